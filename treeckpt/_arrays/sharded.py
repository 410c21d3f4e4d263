"""`Sharded`: local arrays with their offsets in a global array, for any way of sharding; and its adapter.

It corresponds to Paddle's local shape and global offset; with an integer offset to a ZeRO-style flat range of the
global array's elements in C order. A rank may hold one piece or several.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import optree

from .._core.sharding.placements import BoxLayout
from .._core.sharding.region import Region, flat_regions
from .._core.tree.containers import new_instance, register_mark
from .._core.tree.spec import ArraySpec
from ..errors import LayoutError, TreeError
from .base import Adapter, Allocate, ArraySource, ArrayTarget, FlatRangeArray, SourcePiece, TargetPiece
from .registry import adapter_of
from .registry import mark_written as mark_all_written

Offset = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """One rank's part of a global array: a piece, or several.

        tc.Sharded(rows, (1000, 64), (250, 0))             # a box that starts at row 250
        tc.Sharded(flat, (1000, 64), 12_345)               # a flat range of elements, in C order
        tc.Sharded([a, b], (1000, 64), [(0, 0), (500, 0)])  # several pieces, each a box or a flat range

    >>> piece = tc.Sharded(np.ones((2, 4)), global_shape=(2, 4), offset=(0, 0))
    >>> report = tc.save("run/step_00000200", {"w": piece})
    >>> tc.load("run/step_00000200")["w"].shape
    (2, 4)

    Args:
        local: the piece, any array that can be a leaf; or a list of them, all of one dtype. A rank that holds nothing
            gives an empty flat piece: `tc.Sharded(torch.empty(0), shape, 0)`.
        global_shape: of the whole array.
        offset: where the piece starts: one integer per dimension, or, for a flat 1-D piece, the position of its
            first element among all elements in C order. For several pieces a list with as many of these.

    Pieces of all ranks together cover the array. What several pieces hold is written once, and compared as replicas
    are: see `verify_replicas` of `treeckpt.save`.
    """

    __treeckpt_leaf__: ClassVar[bool] = True

    local: Any
    global_shape: tuple[int, ...]
    offset: Any

    def __post_init__(self) -> None:
        index, offset = operator.index, _listed(self.offset)
        object.__setattr__(self, "global_shape", tuple(map(index, self.global_shape)))
        if isinstance(self.local, (list, tuple)) and isinstance(offset, Sequence):
            object.__setattr__(self, "local", tuple(self.local))
            object.__setattr__(self, "offset", tuple(map(_offset, offset)))
        else:
            object.__setattr__(self, "offset", _offset(offset))

    @property
    def several(self) -> bool:
        """Whether `local` and `offset` are lists of pieces."""
        return isinstance(self.local, tuple) and isinstance(self.offset, tuple)

    @property
    def locals(self) -> tuple[Any, ...]:
        """The pieces' arrays."""
        return self.local if self.several else (self.local,)

    @property
    def offsets(self) -> tuple[Offset, ...]:
        """The pieces' offsets."""
        return self.offset if self.several else (self.offset,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self.global_shape

    @property
    def dtype(self) -> Any:
        return self.locals[0].dtype

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is equal for leaves that consist of the same objects."""
        return (*map(id, self.locals), self.global_shape, self.offset)


def _flatten_pieces(leaf: Sharded) -> tuple[Any, ...]:
    return leaf.locals, (leaf.several, leaf.global_shape, leaf.offset), tuple(range(len(leaf.locals)))


def _unflatten_pieces(auxiliary: Any, locals_: Any) -> object:
    several, *others = auxiliary
    local = tuple(locals_) if several else locals_[0]
    return new_instance(Sharded, ("local", "global_shape", "offset"), (local, *others))


class _PieceEntry(optree.PyTreeEntry):
    """The step of an accessor of optree to one of the pieces."""

    def __call__(self, obj: Any) -> Any:
        return obj.locals[self.entry]

    def codify(self, node: str = "") -> str:
        return f"{node}.locals[{self.entry}]"


register_mark(Sharded, _flatten_pieces, _unflatten_pieces, _PieceEntry)


def _listed(numbers: Any) -> Any:
    """Returns the integers of an array of numpy or torch as Python's."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers


def _offset(offset: Any) -> Offset:
    offset = _listed(offset)
    return tuple(map(operator.index, offset)) if isinstance(offset, Sequence) else operator.index(offset)


def with_locals(leaf: Sharded, locals_: Sequence[Any]) -> Sharded:
    """Returns the same pieces with other local arrays."""
    return Sharded(tuple(locals_) if leaf.several else locals_[0], leaf.global_shape, leaf.offset)


def _regions(leaf: Sharded, offset: Offset, local: Sequence[int], path: str) -> tuple[Region, ...]:
    shape = leaf.global_shape
    whole = Region.whole(shape)
    if isinstance(offset, int):
        if len(local) == 1 and offset >= 0 and offset + local[0] <= math.prod(shape):
            return flat_regions(shape, offset, offset + local[0]) if whole.size else (whole,)
        expected = f"a 1-D piece inside {math.prod(shape)} elements"
    else:
        region = Region(offset, tuple(local))
        if len(region.offset) == len(local) == len(shape) and min(offset, default=0) >= 0 and region.within(whole):
            return (region,)
        expected = f"a piece inside shape {shape}"
    raise LayoutError(
        path,
        expected=expected,
        found=f"shape {tuple(local)} at offset {offset}",
        hint="Check the global shape and the offset given to tc.Sharded",
    )


def _inner(leaf: Sharded, path: str) -> Adapter:
    """Returns the adapter of the pieces.

    Raises:
        LayoutError: not each piece has an offset.
        TreeError: pieces of several libraries, or values.
    """
    if not leaf.locals or len(leaf.locals) != len(leaf.offsets):
        raise LayoutError(
            path,
            expected="an offset for each piece, and one piece at least, of size 0 if the rank holds nothing",
            found=f"{len(leaf.locals)} pieces, {len(leaf.offsets)} offsets",
            hint="Pass tc.Sharded lists of equal length, or one array and one offset",
        )
    adapter, *others = (None if isinstance(local, Sharded) else adapter_of(type(local)) for local in leaf.locals)
    if adapter is None or any(other is not adapter for other in others):
        raise TreeError(
            path,
            expected="an array in Sharded, or several of one library",
            found=", ".join(type(local).__name__ for local in leaf.locals),
            hint="Values are no pieces; wrap what each rank has of its own in tc.PerRank",
        )
    return adapter


def _described(leaf: Sharded, parts: Sequence[tuple[ArraySpec, Any]], path: str) -> tuple[ArraySpec, list[Any]]:
    """Returns the spec of the whole array, and its regions here with the memory of each.

    Args:
        parts: the spec and the memory of each piece.
    """
    first, _ = parts[0]
    found: list[tuple[Region, Any]] = []
    for offset, (spec, data) in zip(leaf.offsets, parts, strict=True):
        if spec.dtype != first.dtype:
            raise LayoutError(path, expected=f"pieces of one dtype, as {first.dtype}", found=f"{spec.dtype}")
        start = 0
        for region in _regions(leaf, offset, spec.shape, path):
            found.append((region, FlatRangeArray(data, start, region.shape) if isinstance(offset, int) else data))
            start += region.size
    order = first.order if len(first.shape) == len(leaf.global_shape) else None
    return msgspec.structs.replace(first, shape=leaf.global_shape, order=order), found


def source(leaf: Sharded, path: str, rank: int) -> ArraySource:
    """Describes pieces to save.

    Raises:
        LayoutError: a piece does not lie inside the global shape, or is distributed itself.
    """
    adapter = _inner(leaf, path)
    inner = [adapter.source(local, path, rank) for local in leaf.locals]
    if any(source.layout is not None for source in inner):
        raise _no_array(leaf, path)
    spec, parts = _described(leaf, [(source.spec, source.pieces[0].data) for source in inner], path)
    layout = BoxLayout(tuple((rank, region) for region, _ in parts))
    storage = inner[0].storage if len(inner) == 1 else None
    return ArraySource(spec, layout, [SourcePiece(*part) for part in parts], storage)


def _no_array(leaf: Sharded, path: str) -> LayoutError:
    kinds = ", ".join(dict.fromkeys(type(local).__name__ for local in leaf.locals))
    return LayoutError(path, expected="a plain array in Sharded", found=kinds)


def abstract(leaf: Sharded, path: str, rank: int) -> ArraySpec:
    """Returns the spec of the whole array, with the regions of the pieces."""
    adapter = _inner(leaf, path)
    spec, parts = _described(leaf, [(adapter.abstract(local, path, rank), None) for local in leaf.locals], path)
    return msgspec.structs.replace(spec, regions=tuple(region for region, _ in parts))


def target(leaf: Sharded, path: str, rank: int) -> ArrayTarget:
    """Describes pieces to fill in place."""
    adapter = _inner(leaf, path)
    return _as_target(leaf, [adapter.target(local, path, rank) for local in leaf.locals], path)


def like(leaf: Sharded, path: str, rank: int, device: str | None, *, allocate: Allocate | None = None) -> ArrayTarget:
    """Creates pieces of the same shapes and offsets."""
    adapter = _inner(leaf, path)
    new = [adapter.like(local, path, rank, device, allocate=allocate) for local in leaf.locals]
    return _as_target(leaf, new, path)


def _as_target(leaf: Sharded, inner: list[ArrayTarget], path: str) -> ArrayTarget:
    if any(len(target.pieces) != 1 or target.pieces[0].region.shape != target.spec.shape for target in inner):
        raise _no_array(leaf, path)
    spec, parts = _described(leaf, [(target.spec, target.pieces[0].data) for target in inner], path)
    whole = with_locals(leaf, [target.leaf for target in inner])
    return ArrayTarget(spec, whole, [TargetPiece(*part) for part in parts])


def mark_written(leaves: Sequence[Sharded]) -> None:
    """Tells the libraries of the pieces that these were written to."""
    mark_all_written(local for leaf in leaves for local in leaf.locals)
