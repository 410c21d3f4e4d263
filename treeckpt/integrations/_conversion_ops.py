"""The conversion operations of transformers as load rules.

An operation of transformers takes tensors and returns tensors. The functions here take names and shapes of arrays in
their place, and record the rules that do the same. Which patterns an operation's results belong to, it says itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from .. import MismatchError, rules


class NamedArray(msgspec.Struct, frozen=True):
    """An array while rules are recorded."""

    name: str
    shape: tuple[int, ...]


Arrays = Mapping[str, Any]
"""By pattern, an array or a list of arrays."""


class RuleRecorder:
    """Collects the rules of one model, and gives names to the arrays between them.

    Args:
        prefix: is put before every name.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.rules: list[rules.Rule] = []
        self._count = itertools.count()

    def new(self, shape: Sequence[int]) -> NamedArray:
        """Returns an array with a name that no model has."""
        return NamedArray(f"{self.prefix}:{next(self._count)}", tuple(shape))

    def split(self, array: NamedArray, count: int, dim: int, sizes: Sequence[int] | None = None) -> list[NamedArray]:
        """Splits an array into `count` parts, of equal length without `sizes`."""
        lengths = [array.shape[dim] // count] * count if sizes is None else sizes
        parts = [self.new(_with(array.shape, dim, length)) for length in lengths]
        exact = None if sizes is None else tuple(sizes)
        self.rules.append(rules.Split(array.name, tuple(part.name for part in parts), dim, exact))
        return parts

    def concat(self, arrays: Sequence[NamedArray], dim: int) -> NamedArray:
        """Joins arrays."""
        joined = self.new(_with(arrays[0].shape, dim, sum(array.shape[dim] for array in arrays)))
        self.rules.append(rules.Concat(tuple(array.name for array in arrays), joined.name, dim))
        return joined

    def stack(self, arrays: Sequence[NamedArray], dim: int) -> NamedArray:
        """Stacks arrays along a new dimension."""
        shape = arrays[0].shape
        stacked = self.new((*shape[:dim], len(arrays), *shape[dim:]))
        self.rules.append(rules.Stack(tuple(array.name for array in arrays), stacked.name, axis=dim))
        return stacked

    def unstack(self, array: NamedArray, dim: int) -> list[NamedArray]:
        """Returns the arrays at each index of a dimension."""
        shape = (*array.shape[:dim], *array.shape[dim + 1 :])
        parts = [self.new(shape) for _ in range(array.shape[dim])]
        self.rules.append(rules.Unstack(array.name, tuple(part.name for part in parts), dim))
        return parts

    def regroup(self, array: NamedArray, dim: int, groups: int, *, inverse: bool) -> NamedArray:
        """Returns the array with the pairs of each of `groups` ranges as two halves, or the halves as pairs."""
        made = self.new(array.shape)
        length = array.shape[dim] // groups
        if length % 2:
            raise ValueError(f"{groups} groups of pairs along dimension {dim} of shape {array.shape}")
        permute = rules.rotary_pairs if inverse else rules.rotary_halves
        self.rules += permute(array.name, made.name, heads=groups, head_dim=length, axis=dim)
        return made


def _with(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _one(given: Any) -> NamedArray:
    """Returns the array of a pattern that has one."""
    if not isinstance(given, list):
        return given
    [array] = given
    return array


def _only(arrays: Arrays) -> NamedArray:
    [given] = arrays.values()
    return _one(given)


def _chunk(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    names = op.get_target_patterns(targets, **more)
    array = _only(arrays)
    if array.shape[op.dim] % len(names):
        raise ValueError(f"{len(names)} chunks of shape {array.shape} along dimension {op.dim}")
    return dict(zip(names, to.split(array, len(names), op.dim), strict=True))


def _split(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    full = more["full_layer_name"]
    sizes = [more["model"].get_parameter(full.replace(targets[0], one)).shape[op.dim] for one in targets]
    return dict(zip(targets, to.split(_only(arrays), len(targets), op.dim, sizes), strict=True))


def _concatenate(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    given = [arrays[pattern] for pattern in more["source_patterns"] if pattern in arrays]
    parts = [part for one in given for part in (one if isinstance(one, list) else [one])]
    return {op.get_target_pattern(targets): to.concat(parts, op.dim)}


def _interleave(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    return {targets[0]: to.regroup(_only(arrays), op.dim, 1, inverse=op.inverse)}


def _merge_list(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    names = [op.get_target_pattern(len(arrays), pattern, targets) for pattern in arrays]
    merged = [to.stack(given, op.dim) if isinstance(given, list) else given for given in arrays.values()]
    return dict(zip(names, merged, strict=True))


def _split_list(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    found: dict[str, NamedArray] = {}
    for pattern, given in arrays.items():
        parts = to.unstack(_one(given), op.dim)
        found.update(zip(op.get_target_patterns(arrays, pattern, targets, len(parts)), parts, strict=True))
    return found


def _transpose(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    name = op.get_target_pattern(arrays, more["source_patterns"], targets)
    array = _only(arrays)
    if op.check_dims and array.shape == tuple(more["model"].get_parameter(more["full_layer_name"]).shape):
        return {name: array}
    axes = list(range(len(array.shape)))
    axes[op.dim0], axes[op.dim1] = axes[op.dim1], axes[op.dim0]
    made = to.new([array.shape[axis] for axis in axes])
    to.rules.append(rules.Permute(array.name, tuple(axes), made.name))
    return {name: made}


def _permute_for_rope(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    config = more["config"] if op.subconfig_key is None else getattr(more["config"], op.subconfig_key, more["config"])
    heads = getattr(config, "num_attention_heads", 1)
    found: dict[str, NamedArray] = {}
    for pattern, given in arrays.items():
        array = _one(given)
        if op.permute_layer_names is None or any(name in pattern for name in op.permute_layer_names):
            array = to.regroup(array, 0, heads, inverse=op.inverse) if len(array.shape) in (1, 2) else array
        found[op.get_target_pattern(pattern, more["source_patterns"], targets)] = array
    return found


def _fuse_experts(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    parts: dict[str, list[NamedArray]] = {target: [] for target in targets}
    for pattern in more["source_patterns"]:
        size = math.ceil(len(arrays[pattern]) / len(targets))
        for number, target in enumerate(targets):
            parts[target].append(to.stack(arrays[pattern][number * size : (number + 1) * size], op.stack_dim))
    return {target: to.concat(found, op.concat_dim) for target, found in parts.items()}


def _split_experts(op: Any, to: RuleRecorder, arrays: Arrays, targets: list[str], more: dict[str, Any]) -> Arrays:
    fused = [to.split(_one(arrays[p]), len(targets), op.concat_dim) for p in more["source_patterns"]]
    found: dict[str, NamedArray] = {}
    for number, target in enumerate(targets):
        experts = [expert for parts in fused for expert in to.unstack(parts[number], op.stack_dim)]
        found.update({target.replace("*", str(i)): expert for i, expert in enumerate(experts)})
    return found


RECORDED: dict[str, Callable[[Any, RuleRecorder, Arrays, list[str], dict[str, Any]], Arrays]] = {
    "Chunk": _chunk,
    "Split": _split,
    "Concatenate": _concatenate,
    "Interleave": _interleave,
    "MergeModulelist": _merge_list,
    "SplitModulelist": _split_list,
    "Transpose": _transpose,
    "PermuteForRope": _permute_for_rope,
    "ErnieFuseAndSplitTextVisionExperts": _fuse_experts,
    "ErnieSplitAndDecoupleTextVisionExperts": _split_experts,
}
"""By the name of an operation of `transformers.core_model_loading`."""


class RecordedOperation:
    """Stands for an operation of transformers in a converter: takes and returns `NamedArray`s, and records rules."""

    def __init__(self, op: Any, to: RuleRecorder) -> None:
        self.op, self.to = op, to
        self.supports_many_to_many: bool = op.supports_many_to_many

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedOperation:
        return self

    @property
    def reverse_op(self) -> RecordedOperation:
        """The operation that undoes it, as transformers has it."""
        return RecordedOperation(self.op.reverse_op, self.to)

    def convert(self, input_dict: Arrays, *, target_patterns: list[str], **more: Any) -> Arrays:
        """Records the rules for these arrays, and returns the new ones by pattern.

        Raises:
            MismatchError: an operation without rules, or one that does not fit the arrays.
        """
        kind, name = type(self.op), more["full_layer_name"]
        record = RECORDED.get(kind.__name__) if kind.__module__ == "transformers.core_model_loading" else None
        if record is None:
            raise MismatchError(
                name,
                expected=f"conversion operations that are load rules: {', '.join(RECORDED)}",
                found=f"{kind.__module__}.{kind.__name__}",
                hint="Convert this model with save_pretrained and from_pretrained",
            )
        try:
            return record(self.op, self.to, input_dict, target_patterns, more)
        except (ValueError, IndexError, AttributeError, KeyError) as error:
            found = f"{error}"[:200]
            raise MismatchError(name, expected=f"arrays that {kind.__name__} fits", found=found) from error
