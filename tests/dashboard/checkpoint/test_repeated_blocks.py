"""Repeated blocks are found, and only those that are the same."""

from hypothesis import given
from hypothesis import strategies as st

from treeckpt_dashboard.checkpoint.repeated_blocks import find_repeated_blocks


def names(folds):
    return [(f.title, f.start, f.stop, f.blocks, f.length) for f in folds]


def test_layers_of_a_flat_dict_fold():
    keys = ["wte", *(f"layers.{n}.{k}" for n in range(12) for k in ("a.weight", "b.0.bias")), "norm.weight"]
    [fold] = find_repeated_blocks(keys, ["f"] * len(keys))
    assert names([fold]) == [("layers.0..11", 1, 25, 12, 2)] and fold.name(3) == "layers.3"


def test_plain_numbers_fold_where_they_are_the_same():
    assert names(find_repeated_blocks(["0", "1", "2", "3", "4", "5"], "aaaabb")) == [("0..3", 0, 4, 4, 1)]


def test_blocks_that_differ_in_a_name_a_kind_or_their_order_stay_apart():
    keys = [f"h.{n}.{k}" for n in range(3) for k in ("w", "b")]
    assert len(find_repeated_blocks(keys, "aaaaaa")) == 1
    assert names(find_repeated_blocks(keys, "aaaaab")) == [("h.0..1", 0, 4, 2, 2)]
    assert find_repeated_blocks(["h.0.w", "h.0.b", "h.2.w", "h.2.b"], "aaaa") == [], "numbers that do not follow"
    assert find_repeated_blocks(["h.0.w", "h.0.b", "x", "h.1.w", "h.1.b"], "aaaaa") == [], "blocks that are apart"
    assert find_repeated_blocks(["h.1.w", "h.1.b", "h.0.w", "h.0.b"], "aaaa") == []
    assert find_repeated_blocks(["0", "1"], "aa") == [], "too few to matter"


def test_what_only_looks_like_a_number_is_none():
    assert (
        find_repeated_blocks(["00", "01", "02", "03"], "aaaa") == []
        and find_repeated_blocks(["²", "³", "4", "5"], "aaaa") == []
    )


@given(st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(0, 3), st.sampled_from(["x", ""])), max_size=30))
def test_every_fold_is_what_it_says(parts):
    keys = [".".join(filter(None, (head, str(n), tail))) for head, n, tail in parts]
    folds = find_repeated_blocks(keys, [0] * len(keys))
    reach = 0
    for fold in folds:
        assert reach <= fold.start and fold.length * fold.blocks == fold.stop - fold.start
        reach = fold.stop
        for block in range(fold.blocks):
            inside = keys[fold.start + block * fold.length : fold.start + (block + 1) * fold.length]
            assert [key.removeprefix(fold.name(block)) for key in inside] == [
                key.removeprefix(fold.name(0)) for key in keys[fold.start : fold.start + fold.length]
            ]
    assert reach <= len(keys)
