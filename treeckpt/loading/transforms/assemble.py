"""Reading of composed arrays into a target: boxes of saved arrays, permuted and cast while they are copied.

The part of a composed array that a target needs is divided into boxes of saved ones, each with a writer that knows the
place and order of its elements. The reader treats them as ordinary target pieces, so only their bytes are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ...arrays.base import ArrayTarget, ArrayWriter, Box, TargetPiece, raw_dtype
from ...arrays.registry import check_cast, library_of
from ...core.format.records import Index, Leaf
from ...core.planning.load_plan import Chunk
from ...core.sharding.dtypes import dtype_of
from ...core.sharding.region import Region, byte_runs
from ...core.tree.spec import ArraySpec
from .composed_array import Constant, SourceBox, parts_in, saved
from .view import ComposedLeaf


class PermutedWriter:
    """Writes boxes of a saved array into a target piece, permuted and cast."""

    def __init__(self, piece: TargetPiece, part: SourceBox, spec: ArraySpec) -> None:
        self.inner: ArrayWriter = piece.data
        self.start = part.region.relative_to(piece.region).offset
        self.axes, self.spec, self.dtypes = part.axes, spec, _casts(part.dtypes, spec.dtype)
        kept = [axis for axis in part.axes if axis >= 0]
        self.pick: tuple[Any, ...] = (*(slice(None) if d in kept else 0 for d in range(len(part.box.shape))), ...)
        rising = sorted(kept)
        self.order = [rising.index(axis) for axis in kept]
        self.wide: tuple[Any, ...] = (*(slice(None) if axis >= 0 else None for axis in part.axes), ...)

    def write(self, box: Box, data: np.ndarray) -> None:
        """Writes the data of a box of the saved array, of raw dtype."""
        where = tuple(
            slice(start, start + 1) if axis < 0 else slice(start + box[axis].start, start + box[axis].stop)
            for start, axis in zip(self.start, self.axes, strict=True)
        )
        for before, after in self.dtypes:
            data = library_of(self.spec).cast(data, before, after).reshape(data.shape)
        self.inner.write(where, data[self.pick].transpose(self.order)[self.wide])


def _casts(dtypes: Sequence[str], wanted: str) -> list[tuple[str, str]]:
    """Returns the (from, to) pairs of the casts to apply, in order."""
    return [(a, b) for a, b in itertools.pairwise([*dtypes, wanted]) if a != b]


def pieces_of(
    leaf: Leaf, target: ArrayTarget
) -> tuple[list[tuple[Leaf, list[TargetPiece]]], list[Callable[[], object]]]:
    """Returns (saved leaf, pieces to read) for a target, and functions that fill pieces of one value.

    Args:
        leaf: a composed one, or a saved one that is cast.

    Raises:
        MismatchError: a cast is not possible.
    """
    assert leaf.spec is not None, "values are decoded, not read"
    array, sources = saved(leaf.path, leaf.spec), {leaf.path: leaf}
    if isinstance(leaf, ComposedLeaf):
        array, sources = leaf.array, leaf.sources
    for dtypes in {part.dtypes for part in array.parts}:
        for before, after in _casts(dtypes, target.spec.dtype):
            check_cast(msgspec.structs.replace(target.spec, dtype=after), before, leaf.path)
    pieces: dict[str, list[TargetPiece]] = {}
    fills: list[Callable[[], object]] = []
    for piece in target.pieces:
        for part in parts_in(array, piece.region):
            if isinstance(part, Constant):
                fills.append(constant_write(part, piece, target.spec))
            elif part.region.size:
                writer = PermutedWriter(piece, part, target.spec)
                pieces.setdefault(part.source, []).append(TargetPiece(part.box, writer))
    return [(sources[source], found) for source, found in pieces.items()], fills


def constant_write(part: Constant, piece: TargetPiece, spec: ArraySpec) -> Callable[[], object]:
    """Returns a function that writes a constant into its part of a target piece."""
    kind = "float64" if isinstance(part.value, float) else "int64"
    data = np.array([part.value], kind).view(raw_dtype(8))
    for before, after in _casts((kind, *part.dtypes), spec.dtype):
        data = library_of(spec).cast(data, before, after)
    box = part.region.relative_to(piece.region).slices()
    return partial(piece.data.write, box, np.broadcast_to(data.reshape(-1)[0], part.region.shape))


def only_chunk(index: Index, leaf: ComposedLeaf, rank: int) -> Chunk | None:
    """Returns the range of a chunk that is a whole composed array; None if its bytes are permuted, joined or cast."""
    if len(leaf.array.parts) != 1 or not isinstance(part := leaf.array.parts[0], SourceBox):
        return None
    kept = [axis for axis in part.axes if axis >= 0]
    source = leaf.sources[part.source]
    if len(part.dtypes) > 1 or kept != sorted(kept) or source.spec is None or getattr(source.record, "view", None):
        return None
    chunks = index.chunks_of(source, part.box, rank=rank)
    if len(chunks) != 1 or not part.box.within(chunks[0].region):
        return None
    runs = byte_runs(part.box, chunks[0].region, dtype_of(source.spec.dtype).itemsize)
    whole = Region.whole(leaf.array.shape)
    return Chunk(whole, chunks[0].rank, chunks[0].start + runs.first) if runs.count == 1 else None
