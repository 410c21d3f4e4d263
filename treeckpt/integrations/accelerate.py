"""Accelerate (1.15 or later) on treeckpt: an `Accelerator` whose `save_state` and `load_state` take everything.

    project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=3)
    accelerator = TreeckptAccelerator(project_config=project)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.load_state()  # the newest checkpoint that loads; nothing on a first run
    ...
    accelerator.save_state()  # on all ranks, in the background
    accelerator.end_training()  # waits for it

A checkpoint has the tree of `treeckpt.training.state`, the same for plain, DDP and FSDP training, and restores under any
of them: models, optimizers, schedulers, the scaler, the generators and loaders of each rank, and the objects that are
registered with `register_for_checkpointing`, which have to be equal on all ranks. Of the project at most `total_limit`
checkpoints stay; they are deleted once the next one is committed.

A shuffled loader continues in the order of its epoch; in its place with
`DataLoaderConfiguration(use_stateful_dataloader=True)`, otherwise skip what was used with `skip_first_batches`. Samplers
and loaders that would draw from torch's global generator get generators of their own.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

import treeckpt as tc

__all__ = ["TreeckptAccelerator"]


class TreeckptAccelerator(Accelerator):
    """An `Accelerator` for plain, DDP and FSDP training that saves with treeckpt.

    Args:
        background: as for `treeckpt.Manager`.
        arguments, options: those of `Accelerator`.

    Raises:
        TreeckptError: the training is one of DeepSpeed, Megatron-LM or XLA, whose states Accelerate does not have.
    """

    def __init__(self, *arguments: Any, background: bool | tc.BackgroundOptions = True, **options: Any) -> None:
        self._background, self._positions = background, list[_Position]()
        self._manager: tc.Manager | None = None
        self._last: tc.Pending | None = None
        super().__init__(*arguments, **options)
        if (kind := self.distributed_type.value) in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
            raise tc.TreeckptError("distributed_type", expected="plain, DDP or FSDP training", found=kind)

    def prepare_data_loader(self, *arguments: Any, **options: Any) -> Any:
        loader = super().prepare_data_loader(*arguments, **options)
        if all(position.loader is not loader for position in self._positions):
            self._positions.append(_Position(loader))
        return loader

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> str:
        """Saves everything, on every rank; an error in the background is raised by the next save, or at the end.

        Args:
            output_dir: where to, if the project does not name its checkpoints; what is there is replaced.
            safe_serialization: of no effect: nothing is pickled.

        Returns:
            The path of the checkpoint.
        """
        self._check(options, self._save_model_state_pre_hook)
        state, config = self._state(), self.project_configuration
        tree = tc.training.state(state.pop("model"), state.pop("optimizer"), **state)
        if config.automatic_checkpoint_naming:
            self.checkpoints.save(config.iteration, tree)
            config.iteration += 1
            return self.checkpoints.path(config.iteration - 1)
        if self._background is False:
            tc.save(output_dir, tree, overwrite=True)
        else:
            background = None if self._background is True else self._background
            self._last = tc.save_async(output_dir, tree, overwrite=True, background=background)
        return os.fspath(output_dir)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **options: Any) -> Any:
        """Restores everything, on every rank.

        Args:
            input_dir: a checkpoint; by default the newest of the project that loads.
            load_kwargs: none.
            options: those of `treeckpt.training.restore`, as `fallback` for loaders of another number of ranks.

        Returns:
            The `RestoreReport`; None where the project has no checkpoint yet.
        """
        self._check(load_kwargs or {}, self._load_model_state_pre_hook)
        self.wait_for_saves()
        state, config = self._state() | options, self.project_configuration
        model, optimizer = state.pop("model"), state.pop("optimizer")
        if input_dir is None:
            report = self.checkpoints.resume(model, optimizer, **state)
        else:
            report = tc.training.restore(input_dir, model, optimizer, **state)
        if config.automatic_checkpoint_naming:
            config.iteration = max([*self.checkpoints.steps(), config.iteration - 1]) + 1
        if report is not None:
            self.step = state["extra"]["step"]
        return report

    @property
    def checkpoints(self) -> tc.Manager:
        """The manager of the checkpoints that the project names."""
        config = self.project_configuration
        if not config.automatic_checkpoint_naming:
            raise ValueError("expected a directory, or a project with automatic_checkpoint_naming=True")
        if self._manager is None:
            run, name = os.path.join(config.project_dir, "checkpoints"), "checkpoint_{step}"
            self._manager = tc.Manager(
                run, name=name, keep=config.total_limit, background=self._background, overwrite=False
            )
        return self._manager

    def wait_for_saves(self) -> None:
        """Returns when everything that was saved is durable.

        Raises:
            The error of a save that failed.
        """
        if self._manager is not None:
            self._manager.wait()
        if self._last is not None:
            last, self._last = self._last, None
            last.result()

    def end_training(self) -> None:
        self.wait_for_saves()
        super().end_training()

    def _state(self) -> dict[str, Any]:
        """Returns what is saved and restored, as arguments of `training.state` and `training.restore`."""
        models: Any = {f"model_{number}": model for number, model in enumerate(self._models)}
        extra = {"step": self.step, "objects": [*self._custom_objects]}
        if self.scaler is not None:
            extra["scaler"] = self.scaler
        return {
            "model": self._models[0] if len(models) == 1 else models,
            "optimizer": [one.optimizer for one in self._optimizers] or None,
            "scheduler": [one.scheduler for one in self._schedulers] or None,
            "loader": [one for one in self._positions if any(one.loader is two for two in self._dataloaders)] or None,
            "extra": extra,
        }

    def _check(self, options: Any, hooks: Any) -> None:
        """Raises a TypeError for what has no effect here: options of Accelerate's own files, and hooks that write some."""
        if options or hooks:
            given = f"{[*options]} and {len(hooks)} hooks"
            raise TypeError(f"expected no options for Accelerate's own files, and no state hooks, found {given}")


class _Position:
    """The place of a prepared loader: its epoch, and the generators that its order comes from as the epoch began."""

    def __init__(self, loader: Any) -> None:
        self.loader, self._begun = loader, list[torch.Tensor]()
        sampler = loader.batch_sampler
        while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
            sampler = inner
        self._sampler, base, self._generators = sampler, loader.base_dataloader, list[torch.Generator]()
        for owner in (sampler, base):
            if hasattr(owner, "generator"):
                owner.generator = owner.generator or torch.Generator().manual_seed(torch.initial_seed())
                self._generators.append(owner.generator)
        self._begin, self._end = loader.begin, loader.end
        loader.begin, loader.end = self.begin, self.end

    def begin(self) -> None:
        self._begin()
        self._begun = [generator.get_state() for generator in self._generators]

    def end(self) -> None:
        self._end()
        self._begun = []

    def state_dict(self) -> dict[str, Any]:
        loader, within = self.loader, bool(self._begun) and not self.loader.end_of_dataloader
        return {
            "epoch": loader.iteration + (bool(self._begun) and not within),
            "seed": getattr(self._sampler, "initial_seed", None),
            "generators": self._begun if within else [generator.get_state() for generator in self._generators],
            "loader": loader.state_dict() if within and loader.use_stateful_dataloader else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.iteration = state["epoch"]
        if state["seed"] is not None:
            self._sampler.initial_seed = state["seed"]
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.set_state(saved)
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])
