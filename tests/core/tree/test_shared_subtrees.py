"""Subtrees that repeat in a structure are stored once, at a bounded number of places."""

from __future__ import annotations

import pytest

import treeckpt as tc
from treeckpt._core.tree.structure import (
    MAX_DEPTH,
    MAX_REPEATED_CHILDREN,
    MAX_SHARED,
    CustomNode,
    ListNode,
    PerRankNode,
    Structure,
    expand_shared_subtrees,
    extract_shared_subtrees,
    leaf_count,
)


def test_repeated_subtrees_are_stored_once_where_that_is_shorter() -> None:
    small, large = (ListNode((None,) * n) for n in (MAX_REPEATED_CHILDREN, MAX_REPEATED_CHILDREN + 1))
    pair = ListNode((None, None))
    tree = ListNode((small, small, pair, pair, large, ListNode((large,)), PerRankNode((), (large, large))))
    bare, shared = extract_shared_subtrees(tree)
    mark = CustomNode("", 0, (), ())
    assert shared == (large,)
    assert bare == ListNode((small, small, pair, pair, mark, ListNode((mark,)), PerRankNode((), (large, large))))
    assert expand_shared_subtrees(bare, shared, "index") == tree
    assert leaf_count(tree) == 2 * len(small.children) + 4 + 4 * len(large.children)
    once = ListNode((large, ListNode((None,) * 9)))
    assert extract_shared_subtrees(once) == (once, ())


def test_so_many_places_share_subtrees_and_no_more() -> None:
    one = ListNode((None,) * 4)
    bare, shared = extract_shared_subtrees(ListNode((one,) * (MAX_SHARED + 2)))
    assert bare == ListNode((CustomNode("", 0, (), ()),) * MAX_SHARED + (one,) * 2) and shared == (one,)
    assert expand_shared_subtrees(bare, shared, "index") == ListNode((one,) * (MAX_SHARED + 2))
    for marks in ([0] * (MAX_SHARED + 1), [1], [-1], [True], ["0"]):
        with pytest.raises(tc.FormatError, match="one of the shared subtrees"):
            expand_shared_subtrees(ListNode(tuple(CustomNode("", n, (), ()) for n in marks)), shared, "index")


def test_subtrees_are_shared_at_any_depth() -> None:
    def chain(levels: int, end: Structure) -> Structure:
        node = end
        for _ in range(levels):
            node = ListNode((None, node))
        return node

    one, mark = ListNode((None,) * 4), CustomNode("", 0, (), ())
    for levels in (0, 1, MAX_DEPTH - 1):
        assert expand_shared_subtrees(chain(levels, mark), (one,), "index") == chain(levels, one)
