"""Loads a run's checkpoint on all ranks, or, if it turns out to be broken, the one before.

Rank 0 chooses, and holds a lease until every rank has told how its load went. Where the checkpoint's files are at fault
on any rank, all ranks pass it over and choose again, and fill all of the target again; what is the caller's fault (a
wrong target) is raised.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from ..errors import MismatchError, TreeckptError
from ..io.comm.collective import from_rank0, gather_errors
from ..io.comm.comm import Comm
from ..io.comm.failures import raise_faults
from ..io.storage.reader_leases import hold_lease
from ..loading.consistent_reads import on_one_version
from .checkpoint_info import CheckpointInfo, mark_of
from .history import SaveHistory
from .progress_bar import reading_bar
from .registered_state import RegisteredState
from .run import RunDirectory, step_info
from .select import CheckpointSelector

__all__ = ["Restorer"]

_BROKEN = frozenset({"CheckpointError", "CheckpointNotFound", "CorruptError", "FormatError"})
"""Failures to load that are the checkpoint's, not the caller's."""


_NOTHING = "Nothing was restored"
_LEFT = "What was to be filled may hold parts of the checkpoints that failed: restore another one before it is used"


class _RestoreChoice(msgspec.Struct, array_like=True):
    """What to restore."""

    step: int
    path: str
    nbytes: int | None
    asked: int | None
    """The step that rank 0 was asked for."""


class Restorer:
    """Restores checkpoints of a run.

    Args:
        comm: for questions between ranks.
        load_comm: for the loads.
        registered: is given its state with every restore.
        history: notes what was restored, on rank 0.
    """

    def __init__(
        self,
        run: RunDirectory,
        finder: CheckpointSelector,
        comm: Comm,
        load_comm: Comm,
        registered: RegisteredState,
        history: SaveHistory,
    ) -> None:
        self._run, self._finder, self._comm, self._load_comm = run, finder, comm, load_comm
        self._registered, self._history = registered, history
        self._chosen: CheckpointInfo | None = None

    def restore(self, like: Any, into: Any, step: int | None, options: dict[str, Any]) -> tuple[Any, int]:
        """What was loaded, and from which step; see `Manager.restore`."""
        tried: set[int] = set()
        fills = into is not None or bool(self._registered)
        if fills and step is None and not options.get("strict", True) and options.get("verify", True) is not False:
            # the one before may lack leaves that this one has filled, if it is found to be corrupt on the way
            options = {**options, "verify": "first"}
        while True:
            try:
                choice = from_rank0(
                    self._comm, f"{self._run.url} restore", lambda: self._choose(step, tried), _RestoreChoice
                )
            except TreeckptError as error:
                if tried and fills:
                    error.add_hint(_LEFT)
                raise
            with hold_lease(self._run.folder(choice.step)) if self._comm.rank == 0 else contextlib.nullcontext():
                differs = None if choice.asked == step else self._differs(choice.asked, step)
                result, error = self._load(choice, like, into, options) if differs is None else (None, differs)
                faults = gather_errors(self._comm, f"{choice.path} restore", error)
            if not faults:
                if self._chosen is not None and (mark := mark_of(self._chosen)) is not None:
                    self._history.restored(mark)
                return result, choice.step
            kinds = {fault.kind for fault in faults}
            # where ranks read for each other, those that got nothing from the rank that found it say RankError
            if choice.asked is not None or not (kinds & _BROKEN and kinds <= _BROKEN | {"RankError"}):
                if tried and fills and isinstance(error, TreeckptError):
                    error.add_hint(_LEFT)
                raise_faults(faults, choice.path, self._comm, cause=error, hint=_LEFT if fills else _NOTHING)
            tried.add(choice.step)
            if self._comm.rank == 0:
                self._finder.say(choice.path, f"passed over, rank {faults[0].rank}: {faults[0].text}")

    def _choose(self, step: int | None, tried: set[int]) -> _RestoreChoice:
        info = self._chosen = self._finder.choose(step, tried)
        return _RestoreChoice(step_info(info).step, info.path, info.nbytes, step)

    def _differs(self, asked: int | None, step: int | None) -> MismatchError:
        return MismatchError(
            self._run.url,
            expected=f"the same step on every rank, as step={asked} on rank 0",
            found=f"step={step} on rank {self._comm.rank}",
            hint="Call restore with the same arguments on every rank",
        )

    def _load(
        self, choice: _RestoreChoice, like: Any, into: Any, options: dict[str, Any]
    ) -> tuple[Any, Exception | None]:
        store = self._run.folder(choice.step).store
        total = choice.nbytes if self._comm.size == 1 and like is None and into is None else None
        bar = reading_bar(store, f"restoring step {choice.step}", total)
        try:
            with bar if self._comm.rank == 0 else contextlib.nullcontext(store) as source:
                return on_one_version(
                    source,
                    lambda version: self._registered.restore(version, like, into, self._load_comm, options),
                    together=options.get("read") == "once",
                ), None
        except Exception as error:
            return None, error
