"""Programs that save when their interpreter has begun to end: python -m tests.saving.ends; see test_saves_at_the_end.

It reads a line of JSON, [[way, path], ...], forks for each, and prints by the ways the exit codes of the forks and what
they wrote to stderr, once all interpreters have ended. A way is a function of this module, which saves below the path.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import json
import multiprocessing
import multiprocessing.util
import os
import sys
import tempfile
import threading
import time
import weakref
from typing import Any

import numpy as np

import treeckpt as tc
from treeckpt._io.comm.comm import SoloComm

TREE = {"w": np.arange(100_000), "n": 1}
kept: list[Any] = []
"""Objects that live until the modules are torn down."""


def save(path: str, **options: Any) -> None:
    pending = tc.save_async(path, TREE, **options)
    assert pending.path == path


def first_in_the_background(path: str) -> None:
    atexit.register(save, f"{path}/1")


def first_by_a_thread(path: str) -> None:
    atexit.register(save, f"{path}/1", background=tc.BackgroundOptions(writer="thread", staging="lazy"))


def first_in_the_foreground(path: str) -> None:
    atexit.register(tc.save, f"{path}/1", TREE)


def three_in_a_row(path: str) -> None:
    def handler() -> None:
        for number in (1, 2, 3):
            save(f"{path}/{number}", comm=SoloComm() if number == 3 else None)

    atexit.register(handler)


def with_earlier_saves(path: str) -> None:
    """The handler that was registered first runs last."""
    atexit.register(save, f"{path}/3")
    save(f"{path}/1")
    atexit.register(save, f"{path}/2")


def _manager(path: str, **options: Any) -> None:
    manager = tc.Manager(path, keep=2, **options)
    atexit.register(manager.save, 4, TREE)
    manager.save(1, TREE)
    manager.save(2, TREE)
    atexit.register(manager.save, 3, TREE)


def a_manager(path: str) -> None:
    _manager(path)


def a_manager_in_the_foreground(path: str) -> None:
    _manager(path, background=False)


def a_manager_that_was_closed(path: str) -> None:
    with tc.Manager(path) as manager:
        atexit.register(manager.save, 2, TREE)
        manager.save(1, TREE)


def a_first_manager(path: str) -> None:
    def handler() -> None:
        with tc.Manager(path) as manager:
            manager.save(1, TREE)

    atexit.register(handler)


def an_exception(path: str) -> None:
    atexit.register(save, f"{path}/1")
    raise ValueError("mine")


def an_exit_in_a_thread(path: str) -> None:
    atexit.register(save, f"{path}/1")
    threading.Thread(target=sys.exit, args=(5,)).start()


def running_threads(path: str) -> None:
    def end_late() -> None:
        threading.main_thread().join()
        save(f"{path}/1")

    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    threading.Thread(target=end_late).start()
    atexit.register(save, f"{path}/2")


def an_executor(path: str) -> None:
    """Its work goes on when the main thread has ended."""

    def work() -> None:
        threading.main_thread().join(0.2)
        tc.save(f"{path}/1", TREE)
        save(f"{path}/2")

    kept.append(concurrent.futures.ThreadPoolExecutor(1))
    kept[0].submit(work)
    atexit.register(save, f"{path}/3")


def a_handler_of_threading(path: str) -> None:
    """Such handlers run before threads are waited for."""
    register: Any = threading._register_atexit  # pyright: ignore[reportAttributeAccessIssue]
    register(save, f"{path}/1")
    register(tc.save, f"{path}/2", TREE)


class _Owner:
    path = ""

    def __del__(self) -> None:
        if self.path:
            tc.save(f"{self.path}/1", TREE)
            save(f"{self.path}/2")


def a_finalizer(path: str) -> None:
    kept.append(_Owner())
    weakref.finalize(kept[0], save, f"{path}/1")


def an_object_that_outlives_its_module(path: str) -> None:
    owner = _Owner()
    owner.path = path
    kept.append(owner)


def a_child_of_multiprocessing(path: str) -> None:
    def work() -> None:
        multiprocessing.util.Finalize(None, save, (f"{path}/2",), exitpriority=50)
        multiprocessing.util.Finalize(None, save, (f"{path}/3",), exitpriority=-1)
        save(f"{path}/1")

    _in_child(work)


def a_child_that_saves_first_when_it_ends(path: str) -> None:
    _in_child(lambda: multiprocessing.util.Finalize(None, save, (f"{path}/1",), exitpriority=50))


def _in_child(work: Any) -> None:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)


def a_save_that_is_refused(path: str) -> None:
    tc.save(f"{path}/1", TREE)
    atexit.register(save, f"{path}/1")


def main() -> None:
    running: dict[int, tuple[str, Any]] = {}
    for way, path in json.loads(sys.stdin.readline()):
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
        pid = os.fork()
        if not pid:
            os.dup2(errors.fileno(), 2)
            for one in (errors, *(others for _, others in running.values())):
                one.close()
            globals()[way](path)
            return
        running[pid] = way, errors
    ended: dict[str, Any] = {}
    while running:
        pid, status = os.wait()
        way, errors = running.pop(pid)
        with errors:
            errors.seek(0)
            ended[way] = os.waitstatus_to_exitcode(status), errors.read().decode()
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main()
