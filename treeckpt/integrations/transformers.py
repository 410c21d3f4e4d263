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
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .. import ArraySpec, Index, MismatchError, rules
from ._conversion_ops import NamedArray, RecordedOperation, RuleRecorder

__all__ = ["hub_rules", "module_rules"]

Leaves = Index | Mapping[str, ArraySpec | None] | None
"""An index, or specs by path."""
Arrays = dict[str, NamedArray]


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


def _to_hub(model: Any, arrays: Arrays, to: RuleRecorder) -> dict[str, Any]:
    """Returns the arrays of the hub by name, as `save_pretrained` makes them."""
    from transformers import conversion_mapping, core_model_loading

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as transformers does for a model that was not loaded
        conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        conversions = [one for one in conversions if not isinstance(one, core_model_loading.PrefixChange)]
    recorded: Any = _RecordedModel(model, _with_recorders(conversions, to))
    state: Any = dict(arrays)
    return core_model_loading.revert_weight_conversion(recorded, state)


def _hub_arrays(model: Any, own: Arrays, prefix: str) -> Arrays:
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


def _module_arrays(model: Any, prefix: str) -> Arrays:
    return {name: NamedArray(prefix + name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}


def _given(leaves: Index | Mapping[str, ArraySpec | None], prefix: str) -> Arrays:
    """Returns the arrays below a prefix, by name."""
    if isinstance(leaves, Index):
        leaves = {leaf.path: leaf.spec if isinstance(leaf.spec, ArraySpec) else None for leaf in leaves.entries}
    return {
        path.removeprefix(prefix): NamedArray(path, () if spec is None else spec.shape)
        for path, spec in leaves.items()
        if path.startswith(prefix)
    }


def _checked(model: Any, own: Arrays, given: Arrays) -> Arrays:
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


def _one(given: Any) -> NamedArray:
    return given[0] if isinstance(given, list) else given


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
