"""A rank 0 that serves the Store and is frozen, or off the network, does not hold the others up beyond their limits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import treeckpt as tc

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
"""Seconds: far more than a limit of 5 and two heartbeats, far less than the 300 of torch's own."""
Process = subprocess.Popen[str]


def start(rank: int, port: int, timeout: float, run: Path, *, host: str = "127.0.0.1", inside: str = "") -> Process:
    command = [sys.executable, "-m", "tests.multirank.frozen", host, f"{port}", f"{rank}", f"{timeout}", f"{run}"]
    if inside:
        command = ["ip", "netns", "exec", inside, *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def line(process: Process) -> str:
    assert process.stdout is not None
    found = process.stdout.readline().strip()
    assert found, process.communicate()[1]
    return found


def ask(process: Process, what: str) -> None:
    assert process.stdin is not None
    process.stdin.write(what + "\n")
    process.stdin.flush()


def answer(process: Process) -> tuple[float, str]:
    seconds, error = line(process).split(" ", 1)
    return float(seconds), error


@contextlib.contextmanager
def pair(run: Path, timeout: float, **places: str) -> Iterator[tuple[Process, Process]]:
    """Rank 0, which serves the Store, and rank 1, after a save of both."""
    processes = [start(0, 0, timeout, run, host=places.get("host", "127.0.0.1"), inside=places.get("first", ""))]
    try:
        port = int(line(processes[0]))
        second = start(1, port, timeout, run, host=places.get("host", "127.0.0.1"), inside=places.get("second", ""))
        processes.append(second)
        assert [line(process) for process in processes] == ["ready"] * 2
        yield processes[0], processes[1]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()


def test_a_rank_0_that_is_frozen_is_named_and_met_again_when_it_goes_on(tmp_path: Path) -> None:
    with pair(tmp_path, 5.0) as (first, second):
        first.send_signal(signal.SIGSTOP)
        ask(second, "save missed")
        seconds, error = answer(second)
        assert 5.0 <= seconds < PATIENCE
        assert "rank 0" in error and "does not answer: no answer for 5" in error, error
        ask(second, "save at-once")
        seconds, error = answer(second)
        assert seconds < 5.0 and "not answered either" in error, "the Store is not asked again"
        first.send_signal(signal.SIGCONT)
        for _ in range(20):  # until the client has its answer
            ask(second, "save together")
            ask(first, "save together")
            outcomes = [answer(first)[1], answer(second)[1]]
            if outcomes == ["nothing"] * 2:
                break
        assert outcomes == ["nothing"] * 2
        assert tc.verify(tmp_path / "together").ok


@pytest.mark.parametrize("what", ["save missed", pytest.param("step 2", marks=pytest.mark.slow)])
def test_a_wait_for_a_frozen_rank_0_ends_soon_after_the_signal(tmp_path: Path, what: str) -> None:
    with pair(tmp_path, 300.0) as (first, second):
        first.send_signal(signal.SIGSTOP)
        ask(second, what)
        time.sleep(0.5)
        second.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert "rank 0" in answer(second)[1]
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
    with pair(tmp_path, 5.0, host="10.77.0.1", first=hosts[0], second=hosts[1]) as (first, second):
        subprocess.run(["ip", "-n", hosts[0], "link", "set", hosts[2], "down"], check=True)
        ask(second, "save missed")
        seconds, error = answer(second)
        assert 5.0 <= seconds < PATIENCE and "rank 0" in error, error
        assert first.poll() is None
