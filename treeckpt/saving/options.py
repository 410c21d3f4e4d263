"""The options of a save, and where a manager's save takes its lineage from."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, SupportsIndex

import msgspec

from ..core.format.lineage import Lineage
from ..errors import TreeckptError

__all__ = ["Busy", "Follow", "SaveOptions", "follow_of", "following", "shard_limit"]

Busy = Literal["wait", "skip", "error"]
Follow = Callable[[str], Lineage]
"""Gives the lineage of the save with this id; it raises nothing."""
_follow: ContextVar[Follow | None] = ContextVar("treeckpt_follow", default=None)


@contextlib.contextmanager
def following(follow: Follow) -> Iterator[None]:
    """A save that is started in the body takes its lineage from `follow`, once it is agreed and on rank 0."""
    token = _follow.set(follow)
    try:
        yield
    finally:
        _follow.reset(token)


class SaveOptions(msgspec.Struct, frozen=True):
    """The options of a save; see `treeckpt.save`."""

    step: int | None = None
    overwrite: bool = False
    verify_replicas: bool = False
    allow_pickle: bool = False
    max_shard_bytes: int = 1 << 62
    namespace: str = ""
    busy: Busy = "wait"
    rehearsal: bool = False
    """Only plans: nothing is written, and nothing looked for at the path."""


def shard_limit(limit: Any) -> int:
    """Bytes of a shard, at most, of any type of integer; None is no limit.

    Raises:
        TreeckptError: it is none, or below 1.
    """
    if limit is None:
        return 1 << 62
    if isinstance(limit, bool) or not isinstance(limit, SupportsIndex) or operator.index(limit) < 1:
        hint = "None has each rank write one file"
        raise TreeckptError("max_shard_bytes", expected="bytes, 1 or more", found=f"{limit!r:.60}", hint=hint)
    return operator.index(limit)


def follow_of() -> Follow | None:
    """What gives the lineage of the save that is being started; None for one that no manager makes."""
    return _follow.get()
