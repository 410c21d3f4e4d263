"""Training goes on from files of other programs: state dicts of models, and of optimizers, straight from the files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.optim.swa_utils
from safetensors.torch import save_file
from torch import nn

import treeckpt as tc
from tests.helpers.hfai_parts import write_parts
from tests.helpers.torch_optimizers import OPTIMIZERS, torch_job
from tests.training.jobs import net, run, same_tensors, stepped
from treeckpt import training


def _saved(model: torch.nn.Module) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_state_dict_alone_is_put_under_model(tmp_path: Path) -> None:
    model = net(1)
    save_file(_saved(model), tmp_path / "model.safetensors")
    torch.save(_saved(model), tmp_path / "model.pt")
    for name in ("model.safetensors", "model.pt"):
        fresh = net(2)
        report = training.restore(tmp_path / name, fresh, under="model")
        assert same_tensors(fresh.state_dict(), model.state_dict()) and not report.missing
    fresh = net(2)
    training.restore(torch.load(tmp_path / "model.pt"), fresh, under="model")
    assert same_tensors(fresh.state_dict(), model.state_dict())


def test_rules_see_the_names_of_the_files(tmp_path: Path) -> None:
    model = net(1)
    save_file({f"hub.{name}": tensor for name, tensor in _saved(model).items()}, tmp_path / "model.safetensors")
    torch.save({"state_dict": _saved(model), "epoch": 4}, tmp_path / "run.ckpt")
    for name, options in (
        ("model.safetensors", {"under": "model", "rename": {"hub.*": "*"}}),
        ("run.ckpt", {"from_root": True, "rename": {"state_dict": "model"}}),
        ("run.ckpt", {"from_root": True, "transforms": "state_dict/* -> model/*"}),
    ):
        fresh = net(2)
        training.restore(tmp_path / name, fresh, **options)
        assert same_tensors(fresh.state_dict(), model.state_dict())


def test_parts_of_a_model_at_another_place_are_left_out_by_their_new_names(tmp_path: Path) -> None:
    model, ema = net(1), net(2)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer, extra={"ema": ema.state_dict()}))
    options: Any = {"from_root": True, "rename": {"model": "trained", "extra/ema": "model"}, "rng": False}
    fresh = net(3)
    began, kept = _saved(fresh), torch.optim.AdamW(fresh.parameters())
    training.restore(tmp_path / "c", fresh, kept, exclude="model/last.*", **options)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, (began if name.startswith("last.") else ema.state_dict())[name]), name
    moments = {name for name, one in fresh.named_parameters() if one in kept.state}
    assert moments == {"first.weight", "first.bias", "norm.weight", "norm.bias"}, "they follow exclude"
    for glob in ("trained/last.*", "extra/ema/last.*"):
        with pytest.raises(tc.MismatchError, match=r"names that rules give|found one that means trained/"):
            training.restore(tmp_path / "c", fresh, exclude=glob, **options)


def test_an_error_says_which_names_there_are(tmp_path: Path) -> None:
    save_file({f"hub.{name}": tensor for name, tensor in _saved(net(1)).items()}, tmp_path / "model.safetensors")
    with pytest.raises(tc.MismatchError, match=r"there are model/hub\.\S+, model/hub\."):
        training.restore(tmp_path / "model.safetensors", net(2), under="model", rename={"x.*": "*"})
    with pytest.raises(tc.MismatchError, match=r"there are hub\."):
        training.restore(tmp_path / "model.safetensors", net(2), from_root=True, rename={"x": "model"})
    with pytest.raises(tc.MismatchError, match=r"`model` at its root.*under='model'"):
        training.restore(tmp_path / "model.safetensors", net(2))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("name", "optim"), [("net", "opt"), ("model", "optim")])
@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_state_dicts_of_other_names_are_restored_as_the_error_says(
    tmp_path: Path, way: str, name: str, optim: str
) -> None:
    model = net(1)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    tree = {name: model.state_dict(), optim: optimizer.state_dict()}
    torch.save(tree, tmp_path / "old") if way == "torch" else dcp.save(tree, checkpoint_id=tmp_path / "old")
    fresh = net(2)
    theirs = torch.optim.AdamW(fresh.parameters())
    known = name == "model"
    says = r"pass rename={'optim': 'optimizer'}, from_root=True" if known else r"save\(new, {'model': old\[...\], 'opt"
    with pytest.raises(tc.MismatchError, match=says):
        training.restore(tmp_path / "old", fresh, theirs)
    if known:
        training.restore(tmp_path / "old", fresh, theirs, rename={"optim": "optimizer"}, from_root=True)
    else:
        old = tc.load(tmp_path / "old")
        tc.save(tmp_path / "new", {"model": old[name], "optimizer": old[optim]})
        training.restore(tmp_path / "new", fresh, theirs)
    assert same_tensors(fresh.state_dict(), model.state_dict())
    for mine, other in zip(fresh.parameters(), model.parameters(), strict=True):
        assert same_tensors(theirs.state[mine], optimizer.state[other])


def test_state_dicts_in_memory_are_sent_to_their_file_and_restored_as_the_error_says(tmp_path: Path) -> None:
    model, fresh = net(1), net(2)
    optimizer, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(fresh.parameters())
    stepped(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")
    trees = tc.load(tmp_path / "old.pt"), torch.load(tmp_path / "old.pt")
    for tree in trees:
        with pytest.raises(tc.MismatchError, match=r"a state dict.*Give the path of the file.*save\(new, tree\)"):
            training.restore(tree, fresh, theirs)
    assert not theirs.state
    tc.save(tmp_path / "new", trees[1])
    for path in ("old.pt", "new"):
        fresh = net(2)
        theirs = torch.optim.AdamW(fresh.parameters())
        training.restore(tmp_path / path, fresh, theirs)
        for mine, other in zip(fresh.parameters(), model.parameters(), strict=True):
            assert same_tensors(theirs.state[mine], optimizer.state[other])


# names that wrappers have changed -------------------------------------------------------------------------------------
class _Migrated(nn.Linear):
    """A module whose load code depends on the version that was saved."""

    _version = 3

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


compiled_by_nothing = partial(torch.compile, backend="eager")
"""The same names, without a compiler that takes seconds for each module."""


def _compiled(seed: int) -> nn.Module:
    model = net(seed)
    model.first = compiled_by_nothing(model.first)  # pyright: ignore[reportAttributeAccessIssue]
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_the_steps_of_wrappers_in_saved_names_are_taken_out(tmp_path: Path) -> None:
    """As `module.` in what a job under DistributedDataParallel gave to torch.save."""
    for number, wrap in enumerate((nn.DataParallel, compiled_by_nothing, lambda model: nn.DataParallel(_compiled(1)))):
        model: Any = wrap(net(1))
        optimizer = torch.optim.AdamW(model.named_parameters())
        stepped(model, optimizer)
        path = tmp_path / f"{number}"
        path.mkdir()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "both.pt")
        torch.save(model.state_dict(), path / "model.pt")
        tc.save(path / "ours", {"model": model.state_dict()})
        for name, options in (("both.pt", {}), ("model.pt", {"under": "model"}), ("ours", {})):
            fresh = net(2)
            theirs = torch.optim.AdamW(fresh.parameters())
            report = training.restore(path / name, fresh, *([theirs] if name == "both.pt" else []), **options)
            assert report.renamed and not report.missing and not report.unexpected
            assert same_tensors(list(fresh.state_dict().values()), list(model.state_dict().values()))
            if name == "both.pt":
                mine, other = (list(each.state.values()) for each in (theirs, optimizer))
                assert same_tensors(mine, other)
        fresh = nn.DataParallel(net(2))
        training.restore(path / "both.pt", fresh)
        assert same_tensors(list(fresh.state_dict().values()), list(model.state_dict().values()))


@pytest.mark.parametrize("frozen", ["last", ""])
def test_names_change_of_parameters_that_have_no_moments_too(tmp_path: Path, frozen: str) -> None:
    model = nn.DataParallel(net(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    if frozen:
        model.module.get_submodule(frozen).requires_grad_(False)
        stepped(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    old = nn.ModuleDict({"old": model.module})
    tc.save(tmp_path / "ours", training.state(old, optimizer))
    for name, options in (("c.pt", {}), ("ours", {"rename": {"model/old.*": "model/*"}, "rng": False})):
        fresh = net(2)
        theirs = torch.optim.AdamW(fresh.parameters())
        report = training.restore(tmp_path / name, fresh, theirs, **options)
        assert theirs.param_groups[0]["lr"] == 0.5 and not report.missing
        for mine, saved in zip(fresh.parameters(), model.parameters(), strict=True):
            assert same_tensors(theirs.state.get(mine, {}), optimizer.state.get(saved, {}))


def test_a_child_of_a_wrappers_name_keeps_it(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(net(1))
    for number, model in enumerate((average, nn.DataParallel(average))):
        torch.save({"model": model.state_dict()}, tmp_path / f"{number}.pt")
        fresh = torch.optim.swa_utils.AveragedModel(net(2))
        report = training.restore(tmp_path / f"{number}.pt", fresh)
        assert same_tensors(fresh.state_dict(), average.state_dict()) and bool(report.renamed) == (model is not average)
    twice = {f"{step}.{name}": value for step in ("module", "_orig_mod") for name, value in _saved(net(1)).items()}
    torch.save({"model": twice}, tmp_path / "twice.pt")
    with pytest.raises(tc.TreeckptError, match=r"first\.weight"):
        training.restore(tmp_path / "twice.pt", net(2))


def test_rules_and_globs_come_before_the_steps_of_wrappers(tmp_path: Path) -> None:
    model = nn.DataParallel(net(1))
    torch.save({"model": model.state_dict()}, tmp_path / "a.pt")
    fresh = net(2)
    began = _saved(fresh)
    training.restore(tmp_path / "a.pt", fresh, rename={"model/module.*": "model/*"})
    assert same_tensors(fresh.state_dict(), model.module.state_dict())
    fresh = net(2)
    training.restore(tmp_path / "a.pt", fresh, exclude="model/last.*")
    assert torch.equal(fresh.last.weight, began["last.weight"])
    assert torch.equal(fresh.first.weight, model.module.first.weight)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "run.ckpt")
    other = net(2)
    training.restore(tmp_path / "run.ckpt", other, from_root=True, rename={"state_dict": "model"})
    assert same_tensors(other.state_dict(), model.module.state_dict())
    fresh.add_module("new", nn.Linear(2, 2))
    with pytest.raises(tc.MismatchError, match=r"2 missing in the checkpoint: model/new\.weight, model/new\.bias"):
        training.restore(tmp_path / "a.pt", fresh)
    report = training.restore(tmp_path / "a.pt", nn.ModuleDict({"first": net(2).first}), strict="missing")
    assert "model/last.weight" in report.unexpected


def test_versions_of_modules_follow_the_names_of_wrappers(tmp_path: Path) -> None:
    saved = nn.DataParallel(nn.Sequential(_Migrated(3, 3)))
    torch.save({"model": saved.state_dict()}, tmp_path / "a.pt")
    fresh = nn.Sequential(_Migrated(3, 3))
    training.restore(tmp_path / "a.pt", fresh)
    assert fresh[0].seen == 3 and same_tensors(fresh.state_dict(), saved.module.state_dict())


def test_each_of_several_sources_has_its_own_names(tmp_path: Path) -> None:
    model, other = nn.DataParallel(net(1)), net(3)
    torch.save({"model": model.state_dict()}, tmp_path / "a.pt")
    torch.save({"model": {"last.weight": other.last.weight.detach()}}, tmp_path / "b.pt")
    fresh = net(2)
    training.restore([tmp_path / "a.pt", tmp_path / "b.pt"], fresh)
    assert torch.equal(fresh.last.weight, other.last.weight)
    assert torch.equal(fresh.first.weight, model.module.first.weight)


def test_an_average_at_another_place_loses_the_steps_of_its_wrapper(tmp_path: Path) -> None:
    model, average = net(1), torch.optim.swa_utils.AveragedModel(net(2))
    tc.save(tmp_path / "c", training.state(model, extra={"ema": average.state_dict()}))
    rename = {"model": "trained", "extra/ema": "model"}
    options: Any = {"from_root": True, "rng": False, "strict": "missing"}
    for source, given in ((tmp_path / "c", {"rename": rename}), (tc.From(tmp_path / "c", rename=rename), {})):
        fresh = net(3)
        training.restore(source, fresh, **given, **options)
        assert same_tensors(fresh.state_dict(), average.module.state_dict())


# several sources ------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_dicts_of_optimizers_are_read_from_each_of_several_sources(tmp_path: Path) -> None:
    model, tuned = nn.DataParallel(net(1)), net(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    stepped(model, optimizer)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(both, tmp_path / "base.pt")
    dcp.save({"app": {"model": both["model"], "optim": both["optimizer"]}}, checkpoint_id=tmp_path / "app")
    other = torch.optim.AdamW([tuned.last.weight])
    torch.save({"model": {"last.weight": tuned.last.weight.detach()}, "optimizer": other.state_dict()}, tmp_path / "b")
    fresh = net(2)
    theirs = torch.optim.AdamW(fresh.parameters())
    with pytest.raises(tc.MismatchError) as caught:
        training.restore([tmp_path / "app"], fresh, theirs)
    rename = {"app/model": "model", "app/optim": "optimizer"}
    assert f"give its tc.From rename={rename}, and pass from_root=True" in str(caught.value)
    app = tc.From(tmp_path / "app", rename=rename)
    for bank in (
        [tmp_path / "base.pt", tc.From(tmp_path / "b", select="model/*"), tc.From(tmp_path / "none", optional=True)],
        [app, tc.From(tmp_path / "b", exclude="optimizer")],
    ):
        fresh = net(2)
        theirs = torch.optim.AdamW(fresh.parameters())
        training.restore(bank, fresh, theirs, from_root=True)
        assert torch.equal(fresh.last.weight, tuned.last.weight) and theirs.param_groups[0]["lr"] == 0.5
        assert torch.equal(fresh.first.weight, model.module.first.weight)
        for mine, saved in zip(fresh.parameters(), model.parameters(), strict=True):
            assert same_tensors(theirs.state[mine], optimizer.state[saved])


def test_a_training_state_below_a_name_is_restored_as_the_error_says(tmp_path: Path) -> None:
    model, fresh = net(1), net(2)
    tc.save(tmp_path / "c", {"run": training.state(model, torch.optim.AdamW(model.parameters()))})
    with pytest.raises(tc.MismatchError, match=r"pass rename={'run': ''}, from_root=True"):
        training.restore(tmp_path / "c", fresh)
    training.restore(tmp_path / "c", fresh, torch.optim.AdamW(fresh.parameters()), rename={"run": ""}, from_root=True)
    assert same_tensors(fresh.state_dict(), model.state_dict())


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(numbers))


def test_names_from_the_root_fit_beside_ties_that_are_dropped_and_state_of_each_rank(tmp_path: Path) -> None:
    model = _Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.arange(6)).square().mean().backward()
    optimizer.step()
    app = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    tc.save(tmp_path / "c", {"app": app, "rng": tc.PerRank({"x": 1})})
    rules = ["app/model/embed.weight -> _", "app/optim -> optimizer", "app/model -> model"]
    fresh = _Tied()
    theirs = torch.optim.AdamW(fresh.parameters())
    report = training.restore(tmp_path / "c", fresh, theirs, transforms=rules, from_root=True, rng=False)
    assert torch.equal(fresh.embed.weight, model.embed.weight) and theirs.param_groups[0]["lr"] == 0.5
    assert same_tensors(theirs.state[fresh.embed.weight], optimizer.state[model.embed.weight])
    assert report.dropped == ("app/model/embed.weight",)
    assert ("app/model/head.weight", "model/head.weight") in report.renamed


def test_state_dicts_of_several_optimizers_are_named_where_one_is_given(tmp_path: Path) -> None:
    model = net(1)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    torch.save({"model": [model.state_dict()] * 2, "optimizer": [optimizer.state_dict()] * 2}, tmp_path / "two.pt")
    first, second = net(2), net(3)
    one, other = torch.optim.AdamW(first.parameters()), torch.optim.AdamW(second.parameters())
    with pytest.raises(tc.MismatchError, match=r"found those of 0, 1.*in a dict: {'0': ...}"):
        training.restore(tmp_path / "two.pt", first, one)
    training.restore(tmp_path / "two.pt", {"0": first, "1": second}, {"0": one, "1": other})
    assert same_tensors(second.state_dict(), model.state_dict())


# optimizers -----------------------------------------------------------------------------------------------------------
def _write(way: str, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Saves a training as other programs do, and converts it where the way says so."""
    if way.startswith("torch"):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, path / "old.pt")
        source = path / "old.pt"
    elif way.startswith("hfai"):
        states = {"model": [dict(model.state_dict())], "optimizer": [optimizer.state_dict()]}
        write_parts(path / "parts", states, {"epoch": 3}, 2)
        source = path / "parts"
    else:
        plain = way.startswith("dcp of numbers")
        pair = (model.state_dict(), optimizer.state_dict()) if plain else _state_dicts(way, model, optimizer)
        tree = {"model": pair[0], "optimizer": pair[1]}
        dcp.save(tree, checkpoint_id=path / "dcp", no_dist=True)
        source = path / "dcp"
    if way.endswith("converted"):
        tc.convert.convert(source, path / "ours")
        return path / "ours"
    return source


def _state_dicts(way: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict="flat" in way))


WAYS = ("torch", "torch converted", "dcp", "dcp converted", "dcp of numbers", "dcp flat", "hfai", "hfai converted")
QUICK = [(name, "torch") for name in OPTIMIZERS] + [("AdamW", way) for way in WAYS[1:]]
SLOW = [pytest.param(name, way, marks=pytest.mark.slow) for name in OPTIMIZERS for way in WAYS[1:] if name != "AdamW"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "way"), QUICK + SLOW)
def test_every_optimizer_goes_on_with_the_same_losses(tmp_path: Path, name: str, way: str) -> None:
    if name == "LBFGS" and way in ("dcp", "dcp converted", "dcp flat"):
        pytest.skip("get_state_dict needs an optimizer that steps without a closure")
    model, optimizer = torch_job(name, 1)
    stepped(model, optimizer, 3)
    source = _write(way, tmp_path, model, optimizer)
    fresh, theirs = torch_job(name, 2)
    report = training.restore(source, fresh, theirs)
    assert not report.missing and not report.unexpected, report
    beside = {"torch": ("step",), "hfai": ("epoch",)}  # what stands at the root beside the state dicts
    assert report.ignored == beside.get(way.split()[0], ()), report
    losses = []
    for pair in ((model, optimizer), (fresh, theirs)):
        torch.manual_seed(7)
        losses.append(run(*pair, 3))
    assert losses[0] == losses[1]


def test_names_that_rules_change_are_followed_by_the_state_of_numbers(tmp_path: Path) -> None:
    model, optimizer = torch_job("AdamW", 1)
    stepped(model, optimizer)
    renamed = {f"old.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": renamed, "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")
    fresh, theirs = torch_job("AdamW", 2)
    training.restore(tmp_path / "old.pt", fresh, theirs, rename={"model/old.*": "model/*"})
    assert same_tensors(theirs.state_dict(), optimizer.state_dict())
    fresh, theirs = torch_job("AdamW", 2)
    parts = tc.rules.Split("model/old.last.weight", ("model/last.weight", "model/other"), 0, (2, 1))
    rules = [parts, "model/other -> _", "model/old.* -> model/*"]
    with pytest.raises(tc.MismatchError, match=r"parameters under other names at most"):
        training.restore(tmp_path / "old.pt", fresh, theirs, transforms=rules, strict=False)


def test_numbers_of_other_groups_and_of_names_are_told_apart(tmp_path: Path) -> None:
    model = net(1)
    named = torch.optim.AdamW(reversed(list(model.named_parameters())))
    stepped(model, named)
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "named.pt")
    fresh = net(2)
    theirs = torch.optim.AdamW(fresh.parameters())
    training.restore(tmp_path / "named.pt", fresh, theirs)
    first = dict(model.named_parameters())["first.weight"]
    mine = theirs.state[dict(fresh.named_parameters())["first.weight"]]
    assert same_tensors(mine, named.state[first]), "names that are saved beside the numbers count"
    other = torch.optim.AdamW(list(model.parameters())[:2])
    stepped(model, other)
    torch.save({"model": model.state_dict(), "optimizer": other.state_dict()}, tmp_path / "other.pt")
    with pytest.raises(tc.MismatchError, match=r"groups of 6 parameters.*found groups of 2"):
        training.restore(tmp_path / "other.pt", fresh, theirs)
