"""Globs over paths: against the plain definition, and what is said of those that mean nothing."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.tree.paths import check_used, compile_globs
from treeckpt.errors import MismatchError

PATHS = st.lists(st.sampled_from(["a", "b", "ab", "a[0]", "*", "a.b", ""]), min_size=1, max_size=3).map("/".join)
GLOBS = st.lists(st.text("ab/*?[]0.", max_size=5) | PATHS, max_size=4)


def means(glob: str, path: str) -> bool:
    return path == glob or fnmatch.fnmatchcase(path, glob) or path.startswith(glob.rstrip("/") + "/")


@given(GLOBS, PATHS)
def test_many_globs_mean_what_each_of_them_means(globs: list[str], path: str) -> None:
    assert compile_globs(tuple(globs)).match(path) == any(means(glob, path) for glob in globs)


@given(GLOBS, st.lists(PATHS, max_size=4))
def test_idle_globs_are_those_that_mean_no_path(globs: list[str], paths: list[str]) -> None:
    expected = {glob for glob in globs if not any(means(glob, path) for path in paths)}
    assert set(compile_globs(tuple(globs)).unused(paths)) == expected


def test_the_first_idle_glob_is_refused_with_what_it_may_have_meant() -> None:
    paths = ["model/weight", "model/bias", "step"]
    check_used("select", ("model", "st*"), paths)
    check_used("select", None, paths)
    check_used("select", (), paths)
    with pytest.raises(
        MismatchError, match=r"modle/weight: expected each glob of exclude .* near to it .*model/weight"
    ):
        check_used("exclude", ("step", "modle/weight"), paths)
