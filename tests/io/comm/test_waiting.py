"""Waits for other ranks: who waits for whom is said, and after a signal no rank waits for one that is dead."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import until
from tests.helpers.world import LONG, Faulty, Switch, errors_of, on_ranks
from treeckpt._io import process
from treeckpt._io.comm import waiting
from treeckpt._io.comm.comm import Comm, ThreadComm, thread_comms
from treeckpt._io.comm.message_store import ThreadMessageStore
from treeckpt._io.process import TERMINATION
from treeckpt.convert import convert

TREE = {"w": np.arange(5)}


def prepare(path: Path) -> None:
    tc.save(path / "saved", TREE)


CALLS: dict[str, Callable[[Path, Comm], Any]] = {
    "save": lambda path, comm: tc.save(path / "c", TREE, comm=comm),
    "save_async": lambda path, comm: tc.save_async(
        path / "c", TREE, comm=comm, background=tc.BackgroundOptions(writer="thread")
    ).result(LONG),
    "latest": lambda path, comm: tc.Manager(path / "run", comm=comm).latest(),
    "manager": lambda path, comm: tc.Manager(path / "run", comm=comm, background=False).save(1, TREE),
    "salvage": lambda path, comm: tc.load(path / "saved", comm=comm, fallback=tc.Fallback(on_corrupt="skip")),
    "convert": lambda path, comm: convert(path / "saved", path / "out.safetensors", comm=comm),
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], threading.Event]]:
    """What was logged, and an event for the first line."""
    monkeypatch.setattr(waiting, "SLOW_WAIT", 0.2)
    lines: list[str] = []
    first = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            first.set()

    handler, log = Handler(), logging.getLogger("treeckpt")
    log.addHandler(handler)
    yield lines, first
    log.removeHandler(handler)


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_calls_alone_says_whom_it_waits_for(
    tmp_path: Path, said: tuple[list[str], threading.Event], call: str, alone: int
) -> None:
    lines, first = said
    prepare(tmp_path)

    def act(comm: Comm) -> None:
        if comm.rank != alone:
            assert first.wait(LONG)
        CALLS[call](tmp_path, comm)

    assert errors_of(on_ranks(2, act)) == [None, None]
    assert f"rank {alone} has waited 0.2 s for rank {1 - alone} " in lines[0]
    assert "Every rank calls save" in lines[0] and 'comm="alone"' in lines[0]


def test_a_plain_script_shows_the_word_on_stderr(tmp_path: Path) -> None:
    """Rank 1 is a fork of rank 0, which has torch imported."""
    script = f"""
import os, sys
import torch.distributed as dist
import treeckpt as tc
from treeckpt._io.comm import waiting
waiting.SLOW_WAIT = 0.2
other = os.fork()
dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 2), rank=not other, world_size=2)
if not other:
    sys.stdin.read()
tc.save({str(tmp_path / "c")!r}, {{"step": 1}})
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("treeckpt: rank 0 has waited 0.2 s for rank 1 to make the same call"), line
        _, text = process.communicate(timeout=LONG)
        assert process.returncode == 0, text
    finally:
        process.kill()
        process.communicate()


LIMIT = 0.05
"""Seconds without a heartbeat after which a rank is given up, on the clock of `Beats`; a fifth of them between two."""


class Beats:
    """A clock that goes on, between two heartbeats, once each rank that lives has sent another one.

    So no rank seems silent that a busy machine holds up.
    """

    def __init__(self) -> None:
        self.now, self.stores, self.ended = 1000.0, dict[int, ThreadMessageStore](), set[int]()

    def monotonic(self) -> float:
        return self.now

    def run(self, comms: Sequence[ThreadComm], act: Callable[[ThreadComm], Any]) -> list[BaseException | None]:
        """Runs a function on all ranks; returns their errors."""
        self.stores, self.ended = dict(comms[0].stores), set()

        def on(comm: ThreadComm) -> None:
            try:
                act(comm)
            finally:
                self.ended.add(comm.rank)

        return errors_of(on_ranks(comms, on))

    def counts(self) -> dict[int, int]:
        """The last heartbeat of each rank."""
        found: dict[int, int] = {}
        for store in self.stores.values():
            with store.changed:
                messages = {**store.messages}
            found |= {int(key.rpartition("/")[2]): int(n) for key, n in messages.items() if "/heartbeat" in key}
        return found

    def go_on(self, ranks: Iterable[int]) -> None:
        """Has the time between two heartbeats pass; returns sooner when these ranks have ended."""
        before, ranks = self.counts(), set(ranks)

        def beaten() -> bool:
            now = self.counts()
            return all(rank in self.ended or now.get(rank, 0) > before.get(rank, 0) for rank in ranks)

        assert until(beaten, LONG)
        self.now += LIMIT / 5


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Iterator[Beats]:
    """This process was told to end, and gives ranks up after a while without a heartbeat."""
    beats = Beats()
    for module in (waiting, process):
        monkeypatch.setattr(module, "time", beats)
    TERMINATION.start_listening(LIMIT)
    TERMINATION.record_signal()
    yield beats
    TERMINATION.stop_listening(ended=True)


@pytest.mark.parametrize("tiers", [(), pytest.param((2,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("slow", [0, 1, 3])
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_still_writes_is_waited_for_after_a_signal(
    ending: Beats, slow: int, background: bool, tiers: tuple[int, ...]
) -> None:
    """The last save of a run is what the signal is for: only ranks that give no sign are given up."""
    store = tc.MemoryStore()

    def write(name: str) -> None:
        end = ending.now + 6 * LIMIT
        while ending.now < end:
            ending.go_on(range(4))

    def act(comm: Comm) -> None:
        late = Faulty(store, Switch(0, act=write, names=("commit",)))
        tree = {"w": tc.Sharded(np.ones(4), (16,), (4 * comm.rank,))}
        mine = late if comm.rank == slow else store
        if background:
            tc.save_async(mine, tree, comm=comm, background=tc.BackgroundOptions(writer="thread")).result(LONG)
        else:
            tc.save(mine, tree, comm=comm)

    assert ending.run(thread_comms(4, timeout=LONG, group_sizes=tiers), act) == [None] * 4
    assert tc.load(store)["w"].tolist() == [1.0] * 16


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_gives_no_sign_is_given_up_after_a_signal(ending: Beats, dead: int) -> None:
    store, living = tc.MemoryStore(), {0, 1, 2} - {dead}

    def act(comm: Comm) -> None:
        if comm.rank != dead:
            tc.save(store, TREE, comm=comm)
        while comm.rank == dead and not living <= ending.ended:
            ending.go_on(living)

    errors = ending.run(thread_comms(3, timeout=600.0), act)
    for rank in living:
        error = errors[rank]
        assert isinstance(error, tc.RankError) and dead in error.ranks, error
        assert "after a signal told this process to end" in str(error)
    assert ending.now < 1000 + 10 * LIMIT and not store.files


def test_a_signal_cuts_a_wait_short_that_has_begun() -> None:
    TERMINATION.start_listening(0.3)
    try:
        started = threading.Event()

        def act(comm: Comm) -> None:
            if comm.rank == 0:
                started.set()
                tc.save(tc.MemoryStore(), TREE, comm=comm)
            else:
                assert started.wait(LONG)
                TERMINATION.record_signal()

        [error, _] = errors_of(on_ranks(thread_comms(2, timeout=600.0), act))
        assert isinstance(error, tc.RankError) and 1 in error.ranks
    finally:
        TERMINATION.stop_listening(ended=True)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rank_timeout_that_means_nothing_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises(tc.TreeckptError, match="rank_timeout: expected seconds"):
        tc.Manager(tmp_path).save_on_signal(rank_timeout=timeout)
