"""A power loss at any moment of a save leaves the checkpoint before it, or the new one: whole, and nothing else.

The system calls of real saves are recorded, and everything that they leave possible on the disk is looked at.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import treeckpt as tc
from tests.crash import killed_sharing
from tests.crash.outage import State, lay_out, states
from tests.crash.syscalls import Recording, record, why_not
from tests.helpers.world import assert_holds, seed_of, whole_tree
from treeckpt._core.format.files import step_name
from treeckpt._runs.discovery import scan
from treeckpt._runs.run import RunDirectory

ROOT = Path(__file__).parents[2]
RUN = "runs/run"
LIMITS = [12, pytest.param(5000, marks=pytest.mark.slow)]
"""Choices of what is lost, for a power loss at one moment."""


def recorded(directory: Path, what: str, before: tuple[int, ...]) -> Recording:
    """A run with some steps, each with the seed 1; and what then happens to it."""
    why = why_not()
    if why:
        pytest.skip(why)
    root = directory / "root"
    root.mkdir()
    for step in before:
        tc.save(root / RUN / step_name(step), whole_tree(seed=1), step=step)
    command = [sys.executable, "-W", "error", "-m", "tests.crash.recorded", what, str(root)]
    found = record(root, command, directory / "trace", cwd=ROOT)
    assert found.returned is not None and found.effects and found.syncs
    return found


def recorded_sharing(directory: Path, action: str) -> Recording:
    """A run whose checkpoints share files, and what an action then does in it."""
    if why := why_not():
        pytest.skip(why)
    root = directory / "root"
    root.mkdir()
    killed_sharing.make_run(root / RUN)
    command = [sys.executable, "-W", "error", "-m", "tests.crash.recorded", action, str(root)]
    found = record(root, command, directory / "trace", cwd=ROOT)
    assert found.returned is not None and found.effects and found.syncs
    return found


def look(state: State, root: Path) -> dict[int, int | None]:
    """The seeds of the steps of a state; whatever is there must be whole, or count as no checkpoint."""
    shutil.rmtree(root, ignore_errors=True)
    lay_out(state, root)
    assert "damaged" not in {info.status for info in scan(root / RUN)}, sorted(state.tree)
    return {step: seed_of(root / RUN / step_name(step)) for step in (1, 2, 3)}


def check_goes_on(root: Path) -> None:
    """After it the next save and the clean-up work, and leave nothing of what was torn."""
    run = root / RUN
    tc.save(run / step_name(2), whole_tree(seed=3), step=2, overwrite=True)
    assert_holds(run / step_name(2), seed=3)
    assert not RunDirectory(run).clean([], grace=0).failed
    files = {path.name for path in (run / step_name(2)).iterdir() if not path.name.startswith(".")}
    committed = tc.inspect(run / step_name(2))
    assert {name for name in files if "shard" in name} == {file.name for file in committed.file_list}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("what", ["new", "overwriting", "background", "after a kill"])
def test_a_power_loss_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, what: str, limit: int) -> None:
    fresh = what in ("new", "after a kill")
    recording = recorded(tmp_path, what, () if fresh else (1, 2))
    met: dict[bool, set[int | None]] = {False: set(), True: set()}
    count = 0
    for count, state in enumerate(states(recording, limit), 1):
        found = look(state, tmp_path / "after")
        assert found[1] == (None if fresh else 1) and found[3] is None
        assert found[2] in ((None, 2) if fresh else (1, 2))
        assert not state.saved or found[2] == 2, "a save that has returned is durable"
        met[state.saved].add(found[2])
        if count % 29 == 0:
            check_goes_on(tmp_path / "after")
    assert count >= 25 and met == {False: {None if fresh else 1, 2}, True: {2}}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_power_loss_while_cleaning_leaves_whole_checkpoints_only(tmp_path: Path, limit: int) -> None:
    recording = recorded(tmp_path, "cleaning", (1, 2, 3))
    met: set[tuple[int | None, ...]] = set()
    for state in states(recording, limit):
        found = look(state, tmp_path / "after")
        assert found[3] == 1 and {found[1], found[2]} <= {None, 1}
        met.add((found[1], found[2]))
    assert {(1, 1), (None, None)} <= met


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("action", ["save", "delete_origin"])
def test_a_power_loss_leaves_every_checkpoint_that_shares_files(tmp_path: Path, action: str, limit: int) -> None:
    recording, met = recorded_sharing(tmp_path, action), set[bool]()
    changed = killed_sharing.LAST + (1 if action == "save" else -1)
    for state in states(recording, limit):
        shutil.rmtree(tmp_path / "after", ignore_errors=True)
        lay_out(state, tmp_path / "after")
        run = tmp_path / "after" / RUN
        held = {step for step in range(1, killed_sharing.LAST + 2) if killed_sharing.holds(run, step)}
        assert held | {changed} == set(range(1, killed_sharing.LAST + 1)) | {changed}
        if state.saved:
            assert (changed in held) is (action == "save"), "what has returned is durable"
        met.add(changed in held)
    assert met == {True, False}
