"""The loops of `frameworks`: each trains `bench_model` for `task.saves` steps, and saves after every step.

A framework is added as a function of a task and a clock, and a line in `FRAMEWORKS`. With `task.side == "own"` it saves
as its own documentation shows, else by `treeckpt.integrations`, in both cases below `task.path`.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import treeckpt as tc

from .framework_clock import Framework, FrameworkTask, SaveClock

WIDTH, LAYERS = 1024, 16


def bench_model(scale: float) -> torch.nn.Sequential:
    """Returns 67 MB of parameters, which are 201 MB with the moments of Adam."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(LAYERS * scale)))))


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Trains a step; returns the loss."""
    loss = model(torch.rand(4, WIDTH)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class SquareLoss(torch.nn.Module):
    """A model whose output is a loss, as the Trainer of transformers has it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(numbers).square().mean()}


# transformers ---------------------------------------------------------------------------------------------------------


def _transformers(task: FrameworkTask, clock: SaveClock) -> None:
    from transformers import Trainer, TrainingArguments

    from ..integrations.transformers import TreeckptTrainer

    base: Any = Trainer if task.side == "own" else TreeckptTrainer

    class TimedTrainer(base):
        def _save_checkpoint(self, *arguments: Any) -> None:
            path = Path(task.directory, f"checkpoint-{self.state.global_step}")
            clock.measure(partial(super()._save_checkpoint, *arguments), partial(clock.wait_for, path))

    options: dict[str, Any] = {"max_steps": task.saves, "save_steps": 1, "use_cpu": True, "report_to": []}
    arguments = TrainingArguments(task.directory, **options, per_device_train_batch_size=4, disable_tqdm=True)
    data = [{"numbers": torch.rand(WIDTH)} for _ in range(4 * task.saves)]
    TimedTrainer(SquareLoss(bench_model(task.scale)), arguments, train_dataset=data).train()


# Lightning ------------------------------------------------------------------------------------------------------------


def _lightning(task: FrameworkTask, clock: SaveClock) -> None:
    lightning: Any = importlib.import_module("lightning.pytorch")
    environments: Any = importlib.import_module("lightning.pytorch.plugins.environments")

    from ..integrations.lightning import TreeckptIO

    class BenchModule(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = bench_model(task.scale)

        def training_step(self, numbers: torch.Tensor) -> torch.Tensor:
            return self.model(numbers).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class SaveEachStep(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            path = Path(task.directory, f"step={trainer.global_step}.ckpt")
            clock.measure(partial(trainer.save_checkpoint, path), partial(clock.wait_for, path))

    data: Any = [*torch.rand(4 * task.saves, WIDTH)]
    lightning.Trainer(
        accelerator="cpu",
        max_steps=task.saves,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[SaveEachStep()],
        plugins=[
            environments.LightningEnvironment(),
            *([] if task.side == "own" else [TreeckptIO()]),
        ],
    ).fit(BenchModule(), torch.utils.data.DataLoader(data, batch_size=4))


# Accelerate -----------------------------------------------------------------------------------------------------------


def _accelerate(task: FrameworkTask, clock: SaveClock) -> None:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    from ..integrations.accelerate import TreeckptAccelerator

    accelerator = (Accelerator if task.side == "own" else TreeckptAccelerator)(cpu=True)
    model = bench_model(task.scale)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(task.saves):
        train_step(model, optimizer)
        path = Path(task.directory, f"checkpoint_{step}")
        clock.measure(partial(accelerator.save_state, path), partial(clock.wait_for, path))
    accelerator.end_training()


# torchtitan -----------------------------------------------------------------------------------------------------------


class _NamedOptimizer:
    """An optimizer whose state is by names, as that of torchtitan."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self._model, self._optimizer, options=self._options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self._optimizer, state, options=self._options)


def _torchtitan(task: FrameworkTask, clock: SaveClock) -> None:
    """Its checkpoint manager alone: its trainer asks for an accelerator."""
    from torchtitan.components.checkpointer import CheckpointManager  # pyright: ignore[reportMissingImports]

    from ..integrations.torchtitan import TreeckptManager

    model = bench_model(task.scale)
    optimizer = torch.optim.AdamW(model.parameters())
    schedulers = torch.optim.lr_scheduler.ConstantLR(optimizer)

    kind: Any = CheckpointManager if task.side == "own" else TreeckptManager
    parts: dict[str, Any] = {
        "model_parts": [model],
        "optimizers": _NamedOptimizer(model, optimizer),
        "lr_schedulers": schedulers,
    }
    config = kind.Config(enable=True, interval=1, keep_latest_k=0)
    manager = kind(config, dataloader=None, states={}, sd_adapter=None, base_folder=task.directory, **parts)

    def save(step: int) -> None:
        manager.save(step)
        manager.maybe_wait_for_staging()

    for step in range(1, task.saves + 1):
        train_step(model, optimizer)
        path = Path(task.directory, config.folder, f"step-{step}")
        clock.measure(partial(save, step), partial(clock.wait_for, path))
    manager.close()


# Ray Train ------------------------------------------------------------------------------------------------------------


def _ray(task: FrameworkTask, clock: SaveClock) -> None:
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # loopback addresses alone
    import ray.train.torch  # pyright: ignore[reportMissingImports]

    ray.init("local", num_cpus=1, include_dashboard=False)
    ray.train.torch.TorchTrainer(
        _ray_worker,
        train_loop_config={"task": msgspec.json.encode(task).decode()},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name="run", storage_path=task.directory),
    ).fit()
    ray.shutdown()


def _ray_worker(config: dict[str, str]) -> None:
    import ray.train  # pyright: ignore[reportMissingImports]

    import treeckpt.integrations.ray as tc_ray

    task = msgspec.json.decode(config["task"], type=FrameworkTask)
    clock, model = SaveClock(task), bench_model(task.scale)
    optimizer = torch.optim.AdamW(model.parameters())

    def save_own(metrics: dict[str, float]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(directory, "state.pt"))
            ray.train.report(metrics, ray.train.Checkpoint.from_directory(directory))

    with tc_ray.manager() as manager:
        for step in range(1, task.saves + 1):
            metrics = {"loss": train_step(model, optimizer)}
            state = tc.training.state(model, optimizer)
            save = partial(tc_ray.report, metrics, manager, step, state)
            clock.measure(
                partial(save_own, metrics) if task.side == "own" else save,
                partial(clock.wait_for, Path(manager.path(step))),
            )


FRAMEWORKS = (
    Framework("transformers", ("transformers", "accelerate"), _transformers),
    Framework("lightning", ("lightning",), _lightning),
    Framework("accelerate", ("accelerate",), _accelerate),
    Framework("torchtitan", ("torchtitan", "triton"), _torchtitan),
    Framework("ray", ("ray",), _ray),
)
