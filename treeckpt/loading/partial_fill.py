"""Says in the error of a failed fill which arrays of the target may have changed.

An array may have changed if it has bytes in a range of a shard that was written to its targets; all others have not.
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
from .transforms.view import ComposedLeaf

__all__ = ["add_changed"]

SHOWN = 5


def add_changed(error: Exception, batches: Sequence[ReadBatch]) -> None:
    """Adds to the error of a fill which arrays of the target may have changed."""
    total = sum(len(batch.targets) for batch in batches)
    changed = [path for batch in batches for path in changed_in(batch)]
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


def changed_in(batch: ReadBatch) -> list[str]:
    """Returns the paths of the target's arrays that may hold some of what was read."""
    written: dict[str, tuple[File, list[tuple[int, int]]]] = {}
    for task in batch.written:
        file = task.byte_range.shard.file
        found = written.setdefault(file.name, (file, []))[1]
        found.append((file.header + task.byte_range.start, file.header + task.byte_range.stop))
    met: set[int] = set()
    for file, ranges in written.values():
        starts, stops = np.array(sorted(ranges), np.int64).T
        starts, stops = coalesce(starts, stops, 0)[0].T.tolist()
        for extent in extents_in_file(batch.checkpoint.index, file):
            at = bisect_right(stops, extent.start)
            if at < len(starts) and starts[at] < extent.stop:
                met.add(extent.leaf)
    return [path for path, leaf in batch.targets if not met.isdisjoint(_numbers(leaf))]


def _numbers(leaf: Leaf) -> list[int]:
    """Returns the numbers of the saved arrays whose bytes a leaf takes."""
    leaves = leaf.sources.values() if isinstance(leaf, ComposedLeaf) else [leaf]
    return [one.record.of if isinstance(one.record, AliasRecord) else one.number for one in leaves]
