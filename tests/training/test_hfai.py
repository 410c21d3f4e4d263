"""The interface of hfai.checkpoint, without its faults."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt._io.comm.comm import thread_comms
from treeckpt.training import load, save

from .jobs import net, run, same_tensors, stepped


def _job(seed: int, **order: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(seed, **order)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_a_model_an_optimizer_and_others(tmp_path: Path) -> None:
    model, optimizer = _job(0)
    stepped(model, optimizer)
    save(tmp_path / "c", model, optimizer, {"epoch": 3, "acc": torch.tensor([0.5]), "__version__": "mine"})
    state = load(tmp_path / "c")
    assert (state["epoch"], state["__version__"], state["acc"].tolist()) == (3, "mine", [0.5])
    fresh, again = _job(1)
    fresh.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    torch.manual_seed(3)
    expected = run(model, optimizer, 2)
    torch.manual_seed(3)
    assert run(fresh, again, 2) == expected


def test_in_place_the_order_of_parameters_does_not_matter(tmp_path: Path) -> None:
    model, optimizer = _job(0)
    stepped(model, optimizer)
    save(tmp_path / "c", model, optimizer)
    fresh, again = _job(1, order=("last", "norm", "first"))
    state = load(tmp_path / "c", fresh, again)
    assert set(state) == {"model", "optimizer"} and same_tensors(dict(state["model"]), dict(model.state_dict()))
    torch.manual_seed(3)
    expected = run(model, optimizer, 2)
    torch.manual_seed(3)
    assert run(fresh, again, 2) == expected


def test_lists_of_models_and_optimizers(tmp_path: Path) -> None:
    jobs = [_job(0), _job(1)]
    for job in jobs:
        stepped(*job)
    models, optimizers = [list(each) for each in zip(*jobs, strict=True)]
    save(tmp_path / "c", models, optimizers)
    state = load(tmp_path / "c", nthreads=0)
    for i, (model, optimizer) in enumerate(jobs):
        assert same_tensors(state["model"][i], dict(model.state_dict()))
        _fresh, again = _job(7)
        again.load_state_dict(state["optimizer"][i])
        assert same_tensors(again.state_dict(), optimizer.state_dict())
    save(tmp_path / "c", models[:1], None)
    assert "optimizer" not in load(tmp_path / "c") and isinstance(load(tmp_path / "c")["model"], dict)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([("a", 1)], "others: expected a dict or None, found list"),
        ({"model": 1}, "model: "),
        ({"optimizer": 1}, "optimizer: "),
    ],
)
def test_others_are_a_dict_without_the_names_that_are_taken(tmp_path: Path, others: Any, words: str) -> None:
    with pytest.raises(tc.TreeError, match=words):
        save(tmp_path / "c", net(), None, others)
    assert not (tmp_path / "c").exists()


def test_buffers_are_kept_non_persistent_ones_are_not_and_views_cost_what_they_show(tmp_path: Path) -> None:
    model = net()
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    model.register_buffer("window", torch.zeros(1 << 20)[:10])
    model.register_parameter("turned", nn.Parameter(torch.arange(6.0).view(2, 3).t()))
    report = save(tmp_path / "c", model)
    assert report.nbytes < 2000
    state = load(tmp_path / "c")["model"]
    assert "cache" not in state and state["turned"].tolist() == model.turned.tolist()
    assert int(state["norm.num_batches_tracked"]) == 0


def _with_empty_groups(seed: int, lr: float, names: tuple[str, ...] = ("first", "last")) -> Any:
    model = net(seed)
    optimizer = torch.optim.AdamW([{"params": []}, *({"params": getattr(model, name).parameters()} for name in names)])
    optimizer.add_param_group({"params": [], "name": "later", "lr": lr / 2})
    optimizer.param_groups[0].update(lr=lr, betas=(0.5, lr))
    return model, optimizer


def test_groups_without_parameters_keep_their_hyper_parameters(tmp_path: Path) -> None:
    model, optimizer = _with_empty_groups(0, 0.25)
    stepped(model, optimizer)
    save(tmp_path / "c", model, optimizer)
    assert same_tensors(load(tmp_path / "c")["optimizer"], optimizer.state_dict())
    fresh, again = _with_empty_groups(1, 0.5)
    again.load_state_dict(load(tmp_path / "c")["optimizer"])
    again.step()
    fresh, again = _with_empty_groups(1, 0.5, ("last", "first"))
    load(tmp_path / "c", fresh, again)
    assert [again.param_groups[i]["lr"] for i in (0, 3)] == [0.25, 0.125]
    assert again.param_groups[0]["betas"] == (0.5, 0.25)


def test_a_schedule_goes_on_for_groups_without_parameters(tmp_path: Path) -> None:
    jobs = [_with_empty_groups(0, 0.25), _with_empty_groups(1, 0.5, ("last", "first"))]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in jobs]
    tc.save(tmp_path / "c", tc.training.state(*jobs[0], scheduler=schedules[0]))
    tc.training.restore(tmp_path / "c", *jobs[1], scheduler=schedules[1])
    assert schedules[1].base_lrs == [0.25, 0.001, 0.001, 0.125]


@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_a_group_without_parameters_goes_on_wherever_it_stands(tmp_path: Path, place: int | None) -> None:
    def job(seed: int, lr: float, place: int | None) -> Any:
        model = net(seed)
        groups: list[Any] = [{"params": getattr(model, name).parameters()} for name in ("first", "last")]
        if place is not None:
            groups.insert(place, {"params": [], "lr": lr})
        optimizer = torch.optim.AdamW(groups)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    *saved, schedule = job(0, 0.25, 1)
    tc.save(tmp_path / "c", tc.training.state(*saved, scheduler=schedule))
    model, optimizer, again = job(1, 0.5, place)
    report = tc.training.restore(tmp_path / "c", model, optimizer, scheduler=again)
    if place is None:
        assert report.ignored == ("param_groups/values/empty 1",)
    else:
        assert report.ignored == () and optimizer.param_groups[place]["lr"] == again.base_lrs[place] == 0.25


def test_ties_are_written_once_and_kept_as_state_dicts_keep_them(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict({"embedding": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model

    model, fresh = make(), make()
    assert save(tmp_path / "c", model).nbytes == 50 * 8 * 4
    state = load(tmp_path / "c")["model"]
    assert list(state) == list(model.state_dict()) and state["head.weight"] is state["embedding.weight"]
    load(tmp_path / "c", fresh)
    assert fresh["head"].weight is fresh["embedding"].weight and torch.equal(fresh["head"].weight, model["head"].weight)


def test_state_of_an_optimizer_may_be_nested(tmp_path: Path) -> None:
    model, optimizer = _job(0)
    nested = {"deep": {"er": [torch.arange(3), {"n": 1}]}, "step": 2}
    optimizer.state = dict.fromkeys(model.parameters(), nested)  # pyright: ignore[reportAttributeAccessIssue]
    save(tmp_path / "c", model, optimizer)
    state = load(tmp_path / "c")["optimizer"]["state"]
    assert set(state) == set(range(6)) and all(same_tensors(state[n], nested) for n in state)


def test_ranks_share_large_tensors_by_bytes_and_buffers_are_written_once(tmp_path: Path) -> None:
    model = net()
    model.register_parameter("large", nn.Parameter(torch.arange(1.0, 1 + (1 << 20))))

    def act(comm: Any) -> Any:
        return save(tmp_path / "c", model, None, {"own": tc.PerRank(comm.rank), "n": 1}, comm)

    outcomes = on_ranks(2, act)
    assert errors_of(outcomes) == [None, None]
    nbytes = [outcome.value.nbytes for outcome in outcomes]
    assert sum(nbytes) == sum(t.nbytes for t in model.state_dict().values()) and max(nbytes) < 1.1 * min(nbytes)
    for comm, own in zip(thread_comms(3), (0, 1, 0), strict=True):
        state = load(tmp_path / "c", group=comm)
        assert (state["own"], state["n"]) == (own, 1) and same_tensors(state["model"], dict(model.state_dict()))


class Arguments(argparse.Namespace):
    """A class of the program's own, of which only a pickle can be stored."""


def test_what_a_call_of_hfais_may_say_is_understood(tmp_path: Path) -> None:
    model = net()
    save(tmp_path / "c", model, None, {"args": Arguments(lr=0.5)}, allow_pickle=True)
    assert load(tmp_path / "c", 8, map_location="cpu", allow_pickle=True)["args"].lr == 0.5
    larger = nn.ModuleDict({"first": model.first, "norm": model.norm, "last": model.last, "new": nn.Linear(2, 2)})
    state = load(tmp_path / "c", larger, strict=False, allow_pickle=True)
    assert state["args"].lr == 0.5 and "new.weight" in state["model"]
    with pytest.raises(tc.TreeError, match=r"extra/args: .*allow_pickle=True"):
        save(tmp_path / "c", model, None, {"args": Arguments(lr=0.5)})
    save(tmp_path / "c", model, None, {"args": argparse.Namespace(lr=0.5)})
    assert load(tmp_path / "c")["args"] == argparse.Namespace(lr=0.5)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    save(tmp_path / "c", net())
    with pytest.raises(tc.MismatchError, match="nthreads"):
        load(tmp_path / "c", nthreads=-1)
    with pytest.raises(tc.MismatchError, match="model: expected the model, too, found an optimizer"):
        load(tmp_path / "c", None, torch.optim.SGD(net().parameters()))
    with pytest.raises(tc.MismatchError, match=r"model: .*found strict alone"):
        load(tmp_path / "c", strict=False)
    with pytest.raises(tc.MismatchError, match="map_location: expected a device or None, found dict"):
        load(tmp_path / "c", map_location={"cuda:0": "cpu"})
    with pytest.raises(tc.TreeckptError, match=r"expected a process group of torch.distributed.*found 'world'"):
        save(tmp_path / "c", net(), group="world")
    tc.save(tmp_path / "other", {"a": 1})
    with pytest.raises(tc.MismatchError, match=r"what training.save wrote"):
        load(tmp_path / "other")


def test_torch_distributed_is_not_needed(tmp_path: Path) -> None:
    program = (
        "import sys, torch\nfrom treeckpt.training import load, save\n"
        f"save({str(tmp_path / 'c')!r}, torch.nn.Linear(2, 2), None, {{'epoch': 1}})\n"
        f"assert load({str(tmp_path / 'c')!r})['epoch'] == 1\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=300)
