"""Large indexes: read once, by another process, while the server answers; and the cache of all that."""

import os
import time

import pytest
from starlette.testclient import TestClient

import treeckpt_dashboard.reading as reading
from tests.large import hold_readers, large_index, write_large_checkpoint
from tests.samples import gpt_state, write_checkpoint, write_run
from treeckpt.core.format.index import INDEX_NAME
from treeckpt.errors import CorruptError
from treeckpt.io.storage.run_store import DirectoryEntry, LocalFolder
from treeckpt_dashboard.app import create_app
from treeckpt_dashboard.cache import Cache, default_directory, key_of
from treeckpt_dashboard.library import Library
from treeckpt_dashboard.tables import build_table

LEAVES = 8_000


@pytest.fixture(autouse=True)
def low_bar(monkeypatch):
    """So that a few thousand leaves are large."""
    monkeypatch.setattr(reading, "LARGE", 200_000)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A run of a checkpoint whose index is read by another process, and a small one."""
    run = tmp_path_factory.mktemp("large") / "run"
    write_large_checkpoint(run / "step_00000002", leaves=LEAVES, step=2)
    write_checkpoint(run / "step_00000001", gpt_state(layers=1), step=1)
    assert (run / "step_00000002" / INDEX_NAME).stat().st_size > 200_000
    return run


def asked(client, path, timeout=300):
    """The answer once it is none of 202, and those before it."""
    before, end = [], time.monotonic() + timeout
    while (answer := client.get(path)).status_code == 202:
        assert time.monotonic() < end
        before.append(answer.json()["loading"])
        time.sleep(0.05)
    return answer, before


def serve(run, cache):
    return TestClient(create_app([run], cache=cache), base_url="http://127.0.0.1:8265")


def test_a_large_index_is_read_by_another_process_while_pages_answer(large, tmp_path, monkeypatch):
    go_on = hold_readers(monkeypatch, tmp_path / "go on")
    client = serve(large, tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert [(c["step"], c["status"]) for c in run["checkpoints"]] == [(2, "reading"), (1, "complete")]
    at = f"checkpoints/{run['checkpoints'][0]['id']}"
    first = client.get(f"/api/v1/{at}/tree")
    assert first.status_code == 202 and first.headers["retry-after"] == "1"
    shell = client.get(f"/{at}")
    assert shell.status_code == 200 and "Still loading" in shell.text and "progressbar" not in shell.text
    assert client.get(f"/checkpoints/{run['checkpoints'][1]['id']}").status_code == 200
    go_on()
    answer, more = asked(client, f"/api/v1/{at}/tree")
    assert answer.json()["node"]["leaves"] == LEAVES
    phases = {told["phase"] for told in [first.json()["loading"], *more]}
    assert phases and phases <= {"wait", "start", "read", "write"}
    page = client.get(f"/{at}")
    assert "Still loading" not in page.text and "optimizer" in page.text
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert [c["status"] for c in run["checkpoints"]] == ["complete"] * 2 and run["checkpoints"][0]["leaves"] == LEAVES

    again = serve(large, tmp_path)  # another server, the same cache
    assert again.get(f"/api/v1/{at}/tree").status_code == 200
    os.utime(large / "step_00000002" / INDEX_NAME)  # another file, for all that is known
    assert again.get(f"/api/v1/{at}/tree").status_code == 202
    asked(again, f"/api/v1/{at}/tree")


def test_a_large_index_that_is_damaged_says_so(tmp_path):
    write_large_checkpoint(tmp_path / "run" / "step_00000001", leaves=LEAVES)
    file = tmp_path / "run" / "step_00000001" / INDEX_NAME
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    client = serve(tmp_path / "run", tmp_path / "cache")
    [run] = client.get("/api/v1/runs").json()["runs"]
    answer, _ = asked(client, f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}")
    found = answer.json()["checkpoint"]
    assert found["status"] == "corrupt" and "changed after it was written" in found["error"]
    assert list((tmp_path / "cache").glob("**/*.sqlite")) == []


def test_a_reader_that_is_killed_makes_an_error_not_a_server_that_hangs(large, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PATIENCE", 0.01)
    client = serve(large, tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    answer, _ = asked(client, f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}")
    assert "was killed" in answer.json()["checkpoint"]["error"]


def test_an_index_past_the_cap_is_not_read(large, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_INDEX", 300_000)
    client = serve(large, tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    found = client.get(f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}").json()["checkpoint"]
    assert found["status"] == "corrupt" and "at most" in found["error"]


# the cache -----------------------------------------------------------------------------------------------------------


def test_a_second_start_reads_no_index_again(tmp_path, monkeypatch):
    write_run(tmp_path / "run", steps=(1, 2))
    cache = Cache(tmp_path / "cache")
    library = Library([tmp_path / "run"], cache=cache)
    before = [info for _, info in library.checkpoints(library.runs[0])]
    library.close()

    monkeypatch.setattr("treeckpt.io.storage.metadata_files.read_index", lambda store: pytest.fail("read again"))
    monkeypatch.setattr(
        "treeckpt.io.storage.metadata_files.read_timings", lambda store, save: pytest.fail("read again")
    )
    library = Library([tmp_path / "run"], cache=Cache(tmp_path / "cache"))
    assert [info for _, info in library.checkpoints(library.runs[0])] == before and len(before) == 2


@pytest.mark.parametrize("name", ["summaries.db", "*.sqlite"])
def test_a_damaged_cache_is_made_again(tmp_path, name):
    write_run(tmp_path / "run", steps=(1,))
    first = serve(tmp_path / "run", tmp_path / "cache")
    with first:
        [run] = first.get("/api/v1/runs").json()["runs"]
        at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}/tree"
        wanted = first.get(at).json()
    [file] = (tmp_path / "cache").glob(f"*/{name}")
    file.write_bytes(b"garbage" * 5000)
    second = serve(tmp_path / "run", tmp_path / "cache")
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
    client = serve(tmp_path / "run", tmp_path / "cache")
    [run] = client.get("/api/v1/runs").json()["runs"]
    for row in run["checkpoints"]:
        for page in ("", "/files", "/timing", "/leaves/0"):
            assert client.get(f"/checkpoints/{row['id']}{page}").status_code == 200
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


def test_the_least_used_tables_go_first(tmp_path):
    cache, index = Cache(tmp_path, limit=1), large_index(4)
    for n, key in enumerate("abc"):
        build_table(index, cache.table(key))
        os.utime(cache.table(key), (n, n))
    one = (cache.directory / "a.sqlite").stat().st_size
    for n, key in enumerate("abc"):
        os.utime(cache.directory / f"{key}.sqlite", (n, n))
    Cache(tmp_path, limit=one * 2).tidy()
    assert sorted(p.name for p in cache.directory.glob("*.sqlite")) == ["b.sqlite", "c.sqlite"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("TREECKPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert default_directory() == tmp_path / "treeckpt"


def test_another_file_has_another_key():
    entries = [DirectoryEntry(1, 2, 3), DirectoryEntry(2, 2, 3), DirectoryEntry(1, 3, 3), DirectoryEntry(1, 2, 4)]
    assert len({key_of(url, entry) for url in ("a", "b") for entry in entries}) == 8


def test_what_the_other_process_cannot_read_is_told(tmp_path, capfd):
    assert reading.main(["", str(tmp_path / "nothing"), str(tmp_path / "t")]) == 0
    assert '"error"' in capfd.readouterr().out and not (tmp_path / "t").exists()
    folder = LocalFolder(tmp_path)
    with pytest.raises(CorruptError, match="at most"):
        reading.TableReader(Cache(tmp_path / "cache")).outline("", folder, DirectoryEntry(1 << 40, 0))
