"""What `state` gives is what `restore` takes: training goes on to the last bit, or an error says why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import treeckpt as tc
from treeckpt import training
from treeckpt._io.storage.wrapped_store import CountingStore

from .jobs import net, run, same_tensors, stepped

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on_to_the_last_bit(tmp_path: Path, name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    stepped(model, optimizer, 3)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    expected = run(model, optimizer, 3)
    fresh = net(1)
    again = OPTIMIZERS[name](fresh.parameters())
    report = training.restore(tmp_path / "c", fresh, again)
    assert (report.missing, report.unexpected, report.ignored) == ((), (), ())
    assert run(fresh, again, 3) == expected
    assert same_tensors(fresh.state_dict(), model.state_dict())
    assert same_tensors(again.state_dict(), optimizer.state_dict())


def test_lazily_created_moments_come_as_they_were_saved(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh = net(1)
    again = torch.optim.Adam(fresh.parameters())
    assert not again.state
    training.restore(tmp_path / "c", fresh, again)
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        assert same_tensors(dict(optimizer.state[old]), dict(again.state[new]))


def test_reordered_parameters_resume_bit_exactly(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    expected = run(model, optimizer, 3)
    fresh = net(1, order=("last", "first", "norm"))
    again = torch.optim.AdamW(reversed(list(fresh.parameters())), lr=0.5)
    training.restore(tmp_path / "c", fresh, again)
    assert run(fresh, again, 3) == expected


def test_groups_may_be_split_and_joined_where_that_has_one_meaning(tmp_path: Path) -> None:
    model = net()
    first, norm, last = model.children()
    optimizer = torch.optim.AdamW(
        [
            {"params": [*first.parameters(), *norm.parameters()]},
            {"params": last.parameters(), "role": "head", "lr": 0.5},
        ],
        lr=0.01,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run(model, optimizer, 2, scheduler=schedule)
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=schedule))
    expected = run(model, optimizer, 3, scheduler=schedule)
    fresh = net(1)
    first, norm, last = fresh.children()
    parts = [last.parameters(), norm.parameters(), first.parameters()]
    again = torch.optim.AdamW([{"params": part} for part in parts])
    renewed = torch.optim.lr_scheduler.ExponentialLR(again, 0.5)
    training.restore(tmp_path / "c", fresh, again, scheduler=renewed)
    assert [group.get("role") for group in again.param_groups] == ["head", None, None]
    assert renewed.base_lrs == [0.5, 0.01, 0.01]
    assert run(fresh, again, 3, scheduler=renewed) == expected
    joined = torch.optim.AdamW(fresh.parameters())
    before = fresh.state_dict()["first.weight"].clone()
    with pytest.raises(tc.MismatchError, match=r"param_groups/.*one value for the parameters of a group"):
        training.restore(tmp_path / "c", fresh, joined)
    assert torch.equal(before, fresh.state_dict()["first.weight"])


def _saved(tmp_path: Path, drop: Callable[[dict[str, Any]], None]) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    stepped(model, optimizer)
    tree = training.state(model, optimizer)
    drop(tree)
    tc.save(tmp_path / "c", tree)


def _job(seed: int = 1, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(seed)
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
def test_a_missing_moment_is_an_error(tmp_path: Path, steps: int) -> None:
    _saved(tmp_path, lambda tree: tree["optimizer"]["last.weight"].pop("exp_avg_sq"))
    model, optimizer = _job(steps=steps)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(tc.MismatchError, match=r"^optimizer/last.weight/exp_avg_sq: .*1 missing in the checkpoint"):
        training.restore(tmp_path / "c", model, optimizer)
    assert same_tensors(model.state_dict(), before) and bool(optimizer.state) == bool(steps)
    report = training.restore(tmp_path / "c", model, optimizer, strict=False)
    assert report.missing == ("optimizer/last.weight/exp_avg_sq",)


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        (
            lambda t: (t["optimizer"].pop("last.bias"), t["param_groups"]["members"]["first.bias"].pop("last.bias")),
            "optimizer/last.bias",
        ),
        (lambda t: t["model"].pop("norm.weight"), "model/norm.weight"),
        (lambda t: t["param_groups"]["values"]["first.bias"].pop("eps"), "param_groups/values/eps"),
        (lambda t: (t.pop("optimizer"), t.pop("param_groups")), "optimizer: .*optimizer=None"),
        (lambda t: t.pop("model"), "with `model` at its root"),
        (lambda t: t["model"].update({"more": torch.ones(1)}), "1 not here: model/more"),
        (lambda t: t["optimizer"]["last.bias"].update(more=torch.ones(1)), None),
        (lambda t: t["model"].update({"last.bias": torch.ones(9)}), r"model/last.bias: .*shape \(3,\).*\(9,\)"),
        (lambda t: t["model"].update({"last.bias": torch.ones(3).double()}), "model/last.bias: .*float32.*float64"),
        (lambda t: t["model"].update({"last.bias": 3}), "model/last.bias: expected a tensor, found a value"),
    ],
)
def test_every_difference_is_named_before_anything_changes(tmp_path: Path, drop: Any, words: str | None) -> None:
    _saved(tmp_path, drop)
    model, optimizer = _job()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if words is None:  # more state than this optimizer makes is kept: other versions make it
        training.restore(tmp_path / "c", model, optimizer)
        assert "more" in optimizer.state[model.last.bias]
        return
    with pytest.raises(tc.MismatchError, match=words):
        training.restore(tmp_path / "c", model, optimizer)
    assert same_tensors(model.state_dict(), before) and not optimizer.state


def test_a_parameter_without_state_is_told_from_a_missing_one(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tc.save(tmp_path / "unstepped", training.state(model, optimizer))
    training.restore(tmp_path / "unstepped", *(job := _job()))
    assert not job[1].state
    report = training.restore(tmp_path / "unstepped", *(job := _job(steps=1)))
    assert not job[1].state and "optimizer/first.weight" in report.cleared and not report.missing
    _saved(tmp_path, lambda tree: tree["optimizer"].pop("first.weight"))
    with pytest.raises(tc.MismatchError, match=r"^optimizer/first.weight: "):
        training.restore(tmp_path / "c", *_job(steps=1))


def test_freshly_frozen_parameters_need_no_state(tmp_path: Path) -> None:
    _saved(tmp_path, lambda tree: None)
    model = net(1)
    model.first.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    report = training.restore(tmp_path / "c", model, optimizer)
    assert report.ignored == ("optimizer/first.bias", "optimizer/first.weight") and report.unexpected == ()
    model.first.requires_grad_(True)  # trains again, in no optimizer
    with pytest.raises(tc.MismatchError, match="not here: optimizer/first"):
        training.restore(tmp_path / "c", model, optimizer)


def test_tied_weights_stay_tied_and_are_written_once(tmp_path: Path) -> None:
    def tied_model(*, tie: bool = True) -> nn.ModuleDict:
        model = nn.ModuleDict({"embedding": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)})
        if tie:
            model["head"].weight = model["embedding"].weight
        return model

    def tied(seed: int, *, tie: bool = True) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = tied_model(tie=tie)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model["head"](model["embedding"](torch.arange(4))).square().sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = tied(0)
    report = tc.save(tmp_path / "c", training.state(model, optimizer, rng=False))
    assert report.nbytes < 50 * 8 * 4 * 3 + 100
    fresh, again = tied(1)
    training.restore(tmp_path / "c", fresh, again, rng=False)
    assert fresh["head"].weight is fresh["embedding"].weight
    assert torch.equal(fresh["head"].weight, model["head"].weight)
    assert same_tensors(again.state_dict()["state"], optimizer.state_dict()["state"])
    with pytest.raises(tc.MismatchError, match=r"optimizer/head.weight"):
        training.restore(tmp_path / "c", *tied(1, tie=False), rng=False)
    tc.save(tmp_path / "untied", training.state(tied(2, tie=False)[0], rng=False))
    with pytest.raises(tc.MismatchError, match=r"model/head.weight: expected the bytes of model/embedding.weight"):
        training.restore(tmp_path / "untied", fresh, rng=False)
    whole = tc.load(tmp_path / "untied")
    with pytest.raises(tc.MismatchError, match=r"model/head.weight: expected the bytes of model/embedding.weight"):
        training.restore(whole, fresh, rng=False)
    for source in (tmp_path / "untied", whole):
        fresh["head"].weight.data.zero_()
        report = training.restore(source, fresh, rng=False, strict=False)
        assert torch.equal(fresh["embedding"].weight, whole["model"]["head.weight"]), "the last of them"
        assert report.ignored == ("model/embedding.weight",)
    whole["model"]["embedding.weight"] = whole["model"]["head.weight"].clone()
    tc.save(tmp_path / "equal", whole)
    for source in (tmp_path / "equal", whole):
        with torch.device("meta"):
            empty = tied_model()
        assert training.restore(source, empty, rng=False).ignored == ()
        assert empty["head"].weight is empty["embedding"].weight
        assert torch.equal(empty["head"].weight, whole["model"]["head.weight"])


def _ends(names: str, seed: int = 0) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """The embedding, the head, or both tied, as the first stage of a pipeline, the last one and the whole have them."""
    torch.manual_seed(seed)
    weight = nn.Parameter(torch.randn(5, 4))
    model = nn.ModuleDict({name: nn.Linear(4, 5, bias=False) for name in names.split()})
    for part in model.values():
        part.weight = weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 + seed)
    weight.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stage", ["embedding", "head"])
@pytest.mark.parametrize("stored", [True, False])
def test_state_of_a_tied_parameter_goes_to_a_stage_that_has_one_of_its_names(
    tmp_path: Path, stage: str, *, stored: bool
) -> None:
    model, optimizer = _ends("embedding head")
    source: Any = training.state(model, optimizer, rng=False)
    if stored:
        tc.save(tmp_path / "c", source)
        source = tmp_path / "c"
    part, again = _ends(stage, 1)
    report = training.restore(source, part, again, rng=False, strict="missing")
    assert report.missing == () and torch.equal(part[stage].weight, model["head"].weight)
    assert same_tensors(again.state_dict()["state"], optimizer.state_dict()["state"])
    assert again.param_groups[0]["lr"] == 0.01


def test_stages_that_trained_one_weight_alike_restore_into_one_tied_parameter(tmp_path: Path) -> None:
    def saved(*seeds: int, lr: float = 0.01, grown: float = 0.0) -> Path:
        stages = [_ends(name, seed) for name, seed in zip(("embedding", "head"), seeds, strict=True)]
        stages[1][1].param_groups[0]["lr"] = lr
        stages[1][1].state[stages[1][0]["head"].weight]["exp_avg"][4, 3] += grown
        path = tmp_path / f"{seeds} {lr} {grown}"
        tc.save(path, training.state([one[0] for one in stages], [one[1] for one in stages], rng=False))
        return path

    expected, optimizer = _ends("embedding head")
    whole, again = _ends("embedding head", 1)
    report = training.restore(saved(0, 0), whole, again, rng=False)
    assert (report.missing, report.unexpected, report.ignored) == ((), (), ())
    assert torch.equal(whole["head"].weight, expected["head"].weight)
    assert same_tensors(again.state_dict()["state"], optimizer.state_dict()["state"])
    with pytest.raises(tc.MismatchError, match=r"optimizer/head.weight: .* states that differ"):
        training.restore(saved(0, 0, grown=1.0), whole, again, rng=False)
    with pytest.raises(tc.MismatchError, match="param_groups/lr: expected one value"):
        training.restore(saved(0, 0, lr=0.5), whole, again, rng=False)


class Tied(nn.Module):
    """Three names of one matrix, and of one buffer two."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(20, 4)
        self.encoder, self.head = nn.Embedding(20, 4), nn.Linear(4, 20, bias=False)
        self.encoder.weight = self.head.weight = self.shared.weight
        self.register_buffer("mask", torch.ones(3))
        self.head.register_buffer("mask", self.mask)


@pytest.mark.parametrize("kept", ["shared", "encoder", "head"])
def test_names_of_a_tensor_that_is_filled_under_another_are_not_missing(tmp_path: Path, kept: str) -> None:
    """As files of the hub have them."""
    model = Tied()
    names = {"shared", "encoder", "head"} - {kept}
    state = {k: v + 1 for k, v in model.state_dict().items() if k.partition(".")[0] not in names or "mask" in k}
    state.pop("head.mask" if kept == "shared" else "mask")
    weight = state[f"{kept}.weight"].clone()
    tc.save(tmp_path / "bare", state)
    tc.save(tmp_path / "model", {"model": state})
    masks = {name: value for name, value in state.items() if "mask" in name}
    tc.save(tmp_path / "other", masks)
    tc.save(tmp_path / "other model", {"model": masks})
    for fill in (
        lambda one: tc.load_into(tmp_path / "bare", one),
        lambda one: tc.load_into([tmp_path / "other", tmp_path / "bare"], one),
        lambda one: training.restore([tmp_path / "other model", tmp_path / "model"], one, rng=False),
        lambda one: training.restore(tmp_path / "model", one, rng=False),
        lambda one: training.restore({"model": state}, one, rng=False),
        lambda one: one.load_state_dict(tc.load(tmp_path / "bare", like=one.state_dict())),
    ):
        fresh = Tied()
        report = fill(fresh)
        assert getattr(report, "missing", ()) in ((), []), "nothing is"
        assert torch.equal(fresh.head.weight, weight) and fresh.head.weight is fresh.shared.weight
        assert fresh.head.mask.tolist() == [2.0] * 3
    with torch.device("meta"):
        fresh = Tied()
    training.restore(tmp_path / "model", fresh, rng=False)
    assert torch.equal(fresh.encoder.weight, weight)


def test_a_name_of_a_part_of_a_tensor_that_is_filled_is_missing(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tc.save(tmp_path / "c", {"whole": whole + 1})
    for part in (whole[:3], whole.view(2, 3), whole.clone()):
        with pytest.raises(tc.MismatchError, match="missing in the checkpoint: part"):
            tc.load_into(tmp_path / "c", {"whole": whole, "part": part})
    numbers = np.zeros(6, np.float32)
    tc.load_into(tmp_path / "c", {"whole": numbers, "part": numbers})
    assert numbers.tolist() == [1, 2, 3, 4, 5, 6]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("kept", torch.zeros(3))
        self.calls = {"n": 0}

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "tables": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        assert torch.equal(state["tables"], torch.arange(3))
        self.calls = state["calls"]


def test_extra_state_is_kept_and_non_persistent_buffers_are_not(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(), Counting())
    model[1].calls["n"], model[1].cache[0], model[1].kept[0] = 5, 7, 9
    tree = training.state(model)
    assert "1._extra_state" in tree["model"] and "1.cache" not in tree["model"]
    tc.save(tmp_path / "c", tree)
    fresh = nn.Sequential(Counting(), Counting())
    training.restore(tmp_path / "c", fresh)
    assert (fresh[1].calls, fresh[0].calls) == ({"n": 5}, {"n": 0})
    assert fresh[1].cache[0] == 0 and fresh[1].kept[0] == 9
    tc.save(tmp_path / "bare", {"model": {k: v for k, v in tree["model"].items() if "extra" not in k}})
    with pytest.raises(tc.MismatchError, match=r"model/0._extra_state"):
        training.restore(tmp_path / "bare", fresh, rng=False)


@pytest.mark.parametrize("several", [False, True])
def test_a_model_with_extra_state_is_read_once(tmp_path: Path, several: bool) -> None:
    model = nn.Sequential(Counting(), nn.Linear(512, 512))
    tc.save(tmp_path / "c", training.state(model, rng=False))
    counted: list[int] = []
    store: Any = CountingStore(tc.LocalStore(tmp_path / "c"), counted.append)
    report = training.restore([store] if several else store, model, rng=False)
    weights = 4 * 512 * 513
    assert weights < sum(counted) < 1.5 * weights, "headers and whole blocks too"
    assert report.nbytes == weights + 4 * (2 + 3) + 8 * 3, "all tensors, with those of the extra state"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_wrappers_leave_no_trace_in_names() -> None:
    plain = net()
    wrapped = net()
    wrapped.first = checkpoint_wrapper(wrapped.first)
    wrapped.last = torch.compile(wrapped.last)
    whole = nn.DataParallel(torch.compile(wrapped))
    assert list(training.state(whole)["model"]) == list(training.state(plain)["model"])
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    assert set(training.state(whole, optimizer)["optimizer"]) == {name for name, _ in plain.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_restoring_into_a_wrapped_model(tmp_path: Path) -> None:
    _saved(tmp_path, lambda tree: None)
    model = net(1)
    model.first = checkpoint_wrapper(model.first)
    compiled = torch.compile(model)
    optimizer = torch.optim.Adam(compiled.parameters())
    training.restore(tmp_path / "c", compiled, optimizer)
    saved = tc.load(tmp_path / "c")
    assert torch.equal(model.first.weight, saved["model"]["first.weight"])
    assert torch.equal(optimizer.state[model.last.bias]["exp_avg"], saved["optimizer"]["last.bias"]["exp_avg"])


def test_several_models_and_optimizers_go_by_name(tmp_path: Path) -> None:
    models = {"generator": net(0), "discriminator": net(1)}
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=0.01) for name, model in models.items()}
    for name in models:
        stepped(models[name], optimizers[name])
    tc.save(tmp_path / "c", training.state(models, optimizers))
    assert "optimizer/generator/generator/first.weight/exp_avg" in tc.inspect(tmp_path / "c").by_path
    fresh = {"discriminator": net(5), "generator": net(6)}
    again = {name: torch.optim.Adam(fresh[name].parameters()) for name in ("generator", "discriminator")}
    training.restore(tmp_path / "c", fresh, again)
    for name in models:
        assert same_tensors(fresh[name].state_dict(), models[name].state_dict())
        assert same_tensors(again[name].state_dict(), optimizers[name].state_dict())
    with pytest.raises(tc.TreeError, match="a dict of names"):
        training.state(list(models.values()))
    with pytest.raises(tc.MismatchError, match=r"param_groups/other: .*as many optimizers"):
        training.restore(tmp_path / "c", fresh, {"other": again["generator"]})


def test_parts_of_one_model_are_a_list(tmp_path: Path) -> None:
    whole = net()
    parts = [nn.ModuleDict({"first": whole.first}), nn.ModuleDict({"norm": whole.norm, "last": whole.last})]
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]
    for optimizer in optimizers:
        stepped(whole, optimizer)
    tc.save(tmp_path / "c", training.state(parts, optimizers))
    fresh, again = _job()
    training.restore(tmp_path / "c", fresh, again)
    assert same_tensors(fresh.state_dict(), whole.state_dict())
    assert torch.equal(again.state[fresh.first.bias]["exp_avg"], optimizers[0].state[whole.first.bias]["exp_avg"])
    two = [net(), net()]
    optimizer = torch.optim.Adam([parameter for one in two for parameter in one.parameters()])
    with pytest.raises(tc.TreeError, match="expected one value for each name, found two"):
        training.restore(tmp_path / "c", two, optimizer)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    with pytest.raises(tc.TreeError, match="parameters of the model that is given"):
        training.state(net(), torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(tc.TreeError, match=r"model: expected a torch\.nn"):
        training.state({"w": torch.ones(2)}["w"])  # type: ignore[arg-type]


def test_lbfgs_refuses_another_order_of_parameters(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh = net(1)
    with pytest.raises(tc.MismatchError, match="param_groups/order"):
        training.restore(tmp_path / "c", fresh, torch.optim.LBFGS(reversed(list(fresh.parameters()))))


class Global(torch.optim.SGD):
    """Keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_state_of_no_parameter_is_kept(tmp_path: Path) -> None:
    model = net()
    optimizer = Global(model.parameters(), lr=0.1)
    stepped(model, optimizer, 3)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh = net(1)
    again = Global(fresh.parameters(), lr=0.1)
    training.restore(tmp_path / "c", fresh, again)
    assert again.state["steps"] == 3


def test_values_of_groups_keep_their_types_and_custom_keys(tmp_path: Path) -> None:
    model = net()
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam(
        [{"params": model.parameters(), "tag": ("a", 1), "when": None, "decay": {"from": 2}}], lr=rate, foreach=False
    )
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh = net(1)
    live = torch.tensor(0.5)
    again = torch.optim.Adam(fresh.parameters(), lr=live, foreach=False)
    training.restore(tmp_path / "c", fresh, again)
    group = again.param_groups[0]
    assert (group["tag"], group["when"], group["decay"]) == (("a", 1), None, {"from": 2})
    assert group["lr"] is live and live == 0.25, "compiled code holds the tensor"
    kept = torch.optim.Adam(fresh.parameters(), lr=0.125)
    training.restore(tmp_path / "c", fresh, kept, keep=("lr", "foreach"))
    assert kept.param_groups[0]["lr"] == 0.125


def test_parameters_stay_the_objects_and_the_memory_that_others_refer_to(tmp_path: Path) -> None:
    _saved(tmp_path, lambda tree: None)
    model, optimizer = _job(steps=1)
    before = [(id(p), p.data_ptr(), id(optimizer.state[p]["exp_avg"])) for p in model.parameters()]
    training.restore(tmp_path / "c", model, optimizer)
    assert before == [(id(p), p.data_ptr(), id(optimizer.state[p]["exp_avg"])) for p in model.parameters()]
    assert all(p is q for p, q in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))


def test_generators_go_on_where_they_stood(tmp_path: Path) -> None:
    import random

    model = net()
    tc.save(tmp_path / "c", training.state(model))
    draws = [(random.random(), np.random.rand(), float(torch.rand(()))) for _ in range(3)]
    training.restore(tmp_path / "c", net(9))
    assert draws == [(random.random(), np.random.rand(), float(torch.rand(()))) for _ in range(3)]


class Loader:
    """Gives each number once, from a queue that grows and shrinks."""

    def __init__(self) -> None:
        self.at, self.queue = 0, []

    def take(self) -> int:
        self.at += 1
        if self.at % 3 == 0:
            self.queue.append(self.at)
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "queue": self.queue}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.queue = state["at"], list(state["queue"])


def test_a_loader_neither_skips_nor_repeats_after_a_resume(tmp_path: Path) -> None:
    loader = Loader()
    seen = [loader.take() for _ in range(7)]
    tc.save(tmp_path / "c", training.state(net(), loader=loader))
    again = Loader()
    training.restore(tmp_path / "c", net(), loader=again)
    assert seen + [again.take() for _ in range(3)] == list(range(1, 11)) and again.queue == [3, 6, 9]


def test_extra_comes_back_or_is_filled(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ema = torch.arange(3.0)
    tc.save(tmp_path / "c", training.state(net(), extra={"step": 4, "ema": ema, "scaler": scaler, "loader": Loader()}))
    extra = training.restore(tmp_path / "c", net()).extra
    assert extra["step"] == 4 and torch.equal(extra["ema"], ema) and extra["scaler"]["scale"] == 8.0
    into = {"step": 0, "ema": torch.zeros(3), "scaler": torch.amp.GradScaler("cpu"), "loader": Loader()}
    address = into["ema"].data_ptr()
    training.restore(tmp_path / "c", net(), extra=into)
    assert into["step"] == 4 and into["ema"].data_ptr() == address and torch.equal(into["ema"], ema)
    assert into["scaler"].get_scale() == 8.0 and isinstance(into["loader"], Loader)


def test_several_schedulers_go_by_position_or_name(tmp_path: Path) -> None:
    model, optimizer = _job(steps=1)
    schedule = torch.optim.lr_scheduler

    def make(one: torch.optim.Optimizer) -> dict[str, Any]:
        parts = [schedule.LinearLR(one, total_iters=3), schedule.CosineAnnealingLR(one, 9)]
        return {"warm": schedule.SequentialLR(one, parts, [3]), "steps": schedule.MultiStepLR(one, [2, 5, 5])}

    schedules = make(optimizer)
    for _ in range(3):
        run(model, optimizer, 1)
        for one in schedules.values():
            one.step()
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=schedules))
    again = make(optimizer)
    training.restore(tmp_path / "c", model, optimizer, scheduler=again)
    for name, one in schedules.items():
        found, expected = again[name].state_dict(), one.state_dict()
        assert same_tensors(found, expected)
    with pytest.raises(tc.MismatchError, match=r"scheduler: .*'steps'"):
        training.restore(tmp_path / "c", model, optimizer, scheduler={"warm": again["warm"]})


def test_deferred_models_materialise_in_place(tmp_path: Path) -> None:
    _saved(tmp_path, lambda tree: None)
    expected, expected_optimizer = _job()
    training.restore(tmp_path / "c", expected, expected_optimizer)
    losses = run(expected, expected_optimizer, 2)
    with torch.device("meta"):
        model = net(1)
    optimizer = torch.optim.Adam(model.parameters())
    report = training.restore(tmp_path / "c", model, optimizer)
    assert set(report.materialised) == {f"model/{name}" for name in model.state_dict()}
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    assert run(model, optimizer, 2) == losses


def test_what_no_checkpoint_has_stays_on_meta_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tc.save(tmp_path / "c", {"model": {"1.kept": torch.ones(3), "1.weight": torch.ones(2)}})
    with torch.device("meta"):
        model = nn.ModuleDict({"1": checkpoint_wrapper(Counting())})
    report = training.restore(tmp_path / "c", model, rng=False, strict=False)
    assert report.materialised == ("model/1.weight", "model/1.kept")
    assert report.on_meta == ("model/1.cache",)
    assert "on meta     model/1.cache" in str(report)
    assert "model/1.cache" in caplog.text and "still on the meta device" in caplog.text
    lacking = {"model": {"1.kept": torch.ones(3)}}
    with torch.device("meta"):
        model = nn.ModuleDict({"1": Counting()})
    assert training.restore(lacking, model, rng=False, strict=False).on_meta == ("model/1.weight", "model/1.cache")


_PEAK = """
import sys, torch, treeckpt as tc
from torch import nn
from treeckpt import training
from treeckpt._io.comm.comm import SoloComm, thread_comms
def memory(name):  # of this process alone: ru_maxrss outlives exec
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
path, world = sys.argv[1], int(sys.argv[2])
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3)))
if world > 1:  # the last of several ranks; nobody else is needed, as a restore does not talk
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters())
before = memory("VmRSS")
report = training.restore(path, model, optimizer, rng=False, comm=thread_comms(world)[-1])
print(memory("VmHWM") - before)
weight, rows = tc.load(path, select="model/2.weight", comm=SoloComm())["model"]["2.weight"], 2048 // world
local = model[2].weight if world == 1 else model[2].weight.to_local()
assert len(report.materialised) == 6 and torch.equal(local, weight[-rows:])
"""


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_deferred_job_needs_the_size_of_its_shards_and_no_more(tmp_path: Path, world: int) -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones(()).expand_as(parameter)
    optimizer.step()
    size = 3 * sum(p.nbytes for p in model.parameters()) // world
    tc.save(tmp_path / "c", training.state(model, optimizer, rng=False))
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path / "c"), str(world)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    assert size <= peak + (8 << 20) and peak < size + (64 << 20), f"{peak / size:.2f} of what this rank holds"


def test_a_tree_that_was_loaded_is_restored_too(tmp_path: Path) -> None:
    _saved(tmp_path, lambda tree: None)
    one, two = _job(1), _job(2)
    training.restore(tmp_path / "c", *one)
    training.restore(tc.load(tmp_path / "c"), *two)
    assert same_tensors(one[0].state_dict(), two[0].state_dict())
    assert same_tensors(one[1].state_dict(), two[1].state_dict())
    three = _job(3)
    training.restore(training.state(*one), *three)
    assert same_tensors(one[1].state_dict(), three[1].state_dict())
    assert three[0].first.weight.data_ptr() != one[0].first.weight.data_ptr()


def test_casting_is_asked_for(tmp_path: Path) -> None:
    _saved(tmp_path, lambda tree: None)
    model = net(1).double()
    with pytest.raises(tc.MismatchError, match=r"model/first.weight: .*float64.*cast=True"):
        training.restore(tmp_path / "c", model)
    training.restore(tmp_path / "c", model, cast=True)
    assert torch.equal(model.first.weight.float(), tc.load(tmp_path / "c")["model"]["first.weight"])


@pytest.mark.parametrize("source", ["checkpoint", "tree"])
def test_a_fresh_optimizer_has_moments_of_the_dtype_that_its_parameters_were_cast_to(
    tmp_path: Path, source: str
) -> None:
    model = net().double()
    optimizer = torch.optim.Adam(model.parameters())
    _step_of(model, optimizer, torch.float64)
    tree = training.state(model, optimizer, rng=False, buffers="per_rank")
    tc.save(tmp_path / "c", tree)
    fresh = net(1).bfloat16()
    again = torch.optim.Adam(fresh.parameters())
    training.restore(tree if source == "tree" else tmp_path / "c", fresh, again, rng=False, cast=True)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(again.state[q]["exp_avg"], optimizer.state[p]["exp_avg"].bfloat16())
        assert again.state[q]["exp_avg_sq"].dtype == torch.bfloat16 and again.state[q]["step"].dtype == torch.float32
    _step_of(fresh, again, torch.bfloat16)


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter, dtype=dtype)
    optimizer.step()


def test_a_pattern_that_stands_for_two_arrays_does_not_hide_that_one_is_missing(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": torch.ones(6)})
    for pattern in (torch.zeros(6), np.zeros(6, np.float32), tc.ArraySpec((6,), "float32")):
        with pytest.raises(tc.MismatchError, match="missing in the checkpoint: b"):
            tc.load(tmp_path / "c", {"a": pattern, "b": pattern})
        found = tc.load(tmp_path / "c", {"a": pattern, "b": pattern}, strict=False)
        assert found["b"] is pattern


def test_the_work_grows_with_the_number_of_parameters_and_not_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved structure is walked once, and alike parameters of a fresh optimizer take one step for all."""
    from treeckpt.training import _optimizer_plan, _sources

    count = 300
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(count)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    optimizer.step()
    tc.save(tmp_path / "c", training.state(model, optimizer))
    keys_of, walked = _sources.keys_of, 0

    def counted(node: Any, path: str) -> Any:
        nonlocal walked
        found = keys_of(node, path)
        walked += len(found)
        return found

    monkeypatch.setattr(_sources, "keys_of", counted)
    expected_moments, steps = _optimizer_plan.expected_moments, []

    def stepped_once(*given: Any) -> Any:
        steps.append(given)
        return expected_moments(*given)

    monkeypatch.setattr(_optimizer_plan, "expected_moments", stepped_once)
    training.restore(tmp_path / "c", model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert 0 < walked < 10 * count and len(steps) == 1
