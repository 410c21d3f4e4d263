"""Who is compared in saving beside training: each stages a state, lets go, and writes it in the background.

`start` is the part that blocks: when it returns, the state may be changed. Each is called as its own documentation
shows; what a library does not sync itself is synced for it once it says that it is done.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

import treeckpt

from .checkpointers import is_installed
from .meter import sync_files
from .states import State

__all__ = ["AsyncCheckpointer", "async_checkpointers"]

Wait = Callable[[], object]


class AsyncCheckpointer(Protocol):
    """A library, or a way to use one."""

    name: str

    def prewarm(self, state: State) -> None:
        """What can be prepared before the first save."""
        ...

    def start(self, directory: Path, state: State) -> Wait:
        """The blocking part of a save into an empty directory; gives what waits until it is durable."""
        ...

    def close(self) -> None:
        """Ends what runs in the background."""
        ...


class AsyncTreeckpt:
    """treeckpt.save_async."""

    def __init__(self, *, lazy: bool = False) -> None:
        self.name = "treeckpt lazy" if lazy else "treeckpt"
        self._lazy = lazy

    def prewarm(self, state: State) -> None:
        """Its own function for that."""
        treeckpt.prewarm(state)

    def start(self, directory: Path, state: State) -> Wait:
        """One call; lazily staged, the state must not change before `guard` lets the optimizer step."""
        if self._lazy:
            return treeckpt.save_async(directory / "step", state, staging="lazy").result
        pending = treeckpt.save_async(directory / "step", state)
        pending.wait_staged()
        return pending.result

    def close(self) -> None:
        """Nothing to do."""


class AsyncDcp:
    """torch.distributed.checkpoint.async_save, which syncs its files."""

    def __init__(self, kind: AsyncCheckpointerType) -> None:
        self.name = f"dcp {kind.value}"
        self._kind = kind

    def prewarm(self, state: State) -> None:
        """It has nothing of the kind."""

    def start(self, directory: Path, state: State) -> Wait:
        """With its default stager."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Any = dcp_async_save(state, checkpoint_id=directory, async_checkpointer_type=self._kind)
        return getattr(found, "upload_completion", found).result

    def close(self) -> None:
        """Its threads and processes are daemons."""


class AsyncTorchCheckpointing:
    """torch_checkpointing with its pool prepared; direct I/O is off, as it fails on ext4, and it syncs nothing."""

    name = "torch_checkpointing"

    def __init__(self) -> None:
        package: Any = importlib.import_module("torch_checkpointing")
        storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        config = package.CheckpointManager.Config()
        config.storage_config = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager: Any = config.build()

    def prewarm(self, state: State) -> None:
        """Its own function for that."""
        self._manager.prewarm_staging({"state": state})
        self._manager._prewarm_staging_future.result()  # its first save would wait for it

    def start(self, directory: Path, state: State) -> Wait:
        """One item; its lock is held while it still copies."""
        found: Any = self._manager.save(str(directory / "step"), {"state": state})
        with self._manager.lock():
            pass

        def wait() -> None:
            found.result()
            sync_files(directory)

        return wait

    def close(self) -> None:
        """Ends its writer."""
        self._manager.close()


def async_checkpointers() -> list[AsyncCheckpointer]:
    """Those of the installed that save in the background."""
    found: list[AsyncCheckpointer] = [
        AsyncTreeckpt(),
        AsyncTreeckpt(lazy=True),
        AsyncDcp(AsyncCheckpointerType.THREAD),
        AsyncDcp(AsyncCheckpointerType.PROCESS),
    ]
    if is_installed("torch_checkpointing"):
        found.append(AsyncTorchCheckpointing())
    return found
