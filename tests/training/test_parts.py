"""Ranks that hold different parts of a model, some parameters on several: experts, stages that share a weight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt import training

from .jobs import same_tensors

EXPERTS = 4


class Mixture(nn.Module):
    """A trunk and experts; the rows of a batch go to them in turn. A part of it may lack some experts, or the trunk."""

    def __init__(self, experts: Sequence[int] = range(EXPERTS), seed: int = 0, *, trunk: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        if trunk:
            self.trunk = nn.Linear(5, 6)
        self.experts = nn.ModuleDict({str(e): nn.Linear(6, 3) for e in experts})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x).relu()
        return torch.cat([expert(hidden[n::EXPERTS]) for n, expert in enumerate(self.experts.values())])


class Job:
    """A model, its optimizer of two groups, and a scheduler of their rates."""

    def __init__(self, model: nn.Module, *, lr: float = 0.5) -> None:
        self.model = model
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        self.optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=lr)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self, first: int, steps: int) -> list[float]:
        losses: list[float] = []
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, 5, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    def save(self, path: Path, comm: Any = None) -> None:
        tree = training.state(self.model, self.optimizer, scheduler=self.scheduler, rng=False)
        tc.save(path, tree, comm=comm)

    def restore(self, path: Path, comm: Any = None, **options: Any) -> training.RestoreReport:
        given = {"scheduler": self.scheduler, "rng": False, "comm": comm, **options}
        return training.restore(path, self.model, self.optimizer, **given)

    def moments(self) -> dict[str, Any]:
        return {name: dict(self.optimizer.state[p]) for name, p in self.model.named_parameters()}


PARTS = {
    "experts": lambda rank, world: Mixture(range(rank, EXPERTS, world), seed=7),
    "stages": lambda rank, world: Mixture(range(rank - 1, EXPERTS, world - 1) if rank else [], trunk=not rank, seed=7),
}


@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_a_model_train_on_with_their_moments_in_any_world(tmp_path: Path, parts: str) -> None:
    whole = Job(Mixture())
    whole.train(0, 3)
    whole.save(tmp_path / "1")
    worlds = (1, 2, 4, 3)

    def act(comm: Any) -> Job:
        part = Job(PARTS[parts](comm.rank, comm.size), lr=0.125)
        report = part.restore(tmp_path / f"{worlds[worlds.index(comm.size) - 1]}", comm, strict="missing")
        assert report.missing == () and len(part.optimizer.state) == len(list(part.model.parameters()))
        part.save(tmp_path / f"{comm.size}", comm)
        return part

    for world in worlds[1:]:
        outcomes = on_ranks(world, act)
        assert errors_of(outcomes) == [None] * world
        for outcome in outcomes:
            expected = whole.moments()
            for name, moments in outcome.value.moments().items():
                assert same_tensors(moments, expected[name]), name
    again = Job(Mixture(seed=3), lr=0.125)
    report = again.restore(tmp_path / "3")
    assert (report.missing, report.unexpected) == ((), ())
    assert again.train(3, 3) == whole.train(3, 3)


def test_a_rank_that_trains_what_it_shares_under_another_rate_is_found_at_restore(tmp_path: Path) -> None:
    jobs = [Job(Mixture([rank]), lr=0.5 + rank) for rank in range(2)]  # threads share one generator
    assert errors_of(on_ranks(2, lambda comm: jobs[comm.rank].save(tmp_path / "c", comm))) == [None, None]
    with pytest.raises(tc.MismatchError, match=r"param_groups/lr: .*0.5 for trunk\.\w+, found 1.5 for trunk\.\w+"):
        Job(Mixture([0, 1])).restore(tmp_path / "c")


class Stage(nn.Module):
    """The first or last stage of a language model, which share the embedding."""

    def __init__(self, last: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 4)
        self.add_module("norm" if last else "inner", nn.Linear(4, 4))


def test_stages_that_share_an_embedding_save_its_moments_once(tmp_path: Path) -> None:
    models = [[Stage(last, seed) for last in (False, True)] for seed in (0, 5)]

    def act(comm: Any) -> None:
        model, fresh = models[0][comm.rank], models[1][comm.rank]
        optimizer, again = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, fresh))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        tc.save(tmp_path / "c", training.state(model, optimizer, rng=False), comm=comm)
        training.restore(tmp_path / "c", fresh, again, rng=False, strict="missing", comm=comm)
        assert same_tensors(again.state_dict(), optimizer.state_dict())
        assert same_tensors(fresh.state_dict(), model.state_dict())

    assert errors_of(on_ranks(2, act)) == [None, None]
    assert "optimizer/embedding.weight/exp_avg" in tc.inspect(tmp_path / "c").by_path


@pytest.mark.parametrize("options", [{"strict": "missing"}], ids=str)
def test_a_stage_that_asks_for_more_than_was_saved_is_refused_and_unchanged(tmp_path: Path, options: Any) -> None:
    Job(Mixture([0, 1])).save(tmp_path / "c")
    larger = Job(Mixture([1, 2], seed=3))
    before = {name: tensor.clone() for name, tensor in larger.model.state_dict().items()}
    with pytest.raises(tc.MismatchError, match=r"missing in the checkpoint: model/experts\.2\.weight") as caught:
        larger.restore(tmp_path / "c", **options)
    assert "not here" not in str(caught.value) and "experts.0" not in str(caught.value)
    assert same_tensors(larger.model.state_dict(), before) and not larger.optimizer.state
    with pytest.raises(tc.MismatchError, match="Pass strict='missing' if one is a part of the other"):
        Job(Mixture([1])).restore(tmp_path / "c")


class Parts:
    """Four layers in several parts, each with an optimizer and a scheduler of its own, as virtual stages have them."""

    def __init__(self, parts: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(2, 2) for _ in range(4)]
        self.models = [nn.Module() for _ in range(parts)]
        for number, layer in enumerate(layers):
            self.models[number * parts // 4].add_module(f"{number}", layer)
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1 + seed) for model in self.models]
        self.schedulers: list[Any] = [
            torch.optim.lr_scheduler.SequentialLR(
                one,
                [torch.optim.lr_scheduler.ExponentialLR(one, 0.5), torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1)],
                [4],
            )
            for one in self.optimizers
        ]

    def step(self) -> None:
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            scheduler.step()

    def rates(self) -> set[tuple[float, int]]:
        return {(one.get_last_lr()[0], one.last_epoch) for one in self.schedulers} | {
            (group["lr"], self.schedulers[0].last_epoch) for one in self.optimizers for group in one.param_groups
        }


@pytest.mark.parametrize(("saved", "here"), [(2, 2), (2, 1), (1, 2), (4, 2), (1, 1)])
@pytest.mark.parametrize("form", ["list", "one"])
def test_schedulers_of_parts_go_on_in_another_number_of_parts(tmp_path: Path, saved: int, here: int, form: str) -> None:
    """With two parts, all were refused: the groups of each were looked for in the last part."""
    old, new = Parts(saved), Parts(here, seed=1)
    old.step()
    tc.save(tmp_path / "c", training.state(old.models, old.optimizers, scheduler=old.schedulers, rng=False))
    given: Any = new.schedulers[0] if form == "one" and here == 1 else new.schedulers
    report = training.restore(tmp_path / "c", new.models, new.optimizers, scheduler=given, rng=False)
    assert report.ignored == () and new.rates() == old.rates() == {(0.05, 1)}
    old.step(), new.step()
    assert new.rates() == old.rates() == {(0.025, 2)}
    assert same_tensors(*({k: v for m in parts.models for k, v in m.state_dict().items()} for parts in (old, new)))


class RotaryStage(nn.Module):
    """One layer of several, beside a table that each stage has."""

    def __init__(self, number: int, *, persistent: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3)})
        self.register_buffer("rotary", torch.arange(3.0), persistent=persistent)


def test_a_buffer_that_two_parts_on_a_rank_have_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError) as refused:
        training.state([RotaryStage(0), RotaryStage(1)], rng=False)
    assert (refused.value.path, refused.value.found) == ("rotary", "a buffer of two parts on this rank")
    assert "persistent=False in all but one" in refused.value.hint and "{'first': ..., 'second':" in refused.value.hint
    stages, fresh = ([RotaryStage(0), RotaryStage(1, persistent=False)] for _ in range(2))
    stages[0].rotary += 5
    tc.save(tmp_path / "c", training.state(stages, rng=False))
    training.restore(tmp_path / "c", fresh, rng=False)
    assert all(same_tensors(a.state_dict(), b.state_dict()) for a, b in zip(stages, fresh, strict=True))
    named, others = ({"first": RotaryStage(0), "second": RotaryStage(1)} for _ in range(2))
    named["second"].rotary += 7
    tc.save(tmp_path / "named", training.state(named, rng=False))
    training.restore(tmp_path / "named", others, rng=False)
    assert all(same_tensors(named[name].state_dict(), others[name].state_dict()) for name in named)


def test_a_restore_finds_the_optimizer_of_each_scheduler_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    module = sys.modules["treeckpt.training._restore"]
    find = module.optimizer_of
    monkeypatch.setattr(module, "optimizer_of", lambda one, lives: asked.append(one) or find(one, lives))
    for kinds in (list, lambda found: dict(zip("ab", found, strict=True))):
        old, new = Parts(2), Parts(2, seed=1)
        old.step()
        tc.save(
            tmp_path / "c",
            training.state(old.models, old.optimizers, scheduler=kinds(old.schedulers), rng=False),
            overwrite=True,
        )
        asked.clear()
        given: Any = {"scheduler": kinds(new.schedulers), "rng": False}
        training.restore(tmp_path / "c", new.models, new.optimizers, **given)
        assert asked == new.schedulers and new.rates() == old.rates()


def test_parts_whose_schedules_differ_keep_each_its_own_and_no_other_number_takes_them(tmp_path: Path) -> None:
    old, new = Parts(2), Parts(2, seed=1)
    old.step()
    old.schedulers[1].step()
    tc.save(tmp_path / "c", training.state(old.models, old.optimizers, scheduler=old.schedulers, rng=False))
    training.restore(tmp_path / "c", new.models, new.optimizers, scheduler=new.schedulers, rng=False)
    assert [one.last_epoch for one in new.schedulers] == [1, 2]
    whole = Parts(1, seed=1)
    with pytest.raises(tc.MismatchError, match=r"scheduler: expected schedulers \[0\], found \[0, 1\] in the"):
        given: Any = {"scheduler": whole.schedulers, "keep": ("lr", "initial_lr"), "rng": False}
        training.restore(tmp_path / "c", whole.models, whole.optimizers, **given)


@pytest.mark.parametrize("saved", ["one", "dict"])
def test_one_scheduler_and_a_dict_of_them_are_told_apart_before_anything_changes(tmp_path: Path, saved: str) -> None:
    """The model was filled, and then a `KeyError` of torch was raised."""
    old, new = Parts(1), Parts(1, seed=1)
    one, several = ({"one": job.schedulers[0], "dict": {"a": job.schedulers[0]}} for job in (old, new))
    tc.save(tmp_path / "c", training.state(old.models, old.optimizers, scheduler=one[saved], rng=False))
    before = {name: tensor.clone() for name, tensor in new.models[0].state_dict().items()}
    found = "found one in the checkpoint" if saved == "one" else r"expected one scheduler, found \['a'\]"
    with pytest.raises(tc.MismatchError, match=rf"scheduler: .*{found}.*Give them as they were saved"):
        other = several["dict" if saved == "one" else "one"]
        training.restore(tmp_path / "c", new.models, new.optimizers, scheduler=other, rng=False)
    assert same_tensors(new.models[0].state_dict(), before)


def test_buffers_of_each_rank_may_have_other_shapes(tmp_path: Path) -> None:
    def queue(rank: int, value: float) -> nn.Module:
        made = nn.Linear(2, 2, bias=False)
        nn.init.ones_(made.weight)
        made.register_buffer("seen", torch.full((2 + rank,), value))
        return made

    def act(comm: Any) -> torch.Tensor:
        tree = training.state(queue(comm.rank, 1.0 + comm.rank), rng=False, buffers="per_rank")
        tc.save(tmp_path / "c", tree, comm=comm)
        model = queue(comm.rank, 0.0)
        training.restore(tmp_path / "c", model, rng=False, comm=comm)
        return model.seen

    found = [outcome.value.tolist() for outcome in on_ranks(3, act)]
    assert found == [[1.0] * 2, [2.0] * 3, [3.0] * 4]


def test_experts_of_one_name_on_each_rank_are_refused_however_large(tmp_path: Path) -> None:
    """Expert parallelism written by hand: one of them would be saved, or a mixture of both."""

    def act(comm: Any, *, same: bool) -> None:
        model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(300, 300, bias=False)])})
        rng = torch.Generator().manual_seed(0 if same else comm.rank)
        nn.init.normal_(model["experts"][0].weight, generator=rng)
        tc.save(tmp_path / "c", training.state(model, rng=False), comm=comm, overwrite=True)

    for error in errors_of(on_ranks(2, lambda comm: act(comm, same=False))):
        assert isinstance(error, tc.MismatchError) and error.path == "model/experts.0.weight", error
    assert not any(errors_of(on_ranks(2, lambda comm: act(comm, same=True))))
