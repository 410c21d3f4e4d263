"""Layouts into layouts across world sizes, and the kinds of distributed tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import treeckpt as tc

from .layout_models import MODELS_OF_DIFFERENT_KEYS, NOT_ON_META, build_model, models_of
from .layouts import DIFFERENT_KEYS as ARRAYS_OF_DIFFERENT_KEYS
from .layouts import build, difference, distribute, kept, layouts_of, locals_of, mesh_of, seeded
from .registry import Rank, case

__all__ = ["check_load", "make"]

DIFFERENT_KEYS = (*ARRAYS_OF_DIFFERENT_KEYS, *MODELS_OF_DIFFERENT_KEYS)


# layouts into layouts -------------------------------------------------------------------------------------------------
VARIANTS = ("load", "load_into", "load for meta tensors", "load for specs")


def make(layout: str, rank: int, world: int, **fill: Any) -> dict[str, Any]:
    """The tree of one rank under a layout of the arrays, or of a model."""
    return (
        build_model(layout, rank, world, **fill) if layout in models_of(world) else build(layout, rank, world, **fill)
    )


def check_load(path: Path, layout: str, rank: int, world: int, variant: int) -> None:
    """Loads a checkpoint into a layout of the same arrays, in one of four ways, and compares with the oracle."""
    expected = kept(make, layout, rank, world)
    strict = layout not in DIFFERENT_KEYS
    if layout in NOT_ON_META and variant == 2:
        variant = 0
    if variant == 0:
        found = tc.load(path, kept(make, layout, rank, world, fill=0), strict=strict)
    elif variant == 1:
        found = make(layout, rank, world, fill=255)
        tc.load_into(path, found, strict=strict)
    elif variant == 2:
        found = tc.load(path, kept(make, layout, rank, world, device="meta"), strict=strict)
    else:
        specs = tc.abstract(expected)
        assert all(isinstance(spec, tc.ArraySpec) for spec in specs.values())
        found = tc.load(path, specs, strict=strict)
        expected = {name: _in_a_row(leaf) for name, leaf in expected.items()}
        found = {name: leaf.detach().reshape(-1) for name, leaf in found.items()}
    text = difference(found, expected)
    assert not text, f"{path.name} into {layout} ({VARIANTS[variant]}): {text}"


def _in_a_row(leaf: Any) -> torch.Tensor:
    parts = [local.detach().reshape(-1) for local in locals_of(leaf)]
    return torch.cat(parts) if parts else torch.empty(0)


def load_all(here: Rank, worlds: tuple[int, ...], *, step: int) -> None:
    """Every so many pairs: over all phases each layout is a source and a target, in each of the four ways."""
    for world in worlds:
        for family in (layouts_of, models_of):
            for n, source in enumerate(family(world)):
                for m, layout in enumerate(family(here.world)):
                    if (n + m) % step == 0:
                        path = here.directory / f"{world} {source}"
                        check_load(path, layout, here.rank, here.world, (n + m // step) % 4)


def save_all(here: Rank) -> None:
    """Each layout, each element of each array once."""
    for layout in (*layouts_of(here.world), *models_of(here.world)):
        path = here.directory / f"{here.world} {layout}"
        tree = kept(make, layout, here.rank, here.world)
        tc.save(path, tree)
        if here.rank == 0:
            assert tc.verify(path).ok
            plain = build_model("model", 0, 1) if layout in models_of(here.world) else build("plain", 0, 1)
            unique = sum(tensor.nbytes for tensor in plain.values())
            on_disk = sum(file.stat().st_size for file in path.iterdir())
            assert on_disk <= 1.01 * unique + here.world * (64 << 10), f"{layout}: {on_disk} bytes for {unique}"
            nbytes = tc.inspect(path).nbytes
            assert nbytes == unique, f"{layout}: {nbytes} bytes of arrays for {unique}"


@case("eight")
@case("four")
@case("two")
@case("three")
@case("whole eight")
@case("whole four")
@case("whole three")
def every_layout_is_saved(here: Rank) -> None:
    save_all(here)


@case("eight")
def layouts_of_eight_ranks_load_into_others_of_eight(here: Rank) -> None:
    load_all(here, (8,), step=15)


@case("four")
def layouts_load_into_others_of_the_same_world(here: Rank) -> None:
    load_all(here, (4,), step=13)


@case("four")
def layouts_of_eight_ranks_load_into_those_of_four(here: Rank) -> None:
    load_all(here, (8,), step=13)


@case("three")
def layouts_of_eight_and_four_ranks_load_into_those_of_three(here: Rank) -> None:
    load_all(here, (8, 4), step=13)


@case("two")
def layouts_of_four_ranks_load_into_those_of_two(here: Rank) -> None:
    load_all(here, (4,), step=13)


@case("four again")
def layouts_of_one_and_two_ranks_load_into_those_of_four(here: Rank) -> None:
    load_all(here, (1, 2), step=13)


@case("eight again")
def layouts_of_one_three_and_four_ranks_load_into_those_of_eight(here: Rank) -> None:
    load_all(here, (1, 3, 4), step=17)


@case("whole eight")
@case("whole four")
@case("whole three")
def every_layout_loads_into_every_other_of_as_many_or_fewer_ranks(here: Rank) -> None:
    load_all(here, tuple(world for world in (8, 4, 3) if world >= here.world), step=1)


@case("whole eight again")
def every_layout_loads_into_every_other_of_more_ranks(here: Rank) -> None:
    load_all(here, (4, 3, 1), step=1)


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
def a_local_tensor_whose_elements_share_memory_is_no_target(here: Rank) -> None:
    local = torch.zeros(1, 3).expand(2, 3)
    leaf = DTensor.from_local(local, mesh_of(4), (Shard(0),), run_check=False)
    tc.save(here.directory / "in one place", {"w": torch.arange(24.0).view(8, 3)})
    for load in (
        lambda: tc.load_into(here.directory / "in one place", {"w": leaf}),
        lambda: tc.trees.copy_into({"w": torch.arange(24.0).view(8, 3)}, {"w": leaf}),
    ):
        with pytest.raises(tc.MismatchError, match="w: expected a tensor with memory for each element"):
            load()
    assert not local.any(), "nothing is written"
    found = tc.load(here.directory / "in one place", {"w": leaf})["w"].to_local()
    assert torch.equal(found, torch.arange(24.0).view(4, 2, 3)[here.rank])


class Scaled(torch.Tensor):
    """As quantised weights are: integers and a scale, shown as float32, with no memory of its own."""

    @staticmethod
    def __new__(cls, *parts: torch.Tensor) -> Scaled:
        found = torch.Tensor._make_wrapper_subclass(cls, parts[0].shape, dtype=torch.float32)  # pyright: ignore
        found.parts = parts if len(parts) == 2 else parts[0].parts  # pyright: ignore[reportAttributeAccessIssue]
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(leaf: Any) -> Any:
            return leaf.parts[0].float() * leaf.parts[1] if isinstance(leaf, cls) else leaf

        if function is torch.ops.aten.detach.default or function is torch.ops.aten.view.default:
            return cls(*args[0].parts)
        return function(*map(plain, args), **(kwargs or {}))


@case("four")
def a_local_tensor_of_a_class_with_other_storage_is_refused_by_name(here: Rank) -> None:
    integers = torch.full((2, 3), 7, dtype=torch.int8)
    leaf = DTensor.from_local(Scaled(integers, torch.tensor(0.5)), mesh_of(4), (Shard(0),), run_check=False)
    tc.save(here.directory / "plain rows", {"w": torch.arange(24.0).view(8, 3)})
    for act in (
        lambda: tc.save(here.directory / "scaled rows", {"w": leaf}),
        lambda: tc.load_into(here.directory / "plain rows", {"w": leaf}),
        lambda: tc.load(here.directory / "plain rows", {"w": leaf}),
        lambda: tc.abstract({"w": leaf}),
    ):
        with pytest.raises(tc.TreeckptError, match=r"w: expected a dense tensor or DTensor, found .*Scaled"):
            act()
    assert integers.eq(7).all()


@case("four")
def one_failing_rank_fails_all_and_the_next_save_works(here: Rank) -> None:
    tree = {"w": torch.ones(3), "x": object() if here.rank == 2 else 1}
    with pytest.raises(tc.RankError, match=r"rank 2.*x: expected") as caught:
        tc.save(here.directory / "failing", tree)
    assert list(caught.value.ranks) == [2]
    tc.save(here.directory / "failing", {**tree, "x": 1})
    assert tc.load(here.directory / "failing")["x"] == 1
