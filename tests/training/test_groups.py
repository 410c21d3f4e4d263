"""Hyper-parameters belong to parameters: neither their order nor the split into groups matters, where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from treeckpt.training._groups import (
    ParamGroup,
    from_groups,
    is_same,
    labels_by_member,
    labels_of,
    match_groups,
    to_groups,
    tree_of_groups,
)
from treeckpt.training._modules import key_path

NAMES = [f"p{i}" for i in range(6)]
VALUES = st.fixed_dictionaries({"lr": st.sampled_from([0.1, 0.2]), "betas": st.sampled_from([(0.9, 0.99), (0.5, 0.9)])})


@st.composite
def splits(draw: st.DrawFn, of: dict[str, Any] | None = None) -> list[ParamGroup]:
    """Parameters in any order and split; `of` says what the values of each are."""
    order = draw(st.permutations(NAMES))
    cuts = sorted(draw(st.sets(st.integers(1, 5), max_size=3)))
    runs = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    if of is None:
        return [ParamGroup(tuple((n,) for n in run), draw(VALUES)) for run in runs]
    finer: list[ParamGroup] = []
    for run in runs:
        values = {str(of[n]): of[n] for n in run}.values()
        finer += [ParamGroup(tuple((n,) for n in run if of[n] == value), dict(value)) for value in values]
    return finer


def _values_of(groups: list[ParamGroup]) -> dict[str, Any]:
    return {key_path(member): group.values for group in groups for member in group.members}


def _taken(live: list[ParamGroup], tree: dict[str, Any]) -> list[dict[str, Any]]:
    of = labels_by_member(tree["members"])
    return match_groups(live, of, tree["values"], path="param_groups")


@given(saved=splits(), data=st.data())
def test_each_parameter_gets_its_values_under_any_order_and_split(saved: list[ParamGroup], data: st.DataObject) -> None:
    expected = _values_of(saved)
    live = data.draw(splits(of=expected))
    tree = tree_of_groups(saved)
    taken = _taken(live, tree)
    for group, values in zip(live, taken, strict=True):
        assert all(expected[key_path(member)] == values for member in group.members)


@given(saved=splits(), live=splits())
def test_groups_that_join_different_values_are_refused(saved: list[ParamGroup], live: list[ParamGroup]) -> None:
    expected, tree = _values_of(saved), tree_of_groups(saved)
    alike = all(len({tuple(sorted(expected[key_path(m)].items())) for m in group.members}) == 1 for group in live)
    try:
        _taken(live, tree)
    except tc.MismatchError as error:
        assert not alike and error.path in ("param_groups/lr", "param_groups/betas")
    else:
        assert alike


@given(st.permutations(NAMES), st.permutations(NAMES))
def test_what_is_saved_does_not_depend_on_the_order_of_parameters(one: list[str], other: list[str]) -> None:
    trees = [tree_of_groups([ParamGroup(tuple((n,) for n in order), {"lr": 0.1})]) for order in (one, other)]
    assert trees[0] == trees[1] and list(trees[0]["members"]["p0"]) == list(trees[1]["members"]["p0"]) == NAMES


def test_a_group_is_labelled_by_its_name_or_its_first_parameter() -> None:
    groups = [ParamGroup((("b",), ("a",)), {"lr": 1}), ParamGroup((("c",),), {"name": "rest"}), ParamGroup((), {})]
    assert labels_of(groups) == ["a", "rest", "empty 2"]


def test_a_name_that_several_groups_have_labels_none_of_them() -> None:
    both = [ParamGroup(((name,),), {"name": "rest"}) for name in ("b", "a")]
    assert labels_of([*both, ParamGroup((), {"name": "rest"}), ParamGroup((("c",),), {"name": "a"})]) == [
        "b",
        "a",
        "empty 2",
        "empty 3",
    ]


def test_a_value_of_another_type_is_another_value() -> None:
    assert not is_same(1, 1.0) and not is_same(True, 1) and not is_same((1,), [1]) and is_same((0.9, 1), (0.9, 1))


def test_a_hyper_parameter_that_only_some_had_is_refused() -> None:
    tree = tree_of_groups([ParamGroup((("a",),), {"lr": 1, "extra": 2}), ParamGroup((("b",),), {"lr": 1})])
    with pytest.raises(tc.MismatchError, match=r"param_groups/extra: .*no such hyper-parameter for b"):
        _taken([ParamGroup((("a",), ("b",)), {})], tree)


def _joined(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """What a save makes of the groups of ranks that hold different parameters."""
    return {part: {key: value for tree in trees for key, value in tree[part].items()} for part in ("members", "values")}


def test_a_parameter_of_several_ranks_may_stand_in_a_group_of_each() -> None:
    ranks = [
        [ParamGroup(((first,), ("shared",)), {"lr": rate})] for first, rate in (("a", 0.5), ("b", 0.5), ("c", 0.25))
    ]
    tree = _joined([tree_of_groups(groups) for groups in ranks[:2]])
    assert labels_by_member(tree["members"]) == {"a": ["a"], "shared": ["a", "b"], "b": ["b"]}
    assert _taken([ParamGroup((("shared",), ("b",), ("a",)), {})], tree) == [{"lr": 0.5}]
    assert _taken([ParamGroup((("shared",),), {}), ParamGroup((("new",),), {})], tree) == [{"lr": 0.5}, {}]
    with pytest.raises(tc.MismatchError, match=r"param_groups/lr: .*0.5 for shared, found 0.25 for shared"):
        _taken([ParamGroup((("shared",),), {})], _joined([tree_of_groups(groups) for groups in ranks]))
    rates = to_groups({"base_lrs": [0.5]}, ["a"])["base_lrs"]["by_group"] | {"b": 0.5}
    of = labels_by_member(tree["members"])
    state = {"base_lrs": {"by_group": rates}}
    live = [ParamGroup((("shared",),), {}), ParamGroup((("b",),), {})]
    assert from_groups(state, live, of, path="scheduler") == {"base_lrs": [0.5, 0.5]}


@given(saved=splits(), data=st.data())
def test_schedules_follow_the_groups(saved: list[ParamGroup], data: st.DataObject) -> None:
    state = {"last_epoch": 3, "_schedulers": [{"base_lrs": [group.values["lr"] for group in saved]}], "gamma": [1]}
    live = data.draw(splits(of=_values_of(saved)))
    tree = tree_of_groups(saved)
    found = from_groups(to_groups(state, labels_of(saved)), live, labels_by_member(tree["members"]), path="scheduler")
    expected = [{"base_lrs": [group.values["lr"] for group in live]}]
    assert found == {"last_epoch": 3, "_schedulers": expected, "gamma": [1]}


def test_a_schedule_for_joined_groups_is_refused_where_they_differed() -> None:
    groups = [ParamGroup((("a",),), {}), ParamGroup((("b",),), {})]
    state = to_groups({"base_lrs": [0.1, 0.2]}, labels_of(groups))
    of = labels_by_member(tree_of_groups(groups)["members"])
    with pytest.raises(tc.MismatchError, match=r"scheduler/base_lrs: .*0.1 for a, found 0.2 for b"):
        from_groups(state, [ParamGroup((("a",), ("b",)), {})], of, path="scheduler")
