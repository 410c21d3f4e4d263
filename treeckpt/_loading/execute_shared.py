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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from .._io.comm.comm import Comm, members_of, world_size
from .._io.comm.waiting import log_if_slow
from .._io.storage.checkpoint import Checkpoint, Replaced
from .._io.storage.store import Store
from .._threads import make_call, start_thread
from ..errors import CheckpointError, CheckpointNotFound, RankError
from .execute_local import Buffers, ReadRun, put_all
from .plan import BoxDestination, ContiguousMemory, Read, address_of, memory_at, plan_reads

T = TypeVar("T")
MOST_RANKS = 1024
"""Ranks above which a load reads once only where its caller asks for it: each rank hears what every other one wants."""

JOINED_NBYTES = 64 << 10
"""Bytes of an array up to which it is read together with its neighbours, whatever ranks want these."""


class SharedRead:
    """The ranks of a world that share their reads, seen from one of them."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._services: Any = None
        self._told = 0
        """The id of the error that is on its way out of `settle`; its own reference would keep the arrays of frames."""
        self.checkpoints: Sequence[Checkpoint] = ()
        """The checkpoints that are being read."""

    def agree(self, save_id: str, wanted: Sequence[Read], size: int) -> list[tuple[tuple[int, ...], list[Read]]]:
        """Groups what this rank wants by the ranks of the host that want it too, in an order that all use.

        Reads of small arrays that exist already are joined before. Large ones stay apart until it is known which ranks
        want the same and can share the read.

        Args:
            save_id: of the checkpoint; ranks that have read another version of it share nothing.
            wanted: each with one destination.
            size: bytes of one read of small arrays, at most.
        """
        small = [
            read for read in wanted if type(read.destinations[0]) is ContiguousMemory and read.nbytes <= JOINED_NBYTES
        ]
        joined = set(map(id, small))
        wanted = [read for read in wanted if id(read) not in joined]
        wanted += plan_reads(small, {}, limit=size, size=size)
        seen: collections.Counter[str] = collections.Counter()
        mine: dict[int, Read] = {}
        for read in wanted:
            first = read.destinations[0]
            what = (
                (first.box, first.chunk, first.itemsize) if isinstance(first, BoxDestination) else type(first).__name__
            )
            # equal on two ranks if the same reads serve both
            text = repr((read.file.rank, read.file.part, read.start, read.stop, what))
            # the count tells reads of one rank apart that are equal, such as those of two targets of one array
            mine[xxhash.xxh3_64_intdigest(f"{save_id} {text} {seen[text]}".encode())] = read
            seen[text] += 1
        with log_if_slow(self.rank, "load that reads once"):
            # digests alone: every rank receives those of every other one
            received = self.settle(None, (_host(), list(mine)), step="agreeing")
        here = {rank: digests for rank, (host, digests) in sorted(received.items()) if host == _host()}
        holders: dict[int, list[int]] = {}
        for rank, digests in here.items():
            for digest in digests:
                holders.setdefault(digest, []).append(rank)
        parts: dict[tuple[int, ...], list[Read]] = {}
        for digest, members in holders.items():  # in the order of the first rank that has them
            if digest in mine:
                parts.setdefault(tuple(members), []).append(mine[digest])
        # what is shared comes first: a rank that fails alone then leaves nobody waiting
        return sorted(parts.items(), key=lambda part: (len(part[0]) == 1, part[0]))

    def settle(
        self, fault: Exception | None, message: Any = None, *, step: str = "", excused: bool = False
    ) -> dict[int, Any]:
        """Waits until all ranks have come to this point; returns the message of each.

        Args:
            step: the name of the point, where ranks may be at another one.
            excused: faults count only where ranks are at another point.

        Raises:
            Replaced: a rank failed, and what it read was replaced meanwhile; on every rank.
            RankError: others failed, or are at another point. Otherwise this rank's own error.
        """
        import torch.distributed as dist

        replaced = False
        if fault is not None:
            try:
                # looked up before the exchange, so that all ranks try the next version, or none does
                replaced = isinstance(fault, Replaced) or any(
                    checkpoint.is_replaced() for checkpoint in self.checkpoints
                )
            except CheckpointNotFound as error:
                fault = error
        text = None if fault is None else f"{type(fault).__name__}: {fault}"[:2000]
        received: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(received, (message, text, replaced, step), group=self.group)
        except RuntimeError as error:
            raise self._tell(fault or unreachable(error)) from error
        if excused and all(there == step for *_, there in received):
            return {rank: message for rank, (message, *_) in enumerate(received)}
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

    def share(self, source: int, work: Callable[[], T]) -> T:
        """Returns on every rank what `work` returns on one of them. Every rank has to call.

        Raises:
            RankError: a rank failed before.
        """
        import torch.distributed as dist

        sent: list[Any] = [None]
        with self.together("index"):
            if self.rank == source:
                sent = [work()]
        try:
            dist.broadcast_object_list(sent, source, self.group)
        except RuntimeError as error:
            raise unreachable(error) from error
        return sent[0]

    def share_index(self, checkpoint: Checkpoint) -> None:
        """Has rank 0 read the index and list the files, and send them to all other ranks; see `share`."""
        shared = self.share(0, lambda: (checkpoint.index_bytes, checkpoint.sizes))
        checkpoint.index_bytes, checkpoint.sizes = shared

    def services(self, timeout: datetime.timedelta) -> Any:
        """Returns a group of the same ranks for requests, which is made by the first call, on all ranks."""
        import torch.distributed as dist

        if self._services is None:
            self._services = dist.new_group(backend="gloo", timeout=timeout)
        return self._services

    def drop_services(self) -> None:
        """Has the next call of `services` make another group, on all ranks."""
        self._services = None

    def owned(self, reads: Sequence[Read], members: Sequence[int]) -> list[Read]:
        """Returns the reads that this rank carries out for all members."""
        return [read for i, read in enumerate(reads) if members[i % len(members)] == self.rank]

    def run(self, run: ReadRun, work: Sequence[tuple[Sequence[int], Sequence[Read]]], *, memory: int) -> int:
        """Carries out lists of reads, each together with its members, which have equal lists. Every rank has to call.

        A rank that fails goes on through the lists that it shares, so that no other rank waits for it.

        Args:
            work: the members and the reads of each list; shared lists come first.
            memory: bytes of buffers, at most, unless one read needs more.

        Returns:
            Bytes that this rank read from data areas.

        Raises:
            RankError: another rank failed.
        """
        fault: Exception | None = None
        nbytes = 0
        for members, reads in work:
            try:
                if len(members) > 1:
                    fault = _SharedList(self, run, members, memory // 2, fault).run(reads)
                elif fault is None:
                    run.execute(reads, memory)
                nbytes += sum(read.nbytes for read in self.owned(reads, members))
            except Exception as error:
                # the first failure is the cause of those that follow
                fault = fault or error
        if fault is not None:
            raise fault
        return nbytes


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    # machines can have one name; each of their boots has an id of its own
    return f"{socket.gethostname()}/{boot}"


def open_shared_read(comm: Comm, checkpoints: Sequence[Checkpoint]) -> SharedRead:
    """Returns the shared reads of a world of several ranks. The first call creates a group, on all ranks.

    Args:
        checkpoints: those that the next load reads.

    Raises:
        CheckpointError: the ranks are not those of torch.distributed's default group.
    """
    relay = comm.state.get(SharedRead)
    if relay is None:
        with log_if_slow(comm.rank, "load that reads once"):
            relay = SharedRead(_new_group(comm), comm.rank, comm.size)
        comm.state.put(relay)
    relay.checkpoints = checkpoints
    return relay


def reads_once(comm: Comm, store: Store, *, apart: bool = False) -> bool:
    """Whether a load in which all ranks of a comm take part reads once by default: from an object store, if it can.

    Args:
        apart: the files lie on the disks of several hosts, so that some ranks have to read for others.
    """
    able = comm.size > 1 and members_of(comm) is None and world_size() == comm.size
    return able and (apart or (store.traits.far and comm.size <= MOST_RANKS))


def _new_group(comm: Comm) -> Any:
    size = world_size()
    if size != comm.size:
        raise CheckpointError(
            "once",
            expected=f"torch.distributed with the {comm.size} ranks of this load",
            found=f"a default group of {max(size, 1)}",
            hint="Initialise torch.distributed with these ranks, or leave out once=True of ReadOptions",
        )
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=comm.timeout))


class _Receipt(msgspec.Struct):
    """A range that is being received."""

    read: Read
    buffer: memoryview | None
    """The memory that takes the bytes; None where they stay in the memory of the read."""
    memory: memoryview
    owner: int
    failed: Any
    """A tensor with one number: not 0 where the owner has failed, and the bytes mean nothing."""
    works: list[Any]
    """The transfers to wait for."""


class _Relay(msgspec.Struct, frozen=True):
    """The destination of a read that this rank carries out for others: it is sent to them, and put in place here."""

    start: int
    stop: int
    number: int
    """The number of the read in the list that all members have."""
    read: Read
    work: _SharedList

    def write(self, data: memoryview) -> None:
        work = self.work
        if work.fault is not None:
            raise work.fault
        # from here on the members receive these bytes: a failure must not be sent in their place
        del work.unsent[self.number]
        with work.sending(self.number, data, failed=False):
            put_all(work.local, self.read, data)


class _SharedList:
    """One list of reads that several ranks carry out together: each reads some, and sends them to the others.

    A thread reads and sends, several ranges at once, and this one receives, in order. The first range of the list that
    is not read yet is in flight at its owner, and every other rank is ready to receive it, so no rank waits for ever.

    Args:
        members: the ranks that have this list.
        memory: bytes of buffers for what is read, and as many for what is received.
        fault: the first failure: after it this rank only reports it to the others.
    """

    def __init__(
        self, ranks: SharedRead, run: ReadRun, members: Sequence[int], memory: int, fault: Exception | None
    ) -> None:
        self._group, self._rank, self._members, self._memory = ranks.group, ranks.rank, members, memory
        self.local, self.fault = run, fault
        self.unsent: dict[int, Read] = {}
        """Reads of this rank that it has not begun to send, by number."""

    def run(self, reads: Sequence[Read]) -> Exception | None:
        """Carries out the reads; returns the first failure."""
        members = self._members
        owners = [members[number % len(members)] for number in range(len(reads))]
        mine = {number: reads[number] for number, owner in enumerate(owners) if owner == self._rank}
        sent: Future[None] = Future()
        if start_thread(partial(make_call, sent, partial(self._read_and_send, mine)), "treeckpt-send"):
            try:
                self._receive([(n, owner, reads[n]) for n, owner in enumerate(owners) if owner != self._rank])
            finally:
                wait([sent])
            sent.result()
            return self.fault
        for number, owner in enumerate(owners):  # in one order on all ranks: none waits for one that waits for it
            if owner == self._rank:
                self._read_and_send({number: reads[number]})
            else:
                self._receive([(number, owner, reads[number])])
        return self.fault

    def _read_and_send(self, mine: dict[int, Read]) -> None:
        """Reads what this rank has to read, by number, and sends each to the others; after a failure sends that."""
        self.unsent = dict(mine)
        own = [
            Read(
                read.file,
                read.start,
                read.stop,
                (_Relay(read.start, read.stop, number, read, self),),
                read.memory,
                read.shared,
            )
            for number, read in mine.items()
        ]
        try:
            if self.fault is None:
                # what a relay has written is noted when it puts it in place
                msgspec.structs.replace(self.local, written=[]).execute(own, self._memory)
        except Exception as error:
            self.fault = self.fault or error
        # the other members wait for so many bytes, whatever these are
        nothing = memoryview(bytearray(max((read.nbytes for read in self.unsent.values()), default=0)))
        for number, read in self.unsent.items():
            with self.sending(number, nothing[: read.nbytes], failed=True):
                pass

    @contextlib.contextmanager
    def sending(self, number: int, data: memoryview, *, failed: bool) -> Iterator[None]:
        """Sends a range to the other members while the body runs."""
        import torch
        import torch.distributed as dist

        bytes_ = torch.frombuffer(memory_at(address_of(data), len(data)), dtype=torch.uint8)
        # two tags for each read: its bytes, and whether they mean anything
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

    def _receive(self, expected: Sequence[tuple[int, int, Read]]) -> None:
        """Receives ranges, a few at a time, and puts each in place.

        Args:
            expected: number, owner and read of each.
        """
        largest = max((read.nbytes for *_, read in expected), default=1)
        window = max(self._memory // largest, 1)
        buffers = Buffers([read for *_, read in expected], min(window, len(expected)))
        under_way: collections.deque[_Receipt] = collections.deque()
        for number, owner, read in expected:
            if len(under_way) >= window:
                self._finish(under_way.popleft(), buffers)
            under_way.append(self._start(number, owner, read, buffers.take() if read.memory is None else None))
        for receipt in under_way:
            self._finish(receipt, buffers)

    def _start(self, number: int, owner: int, read: Read, buffer: memoryview | None) -> _Receipt:
        """Starts to receive a range."""
        import torch
        import torch.distributed as dist

        memory = read.memory if buffer is None else buffer[: read.nbytes]
        assert memory is not None, "one of the two"
        failed = torch.zeros(1)
        receipt = _Receipt(read, buffer, memory, owner, failed, [])
        messages = [(number * 2, torch.frombuffer(memory, dtype=torch.uint8)), (number * 2 + 1, failed)]
        with self._reaching(owner):
            receipt.works += [dist.irecv(data, owner, self._group, tag) for tag, data in messages]
        return receipt

    def _finish(self, receipt: _Receipt, buffers: Buffers) -> None:
        """Waits for a range, and puts it in place."""
        with self._reaching(receipt.owner):
            for work in receipt.works:
                work.wait()
        if receipt.failed.item() and self.fault is None:
            self.fault = failed_elsewhere(
                {receipt.owner: "failed to read what it was to hand on; its own error says why"}
            )
        if self.fault is None:
            try:
                put_all(self.local, receipt.read, receipt.memory)
            except Exception as error:
                self.fault = error
        if receipt.buffer is not None:
            buffers.give_back(receipt.buffer)

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
        hint="Mend what ended the load there; ReadOptions(once=True) needs all ranks of a host",
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
