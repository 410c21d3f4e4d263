"""A training state of ours becomes what torch loads into optimizers, and rules are applied while it is converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import treeckpt as tc
from tests.helpers.torch_optimizers import OPTIMIZERS, torch_job
from tests.helpers.training_trees import assert_same
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


@pytest.mark.parametrize("source", ["file.pt", "ours"])
def test_rules_are_applied_while_it_is_converted(tmp_path: Path, source: str) -> None:
    tree = {
        "model": {"h.0.qkv": torch.arange(36.0).view(12, 3), "h.0.b": torch.ones(3)},
        "step": 5,
        "junk": torch.ones(2),
    }
    tree["model"]["tied"] = tree["model"]["h.0.b"]
    torch.save(tree, tmp_path / "file.pt")
    tc.save(tmp_path / "ours", tree)
    rules = {
        "rename": {"model/h.$L.*": "model/layers.$L.*"},
        "transforms": [tc.rules.Split("model/layers.$L.qkv", ("model/q.$L", "model/k.$L"), 0), "junk -> _"],
    }
    expected = tc.load(tmp_path / source, **rules)
    convert(tmp_path / source, tmp_path / "new", **rules)
    found = tc.load(tmp_path / "new")
    assert_same(found, expected)
    assert found["model"]["tied"].data_ptr() == found["model"]["layers.0.b"].data_ptr()
    convert(tmp_path / source, tmp_path / "new.pt", **rules)
    assert_same(torch.load(tmp_path / "new.pt"), expected)
    convert(tmp_path / source, tmp_path / "m.safetensors", **rules, subtree="model")
    assert set(tc.load(tmp_path / "m.safetensors")) == {"q.0", "k.0", "layers.0.b", "tied"}
    with pytest.raises(tc.MismatchError, match=r"no such leaf: there are model/h\.0\.qkv"):
        convert(tmp_path / source, tmp_path / "other", rename={"x": "y"})
    assert not (tmp_path / "other").exists()


def test_rules_of_a_conversion_need_state_that_ranks_share(tmp_path: Path) -> None:
    tc.save(tmp_path / "ours", {"w": torch.ones(3), "own": tc.PerRank(torch.ones(2))})
    with pytest.raises(tc.MismatchError, match=r"own/~rank\*: expected state that all ranks share"):
        convert(tmp_path / "ours", tmp_path / "new", rename={"w": "v"})
