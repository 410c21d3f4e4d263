"""A save that is killed at any moment leaves the checkpoint before it, or the new one: whole, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import treeckpt as tc
from tests.helpers.world import assert_holds, whole_tree
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import parse_shard_name

ROOT = Path(__file__).parents[2]


def killed_saves(directory: Path, mode: str, what: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "error", "-m", "tests.crash.child", str(directory), mode, what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def state_of(path: Path, what: str) -> str:
    """Which checkpoint is there, verified bit for bit."""
    try:
        step = tc.load(path, select="step")["step"]
    except tc.CheckpointNotFound:
        assert what == "new", "the checkpoint before is lost"
        assert INDEX_NAME not in [p.name for p in path.glob("*")]
        return "none"
    assert step == 102 or (what == "overwriting" and step == 101)
    assert_holds(path, seed=step - 100)
    return "new" if step == 102 else "old"


def check_rebuild(path: Path, state: str) -> None:
    """Torn files do not confuse it: the index that was there comes back, or a whole save that was not committed yet."""
    index = (path / INDEX_NAME).read_bytes() if state != "none" else b""
    try:
        rebuilt = tc.rebuild_index(path, replace=True)
    except tc.CheckpointError:
        assert state == "none", "a committed save can always be rebuilt"
        return
    assert_holds(path, seed=2 if (path / INDEX_NAME).read_bytes() != index else {"new": 2, "old": 1}[state])
    assert rebuilt == tc.inspect(path)
    (path / INDEX_NAME).write_bytes(index) if index else (path / INDEX_NAME).unlink()


def check_next_save(path: Path) -> None:
    tc.save(path, whole_tree(seed=3), overwrite=True)
    assert_holds(path, seed=3)
    names = {p.name for p in path.iterdir()}
    assert INDEX_NAME in names and any(parse_shard_name(name) for name in names)


@pytest.mark.parametrize("what", ["new", "overwriting"])
@pytest.mark.parametrize("mode", [pytest.param("store calls", marks=pytest.mark.slow), "system calls"])
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, mode: str, what: str) -> None:
    rows = killed_saves(tmp_path, mode, what)
    before = [bool(row["call"]) for row in rows if not row["after"]]
    assert len(rows) >= 20 and before == [True] * (len(before) - 1) + [False]
    states: list[str] = []
    for row in rows:
        path = Path(row["path"])
        state = state_of(path, what) if path.exists() or what == "overwriting" else "none"
        if path.exists():
            check_rebuild(path, state)
        check_next_save(path)
        if row["call"]:
            states.append(state)
        else:
            assert state == "new", "it ran to its end"
    first = "old" if what == "overwriting" else "none"
    assert states == [first] * states.count(first) + ["new"] * states.count("new"), "a commit is never undone"
    assert min(states.count(first), states.count("new")) >= 2, states
