"""Arrays composed of boxes of saved arrays: for each box its source, its place, its axes and its dtypes.

Splitting, joining, permuting, stacking and casting only change the list of parts; nothing is read. `parts_in` maps a
region of a composed array to boxes of saved ones, so a load reads only the bytes of the region that it needs, however
the saved arrays are cut. Adjacent parts are merged, so undoing a change gives the saved array itself back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from .._core.sharding.region import Region, intersect
from .._core.tree.spec import ArraySpec


class BlockScales(msgspec.Struct, frozen=True, gc=False):
    """The saved scales of a saved array: one for each block of it, by which its elements are multiplied in float32."""

    source: str
    """Path of the saved scales."""
    dtype: str
    dims: tuple[int, ...]
    """For each dimension of the saved scales that of the array; along the others one scale is for all."""
    block: tuple[int, ...]
    """Elements along each dimension of the array that share a scale; the last block of each may be shorter."""

    def grid(self, box: Region) -> Region:
        """Returns the blocks of a box of the array: their first numbers, and how many there are."""
        first = tuple(o // b for o, b in zip(box.offset, self.block, strict=True))
        stop = (-(-s // b) for s, b in zip(box.stop, self.block, strict=True))
        return Region(first, tuple(b - a for a, b in zip(first, stop, strict=True)))

    def region(self, box: Region) -> Region:
        """Returns the region of the saved scales with those of a box of the array."""
        grid = self.grid(box)
        return Region(tuple(grid.offset[d] for d in self.dims), tuple(grid.shape[d] for d in self.dims))


class SourceBox(msgspec.Struct, frozen=True, gc=False):
    """A box of a saved array, and its region in the composed array."""

    region: Region
    """In the composed array."""
    source: str
    """Path of the saved array."""
    box: Region
    """In the saved array."""
    axes: tuple[int, ...]
    """For each dimension of the composed array the dimension of the saved one; -1 for a new dimension of length 1. A
    dimension of the saved array that is missing here has length 1 in `box`."""
    dtypes: tuple[str, ...]
    """The saved dtype, then those that it is cast to, in order."""
    scales: BlockScales | None = None
    """The saved elements are cast to the second dtype, float32, and multiplied by these."""


class Constant(msgspec.Struct, frozen=True, gc=False):
    """A region filled with one value."""

    region: Region
    value: bool | int | float
    dtypes: tuple[str, ...]


class ComposedArray(msgspec.Struct, frozen=True):
    """An array given by parts that cover each of its elements once."""

    spec: ArraySpec
    parts: tuple[SourceBox | Constant, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def rebuilt(self, shape: tuple[int, ...], parts: Iterable[SourceBox | Constant]) -> ComposedArray:
        """Returns an array of other parts and shape; all else stays, the order if it has as many dimensions."""
        order = self.spec.order if len(shape) == len(self.shape) else None
        return ComposedArray(msgspec.structs.replace(self.spec, shape=shape, order=order), tuple(parts))


def saved(path: str, spec: ArraySpec) -> ComposedArray:
    """Returns a saved array as it is."""
    whole = Region.whole(spec.shape)
    return ComposedArray(spec, (SourceBox(whole, path, whole, tuple(range(len(spec.shape))), (spec.dtype,)),))


def constant(spec: ArraySpec, value: bool | int | float) -> ComposedArray:
    """Returns an array filled with one value."""
    return ComposedArray(spec, (Constant(Region.whole(spec.shape), value, (spec.dtype,)),))


def parts_in(array: ComposedArray, region: Region) -> list[SourceBox | Constant]:
    """Returns the parts that cover a region of the array."""
    if region.is_whole(array.shape):
        return list(array.parts)
    cut = ((part, intersect(part.region, region)) for part in array.parts)
    return [_cut(part, common) for part, common in cut if common is not None]


def _cut(part: SourceBox | Constant, to: Region) -> SourceBox | Constant:
    """Returns the part of a part that lies in a region."""
    if isinstance(part, Constant):
        return msgspec.structs.replace(part, region=to)
    offset, shape = list(part.box.offset), list(part.box.shape)
    for d, axis in enumerate(part.axes):
        if axis >= 0:
            offset[axis] += to.offset[d] - part.region.offset[d]
            shape[axis] = to.shape[d]
    return msgspec.structs.replace(part, region=to, box=Region(tuple(offset), tuple(shape)))


def narrow(array: ComposedArray, region: Region) -> ComposedArray:
    """Returns a region of the array as an array of its own."""
    back = tuple(-o for o in region.offset)
    return array.rebuilt(region.shape, (_shifted(part, back) for part in parts_in(array, region)))


def _shifted(part: SourceBox | Constant, by: tuple[int, ...]) -> SourceBox | Constant:
    return msgspec.structs.replace(part, region=part.region.shifted(by))


def permute(array: ComposedArray, axes: Sequence[int]) -> ComposedArray:
    """Returns the array with its dimensions in this order.

    Args:
        axes: for each new dimension the old one; -1 for an added dimension of length 1. A dimension of length 1 may be
            left out, and is removed then.
    """
    parts: list[SourceBox | Constant] = []
    for part in array.parts:
        offset, shape = part.region.offset, part.region.shape
        region = Region(tuple(offset[a] if a >= 0 else 0 for a in axes), tuple(shape[a] if a >= 0 else 1 for a in axes))
        if isinstance(part, SourceBox):
            part = msgspec.structs.replace(part, axes=tuple(part.axes[a] if a >= 0 else -1 for a in axes))
        parts.append(msgspec.structs.replace(part, region=region))
    made = array.rebuilt(tuple(array.shape[a] if a >= 0 else 1 for a in axes), parts)
    if list(axes) == list(range(len(array.shape))):
        return made
    return ComposedArray(msgspec.structs.replace(made.spec, order=None), made.parts)


def cast(array: ComposedArray, dtype: str) -> ComposedArray:
    """Returns the array in another dtype."""
    parts = (
        part if part.dtypes[-1] == dtype else msgspec.structs.replace(part, dtypes=(*part.dtypes, dtype))
        for part in array.parts
    )
    return ComposedArray(msgspec.structs.replace(array.spec, dtype=dtype), tuple(parts))


def scale(array: ComposedArray, scales: BlockScales) -> ComposedArray:
    """Returns a saved array times its scales, in float32."""
    [part] = array.parts
    scaled = msgspec.structs.replace(part, dtypes=(array.spec.dtype, "float32"), scales=scales)
    return ComposedArray(msgspec.structs.replace(array.spec, dtype="float32"), (scaled,))


def interleave(arrays: Sequence[ComposedArray], axis: int, groups: int = 1) -> ComposedArray:
    """Joins arrays along an axis; with n groups, a 1/n part of each in turn, n times.

    Their shapes are equal except along the axis, where each length is divisible by the number of groups.
    """
    parts: list[SourceBox | Constant] = []
    at = 0
    for group in range(groups):
        for array in arrays:
            length = array.shape[axis] // groups
            piece = array if groups == 1 else narrow(array, _slab(array.shape, axis, group * length, length))
            by = tuple(at if d == axis else 0 for d in range(len(array.shape)))
            parts += [_shifted(part, by) for part in piece.parts]
            at += length
    shape = arrays[0].shape
    return arrays[0].rebuilt((*shape[:axis], at, *shape[axis + 1 :]), _merged(parts))


def uninterleave(array: ComposedArray, axis: int, lengths: Sequence[int], groups: int = 1) -> list[ComposedArray]:
    """Returns the arrays that `interleave` joined: `lengths` are their lengths along the axis in one group."""
    stride, starts = sum(lengths), list(itertools.accumulate(lengths, initial=0))
    found: list[ComposedArray] = []
    for start, length in zip(starts, lengths, strict=False):
        pieces = [narrow(array, _slab(array.shape, axis, group * stride + start, length)) for group in range(groups)]
        found.append(pieces[0] if groups == 1 else interleave(pieces, axis))
    return found


def _slab(shape: tuple[int, ...], axis: int, start: int, length: int) -> Region:
    offset = tuple(start if d == axis else 0 for d in range(len(shape)))
    return Region(offset, (*shape[:axis], length, *shape[axis + 1 :]))


def stack(arrays: Sequence[ComposedArray], axis: int) -> ComposedArray:
    """Returns arrays of one shape stacked along a new axis."""
    dims = list(range(len(arrays[0].shape)))
    return interleave([permute(array, [*dims[:axis], -1, *dims[axis:]]) for array in arrays], axis)


def take(array: ComposedArray, axis: int, index: int) -> ComposedArray:
    """Returns the array at one index of an axis, without that axis."""
    return permute(narrow(array, _slab(array.shape, axis, index, 1)), [d for d in range(len(array.shape)) if d != axis])


# merging adjacent parts -------------------------------------------------------------------------------------------
def _merged(parts: list[SourceBox | Constant]) -> tuple[SourceBox | Constant, ...]:
    """Returns the same parts; those that are adjacent in both arrays are merged."""
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


def _join(a: SourceBox | Constant, b: SourceBox | Constant, dim: int) -> SourceBox | Constant | None:
    region = _union(a.region, b.region, dim)
    if region is None or a.dtypes != b.dtypes:
        return None
    if isinstance(a, Constant) or isinstance(b, Constant):
        # as text: 1, 1.0 and True are equal, and NaN does not equal itself
        same = isinstance(a, Constant) and isinstance(b, Constant) and repr(a.value) == repr(b.value)
        return Constant(region, a.value, a.dtypes) if same and isinstance(a, Constant) else None
    if a.source != b.source or a.axes != b.axes or a.axes[dim] < 0 or a.scales != b.scales:
        return None
    box = _union(a.box, b.box, a.axes[dim])
    return msgspec.structs.replace(a, region=region, box=box) if box is not None else None


def _union(a: Region, b: Region, dim: int) -> Region | None:
    """Returns the union of two boxes if the second begins where the first ends along a dimension, else None."""
    if a.offset[dim] + a.shape[dim] != b.offset[dim] or _beside(a, dim)[:2] != _beside(b, dim)[:2]:
        return None
    return Region(a.offset, (*a.shape[:dim], a.shape[dim] + b.shape[dim], *a.shape[dim + 1 :]))
