"""The loops of `frameworks`: each trains `bench_model` for `task.saves` steps, and saves after every step.

A framework is added as a function of a task and a clock, and a line in `FRAMEWORKS`. With `task.side == "own"` it saves
as its own documentation shows, else by `treeckpt.integrations`, in both cases below `task.path`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

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

    def save_own(loss: float) -> None:
        with tempfile.TemporaryDirectory() as directory:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(directory, "state.pt"))
            ray.train.report({"loss": loss}, ray.train.Checkpoint.from_directory(directory))

    with tc_ray.manager() as manager:
        for step in range(1, task.saves + 1):
            metrics: dict[str, Any] = {"loss": train_step(model, optimizer)}
            if task.side == "own":
                clock.measure(lambda metrics=metrics: save_own(metrics["loss"]), lambda: None)
            else:
                state = tc.training.state(model, optimizer)
                clock.measure(
                    lambda metrics=metrics, step=step, state=state: tc_ray.report(metrics, manager, step, state),
                    manager.wait,
                )


FRAMEWORKS = (Framework("ray", "ray", _ray),)
"""All frameworks; `package` is the module that is looked for."""
