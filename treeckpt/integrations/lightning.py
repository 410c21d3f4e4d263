"""Lightning on treeckpt: a plugin that saves and loads, and strategies in which every rank takes part in a save.

    trainer = Trainer(plugins=[TreeckptIO()], callbacks=[ModelCheckpoint("run", save_top_k=-1, save_last="link")])
    trainer.fit(module, loader, ckpt_path="last")

It works with `lightning` and `pytorch_lightning`: with that which the program has imported, the first if both or none.
A checkpoint is a directory of the name that Lightning gives it, in the run of a `Manager`. Saves go on in the background:
what Lightning removes is deleted when the save begun before is committed, and a name whose save was killed loads the
newest checkpoint beside it, with a warning. Files of Lightning's own load as before.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import treeckpt as tc

__all__ = ["RandomStates", "TreeckptDDP", "TreeckptIO", "TreeckptModelParallel", "install"]
_log = logging.getLogger("treeckpt")
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_loaded = [name for name in _FABRICS if {name, _FABRICS[name]} & sys.modules.keys()]
_there = _loaded or [name for name in _FABRICS if importlib.util.find_spec(name.partition(".")[0])]
_pytorch: Any = importlib.import_module((_there or list(_FABRICS))[0])
_fabric: Any = importlib.import_module(_FABRICS[_pytorch.__name__])


def install() -> None:
    """Has `load_from_checkpoint` of modules and data modules take checkpoints of treeckpt; `TreeckptIO` calls it."""
    saving = importlib.import_module(f"{_pytorch.__name__}.core.saving")
    if not isinstance(saving.pl_load, partial):
        saving.pl_load = partial(_load_any, saving.pl_load)


def _load_any(load: Callable[..., Any], path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
        return TreeckptIO().load_checkpoint(path, map_location)
    return load(path, map_location=map_location, weights_only=weights_only)


class TreeckptIO(_fabric.plugins.TorchCheckpointIO):
    """Saves and loads for a `Trainer` or a `Fabric`, `plugins=[TreeckptIO()]`: rank 0 saves alone, nobody waits for it.

    Args:
        options: those of `Manager`: `background`; `allow_pickle=True`, also to load, for unknown kinds of values.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        install()
        self.comm: Any = "alone"
        """Which ranks save: None of strategies in which all do."""
        self._options, self._managers = options, dict[str, tc.Manager]()
        self._last: Any = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"expected no storage_options: {type(self).__name__} has its own, {self._options}")
        manager, name = self._place(os.path.abspath, path)
        manager.count = checkpoint.get("global_step", 0)
        self._last = manager.save(name, {**checkpoint})

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if os.path.isfile(path):
            return super().load_checkpoint(path, map_location, weights_only=weights_only)
        return self.load_with(path, partial(self.restore, device=map_location))

    def restore(self, manager: tc.Manager, step: Any, **options: Any) -> dict[str, Any]:
        """Loads a checkpoint; what each rank had of its own is that of the rank of its number modulo the former ranks."""
        take, pickles = tc.Fallback(per_rank="take"), self._options.get("allow_pickle", False)
        return manager.restore(step=step, fallback=take, allow_pickle=pickles, **options)

    def load_with(self, path: Any, load: Callable[[tc.Manager, Any], dict[str, Any]]) -> dict[str, Any]:
        """Calls a function with the manager and the name of a checkpoint, or of the newest if its save was killed."""
        manager, name = self._place(os.path.realpath, path)
        manager.wait()
        try:
            found = load(manager, name)
        except tc.CheckpointNotFound:
            if not os.path.lexists(path) or (newest := manager.latest()) is None:
                raise
            _log.warning("%s: its save was never finished; %s is loaded", path, manager.path(newest))
            found = load(manager, newest)
        if not dist.is_initialized() or dist.get_rank() == 0:
            _remove_unfinished(os.path.dirname(manager.path(name)), name)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        if os.path.isfile(path) or os.path.islink(path):
            os.unlink(path)
        elif isinstance(self._last, tc.Pending):
            self._last.add_done_callback(partial(_remove, path))
        else:
            _remove(path, None)

    def teardown(self) -> None:
        stack = contextlib.ExitStack()
        for manager in self._managers.values():
            stack.push(manager)
        self._managers = {}
        stack.__exit__(*sys.exc_info())

    def _place(self, resolve: Callable[[Any], str], path: Any) -> tuple[tc.Manager, str]:
        """Returns the manager of the directory above a path, and the name in it."""
        above, name = os.path.split(path if "://" in str(path) else resolve(path))
        if above not in self._managers:
            self._managers[above] = tc.Manager(above, keep=None, comm=self.comm, **self._options)
        return self._managers[above], name


def _remove_unfinished(above: str, but: str) -> None:
    """Deletes what killed saves have left in a directory, which Lightning takes for checkpoints."""
    for entry in os.scandir(above) if os.path.isdir(above) else ():
        if entry.is_dir(follow_symlinks=False) and entry.name != but and not tc.exists(entry.path):
            with contextlib.suppress(tc.TreeckptError):  # another program's, or being saved
                tc.delete(entry.path, force=True)


def _remove(path: Any, after: tc.Pending | None) -> None:
    """Deletes a checkpoint, unless the save after it has failed."""
    if tc.exists(path) and (after is None or tc.exists(after.path)):
        tc.delete(path)


class _AllRanks:
    """A strategy whose ranks all save: replicas in parts, DTensors from where they are; other state is rank 0's."""

    @property
    def checkpoint_io(self) -> Any:
        self._checkpoint_io = self._checkpoint_io or TreeckptIO()
        self._checkpoint_io.comm = None
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        parameters = {name for name, _ in self.lightning_module.named_parameters(remove_duplicate=False)}
        state = copy.copy(checkpoint["state_dict"])
        state |= {k: tc.FromRank(v) for k, v in state.items() if k not in parameters and not isinstance(v, DTensor)}
        own = {"state_dict": state, "loops": tc.PerRank(checkpoint["loops"])}
        marked = {k: tc.FromRank(v) for k, v in checkpoint.items() if isinstance(v, dict) and k not in own} | own
        self.checkpoint_io.save_checkpoint(checkpoint | marked, self.broadcast(filepath), storage_options)


class TreeckptDDP(_AllRanks, _pytorch.strategies.DDPStrategy):
    """DDP in whose saves each rank writes its part."""


class TreeckptModelParallel(_AllRanks, _pytorch.strategies.ModelParallelStrategy):
    """FSDP2 and tensor parallelism: nothing is gathered, and a checkpoint restores into any other mesh."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        if os.path.isfile(path) or os.path.isfile(os.path.join(path, "meta.pt")):
            return super().load_checkpoint(path, weights_only)
        return self.checkpoint_io.load_with(path, self._fill)

    def _fill(self, manager: tc.Manager, step: Any) -> dict[str, Any]:
        """Fills the model and the optimizers; returns the rest."""
        rename = {"state_dict": "model", "optimizer_states": "optimizer"}
        strict = self.lightning_module.strict_loading
        tc.training.restore(
            manager.path(step), self.model, self.optimizers or None, rename=rename, from_root=True, strict=strict
        )
        rest = self.checkpoint_io.restore(manager, step, exclude=(*rename,))
        return {key: value for key, value in rest.items() if key not in rename}

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()


class RandomStates(_pytorch.Callback):
    """Continues the generators of each rank, as Lightning's checkpoints have none."""

    _saved: list[Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        states: list[Any] = [tc.training.rng_state()]
        if dist.is_initialized():
            own, states = states[0], [None] * dist.get_world_size()
            dist.all_gather_object(states, own)
        return {"ranks": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["ranks"]

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._saved is not None and len(self._saved) == trainer.world_size:
            tc.training.set_rng_state(self._saved[trainer.global_rank])
        self._saved = None
