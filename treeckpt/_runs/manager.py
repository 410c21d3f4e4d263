"""`Manager` decides for all ranks when a run is saved, which checkpoint it resumes from, and which ones are kept.

    with tc.Manager("run", keep=[Last(3), Best("loss")], every=1000) as manager:
        manager.save_on_signal()
        manager.resume(model, optimizer)  # the newest checkpoint that loads; nothing on a first run
        for step in range(manager.count + 1, last + 1):
            loss = train(model, optimizer)
            if manager.should_save(step):
                manager.save(step, tc.training.state(model, optimizer), metrics={"loss": loss})

A tree of any kind is restored by `restore(like=state)`, once `latest()` is not None.

Every method is called on every rank, in the same order. Rank 0 alone reads the disk and deletes; the other ranks get
its result over the comm, without collectives. Nothing is decided from memory: metrics are in the checkpoint's custom
metadata, pins are files, and every index records which save it follows, so a restart, or a second manager, decides the
same. The newest checkpoint is the one saved last: after a rollback, one saved since then (`_core.format.lineage`).
`run` deletes, by the policies of `policy`; `schedule` decides which steps are due.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from signal import SIGTERM
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import msgspec

from .. import _api
from .._core.format.files import STEP_PATTERN, CheckpointId, check_id, check_step, id_name, id_text
from .._inspect.deletion import CleanReport
from .._io.comm.collective import all_gather, from_rank0
from .._io.comm.comm import PrefixComm, as_comm
from .._io.process import HEARTBEAT_TIMEOUT
from .._io.public_calls import saves, takes_no_save
from .._io.storage.deletions import GRACE
from .._io.storage.kept_files import hold_lease
from .._io.storage.store import RunStore, Store
from .._loading.options import LoadKeywords, Policy
from .._saving.background import save_async_tree
from .._saving.options import BackgroundOptions, IncrementalOptions, SidecarContent, check_metadata
from .._saving.save import save_tree
from .._saving.session import Pending
from ..errors import CheckpointNotFound, TreeckptError
from ..reports import SaveReport
from .catalog import step_info
from .disk_cleanup import RunDisks, act_on_disks, look_at_disks
from .failures import SaveFailures
from .notebook import run_html
from .options import (
    Keep,
    RestoreKeywords,
    SaveKeywords,
    as_policies,
    as_save_options,
    best_policy,
    check_full_every,
    is_factory,
    load_options,
    named_metrics,
    training_options,
)
from .pending_saves import PendingSaves, RetentionRunner
from .registered import FunctionValue, RegisteredState
from .restore import OpenedStep, Restorer, begin_anew, from_all_disks, restore_from
from .run import CheckpointSelector, RunDirectory, refuse_link
from .run_end import EndMark
from .schedule import LoopState, SaveHistory, SaveSchedule, is_of_workers, training_state

if TYPE_CHECKING:  # they import torch
    from ..training._modules import Modules
    from ..training._optimizers import Optimizers
    from ..training._report import RestoreReport

_log = logging.getLogger("treeckpt")
WAIT_AFTER_ERROR = 10.0
"""Seconds that leaving a manager's body with an error waits for saves in flight."""


class Manager:
    """Saves, keeps and restores the checkpoints of a run. Create one on every rank.

    >>> with tc.Manager("job", keep=[tc.policy.Last(2), tc.policy.Best("loss")], background=False) as manager:
    ...     for step, loss in ((10, 0.5), (20, 0.7), (30, 0.6), (40, 0.8)):
    ...         report = manager.save(step, model.state_dict(), metrics={"loss": loss})
    >>> manager.steps(), manager.latest(), manager.best("loss")
    ([10, 30, 40], 40, 10)

    Args:
        run: a directory, or a URL (`s3://bucket/run`); checkpoints are its subdirectories `step_00000100`, or with
            fewer or more digits where others saved them. A text in the place of a step (`save("tuned", tree)`) is
            the name of its directory: such checkpoints are in the order of their saves, record `count`, and no policy
            counts their steps. Nothing else in it is ever touched. On the private disks of several hosts each has the
            same steps, with the shards of its ranks; then clean-ups after saves in the background begin with the next
            save, `wait` or `close`.
        name: the pattern of the names of steps, as "checkpoint-{step}" or "{step:09d}". Each index records it, by which
            all others know these steps. Steps that have other names in the run keep them, and count too.
        keep: a policy or several of `treeckpt.policy`, or their text, as "last:3 best:loss"; a number is
            `Last(number)`, None keeps everything. By default the last 3 of all in `run` stay, whoever saved them. The
            newest, pinned and known damaged checkpoints are always kept. What is deleted is logged (INFO, `treeckpt`).
        every: steps between saves.
        seconds: seconds between saves, by rank 0's clock; a step is due by either interval.
        background: saves with `save_async`: `save` returns as soon as the tree may change; `BackgroundOptions` say how.
        grace: seconds for which files of a save that never finished are kept.
        comm: which ranks save, same as for `treeckpt.save`; "alone" manages the saves of this process only.
        follow_links: reads links out of a local run, of files and in place of steps; their targets never change.
        incremental: files that have what the checkpoint restored or saved last has, byte for byte, are not written
            again, nor rows of a `KeyedTable` that are as there; see `base` of `treeckpt.save`. Clean-ups keep the files
            that other steps share, and these alone.
        full_every: of so many incremental saves one writes everything.
        options: those of `treeckpt.save`. A step that is saved again replaces the earlier one, which stays valid until
            then; `overwrite=False` refuses it. Without either, a warning names the first step that is saved at or below
            one that this manager neither saved nor restored.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunStore,
        *,
        name: str = STEP_PATTERN,
        keep: Keep = 3,
        every: int | None = None,
        seconds: float | None = None,
        background: bool | BackgroundOptions = True,
        grace: float = GRACE,
        comm: _api.AnyComm = None,
        follow_links: bool = False,
        incremental: bool = False,
        full_every: int | None = None,
        **options: Unpack[SaveKeywords],
    ) -> None:
        others = Manager.__init__.__kwdefaults__ or ()
        self._background, self.options = bool(background), as_save_options(options, background, others)
        self.directory, self._policies = RunDirectory(run, follow_links=follow_links, pattern=name), as_policies(keep)
        self._selector = CheckpointSelector(self.directory)
        self._saving_comm = as_comm(comm)
        # Under keys of their own, so that no message of the manager is taken for one of a save.
        self._comm = PrefixComm(self._saving_comm, "manager")
        self._registered = RegisteredState(self.options.namespace)
        warn, replaces = self._selector.warn_once, options.get("overwrite", False)
        self._history = SaveHistory(self.directory, self._policies, warn, self._comm.rank, replaces=replaces)
        self._restorer = Restorer(
            self.directory,
            self._selector,
            self._comm,
            self._saving_comm,
            history=self._history,
            registered=self._registered,
            namespace=self.options.namespace,
            on_restored=self._restored,
        )
        self.schedule = SaveSchedule(self._saving_comm, every=every, seconds=seconds)
        self._pending = PendingSaves(self._start_clean)
        self._before: Pending | None = None
        """The background save that was begun last; None once all ranks have cleaned up after it together."""
        self.retention = RetentionRunner(self.directory, self._policies, self._selector, self._pending, grace=grace)
        self._on_each_disk = partial(act_on_disks, self._comm, self.directory, busy=self._pending.busy)
        self._other_names: dict[int, str] | None = None
        """The names of steps that are links, or that others named; None before the first save."""
        self._end = EndMark(self.directory.store, self._comm.rank)
        self._exit: int | None = None
        self._full_every = check_full_every(full_every, incremental=incremental)
        self._loop = LoopState()
        self._reached: int | None = None
        self._count = 0

    def __repr__(self) -> str:
        comm = self._saving_comm
        return f"Manager({self.directory.url!r}, keep={list(self._policies)!r}, rank {comm.rank} of {comm.size})"

    def _repr_html_(self) -> str:
        return run_html(self.directory.store, repr(self))

    @property
    def stopping(self) -> bool:
        """Whether a signal has requested a save: after that save, end the training."""
        return self.schedule.stopping

    @property
    def count(self) -> int:
        """The step that was counted, saved or restored last; `step` counts on from it. It may be set."""
        return self._count

    @count.setter
    def count(self, step: int) -> None:
        self._count = step

    # registering -----------------------------------------------------------------------------------------------

    def register(self, name: str, thing: Any) -> None:
        """Registers an object: saved with every step under `registered/<name>`, restored in place by every `restore`.

        Args:
            thing: an object with `state_dict` and `load_state_dict`, `KeyedTable.of` a hash table, or a tree whose
                containers can change; the same on all ranks, except for parts in `PerRank` or `Sharded`. An optimizer
                may be without state when it is restored: its state is created on the devices of its parameters. In a
                `resume` it has its state before what is passed as optimizer, scheduler and generators.

        Raises:
            ValueError: the name is taken.
            TreeError: it is or holds a value that cannot be changed in place; use `register_value` for those.
        """
        self._registered.add(name, thing)

    def register_value(self, name: str, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        """Registers a value: saved with every step under `registered/<name>`, set by every `restore`.

        Args:
            get: returns the value at each save: any tree that `treeckpt.save` takes, the same on all ranks.
            set: called with the value as it was saved. In a `resume`, after the model is filled, and before optimizers,
                schedulers and generators have their states.

        Raises:
            ValueError: the name is taken.
            TypeError: `get` or `set` is not callable.
        """
        self._registered.add_value(name, get, set)

    def registered(self, name: str, default: Any = None) -> Any:
        """Returns what is registered under a name: the object, or the value now; `default` where nothing is.

        >>> with tc.Manager("named") as manager:
        ...     manager.register("seen", {"rows": 5})
        ...     manager.registered("seen"), manager.registered("other")
        ({'rows': 5}, None)
        """
        thing = self._registered.objects.get(name, default)
        return thing.state_dict() if isinstance(thing, FunctionValue) else thing

    def register_io_state(self, name: str, reader: Any, *, changed: Policy = "error") -> None:
        """Registers this rank's reader of input: its state is saved under `io/<name>` with every step, and restored.

        Args:
            reader: has `state_dict` and `load_state_dict`, or `dump_io_state` and `load_io_state`.
            changed: the state to restore when the number of ranks has changed: "error" refuses, "take" takes the state
                of the old rank `rank % old world size`, and a function `merge(states of all old ranks, rank, world
                size)` returns it.

        Raises:
            ValueError: the name is taken.
            TreeError: the reader has no methods that return and take its state.
        """
        self._registered.add_reader(name, reader, changed)

    # saving --------------------------------------------------------------------------------------------------

    @takes_no_save
    def should_save(self, step: int) -> bool:
        """Whether this step is to be saved. Call it once per step, on every rank; all ranks get the same result."""
        step = check_step(step)
        self._pending.collect()
        if self.schedule.listening:
            self._loop.reach(step)
        return self.schedule.due(step) and (step != self._reached or self.stopping)

    def step(
        self,
        tree: Any | Callable[[], Any] = ...,
        *,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, SidecarContent] | None = None,
    ) -> SaveReport | Pending | None:
        """Counts a step, from the one that was restored, and saves it if it is due.

        Args:
            tree: the tree, or a function that returns it, called only if the step is due; without it only what is
                registered is saved.
            metrics, files: as for `save`.

        Returns:
            The result of `save`; None if the step was not due.
        """
        self.count += 1
        makes = is_factory(tree, self.options.namespace)
        if tree is ... or makes:
            self._loop.tree = (lambda: tree) if tree is ... else tree
        if not self.should_save(self.count):
            return None
        return self.save(self.count, tree() if makes else tree, metrics=metrics, files=files)

    @saves
    def save(
        self,
        step: int | str,
        tree: Any = ...,
        *,
        metrics: Mapping[str, float] | None = None,
        pin: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, SidecarContent] | None = None,
    ) -> SaveReport | Pending:
        """Saves a tree as this step, and cleans up when it is committed.

        Its lineage follows the checkpoint restored or saved last, or its newest ancestor with a step below this one.

        Args:
            step: the number of training steps, or a text: a name by which it is restored, pinned and deleted.
            tree: must be a dict if anything is registered, which is saved beside it; without a tree only what is
                registered is saved.
            metrics: numbers by which `Best` and `best` choose; those of rank 0 count.
            pin: keeps the checkpoint until it is unpinned, or the step is saved again: without `pin`, that is logged.
            files: as in `treeckpt.save`.

        Returns:
            The `SaveReport`, or with `background` the `Pending`.

        Raises:
            The errors of `treeckpt.save`; with `background` also the error of the previous save.
            SystemExit: after a signal, if `save_on_signal` was called with `exit`.
        """
        step = check_id(step)
        metadata = check_metadata(custom_metadata)
        named = {} if metrics is None else named_metrics(metrics, metadata)
        if self._comm.rank == 0:
            metadata = {**metadata, **named}
        if self.stopping:
            self._pending.drain()  # an earlier failure must not prevent the last save
        elif self.options.background.busy == "wait":
            self._pending.settle()
        self._loop.note_saved(tree)
        store = self._place_of(step)
        with self._pending.starting(store.name):
            result = self._save(step, store, self._registered.joined(tree), metadata, files, pin=pin)
        if isinstance(result, SaveReport):
            self._start_clean(result)
            self._clean_disks_after(result)
            self.retention.wait()
        if not isinstance(step, str):
            self.count = step
        if isinstance(result, Pending) and result.skipped:
            return result
        if isinstance(result, Pending):  # all ranks know by now that the save before has ended
            before, self._before = self._before, result
            self._clean_disks_after(before)
        self._reached = self._loop.step if isinstance(step, str) else step
        self.schedule.restart()
        if self.stopping and self._exit is not None:
            self.close()
            raise SystemExit(self._exit)
        return result

    def _save(
        self, step: CheckpointId, store: Store, tree: Any, metadata: Mapping[str, Any], files: Any, *, pin: bool
    ) -> SaveReport | Pending:
        number = self._claim(step) if isinstance(step, str) else step
        save = save_async_tree if self._background else save_tree
        # before the save, so that no clean-up removes the step in between
        pinned = pin and self._from_rank0(f"pin {id_text(step)}", partial(self.directory.put_pin, store), bool)
        unpin = partial(self._undo_pin, store, pinned)
        try:
            lineage = self._history.next_save(step, pin=pin)
            failures = SaveFailures(self.directory.failures, store, number) if self._comm.rank == 0 else None
            options = msgspec.structs.replace(
                self.options, step=number, custom_metadata=metadata, files=files, lineage=lineage, failures=failures
            )
            if self._full_every is not None:
                incremental = IncrementalOptions(source=lineage, full_every=self._full_every or None)
                options = msgspec.structs.replace(options, incremental=incremental)
            result = save(store, tree, self._saving_comm, options)
        except BaseException:
            unpin()
            self._start_clean(None)  # the disk may be full of checkpoints that no policy keeps
            raise
        if isinstance(result, Pending) and result.skipped:
            unpin()
        elif isinstance(result, Pending):
            self._pending.add(step, store.name, result, unpin)
        return result

    def _place_of(self, step: CheckpointId) -> Store:
        """Returns the directory into which a step is saved: that in which it was before this manager's first save.

        Raises:
            CheckpointExists: it is a link; on every rank.
        """
        if isinstance(step, str):
            return self.directory.store.folder(id_name(step))
        if (names := self._other_names) is None:
            find = self.directory.links_and_other_names
            names = self._other_names = self._from_rank0("look for steps", find, dict[int, str])
        store = self.directory.store.folder(names.get(step, id_name(step, self.directory.pattern)))
        if step in names:
            self._from_rank0(f"look at step {step}", partial(refuse_link, store), type(None))
        return store

    def _claim(self, name: str) -> int | None:
        """Refuses a name that something else has; returns how many steps rank 0 has counted, if any."""

        def claim() -> int | None:
            self.directory.check_free(name)
            return self.count or None

        return self._from_rank0(f"save {name}", claim, int | None)

    def _undo_pin(self, folder: Store, pinned: bool) -> None:
        """Removes the pin of a save that has failed."""
        if pinned and self._comm.rank == 0:
            with contextlib.suppress(TreeckptError):
                self.directory.take_pin_back(folder)

    def _start_clean(self, report: SaveReport | None) -> None:
        """Starts the clean-up after a save, unless its ranks see several disks: then they clean up together."""
        self._end.note_saved(report)
        if self._comm.rank == 0 and (report is None or not report.disks):
            self.retention.start()

    def _clean_disks_after(self, save: SaveReport | Pending | None) -> None:
        """Starts the clean-up of this rank's disk after a save to several; called by all ranks once it has ended."""
        report = None
        with contextlib.suppress(Exception):  # it is reported elsewhere
            report = save.result() if isinstance(save, Pending) else save
        if report is not None and report.disks and (disks := self._disks("clean")) is not None and disks.leads:
            self.retention.start(disks)

    def _disks(self, call: str) -> RunDisks | None:
        """Returns the disks of the run, on every rank; None where all ranks see one."""
        return look_at_disks(self._comm, self.directory, call)

    @takes_no_save
    def wait(self, timeout: float | None = None) -> None:
        """Waits until everything that was saved is durable, and the clean-up after it is done.

        Args:
            timeout: seconds to wait at most for the saves, and again for the clean-up.

        Raises:
            The error of a save that failed; CheckpointError, which names the lost steps, if one has not ended in time.
        """
        self._pending.settle(timeout)
        before, self._before = self._before, None
        self._clean_disks_after(before)
        self.retention.wait(timeout)

    # restoring -------------------------------------------------------------------------------------------------

    @takes_no_save
    def restore(
        self,
        like: Any = None,
        *,
        step: int | str | None = None,
        into: Any = None,
        source: Any = None,
        **options: Unpack[LoadKeywords],
    ) -> Any:
        """Loads a step; `count` and the lineage of the next save continue from it.

        Args:
            like: same as for `treeckpt.load`.
            step: by default the newest that loads: if one turns out to be damaged on any rank, that is logged and all
                ranks load the one before it and fill everything again. If an earlier step is restored, the steps saved
                after it become an abandoned branch.
            into: a tree to fill in place with `treeckpt.load_into`, in place of `like`.
            source: another run, whose newest checkpoint is taken or its `step`; a checkpoint, of other programs too; or
                a bank of these. It fills `into` and what is registered with `register`, by the names under
                `registered/` there, after the rules of `tc.From`. Of tables that several have, rows are joined by id.
                What is there beside is left (`strict="missing"`, unless given). `count`, lineage and readers stay.
            options: those of `treeckpt.load`, or with `into` of `treeckpt.load_into`; by default it reads once from an
                object store or the disks of several hosts, where the ranks are all those of torch.distributed;
                `namespace` is that of the manager.

        Returns:
            The tree, or the `LoadReport` with `into` or `source`.

        Raises:
            CheckpointNotFound: there is nothing to restore.
            StoreError: nothing could be loaded, and some steps could not be read.
            The errors of `treeckpt.load`.
        """
        targets = {"like": like, "into": into, "source": source}
        given = load_options(options, self.options.namespace, "restore", targets)
        if source is not None:
            given.setdefault("strict", "missing")
            fill = partial(self._registered.fill, into=into, comm=self._saving_comm, options=given)
            return restore_from(source, step, fill, self._comm, once=given["read"].once)

        def load(opened: OpenedStep | None) -> Any:
            if opened is not None:
                return opened.load(like, into=into, **given)
            expected, hint = "a checkpoint to restore", "Start anew where latest() is None"
            raise CheckpointNotFound(self.directory.url, expected=expected, found="none", hint=hint)

        return self._restorer.first_that_loads(step, load)

    @takes_no_save
    def resume(
        self,
        model: Modules,
        optimizer: Optimizers | None = None,
        *,
        step: int | str | None = None,
        **options: Unpack[RestoreKeywords],
    ) -> RestoreReport | None:
        """Continues a run: restores its newest checkpoint that loads into live objects, with what is registered.

        All ranks restore the same step. It is protected from deletion meanwhile. A checkpoint that turns out to be
        damaged on any rank is logged, all ranks restore the one before it, and `RestoreReport.passed_over` names it. So
        is one that lies on the disks of several hosts and is no longer whole, with the host that is missing.
        `count` and the lineage of the next save continue from the step.

        Args:
            model, optimizer, options: those of `treeckpt.training.restore`, for what `treeckpt.training.state` gave;
                `namespace` is that of the manager by default, also for what is registered.
            step: to restore in place of the newest; the steps saved after it become an abandoned branch.

        Returns:
            The report; None on a first run, when nothing was saved yet: nothing has changed then, and `count` is 0.
            What a save of the objects would refuse is refused here.
            Rank 0 logs it (INFO, to the logger `treeckpt`), as a misspelt name of a run looks the same; as a warning
            where runs lie below.

        Raises:
            CheckpointNotFound: there is no such step, or there are checkpoints, none of which can be loaded.
            StoreError: none could be loaded, and some of them could not be read.
            The errors of `treeckpt.training.restore`.
        """
        given = training_options(options, self.options.namespace, "resume")

        def restore(opened: OpenedStep | None) -> RestoreReport | None:
            return None if opened is None else opened.restore(model, optimizer, **given)

        report = self._restorer.first_that_loads(step, restore)
        if report is None:
            allow_pickle = self.options.allow_pickle
            begin_anew(self.directory, self._comm, model, optimizer, given, allow_pickle=allow_pickle)
        # Parts at the root for which no object was given: a last save from the objects here would lack them.
        unasked = [path for path in report.ignored if "/" not in path] if report is not None else []
        if not unasked and (report is None or report.extra is None or options.get("extra") is not None):
            self._loop.tree = partial(training_state, model, optimizer, given)
        return report

    def open(self, step: int | str | None = None) -> AbstractContextManager[OpenedStep | None]:
        """Opens a step for a restore in parts, as for a framework that reads its own files first and has objects later.

        >>> with tc.Manager("run", keep=3) as manager, manager.open() as opened:
        ...     if opened is not None:  # it is None on a first run
        ...         states = [opened.read_file(name) for name in opened.files]
        ...         report = opened.restore(model, rng=False)  # and opened.restore_rng() once all else is in place
        ...     manager.count
        100

        All ranks open the same step, and end the body together: what fails on one rank in it raises on all. The step is
        protected from deletion until then, also by other managers. With the first restore from it `count` and the
        lineage of the next save continue from it. Where a restore finds it damaged, all ranks raise CorruptError, and
        the next `open` or `resume` of this manager passes over it, which is logged: open again until it loads.

        Args:
            step: by default the newest that is not known to be damaged.

        Returns:
            A context manager that gives the `OpenedStep`; None if nothing was saved yet.

        Raises:
            CheckpointNotFound: there is no such step, or there are checkpoints, none of which can be loaded.
            StoreError: none could be loaded, and some of them could not be read.
        """
        return self._restorer.open_described(step)

    def _restored(self, step: int | None) -> None:
        if step is not None:
            self.count = self._reached = step
        self.schedule.restart()

    @contextlib.contextmanager
    def reading(self, step: int | str) -> Iterator[Store]:
        """Protects a step from deletion while the body reads it; called by one process alone, not by all ranks.

        Raises:
            CheckpointNotFound: it does not exist, or is not complete.
        """
        folder = self.directory.folder(step)
        with hold_lease(folder):
            self.directory.checkpoint(step)
            yield folder

    # listing --------------------------------------------------------------------------------------------------

    @takes_no_save
    def latest(self, *, verify: bool = False) -> int | str | None:
        """Returns the newest step that can be restored: the one saved last, not the highest. None if there is none.

        It is the text of a checkpoint that was saved by one.

        Checkpoints that are skipped are logged. After a rollback the abandoned branch comes last.

        Args:
            verify: reads everything and compares checksums; otherwise the index and the sizes of files are checked. Of
                the disks of several hosts that of rank 0 is read: `treeckpt.verify` reads that of each rank.

        Raises:
            CheckpointNotFound: the manager was given the path of one checkpoint in the place of its run.
        """
        return self._from_all_disks("latest", partial(self._newest_step, verify), CheckpointId | None)

    def _newest_step(self, verify: bool) -> CheckpointId | None:
        newest = self._selector.newest(verify=verify, busy=self._pending.busy())
        return step_info(newest).step if newest is not None else None

    @takes_no_save
    def best(self, metric: str | None = None, *, mode: Literal["min", "max"] | None = None) -> int | str | None:
        """Returns the step of the present branch with the best metric; None, and logs those there are, if none has it.

        Args:
            metric: by default the metric of the first `Best` policy, which may be that of `Total`.
            mode: by default the mode of the policy with this metric, otherwise "min".
        """
        policy = best_policy(self._policies, metric, mode)
        return self._from_all_disks(f"best {policy.metric}", partial(self._selector.best, policy), CheckpointId | None)

    @takes_no_save
    def steps(self) -> list[int]:
        """Returns the steps that can be restored, in rising order; `names` has the others."""
        return sorted(step for step in self._ids("steps") if isinstance(step, int))

    @takes_no_save
    def names(self) -> list[str]:
        """Returns the texts of the checkpoints that were saved by one and can be restored, in the order of their saves.

        >>> with tc.Manager("named", keep=2, background=False) as manager:
        ...     for name in ("first", "second", "third"):
        ...         report = manager.save(name, model.state_dict())
        ...     manager.names(), manager.latest()
        (['second', 'third'], 'third')
        """
        return [step for step in self._ids("names") if isinstance(step, str)]

    def _ids(self, call: str) -> list[CheckpointId]:
        """Returns the ids of all checkpoints that can be restored, those that were saved last at the end."""

        def listed() -> list[CheckpointId]:
            return [info.step for info in sorted(map(step_info, self._selector.complete()), key=lambda one: one.age)]

        return self._from_all_disks(call, listed, list[CheckpointId])

    def path(self, step: int | str) -> str:
        """Returns the path or URL of a step, whether or not it is saved."""
        return self.directory.folder(step).place

    # keeping -------------------------------------------------------------------------------------------------

    @takes_no_save
    def pin(self, step: int | str) -> None:
        """Keeps a step until it is unpinned.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        step = check_id(step)
        self._on_step("pin", step, partial(self.directory.pin, step))

    @takes_no_save
    def unpin(self, step: int | str) -> None:
        """Lets the policies decide about a step again.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        step = check_id(step)
        self._on_step("unpin", step, partial(self.directory.unpin, step))

    @takes_no_save
    def delete(self, step: int | str, *, force: bool = False) -> None:
        """Deletes a step whatever the policies say, as the clean-up does: killed on the way, the next one finishes it.

        Args:
            force: also deletes a step that is damaged or was never finished.

        Raises:
            CheckpointNotFound: there is no such checkpoint; with `force`, nothing of one.
            CheckpointError: it is damaged, pinned, or something reads or writes it; with `force`, one of the last two.
        """
        step = check_id(step)
        check = partial(self.directory.plan_deletion, step, force=force)
        self._on_step("delete", step, partial(self.retention.delete, step, force=force), check=check)

    def _on_step(self, what: str, step: CheckpointId, act: Callable[[], None], **check: Callable[[], Any]) -> None:
        call = f"{what} {id_text(step)}"
        if not self._on_each_disk(call, step, act, **check):
            self._from_rank0(call, act, type(None))

    @takes_no_save
    def clean(self, *, dry_run: bool = False) -> CleanReport:
        """Deletes checkpoints that no policy keeps and files that crashed saves left; runs after each save, too.

        Returns:
            What is kept and why, what was removed and why, and what could not be removed.
        """
        disks = self._disks("clean")
        if disks is None:
            return self._from_rank0("clean", partial(self.retention.clean_now, dry_run=dry_run), CleanReport)

        def clean() -> list[CleanReport]:
            return [self.retention.clean_now(dry_run=dry_run, disks=disks)] if disks.leads else []

        reports = all_gather(self._comm, f"{self.directory.url} clean: act", clean, list[CleanReport])
        return disks.merged({rank: report for rank, found in enumerate(reports) for report in found})

    # ending --------------------------------------------------------------------------------------------------

    def save_on_signal(
        self, signals: Iterable[int] = (SIGTERM,), *, exit: int | None = None, rank_timeout: float = HEARTBEAT_TIMEOUT
    ) -> None:
        """Saves after a signal that ends the process: on all ranks at the same step, within two steps of the signal.

        Call it before the data loader starts its workers, which then outlive the signal, although launchers send it to
        them too. Where they die of it and their error breaks the loop, leaving the manager's body saves the last step,
        on several ranks if all leave it, from the objects that `resume` got or what `step` was called with: if no
        optimizer has begun another step since, and no values are in the `extra` or `loader` that `resume` got, which
        are not known to be those of the step.

        The handler only sets a flag. `should_save` and `step` then return the same on every rank, whichever rank got
        the signal; `stopping` tells the training loop to end. torchrun kills ranks that have not ended 30 s after the
        signal, unless its `--shutdown-timeout` says another time: two steps and the save have to fit in it.

        Args:
            signals: `()` listens for `request_save` alone, and may be called in any thread.
            exit: the exit code with which `save` ends the process, on every rank, once that checkpoint is durable; None
                leaves that to the caller.
            rank_timeout: after the signal, waits for a rank end when it has sent no heartbeat for so many seconds.

        Raises:
            TreeckptError: not called in the main thread.
        """
        self._exit = exit
        self.schedule.listen(signals, rank_timeout)

    def request_save(self) -> None:
        """Has all ranks save, at the same step within two steps, where signals cannot be caught, as in workers of Ray.

        It is called on any rank, in any thread. It only sets a flag: `should_save` and `step` then return the same on
        every rank. The training goes on after that save: `stopping` stays as it is. Several ranks have to listen, by
        `save_on_signal(())` before their loops, or by an interval in seconds.

        Raises:
            TreeckptError: there are other ranks, and they do not listen.
        """
        self.schedule.request()

    @takes_no_save
    def close(self, timeout: float | None = None) -> None:
        """Waits for the pending saves, as `wait` does, restores the signal handlers, and marks the run as finished."""
        try:
            self.wait(timeout)
            self._end.write(self.schedule.signum, stopping=self.stopping)
        finally:
            self.schedule.close()
            self._loop.close()
            # `wait` does not come to the clean-up where a save has failed.
            if timeout is None:
                self.retention.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.error = error
        if isinstance(error, Exception):  # it matters more than errors of the saves; other ranks may be gone
            if self.schedule.signum and not self.stopping and is_of_workers(error):
                self._save_broken_loop()
            self.schedule.close(error)
            self._loop.close()
            self._pending.drain(WAIT_AFTER_ERROR)
            self.retention.wait()
            self._end.write(self.schedule.signum, stopping=self.stopping)
        else:
            self.close()

    def _save_broken_loop(self) -> None:
        """Makes the last save of a loop whose error the signal has caused; logs why where it cannot.

        Raises:
            SystemExit: as `save`.
        """
        url, self.schedule.stopping = self.directory.url, True
        try:
            tree = self._loop.last_tree()
            step = check_step(self._loop.step)
            if step != self._reached:
                self.save(step, tree)
            self._pending.settle()
            _log.warning("%s: the signal ended workers of the data loader: step %d was saved", url, step)
        except Exception as why:
            self.schedule.stopping = False
            _log.error("%s: the signal ended workers of the data loader; no last save: %s", url, why)

    def _from_all_disks(self, what: str, call: Callable[[], Any], kind: Any) -> Any:
        return from_all_disks(self._comm, self._selector, f"{self.directory.url} {what}", call, kind, call=what)

    def _from_rank0(self, what: str, call: Callable[[], Any], kind: Any) -> Any:
        return from_rank0(self._comm, f"{self.directory.url} {what}", call, kind, call=what)
