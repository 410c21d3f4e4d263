"""Reads once per host what several ranks want: each rank reads a part and sends it to the others.

Ranks first exchange digests of what they want. What several ranks of one host want is read by one of them in turn,
verified, and sent to the others over torch.distributed, in a gloo group of its own. All ranks go through the same list
of reads in the same order, a few in flight at once, so there is no circular wait. A rank that fails goes on through the
list and reports the failure with each read that it should have sent: then all raise, and none waits forever.

Unlike the rest of treeckpt this is collective: every rank has to call the load.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import queue
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from ..errors import CheckpointError, CheckpointNotFound, RankError
from ..io.comm.comm import Comm
from ..io.comm.waiting import log_if_slow
from ..io.storage.checkpoint import Checkpoint, Replaced, ShardReader
from .read_request import BoxDestination, ReadRequest
from .read_tasks import ReadTask, buffers_for, run_tasks

WINDOW = 4
"""Reads that are in flight at once."""
READERS = 2


class SharedRead:
    """The ranks of a world that share their reads, seen from one of them."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self._size = group, rank, size
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
            received = self.settle(None, (_host(), list(mine)))
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

    def settle(self, fault: Exception | None, message: Any = None) -> dict[int, Any]:
        """Waits until all ranks have come to this point; returns the message of each.

        Raises:
            Replaced: a rank failed, and what it read was replaced meanwhile; on every rank.
            RankError: others failed. Otherwise this rank's own error.
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
            dist.all_gather_object(received, (message, text, replaced), group=self.group)
        except RuntimeError as error:
            if fault is None:
                raise _lost(error) from error
            raise fault from error
        if any(replaced for _, _, replaced in received):
            raise Replaced(
                "ranks", expected="one version of the checkpoint", found="another save in its place"
            ) from fault
        if fault is not None:
            raise fault
        if faults := {rank: text for rank, (_, text, _) in enumerate(received) if text is not None}:
            raise _others(faults)
        return {rank: message for rank, (message, _, _) in enumerate(received)}

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
                    with ThreadPoolExecutor(READERS, "treeckpt-read") as pool:
                        fault = _SharedTasks(self, reader, members, pool, written, fault).run(tasks)
                    nbytes += sum(task.nbytes for task in self.owned(tasks, members))
                elif fault is None:
                    nbytes += run_tasks(reader, tasks, memory=memory, written=written)
            except Exception as error:
                fault = fault or error
        if fault is not None:
            raise fault
        return nbytes


class _Turn(msgspec.Struct):
    """A read in flight."""

    task: ReadTask
    buffer: memoryview | None
    """None where the bytes stay in the memory of the task."""
    memory: memoryview
    owner: int
    messages: list[tuple[int, Any]]
    """The bytes, and whether the owner has failed: tensors, each with the tag under which it is sent."""
    read: Future[None] | None = None
    """On the owner."""
    receipts: list[Any] = []
    """Elsewhere."""


class _SharedTasks(msgspec.Struct):
    """One list of reads that several ranks carry out together."""

    ranks: SharedRead
    reader: ShardReader
    members: Sequence[int]
    pool: ThreadPoolExecutor
    written: list[ReadTask]
    fault: Exception | None
    """The first failure: after it this rank only reports it to the others."""

    def run(self, tasks: Sequence[ReadTask]) -> Exception | None:
        """Carries out the reads, a few at a time; returns the first failure."""
        buffers = buffers_for(tasks, WINDOW)
        under_way: collections.deque[_Turn] = collections.deque()
        for number, task in enumerate(tasks):
            if number >= WINDOW:
                self._finish(under_way.popleft(), buffers)
            under_way.append(self._start(number, task, buffers.get() if task.out is None else None))
        for turn in under_way:
            self._finish(turn, buffers)
        return self.fault

    def _start(self, number: int, task: ReadTask, buffer: memoryview | None) -> _Turn:
        """Starts to read a range, or to receive it."""
        import torch
        import torch.distributed as dist

        memory = task.out if buffer is None else buffer[: task.nbytes]
        assert memory is not None, "one of the two"
        messages = [(number * 2, torch.frombuffer(memory, dtype=torch.uint8)), (number * 2 + 1, torch.zeros(1))]
        turn = _Turn(task, buffer, memory, self.members[number % len(self.members)], messages)
        if turn.owner != self.ranks.rank:
            with self._reaching(turn.owner):
                turn.receipts = [dist.irecv(data, turn.owner, self.ranks.group, tag) for tag, data in messages]
        elif self.fault is None:
            turn.read = self.pool.submit(self.reader.read, task.byte_range, memory, shared=task.shared)
        return turn

    def _finish(self, turn: _Turn, buffers: queue.Queue[memoryview]) -> None:
        """Waits for a range, sends it to the others if this rank read it, and writes it to its destinations."""
        sent: list[tuple[int, Any]] = []
        if turn.owner == self.ranks.rank:
            sent = self._send(turn)
        else:
            with self._reaching(turn.owner):
                for work in turn.receipts:
                    work.wait()
            if turn.messages[1][1].item() and self.fault is None:
                self.fault = _others({turn.owner: "failed to read what it was to hand on; its own error says why"})
        if self.fault is None:
            try:
                turn.task.write(turn.memory, self.written)
            except Exception as error:
                self.fault = error
        for rank, work in sent:
            with self._reaching(rank):
                work.wait()
        if turn.buffer is not None:
            buffers.put(turn.buffer)

    def _send(self, turn: _Turn) -> list[tuple[int, Any]]:
        """Starts to send a range to the other members; returns what to wait for, by rank."""
        import torch.distributed as dist

        try:
            if turn.read is not None:
                turn.read.result()
        except Exception as error:
            self.fault = self.fault or error
        turn.messages[1][1].fill_(self.fault is not None)
        sent: list[tuple[int, Any]] = []
        for rank in self.members:
            if rank != self.ranks.rank:
                with self._reaching(rank):
                    sent += [(rank, dist.isend(data, rank, self.ranks.group, tag)) for tag, data in turn.messages]
        return sent

    @contextlib.contextmanager
    def _reaching(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.fault = self.fault or _lost(error, rank)


def _others(faults: dict[int, str]) -> RankError:
    return RankError(
        "ranks",
        ranks=faults,
        expected="every rank to load",
        hint="Mend what ended the load there; read='once' needs all ranks of a host",
    )


def _lost(error: RuntimeError, rank: int = -1) -> RankError:
    where = {rank: f"does not answer: {error!s:.200}"} if rank >= 0 else {}
    return RankError(
        "ranks",
        ranks=where,
        expected="torch.distributed to carry what one rank reads to the others",
        found=f"{error!s:.200}",
        hint="Look at what ended the other ranks",
    )


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


@contextlib.contextmanager
def together(relay: SharedRead | None) -> Iterator[None]:
    """Runs a body that each rank runs alone; at its end every rank learns whether it failed anywhere.

    Raises:
        RankError: it failed on another rank.
    """
    try:
        yield
    except Exception as error:
        if relay is not None:
            relay.settle(error)
        raise
    if relay is not None:
        relay.settle(None)


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


def _new_group(comm: Comm) -> Any:
    try:
        import torch.distributed as dist
    except ImportError:
        dist = None
    found = dist.get_world_size() if dist is not None and dist.is_available() and dist.is_initialized() else 1
    if dist is None or found != comm.size:
        raise CheckpointError(
            "read",
            expected=f"torch.distributed with the {comm.size} ranks of this load, for read='once'",
            found=f"a default group of {found}",
            hint="Initialise torch.distributed with these ranks, or load with read='each'",
        )
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=comm.timeout))
