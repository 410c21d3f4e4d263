"""The page of saves in progress."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.dashboard.helpers import SAVE, page, under_way
from tests.helpers.large import write_many
from treeckpt._core.format.files import Progress, encode_progress, progress_name
from treeckpt._io.process import this_process
from treeckpt_dashboard.runs import live
from treeckpt_dashboard.runs.live import SaveRates, live_page
from treeckpt_dashboard.store import watch
from treeckpt_dashboard.store.library import Library


def test_a_save_under_way_is_live_with_rate_eta_and_what_it_waits_for(serve, tmp_path, monkeypatch):
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)  # the rate falls with time that passes without news
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
    [row] = page(client, "?status=in_progress").json()["run"]["checkpoints"]
    assert (row["status"], row["saved"], row["phase"]) == ("in_progress", 0.75, "write")
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
    text = client.get("/live").text
    assert text.count("It was killed") == 2 and 'class="count"' not in text
    assert client.get("/api/v1/live").json()["saving"] == 0
    metrics = client.get("/metrics").text
    assert "saves_under_way{" in metrics and not re.search(r"saves_under_way\{[^}]*\} [1-9]", metrics)


def test_a_save_that_fell_silent_is_said_to_hang(tmp_path):
    under_way(tmp_path / "run" / "step_00000007", [(500, "write"), (1000, "commit")], now=time.time_ns() - 10**12)
    [save] = live_page(Library([tmp_path / "run"]), SaveRates(), 0, now_ns=time.time_ns()).saves
    assert save.stalled and save.eta is None and "ranks 0 in writing" in save.stuck and save.quiet > 900


def test_every_page_says_the_same_of_a_save_that_fell_silent(serve, tmp_path):
    write_many(tmp_path / "run", 1)
    directory = tmp_path / "run" / "step_00000007"
    under_way(directory, [(500, "write"), (1000, "commit")], world=2, now=time.time_ns() - 360 * 10**9)
    client = serve(tmp_path / "run")
    found = page(client).json()["run"]
    assert (found["saving"], found["stalled"]) == (0, 1) and found["statuses"] == {"complete": 1, "stalled": 1}
    [row] = [row for row in found["checkpoints"] if row["status"] == "stalled"]
    assert row["stalled"] and row["saved"] == 0.75 and "hangs or was killed" in row["waits_for"]
    assert client.get("/api/v1/live").json()["saving"] == 0
    saves, one = client.get("/live").text, client.get(f"/checkpoints/{row['id']}").text
    home, run = client.get("/").text, client.get(f"/runs/{found['id']}").text
    for html in (saves, one, home, run):
        assert "being written" not in html and "stalled" in html
    for html in (saves, home, run):
        assert 'data-busy="1"' not in html, "it is not busy"
    assert "This is no checkpoint" not in one and "hangs or was killed" in one and "75 %" in one
    metrics = client.get("/metrics").text
    assert "saves_under_way" in metrics and re.search(r"saves_stalled\{[^}]*\} 1", metrics)
    assert 'status="stalled"} 1' in metrics and 'status="in_progress"} 0' in metrics


def test_a_dead_save_hides_none_that_lives(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "FRESH", 0.0)  # each request looks again
    write_many(tmp_path / "run", 3)
    under_way(tmp_path / "run" / "step_00000007", [(500, "write")], world=1, now=time.time_ns() - 10**12)
    client = serve(tmp_path / "run")

    def seen():
        return [(int(save["name"][-1]), save["state"]) for save in client.get("/api/v1/live").json()["saves"]]

    assert seen() == [(7, "stalled")]
    under_way(tmp_path / "run" / "step_00000009", [(500, "write")], world=1)
    under_way(tmp_path / "run" / "step_00000008", [(500, "write")], world=1, now=time.time_ns() - 10**11)
    assert seen() == [(9, "in_progress"), (8, "stalled"), (7, "stalled")], "those that live come first"
    shutil.rmtree(tmp_path / "run" / "step_00000009")
    assert seen() == [(8, "stalled"), (7, "stalled")]


def test_what_has_not_changed_on_the_live_page_is_a_304(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "SPELL", 1e9)
    monkeypatch.setattr(watch, "FRESH", 0.0)
    client = serve(write_many(tmp_path / "run", 2))
    tag = client.get("/live").headers["ETag"]
    assert client.get("/live", headers={"If-None-Match": tag}).status_code == 304
    under_way(tmp_path / "run" / "step_00000007", [(500, "write")], world=1)
    answer = client.get("/live", headers={"If-None-Match": tag})
    assert answer.status_code == 200 and "step 7" in answer.text
    tag = answer.headers["ETag"]
    assert client.get("/live", headers={"If-None-Match": tag}).status_code == 304
    monkeypatch.setattr(live, "SPELL", 1e-3)
    assert client.get("/live", headers={"If-None-Match": tag}).status_code == 200, "ages are said with seconds"


def test_the_page_of_a_save_in_progress_says_so(serve, tmp_path):
    under_way(tmp_path / "run" / "step_00000007", [(500, "write")], world=1)
    client = serve(tmp_path / "run")
    [row] = page(client).json()["run"]["checkpoints"]
    html = client.get(f"/checkpoints/{row['id']}").text
    assert "This save is in progress" in html and "This is no checkpoint" not in html and "50 %" in html


def test_nothing_is_said_of_ranks_that_have_not_reported(serve, tmp_path):
    under_way(tmp_path / "run" / "step_00000007", [(1000, "commit")] * 3, world=4)
    client = serve(tmp_path / "run")
    [save] = client.get("/api/v1/live").json()["saves"]
    assert "Every rank's bytes are durable" not in save["stuck"]
    assert "3 of 4 ranks are durable" in save["stuck"] and "Rank 3 has not reported" in save["stuck"]
    assert "1 not reported" in client.get("/live").text and save["eta"] is None
    assert "of 3 of 4 ranks" in client.get("/").text
    under_way(tmp_path / "run" / "step_00000007", [(500, "write")], world=4)
    [save] = serve(tmp_path / "run").get("/api/v1/live").json()["saves"]
    assert save["rate"] and save["eta"] is None, "the bytes of the others are not known"


def test_the_eta_grows_while_nothing_is_written(tmp_path):
    now = time.time_ns()
    under_way(tmp_path / "run" / "step_00000007", [(500, "write")], world=1, now=now)
    library = Library([tmp_path / "run"])
    etas = [live_page(library, SaveRates(), 0, now_ns=now + s * 10**9).saves[0].eta for s in (0, 3, 15, 45)]
    assert etas[0] == etas[1] == pytest.approx(10) and etas[2] == pytest.approx(20) and etas[3] == pytest.approx(50)


def test_a_process_that_reports_and_writes_nothing_hangs_and_was_not_killed(tmp_path):
    directory, now = tmp_path / "run" / "step_00000007", time.time_ns()
    directory.mkdir(parents=True)
    record = Progress(SAVE, 0, 1, 7, "write", 500, 1000, now - 10**12, now - 10**11, alive_ns=now)
    (directory / progress_name(0, SAVE)).write_bytes(encode_progress(record))
    [save] = live_page(Library([tmp_path / "run"]), SaveRates(), 0, now_ns=now).saves
    assert save.state == "stalled" and "still reports" in save.stuck and "killed" not in save.stuck


def test_a_rate_is_of_the_last_seconds(tmp_path):
    library, speeds = Library([tmp_path / "run"]), SaveRates()
    [run] = library.runs
    now = time.time_ns()
    rates = []
    for second, written in enumerate((100, 1100, 2100)):
        under_way(tmp_path / "run" / "step_00000007", [(written, "write")], planned=9000, now=now + second * 10**9)
        info = library.inspect_directory(run, run.store.folder("step_00000007")).info
        rates.append(speeds.rate(info.saving[0], now + second * 10**9))
    assert rates == [pytest.approx(10), pytest.approx(1000), pytest.approx(1000)]


def test_when_all_is_written_the_coordinator_is_waited_for(tmp_path):
    under_way(tmp_path / "run" / "step_00000007", [(1000, "commit")] * 4)
    [save] = live_page(Library([tmp_path / "run"]), SaveRates(), 0, now_ns=time.time_ns()).saves
    assert "coordinator" in save.stuck and save.eta is None and save.done == 4


def test_a_real_save_under_way_shows(serve, tmp_path):
    """The records are those that the library's own writer keeps."""
    from treeckpt._io.storage.kept_files import ProgressRecorder
    from treeckpt._io.storage.local_store import LocalStore

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
