"""Errors say where, what and what next, and survive the way to another process."""

import pickle

import pytest

from treeckpt import errors
from treeckpt.errors import CheckpointError, FormatError, RankError, TreeckptError

KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not RankError])
def test_every_error_says_path_expected_found_and_hint_and_survives_pickling(kind):
    error = kind("model/w", expected="1", found="2", hint="Do this")
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert type(one) is kind
        assert str(one) == "model/w: expected 1, found 2. Do this"
        assert (one.path, one.expected, one.found, one.hint) == ("model/w", "1", "2", "Do this")


def test_a_rank_error_names_the_ranks():
    error = pickle.loads(pickle.dumps(RankError("run", ranks={3: "no space", 1: "killed"})))
    assert str(error) == "run: found rank 1: killed; rank 3: no space"
    assert error.ranks == {3: "no space", 1: "killed"}


def test_wrong_arguments_are_caught_by_the_classes_of_python_too():
    for kind, of_python in ((errors.TreeError, TypeError), (errors.MismatchError, ValueError)):
        with pytest.raises(of_python) as caught:
            raise kind("others", expected="a dict")
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), of_python)


def test_an_empty_path_is_the_root():
    assert str(TreeckptError("", expected="a tree")) == "<root>: expected a tree"


def test_the_tree_of_errors_is_as_drawn():
    assert errors.__all__ == sorted(errors.__all__)
    assert all(issubclass(kind, TreeckptError) for kind in KINDS)
    assert issubclass(FormatError, CheckpointError)
    for kind in KINDS:
        assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_says_its_cause_and_remedy_and_shows_its_message(kind):
    """`make docs` renders these; tests/test_examples.py runs the examples."""
    assert all(part in kind.__doc__ for part in ("\n\n    Cause: ", "\n\n    Remedy: ", "\n\n    >>> "))
