"""Trains with Composer's `Trainer` and its sharded checkpoints after `treeckpt.dcp.install`; resumes what is there.

Composer asks for torchvision, of which the build for CUDA is the one on PyPI: beside a torch for CPUs its operators are
missing, and only declared here. It lies in a directory of its own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers import framework_job as job

sys.path.append(job.ASIDE)
os.environ["FSDP_VERSION"] = "2"  # the other one runs on GPUs alone
OPERATORS = ("nms", "qnms", "roi_align", "qroi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
library = torch.library.Library("torchvision", "FRAGMENT")
for name in OPERATORS:
    library.define(f"{name}(Tensor rows) -> Tensor")
    library.define(f"_{name}_backward(Tensor rows) -> Tensor")

from composer import Callback, ComposerModel, Trainer  # noqa: E402
from composer.utils import dist as ranks  # noqa: E402

import treeckpt.dcp  # noqa: E402


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(16, generator=torch.Generator().manual_seed(index))


class Regression(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = job.network()
        for module in self.net:
            module._fsdp_wrap = True  # type: ignore[assignment]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean()


class Losses(Callback):
    def __init__(self, kill_at: int | None) -> None:
        self.kill_at, self.losses = kill_at, dict[int, float]()

    def batch_start(self, state: Any, logger: Any) -> None:
        job.kill_at(state.timestamp.batch.value, self.kill_at)

    def after_loss(self, state: Any, logger: Any) -> None:
        self.losses[state.timestamp.batch.value] = state.loss.item()


def main() -> None:
    treeckpt.dcp.install(marker=True)  # Composer looks for `.metadata` and `__<rank>_0.distcp`
    arguments = job.arguments()
    losses, model = Losses(arguments.kill_at), Regression()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        train_dataloader=DataLoader(Rows(), batch_size=4, sampler=ranks.get_sampler(Rows(), shuffle=True)),
        max_duration=f"{arguments.steps}ba",
        device="cpu",
        seed=3,
        parallelism_config={"fsdp": {"state_dict_type": "sharded"}},
        run_name="run",
        save_folder=str(arguments.directory / "checkpoints"),
        save_interval="2ba",
        autoresume=True,
        callbacks=[losses],
        progress_bar=False,
    )
    trainer.fit()
    job.write_outcome(arguments.directory, model.net, losses.losses, resumed_from=min(losses.losses))
    trainer.close()


if __name__ == "__main__":
    main()
