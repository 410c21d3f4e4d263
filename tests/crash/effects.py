"""Kills a process before the effect of a given number: what it changes in a file system, from Python, is counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHANGES = ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir")


def killed_at(action: Callable[[Path], None], path: Path, number: int) -> bool:
    """Runs an action in a fork of this process; whether that was killed, False where the action has fewer effects."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or writes:
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(count)
        code = 1
        try:
            action(path)
            code = 0
        finally:
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended in (0, -signal.SIGKILL), f"the action has failed at effect {number}"
    return ended != 0


def run_killed(module: str, directory: Path, actions: list[str], stride: int) -> None:
    """Has a module of this package kill each action at every `stride`-th effect and check what is left."""
    command = [sys.executable, "-m", f"tests.crash.{module}", str(directory), json.dumps(actions), str(stride)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["action"] for row in rows] == actions and all(row["effects"] > 5 for row in rows), rows
