"""Trains with torchtitan's checkpoint manager, optimizers, schedulers and data loader; resumes what is there.

torchtitan's `Trainer` asks for a GPU; the loop here calls its parts as that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

import treeckpt.dcp
from tests.helpers import framework_job as job


class Numbers(IterableDataset[torch.Tensor]):
    """A rank's data, which goes on where it was."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.position += 1
            yield job.numbers(self.position)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class TrainState:
    """The trainer's own state, as torchtitan's `Trainer` has it."""

    def __init__(self) -> None:
        self.step, self.ntokens_seen = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def main() -> None:
    treeckpt.dcp.install(marker=True)  # torchtitan resumes from directories with DCP's `.metadata` in them
    arguments = job.arguments()
    dist.init_process_group("gloo")
    net = job.network()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    adamw = default_adamw(lr=0.01)
    adamw.implementation = "foreach"
    optimizers = OptimizersContainer(adamw, model_parts=[net])
    schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
        optimizers=optimizers, training_steps=arguments.steps
    )
    loader = ParallelAwareDataloader(Numbers(), dist.get_rank(), 2, batch_size=None)
    train = TrainState()
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True,
            folder="checkpoint",
            interval=2,
            keep_latest_k=2,
            last_save_model_only=False,
            async_mode=arguments.async_mode,
        ),
        dataloader=loader,
        model_parts=[net],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": train},
        sd_adapter=None,
        base_folder=str(arguments.directory),
    )
    manager.load()
    resumed_from, losses, batches = train.step, dict[int, float](), iter(loader)
    while train.step < arguments.steps:
        job.kill_at(train.step, arguments.kill_at)
        batch = next(batches)
        loss = net(batch).square().mean()
        losses[train.step] = loss.item()
        optimizers.zero_grad()
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        train.step += 1
        train.ntokens_seen += batch.numel()
        manager.save(train.step, last_step=train.step == arguments.steps)
    manager.maybe_wait_for_saving()
    manager.close()
    job.write_outcome(arguments.directory, net, losses, resumed_from=resumed_from)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
