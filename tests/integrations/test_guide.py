"""The programs in the guide on frameworks that do not run there: `make test-frameworks` installs what they need."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import treeckpt as tc

ROOT = Path(__file__).parents[2]
LIGHTNING = """
import torch
from lightning import LightningModule


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def training_step(self, batch):
        loss = self.linear(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


module, loader = Module(), torch.utils.data.DataLoader(torch.ones(200, 4))
Trainer = partial(Trainer, accelerator="cpu", max_steps=300, logger=False)
"""


def block_with(word: str) -> str:
    cells = json.loads((ROOT / "notebooks/11_frameworks.ipynb").read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    [block] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in block]
    return block


def run(program: str, directory: Path) -> str:
    (directory / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "300"  # on a busy machine
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_program_for_ray_trains_on_a_cluster_of_two_nodes(tmp_path: Path) -> None:
    program = block_with("import ray.train").replace(
        "ray.shutdown()", "print('nodes', len(ray.nodes()))\nray.shutdown()"
    )
    said = run(program, tmp_path)
    assert "nodes 2" in said and f"{tmp_path}/ray/run/step_00000030" in said
    assert tc.Manager(tmp_path / "ray/run").steps() == [10, 20, 30]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_the_program_for_lightning_keeps_the_best(tmp_path: Path) -> None:
    imports, rest = block_with("TreeckptIO").split("\n\n", 1)
    run(f"from functools import partial\n{imports}\n{LIGHTNING}\n{rest}", tmp_path)
    kept = [path for path in (tmp_path / "run").iterdir() if not path.is_symlink()]
    assert len(kept) == 2 and all(tc.exists(path) for path in kept)
