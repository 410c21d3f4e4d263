"""PEFT: the state of adapters without the frozen base, and the files that `PeftModel.from_pretrained` loads.

from treeckpt.integrations.peft import export, peft_state

manager.save(step, peft_state(model, optimizer))
manager.resume(model, optimizer, strict="missing")  # the base stays as it is
export(manager.path(step), model, "adapter")
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from peft import PeftModel, get_peft_model_state_dict

import treeckpt as tc

__all__ = ["export", "peft_state"]
PROMPTS = "prompt_encoder"
_KNOWN: WeakKeyDictionary[Any, dict[tuple[str, int], Collection[str]]] = WeakKeyDictionary()
"""By model, the names of the adapter of a name with this config."""


def peft_state(model: Any, optimizer: Any = None, **options: Any) -> dict[str, Any]:
    """Returns the training state of a model of PEFT, without the parameters of its frozen base.

    It holds every adapter, also those that are not active or not trained, `modules_to_save`, prompt encoders, whatever
    else is trained, and the buffers. `treeckpt.training.restore` takes it with `strict="missing"`, and names in its
    report what was left out.

    Args:
        model: a `PeftModel`, or what wraps one: DDP, FSDP2, `torch.compile`.
        optimizer, options: as for `treeckpt.training.state`; `exclude` leaves out more.

    Raises:
        TreeckptError: there is no `PeftModel` in the model.
    """
    base = [f"model/{name}" for name in _frozen_base(_peft_model(model))]
    excluded = options.pop("exclude", None) or ()
    exclude = [*base, *([excluded] if isinstance(excluded, str) else excluded)]
    return tc.training.state(model, optimizer, exclude=exclude or None, **options)


def export(source: Any, model: Any, destination: str | os.PathLike[str]) -> None:
    """Writes the adapters in a checkpoint as `model.save_pretrained` does: for `PeftModel.from_pretrained`.

    Args:
        source: the checkpoint, of `peft_state` or of a whole training state.
        model: as for `peft_state`, with the same adapters. It says how they are built; what is in it does not matter.
        destination: a directory. The adapter "default" goes there, others in directories below it.

    Raises:
        TreeckptError: there is no `PeftModel` in the model.
        MismatchError: the model has adapters that the checkpoint lacks.
        The errors of `treeckpt.load`.
    """
    peft = _peft_model(model)
    names = [name for adapter, config in peft.peft_config.items() for name in _adapter_names(peft, adapter, config)]
    stored = tc.inspect(source).by_path
    if missing := [name for name in names if f"model/{name}" not in stored]:
        found, hint = f"{len(missing)} of {len(names)} missing", "Pass the model that was saved, with the same adapters"
        raise tc.MismatchError(f"model/{missing[0]}", expected="all adapters of the model", found=found, hint=hint)
    saved = tc.load(source, select=[f"model/{name}" for name in names], comm="alone")["model"]
    state = {name: tensor for name, tensor in saved.items() if tensor is not ...}
    if hasattr(peft, PROMPTS):  # PEFT computes the prompts from the module, whatever the state is
        peft = _with_prompts(
            peft, {n.removeprefix(f"{PROMPTS}."): t for n, t in state.items() if n.startswith(PROMPTS)}
        )
    peft.save_pretrained(os.fspath(destination), state_dict=state)


def _with_prompts(model: Any, state: dict[str, Any]) -> Any:
    """Returns a model with other prompt encoders; it shares everything else."""
    encoders = copy.deepcopy(getattr(model, PROMPTS))
    encoders.load_state_dict(state, assign=True)
    other = object.__new__(PeftModel)
    vars(other).update(vars(model), _modules={**model._modules, PROMPTS: encoders})
    other._peft_config = copy.deepcopy(model.peft_config)
    return other


def _peft_model(model: Any) -> Any:
    """Returns the model of PEFT in its wrappers."""
    inner = model
    while not isinstance(inner, PeftModel):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise tc.TreeckptError("model", expected="a PeftModel, or what wraps one", found=type(model).__name__)
    return inner


def _frozen_base(model: Any) -> list[str]:
    """Returns the names of the parameters that are neither trained nor part of an adapter."""
    kept = {name for adapter, config in model.peft_config.items() for name in _adapter_names(model, adapter, config)}
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not (parameter.requires_grad or name in kept)]


def _adapter_names(model: Any, adapter: str, config: Any) -> Collection[str]:
    """Returns the names of all that PEFT saves of an adapter; whether it saves embeddings, it may ask the hub once."""
    known = _KNOWN.setdefault(model, {})
    if (adapter, id(config)) not in known:
        named = model.state_dict(keep_vars=True)
        saved = {id(tensor) for tensor in get_peft_model_state_dict(model, named, adapter).values()}
        prompts = f"{PROMPTS}.{adapter}."  # of these it saves what they compute
        known[adapter, id(config)] = {n for n, tensor in named.items() if id(tensor) in saved or n.startswith(prompts)}
    return known[adapter, id(config)]
