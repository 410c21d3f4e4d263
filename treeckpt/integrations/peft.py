"""PEFT: the state of adapters without the frozen base, and the files that `PeftModel.from_pretrained` loads.

from treeckpt.integrations.peft import export, peft_state

manager.save(step, peft_state(model, optimizer))
manager.resume(model, optimizer, strict="missing")  # the base stays as it is
export(manager.path(step), model, "adapter")

AdaLoRA trains by importances and ranks that are in no tensor of the model: save and resume those too, by
`extra={"adalora": AdaLoraRanks(model)}`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from peft import get_peft_model_state_dict

import treeckpt as tc

from .._core.public_names import publish
from ._adalora import EXTRA, AdaLoraRanks, peft_model, with_modules, with_patterns

__all__ = ["AdaLoraRanks", "export", "peft_state"]
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
        TreeckptError: there is no `PeftModel` in the model; or it is trained by AdaLoRA, and `extra` has no ranks.
    """
    base = [f"model/{name}" for name in _frozen_base(peft_model(model))]
    extra = options.get("extra")
    if AdaLoraRanks(model).adapters and not (isinstance(extra, dict) and EXTRA in extra):
        hint = f'Pass extra={{"{EXTRA}": AdaLoraRanks(model)}}, here and where it is restored'
        raise tc.TreeckptError("extra", expected="the ranks of AdaLoRA", found="none", hint=hint)
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
    peft = peft_model(model)
    names = [name for adapter, config in peft.peft_config.items() for name in _adapter_names(peft, adapter, config)]
    stored = tc.inspect(source).by_path
    if missing := [name for name in names if f"model/{name}" not in stored]:
        found, hint = f"{len(missing)} of {len(names)} missing", "Pass the model that was saved, with the same adapters"
        raise tc.MismatchError(f"model/{missing[0]}", expected="all adapters of the model", found=found, hint=hint)
    patterns = [f"extra/{EXTRA}/patterns/{adapter}" for adapter in AdaLoraRanks(peft).adapters]
    select = [*(f"model/{name}" for name in names), *(path for path in patterns if path in stored)]
    saved = tc.load(source, select=select, comm="alone")
    state = {name: tensor for name, tensor in saved["model"].items() if tensor is not ...}
    if hasattr(peft, PROMPTS):  # PEFT computes the prompts from the module, whatever the state is
        prompts = {n.removeprefix(f"{PROMPTS}."): t for n, t in state.items() if n.startswith(PROMPTS)}
        view = _with_prompts(peft, prompts)
    else:
        view = with_patterns(peft, saved.get("extra", {}).get(EXTRA, {}).get("patterns", {}))
    view.save_pretrained(os.fspath(destination), state_dict=state)


def _with_prompts(model: Any, state: dict[str, Any]) -> Any:
    """Returns a model with other prompt encoders and configs of its own; it shares everything else."""
    encoders = copy.deepcopy(getattr(model, PROMPTS))
    encoders.load_state_dict(state, assign=True)
    other = with_modules(model, **{PROMPTS: encoders})
    other._peft_config = copy.deepcopy(model.peft_config)
    return other


def _frozen_base(model: Any) -> list[str]:
    """Returns the names of the parameters that are neither trained nor part of an adapter."""
    kept = {name for adapter, config in model.peft_config.items() for name in _adapter_names(model, adapter, config)}
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not (parameter.requires_grad or name in kept)]


def _adapter_names(model: Any, adapter: str, config: Any) -> Collection[str]:
    """Returns the names of all that PEFT saves of an adapter; whether it saves embeddings, it may ask the hub once."""
    known = _KNOWN.setdefault(model, {})
    if (adapter, id(config)) not in known:
        named, view = model.state_dict(keep_vars=True), model
        if not hasattr(model, PROMPTS):  # by its rank pattern AdaLoRA cuts what it saves
            view = with_patterns(model, {})
        saved = {id(tensor) for tensor in get_peft_model_state_dict(view, named, adapter).values()}
        prompts = f"{PROMPTS}.{adapter}."  # of these it saves what they compute
        known[adapter, id(config)] = {n for n, tensor in named.items() if id(tensor) in saved or n.startswith(prompts)}
    return known[adapter, id(config)]


publish(__name__, __all__, globals())
