"""A verification gives the statistics of every array from the bytes that it compares, in whatever pieces these come."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.samples import BFloat16, gpt_state, write_checkpoint
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._io.storage.open import open_store
from treeckpt._loading.verify import LeafMoments, verify_checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A sharded state with an array of 3 bytes, after which wider elements are not aligned; returns path and state."""
    path = tmp_path_factory.mktemp("moments") / "step_00000001"
    state = gpt_state(layers=1, width=24, vocabulary=50)
    state["odd"] = np.array([True, False, True])
    state["broken"] = np.array([1, np.nan, np.inf, -np.inf, 2], np.float64)
    # whose parts on ranks are rows, and boxes
    for weight in (state["model"]["wte.weight"], state["model"]["layers.0.attention.proj.weight"]):
        weight[14, 1] = weight[13, 20:22] = np.nan
    write_checkpoint(path, state, step=1)
    return path, state


def expect_statistics(index, found, state):
    by_path = {index.entries[number].path: moments for number, moments in found.items()}
    wanted = {f"model/{name}": array for name, array in state["model"].items()}
    for at, moment in state["optimizer"]["state"].items():
        wanted |= {f"optimizer/state/{at}/{name}": array for name, array in moment.items()}
    wanted |= {"odd": state["odd"], "broken": state["broken"]}
    assert by_path.keys() - wanted.keys() == {"rng/~rank*"}
    for path, array in wanted.items():
        if isinstance(array, BFloat16):
            array = (array.bits.astype(np.uint32) << 16).view(np.float32)
        moments, numbers = by_path[path], array.astype(np.float64).reshape(-1)
        numbers = numbers[np.isfinite(numbers)]
        assert (moments.count, moments.finite) == (array.size, len(numbers)), path
        places = [np.flatnonzero(bad(array.reshape(-1))).tolist() for bad in (np.isnan, np.isinf)]
        assert [moments.first_nan, moments.first_infinite] == [place[0] if place else -1 for place in places], path
        assert (moments.low, moments.high) == (numbers.min(), numbers.max()), path
        assert math.isclose(moments.norm, np.linalg.norm(numbers), rel_tol=1e-9), path
        assert math.isclose(moments.deviation, numbers.std(), rel_tol=1e-9, abs_tol=1e-9), path


def test_one_verification_gives_the_statistics_of_all_arrays(written):
    path, state = written
    checkpoint = Checkpoint(open_store(path))
    moments = LeafMoments(checkpoint.index)
    assert verify_checkpoint(checkpoint, moments=moments).ok
    expect_statistics(checkpoint.index, moments.found(), state)
    own = moments.found()[next(leaf.number for leaf in checkpoint.index.entries if "~rank" in leaf.path and leaf.spec)]
    assert own.count == 4 * state["rng"].value.size, "of all ranks together"


@settings(max_examples=8)
@given(data=st.data())
def test_pieces_may_come_in_any_order_and_cut_elements(written, data):
    path, state = written
    checkpoint = Checkpoint(open_store(path))
    index = checkpoint.index
    moments = LeafMoments(index)
    pieces = []
    for file in index.file_list:
        content = (path / file.name).read_bytes()[file.header :]
        cuts = sorted(data.draw(st.sets(st.integers(1, len(content) - 1), max_size=20)))
        bounds = [0, *cuts, len(content)]
        pieces += [(file, low, content[low:high]) for low, high in pairwise(bounds)]
    for file, start, piece in data.draw(st.permutations(pieces)):
        moments.add(file, start, memoryview(piece))
    expect_statistics(index, moments.found(), state)
