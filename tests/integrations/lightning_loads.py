"""Saves with a Trainer and a Fabric, and loads with `load_from_checkpoint` and the Fabric.

python -m tests.integrations.lightning_loads PACKAGE DIRECTORY
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    package, directory = sys.argv[1], Path(sys.argv[2])
    pl = importlib.import_module(package)
    fabrics = importlib.import_module("lightning_fabric" if package == "pytorch_lightning" else "lightning.fabric")
    environments = importlib.import_module(f"{fabrics.__name__}.plugins.environments")
    from treeckpt.integrations.lightning import TreeckptIO, install

    class Module(pl.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(4, width)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    here = environments.LightningEnvironment()  # it would look for others, such as MPI
    for name, plugins in (("ours.ckpt", [here, TreeckptIO()]), ("file.ckpt", [here])):
        quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(max_steps=2, accelerator="cpu", devices=1, plugins=plugins, **quiet)
        module = Module(3)
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 4)))
        trainer.save_checkpoint(directory / name)
        trainer.strategy.teardown()
        install()
        loaded = Module.load_from_checkpoint(directory / name)
        assert torch.equal(loaded.net.weight, module.net.weight) and loaded.hparams.width == 3
    assert (directory / "ours.ckpt").is_dir() and (directory / "file.ckpt").is_file()
    assert TreeckptIO().load_checkpoint(directory / "file.ckpt")["global_step"] == 2

    fabric = fabrics.Fabric(accelerator="cpu", devices=1, plugins=[here, TreeckptIO()])
    net = torch.nn.Linear(4, 3)
    net, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    fabric.backward(net(torch.ones(1, 4)).sum())
    optimizer.step()
    fabric.save(directory / "fabric.ckpt", {"net": net, "optimizer": optimizer, "step": 5})
    weight = net.weight.detach().clone()
    state = {"net": net, "optimizer": optimizer, "step": 0}
    torch.nn.init.zeros_(net.weight)
    assert fabric.load(directory / "fabric.ckpt", state) == {}
    assert torch.equal(net.weight, weight) and state["step"] == 5


if __name__ == "__main__":
    main()
