"""The damage of a checkpoint as pages mark it: its bytes by file, and the leaves that they make unreadable.

It is what the last verification found, and what the listing of the directory shows: shards that are missing or cut
short.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from treeckpt._core.format.byte_map import BadBytes, unreadable_leaves
from treeckpt._inspect.outline import Outline
from treeckpt._runs.verification import Verification
from treeckpt._threads import call_in_thread

LOCATE_WAIT = 0.5
"""Seconds for which a page waits until it is known which leaves are damaged; then it says that it is not."""
_NO_LEAVES = np.empty(0, np.int64)


class Damage(msgspec.Struct, frozen=True, eq=False):
    """What is damaged."""

    bad: tuple[BadBytes, ...] = ()
    """By the shard and where they start; `why` is a sentence."""
    parts: tuple[np.ndarray, ...] = ()
    """The numbers of the leaves that cannot be read because of each of them, rising."""
    located: bool = True
    """Whether it is known which leaves these are; of a million leaves that takes a while."""
    leaves: np.ndarray = _NO_LEAVES
    """All these numbers."""
    ranges: dict[str, tuple[list[int], list[int]]] = {}
    """Of each shard where damaged bytes start, and how far those up to each of these reach."""

    def holds(self, leaf: int) -> bool:
        """Whether a leaf is damaged."""
        return self.count(leaf, leaf + 1) > 0

    def count(self, first: int, stop: int) -> int:
        """Counts the damaged leaves among those from `first` to before `stop`."""
        low, high = np.searchsorted(self.leaves, [first, stop]).tolist()
        return high - low

    def of_bytes(self, file: str, start: int, stop: int) -> bool:
        """Whether any of the bytes of a shard is damaged."""
        starts, reach = self.ranges.get(file, ([], []))
        before = bisect_left(starts, stop)
        return before > 0 and reach[before - 1] > start

    @property
    def rows(self) -> int:
        """How many rows list all of it: one for each range and leaf, and for a range that no leaf needs."""
        return sum(max(1, len(leaves)) for leaves in self.parts)

    def rows_from(self, first: int, count: int) -> list[tuple[BadBytes, int | None]]:
        """Returns some of these rows."""
        found: list[tuple[BadBytes, int | None]] = []
        for one, leaves in zip(self.bad, self.parts, strict=True):
            here = max(1, len(leaves))
            if first < here and len(found) < count:
                some: list[int | None] = leaves[first : first + count - len(found)].tolist() or [None]
                found += [(one, leaf) for leaf in some]
            first = max(0, first - here)
        return found


NO_DAMAGE = Damage()


def damage_of(outline: Outline, found: Verification | None, sizes: Mapping[str, int]) -> Damage:
    """Returns the damage of a checkpoint; which leaves it hits may be found out later, see `Damage.located`.

    Args:
        found: the last verification of it.
        sizes: of the files of its directory, by name.
    """
    index, bad = outline.index, set[BadBytes]()
    for file in index.file_list:
        size, whole = sizes.get(file.name), file.header + file.nbytes
        if size is None:
            bad.add(BadBytes(file.name, 0, whole, "the file is missing"))
        elif size < whole:
            bad.add(BadBytes(file.name, size, whole, f"the file ends at byte {size}"))
    there = {one.file for one in bad}
    for part in found.problems if found is not None else ():
        if part.file in index.file_names and part.file not in there:
            bad.add(BadBytes(part.file, part.start, part.stop or index.file_names[part.file].header, part.text))
    if not bad:
        return NO_DAMAGE
    order = {file.name: number for number, file in enumerate(index.file_list)}
    in_order = tuple(sorted(bad, key=lambda one: (order[one.file], one.start)))
    located = _located(outline, in_order)
    if wait([located], LOCATE_WAIT).not_done:
        nothing = (_NO_LEAVES,) * len(in_order)
        return Damage(in_order, nothing, located=False, ranges=_ranges(in_order))
    return located.result()


_known = WeakKeyDictionary[Outline, tuple[tuple[BadBytes, ...], Future[Damage]]]()
"""The last damage of each outline that is open."""


def _located(outline: Outline, bad: tuple[BadBytes, ...]) -> Future[Damage]:
    known = _known.get(outline)
    if known is None or known[0] != bad:
        known = _known[outline] = bad, call_in_thread(partial(_locate, outline, bad), "treeckpt-damage")
    return known[1]


def _locate(outline: Outline, bad: tuple[BadBytes, ...]) -> Damage:
    parts = unreadable_leaves(outline.index, bad)
    return Damage(bad, tuple(parts), leaves=np.unique(np.concatenate(parts)), ranges=_ranges(bad))


def _ranges(bad: Sequence[BadBytes]) -> dict[str, tuple[list[int], list[int]]]:
    ranges: dict[str, tuple[list[int], list[int]]] = {}
    for one in bad:
        starts, reach = ranges.setdefault(one.file, ([], []))
        starts.append(one.start)
        reach.append(max([one.stop, *reach[-1:]]))
    return ranges
