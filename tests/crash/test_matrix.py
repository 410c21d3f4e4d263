"""Every save of the table, killed at every effect: the checkpoint before is whole; the new one too, or it is not there.

The next save and the clean-up then work, and leave nothing behind.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import treeckpt as tc
from tests.crash.cases import AFTER_COMMIT, AFTER_RESULT, CALLS, Case, all_cases, some_cases
from tests.helpers.world import seed_of, whole_tree
from treeckpt._core.format.files import ended_name, step_name
from treeckpt._io.storage.open import open_run
from treeckpt._runs.failures import DIRECTORY

ROOT = Path(__file__).parents[2]


def killed_jobs(directory: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """The cases as they went."""
    command = [sys.executable, "-m", "tests.crash.jobs", str(directory), json.dumps([case.words for case in cases])]
    limit = 300 + 10 * len(cases)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["case"] for row in rows] == [case.words for case in cases]
    return rows


def kinds_of(calls: list[str]) -> tuple[str, ...]:
    """What was called, without the names of files."""
    words = [call.replace("index.json", "index").replace("timings.", "timings-").partition("-")[0] for call in calls]
    return tuple(words)


def check_case(case: Case, row: dict[str, Any]) -> int | None:
    """What the kill left, and what was told; gives the seed of the step that was saved."""
    run, kinds = Path(row["path"]), kinds_of(row["calls"])
    expected = CALLS[case.culprit == 0, case.what]
    reached = len(kinds) if case.at is None else case.at + 1  # whose writer is killed says so in timings, and tidies up
    assert kinds[:reached] == expected[:reached], kinds
    if case.at is None:
        assert kinds == expected and set(row["told"]) == {"saved"} and row["status"] == [0] * case.processes
    else:
        assert row["call"] and kinds_of([row["call"]]) == (expected[case.at],)
        check_told(case, row)
    assert seed_of(run / step_name(1)) == 1, "the checkpoint before"
    found = seed_of(run / step_name(2))
    commit = CALLS[True, case.what].index(AFTER_COMMIT)
    committed = case.culprit == 0 and (case.at is None or (case.at, case.after) >= (commit, True))
    assert found == (2 if committed else 1 if case.what == "overwriting" else None)
    return found


def check_told(case: Case, row: dict[str, Any]) -> None:
    assert case.at is not None
    may_be_told = case.culprit == 0 and case.at >= CALLS[True, case.what].index(AFTER_RESULT)
    if case.who == "job":
        killed = [status == -signal.SIGKILL for status in row["status"]]
        assert killed[case.culprit] and (may_be_told or not any(told == "saved" for told in row["told"]))
        return
    for rank, told in enumerate(row["told"]):
        if rank == case.culprit and (case.how == "sync" or not told):  # in the background, it or its writer
            assert row["status"][rank] == -signal.SIGKILL
        else:
            assert row["status"][rank] == 0, "who lives on is told in time"
            assert "Error" in told or (may_be_told and told == "saved")


def check_goes_on(run: Path, found: int | None) -> None:
    """A new training saves and cleans up: only what is committed stays."""
    with tc.Manager(run, keep=2, background=False, grace=0) as manager:
        assert manager.latest() == (1 if found is None else 2)
        manager.save(3, whole_tree(seed=3))
        assert not manager.clean().failed
    assert seed_of(run / step_name(3)) == 3
    kept = [1, 3] if found is None else [2, 3]
    assert open_run(run).names() == [step_name(step) for step in kept]
    assert {path.name for path in run.iterdir()} <= {*map(step_name, kept), DIRECTORY}
    for step in kept:
        index = tc.inspect(run / step_name(step))
        whole = {"index.json", f"timings.{index.save_id}.json", *(file.name for file in index.file_list)}
        if step == 3:
            whole.add(ended_name(index.save_id))
        left = {path.name for path in (run / step_name(step)).iterdir()}
        assert left <= whole and whole - left <= {f"timings.{index.save_id}.json"}, left ^ whole


def check(directory: Path, cases: list[Case]) -> None:
    for case, row in zip(cases, killed_jobs(directory, cases), strict=True):
        found = check_case(case, row)
        check_goes_on(Path(row["path"]), found)


def test_a_killed_job_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    check(tmp_path, some_cases())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("processes", "how"), [(1, "sync"), (1, "background"), (4, "sync"), (4, "background")])
def test_a_job_killed_at_any_effect_leaves_whole_checkpoints_only(tmp_path: Path, processes: int, how: str) -> None:
    check(tmp_path, all_cases(processes, how))
