"""Finds the leaves that damaged bytes of files make unreadable, by the chunks that the index lists.

A leaf is damaged when any byte is that its checksums cover: damage counts by blocks, not by elements. Leaves that share
storage with a damaged leaf are damaged too, and so are all columns of a keyed table when one of them is, because its
rows belong together.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...errors import visible
from ..tree.structure import TABLE_KEYS
from .byte_map import extents_in_file
from .records import AliasRecord, File, Index


class BadBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start:stop` of a file (header included) that are missing or changed, or could not be read."""

    file: str
    start: int
    stop: int
    why: str
    unread: str = ""
    """The name of the error by which they could not be read, as EIO: nothing is known of them. Else empty."""


class DamagedLeaf(msgspec.Struct, frozen=True, order=True):
    """A leaf that cannot be read, and the damaged bytes of a file that are the cause.

    Attributes:
        path: of the leaf.
        file: its name.
        start: first byte in the file, header included.
        stop: the byte after the last.
    """

    path: str
    file: str
    start: int
    stop: int

    def __str__(self) -> str:
        return visible(f"{self.path or '<root>'}: bytes {self.start}:{self.stop} of {self.file}")


def leaves_in_range(index: Index, file: File, start: int, stop: int) -> list[int]:
    """Returns the numbers of the leaves in bytes `start:stop` of a file; all its leaves if its header is hit."""
    whole = start < file.header
    return [e.leaf for e in extents_in_file(index, file) if whole or (e.start < stop and e.stop > start)]


def rank_path(path: str, rank: int) -> str:
    """Returns a path of the index as it stands in the shard of one rank."""
    return path.replace("~rank*", f"~rank{rank}")


def damaged_leaves(
    index: Index, bad: Iterable[BadBytes], *, rank: int | None = None
) -> dict[int, tuple[DamagedLeaf, ...]]:
    """Returns the damaged leaves with the bytes that are the cause, by leaf number.

    Args:
        rank: the rank whose state counts under `PerRank`; None counts that of all ranks.
    """
    found: dict[int, list[DamagedLeaf]] = {}
    for part in bad:
        file = index.file_names[part.file]
        for number in dict.fromkeys(leaves_in_range(index, file, part.start, part.stop)):
            leaf = index.entries[number]
            if leaf.ranks is None or rank in (None, file.rank):
                path = leaf.path if rank is not None else rank_path(leaf.path, file.rank)
                found.setdefault(number, []).append(DamagedLeaf(path, part.file, part.start, part.stop))
    for first, others in _dependents(index, found):
        for other in others:
            new = [msgspec.structs.replace(d, path=index.entries[other].path) for d in found[first]]
            found[other] = sorted({*found.get(other, []), *new})
    return {number: tuple(found[number]) for number in sorted(found)}


def _dependents(index: Index, damaged: Iterable[int]) -> list[tuple[int, list[int]]]:
    """Returns for each damaged leaf those that are damaged with it."""
    known = set(damaged)
    pairs = [(number, columns) for columns in _table_leaves(index) for number in columns if number in known]
    reached = known | {number for _, columns in pairs for number in columns}
    aliases: dict[int, list[int]] = {}
    for leaf in index.entries:
        if isinstance(leaf.record, AliasRecord) and leaf.record.of in reached:
            aliases.setdefault(leaf.record.of, []).append(leaf.number)
    return pairs + list(aliases.items())


def _table_leaves(index: Index) -> list[list[int]]:
    """Returns the numbers of the leaves of each keyed table."""
    numbers = {key: number for number, key in enumerate(index.paths)}
    found: list[list[int]] = []
    for ids in index.tables:
        path, ranks = index.paths[ids]
        prefix = path.removesuffix(TABLE_KEYS[0])
        slots = prefix + TABLE_KEYS[2] + "/"
        columns = [numbers[prefix + key, ranks] for key in TABLE_KEYS[:2] if (prefix + key, ranks) in numbers]
        found.append(columns + [n for (p, r), n in numbers.items() if r == ranks and p.startswith(slots)])
    return found
