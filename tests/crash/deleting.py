"""A process that cleans a run up and is killed at one system call after another; see test_deleting.

As in `child`, one process imports everything and forks for each kill; every line that it prints is one case.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import treeckpt as tc
from tests.crash.kills import killed, switched
from tests.helpers.world import Switch, whole_tree
from treeckpt._core.format.files import deleted_name, step_name
from treeckpt._core.format.shard_header import shard_name
from treeckpt._io.storage import kept_files, local_files, local_store
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last

SYSTEM_CALLS = ("open", "fsync", "link", "rename", "replace", "unlink", "rmdir")
CRASHED, HALF = "c" * 16, "a" * 16


def build(run: Path) -> None:
    """Steps 1 and 2 are to go, 3 and 4 to stay; beside 3 and in 5 a save has crashed, and 6 was half deleted."""
    for step in (1, 2, 3, 4):
        tc.save(run / step_name(step), whole_tree(seed=step), step=step)
    for step in (3, 5):
        (run / step_name(step)).mkdir(exist_ok=True)
        for rank in (0, 1):
            (run / step_name(step) / shard_name(CRASHED, rank, 2, 0)).write_bytes(b"torn")
    (run / step_name(6)).mkdir()
    (run / step_name(6) / shard_name(HALF, 0, 1, 0)).write_bytes(b"rest")
    (run / step_name(6) / deleted_name(HALF)).write_bytes(b"{}")
    old = time.time() - 7200
    for path in [*run.rglob("*"), run]:
        os.utime(path, (old, old))


def clean(run: Path, switch: Switch | None) -> None:
    modules = [local_store, local_files, kept_files]
    with switched(switch, SYSTEM_CALLS, modules) if switch is not None else contextlib.nullcontext():
        report = RunDirectory(run).clean([Last(2)])
    assert not report.failed, report


def main(directory: Path) -> None:
    build(directory / "template")
    shutil.copytree(directory / "template", directory / "count")
    switch = Switch()
    clean(directory / "count", switch)
    for at in range(len(switch.calls)):
        for after in (False, True):
            run = directory / f"{at:03d}-{after}"
            shutil.copytree(directory / "template", run)
            call = killed(at, lambda switch, run=run: clean(run, switch), after=after)
            print(json.dumps({"run": str(run), "call": call}), flush=True)


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main(Path(sys.argv[1]))
