"""How ranks reach each other: a board of small messages, without any collective of the user's process groups.

A comm only posts, waits for and removes messages by key; who says what when, and which save a message belongs to, is
for `io.comm.rounds`. `TorchComm` goes over a clone of torch.distributed's Store (a connection of its own), so a wait
never blocks the training's use of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...errors import RankError, TreeckptError
from .fanout import group_sizes_for, is_leader
from .launchers import UnconnectedComm, launched_rank, unconnected_error
from .message_store import TorchMessageStore, connect_to_leader, serve_leader_store

__all__ = [
    "Comm",
    "HierarchicalComm",
    "MessageStore",
    "SoloComm",
    "ThreadComm",
    "TorchComm",
    "as_comm",
    "comm_of",
    "default_comm",
    "global_rank",
    "members_of",
    "thread_comms",
]

TIMEOUT = 600.0
"""Seconds to wait for other ranks, unless told otherwise."""


class MessageStore(Protocol):
    """Where messages are put up and found by key."""

    def post(self, key: str, data: bytes) -> None:
        """Puts a message up, in the place of one with the same key."""
        ...

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        """The messages of these keys as soon as all are there; after `timeout` seconds, None for those that are not.

        Raises:
            RankError: the board is gone, and with it the rank that serves it.
        """
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Removes messages; those that are not there, and a board that is gone, are no error."""
        ...


class Comm(MessageStore, Protocol):
    """One rank's access to the board that all ranks share."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def timeout(self) -> float:
        """Seconds after which a rank counts as silent."""
        ...

    @property
    def memory(self) -> dict[str, Any]:
        """A place for what ranks agreed on, kept between saves."""
        ...


class HierarchicalComm(Comm, Protocol):
    """One whose ranks may speak by leaders."""

    @property
    def tiers(self) -> tuple[int, ...]:
        """Spans of groups of ranks as `io.comm.fanout` knows them; none where all speak to rank 0."""
        ...

    def board(self, leader: int) -> MessageStore:
        """The board that a rank serves for those it leads.

        Raises:
            RankError: it is gone, or that rank has not served it in time.
        """
        ...


class SoloComm:
    """One rank, alone: it sends nothing.

    Args:
        members: its rank in the default group, where there is one.
    """

    def __init__(self, members: tuple[int] | None = None) -> None:
        self.rank, self.size, self.timeout, self.members = 0, 1, TIMEOUT, members
        self.memory: dict[str, Any] = {}

    def post(self, key: str, data: bytes) -> None:
        pass

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return [None] * len(keys)

    def drop(self, keys: Sequence[str]) -> None:
        pass


class _ThreadMessageStore:
    """Messages between threads that act as ranks."""

    def __init__(self) -> None:
        self.messages: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def post(self, key: str, data: bytes) -> None:
        with self.changed:
            self.messages[key] = data
            self.changed.notify_all()

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        with self.changed:
            self.changed.wait_for(lambda: all(key in self.messages for key in keys), timeout)
            return [self.messages.get(key) for key in keys]

    def drop(self, keys: Sequence[str]) -> None:
        with self.changed:
            for key in keys:
                self.messages.pop(key, None)


class ThreadComm:
    """Threads of one process as ranks: for tests, and for what needs no more."""

    def __init__(
        self, rank: int, size: int, boards: Mapping[int, MessageStore], timeout: float, tiers: tuple[int, ...] = ()
    ) -> None:
        self.rank, self.size, self.timeout, self.tiers = rank, size, timeout, tiers
        self.memory: dict[str, Any] = {}
        self._board, self._boards = boards[0], boards

    def post(self, key: str, data: bytes) -> None:
        self._board.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return self._board.wait(keys, timeout)

    def drop(self, keys: Sequence[str]) -> None:
        self._board.drop(keys)

    def board(self, leader: int) -> MessageStore:
        return self._boards[leader]


def thread_comms(size: int, *, timeout: float = TIMEOUT, tiers: tuple[int, ...] = ()) -> list[ThreadComm]:
    """Connected comms for `size` threads, by rank.

    Args:
        tiers: as `io.comm.fanout` has spans: ranks of groups, by whose leaders they speak to rank 0.
    """
    boards = {leader: _ThreadMessageStore() for leader in range(size) if is_leader(leader, size, tiers) or not leader}
    return [ThreadComm(rank, size, boards, timeout, tiers) for rank in range(size)]


class TorchComm:
    """Processes of torch.distributed, over its key-value Store.

    Args:
        store: any torch.distributed Store; the default group's is cloned by `default_comm`.
        timeout: seconds.
        prefix: of all keys, which keeps comms on one store apart.
        members: the global rank of each rank, where these are some ranks of the default group only.
        tiers: ranks of groups by whose leaders they speak to rank 0, see `io.comm.fanout`; by default by the size.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout: float = TIMEOUT,
        prefix: str = "treeckpt",
        members: tuple[int, ...] | None = None,
        tiers: tuple[int, ...] | None = None,
    ) -> None:
        self.rank, self.size, self.timeout, self.members = rank, size, timeout, members
        self.tiers = group_sizes_for(size) if tiers is None else tiers
        self.memory: dict[str, Any] = {}
        self._common = TorchMessageStore(store, prefix)
        self._boards: dict[int, MessageStore] = {}
        self._lock, self._owner = threading.Lock(), os.getpid()

    def _check_owner(self) -> None:
        """Refuses to send messages of a rank from a process that was forked from it: they share a connection."""
        if os.getpid() != self._owner:
            raise RankError(
                "comm",
                ranks={self.rank: f"process {os.getpid()} was forked from it"},
                expected=f"a call in process {self._owner}, which is rank {self.rank}",
                hint='In a forked child pass comm="alone"',
            )

    def post(self, key: str, data: bytes) -> None:
        self._check_owner()
        self._common.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        self._check_owner()
        return self._common.wait(keys, timeout)

    def drop(self, keys: Sequence[str]) -> None:
        if os.getpid() == self._owner:
            self._common.drop(keys)

    def board(self, leader: int) -> MessageStore:
        self._check_owner()
        with self._lock:
            if leader not in self._boards:
                mine = leader == self.rank
                self._boards[leader] = (
                    serve_leader_store(self._common, leader)
                    if mine
                    else connect_to_leader(self._common, leader, self.timeout)
                )
            return self._boards[leader]


def default_comm() -> Comm:
    """The comm of this process: over torch.distributed's default group if that is up, else alone.

    It is kept with the default group's Store, so that ranks count their saves alike and a new group starts anew.
    """
    return _default_store_comms().world if _world_size() > 1 else _SOLO


def _world_size() -> int:
    """Of torch.distributed's default group; 0 where that is not up."""
    if "torch" not in sys.modules:
        return 0
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def _alone_comm() -> Comm:
    """The comm of this process as the only one, whatever others there are."""
    if _world_size() < 2:
        return _SOLO
    kept = _default_store_comms()
    return kept.groups.setdefault("alone", SoloComm((kept.world.rank,)))


def comm_of(group: Any) -> Comm:
    """The comm of a process group of torch.distributed, of any ranks: with it these ranks alone save and load.

    It talks over the default group's Store under a prefix of its own; the group itself is only asked for its name and
    its ranks, so no collective is issued. Rank i of the comm is rank i of the group.

    Args:
        group: as `dist.new_group` or `DeviceMesh.get_group` give it; None is the default group.

    Raises:
        RankError: this rank is not part of the group.
        TreeckptError: it is none.
    """
    import torch.distributed as dist

    if group is None or group is dist.group.WORLD:
        return default_comm()
    check_group(group, "comm")
    members = tuple(dist.get_process_group_ranks(group))
    kept = _default_store_comms()
    key = f"treeckpt/{group.group_name}/{','.join(map(str, members))}"
    if key not in kept.groups:
        kept.groups[key] = TorchComm(
            kept.store, dist.get_rank(group), len(members), timeout=kept.world.timeout, prefix=key, members=members
        )
    return kept.groups[key]


def check_group(group: Any, name: str) -> None:
    """Refuses what is no process group of this rank's.

    Args:
        name: of the argument.

    Raises:
        RankError: this rank is not part of the group.
        TreeckptError: it is none.
    """
    import torch.distributed as dist

    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RankError(
            name,
            ranks={dist.get_rank(): "not part of the group"},
            expected="a process group that this rank is part of",
            hint="Call it on the ranks of the group only",
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TreeckptError(
            name,
            expected="a process group of torch.distributed, or None for all ranks",
            found=f"{group!r:.60}",
            hint="dist.new_group(ranks) makes one, and DeviceMesh.get_group() gives that of a mesh",
        )


def as_comm(comm: Any, *, talks: bool = True) -> Comm:
    """What the `comm` of a public function stands for: a comm itself, a process group, "alone", or None.

    None is the default group, where that is up; else this process alone.

    Args:
        talks: ranks have to reach each other. A load mostly needs to know only which of them this one is.

    Raises:
        RankError: a launcher has started other ranks, which None does not reach.
        TreeckptError: it is none of these.
    """
    if isinstance(comm, str):
        if comm == "alone":
            return _alone_comm()
        expected = 'a process group of torch.distributed, "alone", or None for all ranks'
        raise TreeckptError("comm", expected=expected, found=f"{comm!r:.60}")
    if comm is None:
        place = launched_rank() if not _world_size() else None
        if place is not None and talks:
            raise unconnected_error(place)
        return default_comm() if place is None else UnconnectedComm(place, TIMEOUT)
    return comm if hasattr(comm, "post") else comm_of(comm)


def members_of(comm: Comm) -> tuple[int, ...] | None:
    """The global rank of each of a comm's ranks; None where they are the same."""
    return getattr(comm, "members", None)


def global_rank(comm: Comm) -> int:
    """This rank's number in the default process group, by which DTensors and ShardedTensors name ranks."""
    members = members_of(comm)
    return comm.rank if members is None else members[comm.rank]


class _StoreComms:
    """The comms over one default Store: that of all ranks, and those of groups, by prefix."""

    def __init__(self, original: Any, rank: int, size: int) -> None:
        self.original, self.store = original, _cloned(original)
        self.world = TorchComm(self.store, rank, size)
        self.groups: dict[str, Comm] = {}


_COMMS: dict[int, _StoreComms] = {}
"""Of the default process group, which is itself a global of torch's."""


def _default_store_comms() -> _StoreComms:
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    kept = _COMMS.get(id(store))
    if kept is None or kept.original is not store:
        _COMMS.clear()
        kept = _COMMS[id(store)] = _StoreComms(store, dist.get_rank(), dist.get_world_size())
    return kept


_SOLO = SoloComm()
"""The one comm of a process that is alone: it keeps plans, and the writer, from save to save."""


def _cloned(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store  # a kind of Store without clones: shared, its calls are short polls
