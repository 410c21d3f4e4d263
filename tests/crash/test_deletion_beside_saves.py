"""A checkpoint that is deleted while its step is saved again: the save waits or is refused, and what it commits stays.

`tests.crash.interleavings` plays such meetings in any order of their file operations; here real commands are slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.crash.syscalls import why_not
from tests.helpers.background import until
from tests.helpers.layout_cases import on_ranks
from tests.helpers.s3 import S3
from tests.helpers.world import LONG
from treeckpt._core.format.files import parse_file_name, parse_progress_name, step_name
from treeckpt._core.format.lineage import Lineage
from treeckpt._io.comm.comm import SoloComm, ThreadComm
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._runs.run import RunDirectory
from treeckpt._saving.options import SaveOptions
from treeckpt._saving.save import save_tree

ROOT = Path(__file__).parents[2]
DELETERS = {
    "gc": "from treeckpt._cli.main import main; assert main(['gc', RUN, '--keep-last', '1']) == 0",
    "delete": """
import treeckpt as tc
try:
    tc.Manager(RUN, background=False).delete(1)
except tc.CheckpointError as error:  # it looked after the save had begun
    assert "another save may be writing there" in str(error), error
""",
    "retention": "import treeckpt as tc; tc.Manager(RUN, background=False, keep=1).save(3, {'n': 3})",
}
MET = """
import os, sys, time
def meet(event, arguments):
    if event in ("os.remove", "os.rename") and f"{arguments[0]}" == INDEX and not os.path.exists(BEGUN):
        if any(name.startswith(("deleting", "deleted")) for name in os.listdir(os.path.dirname(INDEX))):
            open(BEGUN, "x").close()
            while not os.path.exists(SEEN):
                time.sleep(0.01)
sys.addaudithook(meet)
"""
"""Has a program wait before it takes away an index that is marked as being deleted, until the mark has been seen."""
needs_strace = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def names_in(path: Path) -> list[str]:
    return os.listdir(path) if path.is_dir() else []


def kinds_in(path: Path) -> set[str]:
    return {kind.kind for name in names_in(path) if (kind := parse_file_name(name))}


@contextlib.contextmanager
def python(code: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A program that runs meanwhile; at the end it has succeeded."""
    process = subprocess.Popen(
        [*command, sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        assert process.stdout is not None
        with process.stdout:
            text = process.stdout.read()
        process.wait(120)
    assert process.returncode == 0, text


@needs_strace
@pytest.mark.parametrize("seconds", [0.7, pytest.param(6.0, marks=pytest.mark.slow)])
def test_a_save_of_a_step_that_is_slowly_being_deleted_stays(tmp_path: Path, seconds: float) -> None:
    """Every call that takes the index away, or brings it, waits in the process that deletes.

    Before the first one that follows the mark of a deletion it waits until that mark has been seen.
    """
    calls = "?unlink,unlinkat,?rename,?renameat,renameat2"
    with contextlib.ExitStack() as deleters:
        for name, code in DELETERS.items():
            run = tmp_path / name
            for step in (1, 2):
                tc.save(run / step_name(step), {"n": step}, step=step)
            inject = f"inject={calls}:delay_enter={int(seconds * 1e6)}"
            only = ["-P", str(run / step_name(1) / "index.json"), "-e", f"trace={calls}", "-e", inject]
            at = [str(run / step_name(1) / "index.json"), f"{run}.begun", f"{run}.seen"]
            code = f"RUN = {str(run)!r}\nINDEX, BEGUN, SEEN = {at}\n{MET}\n{code}"
            deleters.enter_context(python(code, "strace", "-f", "-o", "/dev/null", *only))

        def save_once_a_deletion_has_begun(name: str) -> None:
            path = tmp_path / name / step_name(1)
            assert until((tmp_path / f"{name}.begun").exists), name
            assert kinds_in(path) & {"deleting", "deleted"}, name
            (tmp_path / f"{name}.seen").touch()
            tc.save(path, {"n": 10}, step=1, overwrite=True, comm=SoloComm())

        with ThreadPoolExecutor(len(DELETERS)) as savers:
            list(savers.map(save_once_a_deletion_has_begun, DELETERS))
    for name in DELETERS:
        path = tmp_path / name / step_name(1)
        assert tc.load(path) == {"n": 10} and tc.verify(path).ok, name
        assert kinds_in(path) == {"index", "shard", "timings"}, name


def test_a_save_of_a_step_whose_index_is_being_deleted_from_s3_stays(s3: S3) -> None:
    run = s3.url()
    with tc.Manager(run, background=False) as manager:
        for step in (1, 2):
            manager.save(step, {"n": step})
    s3.rules({"match": "DELETE .*index.json", "do": "slow", "seconds": 0.5})
    store = s3.store(f"{run}/{step_name(1)}")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tc.Manager(run, background=False, comm=SoloComm()).delete, 1)
        assert until(lambda: any(row["method"] == "DELETE" and "index" in row["path"] for row in s3.log()))
        tc.save(store, {"n": 10}, step=1, overwrite=True)
    assert tc.load(store) == {"n": 10} and tc.verify(store).ok


def test_the_record_of_a_save_stands_before_another_rank_creates_a_shard(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Slow:
        """What rank 0 does between the agreement and its own shard."""

        def lineage(self, save_id: str) -> Lineage:
            assert until(lambda: "shard" in kinds_in(tmp_path))
            seen.append(names_in(tmp_path))
            return Lineage(1)

    def save(comm: ThreadComm) -> Any:
        options = SaveOptions(lineage=Slow() if comm.rank == 0 else None)
        tree = {"w": tc.Sharded(np.full(4, comm.rank), (8,), (4 * comm.rank,))}
        return save_tree(LocalStore(tmp_path), tree, comm, options)

    save_id = on_ranks(2, save)[0].save_id
    assert (0, save_id) in [parse_progress_name(name) for name in seen[0]]
    assert kinds_in(tmp_path) == {"index", "shard", "timings"}


CLEAN_UPS = """
import json, os
from treeckpt.policy import Last
from treeckpt._runs.run import RunDirectory
ready, go = os.pipe()
for _ in range(3):
    if not os.fork():
        directory = RunDirectory(RUN)
        os.close(go)
        os.read(ready, 1)
        report = directory.clean([Last(1)])
        names = [one.name for one in report.removed if one.what == "checkpoint"]
        told = [names, [one.why for one in report.failed], [one.why for one in report.left]]
        os.write(1, json.dumps(told).encode() + b"\\n")
        os._exit(0)
os.close(go)
assert [os.wait()[1] for _ in range(3)] == [0, 0, 0]
"""


def test_clean_ups_at_the_same_time_leave_nothing_and_tell_the_truth(tmp_path: Path) -> None:
    steps = range(1, 17)
    for step in steps:
        tc.save(tmp_path / step_name(step), {"n": step}, step=step)
    with python(f"RUN = {str(tmp_path)!r}\n{CLEAN_UPS}") as cleaners:
        assert cleaners.stdout is not None
        told = [json.loads(line) for line in cleaners.stdout]
    assert os.listdir(tmp_path) == [step_name(16)]
    removed = [name for names, _, _ in told for name in names]
    assert sorted(removed) == [step_name(step) for step in steps[:-1]], "each by one of them"
    assert not any(why for _, failed, left in told for why in failed + left if "deleted" not in why), told


@needs_strace
def test_a_shard_that_could_not_be_deleted_goes_with_the_next_clean_up(tmp_path: Path) -> None:
    """The file system refuses the first two unlinks of shards, as some do for a moment."""
    path = tmp_path / step_name(1)
    inject = ["-e", "trace=?unlink,unlinkat", "-e", "inject=?unlink,unlinkat:error=EBUSY:when=1..3"]
    tc.save(path, {"n": 1}, step=1)
    (shard,) = path.glob("shard*")
    code = f"import treeckpt as tc; tc.save({str(path)!r}, {{'n': 2}}, step=1, overwrite=True)"
    with python(code, "strace", "-f", "-o", "/dev/null", "-P", str(shard), *inject):
        pass
    assert shard.exists() and tc.load(path) == {"n": 2}
    report = RunDirectory(tmp_path).clean([])
    assert not shard.exists() and not report.left, report
    assert kinds_in(path) == {"index", "shard", "timings"}


def test_a_directory_that_is_removed_as_a_save_begins_is_made_again(tmp_path: Path) -> None:
    class Emptied(LocalStore):
        """A clean-up of another process meets the directory while it is empty."""

        def prepare(self) -> None:
            super().prepare()
            if not tries:
                tries.append(1)
                self.directory.rmdir()

    tries: list[int] = []
    report = tc.save(Emptied(tmp_path / "at"), {"n": 1})
    assert tries and tc.load(tmp_path / "at") == {"n": 1} and report.save_id == tc.inspect(tmp_path / "at").save_id


def test_a_save_that_is_refused_or_fails_leaves_no_record(tmp_path: Path) -> None:
    tc.save(tmp_path, {"n": 1})
    before = sorted(names_in(tmp_path))
    with pytest.raises(tc.CheckpointExists):
        tc.save(tmp_path, {"n": 2})
    with pytest.raises(tc.CheckpointExists):
        tc.save_async(tmp_path, {"n": 2}, comm=SoloComm()).result(LONG)
    with pytest.raises(tc.TreeckptError):
        tc.save(tmp_path, {"n": object()}, overwrite=True)
    assert sorted(names_in(tmp_path)) == before
