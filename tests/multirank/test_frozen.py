"""A rank 0 that serves the Store and is frozen, or off the network, does not hold the others up beyond their limits."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import treeckpt as tc
from tests.helpers.forked_process import ForkedProcess
from treeckpt._io.comm import message_store

from . import frozen

PATIENCE = 60.0
"""Seconds: far more than a limit of 5 and two heartbeats, far less than the 300 of torch's own."""


def told(process: ForkedProcess) -> str:
    """The next line that the rank itself writes: torch warns of hosts without a name."""
    while (line := process.line()).startswith("[W"):
        pass
    return line


class Answer(NamedTuple):
    seconds: float
    calls: int
    """On the Store."""
    error: str


def answer(process: ForkedProcess) -> Answer:
    seconds, calls, error = told(process).split(" ", 2)
    return Answer(float(seconds), int(calls), error)


def start(rank: int, port: int, run: Path, host: str, namespace: str) -> ForkedProcess:
    if not namespace:
        return ForkedProcess(partial(frozen.main, host, port, rank, f"{run}"))
    command = [sys.executable, "-m", "tests.multirank.frozen", host, f"{port}", f"{rank}", f"{run}"]
    return ForkedProcess(partial(os.execvp, "ip", ["ip", "netns", "exec", namespace, *command]))


@contextlib.contextmanager
def pair(
    run: Path, *, host: str = "127.0.0.1", namespaces: tuple[str, str] = ("", "")
) -> Iterator[tuple[ForkedProcess, ForkedProcess]]:
    """Rank 0, which serves the Store, and rank 1, after a save of both."""
    first = start(0, 0, run, host, namespaces[0])
    second = None
    try:
        second = start(1, int(told(first)), run, host, namespaces[1])
        assert told(first) == told(second) == "ready"
        yield first, second
    finally:
        for process in (first, second):
            if process is not None:
                process.end()


def test_a_rank_0_that_is_frozen_is_named_and_met_again_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_store, "LEAST_ANSWER_LIMIT", 1.0)
    with pair(tmp_path) as (first, second):
        second.ask("limit 1.0")
        first.freeze()
        second.ask("save missed")
        seconds, calls, error = answer(second)
        assert 1.0 <= seconds < PATIENCE and calls
        assert "rank 0" in error and re.search(r"does not answer: no answer for [1-9][\d.]* s", error), error
        second.ask("save at-once")
        _, calls, error = answer(second)
        assert not calls and "not answered either" in error, "the Store is not asked again"
        first.send_signal(signal.SIGCONT)
        second.ask("limit 300")  # once the client has its answer
        second.ask("save together")
        first.ask("save together")
        assert [answer(first).error, answer(second).error] == ["nothing"] * 2
        assert tc.verify(tmp_path / "together").ok


@pytest.mark.parametrize("what", ["save missed", pytest.param("step 2", marks=pytest.mark.slow)])
def test_a_wait_for_a_frozen_rank_0_ends_soon_after_the_signal(tmp_path: Path, what: str) -> None:
    with pair(tmp_path) as (first, second):
        first.freeze()
        second.ask(what)
        time.sleep(0.5)
        second.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert "rank 0" in answer(second).error
        assert time.monotonic() - begin < PATIENCE, "the limit of 2 s, on a busy machine"


@pytest.fixture
def hosts() -> Iterator[tuple[str, str, str]]:
    """Two network namespaces with a link: their names, and the address of the first."""
    names = [f"treeckpt-{os.getpid()}-{number}" for number in range(2)]
    ends = [f"tc{os.getpid()}{letter}" for letter in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ("10.77.0.1", "10.77.0.2"), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield names[0], names[1], ends[0]
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.slow
def test_a_rank_0_whose_host_is_off_the_network_is_named(tmp_path: Path, hosts: tuple[str, str, str]) -> None:
    with pair(tmp_path, host="10.77.0.1", namespaces=hosts[:2]) as (_, second):
        second.ask("limit 5.0")
        subprocess.run(["ip", "-n", hosts[0], "link", "set", hosts[2], "down"], check=True)
        second.ask("save missed")
        seconds, _, error = answer(second)
        assert 5.0 <= seconds < PATIENCE and "rank 0" in error, error
