"""A job of two hosts with two ranks and a disk each, killed at one system call after another; see test_two_hosts.

Each rank is a thread. A job is one process, or one for each host, of which one is killed; these exchange messages
through files. Every line that it prints is one case: the directory, where the kill was, and at which call, if it
happened.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import treeckpt as tc
from tests.crash.kills import killed, switched
from tests.helpers.world import LONG, Switch, errors_of, on_ranks, small_tree
from treeckpt._io.comm.comm import Comm, CommState
from treeckpt._io.storage import local_files, local_store
from treeckpt._io.storage.local_store import LocalRun

WORLD, HOSTS = 4, 2
SYSTEM_CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "replace", "unlink", "posix_fallocate")
SILENT = 1.5
"""Seconds after which a rank of a killed host counts as silent."""


class HostStore(tc.LocalStore):
    """A directory on the disk of one host, which has the same path on every host."""

    @property
    def url(self) -> str:
        return "/local/checkpoint"


class HostRun(LocalRun):
    """The same for a run."""

    @property
    def url(self) -> str:
        return "/local/run"

    def folder(self, name: str) -> HostStore:
        return HostStore(self.path / name)


class FileComm:
    """A rank's comm through files in a directory, for processes without torch."""

    def __init__(self, directory: Path, rank: int, *, timeout: float) -> None:
        self.directory, self.rank, self.size, self.timeout, self.state = directory, rank, WORLD, timeout, CommState()

    def _path(self, key: str) -> Path:
        return self.directory / key.replace("/", "~")

    def post(self, key: str, data: bytes) -> None:
        temporary = self._path(f"{key} {self.rank} {time.monotonic_ns()}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, self._path(key))

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        end = time.monotonic() + timeout
        while True:
            found = [self._path(key).read_bytes() if self._path(key).exists() else None for key in keys]
            if None not in found or time.monotonic() >= end:
                return found
            time.sleep(0.005)

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)


def host_of(rank: int) -> int:
    return rank * HOSTS // WORLD


def disk(directory: Path, host: int) -> Path:
    return directory / f"host{host}"


def save(comm: Comm, directory: Path, seed: int) -> None:
    """One rank's part in a save."""
    store = HostStore(disk(directory, host_of(comm.rank)) / "checkpoint")
    tree, files = small_tree(comm.rank, WORLD, seed=seed), {"config.json": b"%d" % seed}
    tc.save(store, tree, comm=comm, overwrite=True, files=files)


def train(comm: Comm, directory: Path, seed: int, *, grace: float = 3600.0) -> None:
    """One rank's part in a job that saves a step and keeps no other."""
    run = HostRun(disk(directory, host_of(comm.rank)) / "run")
    with tc.Manager(run, keep=1, background=False, grace=grace, comm=comm) as manager:
        manager.save(seed, small_tree(comm.rank, WORLD, seed=seed), files={"config.json": b"%d" % seed})


ACTS: dict[str, tuple[Callable[..., None], bool]] = {
    "new": (save, False),
    "overwriting": (save, True),
    "keeping one step": (train, True),
}
"""What is killed, and whether it was done once before."""


def whole_job(act: Callable[[Comm], object], switch: Switch) -> None:
    """All ranks in one process."""
    with switched(switch, SYSTEM_CALLS, [local_store, local_files]):
        outcomes = on_ranks(WORLD, act)
    assert errors_of(outcomes) == [None] * WORLD, errors_of(outcomes)


def one_host(act: Callable[[Comm], object], host: int, messages: Path, switch: Switch) -> list[Any]:
    """The ranks of one host."""
    messages.mkdir(exist_ok=True)
    comms = [FileComm(messages, rank, timeout=SILENT) for rank in range(WORLD) if host_of(rank) == host]
    with switched(switch, SYSTEM_CALLS, [local_store, local_files]):
        return errors_of(on_ranks(comms, act, timeout=LONG))


def killed_with(culprit: str, directory: Path, at: int, act: Callable[[Comm], object], *, after: bool) -> str:
    """Kills a job, or a host of it; gives the call at which it was killed, "" where it has made fewer."""
    if culprit == "job":
        return killed(at, lambda switch: whole_job(act, switch), after=after)
    host, messages = int(culprit), directory / "messages"
    pid = os.fork()
    if pid == 0:
        one_host(act, 1 - host, messages, Switch())
        os._exit(0)
    call = killed(at, lambda switch: one_host(act, host, messages, switch), after=after)
    assert os.waitpid(pid, 0)[1] == 0
    return call


def run(directory: Path, culprit: str, what: str, every: int) -> None:
    """Kills before and after one call after another, up to the first save that ends before it has made so many."""
    act, before = ACTS[what]
    for at in itertools.count(0, every):
        for after in (False, True):
            place = directory / f"{at:03d}-{after}"
            place.mkdir()
            if before:
                whole_job(lambda comm, place=place: act(comm, place, 1), Switch())
            call = killed_with(culprit, place, at, lambda comm, place=place: act(comm, place, 2), after=after)
            print(json.dumps({"path": str(place), "at": at, "after": after, "call": call}), flush=True)
            if not call and not after:
                return


if __name__ == "__main__":
    assert "torch" not in sys.modules
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
