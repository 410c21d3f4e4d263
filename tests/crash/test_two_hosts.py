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
from tests.crash.two_hosts import HOSTS, disk, save, train, whole_job
from tests.helpers.world import Switch, assert_holds
from treeckpt._core.format.files import parse_file_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._runs.failures import DIRECTORY
from treeckpt._runs.leftovers import clean_checkpoint
from treeckpt._runs.run import RunDirectory

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
    found = {
        tc.inspect(index.parent).created_ns: (host, index.parent.relative_to(disk(place, host)))
        for host in range(HOSTS)
        for index in disk(place, host).rglob(INDEX_NAME)
    }
    if not found:
        return None
    (first, name), whole = found[max(found)], place / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    for host in (1 - first, first):  # its index is the one that counts
        if (path := disk(place, host) / name).exists():
            shutil.copytree(path, whole, dirs_exist_ok=True)
    seed = tc.load(whole, select="step")["step"] - 100
    assert_holds(whole, seed=seed)
    assert tc.read_file(whole, "config.json") == b"%d" % seed
    return seed


def clean_alone(place: Path) -> None:
    """What each host alone may do there."""
    for host in range(HOSTS):
        if (path := disk(place, host) / "checkpoint").exists():
            clean_checkpoint(path, grace=0.0)
        RunDirectory(disk(place, host) / "run").clean([tc.policy.Last(1)], grace=0.0)


def check_next_job(place: Path, what: str) -> None:
    """The next save is whole, and leaves nothing else on any disk."""
    if what == "keeping one step":
        whole_job(lambda comm: train(comm, place, 3, grace=0.0), Switch())
    else:
        whole_job(lambda comm: save(comm, place, 3), Switch())
    assert seed_on_both(place) == 3
    clean_alone(place)
    for host in range(HOSTS):
        files = [path for path in disk(place, host).rglob("*") if path.is_file() and path.parent.name != DIRECTORY]
        kinds = sorted(owned.kind if (owned := parse_file_name(path.name)) else path.name for path in files)
        assert kinds == ["config.json", "index", "shard", "shard", "sidecar", "timings"], files


WHATS = ("new", "overwriting", "keeping one step")
SOME = [("job", what, 13) for what in WHATS[1:]]
ALL = [pytest.param(culprit, what, 1, marks=SLOW) for culprit in ("job", "0", "1") for what in WHATS]


@pytest.mark.parametrize(("culprit", "what", "every"), [*SOME, *ALL])
def test_a_killed_job_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path: Path, culprit: str, what: str, every: int
) -> None:
    before, states = None if what == "new" else 1, list[int | None]()
    between = 0
    for row in killed_jobs(tmp_path, culprit, what, every):
        place = Path(row["path"])
        state = seed_on_both(place)
        assert state in (before, 2), row
        between += state == 2 and any(place.rglob("host1/**/prepared.*"))
        clean_alone(place)
        assert seed_on_both(place) == state, row
        states.append(state)
        check_next_job(place, what)
    assert states[0] == before and states[-1] == 2
    assert between or every > 1, "some die when one disk has the index, and the other does not"
