"""Large indexes are read once, by another process, while the server answers."""

import os
import time

import pytest
import torch

from tests.dashboard.helpers import client_of, get_when_read
from tests.helpers.background import no_threads
from tests.helpers.large import hold_readers, write_large_checkpoint
from tests.helpers.samples import gpt_state, write_checkpoint, write_run
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.storage import checkpoint
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.store import DirectoryEntry
from treeckpt.errors import CorruptError, StoreError
from treeckpt_dashboard.store import index_reader, jobs
from treeckpt_dashboard.store.cache import Cache
from treeckpt_dashboard.store.library import Library

pytestmark = pytest.mark.usefixtures("low_bar")
LEAVES = 8_000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A run of a checkpoint whose index is read by another process, and a small one."""
    run = tmp_path_factory.mktemp("large") / "run"
    write_large_checkpoint(run / "step_00000002", leaves=LEAVES, step=2)
    write_checkpoint(run / "step_00000001", gpt_state(layers=1), step=1)
    assert (run / "step_00000002" / INDEX_NAME).stat().st_size > 200_000
    return run


def test_a_large_index_is_read_by_another_process_while_pages_answer(large, tmp_path, monkeypatch):
    go_on = hold_readers(monkeypatch, tmp_path / "go on")
    client = client_of(large, tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert [(c["step"], c["status"]) for c in run["checkpoints"]] == [(2, "reading"), (1, "complete")]
    at = f"checkpoints/{run['checkpoints'][0]['id']}"
    first = client.get(f"/api/v1/{at}/tree")
    assert first.status_code == 202 and first.headers["retry-after"] == "1"
    shell = client.get(f"/{at}")
    assert shell.status_code == 200 and "Still loading" in shell.text and "progressbar" not in shell.text
    assert client.get(f"/checkpoints/{run['checkpoints'][1]['id']}").status_code == 200
    go_on()
    answer, more = get_when_read(client, f"/api/v1/{at}/tree")
    assert answer.json()["node"]["leaves"] == LEAVES
    phases = {told["phase"] for told in [first.json()["loading"], *more]}
    assert phases and phases <= {"wait", "start", "read", "write"}
    page = client.get(f"/{at}")
    assert "Still loading" not in page.text and "optimizer" in page.text
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert [c["status"] for c in run["checkpoints"]] == ["complete"] * 2 and run["checkpoints"][0]["leaves"] == LEAVES

    again = client_of(large, tmp_path)  # another server, the same cache
    assert again.get(f"/api/v1/{at}/tree").status_code == 200
    os.utime(large / "step_00000002" / INDEX_NAME)  # another file, for all that is known
    assert again.get(f"/api/v1/{at}/tree").status_code == 202
    get_when_read(again, f"/api/v1/{at}/tree")


def test_a_large_index_that_is_damaged_says_so(tmp_path):
    write_large_checkpoint(tmp_path / "run" / "step_00000001", leaves=LEAVES)
    file = tmp_path / "run" / "step_00000001" / INDEX_NAME
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    client = client_of(tmp_path / "run", tmp_path / "cache")
    [run] = client.get("/api/v1/runs").json()["runs"]
    answer, _ = get_when_read(client, f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}")
    found = answer.json()["checkpoint"]
    assert found["status"] == "damaged" and "expected seal" in found["error"]
    assert list((tmp_path / "cache").glob("**/*.outline")) == []


def test_a_reader_that_is_killed_makes_an_error_not_a_server_that_hangs(large, tmp_path, monkeypatch):
    monkeypatch.setattr(index_reader, "TIMEOUT", 0.01)
    hold_readers(monkeypatch, tmp_path / "never")
    client = client_of(large, tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    answer, _ = get_when_read(client, f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}")
    assert "was killed" in answer.json()["checkpoint"]["error"]


def test_an_index_past_the_cap_is_not_read(large, tmp_path, monkeypatch):
    monkeypatch.setattr(index_reader, "MAX_INDEX", 300_000)
    client = client_of(large, tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    found = client.get(f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}").json()["checkpoint"]
    assert found["status"] == "damaged" and "at most" in found["error"]


def test_a_second_start_reads_no_index_again(tmp_path, monkeypatch):
    write_run(tmp_path / "run", steps=(1, 2))
    cache = Cache(tmp_path / "cache")
    library = Library([tmp_path / "run"], cache=cache)
    before = [info for _, info in library.checkpoints(library.runs[0])]
    library.close()

    monkeypatch.setattr("treeckpt._io.storage.checkpoint.read_index", lambda store: pytest.fail("read again"))
    monkeypatch.setattr("treeckpt._io.storage.checkpoint.read_timings", lambda store, save: pytest.fail("read again"))
    library = Library([tmp_path / "run"], cache=Cache(tmp_path / "cache"))
    assert [info for _, info in library.checkpoints(library.runs[0])] == before and len(before) == 2


def test_what_the_other_process_cannot_read_is_told(tmp_path, capfd):
    assert jobs.run_main(index_reader.main, ["", str(tmp_path / "nothing"), str(tmp_path / "t")]) == 0
    assert '"error"' in capfd.readouterr().out and not (tmp_path / "t").exists()
    folder = LocalStore(tmp_path)
    with pytest.raises(CorruptError, match="at most"):
        index_reader.IndexReader(Cache(tmp_path / "cache")).outline("", folder, DirectoryEntry(1 << 40, 0))


def test_an_index_that_could_not_be_read_is_tried_again_and_not_called_damaged(tmp_path, monkeypatch):
    write_run(tmp_path / "run", steps=(1,))
    refused = [StoreError("index.json", found="Too many open files")]

    def read(store):
        if refused:
            raise refused[0]
        return read_index(store)

    read_index = checkpoint.read_index
    monkeypatch.setattr(checkpoint, "read_index", read)
    reader, folder = index_reader.IndexReader(Cache(tmp_path / "cache")), LocalStore(tmp_path / "run/step_00000001")
    entry = folder.entries()[INDEX_NAME]
    monkeypatch.setattr(index_reader, "RETRY", 0.5)
    with pytest.raises(StoreError, match="Too many open files"):
        reader.outline("", folder, entry)
    refused.clear()
    time.sleep(0.6)
    assert reader.outline("", folder, entry).index.step == 1


def test_a_want_of_memory_says_nothing_of_the_checkpoint(tmp_path, monkeypatch):
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")
    reader = index_reader.IndexReader(Cache(tmp_path / "cache"))
    version = DirectoryEntry(1, 0)
    with monkeypatch.context() as patch:
        want = "import treeckpt_dashboard.store.index_reader as r\ndef fail(*_): raise MemoryError\n"
        want += "r.limit_resources = fail\n"
        patch.setattr(jobs, "PROGRAM", jobs.PROGRAM.replace("sys.exit(", want + "sys.exit("))
        patch.setattr(index_reader, "REQUEST_WAIT_SECONDS", 300.0)
        with pytest.raises(StoreError, match="of memory"):
            reader.foreign_outline(str(tmp_path / "x.pt"), version)
    [(error, until)] = reader._failed.values()
    assert type(error) is StoreError and until < time.monotonic() + 2 * index_reader.RETRY, "it is tried again"


def test_where_no_thread_can_be_started_a_page_says_so_and_the_next_request_tries_again(tmp_path):
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")
    reader, version = index_reader.IndexReader(Cache(tmp_path / "cache")), DirectoryEntry(1, 0)
    with no_threads(), pytest.raises(StoreError, match="no thread could be started"):
        reader.foreign_outline(str(tmp_path / "x.pt"), version)
    job = index_reader._ReadJob(reader, "key", ["", str(tmp_path / "x.pt")], tmp_path / "table")
    with no_threads():
        job.finish()
    [(error, _)] = reader._failed.values()
    assert type(error) is StoreError, "neither for the timer"
