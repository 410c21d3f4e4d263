"""A process that saves and is killed at one store call, or one system call, after another; see test_crash.

One process imports everything and forks for each kill, so that hundreds of kills take seconds. Every line that it
prints is one case: the directory, where the kill was, and at which call, if it happened.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import treeckpt as tc
from tests.crash.kills import killed, switched
from tests.helpers.world import Faulty, Switch, errors_of, on_ranks, small_tree
from treeckpt._io.storage import local_files, local_store

WORLD = 2
SYSTEM_CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "replace", "unlink", "posix_fallocate")


def save(path: Path, seed: int, mode: str, switch: Switch) -> None:
    store = Faulty(tc.LocalStore(path), switch) if mode == "store calls" else tc.LocalStore(path)
    modules = [local_store, local_files] if mode == "system calls" else []
    with switched(switch, SYSTEM_CALLS, modules):
        outcomes = on_ranks(
            WORLD,
            lambda c: tc.save(
                store, small_tree(c.rank, WORLD, seed=seed), comm=c, overwrite=True, files={"config.json": b"%d" % seed}
            ),
        )
    assert errors_of(outcomes) == [None] * WORLD, errors_of(outcomes)


def run(directory: Path, mode: str, before: bool) -> None:
    """Kills before and after one call after another, up to the first save that ends before it has made so many.

    How many calls a save makes is not counted in advance: a slow one renews its progress record, which takes more.
    After a call that fails, as the removal of a file that is gone does, nothing is killed.
    """
    for at in itertools.count():
        for after in (False, True):
            path = directory / f"{at:03d}-{after}"
            if before:
                save(path, 1, "", Switch())
            call = killed(at, lambda switch, path=path: save(path, 2, mode, switch), after=after)
            row = {"path": str(path), "at": at, "after": after, "call": call}
            print(json.dumps(row), flush=True)
            if not call and not after:
                return


if __name__ == "__main__":
    assert "torch" not in sys.modules
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "overwriting")
