"""Reading once per host what several ranks want: each rank reads its part, and they hand it on to each other.

Ranks first tell each other, by digests, what they want; what several ranks of one host want is read by one of them in
turn, verified, and sent to the others over torch.distributed, in a gloo group of its own. All go through the same list
of stretches in the same order, a few under way at once, so nobody waits in a circle. A rank that fails goes on through
the list and says so with each stretch that it should have sent: then all raise, and none is left waiting.

Unlike all else in treeckpt this is collective: every rank has to call the load.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from ..errors import CheckpointError, CheckpointNotFound, RankError
from ..io.comm.comm import Comm
from ..io.comm.waiting import log_if_slow
from ..io.storage.shard_reader import Shards
from ..io.storage.versions import Replaced, Version
from .read_tasks import ReadTask, ring_of, run_readings

__all__ = ["Part", "SharedRead", "open_relay", "together"]

WINDOW = 4
"""Stretches that are under way at once."""
READERS = 2


class Part(msgspec.Struct, frozen=True):
    """Wants that the same ranks have in common."""

    members: tuple[int, ...]
    wants: list[int]
    """Their numbers on this rank, in the order in which all members have them."""


class SharedRead:
    """The ranks of a world, as one of them reaches the others."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        self.versions: Sequence[Version] = ()
        """Of the checkpoints that are being read."""

    def agree(self, save_id: str, wants: Sequence[object]) -> list[Part]:
        """What this rank wants, by who else on the host wants it.

        Args:
            save_id: of the checkpoint; ranks that have read another version of it share nothing.
            wants: those whose text (repr) is equal are the same bytes on all ranks.
        """
        seen: collections.Counter[str] = collections.Counter()
        digests: list[int] = []
        for want in map(repr, wants):
            digests.append(xxhash.xxh3_64_intdigest(f"{save_id} {want} {seen[want]}".encode()))
            seen[want] += 1
        with log_if_slow(self._rank, "load with read='once'"):
            told = self._tell((_host(), digests), None)
        here = {rank: mine for rank, (host, mine) in told.items() if host == _host()}
        holders: dict[int, list[int]] = {}
        for rank in sorted(here):
            for digest in here[rank]:
                holders.setdefault(digest, []).append(rank)
        parts: dict[tuple[int, ...], list[int]] = {}
        for number, digest in enumerate(digests):
            parts.setdefault(tuple(holders[digest]), []).append(number)
        for members, numbers in parts.items():
            place = {digest: i for i, digest in enumerate(here[members[0]])}
            numbers.sort(key=lambda number: place[digests[number]])
        # what is shared comes first: a rank that fails alone then leaves nobody waiting
        return [Part(m, parts[m]) for m in sorted(parts, key=lambda m: (len(m) == 1, m))]

    def settle(self, fault: Exception | None) -> None:
        """Waits until all ranks have come so far.

        Raises:
            Replaced: a rank failed, and what it read was replaced meanwhile; on every rank.
            RankError: others failed. Else this rank's own fault.
        """
        self._tell(None, fault)

    def _tell(self, word: Any, fault: Exception | None) -> dict[int, Any]:
        import torch.distributed as dist

        replaced = False
        if fault is not None:
            try:
                replaced = isinstance(fault, Replaced) or any(version.is_replaced() for version in self.versions)
            except CheckpointNotFound as error:
                fault = error
        text = None if fault is None else f"{type(fault).__name__}: {fault}"[:2000]
        heard: list[Any] = [None] * self._size
        try:
            dist.all_gather_object(heard, (word, text, replaced), group=self._group)
        except RuntimeError as error:
            if fault is None:
                raise _lost(error) from error
            raise fault from error
        if any(replaced for _, _, replaced in heard):
            raise Replaced(
                "ranks", expected="one version of the checkpoint", found="another save in its place"
            ) from fault
        if fault is not None:
            raise fault
        if faults := {rank: text for rank, (_, text, _) in enumerate(heard) if text is not None}:
            raise _others(faults)
        return {rank: word for rank, (word, _, _) in enumerate(heard)}

    def owned(self, readings: Sequence[ReadTask], members: Sequence[int]) -> list[ReadTask]:
        """Those which this rank reads for all members."""
        return [r for i, r in enumerate(readings) if members[i % len(members)] == self._rank]

    def run(
        self,
        shards: Shards,
        work: Sequence[tuple[Sequence[int], Sequence[ReadTask]]],
        *,
        memory: int,
        begin: Callable[[ReadTask], object],
    ) -> int:
        """Carries out lists of readings, each together with its members, who bring equal ones. Every rank has to call.

        A rank that fails goes on through the lists that others share, so that nobody waits for it.

        Args:
            work: the members and the readings of each list; those that are shared come first.
            memory, begin: as for `run_readings`.

        Returns:
            Bytes that this rank read from data areas.

        Raises:
            RankError: another rank failed.
        """
        fault: Exception | None = None
        nbytes = 0
        for members, readings in work:
            try:
                if len(members) > 1:
                    nbytes += self._share(shards, readings, members, fault, begin)
                elif fault is None:
                    nbytes += run_readings(shards, readings, memory=memory, begin=begin)
            except Exception as error:
                fault = fault or error
        if fault is not None:
            raise fault
        return nbytes

    def _share(
        self,
        shards: Shards,
        readings: Sequence[ReadTask],
        members: Sequence[int],
        fault: Exception | None,
        begin: Callable[[ReadTask], object],
    ) -> int:
        """Carries out readings together with the other members; `fault` is why this rank only takes part."""
        ring = ring_of(readings, WINDOW)
        with ThreadPoolExecutor(READERS, "treeckpt-read") as pool:
            convoy = SharedReadSession(shards, self._group, self._rank, members, pool, fault, begin)
            under_way: collections.deque[tuple[_Turn, memoryview | None]] = collections.deque()
            for number in range(len(readings) + WINDOW):
                if number >= WINDOW and under_way:
                    turn, buffer = under_way.popleft()
                    convoy.finish(turn)
                    if buffer is not None:
                        ring.put(buffer)
                if number < len(readings):
                    reading = readings[number]
                    buffer = ring.get() if reading.out is None else None
                    memory = reading.out if buffer is None else buffer[: reading.nbytes]
                    assert memory is not None, "one of the two"
                    under_way.append((convoy.start(number, reading, memory), buffer))
        if convoy.fault is not None:
            raise convoy.fault
        return sum(reading.nbytes for reading in self.owned(readings, members))


class _Turn(msgspec.Struct):
    """A stretch under way."""

    number: int
    reading: ReadTask
    memory: memoryview
    owner: int
    read: Future[None] | None
    """On the owner."""
    receipts: list[Any]
    """Elsewhere."""
    status: Any


class SharedReadSession:
    """One list of stretches, as one rank goes through it with the others."""

    def __init__(
        self,
        shards: Shards,
        group: Any,
        rank: int,
        members: Sequence[int],
        pool: ThreadPoolExecutor,
        fault: Exception | None,
        begin: Callable[[ReadTask], object],
    ) -> None:
        self.fault, self._begin = fault, begin
        self._shards, self._group, self._rank, self._members, self._pool = shards, group, rank, members, pool

    def start(self, number: int, reading: ReadTask, memory: memoryview) -> _Turn:
        """Begins to read a stretch, or to receive it."""
        import torch
        import torch.distributed as dist

        owner, status = self._members[number % len(self._members)], torch.zeros(1)
        turn = _Turn(number, reading, memory, owner, None, [], status)
        if owner == self._rank:
            if self.fault is None:
                turn.read = self._pool.submit(self._shards.read, reading.stretch, memory, shared=reading.shared)
            return turn
        with self._reaching(owner):
            turn.receipts = [
                dist.irecv(data, owner, self._group, number * 2 + i) for i, data in enumerate(_messages(turn))
            ]
        return turn

    def finish(self, turn: _Turn) -> None:
        """Waits for a stretch, hands it on if it is this rank's to do, and uses it."""
        sent = self._hand_on(turn) if turn.owner == self._rank else self._receive(turn)
        if self.fault is None and turn.reading.use is not None:
            try:
                self._begin(turn.reading)
                turn.reading.use(turn.memory)
            except Exception as error:
                self.fault = error
        for rank, work in sent:
            with self._reaching(rank):
                work.wait()

    def _hand_on(self, turn: _Turn) -> list[tuple[int, Any]]:
        import torch.distributed as dist

        try:
            if turn.read is not None:
                turn.read.result()
        except Exception as error:
            self.fault = self.fault or error
        turn.status.fill_(self.fault is not None)
        sent: list[tuple[int, Any]] = []
        for rank in self._members:
            if rank != self._rank:
                with self._reaching(rank):
                    for i, data in enumerate(_messages(turn)):
                        sent.append((rank, dist.isend(data, rank, self._group, turn.number * 2 + i)))
        return sent

    def _receive(self, turn: _Turn) -> list[tuple[int, Any]]:
        with self._reaching(turn.owner):
            for work in turn.receipts:
                work.wait()
        if turn.status.item() and self.fault is None:
            self.fault = _others({turn.owner: "failed to read what it was to hand on; its own error says why"})
        return []

    @contextlib.contextmanager
    def _reaching(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.fault = self.fault or _lost(error, rank)


def _messages(turn: _Turn) -> tuple[Any, Any]:
    import torch

    return torch.frombuffer(turn.memory, dtype=torch.uint8), turn.status


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
    """What each rank does alone, at whose end all learn whether it went well everywhere.

    Raises:
        RankError: it did not, elsewhere.
    """
    try:
        yield
    except Exception as error:
        if relay is not None:
            relay.settle(error)
        raise
    if relay is not None:
        relay.settle(None)


def open_relay(comm: Comm, stores: Sequence[Any] = ()) -> SharedRead | None:
    """The relay of a world; None if this process is alone. The first call makes a group, on all ranks.

    Args:
        stores: from which the next load reads.

    Raises:
        CheckpointError: the ranks are not those of torch.distributed's default group.
    """
    if comm.size == 1:
        return None
    relay = comm.state.get(SharedRead)
    if relay is None:
        with log_if_slow(comm.rank, "load with read='once'"):
            relay = SharedRead(_new_group(comm), comm.rank, comm.size)
        comm.state.put(relay)
    relay.versions = [store for store in stores if isinstance(store, Version)]
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
