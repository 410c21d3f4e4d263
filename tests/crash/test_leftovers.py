"""Saves into one path again and again, some of them killed: what a dead save left goes with the next save."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import treeckpt as tc
from tests.crash.disks import fill, small_disk
from tests.crash.saver import NBYTES, tree_of
from tests.helpers.background import gone, until
from tests.helpers.s3 import S3, wait_for_late_requests
from tests.helpers.world import LONG, assert_equal
from treeckpt._cli.main import main
from treeckpt._core.format.files import (
    Owner,
    Progress,
    encode_progress,
    ended_name,
    progress_name,
    step_name,
    stored_name,
)
from treeckpt._core.format.shard_header import shard_name
from treeckpt._io.process import this_process
from treeckpt._io.storage import kept_files
from treeckpt._io.storage.kept_files import LAPSE
from treeckpt._io.storage.open import open_run, open_store
from treeckpt._runs.discovery import scan
from treeckpt._runs.failures import failures_of
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last

ROOT = Path(__file__).parents[2]
KILLS = ("kill", "publish", "committed")


class Savers:
    """The process that forks savers."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "error", "-m", "tests.crash.saver"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.told: list[list[Any]] = []

    def hear(self, *words: Any) -> list[Any]:
        """The next message that begins so; others are kept for later."""
        assert self.process.stdout is not None
        while True:
            for message in self.told:
                if message[: len(words)] == list(words):
                    self.told.remove(message)
                    return message
            line = self.process.stdout.readline()
            assert line, "the savers have ended"
            self.told.append(json.loads(line))

    def start(self, path: object, how: str, seed: int = 0) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(path), how, seed]) + "\n")
        self.process.stdin.flush()
        pid = self.hear("forked")[1]
        if how == "hold":
            self.hear("held", pid)
        return pid

    def end_of(self, pid: int) -> int:
        return self.hear("ended", pid)[2]

    def save(self, path: object, how: str, seed: int = 0) -> None:
        """One save in a process of its own, which ends as it is told."""
        expected = {"well": 0, "interrupt": 130, "interrupt late": 130}.get(how, -signal.SIGKILL)
        pid = self.start(path, how, seed)
        assert self.end_of(pid) == expected
        if how == "background":
            writer = self.hear("writer", pid)[2]
            assert until(lambda: gone(writer)), "writers end with their parent"

    def close(self) -> None:
        assert self.process.stderr is not None
        _, errors = self.process.communicate(timeout=LONG)
        assert not errors, errors[-3000:]


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    made = Savers()
    yield made
    made.close()


def names_at(path: object) -> set[str]:
    wait_for_late_requests()
    return set(open_store(str(path)).sizes())


def expected_at(path: object) -> set[str]:
    """What a checkpoint consists of; the last one of a manager that was closed also has the mark of that."""
    index = tc.inspect(str(path))
    files = names_at(path) & {ended_name(index.save_id)}
    for sidecar in index.sidecars:
        files |= {stored_name(index.save_id, sidecar.name), sidecar.name}
    return {"index.json", f"timings.{index.save_id}.json", *(file.name for file in index.file_list)} | files


def failed_steps(run: Path) -> list[int | None]:
    """The steps of the saves that were killed, as the command lists them, the first one first."""
    rows = failures_of(open_run(run), scan(run)).rows
    assert {row.what for row in rows} == {"killed"} and all("was killed" in row.text for row in rows)
    return [row.step for row in reversed(rows)]


def check_alone(path: object, seed: int) -> None:
    """Nothing but the checkpoint of this seed is there."""
    assert names_at(path) == expected_at(path)
    assert not tc.verify(str(path)).notes, "the copies of sidecar files are its own"
    assert_equal(tc.load(str(path)), tree_of(seed))


@pytest.mark.parametrize("how", KILLS)
def test_the_next_save_into_a_path_removes_what_a_killed_one_left(savers: Savers, tmp_path: Path, how: str) -> None:
    path = tmp_path / "latest"
    tc.save(path, tree_of(1))
    savers.save(path, how, 2)
    savers.save(path, how, 3)
    assert len(names_at(path)) > 3
    tc.save(path, tree_of(4), overwrite=True)
    check_alone(path, 4)


def test_a_kill_between_the_sidecar_files_and_the_index_keeps_the_old_ones(savers: Savers, tmp_path: Path) -> None:
    path = tmp_path / "latest"
    savers.save(path, "well", 1)
    savers.save(path, "publish", 2)
    assert sum(name.startswith("file.") for name in names_at(path)) == 2
    assert tc.read_file(path, "config.json") == b"1" and tc.verify(path).ok
    assert main(["gc", str(path)]) == 0
    check_alone(path, 1)


def test_a_path_with_no_checkpoint_yet_is_cleared_too(savers: Savers, tmp_path: Path) -> None:
    path = tmp_path / "latest"
    for seed in range(3):
        savers.save(path, "kill", seed)
    tc.save(path, tree_of(4))
    check_alone(path, 4)


def test_kills_and_clean_overwrites_leave_one_checkpoint(savers: Savers, tmp_path: Path) -> None:
    path = tmp_path / "latest"
    for seed, how in enumerate(["well", *KILLS, "well", "background", *KILLS]):
        savers.save(path, how, seed)
        tc.save(path, tree_of(seed + 100), overwrite=True)
        check_alone(path, seed + 100)


@pytest.mark.parametrize("how", ["interrupt", "interrupt late"])
def test_a_save_that_is_interrupted_takes_back_what_it_wrote(savers: Savers, tmp_path: Path, how: str) -> None:
    path = tmp_path / "latest"
    savers.save(path, how)
    assert names_at(path) == set()
    tc.save(path, tree_of(1))
    savers.save(path, how, 2)
    check_alone(path, 1)


def test_what_a_live_save_is_writing_stays(savers: Savers, tmp_path: Path) -> None:
    path = tmp_path / "latest"
    tc.save(path, tree_of(1))
    live = savers.start(path, "hold", 2)
    tc.save(path, tree_of(3), overwrite=True)
    assert names_at(path) > expected_at(path), "what is being written is there"
    assert main(["gc", str(path), "--grace", "0"]) == 0
    os.kill(live, signal.SIGUSR1)
    assert savers.end_of(live) == 0
    check_alone(path, 2)
    assert tc.verify(path).ok


def test_two_savers_at_one_path_leave_one_checkpoint(savers: Savers, tmp_path: Path) -> None:
    path = tmp_path / "latest"
    for _ in range(10):
        pids = [savers.start(path, "hold", seed) for seed in (1, 2)]
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        assert [savers.end_of(pid) for pid in pids] == [0, 0]
        assert tc.verify(path).ok
        assert names_at(path) == expected_at(path)


def test_a_kill_at_any_moment_is_made_good_by_the_next_save(savers: Savers, tmp_path: Path) -> None:
    path, chance = tmp_path / "latest", random.Random(1)
    tc.save(path, tree_of(0))
    for seed in range(15):
        pid = savers.start(path, "well", seed)
        time.sleep(chance.random() * 0.03)
        with contextlib.suppress(ProcessLookupError):  # it may have ended before
            os.kill(pid, signal.SIGKILL)
        assert savers.end_of(pid) in (0, -signal.SIGKILL)
        tc.save(path, tree_of(seed), overwrite=True)
        check_alone(path, seed)


def test_a_kill_before_the_first_byte_of_a_record_leaves_nothing_that_stays(tmp_path: Path) -> None:
    tc.save(tmp_path, tree_of(0))
    (tmp_path / f".{progress_name(0, 'a' * 16)}.{this_process().tag}{'0' * 8}.tmp").touch()
    tc.save(tmp_path, tree_of(1), overwrite=True)
    check_alone(tmp_path, 1)


def test_killed_saves_into_an_object_store_leave_nothing_either(s3: S3) -> None:
    url, savers = s3.url("latest"), Savers()
    for seed, how in enumerate(["well", *KILLS, "interrupt late", *KILLS]):
        savers.save(url, how, seed)
    savers.close()
    tc.save(url, tree_of(50), overwrite=True)
    check_alone(url, 50)


def test_gc_of_a_checkpoint_removes_what_dead_saves_left(
    savers: Savers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "latest"
    tc.save(path, tree_of(1))
    savers.save(path, "kill", 2)
    (path / "notes.txt").write_text("mine")
    before = names_at(path)
    assert main(["gc", str(path), "--dry-run"]) == 0
    assert "left over" in capsys.readouterr().out and names_at(path) == before
    assert main(["gc", str(path), "--json"]) == 0
    [removed] = json.loads(capsys.readouterr().out)["removed"]
    assert removed["nbytes"] >= NBYTES
    assert names_at(path) == {*expected_at(path), "notes.txt"}
    assert_equal(tc.load(path), tree_of(1))


def test_verify_lists_what_is_left_over(savers: Savers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latest"
    tc.save(path, tree_of(1))
    assert not tc.verify(path).leftovers
    savers.save(path, "kill", 2)
    (path / "notes.txt").write_text("mine")
    report = tc.verify(path)
    assert report.ok, "what else lies there is no fault of the checkpoint"
    assert {one.file for one in report.leftovers} == names_at(path) - expected_at(path) - {"notes.txt"}
    assert sum(one.nbytes for one in report.leftovers) >= NBYTES
    assert main(["verify", str(path)]) == 0
    assert "left over" in capsys.readouterr().out
    assert main(["verify", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["report"]["leftovers"]) == len(report.leftovers)


def test_a_record_that_cannot_be_judged_here_counts_while_it_is_renewed(tmp_path: Path) -> None:
    path, now = tmp_path / step_name(1), time.time_ns()
    tc.save(path, tree_of(1), step=1)
    kept = names_at(path)
    elsewhere = Owner("elsewhere", os.getpid(), "another boot", 1)

    def left_by(save_id: str, renewed_ns: int) -> set[str]:
        shard = shard_name(save_id, 0, 1, 0)
        (path / shard).write_bytes(b"half of it")
        record = Progress(save_id, 0, 1, 1, "write", 1, 2, renewed_ns, renewed_ns, renewed_ns, elsewhere)
        name = progress_name(0, save_id)
        (path / name).write_bytes(encode_progress(record))
        os.utime(path / name, ns=(renewed_ns, renewed_ns))
        return {shard, name}

    lives, dead = left_by("a" * 16, now), left_by("b" * 16, now - int(LAPSE * 1e9))
    assert names_at(path) == kept | lives | dead
    assert {one.file for one in tc.verify(path).leftovers} == dead
    RunDirectory(tmp_path).clean([Last(1)], grace=0)
    assert names_at(path) == kept | lives
    RunDirectory(tmp_path, clock=lambda: now + int(LAPSE * 1e9)).clean([Last(1)])
    assert names_at(path) == kept


def test_a_process_that_took_a_dead_ones_number_keeps_nothing(tmp_path: Path) -> None:
    path, now = tmp_path / "latest", time.time_ns()
    tc.save(path, tree_of(1))
    other = msgspec.structs.replace(this_process(), started=this_process().started + 1)
    record = Progress("a" * 16, 0, 1, None, "write", 1, 2, now, now, now, other)
    (path / progress_name(0, "a" * 16)).write_bytes(encode_progress(record))
    (path / shard_name("a" * 16, 0, 1, 0)).write_bytes(b"half of it")
    tc.save(path, tree_of(2), overwrite=True)
    check_alone(path, 2)


def test_a_save_that_writes_nothing_new_renews_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "BEAT_SECONDS", 0.01)
    tmp_path.joinpath("at").mkdir()
    now = time.time_ns()
    first = Progress("a" * 16, 0, 1, None, "write", 0, 2, now, now)
    store = open_store(tmp_path / "at")
    note = kept_files.ProgressRecorder(store, first)
    note.begin()
    seen: set[int] = set()

    def renewed() -> bool:
        seen.update(one.alive_ns for one in kept_files.read_progress(store, store.sizes()))
        return len(seen) > 3

    assert until(renewed)
    note.end()
    assert not names_at(tmp_path / "at")


def test_ls_says_at_once_that_a_save_was_killed(
    savers: Savers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    savers.save(tmp_path / step_name(1), "kill")
    assert main(["ls", str(tmp_path)]) == 0
    assert "was killed: 0% of" in capsys.readouterr().out


def test_after_many_kills_only_the_checkpoints_that_are_kept_are_there(savers: Savers, tmp_path: Path) -> None:
    run, chance = tmp_path / "run", random.Random(3)
    last, killed = 0, list[int]()
    for _ in range(25):
        with tc.Manager(run, keep=2, background=False) as manager:  # the training resumes, saves, and dies at the next
            assert last == (manager.latest() or 0)
            if last:
                manager.restore()
            manager.save(last + 1, tree_of(last + 1))
        last += 1
        how = chance.choice([*KILLS, "reading"])
        savers.save(run / step_name(last if how == "reading" else last + 1), how, last + 1)
        last += how == "committed"
        killed += [last + 1] * (how in ("kill", "publish"))
    assert failed_steps(run) == killed, "the last one is still there"
    with tc.Manager(run, keep=2, background=False) as manager:
        assert not manager.clean().left
        assert manager.steps() == [last - 1, last]
    assert open_run(run).names() == [step_name(last - 1), step_name(last)]
    assert failed_steps(run) == killed, "they stay in the list when their files have gone"
    for step in (last - 1, last):
        assert names_at(run / step_name(step)) == expected_at(run / step_name(step))


@pytest.mark.parametrize("committed", [False, True])
def test_a_disk_that_a_dead_save_has_filled_takes_the_next_save(tmp_path: Path, committed: bool) -> None:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        path = disk / "c"
        if committed:
            tc.save(path, {"n": 1})
        kept = set(os.listdir(path)) if committed else set[str]()
        dead = tc.save(tmp_path / "dead", {"n": os.urandom(1 << 20)}).save_id
        path.mkdir(exist_ok=True)
        for shard in (tmp_path / "dead").glob("shard*"):
            (path / shard.name).write_bytes(shard.read_bytes())
        ended = msgspec.structs.replace(this_process(), started=this_process().started + 1)
        now = time.time_ns()
        record = Progress(dead, 0, 1, None, "write", 0, 1, now, now, owner=ended)
        (path / progress_name(0, dead)).write_bytes(encode_progress(record))
        fill(disk, 0)
        if committed:
            before = sorted(os.listdir(path))
            with pytest.raises(tc.CheckpointExists):
                tc.save(path, {"n": 2})
            assert sorted(os.listdir(path)) == before
        tc.save(path, {"n": 2}, overwrite=committed)
        assert tc.load(path) == {"n": 2} and not kept & set(os.listdir(path)) - {"index.json"}
        assert not any(dead in name for name in os.listdir(path))
