"""AdaLoRA, which changes the ranks of its adapters while it trains: what it goes by, and models with other ranks."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from peft import PeftModel, PeftType

import treeckpt as tc

EXTRA = "adalora"
"""The key of the ranks in the `extra` of a training state."""
IMPORTANCES = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""The attributes of PEFT's allocator of ranks that change."""


class AdaLoraRanks:
    """What AdaLoRA trains by beside tensors of the model: which ranks its adapters have, and how important all were.

    Args:
        model: a `PeftModel`, or what wraps one.

    Raises:
        TreeckptError: there is no `PeftModel` in the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = peft_model(model)
        self._allocator = getattr(self._model.base_model, "rankallocator", None)
        kinds = {name: config.peft_type for name, config in self._model.peft_config.items()}
        self.adapters = [name for name, kind in kinds.items() if kind == PeftType.ADALORA]

    def state_dict(self) -> dict[str, Any]:
        configs, allocator = self._model.peft_config, self._allocator
        return {
            "patterns": {name: _text(name, configs[name].rank_pattern) for name in self.adapters},
            "importances": {name: {**getattr(allocator, name)} for name in IMPORTANCES if allocator is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for adapter in self.adapters:
            self._model.peft_config[adapter].rank_pattern = json.loads(state["patterns"][adapter])
        devices = {name: one.device for name, one in self._model.base_model.model.named_parameters()}
        for kind, tensors in state["importances"].items():
            setattr(self._allocator, kind, {name: one.to(devices[name]) for name, one in tensors.items()})


def _text(adapter: str, pattern: dict[str, list[bool]] | None) -> str:
    """Returns a pattern as JSON, by names without the adapter's: a save by PEFT changes them so, on one rank alone."""
    return json.dumps(pattern and {name.replace(f".{adapter}", ""): ranks for name, ranks in pattern.items()})


def peft_model(model: Any) -> Any:
    """Returns the model of PEFT in its wrappers."""
    inner = model
    while not isinstance(inner, PeftModel):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise tc.TreeckptError("model", expected="a PeftModel, or what wraps one", found=type(model).__name__)
    return inner


def with_patterns(model: Any, patterns: Mapping[str, str]) -> Any:
    """Returns a model with other rank patterns, and configs of its own; it shares everything else."""
    base = with_modules(model.base_model)
    base.peft_config = copy.deepcopy(model.peft_config)
    for adapter in AdaLoraRanks(model).adapters:
        base.peft_config[adapter].rank_pattern = json.loads(patterns.get(adapter, "null"))
    return with_modules(model, base_model=base)


def with_modules(module: Any, **modules: Any) -> Any:
    """Returns a module that has some others in it, and shares everything else."""
    other = object.__new__(type(module))
    vars(other).update(vars(module), _modules={**module._modules, **modules})
    return other
