"""The files in a step's directory with which `from_pretrained` opens it: its weights, under the names of the hub.

They are made of the committed checkpoint, by one thread of rank 0, beside the training. So a save need not wait for
them; they can be made under every parallelism, and anew from any checkpoint with `treeckpt.convert`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel
from transformers.utils import is_peft_available

import treeckpt as tc

from ._hub_names import hub_rules

_log = logging.getLogger("treeckpt")


def is_peft(model: Any) -> bool:
    """Whether a model is one of PEFT."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


class HubFiles:
    """Makes the files after each save of a run, and removes them when their checkpoint was deleted."""

    def __init__(self, trainer: Any, manager: tc.Manager) -> None:
        self._trainer, self._manager = trainer, manager
        self._thread, self._rules = ThreadPoolExecutor(1), None
        self._folders = {Path(manager.path(step)) for step in manager.steps()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def before_save(self, path: str) -> None:
        """Removes the files of deleted checkpoints, and those of the one that will be replaced."""
        for folder in [one for one in self._folders if one == Path(path) or not tc.exists(one)]:
            self._folders.discard(folder)
            for one in _made_in(folder) if self._trainer.is_world_process_zero() else ():
                shutil.rmtree(one) if one.is_dir() else one.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()

    def add(self, step: int, saved: Any) -> None:
        """Makes the files of a step in the background, once it is committed."""
        model = self._trainer.model
        if self._rules is None:  # here, as the thread cannot look at the module while it computes
            self._rules = hub_rules(model) if isinstance(model, PreTrainedModel) else ()
        if self._trainer.is_world_process_zero():
            self._thread.submit(self._make, step, saved)

    def wait(self) -> None:
        """Waits for what was begun."""
        self._thread.submit(int).result()
        self.before_save("")

    def _make(self, step: int, saved: Any) -> None:
        folder = Path(self._manager.path(step))
        try:
            if isinstance(saved, tc.Pending):
                saved.result()
            with self._manager.reading(step), tempfile.TemporaryDirectory(prefix="hub-", dir=folder) as made:
                self._write(folder, Path(made, "files"))
                self._folders.add(folder)
                for path in Path(made, "files").iterdir():
                    if not (folder / path.name).exists():
                        os.replace(path, folder / path.name)
        except tc.CheckpointNotFound:
            _log.info("%s was deleted before its files for from_pretrained were made", folder)
        except Exception:
            _log.exception("%s does not open with from_pretrained, as its files could not be made", folder)

    def _write(self, source: Path, destination: Path) -> None:
        if is_peft(self._trainer.model):
            from ..peft import export

            export(source, self._trainer.model, destination)
        else:
            tc.convert.to_safetensors(source, destination, subtree="model", transforms=self._rules, comm="alone")


def _made_in(folder: Path) -> list[Path]:
    """Returns the files and directories that were made in a step's directory."""
    there = folder.iterdir() if folder.is_dir() else ()
    return [
        one for one in there if one.is_dir() or (one.suffix == ".safetensors" and not one.name.startswith("shard-"))
    ]
