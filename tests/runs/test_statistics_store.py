"""Statistics are kept by save and place, within a limit; a damaged file is none."""

import contextlib
import os
import resource
import signal
import time

from tests.helpers.samples import write_checkpoint
from treeckpt._inspect.numbers import Moments
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._runs.statistics_store import StatisticsStore
from treeckpt._runs.verification import DamagedPart, VerificationStore, found_part


def test_what_is_kept_comes_back_and_a_damaged_file_is_none(tmp_path):
    index = write_checkpoint(tmp_path / "step_00000001", step=1)
    store = StatisticsStore(tmp_path / "cache")
    url, one = str(tmp_path / "step_00000001"), Moments(3, 1, 0, -1.0, 2.0, 0.5, 1.5, 2.5)
    assert store.find(url, index.save_id) is None
    assert store.record(url, index, "print", 5, {0: one, 2: Moments()})
    found = store.find(url, index.save_id)
    assert (found.head.fingerprint, found.head.rows) == ("print", 2)
    assert found.row(found.row_of(index.entries[0].path)) == one and found.row_of("nothing") is None
    wide = Moments(2, 0, 0, -(2**63), 2**63 - 1, 0.5, 1.5, 2.5)
    assert store.record(url, index, "print", 5, {0: wide, 1: one})
    rows = store.find(url, index.save_id)
    assert (rows.row(0), rows.row(1)) == (wide, one) and type(rows.row(0).low) is int and type(rows.row(1).low) is float
    assert found.row(1) == Moments() and found.ranking.order.tolist() == [0, 1]
    assert store.find(url, "0" * 16) is None and store.find(str(tmp_path), index.save_id) is None
    [path] = store.directory.iterdir()
    path.write_bytes(path.read_bytes()[:-8])
    assert store.find(url, index.save_id) is None
    assert store.record(url, index, "print", 5, {}) and store.find(url, index.save_id).head.rows == 0


def test_the_oldest_files_go_beyond_the_limit(tmp_path):
    index = write_checkpoint(tmp_path / "step_00000001", step=1)
    store = StatisticsStore(tmp_path / "cache", limit=500)
    for name in "abc":
        assert store.record(f"/{name}", index, "print", 5, {0: Moments(1)})
    assert store.find("/c", index.save_id) is not None and store.find("/a", index.save_id) is None


def test_what_was_just_written_is_the_newest_whatever_the_times_of_files_say(tmp_path):
    """Several files are written within one tick of a file system's clock, and clocks are set back."""
    index = write_checkpoint(tmp_path / "step_00000001", step=1)
    store = StatisticsStore(tmp_path / "cache", limit=300)
    assert store.record("/a", index, "print", 5, {0: Moments(1)})
    [file] = store.directory.iterdir()
    os.utime(file, (time.time() + 9999,) * 2)
    assert store.record("/b", index, "print", 5, {0: Moments(1)})
    assert store.find("/b", index.save_id) is not None and store.find("/a", index.save_id) is None


@contextlib.contextmanager
def no_file_may_grow():
    """Every write to a file fails, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_could_not_be_written_leaves_no_file_in_the_cache(tmp_path):
    index = write_checkpoint(tmp_path / "step_00000001", step=1)
    statistics, verifications = StatisticsStore(tmp_path / "cache"), VerificationStore(tmp_path / "cache")
    folder = LocalStore(tmp_path / "step_00000001")
    found = found_part(index.save_id, "", [DamagedPart("rank_00000.bin", "changed bytes")], by="a test")
    with no_file_may_grow():
        assert not statistics.record("/a", index, "print", 5, {0: Moments(1)})
        [failed] = verifications.record(folder, found, beside=False)
    assert "could not be written to the cache" in failed
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    assert statistics.record("/a", index, "print", 5, {0: Moments(1)}) and statistics.find("/a", index.save_id)
    assert verifications.record(folder, found, beside=False) == []
