"""Statements: which rules they are, and which texts are none."""

from __future__ import annotations

import pytest

from treeckpt import rules as R
from treeckpt._core.tree.spec import ArraySpec
from treeckpt.errors import FormatError
from treeckpt.rules._apply_rules import apply_rules, leaf_states

Q = ("q", "k", "v")


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("a -> b", (R.Rename("a", "b"),)),
        ("a -> a", ()),
        ("a, b -> c, axis=1", (R.Concat(("a", "b"), "c", 1),)),
        ("a -> b, c, axis = 0", (R.Split("a", ("b", "c"), 0),)),
        ("a -> b, _, axis=0", (R.Split("a", ("b", "_"), 0),)),
        ("a -> _", (R.Drop("a"),)),
        ("a, b -> _, optional", (R.Drop("a", optional=True), R.Drop("b", optional=True))),
        ("_ -> a", (R.Keep("a"),)),
        ("a^T -> b", (R.Permute("a"), R.Rename("a", "b"))),
        ("a^T -> a", (R.Permute("a"),)),
        ("a^T, b -> c, axis=0", (R.Permute("a"), R.Concat(("a", "b"), "c", 0))),
        ('a -> b, permute = "[2, 0, 1]"', (R.Permute("a", (2, 0, 1)), R.Rename("a", "b"))),
        ("a -> a, permute='[]'", (R.Permute("a"),)),
        ("a -> b, dtype='bfloat16'", (R.Cast("a", "bfloat16"), R.Rename("a", "b"))),
        ("a -> a, src_dtype='float32', dst_dtype='float16'", (R.Cast("a", "float16", "float32"),)),
        ("h.$LAYER_ID.w -> l.$LAYER_ID.w", (R.Rename("h.$LAYER_ID.w", "l.$LAYER_ID.w"),)),
        ("l.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w",
         (R.Rename("l.$LAYER_ID_OFFSET.w", "l.${LAYER_ID_OFFSET - 1}.w"),)),
        ("h.$L.w -> l.${L+4}.w", (R.Rename("h.$L.w", "l.${L+4}.w"),)),
        ("e.*.w -> e.w, axis=0", (R.Concat(("e.$EACH.w",), "e.w", 0),)),
        ("l.$L.e.$E.w -> l.$L.e, axis=0", (R.Concat(("l.$L.e.$E.w",), "l.$L.e", 0),)),
        ("a.* -> b.*", (R.Rename("a.*", "b.*"),)),
        ("w -> w[0:3], axis=1", (R.Split("w", ("w_0", "w_1", "w_2"), 1),)),
        ("w[2:4] -> w, axis=1", (R.Concat(("w_2", "w_3"), "w", 1),)),
        ("qkv -> q, k, v, fused_qkv, num_heads=8, num_key_value_groups=2", (R.Split("qkv", Q, 1, (4, 1, 1), 2),)),
        ("q, k, v -> qkv, fused_qkv, num_heads=8, num_key_value_groups=2, axis=0", (R.Concat(Q, "qkv", 0, 2),)),
        ("qkv -> q, k, v, fused_qkv_old, num_heads=8, num_key_value_groups=2", (R.Split("qkv", Q, 1, (8, 2, 2), 1),)),
        ("q, k, v -> qkv, fused_qkv_old, num_heads=8, num_key_value_groups=2, shards=2", (R.Concat(Q, "qkv", 1, 2),)),
        ("ffn -> gate, up, fused_ffn, shards=4", (R.Split("ffn", ("gate", "up"), 1, None, 4),)),
        ("gate, up -> ffn, fused_ffn", (R.Concat(("gate", "up"), "ffn", 1, 1),)),
        ("# nothing\n\na -> b; c -> _  # both\n", (R.Rename("a", "b"), R.Drop("c"))),
    ],
)  # fmt: skip
def test_statements_are_rules(text: str, rules: tuple[R.Rule, ...]) -> None:
    assert R.parse(text) == rules


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", "none"),
        ("a -> b -> c", "several"),
        ("-> b", "none"),
        ("a -> ", "none"),
        ("a b -> c", "a b"),
        ("a -> b, c", "axis"),
        ("a, b -> c", "axis"),
        ("a, b -> c, d, axis=0", "2 and 2"),
        ("a -> b, axis=x, c", "x"),
        ("a -> b^T", "on the right"),
        ("a, _ -> b, axis=0", "among names"),
        ("a -> b, color='red'", "color"),
        ("a -> b, permute=3", "3"),
        ("qkv -> q, k, fused_qkv, num_heads=8, num_key_value_groups=2", "1 and 2"),
        ("qkv -> q, k, v, fused_qkv, num_heads=8, num_key_value_groups=3", "8 and 3"),
        ("qkv -> q, k, v, fused_qkv, num_heads=8", "num_key_value_groups"),
        ("qkv -> q, k, v, axis=0, num_heads=8", "num_heads"),
        ("a -> b, axis=0", "axis"),
        ("a -> b, src_dtype='float32'", "src_dtype"),
    ],
)
def test_texts_that_are_no_statements_are_refused_by_what_they_say(text: str, found: str) -> None:
    with pytest.raises(FormatError) as caught:
        R.parse(text)
    assert found in str(caught.value)


def test_names_get_a_prefix_and_optimizers_follow_where_that_is_asked_for() -> None:
    rules = R.parse("h.$L.w^T -> l.$L.w; old -> _", prefix="model/", carried=True)
    inner = (R.Permute("model/h.$L.w"), R.Rename("model/h.$L.w", "model/l.$L.w"), R.Drop("model/old"))
    assert rules == (R.Carried(inner),)
    leaves = {"model/h.0.w": ArraySpec((2, 3), "float32"), "optimizer/h.0.w/exp_avg": ArraySpec((2, 3), "float32")}
    found = apply_rules(leaf_states({**leaves, "model/old": None}), rules).items
    assert {path: item.array and item.array.spec.shape for path, item in found.items()} == {
        "model/l.0.w": (3, 2),
        "optimizer/l.0.w/exp_avg": (3, 2),
    }


def test_what_was_fused_as_text_is_split_as_text() -> None:
    leaves = {name: ArraySpec((4, 8 * n), "float32") for name, n in zip(Q, (4, 1, 1), strict=True)}
    options = "fused_qkv, num_heads=4, num_key_value_groups=1"
    ruled = apply_rules(leaf_states(leaves), R.parse(f"q, k, v -> qkv, {options}; qkv -> q, k, v, {options}"))
    first = apply_rules(leaf_states(leaves), [])
    assert {p: i.array for p, i in ruled.items.items()} == {p: i.array for p, i in first.items.items()}
