"""A selection takes what its path says: keys that begin alike are other keys, and steps that do are other steps."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks


def test_a_key_that_another_begins_with_is_not_taken_along(tmp_path: Path) -> None:
    tree = {"model": {"w": np.arange(3)}, "model2": {"w": np.arange(4)}, "model.w": np.arange(5)}
    tc.save(tmp_path / "c", tree)
    found = tc.load(tmp_path / "c", select="model")
    assert found["model"]["w"].tolist() == [0, 1, 2] and found["model"]["w"].dtype == np.int64
    assert found["model2"] == {"w": ...} and found["model.w"] is ...


def test_steps_whose_names_end_alike_are_told_apart(tmp_path: Path) -> None:
    with tc.Manager(tmp_path) as manager:
        for step in (0, 1, 10):
            manager.save(step, {"w": np.full(2, step)})
    with tc.Manager(tmp_path) as manager:
        assert manager.latest() == 10
        assert [manager.restore(step=step)["w"].tolist() for step in (0, 1, 10)] == [[0, 0], [1, 1], [10, 10]]


def test_what_ranks_have_of_their_own_may_be_shaped_otherwise_on_each(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        tc.save(tmp_path, {"own": tc.PerRank(list(range(comm.rank))), "n": 1}, comm=comm)

    assert errors_of(on_ranks(3, save)) == [None] * 3
    found = [outcome.value for outcome in on_ranks(3, lambda comm: tc.load(tmp_path, comm=comm))]
    assert found == [{"own": tc.PerRank(list(range(rank))), "n": 1} for rank in range(3)]


def test_what_ranks_have_of_their_own_may_have_other_keys_on_each(tmp_path: Path) -> None:
    def own(rank: int) -> dict[str, Any]:
        return {"own": tc.PerRank({f"k{n}": np.full(1, rank) for n in range(rank + 1)})}

    on_ranks(2, lambda comm: tc.save(tmp_path / "c", own(comm.rank), comm=comm))
    for path in (tmp_path / "c", [tmp_path / "c"]):
        for outcome, rank in zip(
            on_ranks(2, lambda comm, p=path: tc.load(p, own(comm.rank), comm=comm)), (0, 1), strict=True
        ):
            assert outcome.error is None and outcome.value["own"].value == own(rank)["own"].value
        [_, lacking] = on_ranks(2, lambda comm, p=path: tc.load(p, own(0), comm=comm))
        assert "own/~rank*/k1" in str(lacking.error)  # that rank has it


TREE = {"model": {"w": np.arange(3), "blocks[0]": {"w": np.arange(2)}}, "empty": {}, "step": 1}


def copy_of_tree() -> dict[str, Any]:
    return {"model": {"w": np.zeros(3, int), "blocks[0]": {"w": np.zeros(2, int)}}, "empty": {}, "step": 0}


@pytest.mark.parametrize("options", [{"select": "modle/*"}, {"exclude": ["step", "modle"]}])
def test_globs_that_mean_nothing_are_refused_before_anything_changes(tmp_path: Path, options: Any) -> None:
    tc.save(tmp_path / "c", TREE)
    trees: list[Any] = []

    def fresh() -> Any:
        trees.append(copy_of_tree())
        return trees[-1]

    bank = [tmp_path / "c", tc.From(tmp_path / "c", **options)]
    for load in (
        lambda **more: tc.load(tmp_path / "c", **options, **more),
        lambda **more: tc.load(tmp_path / "c", copy_of_tree(), **options, **more),
        lambda **more: tc.load_into(tmp_path / "c", fresh(), **options, **more),
        lambda **more: tc.load(bank, **more),
        lambda **more: tc.load(bank[:1], **options, **more),
    ):
        with pytest.raises(tc.MismatchError, match="modle"):
            load()
        assert not any(tree["model"]["w"].any() for tree in trees)
        load(strict=False)
        trees.clear()


def test_containers_without_leaves_may_be_named_and_what_only_like_has_excluded(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", TREE)
    assert tc.load(tmp_path / "c", select="empty")["empty"] == {}
    like = copy_of_tree() | {"head": np.full(2, 7)}
    assert tc.load(tmp_path / "c", like, exclude="head")["head"].tolist() == [7, 7]


def test_a_leaf_with_brackets_in_its_name_is_meant_by_its_name(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", TREE)
    found = tc.load(tmp_path / "c", select="model/blocks[0]/w")
    assert found["model"]["blocks[0]"]["w"].tolist() == [0, 1] and found["model"]["w"] is ...


@pytest.mark.parametrize("options", [{"strict": "miss"}])
def test_words_that_mean_nothing_are_refused(tmp_path: Path, options: Any) -> None:
    tc.save(tmp_path / "c", TREE)
    [name] = options
    for load in (tc.load, tc.load_into):
        with pytest.raises(tc.MismatchError, match=f"{name}: expected .*, found {options[name]!r}"):
            load(tmp_path / "c", copy_of_tree(), **options)


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        ({"w": np.zeros(3, int), "blocks[0]": {"w": np.zeros(2, int)}}, r"rename=\{'model/\*': '\*'\}"),
        ({"module": {"w": np.zeros(3, int)}}, "outer keys of the saved one"),
    ],
)
def test_not_one_name_in_common_is_refused_without_strict_too(tmp_path: Path, tree: Any, hint: str) -> None:
    tc.save(tmp_path / "c", {"model": TREE["model"]})
    bank = [tmp_path / "c", tc.From(tmp_path / "c", select="model/w")]
    for load in (tc.load, tc.load_into):
        for source in (tmp_path / "c", bank):
            with pytest.raises(tc.MismatchError, match=rf"missing in the checkpoint: .*not asked for: model/.*{hint}"):
                load(source, tree, strict=False)
    assert not any(leaf.any() for leaf in (tree.get("w", np.zeros(1)),))


def test_the_weights_themselves_are_proposed_before_a_copy_of_them(tmp_path: Path) -> None:
    weights = {"w": np.zeros(3, int)}
    tc.save(tmp_path / "c", {"extra": {"ema": {"module": weights}}, "averages": weights, "model": weights})
    with pytest.raises(tc.MismatchError, match=r"w as model/w: pass rename=\{'model/\*': '\*'\}"):
        tc.load_into(tmp_path / "c", weights)


def test_one_name_in_common_is_enough_and_so_is_nothing_on_one_side(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", TREE)
    tc.save(tmp_path / "empty", {"model": {}})
    report = tc.load_into(tmp_path / "c", {"model": {"w": np.zeros(3, int)}, "head": np.zeros(2)}, strict=False)
    assert report.missing == ("head",) and report.loaded == 1
    for source, tree in (("empty", {"head": np.zeros(2)}), ("c", {"model": {}}), ("c", {"model": ..., "head": 0})):
        assert tc.load_into(tmp_path / source, tree, strict=False).loaded == 0


STEPS = {"b": [np.arange(2), np.arange(3)], "5": np.arange(4), 5: np.arange(5), "own": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("select", "path"),
    [
        (("b", 0), "b/0"),
        ([("b", 0)], "b/0"),
        ([("own", "x")], "own/x"),
        (5, "5"),
        ([5], "5"),
        (["own/x"], "own/x"),
        ([tc.path_keys("~s5")], "~s5"),
    ],
)
def test_a_path_is_selected_by_its_keys_as_by_its_text(tmp_path: Path, select: Any, path: str) -> None:
    tc.save(tmp_path / "c", STEPS)
    every = ["b/0", "b/1", "~s5", "5", "own/x", "own/y"]

    def taken(**options: Any) -> list[str]:
        found = tc.load(tmp_path / "c", **options)
        leaves = [*found["b"], found["5"], found[5], *found["own"].values()]
        return [name for name, leaf in zip(every, leaves, strict=True) if leaf is not ...]

    assert taken(select=select) == [path]
    assert taken(exclude=select) == [name for name in every if name != path]


def test_a_tuple_of_texts_holds_globs(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", STEPS)
    found = tc.load(tmp_path / "c", select=("b/0", "own"))
    assert found["own"] == {"x": 1, "y": 2} and found["b"][1] is ...


class Pair(NamedTuple):
    a: Any
    b: Any


def test_an_accessor_of_optree_is_one_path(tmp_path: Path) -> None:
    tree = {"pair": Pair(np.arange(2), [np.arange(3)]), "step": 1}
    tc.save(tmp_path / "c", tree)
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
    for accessor, leaf in zip(accessors, leaves, strict=True):
        for select in (accessor, [accessor]):
            assert np.array_equal(accessor(tc.load(tmp_path / "c", select=select)), leaf)
    rest = tc.load(tmp_path / "c", exclude=tuple(accessors[:2]))
    assert rest["pair"] is ... or rest["pair"] == Pair(..., [...])
    assert rest["step"] == 1


@pytest.mark.parametrize("path", ["model/weight", "model/a~1b"])
def test_the_keys_of_a_path_that_are_all_texts_are_several_globs_and_an_error_says_how_they_are_one(
    tmp_path: Path, path: str
) -> None:
    tree = {"model": {"weight": np.arange(2), "a/b": np.arange(3)}}
    tc.save(tmp_path / "c", tree)
    keys: Any = tc.path_keys(path)
    with pytest.raises(tc.MismatchError, match="a tuple of texts is several globs") as caught:
        tc.load(tmp_path / "c", select=keys)
    assert f"select=[{keys}]" in str(caught.value)
    assert tc.load(tmp_path / "c", select=[keys])["model"][keys[1]] is not ...


@pytest.mark.parametrize("what", ["select", "exclude"])
@pytest.mark.parametrize("given", [re.compile("b"), [re.compile("b")], True, b"b", 1.5, {"b": 1}, ["b", None]])
def test_what_is_no_glob_is_refused_by_name(tmp_path: Path, what: str, given: Any) -> None:
    tc.save(tmp_path / "c", STEPS)
    model: Any = torch.nn.Linear(1, 1)
    calls: list[Callable[[], Any]] = [
        lambda: tc.load(tmp_path / "c", **{what: given}),
        lambda: tc.load_into(tmp_path / "c", {}, **{what: given}),
        lambda: tc.load_abstract(tmp_path / "c", **{what: given}),
        lambda: tc.load([tc.From(tmp_path / "c", **{what: given})]),
        lambda: tc.training.state(model, **{what: given}),
        lambda: tc.training.restore(tmp_path / "c", model, **{what: given}),
        lambda: tc.convert.convert(tmp_path / "c", tmp_path / "d.pt", **{what: given}),
    ]
    for call in calls:
        with pytest.raises(tc.MismatchError, match=f"^{what}: expected globs"):
            call()


def test_values_in_shards_are_copied_one_by_one_and_each_frees_its_bytes(tmp_path: Path) -> None:
    count, nbytes = 16, 2 << 20
    tc.save(tmp_path / "c", {f"{number}": bytes([number]) * nbytes for number in range(count)})
    for load in (tc.load, lambda path: tc.load(path, like={f"{number}": b"" for number in range(count)})):
        load(tmp_path / "c")
        tracemalloc.start()
        try:
            found = load(tmp_path / "c")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert [found[f"{number}"][-1] for number in range(count)] == list(range(count))
        assert peak < 1.4 * count * nbytes, peak
