"""Calls inside of calls, on one thread: python -m tests.saving.nested PATH SHARE TRIALS; see test_saves_inside_calls.

At lines of Python that an outer call runs in this thread it saves and loads, as a signal handler may, once a line;
SHARE is the part of the lines, of 100. Then it makes as many trials with real signals at random moments. It prints how
often it has loaded, saved and been refused, by outer calls; it ends with the stacks where a call hangs.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import treeckpt as tc
from treeckpt._io.comm.comm import SoloComm

HANGS = 120.0
"""Seconds after which a call counts as hanging."""
LONGEST = 0.012
"""Seconds after which a signal comes at the latest, of calls that last longer."""
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
        "thread": lambda: tc.save_async(
            f"{path}/e", TREE, overwrite=True, background=tc.BackgroundOptions(writer="thread")
        ).wait_staged(HANGS),
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
    """The calls inside; it counts how often it was made, and the saves that were refused."""

    def __init__(self, path: str) -> None:
        self.path, self.running, self.counts = path, False, {"loads": 0, "saves": 0, "refused": 0}
        self.manager = tc.Manager(f"{path}/inner", keep=2)
        self.manager.save(1, TREE)
        self.manager.wait()
        tc.save(f"{path}/there", TREE)

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = self.counts, {"loads": 0, "saves": 0, "refused": 0}
        return counts

    def __call__(self, call: Callable[[], None]) -> None:
        if self.running:
            return
        self.running = True
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            call()
        finally:
            faulthandler.dump_traceback_later(HANGS, exit=True)
            self.running = False

    def load_all(self) -> None:
        assert np.array_equal(tc.load(f"{self.path}/there")["w"], TREE["w"])
        assert self.manager.latest() is not None
        self.manager.wait()
        self.counts["loads"] += 1

    def save_all(self) -> None:
        for save in (self.save, self.save_async, self.manage):
            self.counts["saves"] += 1
            try:
                save()
            except tc.CheckpointError as error:
                assert "is under way on this thread" in str(error), error
                assert "Set a flag and save at the next step" in str(error), error
                self.counts["refused"] += 1

    def save(self) -> None:
        tc.save(f"{self.path}/inside", TREE, overwrite=True)

    def save_async(self) -> None:
        tc.save_async(f"{self.path}/inside", TREE, overwrite=True).result(HANGS)

    def manage(self) -> None:
        self.manager.save(2, TREE)
        self.manager.wait()


def at_each_line(inner: Inner, calls: dict[str, Callable[[], Any]], share: int) -> dict[str, dict[str, int]]:
    """Makes the inner calls at lines of each outer call."""
    found: dict[str, dict[str, int]] = {}
    for name, call in calls.items():
        call()
        seen: set[tuple[str, int]] = set()
        inner.take_counts()

        def trace(frame: FrameType, event: str, _: Any, seen: set[tuple[str, int]] = seen) -> Any:
            at = frame.f_code.co_filename, frame.f_lineno
            if event == "line" and at not in seen and "importlib" not in at[0]:
                seen.add(at)
                number = zlib.crc32(repr((at[0].rpartition("/")[2], at[1])).encode()) % 100
                for make in (inner.save_all,) * (number < share) + (inner.load_all,) * (number >= 100 - share):
                    inner(make)
            return trace

        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)
        found[name] = inner.take_counts()
    return found


def _seconds(call: Callable[[], Any]) -> float:
    """How long a call takes, so that most signals come while it runs."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def at_random_moments(inner: Inner, calls: dict[str, Callable[[], Any]], trials: int) -> dict[str, dict[str, int]]:
    """Makes the inner calls in a signal's handler, while each outer call is made in turn."""
    found = {name: {"loads": 0, "saves": 0, "refused": 0} for name in calls}
    lasts = {name: min(_seconds(call), LONGEST) for name, call in calls.items()}
    signal.signal(signal.SIGALRM, lambda *_: (inner(inner.save_all), inner(inner.load_all)))
    for trial in range(trials):
        name, call = list(calls.items())[trial % len(calls)]
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, max(lasts[name], 1e-4)))
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
        found[name] = {key: found[name][key] + count for key, count in inner.take_counts().items()}
    return found


def main(path: str, share: int, trials: int) -> None:
    faulthandler.dump_traceback_later(HANGS, exit=True)
    inner, calls = Inner(path), outer_calls(path)
    lines, signals = at_each_line(inner, calls, share), at_random_moments(inner, calls, trials)
    tc.save_async(f"{path}/f", TREE).result(HANGS)
    assert all(tc.verify(f"{path}/{name}").ok for name in "cdef")
    print(json.dumps([lines, signals]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
