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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from ..arrays.registry import is_value
from ..core.text import count_text
from ..core.tree.flatten import flatten
from ..errors import CheckpointNotFound, MismatchError, StoreError, TreeckptError
from ..io.comm.collective import ending_together, from_rank0, gather_errors, interrupts_told
from ..io.comm.comm import Comm
from ..io.comm.failures import raise_faults
from ..io.public_calls import check_options, takes_no_save
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.metadata_files import KnownIndex
from ..io.storage.reader_leases import hold_lease
from ..io.storage.store import Store
from ..loading.consistent_reads import on_one_version
from ..loading.execute_shared import open_relay, together, usual_read
from ..loading.keywords import LoadKeywords
from ..saving.options import SaveOptions
from .broken_loop import LoopState
from .catalog import runs_below
from .checkpoint_info import CheckpointInfo, mark_of, step_info
from .history import SaveHistory
from .options import RestoreKeywords
from .progress_bar import reading_bar
from .registered_state import RegisteredState
from .run import RunDirectory
from .schedule import SaveSchedule
from .select import CheckpointSelector

if TYPE_CHECKING:  # they import torch
    from ..training.modules import Modules
    from ..training.optimizers import Optimizers
    from ..training.report import RestoreReport

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
            options: of the call; `strict`, `verify` and `read` matter here too.
            fills: whether it fills objects in place.
            whole: whether it loads all of the checkpoint.
        """
        tried: set[int] = set()
        passed_over: list[str] = []
        unread: list[tuple[str, Exception | None]] = []
        if fills and step is None and not options.get("strict", True) and options.get("verify", True) is not False:
            # if this one is found to be corrupt on the way, the one before may lack leaves that were filled already
            options = {**options, "verify": "first"}
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
        read = options.get("read") or usual_read(self._load_comm, store)

        def load_version(checkpoint: Checkpoint) -> Any:
            relay = open_relay(self._load_comm, [checkpoint], read)
            with together(relay, "restored"):
                if choice.requested != step:
                    raise self._different_steps(choice.requested, step)
                if relay is not None:
                    relay.share_index(checkpoint)
                return call(checkpoint, comm=self._load_comm, options={**options, "read": read})

        try:
            with bar if self._comm.rank == 0 else contextlib.nullcontext(store) as source:
                return on_one_version(source, load_version, together=read == "once", known=known), None
        except Exception as error:
            return None, error


def _training_state(model: Any, optimizer: Any, options: Mapping[str, Any]) -> Any:
    """Returns the state of the objects that `resume` got.

    Raises:
        LookupError: values are among them, of which the loop may have others by now in variables of its own.
    """
    from ..training import state

    asked = {name: options.get(name) for name in ("scheduler", "loader", "extra")}
    parts: dict[str, Any] = {name: None if one is False else one for name, one in asked.items()}
    given = {name: one for name, one in parts.items() if one is not None}
    for path, leaf in flatten(given, namespace=options.get("namespace", ""))[1]:
        if is_value(leaf):
            raise LookupError(f"{path} is a value, which the loop alone knows: call step with a function for the state")
    return state(model, optimizer, rng=options.get("rng") is not False, **parts)


class RestoreMixin:
    """The methods of a manager that restore checkpoints."""

    _comm: Comm
    _restorer: Restorer
    _registered: RegisteredState
    _reached: int | None
    _loop: LoopState
    directory: RunDirectory
    schedule: SaveSchedule
    options: SaveOptions
    _count: int

    @property
    def count(self) -> int:
        """The step that was counted, saved or restored last; `step` counts on from it. It may be set."""
        return self._count

    @count.setter
    def count(self, step: int) -> None:
        self._count = step

    @partial(takes_no_save, name="Manager.restore")
    def restore(
        self, like: Any = None, *, step: int | None = None, into: Any = None, **options: Unpack[LoadKeywords]
    ) -> Any:
        """Loads a step; `count` and the lineage of the next save continue from it.

        Args:
            like: same as for `treeckpt.load`.
            step: by default the newest that loads: if one turns out to be corrupt on any rank, that is logged and all
                ranks load the one before it and fill everything again. If an earlier step is restored, the steps saved
                after it become an abandoned branch.
            into: a tree to fill in place with `treeckpt.load_into`, in place of `like`.
            options: those of `treeckpt.load`, or with `into` of `treeckpt.load_into`; `read` is "once" by default from
                an object store, where the ranks are all those of torch.distributed, `namespace` that of the manager.

        Returns:
            The tree, or the `LoadReport` with `into`.

        Raises:
            CheckpointNotFound: there is nothing to restore.
            StoreError: nothing could be loaded, and some steps could not be read.
            The errors of `treeckpt.load`.
        """
        if like is not None and into is not None:
            raise TreeckptError(self.directory.url, expected="one target", found="like and into")
        options.setdefault("namespace", self.options.namespace)
        call = partial(self._registered.restore, like=like, into=into)
        fills, whole = into is not None or bool(self._registered), like is None and into is None
        found = self._restorer.restore(call, step, options, fills=fills, whole=whole)
        if found is None:
            raise CheckpointNotFound(
                self.directory.url,
                expected="a checkpoint to restore",
                found="none",
                hint="Start anew where latest() is None",
            )
        self._restored(found.step)
        return found.result

    @partial(takes_no_save, name="Manager.resume")
    def resume(
        self, model: Modules, optimizer: Optimizers | None = None, **options: Unpack[RestoreKeywords]
    ) -> RestoreReport | None:
        """Continues a run: restores its newest checkpoint that loads into live objects, with what is registered.

        All ranks restore the same step. It is protected from deletion meanwhile. A checkpoint that turns out to be
        corrupt on any rank is logged, all ranks restore the one before it, and `RestoreReport.passed_over` names it.
        `count` and the lineage of the next save continue from the step.

        Args:
            model, optimizer, options: those of `treeckpt.training.restore`, for what `treeckpt.training.state` gave;
                `namespace` is that of the manager by default, also for what is registered.

        Returns:
            The report; None on a first run, when nothing was saved yet: nothing has changed then, and `count` is 0.
            What a save of the objects would refuse is refused here.
            Rank 0 logs it (INFO, to the logger `treeckpt`), as a misspelt name of a run looks the same; as a warning
            where runs lie below.

        Raises:
            CheckpointNotFound: there are checkpoints, none of which can be loaded.
            StoreError: none could be loaded, and some of them could not be read.
            The errors of `treeckpt.training.restore`.
        """
        check_options(options, RestoreKeywords.__optional_keys__, "resume")
        options.setdefault("namespace", self.options.namespace)
        call = partial(self._registered.restore_training, model=model, optimizer=optimizer)
        found = self._restorer.restore(call, None, options, fills=True)
        if found is None:
            from ..training.capture import check_objects
            from ..training.user_state import check_generators

            with ending_together(self._comm, "resume", self.directory.url, hint="Nothing has changed"):
                check_objects(model, optimizer, options, self._comm.rank, allow_pickle=self.options.allow_pickle)
            if self._comm.rank == 0:
                url, found = self.directory.url, runs_below(self.directory.store)
                below = f". Below it are runs: {', '.join(found[:5])}" if found else ""
                level = logging.WARNING if found else logging.INFO
                _log.log(level, "%s: no checkpoint: the training starts anew%s", url, below)
                check_generators(options.get("loader"))
            self._loop.tree = partial(_training_state, model, optimizer, options)
            return None
        self._restored(found.step)
        report: RestoreReport = found.result
        unasked = [path for path in report.ignored if "/" not in path]
        if not unasked and (report.extra is None or options.get("extra") is not None):
            self._loop.tree = partial(_training_state, model, optimizer, options)
        return msgspec.structs.replace(report, passed_over=found.passed_over)

    def _restored(self, step: int) -> None:
        self.count = self._reached = step
        self.schedule.restart()

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[Store]:
        """Protects a step from deletion while the body reads it; called by one process alone, not by all ranks.

        Raises:
            CheckpointNotFound: it does not exist, or is not complete.
        """
        folder = self.directory.folder(step)
        with hold_lease(folder):
            self.directory.checkpoint(step)
            yield folder
