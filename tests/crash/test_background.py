"""Saves in the background whose processes end: the interpreter normally; a writer, a rank, the coordinator by force."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treeckpt as tc
from tests.helpers.background import ROOT, Hooked, calls_of, gone, run_program, session, until, writer_pid
from tests.helpers.world import LIMIT, LONG, assert_holds, errors_of, on_ranks, small_tree
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.comm.comm import Comm, SoloComm, thread_comms

# the interpreter ends -------------------------------------------------------------------------------------------------
START = """
import sys, threading, time
from pathlib import Path
import numpy as np
import treeckpt as tc
from tests.helpers.background import Hooked
path = Path({path!r})
background = tc.BackgroundOptions(writer={writer!r}, timeout=300)
pending = tc.save_async({store}, {{"w": np.arange(1000), "n": 1}}, background=background)
print("started", flush=True)
"""


def program(path: Path, end: str, *, act: str = "", at: int | None = None, writer: str = "process") -> str:
    store = f"Hooked(path, path.with_suffix('.log'), {at}, {act!r})" if act else "path"
    return START.format(path=str(path), store=store, writer=writer) + end


def release(path: Path) -> None:
    """Lets a program go on whose saves to a path are held."""
    Hooked(path, path.with_suffix(".log"), act="hold").release()


SAVED = "while not pending.done(): time.sleep(0.01)"
ENDS = [
    ("", "process"),
    ("sys.exit(0)", "process"),
    ("del pending", "process"),
    (SAVED, "process"),
    ("", "thread"),
    *(pytest.param(end, "thread", marks=pytest.mark.slow) for end in ("sys.exit(0)", "del pending", SAVED)),
]


@pytest.mark.parametrize(("end", "writer"), ENDS)
def test_a_normal_end_waits_for_the_save(tmp_path: Path, end: str, writer: str) -> None:
    done = run_program(program(tmp_path / "c", end, writer=writer))
    assert done.returncode == 0 and "lost" not in done.stderr, done.stderr
    assert tc.load(tmp_path / "c")["n"] == 1 and tc.verify(tmp_path / "c").ok


def test_a_thread_still_writes_while_the_interpreter_ends(tmp_path: Path) -> None:
    """No thread can be started by then, in newer interpreters none at all."""
    code = f"""
import numpy as np, threading, time
import treeckpt as tc
class Late(tc.LocalStore):
    def create(self, name, nbytes):
        time.sleep(0.7)
        return super().create(name, nbytes)
    def __reduce__(self):
        raise TypeError("stays here")
in_thread = tc.BackgroundOptions(writer="thread")
tc.save_async(Late({str(tmp_path / "c")!r}), {{"w": np.arange(3_000_000)}}, background=in_thread)
"""
    done = run_program(code)
    assert done.returncode == 0 and "lost" not in done.stderr, done.stderr
    assert tc.verify(tmp_path / "c").ok


def test_a_long_wait_is_said(tmp_path: Path) -> None:
    with running(program(tmp_path / "c", "", act="hold")) as process:
        assert process.stderr is not None
        assert f"waiting for the save to {tmp_path / 'c'} to be committed, for at most" in process.stderr.readline()
        release(tmp_path / "c")
        assert "it is committed" in process.stderr.read()
        assert ends(process) == 0
    assert tc.load(tmp_path / "c")["n"] == 1


@pytest.mark.parametrize(
    ("act", "end"),
    [
        *(("fail", ""), ("fail", SAVED), ("kill", "sys.exit(0)")),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in (("fail", "sys.exit(0)"), ("kill", ""), ("kill", SAVED))
        ),
    ],
)
def test_exit_code_zero_never_hides_a_lost_save(tmp_path: Path, act: str, end: str) -> None:
    handlers = "import atexit; atexit.register(lambda: print('other handlers run', flush=True))\n"
    done = run_program(handlers + program(tmp_path / "c", end, act=act, at=1))
    assert done.returncode == 1 and done.stdout == "started\nother handlers run\n"
    assert f"the save to {tmp_path / 'c'} was lost" in done.stderr
    assert ("injected" if act == "fail" else "SIGKILL") in done.stderr
    assert not (tmp_path / "c" / INDEX_NAME).exists()


def test_a_failure_that_was_asked_for_is_not_told_again(tmp_path: Path) -> None:
    end = "try: pending.result()\nexcept tc.CheckpointError: print('seen')"
    done = run_program(program(tmp_path / "c", end, act="fail", at=1))
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\nseen\n", "")


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("raise ValueError('mine')", 1)])
def test_other_exit_codes_stay_where_nothing_was_lost(tmp_path: Path, end: str, code: int) -> None:
    done = run_program(program(tmp_path / "c", end))
    assert done.returncode == code and "lost" not in done.stderr
    assert tc.load(tmp_path / "c")["n"] == 1, "also then a save that was begun is finished"


def test_a_failing_program_that_loses_a_save_fails(tmp_path: Path) -> None:
    done = run_program(program(tmp_path / "c", "raise ValueError('mine')", act="fail", at=1))
    assert done.returncode == 1 and "ValueError: mine" in done.stderr and "was lost" in done.stderr


def test_a_child_of_multiprocessing_waits_too(tmp_path: Path) -> None:
    code = f"""
import multiprocessing
import numpy as np
import treeckpt as tc
def work(path):
    tc.save_async(path, {{"w": np.arange(1000)}})
child = multiprocessing.get_context("fork").Process(target=work, args=({str(tmp_path / "c")!r},))
child.start(); child.join()
raise SystemExit(child.exitcode)
"""
    done = run_program(code)
    assert done.returncode == 0 and "lost" not in done.stderr, done.stderr
    assert tc.load(tmp_path / "c")["w"].shape == (1000,)


@contextlib.contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ends(process: subprocess.Popen[str]) -> int:
    """Waits for the end of a program, and returns its exit code; fails with the stacks of its threads.

    The writer process has the lowest priority: beside many busy processes a save may take a minute.
    """
    try:
        return process.wait(240)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        pytest.fail(f"the program did not end:\n{process.communicate()[1]}")


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL, signal.SIGINT]
)
def test_the_writer_ends_with_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    """Also where a fork of the parent still holds the socket open."""
    end = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in a background job
from treeckpt._saving.session import session_of
from treeckpt._io.comm.comm import default_comm
writer = session_of(default_comm()).writer.pid
if os.fork() == 0:
    for stream in (0, 1, 2):
        os.close(stream)
    time.sleep(100)
    os._exit(0)
print(writer, flush=True)
while True:  # a signal that comes between the interpreter's check and the call would not end a long sleep
    time.sleep(0.1)
"""
    with running(program(tmp_path / "c", end, act="hold")) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        writer = int(process.stdout.readline())
        assert not gone(writer)
        process.send_signal(number)
        if number == signal.SIGINT:  # after it the interpreter ends normally, and waits
            release(tmp_path / "c")
        assert ends(process) != 0
        assert until(lambda: gone(writer))
    assert (tmp_path / "c" / INDEX_NAME).exists() == (number == signal.SIGINT)


# the writer is killed -------------------------------------------------------------------------------------------------
def test_a_writer_killed_at_any_call_fails_its_save_and_no_other(tmp_path: Path) -> None:
    comm = SoloComm()
    count = tmp_path / "count"
    tc.save_async(Hooked(tmp_path / "d", count), small_tree(0, 1, seed=2), comm=comm).result(LIMIT)
    calls = calls_of(count)
    assert len(calls) >= 7 and calls[-2] == f"publish {INDEX_NAME}"
    last = len(calls) - 1
    # what is left behind one call is what is found before the next, so only the last is looked at from behind too
    for at, after in [*((at, False) for at in range(len(calls))), (last, True)]:
        path = tmp_path / f"{at} {after}"
        tc.save(path, small_tree(0, 1, seed=1))
        pending = tc.save_async(
            Hooked(path, path.with_suffix(".log"), at, "kill", after=after),
            small_tree(0, 1, seed=2),
            comm=comm,
            overwrite=True,
        )
        with pytest.raises(tc.CheckpointError, match="killed by SIGKILL") as caught:
            pending.result(LIMIT)
        assert caught.value.path == str(path)
        assert ("index is in place" in str(caught.value)) == (at == last)
        assert_holds(path, seed=2 if at == last else 1)
        tc.save_async(path, small_tree(0, 1, seed=3), comm=comm, overwrite=True).result(LIMIT)
        assert_holds(path, seed=3)
    session(comm).writer.end()


@pytest.mark.parametrize(
    ("call", "culprit"),
    [
        *(("write shard", 0), ("publish index", 0), ("commit shard", 1)),  # only the coordinator publishes
        *(pytest.param(f"{call} shard", 0, marks=pytest.mark.slow) for call in ("create", "commit")),
        *(pytest.param(f"{call} shard", 1, marks=pytest.mark.slow) for call in ("create", "write")),
        pytest.param("publish timings", 0, marks=pytest.mark.slow),
    ],
)
def test_a_writer_killed_on_one_rank_is_named_on_all(tmp_path: Path, call: str, culprit: int) -> None:
    names = ["create shard", "write shard", "write shard", "commit shard", "publish timings", "publish index"]
    comms = thread_comms(2, timeout=LONG)
    tc.save(tmp_path / "c", small_tree(0, 1, seed=1))

    def act(comm: Comm) -> Any:
        at = names.index(call) if comm.rank == culprit else None
        store = Hooked(tmp_path / "c", tmp_path / f"log{comm.rank}", at, "kill")
        return tc.save_async(store, small_tree(comm.rank, 2, seed=2), comm=comm, overwrite=True).result(LIMIT)

    for error in errors_of(on_ranks(comms, act)):
        assert isinstance(error, tc.RankError) and list(error.ranks) == [culprit] and "SIGKILL" in str(error)
    assert calls_of(tmp_path / f"log{culprit}")[-1].startswith(call)
    assert_holds(tmp_path / "c", seed=1)
    outcomes = on_ranks(
        comms,
        lambda c: tc.save_async(tmp_path / "c", small_tree(c.rank, 2, seed=3), comm=c, overwrite=True).result(LIMIT),
    )
    assert errors_of(outcomes) == [None, None]
    assert_holds(tmp_path / "c", seed=3)
    for comm in comms:
        session(comm).writer.end()


def test_a_writer_that_hangs_is_given_up_on(tmp_path: Path) -> None:
    comm = SoloComm()
    tc.save_async(tmp_path / "a", {"n": 1}, comm=comm).result(LIMIT)
    pid = writer_pid(comm)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(tc.CheckpointError, match=r"silent for 1 s"):
        tc.save_async(tmp_path / "b", {"n": 2}, comm=comm, background=tc.BackgroundOptions(timeout=1.0)).result(LIMIT)
    assert gone(pid)
    assert tc.save_async(tmp_path / "b", {"n": 3}, comm=comm).result(LIMIT) is not None
    session(comm).writer.end()


# a rank is killed -----------------------------------------------------------------------------------------------------
CASES = [(1, phase) for phase in ("before", "create", "commit")]
CASES += [(0, phase) for phase in ("before", "staged", "write", "commit", "publish")]


def test_a_rank_killed_in_any_phase_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash.ranks", str(tmp_path), json.dumps(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["culprit"], row["phase"]) for row in rows] == CASES
    for row in rows:
        culprit, path = row["culprit"], Path(row["path"])
        for rank, told in enumerate(row["told"]):
            if rank == culprit:
                assert row["status"][rank] == -signal.SIGKILL
            else:
                assert row["status"][rank] == 0, told
                assert told.startswith("RankError") and f"rank {culprit}: silent" in told, told
        assert_holds(path / "one", seed=1)
        assert not (path / "two" / INDEX_NAME).exists()
        tc.save(path / "two", small_tree(0, 1, seed=4), overwrite=True)
        assert_holds(path / "two", seed=4)
