"""Operations on trees between real ranks: whole trees out of every layout and back, within groups too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import treeckpt as tc

from .layout_groups import sequence
from .layout_models import build_model, models_of
from .layouts import bits, build, difference, distribute, kept, layouts_of, mesh_of, seeded
from .registry import Rank, case


def _makers(world: int, *, every: bool) -> dict[str, Any]:
    """What makes the tree of each layout; of each that only an even number of ranks has, if not `every`."""
    makers = dict.fromkeys(layouts_of(world), build) | dict.fromkeys(models_of(world), build_model)
    others = () if every else (*layouts_of(3), *models_of(3))
    return {layout: make for layout, make in makers.items() if layout not in others}


def _same(found: Any, expected: dict[str, torch.Tensor], where: str) -> None:
    assert set(found) == set(expected), f"{where}: {sorted(set(found) ^ set(expected))}"
    for name, tensor in expected.items():
        assert type(found[name]) in (torch.Tensor, nn.Parameter), f"{where}: {name} is {type(found[name])}"
        assert bits(found[name]) == bits(tensor), f"{where}: {name}"


@case("eight")
def layouts_of_an_even_number_of_ranks_are_gathered_whole(here: Rank) -> None:
    gather_all(here, every=False)


@case("eight")
def a_whole_tree_is_distributed_over_layouts_of_an_even_number_of_ranks(here: Rank) -> None:
    distribute_all(here, every=False)


@case("three")
@case("whole eight")
def every_layout_is_gathered_whole(here: Rank) -> None:
    gather_all(here, every=True)


@case("three")
@case("whole eight")
def a_whole_tree_is_distributed_over_every_layout(here: Rank) -> None:
    distribute_all(here, every=True)


def gather_all(here: Rank, *, every: bool) -> None:
    for n, (layout, make) in enumerate(_makers(here.world, every=every).items()):
        oracle = kept(make, "model" if make is build_model else "plain", 0, 1)
        tree = make(layout, here.rank, here.world)
        chosen = (None, [here.world - 1], [1, 2])[n % 3]
        found = tc.trees.gather(tree, ranks=chosen, bucket_bytes=(1 << 10, 64 << 20)[n % 2])
        again = kept(make, layout, here.rank, here.world)  # on all ranks: some layouts take collectives to make
        assert not difference(tree, again), f"{layout}: the input is as it was"
        if chosen is None or here.rank in chosen:
            _same(found, oracle, layout)
        else:
            assert set(found) == set(oracle)
            for name, spec in found.items():
                assert isinstance(spec, tc.ArraySpec) and spec.shape == tuple(oracle[name].shape), f"{layout}: {name}"


def distribute_all(here: Rank, *, every: bool) -> None:
    for n, (layout, make) in enumerate(_makers(here.world, every=every).items()):
        expected = kept(make, layout, here.rank, here.world)
        source = (None, 0, here.world - 1)[n % 3]
        whole = kept(make, "model" if make is build_model else "plain", 0, 1) if source in (None, here.rank) else None
        like = make(layout, here.rank, here.world, fill=0)
        found = tc.trees.distribute(whole, like, src=source, bucket_bytes=(1 << 10, 64 << 20)[n % 2])
        assert not (text := difference(found, expected)), f"{layout}: {text}"
        assert not difference(like, kept(make, layout, here.rank, here.world, fill=0)), "like is as it was"
        tc.trees.copy_into(found, like)
        assert not (text := difference(like, expected)), f"{layout}: {text}"
        copy = tc.trees.offload(found, pin=n % 3 == 2, share=n % 3 == 1)
        assert not (text := difference(copy, expected)), f"{layout}: {text}"
        assert tc.trees.same_structure(tc.trees.empty_like(found), expected), layout


@case("eight")
def deferred_leaves_are_made_where_they_are_distributed_to(here: Rank) -> None:
    whole = build_model("model", 0, 1) if here.rank == 2 else None
    for layout in ("fsdp", "fsdp on tp", "tp"):
        like = build_model(layout, here.rank, 8, device="meta")
        assert not difference(tc.trees.distribute(whole, like, src=2), build_model(layout, here.rank, 8)), layout


@case("eight")
def groups_gather_distribute_and_broadcast_among_themselves(here: Rank) -> None:
    """Two groups at once, one of them in an order of its own and none with all; ranks count within the group."""
    members = ([6, 2, 4], [1, 3, 5, 7])
    groups = [dist.new_group(ranks, sort_ranks=False) for ranks in members]
    meshes = [dist.DeviceMesh("cpu", torch.tensor(ranks)) for ranks in members]
    if here.rank == 0:
        for act in (
            tc.trees.gather,
            tc.trees.broadcast,
            lambda t, group: tc.trees.distribute(t, t, src=0, group=group),
        ):
            with pytest.raises(tc.RankError, match="not part of the group"):
                act({"w": torch.ones(1)}, group=groups[0])
        return
    number = int(here.rank % 2)
    group, mesh, first = groups[number], meshes[number], members[number][0]
    full = torch.randn(7, 5, generator=seeded()) + number
    leaf = distribute(full, mesh, (Shard(0),))
    assert torch.equal(tc.trees.gather({"w": leaf}, group=group)["w"], full)
    only = tc.trees.gather({"w": leaf}, group=group, ranks=[0])["w"]
    assert torch.equal(only, full) if here.rank == first else only == tc.ArraySpec((7, 5), "float32")
    found = tc.trees.distribute({"w": full} if here.rank == first else None, {"w": leaf}, src=0, group=group)["w"]
    assert torch.equal(found.to_local(), leaf.to_local())
    sent = tc.trees.broadcast({"w": full, "from": here.rank} if here.rank == first else None, group=group)
    assert torch.equal(sent["w"], full) and sent["from"] == first


@case("eight")
def a_tree_is_broadcast_as_it_is_in_few_messages(here: Rank) -> None:
    weight = nn.Parameter(torch.randn(5, 4, generator=seeded()))
    tree: dict[str, Any] = {
        "many": [torch.full((3,), float(n)) for n in range(1000)],
        "model": {"wte": weight, "head": weight, "rows": weight.detach()[1:3], 7: (True, None, "text")},
        "kinds": [torch.tensor(2.5), torch.empty(0, 3), torch.arange(4).bfloat16(), torch.ones(2, 3).t(),
                  torch.tensor([1 + 2j]).conj(), nn.Parameter(torch.ones(1), requires_grad=False)],
    }  # fmt: skip
    before = sequence()
    found = tc.trees.broadcast(tree if here.rank == 3 else "anything", src=3)
    assert sequence() - before <= 4, f"{sequence() - before} collectives"
    assert (found is tree) == (here.rank == 3)
    assert tc.trees.same_structure(found, tree), str(tc.trees.same_structure(found, tree))
    names = tc.trees.flatten_names(found)
    for name, leaf in tc.trees.flatten_names(tree).items():
        other = names[name]
        assert (
            bits(other.resolve_conj()) == bits(leaf.resolve_conj()) if isinstance(leaf, torch.Tensor) else other == leaf
        )
    assert found["model"]["wte"] is found["model"]["head"]
    assert found["model"]["rows"].untyped_storage().data_ptr() == found["model"]["wte"].untyped_storage().data_ptr()
    before = sequence()
    tc.trees.broadcast(tree, src=3, bucket_bytes=4096)
    assert sequence() - before > 4, "smaller buckets take more messages"


@case("eight")
def a_tree_that_one_rank_can_not_bring_fails_on_all(here: Rank) -> None:
    odd = here.rank == 6
    mesh = mesh_of(8)
    partial = DTensor.from_local(torch.ones(3), mesh, (Partial(),), run_check=False)
    refused = {"a": torch.eye(3).as_subclass(type("Own", (torch.Tensor,), {})) if odd else torch.eye(3)}
    for act in (tc.trees.gather, lambda t: tc.trees.broadcast(t, src=6), lambda t: tc.trees.distribute(t, t, src=6)):
        with pytest.raises(tc.RankError, match=r"rank 6: TreeError: a: .*subclass") as caught:
            act(refused)
        assert list(caught.value.ranks) == [6]
    for act in (lambda t: tc.trees.broadcast(t, src=6), lambda t: tc.trees.distribute(t, t, src=6)):
        with pytest.raises((tc.LayoutError, tc.RankError), match="partial sum"):
            act({"w": partial})
    with pytest.raises(tc.MismatchError, match="rank 6"):
        tc.trees.gather({"v": 1 + odd})
    with pytest.raises(tc.MismatchError, match="same shape"):
        tc.trees.gather({"v": torch.ones(3 + odd)})
    with pytest.raises(tc.RankError, match="w: expected float32 of shape"):
        tc.trees.distribute({"w": torch.ones(2)}, {"w": torch.empty(3 if odd else 2)}, src=0)
    rows = distribute(torch.ones(8, 2), mesh, (Shard(0),))
    with pytest.raises(tc.RankError, match=r"rank 4: LayoutError: w: .* a distributed one"):
        tc.trees.broadcast({"w": rows}, src=4)
    with pytest.raises(tc.LayoutError, match="gather brings them here"):
        tc.trees.copy_into({"w": rows}, {"w": torch.zeros(8, 2)})
    assert torch.equal(tc.trees.gather({"v": torch.ones(2)})["v"], torch.ones(2)), "the next one works"


@case("eight")
def offloaded_dtensors_share_nothing_and_keep_their_kind(here: Rank) -> None:
    mesh = mesh_of(2, 4)
    for full in (torch.randn(7, 3, generator=seeded()), torch.tensor(2.5), torch.empty(0, 3)):
        placements = (Replicate(), Shard(0)) if full.ndim else (Replicate(), Replicate())
        leaf = nn.Parameter(distribute(full, mesh, placements))
        found = tc.trees.offload({"w": leaf, "tied": leaf})
        assert found["w"] is found["tied"] and isinstance(found["w"], nn.Parameter) and found["w"].requires_grad
        assert found["w"].placements == leaf.placements and found["w"].shape == leaf.shape
        before = found["w"].to_local().clone()
        with torch.no_grad():
            leaf.to_local().fill_(9)
        assert torch.equal(found["w"].to_local(), before)


@case("eight")
def state_of_each_rank_stays_its_own_in_a_gathered_tree(here: Rank) -> None:
    stage = {f"layer{here.rank}": torch.full((2,), float(here.rank))}
    tree = {"model": stage, "own": tc.PerRank({"rng": torch.tensor([here.rank]), "n": here.rank}), "step": 3}
    found = tc.trees.gather(tree, ranks=[0, 5])
    assert found["own"].value["n"] == here.rank and found["own"].value["rng"].tolist() == [here.rank]
    assert found["step"] == 3 and set(found["model"]) == {f"layer{n}" for n in range(8)}
    if here.rank in (0, 5):
        assert all(found["model"][f"layer{n}"].tolist() == [n, n] for n in range(8))
