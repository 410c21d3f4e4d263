"""What the Trainer saves with a step: the state, and the small files beside it: configs, tokenizer, its own state."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState
from transformers.utils.import_utils import is_peft_available

import treeckpt as tc

SAVE_ONLY_MODEL = "save_only_model"
"""In the custom metadata of each step: whether it has the model alone."""

ADAPTER_CONFIG = "adapter_config.json"
"""A file of PEFT that is made together with the weights, as with AdaLoRA it says their shapes."""


def is_peft(model: Any) -> bool:
    """Whether a model is one of PEFT."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def state_function(model: Any) -> Callable[..., dict[str, Any]]:
    """Returns the function that gives the training state of a model."""
    if not is_peft(model):
        return tc.training.state
    from ..peft import peft_state

    return peft_state


def adalora_ranks(model: Any) -> Any:
    """Returns what AdaLoRA trains by, if the model is one of PEFT."""
    if not is_peft(model):
        return None
    from ..peft import AdaLoraRanks

    return AdaLoraRanks(model)


def logged_metrics(state: Any) -> dict[str, float]:
    """Returns the numbers that were logged at the present step."""
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    numbers = {name: value for entry in entries for name, value in entry.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name not in ("step", "epoch")}


def config_files(trainer: Any) -> dict[str, bytes]:
    """Returns the files that the Trainer writes beside weights, by name; none where it does not write."""
    named = trainer.model.state_dict() if is_peft(trainer.model) else {}  # for PEFT there must be some weights
    with tempfile.TemporaryDirectory() as made:
        trainer._save(made, state_dict={name: torch.zeros(1).expand(one.shape) for name, one in named.items()})
        files = [path for path in Path(made).iterdir() if path.is_file() and path.suffix != ".safetensors"]
        return {path.name: path.read_bytes() for path in files if path.name != ADAPTER_CONFIG}


def state_file(trainer: Any) -> bytes:
    """Returns the content of `trainer_state.json`, with the present state of the callbacks."""
    state = trainer.state
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            noted, name = state.stateful_callbacks, type(callback).__name__
            noted[name] = [*noted[name], callback.state()] if isinstance(noted[name], list) else callback.state()
    return (json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n").encode()
