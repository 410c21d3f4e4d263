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
same. The newest checkpoint is the one saved last: after a rollback, one saved since then (`core.format.lineage`). `run`
deletes, by the policies of `core.analysis.retention_policy`; `schedule` decides which steps are due.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from signal import SIGTERM
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import msgspec

from .. import api
from ..core.format.file_names import check_step
from ..errors import TreeckptError
from ..io.comm.collective import from_rank0
from ..io.comm.comm import PrefixComm, as_comm
from ..io.comm.termination import HEARTBEAT_TIMEOUT
from ..io.public_calls import saves, takes_no_save
from ..io.storage.run_store import RunStore
from ..reports import SaveReport
from ..saving.background import save_async_tree
from ..saving.future import Pending
from ..saving.options import check_metadata
from ..saving.save import save_tree
from ..saving.sidecar_files import SidecarContent
from .broken_loop import LoopState, is_of_workers
from .checkpoint_info import step_info
from .history import SaveHistory
from .index_summary import METRICS
from .notebook import run_html
from .options import (
    BackgroundSaveKeywords,
    Keep,
    as_policies,
    as_save_options,
    best_policy,
    check_no_other_metrics,
    is_factory,
    parse_metrics,
)
from .pending_saves import PendingSaves, RetentionRunner
from .registered_state import RegisteredState, RegistrationMixin
from .restore import RestoreMixin, Restorer
from .run import GRACE, CleanReport, RunDirectory
from .schedule import SaveSchedule
from .select import CheckpointSelector

_log = logging.getLogger("treeckpt")
WAIT_AFTER_ERROR = 10.0
"""Seconds that leaving a manager's body with an error waits for saves in flight."""


class Manager(RegistrationMixin, RestoreMixin):
    """Saves, keeps and restores the checkpoints of a run. Create one on every rank.

    >>> with tc.Manager("job", keep=[tc.policy.Last(2), tc.policy.Best("loss")], background=False) as manager:
    ...     for step, loss in ((10, 0.5), (20, 0.7), (30, 0.6), (40, 0.8)):
    ...         report = manager.save(step, model.state_dict(), metrics={"loss": loss})
    >>> manager.steps(), manager.latest(), manager.best("loss")
    ([10, 30, 40], 40, 10)

    Args:
        run: a directory, or a URL (`s3://bucket/run`); checkpoints are its subdirectories `step_00000100`. Nothing
            else in it is ever touched.
        keep: a policy or several of `treeckpt.policy`, or their text, as "last:3 best:loss"; a number is
            `Last(number)`, None keeps everything. By default the last 3 of all in `run` stay, whoever saved them. The
            newest, pinned and known damaged checkpoints are always kept. What is deleted is logged (INFO, `treeckpt`).
        every: steps between saves.
        seconds: seconds between saves, by rank 0's clock; a step is due by either interval.
        background: saves with `save_async`: `save` returns as soon as the tree may change.
        grace: seconds for which files of a save that never finished are kept.
        comm: which ranks save, same as for `treeckpt.save`; "alone" manages the saves of this process only.
        follow_links: reads links out of a local run, of files and in place of steps; their targets never change.
        options: those of `treeckpt.save`, and of `treeckpt.save_async` with `background`. A step that is saved again
            replaces the earlier one, which stays valid until then; `overwrite=False` refuses it. Without either, a
            warning names the first step that is saved at or below one that this manager neither saved nor restored.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunStore,
        *,
        keep: Keep = 3,
        every: int | None = None,
        seconds: float | None = None,
        background: bool = True,
        grace: float = GRACE,
        comm: api.AnyComm = None,
        follow_links: bool = False,
        **options: Unpack[BackgroundSaveKeywords],
    ) -> None:
        others = Manager.__init__.__kwdefaults__ or ()
        self._background, self.options = background, as_save_options(options, background=background, others=others)
        self.directory, self._policies = RunDirectory(run, follow_links=follow_links), as_policies(keep)
        self._selector = CheckpointSelector(self.directory)
        self._saving_comm = as_comm(comm)
        self._comm = PrefixComm(self._saving_comm, "manager")
        self._registered = RegisteredState()
        self._history = SaveHistory(
            self.directory, self._selector.warn_once, self._comm.rank, replaces=options.get("overwrite", False)
        )
        self._restorer = Restorer(self.directory, self._selector, self._comm, self._saving_comm, self._history)
        self.schedule = SaveSchedule(self._saving_comm, every=every, seconds=seconds)
        self._pending = PendingSaves(self._start_clean)
        self.retention = RetentionRunner(self.directory, self._policies, self._selector, self._pending, grace=grace)
        self._exit: int | None = None
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
        step: int,
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
        step = check_step(step)
        named, custom = {} if metrics is None else {METRICS: parse_metrics(metrics)}, check_metadata(custom_metadata)
        check_no_other_metrics(custom, named)
        metadata = {**custom, **(named if self._comm.rank == 0 else {})}
        if self.stopping:
            self._pending.drain()  # an earlier failure must not prevent the last save
        elif self.options.busy == "wait":
            self._pending.settle()
        self._loop.note_saved(tree)
        with self._pending.starting(step):
            result = self._save(step, self._registered.joined(tree), metadata, files, pin=pin)
        if isinstance(result, SaveReport):
            self._start_clean()
            self.retention.wait()
        self.count = step
        if isinstance(result, Pending) and result.skipped:
            return result
        self._reached = step
        self.schedule.restart()
        if self.stopping and self._exit is not None:
            self.close()
            raise SystemExit(self._exit)
        return result

    def _save(
        self, step: int, tree: Any, metadata: Mapping[str, Any], files: Any, *, pin: bool
    ) -> SaveReport | Pending:
        options = msgspec.structs.replace(self.options, step=step)
        # before the save, so that no clean-up removes the step in between
        pinned = pin and self._from_rank0(f"pin step {step}", partial(self.directory.put_pin, step), bool)
        unpin = partial(self._undo_pin, step, pinned)
        store, save = self.directory.folder(step), save_async_tree if self._background else save_tree
        try:
            lineage = self._history.next_save(step, pin=pin)
            result = save(store, tree, self._saving_comm, options, metadata, lineage, files)
        except BaseException:
            unpin()
            self._start_clean()  # the disk may be full of checkpoints that no policy keeps
            raise
        if isinstance(result, Pending) and result.skipped:
            unpin()
        elif isinstance(result, Pending):
            self._pending.add(step, result, unpin)
        return result

    def _undo_pin(self, step: int, pinned: bool) -> None:
        """Removes the pin of a save that has failed."""
        if pinned and self._comm.rank == 0:
            with contextlib.suppress(TreeckptError):
                self.directory.take_pin_back(step)

    def _start_clean(self) -> None:
        if self._comm.rank == 0:
            self.retention.start()

    @takes_no_save
    def wait(self, timeout: float | None = None) -> None:
        """Waits until everything that was saved is durable, and the clean-up after it is done.

        Args:
            timeout: seconds to wait at most for the saves, and again for the clean-up.

        Raises:
            The error of a save that failed; CheckpointError, which names the lost steps, if one has not ended in time.
        """
        self._pending.settle(timeout)
        self.retention.wait(timeout)

    # listing --------------------------------------------------------------------------------------------------

    @takes_no_save
    def latest(self, *, verify: bool = False) -> int | None:
        """Returns the newest step that can be restored: the one saved last, not the highest. None if there is none.

        Checkpoints that are skipped are logged. After a rollback the abandoned branch comes last.

        Args:
            verify: reads everything and compares checksums; otherwise the index and the sizes of files are checked.

        Raises:
            CheckpointNotFound: the manager was given the path of one checkpoint in the place of its run.
        """
        return self._from_rank0("latest", partial(self._newest_step, verify), int | None)

    def _newest_step(self, verify: bool) -> int | None:
        found = self._selector.newest(verify=verify, busy=self._pending.busy())
        return step_info(found).step if found is not None else None

    @takes_no_save
    def best(self, metric: str | None = None, *, mode: Literal["min", "max"] | None = None) -> int | None:
        """Returns the step with the best metric; None if no checkpoint has it, with a logged list of those there are.

        Args:
            metric: by default the metric of the first `Best` policy.
            mode: by default the mode of the policy with this metric, otherwise "min".
        """
        policy = best_policy(self._policies, metric, mode)
        return self._from_rank0(f"best {policy.metric}", partial(self._selector.best, policy), int | None)

    @takes_no_save
    def steps(self) -> list[int]:
        """Returns the steps that can be restored, in rising order."""
        return self._from_rank0("steps", self._complete_steps, list[int])

    def _complete_steps(self) -> list[int]:
        return sorted(step_info(info).step for info in self._selector.complete())

    def path(self, step: int) -> str:
        """Returns the path or URL of a step, whether or not it is saved."""
        return self.directory.folder(step).url

    # keeping -------------------------------------------------------------------------------------------------

    @takes_no_save
    def pin(self, step: int) -> None:
        """Keeps a step until it is unpinned.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        step = check_step(step)
        self._from_rank0(f"pin step {step}", partial(self.directory.pin, step), type(None))

    @takes_no_save
    def unpin(self, step: int) -> None:
        """Lets the policies decide about a step again.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        step = check_step(step)
        self._from_rank0(f"unpin step {step}", partial(self.directory.unpin, step), type(None))

    @takes_no_save
    def delete(self, step: int, *, force: bool = False) -> None:
        """Deletes a step whatever the policies say, as the clean-up does: killed on the way, the next one finishes it.

        Args:
            force: also deletes a step that is corrupt or was never finished.

        Raises:
            CheckpointNotFound: there is no such checkpoint; with `force`, nothing of one.
            CheckpointError: it is corrupt, pinned, or something reads or writes it; with `force`, one of the last two.
        """
        step = check_step(step)
        self._from_rank0(f"delete step {step}", partial(self.retention.delete, step, force=force), type(None))

    @takes_no_save
    def clean(self, *, dry_run: bool = False) -> CleanReport:
        """Deletes checkpoints that no policy keeps and files that crashed saves left; runs after each save, too.

        Returns:
            What is kept and why, what was removed and why, and what could not be removed.
        """
        return self._from_rank0("clean", partial(self.retention.clean_now, dry_run=dry_run), CleanReport)

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
            exit: the exit code with which `save` ends the process, on every rank, once that checkpoint is durable; None
                leaves that to the caller.
            rank_timeout: after the signal, waits for a rank end when it has sent no heartbeat for so many seconds.

        Raises:
            TreeckptError: not called in the main thread.
        """
        self._exit = exit
        self.schedule.listen(signals, rank_timeout)

    @takes_no_save
    def close(self, timeout: float | None = None) -> None:
        """Waits for the pending saves, as `wait` does, and restores the signal handlers."""
        try:
            self.wait(timeout)
        finally:
            self.schedule.close()
            self._loop.close()
            if timeout is None:
                self.retention.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # it matters more than errors of the saves; other ranks may be gone
            if self.schedule.signum and not self.stopping and is_of_workers(error):
                self._save_broken_loop()
            self.schedule.close(error)
            self._loop.close()
            self._pending.drain(WAIT_AFTER_ERROR)
            self.retention.wait()
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

    def _from_rank0(self, what: str, call: Callable[[], Any], kind: Any) -> Any:
        return from_rank0(self._comm, f"{self.directory.url} {what}", call, kind, call=what)
