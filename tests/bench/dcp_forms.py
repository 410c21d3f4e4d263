"""Both forms of treeckpt.dcp, and DCP itself, called alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import treeckpt.dcp
from tests.bench.async_checkpointers import AsyncCheckpointer, AsyncDcp
from treeckpt._bench.checkpointers import SyncCheckpointer, SyncDcp
from treeckpt._bench.states import State


class SyncDcpSave(SyncCheckpointer):
    """treeckpt.dcp.save and load."""

    name = "treeckpt.dcp"
    kinds = ("save", "fill")

    def save(self, directory: Path, prepared: Any) -> None:
        treeckpt.dcp.save(prepared, checkpoint_id=directory, no_dist=True)

    def load_into(self, directory: Path, state: State) -> None:
        treeckpt.dcp.load(state, checkpoint_id=directory, no_dist=True)


class SyncDcpStorage(SyncCheckpointer):
    """DCP's save and load with treeckpt.dcp.Writer and Reader."""

    name = "treeckpt.dcp storage"
    kinds = ("save", "fill")

    def save(self, directory: Path, prepared: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_save(prepared, storage_writer=treeckpt.dcp.Writer(directory), no_dist=True)

    def load_into(self, directory: Path, state: State) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(state, storage_reader=treeckpt.dcp.Reader(directory), no_dist=True)


class AsyncDcpSave(AsyncCheckpointer):
    """treeckpt.dcp.async_save."""

    def __init__(self, kind: AsyncCheckpointerType) -> None:
        self.name = f"treeckpt.dcp {kind.value}"
        self._kind = kind

    def start(self, directory: Path, state: State) -> Callable[[], object]:
        found = treeckpt.dcp.async_save(state, checkpoint_id=directory / "step", async_checkpointer_type=self._kind)
        return found.result


def sync_dcp_forms() -> list[SyncCheckpointer]:
    """Returns both forms, and DCP with its defaults and with four threads."""
    return [SyncDcpSave(), SyncDcpStorage(), SyncDcp(), SyncDcp(threads=4)]


def async_dcp_forms() -> list[AsyncCheckpointer]:
    """Returns what saves in the background, with a thread and a process each."""
    kinds = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    return [*map(AsyncDcpSave, kinds), *map(AsyncDcp, kinds)]
