"""Saves that end in one way or another, each in a fork: python -m tests.crash.saver; see test_leftovers.

It reads lines of JSON, [path, how, seed], forks for each, and prints the fork's process id and, when that has ended,
its exit status. HOW is how the save ends: "well"; "kill" kills the process when a shard is written; "publish" when all
is written and the index is not published; "committed" when the index is; "interrupt" is Ctrl-C while a shard is being
written, "interrupt late" behind that; "hold" waits there until it gets SIGUSR1; "background" kills the process while
its writer process may be writing; "reading" while it holds a reader's lease.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

import numpy as np

import treeckpt as tc
from tests.helpers.background import writer_pid
from treeckpt._core.format.files import step_of
from treeckpt._io.storage.kept_files import hold_lease
from treeckpt._io.storage.open import open_store

NBYTES = 1 << 20
WHILE_WRITING = ("interrupt", "hold")
WRITTEN = ("kill", "interrupt late")


def tree_of(seed: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).integers(0, 255, NBYTES, np.uint8), "seed": seed}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def hold() -> None:
    tell("held", os.getpid())
    signal.sigwait([signal.SIGUSR1])


class Ending:
    """Something that ends a save, in whatever store it is, at one of its calls."""

    def __init__(self, store: Any, how: str) -> None:
        self.how, self.done = how, False
        self.act = {"interrupt": interrupt, "interrupt late": interrupt, "hold": hold}.get(how, die)
        create, publish, swap = store.create, store.publish, getattr(store, "compare_and_swap", None)

        def creating(name: str, nbytes: int) -> Any:
            writer = create(name, nbytes)
            commit = writer.commit

            def committing() -> None:
                self.at(*WHILE_WRITING)
                commit()
                self.at(*WRITTEN)

            writer.commit = committing
            return writer

        def publishing(name: str, data: bytes, **options: Any) -> None:
            if name == "index.json":
                self.at("publish")
            publish(name, data, **options)
            if name == "index.json":
                self.at("committed")

        def swapping(name: str, data: bytes, **options: Any) -> None:
            assert swap is not None
            self.at("publish")
            swap(name, data, **options)
            self.at("committed")

        store.create, store.publish = creating, publishing
        if swap is not None:
            store.compare_and_swap = swapping

    def at(self, *moments: str) -> None:
        if self.how in moments and not self.done:
            self.done = True
            self.act()


def save(path: str, how: str, seed: int) -> None:
    store: Any = open_store(path)
    if how == "background":
        tc.save_async(path, tree_of(seed), overwrite=True).wait_staged()
        tell("writer", os.getpid(), writer_pid())
        die()
    if how == "reading":
        with hold_lease(open_store(path)):
            die()
    if how != "well":
        Ending(store, how)
    step = step_of(os.path.basename(path))
    tc.save(store, tree_of(seed), step=step, overwrite=True, files={"config.json": b"%d" % seed})


def in_fork(path: str, how: str, seed: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        save(path, how, seed)
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.signal(signal.SIGCHLD, ended)
    for line in sys.stdin:
        tell("forked", in_fork(*json.loads(line)))


def ended(number: int, frame: object) -> None:
    """Tells of every fork that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        tell("ended", pid, os.waitstatus_to_exitcode(status))


def tell(*words: object) -> None:
    """Writes a whole line at once: the end of a fork may be told between any two calls of the main program."""
    os.write(1, json.dumps(words).encode() + b"\n")


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main()
