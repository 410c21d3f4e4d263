"""A training that saves and saves: python -m tests.crash.soak RUN SAVES SEED; see test_soak.

It resumes from the newest checkpoint, in one world after another, and now and then one of its writers is killed. Every
line that it prints is what it holds after one save.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import treeckpt as tc
from tests.helpers.background import session, writer_pid
from tests.helpers.world import LONG, assert_equal, errors_of, on_ranks, small_tree
from treeckpt._io.comm.comm import Comm, thread_comms

WORLDS = (1, 2, 3)
KEEP = 3
GRACE = 20.0
"""Seconds for which what a killed training left behind stays."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class Training:
    """Ranks as threads, which go on in another number of them from time to time."""

    def __init__(self, run: Path, seed: int) -> None:
        self.run, self.chance = run, random.Random(seed)
        self.worlds: dict[int, list[Comm]] = {size: list(thread_comms(size, timeout=LONG)) for size in WORLDS}
        self.step = self.lost = 0

    def segment(self, saves: int) -> None:
        """Some saves in one world, from the newest checkpoint on, which must be bit for bit what was saved."""
        size = self.chance.choice(WORLDS)
        comms = self.worlds[size]
        options: dict[str, Any] = {"max_shard_bytes": self.chance.choice([1 << 12, 1 << 30])}

        def open_(comm: Comm) -> tc.Manager:
            manager = tc.Manager(self.run, keep=KEEP, grace=GRACE, comm=comm, **options)
            if manager.latest() is not None:
                like = small_tree(comm.rank, size, seed=0)
                found = manager.restore(like=like, fallback=tc.Fallback(per_rank="take"))
                expected = small_tree(comm.rank, size, seed=manager.count)
                for name in ("replica", "shared", "step"):
                    assert_equal(found[name], expected[name])
                assert_equal(found["pieces"].local, expected["pieces"].local)
            return manager

        managers = self._all(comms, open_)
        self.step = managers[0].count
        for _ in range(saves):
            self.step += 1
            self.save(comms, managers)
        outcomes = on_ranks(comms, lambda comm: managers[comm.rank].close())
        self._told(errors_of(outcomes))
        print(json.dumps(self.held()), flush=True)

    def save(self, comms: list[Comm], managers: list[tc.Manager]) -> None:
        size = len(comms)
        step = self.step

        def act(comm: Comm) -> None:
            managers[comm.rank].save(step, small_tree(comm.rank, size, seed=step))

        outcomes = on_ranks(comms, act)
        self._told(errors_of(outcomes))
        print(json.dumps(self.held()), flush=True)
        if self.chance.random() < 0.06 and not any(errors_of(outcomes)):
            os.kill(writer_pid(self.chance.choice(comms)), signal.SIGKILL)

    def _all(self, comms: list[Comm], act: Any) -> list[Any]:
        outcomes = on_ranks(comms, act)
        errors = [error for error in errors_of(outcomes) if error is not None]
        if errors:
            raise errors[0]
        return [outcome.value for outcome in outcomes]

    def _told(self, errors: list[BaseException | None]) -> None:
        """A save of which the writer was killed is told at the next one, on every rank."""
        met = [error for error in errors if error is not None]
        assert len(met) in (0, len(errors)), errors
        for error in met:
            assert isinstance(error, tc.CheckpointError | tc.RankError) and "SIGKILL" in str(error), error
        self.lost += bool(met)

    def held(self) -> dict[str, int]:
        """Memory and descriptors of this process and its writers."""
        writers = [session(comm).writer for comms in self.worlds.values() for comm in comms]
        pids = [writer.pid for writer in writers if writer.pid is not None and writer.alive]
        return {
            "step": self.step,
            "lost": self.lost,
            "memory": memory_of(os.getpid()),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "writers": len(pids),
            "writer memory": most(memory_of, pids),
            "writer descriptors": most(lambda pid: len(os.listdir(f"/proc/{pid}/fd")), pids),
        }


def most(count: Callable[[int], int], pids: list[int]) -> int:
    """The highest count of those that are there still."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            found = max(found, count(pid))
    return found


def memory_of(pid: int) -> int:
    """Resident bytes of a process that no other one has."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


def main(run: Path, saves: int, seed: int) -> None:
    training = Training(run, seed)
    done = 0
    while done < saves:
        count = min(training.chance.randint(2, 8), saves - done)
        training.segment(count)
        done += count
    for comm in (comm for comms in training.worlds.values() for comm in comms):
        session(comm).writer.end()


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
