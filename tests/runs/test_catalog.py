"""Every directory of a run is reported as what it is."""

import os
import shutil
import socket
import threading
import time

import numpy as np
import pytest

import treeckpt
from tests.helpers.background import Gate, GatedRun
from tests.helpers.samples import MESH, write_checkpoint, write_mixed_run, write_run
from tests.helpers.world import LONG
from treeckpt._core.format.files import Progress, encode_progress, progress_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.timings import timings_name
from treeckpt._core.sharding.int_runs import decode_runs
from treeckpt._core.sharding.placements import MeshLayout, Replicate, Shard
from treeckpt._core.tree.containers import PerRank
from treeckpt._inspect.profile import profile_of
from treeckpt._io.storage.checkpoint import LruStatCache
from treeckpt._io.storage.store import DirectoryEntry
from treeckpt._runs import catalog, discovery
from treeckpt._runs.repair_advice import repair_advice
from treeckpt._saving import background
from treeckpt.errors import CheckpointNotFound, CorruptError, TreeckptError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_mixed_run(tmp_path_factory.mktemp("mixed"))


def test_a_mixed_run_is_told_apart(run):
    assert {info.name: info.status for info in discovery.scan(run)} == {
        "step_00000600": "damaged",
        "step_00000500": "damaged",
        "step_00000400": "partial",
        "step_00000300": "partial",
        "step_00000200": "complete",
        "step_00000100": "complete",
        "latest": "foreign",
        "logs": "foreign",
    }


def test_the_newest_comes_first_and_foreign_ones_last(run):
    assert [info.step for info in discovery.scan(run)] == [600, 500, 400, 300, 200, 100, None, None]


def test_errors_say_what_is_wrong(run):
    errors = {info.name: info.error or "" for info in discovery.scan(run)}
    assert "bytes instead of" in errors["step_00000600"]
    assert "index.json" in errors["step_00000500"]
    assert "No space left on device" in errors["step_00000400"]
    assert "no index, though shards of all 4 ranks are there" in errors["step_00000300"]
    assert "symbolic link" in errors["latest"]
    assert errors["step_00000100"] == ""


def test_a_step_that_lost_only_its_index_names_the_command_that_makes_it_again(tmp_path):
    for step in (1, 2):
        index = write_checkpoint(tmp_path / f"step_{step:08d}", step=step)
        (tmp_path / f"step_{step:08d}" / INDEX_NAME).unlink()
    next((tmp_path / "step_00000001").glob("shard-00001-*")).unlink()
    found = {info.step: info for info in discovery.scan(tmp_path)}
    assert found[1].error == "no index: the save is under way, or never finished"
    all_there = (
        f"no index, though shards of all {index.world} ranks are there; the next save to it, or gc, removes them"
    )
    assert found[2].error == all_there
    repair, gc = repair_advice(found[2]), repair_advice(found[1])
    assert repair.command == f"treeckpt verify {tmp_path / 'step_00000002'} --repair"
    assert gc.command == f"treeckpt gc {tmp_path / 'step_00000001'}"


def test_a_save_under_way_with_all_its_shards_is_no_lost_index(tmp_path):
    index = write_checkpoint(tmp_path / "step_00000001", step=1, publish=False)
    now = time.time_ns()
    record = Progress(index.save_id, 0, index.world, 1, "commit", 1, 1, now, now)
    (tmp_path / "step_00000001" / progress_name(0, index.save_id)).write_bytes(encode_progress(record))
    [info] = discovery.scan(tmp_path)
    assert info.saving and info.error == "no index: the save is under way, or never finished"


def test_a_complete_one_is_described(tmp_path):
    index = write_checkpoint(tmp_path / "step_00000007", step=7)
    [info] = discovery.scan(tmp_path)
    assert (info.save_id, info.world, info.leaves) == (index.save_id, 4, len(index.leaves))
    assert (info.nbytes, info.created_ns) == (index.nbytes, index.created_ns)
    assert info.seconds is not None and 0 < info.seconds < 10


def test_a_checkpoint_given_as_the_run_is_found(tmp_path):
    write_run(tmp_path, steps=(5,))
    [info] = discovery.scan(tmp_path / "step_00000005")
    assert (info.name, info.status) == ("step_00000005", "complete")
    assert not discovery.is_checkpoint(tmp_path)


def test_a_checkpoint_whose_index_cannot_be_read_has_the_bytes_of_its_shards(tmp_path):
    index = write_checkpoint(tmp_path / "c")
    (tmp_path / "c" / INDEX_NAME).write_bytes(b"{")
    info = catalog.read_info(tmp_path / "c")
    assert (info.status, info.leaves) == ("damaged", None)
    assert info.nbytes == sum((tmp_path / "c" / file.name).stat().st_size for file in index.file_list) > 0


def test_a_missing_shard_makes_it_damaged(tmp_path):
    index = write_checkpoint(tmp_path / "step_00000001", step=1)
    (tmp_path / "step_00000001" / index.file_list[2].name).unlink()
    [info] = discovery.scan(tmp_path)
    assert info.status == "damaged"
    assert index.file_list[2].name in (info.error or "")


def test_without_timings_it_is_still_complete(tmp_path):
    index = write_checkpoint(tmp_path / "step_00000001", step=1)
    (tmp_path / "step_00000001" / timings_name(index.save_id)).unlink()
    [info] = discovery.scan(tmp_path)
    assert (info.status, info.seconds) == ("complete", None)


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "empty", "unreadable"])
def test_an_index_that_is_no_file_is_damaged_or_unread_and_never_waited_for(tmp_path, kind):
    write_checkpoint(tmp_path / "step_00000001", step=1)
    index = tmp_path / "step_00000001" / INDEX_NAME
    kept = index.read_bytes()
    index.unlink()
    if kind == "directory":
        index.mkdir()
    elif kind == "link":
        elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")  # a link into the run is followed
        elsewhere.write_bytes(kept)
        index.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(index)
    elif kind == "empty":
        index.touch()
    else:
        index.write_bytes(b"\x00\xff" * 100)
    [info] = [info for info in discovery.scan(tmp_path) if info.step == 1]
    assert info.status == ("unread" if kind == "link" else "damaged")
    assert info.error


def test_an_empty_step_is_partial_and_other_empty_ones_are_foreign(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "other").mkdir()
    assert {i.name: i.status for i in discovery.scan(tmp_path)} == {"step_00000001": "partial", "other": "foreign"}


def test_nothing_there_is_an_empty_run(tmp_path):
    assert discovery.scan(tmp_path / "nowhere") == []


def test_names_that_are_no_unicode_are_no_trouble(tmp_path):
    os.mkdir(os.fsencode(tmp_path) + b"/\xff\xfe")
    [info] = discovery.scan(tmp_path)
    assert info.status == "foreign"


def test_timings_are_of_the_save_that_the_index_names(tmp_path):
    index = write_checkpoint(tmp_path / "a", step=1)
    other = write_checkpoint(tmp_path / "b", step=2)
    shutil.copy(tmp_path / "b" / timings_name(other.save_id), tmp_path / "a")
    assert catalog.read_timings(tmp_path / "a").save_id == index.save_id


def test_timings_that_are_not_there_or_changed_are_errors_of_ours(tmp_path):
    index = write_checkpoint(tmp_path / "a", step=1)
    file = tmp_path / "a" / timings_name(index.save_id)
    file.write_bytes(file.read_bytes().replace(b"write", b"wrote"))
    with pytest.raises(CorruptError):
        catalog.read_timings(tmp_path / "a")
    file.unlink()
    with pytest.raises(CheckpointNotFound):
        catalog.read_timings(tmp_path / "a")


def cached(cache, path, read):
    found = path.stat()
    entry = DirectoryEntry(found.st_size, found.st_mtime_ns, found.st_ino)
    return cache.get_or_read((str(path), "text"), entry, lambda: read(path))


def test_the_cache_reads_again_only_what_changed(tmp_path):
    file = tmp_path / "file"
    file.write_text("one")
    reads = []

    def read(path):
        reads.append(path.read_text())
        return reads[-1]

    cache = LruStatCache()
    assert [cached(cache, file, read), cached(cache, file, read)] == ["one", "one"]
    file.write_text("two!")
    assert cached(cache, file, read) == "two!"
    assert reads == ["one", "two!"]


def test_the_cache_keeps_errors_and_forgets_the_oldest(tmp_path):
    calls = []

    def read(path):
        calls.append(path.name)
        raise TreeckptError(path.name)

    for name in "ab":
        (tmp_path / name).touch()
    cache = LruStatCache(1)
    for name in ("a", "a", "b", "a"):
        with pytest.raises(TreeckptError):
            cached(cache, tmp_path / name, read)
    assert calls == ["a", "b", "a"]


def test_scans_agree_from_many_threads(run):
    cache, found = LruStatCache(), []
    threads = [threading.Thread(target=lambda: found.append(discovery.scan(run, cache=cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(one == found[0] for one in found)


def test_what_ranks_held_counts_every_replica(tmp_path):
    tree = {"w": np.zeros((64, 8), np.float32), "own": PerRank(np.zeros(4, np.float32)), "n": 1}
    halves = MeshLayout(MESH, (Shard(0), Replicate()))
    write_checkpoint(tmp_path / "a", tree, layouts=lambda path, array: halves if path == "w" else None)
    info = catalog.read_info(tmp_path / "a")
    assert info.nbytes == 64 * 8 * 4 + 4 * 16 and info.held_nbytes == 2 * 64 * 8 * 4 + 4 * 16
    assert info.blocked_seconds == info.seconds


def test_a_background_save_records_its_host_and_when_its_call_returned(tmp_path, monkeypatch):
    copy, begun = background.stage, time.perf_counter()

    def slow(*given):
        time.sleep(0.2)
        copy(*given)

    monkeypatch.setattr(background, "stage", slow)
    gate = Gate()
    gate.open.clear()
    pending = treeckpt.save_async(
        GatedRun(tmp_path, gate).folder("a"),
        {"x": np.zeros(100_000)},
        step=1,
        background=treeckpt.BackgroundOptions(writer="thread"),
    )
    took = time.perf_counter() - begun
    time.sleep(0.2)
    gate.open.set()
    report = pending.result(LONG)
    timings = catalog.read_timings(tmp_path / "a")
    assert [(host.name, decode_runs(host.ranks).tolist()) for host in timings.hosts] == [(socket.gethostname(), [0])]
    profile = profile_of(timings)
    for blocked in (profile.blocked_seconds, report.blocked_seconds):
        assert 0.2 <= blocked <= took, "the copy, and at most all of the call"
    assert profile.seconds >= profile.blocked_seconds + 0.2, "the write too"
    assert catalog.read_info(tmp_path / "a").blocked_seconds == profile.blocked_seconds
