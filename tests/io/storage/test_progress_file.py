"""The record of a save under way: there while it lasts, gone after it, and never in anybody's way."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import Hooked, session, until, writer_pid
from tests.helpers.world import LONG
from treeckpt._core.format.files import Progress, encode_progress, parse_progress_name, progress_name
from treeckpt._core.format.shard_header import parse_shard_name
from treeckpt._io.comm.comm import SoloComm
from treeckpt._io.storage import kept_files
from treeckpt._io.storage.kept_files import read_progress
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.store import MemoryStore
from treeckpt._runs import discovery


class Slow(tc.LocalStore):
    """Takes its time over every block, in whatever process: over the first one so long that the record is renewed.

    Args:
        seen: where a file stands for each number of written bytes that a watcher has seen. The first block waits for
            one of them, and all others for two.
    """

    def __init__(self, directory: Path, seen: Path | None = None) -> None:
        super().__init__(directory)
        self.seen = seen

    def create(self, name: str, nbytes: int) -> Any:
        inner, numbers = super().create(name, nbytes), itertools.count(1)
        write = inner.write

        def slowly(offset: int, data: memoryview) -> None:
            number = next(numbers)
            if self.seen is not None:
                assert until(lambda: len(os.listdir(self.seen)) >= min(number, 2), LONG)
            threading.Event().wait(kept_files.FIRST_RENEWAL_SECONDS + 0.1 if number == 1 else 0.3)
            write(offset, data)

        inner.write = slowly  # pyright: ignore
        return inner

    def __reduce__(self) -> Any:
        return Slow, (self.directory, self.seen)


class Stuck(tc.LocalStore):
    """Writes no block, in whatever process."""

    def create(self, name: str, nbytes: int) -> Any:
        inner = super().create(name, nbytes)
        inner.write = lambda *_: threading.Event().wait(10 * LONG)  # pyright: ignore
        return inner

    def __reduce__(self) -> Any:
        return Stuck, (self.directory,)


def records_in(path: Path) -> list[Progress]:
    store = LocalStore(path)
    return read_progress(store, store.sizes())


def watch(path: Path, pending: Any, noted: Path) -> list[Progress]:
    seen: list[Progress] = []
    while not pending():
        for record in records_in(path):
            if not seen or record != seen[-1]:
                seen.append(record)
                (noted / f"{record.written}").touch()
        time.sleep(0.005)
    return seen


def check(seen: list[Progress], nbytes: int, path: Path) -> None:
    assert len(seen) >= 2, seen
    written = [record.written for record in seen]
    assert written == sorted(written) and 0 <= written[0] < written[-1] <= nbytes
    assert all(r.rank == 0 and r.world == 1 and r.step == 7 and r.planned == nbytes for r in seen)
    assert {r.save_id for r in seen} == {tc.inspect(path).save_id}
    assert not [name for name in os.listdir(path) if parse_progress_name(name) or name.endswith(".tmp")]


TREE = {"w": np.zeros((60, 1 << 20), np.uint8)}


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """Where a watcher notes what it has seen."""
    (tmp_path / "noted").mkdir()
    return tmp_path / "noted"


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_a_save_in_the_background_shows_how_far_it_is(tmp_path: Path, noted: Path, writer: Any) -> None:
    comm, path = SoloComm(), tmp_path / "c"
    pending = tc.save_async(Slow(path, noted), TREE, comm=comm, background=tc.BackgroundOptions(writer=writer), step=7)
    check(watch(path, pending.done, noted), 60 << 20, path)
    pending.result(60)
    session(comm).writer.end()


def test_a_save_in_the_callers_thread_does_too(tmp_path: Path, noted: Path) -> None:
    path = tmp_path / "c"
    thread = threading.Thread(target=lambda: tc.save(Slow(path, noted), TREE, step=7), daemon=True)
    thread.start()
    check(watch(path, lambda: not thread.is_alive(), noted), 60 << 20, path)


def test_a_quick_save_leaves_no_trace_of_one(tmp_path: Path) -> None:
    noted: list[str] = []

    class Noting(MemoryStore):
        def publish(self, name: str, data: bytes, **options: Any) -> None:
            noted.append(name)
            super().publish(name, data, **options)

    tc.save(Noting(), {"w": np.ones(10)})
    assert noted and not any(map(parse_progress_name, noted))


@pytest.mark.parametrize("first", [True, False], ids=["the first record", "a later one"])
def test_a_save_whose_record_cannot_be_written_fails_before_all_else_or_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    called: list[str] = []
    real = kept_files.replace_file

    def refuse(store: Any, name: str, data: bytes) -> None:
        called.append(name)
        if first or len(called) > 1:
            raise PermissionError(name)
        real(store, name, data)

    monkeypatch.setattr(kept_files, "replace_file", refuse)
    if first:
        with pytest.raises(tc.CheckpointError, match="PermissionError"):
            tc.save(Slow(tmp_path), TREE)
        assert not os.listdir(tmp_path)
    else:
        tc.save(Slow(tmp_path), TREE)
        assert len(called) > 1 and tc.verify(tmp_path).ok


def test_the_record_of_a_killed_writer_goes_with_its_save(tmp_path: Path) -> None:
    comm = SoloComm()
    pending = tc.save_async(Stuck(tmp_path), TREE, comm=comm)
    assert until(lambda: bool(records_in(tmp_path)))
    os.kill(writer_pid(comm), 9)
    with pytest.raises(tc.CheckpointError, match="SIGKILL"):
        pending.result(60)
    assert not [name for name in os.listdir(tmp_path) if parse_progress_name(name) or parse_shard_name(name)]


def left_over(path: Path, save_id: str = "0123456789abcdef") -> str:
    name = progress_name(3, save_id)
    kept_files.replace_file(
        LocalStore(path), name, encode_progress(Progress(save_id, 3, 8, None, "write", 5, 10, 1, 2))
    )
    return name


def test_what_a_killed_save_left_is_harmless(tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = run / "step_00000001"
    tc.save(path, {"n": 1})
    name = left_over(path)
    assert tc.verify(path).ok and tc.load(path) == {"n": 1}
    assert [info.status for info in discovery.scan(run)] == ["complete"]
    assert [(r.rank, r.fraction) for r in records_in(path)] == [(3, 0.5)]
    (path / "index.json").unlink()
    assert tc.rebuild_index(path).save_id and name in os.listdir(path)


def test_a_directory_with_nothing_else_is_a_save_that_never_finished(tmp_path: Path) -> None:
    (tmp_path / "run" / "other").mkdir(parents=True)
    left_over(tmp_path / "run" / "other")
    assert [info.status for info in discovery.scan(tmp_path / "run")] == ["stalled"]


def test_overwriting_removes_the_old_saves_record(tmp_path: Path) -> None:
    first = tc.save(tmp_path, {"n": 1})
    old, foreign = left_over(tmp_path, first.save_id), left_over(tmp_path, "f" * 16)
    tc.save(tmp_path, {"n": 2}, overwrite=True)
    assert old not in os.listdir(tmp_path) and foreign in os.listdir(tmp_path)


def test_what_is_no_record_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / progress_name(0, "0" * 16)).write_bytes(b"{}")
    (tmp_path / progress_name(1, "1" * 16)).mkdir()
    record = encode_progress(Progress("2" * 16, 0, 1, None, "write", 0, 1, 1, 1))
    (tmp_path / progress_name(1, "3" * 16)).write_bytes(record)
    assert records_in(tmp_path) == [] == records_in(tmp_path / "none")


def test_a_hooked_store_travels() -> None:
    import pickle

    store = Hooked(Path("/tmp/x"), Path("/tmp/y"), 3, "kill", after=True)
    assert pickle.loads(pickle.dumps(store)).__dict__.keys() == store.__dict__.keys()


def test_a_record_whose_deletion_fails_for_a_moment_is_gone(tmp_path: Path) -> None:
    class Failing(tc.LocalStore):
        def delete(self, name: str) -> None:
            if name.startswith("progress") and not failed:
                failed.append(name)
                raise OSError(errno.EIO, "for a moment")
            super().delete(name)

    failed: list[str] = []
    tc.save(Failing(tmp_path), {"n": 1})
    assert until(lambda: not any(name.startswith("progress") for name in os.listdir(tmp_path)))
    assert failed
