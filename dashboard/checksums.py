"""The queries of a checkpoint's shards on demand: whether bytes match their checksums, and what each rank wrote."""

from __future__ import annotations

import msgspec

from treeckpt.core.analysis.outline import Outline
from treeckpt.core.text import visible
from treeckpt.errors import TreeckptError
from treeckpt.io.storage.checkpoint import Checkpoint
from treeckpt.io.storage.shard_reader import verify_shard
from treeckpt.io.storage.store import Store

from .library import Missing

__all__ = ["BalancePage", "ChecksumsPage", "balance_page", "checksums_page"]

PART = 64 << 20
"""Bytes that one request compares."""


class ChecksumsPage(msgspec.Struct, frozen=True):
    """A part of a shard's data, compared with its checksums."""

    file: int
    start: int
    stop: int
    nbytes: int
    """Of all of the data."""
    next: int | None
    """Where to go on; None where all of it was compared, or something was wrong."""
    problem: str | None
    """What is wrong."""


class BalancePage(msgspec.Struct, frozen=True):
    """What each rank wrote."""

    ranks: list[int]
    nbytes: list[int]
    mean: float


def checksums_page(store: Store, outline: Outline, number: int, start: int) -> ChecksumsPage:
    """Compares the checksums of shard `number` of the checkpoint in a store, from byte `start` of its data on.

    Raises:
        Missing: there is no such shard.
    """
    index = outline.index
    if not 0 <= number < len(index.file_list):
        raise Missing("There is no such shard in this checkpoint.")
    file = index.file_list[number]
    start = min(start, file.nbytes)
    stop = min(start + PART, file.nbytes)
    try:
        verify_shard(store, Checkpoint(store, index).shard(file), start, stop)
    except (TreeckptError, OSError) as error:
        return ChecksumsPage(number, start, start, file.nbytes, None, visible(str(error)))
    return ChecksumsPage(number, start, stop, file.nbytes, stop if stop < file.nbytes else None, None)


def balance_page(outline: Outline) -> BalancePage:
    """What each rank wrote, by rank."""
    by_rank: dict[int, int] = {}
    for file in outline.index.file_list:
        by_rank[file.rank] = by_rank.get(file.rank, 0) + file.nbytes
    mean = sum(by_rank.values()) / len(by_rank) if by_rank else 0.0
    return BalancePage(list(by_rank), list(by_rank.values()), mean)
