"""A tree as typed leaves and a structure, there and back, and the plan of a save as a pure function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optree.functools
import pytest
import torch
from hypothesis import given

import treeckpt as tc
from tests.helpers.strategies import same, trees, values
from tests.helpers.world import on_ranks


@given(trees())
def test_a_tree_of_any_containers_comes_back(tree: Any) -> None:
    leaves, structure = tc.tree_flatten(tree, rank=3, namespace="treeckpt-tests")
    assert same(tc.tree_unflatten(structure, leaves, rank=3, namespace="treeckpt-tests"), tree)
    again, same_structure = tc.tree_flatten(tree, rank=3, namespace="treeckpt-tests")
    assert structure == same_structure and [leaf.path for leaf in again] == [leaf.path for leaf in leaves]
    assert all(leaf.value is other.value for leaf, other in zip(leaves, again, strict=True))


@given(trees(values().filter(lambda value: not isinstance(value, (dict, list, tuple))), max_leaves=4))
def test_a_tree_of_any_values_comes_back(tree: Any) -> None:
    leaves, structure = tc.tree_flatten(tree, namespace="treeckpt-tests")
    assert same(tc.tree_unflatten(structure, leaves, namespace="treeckpt-tests"), tree)


def test_leaves_say_where_their_parts_lie_in_the_whole_array() -> None:
    tree = {
        "plain": torch.zeros(2, 3, dtype=torch.bfloat16),
        "rows": tc.Sharded(np.zeros((2, 4)), (8, 4), (6, 0)),
        "flat": tc.Sharded(np.zeros(5, np.float32), (4, 4), 6),
        "none": tc.Sharded(np.zeros(0), (4, 4), 0),
        "value": None,
    }
    leaves = {leaf.path: leaf for leaf in tc.tree_flatten(tree)[0]}
    assert leaves["plain"].spec == tc.ArraySpec((2, 3), "bfloat16") and leaves["plain"].value is tree["plain"]
    assert leaves["plain"].regions == (tc.Region((0, 0), (2, 3)),)
    assert leaves["rows"].spec.shape == (8, 4) and leaves["rows"].regions == (tc.Region((6, 0), (2, 4)),)
    assert leaves["flat"].regions == (tc.Region((1, 2), (1, 2)), tc.Region((2, 0), (1, 3)))
    assert leaves["none"].regions == () == leaves["value"].regions and leaves["value"].spec is None


def test_what_a_save_takes_apart_comes_back() -> None:
    table = tc.KeyedTable(np.array([1, 2]), {"row": np.ones((2, 1))}, scalars={"step": 3})
    function = optree.functools.partial(torch.add, torch.ones(1))
    tree = {"sparse": torch.eye(2).to_sparse(), "table": table, "f": function, "model": torch.nn.Linear(1, 1)}
    leaves, structure = tc.tree_flatten(tree)
    assert [leaf.path for leaf in leaves][:3] == ["sparse/indices", "sparse/values", "table/ids"]
    made = tc.tree_unflatten(structure, leaves, allow_pickle=True)
    assert torch.equal(made["sparse"].to_dense(), torch.eye(2)) and made["table"].slots["row"] is table.slots["row"]
    assert made["f"](1).tolist() == [2] and list(made["model"]) == ["weight", "bias"]
    with pytest.raises(tc.MismatchError, match=r"f: .*torch:add"):
        tc.tree_unflatten(structure, leaves)


def test_the_structure_of_an_index_takes_leaves_too(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": [1, (2.5, None)], "own": tc.PerRank({"x": 1})})
    structure = tc.inspect(tmp_path / "c").structure
    assert structure == tc.tree_flatten({"a": [0, (0, 0)], "own": tc.PerRank({"x": 0})})[1]
    assert tc.tree_unflatten(structure, "abcd") == {"a": ["a", ("b", "c")], "own": tc.PerRank({"x": "d"})}


@pytest.mark.parametrize(("given", "named"), [("ab", "b/0"), ("abcd", "leaves")])
def test_another_number_of_leaves_is_refused(given: str, named: str) -> None:
    _, structure = tc.tree_flatten({"a": (1, 2), "b": [3]})
    with pytest.raises(tc.MismatchError, match=rf"^{named}: expected 3 leaves.*found {len(given)}"):
        tc.tree_unflatten(structure, given)


def test_a_structure_of_another_kind_is_refused() -> None:
    tree = {"a": 1}
    for other in (optree.tree_structure(tree), tc.tree_flatten(tree), tree, [1]):
        wrong: Any = other
        with pytest.raises(tc.MismatchError, match="structure: expected a structure of tree_flatten, found a "):
            tc.tree_unflatten(wrong, [1])


def state_of(rank: int) -> dict[str, Any]:
    return {
        "replicated": np.zeros((64, 1 << 13)),  # large enough to be shared by three writers
        "small": np.zeros(3),
        "rows": tc.Sharded(np.full((4, 3), rank), (12, 3), (4 * rank, 0)),
        "same": tc.Sharded(np.zeros(5), (5,), 0),
        "own": tc.PerRank({"seed": np.full(2, rank)}),
        "best": tc.FromRank(np.zeros(7) if rank == 1 else None, 1),
        "step": 3,
    }


def test_the_plan_is_that_of_the_save(tmp_path: Path) -> None:
    planned = tc.plan_writes([state_of(rank) for rank in range(3)])
    outcomes = on_ranks(3, lambda comm: tc.save(tmp_path / "c", state_of(comm.rank), comm=comm))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    index = tc.inspect(tmp_path / "c")
    written: list[dict[str, list[tc.Region]]] = [{}, {}, {}]
    for leaf in index.entries:
        own = range(3) if leaf.ranks is not None else [None]
        for chunk in (c for rank in own for c in index.chunks_of(leaf, rank=rank)) if leaf.spec is not None else ():
            written[chunk.rank].setdefault(leaf.path, []).append(chunk.region)
    assert planned == [{path: tuple(sorted(regions)) for path, regions in own.items()} for own in written]
    sizes = [sum(region.size for region in own["replicated"]) for own in planned]
    assert sum(sizes) == 64 << 13 and min(sizes) > 0


def test_a_plan_names_what_does_not_fit_together() -> None:
    with pytest.raises(tc.LayoutError, match=r"w: expected pieces that cover all of shape \(4,\)"):
        tc.plan_writes([{"w": tc.Sharded(np.zeros(2), (4,), 0)}, {}])
    with pytest.raises(tc.MismatchError, match="w: "):
        tc.plan_writes([{"w": np.zeros(2)}, {"w": np.zeros(3)}])
    with pytest.raises(tc.MismatchError, match="trees: expected a list of trees, one for each rank, found a list of 0"):
        tc.plan_writes([])
    not_a_list: Any = {"w": np.zeros(2)}
    with pytest.raises(tc.MismatchError, match=r"trees: expected a list of trees, .* found a dict of 1"):
        tc.plan_writes(not_a_list)
