"""Reading of composed arrays into a target: boxes of saved arrays, permuted and cast while they are copied.

The part of a composed array that a target needs is divided into boxes of saved ones, each with a writer that knows the
place and order of its elements. The reader treats them as ordinary target pieces, so only their bytes are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import ArrayTarget, ArrayWriter, Box, TargetPiece, raw_dtype
from .._arrays.numpy import cast as cast_as_numpy
from .._arrays.registry import check_cast, library_of
from .._core.format.records import Index, Leaf
from .._core.planning.load_plan import Chunk
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, byte_runs
from .._core.tree.spec import ArraySpec
from ._composed_array import BlockScales, Constant, SourceBox, parts_in, saved
from ._view import ComposedLeaf


class ScaleValues:
    """The scales of a box of a saved array.

    Args:
        box: of the array.
        raw: the saved scales of the box, which may be read into it later.
    """

    def __init__(self, scales: BlockScales, box: Region, raw: np.ndarray) -> None:
        self._scales, self._box, self._raw = scales, box, raw

    @cached_property
    def _grid(self) -> np.ndarray:
        values = cast_as_numpy(self._raw, self._scales.dtype, "float32").view(np.float32)
        return values.reshape(self._scales.grid(self._box).shape)

    def multiply(self, box: Box, data: np.ndarray) -> np.ndarray:
        """Returns raw elements of float32 times their scales; the place of the data counts from that of the box."""
        picks: list[np.ndarray] = []
        for place, offset, block in zip(box, self._box.offset, self._scales.block, strict=True):
            first = offset // block
            picks.append(np.arange(offset + place.start, offset + place.stop) // block - first)
        # a dimension along which one scale is for all is broadcast
        picks = [pick[:1] if len(pick) and pick[0] == pick[-1] else pick for pick in picks]
        values = np.ascontiguousarray(data).view(np.float32).reshape(data.shape)
        grid = self._grid[np.ix_(*picks)] if picks else self._grid
        return np.asarray(values * grid).view(data.dtype)


class PermutedWriter:
    """Writes boxes of a saved array into a target piece, scaled, permuted and cast.

    Args:
        scales: those of the part, where it has some.
    """

    def __init__(self, piece: TargetPiece, part: SourceBox, spec: ArraySpec, scales: ScaleValues | None = None) -> None:
        self.scales = scales
        self.inner: ArrayWriter = piece.data
        self.start = part.region.relative_to(piece.region).offset
        self.axes, self.spec, self.saved_dtype = part.axes, spec, part.dtypes[0]
        # with scales the first cast is that to float32, in which they are multiplied
        self.dtypes = _casts(part.dtypes[scales is not None :], spec.dtype)
        kept = [axis for axis in part.axes if axis >= 0]
        # `...` at the end keeps an array without dimensions from becoming a number
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
        cast = library_of(self.spec).cast
        if self.scales is not None:
            data = self.scales.multiply(box, cast(data, self.saved_dtype, "float32").reshape(data.shape))
        for before, after in self.dtypes:
            data = cast(data, before, after).reshape(data.shape)
        self.inner.write(where, data[self.pick].transpose(self.order)[self.wide])


def _casts(dtypes: Sequence[str], wanted: str) -> list[tuple[str, str]]:
    """Returns the (from, to) pairs of the casts to apply, in order."""
    return [(a, b) for a, b in itertools.pairwise([*dtypes, wanted]) if a != b]


def scales_of(part: SourceBox, read: Callable[[str, Region], np.ndarray]) -> ScaleValues | None:
    """Returns the scales of a part; None where it has none.

    Args:
        read: returns the raw elements of a region of a saved array, which may be read into them later.
    """
    if part.scales is None:
        return None
    return ScaleValues(part.scales, part.box, read(part.scales.source, part.scales.region(part.box)))


def pieces_of(
    leaf: Leaf, target: ArrayTarget, read: Callable[[Leaf, Region], np.ndarray]
) -> tuple[list[tuple[Leaf, list[TargetPiece]]], list[Callable[[], object]]]:
    """Returns (saved leaf, pieces to read) for a target, and functions that fill pieces of one value.

    Args:
        leaf: a composed one, or a saved one that is cast.
        read: returns the raw elements of a region of a saved array that are read before all else, into them.

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
                scales = scales_of(part, lambda path, region: read(sources[path], region))
                writer = PermutedWriter(piece, part, target.spec, scales)
                pieces.setdefault(part.source, []).append(TargetPiece(part.box, writer))
    return [(sources[source], parts) for source, parts in pieces.items()], fills


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
    if (
        len(part.dtypes) > 1
        or part.scales is not None
        or kept != sorted(kept)
        or source.spec is None
        or getattr(source.record, "view", None)
    ):
        return None
    chunks = index.chunks_of(source, part.box, rank=rank)
    if len(chunks) != 1 or not part.box.within(chunks[0].region):
        return None
    runs = byte_runs(part.box, chunks[0].region, dtype_of(source.spec.dtype).itemsize)
    whole = Region.whole(leaf.array.shape)
    return Chunk(whole, chunks[0].rank, chunks[0].start + runs.first) if runs.count == 1 else None
