"""What a comm keeps between saves: the position in the rounds, and one value per type for the comm's users."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

T = TypeVar("T")


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
    """When the last round was abandoned here, or ended without a rank, on the monotonic clock."""
    unposted_notes: list[tuple[int, str]] = dataclasses.field(default_factory=list[tuple[int, str]])
    """Rounds that this rank has abandoned, and why, of which the others do not know yet."""
    posted_notes: list[list[str]] = dataclasses.field(default_factory=list[list[str]])
    """Keys of the notes about others."""
    unread_keys: dict[bool, list[str]] = dataclasses.field(default_factory=dict[bool, list[str]])
    """Keys of messages that some rank may still read, of rounds (False) and of branches (True)."""
    managers: int = 0
    """Managers created so far; the number keeps their messages apart."""
    loads: int = 0
    """Loads in the background that end together, so far, likewise."""
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
