"""Trains with TorchTNT's loop and its `DistributedCheckpointSaver` after `install`; resumes what is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import framework_job as job

sys.path.append(job.ASIDE)  # pkg_resources
from torchtnt.framework.callbacks import DistributedCheckpointSaver
from torchtnt.framework.state import State
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit

import treeckpt.dcp


class Numbers:
    """A rank's batches, from where it was."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.position += 1
            yield job.numbers(self.position)


class Regression(TrainUnit[torch.Tensor]):
    def __init__(self, numbers: Numbers, kill_at: int | None) -> None:
        super().__init__()
        self.net = DistributedDataParallel(job.network())
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.numbers, self.kill_at, self.losses = numbers, kill_at, dict[int, float]()

    def train_step(self, state: State, data: torch.Tensor) -> None:
        step = self.train_progress.num_steps_completed
        job.kill_at(step, self.kill_at)
        loss = self.net(data).square().mean()
        self.losses[step] = loss.item()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    treeckpt.dcp.install(marker=True)  # TorchTNT takes a directory with `.metadata` for a checkpoint
    arguments = job.arguments()
    dist.init_process_group("gloo")
    numbers = Numbers()
    unit = Regression(numbers, arguments.kill_at)
    saver = DistributedCheckpointSaver(str(arguments.directory), save_every_n_train_steps=2)
    DistributedCheckpointSaver.restore_from_latest(str(arguments.directory), unit)
    resumed_from = numbers.position = unit.train_progress.num_steps_completed
    train(unit, numbers, max_epochs=1, max_steps_per_epoch=arguments.steps, callbacks=[saver])
    job.write_outcome(arguments.directory, unit.net.module, unit.losses, resumed_from=resumed_from)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
