"""The page of saves in progress."""

import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.dashboard.helpers import SAVE, page, under_way
from tests.helpers.large import write_many
from treeckpt.core.format.save_progress import Progress, encode_progress, progress_name
from treeckpt.io.storage.process_owner import this_process
from treeckpt_dashboard.runs.live import SaveRates, live_page
from treeckpt_dashboard.store.library import Library


def test_a_save_under_way_is_live_with_rate_eta_and_what_it_waits_for(serve, tmp_path):
    write_many(tmp_path / "run", 1)
    under_way(tmp_path / "run" / "step_00000007", [(500, "write"), (1000, "commit"), (1000, "commit"), (500, "write")])
    client = serve(tmp_path / "run")
    [save] = client.get("/api/v1/live").json()["saves"]
    assert (save["step"], save["ranks"], save["done"], save["phase"]) == (7, 4, 2, "write")
    assert client.get("/api/v1/live").json()["saving"] == 1 and 'class="count">1<' in client.get("/live").text
    assert (save["written"], save["planned"], save["share"], save["stalled"]) == (3000, 4000, 0.75, False)
    assert save["rate"] == pytest.approx(300) and save["eta"] == pytest.approx(1000 / 300)
    assert "2 of 4 ranks wait for 0, 3" in save["stuck"]
    assert [rank["rank"] for rank in save["slowest"]] == [0, 3, 1, 2]
    html = client.get("/live").text
    assert "2 of 4 ranks wait for 0, 3" in html and "step 7" in html
    [row] = page(client, "?status=saving").json()["run"]["checkpoints"]
    assert (row["status"], row["saved"], row["phase"]) == ("saving", 0.75, "write")
    home = client.get("/").text
    assert 'data-busy="1"' in home and "being written" in home


def test_a_save_that_was_killed_is_not_shown_as_being_written(serve, tmp_path):
    [complete] = write_many(tmp_path / "run", 1).iterdir()
    under_way(complete, [(500, "write")], world=1)
    under_way(tmp_path / "run" / "step_00000007", [(500, "write")], world=1)
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = int(Path(f"/proc/{killed.pid}/stat").read_text().rpartition(")")[2].split()[19])
    owner = msgspec.structs.replace(this_process(), pid=killed.pid, started=started)
    for directory in (complete, tmp_path / "run" / "step_00000007"):
        record = Progress(SAVE, 0, 1, 7, "write", 500, 1000, time.time_ns(), time.time_ns(), owner=owner)
        (directory / progress_name(0, SAVE)).write_bytes(encode_progress(record))
    client = serve(tmp_path / "run")
    seen = page(client).json()["run"]
    assert seen["saving"] == 2 and [row["saved"] for row in seen["checkpoints"]] == [0.5, 0.5]
    killed.kill()
    killed.wait()
    client = serve(tmp_path / "run")
    seen = page(client, "?keep=last:1").json()["run"]
    assert seen["saving"] == 0 and seen["statuses"] == {"complete": 1, "partial": 1}
    assert [(row["saved"], row["phase"]) for row in seen["checkpoints"]] == [(None, None)] * 2
    assert "being written" not in client.get("/").text
    live = client.get("/live").text
    assert live.count("It was killed") == 2 and 'class="count"' not in live
    assert client.get("/api/v1/live").json()["saving"] == 0
    metrics = client.get("/metrics").text
    assert "saves_under_way{" in metrics and not re.search(r"saves_under_way\{[^}]*\} [1-9]", metrics)


def test_a_save_that_fell_silent_is_said_to_hang(tmp_path):
    under_way(tmp_path / "run" / "step_00000007", [(500, "write"), (1000, "commit")], now=time.time_ns() - 10**12)
    [save] = live_page(Library([tmp_path / "run"]), SaveRates(), 0, now_ns=time.time_ns()).saves
    assert save.stalled and save.eta is None and "ranks 0 in writing" in save.stuck and save.quiet > 900


def test_a_rate_is_of_the_last_seconds(tmp_path):
    library, speeds = Library([tmp_path / "run"]), SaveRates()
    [run] = library.runs
    now = time.time_ns()
    rates = []
    for second, written in enumerate((100, 1100, 2100)):
        under_way(tmp_path / "run" / "step_00000007", [(written, "write")], planned=9000, now=now + second * 10**9)
        info = library.inspect_directory(run, run.store.folder("step_00000007")).info
        rates.append(speeds.rate(info.saving[0]))
    assert rates == [pytest.approx(10), pytest.approx(1000), pytest.approx(1000)]


def test_when_all_is_written_the_coordinator_is_waited_for(tmp_path):
    under_way(tmp_path / "run" / "step_00000007", [(1000, "commit")] * 4)
    [save] = live_page(Library([tmp_path / "run"]), SaveRates(), 0, now_ns=time.time_ns()).saves
    assert "coordinator" in save.stuck and save.eta is None and save.done == 4


def test_a_real_save_under_way_shows(serve, tmp_path):
    """The records are those that the library's own writer keeps."""
    from treeckpt.io.storage.progress_file import ProgressRecorder
    from treeckpt.io.storage.store import LocalStore

    store = LocalStore(tmp_path / "run" / "step_00000009")
    store.prepare()
    first = Progress(SAVE, 0, 1, 9, "write", 0, 1 << 20, time.time_ns(), time.time_ns())
    note = ProgressRecorder(store, first)
    note.started -= 10
    note.renewed -= 10
    note.add(1 << 19)
    [save] = serve(tmp_path / "run").get("/api/v1/live").json()["saves"]
    assert save["written"] == 1 << 19 and save["step"] == 9
    note.end()
    assert serve(tmp_path / "run").get("/api/v1/live").json()["saves"] == []
