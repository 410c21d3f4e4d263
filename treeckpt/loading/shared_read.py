"""Reads once per host what several ranks want: each rank reads a part and sends it to the others.

Ranks first exchange digests of what they want. What several ranks of one host want is read by one of them in turn,
verified, and sent to the others over torch.distributed, in a gloo group of its own. All ranks go through the same list
of reads in the same order, several in flight at once (of an object store as many as one rank alone has), so there is no
circular wait. A rank that fails goes on through the list and reports the failure with each read that it should have
sent: then all raise, and none waits forever.

Unlike the rest of treeckpt this is collective: every rank has to call the load.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import xxhash

from ..errors import CheckpointError, CheckpointNotFound
from ..io.comm.comm import Comm, members_of, world_size
from ..io.comm.waiting import log_if_slow
from ..io.storage.checkpoint import Checkpoint, Replaced, ShardReader
from ..io.storage.store import Store
from .read_request import BoxDestination, ReadRequest
from .read_tasks import ReadTask, run_tasks
from .shared_tasks import SharedTasks, failed_elsewhere, unreachable

MOST_RANKS = 1024
"""Ranks above which a load reads once only where its caller asks for it: each rank hears what every other one wants."""


class SharedRead:
    """The ranks of a world that share their reads, seen from one of them."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self._size = group, rank, size
        self._told = 0
        """The id of the error that is on its way out of `settle`; its own reference would keep the arrays of frames."""
        self.checkpoints: Sequence[Checkpoint] = ()
        """The checkpoints that are being read."""

    def agree(
        self, save_id: str, requests: Sequence[ReadRequest[Any]]
    ) -> list[tuple[tuple[int, ...], list[ReadRequest[Any]]]]:
        """Groups the requests of this rank by the ranks of the host that have them too, in an order that all use.

        Args:
            save_id: of the checkpoint; ranks that have read another version of it share nothing.
        """
        seen: collections.Counter[str] = collections.Counter()
        mine: dict[int, ReadRequest[Any]] = {}
        for request in requests:
            copy = request.destination
            shape = (copy.box, copy.chunk, copy.itemsize) if isinstance(copy, BoxDestination) else type(copy).__name__
            want = repr((request.byte_range, shape))  # equal on two ranks if the same reads serve both
            mine[xxhash.xxh3_64_intdigest(f"{save_id} {want} {seen[want]}".encode())] = request
            seen[want] += 1
        with log_if_slow(self.rank, "load with read='once'"):
            received = self.settle(None, (_host(), list(mine)), step="agreeing")
        here = {rank: digests for rank, (host, digests) in sorted(received.items()) if host == _host()}
        holders: dict[int, list[int]] = {}
        for rank, digests in here.items():
            for digest in digests:
                holders.setdefault(digest, []).append(rank)
        parts: dict[tuple[int, ...], list[ReadRequest[Any]]] = {}
        for digest, members in holders.items():  # in the order of the first rank that has them
            if digest in mine:
                parts.setdefault(tuple(members), []).append(mine[digest])
        # what is shared comes first: a rank that fails alone then leaves nobody waiting
        return sorted(parts.items(), key=lambda part: (len(part[0]) == 1, part[0]))

    def settle(self, fault: Exception | None, message: Any = None, *, step: str = "") -> dict[int, Any]:
        """Waits until all ranks have come to this point; returns the message of each.

        Args:
            step: the name of the point, where ranks may be at another one.

        Raises:
            Replaced: a rank failed, and what it read was replaced meanwhile; on every rank.
            RankError: others failed, or are at another point. Otherwise this rank's own error.
        """
        import torch.distributed as dist

        replaced = False
        if fault is not None:
            try:
                replaced = isinstance(fault, Replaced) or any(one.is_replaced() for one in self.checkpoints)
            except CheckpointNotFound as error:
                fault = error
        text = None if fault is None else f"{type(fault).__name__}: {fault}"[:2000]
        received: list[Any] = [None] * self._size
        try:
            dist.all_gather_object(received, (message, text, replaced, step), group=self.group)
        except RuntimeError as error:
            raise self._tell(fault or unreachable(error)) from error
        if any(replaced for _, _, replaced, _ in received):
            found = "another save in its place"
            raise self._tell(Replaced("ranks", expected="one version of the checkpoint", found=found)) from fault
        if fault is not None:
            raise self._tell(fault)
        if faults := {rank: text for rank, (_, text, *_) in enumerate(received) if text is not None}:
            raise self._tell(failed_elsewhere(faults))
        if len({there for *_, there in received}) > 1:
            steps = {rank: f"is at the step {there or 'read'!r}" for rank, (*_, there) in enumerate(received)}
            raise self._tell(failed_elsewhere(steps))
        return {rank: message for rank, (message, *_) in enumerate(received)}

    def _tell(self, error: Exception) -> Exception:
        """Notes that all ranks raise an error now, each its own."""
        self._told = id(error)
        return error

    @contextlib.contextmanager
    def together(self, step: str = "") -> Iterator[None]:
        """Runs a body that each rank runs alone; at its end every rank learns whether it failed anywhere.

        Bodies may be nested: what all ranks know of is not told again.

        Args:
            step: as for `settle`.

        Raises:
            RankError: it failed on another rank.
        """
        self._told = 0
        try:
            yield
        except Exception as error:
            known: BaseException | None = error
            while known is not None and id(known) != self._told:
                known = known.__cause__ or known.__context__
            if known is None:
                self.settle(error, step=step)
            raise
        self.settle(None, step=step)

    def share_index(self, checkpoint: Checkpoint) -> None:
        """Has rank 0 read the index and list the files, and send them to all other ranks. Every rank has to call.

        Raises:
            RankError: a rank failed before.
        """
        import torch.distributed as dist

        found: list[Any] = [None]
        with self.together("index"):
            if self.rank == 0:
                found = [(checkpoint.index_bytes, checkpoint.sizes)]
        try:
            dist.broadcast_object_list(found, 0, self.group)
        except RuntimeError as error:
            raise unreachable(error) from error
        checkpoint.index_bytes, checkpoint.sizes = found[0]

    def owned(self, tasks: Sequence[ReadTask], members: Sequence[int]) -> list[ReadTask]:
        """Returns the reads that this rank carries out for all members."""
        return [task for i, task in enumerate(tasks) if members[i % len(members)] == self.rank]

    def run(
        self,
        reader: ShardReader,
        work: Sequence[tuple[Sequence[int], Sequence[ReadTask]]],
        *,
        memory: int,
        written: list[ReadTask],
    ) -> int:
        """Carries out lists of reads, each together with its members, which have equal lists. Every rank has to call.

        A rank that fails goes on through the lists that it shares, so that no other rank waits for it.

        Args:
            work: the members and the reads of each list; shared lists come first.
            memory, written: as for `run_tasks`.

        Returns:
            Bytes that this rank read from data areas.

        Raises:
            RankError: another rank failed.
        """
        fault: Exception | None = None
        nbytes = 0
        for members, tasks in work:
            try:
                if len(members) > 1:
                    fault = SharedTasks(
                        self.group, self.rank, reader, members, memory=memory, written=written, fault=fault
                    ).run(tasks)
                    nbytes += sum(task.nbytes for task in self.owned(tasks, members))
                elif fault is None:
                    nbytes += run_tasks(reader, tasks, memory=memory, written=written)
            except Exception as error:
                fault = fault or error
        if fault is not None:
            raise fault
        return nbytes


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def together(relay: SharedRead | None, step: str = "") -> AbstractContextManager[None]:
    """Returns `relay.together(step)`; for None a context that does nothing."""
    return contextlib.nullcontext() if relay is None else relay.together(step)


def open_relay(comm: Comm, checkpoints: Sequence[Checkpoint], read: Literal["each", "once"]) -> SharedRead | None:
    """Returns the shared reads of a world, None for "each" and if this process is alone.

    The first call creates a group, on all ranks.

    Args:
        checkpoints: those that the next load reads.

    Raises:
        CheckpointError: the ranks are not those of torch.distributed's default group.
    """
    if read == "each" or comm.size == 1:
        return None
    relay = comm.state.get(SharedRead)
    if relay is None:
        with log_if_slow(comm.rank, "load with read='once'"):
            relay = SharedRead(_new_group(comm), comm.rank, comm.size)
        comm.state.put(relay)
    relay.checkpoints = checkpoints
    return relay


def usual_read(comm: Comm, store: Store) -> Literal["each", "once"]:
    """Returns how a load reads in which all ranks of a comm take part: "once" from an object store, where it works."""
    able = 1 < comm.size <= MOST_RANKS and members_of(comm) is None and world_size() == comm.size
    return "once" if able and store.traits.far else "each"


def _new_group(comm: Comm) -> Any:
    found = world_size()
    if found != comm.size:
        raise CheckpointError(
            "read",
            expected=f"torch.distributed with the {comm.size} ranks of this load, for read='once'",
            found=f"a default group of {max(found, 1)}",
            hint="Initialise torch.distributed with these ranks, or load with read='each'",
        )
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=comm.timeout))
