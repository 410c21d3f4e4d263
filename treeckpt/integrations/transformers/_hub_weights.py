"""The weights of a step of the Trainer that `from_pretrained` opens, under the names of the hub.

They are made of the committed step, by one thread of rank 0 beside the training: no save waits for them, they are made
under every parallelism, and may be made anew with `treeckpt.convert`. Those that a killed process has not made are made
after the first step of the next call of `train`.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel

import treeckpt as tc

from ._hub_names import hub_rules
from ._step_files import ADAPTER_CONFIG, SAVE_ONLY_MODEL, is_peft

_log = logging.getLogger("treeckpt")
WORK = "weights-"
"""The first letters of a directory in which they are made."""


class HubWeights:
    """Makes the weights after each save of a run, and removes them when their step was deleted."""

    def __init__(self, trainer: Any, manager: tc.Manager) -> None:
        self._trainer, self._manager = trainer, manager
        self._thread, self._rules = ThreadPoolExecutor(1), None
        self._unchecked = manager.steps()
        self._folders = {Path(manager.path(step)) for step in self._unchecked}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def clear(self, path: str = "") -> None:
        """Removes the weights of deleted steps, and those at a path."""
        for folder in [one for one in list(self._folders) if one == Path(path) or not tc.exists(one)]:
            self._folders.discard(folder)
            _remove_made(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def replace(self, path: str) -> None:
        """Removes the weights of a step that will be saved, those too that are being made."""
        if Path(path) in self._folders:
            self.wait()
        self.clear(path)

    def add(self, step: int, saved: Any = None) -> None:
        """Makes the weights of a step in the background, once it is committed; if saved before, those it lacks."""
        if self._rules is None:  # not in the thread: the module may be in the middle of a step there
            self._rules = _rules_of(self._trainer.model)
        self._thread.submit(self._make, step, saved)

    def repair(self) -> None:
        """Has the weights made that a process before this one has not made, as it was killed."""
        while self._unchecked:
            self.add(self._unchecked.pop())

    def wait(self) -> None:
        """Waits for all that was begun."""
        self.repair()
        self._thread.submit(self.clear).result()

    def _make(self, step: int, saved: Any) -> None:
        folder = Path(self._manager.path(step))
        try:
            if saved is None and not _is_killed(folder):
                return
            if isinstance(saved, tc.Pending):
                saved.result()
            self._folders.add(folder)
            _remove_made(folder)
            with self._manager.reading(step), tempfile.TemporaryDirectory(prefix=WORK, dir=folder) as made:
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
    directories = [one for one in there if (one / ADAPTER_CONFIG).exists() or one.name.startswith(WORK)]
    files = [one for one in there if one.name.endswith((".safetensors", ".safetensors.index.json"))]
    named = [one for one in there if one.name == ADAPTER_CONFIG]
    return [*directories, *named, *(one for one in files if not one.name.startswith("shard-"))]


def _remove_made(folder: Path) -> None:
    for one in _made_in(folder):
        shutil.rmtree(one) if one.is_dir() else one.unlink()


def _is_killed(folder: Path) -> bool:
    """Whether a step of the Trainer lacks weights; the directory in which they are made is removed last."""
    made = [one.name.startswith(WORK) for one in _made_in(folder)]
    return (any(made) or not made) and SAVE_ONLY_MODEL in tc.inspect(folder).custom_metadata
