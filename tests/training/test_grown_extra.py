"""Dicts and lists below the names of `extra` that grew after the program made them: they take what was saved."""

from __future__ import annotations

import collections
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import treeckpt as tc
from treeckpt import training

SOURCES = ["path", "tree", "bank"]


def _restore(path: Path, kind: str, saved: Any, here: Any, **options: Any) -> Any:
    model = nn.Linear(1, 1)
    source: Any = training.state(model, extra={"it": saved})
    if kind != "tree":
        tc.save(path, source)
        source = path if kind == "path" else [path]
    return training.restore(source, model, extra={"it": here}, **options)


def _plain(tree: Any) -> Any:
    if isinstance(tree, tc.PerRank):
        return _plain(tree.value)
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, collections.deque)):
        return [_plain(value) for value in tree]
    return tree.tolist() if isinstance(tree, (Tensor, np.ndarray)) else tree


def _t(value: float) -> Tensor:
    return torch.tensor([value])


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ({"loss": [3.0, 2.0]}, {}),
        ({"loss": [3.0, 2.0]}, collections.defaultdict(list)),
        (collections.OrderedDict(loss=[3.0, 2.0]), {"loss": [9.0]}),
        ({1: 0.5, 2: 0.4}, {}),
        ({1: 0.5, 2: 0.4}, {1: 0.0}),
        ({"loss": [], "more": {}}, {}),
        ([_t(1), _t(2)], []),
        ([_t(1), _t(2)], [_t(0)]),
        ([1.0, _t(2)], [0.0]),
        ([[_t(1)], [_t(1), _t(2)]], [[], []]),
        ([np.zeros(2), {"a": _t(1)}], []),
        ([1.0, 2.0], [1.0, 2.0, 3.0]),
        ({"a": {"b": [{"c": _t(2)}]}}, {"a": {}}),
        (collections.deque([_t(1), _t(2)], 3), collections.deque(maxlen=3)),
        (tc.PerRank({"seen": [1, _t(2)]}), tc.PerRank({})),
        ({"a[0]*?": {"~rank*": _t(1)}}, {}),
    ],
    ids=str,
)
def test_they_take_what_was_saved(tmp_path: Path, saved: Any, here: Any, kind: str) -> None:
    into = copy.deepcopy(here)
    _restore(tmp_path / "c", kind, saved, into)
    assert type(into) is type(here) and _plain(into) == _plain(saved)


@pytest.mark.parametrize("kind", SOURCES)
def test_what_is_there_is_filled_and_what_is_new_is_a_copy(tmp_path: Path, kind: str) -> None:
    saved, first = [_t(1), _t(2)], _t(0)
    here = [first]
    _restore(tmp_path / "c", kind, saved, here)
    saved[1].fill_(-1)
    assert here[0] is first and first.tolist() == [1] and here[1].tolist() == [2]


@pytest.mark.parametrize("kind", SOURCES)
def test_a_list_whose_arrays_would_be_lost_is_named_with_both_lengths(tmp_path: Path, kind: str) -> None:
    here = [_t(0), _t(5)]
    with pytest.raises(
        tc.MismatchError,
        match=r"^extra/it: expected a sequence of 1 item, .*, found one of 2 here, .*del the_list\[1:\]",
    ):
        _restore(tmp_path / "c", kind, [_t(1)], here)
    assert _plain(here) == [[0], [5]]
    del here[1:]  # as the hint says
    _restore(tmp_path / "d", kind, [_t(1)], here)
    assert _plain(here) == [[1]]


def test_a_sequence_that_cannot_grow_is_named_with_both_lengths(tmp_path: Path) -> None:
    for number, here in enumerate([(), collections.deque(maxlen=1)]):
        with pytest.raises(
            tc.MismatchError, match=r"^extra/it: expected a sequence of 2 items, .* one of 0 here\. Give"
        ):
            _restore(
                tmp_path / str(number), "path", type(here)([_t(1), _t(2)]) if number == 0 else [_t(1), _t(2)], here
            )


def test_names_of_extra_are_compared_and_leaves_that_were_not_saved_are_missing(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    tc.save(tmp_path / "c", training.state(model, extra={"a": {"x": 1}, "b": [1]}))
    with pytest.raises(tc.MismatchError, match=r"extra/b/0: expected the same names in extra"):
        training.restore(tmp_path / "c", model, extra={"a": {}})
    with pytest.raises(tc.MismatchError, match=r"extra/a/y: .*1 missing in the checkpoint"):
        training.restore(tmp_path / "c", model, extra={"a": {"y": 2}, "b": []})
    kept: dict[str, Any] = {"a": {"y": 2}, "b": ...}
    report = training.restore(tmp_path / "c", model, extra=kept, strict=False)
    assert kept["a"] == {"y": 2, "x": 1} and report.missing == ("extra/a/y",)


def test_nothing_is_added_where_the_restore_is_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", training.state(nn.Linear(1, 1), extra={"log": {"loss": [1.0]}}))
    log: dict[str, Any] = {}
    with pytest.raises(tc.MismatchError, match="model/weight"):
        training.restore(tmp_path / "c", nn.Linear(2, 1), extra={"log": log})
    assert log == {}


def test_a_preempted_run_goes_on_with_its_history(tmp_path: Path) -> None:
    for steps in (2, 4):
        model, history = nn.Linear(1, 1), collections.defaultdict(list)
        manager = tc.Manager(tmp_path / "run", background=False)
        state = manager.resume(model, extra={"history": history})
        first = 0 if state is None else state.step + 1
        for step in range(first, steps):
            history["loss"].append(float(step))
            manager.save(step, training.state(model, extra={"history": history}))
    assert history == {"loss": [0.0, 1.0, 2.0, 3.0]}
