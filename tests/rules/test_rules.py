"""Rules on names and specs: what they find, what they refuse, what undoes them, and what follows parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import treeckpt as tc
from treeckpt import rules as R
from treeckpt._core.tree.spec import ArraySpec
from treeckpt.errors import FormatError, MismatchError, TreeckptError
from treeckpt.rules._apply_rules import TransformedLeaves, apply_rules, leaf_states, rule_history

Leaves = dict[str, ArraySpec | None]


def spec(*shape: int, dtype: str = "float32") -> ArraySpec:
    return ArraySpec(shape, dtype)


def run(leaves: Leaves, *rules: R.Rule, strict: bool = True) -> TransformedLeaves:
    return apply_rules(leaf_states(leaves), rules, strict=strict)


def shapes(ruled: TransformedLeaves) -> dict[str, tuple[int, ...] | None]:
    return {path: item.array.spec.shape if item.array else None for path, item in ruled.items.items()}


def test_names_are_exchanged_at_once() -> None:
    leaves: Leaves = {"a": spec(1), "b": spec(2)}
    assert shapes(run(leaves, R.Renames((("a", "b"), ("b", "a"))))) == {"b": (1,), "a": (2,)}
    with pytest.raises(MismatchError, match="two: a -"):
        run(leaves, R.Rename("a", "b"))


def test_numbers_that_only_the_sources_have_are_gone_through_in_order() -> None:
    leaves: Leaves = {f"l.{layer}.e.{e}.{w}": spec(e + 1, 2) for layer in (0, 1) for e in (10, 2, 9) for w in "ab"}
    with pytest.raises(MismatchError, match="without a gap, found none of number 3"):
        run(leaves, R.Concat(("l.$L.e.$E.a",), "l.$L.a"))
    leaves |= {f"l.{layer}.e.{e}.{w}": spec(e + 1, 2) for layer in (0, 1) for e in range(3, 9) for w in "ab"}
    found = run(leaves, R.Concat(("l.$L.e.$E.a", "l.$L.e.$E.b"), "l.$L.w"))
    assert list(found.items) == ["l.0.w", "l.1.w"]
    made = found.items["l.0.w"].array
    assert made is not None and made.spec.shape == (2 * sum(range(3, 12)), 2)
    assert [part.source for part in made.parts][:4] == ["l.0.e.2.a", "l.0.e.2.b", "l.0.e.3.a", "l.0.e.3.b"]


def test_a_join_by_groups_is_undone_by_a_split_into_the_lengths_of_one_group() -> None:
    leaves: Leaves = {"q": spec(3, 8), "k": spec(3, 2)}
    for axis in (1, -1):
        join = R.Concat(("q", "k"), "qk", axis, 2)
        assert R.inverse(join, leaves) == (R.Split("qk", ("q", "k"), 1, (4, 1), 2),)
    assert R.inverse(R.Split("qk", ("q", "k"), 1, (4, 1), 2), {"qk": spec(3, 10)}) == (
        R.Concat(("q", "k"), "qk", 1, 2),
    )
    assert R.inverse(R.Concat(("a", "b"), "c"), {"a": spec(0, 2), "b": spec(0, 2)}) == (R.Split("c", ("a", "b")),)


def test_a_stack_of_layers_and_its_rows_are_each_others_inverse() -> None:
    leaves: Leaves = {f"h.{i}.w": spec(2, 3) for i in range(12)}
    stacked = run(leaves, R.Stack("h.$L.w", "w"))
    assert shapes(stacked) == {"w": (12, 2, 3)}
    again = run({"w": spec(12, 2, 3)}, R.Unstack("w", "h.$L.w"))
    assert shapes(again) == dict.fromkeys(leaves, (2, 3))
    assert [part.source for part in stacked.items["w"].array.parts] == list(leaves)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rule", "expected", "found"),
    [
        (R.Split("w", ("a", "b")), "1 groups of 1+1 divide", "7"),
        (R.Split("w", ("a", "b"), 2), "an axis of shape", "axis 2"),
        (R.Split("w", ("a", "b"), 1, (1, 1, 2)), "3 new names", "a, b"),
        (R.Split("w", ("a", "b"), 0, (0, 0)), "at least 1", "0"),
        (R.Split("step", ("a", "b")), "an array", "a value"),
        (R.Concat(("w", "v"), "c"), "one shape but along axis 0", "3"),
        (R.Concat(("w", "i"), "c"), "arrays of one dtype", "int8"),
        (R.Concat(("w", "none"), "c"), "none beside it", "no such leaf"),
        (R.Concat(("w", "w2"), "c", 0, 2), "2 groups divide", "7"),
        (R.Stack(("w", "v"), "c"), "arrays of one shape, as", "3"),
        (R.Permute("w", (0, 2)), "an order of the 2 dimensions", "(0, 2)"),
        (R.Cast("w", "float7"), "a dtype that treeckpt knows", "float7"),
        (R.Unstack("w", ("a", "b")), "7 new names", "a, b"),
        (R.Rename("x", "y"), "x", "no such leaf"),
        (R.Drop("x"), "leaves that the rule is about", "no such leaf"),
        (R.Renames((("w", "y"), ("wv", "z"))), "wv", "no such leaf"),
        (R.Permute("w*", None, "c"), "one leaf of this name", "two"),
        (R.Split("n$N", ("a", "b")), "one array for a", "found 2"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_rule_and_the_leaf(rule: R.Rule, expected: str, found: str) -> None:
    leaves: Leaves = {"w": spec(7, 4), "w2": spec(7, 4), "v": spec(7, 3), "i": spec(7, 4, dtype="int8"), "step": None}
    leaves |= {"n0": spec(2), "n1": spec(2)}
    with pytest.raises(TreeckptError) as caught:
        run(leaves, rule)
    assert expected in str(caught.value) and found in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why", "meant"),
    [
        (("enc", "encoder"), "Names begin with `model/`", ("model/enc.*", "model/encoder.*")),
        (("enc.*", "encoder.*"), "Names begin with `model/`", ("model/enc.*", "model/encoder.*")),
        (("enc.w", "enc.weight"), "Names begin with `model/`", ("model/enc.w", "model/enc.weight")),
        (("enc", "model/encoder"), "Names begin with `model/`", ("model/enc.*", "model/encoder.*")),
        (("model/enc", "model/encoder"), "Below a dotted name", ("model/enc.*", "model/encoder.*")),
        (("h.$L", "l.$L"), "Names begin with `model/`", ("model/h.$L.*", "model/l.$L.*")),
        (("seed", "seeds"), "Names begin with `rng/`", ("rng/seed", "rng/seeds")),
        (("decoder", "encoder"), "Look at the names with treeckpt show", None),
    ],
)
def test_a_rename_without_the_root_or_the_rest_of_the_name_is_told_as_it_was_meant(
    given: tuple[str, str], why: str, meant: tuple[str, str] | None
) -> None:
    leaves = training({"enc.w": (2,), "enc.b": (2,), "h.0.w": (3,), "h.1.w": (3,)}) | {"rng/seed": None}
    with pytest.raises(MismatchError) as caught:
        run(leaves, R.Renames((given,)))
    assert why in caught.value.hint
    if meant is not None:
        assert caught.value.hint.endswith(f"write {meant[0]!r}: {meant[1]!r}")
        run(leaves, R.Renames((meant,)))


def test_a_pair_that_may_find_nothing_is_told_as_a_rule(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": 1})
    with pytest.raises(MismatchError, match=r"transforms=rules\.Rename\('gone', 'b', optional=True\)"):
        tc.load(tmp_path / "c", rename={"a": "x", "gone": "b"})
    assert tc.load(tmp_path / "c", rename={"a": "x"}, transforms=R.Rename("gone", "b", optional=True)) == {"x": 1}


def test_an_error_shows_the_chain_of_rules_that_led_to_the_leaf() -> None:
    rules = [R.Rename("h.$L.*", "l.${L+1}.*"), R.Permute("l.$L.w"), R.Split("l.$L.w", ("l.$L.a", "l.$L.b"))]
    with pytest.raises(MismatchError) as caught:
        run({"h.0.w": spec(2, 3)}, *rules)
    assert caught.value.path == "l.1.w"
    assert (
        "for rule 3: split l.$L.w -> l.$L.a, l.$L.b on h.0.w -(1: rename h.$L.* -> l.${L+1}.*)-> l.1.w "
        "-(2: permute l.$L.w -> l.$L.w)-> l.1.w"
    ) in str(caught.value)


def test_an_optional_rule_and_a_lenient_load_may_find_nothing() -> None:
    leaves: Leaves = {"w": spec(2)}
    assert shapes(run(leaves, R.Drop("x", optional=True), R.Split("y", ("a", "b"), optional=True))) == {"w": (2,)}
    assert shapes(run(leaves, R.Rename("x", "y"), strict=False)) == {"w": (2,)}


def test_pieces_called_underscore_and_slices_are_dropped_from_what_there_is() -> None:
    ruled = run({"w": spec(6, 2), "x": spec(3)}, R.Split("w", ("_", "b"), sizes=(2, 1)), R.Slice("x", -2), R.Drop("x"))
    assert shapes(ruled) == {"b": (2, 2)} and ruled.dropped == ("x",)


@pytest.mark.parametrize("rule", [R.Drop("w"), R.Slice("w", 1), R.Split("w", ("a", "_")), R.Cast("w", "float16")])
def test_what_loses_something_has_no_inverse(rule: R.Rule) -> None:
    with pytest.raises(MismatchError, match="loses something"):
        R.inverse(rule, {"w": spec(4, 4)})


@pytest.mark.parametrize(
    ("make", "rule", "expected", "found"),
    [
        (lambda: R.Permute("w", 1), "Permute", "tuple[int, ...] | None as axes", "1"),  # type: ignore[arg-type]
        (lambda: R.Permute("w", (1, "0")), "Permute", "as axes", "(1, '0')"),  # type: ignore[arg-type]
        (lambda: R.Rename("a", 3), "Rename", "str as target", "3"),  # type: ignore[arg-type]
        (lambda: R.Rename(["a"], "b"), "Rename", "str as source", "['a']"),  # type: ignore[arg-type]
        (lambda: R.Rename("a", "b", optional="no"), "Rename", "bool as optional", "'no'"),  # type: ignore[arg-type]
        (lambda: R.Renames(("a", "b")), "Renames", "as names", "('a', 'b')"),  # type: ignore[arg-type]
        (lambda: R.Copy("a", None), "Copy", "str as target", "None"),  # type: ignore[arg-type]
        (lambda: R.Drop(1), "Drop", "str as source", "1"),  # type: ignore[arg-type]
        (lambda: R.Keep(b"a"), "Keep", "str as source", "b'a'"),  # type: ignore[arg-type]
        (lambda: R.Fill("x", "1"), "Fill", "bool | int | float as value", "'1'"),  # type: ignore[arg-type]
        (lambda: R.Fill("x", shape=3), "Fill", "as shape", "3"),  # type: ignore[arg-type]
        (lambda: R.Fill("x", dtype=4), "Fill", "the name of a dtype", "4"),  # type: ignore[arg-type]
        (lambda: R.Split("w", 3), "Split", "as into", "3"),  # type: ignore[arg-type]
        (lambda: R.Split("w", ("a", "b"), sizes=2), "Split", "as sizes", "2"),  # type: ignore[arg-type]
        (lambda: R.Concat(("a", "b"), "c", "0"), "Concat", "int as axis", "'0'"),  # type: ignore[arg-type]
        (lambda: R.Cast("w", 3), "Cast", "the name of a dtype", "3"),  # type: ignore[arg-type]
        (lambda: R.Cast("w", "float32", 4), "Cast", "as of", "4"),  # type: ignore[arg-type]
        (lambda: R.Cast(5, "float32"), "Cast", "str as source", "5"),  # type: ignore[arg-type]
        (lambda: R.Slice("w", "a"), "Slice", "int | None as start", "'a'"),  # type: ignore[arg-type]
        (lambda: R.Stack("w", 2), "Stack", "str as target", "2"),  # type: ignore[arg-type]
        (lambda: R.Unstack("w", {}), "Unstack", "as into", "{}"),  # type: ignore[arg-type]
        (lambda: R.Carried("a -> b"), "Carried", "tuple[Rule, ...] as rules", "'a -> b'"),  # type: ignore[arg-type]
        (lambda: R.carried("a -> b"), "Carried", "as rules", "('a -> b',)"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_with_the_rule(
    make: Callable[[], object], rule: str, expected: str, found: str
) -> None:
    with pytest.raises(MismatchError) as caught:
        make()
    error = caught.value
    assert (error.path, error.found) == (f"rules.{rule}", found) and f"treeckpt.rules.{rule}" in error.hint
    assert expected in error.expected


def test_lists_and_numbers_of_numpy_are_taken_as_they_were() -> None:
    assert R.Permute("w", [np.int64(1), 0]) == R.Permute("w", (1, 0))  # type: ignore[arg-type]
    assert R.Fill("x", np.float32(1.5), [2], np.float32) == R.Fill("x", 1.5, (2,))  # type: ignore[arg-type]
    assert R.Concat("e.$E", "e") == R.Concat(("e.$E",), "e")  # type: ignore[arg-type]
    assert shapes(run({"w": spec(4)}, R.Split("w", "w.$I", sizes=[1, 3])))["w.1"] == (3,)  # type: ignore[arg-type]


def test_what_is_no_rule_is_refused() -> None:
    for given in (3, [3], {"a": 3}):
        with pytest.raises(TreeckptError, match=r"transforms: expected rules|->"):
            R.as_rules(None, given)  # type: ignore[arg-type]
    for counts in ({"heads": "8"}, {"heads": 8, "kv_heads": "2"}, {"heads": 8, "groups": 2.0}):
        with pytest.raises(TreeckptError, match=r"heads|groups: expected an integer, found"):
            R.split_qkv("w", ("q", "k", "v"), **counts)  # type: ignore[arg-type]
    with pytest.raises(TreeckptError, match=r"head_dim: expected an integer, found '64'"):
        R.rotary_halves("w", "v", heads=8, head_dim="64")  # type: ignore[arg-type]


def test_every_rule_has_a_json_form() -> None:
    rules = (
        R.Rename("a.$L", "b.${L + 1}"),
        R.Renames((("a", "b"), ("b", "a"))),
        R.Copy("a", "b"),
        R.Drop("a", optional=True),
        R.Keep("a"),
        R.Fill("a", 1.5, (2, 3), "bfloat16"),
        R.split_qkv("a", ("q", "k", "v"), heads=8, kv_heads=2),
        R.fuse_qkv(("q", "k", "v"), "a", heads=8, kv_heads=2),
        R.split_ffn("a", ("gate", "up"), groups=4),
        R.Permute("a", (1, 0), "b"),
        R.Cast("a", "float64", "float32"),
        R.Slice("a", 1, None, 1),
        R.Stack("a.$L", "a"),
        R.Stack(("a", "b"), "c"),
        R.Unstack("a", "a.$L", 1),
        R.carried(R.Rename("model/a", "model/b")),
    )
    assert R.decode(R.encode(rules)) == rules
    assert R.decode(b'["a -> b", {"rule": "drop", "source": "c"}]') == (R.Rename("a", "b"), R.Drop("c"))
    for bad in (
        b"{}",
        b'[{"rule": "eval"}]',
        b'[{"rule": "drop"}]',
        b'[{"rule": "drop", "source": "a", "x": 1}]',
        b"[",
    ):
        with pytest.raises(FormatError):
            R.decode(bad)
    with pytest.raises(AttributeError):
        rules[0].source = "x"  # type: ignore[misc]
    assert msgspec.json.decode(R.encode(rules[3:4])) == [{"rule": "drop", "source": "a", "optional": True}]


@pytest.mark.parametrize(("heads", "kv", "groups"), [(8, 3, 0), (8, 2, 4), (0, 1, 0), (8, 8, 3)])
def test_heads_that_cannot_be_shared_are_refused(heads: int, kv: int, groups: int) -> None:
    with pytest.raises(TreeckptError, match="share"):
        R.split_qkv("a", ("q", "k", "v"), heads=heads, kv_heads=kv, groups=groups)


# what follows parameters ----------------------------------------------------------------------------------------------
GROUP = "all~1of"


def training(names: dict[str, tuple[int, ...]], *, prefix: str = "") -> Leaves:
    """The leaves of a training state: Adam's moments of each parameter."""
    leaves: Leaves = {f"model/{name}": spec(*shape) for name, shape in names.items()}
    for name, shape in names.items():
        moments = {"step": spec(), "exp_avg": spec(*shape), "exp_avg_sq": spec(*shape)}
        leaves |= {f"optimizer/{prefix}{name}/{moment}": s for moment, s in moments.items()}
    leaves |= {f"param_groups/{prefix}members/{GROUP}/{name.replace('/', '~1')}": None for name in names}
    return leaves | {f"param_groups/{prefix}values/{GROUP}/lr": None}


@pytest.mark.parametrize("prefix", ["", "adam/"])
def test_moments_and_groups_follow_their_parameters(prefix: str) -> None:
    leaves = training({"h.0.qkv": (12, 4), "h.0.gate": (3, 4), "h.0.up": (3, 4), "b/w": (2,)}, prefix=prefix)
    ruled = run(
        leaves,
        R.carried(
            R.Rename("model/h.$L.*", "model/l.$L.*"),
            R.split_qkv("model/l.$L.qkv", ("model/l.$L.q", "model/l.$L.k", "model/l.$L.v"), heads=4, kv_heads=1),
            R.fuse_ffn(("model/l.$L.gate", "model/l.$L.up"), "model/l.$L.ffn"),
            R.Permute("model/l.$L.q"),
            R.Cast("model/l.$L.k", "bfloat16"),
            R.Rename("model/b/w", "model/c/w"),
        ),
    )
    expected = training(
        {"l.0.q": (4, 8), "l.0.k": (2, 4), "l.0.v": (2, 4), "l.0.ffn": (6, 4), "c/w": (2,)}, prefix=prefix
    )
    assert shapes(ruled) == {path: s and s.shape for path, s in expected.items()}
    dtypes = {path: item.array.spec.dtype for path, item in ruled.items.items() if item.array}
    assert dtypes["model/l.0.k"] == "bfloat16" and dtypes[f"optimizer/{prefix}l.0.k/exp_avg"] == "float32"
    chain = rule_history(ruled.items[f"optimizer/{prefix}l.0.q/exp_avg"], "here")
    assert chain.startswith(f"optimizer/{prefix}h.0.qkv/exp_avg -(1.1: rename") and chain.endswith("-> here")


def test_dropped_and_copied_parameters_take_their_moments_along() -> None:
    leaves = training({"a": (2,), "b": (3,)})
    ruled = run(leaves, R.carried(R.Drop("model/a"), R.Copy("model/b", "model/c")))
    assert set(ruled.items) == set(training({"b": (3,), "c": (3,)}))
    assert set(ruled.dropped) == {path for path in leaves if path.split("/")[-1] == "a" or "/a/" in path}


def test_parameters_of_different_groups_are_not_joined() -> None:
    leaves = training({"a": (2,), "b": (2,)})
    leaves["param_groups/members/other/b"] = leaves.pop(f"param_groups/members/{GROUP}/b")
    with pytest.raises(MismatchError, match="no such leaf"):
        run(leaves, R.carried(R.Concat(("model/a", "model/b"), "model/c")))


def test_carried_rules_and_their_inverse_give_every_leaf_back() -> None:
    leaves = training({"h.0.qkv": (6, 4), "h.1.qkv": (6, 4), "e": (3, 2)})
    rules = R.carried(
        R.Split("model/h.$L.qkv", ("model/h.$L.q", "model/h.$L.k", "model/h.$L.v")),
        R.Stack("model/h.$L.q", "model/q"),
        R.Permute("model/e"),
    )
    there = run(leaves, rules)
    back = apply_rules(there.items, R.inverse(rules, leaves))
    assert shapes(back) == {path: s and s.shape for path, s in leaves.items()}


def test_moments_of_another_shape_and_moments_that_are_missing_are_refused() -> None:
    leaves = training({"a": (4, 2), "b": (4, 2)})
    leaves["optimizer/a/row"] = spec(4)
    with pytest.raises(MismatchError, match="a moment of its parameter's shape"):
        run(leaves, R.carried(R.Split("model/a", ("model/c", "model/d"))))
    assert "optimizer/c/row" in run(leaves, R.carried(R.Rename("model/a", "model/c"))).items
    del leaves["optimizer/a/row"], leaves["optimizer/b/exp_avg"]
    with pytest.raises(MismatchError, match="no such leaf"):
        run(leaves, R.carried(R.Concat(("model/a", "model/b"), "model/c")))


def test_carried_rules_see_parameters_alone() -> None:
    leaves = training({"a": (4, 2)}) | {"extra/w": spec(4, 2)}
    found = shapes(run(leaves, R.carried(R.Permute("*"))))
    assert found["model/a"] == found["optimizer/a/exp_avg"] == (2, 4) and found["extra/w"] == (4, 2)
    with pytest.raises(MismatchError, match="below model/"):
        run(leaves, R.carried(R.Rename("model/a", "net/a")))


def test_the_inverse_of_a_rule_for_all_layers_is_a_rule_for_each_of_them() -> None:
    names = {f"h.{i}.qkv": (6, 4) for i in range(60)}
    leaves = training(names)
    rules = R.carried(R.Split("model/h.$L.qkv", ("model/h.$L.q", "model/h.$L.k", "model/h.$L.v")))
    back = R.inverse(rules, leaves)
    there = run(leaves, rules)
    assert shapes(apply_rules(there.items, back)) == {path: s and s.shape for path, s in leaves.items()}


@pytest.mark.parametrize("path", ["param_groups/lr", "param_groups/order", "param_groups/members"])
def test_what_lies_right_below_param_groups_is_no_membership_and_stays(path: str) -> None:
    leaves = training({"a": (4, 2)}) | {path: None}
    found = shapes(run(leaves, R.carried(R.Rename("model/a", "model/b"))))
    assert found[path] is None and found["model/b"] == found["optimizer/b/exp_avg"] == (4, 2)


@pytest.mark.parametrize("groups", [{"order": []}, {"lr": 1}])
def test_param_groups_without_members_are_loaded_by_carried_rules(groups: dict[str, object]) -> None:
    store = tc.MemoryStore()
    tc.save(store, {"model": {"w": np.arange(2)}, "param_groups": groups})
    found = tc.load(store, transforms=[R.carried(R.Rename("model/w", "model/v"))])
    assert found["model"]["v"].tolist() == [0, 1] and found["param_groups"] == groups
