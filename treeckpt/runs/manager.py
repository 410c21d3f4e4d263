"""Which checkpoint of a run to resume from, when to make the next, and which to keep: `Manager` decides for all ranks.

    with tc.Manager("run", keep=[Last(3), Best("loss")], every=1000) as manager:
        manager.save_on_signal()
        if manager.latest() is not None:
            state = manager.restore(like=state)
        for step in range(manager.count + 1, last + 1):
            state, loss = train(state)
            if manager.should_save(step):
                manager.save(step, state, metrics={"loss": loss})

Every method is called on every rank, in the same order. Rank 0 alone looks at the disk and deletes; the others get its
answer over the comm, without collectives. Nothing is decided from memory: metrics stand in the checkpoint's custom
metadata, pins are files, and every index records which save it follows, so a restart, or a second manager, decides
alike. The newest is what was saved last: after a rollback, what was saved since (`core.format.lineage`). What is
deleted, and how, `run` says; the policies are `core.analysis.retention_policy`'s; when a step is due, `pacing` decides.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from signal import SIGTERM
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from .. import api
from ..core.analysis.retention_policy import Policy
from ..core.format.file_names import check_step
from ..errors import TreeckptError
from ..io.comm.channel import Channel
from ..io.comm.collective import from_rank0
from ..io.comm.comm import as_comm
from ..io.comm.waiting import LIMIT
from ..io.storage.reader_leases import hold_lease
from ..io.storage.run_store import RunStore
from ..io.storage.store import Store
from ..reports import SaveReport
from ..saving.background import save_async_tree
from ..saving.future import Pending
from ..saving.options import SaveOptions, shard_limit
from ..saving.save import save_tree
from .catalog import METRICS
from .history import SaveHistory
from .notebook import run_html
from .options import best_policy, check_options, is_maker, numbers_of, policies_of
from .pending_saves import PendingSaves, RetentionRunner
from .registered_state import RegisteredState, RegistrationMixin
from .restore import Restorer
from .run import GRACE, CleanReport, RunDirectory, step_info
from .schedule import SaveSchedule
from .select import CheckpointSelector

__all__ = ["Manager"]

AFTER_ERROR = 10.0
"""Seconds that leaving a manager's body with an error waits for saves in flight."""


class Manager(RegistrationMixin):
    """Saves, keeps and restores the checkpoints of a run. Make one on every rank.

    Args:
        run: a directory, or a URL (`s3://bucket/run`); checkpoints are its subdirectories `step_00000100`. Nothing
            else in it is ever touched.
        keep: a policy or several of `treeckpt.policy`; a number is `Last(number)`, None keeps everything. The newest
            and the pinned stay in any case.
        every: steps between saves.
        seconds: between saves, by rank 0's clock; saves are due by either.
        background: saves with `save_async`: `save` returns as soon as the tree may change.
        grace: seconds for which files of a save that never finished are left alone.
        comm: how ranks talk, as for `treeckpt.save`; "alone" is a manager of this process only.
        options: of `treeckpt.save`, and of `treeckpt.save_async` with `background`. A step that is saved again
            replaces the earlier one, which stays valid until then; `overwrite=False` refuses it.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunStore,
        *,
        keep: Policy | Sequence[Policy] | int | None = 3,
        every: int | None = None,
        seconds: float | None = None,
        background: bool = True,
        grace: float = GRACE,
        comm: api.AnyComm = None,
        **options: Any,
    ) -> None:
        check_options(options, background=background)
        self._run, self._policies = RunDirectory(run), policies_of(keep)
        self._finder = CheckpointSelector(self._run)
        self._saving_comm = as_comm(comm)
        self._comm = Channel(self._saving_comm, "manager")
        self._registered = RegisteredState()
        self._history = SaveHistory(self._run, self._finder.say, self._comm.rank)
        self._restorer = Restorer(
            self._run, self._finder, self._comm, self._saving_comm, self._registered, self._history
        )
        self._pace = SaveSchedule(self._saving_comm, every=every, seconds=seconds)
        limit = shard_limit(options.get("max_shard_bytes"))
        self._background = background
        self._options = SaveOptions(**{"overwrite": True, **options, "max_shard_bytes": limit})
        self._flights = PendingSaves(self._sweep)
        self._sweeper = RetentionRunner(self._run, self._policies, self._finder, self._flights, grace=grace)
        self._exit: int | None = None
        self._reached: int | None = None
        self.count = 0
        """The step that was counted, saved or restored last."""

    def __repr__(self) -> str:
        comm = self._saving_comm
        return f"Manager({self._run.url!r}, keep={list(self._policies)!r}, rank {comm.rank} of {comm.size})"

    def _repr_html_(self) -> str:
        return run_html(self._run.store, repr(self))

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked to save: after that save, end the training."""
        return self._pace.stopping

    # saving --------------------------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether this step is to be saved. Call it once a step, on every rank; it is the same on all of them."""
        step = check_step(step)
        self._flights.collect()
        return self._pace.due(step) and (step != self._reached or self.stopping)

    def step(
        self, tree: Any | Callable[[], Any] = ..., *, metrics: Mapping[str, float] | None = None
    ) -> SaveReport | Pending | None:
        """Counts a step, from the one that was restored, and saves it if it is due.

        Args:
            tree: or a function that gives it, called only then; left out, what is registered is saved alone.

        Returns:
            What `save` returns; None where nothing was due.
        """
        self.count += 1
        if not self.should_save(self.count):
            return None
        return self.save(self.count, tree() if is_maker(tree) else tree, metrics=metrics)

    def save(
        self,
        step: int,
        tree: Any = ...,
        *,
        metrics: Mapping[str, float] | None = None,
        pin: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> SaveReport | Pending:
        """Saves a tree as this step, and cleans up when it is committed.

        It follows what was restored or saved last, or of its ancestors the newest with a step below this one.

        Args:
            tree: a dict, if anything is registered, which is saved beside it; left out, that is saved alone.
            metrics: numbers by which `Best` and `best` choose; those of rank 0 count.
            pin: keeps the checkpoint until it is unpinned.

        Returns:
            The `SaveReport`, or with `background` the `Pending`.

        Raises:
            As `treeckpt.save`; with `background` also what the save before came to.
            SystemExit: after a signal, if `save_on_signal` was told to exit.
        """
        step = check_step(step)
        named = {} if metrics is None else {METRICS: numbers_of(metrics)}
        metadata = {**(custom_metadata or {}), **(named if self._comm.rank == 0 else {})}
        if self.stopping:
            self._flights.drain()  # the last save is neither skipped nor held up by what went wrong before
        elif self._options.busy == "wait":
            self._flights.settle()
        with self._flights.starting(step):
            result = self._save(step, self._registered.joined(tree), metadata, pin=pin)
        if isinstance(result, SaveReport):
            self._sweep()
            self._sweeper.wait()
        self.count = step
        if isinstance(result, Pending) and result.skipped:
            return result
        self._reached = step
        self._pace.restart()
        if self.stopping and self._exit is not None:
            self.close()
            raise SystemExit(self._exit)
        return result

    def _save(self, step: int, tree: Any, metadata: Mapping[str, Any], *, pin: bool) -> SaveReport | Pending:
        options = msgspec.structs.replace(self._options, step=step)
        # before the save, so that no clean-up comes in between
        pinned = pin and self._ask(f"pin step {step}", lambda: self._run.put_pin(step), bool)

        def unpin() -> None:
            if pinned and self._comm.rank == 0:
                with contextlib.suppress(TreeckptError):
                    self._run.take_pin_back(step)

        store, save = self._run.folder(step).store, save_async_tree if self._background else save_tree
        try:
            lineage = self._history.next_save(step)
            result = save(store, tree, self._saving_comm, options, metadata, lineage)
        except BaseException:
            unpin()
            self._sweep()  # the disk may be full of what would go
            raise
        if isinstance(result, Pending) and result.skipped:
            unpin()
        elif isinstance(result, Pending):
            self._flights.add(step, result, unpin)
        return result

    def _sweep(self) -> None:
        if self._comm.rank == 0:
            self._sweeper.start()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until everything that was saved is durable, and cleaned up after.

        Args:
            timeout: seconds to wait at most for either.

        Raises:
            What a save came to, if it failed; CheckpointError, naming what is lost, if one has not ended in time.
        """
        self._flights.settle(timeout)
        self._sweeper.wait(timeout)

    # what there is -------------------------------------------------------------------------------------------

    def latest(self, *, verify: bool = False) -> int | None:
        """The newest step that can be restored: the one saved last, not the highest. None where there is none.

        What is passed over is logged. After a rollback the abandoned branch comes last.

        Args:
            verify: reads everything and compares checksums; otherwise the index and the sizes of files are checked.
        """

        def answer() -> int | None:
            found = self._finder.newest(verify=verify, busy=self._flights.busy())
            return step_info(found).step if found is not None else None

        return self._ask("latest", answer, int | None)

    def best(self, metric: str | None = None, *, mode: Literal["min", "max"] | None = None) -> int | None:
        """The step with the best metric, None where none has it.

        Args:
            metric: by default that of the first `Best` policy.
            mode: by default that of the policy with this metric, else "min".
        """
        policy = best_policy(self._policies, metric, mode)
        return self._ask(f"best {policy.metric}", lambda: self._finder.best(policy), int | None)

    def steps(self) -> list[int]:
        """The steps that can be restored, in rising order."""
        return self._ask("steps", lambda: sorted(step_info(i).step for i in self._finder.complete()), list[int])

    def path(self, step: int) -> str:
        """Where a step is, or would be saved."""
        return self._run.folder(step).url

    # restoring -----------------------------------------------------------------------------------------------

    def restore(self, like: Any = None, *, step: int | None = None, into: Any = None, **options: Any) -> Any:
        """Loads a step; `count` and the lineage go on from it, with the next save.

        Args:
            like: as for `treeckpt.load`.
            step: by default the newest that loads: where one turns out to be corrupt on any rank, that is logged and
                all ranks take the one before and fill everything again. After an earlier one, what was saved since is
                an abandoned branch.
            into: a tree to fill in place, as `treeckpt.load_into` does, instead.
            options: of `treeckpt.load`, or `load_into`.

        Returns:
            The tree, or the `LoadReport` with `into`.

        Raises:
            CheckpointNotFound: there is nothing to restore.
            As `treeckpt.load`.
        """
        if like is not None and into is not None:
            raise TreeckptError(self._run.url, expected="one target", found="like and into")
        result, self.count = self._restorer.restore(like, into, step, options)
        self._reached = self.count
        self._pace.restart()
        return result

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[Store]:
        """Keeps a step from being deleted while the body reads it; for one process, by itself.

        Raises:
            CheckpointNotFound: it is not there, or not complete.
        """
        folder = self._run.folder(step)
        with hold_lease(folder):
            self._run.checkpoint(step)
            yield folder.store

    # keeping -------------------------------------------------------------------------------------------------

    def pin(self, step: int) -> None:
        """Keeps a step until it is unpinned.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        step = check_step(step)
        self._ask(f"pin step {step}", lambda: self._run.pin(step), type(None))

    def unpin(self, step: int) -> None:
        """Lets the policies decide about a step again.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        step = check_step(step)
        self._ask(f"unpin step {step}", lambda: self._run.unpin(step), type(None))

    def clean(self, *, dry_run: bool = False) -> CleanReport:
        """Deletes what no policy keeps and what crashed saves left behind; it happens by itself after each save.

        Returns:
            What stays and why, what was removed and why, what could not be.
        """
        return self._ask("clean", lambda: self._sweeper.sweep(dry_run=dry_run), CleanReport)

    # ending --------------------------------------------------------------------------------------------------

    def save_on_signal(
        self, signals: Iterable[int] = (SIGTERM,), *, exit: int | None = None, rank_timeout: float = LIMIT
    ) -> None:
        """Saves when the process is told to end: on all ranks at the same step, within two steps of the signal.

        The handler only sets a flag. `should_save` and `step` then say so on every rank, whichever got the signal;
        `stopping` tells the training loop to end.

        Args:
            exit: the exit code with which `save` ends the process, on every rank, once that checkpoint is durable;
                None leaves that to the caller.
            rank_timeout: seconds without an answer of another rank after which waits for it end, from the signal on.

        Raises:
            TreeckptError: not called in the main thread.
        """
        self._exit = exit
        self._pace.listen(signals, rank_timeout)

    def close(self, timeout: float | None = None) -> None:
        """Waits for the saves in flight, as `wait` does, and gives signals back."""
        try:
            self.wait(timeout)
        finally:
            self._pace.close()
            self._sweeper.close(wait=timeout is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # it matters more than what the saves come to; other ranks may be gone
            self._pace.close(error)
            self._flights.drain(AFTER_ERROR)
            self._sweeper.close()
        else:
            self.close()

    def _ask(self, what: str, answer: Callable[[], Any], kind: Any) -> Any:
        return from_rank0(self._comm, f"{self._run.url} {what}", answer, kind)
