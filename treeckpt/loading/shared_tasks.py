"""Carries out one list of reads on several ranks: each range is read by one of them and sent to the others."""

from __future__ import annotations

import collections
import contextlib
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ..errors import RankError
from ..io.storage.checkpoint import ShardReader
from ..threads import make_call, start_thread
from .read_request import memory_at
from .read_tasks import ReadTask, buffers_for, read_each


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


class SharedTasks:
    """One list of reads that several ranks carry out together: each reads some, and sends them to the others.

    A thread reads and sends, several ranges at once, and this one receives, in order. The first range of the list that
    is not read yet is in flight at its owner, and every other rank is ready to receive it, so no rank waits for ever.

    Args:
        group: of all ranks, in which ranges are sent.
        rank: this one.
        members: the ranks that have this list.
        memory: bytes of buffers, half of them for what is received.
        fault: the first failure: after it this rank only reports it to the others.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        reader: ShardReader,
        members: Sequence[int],
        *,
        memory: int,
        written: list[ReadTask],
        fault: Exception | None,
    ) -> None:
        self._group, self._rank, self._reader, self._members = group, rank, reader, members
        self._memory, self._written, self.fault = memory // 2, written, fault

    def run(self, tasks: Sequence[ReadTask]) -> Exception | None:
        """Carries out the reads; returns the first failure."""
        members = self._members
        owners = [members[number % len(members)] for number in range(len(tasks))]
        mine = [number for number, owner in enumerate(owners) if owner == self._rank]
        sent: Future[None] = Future()
        if start_thread(partial(make_call, sent, partial(self._read_and_send, tasks, mine)), "treeckpt-send"):
            try:
                self._receive([(n, owner, tasks[n]) for n, owner in enumerate(owners) if owner != self._rank])
            finally:
                wait([sent])
            sent.result()
            return self.fault
        for number, owner in enumerate(owners):  # in one order on all ranks: none waits for one that waits for it
            if owner == self._rank:
                self._read_and_send(tasks, [number])
            else:
                self._receive([(number, owner, tasks[number])])
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
            if rank != self._rank:
                with self._reaching(rank):
                    sent += [(rank, dist.isend(part, rank, self._group, tag)) for tag, part in messages]
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
            receipt.works += [dist.irecv(data, owner, self._group, tag) for tag, data in messages]
        return receipt

    def _finish(self, receipt: _Receipt, buffers: queue.Queue[memoryview]) -> None:
        """Waits for a range, and writes it to its destinations."""
        with self._reaching(receipt.owner):
            for work in receipt.works:
                work.wait()
        if receipt.failed.item() and self.fault is None:
            self.fault = failed_elsewhere(
                {receipt.owner: "failed to read what it was to hand on; its own error says why"}
            )
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
            self.fault = self.fault or unreachable(error, rank)


def failed_elsewhere(faults: dict[int, str]) -> RankError:
    """Returns the error for failures of other ranks, told by rank."""
    return RankError(
        "ranks",
        ranks=faults,
        expected="every rank to load",
        hint="Mend what ended the load there; read='once' needs all ranks of a host",
    )


def unreachable(error: RuntimeError, rank: int = -1) -> RankError:
    """Returns the error where torch.distributed fails; `rank` is the one that was to answer, if it is known."""
    where = {rank: f"does not answer: {error!s:.200}"} if rank >= 0 else {}
    return RankError(
        "ranks",
        ranks=where,
        expected="torch.distributed to carry what one rank reads to the others",
        found=f"{error!s:.200}",
        hint="Look at what ended the other ranks",
    )
