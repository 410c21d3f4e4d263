"""The cache directory: damaged, not writable, too large, never inside a run."""

import os
from collections import defaultdict

import numpy as np
import pytest

import treeckpt as tc
from tests.dashboard.helpers import client_of
from tests.helpers.large import large_index
from tests.helpers.memory_run import MemoryRun
from tests.helpers.samples import write_run
from treeckpt._io.storage.store import DirectoryEntry
from treeckpt._runs.verification import cache_directory
from treeckpt_dashboard.store import index_reader
from treeckpt_dashboard.store.cache import Cache, key_of
from treeckpt_dashboard.store.library import Library
from treeckpt_dashboard.store.outline_file import write_outline
from treeckpt_dashboard.web.app import create_app

pytestmark = pytest.mark.usefixtures("low_bar")


@pytest.mark.parametrize("name", ["summaries.db", "*.outline"])
def test_a_damaged_cache_is_made_again(tmp_path, name):
    write_run(tmp_path / "run", steps=(1,))
    first = client_of(tmp_path / "run", tmp_path / "cache")
    with first:
        [run] = first.get("/api/v1/runs").json()["runs"]
        at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}/tree"
        wanted = first.get(at).json()
    [file] = (tmp_path / "cache").glob(f"*/{name}")
    file.write_bytes(b"garbage" * 5000)
    second = client_of(tmp_path / "run", tmp_path / "cache")
    assert second.get("/api/v1/runs").json()["runs"][0]["checkpoints"][0]["status"] == "complete"
    assert second.get(at).json() == wanted


def test_a_cache_that_cannot_be_written_is_made_elsewhere(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    assert cache.directory.is_dir() and tmp_path not in cache.directory.parents


def test_the_cache_is_never_inside_a_run(tmp_path):
    with pytest.raises(ValueError, match="inside the run"):
        create_app([tmp_path], cache=tmp_path / "cache")


def test_a_run_is_never_written_to(tmp_path):
    write_run(tmp_path / "run", steps=(1, 2))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    client = client_of(tmp_path / "run", tmp_path / "cache")
    [run] = client.get("/api/v1/runs").json()["runs"]
    for row in run["checkpoints"]:
        for page in ("", "/files", "/timing", "/leaves/0"):
            assert client.get(f"/checkpoints/{row['id']}{page}").status_code == 200
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


def test_the_least_used_tables_go_first(tmp_path):
    cache, index = Cache(tmp_path, limit=1), large_index(4)
    for n, key in enumerate("abc"):
        write_outline(index, cache.outline_path(key))
        os.utime(cache.outline_path(key), (n, n))
    one = (cache.directory / "a.outline").stat().st_size
    for n, key in enumerate("abc"):
        os.utime(cache.directory / f"{key}.outline", (n, n))
    Cache(tmp_path, limit=one * 2).tidy()
    assert sorted(p.name for p in cache.directory.glob("*.outline")) == ["b.outline", "c.outline"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("TREECKPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_directory() == tmp_path / "treeckpt"


def test_another_file_has_another_key():
    entries = [DirectoryEntry(1, 2, 3), DirectoryEntry(2, 2, 3), DirectoryEntry(1, 3, 3), DirectoryEntry(1, 2, 4)]
    assert len({key_of(url, entry) for url in ("a", "b") for entry in entries}) == 8


class _TimelessRun(MemoryRun):
    """A run whose store knows neither modification times nor other numbers of its files."""

    def folder(self, name):
        folder = super().folder(name)
        folder.times = defaultdict(int, dict.fromkeys(folder.times, 0))
        return folder


@pytest.mark.parametrize("low", [False, True], ids=["small index", "large index"])
def test_of_a_store_that_knows_no_times_nothing_is_kept_that_a_save_has_replaced(tmp_path, monkeypatch, low):
    """Both saves have files of the same sizes: only what is in them tells them apart."""
    monkeypatch.setattr(index_reader, "LARGE_INDEX_NBYTES", 1 if low else 1 << 20)
    run = _TimelessRun()
    library = Library([run], cache=Cache(tmp_path))
    for name, step in (("a", 1), ("b", 2)):
        tc.save(run.folder("step_00000001"), {name: np.arange(4)}, step=step, overwrite=True)
        assert {entry.modified_ns for entry in run.folder("step_00000001").entries().values()} == {0}
        [(checkpoint_id, _)] = library.checkpoints(library.runs[0], wait=300)
        found = library.checkpoint(checkpoint_id)
        assert found.info.step == step
        assert [leaf.path for leaf in library.outline(found).index.entries] == [name]
