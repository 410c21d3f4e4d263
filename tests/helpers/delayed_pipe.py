"""Runs a command behind a link with a latency: `python delayed_pipe.py SECONDS COMMAND ...`.

What arrives on stdin reaches the command so many seconds later, and what it answers leaves as many seconds later.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time


def carry(source: int, target: int, seconds: float) -> None:
    """Copies bytes between two descriptors, each after `seconds`, until the source ends."""
    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def send() -> None:
        while True:
            due, data = waiting.get()
            time.sleep(max(due - time.monotonic(), 0))
            if not data:
                os.close(target)
                return
            view = memoryview(data)
            while len(view):
                view = view[os.write(target, view) :]

    sender = threading.Thread(target=send)
    sender.start()
    data = b"?"
    while data:
        data = os.read(source, 1 << 20)
        waiting.put((time.monotonic() + seconds, data))
    sender.join()


def main() -> None:
    seconds, command = float(sys.argv[1]), sys.argv[2:]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None and child.stdout is not None
    there = threading.Thread(target=carry, args=(0, os.dup(child.stdin.fileno()), seconds), daemon=True)
    there.start()
    child.stdin.close()
    carry(child.stdout.fileno(), 1, seconds)


if __name__ == "__main__":
    main()
