from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from treeckpt.training._modules import get_in, key_path, nested, strip_wrappers, tie_names

STEPS = st.lists(st.sampled_from(["module", "layers", "0", "weight", "_orig_mod"]), min_size=1, max_size=4)
HOPS = st.lists(st.sampled_from(["module", "_orig_mod", "_checkpoint_wrapped_module"]), max_size=3, unique=True)


@given(steps=STEPS, data=st.data())
def test_hops_are_dropped_where_wrappers_stand_and_nowhere_else(steps: list[str], data: st.DataObject) -> None:
    hops: dict[str, list[str]] = {}
    wrapped: list[str] = []
    for depth in range(len(steps)):
        # a wrapped child of the name of the hop cannot be told from the hop where a hook took the hop out
        chosen = [hop for hop in data.draw(HOPS) if hop != steps[depth]]
        hops[".".join(steps[:depth])] = chosen
        wrapped += [*chosen, steps[depth]]
    assert strip_wrappers(".".join(wrapped), hops) == ".".join(steps)
    assert strip_wrappers(".".join(steps), hops) == ".".join(steps)
    assert strip_wrappers(".".join(steps), {}) == ".".join(steps)


def test_a_child_named_like_a_hop_keeps_its_name() -> None:
    assert strip_wrappers("module.module.weight", {"": ["module"]}) == "module.weight"
    assert strip_wrappers("a.module.weight", {"": ["module"]}) == "a.module.weight"


@given(st.dictionaries(st.text("ab/~", min_size=1, max_size=3), st.integers(), max_size=5), st.text("g", min_size=1))
def test_nested_dicts_give_back_what_was_put_in(names: dict[str, int], prefix: str) -> None:
    tree = nested(((prefix, name), value) for name, value in names.items())
    assert all(get_in(tree, (prefix, name)) == value for name, value in names.items())
    assert len({key_path((prefix, name)) for name in names}) == len(names)


def test_two_parts_with_one_name_are_told_apart_by_a_dict() -> None:
    with pytest.raises(tc.TreeError, match=r"^0\.weight: .*found two.*dict of names"):
        nested([(("0.weight",), 1), (("0.weight",), 2)])


@given(st.permutations([("b",), ("a",), ("c",)]))
def test_a_tied_parameter_has_one_name_whatever_the_order(keys: list[tuple[str, ...]]) -> None:
    assert tie_names((key, 7) for key in keys) == {7: (("a",), ("b",), ("c",))}
