"""Trains with Accelerate's FSDP2 and its `save_state` after `treeckpt.dcp.install()`; resumes what is there."""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration

import treeckpt.dcp
from tests.helpers import framework_job as job


class Progress:
    """The number of steps so far, which Accelerate saves as it does any registered object."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def accelerator_on_cpu(project: ProjectConfiguration) -> Accelerator:
    """Returns an accelerator with FSDP2 on CPUs: Accelerate itself turns FSDP on where it finds a GPU only."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True,
        auto_wrap_policy="no_wrap",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=project)
    for state in (PartialState(), accelerator.state):  # the two that it sets itself
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def main() -> None:
    treeckpt.dcp.install()
    arguments = job.arguments()
    project = ProjectConfiguration(str(arguments.directory), automatic_checkpoint_naming=True)
    accelerator = accelerator_on_cpu(project)
    net = job.network(dropout=0.5)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    net, optimizer = accelerator.prepare(net, optimizer)
    progress, losses = Progress(), dict[int, float]()
    accelerator.register_for_checkpointing(progress)
    if (arguments.directory / "checkpoints").exists():
        accelerator.load_state()
        project.iteration = progress.step // 2
    resumed_from = progress.step
    while progress.step < arguments.steps:
        job.kill_at(progress.step, arguments.kill_at)
        loss = net(job.numbers(progress.step)).square().mean()
        losses[progress.step] = loss.item()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        if progress.step % 2 == 0:
            accelerator.save_state()
    job.write_outcome(arguments.directory, net, losses, resumed_from=resumed_from)
    accelerator.end_training()


if __name__ == "__main__":
    main()
