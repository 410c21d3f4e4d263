"""Loads in the background: the same tree as `load`, errors from `result`, and a process that ends does not wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.corruption import flip

TREE = {"w": np.arange(1000.0), "more": [np.ones(3), "x"], "n": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tc.save(tmp_path / "c", TREE)
    return tmp_path / "c"


def same(found: Any) -> bool:
    whole = np.array_equal(found["w"], TREE["w"]) and np.array_equal(found["more"][0], np.ones(3))
    return whole and bool(tc.trees.same_structure(found, TREE)) and found["n"] == 3


def test_it_gives_what_load_gives(path: Path) -> None:
    reports: list[tc.LoadReport] = []
    pending = tc.load_async(path, on_report=reports.append)
    assert same(pending.result(60)) and pending.done() and reports[0].loaded == 4
    assert repr(pending) == f"<PendingLoad loaded {path}>"
    bank = tc.load_async([path, tc.From(path, select="w")], {"w": np.zeros(1000), "n": 0}, strict=False)
    assert np.array_equal(bank.result(60)["w"], TREE["w"])
    assert tc.load_async(str(path), select="n").result(60)["n"] == 3


def test_what_fails_comes_out_of_the_result_each_time(path: Path, tmp_path: Path) -> None:
    seen: list[tc.PendingLoad] = []
    missing = tc.load_async(tmp_path / "none")
    missing.add_done_callback(seen.append)
    for _ in range(2):
        with pytest.raises(tc.CheckpointNotFound, match="none: expected a checkpoint"):
            missing.result(60)
    assert missing.done() and seen == [missing] and "failed" in repr(missing)
    with pytest.raises(tc.MismatchError, match="w: expected shape"):
        tc.load_async(path, {"w": np.zeros(3)}, strict=False).result(60)
    with pytest.raises(tc.CheckpointError, match="path: expected a path"):
        tc.load_async(3).result(60)  # type: ignore[arg-type]


def test_options_that_load_does_not_have_are_refused_at_once(path: Path) -> None:
    with pytest.raises(TypeError, match="'selekt' is no option of load_async"):
        tc.load_async(path, selekt="w")  # type: ignore[call-arg]
    with pytest.raises(tc.MismatchError, match="together: expected True or False, found 'yes'"):
        tc.load_async(path, together="yes")  # type: ignore[arg-type]


class Held(tc.LocalStore):
    """A store that waits before it reads."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def read(self, *arguments: Any, **options: Any) -> Any:
        self.go.wait(60)
        return super().read(*arguments, **options)


def test_a_result_may_be_waited_for_within_a_limit(path: Path) -> None:
    store = Held(path)
    pending = tc.load_async(store)
    assert not pending.done() and "loading" in repr(pending)
    with pytest.raises(TimeoutError, match=r"still being loaded after 0\.01 s"):
        pending.result(0.01)
    store.go.set()
    assert same(pending.result(60))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_is_told_that_the_load_is_not_its_own(path: Path) -> None:
    store = Held(path)
    pending = tc.load_async(store)
    child = os.fork()
    if child == 0:
        try:
            pending.result(60)
        except tc.CheckpointError as error:
            os._exit(7 if "forked from it while the load was under way" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store.go.set()
    assert same(pending.result(60))


PROGRAM = """
import sys, threading, time
import treeckpt as tc
from treeckpt._loading.background import _EXITING

begun = threading.Event()

class Slow(tc.LocalStore):
    def read_into(self, *arguments, **options):
        print("reading", flush=True)
        begun.set()
        _EXITING.wait(240)  # the end comes while reads are under way, however late the main thread gets to it
        time.sleep(0.2)
        return super().read_into(*arguments, **options)
    read_parts = lambda self, *arguments, **options: False
    mapped = None

pending = tc.load_async(Slow(sys.argv[1]), read=tc.ReadOptions(memory=1 << 20))
assert begun.wait(240)
assert not pending.done()
raise SystemExit(3)
"""


def test_a_process_that_ends_before_does_not_wait_for_the_reads(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {f"w{n}": np.zeros(1 << 18) for n in range(100)})
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "c")], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 3, found.stderr
    assert found.stdout.count("reading") < 60 and "Traceback" not in found.stderr


def test_damage_is_an_error_of_the_result(path: Path) -> None:
    [shard] = path.glob("*.safetensors")
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 8))
    with pytest.raises(tc.CorruptError, match="changed bytes"):
        tc.load_async(path).result(60)
