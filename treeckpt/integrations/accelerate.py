"""Accelerate (1.15 or later) on treeckpt: an `Accelerator` whose `save_state` and `load_state` take everything.

    project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=3)
    accelerator = TreeckptAccelerator(project_config=project)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.load_state()  # the newest checkpoint that loads; nothing on a first run
    accelerator.save_state()  # on all ranks, in the background; `end_training` waits for it

A checkpoint is that of `treeckpt.training.state`, and restores under plain, DDP and FSDP training alike. It has models,
optimizers, schedulers, the scaler, the generators and loaders of each rank, and the objects that are registered for
checkpointing, which have to be equal on all ranks. A shuffled loader continues in the order of its epoch; in its place
with `DataLoaderConfiguration(use_stateful_dataloader=True)`, otherwise skip what was used with `skip_first_batches`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import treeckpt as tc

from ._accelerate_loaders import LoaderPosition

__all__ = ["TreeckptAccelerator"]
_accelerate: Any = importlib.import_module("accelerate")


class TreeckptAccelerator(_accelerate.Accelerator):
    """An `Accelerator` for plain, DDP and FSDP training that saves with treeckpt; `background` says how.

    Raises:
        TypeError: the training is one of DeepSpeed, Megatron-LM or XLA, whose states Accelerate does not have.
    """

    def __init__(self, *arguments: Any, background: tc.BackgroundOptions | None = None, **options: Any) -> None:
        self._background, self._positions = background, list[LoaderPosition]()
        self._manager: tc.Manager | None = None
        self._last: tc.Pending | None = None
        super().__init__(*arguments, **options)
        if (kind := self.distributed_type.value) in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
            raise TypeError(f"expected plain, DDP or FSDP training, found {kind}")

    @property
    def checkpoints(self) -> tc.Manager:
        """The manager of the checkpoints that the project names."""
        if not (config := self.project_configuration).automatic_checkpoint_naming:
            raise ValueError("expected a directory, or a project with automatic_checkpoint_naming=True")
        if self._manager is None:
            run, how = f"{config.project_dir}/checkpoints", self._background or True
            options: Any = {"name": "checkpoint_{step}", "keep": config.total_limit, "overwrite": False}
            self._manager = tc.Manager(run, background=how, **options)
        return self._manager

    def prepare_data_loader(self, *arguments: Any, **options: Any) -> Any:
        loader = super().prepare_data_loader(*arguments, **options)
        if all(position.loader is not loader for position in self._positions):
            self._positions.append(LoaderPosition(loader))
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        skipped = super().skip_first_batches(dataloader, num_batches)
        for position in self._positions:
            if position.loader is dataloader:
                position.watch(skipped)
        return skipped

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Saves everything, on every rank, and returns the path; an error is raised by the next save, or at the end.

        Args:
            output_dir: where to, if the project names no checkpoints; what is there is replaced.
            safe_serialization: of no effect: nothing is pickled.
        """
        self._refuse(options, self._save_model_state_pre_hook)
        state, config = self._state(), self.project_configuration
        tree = tc.training.state(state.pop("model"), state.pop("optimizer"), **state)
        if output_dir is not None and not config.automatic_checkpoint_naming:
            self._last = tc.save_async(output_dir, tree, overwrite=True, background=self._background)
            return output_dir
        self.checkpoints.save(config.iteration, tree)
        config.iteration += 1
        path = self.checkpoints.path(config.iteration - 1)
        return path if "://" in path else Path(path)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **options: Any) -> Any:
        """Restores everything, on every rank; returns the `RestoreReport`, None if the project has no checkpoint yet.

        Args:
            input_dir: a checkpoint; by default the newest of the project that loads.
            options: those of `treeckpt.training.restore`, as `fallback` for loaders of another number of ranks.
        """
        self._refuse(load_kwargs or {}, self._load_model_state_pre_hook)
        self.wait_for_saves()
        state, config = self._state() | options, self.project_configuration
        objects = state.pop("model"), state.pop("optimizer")
        if input_dir is None:
            report = self.checkpoints.resume(*objects, **state)
        else:
            report = tc.training.restore(input_dir, *objects, **state)
        if config.automatic_checkpoint_naming:
            config.iteration = max([*self.checkpoints.steps(), config.iteration - 1]) + 1
        self.step = state["extra"]["step"]
        return report

    def wait_for_saves(self) -> None:
        """Returns when everything that was saved is durable; raises the error of a save that failed."""
        if self._manager is not None:
            self._manager.wait()
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def end_training(self) -> None:
        self.wait_for_saves()
        super().end_training()

    def _state(self) -> dict[str, Any]:
        """Returns what is saved and restored, as arguments of `training.state` and `training.restore`."""
        models = {f"model_{number}": model for number, model in enumerate(self._models)}
        return {
            "model": self._models[0] if len(models) == 1 else models,
            "optimizer": [each.optimizer for each in self._optimizers] or None,
            "scheduler": [each.scheduler for each in self._schedulers] or None,
            "loader": [each for each in self._positions if any(each.loader is it for it in self._dataloaders)] or None,
            "extra": {"step": self.step, "scaler": self.scaler, "objects": [*self._custom_objects]},
        }

    def _refuse(self, options: Any, hooks: Any) -> None:
        if options or hooks:
            raise TypeError(f"expected no options or hooks for Accelerate's files, found {[*options, *hooks.values()]}")
