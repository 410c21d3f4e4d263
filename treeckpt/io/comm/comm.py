"""Message exchange between ranks over a key-value store, without collectives of the user's process groups.

A comm posts, awaits and removes messages by key; `rounds` defines their order and the save that they belong to.
`TorchComm` uses a clone of torch.distributed's Store, so a wait never blocks the training's use of that Store.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...errors import MismatchError, RankError, TreeckptError
from .fanout import group_sizes_for, is_leader
from .launchers import UnconnectedComm, launched_rank, local_rank, unconnected_error
from .message_store import ThreadMessageStore, TorchMessageStore, connect_to_leader, serve_leader_store
from .state import CommState

TIMEOUT = 600.0
"""Default time limit of a wait for other ranks, in seconds."""


class MessageStore(Protocol):
    """A store of messages by key."""

    def post(self, key: str, data: bytes) -> None:
        """Stores a message; replaces one with the same key."""
        ...

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        """Returns the messages of these keys once all exist; after `timeout` seconds None for each missing one.

        Raises:
            RankError: the store cannot be reached: the rank that serves it has ended.
        """
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Removes messages. A missing message, or a store that cannot be reached, is no error."""
        ...


class Comm(MessageStore, Protocol):
    """One rank's access to the message store that all ranks share."""

    rank: int
    size: int
    timeout: float
    """Seconds without a message after which a rank counts as silent."""
    state: CommState
    """What this rank keeps between saves."""


class HierarchicalComm(Comm, Protocol):
    """A comm in which ranks may exchange messages through leaders of groups."""

    group_sizes: tuple[int, ...]
    """Sizes of the nested groups (`fanout`); empty where every rank exchanges messages with rank 0."""

    def leader_store(self, leader: int) -> MessageStore:
        """Returns the store that a leader serves for the ranks of its group.

        Raises:
            RankError: the store cannot be reached, or the leader did not serve it in time.
        """
        ...


def base_of(comm: Comm) -> Comm:
    """Returns the comm that lasts: one that is made for some calls only has an attribute `base`, which is that one."""
    return getattr(comm, "base", comm)


class SoloComm:
    """The comm of a single rank: it sends nothing. `members` holds its number in the default group, if there is one."""

    def __init__(self, members: tuple[int] | None = None) -> None:
        self.rank, self.size, self.timeout, self.members = 0, 1, TIMEOUT, members
        self.state = CommState()

    def post(self, key: str, data: bytes) -> None:
        pass

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return [None] * len(keys)

    def drop(self, keys: Sequence[str]) -> None:
        pass


class _StoreComm:
    """A comm over a message store, with a prefix before all keys."""

    def __init__(
        self, store: MessageStore, rank: int, size: int, timeout: float, state: CommState, prefix: str = ""
    ) -> None:
        self.rank, self.size, self.timeout, self.state = rank, size, timeout, state
        self._store, self._prefix = store, prefix

    def post(self, key: str, data: bytes) -> None:
        self._store.post(self._prefix + key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return self._store.wait([self._prefix + key for key in keys], timeout)

    def drop(self, keys: Sequence[str]) -> None:
        self._store.drop([self._prefix + key for key in keys])


class PrefixComm(_StoreComm):
    """A comm with a prefix before all keys, so that a background save and the manager can use one comm at a time.

    Two objects of one comm with the same prefix share messages and state.
    """

    def __init__(self, comm: Comm, prefix: str) -> None:
        super().__init__(comm, comm.rank, comm.size, comm.timeout, comm.state.of_prefix(prefix), f"{prefix}/")
        self.base = base_of(comm)


def background_comm(comm: Comm) -> Comm:
    """Returns a comm of the same ranks for one call in the background, beside others; in the same order on each."""
    if comm.size == 1:
        return comm
    comm.state.loads += 1
    return PrefixComm(comm, f"load {comm.state.loads}")


class ThreadComm(_StoreComm):
    """The comm of a thread that acts as a rank: for tests, and for programs whose ranks are threads of one process."""

    def __init__(
        self,
        rank: int,
        size: int,
        stores: Mapping[int, ThreadMessageStore],
        timeout: float,
        group_sizes: tuple[int, ...] = (),
    ) -> None:
        super().__init__(stores[0], rank, size, timeout, CommState())
        self.stores, self.group_sizes = stores, group_sizes

    def leader_store(self, leader: int) -> MessageStore:
        return self.stores[leader]


def thread_comms(size: int, *, timeout: float = TIMEOUT, group_sizes: tuple[int, ...] = ()) -> list[ThreadComm]:
    """Returns connected comms for `size` threads, by rank; `group_sizes` as for `TorchComm`."""
    leaders = {0, *(rank for rank in range(size) if is_leader(rank, size, group_sizes))}
    stores = {leader: ThreadMessageStore() for leader in leaders}
    return [ThreadComm(rank, size, stores, timeout, group_sizes) for rank in range(size)]


class TorchComm:
    """The comm of a process of torch.distributed, over its key-value Store.

    Args:
        store: any torch.distributed Store; `default_comm` passes a clone of the default group's.
        timeout: seconds.
        prefix: of all keys, which keeps several comms on one store apart.
        members: the global rank of each rank, where the comm has only some ranks of the default group.
        group_sizes: of the nested groups whose leaders pass messages on (`fanout`); by default by the world size.
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
        group_sizes: tuple[int, ...] | None = None,
    ) -> None:
        self.rank, self.size, self.timeout, self.members = rank, size, timeout, members
        self.group_sizes = group_sizes_for(size) if group_sizes is None else group_sizes
        self.state = CommState()
        self.common = TorchMessageStore(store, prefix, limit=timeout)
        self._leader_stores: dict[int, MessageStore] = {}
        self._lock, self._owner = threading.RLock(), os.getpid()

    def _check_owner(self) -> None:
        """Refuses a process that was forked from the rank's process: both would use one connection."""
        if os.getpid() != self._owner:
            raise RankError(
                "comm",
                ranks={self.rank: f"process {os.getpid()} was forked from it"},
                expected=f"a call in process {self._owner}, which is rank {self.rank}",
                hint='In a forked child pass comm="alone"',
            )

    def post(self, key: str, data: bytes) -> None:
        self._check_owner()
        self.common.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        self._check_owner()
        return self.common.wait(keys, timeout)

    def drop(self, keys: Sequence[str]) -> None:
        if os.getpid() == self._owner:
            self.common.drop(keys)

    def leader_store(self, leader: int) -> MessageStore:
        self._check_owner()
        with self._lock:
            if leader not in self._leader_stores:
                self._leader_stores[leader] = (
                    serve_leader_store(self.common, leader)
                    if leader == self.rank
                    else connect_to_leader(self.common, leader, self.timeout)
                )
            return self._leader_stores[leader]


def default_comm() -> Comm:
    """Returns the comm of torch.distributed's default group if that is initialised, else a solo one.

    It is cached per Store of the default group, so that ranks count their saves alike and a new group starts anew.
    """
    return _default_store_comms().world if world_size() > 1 else _SOLO


def world_size() -> int:
    """Returns the size of torch.distributed's default group; 0 where that is not initialised."""
    if "torch" not in sys.modules:
        return 0
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def comm_of(group: Any) -> Comm:
    """Returns the comm of a process group of torch.distributed, or of the default group for None.

    It sends messages over the default group's Store under a prefix of its own. Of the group only the name and the
    ranks are read, so no collective is issued. Rank i of the comm is rank i of the group. Raises as `check_group`.
    """
    import torch.distributed as dist

    if group is None or group is dist.group.WORLD:
        return default_comm()
    check_group(group, "comm")
    return comm_of_ranks(tuple(dist.get_process_group_ranks(group)), group.group_name)


def comm_of_ranks(members: tuple[int, ...], name: str = "") -> Comm:
    """Returns the comm of some ranks of the default group, of which this process is one.

    Args:
        members: the global rank of each rank of the comm.
        name: tells comms of the same ranks apart.
    """
    comms = _default_store_comms()
    if members == tuple(range(comms.world.size)) and not name:
        return comms.world
    key = f"treeckpt/{name}/{','.join(map(str, members))}"
    if key not in comms.groups:
        rank = members.index(comms.world.rank)
        comms.groups[key] = TorchComm(
            comms.store, rank, len(members), timeout=comms.world.timeout, prefix=key, members=members
        )
    return comms.groups[key]


def check_group(group: Any, name: str) -> None:
    """Checks that an argument is a process group with this rank.

    Args:
        name: of the argument, for the error.

    Raises:
        RankError: this rank is not part of the group.
        TreeckptError: `group` is no process group.
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


def as_comm(comm: Any, *, sends_messages: bool = True) -> Comm:
    """Returns the comm that the `comm` argument of a public function stands for.

    Args:
        comm: a comm, a process group, "alone", or None for the default group (this process alone where there is none).
        sends_messages: whether the call exchanges messages. Most loads do not: they need only rank and world size.

    Raises:
        RankError: a launcher has started other ranks, which None does not reach.
        TreeckptError: `comm` is none of these.
    """
    if isinstance(comm, str):
        if comm == "alone" and world_size() > 1:
            comms = _default_store_comms()
            return comms.groups.setdefault("alone", SoloComm((comms.world.rank,)))
        if comm == "alone":
            return _SOLO
        expected = 'a process group of torch.distributed, "alone", or None for all ranks'
        raise TreeckptError("comm", expected=expected, found=f"{comm!r:.60}")
    if comm is not None:
        return comm if hasattr(comm, "post") else comm_of(comm)
    launched = launched_rank() if not world_size() else None
    if launched is not None and sends_messages:
        raise unconnected_error(launched)
    return default_comm() if launched is None else UnconnectedComm(launched, TIMEOUT)


def members_of(comm: Comm) -> tuple[int, ...] | None:
    """Returns the global rank of each rank of a comm; None where the numbers are the same."""
    return getattr(comm, "members", None)


def global_rank(comm: Comm) -> int:
    """Returns this rank's number in the default process group, which DTensors and ShardedTensors use."""
    members = members_of(comm)
    return comm.rank if members is None else members[comm.rank]


def other_world_error(path: str, comm: Comm, saved: int, *, take: str, others: str = "") -> MismatchError:
    """Returns the error for state that each rank of a world of another size had of its own.

    Args:
        saved: ranks that saved it.
        take: the argument to pass, with which each rank takes the state of one old rank.
        others: what else can be done.
    """
    given = f"rank r what rank r % {saved} had saved" if saved > 1 else "each rank what rank 0 had saved"
    hint = f"The number of ranks changed: pass {take}, which gives {given}"
    if isinstance(comm, UnconnectedComm):
        others += '. A process that is alone, whatever its launcher says, passes comm="alone"'
    return MismatchError(
        path,
        expected=f"state of one rank of {comm.size}",
        found=f"state saved by a world of {saved}",
        hint=hint + others,
    )


def ranks_of_host(comm: Comm) -> tuple[int, ...]:
    """Returns the global ranks of a comm on this host, in order, without a message: by what the launcher says.

    The ranks of a host are taken to follow each other, as launchers number them by default. Where there is no
    launcher, or the comm has one rank, it is this rank alone.
    """
    here, local = global_rank(comm), local_rank() if comm.size > 1 else None
    if local is None:
        return (here,)
    first = here - local.rank
    return tuple(rank for rank in members_of(comm) or range(comm.size) if first <= rank < first + local.size)


class _StoreComms:
    """The comms over one default Store: the comm of all ranks, and those of groups by prefix."""

    def __init__(self, original: Any, rank: int, size: int) -> None:
        self.original = self.store = original
        # a kind of Store without clones is shared, and each call on it is a short poll
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            self.store = original.clone()
        self.world = TorchComm(self.store, rank, size)
        self.groups: dict[str, Comm] = {}


_COMMS: dict[int, _StoreComms] = {}
"""By the id of the default process group's Store. The group itself is a global of torch."""


def _default_store_comms() -> _StoreComms:
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    comms = _COMMS.get(id(store))
    if comms is None or comms.original is not store:
        _COMMS.clear()
        comms = _COMMS[id(store)] = _StoreComms(store, dist.get_rank(), dist.get_world_size())
    return comms


_SOLO = SoloComm()
"""The one comm of a process without others: it keeps plans and the writer process from save to save."""
