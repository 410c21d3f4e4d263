"""Where no thread can be started, the calling thread does the work: with nothing lost, and no error."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import no_threads, run_program
from tests.helpers.s3 import S3
from treeckpt._io.comm.comm import SoloComm
from treeckpt._threads import ThreadPool, call_in_thread, start_thread

TREE = {"w": np.arange(3_000_000), "b": np.arange(5 << 20, dtype=np.int32)[::-1], "n": 1}


def same(found: Any) -> bool:
    return found["n"] == 1 and all(np.array_equal(found[name], TREE[name]) for name in ("w", "b"))


def test_a_pool_makes_its_calls_here_where_no_thread_can_be_started() -> None:
    here = threading.get_ident()
    with no_threads():
        with ThreadPool(3, "treeckpt-test") as pool:
            assert list(pool.map(lambda n: (n, threading.get_ident()), range(4))) == [(n, here) for n in range(4)]
            failed = pool.submit(lambda: 1 // 0)
        assert isinstance(failed.exception(), ZeroDivisionError)
        assert call_in_thread(threading.get_ident, "treeckpt-test").result() == here
        assert start_thread(threading.get_ident, "treeckpt-test") is None


def test_a_pool_uses_the_threads_that_it_has() -> None:
    with ThreadPool(3, "treeckpt-test") as pool:
        both = threading.Barrier(2, timeout=60)
        meeting = [pool.submit(both.wait), pool.submit(both.wait)]
        with no_threads():
            others = list(pool.map(lambda _: threading.current_thread().name, range(5)))
        assert sorted(future.result() for future in meeting) == [0, 1] and set(others) == {"treeckpt-test"}
    assert not [thread for thread in threading.enumerate() if thread.name == "treeckpt-test"]


def test_calls_that_are_cancelled_are_not_made() -> None:
    begun, gate = threading.Event(), threading.Event()
    pool = ThreadPool(1, "treeckpt-test")
    first = pool.submit(lambda: (begun.set(), gate.wait(60)))
    later = pool.submit(print)
    assert begun.wait(60)
    pool.shutdown(wait=False, cancel_futures=True)
    gate.set()
    pool.shutdown()
    assert first.result() == (None, True) and later.cancelled()


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_everything_is_saved_and_loaded_without_a_thread(tmp_path: Path, writer: Any) -> None:
    with no_threads():
        tc.save(tmp_path / "a", TREE, files={"one": b"1", "two": b"2"})
        pending = tc.save_async(
            tmp_path / "b", TREE, comm=SoloComm(), background=tc.BackgroundOptions(writer=writer, staging="lazy")
        )
        assert pending.done() and pending.result() is not None
        tc.prewarm(TREE, comm=SoloComm(), background=tc.BackgroundOptions(writer=writer))
        assert tc.verify(tmp_path / "a").ok and tc.verify(tmp_path / "b").ok
        assert same(tc.load(tmp_path / "a")) and same(tc.load_async(tmp_path / "b").result())
        into = {"w": np.zeros(3_000_000, int), "b": np.zeros(5 << 20, np.int32), "n": 0}
        tc.load_into(tmp_path / "b", into)
        assert same(into)
        with tc.Manager(tmp_path / "run", keep=1, background=tc.BackgroundOptions(writer=writer)) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"step": step})
            assert manager.latest() == 3 and manager.restore() == {"step": 3}
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_00000003"]
        with pytest.raises(tc.CheckpointExists):
            tc.save_async(tmp_path / "b", TREE, comm=SoloComm())


@pytest.mark.parametrize("loop", [False, True], ids=["", "in an event loop"])
def test_an_object_store_is_written_and_read_without_a_thread(s3: S3, loop: bool) -> None:
    async def save_and_load() -> None:  # as a notebook's cell is run
        _save_and_load(s3)

    call_in_thread(lambda: asyncio.run(save_and_load()) if loop else _save_and_load(s3), "treeckpt-test").result()


def _save_and_load(s3: S3) -> None:
    run = s3.url()
    with no_threads():
        tc.save(f"{run}/step_00000001", TREE, step=1, max_shard_bytes=20 << 20)
        with tc.Manager(run, keep=1) as manager:
            manager.save(2, TREE)
            manager.wait()
            assert manager.steps() == [2] and same(manager.restore())
        assert not {"step_00000001"} & set(manager.directory.store.names())
    assert not s3.uploads(run)


AT_THE_LIMIT = """
import os, resource, sys
import numpy as np
import treeckpt as tc
from treeckpt._io.comm.comm import SoloComm

path, tree = sys.stdin.readline().strip(), {"w": np.arange(300_000), "n": 1}
tc.save_async(path + "/first", tree, background=tc.BackgroundOptions(writer="thread"), comm=SoloComm()).result(60)
tc.load(path + "/first")  # all modules are imported: another user may not read them
if os.getuid() == 0:  # root has no limit
    os.chown(path, 54321, 54321)
    os.setgid(54321)
    os.setuid(54321)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    os.fork()
except BlockingIOError:
    print("limited")
tc.save(path + "/1", tree)
for number, writer in ((2, "thread"), (3, "process")):
    pending = tc.save_async(f"{path}/{number}", tree, background=tc.BackgroundOptions(writer=writer), comm=SoloComm())
    print(pending.done(), pending.result().nbytes)
"""


def test_a_process_at_its_limit_of_processes_saves() -> None:
    with tempfile.TemporaryDirectory() as run:  # pytest's directories are not for other users
        done = run_program(AT_THE_LIMIT, input=f"{run}\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["limited", *["True 2400000"] * 2]
        assert all(tc.verify(Path(run) / number).ok for number in "123")
