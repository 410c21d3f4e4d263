"""The pages of runs: filters, orders, cursors, why a checkpoint stays, what is new, and saves under way."""

import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import treeckpt as tc
from tests.background import until
from tests.large import write_many
from tests.samples import START_NS, gpt_state, write_checkpoint, write_mixed_run
from treeckpt.core.format.file_names import PIN_NAME
from treeckpt.core.format.save_progress import Progress, encode_progress, progress_name
from treeckpt.io.storage.process_owner import this_process
from treeckpt.io.storage.run_store import LocalRun, MemoryRun, modified_times
from treeckpt.runs.disk_growth import Growth, days_until, growth_of
from treeckpt_dashboard.keeping import KeepError, keep_text, parse_keep
from treeckpt_dashboard.library import Library
from treeckpt_dashboard.ops import Speeds, live_page
from treeckpt_dashboard.runs import Question, run_page, runs_page
from treeckpt_dashboard.watch import Known, Watch


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """250 small checkpoints, steps 100 to 25,000."""
    return write_many(tmp_path_factory.mktemp("many") / "run", 250)


def page(client, query=""):
    [run] = client.get("/api/v1/runs").json()["runs"]
    client.app.state.library.watches[run["id"]].refresh(wait=300)
    return client.get(f"/api/v1/runs/{run['id']}{query}")


def steps(answer):
    return [row["step"] for row in answer.json()["run"]["checkpoints"]]


def test_orders_go_by_every_column_both_ways(serve, many):
    client = serve(many)
    assert steps(page(client))[:3] == [25_000, 24_900, 24_800]
    assert steps(page(client, "?sort=oldest"))[:3] == [100, 200, 300] == steps(page(client, "?sort=step"))[:3]
    for sort, key in (("time", "seconds"), ("-time", "seconds"), ("bytes", "nbytes"), ("-bytes", "nbytes")):
        values = [row[key] for row in page(client, f"?sort={sort}").json()["run"]["checkpoints"]]
        assert values == sorted(values, reverse=sort.startswith("-")) and len(values) == 100
    assert page(client, "?sort=name").status_code == 422


@pytest.mark.parametrize("sort", ["newest", "oldest", "-time", "bytes", "-status"])
def test_cursors_lead_through_every_checkpoint_once(serve, many, sort):
    client, met, query = serve(many), [], f"?sort={sort}"
    while True:
        run = page(client, query).json()["run"]
        met += [row["step"] for row in run["checkpoints"]]
        if run["cursor"] is None:
            break
        query = f"?sort={sort}&cursor={run['cursor']}"
    assert len(met) == 250 == len(set(met))


def test_a_cursor_goes_on_where_it_was_whatever_is_saved_meanwhile(serve, tmp_path):
    write_many(tmp_path / "run", 120)
    client = serve(tmp_path / "run")
    cursor = page(client).json()["run"]["cursor"]
    write_checkpoint(tmp_path / "run" / "step_00099999", gpt_state(layers=1), step=99999)
    time.sleep(1.1)
    assert steps(page(client))[0] == 99999
    assert steps(page(client, f"?cursor={cursor}")) == list(range(2000, 0, -100))
    (tmp_path / "run" / "step_00002100").rename(tmp_path / "gone")  # the row that the cursor stands for
    assert steps(page(client, f"?cursor={cursor}")) == list(range(2000, 0, -100))


@pytest.mark.parametrize("cursor", ["x", "AAAA", "e30", "WyJ6eiIsMV0", "%00", "9" * 1900])
def test_cursors_of_nobody_are_refused(serve, many, cursor):
    assert page(serve(many), f"?cursor={cursor}").status_code == 422


def test_filters_go_by_status_and_words(serve, tmp_path):
    client = serve(write_mixed_run(tmp_path / "run"))
    run = page(client).json()["run"]
    assert run["statuses"] == {"complete": 2, "corrupt": 2, "foreign": 2, "partial": 2}
    assert steps(page(client, "?status=corrupt")) == [600, 500]
    assert steps(page(client, "?q=SPACE left")) == [400] and steps(page(client, "?q=00020")) == [200]
    none = page(client, "?q=nothing").json()["run"]
    assert none["matching"] == 0 and none["total"] == 8
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert "None of the 8 directories" in client.get(f"/runs/{run['id']}?q=nothing").text
    assert client.get(f"/runs/{run['id']}?sort=-time&status=corrupt").status_code == 200


def test_reasons_are_those_of_retention_and_the_rest_goes_next(serve, tmp_path):
    write_many(tmp_path / "run", 6)
    (tmp_path / "run" / "step_00000200" / PIN_NAME).write_bytes(b"{}")
    client = serve(tmp_path / "run", policies=parse_keep("last:2 every:300"))
    rows = page(client).json()["run"]["checkpoints"]
    assert [(row["step"], row["kept"], row["goes"]) for row in rows] == [
        (600, ["newest", "one of the last 2", "a multiple of 300 steps"], False),
        (500, ["one of the last 2"], False),
        (400, [], True),
        (300, ["a multiple of 300 steps"], False),
        (200, ["pinned"], False),
        (100, [], True),
    ]
    run = page(client).json()["run"]
    assert (run["goes"], run["keep"]) == (2, "last:2 every:300")
    assert run["goes_nbytes"] == 2 * rows[0]["nbytes"]
    asked = page(client, "?keep=all").json()["run"]
    assert asked["goes"] == 0 and asked["checkpoints"][2]["kept"] == ["all are kept"]
    html = client.get(f"/runs/{run['id']}").text
    assert "goes next" in html and "a multiple of 300 steps" in html


@pytest.mark.parametrize("text", ["", "all", "last:3", "every:1000 last:2", "period:3600", "steps:1;2;30",
                                  "best:loss:min:2", "best:val:max:1"])  # fmt: skip
def test_policies_read_back_as_they_were_written(text):
    assert keep_text(parse_keep(text)) == text
    assert parse_keep(text.replace(" ", ",")) == parse_keep(text.replace(" ", "+")) == parse_keep(text)


NO_POLICIES = [
    "last", "last:0", "last:-1", "last:x", "every:1e9", "period:nan", "period:-1", "best:", "steps:", "steps:²", "keep",
    "all:1", "all " * 20, "last:" + "9" * 30,
]  # fmt: skip


@pytest.mark.parametrize("text", NO_POLICIES)
def test_what_is_no_policy_is_refused(serve, many, text):
    with pytest.raises(KeepError):
        parse_keep(text)
    assert serve(many).get("/usage", params={"keep": text}).status_code == 422


# what is new ---------------------------------------------------------------------------------------------------------


def test_an_answer_that_has_not_changed_is_not_made_again(serve, tmp_path):
    write_many(tmp_path / "run", 3)
    client = serve(tmp_path / "run")
    [run] = client.get("/api/v1/runs").json()["runs"]
    for path in ("/", f"/runs/{run['id']}", "/api/v1/runs", f"/api/v1/runs/{run['id']}"):
        tag = client.get(path).headers["etag"]
        again = client.get(path, headers={"if-none-match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert "content-security-policy" in again.headers
        assert client.get(path, headers={"if-none-match": 'W/"other"'}).status_code == 200
    tag = client.get("/").headers["etag"]
    write_checkpoint(tmp_path / "run" / "step_00099999", gpt_state(layers=1), step=99999)
    time.sleep(1.1)
    changed = client.get("/", headers={"if-none-match": tag})
    assert changed.status_code == 200 and "step 99,999" in changed.text and changed.headers["etag"] != tag


def test_only_what_may_have_changed_is_looked_at_again(tmp_path):
    write_many(tmp_path / "run", 200)
    now, looked = [0.0], []
    library = Library([tmp_path / "run"])
    run = library.runs[0]

    def look(name):
        looked.append(name)
        return library._look(run, name)

    watch = Watch(run.store, look, clock=lambda: now[0])
    watch.refresh(wait=300)
    assert sorted(looked) == sorted(run.store.names()) and looked[0] == "step_00020000"
    version, looked[:] = watch.version, []
    watch.refresh(wait=300)
    assert looked == []  # fresh still
    now[0] = 2.0
    (tmp_path / "run" / "step_00000100" / PIN_NAME).write_bytes(b"{}")
    watch.refresh(wait=300)
    assert looked[-1] == "step_00000100" and len(looked) <= 65 and watch.version == version + 1
    assert watch.infos[-1].pinned
    now[0] = 4.0
    (tmp_path / "run" / "step_00000100").rename(tmp_path / "gone")
    watch.refresh(wait=300)
    assert len(watch.infos) == 199


def test_the_first_look_shows_how_far_it_is_and_does_not_block(tmp_path, monkeypatch):
    import threading

    write_many(tmp_path / "run", 30)
    library, gate, seen = Library([tmp_path / "run"]), threading.Event(), []
    run = library.runs[0]

    def look(name):
        seen.append(name)
        if len(seen) > 10:
            gate.wait(300)
        return library._look(run, name)

    library.watches[run.id] = Watch(run.store, look)
    with monkeypatch.context() as patch:
        patch.setattr("treeckpt_dashboard.watch.SOON", 0.3)
        runs_page(library)
        assert until(lambda: len(seen) > 10)  # and now it stands still
        part = runs_page(library).runs[0]
    assert (part.scan.complete, part.total, part.scan.total) == (False, 10, 30) and part.newest_step == 3000
    gate.set()
    library.watches[run.id].refresh(wait=300)
    part = runs_page(library).runs[0]
    assert part.scan.complete and part.total == 30


def test_a_full_page_is_shown_while_the_rest_is_looked_at(tmp_path):
    import threading

    for step in range(1, 141):
        (tmp_path / f"step_{step:08d}").mkdir()
    library, gate, seen = Library([tmp_path]), threading.Event(), []
    run = library.runs[0]

    def look(name):
        seen.append(name)
        if len(seen) > 120:
            gate.wait(30)
        return library._look(run, name)

    watch = library.watches[run.id] = Watch(run.store, look)
    while len(watch.infos) < 100:
        watch.refresh()
    assert watch.infos[0].step == 140 and not watch.progress.complete and len(watch.infos) <= 120
    gate.set()
    watch.refresh(wait=300)
    assert len(watch.infos) == 140 and watch.progress.complete


def test_a_shard_that_is_cut_short_later_is_found_in_the_end(tmp_path):
    write_many(tmp_path / "run", 3)
    now = [0.0]
    library = Library([tmp_path / "run"], clock=lambda: now[0])
    assert runs_page(library).runs[0].complete == 3
    shard = next((tmp_path / "run" / "step_00000200").glob("shard*"))
    with open(shard, "r+b") as file:
        file.truncate(100)
    now[0] = 2.0
    assert runs_page(library).runs[0].statuses == {"complete": 2, "corrupt": 1}


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_changes_of_a_run_are_those_of_its_folders(tmp_path, kind):
    if kind == "local":
        write_many(tmp_path / "run", 3)
        (tmp_path / "run" / ".hidden").mkdir()
        (tmp_path / "run" / "note").write_text("x")
        (tmp_path / "run" / "lost").symlink_to(tmp_path / "nowhere")
        (tmp_path / "run" / "link").symlink_to(tmp_path / "run" / "step_00000100")
        run = LocalRun(tmp_path / "run")
    else:
        run = MemoryRun("changes")
        run.folder("a").store.publish("x", b"1", replace=True)
    assert modified_times(run) == {name: run.folder(name).modified_ns() for name in run.names()} != {}


def test_runs_of_other_stores_are_shown_too(serve):
    run = MemoryRun("elsewhere")
    folder = run.folder("step_00000001")
    folder.store.publish("note.txt", b"hello", replace=True)
    library = Library([run])
    part = runs_page(library).runs[0]
    assert (part.name, part.path, [row.status for row in part.checkpoints]) == (
        "elsewhere", "memory://elsewhere", ["foreign"],
    )  # fmt: skip


# saves under way -----------------------------------------------------------------------------------------------------

SAVE = "00000000000000ff"


def under_way(directory, ranks, *, planned=1000, world=4, now=None):
    """Records of ranks: (bytes written, phase) of each."""
    directory.mkdir(parents=True, exist_ok=True)
    now = now or time.time_ns()
    for rank, (written, phase) in enumerate(ranks):
        record = Progress(SAVE, rank, world, 7, phase, written, planned, now - 10 * 10**9, now)
        (directory / progress_name(rank, SAVE)).write_bytes(encode_progress(record))


def test_a_save_under_way_is_live_with_rate_eta_and_what_it_waits_for(serve, tmp_path):
    write_many(tmp_path / "run", 1)
    under_way(tmp_path / "run" / "step_00000007", [(500, "write"), (1000, "commit"), (1000, "commit"), (500, "write")])
    client = serve(tmp_path / "run")
    [save] = client.get("/api/v1/live").json()["saves"]
    assert (save["step"], save["ranks"], save["done"], save["phase"]) == (7, 4, 2, "write")
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
    assert client.get("/live").text.count("It was killed") == 2
    metrics = client.get("/metrics").text
    assert "saves_under_way{" in metrics and not re.search(r"saves_under_way\{[^}]*\} [1-9]", metrics)


def test_a_save_that_fell_silent_is_said_to_hang(tmp_path):
    under_way(tmp_path / "run" / "step_00000007", [(500, "write"), (1000, "commit")], now=time.time_ns() - 10**12)
    [save] = live_page(Library([tmp_path / "run"]), Speeds(), 0, now_ns=time.time_ns()).saves
    assert save.stalled and save.eta is None and "ranks 0 in writing" in save.stuck and save.quiet > 900


def test_a_rate_is_of_the_last_seconds(tmp_path):
    library, speeds = Library([tmp_path / "run"]), Speeds()
    now = time.time_ns()
    rates = []
    for second, written in enumerate((100, 1100, 2100)):
        under_way(tmp_path / "run" / "step_00000007", [(written, "write")], planned=9000, now=now + second * 10**9)
        info = library._look(library.runs[0], "step_00000007").info
        rates.append(speeds.rate(info.saving[0]))
    assert rates == [pytest.approx(10), pytest.approx(1000), pytest.approx(1000)]


def test_when_all_is_written_the_coordinator_is_waited_for(tmp_path):
    under_way(tmp_path / "run" / "step_00000007", [(1000, "commit")] * 4)
    [save] = live_page(Library([tmp_path / "run"]), Speeds(), 0, now_ns=time.time_ns()).saves
    assert "coordinator" in save.stuck and save.eta is None and save.done == 4


def test_a_real_save_under_way_shows(serve, tmp_path):
    """The records are those that the library's own writer keeps."""
    from treeckpt.io.storage.progress_file import ProgressRecorder
    from treeckpt.io.storage.store import LocalStore

    store = LocalStore(tmp_path / "run" / "step_00000009")
    store.prepare()
    first = Progress(SAVE, 0, 1, 9, "write", 0, 1 << 20, time.time_ns(), time.time_ns())
    note = ProgressRecorder(store, first)
    note._started -= 10
    note._renewed -= 10
    note.add(1 << 19)
    [save] = serve(tmp_path / "run").get("/api/v1/live").json()["saves"]
    assert save["written"] == 1 << 19 and save["step"] == 9
    note.end()
    assert serve(tmp_path / "run").get("/api/v1/live").json()["saves"] == []


# usage and metrics ---------------------------------------------------------------------------------------------------


def test_usage_adds_up_and_says_what_would_go(serve, tmp_path):
    write_many(tmp_path / "run", 6)
    client = serve(tmp_path / "run")
    size = page(client).json()["run"]["checkpoints"][0]["nbytes"]
    usage = client.get("/api/v1/usage", params={"keep": "last:2 every:300"}).json()
    [run] = usage["runs"]
    assert usage["nbytes"] == run["nbytes"] == 6 * size and run["statuses"] == {"complete": 6 * size}
    assert {r["reason"]: (r["steps"], r["nbytes"], r["alone"]) for r in run["reasons"]} == {
        "newest": (1, size, 0),
        "one of the last 2": (2, 2 * size, size),
        "a multiple of 300 steps": (2, 2 * size, size),
    }
    assert [row["name"] for row in run["rows"]] == [f"step_{n:08d}" for n in (100, 200, 400)]
    assert run["removals"] == 3 and run["freed"] > 3 * size  # headers and records go too
    assert run["per_day"] == pytest.approx(size * 86_400 / 60) and run["between"] == 60
    assert run["days"] == pytest.approx(run["disk_free"] / run["per_day"]) and run["days_after"] > run["days"]
    assert len(list((tmp_path / "run").iterdir())) == 6
    html = client.get("/usage", params={"keep": "last:2 every:300"}).text
    assert "step_00000100" in html and "would free" in html
    assert "No policies are named" in client.get("/usage").text


def test_usage_of_bad_directories_and_of_single_checkpoints(serve, tmp_path):
    write_mixed_run(tmp_path / "run")
    client = serve(tmp_path / "run", tmp_path / "run" / "step_00000200")
    first, second = client.get("/api/v1/usage?keep=last:1").json()["runs"]
    assert {row["name"] for row in first["rows"]} == {"step_00000100", "step_00000400"}, (
        "what no policy keeps, and failed"
    )
    assert first["problem"] is None
    assert any("corrupt" in row["reason"] for row in first["left"])
    assert "by itself" in second["problem"] and client.get("/usage").status_code == 200


def test_growth_is_of_the_newest_saves():
    day = 86_400 * 10**9
    assert growth_of([(0, 5), (day, 10), (2 * day, 30)]) == Growth(3, 20.0, 86_400.0)
    assert growth_of([(n * day, n) for n in range(100)], count=2) == Growth(2, 99.0, 86_400.0)
    assert growth_of([]) is None is growth_of([(5, 1)]) and growth_of([(5, 1), (5, 1)]) is None
    assert days_until(100, Growth(2, 50.0, 1.0)) == 2 and days_until(100, None) is None
    assert days_until(100, Growth(2, 0.0, 1.0)) is None


def test_metrics_are_prometheus_text_with_bounded_labels(serve, tmp_path):
    import re

    write_mixed_run(tmp_path / 'a"b\\c')
    under_way(tmp_path / 'a"b\\c' / "step_00000007", [(500, "write")])
    answer = serve(tmp_path / 'a"b\\c').get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    seen = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(
                r'treeckpt_[a-z_]+(\{[a-z]+="([^"\\]|\\.)*"(,[a-z]+="[a-z]+")*\})? -?[0-9.e+]+', line
            ), line
            name, value = line.rsplit(" ", 1)
            seen[name.replace('run="a\\"b\\\\c"', "R")] = float(value)
    assert seen['treeckpt_checkpoints{R,status="complete"}'] == 2
    assert seen['treeckpt_checkpoints{R,status="saving"}'] == 1
    assert seen["treeckpt_newest_step{R}"] == 200 and seen["treeckpt_save_written_bytes{R}"] == 500
    assert seen["treeckpt_runs"] == 1 and seen["treeckpt_newest_timestamp_seconds{R}"] == START_NS / 1e9 + 200
    assert answer.text.count("# TYPE") == answer.text.count("# HELP")


def test_pages_of_many_checkpoints_are_quick_to_sort(many):
    library = Library([many])
    run_page(library, library.runs[0].id)
    library.watches[library.runs[0].id].refresh(wait=300)
    info = library.watches[library.runs[0].id].infos[0]
    known = {
        f"step_{n:08d}": Known(msgspec.structs.replace(info, name=f"step_{n:08d}", step=n), 1) for n in range(10_000)
    }
    library.watches[library.runs[0].id]._known = known
    library.watches[library.runs[0].id].version += 1
    run_page(library, library.runs[0].id)
    started = time.process_time()
    for sort in ("newest", "-time", "bytes"):
        run_page(library, library.runs[0].id, Question(sort=sort, q="step", keep="last:3"))
    assert time.process_time() - started < 1.5


def test_abandoned_branches_are_shown_behind_the_lineage_with_what_follows_what(serve, tmp_path):
    made = tc.Manager(tmp_path / "run", keep=None, background=False)
    for step in (10, 20, 30, 40):
        made.save(step, {"step": step})
    made.restore(step=20)
    for step in (21, 22):
        made.save(step, {"step": step})
    client = serve(tmp_path / "run")
    answer = page(client, "?keep=last:2")
    rows = {row["step"]: row for row in answer.json()["run"]["checkpoints"]}
    assert list(rows) == [22, 21, 20, 10, 40, 30] and answer.json()["run"]["newest_step"] == 22
    assert [step for step, row in rows.items() if row["abandoned"]] == [40, 30]
    assert [step for step, row in rows.items() if row["goes"]] == [20, 10, 40, 30]
    assert {step: row["follows_step"] for step, row in rows.items()} == {
        10: None,
        20: 10,
        30: 20,
        40: 30,
        21: 20,
        22: 21,
    }
    assert [step for step, row in rows.items() if row["branches"]] == [21], "after 40 came 21, which follows 20"
    assert rows[21]["follows"] == rows[20]["save_id"] and rows[10]["follows"] is None
    run_id = client.get("/api/v1/runs").json()["runs"][0]["id"]
    html = client.get(f"/runs/{run_id}").text
    assert html.count("abandoned branch") == 2 and "follows step 20" in html
    for step, row in rows.items():
        own = client.get(f"/api/v1/checkpoints/{row['id']}").json()["checkpoint"]
        assert own["abandoned"] == row["abandoned"]
        assert ("abandoned branch" in client.get(f"/checkpoints/{row['id']}").text) == (step in (30, 40))
    assert steps(page(client, "?sort=oldest")) == [30, 40, 10, 20, 21, 22]


def test_a_cursor_of_a_run_that_went_back_goes_on_where_it_was(serve, tmp_path):
    made = tc.Manager(tmp_path / "run", keep=None, background=False)
    for step in (*range(1, 121), 60):
        made.save(step, {"step": step})
    client = serve(tmp_path / "run")
    cursor = page(client).json()["run"]["cursor"]
    behind = [*range(81, 60, -1)][1:]
    assert steps(page(client, f"?cursor={cursor}")) == behind
    (tmp_path / "run" / "step_00000081").rename(tmp_path / "gone")  # the row that the cursor stands for
    assert steps(page(client, f"?cursor={cursor}")) == behind
