"""What a fill that failed has left in its target, for the text of the error.

Which bytes had reached their arrays is known by the stretches of the shards that were read; an array with bytes in one
of these may have changed, all others have not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from ..core.format.byte_map import extents_in_file
from ..core.format.records import AliasRecord, File, Leaf
from ..core.sharding.region import coalesce
from ..errors import TreeckptError
from .read_batch import ReadBatch
from .transforms.view import MadeLeaf

__all__ = ["add_changed"]

SHOWN = 5


def add_changed(error: Exception, fillings: Sequence[ReadBatch]) -> None:
    """Adds to the error of a fill which arrays of the target may have changed."""
    total, changed = sum(len(filling.asked) for filling in fillings), [p for f in fillings for p in changed_in(f)]
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        names = ", ".join(path or "<root>" for path in changed[:SHOWN])
        text = f"The target is partly filled: {len(changed)} of {total} arrays may have changed: {names}{more}"
    else:
        text = "The target was not changed"
    if isinstance(error, TreeckptError):
        error.add_hint(text)
    else:
        error.add_note(text)


def changed_in(filling: ReadBatch) -> list[str]:
    """The paths of a target's arrays that may hold some of what was read."""
    stretches: dict[str, tuple[File, list[tuple[int, int]]]] = {}
    for reading in filling.begun:
        file = reading.stretch.opened.file
        found = stretches.setdefault(file.name, (file, []))[1]
        found.append((file.header + reading.stretch.low, file.header + reading.stretch.high))
    met: set[int] = set()
    for file, ranges in stretches.values():
        starts, stops = np.array(sorted(ranges), np.int64).T
        starts, stops = coalesce(starts, stops, 0)[0].T.tolist()
        for extent in extents_in_file(filling.index, file):
            at = bisect_right(stops, extent.start)
            if at < len(starts) and starts[at] < extent.stop:
                met.add(extent.leaf)
    return [path for path, leaf in filling.asked if not met.isdisjoint(_numbers(leaf))]


def _numbers(leaf: Leaf) -> list[int]:
    """The saved arrays whose bytes a leaf takes."""
    leaves = leaf.sources.values() if isinstance(leaf, MadeLeaf) else [leaf]
    return [one.record.of if isinstance(one.record, AliasRecord) else one.number for one in leaves]
