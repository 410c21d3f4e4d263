"""Contenders beside those of `treeckpt bench`: on several ranks, of rows, on devices, Orbax and torch_checkpointing."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import treeckpt
from treeckpt._bench import checkpointers as bench
from treeckpt._bench.checkpointers import (
    SyncCheckpointer,
    SyncDcp,
    SyncSafetensors,
    SyncTorchSave,
    SyncTreeckpt,
    is_installed,
    sync_files,
)
from treeckpt._bench.states import State


class RankTreeckpt(SyncTreeckpt):
    """treeckpt on several ranks, each of which loads what it has."""

    def load(self, directory: Path, like: State) -> State:
        return treeckpt.load(directory / "step", like)


class SyncOneRank(SyncTreeckpt):
    """treeckpt where rank 0 alone loads, while the others wait: what several ranks that load the same are beside."""

    name = "treeckpt one rank"
    kinds = ("save", "load")

    def load(self, directory: Path, like: State) -> State:
        return {} if dist.get_rank() else treeckpt.load(directory / "step", like, comm="alone")


class RankDcp(SyncDcp):
    """DCP on several ranks."""

    alone = False


def rank_checkpointers(*, one: bool) -> list[SyncCheckpointer]:
    """Returns what is compared on several ranks; `one` compares only loads, and one rank that loads alone too."""
    found: list[SyncCheckpointer] = [RankTreeckpt(), RankDcp()]
    if one:
        found.append(SyncOneRank())
        for contender in found:
            contender.kinds = ("save", "load")
    return found


class DeviceTreeckpt(SyncTreeckpt):
    """treeckpt that loads to a device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def load(self, directory: Path, like: State) -> State:
        return treeckpt.load(directory / "step", device=self._device)


class DeviceTorchSave(SyncTorchSave):
    """torch.load that maps all to a device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def load(self, directory: Path, like: State) -> State:
        return torch.load(directory / "state.pt", map_location=self._device)


class DeviceSafetensors(SyncSafetensors):
    """safetensors that loads to a device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def load(self, directory: Path, like: State) -> State:
        from safetensors.torch import load_file

        return load_file(directory / "state.safetensors", device=self._device)


def device_checkpointers(device: str) -> list[SyncCheckpointer]:
    """Returns the installed checkpointers that are compared for a state on a device."""
    found: list[SyncCheckpointer] = [DeviceTreeckpt(device), DeviceTorchSave(device), SyncDcp()]
    return [*found, DeviceSafetensors(device)] if is_installed("safetensors") else found


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


def sync_checkpointers() -> list[SyncCheckpointer]:
    """Returns the checkpointers of `treeckpt bench`, and the others that are installed."""
    found = bench.sync_checkpointers()
    if is_installed("orbax.checkpoint") and is_installed("jax"):
        found.append(SyncOrbax())
    if is_installed("torch_checkpointing"):
        found.append(SyncTorchCheckpointing())
    return found
