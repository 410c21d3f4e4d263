"""Hundreds of saves in the background, in changing worlds, with kills: what they hold and leave does not grow."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import treeckpt as tc
from tests.crash import soak
from tests.helpers.background import gone, until
from tests.helpers.world import assert_holds
from treeckpt._core.format.files import ended_name, step_name
from treeckpt._runs.failures import DIRECTORY
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last

ROOT = Path(__file__).parents[2]
MEMORY = 24 << 20
"""Bytes by which a process may grow after its first saves: what interpreters keep of what they free."""
WARM = 12
"""Saves until every world has been used: only then is there nothing new to hold."""


class Life:
    """One process that trains, until it ends or is killed."""

    def __init__(self, run: Path, saves: int, seed: int) -> None:
        command = [sys.executable, "-W", "error", "-m", "tests.crash.soak", str(run), str(saves), str(seed)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.rows: list[dict[str, int]] = []

    def live(self, *, until_row: int | None = None, delay: float = 0.0) -> None:
        """Reads what it holds; kills it some time after a row, if one is given."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for line in self.process.stdout:
            self.rows.append(json.loads(line))
            if len(self.rows) == until_row:
                time.sleep(delay)
                self.kill()
                break
        errors = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        code = self.process.wait(300)
        assert code == (-signal.SIGKILL if until_row is not None else 0), errors[-4000:]

    def kill(self) -> None:
        children = list[int]()
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
                children += map(int, task.read_text().split())
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(300)
        assert until(lambda: all(gone(pid) for pid in children)), "writers end with their parent"


def check_flat(rows: list[dict[str, int]]) -> None:
    """What a process holds after its last saves, and what it held once it had used every world."""
    early, late = rows[WARM : WARM + 5], rows[-5:]
    for what, more in (("memory", MEMORY), ("writer memory", MEMORY), ("descriptors", 3), ("writer descriptors", 3)):
        before, after = max(row[what] for row in early), min(row[what] for row in late)
        if row_of_writers(late) > row_of_writers(early) and what == "descriptors":
            more += 3 * (row_of_writers(late) - row_of_writers(early))  # each has a socket and arenas
        assert after <= before + more, (what, before, after)


def row_of_writers(rows: list[dict[str, int]]) -> int:
    return max(row["writers"] for row in rows)


def disk_use(run: Path) -> int:
    found = 0
    for path in run.rglob("*"):
        if path.is_file():
            found += path.stat().st_size
    return found


def in_checkpoints(run: Path) -> float:
    """How much of the disk is used, in checkpoints: the largest, as those of more ranks and shards are larger."""
    return disk_use(run) / max(
        disk_use(Path(info.path)) for info in RunDirectory(run).checkpoints() if info.status == "complete"
    )


def soaked(run: Path, saves: int, lives: int, seed: int) -> list[float]:
    """One long life, and before it several that are killed; gives how much of the disk was used after each."""
    chance = random.Random(seed)
    used: list[float] = []
    reached = 0
    for number in range(lives):
        life = Life(run, 1000, seed * 100 + number)
        life.live(until_row=chance.randint(2, 6), delay=chance.random() * 0.2)
        reached += len(life.rows)
        used.append(in_checkpoints(run))
        newest = max(info.step or 0 for info in RunDirectory(run).checkpoints() if info.status == "complete")
        assert newest >= life.rows[-1]["step"] - 3, "no more is lost than what was under way"
        assert_holds_kept(run)
    last = Life(run, saves - reached, seed)
    last.live()
    check_flat(last.rows)
    assert reached + len(last.rows) >= saves
    used.append(in_checkpoints(run))
    return used


def assert_holds_kept(run: Path) -> None:
    infos = RunDirectory(run).checkpoints()
    assert "damaged" not in {info.status for info in infos}
    for info in infos:
        if info.status == "complete":
            assert tc.verify(info.path).ok


def check_soak(run: Path, saves: int, lives: int, seed: int) -> None:
    used = soaked(run, saves, lives, seed)
    # an hour later: who was killed while reading counts as a reader for a while
    report = RunDirectory(run, clock=lambda: time.time_ns() + 3600 * 10**9).clean([Last(soak.KEEP)], grace=0)
    assert not report.failed and len(report.kept) == soak.KEEP
    assert {path.name for path in run.iterdir()} - {DIRECTORY} == {step_name(step) for step in report.kept}
    files = {path.name for path in run.rglob("*") if path.is_file() and path.parent.name != DIRECTORY}
    for step in report.kept:
        index = tc.inspect(run / step_name(step))
        files -= {"index.json", f"timings.{index.save_id}.json", *(file.name for file in index.file_list)}
        files -= {ended_name(index.save_id)}
        if index.world == 1:
            assert_holds(run / step_name(step), seed=step)
    assert not files, "nothing that no checkpoint needs"
    # what is kept, what is under way, and what killed trainings left within the time of grace
    assert max(used) <= soak.KEEP + 3 + lives, used


def test_many_saves_and_some_kills_leave_nothing_behind(tmp_path: Path) -> None:
    check_soak(tmp_path / "run", 26, 2, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hundreds_of_saves_and_many_kills_leave_nothing_behind(tmp_path: Path) -> None:
    check_soak(tmp_path / "run", 500, 20, 2)
