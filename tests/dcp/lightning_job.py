"""Trains with Lightning's ModelParallelStrategy on two ranks after `treeckpt.dcp.install()`; resumes what is there.

python -m torch.distributed.run --nproc-per-node 2 tests/dcp/lightning_job.py DIRECTORY STEPS [STEP AT WHICH IT DIES]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import treeckpt.dcp


class Module(pytorch_lightning.LightningModule):
    def __init__(self, last: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.last = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 5)), last

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        numbers = torch.rand(8, 16, generator=torch.Generator().manual_seed(self.global_step))
        return self.net(numbers).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(directory: Path, steps: int, last: int = -1) -> None:
    treeckpt.dcp.install()
    module = Module(last)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1, filename="{step}")],
        use_distributed_sampler=False,
    )
    loader: Any = torch.utils.data.DataLoader(torch.zeros(100, 1), batch_size=None)
    found = sorted(path for path in directory.glob("step=*.ckpt") if (path / "meta.pt").exists())
    trainer.fit(module, loader, ckpt_path=found[-1] if found else None)
    weights = {name: weight.full_tensor() for name, weight in module.net.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "from": found[-1].name if found else None}, directory / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
