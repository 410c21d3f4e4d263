"""A recursive function runs at any depth, and each of its calls gets the result of the call it made."""

import sys

import pytest

from treeckpt.core.tree.recursion import trampoline


def test_calls_return_their_results_to_those_that_made_them():
    def total(tree):
        found = 0
        for child in tree if isinstance(tree, list) else ():
            found += yield total(child)
        return found if isinstance(tree, list) else tree

    assert trampoline(total([1, [2, [3], []], [[[4]]]])) == 10 and trampoline(total(5)) == 5


def test_a_call_that_returns_nothing_returns_none():
    def inner():
        return
        yield

    def outer():
        return [(yield inner()), (yield inner())]

    assert trampoline(outer()) == [None, None]


def test_depth_is_not_limited_by_nested_calls():
    def down(n):
        return n if not n else 1 + (yield down(n - 1))

    assert trampoline(down(10 * sys.getrecursionlimit())) == 10 * sys.getrecursionlimit()


def test_errors_reach_the_one_who_runs_it():
    def fails():
        raise KeyError("deep")
        yield

    def outer():
        yield fails()

    with pytest.raises(KeyError, match="deep"):
        trampoline(outer())
