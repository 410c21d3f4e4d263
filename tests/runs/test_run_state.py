"""Whether a run is finished, stopped, alive or late: by the mark of its manager, by saves, by the usual interval."""

import json
import logging
import signal
import subprocess
import sys

import msgspec
import pytest

import treeckpt as tc
from tests.helpers.s3 import S3
from tests.helpers.world import on_ranks
from treeckpt._cli.main import main
from treeckpt._core.format.files import ended_name
from treeckpt._core.format.lineage import Lineage
from treeckpt._runs import run_end
from treeckpt._runs.active_saves import SaveUnderWay
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.discovery import scan
from treeckpt._runs.run_end import RunEnd
from treeckpt._runs.run_state import activity_at, signs_of_run
from treeckpt.errors import StoreError

SECOND, NOW = 10**9, 1_700_000_000 * 10**9
QUARTER = 900.0


def saved(step, ago, **fields):
    """A complete checkpoint that was begun so many seconds ago."""
    created = NOW - int(ago * SECOND)
    return CheckpointInfo(f"step_{step:08d}", "", "complete", step, f"{step:016x}", created_ns=created, **fields)


def run_of(age, *, count=8, interval=QUARTER):
    """Checkpoints at even intervals, newest first; the newest was begun so many seconds ago."""
    return [saved(10 - n, age + n * interval) for n in range(count)]


def of(infos):
    return activity_at(signs_of_run(infos), NOW)


def save_under_way(state, ago):
    began = NOW - int(ago * SECOND)
    save = SaveUnderWay("f" * 16, 11, 1, 1, "write", 1, 2, began, began, state=state)
    return CheckpointInfo("step_00000011", "", "partial", 11, created_ns=began, saving=(save,))


@pytest.mark.parametrize(
    ("age", "state"),
    [(0, "alive"), (2.9, "alive"), (3.1, "late"), (19.9, "late"), (20, "ended"), (10_000, "ended"), (-5, "alive")],
)
def test_a_run_is_late_after_three_usual_intervals_until_it_is_taken_for_ended(age, state):
    found = of(run_of(age * QUARTER))
    assert (found.state, found.interval, found.step) == (state, pytest.approx(QUARTER), 10)
    assert found.live is (state != "ended")
    assert of([save_under_way("in_progress", 5), *run_of(age * QUARTER)]).state == "alive", "it saves"


def test_a_run_is_not_taken_for_ended_within_an_hour_however_often_it_saves():
    for age, state in [(59, "alive"), (61, "late"), (3599, "late"), (3600, "ended")]:
        assert of(run_of(age, interval=1)).state == state


def test_the_text_says_by_how_much_it_is_late_and_when_the_next_save_is_expected():
    late = of(run_of(4 * QUARTER))
    assert late.text == (
        "late by 45 min 0 s: the last save of step 10 was begun at 2023-11-14 21:13:20 UTC, usually every 15 min 0 s"
    )
    assert (late.last, late.due) == (NOW / 1e9 - 3600, NOW / 1e9 - 2700)
    alive = of(run_of(60))
    assert (
        alive.text == ("alive: the next save is expected about 2023-11-14 22:27:20 UTC, usually every 15 min 0 s")
        and alive.due == NOW / 1e9 + QUARTER - 60
    )


@pytest.mark.parametrize(
    ("infos", "why", "live"),
    [
        ([], "no checkpoint is complete", False),
        ([CheckpointInfo("step_00000001", "", "damaged", 1)], "no checkpoint is complete", False),
        (run_of(60, count=2), "too few saves follow each other", True),
    ],
)
def test_what_is_not_known_says_why(infos, why, live):
    found = of(infos)
    assert (found.state, found.live) == ("unknown", live) and why in found.text


def test_without_an_interval_a_run_is_taken_for_ended_after_an_hour():
    assert of(run_of(3601, count=1)).state == "ended"


@pytest.mark.parametrize("by", ["", "ValueError"])
def test_a_mark_counts_until_a_save_begins_after_it(by):
    mark = RunEnd(NOW - 5 * SECOND, by)
    newest, *others = run_of(60)
    ended = msgspec.structs.replace(newest, ended=mark)
    found = of([ended, *others])
    assert (found.state, found.since, found.due, found.live) == (
        (by and "stopped") or "finished",
        mark.ended_ns / 1e9,
        None,
        False,
    )
    assert (
        found.text
        == f"{'stopped by ValueError' if by else 'finished'} at 2023-11-14 22:13:15 UTC, after the save of step 10"
    )
    assert (
        of([msgspec.structs.replace(saved(11, 30), ended=RunEnd(NOW - 20 * SECOND)), ended, *others]).since
        == found.since
    )
    for later in (saved(11, 4), save_under_way("in_progress", 4), save_under_way("stalled", 4)):
        assert of([later, ended, *others]).state == "alive", later
    failed = CheckpointInfo("step_00000011", "", "partial", 11, created_ns=NOW - 4 * SECOND)
    assert of([failed, ended, *others]).state == "alive", "it was resumed, and a save failed"


def test_a_kill_during_the_last_save_has_stopped_the_run_and_an_older_one_has_not():
    killed = of([save_under_way("killed", 5), *run_of(60)])
    assert killed.state == "stopped" and "by a kill during a save" in killed.text and not killed.live
    marked = [msgspec.structs.replace(saved(10, 60), ended=RunEnd(NOW - 50 * SECOND)), *run_of(60)[1:]]
    assert of([save_under_way("killed", 5), *marked]).state == "stopped"
    assert of([save_under_way("killed", 100), *run_of(60)]).state == "alive"
    assert "hangs or was killed" in of([save_under_way("stalled", 5), *run_of(4 * QUARTER)]).text


def test_the_interval_is_between_saves_that_followed_each_other():
    def follows(step, ago, before):
        return saved(step, ago, lineage=Lineage(step, f"{before:016x}"))

    # between 1000, 2000 and 3000 others were deleted
    listed = [follows(3002, 10, 3001), follows(3001, 20, 3000), follows(3000, 30, 2999), follows(2000, 9e3, 1999)]
    assert of(listed).interval == pytest.approx(10)
    assert of(listed[:2]).interval is None, "one interval is none that is usual"


# real managers --------------------------------------------------------------------------------------------------------


def activity(run):
    infos = scan(run)
    return activity_at(signs_of_run(infos), max(info.created_ns or 0 for info in infos) + SECOND)


def train(run, steps, *, error=None, **options):
    with tc.Manager(run, keep=None, **options) as manager:
        manager.restore() if manager.latest() is not None else None
        for step in steps:
            manager.save(step, {"x": step})
        if error is not None:
            raise error


@pytest.mark.parametrize("background", [True, False])
def test_a_manager_that_is_closed_marks_the_run_until_another_saves(tmp_path, capsys, background):
    run = tmp_path / "run"
    train(run, [1, 2, 3], background=background)
    found = activity(run)
    assert (found.state, found.step) == ("finished", 3)
    assert len(list(run.glob("*/ended.*"))) == 1 and list(run.glob("step_00000003/ended.*")), "after the last commit"
    train(run, [])  # it only reads
    assert activity(run) == found
    main(["ls", str(run)])
    assert capsys.readouterr().out.splitlines()[-1] == f"{run}: {found.text}"
    main(["ls", str(run), "--json"])
    ended = json.loads(capsys.readouterr().out)[0]["ended"]
    assert ended["ended_ns"] / 1e9 == found.since and ended["stopped_by"] == ""
    main(["ls", str(run), "--metric", "loss", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["activity"] == msgspec.to_builtins(found)
    with tc.Manager(run, keep=None) as manager:
        manager.restore()
        manager.save(4, {"x": 4})
        manager.wait()
        assert activity(run).state == "alive", "the mark of step 3 is old"
    assert activity(run).step == 4 and activity(run).state == "finished"


def test_the_mark_is_no_leftover_and_changes_nothing_else(tmp_path, capsys):
    run = tmp_path / "run"
    train(run, [1, 2])
    step = run / "step_00000002"
    assert tc.verify(step).ok and not tc.verify(step).leftovers
    assert main(["gc", str(run), "--grace", "0", "--json"]) == 0
    assert list(step.glob("ended.*")) and json.loads(capsys.readouterr().out)["removed"] == []
    tc.save(step, {"x": 5}, step=2, overwrite=True)
    assert not list(step.glob("ended.*")), "it went with the save that it is about"
    train(run, [3])
    with tc.Manager(run, keep=1) as manager:
        manager.delete(3)
        assert manager.steps() == [1, 2]
    assert not (run / "step_00000003").exists()


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_a_run_whose_body_ends_with_an_error_is_stopped(tmp_path, error):
    with pytest.raises(type(error)):
        train(tmp_path / "run", [1, 2], error=error)
    found = activity(tmp_path / "run")
    assert found.state == "stopped" and f"by {type(error).__name__}" in found.text


def test_a_run_that_saved_on_a_signal_is_stopped(tmp_path):
    with tc.Manager(tmp_path / "run", every=1) as manager:
        manager.save_on_signal([signal.SIGUSR1])
        for step in range(1, 4):
            if manager.should_save(step):
                manager.save(step, {"x": step})
            signal.raise_signal(signal.SIGUSR1)
            if manager.stopping:
                break
    found = activity(tmp_path / "run")
    assert (found.state, found.step) == ("stopped", 2) and "by SIGUSR1" in found.text


def test_a_run_that_is_killed_during_a_save_is_stopped(tmp_path):
    code = """if True:
        import os, signal, sys
        import treeckpt as tc
        from treeckpt._io.storage.local_store import LocalStore
        publish = LocalStore.publish
        def killed(self, name, data, **options):
            if name == "index.json" and "00000003" in self.url:
                os.kill(os.getpid(), signal.SIGKILL)
            publish(self, name, data, **options)
        LocalStore.publish = killed
        with tc.Manager(sys.argv[1], background=False) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"x": step})
    """
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert ended.returncode == -signal.SIGKILL
    found = activity(tmp_path / "run")
    assert (found.state, found.step) == ("stopped", 2) and "by a kill during a save" in found.text, found


def test_only_rank_0_marks_a_run_and_managers_alone_their_own(tmp_path):
    outcomes = on_ranks(2, lambda comm: train(tmp_path / "run", [1, 2], comm=comm))
    assert [one.error for one in outcomes] == [None] * 2
    assert activity(tmp_path / "run").state == "finished" and len(list((tmp_path / "run").glob("*/ended.*"))) == 1


def test_an_object_store_has_the_mark_too(s3: S3):
    url = s3.url()
    train(url, [1, 2])
    assert activity(url).state == "finished"
    with tc.Manager(url, keep=None) as manager:
        manager.save(3, {"x": 3})
        manager.wait()
        assert activity(url).state == "alive"


def test_what_cannot_be_written_or_read_is_no_error_and_no_mark(tmp_path, monkeypatch, caplog):
    run = tmp_path / "run"

    def full(*_):
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING, "treeckpt"), monkeypatch.context() as patch:
        patch.setattr(run_end, "RunEnd", full)
        train(run, [1, 2, 3])
    assert "that the run has ended could not be written" in caplog.text and activity(run).state == "alive"
    info = scan(run)[0]
    for content in (b"", b"{}", b"\xff", b'{"ended_ns": "x"}', b"x" * 10_000):
        (run / "step_00000003" / ended_name(info.save_id)).write_bytes(content)
        assert activity(run).state == "alive", content
    (run / "step_00000003" / ended_name(info.save_id)).write_text(
        '{"ended_ns": 9000000000000000000, "stopped_by": "a\\u202eb"}'
    )
    assert "\u202e" not in activity(run).text and activity(run).state == "stopped"


def test_a_store_that_is_down_does_not_delay_the_error(tmp_path):
    with pytest.raises(StoreError):
        train(tmp_path / "run", [1], error=StoreError("s3://x", expected="an answer", found="none"))
    assert not list((tmp_path / "run").glob("*/ended.*"))
