"""The values of an array for `show`: as numpy prints them, with statistics, from reads of bounded size.

An array of at most `WHOLE` bytes is read whole. Of a larger one, the corners that numpy would print are read, and the
first `WHOLE` bytes for the statistics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from .._arrays.base import raw_dtype
from .._core.format.records import AliasRecord, Index, Leaf, PerRankArrays
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.region import Region
from .._inspect.numbers import ElementStats, as_numbers, element_stats
from .._io.storage.store import Store
from .._loading.peek import Peek, peek, peek_blob

WHOLE = 4 << 20
"""Bytes that are read for the statistics, at most."""
PRINTED = 1000
"""Elements from which numpy prints the corners only."""
EDGE = 3
"""Elements at each end of a dimension that are printed of a larger array, as by numpy."""
DIMS = 4
"""Dimensions that are printed of a larger array: of those before, the first element."""
WIDTH = 100
"""Characters of a line."""
BLOB_SHOWN = 500
"""Bytes of a text or bytes that are printed."""


class LeafValues(msgspec.Struct, frozen=True):
    """Values of an array, or the first bytes of a text or bytes in shards."""

    text: str
    """As numpy, or Python, prints them; `...` stands for what is left out."""
    rank: int | None
    """Whose array it is, of one for each rank."""
    at: tuple[int, ...]
    """Indices of the leading dimensions of which `text` shows one element."""
    statistics: ElementStats | None
    """Of the first `sampled` elements, in C order; None for elements that are no numbers."""
    sampled: int
    elements: int
    read: int
    """Bytes that were read, checksums included."""
    verified: bool
    """Whether all that was read matches its checksums."""


def read_values(store: Store, index: Index, leaf: Leaf) -> LeafValues | None:
    """Reads values of a leaf; None for one without elements, and for a view of another leaf.

    Raises:
        TreeckptError: the bytes are missing or damaged, or do not lie in a file as they are.
    """
    record = leaf.record
    if isinstance(record, AliasRecord) and record.view is None:
        leaf = index.entries[record.of]
    if leaf.spec is None and leaf.stored is not None:
        rank = int(decode_runs(leaf.ranks)[0]) if leaf.ranks is not None else None
        text, read = peek_blob(store, index, leaf, BLOB_SHOWN, rank=rank)
        return LeafValues(
            text,
            rank,
            at=(),
            statistics=None,
            sampled=read.region.size,
            elements=leaf.stored.nbytes,
            read=read.read,
            verified=read.verified,
        )
    if leaf.spec is None or not math.prod(leaf.spec.shape) or isinstance(leaf.record, AliasRecord):
        return None
    rank = int(decode_runs(leaf.ranks or ())[0]) if isinstance(leaf.record, PerRankArrays) else None
    shape, dtype = leaf.spec.shape, leaf.spec.dtype
    itemsize, elements = dtype_of(dtype).itemsize, math.prod(shape)
    sample = _first_rows(shape, max(1, WHOLE // itemsize))
    reads = [peek(store, index, leaf, sample, rank=rank)]
    at = (0,) * (len(shape) - DIMS if elements > PRINTED else 0)
    if sample.size == elements:
        raw = _raw(reads[0], itemsize)[at]
    else:
        corners = _corners(shape, len(at))
        reads += [peek(store, index, leaf, region, rank=rank) for region, _ in corners]
        raw = np.zeros([min(n, 2 * EDGE + 1) for n in shape[len(at) :]], raw_dtype(itemsize))
        for (_, place), found in zip(corners, reads[1:], strict=True):
            raw[place] = _raw(found, itemsize)[at]
    return LeafValues(
        _text(raw, dtype, threshold=PRINTED if sample.size == elements else 0),
        rank,
        at=at,
        statistics=element_stats(reads[0].data, dtype),
        sampled=sample.size,
        elements=elements,
        read=sum(found.read for found in reads),
        verified=all(found.verified for found in reads),
    )


def _first_rows(shape: Sequence[int], most: int) -> Region:
    """Returns the region of the first elements in C order, at most so many; whole where they all fit."""
    sizes = list(shape)
    for dim in range(len(sizes)):
        below = math.prod(shape[dim + 1 :])
        sizes[dim] = min(sizes[dim], max(1, most // below))
    return Region((0,) * len(sizes), tuple(sizes))


def _corners(shape: Sequence[int], leading: int) -> list[tuple[Region, tuple[slice, ...]]]:
    """Returns the regions that numpy prints of an array, and where each lies in an array of the corners."""
    ends: list[list[tuple[int, int, slice]]] = [[(0, 1, slice(None))]] * leading
    for n in shape[leading:]:
        if n <= 2 * EDGE:
            ends.append([(0, n, slice(None))])
        else:
            ends.append([(0, EDGE, slice(0, EDGE)), (n - EDGE, EDGE, slice(-EDGE, None))])
    return [
        (Region(tuple(p[0] for p in parts), tuple(p[1] for p in parts)), tuple(p[2] for p in parts[leading:]))
        for parts in itertools.product(*ends)
    ]


def _raw(found: Peek, itemsize: int) -> np.ndarray:
    return found.data.reshape(-1).view(raw_dtype(itemsize)).reshape(found.region.shape)


def _text(raw: np.ndarray, dtype: str, *, threshold: int) -> str:
    kind = dtype_of(dtype).numpy
    values = np.ascontiguousarray(raw).view(kind).reshape(raw.shape) if kind is not None else as_numbers(raw, dtype)
    assert values is not None, "elements without a numpy dtype are numbers"
    if kind is None and values.dtype.kind == "f":
        values = values.astype(np.float32)  # exact: these have fewer bits
    return np.array2string(values, threshold=threshold, edgeitems=EDGE, max_line_width=WIDTH)
