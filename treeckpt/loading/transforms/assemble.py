"""Arrays that rules made, on their way into a target: boxes of saved arrays, turned and cast as they are copied.

What a target wants of a made array is divided into boxes of saved ones, each with something to write to that knows
where its elements go and in which order. To the engine they are pieces like any others, so only their bytes are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ...arrays.base import Box, Target, TargetPiece, Writable, raw_dtype
from ...arrays.registry import check_cast, library_of
from ...core.format.records import Index, Leaf
from ...core.planning.load_plan import Chunk
from ...core.sharding.dtypes import dtype_of
from ...core.sharding.region import Region, byte_runs
from ...core.tree.spec import ArraySpec
from .composed_array import Constant, Part, parts_in
from .view import MadeLeaf

__all__ = ["only_chunk", "pieces_of"]


class PermutedWriter:
    """A box of a target, written box by box of a saved array."""

    def __init__(self, piece: TargetPiece, part: Part, spec: ArraySpec) -> None:
        self.inner: Writable = piece.data
        self.start = part.region.relative_to(piece.region).offset
        self.axes, self.spec, self.dtypes = part.axes, spec, _casts(part.dtypes, spec.dtype)
        kept = [axis for axis in part.axes if axis >= 0]
        self.pick: tuple[Any, ...] = (*(slice(None) if d in kept else 0 for d in range(len(part.box.shape))), ...)
        rising = sorted(kept)
        self.order = [rising.index(axis) for axis in kept]
        self.wide: tuple[Any, ...] = (*(slice(None) if axis >= 0 else None for axis in part.axes), ...)

    def write(self, box: Box, data: np.ndarray) -> None:
        where = tuple(
            slice(start, start + 1) if axis < 0 else slice(start + box[axis].start, start + box[axis].stop)
            for start, axis in zip(self.start, self.axes, strict=True)
        )
        for before, after in self.dtypes:
            data = library_of(self.spec).cast(data, before, after).reshape(data.shape)
        self.inner.write(where, data[self.pick].transpose(self.order)[self.wide])


def _casts(dtypes: Sequence[str], wanted: str) -> list[tuple[str, str]]:
    chain = [*dtypes, wanted]
    return [(a, b) for a, b in itertools.pairwise(chain) if a != b]


def pieces_of(leaf: MadeLeaf, target: Target) -> Iterator[tuple[Leaf, TargetPiece] | Callable[[], None]]:
    """What has to be read into a target, as saved leaves with pieces of them; and what fills it without.

    Raises:
        MismatchError: a cast that cannot be made.
    """
    for dtypes in {part.dtypes for part in leaf.made.parts}:
        for before, after in _casts(dtypes, target.spec.dtype):
            check_cast(msgspec.structs.replace(target.spec, dtype=after), before, leaf.path)
    for piece in target.pieces:
        for part in parts_in(leaf.made, piece.region):
            if isinstance(part, Constant):
                yield _filler(part, piece, target.spec)
            elif part.region.size:
                yield leaf.sources[part.source], TargetPiece(part.box, PermutedWriter(piece, part, target.spec))


def _filler(part: Constant, piece: TargetPiece, spec: ArraySpec) -> Callable[[], None]:
    """What writes a constant where it is wanted."""
    kind = "float64" if isinstance(part.value, float) else "int64"
    data = np.array([part.value], kind).view(raw_dtype(8))
    for before, after in _casts((kind, *part.dtypes), spec.dtype):
        data = library_of(spec).cast(data, before, after)
    box = part.region.relative_to(piece.region).slices()
    return lambda: piece.data.write(box, np.broadcast_to(data.reshape(-1)[0], part.region.shape))


def only_chunk(index: Index, leaf: MadeLeaf, rank: int) -> Chunk | None:
    """The stretch of a chunk that is all of a made array, None where its bytes are to be turned, joined or cast."""
    if len(leaf.made.parts) != 1 or not isinstance(part := leaf.made.parts[0], Part):
        return None
    kept = [axis for axis in part.axes if axis >= 0]
    source = leaf.sources[part.source]
    if len(part.dtypes) > 1 or kept != sorted(kept) or source.spec is None or getattr(source.record, "view", None):
        return None
    chunks = index.chunks_of(source, part.box, rank=rank)
    if len(chunks) != 1 or not part.box.within(chunks[0].region):
        return None
    runs = byte_runs(part.box, chunks[0].region, dtype_of(source.spec.dtype).itemsize)
    whole = Region.whole(leaf.made.shape)
    return Chunk(whole, chunks[0].rank, chunks[0].start + runs.first) if runs.count == 1 else None
