"""Layers are ranked by how far all their arrays moved together, as one vector."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from treeckpt._inspect.ranking import is_optimizer_state, layer_changes, layer_of, relative_changes


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model/layers.12.mlp.0.weight", "model/layers.12"),
        ("model/transformer/h/3/attn/w", "model/transformer/h/3"),
        ("optimizer/state/7/exp_avg", "optimizer/state/7"),
        ("model/wte.weight", "model"),
        ("model/w1.weight", "model"),
        ("x", ""),
        ("0", "0"),
    ],
)
def test_a_layer_is_named_up_to_the_first_number(path, layer):
    assert layer_of(path) == layer


@pytest.mark.parametrize(
    ("path", "is_state"),
    [
        ("optimizer/state/7/exp_avg", True),
        ("optim.state.layers.0.weight.exp_avg_sq", True),
        ("optimizers/0/w", True),
        ("emb/slots/exp_avg", True),
        ("state/3/momentum_buffer", True),
        ("model/layers.0.weight", False),
        ("model/suboptimal.weight", False),
        ("model/exp_avgs", False),
        ("", False),
    ],
)
def test_optimizer_state_is_told_by_a_key_of_the_path(path, is_state):
    assert is_optimizer_state(path) is is_state


def columns(pairs):
    rows = []
    for before, after in pairs:
        a, b = np.linalg.norm(before), np.linalg.norm(after)
        cosine = before @ after / (a * b) if a and b else math.nan
        rows.append(((before != after).sum(), 0, a, b, np.linalg.norm(after - before), cosine))
    names = ("changed", "not_finite", "before", "after", "change", "cosine")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


VECTOR = hnp.arrays(np.float64, 4, elements=st.integers(-9, 9))


@given(st.lists(st.tuples(st.integers(0, 3), VECTOR, VECTOR), min_size=1, max_size=12))
def test_a_layer_changes_as_the_vector_of_all_its_arrays(drawn):
    found = layer_changes([f"layers.{n}.w" for n, _, _ in drawn], columns([(a, b) for _, a, b in drawn]))
    assert [one.relative for one in found] == sorted((one.relative for one in found), reverse=True)
    for one in found:
        members = [(a, b) for n, a, b in drawn if f"layers.{n}" == one.layer]
        before, after = (np.concatenate(side) for side in zip(*members, strict=True))
        assert one.arrays == len(members) and one.changed == sum((a != b).any() for a, b in members)
        assert math.isclose(one.change, np.linalg.norm(after - before), abs_tol=1e-9)
        if one.before and one.after:
            wanted = before @ after / np.linalg.norm(before) / np.linalg.norm(after)
            assert math.isclose(one.cosine, wanted, abs_tol=1e-9)
            assert math.isclose(one.relative, one.change / one.before)
        else:
            assert one.cosine is None


def test_what_became_nan_and_what_was_zero_changed_most():
    found = relative_changes(np.array([2.0, 0.0, 0.0, 1.0]), np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 0, 3]))
    assert found.tolist() == [0.5, math.inf, 0.0, math.inf]
