"""Ctrl-C at any moment of a save, caught and retried: no rank waits for long, and the next save commits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import treeckpt as tc
from tests.helpers.forked_process import ForkedProcess, forked_together
from tests.helpers.s3 import S3

from . import interrupting

LONGEST = 15.0
"""Seconds that no call may take: a save of a few MiB, and what waits for an interrupted rank."""
PATIENCE = 240.0
"""The same on a busy machine; far less than the 600 of a comm."""


def _answer(process: ForkedProcess) -> str:
    """Returns the next line of JSON: where an interrupt falls into a finalizer, Python prints it, and goes on."""
    while not (line := process.line()).startswith("[["):
        pass
    return line


class Ranks:
    """The processes of a job, which save and are interrupted."""

    def __init__(self, processes: list[ForkedProcess], how: str, run: str) -> None:
        self.processes, self.how, self.run = processes, how, run

    def interrupt(self, number: int, delay: float, ranks: list[int]) -> list[list[tuple[float, str]]]:
        """Lets all ranks save, and interrupts some after a delay; returns the calls of each: seconds and errors."""
        for process in self.processes:
            process.ask(f"save {number}")
        assert [process.line() for process in self.processes] == ["begin"] * len(self.processes)
        time.sleep(delay)
        if len(ranks) == len(self.processes):
            os.killpg(self.processes[0].pid, signal.SIGINT)  # all at once: none saves again before the last one has it
        else:
            for rank in ranks:
                self.processes[rank].send_signal(signal.SIGINT)
            time.sleep(1.0)
            for rank in set(range(len(self.processes))) - set(ranks):  # the end of the trial
                self.processes[rank].send_signal(signal.SIGUSR1)
        return [json.loads(_answer(process)) for process in self.processes]

    def saved(self, number: int) -> bool:
        name = f"step_{number * 2 + 1:08}" if self.how == "manager" else f"{number}b"
        return tc.verify(f"{self.run}/{name}").ok


@contextmanager
def job(how: str, world: int, run: str) -> Iterator[Ranks]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    mains = [partial(interrupting.main, how, store.port, rank, world, run) for rank in range(world)]
    processes = forked_together(mains)
    try:
        assert [process.line() for process in processes] == ["ready"] * world
        yield Ranks(processes, how, run)
    finally:
        for process in processes:
            process.end()


def check(ranks: Ranks, moments: int, *, seed: int, chosen: Callable[[int], list[int]]) -> list[float]:
    """Interrupts saves at random moments; returns the seconds of each call."""
    rng, waits = random.Random(seed), list[float]()
    for number in range(1, moments + 1):
        delay, interrupted = rng.uniform(0, 0.15), chosen(number)
        calls = ranks.interrupt(number, delay, interrupted)
        waits += [seconds for each in calls for seconds, _ in each]
        where = number, delay, interrupted, calls
        assert max(waits) < PATIENCE, where
        assert all(len(each) <= 3 for each in calls), where
        assert ranks.saved(number), where
        if ranks.how != "manager":
            for name in ("a", "b"):
                shutil.rmtree(f"{ranks.run}/{number}{name}", ignore_errors=True)
    return waits


FULL = pytest.param(200, marks=pytest.mark.slow, id="200")


@pytest.mark.parametrize("moments", [4, FULL])
@pytest.mark.parametrize(
    ("how", "world"),
    [("store", 2), *(pytest.param(*at, marks=pytest.mark.slow) for at in (("store", 4), ("gloo", 2), ("gloo", 4)))],
)
def test_ranks_that_are_all_interrupted_save_when_they_call_again(
    how: str, world: int, moments: int, tmp_path: Path
) -> None:
    with job(how, world, str(tmp_path)) as ranks:
        waits = sorted(check(ranks, moments, seed=moments, chosen=lambda _: list(range(world))))
    print({f"{at:.0%}": f"{waits[min(int(at * len(waits)), len(waits) - 1)]:.3f} s" for at in (0.5, 0.9, 0.99, 1)})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["store", "gloo", "async", "manager"])
def test_one_rank_alone_is_interrupted(how: str, tmp_path: Path) -> None:
    with job(how, 3, str(tmp_path)) as ranks:
        waits = sorted(check(ranks, 40, seed=1, chosen=lambda number: [number % 3]))
    print(f"longest: {waits[-1]:.3f} s")


@pytest.mark.slow
@pytest.mark.parametrize("request_of", ["shard-00000", "shard-00001", "index", "progress"])
def test_an_interrupt_while_a_request_takes_long_is_told_to_the_others(request_of: str, s3: S3) -> None:
    """The request itself cannot be interrupted: only the rank that made it waits for its end."""
    run, world = s3.url(), 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    command = [sys.executable, "-m", "tests.multirank.interrupting", "store", f"{store.port}"]
    processes = forked_together(
        [partial(os.execv, sys.executable, [*command, f"{rank}", f"{world}", run]) for rank in range(world)]
    )
    try:
        assert [process.line() for process in processes] == ["ready"] * world
        s3.rules({"match": f"PUT .*{request_of}", "do": "slow", "seconds": 30})
        calls = Ranks(processes, "store", run).interrupt(1, 2.0, [0, 1])
    finally:
        for process in processes:
            process.end()
    other = calls[0 if request_of == "shard-00001" else 1]
    assert max(seconds for seconds, _ in other) < LONGEST, calls
    assert tc.verify(f"{run}/1b").ok
