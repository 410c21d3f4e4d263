"""Messages of one user of a comm, kept apart from those of every other: the same comm under a prefix.

A save in the background and a question of the manager may then be under way at one time, each in its own rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .comm import Comm

__all__ = ["Channel"]


class Channel:
    """A comm whose keys begin with a name. Channels of one name on one comm are the same channel."""

    def __init__(self, comm: Comm, name: str) -> None:
        self._comm, self._name = comm, name
        self.rank, self.size = comm.rank, comm.size
        self.memory: dict[str, Any] = comm.memory.setdefault(f"channel {name}", {})

    @property
    def timeout(self) -> float:
        return self._comm.timeout

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [f"{self._name}/{key}" for key in keys]

    def post(self, key: str, data: bytes) -> None:
        self._comm.post(f"{self._name}/{key}", data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return self._comm.wait(self._keys(keys), timeout)

    def drop(self, keys: Sequence[str]) -> None:
        self._comm.drop(self._keys(keys))
