"""A clean-up that is killed at any moment leaves whole checkpoints and leftovers, which the next one takes away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import treeckpt as tc
from tests.crash.deleting import CRASHED
from tests.helpers.world import assert_equal, whole_tree
from treeckpt._core.format.files import step_name, step_of
from treeckpt._io.storage.open import open_run
from treeckpt._runs.discovery import scan
from treeckpt._runs.failures import DIRECTORY, failures_of
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last

ROOT = Path(__file__).parents[2]


def test_a_killed_deletion_leaves_no_half_checkpoint_and_is_finished_by_the_next_clean_up(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.crash.deleting", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    # behind an unlink of what is gone already there is no "after": that clean-up ran to its end
    killed = [row for row in rows if row["call"]]
    assert len(killed) >= 60 and len(rows) - len(killed) < 10
    assert {row["call"] for row in rows} >= {"replace", "fsync", "unlink", "rmdir"}
    assert all(check(Path(row["run"])) == 2 for row in rows if not row["call"])
    left = [check(Path(row["run"])) for row in killed]
    assert left == sorted(left, reverse=True), "what is gone stays gone"
    assert left[0] == 4 and left[-1] == 2 and 3 in left


def check(run: Path) -> int:
    """How many checkpoints the killed clean-up left; then cleans up again."""
    infos = {info.name: info.status for info in scan(run)}
    assert "damaged" not in infos.values(), infos
    whole = [step_of(name) or 0 for name, status in infos.items() if status == "complete"]
    assert {3, 4} <= set(whole) <= {1, 2, 3, 4}
    for step in whole:
        assert_equal(tc.load(run / step_name(step), fallback=tc.Fallback(per_rank="take")), whole_tree(seed=step))
        assert tc.verify(run / step_name(step)).ok
    report = RunDirectory(run).clean([Last(2)])
    assert not report.failed and list(report.kept) == [3, 4]
    kept = (step_name(3), step_name(4), DIRECTORY)
    # an empty directory, if that is all that is left, is young: a save might be about to begin there
    assert [path for path in run.rglob("*") if path.is_file() and path.parent.name not in kept] == []
    assert sorted(p.name.partition("-")[0] for p in (run / step_name(3)).iterdir())[:2] == ["index.json", "shard"]
    assert len(list((run / step_name(3)).iterdir())) == 3
    RunDirectory(run).clean([Last(2)], grace=0)
    assert open_run(run).names() == [step_name(3), step_name(4)]
    assert [(row.save_id, row.what) for row in failures_of(open_run(run), scan(run)).rows] == [(CRASHED, "unfinished")]
    return len(whole)
