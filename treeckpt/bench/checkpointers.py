"""Who is compared: each saves a state into a directory, loads it as a new one, and loads it into one that exists.

A save returns when its bytes are on the device: what a library does not sync itself is synced for it, on its clock.
Each is called as its own documentation shows, with the fastest of its documented ways to load.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import treeckpt

from .meter import sync_files
from .optional_checkpointers import SyncOrbax, SyncTorchCheckpointing
from .states import State

__all__ = [
    "ComparingCheckpointer",
    "SliceReader",
    "SyncCheckpointer",
    "is_installed",
    "select_by_name",
    "slice_readers",
    "sync_checkpointers",
]


class Named(Protocol):
    """Something that is compared."""

    name: str


_Named = TypeVar("_Named", bound=Named)


class SyncCheckpointer(Protocol):
    """A library, or a way to use one."""

    name: str
    kinds: tuple[str, ...]
    """Of "save", "load", "fill" and "first": what is measured; "save" always."""

    def prepare(self, state: State) -> Any:
        """What `save` gets, in the arrays that the library knows; before the clock starts."""
        ...

    def save(self, directory: Path, prepared: Any) -> None:
        """Saves, durably. The directory is there and empty."""
        ...

    def load(self, directory: Path, like: State) -> State:
        """A new state; `like` has its shapes and layouts."""
        ...

    def load_into(self, directory: Path, state: State) -> None:
        """Fills a state."""
        ...


class ComparingCheckpointer(Protocol):
    """A contender that can also compare all checksums before the first byte is written."""

    def compare_and_fill(self, directory: Path, state: State) -> None:
        """Fills a state in two passes."""
        ...


class SyncTreeckpt:
    """treeckpt with its defaults: durable, checksums written and verified."""

    name = "treeckpt"
    kinds: tuple[str, ...] = ("save", "load", "fill", "first")

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone

    def prepare(self, state: State) -> State:
        """As it is."""
        return state

    def save(self, directory: Path, prepared: State) -> None:
        """One call."""
        treeckpt.save(directory / "step", prepared)

    def load(self, directory: Path, like: State) -> State:
        """As saved; on several ranks, as `like` is."""
        return treeckpt.load(directory / "step", None if self._alone else like)

    def load_into(self, directory: Path, state: State) -> None:
        """In one pass, with each block's checksum compared as its bytes are put in place, the default."""
        treeckpt.load_into(directory / "step", state)

    def compare_and_fill(self, directory: Path, state: State) -> None:
        """With all checksums compared before the first byte is written, and again on the way."""
        treeckpt.load_into(directory / "step", state, verify="first")


class SyncDcp:
    """torch.distributed.checkpoint, which syncs its files by default."""

    def __init__(self, *, alone: bool, threads: int = 1) -> None:
        self.name = "dcp" if threads == 1 else f"dcp-{threads}"
        self.kinds: tuple[str, ...] = ("save", "load", "fill") if threads == 1 else ("save",)  # threads only write
        self._alone, self._threads = alone, threads

    def prepare(self, state: State) -> State:
        """As it is."""
        return state

    def save(self, directory: Path, prepared: State) -> None:
        """Into a file for each thread."""
        writer = FileSystemWriter(directory, thread_count=self._threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_save(prepared, storage_writer=writer, no_dist=self._alone)

    def load(self, directory: Path, like: State) -> State:
        """Into new tensors, as it has no other way."""
        state = {name: torch.empty_like(leaf) for name, leaf in like.items()}
        self.load_into(directory, state)
        return state

    def load_into(self, directory: Path, state: State) -> None:
        """Its own way."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(state, storage_reader=FileSystemReader(directory), no_dist=self._alone)


class SyncTorchSave:
    """torch.save and torch.load."""

    name = "torch.save"
    kinds: tuple[str, ...] = ("save", "load", "fill")

    def prepare(self, state: State) -> State:
        """As it is."""
        return state

    def save(self, directory: Path, prepared: State) -> None:
        """One file, synced."""
        torch.save(prepared, directory / "state.pt")
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        """Read, not mapped."""
        return torch.load(directory / "state.pt")

    def load_into(self, directory: Path, state: State) -> None:
        """Copied out of the mapped file."""
        mapped = torch.load(directory / "state.pt", mmap=True)
        for name, leaf in state.items():
            leaf.copy_(mapped[name])


class SyncSafetensors:
    """safetensors' functions for torch; the file is mapped, so loading is done when every page was touched."""

    name = "safetensors"
    kinds: tuple[str, ...] = ("save", "load", "fill")

    def prepare(self, state: State) -> State:
        """As it is."""
        return state

    def save(self, directory: Path, prepared: State) -> None:
        """One file, synced."""
        from safetensors.torch import save_file

        save_file(prepared, directory / "state.safetensors")
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        """Mapped."""
        from safetensors.torch import load_file

        return load_file(directory / "state.safetensors")

    def load_into(self, directory: Path, state: State) -> None:
        """Copied out of the mapped file."""
        for name, tensor in self.load(directory, state).items():
            state[name].copy_(tensor)


def is_installed(module: str) -> bool:
    """Whether a module is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def select_by_name(found: Sequence[_Named], names: Sequence[str]) -> list[_Named]:
    """Those whose name is, or begins with the word, one of the names; all if there are none."""
    return [one for one in found if not names or {one.name, one.name.partition(" ")[0]} & set(names)]


def sync_checkpointers(ranks: int) -> list[SyncCheckpointer]:
    """Who is compared on so many ranks: those of the installed that can."""
    if ranks > 1:
        return [SyncTreeckpt(alone=False), SyncDcp(alone=False)]
    found: list[SyncCheckpointer] = [SyncTreeckpt(alone=True), SyncTorchSave()]
    if is_installed("safetensors"):
        found.append(SyncSafetensors())
    found += [SyncDcp(alone=True), SyncDcp(alone=True, threads=4)]
    if is_installed("orbax.checkpoint") and is_installed("jax"):
        found.append(SyncOrbax())
    if is_installed("torch_checkpointing"):
        found.append(SyncTorchCheckpointing())
    return found


# a part of a tensor -----------------------------------------------------------------------------------------------


class SliceReader(Protocol):
    """A contender that reads some rows of a leaf."""

    def load_rows(self, directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        """Rows from `start` to before `stop` of a leaf of this shape."""
        ...


class _TreeckptRows(SyncTreeckpt):
    def load_rows(self, directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        piece = torch.empty((stop - start, *shape[1:]))
        wanted = treeckpt.Sharded(piece, shape, (start, *(0 for _ in shape[1:])))
        return treeckpt.load(directory / "step", {name: wanted})[name].local


class _SafetensorsRows(SyncSafetensors):
    def load_rows(self, directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(directory / "state.safetensors", framework="pt") as file:
            return file.get_slice(name)[start:stop]


class _TorchRows(SyncTorchSave):
    def load_rows(self, directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        return torch.load(directory / "state.pt", mmap=True)[name][start:stop].clone()


def slice_readers() -> list[Any]:
    """Contenders that are `SliceReader`s too."""
    return [_TreeckptRows(alone=True), _TorchRows(), *([_SafetensorsRows()] if is_installed("safetensors") else [])]
