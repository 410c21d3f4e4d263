"""Waits for other ranks: who waits for whom is said, and after a signal no rank waits for one that is dead."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.world import LONG, Faulty, Switch, errors_of, on_ranks
from treeckpt._io.comm import waiting
from treeckpt._io.comm.comm import Comm, thread_comms
from treeckpt._io.process import TERMINATION, Termination
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


def test_ranks_that_come_together_say_nothing(tmp_path: Path, said: tuple[list[str], threading.Event]) -> None:
    """The writing of one may take longer than the others': that is no reason for a word."""
    lines, _ = said
    store = tc.MemoryStore()

    def act(comm: Comm) -> None:
        slow = Faulty(store, Switch(0, act=lambda _: time.sleep(0.6), names=("commit",)))
        tc.save(slow if comm.rank == 1 else store, {"w": tc.Sharded(np.ones(4), (8,), (4 * comm.rank,))}, comm=comm)

    assert errors_of(on_ranks(2, act)) == [None, None]
    assert not [line for line in lines if "waited" in line]


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


@pytest.fixture
def ending() -> Iterator[Termination]:
    """This process was told to end, and gives ranks up after half a second."""
    TERMINATION.start_listening(0.5)
    TERMINATION.record_signal()
    yield TERMINATION
    TERMINATION.stop_listening(ended=True)


@pytest.mark.parametrize("tiers", [(), pytest.param((2,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("slow", [0, 1, 3])
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_still_writes_is_waited_for_after_a_signal(
    ending: Termination, slow: int, background: bool, tiers: tuple[int, ...]
) -> None:
    """The last save of a run is what the signal is for: only ranks that give no sign are given up."""
    store = tc.MemoryStore()

    def act(comm: Comm) -> None:
        late = Faulty(store, Switch(0, act=lambda _: time.sleep(6 * ending.limit), names=("commit",)))
        tree = {"w": tc.Sharded(np.ones(4), (16,), (4 * comm.rank,))}
        mine = late if comm.rank == slow else store
        if background:
            tc.save_async(mine, tree, comm=comm, background=tc.BackgroundOptions(writer="thread")).result(LONG)
        else:
            tc.save(mine, tree, comm=comm)

    assert errors_of(on_ranks(thread_comms(4, timeout=LONG, group_sizes=tiers), act)) == [None] * 4
    assert tc.load(store)["w"].tolist() == [1.0] * 16


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_gives_no_sign_is_given_up_after_a_signal(ending: Termination, dead: int) -> None:
    store = tc.MemoryStore()
    begin = time.monotonic()

    def act(comm: Comm) -> None:
        if comm.rank != dead:
            tc.save(store, TREE, comm=comm)

    outcomes = on_ranks(thread_comms(3, timeout=600.0), act)
    for rank, error in enumerate(errors_of(outcomes)):
        if rank != dead:
            assert isinstance(error, tc.RankError) and dead in error.ranks, error
            assert "after a signal told this process to end" in str(error)
    assert time.monotonic() - begin < LONG and not store.files


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


def test_a_rank_that_died_after_its_report_is_waited_for_no_longer_than_the_comms_limit(tmp_path: Path) -> None:
    """Rank 1 reports and never reads the verdict: rank 0's save is committed all the same."""

    class Dies:
        def __init__(self, inner: Comm) -> None:
            self.rank, self.size, self.timeout, self.state = inner.rank, inner.size, inner.timeout, inner.state
            self.drop, self._post, self._wait, self._heard = inner.drop, inner.post, inner.wait, 0

        def post(self, key: str, data: bytes) -> None:
            if self._heard < 2:
                self._post(key, data)

        def wait(self, keys: Any, timeout: float) -> list[bytes | None]:
            self._heard += any(key.endswith("/all") for key in keys)
            if self._heard > 1:
                raise SystemExit("killed before it reads the verdict")
            return self._wait(keys, timeout)

    spent: list[float] = []

    def act(comm: Comm) -> None:
        comm.timeout = 2.0  # pyright: ignore[reportAttributeAccessIssue]
        if comm.rank == 1:
            tc.save(tmp_path / "c", TREE, comm=Dies(comm))
        else:
            begin = time.monotonic()
            tc.save(tmp_path / "c", TREE, comm=comm)
            spent.append(time.monotonic() - begin)

    outcomes = on_ranks(2, act)
    assert outcomes[0].error is None and isinstance(outcomes[1].error, SystemExit)
    assert 2.0 <= spent[0] < 20.0, "of the 30 s that it waits with a longer limit"
