"""The trees of ranks join key by key, in an order that all can tell; what contradicts another rank's is refused."""

import collections

import pytest

from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.flatten import flatten
from treeckpt._core.tree.merge import merge, with_ranks
from treeckpt._core.tree.structure import DefaultDictNode, DictNode, ListNode, OrderedDictNode, PerRankNode
from treeckpt.errors import MismatchError

FIRST, SECOND, BOTH = ((0,),), ((1,),), ((0, 1, 2),)


def structure_of(tree, rank=0):
    return flatten(tree, rank=rank)[0]


def merged(a, b):
    return merge(structure_of(a), structure_of(b))


def leaves(*keys):
    return DictNode(keys, (None,) * len(keys))


def test_keys_that_only_the_second_has_follow_those_of_the_first():
    assert merged({"c": 1, "a": 1}, {"b": 1, "a": 1, "d": 1}) == leaves("c", "a", "b", "d")
    assert merged({}, {"a": 1}) == merged({"a": 1}, {}) == leaves("a")


def test_parts_below_a_common_key_are_joined_there():
    assert merged({"m": {"x": 1}, "n": [{"p": 1}]}, {"n": [{"q": 1}], "m": {"y": 1}}) == DictNode(
        ("m", "n"), (leaves("x", "y"), ListNode((leaves("p", "q"),)))
    )


def test_ordered_and_default_dicts_join_with_their_like():
    ordered = merged(collections.OrderedDict(a=1), collections.OrderedDict(b=1))
    assert ordered == OrderedDictNode(None, ("a", "b"), (None, None))
    counted = merged(collections.defaultdict(int, a=1), collections.defaultdict(int, b=1))
    assert counted == DefaultDictNode("int", ("a", "b"), (None, None))


@pytest.mark.parametrize(
    ("a", "b", "path", "expected", "found"),
    [
        ({"a": 1}, collections.OrderedDict(a=1), "", "dict of 1", "OrderedDict of 1"),
        ({"m": [1, 2]}, {"m": [1]}, "m", "list of 2", "list of 1"),
        ({"m": [1]}, {"m": (1,)}, "m", "list of 1", "tuple of 1"),
        ({"m": 1}, {"m": []}, "m", "a leaf", "list of 0"),
        ({"m": {"x": []}}, {"m": {"x": 1}}, "m/x", "list of 0", "a leaf"),
        ([[1], [[1]]], [[1], [[1, 2]]], "1/0", "list of 1", "list of 2"),
        ([1, [1]], [1, 1], "1", "list of 1", "a leaf"),
        ([1, 1], [1, [1]], "1", "a leaf", "list of 1"),
        (collections.deque([1], 2), collections.deque([1], 3), "", "deque of 1", "deque of 1"),
        (PerRank(1), [1], "", "per_rank of 1", "list of 1"),
        (1, PerRank(1), "", "a leaf", "per_rank of 1"),
    ],
)
def test_nodes_that_differ_are_named(a, b, path, expected, found):
    with pytest.raises(MismatchError) as caught:
        merged(a, b)
    assert (caught.value.path, caught.value.found) == (path, found)
    assert caught.value.expected.endswith(f": {expected}")


def test_defaults_of_another_factory_are_named():
    with pytest.raises(MismatchError, match="default_factory") as caught:
        merged({"m": collections.defaultdict(int)}, {"m": collections.defaultdict(list)})
    assert (caught.value.path, caught.value.found) == ("m", "list")


def test_equal_groups_of_ranks_are_one_and_others_are_listed():
    one, two = PerRankNode((FIRST,), (ListNode((None,)),)), PerRankNode((SECOND,), (None,))
    both = PerRankNode((FIRST, SECOND), (ListNode((None,)), None))
    assert merge(one, two) == both and merge(one, one) == one and merge(both, two) == both
    other = PerRankNode((FIRST,), (None,))
    assert merge(one, other) == PerRankNode((FIRST, FIRST), (ListNode((None,)), None))


def test_every_per_rank_gets_the_ranks_and_all_else_stays():
    inner = PerRankNode((FIRST,), (None,))
    wide = PerRankNode((BOTH,), (None,))
    assert with_ranks(inner, BOTH) == wide
    assert with_ranks(ListNode((None, inner)), BOTH) == ListNode((None, wide))
    assert with_ranks(ListNode((leaves("a"), ListNode((inner,)))), BOTH) == ListNode((leaves("a"), ListNode((wide,))))
    assert with_ranks(PerRankNode((FIRST,), (ListNode((inner,)),)), BOTH) == PerRankNode((BOTH,), (ListNode((wide,)),))
    assert with_ranks(None, BOTH) is None


def test_a_structure_without_per_rank_is_returned_as_it_is():
    for structure in (leaves("a"), ListNode((leaves("a"), ListNode((leaves("b"),))))):
        assert with_ranks(structure, BOTH) is structure
