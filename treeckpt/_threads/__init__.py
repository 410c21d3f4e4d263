"""Threads of this package. Where none can be started, the calling thread does the work.

So it is at a limit of processes (`ulimit -u`, a container's `pids.max`) and where the interpreter ends: newer ones
start no thread then, older ones start one that never runs. `concurrent.futures.ThreadPoolExecutor` refuses work in both
cases, and its locks are not for signal handlers: `ThreadPool` takes none.

It imports nothing of the package. Every thread is started by `start_thread`, `call_in_thread` or a `ThreadPool`, but
one of the writer process, which is to import little.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Calls = SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


def start_thread(run: Callable[[], object], name: str, *, awaited: bool = False) -> threading.Thread | None:
    """Starts a thread; returns None where none can be started.

    Args:
        awaited: the interpreter does not end before the thread. While it ends, none is started.
    """
    # older interpreters would start a thread that never runs, and wait for it
    if sys.is_finalizing() or (awaited and not threading.main_thread().is_alive()):
        return None
    thread = threading.Thread(target=run, name=name, daemon=not awaited)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def start_unnamed_thread(run: Callable[[], object]) -> bool:
    """As `start_thread`, but does not wait for milliseconds until the thread runs; returns whether it was started."""
    if sys.is_finalizing():
        return False
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        return False
    return True


def call_in_thread(call: Callable[[], T], name: str, *, awaited: bool = False) -> Future[T]:
    """Makes a call in a thread of its own, or here where none can be started; `awaited` as for `start_thread`."""
    future: Future[T] = Future()
    run = partial(make_call, future, call)
    if start_thread(run, name, awaited=awaited) is None:
        run()
    return future


class ThreadPool(Executor):
    """Makes calls in threads, or in the thread that submits them where none can be started.

    Threads start with the first calls. They end with `shutdown`, or when the object is deleted; nothing waits for them
    at the end of the interpreter.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._limit, self._name = threads, name
        self._threads: list[threading.Thread] = []
        self._calls: _Calls = SimpleQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        # queued before a thread is started: where none can be, the calls that wait are made here
        self._calls.put((future, partial(fn, *args, **kwargs)))
        self._threads = [thread for thread in self._threads if thread.is_alive()]  # none does in a forked child
        if len(self._threads) < self._limit:
            thread = start_thread(partial(_make_calls, self._calls), self._name)
            if thread is not None:
                self._threads.append(thread)
            elif not self._threads:
                self._make_calls_here()
        return future

    def _make_calls_here(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                make_call(*call)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures:
            try:
                call = self._calls.get_nowait()
            except Empty:
                break
            if call is not None:
                call[0].cancel()
        self._end_threads()
        for thread in self._threads if wait else ():
            thread.join()

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def __del__(self) -> None:
        self._end_threads()


def _make_calls(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        make_call(*call)
        del call  # else it would keep what it returned until the next one


def make_call(future: Future[Any], call: Callable[[], Any]) -> None:
    """Makes a call, and gives a future its result or its error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    # SystemExit and KeyboardInterrupt too: without a result the caller would wait for ever
    except BaseException as error:
        future.set_exception(error)
        del future, call  # the error refers to this frame
    else:
        future.set_result(result)


class WorkerThreads:
    """A group of threads that calls functions in parallel, together with the caller's thread.

    It is of use for functions that release Python's global lock for long, as numpy's copies and sorts. A pool alone
    does not suffice: after an error it leaves other functions running, which may write to memory that the caller
    reuses. The threads start with the first call, and end when the object is deleted.

    Args:
        threads: their number, including the caller's thread.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPool(max(1, threads - 1), "treeckpt-team")

    def __call__(self, functions: Sequence[Callable[[], object]]) -> None:
        """Calls all functions, in about their order; once none runs any more, returns or raises the first error."""
        left = deque(functions)

        def work() -> None:
            while left:
                try:
                    function = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    function()
                except BaseException:
                    # no further function is begun after an error
                    left.clear()
                    raise

        helpers: list[Future[None]] = []
        helpers.extend(self._pool.submit(work) for _ in range(min(self._threads, len(functions)) - 1))
        try:
            work()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()
