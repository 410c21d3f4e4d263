"""Stores that misbehave in the writer process, processes that save in the background, and probes of the interpreter."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import treeckpt as tc
from tests.helpers.world import LONG
from treeckpt._io.comm.comm import Comm
from treeckpt._io.storage.local_store import LocalRun, LocalStore
from treeckpt._io.storage.store import RunStore, Writer
from treeckpt._saving.session import Session, session_of

__all__ = [
    "Hooked",
    "Probe",
    "arenas_open",
    "calls_of",
    "content_of",
    "descriptors_left",
    "files_open",
    "gone",
    "in_child",
    "no_threads",
    "run_program",
    "savers_ended",
    "session",
    "until",
    "writer_pid",
]

ROOT = Path(__file__).parents[2]
PAUSE = 0.2
"""Seconds that a slow store takes for a call."""


class Hooked(tc.LocalStore):
    """A directory whose calls are noted, and at number `at` something happens; in the writer process only.

    Args:
        log: gets a line for each call.
        at: counted from 0; None never.
        act: "fail" raises, "kill" kills the process, "sleep" takes its time at each call, "hold" waits until `release`
            was called: at that call, or at each if `at` is None.
        after: once the call has taken effect.
    """

    def __init__(
        self,
        directory: Path,
        log: Path,
        at: int | None = None,
        act: str = "fail",
        *,
        after: bool = False,
        home: int = 0,
    ) -> None:
        super().__init__(directory)
        self.log, self.at, self.act, self.after, self.home = log, at, act, after, home or os.getpid()

    def __reduce__(self) -> Any:
        return _hooked, (self.directory, self.log, self.at, self.act, self.after, self.home)

    def hook(self, name: str, effect: Callable[[], Any]) -> Any:
        if os.getpid() == self.home:
            return effect()
        with open(self.log, "a") as log:
            log.write(f"{name}\n")
        now = self.at is not None and len(calls_of(self.log)) == self.at + 1
        if now and not self.after:
            self.happen(name)
        if self.act == "hold" and self.at is None:
            self.happen(name)
        time.sleep(PAUSE if self.act == "sleep" else 0)
        result = effect()
        if now and self.after:
            self.happen(name)
        return result

    @property
    def gate(self) -> Path:
        return self.log.with_suffix(".go")

    def release(self) -> None:
        """Lets the calls of a held store go on, in whatever process they are made."""
        self.gate.touch()

    def happen(self, name: str) -> None:
        if self.act == "hold":
            assert until(self.gate.exists)
            return
        if self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(5, f"injected at {name}")

    def create(self, name: str, nbytes: int) -> Writer:
        return _HookedWriter(self.hook(f"create {name}", lambda: super(Hooked, self).create(name, nbytes)), self, name)

    def publish(self, name: str, data: bytes, *, replace: bool, check: Callable[[], object] = lambda: None) -> None:
        self.hook(f"publish {name}", lambda: super(Hooked, self).publish(name, data, replace=replace, check=check))


def _hooked(directory: Path, log: Path, at: int | None, act: str, after: bool, home: int) -> Hooked:
    return Hooked(directory, log, at, act, after=after, home=home)


class _HookedWriter:
    ordered = False

    def __init__(self, inner: Writer, store: Hooked, name: str) -> None:
        self.inner, self.store, self.name = inner, store, name

    def write(self, offset: int, data: memoryview) -> None:
        self.store.hook(f"write {self.name}", lambda: self.inner.write(offset, data))

    def commit(self) -> None:
        self.store.hook(f"commit {self.name}", self.inner.commit)

    def abort(self) -> None:
        self.inner.abort()


def calls_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def session(comm: Comm | None = None) -> Session:
    from treeckpt._io.comm.comm import default_comm

    return session_of(comm or default_comm())


def writer_pid(comm: Comm | None = None) -> int:
    pid = session(comm).writer.pid
    assert pid is not None, "it runs"
    return pid


def gone(pid: int) -> bool:
    """Whether a process has ended, with all its threads (a zombie has)."""
    try:
        zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return zombie and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def files_open(directory: Path) -> list[str]:
    """The files below a directory that this process has open: those of one test, whatever others leave to it."""
    return [target for target in _open_targets() if f"{target}/".startswith(f"{directory}/")]


def arenas_open() -> int:
    """How many descriptors of arenas this process has; what other tests forgot may only become less meanwhile."""
    return sum("treeckpt-arena" in target for target in _open_targets())


def _open_targets() -> list[str]:
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


def until(condition: Callable[[], bool], timeout: float = LONG) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Probe(threading.Thread):
    """Ticks every millisecond; `stop` gives the longest time that this process computed between two ticks, in seconds.

    Its own computing counts, not the clock: what other processes of a busy machine take does not, nor the time in which
    this thread could go on and had no processor.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._going, self._longest = True, 0.0
        self.start()

    def run(self) -> None:
        last, waited = time.process_time(), _waited_for_processor()
        while self._going:
            time.sleep(0.001)
            now, waits = time.process_time(), _waited_for_processor()
            self._longest = max(self._longest, now - last - (waits - waited))
            last, waited = now, waits

    def stop(self) -> float:
        self._going = False
        self.join()
        return self._longest


def _waited_for_processor() -> float:
    """The seconds in which this thread could go on and had no processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def savers_ended() -> None:
    """Waits for the threads of saves: one may act a moment longer than its result is known."""
    for thread in threading.enumerate():
        if thread.name == "treeckpt-save":
            thread.join(LONG)
    gc.collect()


def run_program(
    code: str, *, arguments: Sequence[str] = (), timeout: float = 240.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A program of its own, at the root of the checkout; `__main__` is as unguarded as scripts are."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False, **options)


def content_of(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint by name, with what differs from save to save taken out: id, start, seals."""
    index = tc.inspect(path)
    found: dict[str, bytes] = {}
    for file in path.iterdir():
        if file.name.startswith("timings"):
            continue
        data = file.read_bytes().replace(index.save_id.encode(), b"S" * 16)
        data = data.replace(str(index.created_ns).encode(), b"T" * len(str(index.created_ns)))
        data = re.sub(rb'"seal":"[0-9a-f]{16}"', b'"seal":""', data)
        if file.suffix == ".safetensors":  # the manifest's time is inside of the header, which the first block is not
            assert msgspec.json.decode(file.read_bytes()[8 : 8 + int.from_bytes(data[:8], "little")])
        found[file.name.replace(index.save_id, "S")] = data
    return found


class Gate:
    """Holds writes back, or makes them fail, in the directories of some steps."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.failing: set[str] = set()
        self.reached = threading.Event()


class GatedRun(RunStore):
    """A run whose saves go through a gate. It writes from a thread: gates are not shared with processes."""

    def __init__(self, path: Path, gate: Gate) -> None:
        self.inner, self.gate = LocalRun(path), gate

    @property
    def url(self) -> str:
        return self.inner.url

    def names(self) -> list[str]:
        return self.inner.names()

    def folder(self, name: str) -> LocalStore:
        folder = self.inner.folder(name)
        create, gate = folder.create, self.gate

        def gated(file: str, nbytes: int) -> Any:
            gate.reached.set()
            assert gate.open.wait(LONG)
            if name in gate.failing:
                raise OSError(28, "No space left on device")
            return create(file, nbytes)

        folder.create = gated  # pyright: ignore[reportAttributeAccessIssue]
        return folder


def in_child(act: Callable[[], int]) -> tuple[int, str]:
    """Runs something in a fork of this process; returns its exit code, and what it has printed."""
    with tempfile.TemporaryFile("w+") as file:
        if not (pid := os.fork()):
            code = 99
            try:
                with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                    code = act()
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=file)
            finally:
                file.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        file.seek(0)
        return os.waitstatus_to_exitcode(status), file.read()


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Leaves this process so many file descriptors; a child must ask, as the limit stays."""
    gc.collect()  # files of earlier tests that are closed later would leave more
    # a process of many tests may have more than 256 open
    limit = max(256, 1 + count + max(int(name) for name in os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(count):
        os.close(held.pop())
    yield
    for fd in held:
        os.close(fd)


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started in the body: each would need a stack that is larger than any memory."""
    before = threading.stack_size(1 << 46)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(before)
