"""A restore that finds its checkpoint damaged midway takes the one before, and leaves nothing of the first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import on_ranks, shards_of
from treeckpt._core.format.files import step_name

N = 1 << 18


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def damage_end(run: Path, step: int) -> None:
    """Changes a byte of the last array of a step."""
    shard = shards_of(run / step_name(step))[0]
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    shard.write_bytes(data)


class Recorder:
    """Keeps what it is given."""

    def __init__(self, value: int) -> None:
        self.value, self.given = value, list[int]()

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given.append(state["value"])


def damaged_newest(run: Path) -> tc.Manager:
    """A run of two steps, of which the newest has a changed byte in its last array."""
    made = tc.Manager(run, background=False, keep=None)
    for step in (1, 2):
        made.save(step, {f"w{i}": np.full(N, 10.0 * step + i) for i in range(4)} | {"step": step})
    damage_end(run, 2)
    return made


def test_a_fallback_fills_everything_again_and_gives_objects_their_state_once(run: Path) -> None:
    made, target = damaged_newest(run), {f"w{i}": np.zeros(N) for i in range(4)} | {"step": 0}
    arrays = dict(target)
    made.restore(into=target)
    assert made.count == 1 and target["step"] == 1
    assert all(target[f"w{i}"] is arrays[f"w{i}"] and (target[f"w{i}"] == 10 + i).all() for i in range(4))


def test_a_fallback_gives_what_is_registered_the_state_of_the_older_step(run: Path) -> None:
    made = tc.Manager(run, background=False, keep=None)
    model, counter, reader = torch.nn.Linear(512, 512), Recorder(0), Recorder(0)
    made.register("model", model)
    made.register("counter", counter)
    made.register_io_state("reader", reader)
    for step in (1, 2):
        counter.value = reader.value = step
        with torch.no_grad():
            model.weight.fill_(step)
        made.save(step, {"x": np.full(N, float(step))})
    damage_end(run, 2)
    target = {"x": np.zeros(N)}
    made.restore(into=target)
    assert (target["x"] == 1).all() and bool((model.weight == 1).all())
    assert counter.given == [1] and reader.given == [1], "never that of the step that was passed over"


def test_a_fallback_never_mixes_two_steps_where_the_older_one_has_less(run: Path) -> None:
    made = tc.Manager(run, background=False, keep=None)
    made.save(1, {"a": np.full(N, 1.0)})
    made.save(2, {"a": np.full(N, 2.0), "b": np.full(N, 2.0)})
    damage_end(run, 2)
    for target in ({"a": np.zeros(N), "b": np.zeros(N)}, {"b": np.zeros(N), "a": np.zeros(N)}):
        report = made.restore(into=target, strict=False)
        assert report.missing == ("b",) and (target["a"] == 1).all() and not target["b"].any()


def test_a_restore_that_finds_nothing_whole_says_what_the_target_holds(run: Path) -> None:
    made = damaged_newest(run)
    damage_end(run, 1)
    target = {f"w{i}": np.zeros(N) for i in range(4)} | {"step": 0}
    with pytest.raises(tc.CheckpointNotFound, match="may hold parts of the checkpoints that failed"):
        made.restore(into=target)
    with pytest.raises(tc.CheckpointNotFound, match=r"treeckpt verify says of each$"):
        made.restore()
    with pytest.raises(tc.CorruptError, match="partly filled"):
        made.restore(step=2, into=target)


def test_a_restore_of_a_part_leaves_the_rest_and_refuses_what_is_missing(run: Path) -> None:
    with tc.Manager(run, background=False) as made:
        counter = Recorder(3)
        made.register("counter", counter)
        made.save(1, {"a": np.ones(4), "b": np.ones(4)})
        target = {"a": np.zeros(4)}
        made.restore(into=target, strict="missing")
        assert (target["a"] == 1).all() and counter.given == [3]
        assert (made.restore({"b": np.zeros(4)}, strict="missing")["b"] == 1).all()
        target = {"a": np.zeros(4), "c": np.zeros(4)}
        with pytest.raises(tc.MismatchError, match="1 missing in the checkpoint: c"):
            made.restore(into=target, strict="missing")
        made.register("later", Recorder(0))
        with pytest.raises(tc.MismatchError, match="the state of 'later'"):
            made.restore({"b": ...}, strict="missing")
    assert not target["a"].any() and counter.given == [3, 3]


@pytest.mark.parametrize("steps", [(1, 2), (None, 1), (1, None)])
def test_ranks_that_restore_different_steps_are_told(tmp_path: Path, steps: tuple[int | None, int | None]) -> None:
    with tc.Manager(tmp_path, background=False) as manager:
        manager.save(1, {"v": 1})
        manager.save(2, {"v": 2})
    found = on_ranks(2, lambda comm: tc.Manager(tmp_path, comm=comm).restore(step=steps[comm.rank]))
    for outcome in found:
        assert isinstance(outcome.error, tc.RankError) and "MismatchError" in str(outcome.error), outcome
        assert f"step={steps[0]} on rank 0" in str(outcome.error) and f"step={steps[1]} on rank 1" in str(outcome.error)
