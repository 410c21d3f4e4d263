"""Trains with Lightning and `treeckpt.integrations.lightning`; goes on from the last checkpoint.

python -m torch.distributed.run --nproc-per-node N -m tests.integrations.lightning_job DIRECTORY STEPS [...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import treeckpt as tc
from tests.helpers import framework_job as job

PARTS = 2
"""Parts of a batch: one for each of two ranks, or all for one."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--package", default="lightning.pytorch")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, ddp-all or fsdp")
    parser.add_argument("--kill-at", type=int, help="the step in whose save each rank that saves kills itself")
    parser.add_argument(
        "--kill-in", default="step", choices=["step", "last"], help="the save of step=N.ckpt or last.ckpt"
    )
    parser.add_argument("--save-last", default="True", choices=["True", "link"])
    parser.add_argument("--own-order", action="store_true", help="each rank has another order of the data")
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()
    pl = importlib.import_module(options.package)
    from treeckpt.integrations.lightning import TreeckptDDP, TreeckptIO, TreeckptModelParallel

    class IO(TreeckptIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            dies = checkpoint["global_step"] == options.kill_at and Path(path).name.startswith(options.kill_in)
            for manager in self._managers.values() if dies else ():
                manager.wait()
            with job.killed_in_save() if dies else contextlib.nullcontext():
                super().save_checkpoint(checkpoint, path)

    class Module(pl.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = job.network(dropout=options.dropout)
            self.losses: dict[tuple[int, int], float] = {}

        def configure_model(self) -> None:
            if options.strategy == "fsdp":
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            found = []
            for part in range(self.global_rank, PARTS, self.trainer.world_size):
                data = torch.rand(8, 16, generator=torch.Generator().manual_seed(PARTS * int(batch) + part))
                found.append(self.net(data).square().mean())
                self.losses[self.global_step, part] = found[-1].item()
            loss = sum(found) / len(found)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}

    class RandomStates(pl.Callback):
        """Continues the generators of each rank."""

        saved: Any = ()

        def state_dict(self) -> dict[str, Any]:
            states = [tc.training.rng_state()] * int(os.environ["WORLD_SIZE"])
            if dist.is_initialized():
                dist.all_gather_object(states, states[0])
            return {"ranks": states}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.saved = state_dict["ranks"]

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if len(self.saved) == trainer.world_size:
                tc.training.set_rng_state(self.saved[trainer.global_rank])
            self.saved = ()

    save_last: Any = "link" if options.save_last == "link" else True
    kept = pl.callbacks.ModelCheckpoint(
        options.directory, "{step}", "loss", save_top_k=2, every_n_train_steps=2, save_last=save_last
    )
    sizes = {"data_parallel_size": int(os.environ["WORLD_SIZE"]), "tensor_parallel_size": 1}
    strategy = {
        "auto": lambda: "auto",
        "ddp": lambda: "ddp",
        "ddp-all": lambda: TreeckptDDP(io=IO()),
        "fsdp": lambda: TreeckptModelParallel(**sizes, io=IO()),
    }[options.strategy]()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        plugins=[IO()] if isinstance(strategy, str) else None,
        max_steps=options.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[kept, RandomStates()],
        use_distributed_sampler=False,
    )
    torch.manual_seed(1 + int(os.environ["RANK"]))
    data: Any = torch.arange(5)
    seed = 7 + (int(os.environ["RANK"]) if options.own_order else 0)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    loader: Any = StatefulDataLoader(data, batch_size=1, sampler=order, generator=torch.Generator())
    module = Module(33)
    trainer.fit(module, loader, ckpt_path="last", weights_only=None)
    weights: dict[str, Any] = module.net.state_dict()
    outcome = {
        "weights": {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights.items()},
        "losses": module.losses,
        "best": kept.best_model_path,
        "kept": kept.best_k_models,
    }
    torch.save(outcome, options.directory / f"outcome-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
