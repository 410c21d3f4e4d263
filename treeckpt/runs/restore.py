"""Loads a run's checkpoint on all ranks, or, if it turns out to be corrupt, the one before it.

Rank 0 chooses a checkpoint, and holds a lease until every rank has reported the result of its load. If the files of the
checkpoint are at fault on any rank, all ranks skip it, choose again, and fill all of the target again; an error of the
caller (a wrong target) is raised.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import msgspec

from ..errors import MismatchError, TreeckptError
from ..io.comm.collective import from_rank0, gather_errors
from ..io.comm.comm import Comm
from ..io.comm.failures import raise_faults
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.reader_leases import hold_lease
from ..loading.consistent_reads import on_one_version
from ..loading.shared_read import open_relay, together, usual_read
from .checkpoint_info import CheckpointInfo, mark_of
from .history import SaveHistory
from .options import LoadKeywords
from .progress_bar import reading_bar
from .registered_state import RegisteredState
from .run import RunDirectory, step_info
from .select import CheckpointSelector

_BROKEN = frozenset({"CheckpointError", "CheckpointNotFound", "CorruptError", "FormatError"})
"""Errors of a load that the checkpoint causes, not the caller."""
_NOTHING_RESTORED = "Nothing was restored"
_PARTLY_FILLED = (
    "What was to be filled may hold parts of the checkpoints that failed: restore another one before it is used"
)


class _RestoreChoice(msgspec.Struct, array_like=True):
    """The checkpoint that rank 0 has chosen."""

    step: int
    path: str
    nbytes: int | None
    requested: int | None
    """The argument `step` of rank 0."""


class Restorer:
    """Restores checkpoints of a run.

    Args:
        comm: for messages between ranks about the restore.
        load_comm: for the loads.
        registered: restored together with the tree.
        history: records what was restored, on rank 0.
    """

    def __init__(
        self,
        run: RunDirectory,
        selector: CheckpointSelector,
        comm: Comm,
        load_comm: Comm,
        registered: RegisteredState,
        history: SaveHistory,
    ) -> None:
        self.directory, self._selector, self._comm, self._load_comm = run, selector, comm, load_comm
        self._registered, self._history = registered, history
        self._chosen: CheckpointInfo | None = None

    def restore(self, like: Any, into: Any, step: int | None, options: LoadKeywords) -> tuple[Any, int]:
        """Returns the result of the load and its step; see `Manager.restore`."""
        tried: set[int] = set()
        fills = into is not None or bool(self._registered)
        if fills and step is None and not options.get("strict", True) and options.get("verify", True) is not False:
            # if this one is found to be corrupt on the way, the one before may lack leaves that were filled already
            options = {**options, "verify": "first"}
        while True:
            try:
                choice = from_rank0(
                    self._comm, f"{self.directory.url} restore", partial(self._choose, step, tried), _RestoreChoice
                )
            except TreeckptError as error:
                if tried and fills:
                    error.add_hint(_PARTLY_FILLED)
                raise
            with hold_lease(self.directory.folder(choice.step)) if self._comm.rank == 0 else contextlib.nullcontext():
                result, error = self._load(choice, step, like, into, options)
                faults = gather_errors(self._comm, f"{choice.path} restore", error)
            if not faults:
                if self._chosen is not None and (mark := mark_of(self._chosen)) is not None:
                    self._history.restored(mark)
                return result, choice.step
            kinds = {fault.kind for fault in faults}
            # where ranks read for each other, those that got nothing from the rank with the error report RankError
            if choice.requested is not None or not (kinds & _BROKEN and kinds <= _BROKEN | {"RankError"}):
                if tried and fills and isinstance(error, TreeckptError):
                    error.add_hint(_PARTLY_FILLED)
                hint = _PARTLY_FILLED if fills else _NOTHING_RESTORED
                raise_faults(faults, choice.path, self._comm.size, cause=error, hint=hint)
            tried.add(choice.step)
            if self._comm.rank == 0:
                self._selector.warn_once(choice.path, f"passed over, rank {faults[0].rank}: {faults[0].text}")

    def _choose(self, step: int | None, tried: set[int]) -> _RestoreChoice:
        info = self._chosen = self._selector.choose(step, tried)
        return _RestoreChoice(step_info(info).step, info.path, info.nbytes, step)

    def _different_steps(self, requested: int | None, step: int | None) -> MismatchError:
        return MismatchError(
            self.directory.url,
            expected=f"the same step on every rank, as step={requested} on rank 0",
            found=f"step={step} on rank {self._comm.rank}",
            hint="Call restore with the same arguments on every rank",
        )

    def _load(
        self, choice: _RestoreChoice, step: int | None, like: Any, into: Any, options: LoadKeywords
    ) -> tuple[Any, Exception | None]:
        store = self.directory.folder(choice.step).store
        total = choice.nbytes if self._comm.size == 1 and like is None and into is None else None
        bar = reading_bar(store, f"restoring step {choice.step}", total)
        read = options.get("read") or usual_read(self._load_comm, store)

        def load_version(checkpoint: Checkpoint) -> Any:
            relay = open_relay(self._load_comm, [checkpoint], read)
            with together(relay, "restored"):
                if choice.requested != step:
                    raise self._different_steps(choice.requested, step)
                if relay is not None:
                    relay.share_index(checkpoint)
                return self._registered.restore(checkpoint, like, into, self._load_comm, {**options, "read": read})

        try:
            with bar if self._comm.rank == 0 else contextlib.nullcontext(store) as source:
                return on_one_version(source, load_version, together=read == "once"), None
        except Exception as error:
            return None, error
