"""Trains with Lightning's ModelParallelStrategy after `treeckpt.dcp.install()`; resumes what is there."""

from __future__ import annotations

from typing import Any

import pytorch_lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import treeckpt.dcp
from tests.helpers import framework_job as job


class Module(pytorch_lightning.LightningModule):
    def __init__(self, last: int | None) -> None:
        super().__init__()
        self.net, self.last = job.network(), last
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        job.kill_at(self.global_step, self.last)
        loss = self.net(job.numbers(self.global_step)).square().mean()
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    treeckpt.dcp.install()
    arguments = job.arguments()
    module = Module(arguments.kill_at)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=arguments.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(arguments.directory, every_n_train_steps=2, save_top_k=-1, filename="{step}")],
        use_distributed_sampler=False,
    )
    loader: Any = torch.utils.data.DataLoader(torch.zeros(100, 1), batch_size=None)
    found = sorted(path for path in arguments.directory.glob("step=*.ckpt") if (path / "meta.pt").exists())
    trainer.fit(module, loader, ckpt_path=found[-1] if found else None)
    resumed_from = int(found[-1].stem.removeprefix("step=")) if found else 0
    job.write_outcome(arguments.directory, module.net, module.losses, resumed_from=resumed_from)


if __name__ == "__main__":
    main()
