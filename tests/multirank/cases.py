"""What the ranks do in each phase. A case passes when it raises nothing on any rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import treeckpt as tc
from treeckpt.io.comm import Comm, default_comm

from .layouts import DIFFERENT_KEYS, bits, build, difference, distribute, layouts_of, mesh_of

__all__ = ["PHASES", "Rank", "check_load", "mlp", "of", "oracle_of"]


@dataclasses.dataclass(frozen=True)
class Rank:
    """Where a case runs."""

    rank: int
    world: int
    directory: Path


Case = Callable[[Rank], None]
PHASES: dict[str, tuple[int, dict[str, Case]]] = {
    "four": (4, {}),
    "two": (2, {}),
    "three": (3, {}),
    "four again": (4, {}),
}


def of(phase: str) -> dict[str, Case]:
    return PHASES[phase][1]


def case(phase: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        of(phase)[function.__name__.replace("_", " ")] = function
        return function

    return register


# layouts into layouts -------------------------------------------------------------------------------------------------
def check_load(path: Path, layout: str, rank: int, world: int, variant: int) -> None:
    """Loads a checkpoint of the shared arrays into a layout, in one of four ways, and compares with the oracle."""
    expected = build(layout, rank, world)
    strict = layout not in DIFFERENT_KEYS
    if variant == 0:
        found = tc.load(path, build(layout, rank, world, fill=0), strict=strict)
    elif variant == 1:
        found = build(layout, rank, world, fill=255)
        tc.load_into(path, found, strict=strict)
    elif variant == 2:
        found = tc.load(path, build(layout, rank, world, device="meta"), strict=strict)
    else:
        specs = tc.abstract(expected)
        assert all(isinstance(spec, tc.ArraySpec) for spec in specs.values())
        found = tc.load(path, specs, strict=strict)
        expected = {name: _local(leaf) for name, leaf in expected.items()}
        found = {name: leaf.reshape(-1) for name, leaf in found.items()}
    text = difference(found, expected)
    assert not text, f"{path.name} into {layout} (variant {variant}): {text}"


def _local(leaf: Any) -> torch.Tensor:
    local = leaf.to_local() if isinstance(leaf, DTensor) else leaf.local if isinstance(leaf, tc.Sharded) else leaf
    return local.reshape(-1)


def _load_all(here: Rank, worlds: tuple[int, ...]) -> None:
    """Every third pair: each layout is met as a source, as a target, and in each of the four ways, several times."""
    for world in worlds:
        for n, source in enumerate(layouts_of(world)):
            for m, layout in enumerate(layouts_of(here.world)):
                if (n + m) % 3 == 0:
                    check_load(here.directory / f"{world} {source}", layout, here.rank, here.world, (n + m // 3) % 4)


def _save_all(here: Rank) -> None:
    for layout in layouts_of(here.world):
        path = here.directory / f"{here.world} {layout}"
        tc.save(path, build(layout, here.rank, here.world))
        if here.rank == 0:
            assert tc.verify(path).ok
            unique = sum(tensor.nbytes for tensor in build("plain", 0, 1).values())
            on_disk = sum(file.stat().st_size for file in path.iterdir())
            assert on_disk <= 1.01 * unique + here.world * (64 << 10), f"{layout}: {on_disk} bytes for {unique}"
            nbytes = tc.inspect(path).nbytes
            assert nbytes == unique, f"{layout}: {nbytes} bytes of arrays for {unique}"


@case("four")
def every_layout_is_saved(here: Rank) -> None:
    _save_all(here)


@case("four")
def layouts_load_into_others_of_the_same_world(here: Rank) -> None:
    _load_all(here, (4,))


@case("three")
def layouts_of_four_ranks_load_into_those_of_three(here: Rank) -> None:
    _load_all(here, (4,))


@case("two")
def layouts_of_four_ranks_load_into_those_of_two(here: Rank) -> None:
    _load_all(here, (4,))


@case("two")
def every_layout_of_two_ranks_is_saved(here: Rank) -> None:
    _save_all(here)


@case("four again")
def layouts_of_one_and_two_ranks_load_into_those_of_four(here: Rank) -> None:
    _load_all(here, (1, 2))


# kinds of tensors -----------------------------------------------------------------------------------------------------
@case("four")
def parameters_that_are_dtensors_stay_parameters(here: Rank) -> None:
    mesh = mesh_of(4)
    full = torch.arange(30.0).reshape(6, 5)
    tree = {
        "w": nn.Parameter(distribute(full, mesh, (Shard(0),))),
        "frozen": nn.Parameter(distribute(full, mesh, (Shard(1),)), requires_grad=False),
        "active": distribute(full, mesh, (Replicate(),)).requires_grad_(),
        "plain": distribute(full, mesh, (Shard(0),)),
    }
    tc.save(here.directory / "parameters", tree)
    loaded = tc.load(here.directory / "parameters", tree)
    for name, leaf in tree.items():
        assert isinstance(loaded[name], DTensor), name
        assert isinstance(loaded[name], nn.Parameter) == isinstance(leaf, nn.Parameter), name
        assert loaded[name].requires_grad == leaf.requires_grad, name
        assert loaded[name].is_leaf, name
        assert loaded[name] is not leaf, name
    assert not difference(loaded, tree)
    whole = tc.load(here.directory / "parameters")
    assert type(whole["w"]) is nn.Parameter
    assert whole["w"].requires_grad
    assert not whole["frozen"].requires_grad
    assert type(whole["active"]) is torch.Tensor
    assert torch.equal(whole["w"].data, full)


@case("four")
def ties_among_dtensors_are_written_once(here: Rank) -> None:
    """`few` has rows on two ranks only: the others cannot tell from memory that it is tied."""
    mesh = mesh_of(4)
    weight = nn.Parameter(distribute(torch.randn(64, 8, generator=_seeded()), mesh, (Shard(0),)))
    few = nn.Parameter(distribute(torch.randn(2, 9, generator=_seeded()), mesh, (Shard(0),)))
    tree = {
        "wte": weight, "head": weight, "data": weight.detach(), "few": few, "again": few, "more": few.detach(),
    }  # fmt: skip
    path = here.directory / "ties"
    tc.save(path, tree)
    nbytes = sum(file.nbytes for file in tc.inspect(path).file_list)
    assert nbytes == 64 * 8 * 4 + 2 * 9 * 4, nbytes
    assert not difference(tc.load(path, tree), tree)
    whole = tc.load(path)
    assert whole["head"] is whole["wte"]
    assert whole["again"] is whole["few"]
    assert whole["more"].data_ptr() == whole["few"].data_ptr()


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@case("four")
def partial_placements_are_refused(here: Rank) -> None:
    leaf = DTensor.from_local(torch.ones(3), mesh_of(4), (Partial(),), run_check=False)
    for call in (
        lambda: tc.save(here.directory / "partial", {"a": {"w": leaf}}),
        lambda: tc.abstract({"a": {"w": leaf}}),
    ):
        with pytest.raises(tc.LayoutError, match="partial sum") as caught:
            call()
        assert caught.value.path == "a/w"
        assert "Redistribute" in caught.value.hint
    assert not list((here.directory / "partial").glob("*")), "a refused save leaves nothing"


@case("four")
def a_local_tensor_that_does_not_fit_is_refused(here: Rank) -> None:
    local = torch.ones(3 if here.rank else 5)
    leaf = DTensor.from_local(local, mesh_of(4), (Shard(0),), run_check=False, shape=torch.Size([14]), stride=(1,))
    with pytest.raises(tc.TreeckptError, match="local tensor of shape"):
        tc.save(here.directory / "misfit", {"w": leaf})


@case("four")
def one_failing_rank_fails_all_and_the_next_save_works(here: Rank) -> None:
    tree = {"w": torch.ones(3), "x": object() if here.rank == 2 else 1}
    with pytest.raises(tc.RankError, match=r"rank 2.*x: expected") as caught:
        tc.save(here.directory / "failing", tree)
    assert list(caught.value.ranks) == [2]
    tc.save(here.directory / "failing", {**tree, "x": 1})
    assert tc.load(here.directory / "failing")["x"] == 1


# replicas -------------------------------------------------------------------------------------------------------------
@case("four")
def replicas_share_the_writing_by_bytes(here: Rank) -> None:
    tree = {f"layer{n}": torch.randn(200 + n, 1000, generator=_seeded()) for n in range(8)}
    tree |= {f"bias{n}": torch.randn(1000, generator=_seeded()) for n in range(8)}
    report = tc.save(here.directory / "replicas", tree)
    nbytes: list[Any] = [None] * 4
    dist.all_gather_object(nbytes, report.nbytes)
    unique = sum(tensor.nbytes for tensor in tree.values())
    assert sum(nbytes) == unique, "each byte once"
    assert max(nbytes) <= 1.05 * unique / 4, f"{nbytes} of {unique}"
    files = [file.nbytes for file in tc.inspect(here.directory / "replicas").file_list]
    assert sum(files) == unique


@case("four")
def replicated_meshes_share_the_writing_too(here: Rank) -> None:
    full = torch.randn(2048, 1024, generator=_seeded())
    for name, placements in {"hsdp": (Replicate(), Shard(0)), "both": (Replicate(), Replicate())}.items():
        report = tc.save(here.directory / f"shared {name}", {"w": distribute(full, mesh_of(2, 2), placements)})
        nbytes: list[Any] = [None] * 4
        dist.all_gather_object(nbytes, report.nbytes)
        assert sum(nbytes) == full.nbytes, name
        assert max(nbytes) <= 1.1 * full.nbytes / 4, f"{name}: {nbytes}"


@case("four")
def small_replicas_that_differ_are_named(here: Rank) -> None:
    odd = here.rank == 3
    leaves = {
        "value": 5 if odd else 4,
        "kind": 1.0 if odd else 1,
        "nan": float("nan") if odd else 0.0,
        "tensor": torch.full((10,), float(odd)),
        "scalar": torch.tensor(-0.0 if odd else 0.0),
        "numpy": np.full(3, odd),
        "dtensor": distribute(torch.full((10,), float(odd)), mesh_of(4), (Replicate(),)),
    }
    for name, leaf in leaves.items():
        with pytest.raises(tc.MismatchError) as caught:
            tc.save(here.directory / f"differ {name}", {"deep": [{"same": 1, name: leaf}]})
        assert caught.value.path == f"deep/0/{name}", caught.value
        assert "rank 3" in str(caught.value)
        assert "PerRank" in caught.value.hint
        assert not (here.directory / f"differ {name}" / "index.json").exists()


@case("four")
def large_replicas_are_compared_when_asked(here: Rank) -> None:
    large = torch.zeros(300, 300)
    sharded = distribute(large.clone(), mesh_of(2, 2), (Replicate(), Shard(0)))
    if here.rank == 2:
        large[250, 7] = 1
        sharded.to_local()[100, 3] = 1
    tc.save(here.directory / "unseen", {"w": large, "s": sharded})
    for name, leaf in {"w": large, "s": sharded}.items():
        with pytest.raises(tc.MismatchError) as caught:
            tc.save(here.directory / "seen", {"a": {name: leaf}}, verify_replicas=True)
        assert caught.value.path.startswith(f"a/{name}"), caught.value
    full = torch.randn(300, 300, generator=_seeded())
    fine = {"w": full, "s": distribute(full, mesh_of(2, 2), (Replicate(), Shard(0)))}
    tc.save(here.directory / "fine", fine, verify_replicas=True)
    assert not difference(tc.load(here.directory / "fine", fine), fine)


@case("four")
def arrays_that_contradict_each_other_are_named(here: Rank) -> None:
    odd = here.rank == 1
    pairs: dict[str, Any] = {
        "shape": torch.zeros(3 if odd else 4),
        "dtype": torch.zeros(3, dtype=torch.float64 if odd else torch.float32),
        "kind": 5 if odd else torch.zeros(3),
        "node": {"x": 1} if odd else [1],
        "layout": distribute(torch.zeros(8, 8), mesh_of(4), (Shard(int(odd)),)),
        "half": distribute(torch.zeros(8), mesh_of(4), (Shard(0),)) if odd else torch.zeros(8),
    }
    for name, leaf in pairs.items():
        with pytest.raises(tc.MismatchError) as caught:
            tc.save(here.directory / f"contradict {name}", {"a": {name: leaf}})
        assert caught.value.path == f"a/{name}", caught.value


@case("four")
def ranks_may_tie_what_others_hold_apart(here: Rank) -> None:
    weight, other = torch.arange(6.0), torch.arange(6.0)
    trees: list[dict[str, Any]] = [
        {"a": weight, "b": weight},
        {"b": weight, "a": weight},
        {"a": weight, "b": other},
        {"b": weight, "c": weight, "part": weight[:3]},
    ]
    tc.save(here.directory / "tied apart", trees[here.rank])
    loaded = tc.load(here.directory / "tied apart")
    for name in ("a", "b", "c"):
        assert torch.equal(loaded[name], weight), name
    assert torch.equal(loaded["part"], weight[:3])
    views = {"base": weight, "v": weight[:3] if here.rank else weight[3:]}
    with pytest.raises(tc.MismatchError) as caught:
        tc.save(here.directory / "views", views)
    assert caught.value.path == "v"


# trees that differ ----------------------------------------------------------------------------------------------------
@case("four")
def pipeline_stages_join_into_one_tree(here: Rank) -> None:
    stage = here.rank
    layers = {f"layers.{stage}.{name}": torch.full((4, 4), float(stage)) for name in ("wq", "wk")}
    head = {"wte": torch.ones(8, 4)} if stage == 0 else {"head": torch.ones(8, 4)} if stage == 3 else {}
    tree = {
        "model": {**layers, **head},
        "optimizer": {"state": {stage: {"step": torch.tensor(3.0)}}, "lr": 0.1},
        "loader": tc.PerRank({"position": stage, "seen": torch.arange(stage + 1)}),
    }
    path = here.directory / "pipeline"
    tc.save(path, tree)
    loaded = tc.load(path)
    assert len(loaded["model"]) == 10
    assert all(loaded["model"][f"layers.{n}.wq"].eq(n).all() for n in range(4))
    assert set(loaded["optimizer"]["state"]) == {0, 1, 2, 3}
    assert loaded["loader"].value["position"] == stage
    assert torch.equal(loaded["loader"].value["seen"], torch.arange(stage + 1))
    mine = tc.load(path, tree, strict=False)
    assert not difference(mine["model"], tree["model"])
    with pytest.raises(tc.MismatchError, match="not asked for"):
        tc.load(path, tree)


# per rank -------------------------------------------------------------------------------------------------------------
def _own(rank: int) -> dict[str, Any]:
    return {
        "rng": tc.PerRank({"state": torch.full((5,), rank, dtype=torch.uint8), "numpy": np.arange(rank, rank + 3)}),
        "loader": tc.PerRank([rank, {"epoch": 1.5 * rank}, None, f"file{rank}"]),
        "alike": tc.PerRank(torch.ones(2)),
        "step": 7,
    }


def _same_own(found: dict[str, Any], rank: int) -> None:
    expected = _own(rank)
    assert torch.equal(found["rng"].value["state"], expected["rng"].value["state"])
    assert found["rng"].value["numpy"].tolist() == expected["rng"].value["numpy"].tolist()
    assert found["loader"].value == expected["loader"].value
    assert torch.equal(found["alike"].value, torch.ones(2))
    assert found["step"] == 7


@case("four")
def each_rank_gets_its_own_state_back(here: Rank) -> None:
    path = here.directory / "own"
    tc.save(path, _own(here.rank))
    _same_own(tc.load(path), here.rank)
    _same_own(tc.load(path, _own(99)), here.rank)
    into = _own(99)
    tc.load_into(path, into)
    _same_own(into, here.rank)


@case("two")
def a_smaller_world_finds_the_state_of_its_ranks(here: Rank) -> None:
    path = here.directory / "own"
    for load in (lambda **o: tc.load(path, **o), lambda **o: tc.load(path, _own(99), **o)):
        with pytest.raises(tc.MismatchError, match=r"world of 4") as caught:
            load()
        assert "per_rank='take'" in caught.value.hint
        _same_own(load(per_rank="take"), here.rank)
    assert tc.load(path, {**_own(0), "rng": ..., "loader": ..., "alike": ...})["step"] == 7
    assert tc.load(path, select="step")["step"] == 7


@case("two")
def own_state_of_two_ranks_is_saved(here: Rank) -> None:
    tc.save(here.directory / "own of two", _own(here.rank))


@case("four again")
def a_larger_world_has_no_state_for_its_new_ranks(here: Rank) -> None:
    path = here.directory / "own of two"
    for load in (lambda **o: tc.load(path, **o), lambda **o: tc.load(path, _own(99), **o)):
        with pytest.raises(tc.MismatchError) as caught:
            load()
        assert "per_rank='take'" in caught.value.hint
        _same_own(load(per_rank="take"), here.rank % 2)


# how ranks talk -------------------------------------------------------------------------------------------------------
class _Collectives(TorchDispatchMode):
    """Counts the operators of c10d that this thread calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def _sequence() -> int:
    """How many collectives the default group has issued, from any thread."""
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


@case("four")
def no_collective_is_issued(here: Rank) -> None:
    tree = {"d": build("fsdp tp", here.rank, 4), "p": build("plain", here.rank, 4), "own": tc.PerRank(here.rank)}
    stages = build("stages", here.rank, 4)
    path = here.directory / "quiet"
    with _Collectives() as control:
        before = _sequence()
        dist.all_reduce(torch.ones(1))
        assert control.found, "the operator count sees a collective"
        assert _sequence() == before + 1, "so does the group's own count"
    with _Collectives() as collectives:
        before = _sequence()
        tc.save(path, tree)
        tc.save(path, tree, overwrite=True, verify_replicas=True)
        tc.save(here.directory / "quiet stages", stages)
        tc.load(path, tree)
        tc.load(path)
        tc.load_into(path, tree)
        tc.load(path, tc.abstract(tree))
        after = _sequence()
    assert not collectives.found
    assert after == before, f"{after - before} collectives"


class _Counting:
    """A comm that counts the bytes that this rank sends."""

    def __init__(self, inner: Comm) -> None:
        self._inner, self._sent = inner, 0
        self.rank, self.size, self.timeout, self.memory = inner.rank, inner.size, inner.timeout, inner.memory

    def post(self, key: str, data: bytes) -> None:
        self._sent += len(data)
        self._inner.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return self._inner.wait(keys, timeout)

    def drop(self, keys: Sequence[str]) -> None:
        self._inner.drop(keys)

    def sent(self) -> int:
        """Bytes since the last call."""
        found, self._sent = self._sent, 0
        return found


INVENTORY = 15_000
"""Bytes: less than what 300 leaves take to be told; more than digests, names, reports and spans do."""


@case("four")
def equal_trees_exchange_digests_only(here: Rank) -> None:
    comm = _Counting(default_comm())
    comm.memory.pop("plans", None)
    for step in range(3):
        tree = {f"layers.{n}.weight": torch.zeros(200, 100) for n in range(300)}
        path = here.directory / f"digests {step}"
        tc.save(path, {"model": tree, "sharded": build("rows", here.rank, 4), "step": step}, comm=comm)
        sent = comm.sent()
        assert 0 < sent < INVENTORY / 4, sent


@case("four")
def joined_plans_are_remembered(here: Rank) -> None:
    comm = _Counting(default_comm())
    comm.memory.pop("plans", None)
    spent = []
    for step in range(3):
        model = {f"layers.{4 * n + here.rank}.weight": torch.zeros(200, 100) for n in range(300)}
        tree = {"model": model, "step": step}
        tc.save(here.directory / f"joined {step}", tree, comm=comm)
        spent.append(comm.sent())
        loaded = tc.load(here.directory / f"joined {step}", tree, strict=False)
        assert loaded["step"] == step
        assert len(tc.inspect(here.directory / f"joined {step}").leaves) == 1201
    assert spent[0] > INVENTORY, "an inventory is sent once"
    assert max(spent[1:]) < INVENTORY / 4, f"{spent}: then digests only"
    tc.save(here.directory / "joined other", {"model": {**model, "new": torch.zeros(3)}}, comm=comm)
    assert comm.sent() > INVENTORY, "another tree is joined anew"
    assert tc.load(here.directory / "joined other", select="model/new")["model"]["new"].shape == (3,)


# real training states -------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Uneven on purpose: 14 hidden units are 7 per tensor-parallel rank, and 4 and 3 per data-parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 14)
        self.norm = nn.LayerNorm(14)
        self.down = nn.Linear(14, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def mlp() -> Net:
    torch.manual_seed(1)
    return Net()


def _tensor_parallel(model: Net, mesh: Any) -> Net:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _trained(model: nn.Module, steps: int = 2) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((3, 10), step + 1.0)).square().sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def oracle_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a training state, whole."""
    found = {f"model/{name}": _whole(tensor) for name, tensor in state["model"].items()}
    for number, moments in state["optimizer"]["state"].items():
        found |= {f"optimizer/{number}/{name}": _whole(tensor) for name, tensor in moments.items()}
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert bits(found[name]) == bits(tensor), name


@case("four")
def fsdp_on_tensor_parallel_is_saved(here: Rank) -> None:
    mesh = mesh_of(2, 2)
    model = _tensor_parallel(mlp(), mesh["b"])
    fully_shard(model, mesh=mesh["a"])
    state = _trained(model)
    oracle = oracle_of(state)
    if here.rank == 0:
        torch.save(oracle, here.directory / "fsdp tp.pt")
    path = here.directory / "fsdp tp state"
    tc.save(path, state)
    _same_state(oracle_of(tc.load(path, state)), oracle)


@case("four")
def hybrid_fsdp_is_saved(here: Rank) -> None:
    model = mlp()
    fully_shard(model.up, mesh=mesh_of(2, 2))
    fully_shard(model, mesh=mesh_of(2, 2))
    state = _trained(model)
    oracle = oracle_of(state)
    if here.rank == 0:
        torch.save(oracle, here.directory / "hsdp.pt")
    path = here.directory / "hsdp state"
    tc.save(path, state)
    _same_state(oracle_of(tc.load(path, state)), oracle)


@case("two")
def fsdp_states_load_into_tensor_parallel_ones(here: Rank) -> None:
    for name in ("fsdp tp", "hsdp"):
        oracle = torch.load(here.directory / f"{name}.pt")
        state = _trained(_tensor_parallel(mlp(), mesh_of(2)), steps=1)
        loaded = tc.load(here.directory / f"{name} state", state)
        assert loaded["model"]["up.weight"].placements == (Shard(0),)
        assert loaded["model"]["down.weight"].placements == (Shard(1),)
        _same_state(oracle_of(loaded), oracle)
        tc.load_into(here.directory / f"{name} state", state)
        _same_state(oracle_of(state), oracle)


@case("two")
def fsdp_states_load_into_a_deferred_module(here: Rank) -> None:
    oracle = torch.load(here.directory / "fsdp tp.pt")
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mesh=mesh_of(2))
    loaded = tc.load(here.directory / "fsdp tp state", {"model": model.state_dict(), "optimizer": ...}, strict=False)
    model.load_state_dict(loaded["model"], assign=True)
    assert all(not parameter.is_meta for parameter in model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    found = {f"model/{name}": _whole(tensor) for name, tensor in model.state_dict().items()}
    _same_state(found, {name: tensor for name, tensor in oracle.items() if name.startswith("model/")})
    model(torch.ones(3, 10)).sum().backward()
