"""Calls inside of calls, on one thread: python -m tests.saving.nested WAY PATH SHARE; see test_saves_inside_calls.

"save" and "load" make such a call at each line of Python that an outer call runs in this thread, as a signal handler
may, once a line; SHARE is the part of the lines, of 100. "signals" makes SHARE trials with real signals at random
moments. It prints how many calls were made, and how many were refused; it ends with the stacks where one hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import random
import signal
import sys
import zlib
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import treeckpt as tc
from treeckpt.io.comm.comm import SoloComm

HANGS = 120.0
"""Seconds after which a call counts as hanging."""
TREE = {"w": np.arange(70_000), "list": [1, {"a": 2.5}], "b": np.ones(3, np.float32)}


def outer_calls(path: str) -> dict[str, Callable[[], Any]]:
    """The calls by name; each can be made several times."""
    managers = [tc.Manager(f"{path}/run{number}", keep=1, background=bool(number)) for number in (0, 1)]
    managers[1].save(1, TREE)
    tc.save(f"{path}/c", TREE)
    pending = tc.save_async(f"{path}/other", TREE, comm=SoloComm())

    def manage(manager: tc.Manager) -> None:
        manager.save(manager.count + 1, TREE, pin=False)
        manager.wait()

    return {
        "save": lambda: tc.save(f"{path}/c", TREE, overwrite=True, files={"one": b"1"}),
        "save_async": lambda: tc.save_async(f"{path}/d", TREE, overwrite=True).result(HANGS),
        "thread": lambda: tc.save_async(f"{path}/e", TREE, overwrite=True, writer="thread").wait_staged(HANGS),
        "foreground": lambda: manage(managers[0]),
        "background": lambda: manage(managers[1]),
        "result": lambda: pending.result(HANGS),
        "load": lambda: tc.load(f"{path}/c"),
        "load_into": lambda: tc.load_into(f"{path}/c", {"w": np.zeros(70_000, int)}, strict=False),
        "verify": lambda: tc.verify(f"{path}/c"),
        "restore": lambda: managers[1].restore(),
        "latest": lambda: (managers[0].latest(), managers[0].steps(), managers[0].should_save(3)),
        "close": lambda: managers[1].close(),
        "new": lambda: tc.Manager(f"{path}/run1").close(),
    }


class Inner:
    """The call inside, of which it counts how often it was made and refused."""

    def __init__(self, path: str, way: str) -> None:
        self.path, self.way, self.made, self.refused, self.running = path, way, 0, 0, False
        self.manager = tc.Manager(f"{path}/inner", keep=2)
        self.manager.save(1, TREE)
        self.manager.wait()
        tc.save(f"{path}/there", TREE)

    def __call__(self) -> None:
        if self.running:
            return
        self.running = True
        faulthandler.dump_traceback_later(HANGS, exit=True)
        self.made += 1
        try:
            if self.way == "load":
                assert np.array_equal(tc.load(f"{self.path}/there")["w"], TREE["w"])
                assert self.manager.latest() == 1
                self.manager.wait()
                return
            for save in (self.save, self.save_async, self.manage):
                try:
                    save()
                except tc.CheckpointError as error:
                    assert "is under way on this thread" in str(error), error
                    assert "Set a flag and save at the next step" in str(error), error
                    self.refused += 1
        finally:
            faulthandler.dump_traceback_later(HANGS, exit=True)
            self.running = False

    def save(self) -> None:
        tc.save(f"{self.path}/inside", TREE, overwrite=True)

    def save_async(self) -> None:
        tc.save_async(f"{self.path}/inside", TREE, overwrite=True).result(HANGS)

    def manage(self) -> None:
        self.manager.save(2, TREE)
        self.manager.wait()


def at_each_line(path: str, way: str, share: int) -> dict[str, Any]:
    """Makes the inner call at the lines of each outer call; returns how often it was made and refused by the outer."""
    inner, counts = Inner(path, way), {}
    for name, call in outer_calls(path).items():
        call()
        seen: set[tuple[str, int]] = set()
        inner.made = inner.refused = 0

        def trace(frame: FrameType, event: str, _: Any, seen: set[tuple[str, int]] = seen) -> Any:
            at = frame.f_code.co_filename, frame.f_lineno
            if event == "line" and at not in seen and "importlib" not in at[0]:
                seen.add(at)
                if zlib.crc32(repr(at).encode()) % 100 < share:
                    inner()
            return trace

        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)
        counts[name] = inner.made, inner.refused
    return counts


def at_random_moments(path: str, trials: int) -> dict[str, Any]:
    """A signal comes while each outer call is made."""
    inner, counts = Inner(path, "save"), {}
    calls = list(outer_calls(path).items())
    for _, call in calls:
        call()
    signal.signal(signal.SIGALRM, lambda *_: inner())
    for trial in range(trials):
        name, call = calls[trial % len(calls)]
        inner.made = inner.refused = 0
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 0.012))
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
        made, refused = counts.get(name, (0, 0))
        counts[name] = made + inner.made, refused + inner.refused
    return counts


def main(way: str, path: str, share: int) -> None:
    faulthandler.dump_traceback_later(HANGS, exit=True)
    counts = at_random_moments(path, share) if way == "signals" else at_each_line(path, way, share)
    for name in ("c", "d", "e"):
        with contextlib.suppress(tc.CheckpointError):
            tc.save_async(f"{path}/f", TREE, overwrite=True).result(HANGS)
        assert tc.verify(f"{path}/{name}").ok
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
