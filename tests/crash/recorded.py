"""A save, or a clean-up, that is recorded: python -m tests.crash.recorded WHAT DIRECTORY; see test_power_loss."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path

import treeckpt as tc
from tests.crash import killed_sharing
from tests.helpers.world import LONG, errors_of, on_ranks, small_tree
from treeckpt._core.format.files import step_name
from treeckpt._io.storage import local_files
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last

WORLD = 2


def save(path: Path, seed: int) -> None:
    outcomes = on_ranks(
        WORLD, lambda c: tc.save(path, small_tree(c.rank, WORLD, seed=seed), step=2, comm=c, overwrite=True)
    )
    assert errors_of(outcomes) == [None] * WORLD, errors_of(outcomes)


def die_making(path: Path) -> None:
    """Begins a save in a process that is killed at its second sync, behind the making of the first directory."""
    if (pid := os.fork()) == 0:
        syncs = itertools.count(1)
        real = local_files.sync_directory

        def sync(directory: Path) -> None:
            if next(syncs) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            real(directory)

        local_files.sync_directory = sync
        tc.LocalStore(path).prepare()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def main(what: str, directory: Path) -> None:
    run = directory / "runs" / "run"
    path = run / step_name(2)
    if what == "after a kill":
        for _ in range(3):  # each time one directory more is made, and not synced
            die_making(path)
    if what in ("new", "overwriting", "after a kill"):
        save(path, 2)
    elif what == "background":
        tc.save_async(path, small_tree(0, 1, seed=2), step=2, overwrite=True).result(LONG)
    elif what in killed_sharing.ACTIONS:
        killed_sharing.ACTIONS[what](run)
    elif what == "cleaning":
        assert not RunDirectory(run).clean([Last(1)], grace=0).failed
    with contextlib.suppress(FileNotFoundError):
        os.open(directory / "returned", os.O_RDONLY)


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main(sys.argv[1], Path(sys.argv[2]))
