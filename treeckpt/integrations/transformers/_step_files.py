"""What a step of the Trainer has beside its shards: small files, and weights that `from_pretrained` opens.

The small files (configs, tokenizer, arguments, the Trainer's state) are saved with the step. The weights, under the
names of the hub, are made of the committed step, by one thread of rank 0 beside the training: no save waits for them,
they are made under every parallelism, and may be made anew with `treeckpt.convert`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState
from transformers.utils.import_utils import is_peft_available

import treeckpt as tc

from ._hub_names import hub_rules

_log = logging.getLogger("treeckpt")
WORK = "weights-"
"""The first letters of a directory in which they are made."""


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


def logged_metrics(state: Any) -> dict[str, float]:
    """Returns the numbers that were logged at the present step."""
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    numbers = {name: value for entry in entries for name, value in entry.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name not in ("step", "epoch")}


def config_files(trainer: Any) -> dict[str, bytes]:
    """Returns the files that the Trainer writes beside weights, by name; none where it does not write."""
    names = trainer.model.state_dict() if is_peft(trainer.model) else ()  # for PEFT there must be some weights
    with tempfile.TemporaryDirectory() as made:
        trainer._save(made, state_dict={name: torch.zeros(1) for name in names})
        files = [path for path in Path(made).iterdir() if path.is_file() and path.suffix != ".safetensors"]
        return {path.name: path.read_bytes() for path in files}


def state_file(trainer: Any) -> bytes:
    """Returns the content of `trainer_state.json`, with the present state of the callbacks."""
    state = trainer.state
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            noted, name = state.stateful_callbacks, type(callback).__name__
            noted[name] = [*noted[name], callback.state()] if isinstance(noted[name], list) else callback.state()
    return (json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n").encode()


class HubWeights:
    """Makes the weights after each save of a run, and removes them when their step was deleted."""

    def __init__(self, trainer: Any, manager: tc.Manager) -> None:
        self._trainer, self._manager = trainer, manager
        self._thread, self._rules = ThreadPoolExecutor(1), None
        self._folders = {Path(manager.path(step)) for step in manager.steps()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def clear(self, path: str = "") -> None:
        """Removes the weights of deleted steps, and those at a path that will be saved again."""
        for folder in [one for one in list(self._folders) if one == Path(path) or not tc.exists(one)]:
            self._folders.discard(folder)
            for one in _made_in(folder):
                shutil.rmtree(one) if one.is_dir() else one.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()

    def add(self, step: int, saved: Any) -> None:
        """Makes the weights of a step in the background, once it is committed."""
        if self._rules is None:  # not in the thread: the module may be in the middle of a step there
            self._rules = _rules_of(self._trainer.model)
        self._thread.submit(self._make, step, saved)

    def wait(self) -> None:
        """Waits for all that was begun."""
        self._thread.submit(self.clear).result()

    def _make(self, step: int, saved: Any) -> None:
        folder = Path(self._manager.path(step))
        try:
            if isinstance(saved, tc.Pending):
                saved.result()
            with self._manager.reading(step), tempfile.TemporaryDirectory(prefix=WORK, dir=folder) as made:
                self._folders.add(folder)
                self._write(folder, Path(made, "files"))
                for path in Path(made, "files").iterdir():
                    if not (folder / path.name).exists():
                        path.replace(folder / path.name)
        except tc.CheckpointNotFound:
            _log.info("%s was deleted before its weights for from_pretrained were made", folder)
        except Exception:
            _log.exception("%s does not open with from_pretrained, as its weights could not be made", folder)

    def _write(self, source: Path, destination: Path) -> None:
        if is_peft(self._trainer.model):
            from ..peft import export

            export(source, self._trainer.model, destination)
        else:
            tc.convert.to_safetensors(source, destination, subtree="model", transforms=self._rules, comm="alone")


def _rules_of(model: Any) -> tuple[tc.rules.Rule, ...]:
    """Returns the rules to the names of the hub; none where they cannot be told: then the names are the module's."""
    try:
        return hub_rules(model) if isinstance(model, PreTrainedModel) else ()
    except tc.MismatchError as error:
        _log.warning("weights for from_pretrained have the names of the module: %s", error)
        return ()


def _made_in(folder: Path) -> list[Path]:
    """Returns what was made in a step's directory: weights, and directories of adapters or of work that was killed."""
    there = list(folder.iterdir()) if folder.is_dir() else []
    directories = [one for one in there if (one / "adapter_config.json").exists() or one.name.startswith(WORK)]
    return directories + [one for one in there if one.suffix == ".safetensors" and not one.name.startswith("shard-")]
