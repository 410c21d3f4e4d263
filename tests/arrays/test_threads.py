"""Works that are done at the same time: all of them, once; an error is heard when nothing runs any more."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import pytest

from tests.helpers.background import until
from treeckpt import _threads
from treeckpt._threads import WorkerThreads


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_every_work_is_done_once(threads: int, count: int) -> None:
    team, done = WorkerThreads(threads), list[int]()
    for _ in range(2):
        team([lambda n=n: done.append(n) for n in range(count)])
    assert sorted(done) == sorted([*range(count)] * 2)


def test_works_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=120)
    WorkerThreads(2)([both.wait, both.wait])


@pytest.mark.parametrize("here", [True, False])
def test_an_error_is_raised_when_nothing_runs_any_more_and_what_is_left_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    heard = threading.Event()

    class Works(deque[Callable[[], object]]):
        def clear(self) -> None:
            super().clear()
            heard.set()

    both, running, begun = threading.Barrier(2, timeout=120), [True], list[int]()

    def meet(act: Callable[[], None]) -> None:
        both.wait()
        act() if (threading.current_thread() is threading.main_thread()) == here else end()

    def end() -> None:
        assert heard.wait(120)
        time.sleep(0.1)
        running.clear()

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(_threads, "deque", Works)
    with pytest.raises(ZeroDivisionError):
        WorkerThreads(2)([lambda: meet(fail), lambda: meet(fail), *(lambda n=n: begun.append(n) for n in range(9))])
    assert not running and not begun


def test_its_threads_end_when_nobody_has_it_any_more() -> None:
    before, all_three = set(threading.enumerate()), threading.Barrier(3, timeout=120)
    team = WorkerThreads(3)
    team([all_three.wait] * 3)
    own = {thread for thread in set(threading.enumerate()) - before if thread.name == "treeckpt-team"}
    assert len(own) == 2
    del team
    assert until(lambda: not any(thread.is_alive() for thread in own)), "threads stay"
