"""The manager saves, keeps, finds and restores the right checkpoints, on one rank and on many."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import until
from tests.helpers.memory_run import MemoryRun
from tests.helpers.world import LONG, assert_equal, errors_of, on_ranks, reseal, shards_of, small_tree, whole_tree
from treeckpt import _api
from treeckpt._core.format.files import PIN_NAME, deleted_name, parse_file_name, step_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import shard_name
from treeckpt._io.comm.comm import thread_comms
from treeckpt._io.storage.kept_files import hold_lease
from treeckpt._io.storage.open import open_run
from treeckpt._io.storage.store import RunStore
from treeckpt._io.timing import steady_clock
from treeckpt._runs.discovery import scan
from treeckpt._runs.run import RunDirectory
from treeckpt._runs.schedule import SaveSchedule
from treeckpt.policy import Best, EverySteps, Last


@pytest.fixture(params=["disk", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def run(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3").url()
    return tmp_path / "run" if request.param == "disk" else MemoryRun()


def manager(run, **options):
    return tc.Manager(run, **{"background": False, **options})


def fill(run, steps, **options):
    made = manager(run, keep=None, **options)
    for step in steps:
        made.save(step, {"step": step})
    return made


def age(path: Path, seconds: float = 7200) -> None:
    """Makes everything below a path look so old, but for files that a thread replaces meanwhile."""
    at = time.time() - seconds
    for name in [*path.rglob("*"), path]:
        with contextlib.suppress(FileNotFoundError):
            os.utime(name, (at, at))


def crash_a_save(path: Path, save_id: str = "c" * 16) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / shard_name(save_id, 0, 2, 0)).write_bytes(b"half of it")
    (path / f".timings.{save_id}.json.{'d' * 16}.tmp").write_bytes(b"{")


# saving and finding --------------------------------------------------------------------------------------------------


def test_an_empty_run_has_nothing_and_restore_says_so(run):
    with manager(run) as made:
        assert (made.latest(), made.steps(), made.best("loss")) == (None, [], None)
        with pytest.raises(tc.CheckpointNotFound, match="latest"):
            made.restore()
        assert made.clean().kept == {}


def test_saves_are_named_kept_and_restored(run):
    with manager(run, keep=2) as made:
        for step in (100, 200, 300):
            report = made.save(step, small_tree(0, 1, seed=step))
            assert isinstance(report, tc.SaveReport) and report.step == step
        assert made.steps() == [200, 300] and made.latest() == 300
        assert_equal(made.restore(), whole_tree(seed=300))
        assert_equal(made.restore(step=200), whole_tree(seed=200))
        assert made.count == 200
    assert open_run(run).names() == ["step_00000200", "step_00000300"]


def test_steps_are_counted_and_saved_at_the_interval(run):
    made, asked = manager(run, keep=None, every=3), []
    results = [made.step(lambda: asked.append(1) or {"a": 1}) for _ in range(7)]
    assert [r.step if r else None for r in results] == [None, None, 3, None, None, 6, None]
    assert len(asked) == 2, "the tree is made only where it is saved"
    again = manager(run, keep=None, every=3)
    again.restore()
    assert again.count == 6
    assert not again.should_save(6), "what was restored needs no saving"
    assert [again.step({"a": 1}) is not None for _ in range(3)] == [False, False, True]
    assert again.steps() == [3, 6, 9]


def test_restoring_into_a_tree(run):
    fill(run, [5])
    tree = {"step": 0}
    assert manager(run).restore(into=tree).loaded == 1
    assert tree == {"step": 5}
    array = {"a": np.zeros(3), "n": 0}
    manager(run).save(6, {"a": np.arange(3.0), "n": 7})
    assert manager(run).restore(like={"a": tc.ArraySpec((3,), "float64"), "n": ...})["a"].tolist() == [0, 1, 2]
    manager(run).restore(into=array)
    assert array["a"].tolist() == [0, 1, 2]


def test_a_step_saved_twice_is_replaced_and_not_lost(run):
    made = fill(run, [1, 2])
    first = made.save(2, {"step": "old"}).save_id
    assert made.save(2, {"step": "new"}).save_id != first
    assert made.restore() == {"step": "new"} and made.steps() == [1, 2]
    with pytest.raises(tc.CheckpointExists):
        manager(run, overwrite=False).save(2, {"step": "newer"})
    assert manager(run, keep=1).clean().kept.keys() == {2}
    assert made.restore() == {"step": "new"}


def test_metrics_choose_the_best_after_a_restart_too(run):
    made = manager(run, keep=[Best("loss", 2), Best("accuracy", mode="max")])
    for step, loss in enumerate([5.0, 1.0, 4.0, float("nan"), 2.0, 9.0]):
        made.save(step, {"s": step}, metrics={"loss": loss, "accuracy": np.float32(step == 2)})
    again = manager(run, keep=[Best("loss", 2), Best("accuracy", mode="max")])
    assert again.steps() == [1, 2, 4, 5]
    assert (again.best(), again.best("accuracy"), again.best("accuracy", mode="min")) == (1, 2, 5)
    assert again.best("other") is None
    with pytest.raises(tc.TreeckptError, match="metric"):
        manager(run).best()
    with pytest.raises(tc.TreeError, match="metrics/loss"):
        made.save(9, {}, metrics={"loss": "low"})  # type: ignore[arg-type]


def test_a_misspelt_metric_deletes_nothing_and_is_said_once(run, caplog):
    with manager(run, keep=[Last(1), Best("los", 2)]) as made:
        for step in range(4):
            made.save(step, {"s": step}, metrics={"loss": step})
        assert made.steps() == [0, 1, 2, 3]
        assert "no checkpoint has the metric 'los'" in str(made.clean(dry_run=True))
    [text] = [record.getMessage() for record in caplog.records]
    assert "no checkpoint has the metric 'los' as a number (metrics there are: loss)" in text


def test_the_best_by_a_misspelt_metric_is_none_and_the_metrics_there_are_get_logged(run, caplog):
    made = manager(run)
    assert made.best("los") is None and not caplog.records, "a run without checkpoints has no metrics yet"
    made.save(1, {"s": 1}, metrics={"loss": 0.5, "acc": 1})
    assert (made.best("los"), made.best("los"), made.best("loss")) == (None, None, 1)
    [text] = [record.getMessage() for record in caplog.records]
    assert "no checkpoint has the metric 'los' as a number (metrics there are: acc, loss)" in text


def test_a_metric_that_is_measured_later_chooses_from_then_on(run):
    with manager(run, keep=[Last(2), Best("loss")]) as made:
        for step, metrics in enumerate([None, None, None, {"loss": 1.0}, None, {"loss": 2.0}, None]):
            made.save(step, {"s": step}, metrics=metrics)
            if step == 2:
                assert made.steps() == [0, 1, 2]
        assert made.steps() == [3, 5, 6]


def test_pins_hold_until_they_are_taken_away(run):
    made = manager(run, keep=1)
    made.save(1, {"s": 1}, pin=True)
    made.save(2, {"s": 2})
    made.save(3, {"s": 3})
    assert made.steps() == [1, 3]
    made.pin(3)
    made.save(4, {"s": 4})
    assert manager(run).clean(dry_run=True).kept[3] == ("pinned", "one of the last 3")
    made.unpin(1)
    made.unpin(1)
    made.clean()
    assert made.steps() == [3, 4]
    for act in (made.pin, made.unpin):
        with pytest.raises(tc.CheckpointNotFound):
            act(77)


def test_a_dry_run_deletes_nothing_and_foretells_the_real_one(run):
    made = fill(run, range(5))
    one = manager(run, keep=2)
    foretold = one.clean(dry_run=True)
    assert made.steps() == [0, 1, 2, 3, 4]
    done = one.clean()
    assert (done.kept, done.removed, done.left) == (foretold.kept, foretold.removed, foretold.left)
    assert made.steps() == [3, 4] and len(done.removed) == 3
    assert ": 2 steps kept, 3 would go\n" in str(foretold) and ": 2 steps kept, 3 removed\n" in str(done)
    assert "  would go  step_00000000, checkpoint: no policy keeps it" in str(foretold)
    assert "  removed   step_00000000, checkpoint: no policy keeps it" in str(done)
    assert ": 1 step kept, 1 would go\n" in str(manager(run, keep=1).clean(dry_run=True))


def test_a_restart_decides_as_before(run):
    keep = [Last(2), EverySteps(4), Best("m")]
    one = manager(run, keep=keep)
    for step in range(1, 8):
        one.save(step, {"s": step}, metrics={"m": abs(step - 3)})
    before = open_run(run).names()
    report = manager(run, keep=keep).clean()
    assert not report.removed and open_run(run).names() == before
    assert report.kept.keys() == {3, 4, 6, 7}


def test_bad_steps_are_refused(run):
    with pytest.raises(tc.TreeError, match="0 or more"):
        manager(run).save(-1, {})


def test_the_manager_prints_itself(run):
    assert repr(manager(run, keep=2)) == f"Manager({RunDirectory(run).url!r}, keep=[Last(count=2)], rank 0 of 1)"


# what is broken --------------------------------------------------------------------------------------------------


def test_latest_passes_over_what_is_partial_or_damaged_and_says_why(tmp_path, caplog):
    made = fill(tmp_path, [1, 2, 3, 4])
    shards_of(tmp_path / step_name(4))[0].write_bytes(b"cut")
    (tmp_path / step_name(3) / INDEX_NAME).write_bytes(b"{}")
    crash_a_save(tmp_path / step_name(5))
    assert made.latest() == 2 and made.steps() == [1, 2]
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3
    for step, why in ((5, "partial"), (4, "3 bytes instead of"), (3, "index.json")):
        assert any(str(tmp_path / step_name(step)) in text and why in text for text in texts), texts
    made.latest()
    assert len(caplog.records) == 3, "each is said once"
    assert made.restore() == {"step": 2}


def test_changed_bytes_are_found_by_verifying_and_restore_falls_back(tmp_path, caplog):
    made = manager(tmp_path, keep=None)
    for step in (1, 2):
        made.save(step, small_tree(0, 1, seed=step))
    shard = shards_of(tmp_path / step_name(2))[0]
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    shard.write_bytes(data)
    assert made.latest() == 2 and made.latest(verify=True) == 1
    caplog.clear()
    assert_equal(manager(tmp_path).restore(), whole_tree(seed=1))
    assert any(str(tmp_path / step_name(2)) in record.getMessage() for record in caplog.records)
    with pytest.raises(tc.CorruptError):
        made.restore(step=2)
    tree = whole_tree(seed=5)
    made.restore(into=tree, fallback=tc.Fallback(per_rank="take"))
    assert_equal(tree, whole_tree(seed=1))


def test_a_wrong_target_is_no_reason_to_take_an_older_one(run):
    made = fill(run, [1, 2])
    with pytest.raises(tc.MismatchError):
        made.restore(like={"other": 0})
    assert made.count == 2


def test_when_nothing_loads_restore_says_so(tmp_path):
    made = manager(tmp_path)
    made.save(1, small_tree(0, 1))
    shard = shards_of(tmp_path / step_name(1))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(tc.CheckpointNotFound, match="cannot be loaded"):
        made.restore()


def test_a_checkpoint_that_was_moved_to_another_step_is_not_trusted(tmp_path, caplog):
    made = fill(tmp_path, [1, 2])
    shutil.copytree(tmp_path / step_name(1), tmp_path / step_name(9))
    assert made.latest() == 2
    assert "its index says step 1" in caplog.text
    assert "damaged" in manager(tmp_path, keep=1).clean().left[0].why
    assert (tmp_path / step_name(9) / INDEX_NAME).exists()


def test_an_index_that_is_forged_is_no_trouble(tmp_path):
    made = fill(tmp_path, [1, 2])
    reseal(tmp_path / step_name(2), lambda document: document.update(version=99))
    assert made.latest() == 1
    assert manager(tmp_path, keep=1).clean().kept.keys() == {1}


# cleaning ------------------------------------------------------------------------------------------------------------


def test_what_crashed_saves_left_goes_after_the_grace_period(tmp_path):
    made = fill(tmp_path, [1, 2])
    crash_a_save(tmp_path / step_name(3))
    crash_a_save(tmp_path / step_name(2))
    before = {path.name for path in (tmp_path / step_name(2)).iterdir()}
    assert not made.clean().removed
    age(tmp_path)
    report = made.clean()
    assert {(r.name, r.what) for r in report.removed} == {(step_name(3), "leftovers"), (step_name(2), "leftovers")}
    assert not (tmp_path / step_name(3)).exists()
    after = {path.name for path in (tmp_path / step_name(2)).iterdir()}
    assert all(parse_file_name(name).save_id == "c" * 16 for name in before - after) and len(before - after) == 2
    assert made.restore() == {"step": 2} and tc.verify(tmp_path / step_name(2)).ok


def test_a_stale_partial_save_is_never_merged_into_the_next_one(tmp_path):
    tc.save(tmp_path / step_name(1), {"a": np.zeros(100)})
    (tmp_path / step_name(1) / INDEX_NAME).unlink()
    made = manager(tmp_path)
    made.save(1, {"b": np.ones(3)})
    assert list(made.restore()) == ["b"]
    age(tmp_path)
    made.clean()
    assert len(shards_of(tmp_path / step_name(1))) == 1 and list(made.restore()) == ["b"]


def test_foreign_files_and_directories_are_never_deleted(tmp_path):
    fill(tmp_path, [1, 2, 3])
    (tmp_path / step_name(1) / "notes.txt").write_text("mine")
    (tmp_path / step_name(1) / "plots").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "train.log").write_text("mine")
    (tmp_path / "step_9").mkdir()
    (tmp_path / step_name(8)).mkdir()
    (tmp_path / step_name(8) / "data.bin").write_text("mine")
    tc.save(tmp_path / "best", {"a": 1})
    outside = tmp_path.parent / f"{tmp_path.name} outside"
    tc.save(outside, {"a": 1}, step=7)
    (tmp_path / step_name(7)).symlink_to(outside)
    age(tmp_path)
    manager(tmp_path, keep=1, grace=0).clean()
    rest = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"step_00000001/notes.txt", "train.log", "step_00000008/data.bin", "best/index.json"} <= rest
    assert (tmp_path / "step_9").is_dir() and (tmp_path / step_name(1) / "plots").is_dir()
    assert tc.load(outside) == {"a": 1} and tc.load(tmp_path / "best") == {"a": 1}
    assert manager(tmp_path).steps() == [3]


def test_a_step_that_is_read_is_deleted_only_afterwards(run):
    made = fill(run, [1, 2])
    keeper = manager(run, keep=1)
    with made.reading(1) as store:
        [left] = keeper.clean().left
        assert "being read" in left.why and made.steps() == [1, 2]
        assert tc.load(store) == {"step": 1}
    assert keeper.clean().removed[0].name == step_name(1)
    with pytest.raises(tc.CheckpointNotFound), made.reading(1):
        pass
    assert open_run(run).names() == [step_name(2)], "a reader that comes too late brings nothing back"


def call_that_removes_the_index(store):
    return "rename" if store.traits.renames else "delete"


def test_a_reader_that_comes_between_decision_and_deletion_keeps_the_shards(run, monkeypatch):
    made, keeper, held = fill(run, [1, 2]), RunDirectory(run), []
    folder = made.directory.folder(1)

    store = type(folder)
    call = call_that_removes_the_index(folder)
    real = getattr(store, call)

    def delete(self, name, *aside, **options):
        if name == INDEX_NAME and not held:
            held.append(hold_lease(folder))
            held[0].__enter__()
        real(self, name, *aside, **options)

    monkeypatch.setattr(store, call, delete)
    report = keeper.clean([Last(1)])
    assert "reader is done" in report.left[0].why
    assert any(parse_file_name(name).kind == "shard" for name in folder.entries()), "it can go on reading"
    assert made.steps() == [2]
    held[0].__exit__(None, None, None)
    assert "cut short" in keeper.clean([Last(1)]).removed[0].reason
    assert open_run(run).names() == [step_name(2)]


def test_leases_are_renewed_and_those_of_dead_readers_expire(tmp_path, monkeypatch):
    fill(tmp_path, [1, 2])
    folder = RunDirectory(tmp_path).folder(1)
    monkeypatch.setattr("treeckpt._io.storage.kept_files.RENEW_SECONDS", 0.01)
    with hold_lease(folder):
        age(tmp_path / step_name(1))
        assert until(lambda: bool(RunDirectory(tmp_path).clean([Last(1)], dry_run=True).left)), "it is renewed"
    (tmp_path / step_name(1) / f"lease.{'e' * 16}.json").write_text("{}")
    assert RunDirectory(tmp_path).clean([Last(1)], dry_run=True).left
    age(tmp_path / step_name(1))
    assert RunDirectory(tmp_path).clean([Last(1)]).removed[0].name == step_name(1)
    assert not (tmp_path / step_name(1)).exists()


def test_a_pin_between_decision_and_deletion_wins(tmp_path, monkeypatch):
    fill(tmp_path, [1, 2])
    run = RunDirectory(tmp_path)
    real = run.remover.remove

    def remove(folder, removal, grace):
        (tmp_path / step_name(1) / PIN_NAME).write_text("{}")
        return real(folder, removal, grace)

    monkeypatch.setattr(run.remover, "remove", remove)
    assert "pinned" in run.clean([Last(1)]).left[0].why
    names = {path.name for path in (tmp_path / step_name(1)).iterdir()}
    assert INDEX_NAME in names and not any(name.startswith("deleted") for name in names)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pin_beside_the_deletion_of_the_index_keeps_the_step_or_is_an_error(run, monkeypatch, when):
    made = fill(run, [1, 2])
    folder = type(open_run(run).folder(step_name(1)))
    call = call_that_removes_the_index(open_run(run).folder(step_name(1)))
    real, told = getattr(folder, call), []

    def delete(store, name, *aside, **options):
        pins = name == INDEX_NAME and not told
        told.append(name)
        if pins and when == "before":
            made.pin(1)
        real(store, name, *aside, **options)
        if pins and when == "after":
            with pytest.raises(tc.CheckpointNotFound, match="it is being deleted"):
                made.pin(1)

    with monkeypatch.context() as patch:
        patch.setattr(folder, call, delete)
        report = manager(run, keep=1).clean()
    if when == "before":
        assert "pinned meanwhile" in report.left[0].why and made.restore(step=1) == {"step": 1}
        names = open_run(run).folder(step_name(1)).entries()
        assert PIN_NAME in names and not any(name.startswith("deleted") for name in names)
        assert manager(run, keep=1).clean().kept[1] == ("pinned",)
    else:
        assert made.steps() == [2] and open_run(run).names() == [step_name(2)]


def test_a_pin_that_is_written_after_the_deletion_has_looked_is_an_error(tmp_path, monkeypatch):
    fill(tmp_path, [1, 2])
    run = RunDirectory(tmp_path)
    put = run.put_pin

    def put_late(folder):
        manager(tmp_path, keep=1).clean()
        return put(folder)

    monkeypatch.setattr(run, "put_pin", put_late)
    with pytest.raises(tc.CheckpointNotFound, match="found it was being deleted"):
        run.pin(1)
    assert os.listdir(tmp_path) == [step_name(2)]


def test_a_save_to_the_step_between_decision_and_deletion_wins(tmp_path, monkeypatch):
    made, run = fill(tmp_path, [1, 2]), RunDirectory(tmp_path)
    real = run.remover.remove

    def remove(folder, removal, grace):
        made.save(1, {"step": "again"})
        return real(folder, removal, grace)

    monkeypatch.setattr(run.remover, "remove", remove)
    assert "another save" in run.clean([Last(1)]).left[0].why
    assert made.restore(step=1) == {"step": "again"}


def test_a_clock_that_jumps_deletes_nothing_of_a_save_under_way(tmp_path):
    fill(tmp_path, [1, 2])
    crash_a_save(tmp_path / step_name(3))
    jump = [0]
    run = RunDirectory(tmp_path, clock=steady_clock(lambda: time.time_ns() + jump[0], time.monotonic_ns))
    for jump[0] in (10**18, -(10**18)):
        assert not run.clean([Last(2)]).removed
    assert (tmp_path / step_name(3)).exists()
    later = [0]
    run = RunDirectory(
        tmp_path, clock=steady_clock(lambda: time.time_ns() + later[0], lambda: time.monotonic_ns() + later[0])
    )
    later[0] = 7200 * 10**9
    assert run.clean([Last(2)]).removed, "time that really passed counts"


def test_a_run_that_cannot_be_written_is_read_all_the_same(tmp_path, caplog):
    fill(tmp_path, [1, 2])
    read_only = ReadOnly(open_run(tmp_path))
    made = manager(read_only, keep=1)
    assert made.latest() == 2 and made.restore() == {"step": 2}
    report = made.clean()
    assert report.failed[0].name == step_name(1) and "Read-only" in report.failed[0].why and not report.removed
    with pytest.raises(tc.CheckpointError, match="Read-only"):
        made.pin(1)
    assert made.steps() == [1, 2]
    made.retention.start()
    made.retention.wait()
    assert "could not be cleaned away" in caplog.text


class ReadOnly(RunStore):
    """A run whose file system takes no changes; permissions would not stop root."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def url(self):
        return self.inner.url

    def names(self):
        return self.inner.names()

    def folder(self, name):
        folder = self.inner.folder(name)

        def refuse(*args, **options):
            raise OSError(30, "Read-only file system")

        for name in ("publish", "delete", "create", "rename"):
            setattr(folder, name, refuse)
        return folder


def test_two_managers_on_one_run_agree(tmp_path):
    fill(tmp_path, range(1, 31))
    reports = {}

    def clean(name):
        reports[name] = RunDirectory(tmp_path).clean([Last(3), EverySteps(10)])

    threads = [threading.Thread(target=clean, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert manager(tmp_path).steps() == [10, 20, 28, 29, 30]
    assert not any(report.failed for report in reports.values()), [r.failed for r in reports.values()]
    age(tmp_path)
    RunDirectory(tmp_path).clean([Last(3), EverySteps(10)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(s) for s in (10, 20, 28, 29, 30)]


def test_a_run_is_not_empty_because_its_only_step_is_replaced_while_it_is_listed(run, monkeypatch):
    fill(run, [1])
    other, store, left = manager(run, keep=1, overwrite=True), type(open_run(run)), [2, 3]
    real = store.folders

    def listed_and_replaced(self):
        found = real(self)
        if left and threading.current_thread() is threading.main_thread():
            step = left.pop(0)
            saving = threading.Thread(target=other.save, args=(step, {"step": step}))
            saving.start()
            saving.join()
        return found

    monkeypatch.setattr(store, "folders", listed_and_replaced)
    assert manager(run).steps() == [3] and not left


def test_a_half_deleted_step_is_none_and_the_next_save_there_is_whole(tmp_path):
    made = fill(tmp_path, [1, 2])
    save_id = tc.inspect(tmp_path / step_name(1)).save_id
    (tmp_path / step_name(1) / deleted_name(save_id)).write_text("{}")
    (tmp_path / step_name(1) / INDEX_NAME).unlink()
    assert made.steps() == [2]
    made.save(1, {"step": "again"})
    assert made.restore(step=1) == {"step": "again"}
    assert deleted_name(save_id) not in os.listdir(tmp_path / step_name(1)), "what was cut short is finished"


# ranks ---------------------------------------------------------------------------------------------------------------


def test_all_ranks_get_rank_0s_answer(tmp_path):
    def act(comm):
        # only rank 0's directory has anything in it: the others see a listing that is empty
        with manager(tmp_path if comm.rank == 0 else tmp_path / "stale", keep=2, comm=comm) as made:
            found = [made.latest()]
            return [*found, made.steps(), made.best("loss"), made.clean(dry_run=True).kept]

    fill(tmp_path, [1, 2, 3])
    outcomes = on_ranks(3, act)
    assert errors_of(outcomes) == [None] * 3
    kept = {2: ("one of the last 2",), 3: ("newest", "one of the last 2")}
    assert [o.value for o in outcomes] == [[3, [1, 2, 3], None, kept]] * 3


def test_ranks_save_delete_and_restore_together(tmp_path):
    def act(comm):
        with manager(tmp_path, keep=2, comm=comm) as made:
            for step in (1, 2, 3):
                made.save(step, small_tree(comm.rank, 3, seed=step), metrics={"loss": step}, pin=step == 1)
                assert made.latest() == step
            tree = made.restore(like=small_tree(comm.rank, 3))
            return made.steps(), made.count, tree["step"], tree["own"].value["n"]

    outcomes = on_ranks(3, act)
    assert errors_of(outcomes) == [None] * 3
    assert [o.value for o in outcomes] == [([1, 2, 3], 3, 103, rank) for rank in range(3)]


def test_one_ranks_failure_to_load_makes_all_take_the_checkpoint_before(tmp_path):
    saved = on_ranks(
        2, lambda c: [tc.save(tmp_path / step_name(s), small_tree(c.rank, 2, seed=s), step=s, comm=c) for s in (1, 2)]
    )
    assert errors_of(saved) == [None] * 2
    shard = shards_of(tmp_path / step_name(2))[1]
    shard.write_bytes(shard.read_bytes()[:-3] + b"bad")

    def act(comm):
        made = manager(tmp_path, comm=comm)
        return made.restore(like=small_tree(comm.rank, 2))["step"], made.count

    outcomes = on_ranks(2, act)
    assert errors_of(outcomes) == [None] * 2
    assert [o.value for o in outcomes] == [(101, 1)] * 2


def test_the_metrics_of_rank_0_count(tmp_path):
    """Each rank has measured its own share of the data."""

    def act(comm):
        manager(tmp_path, comm=comm).save(1, {"s": 1}, metrics={"loss": 0.5 + comm.rank})

    assert errors_of(on_ranks(2, act)) == [None, None]
    assert [info.metrics for info in scan(tmp_path)] == [{"loss": 0.5}]


def test_rank_0s_errors_are_everybodys(tmp_path):
    outcomes = on_ranks(2, lambda c: manager(tmp_path, comm=c).restore())
    assert [type(o.error) for o in outcomes] == [tc.CheckpointNotFound] * 2
    outcomes = on_ranks(2, lambda c: manager(tmp_path, comm=c).pin(4))
    assert [type(o.error) for o in outcomes] == [tc.CheckpointNotFound] * 2


def test_one_ranks_wrong_target_is_everybodys_error(tmp_path):
    fill(tmp_path, [1])
    outcomes = on_ranks(2, lambda c: manager(tmp_path, comm=c).restore(like={"step": 0} if c.rank else {"other": 0}))
    assert all(isinstance(o.error, tc.RankError) and list(o.error.ranks) == [0] for o in outcomes)


def test_a_rank_that_does_not_ask_is_named(tmp_path):
    outcomes = on_ranks(2, lambda c: manager(tmp_path, comm=c).latest() if c.rank == 0 else None, timeout=0.2)
    assert isinstance(outcomes[0].error, tc.RankError) and list(outcomes[0].error.ranks) == [1]


def test_questions_and_saves_on_one_comm_do_not_mix(tmp_path):
    def act(comm):
        made, other = manager(tmp_path / "a", comm=comm), manager(tmp_path / "b", comm=comm)
        for step in range(3):
            made.save(step, {"s": step})
            other.save(step + 10, {"s": step})
            tc.save(tmp_path / f"plain {step}", {"s": step}, comm=comm)
        return made.steps(), other.steps()

    outcomes = on_ranks(2, act)
    assert errors_of(outcomes) == [None] * 2
    assert [o.value for o in outcomes] == [([0, 1, 2], [10, 11, 12])] * 2


# when ----------------------------------------------------------------------------------------------------------------


def test_times_are_decided_by_rank_0_for_all(tmp_path):
    comms, clocks = thread_comms(3, timeout=60), [0.0, 1e6, -50.0]

    def act(comm):
        made, said = manager(tmp_path, seconds=10, every=7, comm=comm), []
        made.schedule.clock = lambda: clocks[comm.rank]
        made.schedule.restart()
        for step in range(1, 13):
            said.append(made.should_save(step))
            if said[-1]:
                made.save(step, {"s": 0})
            if comm.rank == 0:
                clocks[0] += 4
        return [step for step, due in enumerate(said, 1) if due]

    outcomes = on_ranks(comms, act)
    assert errors_of(outcomes) == [None] * 3
    found = [o.value for o in outcomes]
    assert found[0] == found[1] == found[2] and 7 in found[0] and len(found[0]) >= 3, found


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_signal_on_any_rank_makes_all_save_the_same_step(tmp_path, who):
    """The handler's flag is set by hand: threads get no signals. Real ones are in tests/multirank."""
    meet = threading.Barrier(3)

    def act(comm):
        made = manager(tmp_path, comm=comm)
        made.schedule.listening = True
        for step in range(1, 50):
            if comm.rank == who and step == 5:
                made.schedule.signum = 15
            if made.should_save(step):
                made.save(step, {"s": step})
            if made.stopping:
                return step
            meet.wait(60)  # as a step's collective does
        return None

    outcomes = on_ranks(3, act)
    assert errors_of(outcomes) == [None] * 3
    steps = {o.value for o in outcomes}
    assert len(steps) == 1 and steps <= {6, 7}, steps
    assert manager(tmp_path).steps() == sorted(steps)


def test_ranks_that_drift_apart_still_save_the_same_step(tmp_path):
    """By 20 steps at most, so that no rank ends before another has heard the signal."""
    reached, moved = [0, 0, 0], threading.Condition()

    def reach(rank, step):
        with moved:
            reached[rank] = step
            moved.notify_all()
            assert moved.wait_for(lambda: step <= min(reached) + 20, LONG)

    def act(comm):
        made = manager(tmp_path, comm=comm)
        made.schedule.listening = True
        for step in range(1, 200):
            reach(comm.rank, step)
            time.sleep(0.001 + 0.002 * comm.rank)
            if comm.rank == 2 and step == 5:
                made.schedule.signum = 15
            if made.should_save(step):
                made.save(step, {"s": step})
            if made.stopping:
                return step
        return None

    outcomes = on_ranks(3, act)
    assert errors_of(outcomes) == [None] * 3
    assert len({o.value for o in outcomes}) == 1 and outcomes[0].value is not None


def test_a_rank_interrupted_while_it_asks_for_a_decision_asks_again_in_step(tmp_path, monkeypatch):
    meet, real = threading.Barrier(2), SaveSchedule._read_plan
    interrupted = iter([True])

    def read_plan(schedule):
        if schedule._calls == 5 and next(interrupted, False):
            raise KeyboardInterrupt
        return real(schedule)

    monkeypatch.setattr(SaveSchedule, "_read_plan", read_plan)

    def act(comm):
        made = manager(tmp_path, comm=comm)
        made.schedule.listening = True
        for step in range(1, 50):
            if comm.rank and step == 8:
                made.schedule.signum = 15
            try:
                due = made.should_save(step)
            except KeyboardInterrupt:
                due = made.should_save(step)
            if due:
                made.save(step, {"s": step})
            if made.stopping:
                return step
            meet.wait(60)  # as a step's collective does
        return None

    outcomes = on_ranks(2, act)
    assert errors_of(outcomes) == [None] * 2
    assert outcomes[0].value == outcomes[1].value in (9, 10)


def test_without_times_and_signals_nothing_is_posted(tmp_path):
    [comm, _] = thread_comms(2)
    made = manager(tmp_path, every=2, comm=comm)
    assert [made.should_save(step) for step in range(5)] == [False, False, True, False, True]
    assert not comm.stores[0].messages


def test_a_signal_saves_once_and_ends_the_process_if_asked(tmp_path):
    import signal

    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended, manager(tmp_path, comm=None) as made:
        made.save_on_signal([signal.SIGUSR1], exit=3)
        assert made.step({"a": 1}) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        made.step({"a": 2})
    assert ended.value.code == 3 and made.stopping
    assert signal.getsignal(signal.SIGUSR1) == before
    assert manager(tmp_path).restore() == {"a": 2} and manager(tmp_path).latest() == 2


def test_signals_can_be_listened_to_only_in_the_main_thread(tmp_path):
    def act(comm):
        manager(tmp_path, comm=comm).save_on_signal()

    [outcome] = on_ranks(1, act)
    assert isinstance(outcome.error, tc.TreeckptError) and "main thread" in str(outcome.error)


# together ------------------------------------------------------------------------------------------------------------


def test_readers_of_a_run_that_is_saved_and_cleaned_all_the_time_never_see_half_a_checkpoint(tmp_path):
    errors, loads, stop = [], [], threading.Event()
    writer = manager(tmp_path, keep=1)
    writer.save(0, small_tree(0, 1, seed=0))

    def read(choose):
        reader = manager(tmp_path, keep=None)
        while not stop.is_set():
            try:
                tree = choose(reader)
                assert_equal(tree, whole_tree(seed=tree["step"] - 100))
                loads.append(tree["step"])
            except tc.CheckpointNotFound:
                pass
            except BaseException as error:
                errors.append(error)
                return

    def oldest(reader):
        with reader.reading(reader.steps()[0]) as store:
            return tc.load(store)

    threads = [threading.Thread(target=read, args=(choose,)) for choose in (oldest, lambda reader: reader.restore())]
    for thread in threads:
        thread.start()
    step = 0
    while not errors and (step < 30 or len(set(loads)) < 5):  # until they have read while it changed
        step += 1
        writer.save(step, small_tree(0, 1, seed=step))
    stop.set()
    for thread in threads:
        thread.join(200)
    assert not errors, errors[0]
    writer.clean()
    assert writer.steps() == [step] and len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_restore_holds_a_lease_while_it_loads(tmp_path, monkeypatch):
    fill(tmp_path, [1, 2])
    seen = []
    real = _api.load

    def load(store, *args, **options):
        seen.append([name for name in os.listdir(tmp_path / step_name(1)) if name.startswith("lease.")])
        seen.append(RunDirectory(tmp_path).clean([Last(1)]).left[0].why)
        return real(store, *args, **options)

    monkeypatch.setattr(_api, "load", load)
    assert manager(tmp_path).restore(step=1) == {"step": 1}
    assert len(seen[0]) == 1 and "being read" in seen[1]
    assert not [name for name in os.listdir(tmp_path / step_name(1)) if name.startswith("lease.")]


def test_options_are_refused_when_the_manager_is_made(tmp_path):
    assert manager(tmp_path, max_shard_bytes=1 << 20).save(1, {"a": 1})
    for options in ({"colour": 1}, {"step": 1}, {"writer": "thread"}):
        with pytest.raises(TypeError, match=next(iter(options))):
            manager(tmp_path, **options)
    with pytest.raises(TypeError, match="colour"):
        tc.Manager(tmp_path, colour=1)


def test_a_directory_is_never_cleaned_away_under_a_save_that_begins_in_it(tmp_path, monkeypatch):
    """An old empty directory is about to be removed when a save into it begins: one waits for the other."""
    made, order = tc.Manager(tmp_path, keep=1, background=tc.BackgroundOptions(writer="thread")), []
    made.save(1, {"s": 1})
    made.wait()
    (tmp_path / step_name(2)).mkdir()
    age(tmp_path / step_name(2))
    entered, real = threading.Event(), made.directory.remover.remove

    def remove(folder, removal, grace):
        entered.set()
        time.sleep(0.3)
        order.append("removed")
        return real(folder, removal, grace)

    monkeypatch.setattr(made.directory.remover, "remove", remove)
    made.retention.start()
    assert entered.wait(60)
    made.save(2, {"s": 2})
    order.append("saved")
    made.close()
    assert order[:2] == ["removed", "saved"] and manager(tmp_path).restore() == {"s": 2}
