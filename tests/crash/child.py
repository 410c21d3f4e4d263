"""A process that saves and is killed at one store call, or one system call, after another; see test_crash.

One process imports everything and forks for each kill, so that hundreds of kills take seconds. Every line that it
prints is one case: the directory, where the kill was, and at which call, if it happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import treeckpt as tc
from tests.world import Faulty, Switch, errors_of, on_ranks, small_tree
from treeckpt.io import diskfile
from treeckpt.io import store as store_module

WORLD = 2
SYSTEM_CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "replace", "unlink", "posix_fallocate")


def kill_telling(pipe: int) -> Callable[[str], None]:
    def kill(name: str) -> None:
        os.write(pipe, name.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    return kill


class Os:
    """os with a switch at the calls that change a disk."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in SYSTEM_CALLS:
            return real
        return lambda *args, **options: self.switch(name, lambda: real(*args, **options))


def save(path: Path, seed: int, mode: str, switch: Switch) -> None:
    store = Faulty(tc.LocalStore(path), switch) if mode == "store calls" else tc.LocalStore(path)
    if mode == "system calls":
        store_module.os = diskfile.os = Os(switch)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        outcomes = on_ranks(
            WORLD, lambda c: tc.save(store, small_tree(c.rank, WORLD, seed=seed), comm=c, overwrite=True)
        )
    finally:
        store_module.os = diskfile.os = os
    assert errors_of(outcomes) == [None] * WORLD, errors_of(outcomes)


def run(directory: Path, mode: str, before: bool) -> None:
    switch = Switch()
    for seed in (1, 2) if before else (2,):
        switch = Switch()
        save(directory / "count", seed, mode, switch)
    for at in range(len(switch.calls)):
        for after in (False, True):
            path = directory / f"{at:03d}-{after}"
            if before:
                save(path, 1, "", Switch())
            told, tell = os.pipe()
            pid = os.fork()
            if pid == 0:
                save(path, 2, mode, Switch(at, after=after, act=kill_telling(tell)))
                os._exit(0)
            os.close(tell)
            call = os.read(told, 1000).decode()
            os.close(told)
            status = os.waitpid(pid, 0)[1]
            assert os.WIFSIGNALED(status) == bool(call), status
            row = {"path": str(path), "at": at, "after": after, "call": call}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    assert "torch" not in sys.modules
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "overwriting")
