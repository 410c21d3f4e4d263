"""Opens a run's checkpoint on all ranks, or, where it turns out to be damaged, the one before it, and restores from it.

Rank 0 chooses a checkpoint, and holds a lease as long as it is open. Every rank reports the result of each load. If the
files of the checkpoint are at fault on any rank, all ranks raise one error, and the next choice passes over it; all of
the target is then filled again. An error of the caller (a wrong target) is raised as it is. In an object store the
index by which rank 0 has chosen is not read again, and the data is requested while the lease is written: if a clean-up
deletes the checkpoint in that moment, files are gone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import msgspec

from .._core.format.files import CheckpointId, id_text
from .._core.format.index import INDEX_NAME
from .._core.text import count_text
from .._core.tree.value_codec import Value, decode_value
from .._io.comm.collective import (
    Conclusion,
    Exchange,
    all_gather,
    ending_together,
    from_rank0,
    gather_errors,
    interrupts_told,
    raise_faults,
)
from .._io.comm.comm import Comm
from .._io.public_calls import takes_no_save
from .._io.storage.checkpoint import Checkpoint, KnownIndex, read_sidecar
from .._io.storage.foreign_formats import describe_foreign
from .._io.storage.kept_files import hold_lease
from .._io.storage.open import is_path_or_store, open_run, open_store
from .._loading.disks import LoadingRanks
from .._loading.execute_shared import reads_once
from .._loading.options import Fallback, LoadKeywords, ReadOptions
from .._loading.overlay import Bank, as_bank
from .._loading.partial_ranks import partial_ranks
from .._loading.read_batch import open_relay, together
from .._loading.run_load import on_one_version, on_versions
from ..errors import CheckpointError, CheckpointNotFound, CorruptError, MismatchError, StoreError, TreeckptError
from ..reports import LoadReport
from .catalog import CheckpointInfo, mark_of, step_info
from .discovery import runs_below
from .disk_cleanup import RunDisks, complete_saves, look_at_disks, on_each_disk
from .disks import joined_infos, seen_here
from .options import RestoreKeywords, load_options, training_options
from .progress_bar import reading_bar
from .registered import RegisteredState
from .run import CheckpointSelector, OtherDisks, RunDirectory
from .schedule import SaveHistory

if TYPE_CHECKING:  # they import torch
    from ..training._modules import Modules
    from ..training._optimizers import Optimizers
    from ..training._report import RestoreReport

T = TypeVar("T")
_log = logging.getLogger("treeckpt")

_BROKEN = frozenset({"CheckpointError", "CheckpointNotFound", "CorruptError", "FormatError"})
"""Errors of a load that the checkpoint causes, not the caller."""
_NOTHING_RESTORED = "Nothing was restored"
_PARTLY_FILLED = (
    "What was to be filled may hold parts of the checkpoints that failed: restore another one before it is used"
)


class _RestoreChoice(msgspec.Struct, array_like=True):
    """The checkpoint that rank 0 has chosen."""

    step: CheckpointId | None
    """None where the run has no checkpoint."""
    path: str
    nbytes: int | None
    requested: CheckpointId | None
    """The argument `step` of rank 0."""
    passed_over: tuple[str, ...]
    """The damaged checkpoints that are newer."""
    name: str = ""
    """The name of its directory."""
    save_id: str | None = None
    count: int | None = None
    """The number of training steps that it records: of one with a text, those that were counted until its save."""
    apart: bool = False
    """Whether it may lie on the disks of several hosts, or its directory be missing on some."""


def from_all_disks(
    comm: Comm,
    selector: CheckpointSelector,
    topic: str,
    answer: Callable[[], T],
    kind: Any,
    *,
    call: str,
    on_disks: Callable[[RunDisks], object] = lambda disks: None,
    at_once: bool = False,
) -> T:
    """Returns the result of `answer()` on rank 0, on every rank, as `from_rank0` does, by what all ranks see.

    Rank 0 answers by what it sees itself. Only where that may be one disk of several, as a node-local checkpoint or no
    complete one at all, do the ranks tell it what each disk has.

    Args:
        selector: by which rank 0 answers.
        on_disks: called on every rank where they see several disks, before the answer.
        at_once: whether the ranks know that another one does not see what rank 0 sees.
    """
    if comm.size == 1:
        return answer()

    def by_one_disk() -> tuple[bool, T | None]:
        try:
            with selector.seeing_one_disk():
                return True, answer()
        except OtherDisks:
            return False, None

    if not at_once:
        is_known, result = from_rank0(comm, topic, by_one_disk, tuple[bool, kind | None], call=call)
        if is_known:
            return result  # pyright: ignore[reportReturnType]
    disks = look_at_disks(comm, selector.directory, call)
    if disks is not None:
        on_disks(disks)

    def by_all() -> T:
        infos = disks.joined.values() if disks is not None else joined_infos([seen_here(selector.directory)])
        if disks is None and not any(info.disks for info in infos):
            return answer()
        with selector.seeing(list(infos)):
            return answer()

    return from_rank0(comm, f"{topic}: all disks", by_all, kind, call=call)


RestoreCall = Callable[..., Any]
"""Loads an opened checkpoint with the given `comm` and `options`, and returns the result of the restore."""


class _Search(msgspec.Struct):
    """What is known of a run's checkpoints until one was restored, the same on every rank."""

    failed: set[str | None] = msgspec.field(default_factory=set[str | None])
    """The ids of the saves that did not load."""
    passed_over: list[str] = msgspec.field(default_factory=list[str])
    """These, and others that are newer than what was chosen, each with what is wrong."""
    unread: list[tuple[str, Exception | None]] = msgspec.field(default_factory=list[tuple[str, Exception | None]])
    """Those of them that could not be read, and why: where no other loads, the run is no empty one."""
    filled: bool = False
    """Whether objects may hold parts of them."""


class Restorer:
    """Opens checkpoints of a run.

    Args:
        comm: for messages between ranks about the restore.
        load_comm: for the loads.
        history: records what was restored, on rank 0.
        registered: is restored with every step.
        namespace: of the manager.
        on_restored: called with the number of training steps of a step that was restored, if it records one.
    """

    def __init__(
        self,
        run: RunDirectory,
        selector: CheckpointSelector,
        comm: Comm,
        load_comm: Comm,
        *,
        history: SaveHistory,
        registered: RegisteredState,
        namespace: str,
        on_restored: Callable[[int | None], None],
    ) -> None:
        self.directory, self.selector, self.history = run, selector, history
        self.comm, self.load_comm = comm, load_comm
        self.registered, self.namespace, self.on_restored = registered, namespace, on_restored
        self.search = _Search()
        self._chosen: CheckpointInfo | None = None
        """What rank 0 has chosen, there."""
        self._known: KnownIndex | None = None
        """Its index, if that was read to choose it; near, its bytes are read again under the lease, and compared."""

    def first_that_loads(self, step: CheckpointId | None, act: Callable[[OpenedStep | None], T]) -> T:
        """Returns the result of `act` for a step, or for the newest one in which it finds no damage; None is none."""
        while True:
            with self.open(step) as opened:
                try:
                    return act(opened)
                except TreeckptError:
                    if opened is None or not opened.damaged:
                        raise

    @contextlib.contextmanager
    def open(self, step: CheckpointId | None) -> Iterator[OpenedStep | None]:
        """Gives a step, or the newest that is not known to be damaged; None if the run has none. Holds a lease on it.

        Raises:
            As `Manager.open`.
        """
        try:
            choice = self._agreed_choice(step)
        except TreeckptError as error:
            if self.search.filled:
                error.add_hint(_PARTLY_FILLED)
            self.search = _Search()
            raise
        passed_over = self.search.passed_over
        passed_over += [text for text in choice.passed_over if text not in passed_over]
        if choice.step is None:
            yield None
            return
        with self._lease(choice):
            known, self._known = self._known, None
            opened = OpenedStep(self, choice, self._chosen, known)
            yield opened
        if opened.restored and not opened.damaged:
            self.search = _Search()

    @contextlib.contextmanager
    def open_described(self, step: CheckpointId | None) -> Iterator[OpenedStep | None]:
        """Does what `open` does, for bodies of callers: what is given is described, and all ranks end together."""
        with contextlib.ExitStack() as held:
            while (opened := held.enter_context(self.open(step))) is not None:
                try:
                    opened.describe()
                    break
                except TreeckptError:  # it was deleted before the lease was written
                    if not opened.damaged:
                        raise
                held.close()
            if opened is not None:
                # ranks may read its files by themselves, under the lease of rank 0
                hint = "What was to be restored may be restored on some ranks only"
                held.enter_context(ending_together(self.comm, f"{opened.path} opened", opened.path, hint=hint))
            yield opened

    def _complete_saves(self, disks: RunDisks) -> None:
        """Completes saves to the disks of several hosts that had died behind their commit, on every rank."""
        url, act = self.directory.url, partial(complete_saves, self.directory, disks) if disks.leads else None
        on_each_disk(self.comm, disks, f"{url} restore: saves completed", url, act, hint=_NOTHING_RESTORED)

    def _choose(self, step: CheckpointId | None) -> _RestoreChoice:
        passed_over: list[str] = []
        info = self._chosen = self.selector.choose(step, self.search.failed, passed_over)
        if info is None:
            return _RestoreChoice(None, self.directory.url, None, step, ())
        self._known = self.selector.take_index(info)
        return _RestoreChoice(
            step=step_info(info).step,
            path=info.path,
            nbytes=info.nbytes,
            requested=step,
            passed_over=tuple(passed_over),
            name=info.name,
            save_id=info.save_id,
            count=info.step,
            apart=self.selector.joined is not None,
        )

    def _agreed_choice(self, step: CheckpointId | None) -> _RestoreChoice:
        """Returns the choice of rank 0 on every rank.

        Raises:
            MismatchError: ranks ask for different steps.
        """
        choice = self._choice_of_rank0(step, at_once=False)
        if self.comm.size == 1:
            return choice
        with Exchange(self.comm, f"{choice.path} open") as exchange:
            alike = exchange.step(
                lambda: b"%d" % self._sees(choice, step), lambda seen: Conclusion(len({*seen.values()}) == 1), bool
            )
        # otherwise a job of fewer hosts has saved it
        return choice if alike else self._choice_of_rank0(step, at_once=True)

    def _choice_of_rank0(self, step: CheckpointId | None, *, at_once: bool) -> _RestoreChoice:
        unread, topic = self.search.unread, f"{self.directory.url} restore"
        try:
            return from_all_disks(
                self.comm,
                self.selector,
                topic,
                partial(self._choose, step),
                _RestoreChoice,
                call="restore",
                on_disks=self._complete_saves,
                at_once=at_once,
            )
        except CheckpointNotFound:
            if not unread:
                raise
            raise StoreError(
                self.directory.url,
                expected="a checkpoint to restore",
                found=f"none that loads; {count_text(len(unread), 'step')} could not be read, first {unread[0][0]}",
                hint="They may be whole: do not start anew before the disk was looked at",
            ) from next((error for _, error in reversed(unread) if error is not None), None)

    def _sees(self, choice: _RestoreChoice, step: CheckpointId | None) -> bool:
        """Whether this rank sees what was chosen, or need not.

        Raises:
            MismatchError: rank 0 was asked for another step than this one.
        """
        if choice.requested != step:
            raise MismatchError(
                self.directory.url,
                expected=f"the same step on every rank, as step={choice.requested!r} on rank 0",
                found=f"step={step!r} on rank {self.comm.rank}",
                hint="Call restore with the same arguments on every rank",
            )
        if choice.step is None or choice.apart or self.directory.store.traits.local_path is None:
            return True
        return self.directory.store.folder(choice.name).entry(INDEX_NAME) is not None

    def _lease(self, choice: _RestoreChoice) -> AbstractContextManager[object]:
        if self.comm.rank and not choice.apart:
            return contextlib.nullcontext()
        return hold_lease(self.directory.store.folder(choice.name), ahead=self._known is not None)


class _Described(msgspec.Struct, frozen=True, array_like=True):
    """What the index of an opened step says."""

    metadata: dict[str, Value]
    files: tuple[str, ...]


class OpenedStep:
    """A step that `Manager.open` gives, which no clean-up deletes until its body ends.

    Every rank calls its methods, in the same order, and what fails on one of them raises on all.

    >>> with tc.Manager("run").open() as opened:
    ...     opened.step, opened.files, sorted(opened.load())
    (100, (), ['model', 'step'])

    Attributes:
        step: its number, or the text by which it was saved.
        path: its path or URL, which `load`, `inspect` and others take. Of the disks of several hosts these read one.
        passed_over: the newer checkpoints that could not be loaded, each with what is wrong.
        restored: whether something was restored from it: then `Manager.count` and the next save follow it.
        damaged: whether it was found to be damaged: the next `Manager.open` passes over it.
    """

    def __init__(
        self, restorer: Restorer, choice: _RestoreChoice, info: CheckpointInfo | None, known: KnownIndex | None
    ) -> None:
        assert choice.step is not None, "there is one"
        self._restorer, self._choice, self._info, self._known = restorer, choice, info, known
        self._comm, self._folder = restorer.comm, restorer.directory.store.folder(choice.name)
        self.step, self.path = choice.step, choice.path
        self.passed_over = tuple(restorer.search.passed_over)
        self.restored = self.damaged = False
        self._described = _Described({}, ())
        self._save_id: str | None = None
        """Of the one save that it stands for; None where it stands for whichever is there."""

    def __repr__(self) -> str:
        return f"OpenedStep({self.path!r})"

    @property
    def custom_metadata(self) -> dict[str, Any]:
        """What it was saved with as `custom_metadata`, with the metrics under "metrics"."""
        metadata = self._described.metadata
        return {key: decode_value(value, f"custom_metadata/{key}") for key, value in metadata.items()}

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files that were saved with it."""
        return self._described.files

    @takes_no_save
    def read_file(self, name: str) -> bytes:
        """Returns the content of a file that was saved with `files=`, verified; it is read once for all ranks.

        Raises:
            MismatchError: there is none of that name.
            As `restore`.
        """
        if name not in self.files:
            found = f"files: {', '.join(self.files[:20]) or 'none'}"
            raise MismatchError(f"{self.path}: {name}", expected="a file that was saved with it", found=found)
        return self._read(name, lambda checkpoint: read_sidecar(checkpoint.store, checkpoint.index, name), bytes)

    @takes_no_save
    def restore(
        self, model: Modules, optimizer: Optimizers | None = None, **options: Unpack[RestoreKeywords]
    ) -> RestoreReport:
        """Puts the saved training state into live objects, as `treeckpt.training.restore`, with what is registered.

        More calls may follow, as for an optimizer that is made later; each fills all that it is given, and what is
        registered, again. `rng=False` leaves the random generators to `restore_rng`.

        Raises:
            CorruptError: it turned out to be damaged on some rank, or was replaced by another save; not for a step that
                was asked for, which raises what was found.
            The errors of `treeckpt.training.restore`.
        """
        given = training_options(options, self._restorer.namespace, "restore")
        call = partial(self._restorer.registered.restore_training, model=model, optimizer=optimizer)
        report: RestoreReport = self._restore(call, given, fills=True)
        return msgspec.structs.replace(report, passed_over=self.passed_over)

    @takes_no_save
    def restore_rng(self, *, read: ReadOptions | None = None, fallback: Fallback | None = None) -> RestoreReport:
        """Sets the random generators of each rank to what `treeckpt.training.state` saved, once all else is in place.

        Raises:
            MismatchError: it has none.
            As `restore`.
        """
        from ..training import restore

        def call(checkpoint: Checkpoint, comm: Comm, options: dict[str, Any]) -> RestoreReport:
            return restore(checkpoint, {}, rng=True, extra=False, strict="missing", comm=comm, **options)

        given = training_options({"read": read, "fallback": fallback}, self._restorer.namespace, "restore_rng")
        return self._restore(call, given, fills=False)

    @takes_no_save
    def load(self, like: Any = None, *, into: Any = None, **options: Unpack[LoadKeywords]) -> Any:
        """Loads a tree, or with `into` fills one in place, and restores what is registered; see `Manager.restore`.

        Raises:
            As `restore`, and `treeckpt.load`.
        """
        given = load_options(options, self._restorer.namespace, "load", {"like": like, "into": into})
        call = partial(self._restorer.registered.restore, like=like, into=into)
        fills = into is not None or bool(self._restorer.registered)
        return self._restore(call, given, fills=fills, whole=like is None and into is None)

    def describe(self) -> None:
        """Reads what `custom_metadata` and `files` tell, on every rank; from now on it stands for this one save."""

        def described(checkpoint: Checkpoint) -> _Described:
            index = checkpoint.index
            return _Described(index.metadata, tuple(each.name for each in index.sidecars))

        self._save_id = self._choice.save_id
        self._described = self._read("description", described, _Described)

    def _read(self, what: str, read: Callable[[Checkpoint], T], kind: Any) -> T:
        """Returns what is read of small files, on every rank: by rank 0; of several disks by the first that has it."""
        apart = self._choice.apart

        def read_version(checkpoint: Checkpoint) -> T | None:
            if apart and checkpoint.index.save_id != self._save_id:
                return None
            self._check_version(checkpoint)
            return read(checkpoint)

        def read_here() -> T | None:
            if self._folder.entry(INDEX_NAME) is None if apart else self._comm.rank:
                return None
            return on_one_version(self._folder, read_version, known=self._known)

        mine = self._run(read_here, fills=False)
        answer: Any = kind | None
        found = all_gather(self._comm, f"{self.path} {what}", lambda: mine, answer)
        return next(each for each in found if each is not None)

    def _check_version(self, checkpoint: Checkpoint) -> None:
        """Refuses another save than the one that was opened."""
        if self._save_id is not None and checkpoint.index.save_id != self._save_id:
            found, hint = "another one, which has replaced it", "Open the step again"
            raise CheckpointError(self.path, expected="the save that was opened", found=found, hint=hint)

    def _restore(self, call: RestoreCall, options: Mapping[str, Any], *, fills: bool, whole: bool = False) -> Any:
        """Returns what a call returns that restores the step.

        Args:
            options: of the call; `strict` and `read`, a `ReadOptions`, matter here too.
            fills: whether it fills objects in place.
            whole: whether it loads all of the checkpoint.
        """
        read: ReadOptions = options["read"]
        is_newest = self._choice.requested is None
        if fills and is_newest and not options.get("strict", True) and read.verify is not False:
            # if this one is found to be damaged on the way, the one before may lack leaves that were filled already
            options = {**options, "read": msgspec.structs.replace(read, verify="first")}
        result = self._run(partial(self._load, call, options, whole=whole), fills=fills)
        if not self.restored:
            self.restored = True
            if self._info is not None and (mark := mark_of(self._info)) is not None:
                self._restorer.history.restored(mark)
            self._restorer.on_restored(self._choice.count)
        return result

    def _load(self, call: RestoreCall, options: Mapping[str, Any], *, whole: bool) -> Any:
        choice, comm, store = self._choice, self._restorer.load_comm, self._folder
        known, self._known = self._known, None
        bar = reading_bar(store, f"restoring {id_text(self.step)}", choice.nbytes if comm.size == 1 and whole else None)
        read: ReadOptions = options["read"]
        if read.once is None:
            once = comm.size > 1 and reads_once(comm, store, apart=choice.apart)
            read = msgspec.structs.replace(read, once=once)

        def load_version(checkpoint: Checkpoint) -> Any:
            relay = open_relay(comm, [checkpoint], read.once)
            with together(relay, "restored"):
                if relay is not None and not choice.apart:
                    relay.share_index(checkpoint)
                self._check_version(checkpoint)
                return call(checkpoint, comm=comm, options={**options, "read": read})

        once = bool(read.once)
        across = LoadingRanks(comm, apart=True) if once and choice.apart else None
        partly = options.get("partial", False)
        # around all: a rank that fails to open the checkpoint says so where the others wait for its part
        with partial_ranks(comm, choice.path, partly) as ranks:
            options = {**options, "partial": ranks or False}
            with bar if self._comm.rank == 0 else contextlib.nullcontext(store) as source:
                return on_one_version(source, load_version, together=once or partly, known=known, across=across)

    def _run(self, act: Callable[[], T], *, fills: bool) -> T:
        """Returns what `act` returns on this rank; raises on every rank where it fails on some.

        If the files of the checkpoint are at fault, the next `open` passes over it, unless it was asked for.
        """
        topic, result, error = f"{self.path} restore", None, None
        with interrupts_told(self._comm, topic):
            try:
                result = act()
            except Exception as failed:
                error = failed
        faults = gather_errors(self._comm, topic, error)
        if not faults:
            return cast(T, result)
        search, hint = self._restorer.search, _PARTLY_FILLED if fills else _NOTHING_RESTORED
        # the sector may stay bad, and the training could not go on: the step before is taken, and a warning says so
        bad = [fault for fault in faults if fault.kind == "StoreError" and fault.errno == errno.EIO]
        kinds = {fault.kind if fault not in bad else "CheckpointError" for fault in faults}
        # where ranks read for each other, those that got nothing from the rank with the error report RankError
        broken = kinds & _BROKEN and kinds <= _BROKEN | {"RankError"}
        if self._choice.requested is not None or not broken:
            if search.failed and fills and isinstance(error, TreeckptError):
                error.add_hint(_PARTLY_FILLED)
            raise_faults(faults, self.path, self._comm.size, cause=error, hint=hint)
        why = f"rank {faults[0].rank}: {faults[0].text}"
        self._pass_over(why, kinds, fills=fills)
        search.unread += [(f"{self.path}: rank {fault.rank}: {fault.text}", error) for fault in bad[:1]]
        raise CorruptError(self.path, expected="a checkpoint that loads on all ranks", found=why, hint=hint) from error

    def _pass_over(self, why: str, kinds: AbstractSet[str], *, fills: bool) -> None:
        """Notes that the checkpoint was found to be damaged, for the next `open`."""
        search, selector, self.damaged = self._restorer.search, self._restorer.selector, True
        search.failed.add(self._choice.save_id)
        search.passed_over.append(f"{self.path}: {why}")
        search.filled = search.filled or fills
        if self._comm.rank == 0:
            selector.warn_once(self.path, f"passed over, {why}")
            if "CorruptError" in kinds and self._info is not None:
                selector.keep_damage(self._info, why)


def begin_anew(
    run: RunDirectory,
    comm: Comm,
    model: Modules,
    optimizer: Optimizers | None,
    options: Mapping[str, Any],
    *,
    allow_pickle: bool,
) -> None:
    """Refuses objects that a save would refuse, on the first run of a training; logs that nothing was restored."""
    from ..training._capture import check_objects
    from ..training._user_state import check_generators

    with ending_together(comm, "resume", run.url, hint="Nothing has changed"):
        check_objects(model, optimizer, options, comm.rank, allow_pickle=allow_pickle)
    if comm.rank == 0:
        runs = runs_below(run.store)
        below = f". Below it are runs: {', '.join(runs[:5])}" if runs else ""
        level = logging.WARNING if runs else logging.INFO
        _log.log(level, "%s: no checkpoint: the training starts anew%s", run.url, below)
        check_generators(options.get("loader"))


def restore_from(
    source: Any,
    step: CheckpointId | None,
    fill: Callable[[Checkpoint | Bank], LoadReport],
    comm: Comm,
    *,
    once: bool | None,
) -> LoadReport:
    """Fills something from other runs, or from checkpoints; returns what `fill` returns for what is opened.

    Rank 0 chooses the newest checkpoint of each run, and holds a lease on it meanwhile.

    Args:
        source: a path, a store, or a bank of these.
        step: of the only run; None for its newest.

    Raises:
        CheckpointNotFound: there is none.
        The errors of `fill`, on all ranks.
    """
    bank = as_bank(source) or Bank([source])
    url = ", ".join(map(str, bank.paths))
    if step is not None and len(bank.sources) > 1:
        hint = "Give the paths of the checkpoints themselves"
        raise TreeckptError("step", expected="one run in source", found=f"{len(bank.sources)}", hint=hint)

    def choose() -> list[str]:
        return [_name_in_run(each, step) for each in bank.paths]

    names = from_rank0(comm, f"restore from {url}", choose, list[str], call="restore")
    paths = [open_run(each).folder(name) if name else each for name, each in zip(names, bank.paths, strict=True)]
    with contextlib.ExitStack() as leases:
        for name, folder in zip(names, paths, strict=True) if comm.rank == 0 else ():
            if name:
                leases.enter_context(hold_lease(folder))
        with ending_together(comm, f"restored from {url}", url, hint=_PARTLY_FILLED):
            return on_versions(bank.opened(paths), fill, together=bool(once))


def _name_in_run(path: Any, step: CheckpointId | None) -> str:
    """Returns the name of a checkpoint in a run: of a step, or the newest; empty for a path of no run."""
    if isinstance(path, Checkpoint) or not _is_run(path):
        if step is not None:
            expected = "a run in source, which has steps"
            raise TreeckptError("step", expected=expected, found=f"{path}", hint="Leave it out")
        return ""
    run = RunDirectory(path)
    info = run.checkpoint(step) if step is not None else CheckpointSelector(run).choose(None, (), [])
    return "" if info is None else info.name


def _is_run(path: Any) -> bool:
    """Whether a path or store is no checkpoint, of ours or of another program."""
    if isinstance(path, (str, os.PathLike)):
        text: str = os.fspath(path)  # pyright: ignore[reportUnknownArgumentType]
        return open_store(text).entry(INDEX_NAME) is None and describe_foreign(text) is None
    return not is_path_or_store(path)
