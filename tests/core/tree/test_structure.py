"""Path texts, structures as JSON, and the union of several ranks' structures."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies import keys, trees
from treeckpt._core.sharding.int_runs import decode_runs, encode_runs
from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.flatten import flatten
from treeckpt._core.tree.merge import merge, with_ranks
from treeckpt._core.tree.structure import (
    MAX_DEPTH,
    DictNode,
    ListNode,
    PerRankNode,
    Structure,
    TupleNode,
    key_text,
    parse_path,
    paths_of,
    rank_key,
)
from treeckpt._core.tree.value_codec import TypedValue
from treeckpt.errors import FormatError, MismatchError, TreeError


def typed(key):
    """A key with its type, as dict keys 1, 1.0 and True are equal but have different texts."""
    return (type(key), tuple(map(typed, key))) if isinstance(key, tuple) else (type(key), repr(key))


@given(keys(), keys())
def test_different_keys_never_share_a_text(a, b):
    assert (key_text(a) == key_text(b)) == (typed(a) == typed(b))


@given(st.lists(keys(), min_size=1, max_size=4), st.lists(keys(), min_size=1, max_size=4))
def test_different_paths_never_share_a_text(a, b):
    texts = ["/".join(key_text(key) for key in path) for path in (a, b)]
    assert (texts[0] == texts[1]) == ([typed(k) for k in a] == [typed(k) for k in b])


@given(st.lists(keys(), min_size=1, max_size=5))
def test_a_path_is_parsed_into_its_steps(path):
    steps = parse_path("/".join(key_text(key) for key in path))
    assert len(steps) == len(path)
    for step, key in zip(steps, path, strict=True):
        plain = isinstance(key, str) and not key_text(key).startswith("~s")
        assert step == (key if plain else key_text(key))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("layers.0.weight", "layers.0.weight"), ("a/b", "a~1b"), ("~", "~0"), ("", "~s"), ("7", "~s7"), (7, "7"),
        (-7, "-7"),
        (True, "~b1"), (None, "~n"), (1.5, "~f1.5"), (b"\x00\xff", "~x00ff"), ((0, "a"), "~(0~,a~)"), ((), "~(~)"),
    ],
)  # fmt: skip
def test_key_texts_are_as_documented(key, text):
    assert key_text(key) == text
    assert rank_key(3) == "~rank3"


@pytest.mark.parametrize(
    "key", [object(), frozenset(), 1j, float("nan"), (1, float("nan")), "\ud800", ("\udcff",), ...]
)
def test_keys_without_a_text_of_their_own_are_refused_by_path(key):
    with pytest.raises(TreeError, match="model/opt"):
        key_text(key, "model/opt")


@given(trees())
def test_structures_come_back_from_json(tree):
    structure, _ = flatten(tree)
    assert msgspec.json.decode(msgspec.json.encode(structure), type=Structure) == structure


@given(trees(), st.integers(0, 9))
def test_paths_follow_from_the_structure_alone(tree, rank):
    structure, leaves = flatten(tree, rank=rank)
    mine = [
        "/".join(f"~rank{rank}" if step == "~rank*" else step for step in path.split("/"))
        for path, _ in paths_of(structure)
    ]
    assert mine == [path for path, _ in leaves]


@given(trees())
def test_no_two_leaves_share_a_path(tree):
    paths = [path for path, _ in flatten(tree)[1]]
    assert len(set(paths)) == len(paths)


def nested(depth):
    structure: Structure = None
    for _ in range(depth):
        structure = ListNode((structure,))
    return structure


@pytest.mark.parametrize(
    "structure",
    [
        nested(MAX_DEPTH + 2),
        DictNode(("a",), ()),
        DictNode((), (None,)),
        DictNode((TypedValue("list", ()),), (None,)),
        DictNode((TypedValue("nothing", ()),), (None,)),
        PerRankNode((), (None,)),
        PerRankNode((((0, 1, 1 << 60),),), (None,)),
        PerRankNode((((0, 1),),), (None,)),
        PerRankNode((((-1,),),), (None,)),
    ],
)
def test_structures_that_no_save_writes_are_refused(structure):
    with pytest.raises((FormatError, TreeError)):
        paths_of(structure)


# merge ----------------------------------------------------------------------------------------------------------------
def structure_of(tree, rank=0):
    return flatten(tree, rank=rank)[0]


@given(trees())
def test_a_structure_merged_with_itself_is_itself(tree):
    structure = structure_of(tree)
    assert merge(structure, structure) == structure


@given(st.dictionaries(keys(), trees(per_rank=False, max_leaves=4), max_size=5), st.data())
def test_parts_of_a_dict_on_several_ranks_make_up_the_dict(tree, data):
    held = [data.draw(st.sets(st.integers(0, 2), min_size=1)) for _ in tree]
    parts = [{k: v for (k, v), ranks in zip(tree.items(), held, strict=True) if rank in ranks} for rank in range(3)]
    merged = structure_of(parts[0])
    for part in parts[1:]:
        merged = merge(merged, structure_of(part))
    assert sorted(paths_of(merged)) == sorted(paths_of(structure_of(tree)))


def test_each_rank_keeps_its_own_subtree_under_per_rank():
    trees_of = [{"rng": PerRank([0] * (rank // 2 + 1)), "w": 0} for rank in range(4)]
    merged = structure_of(trees_of[0], 0)
    for rank in (1, 2, 3):
        merged = merge(merged, structure_of(trees_of[rank], rank))
    found = [(path, None if r is None else decode_runs(r).tolist()) for path, r in paths_of(merged)]
    assert found == [
        ("rng/~rank*/0", [0]), ("rng/~rank*/0", [1]), ("rng/~rank*/0", [2]), ("rng/~rank*/1", [2]),
        ("rng/~rank*/0", [3]), ("rng/~rank*/1", [3]), ("w", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "path"),
    [
        ({"m": {"x": 1}}, {"m": {"x": [1]}}, "m/x"),
        ({"m": {"a/b": [1]}}, {"m": {"a/b": [1, 2]}}, "m/a~1b"),
        ({("t", 1): (1,)}, {("t", 1): [1]}, "~(t~,1~)"),
        ([1, {"k": 1}], [1, 2], "1"),
        ({"m": {}}, {"m": ()}, "m"),
        (1, [1], ""),
    ],
)
def test_contradictions_name_the_place(a, b, path):
    with pytest.raises(MismatchError, match="same kind of node") as caught:
        merge(structure_of(a), structure_of(b))
    assert caught.value.path == path


def test_a_key_true_is_not_the_key_one():
    merged = merge(structure_of({1: 0}), structure_of({True: 0}))
    assert [path for path, _ in paths_of(merged)] == ["1", "~b1"]


def test_equal_trees_on_all_ranks_widen_every_per_rank_inner_ones_too():
    structure = structure_of({"a": PerRank({"x": 1, "y": [PerRank(2)]}), "b": [3]}, rank=1)
    wide = with_ranks(structure, encode_runs(range(3)))
    assert paths_of(wide) == [
        ("a/~rank*/x", encode_runs(range(3))),
        ("a/~rank*/y/0/~rank*", encode_runs(range(3))),
        ("b/0", None),
    ]
    assert with_ranks(TupleNode((None,)), encode_runs(range(3))) == TupleNode((None,))


def test_repeated_nodes_keep_their_own_keys():
    keys = [(1, "a"), (True, "a"), (1.0, "a"), ("1", "a"), (1, "a")]
    whole = DictNode(tuple("vwxyz"), tuple(DictNode(one, (None, None)) for one in keys))
    steps = ["v/1", "w/~b1", "x/~f1.0", "y/~s1", "z/1"]
    assert [path for path, _ in paths_of(whole)][::2] == steps


def test_as_many_leaves_as_a_tree_has_may_stand_under_a_long_name():
    keys = tuple(f"k{n}" for n in range(100_000))
    structure = DictNode(("n" * 900,), (DictNode(keys, (None,) * len(keys)),))
    assert len(paths_of(structure)) == len(keys)


def test_names_that_take_more_text_than_is_read_back_are_refused_before_a_save():
    def tree(leaves, levels):
        below = dict.fromkeys((f"k{n}" for n in range(leaves)), 1)
        for _ in range(levels):
            below = {"level" * 5: below}
        return below

    structure, leaves = flatten(tree(5000, 190))
    assert len(paths_of(structure)) == len(leaves)
    with pytest.raises(TreeError, match="shorter names"):
        flatten(tree(10_000, 190))
