"""A save to the private disks of two hosts that is killed at any moment loses nothing that both disks hold."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import treeckpt as tc
from tests.crash.two_hosts import HOSTS, disk, save, whole_job
from tests.helpers.world import Switch, assert_holds
from treeckpt._core.format.files import parse_file_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._runs.clean_one import clean_checkpoint

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow


def killed_jobs(directory: Path, culprit: str, what: str, every: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "error", "-m", "tests.crash.two_hosts"]
    command += [str(directory), culprit, what, str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def seed_on_both(place: Path) -> int | None:
    """Which checkpoint the disks hold together, verified bit for bit; the newest of which one has the index."""
    found = {}
    for host in range(HOSTS):
        if (disk(place, host) / "checkpoint" / INDEX_NAME).exists():
            found[tc.inspect(disk(place, host) / "checkpoint").created_ns] = host
    if not found:
        return None
    whole, first = place / "whole", found[max(found)]
    shutil.rmtree(whole, ignore_errors=True)
    shutil.copytree(disk(place, 1 - first) / "checkpoint", whole) if disk(place, 1 - first).exists() else None
    shutil.copytree(disk(place, first) / "checkpoint", whole, dirs_exist_ok=True)
    seed = tc.load(whole, select="step")["step"] - 100
    assert_holds(whole, seed=seed)
    assert tc.read_file(whole, "config.json") == b"%d" % seed
    return seed


def check_next_save(place: Path) -> None:
    """The job goes on: its next save is whole, and leaves nothing else on any disk."""
    whole_job(lambda comm: save(comm, place, 3), Switch())
    assert seed_on_both(place) == 3
    for host in range(HOSTS):
        path = disk(place, host) / "checkpoint"
        clean_checkpoint(path, grace=0.0)
        kinds = sorted(owned.kind if (owned := parse_file_name(each.name)) else each.name for each in path.iterdir())
        assert kinds == ["index", "shard", "shard", "sidecar", "timings"], kinds


@pytest.mark.parametrize("what", ["new", "overwriting"])
@pytest.mark.parametrize(
    ("culprit", "every"),
    [
        ("job", 7),
        pytest.param("job", 1, marks=SLOW),
        pytest.param("0", 1, marks=SLOW),
        pytest.param("1", 1, marks=SLOW),
    ],
)
def test_a_killed_job_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path: Path, culprit: str, every: int, what: str
) -> None:
    before, states = 1 if what == "overwriting" else None, list[int | None]()
    for row in killed_jobs(tmp_path, culprit, what, every):
        place = Path(row["path"])
        state = seed_on_both(place)
        assert state in (before, 2), row
        for host in range(HOSTS):  # what each host alone may do there
            if disk(place, host).exists():
                clean_checkpoint(disk(place, host) / "checkpoint", grace=0.0)
        assert seed_on_both(place) == state, row
        states.append(state)
        check_next_save(place)
    assert states[0] == before and states[-1] == 2
