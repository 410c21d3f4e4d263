"""Training states under every arrangement, restored into every other one, and trained on."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import treeckpt as tc
from tests.training.fused_jobs import job as fused_job
from tests.training.fused_jobs import step as fused_step
from tests.training.odd_optimizers import KINDS
from treeckpt import training
from treeckpt.training._optimizers import optimizer_chain

from . import hfai_cases
from .layouts import bits, distribute, mesh_of
from .registry import Case, Rank
from .training_jobs import Job, Net, arrange, arrangements, close, get_losses, put_losses, train, whole_state

__all__ = ["PHASES"]

PHASES: dict[str, tuple[int, dict[str, Case]]] = {"four train": (4, {}), "two train": (2, {})}


def case(phase: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        PHASES[phase][1][function.__name__.replace("_", " ")] = function
        return function

    return register


@dataclasses.dataclass
class Loader:
    """Gives row numbers; each rank has a stream of its own."""

    position: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@case("four train")
def every_arrangement_is_saved(here: Rank) -> None:
    for name in arrangements(4):
        job = arrange(name, 4)
        train(job, 0, 3)
        loader = Loader(100 + here.rank)
        torch.manual_seed(40 + here.rank)
        tc.save(
            here.directory / f"job {name}",
            training.state(*job.given, scheduler=job.scheduler, loader=loader, extra={"step": 3}),
            step=3,
        )
        oracle = whole_state(job)
        losses = train(job, 3, 3)
        if here.rank == 0:
            torch.save(oracle, here.directory / f"job {name}.pt")
            put_losses(here.directory / f"job {name}.json", losses)
    dist.barrier()
    expected = get_losses(here.directory / "job plain.json")
    for name in arrangements(4):
        close(get_losses(here.directory / f"job {name}.json"), expected, name)


@case("four train")
def arrangements_save_the_same_tree(here: Rank) -> None:
    paths = {name: set(tc.inspect(here.directory / f"job {name}").by_path) for name in arrangements(4)}
    assert paths["plain"] == paths["ddp"] == paths["fsdp"] == paths["hsdp"] == paths["fsdp tp"]
    assert {"model/up.weight", "optimizer/up.weight/exp_avg", "param_groups/members/down.weight/up.weight"} <= paths[
        "plain"
    ]


@case("four train")
def training_goes_on_from_every_arrangement_in_every_other_one(here: Rank) -> None:
    _restore_all(here, arrangements(4), fallback=tc.Fallback(per_rank="error"))


@case("two train")
def training_goes_on_with_fewer_ranks(here: Rank) -> None:
    _restore_all(here, arrangements(4), fallback=tc.Fallback(per_rank="take"))


def _restore_all(here: Rank, sources: list[str], **options: Any) -> None:
    for source in sources:
        oracle = torch.load(here.directory / f"job {source}.pt")
        expected = get_losses(here.directory / f"job {source}.json")
        for target in arrangements(here.world):
            job, loader = arrange(target, here.world, seed=9), Loader()
            report = training.restore(
                here.directory / f"job {source}", *job.given, scheduler=job.scheduler, loader=loader, **options
            )
            assert (report.step, report.missing, report.unexpected) == (3, (), ())
            assert report.extra == {"step": 3} and loader.position == 100 + here.rank
            state = whole_state(job)
            assert set(state) == set(oracle) and "up.weight:exp_avg_sq" in state
            for name in oracle:
                assert bits(state[name]) == bits(oracle[name]), f"{source} -> {target}: {name}"
            assert torch.initial_seed() == 40 + here.rank
            close(train(job, 3, 3), expected, f"{source} -> {target}")


@case("four train")
def a_deferred_model_takes_its_shards(here: Rank) -> None:
    for source in ("plain", "fsdp tp"):
        for target in ("fsdp", "hsdp", "fsdp tp"):
            job = arrange(target, 4, meta=True)
            report = training.restore(here.directory / f"job {source}", *job.given, scheduler=job.scheduler, rng=False)
            assert "model/up.weight" in report.materialised
            assert all(isinstance(p, DTensor) and not p.is_meta for p in job.model.parameters())
            close(train(job, 3, 3), get_losses(here.directory / f"job {source}.json"), f"{source} -> meta {target}")


@case("four train")
def restoring_keeps_parameters_and_their_memory(here: Rank) -> None:
    job = arrange("fsdp", 4, seed=3)
    train(job, 0, 1)
    parameters = list(job.model.parameters())
    addresses = [p.to_local().data_ptr() for p in parameters]
    moments = [job.optimizer.state[p]["exp_avg"] for p in parameters]
    training.restore(here.directory / "job plain", *job.given, scheduler=job.scheduler, rng=False)
    assert all(a is b for a, b in zip(parameters, job.model.parameters(), strict=True))
    assert addresses == [p.to_local().data_ptr() for p in parameters]
    assert all(m is job.optimizer.state[p]["exp_avg"] for m, p in zip(moments, parameters, strict=True))


@case("four train")
def a_tree_in_memory_is_restored_without_a_checkpoint(here: Rank) -> None:
    first, second = arrange("fsdp tp", 4), arrange("fsdp tp", 4, seed=5)
    train(first, 0, 2)
    tree = training.state(*first.given, scheduler=first.scheduler, buffers="per_rank")
    training.restore(tree, *second.given, scheduler=second.scheduler)
    expected, found = whole_state(first), whole_state(second)
    assert set(found) == set(expected) and all(bits(found[name]) == bits(expected[name]) for name in expected)
    assert train(second, 2, 2) == train(first, 2, 2)
    try:
        training.restore(tree, *arrange("plain", 4).given, rng=False)
    except tc.LayoutError as error:
        assert "this rank holds" in error.expected
    else:
        raise AssertionError("a rank has no more than its shard of the tree")


class Batches(nn.Module):
    """Batch statistics that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


@case("four train")
def batch_statistics_are_those_of_the_first_rank_or_of_each(here: Rank) -> None:
    for mode in ("replicated", "per_rank"):
        for wrapped in (True, False):
            model: nn.Module = Batches()
            model.norm.running_mean.fill_(here.rank)
            module = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False) if wrapped else model
            path = here.directory / f"{mode} statistics {wrapped}"
            # DDP broadcasts buffers when it is made
            model.norm.running_mean.fill_(here.rank)
            if mode == "replicated" and not wrapped:
                _refuses(lambda p=path, m=module: tc.save(p, training.state(m, buffers="replicated")), "running_mean")
                continue
            tc.save(path, training.state(module, buffers=mode))
            fresh = Batches()
            training.restore(path, fresh)
            assert fresh.norm.running_mean.tolist() == [here.rank if mode == "per_rank" else 0] * 3


def _refuses(act: Callable[[], object], *words: str) -> None:
    try:
        act()
    except tc.TreeckptError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"nothing was refused, of {words}")


@case("two train")
def a_model_that_has_just_been_evaluated_is_saved_and_restored(here: Rank) -> None:
    """FSDP2 leaves the root's parameters whole after a forward."""
    jobs = [arrange("fsdp", 2, seed=seed) for seed in (0, 4)]
    train(jobs[0], 0, 1)
    for job in jobs:
        with torch.no_grad():
            job.model(torch.ones(1, 10, dtype=torch.float64))
    path = here.directory / "evaluated"
    tc.save(path, training.state(*jobs[0].given, rng=False))
    training.restore(path, *jobs[1].given, rng=False)
    expected, found = (whole_state(job) for job in jobs)
    assert set(found) == set(expected) and all(bits(found[name]) == bits(expected[name]) for name in expected)


class Factored(torch.optim.Optimizer):
    """Keeps sums of the squares of rows and columns, plain on every rank, whatever its parameters are laid out as."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            grad = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
            state, dims = self.state[parameter], range(grad.ndim)
            for d in dims:
                state.setdefault(f"sums {d}", torch.zeros_like(grad.sum([o for o in dims if o != d])))
                state[f"sums {d}"].add_(grad.square().sum([o for o in dims if o != d]))
            step = grad / (1 + state["sums 0"].sum().sqrt()) * self.param_groups[0]["lr"]
            parameter.sub_(distribute(step, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else step)  # fmt: skip  # noqa: E501


@case("four train")
def factored_moments_beside_parameters_in_shards_go_on_in_the_same_arrangement(here: Rank) -> None:
    """Nothing tells that they are the same on all ranks, as sums of a rank's part are not: they are each rank's own."""

    def job(name: str, seed: int) -> Job:
        made = arrange(name, 4, seed=seed)
        return dataclasses.replace(made, optimizer=Factored(made.model.parameters()), scheduler=None)

    def go_on(one: Job) -> list[float]:
        return [_step(one, number) for number in (2, 3)]

    first = job("fsdp", 0)
    _step(first, 0)
    tc.save(here.directory / "factored", training.state(*first.given, rng=False))
    again, plain = job("fsdp", 5), job("plain", 6)
    training.restore(here.directory / "factored", *again.given, rng=False)
    for p, q in zip(first.model.parameters(), again.model.parameters(), strict=True):
        found, expected = again.optimizer.state[q], first.optimizer.state[p]
        assert found.keys() == expected.keys() and all(type(t) is torch.Tensor for t in found.values())
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert go_on(again) == go_on(first)
    _refuses(lambda: training.restore(here.directory / "factored", *plain.given, rng=False), "expected a moment of")


def _step(job: Job, number: int) -> float:
    job.optimizer.zero_grad()
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    loss = job.model(x).square().mean()
    loss.backward()
    job.optimizer.step()
    return loss.item()


@case("two train")
def a_moment_of_a_rank_s_part_alone_is_that_rank_s_own(here: Rank) -> None:
    """The shapes are the same on both ranks; as replicas they would be refused."""
    model = nn.Linear(256, 256, bias=False)
    fully_shard(model, mesh=mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local, weight = torch.full((128, 256), float(here.rank)), model.weight
    optimizer.state[weight] = {"local": local}
    tc.save(here.directory / "own parts", training.state(model, optimizer, rng=False))
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    training.restore(here.directory / "own parts", model, again, rng=False)
    assert type(again.state[weight]["local"]) is torch.Tensor and torch.equal(again.state[weight]["local"], local)
    optimizer.state[weight] = {"local": DTensor.from_local(local, weight.device_mesh, weight.placements)}
    tc.save(here.directory / "parts", training.state(model, optimizer, rng=False))
    found = tc.load(here.directory / "parts", select="optimizer")["optimizer"]["weight"]["local"]
    assert found.shape == (256, 256) and found[:, 0].tolist() == [0] * 128 + [1] * 128


class Blockwise(torch.optim.Optimizer):
    """Momentum in 8 bits, with a scale for each block of the local part: the state of a shard has no other layout."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in (p for group in self.param_groups for p in group["params"]):
            own, grad = (one.to_local() if isinstance(one, DTensor) else one for one in (p, p.grad))
            flat, state = grad.reshape(-1).float(), self.state[p]
            if not state:
                state["codes"] = torch.zeros(flat.numel(), dtype=torch.int8)
                state["scales"], state["step"] = torch.zeros(-(-flat.numel() // 16)), torch.tensor(0.0)
            width = state["scales"].repeat_interleave(16)[: flat.numel()]
            momentum = 0.9 * state["codes"].float() * width + flat
            blocks = nn.functional.pad(momentum, (0, -momentum.numel() % 16)).view(-1, 16)
            scales = (blocks.abs().amax(1) if len(blocks) else torch.zeros(0)) / 127
            codes = torch.round(blocks / scales.clamp_min(1e-12)[:, None]).view(-1)[: flat.numel()]
            state["codes"], state["scales"] = codes.to(torch.int8), scales
            state["step"] += 1
            own.sub_(momentum.view(own.shape).to(own.dtype), alpha=0.1)


@case("four train")
def codes_and_scales_of_shards_go_on_in_the_same_arrangement_and_are_refused_in_others(here: Rank) -> None:
    def job(name: str, seed: int) -> Job:
        made = arrange(name, 4, seed=seed)
        return dataclasses.replace(made, optimizer=Blockwise(made.model.parameters()), scheduler=None)

    names = ["fsdp", "hsdp", "fsdp tp"]
    for name in names:
        first = job(name, 0)
        for number in range(2):
            _step(first, number)
        tc.save(here.directory / f"blockwise {name}", training.state(*first.given, rng=False))
        losses = [_step(first, number) for number in (2, 3)]
        for again in (job(name, 5), first):
            training.restore(here.directory / f"blockwise {name}", *again.given, rng=False)
            assert [_step(again, number) for number in (2, 3)] == losses, name
    for name in names:
        for other in [*names, "plain", "ddp"]:
            if other != name:
                one = job(other, 6)
                before = [p.detach().clone() for p in one.model.parameters()]
                _refuses(
                    lambda name=name, one=one: training.restore(
                        here.directory / f"blockwise {name}", *one.given, rng=False
                    ),
                    "codes: expected a moment of the part",
                    "optimizer=None",
                )
                assert all(map(_same_part, before, one.model.parameters())), (name, other)


def _same_part(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (one.to_local() if isinstance(one, DTensor) else one for one in (a, b))
    return torch.equal(a, b)


@case("two train")
def own_state_follows_the_policy_when_the_world_changed(here: Rank) -> None:
    path = here.directory / "job ddp"

    def merge(states: list[Any], rank: int, world: int) -> Any:
        assert (len(states), world) == (4, 2)
        return {"position": sum(state["position"] for state in states[rank::world])}

    def restore(per_rank: Any = None, **options: Any) -> Loader:
        job, loader = arrange("ddp", 2), Loader()
        fallback = tc.Fallback(per_rank=per_rank)
        training.restore(path, *job.given, scheduler=job.scheduler, loader=loader, fallback=fallback, **options)
        return loader

    _refuses(restore, "world of 4", "per_rank")
    assert restore(per_rank="take").position == 100 + here.rank
    loader = restore(per_rank={"loader": merge, "rng": "take"})
    assert loader.position == (100 + here.rank) + (102 + here.rank)
    assert torch.initial_seed() == 40 + here.rank
    torch.manual_seed(7)
    assert restore(per_rank={"loader": merge}).position == loader.position
    assert torch.initial_seed() == 40 + here.rank, "fewer ranks continue with their own generators"
    _refuses(lambda: restore(per_rank={"loader": merge, "rng": "error"}), "rng")
    _refuses(lambda: restore(rng=False), "loader")
    _refuses(lambda: restore(per_rank="guess"), "guess")
    _refuses(lambda: training.restore(here.directory / "per_rank statistics True", Batches(), rng=False), "buffers")


def _stage(full: Net, rank: int) -> nn.Module:
    """Half of the model, under the names that the whole gives its parts."""
    stage = nn.Module()
    for name in (("up",), ("norm", "down"))[rank]:
        stage.add_module(name, getattr(full, name))
    return stage


class Experts(nn.Module):
    """A trunk, and one layer for each of the given experts."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"{e}": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)) for e in experts})
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))


@case("four train")
def experts_of_pairs_of_ranks_and_a_trunk_of_all_keep_their_moments(here: Rank) -> None:
    """Each pair of ranks has an expert of its own, cut over the two; the trunk is cut over all four.

    Of statistics, the first rank of the pair, or of all, speaks for those that have the module.
    """
    pairs = [mesh_of(2, first=first) for first in (0, 2)]
    number = here.rank // 2

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Experts((0, 1))
        del model.experts[f"{1 - number}"]
        fully_shard(model.experts[f"{number}"], mesh=pairs[number])
        fully_shard(model.trunk, mesh=mesh_of(4))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

    model, optimizer = make(0)
    for seed, parameter in enumerate(model.parameters()):
        full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.grad = distribute(full, parameter.device_mesh, parameter.placements)
    optimizer.step()
    for name, buffer in model.named_buffers():
        if name.endswith("mean"):
            buffer.fill_(here.rank)
    path = here.directory / "experts"
    tc.save(path, training.state(model, optimizer, rng=False))
    fresh, again = make(1)
    training.restore(path, fresh, again, rng=False, strict="missing")
    whole = Experts((0, 1))
    plain = torch.optim.AdamW(whole.parameters())
    report = training.restore(path, whole, plain, rng=False)
    assert (report.missing, report.unexpected) == ((), ())
    expected = whole_state(Job(model, optimizer, None))
    assert set(expected) > {f"experts.{number}.0.bias:exp_avg", "trunk.1.weight:step"}
    means = {name: set(buffer.tolist()) for name, buffer in whole.named_buffers() if name.endswith("mean")}
    assert means == {"experts.0.1.running_mean": {0}, "experts.1.1.running_mean": {2}, "trunk.1.running_mean": {0}}
    for found in (whole_state(Job(fresh, again, None)), whole_state(Job(whole, plain, None))):
        assert all(bits(found[name]) == bits(expected[name]) for name in expected)
    assert plain.param_groups[0]["lr"] == 0.1


@case("two train")
def pipeline_stages_are_parts_of_one_state(here: Rank) -> None:
    job = arrange("plain", 2)
    stage = _stage(job.model, here.rank)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01)
    for one in (optimizer, job.optimizer):
        for parameter in (stage if one is optimizer else job.model).parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        one.step()
        break
    path = here.directory / "stages"
    tc.save(path, training.state([stage], [optimizer]))
    fresh = _stage(Net().double(), here.rank)
    again = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    _refuses(lambda: training.restore(path, [fresh], [again]), "not here", "strict='missing'")
    training.restore(path, [fresh], [again], strict="missing")
    for (name, a), b in zip(stage.named_parameters(), fresh.parameters(), strict=True):
        assert bits(a) == bits(b), name
        assert bits(optimizer.state[a]["exp_avg"]) == bits(again.state[b]["exp_avg"]), name
    mine = training.state([_stage(Net().double(), here.rank)], rng=False)
    _refuses(lambda: tc.load(path, mine), "not asked for", 'strict="missing"')
    tc.load_into(path, mine, strict="missing")
    for name, tensor in stage.state_dict().items():
        assert bits(mine["model"][name]) == bits(tensor), name
    assert again.param_groups[0]["lr"] == 0.01
    whole = Net().double()
    all_of_it = torch.optim.AdamW(whole.parameters())
    report = training.restore(path, whole, all_of_it, rng=False, strict=False)
    assert report.missing == ("model/seen",)
    assert set(tc.inspect(path).by_path) >= {"optimizer/up.weight/exp_avg", "optimizer/down.weight/exp_avg"}
    part = dict(stage.named_parameters())
    for name, parameter in whole.named_parameters():
        if name in part:
            assert bits(parameter) == bits(part[name])


@case("four train")
def state_dicts_of_an_optimizer_s_own_follow_every_arrangement(here: Rank) -> None:
    for kind in ("by place beside what it wraps", "entries of its own", "no optimizer by its class"):

        def make(name: str, seed: int, kind: str = kind) -> Job:
            job = arrange(name, 4, seed=seed)
            job.optimizer = KINDS[kind](job.optimizer.param_groups[0]["params"])
            job.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer_chain(job.optimizer)[-1], 0.9)
            return job

        names = ("plain", "fsdp", "fsdp tp", "ddp")
        path = here.directory / "own state dicts" / kind
        for name in names:
            job = make(name, 0)
            train(job, 0, 3)
            tc.save(path / name, training.state(*job.given, scheduler=job.scheduler))
            expected = train(job, 3, 3)
        for source, target in [("fsdp", "plain"), ("plain", "fsdp tp"), ("fsdp tp", "fsdp"), ("fsdp", "ddp")]:
            job = make(target, 4)
            report = training.restore(path / source, *job.given, scheduler=job.scheduler)
            assert (report.missing, report.unexpected, report.ignored) == ((), (), ())
            close(train(job, 3, 3), expected, f"{kind}: {source} -> {target}")


@case("two train")
def a_fresh_registered_optimizer_is_laid_out_as_the_one_that_was_saved(here: Rank) -> None:
    for kind in ("other dtypes, nested", "by place beside what it wraps", "a rate that is a tensor, nested"):

        def make(seed: int, kind: str = kind) -> tuple[nn.Module, Any, tc.Manager]:
            torch.manual_seed(seed)
            model = nn.Linear(6, 5)
            fully_shard(model, mesh=mesh_of(2))
            manager = tc.Manager(here.directory / "registered" / kind, background=False)
            optimizer = KINDS[kind](model.parameters())
            manager.register("model", model)
            manager.register("optimizer", optimizer)
            return model, optimizer, manager

        def losses(model: nn.Module, optimizer: Any) -> list[float]:
            torch.manual_seed(9)
            return [float(optimizer.step(lambda: _backward(optimizer, model))) for _ in range(3)]

        model, optimizer, manager = make(0)
        losses(model, optimizer)
        manager.save(1)
        expected = [(type(leaf), leaf.dtype) for leaf in _tensors(optimizer)], losses(model, optimizer)
        model, optimizer, manager = make(1)
        manager.restore()
        assert ([(type(leaf), leaf.dtype) for leaf in _tensors(optimizer)], losses(model, optimizer)) == expected


def _backward(optimizer: Any, model: nn.Module) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.randn(3, 6)).square().mean()
    loss.backward()
    return loss


def _tensors(optimizer: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(optimizer.state_dict()) if isinstance(x, torch.Tensor)]


@case("two train")
def parts_of_a_fused_matrix_are_saved_and_loaded_under_every_arrangement(here: Rank) -> None:
    for turned in (False, True):
        path = here.directory / f"fused {turned}"
        plain, optimizer = fused_job(0, turned=turned)
        fused_step(plain, optimizer)
        tc.save(path / "plain", training.state(plain, optimizer))
        sharded, again = fused_job(1, turned=turned, wrap=lambda model: fully_shard(model, mesh=mesh_of(2)))
        training.restore(path / "plain", sharded, again)
        tc.save(path / "fsdp", training.state(sharded, again))
        last, renewed = fused_job(2, turned=turned)
        training.restore(path / "fsdp", last, renewed)
        assert bits(last[0].wqkv.weight) == bits(plain[0].wqkv.weight)
        moment = renewed.state[last[0].wqkv.weight]["exp_avg"]
        assert bits(moment) == bits(optimizer.state[plain[0].wqkv.weight]["exp_avg"])


class _Rows(nn.Module):
    """This rank's rows of a table, which its state dict has as a ShardedTensor of all rows, as torchrec does."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), fill + dist.get_rank()))
        self.register_state_dict_post_hook(_to_sharded)
        self.register_load_state_dict_pre_hook(_from_sharded)


def _to_sharded(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    from torch.distributed._shard import sharded_tensor

    local = sharded_tensor.Shard.from_tensor_and_offsets(
        state[f"{prefix}weight"].detach(), [3 * dist.get_rank(), 0], dist.get_rank()
    )
    state[f"{prefix}weight"] = sharded_tensor.init_from_local_shards([local], 6, 2)


def _from_sharded(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].local_shards()[0].tensor


@case("two train")
def a_model_whose_state_dict_has_sharded_tensors_is_saved_and_restored(here: Rank) -> None:
    for buffers in ("replicated", "per_rank"):
        tc.save(here.directory / buffers, training.state(nn.ModuleDict({"t": _Rows(5.0)}), buffers=buffers))
        fresh = nn.ModuleDict({"t": _Rows(0.0)})
        training.restore(here.directory / buffers, fresh)
        assert fresh["t"].weight.tolist() == [[5.0 + here.rank] * 2] * 3
    whole = nn.ModuleDict({"t": nn.Embedding(6, 2)})
    training.restore(here.directory / "replicated", whole)
    assert whole["t"].weight[:, 0].tolist() == [5.0] * 3 + [6.0] * 3
    tc.save(here.directory / "whole", training.state(whole))
    training.restore(here.directory / "whole", fresh := nn.ModuleDict({"t": _Rows(0.0)}))
    assert fresh["t"].weight.tolist() == [[5.0 + here.rank] * 2] * 3
    optimizer = torch.optim.Adagrad(fresh.parameters())
    for p in fresh.parameters():
        p.grad = torch.full_like(p, 1.0 + here.rank)
    optimizer.step()
    tc.save(here.directory / "adagrad", training.state(fresh, optimizer))
    training.restore(here.directory / "adagrad", fresh, again := torch.optim.Adagrad(fresh.parameters()))
    assert bits(again.state[fresh["t"].weight]["sum"]) == bits(optimizer.state[fresh["t"].weight]["sum"])
    training.restore(here.directory / "adagrad", whole, again := torch.optim.Adagrad(whole.parameters()))
    assert again.state[whole["t"].weight]["sum"][:, 0].tolist() == [1.0] * 3 + [4.0] * 3


class _Scaled(nn.Linear):
    """Whose older weights are smaller by a factor of 100."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") in (None, 1):
            state[f"{prefix}weight"] *= 100
        self.given = state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


class _Old(nn.Linear):
    pass


class _Listed(nn.Module):
    """Keeps a list, which every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}seen"] = self.seen

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = state.pop(f"{prefix}seen", self.seen)


@case("four train")
def modules_with_load_code_take_their_shares_under_every_arrangement(here: Rank) -> None:
    def make(kind: type, seed: int, *, wrap: str, meta: bool = False) -> nn.Module:
        torch.manual_seed(seed)
        with torch.device("meta" if meta else "cpu"):
            model: Any = nn.Sequential(nn.Linear(4, 6), kind(6, 5), _Listed())
        if wrap == "fsdp":
            fully_shard(model[1], mesh=mesh_of(4))
            return fully_shard(model, mesh=mesh_of(4))
        return nn.parallel.DistributedDataParallel(model) if wrap == "ddp" else model

    def whole(model: nn.Module) -> list[torch.Tensor]:
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]

    for kind, factor in ((_Scaled, 1), (_Old, 100)):
        expected = whole(make(kind, 0, wrap="plain"))
        expected[2] = expected[2] * factor
        for saved in ("plain", "ddp", "fsdp"):
            path = here.directory / f"code {kind.__name__} {saved}"
            model: Any = make(kind, 0, wrap=saved)
            getattr(model, "module", model)[2].seen = [torch.ones(2), torch.zeros(1)]
            tc.save(path, training.state(model))
            for wrap in ("plain", "ddp", "fsdp", "fsdp meta"):
                name, _, meta = wrap.partition(" ")
                fresh: Any = make(_Scaled, 1, wrap=name, meta=bool(meta))
                training.restore(path, fresh, read=tc.ReadOptions(once=wrap == "ddp"))
                inner = getattr(fresh, "module", fresh)
                assert [one.tolist() for one in inner[2].seen] == [[1, 1], [0]]
                assert isinstance(inner[1].given, DTensor) == (name == "fsdp"), "a share on each rank"
                found = whole(fresh)
                assert all(map(torch.equal, found, expected)), (kind, saved, wrap)


@case("two train")
def attributes_that_a_module_saves_are_those_of_the_first_rank_or_each_one_s(here: Rank) -> None:
    def make(count: int, *, wrapped: bool) -> tuple[nn.Module, _Listed]:
        model = nn.ModuleDict({"layer": nn.Linear(2, 2), "seen": _Listed()})
        model["seen"].seen = [torch.full((2,), float(here.rank))] * count
        return nn.parallel.DistributedDataParallel(model) if wrapped else model, model["seen"]

    for buffers in ("replicated", "first", "per_rank"):
        path = here.directory / f"attributes {buffers}"
        model, _ = make(2, wrapped=buffers == "replicated")
        tc.save(path, training.state(model, buffers=buffers))
        fresh, listed = make(0, wrapped=True)
        training.restore(path, fresh)
        expected = here.rank if buffers == "per_rank" else 0
        assert [one.tolist() for one in listed.seen] == [[expected] * 2] * 2, buffers
    model, _ = make(2, wrapped=False)
    _refuses(lambda: tc.save(here.directory / "differ", training.state(model)), "seen.seen")


@case("two train")
def optimizer_state_that_is_split_over_ranks_is_one(here: Rank) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    job = arrange("ddp", 2)
    job.optimizer = ZeroRedundancyOptimizer(job.model.parameters(), torch.optim.AdamW, lr=0.02)
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: 0.9**step)
    train(job, 0, 2)
    tc.save(here.directory / "zero", training.state(*job.given, scheduler=job.scheduler))
    expected = train(job, 2, 2)
    plain = arrange("plain", 2, seed=4)
    plain.optimizer = torch.optim.AdamW(plain.model.parameters(), lr=0.5)
    plain.scheduler = torch.optim.lr_scheduler.LambdaLR(plain.optimizer, lambda step: 0.9**step)
    training.restore(here.directory / "zero", *plain.given, scheduler=plain.scheduler)
    close(train(plain, 2, 2), expected, "zero -> plain")
    again = arrange("ddp", 2, seed=4)
    again.optimizer = ZeroRedundancyOptimizer(again.model.parameters(), torch.optim.AdamW, lr=0.5)
    again.scheduler = torch.optim.lr_scheduler.LambdaLR(again.optimizer, lambda step: 0.9**step)
    training.restore(here.directory / "zero", *again.given, scheduler=again.scheduler)
    close(train(again, 2, 2), expected, "zero -> zero")


@case("two train")
def what_a_checkpoint_has_no_state_for_has_none_after_a_rollback(here: Rank) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for name in arrangements(2):
        job = arrange(name, 2)
        for parameter in job.model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.ndim == 2 else None
        job.optimizer.step()
        path = here.directory / f"back {name}"
        tc.save(path, training.state(*job.given, rng=False))
        saved = whole_state(job)
        train(job, 0, 2)
        report = training.restore(path, *job.given, rng=False)
        assert set(report.cleared) == {f"optimizer/{one}" for one in ("up.bias", "norm.weight", "norm.bias")}, name
        found = whole_state(job)
        assert found.keys() == saved.keys() and all(bits(found[one]) == bits(saved[one]) for one in saved), name
    for other in arrangements(2):
        job = arrange(other, 2, seed=3)
        train(job, 0, 1)
        training.restore(path, *job.given, rng=False)
        found = whole_state(job)
        assert found.keys() == saved.keys() and all(bits(found[one]) == bits(saved[one]) for one in saved), other
    split = arrange("ddp", 2)
    split.optimizer = ZeroRedundancyOptimizer(split.model.parameters(), torch.optim.AdamW, lr=0.02)
    tc.save(here.directory / "back zero", training.state(*split.given, rng=False))
    split.scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(split.model.parameters()), 1)
    train(split, 0, 1)
    mine: Any = split.optimizer
    assert mine.optim.state
    training.restore(here.directory / "back zero", *split.given, rng=False)
    assert not mine.optim.state


@case("two train")
def a_stage_that_trains_later_goes_back(here: Rank) -> None:
    stage = _stage(Net().double(), here.rank)
    optimizer = torch.optim.AdamW(stage.parameters())

    def step() -> None:
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    if here.rank == 0:
        step()
    tc.save(here.directory / "late stage", training.state([stage], [optimizer], rng=False))
    step()
    report = training.restore(here.directory / "late stage", [stage], [optimizer], rng=False, strict="missing")
    assert bool(optimizer.state) == (here.rank == 0) and bool(report.cleared) == (here.rank == 1)


for _phase, _cases in (("two train", hfai_cases.TWO), ("four train", hfai_cases.FOUR)):
    for _one in _cases:
        case(_phase)(_one)


@case("four train")
def ranks_resume_one_step_past_a_broken_one(here: Rank) -> None:
    """What only rank 3 can see, a changed byte of what it alone reads, makes all ranks take the step before."""
    run = here.directory / "resumed"

    def start(name: str, seed: int) -> tuple[Job, tc.Manager, dict[str, int]]:
        job, seen = arrange(name, 4, seed=seed), {"steps": 0}
        manager = tc.Manager(run, background=False, keep=None)
        manager.register("seen", seen)
        return job, manager, seen

    job, manager, seen = start("fsdp", 0)
    assert manager.resume(*job.given, scheduler=job.scheduler) is None and manager.count == 0
    for step in (1, 2):
        train(job, step - 1, 1)
        seen["steps"] = step
        manager.save(step, training.state(*job.given, scheduler=job.scheduler))
        if step == 1:
            oracle = whole_state(job)
    if here.rank == 0:
        [path] = (run / "step_00000002").glob("shard-00003-*")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    for name in ("fsdp", "plain"):
        again, fresh, state = start(name, 5)
        report = fresh.resume(*again.given, scheduler=again.scheduler)
        assert report is not None and (report.step, fresh.count, state) == (1, 1, {"steps": 1})
        assert len(report.passed_over) == 1 and "step_00000002" in report.passed_over[0], report.passed_over
        found = whole_state(again)
        assert all(bits(found[name]) == bits(oracle[name]) for name in oracle)
    again, fresh, state = start("fsdp", 5)
    opened_steps: list[object] = []
    for _ in range(2):
        with contextlib.suppress(tc.CorruptError), fresh.open() as opened:
            assert opened is not None
            opened_steps.append(opened.step)
            opened.restore(*again.given, scheduler=again.scheduler, rng=False)
            opened.restore_rng()
    assert (opened_steps, fresh.count, state) == ([2, 1], 1, {"steps": 1})
    found = whole_state(again)
    assert all(bits(found[name]) == bits(oracle[name]) for name in oracle)


@case("two train")
def a_request_of_one_rank_has_both_save(here: Rank) -> None:
    saved: list[int] = []
    with tc.Manager(here.directory / "requested", background=False) as manager:
        manager.save_on_signal(())
        for step in range(1, 12):
            if here.rank == 1 and step == 5:
                threading.Thread(target=manager.request_save).start()
            if manager.should_save(step):
                manager.save(step, {"step": step})
                saved.append(step)
            dist.barrier()
        assert manager.steps() == saved and len(saved) == 1 and saved[0] >= 5


@case("two train")
def whose_buffers_are_saved_is_chosen(here: Rank) -> None:
    """Batch statistics of plain replicas differ: refused as they are, rank 0's with "first", each one's "per_rank"."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    mean = model.get_buffer("1.running_mean").fill_(here.rank + 1.0)
    path = here.directory / "buffers"
    for buffers in ("replicated", "same"):
        _refuses(lambda buffers=buffers: tc.save(path, training.state(model, buffers=buffers)), "1.running_mean")
    tc.save(path, training.state(model, buffers="first"))
    mean.fill_(-1)
    training.restore(path, model)
    assert mean.tolist() == [1.0] * 4, mean
    wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    mean.fill_(here.rank + 3.0)
    _refuses(lambda: tc.save(path, training.state(wrapped, buffers="same"), overwrite=True), "1.running_mean")
    training.save(path, wrapped, buffers="first")
    assert tc.load(path)["model"]["0"]["1.running_mean"].tolist() == [3.0] * 4


@case("two train")
def an_average_of_a_model_in_shards_is_restored_and_loads_into_a_plain_model(here: Rank) -> None:
    """The average is made of the plain model: FSDP2 refuses copies of one in shards."""

    def build(seed: int) -> tuple[nn.Module, AveragedModel]:
        torch.manual_seed(seed)
        model = nn.Linear(8, 6)
        average = AveragedModel(model)
        fully_shard(model, mesh=mesh_of(2))
        fully_shard(average.module, mesh=mesh_of(2))
        average.update_parameters(model)
        return model, average

    model, average = build(1)
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update_parameters(model)
    path = here.directory / "average"
    tc.save(path, training.state(model, extra={"ema": average}))
    again, other = build(2)
    training.restore(path, again, extra={"ema": other})
    assert isinstance(other.module.weight, DTensor) and int(other.n_averaged) == 2
    whole = average.module.weight.full_tensor()
    assert bits(other.module.weight.full_tensor()) == bits(whole)
    assert bits(again.weight.full_tensor()) == bits(model.weight.full_tensor()) != bits(whole)
    saved = tc.load(path, select="extra/ema/module.*")["extra"]["ema"]
    plain = nn.Linear(8, 6)
    plain.load_state_dict({name.removeprefix("module."): leaf for name, leaf in saved.items() if leaf is not ...})
    assert bits(plain.weight.detach()) == bits(whole)


@case("two train")
def float8_weights_of_a_hub_are_scaled_into_shards(here: Rank) -> None:
    weight = (torch.randn(300, 500, generator=torch.Generator().manual_seed(0)) * 30).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    each = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :500]
    path = here.directory / "float8"
    tc.save(path, {"weight": weight, "weight_scale_inv": scales})
    rule = tc.rules.Dequantize("weight", "weight_scale_inv", block=(128, 128))
    for once in (False, True):
        with torch.device("meta"):
            model = nn.Linear(500, 300, bias=False, dtype=torch.bfloat16)
        fully_shard(model, mesh=mesh_of(2))
        restore = partial(training.restore, path, model, under="model", cast=True)
        _refuses(partial(restore, strict="missing"), "weight_scale_inv")
        assert model.weight.is_meta
        restore(transforms=rule, read=tc.ReadOptions(once=once))
        assert torch.equal(model.weight.full_tensor(), (weight.float() * each).bfloat16())


class _Average:
    """An average that sets weights aside for an evaluation, and takes back whatever arrays were saved."""

    def __init__(self, model: nn.Module, value: float, *, stored: bool) -> None:
        self.shadow = [parameter.detach().clone().fill_(value) for parameter in model.parameters()]
        self.stored = [parameter.detach() * 1.0 for parameter in model.parameters()] if stored else None

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@case("two train")
def arrays_that_an_object_lacks_here_get_the_layout_of_its_others(here: Rank) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    fully_shard(model, mesh=mesh_of(2))
    saved = _Average(model, 3.0, stored=True)
    path = here.directory / "stored"
    tc.save(path, {"average": saved})
    for stored in (False, True):
        found = _Average(model, 0.0, stored=stored)
        tc.load_into(path, {"average": found})
        for mine, other in zip(
            [*found.shadow, *(found.stored or ())], [*saved.shadow, *(saved.stored or ())], strict=True
        ):
            assert isinstance(mine, DTensor) and mine.placements == other.placements
            assert bits(mine.to_local()) == bits(other.to_local())
    without = here.directory / "without"
    tc.save(without, {"average": _Average(model, 5.0, stored=False)})
    tc.load_into(without, {"average": saved})
    assert saved.stored is None and all(bool((one.to_local() == 5.0).all()) for one in saved.shadow)
