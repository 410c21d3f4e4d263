"""Message exchange between ranks over a key-value store, without collectives of the user's process groups.

A comm posts, awaits and removes messages by key; `rounds` defines their order and the save that they belong to.
`TorchComm` uses a clone of torch.distributed's Store, so a wait never blocks the training's use of that Store.
`as_comm` knows all that the argument `comm` of public functions may be; another kind of comm is a class with the
methods of `Comm`, and a line there.

Whether a launcher has started this process as one of several ranks is found out by the environment alone: torchrun,
srun, mpirun and jax.distributed tell each process its rank and the number of ranks. Processes without a comm would each
save as the only one, and overwrite each other's files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec

from ...errors import MismatchError, RankError, TreeckptError
from ..process import OwnProcess
from .message_store import (
    ThreadMessageStore,
    TorchMessageStore,
    connect_to_leader,
    group_sizes_for,
    is_leader,
    open_tcp_store,
    serve_leader_store,
)

T = TypeVar("T")
TIMEOUT = 600.0
"""Default time limit of a wait for other ranks, in seconds."""
_SLURM_SPECIAL = 0xFFFF_FFF0
"""Step ids from here on are SLURM's own: the batch script, an interactive shell, what is outside of all steps."""
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
)
"""Variables of the rank and of the number of ranks, of Open MPI, MVAPICH2, MPICH with its kin, and Horovod."""
_LOCAL = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""Variables of a process's number on its host, and of the number of processes there."""


@dataclasses.dataclass
class CommState:
    """The state of one rank of a comm."""

    last_round: int = 0
    """Number of the last round whose messages this rank has read."""
    opened: int = 0
    """On rank 0: number of the last round that it has begun to open."""
    ended: int = 0
    """Number of the last round that has come to its end here, with its branch and all ranks."""
    abandoned: int = 0
    """Number of the last round that this rank has abandoned, 0 for none."""
    joined: bool = False
    """Whether this rank has joined a round, of this comm or of one that has it as base, and not noted its end since."""
    failed_at: float = -math.inf
    """The moment at which the last round was abandoned here, or ended without a rank, on the monotonic clock."""
    unposted_notes: list[tuple[int, str]] = dataclasses.field(default_factory=list[tuple[int, str]])
    """Rounds that this rank has abandoned, and why, of which the others do not know yet."""
    posted_notes: list[list[str]] = dataclasses.field(default_factory=list[list[str]])
    """The keys of each note that this rank has posted and not removed yet."""
    unread_keys: dict[bool, list[str]] = dataclasses.field(default_factory=dict[bool, list[str]])
    """Keys of messages that some rank may still read, of rounds (False) and of branches (True)."""
    managers: int = 0
    """Managers created so far; the number keeps their messages apart."""
    loads: int = 0
    """Loads in the background that end together, so far; the number keeps their messages apart."""
    _by_prefix: dict[str, CommState] = dataclasses.field(default_factory=dict[str, "CommState"])
    _values: dict[type, object] = dataclasses.field(default_factory=dict[type, object])

    def of_prefix(self, prefix: str) -> CommState:
        """Returns the state that the comms with this prefix share."""
        return self._by_prefix.setdefault(prefix, CommState())

    def get(self, kind: type[T]) -> T | None:
        """Returns the value of a type that a user of the comm has put here; None where there is none."""
        value = self._values.get(kind)
        return value if isinstance(value, kind) else None

    def put(self, value: object) -> None:
        """Keeps a value under its type, in place of an earlier one."""
        self._values[type(value)] = value

    def setdefault(self, value: T) -> T:
        """Keeps a value under its type unless there is one already; returns the one that is kept."""
        kept = self._values.setdefault(type(value), value)
        assert isinstance(kept, type(value)), "values are kept under their types"
        return kept

    def remove(self, kind: type) -> None:
        """Removes the value of a type, if there is one."""
        self._values.pop(kind, None)


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
    """Sizes of the nested groups (`message_store`); empty where every rank exchanges messages with rank 0."""

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


class UnconnectedComm:
    """The comm of a launched rank that cannot reach the others: sufficient for loads that exchange no messages."""

    def __init__(self, launched: LaunchedRank, timeout: float) -> None:
        self.rank, self.size, self.timeout, self._launched = launched.rank, launched.size, timeout, launched
        self.state = CommState()

    def post(self, key: str, data: bytes) -> None:
        raise unconnected_error(self._launched)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        raise unconnected_error(self._launched)

    def drop(self, keys: Sequence[str]) -> None:
        pass


def unconnected_error(launched: LaunchedRank, name: str = "comm") -> RankError:
    """Returns the error where ranks would have to exchange messages; argument `name` would say how."""
    others = ", tc.comm(store, rank, size) or MPI.COMM_WORLD of mpi4py" if name == "comm" else ""
    return RankError(
        name,
        ranks={launched.rank: "it cannot reach the others"},
        expected=f"a way to reach the other ranks, of {launched.size}",
        found=f"{launched.evidence}, but no process group of torch.distributed, and no {name}",
        hint=f"Call dist.init_process_group first, or pass {name}={others}; a process that is to do this by itself, "
        f'whatever the others do, passes {name}="alone"',
    )


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
    """Returns connected comms for `size` threads, by rank: each is the `comm=` of calls that a thread makes as a rank.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from treeckpt.testing import thread_comms
    >>> with ThreadPoolExecutor(2) as pool:
    ...     saves = [
    ...         pool.submit(tc.save, "two", {"own": tc.PerRank(comm.rank)}, comm=comm)
    ...         for comm in thread_comms(2)
    ...     ]
    >>> tc.inspect("two").world
    2

    Args:
        timeout: seconds to wait for another rank.
        group_sizes: as for `TorchComm`.
    """
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
        group_sizes: of the nested groups whose leaders pass messages on (`message_store`); by default those for
            the size.
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
        self._lock, self._owner = threading.RLock(), OwnProcess()

    def _check_owner(self) -> None:
        """Refuses a process that was forked from the rank's process: both would use one connection."""
        if not self._owner.is_this:
            raise RankError(
                "comm",
                ranks={self.rank: f"process {os.getpid()} was forked from it"},
                expected=f"a call in process {self._owner.pid}, which is rank {self.rank}",
                hint='In a forked child pass comm="alone"',
            )

    def post(self, key: str, data: bytes) -> None:
        self._check_owner()
        self.common.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        self._check_owner()
        return self.common.wait(keys, timeout)

    def drop(self, keys: Sequence[str]) -> None:
        if self._owner.is_this:
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


class LaunchedRank(msgspec.Struct, frozen=True):
    """The rank that a launcher has given this process."""

    rank: int
    size: int
    evidence: str
    """What says so, as a variable of the launcher, as text for errors."""


def launched_rank(environment: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Returns this process's rank among those that were started with it; None where no launcher is found."""
    variables = os.environ if environment is None else environment
    torchrun = _rank_in(variables, "RANK", "WORLD_SIZE")
    if torchrun is not None and torchrun.size == 1 and "TORCHELASTIC_RUN_ID" in variables:
        # torchrun says that there is one rank, and it is started by srun and mpirun, not the reverse
        candidates = [_rank_of_jax()]
    else:
        candidates = [_rank_of_jax(), torchrun, _rank_of_slurm(variables)]
        candidates += [_rank_in(variables, *names) for names in _MPI]
    return next((launched for launched in candidates if launched is not None and launched.size > 1), None)


def local_rank(environment: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Returns this process's number among those that a launcher has started on this host; None where none says so."""
    variables = os.environ if environment is None else environment
    return next((launched for names in _LOCAL if (launched := _rank_in(variables, *names)) is not None), None)


def _rank_of_slurm(variables: Mapping[str, str]) -> LaunchedRank | None:
    step = _number(variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID")))
    if step is None or step >= _SLURM_SPECIAL:
        return None  # the shell of sbatch or salloc has the job's number of tasks, but is none of them
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    return _rank_in(variables, "SLURM_PROCID", size_name)


def _rank_of_jax() -> LaunchedRank | None:
    """Returns the rank that jax.distributed was initialised with, if the program uses it; does not import jax."""
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    rank, size = getattr(state, "process_id", None), getattr(state, "num_processes", None)
    if isinstance(rank, int) and isinstance(size, int) and size > 1:
        return LaunchedRank(rank, size, f"jax.distributed, process {rank} of {size}")
    return None


def _rank_in(variables: Mapping[str, str], rank_name: str, size_name: str) -> LaunchedRank | None:
    rank, size = _number(variables.get(rank_name)), _number(variables.get(size_name))
    if rank is None or size is None or not rank < size:
        return None
    return LaunchedRank(rank, size, f"{rank_name}={rank} and {size_name}={size} in the environment")


def _number(text: str | None) -> int | None:
    # `isdigit` alone is true of digits such as a raised 2, which `int` refuses
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


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


def comm(store: Any, rank: int, size: int, *, timeout: float = TIMEOUT) -> Comm:
    """Returns the comm of a rank over a Store of torch.distributed, where there is no process group.

    It is what `comm=` takes, as `(rank, size, store)` does. Calls with one Store return one comm, whose first `timeout`
    counts. Ranks are processes, or threads of one. A Store that a run before has left may be used again, once all of
    its ranks have ended.

    >>> import torch.distributed as dist
    >>> report = tc.save("alone", {"step": 1}, comm=tc.comm(dist.HashStore(), 0, 1))

    Args:
        store: a TCPStore, FileStore, HashStore or PrefixStore: of each rank its own, of the same content.
        rank, size: the number of this rank, below the number of ranks.
        timeout: seconds to wait for another rank.

    Raises:
        TreeckptError: one of them is something else.
    """
    numbers = all(isinstance(number, int) and not isinstance(number, bool) for number in (rank, size))  # pyright: ignore[reportUnnecessaryIsInstance]
    if not numbers or not 0 <= rank < size or not all(hasattr(store, name) for name in _STORE_METHODS):
        expected = "a Store of torch.distributed, and a rank from 0 up to size - 1"
        raise TreeckptError("comm", expected=expected, found=f"{store!r:.60}, rank {rank!r:.20} of {size!r:.20}")
    return _kept_comm(store, (rank, size), lambda: TorchComm(own_connection(store), rank, size, timeout=timeout))


_STORE_METHODS = ("set", "get", "check", "delete_key")
_MPI_TAG = 32_749
"""The tag of the message by which rank 0 tells the others where its TCPStore is; MPI has tags up to 32767 at least."""


class MpiComm:
    """The comm of a rank of an MPI program: over a TCPStore that rank 0 serves from the first message on.

    Args:
        mpi: a communicator with the methods of mpi4py's.
    """

    def __init__(self, mpi: Any, timeout: float = TIMEOUT) -> None:
        self.rank, self.size, self.timeout, self._mpi = mpi.Get_rank(), mpi.Get_size(), timeout, mpi
        self.group_sizes = group_sizes_for(self.size)
        self.state = CommState()

    @cached_property
    def _connected(self) -> TorchComm:
        host = socket.gethostname()
        if self.rank == 0:
            store = open_tcp_store(host, 0, serves=True)
            others = range(1, self.size)
            self._sent = [self._mpi.isend((host, store.port), dest=rank, tag=_MPI_TAG) for rank in others]
        else:
            deadline = time.monotonic() + self.timeout
            while not self._mpi.iprobe(source=0, tag=_MPI_TAG):
                if time.monotonic() > deadline:
                    text = f"silent for {self.timeout:g} s"
                    raise RankError("ranks", ranks={0: text}, expected="the address of its message store")
                time.sleep(0.01)
            store = open_tcp_store(*self._mpi.recv(source=0, tag=_MPI_TAG), serves=False)
        return TorchComm(store, self.rank, self.size, timeout=self.timeout)

    def post(self, key: str, data: bytes) -> None:
        self._connected.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return self._connected.wait(keys, timeout)

    def drop(self, keys: Sequence[str]) -> None:
        self._connected.drop(keys)

    def leader_store(self, leader: int) -> MessageStore:
        return self._connected.leader_store(leader)


_KEPT: dict[int, tuple[weakref.ref[Any], dict[object, Comm]]] = {}
"""The comms over each Store or communicator of the user, by its id: ranks count their saves on one comm."""
_KEPT_LOCK = threading.Lock()


def _kept_comm(over: Any, key: object, make: Callable[[], Comm]) -> Comm:
    """Returns the comm of an object that is kept under a key; makes it the first time."""
    with _KEPT_LOCK:
        reference, comms = _KEPT.get(id(over), (None, dict[object, Comm]()))
        if reference is None or reference() is not over:  # a new one may have the id of one that is gone
            for number in [number for number, (one, _) in _KEPT.items() if one() is None]:
                del _KEPT[number]
            comms = dict[object, Comm]()
            _KEPT[id(over)] = weakref.ref(over), comms
        if key not in comms:
            comms[key] = make()
        return comms[key]


def as_comm(given: Any, *, sends_messages: bool = True) -> Comm:
    """Returns the comm that the `comm` argument of a public function stands for.

    Args:
        given: a comm, a process group, (rank, size, store), a communicator of mpi4py, "alone", or None for the default
            group (this process alone where there is none).
        sends_messages: whether the call exchanges messages. Most loads do not: they need only rank and world size.

    Raises:
        RankError: a launcher has started other ranks, which None does not reach.
        TreeckptError: it is none of these.
    """
    if given is None:
        launched = launched_rank() if not world_size() else None
        if launched is not None and sends_messages:
            raise unconnected_error(launched)
        return default_comm() if launched is None else UnconnectedComm(launched, TIMEOUT)
    kind: type[object] = type(given)
    if kind is str and given == "alone":
        if world_size() <= 1:
            return _SOLO
        comms = _default_store_comms()
        # kept, so that plans and the writer process last from save to save, as those of `_SOLO` do
        return comms.groups.setdefault("alone", SoloComm((comms.world.rank,)))
    if hasattr(given, "post"):
        return given  # a comm is known by its methods: it may be of a class of the user's
    if issubclass(kind, tuple) and len(given) == 3:
        rank, size, store = given
        return comm(store, rank, size)
    if hasattr(given, "Get_rank") and hasattr(given, "Get_size"):
        return _kept_comm(given, None, lambda: MpiComm(given) if given.Get_size() > 1 else SoloComm())
    if _is_group(given):
        return comm_of(given)
    raise TreeckptError(
        "comm",
        expected="a process group of torch.distributed, what tc.comm(store, rank, size) returns, (rank, size, store) "
        'with a Store of torch.distributed, a communicator of mpi4py, "alone", or None for all ranks',
        found=f"{given!r:.60}",
        hint="dist.new_group(ranks) makes a process group, and DeviceMesh.get_group() gives that of a mesh",
    )


def _is_group(given: Any) -> bool:
    if "torch" not in sys.modules:
        return False  # there is none
    import torch.distributed as dist

    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    return isinstance(given, dist.ProcessGroup) or (isinstance(given, type(outside)) and given == outside)


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


def own_connection(store: Any) -> Any:
    """Returns a clone of a Store, so that no wait blocks others' use of it."""
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        return store.clone()
    return store  # a kind of Store without clones is shared, and each call on it is a short poll


class _StoreComms:
    """The comms over one default Store: the comm of all ranks, and those of groups by prefix."""

    def __init__(self, original: Any, rank: int, size: int) -> None:
        self.original, self.store = original, own_connection(original)
        self.world = TorchComm(self.store, rank, size)
        self.groups: dict[str, Comm] = {}


_COMMS: dict[int, _StoreComms] = {}
"""The comms of each default process group, by the id of its Store. The group itself is a global of torch."""


def _default_store_comms() -> _StoreComms:
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    comms = _COMMS.get(id(store))
    # a new Store may have the id of one that is gone
    if comms is None or comms.original is not store:
        _COMMS.clear()
        comms = _COMMS[id(store)] = _StoreComms(store, dist.get_rank(), dist.get_world_size())
    return comms


_SOLO = SoloComm()
"""The one comm of a process without others: it keeps plans and the writer process from save to save."""
