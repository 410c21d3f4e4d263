"""The checkpointers that save beside training: each stages a state, returns, and writes it in the background.

`start` is the part that blocks: when it returns, the state may be changed. Each is called as its own documentation
shows; what a library does not sync itself is synced for it once it says that it is done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

import treeckpt
from tests.bench.checkpointers import torch_checkpointing_manager
from treeckpt._bench.checkpointers import is_installed, sync_files
from treeckpt._bench.states import State


class AsyncCheckpointer:
    """A library, or a way to use one."""

    name: str

    def prewarm(self, state: State) -> None:
        """Prepares what can be prepared before the first save; by default nothing."""

    def start(self, directory: Path, state: State) -> Callable[[], object]:
        """Carries out the blocking part of a save into an empty directory; returns what waits until it is durable."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what runs in the background; by default nothing."""


class AsyncTreeckpt(AsyncCheckpointer):
    """treeckpt.save_async; lazily staged, the state must not change before `guard` lets the optimizer step."""

    def __init__(self, *, lazy: bool = False) -> None:
        self.name = "treeckpt lazy" if lazy else "treeckpt"
        self._lazy = lazy

    def prewarm(self, state: State) -> None:
        treeckpt.prewarm(state)

    def start(self, directory: Path, state: State) -> Callable[[], object]:
        if self._lazy:
            return treeckpt.save_async(
                directory / "step", state, background=treeckpt.BackgroundOptions(staging="lazy")
            ).result
        pending = treeckpt.save_async(directory / "step", state)
        pending.wait_staged()
        return pending.result


class AsyncDcp(AsyncCheckpointer):
    """torch.distributed.checkpoint.async_save with its default stager; it syncs its files."""

    def __init__(self, kind: AsyncCheckpointerType) -> None:
        self.name = f"dcp {kind.value}"
        self._kind = kind

    def start(self, directory: Path, state: State) -> Callable[[], object]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Any = dcp_async_save(state, checkpoint_id=directory, async_checkpointer_type=self._kind)
        return getattr(found, "upload_completion", found).result


class AsyncTorchCheckpointing(AsyncCheckpointer):
    """torch_checkpointing with its pool prepared."""

    name = "torch_checkpointing"

    def __init__(self) -> None:
        self._manager = torch_checkpointing_manager()

    def prewarm(self, state: State) -> None:
        self._manager.prewarm_staging({"state": state})
        self._manager._prewarm_staging_future.result()  # its first save would wait for it

    def start(self, directory: Path, state: State) -> Callable[[], object]:
        found: Any = self._manager.save(str(directory / "step"), {"state": state})
        with self._manager.lock():  # it is held while it still copies
            pass

        def wait() -> None:
            found.result()
            sync_files(directory)

        return wait

    def close(self) -> None:
        self._manager.close()


def async_checkpointers() -> list[AsyncCheckpointer]:
    """Returns those of the installed that save in the background."""
    kinds = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    found: list[AsyncCheckpointer] = [AsyncTreeckpt(), AsyncTreeckpt(lazy=True), *map(AsyncDcp, kinds)]
    if is_installed("torch_checkpointing"):
        found.append(AsyncTorchCheckpointing())
    return found
