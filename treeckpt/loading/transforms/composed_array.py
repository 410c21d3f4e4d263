"""Arrays made of parts of others: which box of which saved array is where, along which axes, in which dtype?

Splitting, joining, permuting, stacking and casting only rearrange the list of parts; nothing is read. What a load
wants of a made array, `parts_in` turns into boxes of saved ones: whatever cut those, and whoever wants which piece,
only its bytes are read. Parts that fit together are joined, so undoing a change gives the saved array itself back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from ...core.sharding.region import Region, intersect
from ...core.tree.spec import ArraySpec

__all__ = [
    "ComposedArray",
    "Constant",
    "Part",
    "cast",
    "constant",
    "interleave",
    "is_saved",
    "narrow",
    "parts_in",
    "permute",
    "saved",
    "stack",
    "take",
    "uninterleave",
]


class Part(msgspec.Struct, frozen=True, gc=False):
    """A box of a saved array, and where it is to be."""

    region: Region
    """In the made array."""
    source: str
    """The path of the saved one."""
    box: Region
    """In that."""
    axes: tuple[int, ...]
    """For each dimension of the made array that of the saved one, -1 for a new one of a single element. A dimension of
    the saved array that is in no list has a single element in `box`."""
    dtypes: tuple[str, ...]
    """As saved, and what it is cast to, one after the other."""


class Constant(msgspec.Struct, frozen=True, gc=False):
    """A box that holds one value everywhere."""

    region: Region
    value: bool | int | float
    dtypes: tuple[str, ...]


class ComposedArray(msgspec.Struct, frozen=True):
    """An array: its parts cover it, and each element once."""

    shape: tuple[int, ...]
    parts: tuple[Part | Constant, ...]


def saved(path: str, spec: ArraySpec) -> ComposedArray:
    """A saved array as it is."""
    whole = Region.whole(spec.shape)
    return ComposedArray(spec.shape, (Part(whole, path, whole, tuple(range(len(spec.shape))), (spec.dtype,)),))


def is_saved(made: ComposedArray, path: str, spec: ArraySpec) -> bool:
    """Whether a made array is a saved one, untouched."""
    return made == saved(path, spec)


def constant(shape: tuple[int, ...], dtype: str, value: bool | int | float) -> ComposedArray:
    """An array of one value."""
    return ComposedArray(shape, (Constant(Region.whole(shape), value, (dtype,)),))


def parts_in(made: ComposedArray, region: Region) -> list[Part | Constant]:
    """What makes up a region of the array."""
    if region.is_whole(made.shape):
        return list(made.parts)
    cut = ((part, intersect(part.region, region)) for part in made.parts)
    return [_cut(part, common) for part, common in cut if common is not None]


def _cut(part: Part | Constant, to: Region) -> Part | Constant:
    if isinstance(part, Constant):
        return Constant(to, part.value, part.dtypes)
    offset, shape = list(part.box.offset), list(part.box.shape)
    for d, axis in enumerate(part.axes):
        if axis >= 0:
            offset[axis] += to.offset[d] - part.region.offset[d]
            shape[axis] = to.shape[d]
    return Part(to, part.source, Region(tuple(offset), tuple(shape)), part.axes, part.dtypes)


def narrow(made: ComposedArray, region: Region) -> ComposedArray:
    """A region of the array, as one of its own."""
    back = tuple(-o for o in region.offset)
    return ComposedArray(
        region.shape, tuple(_moved(part, part.region.shifted(back)) for part in parts_in(made, region))
    )


def _moved(part: Part | Constant, region: Region) -> Part | Constant:
    if isinstance(part, Constant):
        return Constant(region, part.value, part.dtypes)
    return Part(region, part.source, part.box, part.axes, part.dtypes)


def permute(made: ComposedArray, axes: Sequence[int]) -> ComposedArray:
    """The array with its dimensions in this order."""

    def turned(part: Part | Constant) -> Part | Constant:
        region = Region(tuple(part.region.offset[a] for a in axes), tuple(part.region.shape[a] for a in axes))
        if isinstance(part, Constant):
            return Constant(region, part.value, part.dtypes)
        return Part(region, part.source, part.box, tuple(part.axes[a] for a in axes), part.dtypes)

    return ComposedArray(tuple(made.shape[a] for a in axes), tuple(turned(part) for part in made.parts))


def cast(made: ComposedArray, dtype: str) -> ComposedArray:
    """The array in another dtype."""
    parts = (
        part if part.dtypes[-1] == dtype else msgspec.structs.replace(part, dtypes=(*part.dtypes, dtype))
        for part in made.parts
    )
    return ComposedArray(made.shape, tuple(parts))


def interleave(arrays: Sequence[ComposedArray], axis: int, groups: int = 1) -> ComposedArray:
    """Arrays one after the other along an axis; with several groups, a share of each after the other, again and again.

    All have equal shapes but along the axis, where each can be divided by the number of groups.
    """
    parts: list[Part | Constant] = []
    at = 0
    for group in range(groups):
        for array in arrays:
            length = array.shape[axis] // groups
            piece = array if groups == 1 else narrow(array, _slab(array.shape, axis, group * length, length))
            by = tuple(at if d == axis else 0 for d in range(len(array.shape)))
            parts += [_moved(part, part.region.shifted(by)) for part in piece.parts]
            at += length
    shape = arrays[0].shape
    return ComposedArray((*shape[:axis], at, *shape[axis + 1 :]), _joined(parts))


def uninterleave(made: ComposedArray, axis: int, lengths: Sequence[int], groups: int = 1) -> list[ComposedArray]:
    """The inverse of `interleave`: arrays with `lengths` of each group along the axis."""
    stride, starts = sum(lengths), list(itertools.accumulate(lengths, initial=0))
    found: list[ComposedArray] = []
    for start, length in zip(starts, lengths, strict=False):
        pieces = [narrow(made, _slab(made.shape, axis, group * stride + start, length)) for group in range(groups)]
        found.append(pieces[0] if groups == 1 else interleave(pieces, axis))
    return found


def _slab(shape: tuple[int, ...], axis: int, start: int, length: int) -> Region:
    offset = tuple(start if d == axis else 0 for d in range(len(shape)))
    return Region(offset, (*shape[:axis], length, *shape[axis + 1 :]))


def stack(arrays: Sequence[ComposedArray], axis: int) -> ComposedArray:
    """Arrays of one shape along a new axis."""
    return interleave([_with_axis(array, axis) for array in arrays], axis)


def _with_axis(made: ComposedArray, axis: int) -> ComposedArray:
    def wider(part: Part | Constant) -> Part | Constant:
        offset, shape = part.region.offset, part.region.shape
        region = Region((*offset[:axis], 0, *offset[axis:]), (*shape[:axis], 1, *shape[axis:]))
        if isinstance(part, Constant):
            return Constant(region, part.value, part.dtypes)
        return Part(region, part.source, part.box, (*part.axes[:axis], -1, *part.axes[axis:]), part.dtypes)

    shape = (*made.shape[:axis], 1, *made.shape[axis:])
    return ComposedArray(shape, tuple(wider(part) for part in made.parts))


def take(made: ComposedArray, axis: int, index: int) -> ComposedArray:
    """One element along an axis, which is then no more."""

    def narrower(part: Part | Constant) -> Part | Constant:
        offset, shape = part.region.offset, part.region.shape
        region = Region((*offset[:axis], *offset[axis + 1 :]), (*shape[:axis], *shape[axis + 1 :]))
        if isinstance(part, Constant):
            return Constant(region, part.value, part.dtypes)
        return Part(region, part.source, part.box, (*part.axes[:axis], *part.axes[axis + 1 :]), part.dtypes)

    row = narrow(made, _slab(made.shape, axis, index, 1))
    return ComposedArray((*made.shape[:axis], *made.shape[axis + 1 :]), tuple(narrower(part) for part in row.parts))


# joining what fits ------------------------------------------------------------------------------------------------
def _joined(parts: list[Part | Constant]) -> tuple[Part | Constant, ...]:
    """The same parts, those that lie side by side in both arrays as one."""
    for dim in reversed(range(len(parts[0].region.shape) if len(parts) > 1 else 0)):
        parts.sort(key=lambda part: _beside(part.region, dim))
        kept = parts[:1]
        for part in parts[1:]:
            joined = _join(kept[-1], part, dim)
            if joined is None:
                kept.append(part)
            else:
                kept[-1] = joined
        parts = kept
    return tuple(parts)


def _beside(region: Region, dim: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    offset, shape = region.offset, region.shape
    return (*offset[:dim], *offset[dim + 1 :]), (*shape[:dim], *shape[dim + 1 :]), offset[dim]


def _join(a: Part | Constant, b: Part | Constant, dim: int) -> Part | Constant | None:
    region = _union(a.region, b.region, dim)
    if region is None or a.dtypes != b.dtypes:
        return None
    if isinstance(a, Constant) or isinstance(b, Constant):
        same = isinstance(a, Constant) and isinstance(b, Constant) and repr(a.value) == repr(b.value)
        return Constant(region, a.value, a.dtypes) if same and isinstance(a, Constant) else None
    if a.source != b.source or a.axes != b.axes or a.axes[dim] < 0:
        return None
    box = _union(a.box, b.box, a.axes[dim])
    return Part(region, a.source, box, a.axes, a.dtypes) if box is not None else None


def _union(a: Region, b: Region, dim: int) -> Region | None:
    """Two boxes of which the second begins where the first ends, as one."""
    if a.offset[dim] + a.shape[dim] != b.offset[dim] or _beside(a, dim)[:2] != _beside(b, dim)[:2]:
        return None
    return Region(a.offset, (*a.shape[:dim], a.shape[dim] + b.shape[dim], *a.shape[dim + 1 :]))
