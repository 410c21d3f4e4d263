"""Saves that failed or were killed stay in a list of the run when their files have gone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import Gate, GatedRun
from tests.helpers.killed_saves import DEAD, leave_killed
from tests.helpers.s3 import S3
from tests.helpers.world import errors_of, on_ranks
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name
from treeckpt._io.storage.open import open_run
from treeckpt._runs.discovery import scan
from treeckpt._runs.failures import DIRECTORY, MAX_KEPT, Failures, SaveFailure, failures_of
from treeckpt._runs.run import RunDirectory


def known(run: Any) -> Failures:
    return failures_of(open_run(run), scan(run))


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_listed_when_nothing_else_of_it_is_left(tmp_path: Path, background: bool) -> None:
    gate = Gate()
    gate.failing = {step_name(2)}
    options = tc.BackgroundOptions(writer="thread") if background else False
    manager = tc.Manager(GatedRun(tmp_path, gate), background=options, grace=0)
    manager.save(1, {"s": 1})
    manager.wait()
    with pytest.raises(tc.CheckpointError, match="No space left"):
        manager.save(2, {"s": 2})
        manager.wait()
    gate.failing.clear()
    manager.save(2, {"s": 2})
    manager.save("tuned", {"s": 3})
    manager.close()
    [row] = known(tmp_path).rows
    assert (row.what, row.step, row.name, row.world) == ("failed", 2, step_name(2), 1)
    assert "No space left" in row.error and row.text.startswith("The save on 1 rank failed after")
    assert row.began_ns is not None and row.began_ns <= row.ended_ns <= time.time_ns()
    assert not any(row.save_id in name for name in os.listdir(tmp_path / step_name(2)))
    assert [info.name for info in scan(tmp_path)] == ["tuned", step_name(2), step_name(1)], "no listing shows them"


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        with tc.Manager(tmp_path, comm=comm, background=False) as manager:
            manager.save("tuned", {"rank": tc.PerRank(object() if comm.rank else 1)})

    assert None not in errors_of(on_ranks(2, save))
    [row] = known(tmp_path).rows
    assert (row.what, row.name, row.world) == ("failed", "tuned", 2) and "rank 1" in row.error


def test_a_killed_save_stays_listed_when_a_save_or_a_clean_up_has_removed_it(tmp_path: Path) -> None:
    leave_killed(tmp_path)
    leave_killed(tmp_path, 8, save_id="e" * 16, ago=50)
    before = known(tmp_path).rows
    assert [(row.save_id, row.what, row.step) for row in before] == [("e" * 16, "killed", 8), (DEAD, "killed", 7)]
    far = "25% of 1 kB written by 1 of 2 ranks, as far as they reported"
    assert before[1].text == f"The save was killed after 5 s: {far}."
    with tc.Manager(tmp_path, background=False) as manager:
        manager.save(7, {"s": 7})
    assert open_run(tmp_path).names() == [step_name(7)] and known(tmp_path).rows == before
    assert main(["gc", str(tmp_path)]) == 0
    manager.delete(7)
    assert known(tmp_path).rows == before


def test_a_save_that_was_committed_is_not_listed(tmp_path: Path) -> None:
    report = tc.save(tmp_path / step_name(3), {"s": 3}, step=3)
    leave_killed(tmp_path, 3, save_id=report.save_id)
    directory = RunDirectory(tmp_path)
    directory.failures.keep([SaveFailure(report.save_id, step_name(3), 3, "failed", 1, 2, error="no answer")])
    assert not known(tmp_path).rows
    (tmp_path / DIRECTORY / f"failed.{report.save_id}.json").unlink()
    assert main(["gc", str(tmp_path)]) == 0 and not os.listdir(tmp_path / DIRECTORY)


def test_the_oldest_go_and_damaged_files_are_named(tmp_path: Path) -> None:
    history = RunDirectory(tmp_path).failures
    for number in range(MAX_KEPT + 5):
        history.keep([SaveFailure(f"{number:016x}", step_name(1), 1, "failed", None, number)])
        os.utime(tmp_path / DIRECTORY / f"failed.{number:016x}.json", ns=(number, number))
    rows = known(tmp_path).rows
    assert [row.ended_ns for row in rows] == list(range(MAX_KEPT + 4, 4, -1))
    (tmp_path / DIRECTORY / f"failed.{9:016x}.json").write_text("{")
    (tmp_path / DIRECTORY / "notes.txt").write_text("mine")
    found = known(tmp_path)
    assert len(found.rows) == MAX_KEPT - 1 and found.problem == f"1 file of {DIRECTORY} could not be read"


def test_a_run_that_takes_no_file_and_a_link_make_no_save_fail(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / DIRECTORY).symlink_to(tmp_path / "elsewhere")
    leave_killed(tmp_path / "run")
    with tc.Manager(tmp_path / "run", background=False) as manager:
        manager.save(7, {"s": 7})
        with pytest.raises(tc.TreeError):
            manager.save(8, {"s": object()})
    assert not os.listdir(tmp_path / "elsewhere") and "is a link" in known(tmp_path / "run").problem
    (tmp_path / "run" / DIRECTORY).unlink()
    (tmp_path / "run" / DIRECTORY).write_text("a file")
    with pytest.raises(tc.TreeError):
        manager.save(8, {"s": object()})
    (tmp_path / "run" / DIRECTORY).unlink()
    manager.clean()
    assert [row.step for row in known(tmp_path / "run").rows] == [8], "what could not be written is written later"


def test_failures_in_an_object_store_are_listed_too(s3: S3) -> None:
    run = s3.url("run")
    leave_killed(run)
    with tc.Manager(run, background=False) as manager:
        manager.save(7, {"w": np.ones(4)})
        with pytest.raises(tc.TreeError):
            manager.save(8, {"s": object()})
        assert manager.steps() == [7]
    names = open_run(run).folder(DIRECTORY).entries()
    assert len(names) == 2 or len(known(run).rows) == 2
    assert [(row.what, row.step) for row in known(run).rows] == [("failed", 8), ("killed", 7)]


def test_the_command_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tc.save(tmp_path / step_name(1), {"s": 1}, step=1)
    assert main(["ls", "--failures", str(tmp_path)]) == 0
    assert "No failed or killed save is known in the last 7 days." in capsys.readouterr().out
    leave_killed(tmp_path)
    leave_killed(tmp_path, 8, save_id="e" * 16, ago=9 * 86_400)
    assert main(["ls", "--failures", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{step_name(7)}, save {DEAD}. The save was killed" in out and "1 before that" in out and "eeee" not in out
    assert main(["ls", "--failures", "--days", "10", "--json", str(tmp_path)]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert [row["save_id"] for row in found["failures"]] == [DEAD, "e" * 16] and found["older"] == 0
    assert main(["ls", "--failures", str(tmp_path / step_name(1))]) == 2
