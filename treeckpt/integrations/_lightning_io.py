"""What saves and loads for Lightning; see `treeckpt.integrations.lightning`."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import treeckpt as tc

_is_alone = "lightning_fabric" in sys.modules or importlib.util.find_spec("lightning") is None
_fabric: Any = importlib.import_module("lightning_fabric" if _is_alone else "lightning.fabric")
pytorch: Any = importlib.import_module("pytorch_lightning" if _is_alone else "lightning.pytorch")


def install() -> None:
    """Has `load_from_checkpoint` of modules and data modules take these checkpoints, too; `TreeckptIO` calls it."""
    saving: Any = importlib.import_module(f"{pytorch.__name__}.core.saving")
    if not isinstance(saving.pl_load, partial):
        saving.pl_load = partial(_load, saving.pl_load)


def _load(load: Callable[..., Any], path: Any, map_location: Any = None, **options: Any) -> Any:
    is_ours = isinstance(path, (str, os.PathLike)) and Path(path).is_dir()
    return (TreeckptIO().load_checkpoint if is_ours else load)(path, map_location, **options)


class TreeckptIO(_fabric.plugins.TorchCheckpointIO):
    """Saves and loads for a `Trainer` or a `Fabric`, `plugins=[TreeckptIO()]`: rank 0 saves alone, nobody waits for it.

    Args:
        options: those of `Manager`: `background`; `allow_pickle=True`, also to load, for unknown kinds of values.
    """

    def __init__(self, **options: Any) -> None:
        install()
        self.options, self._managers = {"comm": "alone", "keep": None} | options, dict[str, tc.Manager]()
        self._to_remove = list[str]()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"expected no storage_options, but options of {type(self).__name__}: {self.options}")
        manager, name = self._settle(path, os.path.abspath)
        manager.count = checkpoint.get("global_step", 0)
        manager.save(name, {**checkpoint})

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None, **options: Any) -> Any:
        if Path(path).is_file():
            return super().load_checkpoint(path, map_location, weights_only=weights_only)
        if not callable(map_location) and not isinstance(map_location, dict):
            options["device"] = map_location
        return self.restore(path, lambda opened: None, **options)

    def restore(self, path: Any, fill: Callable[[Any], object], **options: Any) -> dict[str, Any]:
        """Calls a function with the opened checkpoint, or the newest if its save was killed, and loads it as a dict."""
        manager, name = self._settle(path, os.path.realpath)
        began = os.path.lexists(path) and not tc.exists(manager.path(name))
        if began and not manager.names():
            found, run = "an unfinished save, and none that is whole beside it", Path(manager.path(name)).parent
            hint = f"To begin the training anew, remove {path}. `treeckpt ls {run}` says what is there"
            raise tc.CheckpointNotFound(manager.path(name), expected="a whole checkpoint", found=found, hint=hint)
        take, pickles = tc.Fallback(per_rank="take"), self.options.get("allow_pickle", False)
        with manager.open(None if began else name) as opened:
            assert opened is not None, "an error otherwise"
            if opened.step != name:
                logging.getLogger("treeckpt").warning("%s was never finished; %s is loaded", path, opened.path)
            fill(opened)
            tree = opened.load(fallback=take, allow_pickle=pickles, **options)
        return {key: part.value if isinstance(part, tc.PerRank) else part for key, part in tree.items()}

    def remove_checkpoint(self, path: Any) -> None:
        if (file := Path(path)).is_file() or file.is_symlink():
            file.unlink()
        else:
            self._to_remove.append(os.fspath(path))

    def teardown(self) -> None:
        """Waits for all saves, and raises the error of one that failed."""
        while self._managers:
            self._managers.popitem()[1].__exit__(*sys.exc_info())
        self._remove()

    def _settle(self, path: Any, resolve: Callable[[Any], str]) -> tuple[tc.Manager, str]:
        """Waits for the saves before, and returns the manager of the directory above a path, and the name in it."""
        for manager in self._managers.values():
            manager.wait()
        self._remove()
        above, name = os.path.split(path if "://" in str(path) else resolve(path))
        if above not in self._managers:
            self._managers[above] = tc.Manager(above, **self.options)
        return self._managers[above], name

    def _remove(self) -> None:
        while self._to_remove:
            if tc.exists(path := self._to_remove.pop()):
                with contextlib.suppress(tc.CheckpointError):  # it is pinned, or being read
                    tc.delete(path)
