"""The text of a path and the keys of a tree: each is made of the other, without loss, for every key that is stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from treeckpt._core.tree.flatten import flatten

SCALARS = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.integers(-(10**20), 10**20),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=8),
    st.sampled_from(["", "~", "/", "0", "-1", "~s0", "~rank*", "~rank3", "~(~)", "a~,b", "~1", "~01", "1e3"]),
)
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=8)
RANKS = st.one_of(st.integers(0, 10**8), st.just(...)).map(tc.PerRank)


def exact(keys: Any) -> str:
    return repr(keys)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0


@given(st.lists(st.one_of(KEYS, RANKS)).map(tuple))
def test_keys_come_back_from_their_text(keys: tuple[object, ...]) -> None:
    assert exact(tc.path_keys(tc.path_text(keys))) == exact(keys)


@given(st.text(st.sampled_from("~01srbnfx(),*/-9a."), max_size=12))
def test_a_text_is_refused_or_is_that_of_its_keys(text: str) -> None:
    try:
        keys = tc.path_keys(text)
    except tc.MismatchError as error:
        assert error.path == text and error.hint
    else:
        assert tc.path_text(keys) == text


class Pair(NamedTuple):
    left: Any
    right: Any


def test_the_keys_of_an_index_lead_to_the_leaves(tmp_path: Any) -> None:
    tree = {
        "model": {"a/b": np.ones(2), "0": 1},
        (1, None): [np.zeros(1), Pair(2, b"x")],
        True: 3,
        "own": tc.PerRank(4),
    }
    tc.save(tmp_path / "c", tree)
    loaded = tc.load(tmp_path / "c")
    for (_, leaf), entry in zip(flatten(tree)[1], tc.inspect(tmp_path / "c").entries, strict=True):
        node = loaded
        for key in tc.path_keys(entry.path):
            named = isinstance(node, tuple) and isinstance(key, str)
            node = node.value if isinstance(key, tc.PerRank) else getattr(node, key) if named else node[key]
        assert np.array_equal(node, leaf)


def test_what_is_no_key_is_named() -> None:
    with pytest.raises(tc.TreeError, match=r"keys\[1\]: expected dict keys of str.* found a key of builtins:set"):
        tc.path_text(("a", {1}))
    with pytest.raises(tc.TreeError, match=r"keys\[0\]: expected PerRank of a rank"):
        tc.path_text((tc.PerRank(-1),))
    for wrong in ("model", 3):
        with pytest.raises(tc.TreeError, match="keys: expected the keys of a path, in order"):
            tc.path_text(wrong)  # type: ignore[arg-type]
    with pytest.raises(tc.MismatchError, match="path: expected a path as text"):
        tc.path_keys(("a",))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a//b", "a/", "/a", "007", "~b2", "~", "~2", "~f01", "~xzz", "~(1", "~(1~)x", "~sab"])
def test_a_text_that_no_key_has_is_named(text: str) -> None:
    with pytest.raises(tc.MismatchError, match="expected steps as path_text writes them, found the step"):
        tc.path_keys(text)


def test_a_text_of_tuples_without_end_is_refused() -> None:
    with pytest.raises(tc.MismatchError):
        tc.path_keys("~(" * 100_000)
