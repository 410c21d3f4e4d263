"""Layouts into layouts across world sizes, and the kinds of distributed tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import treeckpt as tc

from .layouts import DIFFERENT_KEYS, build, difference, distribute, layouts_of, mesh_of, seeded
from .registry import Rank, case

__all__ = ["check_load"]


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
    weight = nn.Parameter(distribute(torch.randn(64, 8, generator=seeded()), mesh, (Shard(0),)))
    few = nn.Parameter(distribute(torch.randn(2, 9, generator=seeded()), mesh, (Shard(0),)))
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
