"""How ranks reach each other: a board of small messages, without any collective of the user's process groups.

A comm only posts, waits for and removes messages by key; who says what when, and which save a message belongs to, is
for `io.rounds`. `TorchComm` goes over a clone of torch.distributed's Store (a connection of its own), so a wait never
blocks the training's use of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ..core.errors import RankError, TreeckptError

__all__ = [
    "Comm",
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


class Comm(Protocol):
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


class SoloComm:
    """One rank, alone: it has nobody to post to."""

    def __init__(self) -> None:
        self.rank, self.size, self.timeout = 0, 1, TIMEOUT
        self.memory: dict[str, Any] = {}

    def post(self, key: str, data: bytes) -> None:
        pass

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return [None] * len(keys)

    def drop(self, keys: Sequence[str]) -> None:
        pass


class _Board:
    """Messages between threads that act as ranks."""

    def __init__(self) -> None:
        self.messages: dict[str, bytes] = {}
        self.changed = threading.Condition()


class ThreadComm:
    """Threads of one process as ranks: for tests, and for what needs no more."""

    def __init__(self, rank: int, size: int, board: _Board, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.memory: dict[str, Any] = {}
        self._board = board

    def post(self, key: str, data: bytes) -> None:
        with self._board.changed:
            self._board.messages[key] = data
            self._board.changed.notify_all()

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        board = self._board
        with board.changed:
            board.changed.wait_for(lambda: all(key in board.messages for key in keys), timeout)
            return [board.messages.get(key) for key in keys]

    def drop(self, keys: Sequence[str]) -> None:
        with self._board.changed:
            for key in keys:
                self._board.messages.pop(key, None)


def thread_comms(size: int, *, timeout: float = TIMEOUT) -> list[ThreadComm]:
    """Connected comms for `size` threads, by rank."""
    board = _Board()
    return [ThreadComm(rank, size, board, timeout) for rank in range(size)]


class TorchComm:
    """Processes of torch.distributed, over its key-value Store.

    Args:
        store: any torch.distributed Store; the default group's is cloned by `default_comm`.
        timeout: seconds.
        prefix: of all keys, which keeps comms on one store apart.
        members: the global rank of each rank, where these are some ranks of the default group only.
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
    ) -> None:
        self.rank, self.size, self.timeout, self.members = rank, size, timeout, members
        self.memory: dict[str, Any] = {}
        self._store, self._prefix = store, prefix

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [f"{self._prefix}/{key}" for key in keys]

    def post(self, key: str, data: bytes) -> None:
        try:
            self._store.set(f"{self._prefix}/{key}", data)
        except RuntimeError as error:
            raise _gone(error) from error

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        """Polls: a blocking wait would hold this connection and cannot be told from a broken one when it ends."""
        deadline, pause, names = time.monotonic() + timeout, 0.0005, self._keys(keys)
        try:
            while not (complete := self._store.check(names)) and time.monotonic() < deadline:
                time.sleep(min(pause, timeout))
                pause = min(pause * 1.5, 0.05)
            # get waits for what is not there, so it is asked for only what is
            return [bytes(self._store.get(name)) if complete or self._store.check([name]) else None for name in names]
        except RuntimeError as error:
            raise _gone(error) from error

    def drop(self, keys: Sequence[str]) -> None:
        with contextlib.suppress(RuntimeError):
            for name in self._keys(keys):
                self._store.delete_key(name)


def _gone(error: RuntimeError) -> RankError:
    return RankError(
        "ranks",
        ranks={0: f"its message store does not answer: {error!s:.200}"},
        expected="torch.distributed's Store, which rank 0 usually serves",
        hint="Look at what ended rank 0. A save that was under way may be committed: look before saving there again",
    )


def default_comm() -> Comm:
    """The comm of this process: over torch.distributed's default group if that is up, else alone.

    It is kept with the default group's Store, so that ranks count their saves alike and a new group starts anew.
    """
    if "torch" not in sys.modules:
        return _SOLO
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return _SOLO
    return _kept().world


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
    kept = _kept()
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


def as_comm(comm: Any) -> Comm:
    """What the `comm` of a public function stands for: a comm itself, a process group, or None for the default."""
    if comm is None:
        return default_comm()
    return comm if hasattr(comm, "post") else comm_of(comm)


def members_of(comm: Comm) -> tuple[int, ...] | None:
    """The global rank of each of a comm's ranks; None where they are the same."""
    return getattr(comm, "members", None)


def global_rank(comm: Comm) -> int:
    """This rank's number in the default process group, by which DTensors and ShardedTensors name ranks."""
    members = members_of(comm)
    return comm.rank if members is None else members[comm.rank]


class _Kept:
    """The comms over one default Store: that of all ranks, and those of groups, by prefix."""

    def __init__(self, original: Any, rank: int, size: int) -> None:
        self.original, self.store = original, _clone(original)
        self.world = TorchComm(self.store, rank, size)
        self.groups: dict[str, TorchComm] = {}


_COMMS: dict[int, _Kept] = {}
"""Of the default process group, which is itself a global of torch's."""


def _kept() -> _Kept:
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    kept = _COMMS.get(id(store))
    if kept is None or kept.original is not store:
        _COMMS.clear()
        kept = _COMMS[id(store)] = _Kept(store, dist.get_rank(), dist.get_world_size())
    return kept


_SOLO = SoloComm()
"""The one comm of a process that is alone: it keeps plans, and the writer, from save to save."""


def _clone(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store  # a kind of Store without clones: shared, its calls are short polls
