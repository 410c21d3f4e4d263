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
import queue
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from ..errors import CheckpointError, CheckpointNotFound, RankError
from ..io.comm.comm import Comm
from ..io.comm.waiting import log_if_slow
from ..io.storage.checkpoint import Checkpoint, Replaced, ShardReader
from .read_request import BoxDestination, ReadRequest, memory_at
from .read_tasks import ReadTask, buffers_for, read_each, run_tasks


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
                    shared = _SharedTasks(self, reader, members, memory=memory, written=written, fault=fault)
                    fault = shared.run(tasks)
                    nbytes += sum(task.nbytes for task in self.owned(tasks, members))
                elif fault is None:
                    nbytes += run_tasks(reader, tasks, memory=memory, written=written)
            except Exception as error:
                fault = fault or error
        if fault is not None:
            raise fault
        return nbytes


class _Receipt(msgspec.Struct):
    """A range that is being received."""

    task: ReadTask
    buffer: memoryview | None
    """None where the bytes stay in the memory of the task."""
    memory: memoryview
    owner: int
    failed: Any
    """A tensor with one number: not 0 where the owner has failed, and the bytes mean nothing."""
    works: list[Any]
    """What to wait for."""


class _SharedTasks:
    """One list of reads that several ranks carry out together: each reads some, and sends them to the others.

    A thread reads and sends, several ranges at once, and this one receives, in order. The first range of the list that
    is not read yet is in flight at its owner, and every other rank is ready to receive it, so no rank waits for ever.

    Args:
        memory: bytes of buffers, half of them for what is received.
        fault: the first failure: after it this rank only reports it to the others.
    """

    def __init__(
        self,
        ranks: SharedRead,
        reader: ShardReader,
        members: Sequence[int],
        *,
        memory: int,
        written: list[ReadTask],
        fault: Exception | None,
    ) -> None:
        self._ranks, self._reader, self._members = ranks, reader, members
        self._memory, self._written, self.fault = memory // 2, written, fault

    def run(self, tasks: Sequence[ReadTask]) -> Exception | None:
        """Carries out the reads; returns the first failure."""
        members = self._members
        owners = [members[number % len(members)] for number in range(len(tasks))]
        mine = [number for number, owner in enumerate(owners) if owner == self._ranks.rank]
        with ThreadPoolExecutor(1, "treeckpt-send") as pool:
            sending = pool.submit(self._read_and_send, tasks, mine)
            self._receive([(n, owner, tasks[n]) for n, owner in enumerate(owners) if owner != self._ranks.rank])
            sending.result()
        return self.fault

    def _read_and_send(self, tasks: Sequence[ReadTask], mine: Sequence[int]) -> None:
        """Reads the tasks with these numbers, and sends each to the others; after a failure sends that instead."""
        left = dict.fromkeys(mine)

        def put(at: int, data: memoryview) -> None:
            if self.fault is not None:
                raise self.fault
            number = mine[at]
            del left[number]
            with self._sending(number, data, failed=False):
                tasks[number].take(data, self._written)

        try:
            if self.fault is None:
                read_each(self._reader, [tasks[number] for number in mine], put, memory=self._memory)
        except Exception as error:
            self.fault = self.fault or error
        nothing = memoryview(bytearray(max((tasks[number].nbytes for number in left), default=0)))
        for number in left:
            with self._sending(number, nothing[: tasks[number].nbytes], failed=True):
                pass

    @contextlib.contextmanager
    def _sending(self, number: int, data: memoryview, *, failed: bool) -> Iterator[None]:
        """Sends a range to the other members while the body runs."""
        import torch
        import torch.distributed as dist

        bytes_ = torch.frombuffer(memory_at(np.frombuffer(data, np.uint8).ctypes.data, len(data)), dtype=torch.uint8)
        messages = [(number * 2, bytes_), (number * 2 + 1, torch.full((1,), float(failed)))]
        sent: list[tuple[int, Any]] = []
        for rank in self._members:
            if rank != self._ranks.rank:
                with self._reaching(rank):
                    sent += [(rank, dist.isend(part, rank, self._ranks.group, tag)) for tag, part in messages]
        try:
            yield
        finally:
            for rank, work in sent:
                with self._reaching(rank):
                    work.wait()

    def _receive(self, expected: Sequence[tuple[int, int, ReadTask]]) -> None:
        """Receives ranges, a few at a time, and writes each to its destinations.

        Args:
            expected: number, owner and task of each.
        """
        largest = max((task.nbytes for *_, task in expected), default=1)
        window = max(self._memory // largest, 1)
        buffers = buffers_for([task for *_, task in expected], min(window, len(expected)))
        under_way: collections.deque[_Receipt] = collections.deque()
        for number, owner, task in expected:
            if len(under_way) >= window:
                self._finish(under_way.popleft(), buffers)
            under_way.append(self._start(number, owner, task, buffers.get() if task.out is None else None))
        for receipt in under_way:
            self._finish(receipt, buffers)

    def _start(self, number: int, owner: int, task: ReadTask, buffer: memoryview | None) -> _Receipt:
        """Starts to receive a range."""
        import torch
        import torch.distributed as dist

        memory = task.out if buffer is None else buffer[: task.nbytes]
        assert memory is not None, "one of the two"
        failed = torch.zeros(1)
        receipt = _Receipt(task, buffer, memory, owner, failed, [])
        messages = [(number * 2, torch.frombuffer(memory, dtype=torch.uint8)), (number * 2 + 1, failed)]
        with self._reaching(owner):
            receipt.works += [dist.irecv(data, owner, self._ranks.group, tag) for tag, data in messages]
        return receipt

    def _finish(self, receipt: _Receipt, buffers: queue.Queue[memoryview]) -> None:
        """Waits for a range, and writes it to its destinations."""
        with self._reaching(receipt.owner):
            for work in receipt.works:
                work.wait()
        if receipt.failed.item() and self.fault is None:
            self.fault = _others({receipt.owner: "failed to read what it was to hand on; its own error says why"})
        if self.fault is None:
            try:
                receipt.task.write(receipt.memory, self._written)
            except Exception as error:
                self.fault = error
        if receipt.buffer is not None:
            buffers.put(receipt.buffer)

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
