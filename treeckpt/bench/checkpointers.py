"""The checkpointers that are compared: each saves a state into a directory, loads it as a new one, and fills another.

A save returns when its bytes are on the device: what a library does not sync itself is synced for it, on its clock.
Each is called as its own documentation shows, with the fastest of its documented ways to load.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import treeckpt

from .meter import sync_files
from .states import State


class SyncCheckpointer:
    """A library, or a way to use one. A subclass has the methods of its `kinds`."""

    name: str
    kinds: tuple[str, ...] = ("save", "load", "fill")
    """Of "save", "load", "fill", "first" and "rows": what is measured; "save" always."""
    loads_alone = False
    """Whether one rank loads, however many there are."""

    def prepare(self, state: State) -> Any:
        """Returns what `save` gets, in the arrays of the library; before the clock starts."""
        return state

    def save(self, directory: Path, prepared: Any) -> None:
        """Saves, durably, into an empty directory."""
        raise NotImplementedError

    def load(self, directory: Path, like: State) -> State:
        """Returns a new state with the shapes and layouts of `like`; by default fills empty tensors."""
        state = {name: torch.empty_like(leaf) for name, leaf in like.items()}
        self.load_into(directory, state)
        return state

    def load_into(self, directory: Path, state: State) -> None:
        """Fills a state."""
        raise NotImplementedError

    def compare_and_fill(self, directory: Path, state: State) -> None:
        """Fills a state once all checksums were compared."""
        raise NotImplementedError

    def load_rows(self, directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        """Returns rows from `start` to before `stop` of a leaf of this shape."""
        raise NotImplementedError


class SyncTreeckpt(SyncCheckpointer):
    """treeckpt with its defaults: durable, checksums written and verified."""

    name = "treeckpt"
    kinds = ("save", "load", "fill", "first", "rows")

    def __init__(self, *, alone: bool = True, device: str | None = None) -> None:
        self._alone, self._device = alone, device

    def save(self, directory: Path, prepared: Any) -> None:
        treeckpt.save(directory / "step", prepared)

    def load(self, directory: Path, like: State) -> State:
        return treeckpt.load(directory / "step", None if self._alone else like, device=self._device)

    def load_into(self, directory: Path, state: State) -> None:
        """Fills in one pass: by default each block's checksum is compared as its bytes are put in place."""
        treeckpt.load_into(directory / "step", state)

    def compare_and_fill(self, directory: Path, state: State) -> None:
        treeckpt.load_into(directory / "step", state, verify="first")

    def load_rows(self, directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        piece = torch.empty((stop - start, *shape[1:]))
        wanted = treeckpt.Sharded(piece, shape, (start, *(0 for _ in shape[1:])))
        return treeckpt.load(directory / "step", {name: wanted})[name].local


class SyncOneRank(SyncTreeckpt):
    """treeckpt where rank 0 alone loads, while the others wait: what several ranks that load the same are beside."""

    name = "treeckpt one rank"
    kinds = ("save", "load")
    loads_alone = True

    def load(self, directory: Path, like: State) -> State:
        return {} if dist.get_rank() else treeckpt.load(directory / "step", like, comm="alone")


class SyncDcp(SyncCheckpointer):
    """torch.distributed.checkpoint, which syncs its files by default; it loads into new tensors by filling them."""

    def __init__(self, *, alone: bool = True, threads: int = 1) -> None:
        self.name = "dcp" if threads == 1 else f"dcp-{threads}"
        self.kinds = ("save", "load", "fill") if threads == 1 else ("save",)  # threads only write
        self._alone, self._threads = alone, threads

    def save(self, directory: Path, prepared: Any) -> None:
        writer = FileSystemWriter(directory, thread_count=self._threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_save(prepared, storage_writer=writer, no_dist=self._alone)

    def load_into(self, directory: Path, state: State) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(state, storage_reader=FileSystemReader(directory), no_dist=self._alone)


class SyncTorchSave(SyncCheckpointer):
    """torch.save and torch.load: read to load, mapped to fill."""

    name = "torch.save"
    kinds = ("save", "load", "fill", "rows")

    def __init__(self, *, device: str | None = None) -> None:
        self._device = device

    def save(self, directory: Path, prepared: Any) -> None:
        torch.save(prepared, directory / "state.pt")
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        return torch.load(directory / "state.pt", map_location=self._device)

    def load_into(self, directory: Path, state: State) -> None:
        mapped = torch.load(directory / "state.pt", mmap=True)
        for name, leaf in state.items():
            leaf.copy_(mapped[name])

    def load_rows(self, directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        return torch.load(directory / "state.pt", mmap=True)[name][start:stop].clone()


class SyncSafetensors(SyncCheckpointer):
    """safetensors' functions for torch; the file is mapped, so loading is done when every page was touched."""

    name = "safetensors"
    kinds = ("save", "load", "fill", "rows")

    def __init__(self, *, device: str | None = None) -> None:
        self._device = device or "cpu"

    def save(self, directory: Path, prepared: Any) -> None:
        from safetensors.torch import save_file

        save_file(prepared, directory / "state.safetensors")
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        from safetensors.torch import load_file

        return load_file(directory / "state.safetensors", device=self._device)

    def load_into(self, directory: Path, state: State) -> None:
        for name, tensor in self.load(directory, state).items():
            state[name].copy_(tensor)

    def load_rows(self, directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(directory / "state.safetensors", framework="pt") as file:
            return file.get_slice(name)[start:stop]


class SyncOrbax(SyncCheckpointer):
    """Orbax's checkpointer for trees, waited for. JAX's arrays cannot be filled in place."""

    name = "orbax"
    kinds = ("save", "load")

    def __init__(self) -> None:
        self._ocp: Any = importlib.import_module("orbax.checkpoint")
        self._jax: Any = importlib.import_module("jax")
        logging.getLogger("absl").setLevel(logging.ERROR)

    def prepare(self, state: State) -> Any:
        return self._jax.block_until_ready({name: self._jax.numpy.asarray(t.numpy()) for name, t in state.items()})

    def save(self, directory: Path, prepared: Any) -> None:
        """Saves, and syncs several of its metadata files, which it does not sync itself."""
        with self._ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory.absolute() / "step", prepared)
            checkpointer.wait_until_finished()
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        device = self._jax.sharding.SingleDeviceSharding(self._jax.devices()[0])
        target = {
            name: self._jax.ShapeDtypeStruct(tuple(leaf.shape), np.float32, sharding=device)
            for name, leaf in like.items()
        }
        with self._ocp.StandardCheckpointer() as checkpointer:
            loaded = self._jax.block_until_ready(checkpointer.restore(directory.absolute() / "step", target))
        return {name: torch.from_dlpack(array) for name, array in loaded.items()}


class SyncTorchCheckpointing(SyncCheckpointer):
    """torch_checkpointing, saving in the foreground; it has no way to load tensors but to fill some."""

    name = "torch_checkpointing"

    def __init__(self) -> None:
        self._manager = torch_checkpointing_manager("with_sync_save")

    def save(self, directory: Path, prepared: Any) -> None:
        self._manager.save(str(directory / "step"), {"state": prepared})
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        return self._load(directory, {name: torch.empty_like(leaf) for name, leaf in like.items()})

    def _load(self, directory: Path, state: State) -> State:
        return dict(self._manager.load(str(directory / "step"), into={"state": state})["state"])

    def load_into(self, directory: Path, state: State) -> None:
        """Fills a state; what comes back in other tensors is copied."""
        for name, loaded in self._load(directory, state).items():
            if loaded.data_ptr() != state[name].data_ptr():
                state[name].copy_(loaded)


def torch_checkpointing_manager(config: str = "") -> Any:
    """Returns torch_checkpointing's manager; direct I/O is off, as it fails on ext4, and it syncs nothing.

    Args:
        config: a constructor of its configuration.
    """
    package: Any = importlib.import_module("torch_checkpointing")
    storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
    kind = package.CheckpointManager.Config
    options = getattr(kind, config)() if config else kind()
    options.storage_config = storage.LocalFileSystemStorageConfig(use_direct_io=False)
    return options.build()


def is_installed(module: str) -> bool:
    """Whether a module is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def device_checkpointers(device: str) -> list[SyncCheckpointer]:
    """Returns the installed checkpointers that are compared for a state on a device."""
    found: list[SyncCheckpointer] = [SyncTreeckpt(device=device), SyncTorchSave(device=device), SyncDcp()]
    return [*found, SyncSafetensors(device=device)] if is_installed("safetensors") else found


def sync_checkpointers(ranks: int = 1) -> list[SyncCheckpointer]:
    """Returns the installed checkpointers that are compared on so many ranks."""
    if ranks > 1:
        return [SyncTreeckpt(alone=False), SyncDcp(alone=False)]
    found: list[SyncCheckpointer] = [SyncTreeckpt(), SyncTorchSave()]
    if is_installed("safetensors"):
        found.append(SyncSafetensors())
    found += [SyncDcp(), SyncDcp(threads=4)]
    if is_installed("orbax.checkpoint") and is_installed("jax"):
        found.append(SyncOrbax())
    if is_installed("torch_checkpointing"):
        found.append(SyncTorchCheckpointing())
    return found
