"""A training state restored from several checkpoints: each gives its part, later ones win, moments included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt import rules as R
from treeckpt._loading.match import LoadOptions
from treeckpt._loading.run_load import on_versions
from treeckpt.convert._contents import open_source


class Net(nn.Module):
    """A body, a head, and generators that each rank has of its own."""

    def __init__(self, head: str = "head") -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.add_module(head, nn.Linear(3, 2))


def trained(seed: int, *, head: str = "head", steps: int = 1) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    net = Net(head)
    optimizer = torch.optim.AdamW(net.parameters(), lr=seed / 10)
    for _ in range(steps):
        getattr(net, head)(net.body(torch.randn(4, 3))).sum().backward()
        optimizer.step()
    return net, optimizer


def saved(path: Path, seed: int, **options: Any) -> tuple[Net, torch.optim.AdamW]:
    net, optimizer = trained(seed, **options)
    tc.save(path, tc.training.state(net, optimizer, rng=True, extra={"from": seed}), step=seed)
    return net, optimizer


def parts(net: Net, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    found = dict(net.named_parameters())
    for name, parameter in net.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: value.detach() for name, value in found.items()}


def test_each_checkpoint_gives_its_part_and_later_ones_win(tmp_path: Path) -> None:
    base, tuned = saved(tmp_path / "base", 1), saved(tmp_path / "tuned", 2, steps=3)
    net, optimizer = trained(5)
    report = tc.training.restore(
        [tmp_path / "base", tc.From(tmp_path / "tuned", select=["model/head.*", "optimizer/head.*", "rng"])],
        net,
        optimizer,
    )
    found, first, second = parts(net, optimizer), parts(*base), parts(*tuned)
    assert len(found) == 16
    for name, value in found.items():
        assert torch.equal(value, (second if name.startswith("head") else first)[name]), name
    assert optimizer.param_groups[0]["lr"] == 0.1 and report.extra == {"from": 1}
    assert report.step == 1 and not report.missing and not report.unexpected
    after = torch.get_rng_state()
    tc.training.restore(tmp_path / "tuned", net)
    assert torch.equal(after, torch.get_rng_state())


def test_rules_of_one_checkpoint_see_all_of_its_names_from_the_root(tmp_path: Path) -> None:
    base, (ema, _) = saved(tmp_path / "base", 1), trained(2)
    tc.save(tmp_path / "other", {"state_dict": dict(ema.state_dict())})
    net, optimizer = trained(5)
    bank: Any = [
        tmp_path / "base",
        tc.From(tmp_path / "other", rename={"state_dict": "model"}, exclude="model/head.*"),
    ]
    tc.training.restore(bank, net, optimizer, from_root=True)
    found, first, second = parts(net, optimizer), parts(*base), dict(ema.named_parameters())
    for name, value in found.items():
        assert torch.equal(value, (second if name in ("body.weight", "body.bias") else first)[name]), name


def test_a_whole_checkpoint_behind_another_is_all_that_is_taken(tmp_path: Path) -> None:
    saved(tmp_path / "base", 1)
    tuned = saved(tmp_path / "tuned", 2, steps=2)
    net, optimizer = trained(5)
    report = tc.training.restore(tc.Bank([tmp_path / "base", tmp_path / "tuned"]), net, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(parts(net, optimizer).values(), parts(*tuned).values(), strict=True))
    assert (report.step, report.extra) == (2, {"from": 2})


def test_rules_of_one_checkpoint_are_for_it_alone_and_its_moments_follow(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", 1)
    old = saved(tmp_path / "old", 2, head="classifier")
    net, optimizer = trained(5)
    bank = [
        tc.From(tmp_path / "base", exclude=["model/head.*", "optimizer/head.*"]),
        tc.From(
            tmp_path / "old",
            rename={"model/classifier.*": "model/head.*"},
            transforms=R.Permute("model/head.weight", (0, 1)),
            select=["model/head.*", "optimizer/head.*"],
        ),
    ]
    report = tc.training.restore(bank, net, optimizer)
    found, first, second = parts(net, optimizer), parts(*base), parts(*old)
    for name, value in found.items():
        there = first[name] if name.startswith("body") else second[name.replace("head", "classifier")]
        assert torch.equal(value, there), name
    assert ("model/classifier.bias", "model/head.bias") in report.renamed


def test_what_is_not_selected_stays_and_what_nobody_gives_is_missing(tmp_path: Path) -> None:
    base, _ = saved(tmp_path / "base", 1)
    net, _ = trained(5)
    before = net.head.weight.detach().clone()
    bank = [tmp_path / "base", tc.From(tmp_path / "none", optional=True)]
    tc.training.restore(bank, net, rng=False, exclude="model/head.*")
    assert torch.equal(net.body.weight, base.body.weight) and torch.equal(net.head.weight, before)
    part = tc.From(tmp_path / "base", select="model/body.*")
    with pytest.raises(tc.MismatchError, match=r"model/head\.weight"):
        tc.training.restore(part, net, rng=False)
    assert tc.training.restore(part, net, rng=False, strict=False).missing == ("model/head.weight", "model/head.bias")


def test_generators_are_those_of_the_last_that_has_them_rank_by_rank(tmp_path: Path) -> None:
    net = Net()

    def save(comm: Any) -> None:
        for name, seed in (("base", 10), ("last", 20)):
            state = {"model": net.state_dict(), "rng": tc.PerRank({"x": seed + comm.rank, name: 0})}
            tc.save(tmp_path / name, state, comm=comm)

    def own(comm: Any) -> Any:
        return on_versions(
            [tmp_path / "base", tmp_path / "last"],
            lambda opened: open_source(opened, comm, LoadOptions()).own("rng", "error"),
        )

    assert errors_of(on_ranks(2, save)) == [None, None]
    outcomes = on_ranks(2, own)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.value for outcome in outcomes] == [{"x": 20, "last": 0}, {"x": 21, "last": 0}]


@pytest.mark.parametrize(
    ("source", "options", "kind", "words"),
    [
        ([], {}, tc.TreeckptError, "one checkpoint at least"),
        (["none"], {}, tc.CheckpointNotFound, "none"),
        ([tc.From("none", optional=True)], {}, tc.CheckpointNotFound, "one checkpoint at least"),
        (["base"], {"rename": {"a": "b"}}, tc.TreeckptError, "rules on each checkpoint"),
        (["plain"], {}, tc.MismatchError, "with `model` at its root"),
        (["base", 7], {}, tc.TreeckptError, "found int"),
        (7, {}, tc.MismatchError, "a bank of them"),
    ],
)
def test_banks_that_are_none_are_refused_and_nothing_changes(
    tmp_path: Path, monkeypatch: Any, source: Any, options: Any, kind: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(Path("base"), 1)
    tc.save("plain", {"w": torch.ones(2)})
    net, optimizer = trained(5)
    before = {name: value.clone() for name, value in parts(net, optimizer).items()}
    with pytest.raises(kind, match=words):
        tc.training.restore(source, net, optimizer, **options)
    assert all(torch.equal(value, before[name]) for name, value in parts(net, optimizer).items())


def test_names_of_one_tensor_may_come_from_two_checkpoints_that_have_equal_bytes(tmp_path: Path) -> None:
    def tied(value: float) -> nn.ModuleDict:
        model = nn.ModuleDict({"embedding": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
        model["head"].weight = model["embedding"].weight
        nn.init.constant_(model["head"].weight, value)
        return model

    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        tc.save(tmp_path / name, tc.training.state(tied(value), rng=False))
    model = tied(0.0)
    tc.training.restore([tmp_path / "a", tc.From(tmp_path / "b", select="model/head.*")], model, rng=False)
    assert model["head"].weight.eq(1).all() and model["head"].weight is model["embedding"].weight
    with pytest.raises(tc.MismatchError, match=r"model/head.weight: expected the bytes of model/embedding.weight"):
        tc.training.restore([tmp_path / "a", tc.From(tmp_path / "c", select="model/head.*")], model, rng=False)
    assert model["head"].weight.eq(1).all()
