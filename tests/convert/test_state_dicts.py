"""A training state of ours becomes what torch loads into optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import treeckpt as tc
from tests.helpers.torch_optimizers import OPTIMIZERS, torch_job
from tests.training.jobs import same_tensors, stepped
from treeckpt import training

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
convert = tc.convert.convert
QUICK = ("AdamW", "SGD with momentum", "LBFGS")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name not in QUICK)]
)
def test_torch_loads_the_state_of_an_optimizer(tmp_path: Path, name: str) -> None:
    model, optimizer = torch_job(name, 1)
    stepped(model, optimizer, 3)
    tc.save(tmp_path / "ours", training.state(model, optimizer, rng=False))
    report = tc.convert.to_torch_file(tmp_path / "ours", tmp_path / "file.pt")
    assert any("by number" in note.becomes for note in report.notes) and not report.losses
    found = torch.load(tmp_path / "file.pt")
    fresh, theirs = torch_job(name, 2)
    fresh.load_state_dict(found["model"])
    theirs.load_state_dict(found["optimizer"])
    assert same_tensors(theirs.state_dict(), optimizer.state_dict())
    fresh, theirs = torch_job(name, 3)
    training.restore(tmp_path / "file.pt", fresh, theirs, rng=False)
    assert same_tensors(theirs.state_dict(), optimizer.state_dict())
    if name in ("LBFGS", "SparseAdam"):
        return  # a fresh one cannot take the step by which get_state_dict makes its state
    tc.convert.to_dcp(tmp_path / "ours", tmp_path / "dcp")
    fresh, theirs = torch_job(name, 4)
    model_state, state = get_state_dict(fresh, theirs)
    dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(fresh, theirs, model_state_dict=model_state, optim_state_dict=state)
    assert same_tensors(theirs.state_dict(), optimizer.state_dict())
    assert same_tensors(fresh.state_dict(), model.state_dict())


def test_several_optimizers_each_have_a_state_dict(tmp_path: Path) -> None:
    jobs = {"a": torch_job("AdamW", 1), "b": torch_job("SGD with momentum", 2)}
    for job in jobs.values():
        stepped(*job)
    models, optimizers = ({name: job[n] for name, job in jobs.items()} for n in (0, 1))
    tc.save(tmp_path / "ours", training.state(models, optimizers, rng=False))
    convert(tmp_path / "ours", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt")
    for name, (_, optimizer) in jobs.items():
        assert same_tensors(found["optimizer"][name], optimizer.state_dict())
