"""Loads a run's checkpoint on all ranks, or, if it turns out to be corrupt, the one before it.

Rank 0 chooses a checkpoint, and holds a lease until every rank has reported the result of its load. If the files of the
checkpoint are at fault on any rank, all ranks skip it, choose again, and fill all of the target again; an error of the
caller (a wrong target) is raised. In an object store the index by which rank 0 has chosen is not read again, and the
data is requested while the lease is written: if a clean-up deletes the checkpoint in that moment, files are gone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec

from .._core.text import count_text
from .._io.comm.collective import from_rank0, gather_errors, interrupts_told, raise_faults
from .._io.comm.comm import Comm
from .._io.storage.checkpoint import Checkpoint, KnownIndex
from .._io.storage.kept_files import hold_lease
from .._loading.execute_shared import open_relay, reads_once, together
from .._loading.options import ReadOptions
from .._loading.run_load import on_one_version
from ..errors import CheckpointNotFound, MismatchError, StoreError, TreeckptError
from .catalog import CheckpointInfo, mark_of, step_info
from .progress_bar import reading_bar
from .run import CheckpointSelector, RunDirectory, SaveHistory

_log = logging.getLogger("treeckpt")

_BROKEN = frozenset({"CheckpointError", "CheckpointNotFound", "CorruptError", "FormatError"})
"""Errors of a load that the checkpoint causes, not the caller."""
_NOTHING_RESTORED = "Nothing was restored"
_PARTLY_FILLED = (
    "What was to be filled may hold parts of the checkpoints that failed: restore another one before it is used"
)


class _RestoreChoice(msgspec.Struct, array_like=True):
    """The checkpoint that rank 0 has chosen."""

    step: int | None
    """None where the run has no checkpoint."""
    path: str
    nbytes: int | None
    requested: int | None
    """The argument `step` of rank 0."""
    passed_over: tuple[str, ...]
    """The corrupt checkpoints that are newer."""


class Restored(msgspec.Struct, frozen=True):
    """The result of a restore."""

    result: Any
    step: int
    passed_over: tuple[str, ...]
    """The newer checkpoints that could not be loaded, each with what is wrong."""


RestoreCall = Callable[..., Any]
"""Loads an opened checkpoint with the given `comm` and `options`, and returns the result of the restore."""


class Restorer:
    """Restores checkpoints of a run.

    Args:
        comm: for messages between ranks about the restore.
        load_comm: for the loads.
        history: records what was restored, on rank 0.
    """

    def __init__(
        self, run: RunDirectory, selector: CheckpointSelector, comm: Comm, load_comm: Comm, history: SaveHistory
    ) -> None:
        self.directory, self._selector, self._history = run, selector, history
        self._comm, self._load_comm = comm, load_comm
        self._chosen: CheckpointInfo | None = None
        self._known: KnownIndex | None = None
        """Its index, if that was read to choose it; near, its bytes are read again under the lease, and compared."""

    def restore(
        self, call: RestoreCall, step: int | None, options: Mapping[str, Any], *, fills: bool, whole: bool = False
    ) -> Restored | None:
        """Restores a step, or the newest that loads; returns None if the run has none.

        Args:
            options: of the call; `strict` and `read`, a `ReadOptions`, matter here too.
            fills: whether it fills objects in place.
            whole: whether it loads all of the checkpoint.
        """
        tried: set[int] = set()
        passed_over: list[str] = []
        unread: list[tuple[str, Exception | None]] = []
        read: ReadOptions = options["read"]
        if fills and step is None and not options.get("strict", True) and read.verify is not False:
            # if this one is found to be corrupt on the way, the one before may lack leaves that were filled already
            options = {**options, "read": msgspec.structs.replace(read, verify="first")}
        while True:
            try:
                choice = self._agreed_choice(step, tried, unread)
            except TreeckptError as failed:
                if tried and fills:
                    failed.add_hint(_PARTLY_FILLED)
                raise
            passed_over += [text for text in choice.passed_over if text not in passed_over]
            result, error = None, None
            topic = f"{choice.path} restore"
            with self._lease(choice.step):
                if choice.step is not None:
                    with interrupts_told(self._comm, topic):
                        result, error = self._load(choice, choice.step, step, call, options, whole=whole)
                elif choice.requested != step:
                    error = self._different_steps(choice.requested, step)
                faults = gather_errors(self._comm, topic, error)
            if not faults and choice.step is None:
                return None
            if not faults and choice.step is not None:
                if self._chosen is not None and (mark := mark_of(self._chosen)) is not None:
                    self._history.restored(mark)
                return Restored(result, choice.step, tuple(passed_over))
            # the sector may stay bad, and the training could not go on: the step before is taken, and a warning says so
            bad = [fault for fault in faults if fault.kind == "StoreError" and fault.errno == errno.EIO]
            kinds = {fault.kind if fault not in bad else "CheckpointError" for fault in faults}
            # where ranks read for each other, those that got nothing from the rank with the error report RankError
            broken = kinds & _BROKEN and kinds <= _BROKEN | {"RankError"}
            if choice.step is None or choice.requested is not None or not broken:
                if tried and fills and isinstance(error, TreeckptError):
                    error.add_hint(_PARTLY_FILLED)
                hint = _PARTLY_FILLED if fills else _NOTHING_RESTORED
                raise_faults(faults, choice.path, self._comm.size, cause=error, hint=hint)
            else:
                tried.add(choice.step)
                why = f"rank {faults[0].rank}: {faults[0].text}"
                passed_over.append(f"{choice.path}: {why}")
                if bad:
                    unread.append((f"{choice.path}: rank {bad[0].rank}: {bad[0].text}", error))
                if self._comm.rank == 0:
                    self._selector.warn_once(choice.path, f"passed over, {why}")
                    if "CorruptError" in kinds and self._chosen is not None:
                        self._selector.keep_damage(self._chosen, why)

    def _choose(self, step: int | None, tried: set[int]) -> _RestoreChoice:
        passed_over: list[str] = []
        info = self._chosen = self._selector.choose(step, tried, passed_over)
        if info is None:
            return _RestoreChoice(None, self.directory.url, None, step, ())
        self._known = self._selector.take_index(info)
        return _RestoreChoice(step_info(info).step, info.path, info.nbytes, step, tuple(passed_over))

    def _agreed_choice(
        self, step: int | None, tried: set[int], unread: Sequence[tuple[str, Exception | None]]
    ) -> _RestoreChoice:
        """Returns the choice of rank 0 on every rank.

        Args:
            unread: the steps that could not be read, and why: where no other loads, the run is no empty one.
        """
        topic, choose = f"{self.directory.url} restore", partial(self._choose, step, tried)
        try:
            return from_rank0(self._comm, topic, choose, _RestoreChoice, call="restore")
        except CheckpointNotFound:
            if not unread:
                raise
            raise StoreError(
                self.directory.url,
                expected="a checkpoint to restore",
                found=f"none that loads; {count_text(len(unread), 'step')} could not be read, first {unread[0][0]}",
                hint="They may be whole: do not start anew before the disk was looked at",
            ) from next((error for _, error in reversed(unread) if error is not None), None)

    def _lease(self, step: int | None) -> AbstractContextManager[object]:
        if step is None or self._comm.rank:
            return contextlib.nullcontext()
        return hold_lease(self.directory.folder(step), ahead=self._known is not None)

    def _different_steps(self, requested: int | None, step: int | None) -> MismatchError:
        return MismatchError(
            self.directory.url,
            expected=f"the same step on every rank, as step={requested} on rank 0",
            found=f"step={step} on rank {self._comm.rank}",
            hint="Call restore with the same arguments on every rank",
        )

    def _load(
        self,
        choice: _RestoreChoice,
        found: int,
        step: int | None,
        call: RestoreCall,
        options: Mapping[str, Any],
        *,
        whole: bool,
    ) -> tuple[Any, Exception | None]:
        store = self.directory.folder(found)
        known, self._known = self._known, None
        bar = reading_bar(store, f"restoring step {found}", choice.nbytes if self._comm.size == 1 and whole else None)
        read: ReadOptions = options["read"]
        if read.once is None:
            read = msgspec.structs.replace(read, once=reads_once(self._load_comm, store))

        def load_version(checkpoint: Checkpoint) -> Any:
            relay = open_relay(self._load_comm, [checkpoint], read.once)
            with together(relay, "restored"):
                if choice.requested != step:
                    raise self._different_steps(choice.requested, step)
                if relay is not None:
                    relay.share_index(checkpoint)
                return call(checkpoint, comm=self._load_comm, options={**options, "read": read})

        try:
            with bar if self._comm.rank == 0 else contextlib.nullcontext(store) as source:
                return on_one_version(source, load_version, together=bool(read.once), known=known), None
        except Exception as error:
            return None, error
