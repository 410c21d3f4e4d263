"""Load rules between the names of a transformers model's module and those of its checkpoints on the hub.

    from treeckpt.integrations.transformers import hub_rules, module_rules

    tc.convert.to_safetensors("run/step_00000100", "hub", subtree="model", hub_names=model)  # applies hub_rules(model)
    tc.convert.convert("hub", "run/step_00000000", transforms=module_rules(model))

Since version 5, the modules of transformers can have other names and layouts than the checkpoints of the same model:
the experts of a mixture are one array, for example. transformers converts between both by its conversion mapping. The
rules are derived from that mapping, for the names and shapes of one model: plain data, written out in full, which can
be stored and applied without transformers.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ... import ArraySpec, Index, MismatchError, TreeckptError, rules

__all__ = ["hub_rules", "module_rules"]

Leaves = Index | Mapping[str, ArraySpec | None] | None
"""An index, or specs by path."""


class NamedArray(msgspec.Struct, frozen=True):
    """An array while rules are recorded."""

    name: str
    shape: tuple[int, ...]


NamedArrays = dict[str, NamedArray]
Arrays = Mapping[str, Any]
"""By pattern, an array or a list of arrays."""


def hub_rules(model: Any, leaves: Leaves = None, *, prefix: str = "") -> tuple[rules.Rule, ...]:
    """Returns the rules from the module's names to those that `save_pretrained` writes.

    Args:
        model: a model of transformers, on any device, or its config.
        leaves: those that there are, an index or specs by path; default: `model.state_dict()`. Where one array has
            several names, one of them is enough.
        prefix: of the model's names in `leaves` and in the rules, as `model/` in a state of `treeckpt.training`.

    Raises:
        MismatchError: `leaves` are not those of the model, or transformers has a conversion that no rules express.
    """
    model, to = _built(model), RuleRecorder(prefix)
    own = _module_arrays(model, prefix)
    arrays = own if leaves is None else _checked(model, own, _given(leaves, prefix))
    for name in model._keys_to_ignore_on_save or ():
        if name in arrays:
            to.rules.append(rules.Drop(arrays.pop(name).name))
    return _renamed(to, _to_hub(model, arrays, to))


def module_rules(model: Any, leaves: Leaves = None, *, prefix: str = "") -> tuple[rules.Rule, ...]:
    """Returns the rules from the names of a checkpoint on the hub to those of the module.

    Args:
        model: a model of transformers, on any device, or its config.
        leaves: those of the checkpoint, an index or specs by path; default: what `save_pretrained` writes. Of an older
            checkpoint, all that transformers renames is renamed.
        prefix: of the model's names in `leaves` and in the rules, as `model/` in a state of `treeckpt.training`.

    Raises:
        MismatchError: transformers has a conversion that no rules express.
    """
    from transformers import conversion_mapping, core_model_loading

    model, to = _built(model), RuleRecorder(prefix)
    own = _module_arrays(model, prefix)
    given = _hub_arrays(model, own, prefix) if leaves is None else _given(leaves, prefix)
    conversions = _with_recorders(conversion_mapping.get_model_conversion_mapping(model), to)
    renamings = [one for one in conversions if isinstance(one, core_model_loading.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, core_model_loading.WeightConverter)]
    groups: dict[str, Any] = {}
    for name in sorted(given, key=core_model_loading.dot_natural_key):  # from here on as from_pretrained does
        end = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": own}
        now, pattern = core_model_loading.rename_source_key(name, renamings, converters, **end)
        if now not in own and name in own:
            now, pattern = core_model_loading.rename_source_key(name, [], [], **end)
        if now in own:
            if now not in groups:
                converter = next((one for one in converters if pattern in one.source_patterns), None)
                groups[now] = copy.deepcopy(converter) or core_model_loading.WeightRenaming(name, now)
            groups[now].add_tensor(now, name, pattern or name, given[name])
        elif any(re.search(ignored, now) for ignored in model._keys_to_ignore_on_load_unexpected or ()):
            to.rules.append(rules.Drop(given[name].name))
    found: dict[str, Any] = {}
    for first, conversion in groups.items():
        found |= conversion.convert(first, model=model, config=model.config)
    return (*_renamed(to, found), *_ties(model, found, prefix))


class _RecordedModel:
    """A model for `revert_weight_conversion`, with converters that record rules."""

    def __init__(self, model: Any, conversions: Sequence[Any]) -> None:
        self._model, self._weight_conversions = model, list(conversions) or None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _to_hub(model: Any, arrays: NamedArrays, to: RuleRecorder) -> dict[str, Any]:
    """Returns the arrays of the hub by name, as `save_pretrained` makes them."""
    from transformers import conversion_mapping, core_model_loading

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as transformers does for a model that was not loaded
        conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        conversions = [one for one in conversions if not isinstance(one, core_model_loading.PrefixChange)]
    recorded: Any = _RecordedModel(model, _with_recorders(conversions, to))
    state: Any = dict(arrays)
    return core_model_loading.revert_weight_conversion(recorded, state)


def _hub_arrays(model: Any, own: NamedArrays, prefix: str) -> NamedArrays:
    """Returns the arrays that `save_pretrained` writes, by name."""
    ignored = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    written = {name: array for name, array in own.items() if name not in ignored}
    found = _to_hub(model, written, RuleRecorder(prefix))
    return {name: NamedArray(prefix + name, _one(given).shape) for name, given in found.items()}


def _built(model: Any) -> Any:
    """Returns a model; for a config, one without memory, of the class that the config names."""
    import torch
    import transformers

    if isinstance(model, transformers.PreTrainedModel):
        return model
    if not isinstance(model, transformers.PreTrainedConfig):
        raise MismatchError("model", expected="a model of transformers, or its config", found=f"{type(model).__name__}")
    names = getattr(model, "architectures", None) or ()
    kinds = [kind for name in names if (kind := getattr(transformers, name, None)) is not None]
    with torch.device("meta"):
        return kinds[0](model) if kinds else transformers.AutoModel.from_config(model)


def _module_arrays(model: Any, prefix: str) -> NamedArrays:
    return {name: NamedArray(prefix + name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}


def _given(leaves: Index | Mapping[str, ArraySpec | None], prefix: str) -> NamedArrays:
    """Returns the arrays below a prefix, by name."""
    if isinstance(leaves, Index):
        leaves = {leaf.path: leaf.spec if isinstance(leaf.spec, ArraySpec) else None for leaf in leaves.entries}
    return {
        path.removeprefix(prefix): NamedArray(path, () if spec is None else spec.shape)
        for path, spec in leaves.items()
        if path.startswith(prefix)
    }


def _checked(model: Any, own: NamedArrays, given: NamedArrays) -> NamedArrays:
    """Checks that arrays are those of a model, and returns them.

    Raises:
        MismatchError: one is missing, of another shape, or none of the model's.
    """
    kind, ties = type(model).__name__, model.all_tied_weights_keys
    missing = [name for name in own if name not in given and name not in ties and name not in ties.values()]
    unexpected = [name for name in given if name not in own]
    if missing or unexpected:
        other = f", and {len(unexpected)} others, as {unexpected[0]}" if unexpected else ""
        raise MismatchError(
            (missing or unexpected)[0],
            expected=f"the {len(own)} names of the state dict of {kind}",
            found=f"{len(missing)} of them missing{other}",
            hint="Name the place of the model's state, as subtree='model'",
        )
    for name, array in given.items():
        if array.shape != own[name].shape:
            raise MismatchError(
                name,
                expected=f"shape {own[name].shape}, as {kind} has it",
                found=f"{array.shape}",
                hint="Pass the model, or the config, that was saved",
            )
    return given


def _with_recorders(conversions: Sequence[Any], to: RuleRecorder) -> list[Any]:
    """Returns copies of conversions whose operations record rules."""
    found = copy.deepcopy(list(conversions))
    for conversion in found:
        if hasattr(conversion, "operations"):
            conversion.operations = [RecordedOperation(op, to) for op in conversion.operations]
    return found


def _renamed(to: RuleRecorder, found: Mapping[str, Any]) -> tuple[rules.Rule, ...]:
    """Returns the recorded rules, and one that gives all arrays their new names at once."""
    names = [(_one(given).name, to.prefix + name) for name, given in found.items()]
    pairs = tuple((before, now) for before, now in names if before != now)
    return (*to.rules, *((rules.Renames(pairs),) if pairs else ()))


def _ties(model: Any, found: Mapping[str, Any], prefix: str) -> list[rules.Rule]:
    """Returns copies for names of the model's shared arrays that a checkpoint lacks."""
    known, made = set(found), list[rules.Rule]()
    for pair in model.all_tied_weights_keys.items():
        for missing, there in (pair, pair[::-1]):
            if missing not in known and there in known:
                made.append(rules.Copy(prefix + there, prefix + missing))
                known.add(missing)
    return made


# operations as rules --------------------------------------------------------------------------------------------------

# An operation of transformers takes tensors and returns tensors. The functions here take names and shapes of arrays in
# their place, and record the rules that do the same. Which patterns an operation's results belong to, it says itself.


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
        except TreeckptError:
            raise
        except (ValueError, IndexError, AttributeError, KeyError) as error:
            found = f"{error}"[:200]
            raise MismatchError(name, expected=f"arrays that {kind.__name__} fits", found=found) from error
