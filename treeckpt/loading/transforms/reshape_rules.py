"""Rules that reshape: split, join, permute, cast, slice, stack and unstack, as plain data with a JSON form.

Each says which leaves it takes (`patterns`), what the new ones are called (`targets`), and what array each of these is
(`make`, by `loading.transforms.composed_array`); and, where nothing is lost, which rules undo it.
`loading.transforms.apply_rule` finds the leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...core.sharding.dtypes import dtype_of, normalize_dtype
from ...core.tree.spec import ArraySpec
from ...errors import MismatchError
from . import composed_array as arrays
from .composed_array import ComposedArray
from .patterns import Binding, expand, numbers_of

__all__ = [
    "NOWHERE",
    "Array",
    "BaseRule",
    "Cast",
    "Concat",
    "Permute",
    "Reshape",
    "Shaping",
    "Slice",
    "Split",
    "Stack",
    "Unstack",
]

NOWHERE = "_"
"""The name of what is not kept."""


class Array(msgspec.Struct, frozen=True):
    """An array as rules see it."""

    spec: ArraySpec
    made: ComposedArray


class BaseRule(
    msgspec.Struct, frozen=True, tag_field="rule", omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """What all rules have."""

    optional: bool = False
    """Whether it may find nothing to do; otherwise that is an error, as a misspelt name is one."""


class Shaping(BaseRule, frozen=True):
    """A rule that makes arrays of others; leaves that agree in what the new names have go together."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """What it takes."""
        raise NotImplementedError

    @property
    def targets(self) -> tuple[str, ...]:
        """What it gives."""
        raise NotImplementedError

    @property
    def joins(self) -> bool:
        """Whether it takes several arrays at a time."""
        return False

    def make(self, given: Sequence[Array]) -> list[Array]:
        """The new arrays.

        Raises:
            MismatchError: it cannot be done with these shapes and dtypes.
        """
        raise NotImplementedError

    def names(self, binding: Binding, count: int) -> list[str]:
        """Names for `count` new arrays."""
        return [expand(target, binding) for target in self.targets]

    def undo(self, given: Sequence[tuple[str, Array]], made: Sequence[str]) -> tuple[Reshape, ...] | None:
        """Rules that take the new names back to the old ones; None where that is not possible."""
        return None


class OfOne(Shaping, frozen=True):
    """A rule that takes one array at a time; what it makes of it has the same name, unless it says another."""

    source: str

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source,)


def _refuse(expected: str, found: str, hint: str = "") -> MismatchError:
    """An error whose path is told by whoever applies the rule."""
    return MismatchError("", expected=expected, found=found, hint=hint)


def _axis(axis: int, shape: tuple[int, ...], more: int = 0) -> int:
    ndim = len(shape) + more
    if not -ndim <= axis < ndim:
        raise _refuse(f"an axis of shape {shape}", f"axis {axis}")
    return axis % ndim


def _of(like: Array, shape: tuple[int, ...], made: ComposedArray) -> Array:
    return Array(msgspec.structs.replace(like.spec, shape=shape), made)


def _check_alike(given: Sequence[Array], axis: int | None) -> None:
    """Refuses arrays that differ in dtype, or in shape other than along the axis."""
    for array in given:
        if array.spec.dtype != given[0].spec.dtype:
            raise _refuse(f"arrays of one dtype, as {given[0].spec.dtype}", array.spec.dtype, "Cast them before")
        a, b = list(array.spec.shape), list(given[0].spec.shape)
        if axis is not None and len(a) == len(b):
            a[axis] = b[axis]
        if a != b:
            besides = "" if axis is None else f" but along axis {axis}"
            raise _refuse(f"arrays of one shape{besides}, as {given[0].spec.shape}", f"{array.spec.shape}")


class Split(OfOne, frozen=True, tag="split"):
    """One array becomes several, along an axis.

    Args:
        source: the array.
        into: the new names, `_` for a piece that is not kept; or one name with a number of its own, `w.$I`, counted
            from 0, which needs `sizes`.
        axis: that is cut.
        sizes: how long the pieces are in proportion to each other; None for equal ones.
        groups: the axis is first thought cut into so many equal stretches, each of which is split; piece k is made of
            the k-th of each. So a fused projection of grouped-query attention with 32 heads and 8 groups of keys and
            values, a group after the other, has `sizes=(4, 1, 1), groups=8`.
    """

    into: tuple[str, ...]
    axis: int = 0
    sizes: tuple[int, ...] | None = None
    groups: int = 1

    @property
    def targets(self) -> tuple[str, ...]:
        return self.into

    def make(self, given: Sequence[Array]) -> list[Array]:
        [array] = given
        axis, shape = _axis(self.axis, array.spec.shape), array.spec.shape
        sizes = self.sizes or (1,) * len(self.into)
        if min(sizes) < 0 or not sum(sizes) or self.groups < 1:
            raise _refuse("sizes and groups of at least 1", f"{sizes}, {self.groups} groups")
        if shape[axis] % (sum(sizes) * self.groups):
            raise _refuse(
                f"a length along axis {axis} that {self.groups} groups of {'+'.join(map(str, sizes))} divide",
                f"{shape[axis]} of shape {shape}",
            )
        unit = shape[axis] // self.groups // sum(sizes)
        pieces = arrays.uninterleave(array.made, axis, [unit * size for size in sizes], self.groups)
        return [_of(array, piece.shape, piece) for piece in pieces]

    def names(self, binding: Binding, count: int) -> list[str]:
        return _numbered(self.into, self.source, binding, count)

    def undo(self, given: Sequence[tuple[str, Array]], made: Sequence[str]) -> tuple[Reshape, ...] | None:
        return None if NOWHERE in made else (Concat(tuple(made), given[0][0], self.axis, self.groups),)


def _numbered(into: Sequence[str], source: str, binding: Binding, count: int) -> list[str]:
    """New names, written out or with a number of their own that is counted from 0.

    Raises:
        MismatchError: there are more or fewer than arrays.
    """
    free = numbers_of(into[0]) - numbers_of(source) if len(into) == 1 else set[str]()
    names = [expand(name, binding) for name in into] if not free else []
    if len(free) == 1:
        [name] = free
        names = [expand(into[0], tuple(sorted((*binding, (name, i))))) for i in range(count)]
    if len(names) != count:
        raise _refuse(f"{count} new names", f"{', '.join(into)}")
    return names


class Concat(Shaping, frozen=True, tag="concat"):
    """Several arrays become one, along an axis; with several groups, a share of each after the other, again and again.

    A number that only the sources have, as in `Concat(("experts.$E.w",), "experts.w")`, is gone through in order.
    """

    sources: tuple[str, ...]
    target: str
    axis: int = 0
    groups: int = 1

    @property
    def patterns(self) -> tuple[str, ...]:
        return self.sources

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    @property
    def joins(self) -> bool:
        return True

    def make(self, given: Sequence[Array]) -> list[Array]:
        axis = _axis(self.axis, given[0].spec.shape)
        _check_alike(given, axis)
        for array in given:
            if self.groups < 1 or array.spec.shape[axis] % self.groups:
                raise _refuse(f"a length along axis {axis} that {self.groups} groups divide", f"{array.spec.shape}")
        joined = arrays.interleave([array.made for array in given], axis, self.groups)
        return [_of(given[0], joined.shape, joined)]

    def undo(self, given: Sequence[tuple[str, Array]], made: Sequence[str]) -> tuple[Reshape, ...] | None:
        shapes = [array.spec.shape for _, array in given]
        axis = _axis(self.axis, shapes[0])
        lengths = tuple(shape[axis] // self.groups for shape in shapes)
        sizes = lengths if sum(lengths) else None
        return (Split(made[0], tuple(name for name, _ in given), axis, sizes, self.groups),)


class Permute(OfOne, frozen=True, tag="permute"):
    """An array with its dimensions in another order; without `axes` in the reverse one, so a matrix is transposed."""

    axes: tuple[int, ...] | None = None
    target: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source if self.target is None else self.target,)

    def make(self, given: Sequence[Array]) -> list[Array]:
        [array] = given
        ndim = len(array.spec.shape)
        axes = tuple(reversed(range(ndim))) if self.axes is None else self.axes
        if sorted(axes) != list(range(ndim)):
            raise _refuse(f"an order of the {ndim} dimensions of shape {array.spec.shape}", f"{axes}")
        turned = arrays.permute(array.made, axes)
        return [_of(array, turned.shape, turned)]

    def undo(self, given: Sequence[tuple[str, Array]], made: Sequence[str]) -> tuple[Reshape, ...] | None:
        axes = None if self.axes is None else tuple(self.axes.index(d) for d in range(len(self.axes)))
        return (Permute(made[0], axes, given[0][0]),)


_WIDER = {
    "float32": ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    "float64": ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    "int64": ("int32", "int16", "int8", "uint8", "uint16", "uint32", "bool"),
    "int32": ("int16", "int8", "uint8", "uint16", "bool"),
}


class Cast(OfOne, frozen=True, tag="cast"):
    """Arrays, or all below a node, in another dtype; values stay as they are.

    Args:
        dtype: a name, or a dtype of torch or numpy, which becomes its name.
        of: only arrays of this dtype.
    """

    dtype: str
    of: str | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "dtype", normalize_dtype(self.dtype))
        if self.of is not None:
            msgspec.structs.force_setattr(self, "of", normalize_dtype(self.of))

    def make(self, given: Sequence[Array]) -> list[Array]:
        [array] = given
        if self.of not in (None, array.spec.dtype):
            return [array]
        dtype = dtype_of(self.dtype).name
        return [Array(msgspec.structs.replace(array.spec, dtype=dtype), arrays.cast(array.made, dtype))]

    def undo(self, given: Sequence[tuple[str, Array]], made: Sequence[str]) -> tuple[Reshape, ...] | None:
        before = given[0][1].spec.dtype
        if before == self.dtype or self.of not in (None, before):
            return ()
        return (Cast(made[0], before),) if before in _WIDER.get(self.dtype, ()) else None


class Slice(OfOne, frozen=True, tag="slice"):
    """A stretch of an array along an axis, as of a slice of Python."""

    start: int | None = None
    stop: int | None = None
    axis: int = 0
    target: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source if self.target is None else self.target,)

    def make(self, given: Sequence[Array]) -> list[Array]:
        [array] = given
        axis = _axis(self.axis, array.spec.shape)
        length = array.spec.shape[axis]
        start, stop, _ = slice(self.start, self.stop).indices(length)
        lengths = (start, max(0, stop - start), length - max(start, stop))
        piece = arrays.uninterleave(array.made, axis, lengths)[1]
        return [_of(array, piece.shape, piece)]


class Stack(Shaping, frozen=True, tag="stack"):
    """Several arrays become one with a new axis: `Stack("layers.$L.w", "layers.w")`, in the order of their numbers."""

    sources: str | tuple[str, ...]
    target: str
    axis: int = 0

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.sources,) if isinstance(self.sources, str) else self.sources

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    @property
    def joins(self) -> bool:
        return True

    def make(self, given: Sequence[Array]) -> list[Array]:
        _check_alike(given, None)
        stacked = arrays.stack([array.made for array in given], _axis(self.axis, given[0].spec.shape, 1))
        return [_of(given[0], stacked.shape, stacked)]

    def undo(self, given: Sequence[tuple[str, Array]], made: Sequence[str]) -> tuple[Reshape, ...] | None:
        return (Unstack(made[0], tuple(name for name, _ in given), self.axis),)


class Unstack(OfOne, frozen=True, tag="unstack"):
    """An array becomes one for each element along an axis: `Unstack("layers.w", "layers.$L.w")`, counted from 0."""

    into: str | tuple[str, ...]
    axis: int = 0

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.into,) if isinstance(self.into, str) else self.into

    def make(self, given: Sequence[Array]) -> list[Array]:
        [array] = given
        axis = _axis(self.axis, array.spec.shape)
        rows = (arrays.take(array.made, axis, i) for i in range(array.spec.shape[axis]))
        return [_of(array, row.shape, row) for row in rows]

    def names(self, binding: Binding, count: int) -> list[str]:
        return _numbered(self.targets, self.source, binding, count)

    def undo(self, given: Sequence[tuple[str, Array]], made: Sequence[str]) -> tuple[Reshape, ...] | None:
        return (Stack(tuple(made), given[0][0], _axis(self.axis, given[0][1].spec.shape)),)


Reshape = Split | Concat | Permute | Cast | Slice | Stack | Unstack
