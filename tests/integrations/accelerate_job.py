"""Trains with Accelerate and `treeckpt.integrations.accelerate`; goes on from the newest checkpoint.

python -m torch.distributed.run --nproc-per-node N -m tests.integrations.accelerate_job DIRECTORY STEPS [...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import DataLoaderConfiguration, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import treeckpt as tc
from tests.helpers import framework_job as job
from treeckpt.integrations.accelerate import TreeckptAccelerator

Killed = Callable[[], contextlib.AbstractContextManager[Any]]
PARTS = 2
"""Parts of a batch: one for each of two ranks, or all for one."""


class Progress:
    """The number of steps so far."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def accelerator(options: argparse.Namespace) -> TreeckptAccelerator:
    """Returns an accelerator on CPUs; with FSDP2, which Accelerate itself turns on where it finds a GPU only."""
    project = ProjectConfiguration(str(options.directory), automatic_checkpoint_naming=True, total_limit=2)
    loading = DataLoaderConfiguration(
        use_stateful_dataloader=not options.skip,
        split_batches=not options.dispatch,
        use_seedable_sampler=options.seedable,
        dispatch_batches=options.dispatch,
    )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    made = TreeckptAccelerator(
        cpu=True, project_config=project, dataloader_config=loading, fsdp_plugin=plugin if options.fsdp else None
    )
    if options.fsdp:
        for state in (PartialState(), made.state):  # the two that it sets itself
            state.distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = plugin
    return made


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--dispatch", action="store_true")
    parser.add_argument("--skip", action="store_true", help="loaders of torch, by skip_first_batches")
    parser.add_argument("--kill-at", type=int, help="the step in whose save each rank kills itself")
    parser.add_argument("--resized", action="store_true", help="another number of ranks has saved")
    parser.add_argument("--dropout", type=float, default=0.0)
    return parser.parse_args(arguments)


def train(options: argparse.Namespace, killed: Killed = job.killed_in_save) -> dict[str, Any]:
    """Trains from where the run is; returns what it has found.

    Args:
        killed: makes the context of the save in which the run is killed.
    """
    made = accelerator(options)
    outcome = train_with(made, options, killed)
    made.free_memory()  # while there is a process group: to be its last holder can be a deadlock of torch's
    made.end_training()
    return outcome


def train_with(made: TreeckptAccelerator, options: argparse.Namespace, killed: Killed) -> dict[str, Any]:
    """Trains with an accelerator."""
    net = job.network(dropout=options.dropout)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data: Any = TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_size=1 if options.dispatch else PARTS, shuffle=True)
    torch.manual_seed(1 + made.process_index)
    made.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    net, optimizer, loader, scheduler = made.prepare(net, optimizer, loader, scheduler)
    progress, losses = Progress(), dict[tuple[int, int], float]()
    made.register_for_checkpointing(progress)
    fallback = tc.Fallback(per_rank={"loader": "take"}) if options.resized else None
    report = made.load_state(fallback=fallback)
    resumed_from = progress.step
    used = progress.step % len(loader) if options.skip else 0
    batches = made.skip_first_batches(loader, used) if used else loader
    while progress.step < options.steps:
        for (numbers,) in batches:
            found = []
            for number in numbers.tolist():
                found.append(net(torch.rand(8, 16, generator=torch.Generator().manual_seed(number))).square().mean())
                losses[progress.step, number] = found[-1].item()
            made.backward(sum(found) / len(found))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % 2 == 0:
                dies = progress.step == options.kill_at
                if dies:
                    made.wait_for_saves()
                with killed() if dies else contextlib.nullcontext():
                    made.save_state()
            if progress.step == options.steps:
                break
        batches = loader
    made.wait_for_saves()
    weights: dict[str, Any] = net.state_dict()
    return {
        "weights": {
            name.removeprefix("module."): one.full_tensor() if isinstance(one, DTensor) else one
            for name, one in weights.items()
        },
        "losses": losses,
        "resumed_from": resumed_from,
        "rate": scheduler.get_last_lr(),
        "scaler": made.scaler.state_dict(),
        "path": report and report.path,
    }


def main() -> None:
    options = parse()
    torch.save(train(options), options.directory / f"outcome-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
