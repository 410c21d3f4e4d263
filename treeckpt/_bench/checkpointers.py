"""The checkpointers that are compared: each saves a state into a directory, loads it as a new one, and fills another.

A save returns when its bytes are on the device: what a library does not sync itself is synced for it, on its clock.
Each is called as its own documentation shows, with the fastest of its documented ways to load.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import treeckpt

from .states import State


class SyncCheckpointer:
    """A library, or a way to use one. A subclass has the methods of its `kinds`."""

    name: str
    kinds: tuple[str, ...] = ("save", "load", "fill")
    """What is measured, of "save", "load", "fill" and "first"; "save" always."""

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


class SyncTreeckpt(SyncCheckpointer):
    """treeckpt with its defaults: durable, checksums written and verified."""

    name = "treeckpt"
    kinds = ("save", "load", "fill", "first")

    def save(self, directory: Path, prepared: Any) -> None:
        treeckpt.save(directory / "step", prepared)

    def load(self, directory: Path, like: State) -> State:
        return treeckpt.load(directory / "step")

    def load_into(self, directory: Path, state: State) -> None:
        """Fills in one pass: by default each block's checksum is compared as its bytes are put in place."""
        treeckpt.load_into(directory / "step", state)

    def compare_and_fill(self, directory: Path, state: State) -> None:
        treeckpt.load_into(directory / "step", state, read=treeckpt.ReadOptions(verify="first"))


class SyncDcp(SyncCheckpointer):
    """torch.distributed.checkpoint, which syncs its files by default; it loads into new tensors by filling them."""

    alone = True
    """Whether this process saves and loads without others."""

    def __init__(self, threads: int = 1) -> None:
        self.name = "dcp" if threads == 1 else f"dcp-{threads}"
        self.kinds = ("save", "load", "fill") if threads == 1 else ("save",)  # threads only write
        self._threads = threads

    def save(self, directory: Path, prepared: Any) -> None:
        writer = FileSystemWriter(directory, thread_count=self._threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_save(prepared, storage_writer=writer, no_dist=self.alone)

    def load_into(self, directory: Path, state: State) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(state, storage_reader=FileSystemReader(directory), no_dist=self.alone)


class SyncTorchSave(SyncCheckpointer):
    """torch.save and torch.load: read to load, mapped to fill."""

    name = "torch.save"
    kinds = ("save", "load", "fill")

    def save(self, directory: Path, prepared: Any) -> None:
        torch.save(prepared, directory / "state.pt")
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        return torch.load(directory / "state.pt")

    def load_into(self, directory: Path, state: State) -> None:
        mapped = torch.load(directory / "state.pt", mmap=True)
        for name, leaf in state.items():
            leaf.copy_(mapped[name])


class SyncSafetensors(SyncCheckpointer):
    """safetensors' functions for torch; the file is mapped, so loading is done when every page was touched."""

    name = "safetensors"
    kinds = ("save", "load", "fill")

    def save(self, directory: Path, prepared: Any) -> None:
        from safetensors.torch import save_file

        save_file(prepared, directory / "state.safetensors")
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        from safetensors.torch import load_file

        return load_file(directory / "state.safetensors")

    def load_into(self, directory: Path, state: State) -> None:
        for name, tensor in self.load(directory, state).items():
            state[name].copy_(tensor)


def files_of(directory: Path) -> list[Path]:
    """The files below a directory."""
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Opens a file, or a directory, and closes it at the end."""
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_files(directory: Path) -> None:
    """Makes files durable, and the names of files."""
    for path in [*files_of(directory), *(p for p in directory.rglob("*") if p.is_dir()), directory]:
        with opened(path) as fd:
            os.fsync(fd)


def is_installed(module: str) -> bool:
    """Whether a module is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def sync_checkpointers() -> list[SyncCheckpointer]:
    """Returns the checkpointers that are compared, of those that are installed."""
    found = [SyncTreeckpt(), SyncTorchSave(), SyncDcp(), SyncDcp(threads=4)]
    return [*found[:2], SyncSafetensors(), *found[2:]] if is_installed("safetensors") else found
