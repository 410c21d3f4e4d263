"""Trees of every kind of container, taken apart and put together again."""

import collections
import dataclasses
import enum
import os
import time
import typing

import msgspec
import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.strategies import Branch, Color, Frozen, Registered, Weight, keys, resolve, same, trees, values
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.flatten import child_of_rank, flatten, replace_leaves, unflatten, update_in_place
from treeckpt._core.tree.leaf_differences import SequenceReplacement
from treeckpt._core.tree.structure import (
    MAX_DEPTH,
    CustomNode,
    DataclassNode,
    DefaultDictNode,
    NamedTupleNode,
    PerRankNode,
    StructSequenceNode,
    Structure,
    TupleNode,
)
from treeckpt.errors import FormatError, MismatchError, TreeError

SPACE = "treeckpt-tests"


def there_and_back(tree, rank=0):
    structure, leaves = flatten(tree, rank=rank, namespace=SPACE)
    stored = msgspec.json.decode(msgspec.json.encode(structure), type=Structure)
    rest = iter([leaf for _, leaf in leaves])
    found = unflatten(stored, rest, resolve=resolve, rank=rank, namespace=SPACE)
    assert next(rest, None) is None, "every leaf is used"
    return found


@given(trees(), st.integers(0, 5))
def test_trees_come_back_exactly(tree, rank):
    assert same(there_and_back(tree, rank), tree)


@given(trees(st.none() | st.text(max_size=2)))
def test_leaves_are_the_very_objects_in_order(tree):
    _, leaves = flatten(tree, namespace=SPACE)
    marks = [object() for _ in leaves]
    new = replace_leaves(tree, iter(marks), namespace=SPACE)
    assert [leaf for _, leaf in flatten(new, namespace=SPACE)[1]] == marks


@given(keys(), keys())
def test_insertion_order_and_types_of_keys_stay(a, b):
    assert same(there_and_back({a: 1, b: 2}), {a: 1, b: 2})


@pytest.mark.parametrize(
    "tree", [{}, [], (), collections.deque(maxlen=2), collections.OrderedDict(), PerRank({}), Registered([], "x")]
)
def test_empty_containers_have_no_leaves_and_stay(tree):
    assert flatten(tree, namespace=SPACE)[1] == []
    assert same(there_and_back({"x": tree}), {"x": tree})


@pytest.mark.parametrize("leaf", [1, "x", None, 1.5, b"x", {1, 2}, range(3), Color.RED])
def test_a_single_leaf_is_a_tree_with_an_empty_path(leaf):
    assert flatten(leaf) == (None, [("", leaf)])


@given(values().filter(lambda value: not isinstance(value, (dict, list, tuple))))
def test_whatever_is_no_container_is_one_leaf(value):
    [(path, leaf)] = flatten({"k": value})[1]
    assert path == "k" and leaf is value


@pytest.mark.parametrize(
    "tree",
    [os.stat(os.curdir), time.localtime(), time.struct_time(range(9)), os.times()],
    ids=["stat", "zone", "no zone", "times"],
)
def test_struct_sequences_keep_the_fields_that_are_no_items(tree):
    resolve = {f"{type(tree).__module__}:{type(tree).__qualname__}": type(tree)}.__getitem__
    structure, leaves = flatten({"s": tree})
    assert len({path for path, _ in leaves}) == len(leaves) == type(tree).n_fields
    found = unflatten(structure, iter([leaf for _, leaf in leaves]), resolve=resolve)["s"]
    assert type(found) is type(tree) and found.__reduce__() == tree.__reduce__()
    renewed = replace_leaves(tree, iter([leaf for _, leaf in leaves]))
    assert renewed.__reduce__() == tree.__reduce__()


def test_paths_name_fields_positions_and_keys():
    tree = {"w": Weight([1], 2), "b": Branch(3, Frozen(4)), "r": Registered([5], "x"), "p": PerRank((6,)), 7: 8}
    assert [path for path, _ in flatten(tree, rank=2, namespace=SPACE)[1]] == [
        "w/value/0", "w/scale", "b/left", "b/right/only", "r/part 0", "p/~rank2/0", "7",
    ]  # fmt: skip


def test_a_dataclass_comes_back_without_running_its_init():
    @dataclasses.dataclass
    class Loud:
        x: int

        def __post_init__(self):
            raise AssertionError("ran")

    loud = object.__new__(Loud)
    loud.x = 1
    structure, _ = flatten(loud)
    back = unflatten(structure, iter([5]), resolve=lambda name: Loud)
    assert isinstance(back, Loud) and back.x == 5


def test_a_member_of_an_enum_of_dataclasses_is_a_leaf():
    @dataclasses.dataclass(frozen=True)
    class Base:
        x: int

    class Member(Base, enum.Enum):
        A = 1

    assert flatten(Member.A) == (None, [("", Member.A)])


def test_a_dataclass_that_is_a_container_itself_is_a_leaf_for_its_content_would_be_lost():
    @dataclasses.dataclass
    class Output(dict):
        x: int = 0

    value = Output(3)
    assert flatten(value) == (None, [("", value)])


# what cannot be taken apart -------------------------------------------------------------------------------------------
def deep(levels, make):
    tree = 0
    for _ in range(levels):
        tree = make(tree)
    return tree


def test_the_deepest_tree_that_flattens_comes_back():
    tree = deep(MAX_DEPTH, lambda t: {"k": [t]} if t == 0 else [t])[0]
    found = there_and_back(tree)
    for _ in range(MAX_DEPTH - 2):  # the comparison of lists in lists nests calls
        assert type(found) is type(tree) is list and len(found) == len(tree) == 1
        found, tree = found[0], tree[0]
    assert found == tree == {"k": [0]}


def holding_itself():
    tree: dict = {}
    tree["x"] = [tree]
    return tree


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"m": {object(): 1}}, "m"),
        ({"m": {frozenset(): 1}}, "m"),
        ({"m": {float("nan"): 1}}, "m"),
        ({"m": {("a", "\ud800"): 1}}, "m"),
        ({"m": {"\ud800": 1}}, "m"),
        ([collections.defaultdict(lambda: 0)], "0"),
        ([collections.defaultdict(object)], "0"),
        ({"m": object.__new__(Branch)}, "m"),
        (holding_itself(), "x/0/x/0/x/0"),
    ],
)
def test_what_cannot_be_stored_names_its_path(tree, path):
    with pytest.raises(TreeError) as caught:
        flatten(tree)
    assert caught.value.path.startswith(path)
    assert caught.value.expected and caught.value.found


class Twice:
    pass


optree.register_pytree_node(
    Twice, lambda t: ((1, 2), None, ("same", "same")), lambda aux, children: Twice(), namespace=SPACE
)


def test_a_registered_class_that_names_two_children_alike_is_refused():
    with pytest.raises(TreeError, match="x: "):
        flatten({"x": Twice()}, namespace=SPACE)


# what cannot be put together ------------------------------------------------------------------------------------------
def nobody(name):
    raise LookupError(name)


@pytest.mark.parametrize("tree", [Weight(1, 2), Branch(1), Frozen(1), Registered([1], "x"), time.gmtime(0)])
def test_classes_that_the_program_lacks_are_named_with_the_path(tree):
    structure, leaves = flatten({"m": tree}, namespace=SPACE)
    with pytest.raises(MismatchError, match="Import") as caught:
        unflatten(structure, iter([leaf for _, leaf in leaves]), resolve=nobody, namespace=SPACE)
    assert caught.value.path == "m"
    assert type(tree).__qualname__ in str(caught.value)


@pytest.mark.parametrize(
    "node",
    [
        NamedTupleNode("x:Y", ("a",), (None,)),
        StructSequenceNode("x:Y", ("a",), (None,)),
        DataclassNode("x:Y", ("a",), (None,)),
        CustomNode("x:Y", None, ("a",), (None,)),
    ],
)
@pytest.mark.parametrize("kind", [int, Weight, Branch, time.struct_time, dict])
def test_a_class_of_another_kind_or_with_other_fields_is_refused(node, kind):
    with pytest.raises(MismatchError):
        unflatten(node, iter([1]), resolve=lambda name: kind)


def test_an_unknown_default_factory_is_refused():
    with pytest.raises(FormatError, match="system"):
        unflatten(DefaultDictNode("system", (), ()), iter([]), resolve=nobody)


def test_the_subtree_of_a_rank_that_did_not_save_is_missing():
    node = PerRankNode((encode_runs([0, 2]), encode_runs([1])), (None, Structure and None))
    assert child_of_rank(node, 1, "x") is None
    with pytest.raises(MismatchError, match="rank 3") as caught:
        child_of_rank(node, 3, "rng")
    assert caught.value.path == "rng"


# new leaves in old containers -----------------------------------------------------------------------------------------
@given(trees(per_rank=False))
def test_graft_puts_leaves_into_containers_that_can_change_and_names_the_others(tree):
    marks = iter(range(1000, 9999))
    new = replace_leaves(tree, marks, namespace=SPACE)
    wanted = flatten(new, namespace=SPACE)[1]
    before = flatten(tree, namespace=SPACE)[1]
    would_be = update_in_place(tree, new, is_value=lambda leaf: False, namespace=SPACE, dry=True)
    assert all(a is b for (_, a), (_, b) in zip(before, flatten(tree, namespace=SPACE)[1], strict=True))
    stuck = dict(update_in_place(tree, new, is_value=lambda leaf: False, namespace=SPACE))
    assert list(stuck.items()) == would_be
    after = flatten(tree, namespace=SPACE)[1]
    assert [path for path, _ in after] == [path for path, _ in wanted]
    for (path, leaf), (_, mark) in zip(after, wanted, strict=True):
        assert leaf == mark or stuck.get(path) == mark or path == ""


class Made(typing.NamedTuple):
    x: object
    y: object


class MadeOtherwise(Made):
    """A namedtuple whose `_make` and `__new__` are those of its author."""

    def __new__(cls, both):
        return super().__new__(cls, both, both)

    @classmethod
    def _make(cls, iterable):
        raise AssertionError("a container is rebuilt from its children alone")


def test_a_namedtuple_with_a_make_of_its_own_is_rebuilt_from_its_children():
    tree = {"a": MadeOtherwise(1)}
    found = replace_leaves(tree, iter([2, 3]))["a"]
    assert type(found) is MadeOtherwise and tuple(found) == (2, 3)
    store = tc.MemoryStore()
    tc.save(store, {"a": MadeOtherwise(5), "b": [1]})
    for saved in (tc.load(store), tc.load(store, like={"a": MadeOtherwise(0), "b": [1]})):
        assert type(saved["a"]) is MadeOtherwise and tuple(saved["a"]) == (5, 5)


def test_a_sequence_that_takes_the_saved_content_whole_makes_its_namedtuple_from_the_children():
    sequence = SequenceReplacement("a", MadeOtherwise(1), TupleNode((None, None)))
    found = sequence.content(iter([7, 8]), resolve=resolve)
    assert type(found) is MadeOtherwise and tuple(found) == (7, 8)
