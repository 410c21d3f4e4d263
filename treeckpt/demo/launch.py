"""Starts the processes of a task, follows their output, and ends them in every case.

Several ranks run under torchrun's agent (which picks a free port for its rendezvous), one runs as it is. Their output
comes through one pipe: `@step N` lines move the progress bar, `@error RANK LINE` lines hold the traceback of a rank,
and all other lines are kept for the case that a worker ends without a traceback. A worker that outlives this process
ends at its next print.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType

import msgspec

from .tasks import Outcome, Task, outcome_path

MAX_TASK_SECONDS = 600.0  # seconds for a whole task: many times what a slow machine takes
TAIL = 40  # lines of output to show of a job that failed

OnStep = Callable[[int], None]


class JobFailed(Exception):
    """A task's processes failed; the message ends with what they said last."""


def run_job(
    task: Task, on_step: OnStep, *, environment: Mapping[str, str], patience: float = MAX_TASK_SECONDS
) -> Outcome:
    """Runs a task in fresh processes and waits for it.

    Raises:
        JobFailed: a process failed, or the task took more than `patience` seconds.
    """
    path = outcome_path(task)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with started(command_of(task), worker_environment(environment)) as process:
        late = threading.Event()
        watchdog = threading.Timer(patience, lambda: (late.set(), end(process)))
        watchdog.start()
        try:
            said = follow(process.stdout or (), on_step)
            code = process.wait()
        finally:
            watchdog.cancel()
    if late.is_set():
        raise JobFailed(f"{task.name}: not done after {patience:.0f} s. It said last:\n{said}")
    if code or not path.exists():
        raise JobFailed(f"{task.name}: failed with exit code {code}. It said last:\n{said}")
    return msgspec.json.decode(path.read_bytes(), type=Outcome)  # pyright: ignore[reportReturnType, reportArgumentType]


def command_of(task: Task) -> list[str]:
    """Returns the command line of a task."""
    return [sys.executable, "-m", "treeckpt.demo.train", msgspec.json.encode(task).decode()]


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the workers' environment: one thread, the loopback interface, no variables of an outer torchrun."""
    ours = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    clean = {k: v for k, v in environment.items() if k not in ours and not k.startswith("TORCHELASTIC_")}
    clean |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    clean["PYTHONFAULTHANDLER"] = "1"  # a worker that dies of a signal says where it stood
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # gloo would else look up the host's name, which need not resolve
            clean.setdefault("GLOO_SOCKET_IFNAME", name)
    return clean


def follow(lines: Iterable[str], on_step: OnStep) -> str:
    """Reads a job's output to its end; gives what it said last: the first rank's traceback, or else the last lines."""
    tail: deque[str] = deque(maxlen=TAIL)
    errors: dict[str, list[str]] = {}
    closing = False
    for line in lines:
        match line.rstrip("\n").split(" ", 2):
            case ["@step", number]:
                on_step(int(number))
            case ["@error", rank, text]:
                if text.strip(" ^~"):  # the marks under a line of a traceback say little here
                    errors.setdefault(rank, []).append(text)
            case _ if not closing:
                tail.append(line.rstrip("\n"))
                closing = "torch/distributed/elastic" in line and "exitcode" in line  # torchrun's summary begins
            case _:
                pass
    for rank, traceback in errors.items():  # the others only lost their peer
        return "\n".join(f"[rank {rank}] {text}" for text in traceback[-TAIL:])
    return "\n".join(tail)


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Runs a process in a session of its own, so that Ctrl-C does not reach it; ends it at the end.

    Meanwhile SIGTERM raises SystemExit here, so that every `finally` runs.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()  # only there signals can be handled
    before = signal.signal(signal.SIGTERM, _exit) if in_main_thread else None
    try:
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                end(process)
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process and its workers: torchrun's agent passes SIGTERM on, and gets 10 s for it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
