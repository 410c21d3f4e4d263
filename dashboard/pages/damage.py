"""The damage of a checkpoint as pages mark it: its bytes by file, and the leaves that they make unreadable.

It is what the last verification found, and what the listing of the directory shows: shards that are missing or cut
short.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from treeckpt._core.format.byte_map import BadBytes, DamagedLeaf, damaged_leaves
from treeckpt._inspect.outline import Outline
from treeckpt._runs.verification import Verification


class Damage(msgspec.Struct, frozen=True):
    """What is damaged."""

    bad: tuple[BadBytes, ...] = ()
    """By the shard and where they start; `why` is a sentence."""
    parts: tuple[tuple[int, tuple[DamagedLeaf, ...]], ...] = ()
    """The numbers of the leaves that cannot be read, rising, each with the bytes that are the cause."""
    leaves: tuple[int, ...] = ()
    """These numbers."""

    def holds(self, leaf: int) -> bool:
        """Whether a leaf is damaged."""
        return self.count(leaf, leaf + 1) > 0

    def count(self, first: int, stop: int) -> int:
        """Counts the damaged leaves among those from `first` to before `stop`."""
        return bisect_left(self.leaves, stop) - bisect_left(self.leaves, first)

    def of_bytes(self, file: str, start: int, stop: int) -> bool:
        """Whether any of the bytes of a shard is damaged."""
        return any(one.file == file and one.start < stop and start < one.stop for one in self.bad)


NO_DAMAGE = Damage()


def damage_of(outline: Outline, found: Verification | None, sizes: Mapping[str, int]) -> Damage:
    """Returns the damage of a checkpoint.

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
    return _damage(outline, tuple(sorted(bad, key=lambda one: (order[one.file], one.start))))


@lru_cache(4)
def _damage(outline: Outline, bad: tuple[BadBytes, ...]) -> Damage:
    leaves = damaged_leaves(outline.index, bad)
    return Damage(bad, tuple(leaves.items()), tuple(leaves))
