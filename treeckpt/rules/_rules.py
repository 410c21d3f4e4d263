"""The load rules as plain data with a JSON form: rules on names, and rules that build new arrays.

A rule that builds arrays (split, concat, permute, cast, dequantize, slice, stack, unstack) has the patterns of the
leaves that it takes (`patterns`), the names of the new leaves (`targets`), a function that composes the new arrays
(`make`, by `rules._composed_array`) and, where no data is lost, the rules that undo it. `rules._apply_rules` finds the
leaves, and applies a list of rules in order, each to the result of those before it. Rules never touch data: a load
reads only the bytes that it needs of their result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from typing import Any, ClassVar

import msgspec
import numpy as np
from optree import PyTreeAccessor

from .._core.sharding.dtypes import dtype_of, normalize_dtype
from .._core.tree.paths import as_path
from ..errors import MismatchError
from . import _composed_array as arrays
from ._composed_array import ComposedArray, SourceBox, saved
from ._patterns import Binding, expand, numbers_in

_DTYPES = ("dtype", "of")
"""The fields of rules that are dtypes."""


class BaseRule(
    msgspec.Struct, frozen=True, tag_field="rule", omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """The base of all rules.

    A list becomes a tuple, a name in the place of several a tuple of it, a path as keys or an accessor of optree its
    text, a number of numpy one of Python, and a dtype its name.

    Args:
        optional: whether the rule may match no leaf; otherwise that is an error, as a misspelt name looks the same.

    Raises:
        MismatchError: an argument is of another type.
    """

    optional: bool = False

    def __post_init__(self) -> None:
        for name, kind, text in _fields(type(self)):
            given = getattr(self, name)
            try:
                value = normalize_dtype(given) if name in _DTYPES and given is not None else given
                value = _converted(value, kind)
            except (msgspec.ValidationError, MismatchError) as error:
                raise MismatchError(
                    f"rules.{type(self).__name__}",
                    expected=f"{error.expected if isinstance(error, MismatchError) else text} as {name}",
                    found=f"{given!r:.80}",
                    hint=f"help(treeckpt.rules.{type(self).__name__}) says what it takes",
                ) from error
            if value is not given:
                msgspec.structs.force_setattr(self, name, value)


@cache
def _fields(kind: type[BaseRule]) -> list[tuple[str, Any, str]]:
    """Returns the name, the type and the text of the type of each field."""
    texts = {name: text for base in reversed(kind.__mro__) for name, text in inspect.get_annotations(base).items()}
    return [(field.name, field.type, texts[field.name]) for field in msgspec.structs.fields(kind)]


def _converted(value: Any, kind: Any) -> Any:
    if kind in (str, str | None) and isinstance(value, tuple):
        return as_path(value, "a path")
    if kind == tuple[str, ...]:
        several = (value,) if isinstance(value, (str, PyTreeAccessor)) else value
        if isinstance(several, (list, tuple)) and any(isinstance(name, tuple) for name in several):
            several = tuple(as_path(name, "a path") if isinstance(name, tuple) else name for name in several)
        value = several
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        # a second try, because it looks at each element: `names` of a model can have thousands
        return msgspec.convert(_plain(value), kind)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, range)):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


NOWHERE = "_"
"""The target name of an array that is dropped."""


class ArrayRule(BaseRule, frozen=True):
    """The base of rules that build arrays from others.

    Leaves whose patterns bind the same values for the numbers and texts of `targets` are taken together.
    """

    joins: ClassVar[bool] = False
    """Whether the rule takes several arrays at a time."""
    led_by: ClassVar[int | None] = None
    """The number of a pattern, where leaves for which it has none beside them are not taken."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of the leaves that the rule takes."""
        raise NotImplementedError

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the leaves that the rule adds."""
        raise NotImplementedError

    def make(self, given: Sequence[ComposedArray]) -> list[ComposedArray]:
        """Returns the new arrays.

        Raises:
            MismatchError: the rule cannot be applied to these shapes and dtypes.
        """
        raise NotImplementedError

    def names(self, binding: Binding, count: int) -> list[str]:
        """Returns names for `count` new arrays."""
        return [expand(target, binding) for target in self.targets]

    def undo(self, given: Sequence[tuple[str, ComposedArray]], new: Sequence[str]) -> tuple[Reshape, ...] | None:
        """Returns rules that restore the old names from the new ones; None where that is not possible."""
        return None


class SingleArrayRule(ArrayRule, frozen=True):
    """The base of rules that take one array at a time; the result keeps its name unless the rule has a target."""

    source: str

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source,)


class SplittingRule(SingleArrayRule, frozen=True):
    """The base of rules that build several arrays from one."""

    into: str | tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.into,) if isinstance(self.into, str) else self.into

    def names(self, binding: Binding, count: int) -> list[str]:
        """Returns the new names; a number that only they have is counted from 0.

        Raises:
            MismatchError: their number differs from that of the arrays.
        """
        into = self.targets
        free = numbers_in(into[0]) - numbers_in(self.source) if len(into) == 1 else set[str]()
        names = [expand(name, binding) for name in into] if not free else []
        if len(free) == 1:
            [name] = free
            names = [expand(into[0], tuple(sorted((*binding, (name, i))))) for i in range(count)]
        if len(names) != count:
            raise _rule_error(f"{count} new names", f"{', '.join(into)}")
        return names


class JoiningRule(ArrayRule, frozen=True):
    """The base of rules that build one array from several."""

    sources: str | tuple[str, ...]
    target: str
    joins: ClassVar[bool] = True

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.sources,) if isinstance(self.sources, str) else self.sources

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)


def _rule_error(expected: str, found: str, hint: str = "") -> MismatchError:
    """Returns an error without a path; the caller that applies the rule adds it."""
    return MismatchError("", expected=expected, found=found, hint=hint)


def _axis(axis: int, shape: tuple[int, ...], more: int = 0) -> int:
    ndim = len(shape) + more
    if not -ndim <= axis < ndim:
        raise _rule_error(f"an axis of shape {shape}", f"axis {axis}")
    return axis % ndim


def _check_alike(given: Sequence[ComposedArray], axis: int | None) -> None:
    """Raises a MismatchError for arrays that differ in dtype, or in shape other than along the axis."""
    for array in given:
        if array.spec.dtype != given[0].spec.dtype:
            raise _rule_error(f"arrays of one dtype, as {given[0].spec.dtype}", array.spec.dtype, "Cast them before")
        a, b = list(array.shape), list(given[0].shape)
        if axis is not None and len(a) == len(b):
            a[axis] = b[axis]
        if a != b:
            besides = "" if axis is None else f" but along axis {axis}"
            raise _rule_error(f"arrays of one shape{besides}, as {given[0].shape}", f"{array.shape}")


class Split(SplittingRule, frozen=True, tag="split"):
    """Splits one array into several along an axis.

    >>> rule = tc.rules.Split("model/weight", ("model/a", "model/b"), axis=1)
    >>> tc.load("run/step_00000100", transforms=rule)["model"]["a"].shape
    torch.Size([2, 2])

    Args:
        source: the array.
        into: the new names, `_` for a piece that is dropped; or one name with a number of its own, `w.$I`, counted
            from 0, which needs `sizes`.
        axis: the axis to cut.
        sizes: relative lengths of the pieces; None means equal lengths.
        groups: the axis is first divided into this many equal ranges, and each of them is split; piece k is the
            concatenation of their k-th parts. A fused projection of grouped-query attention with 32 heads and 8 groups
            of keys and values, group after group, has `sizes=(4, 1, 1), groups=8`.
    """

    into: tuple[str, ...]
    axis: int = 0
    sizes: tuple[int, ...] | None = None
    groups: int = 1

    def make(self, given: Sequence[ComposedArray]) -> list[ComposedArray]:
        [array] = given
        axis, shape = _axis(self.axis, array.shape), array.shape
        sizes = self.sizes or (1,) * len(self.into)
        if min(sizes) < 0 or not sum(sizes) or self.groups < 1:
            raise _rule_error("sizes and groups of at least 1", f"{sizes}, {self.groups} groups")
        if shape[axis] % (sum(sizes) * self.groups):
            raise _rule_error(
                f"a length along axis {axis} that {self.groups} groups of {'+'.join(map(str, sizes))} divide",
                f"{shape[axis]} of shape {shape}",
            )
        unit = shape[axis] // self.groups // sum(sizes)
        return arrays.uninterleave(array, axis, [unit * size for size in sizes], self.groups)

    def undo(self, given: Sequence[tuple[str, ComposedArray]], new: Sequence[str]) -> tuple[Reshape, ...] | None:
        return None if NOWHERE in new else (Concat(tuple(new), given[0][0], self.axis, self.groups),)


class Concat(JoiningRule, frozen=True, tag="concat"):
    """Joins several arrays along an axis; with n groups, a 1/n part of each in turn, n times.

    A number that only the sources have, as in `Concat(("experts.$E.w",), "experts.w")`, orders them.

    >>> report = tc.save("run/step_00000200", {"a": np.ones((1, 2)), "b": np.zeros((1, 2))})
    >>> tc.load("run/step_00000200", transforms=tc.rules.Concat(("a", "b"), "ab"))["ab"].shape
    (2, 2)

    Args:
        sources, target: the patterns of the arrays, in their order, and the name of the new one.
        axis: the axis to join.
        groups: n.
    """

    sources: tuple[str, ...]
    target: str
    axis: int = 0
    groups: int = 1

    def make(self, given: Sequence[ComposedArray]) -> list[ComposedArray]:
        axis = _axis(self.axis, given[0].shape)
        _check_alike(given, axis)
        for array in given:
            if self.groups < 1 or array.shape[axis] % self.groups:
                raise _rule_error(f"a length along axis {axis} that {self.groups} groups divide", f"{array.shape}")
        return [arrays.interleave(given, axis, self.groups)]

    def undo(self, given: Sequence[tuple[str, ComposedArray]], new: Sequence[str]) -> tuple[Reshape, ...] | None:
        shapes = [array.shape for _, array in given]
        axis = _axis(self.axis, shapes[0])
        lengths = tuple(shape[axis] // self.groups for shape in shapes)
        sizes = lengths if sum(lengths) else None
        return (Split(new[0], tuple(name for name, _ in given), axis, sizes, self.groups),)


class Permute(SingleArrayRule, frozen=True, tag="permute"):
    """Permutes the dimensions of an array; without `axes` it reverses them, which transposes a matrix.

    >>> tc.load("run/step_00000100", transforms=tc.rules.Permute("model/weight"))["model"]["weight"].shape
    torch.Size([4, 2])

    Args:
        source: the array.
        axes: the old number of each new dimension.
        target: its new name; None keeps the name.
    """

    axes: tuple[int, ...] | None = None
    target: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source if self.target is None else self.target,)

    def make(self, given: Sequence[ComposedArray]) -> list[ComposedArray]:
        [array] = given
        ndim = len(array.shape)
        axes = tuple(reversed(range(ndim))) if self.axes is None else self.axes
        if sorted(axes) != list(range(ndim)):
            raise _rule_error(f"an order of the {ndim} dimensions of shape {array.shape}", f"{axes}")
        return [arrays.permute(array, axes)]

    def undo(self, given: Sequence[tuple[str, ComposedArray]], new: Sequence[str]) -> tuple[Reshape, ...] | None:
        axes = None if self.axes is None else tuple(self.axes.index(d) for d in range(len(self.axes)))
        return (Permute(new[0], axes, given[0][0]),)


_WIDER = {
    "float32": ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    "float64": ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    "int64": ("int32", "int16", "int8", "uint8", "uint16", "uint32", "bool"),
    "int32": ("int16", "int8", "uint8", "uint16", "bool"),
}


class Cast(SingleArrayRule, frozen=True, tag="cast"):
    """Casts arrays, or all arrays below a node, to another dtype; values stay as they are.

    >>> tc.load("run/step_00000100", transforms=tc.rules.Cast("model", "bfloat16"))["model"]["bias"].dtype
    torch.bfloat16

    Args:
        source: the arrays, or a node above them.
        dtype: a name, or a dtype of torch or numpy, which is stored as its name.
        of: casts only arrays of this dtype.
    """

    dtype: str
    of: str | None = None

    def make(self, given: Sequence[ComposedArray]) -> list[ComposedArray]:
        [array] = given
        return [array if self.of not in (None, array.spec.dtype) else arrays.cast(array, dtype_of(self.dtype).name)]

    def undo(self, given: Sequence[tuple[str, ComposedArray]], new: Sequence[str]) -> tuple[Reshape, ...] | None:
        before = given[0][1].spec.dtype
        if before == self.dtype or self.of not in (None, before):
            return ()
        return (Cast(new[0], before),) if before in _WIDER.get(self.dtype, ()) else None


class Dequantize(ArrayRule, frozen=True, tag="dequantize"):
    """Multiplies arrays by their scales, block by block, in float32: float8 weights of checkpoints on a hub.

    Only leaves beside which there are scales are taken; the scales are no leaves any more. A rank reads the scales of
    its part alone. Give it before rules that cut, join or cast.

    >>> w = torch.full((2, 4), 3.0).to(torch.float8_e4m3fn)
    >>> report = tc.save("run/step_00000200", {"w": w, "w_scale_inv": torch.tensor([[0.5, 2.0]])})
    >>> rule = tc.rules.Dequantize("*", "*_scale_inv", block=(2, 2))
    >>> tc.load("run/step_00000200", transforms=rule)["w"][0]
    tensor([1.5000, 1.5000, 6.0000, 6.0000])

    Args:
        source: the pattern of the arrays, as `model/*.weight`.
        scales: that of their scales, as `model/*.weight_scale_inv`; the same texts and numbers make a pair.
        block: elements along each of the last dimensions that share a scale, as `weight_block_size` of
            `quantization_config` in a config.json; the last blocks may be shorter. None is for one scale for the whole
            array, or for each index along a dimension (`[out, 1]`, `[out]`).
        dtype: of the result.
    """

    source: str
    scales: str
    block: tuple[int, ...] | None = None
    dtype: str = "float32"
    joins: ClassVar[bool] = True
    led_by: ClassVar[int | None] = 1

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.source, self.scales)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source,)

    def make(self, given: Sequence[ComposedArray]) -> list[ComposedArray]:
        weight, scales = given
        places: list[str] = []
        for array in given:
            part = array.parts[0]
            if not isinstance(part, SourceBox) or array != saved(part.source, array.spec):
                raise _rule_error("arrays as they were saved", "cut, joined or cast ones", "Dequantize them before")
            places.append(part.source)
        if not scales.spec.dtype.startswith(("float", "bfloat")):
            raise _rule_error("scales of floating point", scales.spec.dtype)
        dims, block = self._blocks(weight.shape, scales.shape)
        scaled = arrays.scale(weight, arrays.BlockScales(places[1], scales.spec.dtype, dims, block))
        return [arrays.cast(scaled, dtype_of(self.dtype).name)]

    def _blocks(self, shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the dimension of the array for each of the scales, and the elements that share one."""
        ndim, last = len(shape), len(self.block or ())
        # [out] for [out, in] has the first dimensions, one scale for all, or fewer dimensions otherwise, the last ones
        first = 0 if scales and scales != (1,) and scales == shape[: len(scales)] else max(0, ndim - len(scales))
        dims = tuple(range(first, first + len(scales)))
        counts = dict(zip(dims, scales, strict=True))
        block = [1 if counts.get(d, 1) == n else n for d, n in enumerate(shape)]
        block[ndim - last :] = self.block or ()
        fits = len(scales) <= ndim >= last and min(block, default=1) > 0
        if not fits or any(counts.get(d, 1) != -(-n // b) for d, (n, b) in enumerate(zip(shape, block, strict=True))):
            raise _rule_error(
                f"a scale for each block of {self.block or 'all, or one index along a dimension,'} of shape {shape}",
                f"scales of shape {scales}",
                "Pass as block= the weight_block_size of quantization_config in config.json",
            )
        return dims, tuple(block)


_SCALES = (("", "_scale_inv"), ("", "_scale"), ("weight", "scale"))
"""The ends of the names of arrays and of their scales, as checkpoints on a hub have them."""
_CODED = (("weight", "SCB"), ("", ".absmax"), ("", "_zero_point"), ("weight", "zeros"))
"""Those of arrays beside which there is more than a factor: the library that wrote them alone knows their values."""


def check_scaled(path: str, dtypes: tuple[str, str], names: Container[str], *, at: str = "") -> None:
    """Refuses a cast that would take float8 or 8-bit integer elements without the scales that are beside them.

    Args:
        dtypes: the saved one, and the one that is wanted.
        names: the paths of all arrays.
        at: the path among them, if it is another one.

    Raises:
        MismatchError: naming the rule that scales them.
    """
    before, after = dtypes
    quantized = before.startswith("float8") or (before in ("int8", "uint8") and "float" in after)
    if not quantized or after.startswith("float8"):
        return
    at = at or path

    def beside(ends: Sequence[tuple[str, str]]) -> str | None:
        near = (at.removesuffix(old) + new for old, new in ends if at.endswith(old))
        return next((name for name in near if name in names), None)

    if (code := beside(_CODED)) is not None:
        raise MismatchError(
            path,
            expected=f"{before} as it is coded by {code} beside it",
            found=f"a cast to {after} without that",
            hint="Load it with the library that quantized it; or ask for its own dtype, and for what is beside it",
        )
    if (there := beside(_SCALES)) is None:
        return
    cut = max(at.rfind("."), at.rfind("/")) + 1
    star = "*" + at[cut - 1 : cut]
    raise MismatchError(
        path,
        expected=f"{before} times its scales, {there}",
        found=f"a cast to {after} without them",
        hint=f"Pass transforms=rules.Dequantize('{star}{at[cut:]}', '{star}{there[cut:]}', block=...), with the "
        "weight_block_size of config.json. A rules.Cast takes the elements as they are",
    )


class Slice(SingleArrayRule, frozen=True, tag="slice"):
    """Takes a range of an array along an axis, with the meaning of a Python slice.

    >>> tc.load("run/step_00000100", transforms=tc.rules.Slice("model/weight", 0, 3, axis=1))["model"]["weight"].shape
    torch.Size([2, 3])

    Args:
        source: the array.
        start, stop: the range; None is an end of the axis.
        axis: the axis to cut.
        target: its new name; None keeps the name.
    """

    start: int | None = None
    stop: int | None = None
    axis: int = 0
    target: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source if self.target is None else self.target,)

    def make(self, given: Sequence[ComposedArray]) -> list[ComposedArray]:
        [array] = given
        axis = _axis(self.axis, array.shape)
        length = array.shape[axis]
        start, stop, _ = slice(self.start, self.stop).indices(length)
        lengths = (start, max(0, stop - start), length - max(start, stop))
        return [arrays.uninterleave(array, axis, lengths)[1]]


class Stack(JoiningRule, frozen=True, tag="stack"):
    """Stacks arrays along a new axis, in the order of their numbers: `Stack("layers.$L.w", "layers.w")`.

    >>> report = tc.save("run/step_00000200", {"e": [np.ones(2), np.zeros(2)]})
    >>> tc.load("run/step_00000200", transforms=tc.rules.Stack("e/$I", "experts"))["experts"].shape
    (2, 2)

    Args:
        sources, target: the pattern of the arrays, and the name of the new one.
        axis: the new axis.
    """

    axis: int = 0

    def make(self, given: Sequence[ComposedArray]) -> list[ComposedArray]:
        _check_alike(given, None)
        return [arrays.stack(given, _axis(self.axis, given[0].shape, 1))]

    def undo(self, given: Sequence[tuple[str, ComposedArray]], new: Sequence[str]) -> tuple[Reshape, ...] | None:
        return (Unstack(new[0], tuple(name for name, _ in given), self.axis),)


class Unstack(SplittingRule, frozen=True, tag="unstack"):
    """Unstacks an array into one for each index along an axis: `Unstack("layers.w", "layers.$L.w")`, counted from 0.

    >>> rule = tc.rules.Unstack("model/weight", "model/row.$I")
    >>> sorted(tc.load("run/step_00000100", transforms=rule)["model"])
    ['bias', 'row.0', 'row.1']

    Args:
        source, into: the array, and the pattern of the new names.
        axis: the axis that goes.
    """

    axis: int = 0

    def make(self, given: Sequence[ComposedArray]) -> list[ComposedArray]:
        [array] = given
        axis = _axis(self.axis, array.shape)
        return [arrays.take(array, axis, i) for i in range(array.shape[axis])]

    def undo(self, given: Sequence[tuple[str, ComposedArray]], new: Sequence[str]) -> tuple[Reshape, ...] | None:
        return (Stack(tuple(new), given[0][0], _axis(self.axis, given[0][1].shape)),)


Reshape = Split | Concat | Permute | Cast | Dequantize | Slice | Stack | Unstack


class OneName(BaseRule, frozen=True):
    """The base of rules that give one new name to what a pattern matches."""

    source: str
    target: str

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(pattern, new name) pairs."""
        return ((self.source, self.target),)


class Rename(OneName, frozen=True, tag="rename"):
    """Renames leaves, or everything below a node: `Rename("model/h.$L.*", "model/layers.${L + 4}.*")`.

    >>> sorted(tc.load("run/step_00000100", transforms=tc.rules.Rename("model/weight", "model/w"))["model"])
    ['bias', 'w']

    Args:
        source, target: the pattern of leaves, or of a node above them, and their new name.
    """


class Renames(BaseRule, frozen=True, tag="renames"):
    """Applies several renames at once: the first pattern that matches a leaf counts, so names can be exchanged.

    >>> swap = tc.rules.Renames((("model/weight", "model/bias"), ("model/bias", "model/weight")))
    >>> tc.load("run/step_00000100", transforms=swap)["model"]["bias"].shape
    torch.Size([2, 4])

    Args:
        names: (pattern, new name) pairs.
    """

    names: tuple[tuple[str, str], ...]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(pattern, new name) pairs."""
        return self.names


class Copy(OneName, frozen=True, tag="copy"):
    """Adds a second name to leaves, or to everything below a node; both are one tied array while neither is changed.

    >>> sorted(tc.load("run/step_00000100", transforms=tc.rules.Copy("model", "ema")))
    ['ema', 'model', 'step']

    Args:
        source, target: the pattern of leaves, or of a node above them, and their second name.
    """


class Drop(BaseRule, frozen=True, tag="drop"):
    """Removes leaves, or everything below a node.

    >>> tc.load("run/step_00000100", transforms=tc.rules.Drop("model"))
    {'step': 100}

    Args:
        source: the pattern of leaves, or of a node above them.
    """

    source: str


class Keep(BaseRule, frozen=True, tag="keep"):
    """Leaves the target's values under these names unchanged, whatever was saved there.

    >>> tc.load_into("run/step_00000100", {"model": model, "step": 0}, transforms=tc.rules.Keep("model/bias")).loaded
    2

    Args:
        source: the pattern of leaves, or of a node above them.
    """

    source: str


class Fill(BaseRule, frozen=True, tag="fill"):
    """Adds an array of one value where none was saved.

    >>> tc.load("run/step_00000100", transforms=tc.rules.Fill("model/scale", 1.0, shape=(2,)))["model"]["scale"]
    tensor([1., 1.])

    Args:
        target: its name; a pattern if the shape comes from `like`.
        value: the value of every element.
        shape, dtype: of the array; a shape of None means the shape and dtype that `like` has there.
    """

    target: str
    value: bool | int | float = 0
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"


class Carried(BaseRule, frozen=True, tag="carried"):
    """Applies rules to `model/...` of a state saved by `treeckpt.training`, and to the optimizers' state of it.

    Moments (`optimizer/<name>/exp_avg`) are renamed, split, joined and permuted as their parameters are. State of which
    a parameter has one value (`step`, its membership in a group) is copied to each parameter that it is split into;
    where parameters of one group are joined, the value of the first is taken. Casts, scales and fills apply to
    parameters only.

    >>> report = tc.save("run/step_00000200", tc.training.state(torch.nn.ModuleDict({"old": model})))
    >>> rule = tc.rules.Carried((tc.rules.Rename("model/old.*", "model/*"),))
    >>> tc.training.restore("run/step_00000200", model, transforms=rule).loaded
    2

    Args:
        rules: applied in order, on the names that they have in the state.
    """

    rules: tuple[Rule, ...]


OneRule = Rename | Renames | Copy | Drop | Keep | Fill | Reshape
Rule = OneRule | Carried


_NAMES = ("source", "target", "into", "sources", "names", "scales")
"""The fields of rules that hold patterns and names."""


def placed_below(rules: Iterable[Rule], prefix: str) -> tuple[Rule, ...]:
    """Returns the rules for leaves of which each has become `prefix/...`."""
    return with_names(rules, lambda name: f"{prefix}/{name}" if name else prefix)


def with_names(rules: Iterable[Rule], change: Callable[[str], str]) -> tuple[Rule, ...]:
    """Returns the rules with each of their patterns and names changed."""

    def changed(name: Any) -> Any:
        if isinstance(name, str):
            return change(name)
        return tuple(map(changed, name)) if isinstance(name, tuple) else name

    new: list[Rule] = []
    for rule in rules:
        if isinstance(rule, Carried):
            fields: dict[str, Any] = {"rules": with_names(rule.rules, change)}
        else:
            fields = {name: changed(getattr(rule, name)) for name in _NAMES if name in rule.__struct_fields__}
        is_same = all(getattr(rule, name) == value for name, value in fields.items())
        new.append(rule if is_same else msgspec.structs.replace(rule, **fields))
    return tuple(new)


def label_of(rule: Rule) -> str:
    """Returns a short description of a rule, for errors."""
    kind = str(type(rule).__struct_config__.tag)
    if isinstance(rule, ArrayRule):
        return f"{kind} {', '.join(rule.patterns)} -> {', '.join(rule.targets)}"[:200]
    if isinstance(rule, (Rename, Renames, Copy)):
        more = f" and {len(rule.pairs) - 1} more" if len(rule.pairs) > 1 else ""
        return f"{kind} " + "".join(f"{a} -> {b}" for a, b in rule.pairs[:1])[:200] + more
    if isinstance(rule, Carried):
        return f"{kind} {len(rule.rules)} rules"
    return f"{kind} {rule.target if isinstance(rule, Fill) else rule.source}"
