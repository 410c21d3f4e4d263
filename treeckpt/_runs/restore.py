"""Loads a run's checkpoint on all ranks, or, if it turns out to be damaged, the one before it.

Rank 0 chooses a checkpoint, and holds a lease until every rank has reported the result of its load. If the files of the
checkpoint are at fault on any rank, all ranks skip it, choose again, and fill all of the target again; an error of the
caller (a wrong target) is raised. In an object store the index by which rank 0 has chosen is not read again, and the
data is requested while the lease is written: if a clean-up deletes the checkpoint in that moment, files are gone.

Objects registered with a manager are saved with every step, and restored by every restore. There are two kinds: objects
that all ranks share (trees, or objects with `state_dict` and `load_state_dict`), saved under `registered/` in the
checkpoint; and readers of input, of which each rank has its own, saved under `io/`, each with a policy for a changed
number of ranks. Shared objects are filled in the load of the tree or training state; readers get their state last.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .. import _api
from .._arrays.stateful import LoadsSavedState, StatePlan, is_optimizer, object_states, plan_state
from .._core.format.files import CheckpointId, id_text
from .._core.format.index import INDEX_NAME
from .._core.format.records import Index
from .._core.text import count_text
from .._core.tree.containers import PerRank
from .._core.tree.flatten import flatten
from .._core.tree.paths import compile_globs, globs_of
from .._core.tree.structure import empty_container_paths, key_text, keys_of
from .._io.comm.collective import (
    Fault,
    ending_together,
    from_rank0,
    gather_errors,
    interrupts_told,
    raise_faults,
)
from .._io.comm.comm import Comm, other_world_error
from .._io.storage.checkpoint import Checkpoint, KnownIndex
from .._io.storage.foreign_formats import describe_foreign
from .._io.storage.kept_files import hold_lease
from .._io.storage.open import is_path_or_store, open_run, open_store
from .._loading.disks import LoadingRanks
from .._loading.execute_shared import reads_once
from .._loading.match import LoadOptions
from .._loading.options import ONLY_OF_LOAD, Policy, ReadOptions, read_alone
from .._loading.overlay import Bank, as_bank
from .._loading.read_batch import open_relay, together
from .._loading.run_load import on_one_version, on_versions
from ..errors import CheckpointNotFound, MismatchError, StoreError, TreeckptError, TreeError
from ..reports import LoadReport
from ..rules import as_rules
from ..trees._per_rank_state import load_own
from .catalog import CheckpointInfo, mark_of, step_info
from .disk_cleanup import RunDisks, complete_saves, look_at_disks, on_each_disk
from .disks import joined_infos, seen_here
from .progress_bar import reading_bar
from .run import CheckpointSelector, OtherDisks, RunDirectory
from .schedule import SaveHistory

if TYPE_CHECKING:  # it imports torch
    from ..training._user_state import TreeToFill

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
    count: int | None = None
    """The number of training steps that it records: of one with a text, those that were counted until its save."""
    apart: bool = False
    """Whether it may lie on the disks of several hosts, or its directory be missing on some."""


class Restored(msgspec.Struct, frozen=True):
    """The result of a restore."""

    result: Any
    count: int | None
    """The number of training steps that it records."""
    passed_over: tuple[str, ...]
    """The newer checkpoints that could not be loaded, each with what is wrong."""


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
        self, call: RestoreCall, step: CheckpointId | None, options: Mapping[str, Any], *, fills: bool, whole: bool
    ) -> Restored | None:
        """Restores a step, or the newest that loads; returns None if the run has none.

        Args:
            options: of the call; `strict` and `read`, a `ReadOptions`, matter here too.
            fills: whether it fills objects in place.
            whole: whether it loads all of the checkpoint.
        """
        tried, passed_over = set[CheckpointId](), list[str]()
        unread: list[tuple[str, Exception | None]] = []
        on_all = False
        read: ReadOptions = options["read"]
        if fills and step is None and not options.get("strict", True) and read.verify is not False:
            # if this one is found to be damaged on the way, the one before may lack leaves that were filled already
            options = {**options, "read": msgspec.structs.replace(read, verify="first")}
        while True:
            try:
                choice = self._agreed_choice(step, tried, unread, at_once=on_all)
            except TreeckptError as failed:
                if tried and fills:
                    failed.add_hint(_PARTLY_FILLED)
                raise
            passed_over += [text for text in choice.passed_over if text not in passed_over]
            result, error, faults = self._attempt(choice, step, call, options, whole=whole)
            if not faults:
                if choice.step is None:
                    return None
                if self._chosen is not None and (mark := mark_of(self._chosen)) is not None:
                    self._history.restored(mark)
                return Restored(result, choice.count, tuple(passed_over))
            if not on_all and not choice.apart and self._is_not_seen_by_all(faults):
                on_all = True  # a job of fewer hosts has saved it
                continue
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

    def _complete_saves(self, disks: RunDisks) -> None:
        """Completes saves to the disks of several hosts that had died behind their commit, on every rank."""
        url, act = self.directory.url, partial(complete_saves, self.directory, disks) if disks.leads else None
        on_each_disk(self._comm, disks, f"{url} restore: saves completed", url, act, hint=_NOTHING_RESTORED)

    def _choose(self, step: CheckpointId | None, tried: set[CheckpointId]) -> _RestoreChoice:
        passed_over: list[str] = []
        info = self._chosen = self._selector.choose(step, tried, passed_over)
        if info is None:
            return _RestoreChoice(None, self.directory.url, None, step, ())
        self._known = self._selector.take_index(info)
        return _RestoreChoice(
            step=step_info(info).step,
            path=info.path,
            nbytes=info.nbytes,
            requested=step,
            passed_over=tuple(passed_over),
            name=info.name,
            count=info.step,
            apart=self._selector.joined is not None,
        )

    def _agreed_choice(
        self,
        step: CheckpointId | None,
        tried: set[CheckpointId],
        unread: Sequence[tuple[str, Exception | None]],
        *,
        at_once: bool,
    ) -> _RestoreChoice:
        """Returns the choice of rank 0 on every rank.

        Args:
            unread: the steps that could not be read, and why: where no other loads, the run is no empty one.
            at_once: as for `from_all_disks`.
        """
        topic, choose = f"{self.directory.url} restore", partial(self._choose, step, tried)
        try:
            return from_all_disks(
                self._comm,
                self._selector,
                topic,
                choose,
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

    def _attempt(
        self,
        choice: _RestoreChoice,
        step: CheckpointId | None,
        call: RestoreCall,
        options: Mapping[str, Any],
        *,
        whole: bool,
    ) -> tuple[Any, Exception | None, tuple[Fault, ...]]:
        """Loads what was chosen, on every rank; returns the result or the error of this one, and the faults of all."""
        result, error, topic = None, None, f"{choice.path} restore"
        with self._lease(choice):
            if choice.step is not None:
                with interrupts_told(self._comm, topic):
                    result, error = self._load(choice, choice.step, step, call, options, whole=whole)
            elif choice.requested != step:
                error = self._different_steps(choice.requested, step)
            return result, error, gather_errors(self._comm, topic, error)

    def _is_not_seen_by_all(self, faults: Sequence[Fault]) -> bool:
        """Whether some ranks do not see what was chosen, and others do."""
        lacking = {fault.rank for fault in faults if fault.kind == "CheckpointNotFound"}
        return self.directory.store.traits.local_path is not None and 0 < len(lacking) < self._comm.size

    def _lease(self, choice: _RestoreChoice) -> AbstractContextManager[object]:
        if choice.step is None or (self._comm.rank and not choice.apart):
            return contextlib.nullcontext()
        return hold_lease(self.directory.store.folder(choice.name), ahead=self._known is not None)

    def _different_steps(self, requested: CheckpointId | None, step: CheckpointId | None) -> MismatchError:
        return MismatchError(
            self.directory.url,
            expected=f"the same step on every rank, as step={requested!r} on rank 0",
            found=f"step={step!r} on rank {self._comm.rank}",
            hint="Call restore with the same arguments on every rank",
        )

    def _load(
        self,
        choice: _RestoreChoice,
        found: CheckpointId,
        step: CheckpointId | None,
        call: RestoreCall,
        options: Mapping[str, Any],
        *,
        whole: bool,
    ) -> tuple[Any, Exception | None]:
        store = self.directory.store.folder(choice.name)
        known, self._known = self._known, None
        bar = reading_bar(
            store, f"restoring {id_text(found)}", choice.nbytes if self._comm.size == 1 and whole else None
        )
        read: ReadOptions = options["read"]
        if read.once is None:
            once = self._load_comm.size > 1 and reads_once(self._load_comm, store, apart=choice.apart)
            read = msgspec.structs.replace(read, once=once)

        def load_version(checkpoint: Checkpoint) -> Any:
            relay = open_relay(self._load_comm, [checkpoint], read.once)
            with together(relay, "restored"):
                if choice.requested != step:
                    raise self._different_steps(choice.requested, step)
                if relay is not None and not choice.apart:
                    relay.share_index(checkpoint)
                return call(checkpoint, comm=self._load_comm, options={**options, "read": read})

        once = bool(read.once)
        across = LoadingRanks(self._load_comm, apart=True) if once and choice.apart else None
        try:
            with bar if self._comm.rank == 0 else contextlib.nullcontext(store) as source:
                return on_one_version(source, load_version, together=once, known=known, across=across), None
        except Exception as error:
            return None, error


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


# registered objects ---------------------------------------------------------------------------------------------------

OBJECTS, READERS = "registered", "io"
"""The keys at the root of the tree under which shared objects and readers are saved."""


class InputReader(msgspec.Struct, frozen=True):
    """A reader, as an object with `state_dict` and `load_state_dict`, and the policy for a changed number of ranks."""

    owner: Any
    changed: Policy


class FunctionValue(LoadsSavedState):
    """A value that is read and set by functions, which pass it on as it is."""

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        self._get, self._set = get, set

    def state_dict(self) -> Any:
        """Returns the value."""
        return self._get()

    def load_state_dict(self, state: Any) -> None:
        """Sets the value."""
        self._set(state)


class RegisteredState:
    """The objects registered with one manager, on one rank."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        """What all ranks share."""
        self.readers: dict[str, InputReader] = {}

    def __bool__(self) -> bool:
        return bool(self.objects or self.readers)

    # saving ------------------------------------------------------------------------------------------------------

    def joined(self, tree: Any) -> Any:
        """Returns a tree together with what is registered; `...` stands for no tree.

        Raises:
            TreeError: there is no tree and nothing registered, or the tree is no dict.
        """
        if not self:
            if tree is ...:
                raise TreeError("", expected="a tree", found="none, and nothing registered")
            return tree
        parts: dict[str, Any] = {}
        if self.objects:
            parts[OBJECTS] = self.objects
        if self.readers:
            parts[READERS] = {
                name: PerRank(object_states(one.owner.state_dict(), f"{READERS}/{key_text(name)}", (one.owner,)))
                for name, one in self.readers.items()
            }
        return {**_as_dict(tree), **parts}

    # restoring ---------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint, like: Any, into: Any, comm: Comm, options: Mapping[str, Any]) -> Any:
        """Loads or fills a tree, same as `treeckpt.load` and `load_into`, and restores what is registered.

        Raises:
            The errors of `treeckpt.load`; nothing that is registered has changed then.
        """
        if not self and into is not None:
            return _api.load_into(checkpoint, into, comm=comm, **options)
        if not self:
            return _api.load(checkpoint, like, comm=comm, **options)
        selection = _RegisteredSelection(checkpoint.index, options)
        options = selection.tree_options({OBJECTS: self.objects, READERS: self.readers})
        readers = self._plan_readers(checkpoint, selection, comm, options)
        things = {name: self.objects[name] for name in selection.wanted(OBJECTS, self.objects)}
        trees = _trees_with_optimizers(things, checkpoint, selection.selects, comm, options)
        target: dict[str, Any] = {}
        if things or selection.has_unregistered(OBJECTS, self.objects):
            target = {OBJECTS: things | {name: tree.target for name, tree in trees.items()}, READERS: ...}
        if into is not None:
            rest = dict.fromkeys((OBJECTS, READERS), ...)
            result = _fill(checkpoint, _as_dict(into), {**rest, **target}, comm, options)
        else:
            result = _load(checkpoint, like, checkpoint.index, comm, options)
            if target:  # the registered objects alone
                filling = {key: given for key, given in options.items() if key not in ONLY_OF_LOAD}
                # A fill refuses both, which say how new arrays are made.
                filling["read"] = msgspec.structs.replace(options["read"], mmap=False, copy=False)
                rest = dict.fromkeys((key for key in _roots(checkpoint.index) if key not in target), ...)
                _fill(checkpoint, {}, {**rest, **target}, comm, filling)
        for tree in trees.values():
            tree.take_back()
        for reader in readers:
            reader.load()
        return result

    def fill(self, source: Checkpoint | Bank, into: Any, comm: Comm, options: Mapping[str, Any]) -> LoadReport:
        """Fills a tree, and the objects that all ranks share, from checkpoints that need not be those of this run.

        Raises:
            The errors of `treeckpt.load_into`; nothing has changed then.
        """
        if not self.objects and into is None:
            raise TreeError("", expected="a tree in into, or something registered", found="neither")
        chosen = LoadOptions(globs_of(options.get("select")), exclude=globs_of(options.get("exclude"), "exclude"))
        trees = _trees_with_optimizers(self.objects, source, chosen.selects, comm, options)
        things = self.objects | {name: tree.target for name, tree in trees.items()}
        parts = {OBJECTS: things} if things else {}
        report = _fill(source, {} if into is None else _as_dict(into), parts, comm, options)
        for tree in trees.values():
            tree.take_back()
        return report

    def restore_training(
        self, checkpoint: Checkpoint, model: Any, optimizer: Any, comm: Comm, options: Mapping[str, Any]
    ) -> Any:
        """Restores a training state, same as `treeckpt.training.restore`, and what is registered; returns the report.

        Raises:
            The errors of `treeckpt.training.restore`.
        """
        from ..training import restore
        from ..training._restore import WithObjects

        if not self:
            return restore(checkpoint, model, optimizer, comm=comm, **options)
        # The globs of a training state mean `model/...` alone, so they choose nothing of what is registered.
        selection = _RegisteredSelection(checkpoint.index, {"strict": options.get("strict", True)})
        readers = self._plan_readers(checkpoint, selection, comm, options)
        things = {name: self.objects[name] for name in selection.wanted(OBJECTS, self.objects)}
        report = restore(WithObjects(checkpoint, {OBJECTS: things}), model, optimizer, comm=comm, **options)
        for reader in readers:
            reader.load()
        return msgspec.structs.replace(report, ignored=self._ignored(report.ignored, checkpoint.index))

    def _ignored(self, parts: Iterable[str], index: Index) -> tuple[str, ...]:
        """Returns the parts of a checkpoint that a restore did not ask for, without what is registered."""
        found: list[str] = []
        for part in parts:
            ours = {f"{part}/{key_text(name)}" for name in {OBJECTS: self.objects, READERS: self.readers}.get(part, ())}
            there = ("/".join(path.split("/")[:2]) for path in index.by_path if path.startswith(f"{part}/"))
            found += [name for name in dict.fromkeys(there) if name not in ours] if ours else [part]
        return tuple(found)

    def _plan_readers(
        self, checkpoint: Checkpoint, selection: _RegisteredSelection, comm: Comm, options: Mapping[str, Any]
    ) -> list[StatePlan]:
        """Loads this rank's state of each reader; returns what these take."""
        wanted = selection.wanted(READERS, self.readers)
        if not wanted:
            return []
        world = selection.index.world
        changed = {name: self.readers[name].changed for name in wanted} if comm.size != world else {}
        for name in (name for name, policy in changed.items() if policy == "error"):
            others = "; or a function merge(states, rank, world) in place of 'take'; or do not register it"
            take = f"changed='take' to register_io_state({name!r}, ...)"
            raise other_world_error(f"{READERS}/{name}", comm, world, take=take, others=others)
        merges = any(callable(policy) for policy in changed.values())

        def merge(states: list[Any], rank: int, size: int) -> dict[str, Any]:
            return {
                name: policy([state[name].value for state in states], rank, size)
                if callable(policy := changed[name])
                else states[rank % world][name].value
                for name in wanted
            }

        reading = {key: options[key] for key in ("allow_pickle", "namespace") if key in options}
        found = load_own(
            checkpoint,
            READERS,
            merge if merges else "take",
            comm,
            saved_world=world,
            argument="changed",
            read=read_alone(options["read"]),
            **reading,
        )
        states = found if merges else {name: found[name].value for name in wanted}
        namespace = options.get("namespace", "")
        return [
            plan_state(f"{READERS}/{key_text(name)}", self.readers[name].owner, state, namespace=namespace)
            for name, state in states.items()
        ]


class _RegisteredSelection:
    """Tells which of the registered names are in a checkpoint, and are selected by the options of the load."""

    def __init__(self, index: Index, options: Mapping[str, Any]) -> None:
        self.index, self._options, self._strict = index, options, options.get("strict", True)
        self._saved = [*index.by_path, *empty_container_paths(index.structure)]
        given = LoadOptions(globs_of(options.get("select")), exclude=globs_of(options.get("exclude"), "exclude"))
        self._chosen = given.for_structure(index.structure)
        self.selects = self._chosen.selects

    def tree_options(self, registered: Mapping[str, Iterable[str]]) -> dict[str, Any]:
        """Returns the options for the tree, without globs that match only registered names not in the checkpoint."""
        names = [f"{part}/{key_text(name)}" for part, part_names in registered.items() for name in part_names]
        saved, options = self._saved, dict(self._options)
        for key, globs in (("select", self._chosen.select), ("exclude", self._chosen.exclude)):
            if globs:
                known = compile_globs(globs)
                ours = set(known.unused(saved)) - set(known.unused(saved + names))
                options[key] = [glob for glob in globs if glob not in ours]
        return options

    def wanted(self, part: str, names: Iterable[str]) -> list[str]:
        """Returns the names of a part that are to be restored.

        Raises:
            MismatchError: with `strict`, one is not in the checkpoint.
        """
        found: list[str] = []
        for name in names:
            path = f"{part}/{key_text(name)}"
            below = [p for p in self._saved if p == path or p.startswith(f"{path}/")]
            if any(map(self._chosen.selects, below)):
                found.append(name)
            elif not below and self._strict and self._chosen.selects(path):
                raise MismatchError(
                    path,
                    expected=f"the state of {name!r}, which is registered",
                    found="nothing in the checkpoint",
                    hint="Pass strict=False, or leave it out",
                )
        return found

    def has_unregistered(self, part: str, names: Iterable[str]) -> bool:
        """Whether the checkpoint has a selected leaf of a part that is not registered."""
        known = tuple(f"{part}/{key_text(name)}" for name in names)
        return any(
            path.startswith(f"{part}/") and not path.startswith(known) and self._chosen.selects(path)
            for path in self.index.by_path
        )


def _trees_with_optimizers(
    things: Mapping[str, Any],
    checkpoint: Checkpoint | Bank,
    selects: Callable[[str], bool],
    comm: Comm,
    options: Mapping[str, Any],
) -> dict[str, TreeToFill]:
    """Returns the objects that hold optimizers, to be filled so that these take a state even if they have none yet."""
    namespace = options.get("namespace", "")
    # Without torch nothing is an optimizer, and it is not imported to find that out.
    names = "torch" in sys.modules and [
        name
        for name, thing in things.items()
        if any(is_optimizer(leaf) for _, leaf in flatten(thing, namespace=namespace)[1])
    ]
    if not names or options["fallback"].on_corrupt == "skip":
        return {}
    from ..training._sources import CheckpointSource
    from ..training._user_state import TreeToFill

    rules = as_rules(options.get("rename"), options.get("transforms"))
    source = CheckpointSource(
        checkpoint,
        comm,
        LoadOptions(allow_pickle=options.get("allow_pickle", False), namespace=namespace, rules=rules),
    )
    return {name: TreeToFill(things[name], (OBJECTS, name), source, selects) for name in names}


def _fill(
    checkpoint: Checkpoint | Bank, into: dict[str, Any], parts: dict[str, Any], comm: Comm, options: Mapping[str, Any]
) -> LoadReport:
    """Fills a dict and further parts at the root of the tree, in one load."""
    tree = {**into, **parts}
    report = _api.load_into(checkpoint, tree, comm=comm, **options)
    # The load may have put new values into `tree`, which is a copy of the caller's dict.
    into.update((key, tree[key]) for key in into)
    return report


def _load(checkpoint: Checkpoint, like: Any, index: Index, comm: Comm, options: Mapping[str, Any]) -> Any:
    """Loads the tree without what is registered."""
    ours = {OBJECTS, READERS}
    if like is not None:
        tree = _api.load(checkpoint, {**_as_dict(like), **dict.fromkeys(ours, ...)}, comm=comm, **options)
    else:
        rest = [key for key in _roots(index) if key not in ours]
        select = options.get("select")
        if select is None:
            # A key may have characters that mean something in a glob.
            select = [glob.escape(key_text(key)) for key in rest]
        tree = _api.load(checkpoint, comm=comm, **{**options, "select": select})
    return {key: value for key, value in tree.items() if key not in ours}


def _roots(index: Index) -> Sequence[Any]:
    return keys_of(index.structure, "") if index.structure is not None else []


def _as_dict(tree: Any) -> dict[str, Any]:
    if tree is ...:
        return {}
    if type(tree) is not dict or not {OBJECTS, READERS}.isdisjoint(tree):
        found = f"a {type(tree).__qualname__}" if type(tree) is not dict else f"one with {OBJECTS!r} or {READERS!r}"
        raise TreeError("", expected=f"a dict, beside whose keys {OBJECTS!r} and {READERS!r} are put", found=found)
    return tree


def check_name(name: str, taken: Mapping[str, Any], what: str) -> None:
    """Refuses what is no name, and a name that is registered already."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"expected a name, found {name!r:.60}")
    if name in taken:
        raise ValueError(f"{name!r} is {what} already")
