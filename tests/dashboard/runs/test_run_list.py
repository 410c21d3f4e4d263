"""The pages of runs: filters, orders, cursors, retention, ETags, and branches."""

import json
import time
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

import treeckpt as tc
from tests.dashboard.helpers import page, steps, under_way
from tests.helpers.large import write_many
from tests.helpers.memory_run import MemoryRun
from tests.helpers.samples import gpt_state, write_checkpoint, write_mixed_run, write_run
from treeckpt._cli.main import main
from treeckpt._core.format.files import PIN_NAME
from treeckpt._io.storage.store import StoreTraits
from treeckpt._runs.discovery import scan
from treeckpt.policy import parse_keep
from treeckpt_dashboard.runs.failures import FailureLists, failures_page
from treeckpt_dashboard.runs.model import ListQuery, run_page, runs_page
from treeckpt_dashboard.store.library import Library
from treeckpt_dashboard.store.watch import DirectoryState, RunWatcher


def test_orders_go_by_every_column_both_ways(serve, many):
    client = serve(many)
    assert steps(page(client))[:3] == [25_000, 24_900, 24_800]
    assert steps(page(client, "?sort=oldest"))[:3] == [100, 200, 300] == steps(page(client, "?sort=step"))[:3]
    for sort, key in (("time", "seconds"), ("-time", "seconds"), ("bytes", "nbytes"), ("-bytes", "nbytes")):
        values = [row[key] for row in page(client, f"?sort={sort}").json()["run"]["checkpoints"]]
        assert values == sorted(values, reverse=sort.startswith("-")) and len(values) == 100
    wrong = page(client, "?sort=name")
    assert wrong.status_code == 422 and "expected newest, oldest, bytes" in wrong.text and "^" not in wrong.text


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
    assert run["statuses"] == {"complete": 2, "damaged": 2, "foreign": 2, "partial": 2}
    assert steps(page(client, "?status=damaged")) == [600, 500]
    assert steps(page(client, "?q=SPACE left")) == [400] and steps(page(client, "?q=00020")) == [200]
    none = page(client, "?q=nothing").json()["run"]
    assert none["matching"] == 0 and none["total"] == 8
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert "None of the 8 directories" in client.get(f"/runs/{run['id']}?q=nothing").text
    assert client.get(f"/runs/{run['id']}?sort=-time&status=damaged").status_code == 200


def test_lists_filters_metrics_and_the_command_count_the_same_states(serve, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    run, shard = write_mixed_run(tmp_path / "run"), next((tmp_path / "run/step_00000200").glob("shard-*"))
    under_way(run / "step_00000700", [(500, "write")])
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of the same size: only a verification finds it
    assert main(["verify", str(run / "step_00000200")]) == 1 and main(["verify", str(run / "step_00000100")]) == 0
    capsys.readouterr()
    client = serve(run)
    [found] = client.get("/api/v1/runs").json()["runs"]
    counts = {"complete": 1, "damaged": 3, "foreign": 2, "in_progress": 1, "partial": 2}
    assert found["statuses"] == counts and (found["complete"], found["intact"]) == (1, 1)
    assert (found["state"], found["newest_step"]) == ("in_progress", 100), "that of the run, not of one directory"
    rows = {status: page(client, f"?status={status}").json()["run"]["checkpoints"] for status in counts}
    assert {status: len(rows[status]) for status in counts} == counts
    assert [row["step"] for row in page(client, "?q=intact").json()["run"]["checkpoints"]] == [100]
    metrics = client.get("/metrics").text
    assert all(f'status="{status}"}} {number}\n' in metrics for status, number in counts.items())
    assert main(["ls", "--json", str(run)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {one["name"]: one["status"] for one in listed} == {row["name"]: name for name in rows for row in rows[name]}
    assert [one["step"] for one in listed if one["intact"]] == [100]
    assert Counter(info.status for info in scan(run)) == counts
    text = client.get(f"/runs/{found['id']}").text
    assert (
        ">1<small>complete,</small>" in text and ">3<small>damaged</small>" in text and "1 known to be intact" in text
    )
    assert "committed" not in text and "corrupt" not in text


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
    assert run["goes_nbytes"] == rows[2]["disk_nbytes"] + rows[5]["disk_nbytes"]
    asked = page(client, "?keep=all").json()["run"]
    assert asked["goes"] == 0 and asked["checkpoints"][2]["kept"] == ["all are kept"]
    html = client.get(f"/runs/{run['id']}").text
    assert "will be pruned" in html and "a multiple of 300 steps" in html


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


def test_runs_of_other_stores_are_shown_too(serve):
    run = MemoryRun("elsewhere")
    folder = run.folder("step_00000001")
    folder.publish("note.txt", b"hello", replace=True)
    library = Library([run])
    part = runs_page(library).runs[0]
    assert (part.name, part.path, [row.status for row in part.checkpoints]) == (
        "elsewhere", "memory://elsewhere", ["foreign"],
    )  # fmt: skip


def test_pages_of_many_checkpoints_are_quick_to_sort(many):
    library = Library([many])
    run = library.runs[0]
    library.watches[run.id].refresh(wait=300)
    failures = failures_page(library, FailureLists(library), run.id)
    run_page(library, failures)
    info = library.watches[run.id].infos[0]
    named = {f"step_{n:08d}": msgspec.structs.replace(info, name=f"step_{n:08d}", step=n) for n in range(10_000)}
    store = SimpleNamespace(
        traits=StoreTraits(), names=lambda: list(named), folder=lambda name: SimpleNamespace(name=name)
    )
    library.watches[run.id] = RunWatcher(store, lambda f: DirectoryState(named[f.name], 1), clock=lambda: 0.0)
    library.watches[run.id].refresh(wait=300)
    run_page(library, failures)
    started = time.thread_time()  # without that of scans of other tests
    for sort in ("newest", "-time", "bytes"):
        page = run_page(library, failures, ListQuery(sort=sort, q="step", keep="last:3"))
        assert page.run.matching == 10_000
    assert time.thread_time() - started < 1.5


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


def test_runs_give_every_checkpoint_newest_first(client):
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert [(c["step"], c["status"]) for c in run["checkpoints"]] == [
        (700, "complete"), (600, "damaged"), (500, "damaged"), (400, "partial"), (300, "partial"), (200, "complete"),
        (100, "complete"), (None, "foreign"), (None, "foreign"),
    ]  # fmt: skip
    assert (run["complete"], run["newest_step"], run["total"]) == (3, 700, 9)
    first = run["checkpoints"][0]
    assert first["world"] == 4 and first["seconds"] > 0
    assert first["rate"] == pytest.approx(first["nbytes"] / first["seconds"])


def test_a_run_is_paged_at_100(serve, tmp_path):
    for step in range(1, 131):
        (tmp_path / f"step_{step:08d}").mkdir()
    client = serve(tmp_path)
    page(client)
    [first] = client.get("/api/v1/runs").json()["runs"]
    assert (len(first["checkpoints"]), first["next"], first["total"]) == (100, 100, 130)
    rest = client.get(f"/api/v1/runs/{first['id']}", params={"start": 100}).json()["run"]
    assert [c["step"] for c in rest["checkpoints"]] == list(range(30, 0, -1)) and rest["next"] is None
    assert client.get(f"/runs/{first['id']}?start=100").status_code == 200


def test_several_runs_and_a_single_checkpoint(serve, tmp_path):
    a, b = write_run(tmp_path / "a", steps=(1,)), write_run(tmp_path / "b", steps=(2,))
    found = serve(a, b / "step_00000002", a).get("/api/v1/runs").json()["runs"]
    assert [(r["name"], [c["step"] for c in r["checkpoints"]]) for r in found] == [("a", [1]), ("step_00000002", [2])]


def test_a_new_save_shows_within_a_second(tmp_path):
    from treeckpt_dashboard.runs.model import runs_page
    from treeckpt_dashboard.store.library import Library

    now = [0.0]
    library = Library([tmp_path], clock=lambda: now[0])
    assert runs_page(library).runs[0].total == 0
    write_run(tmp_path, steps=(1,))
    assert runs_page(library).runs[0].total == 0
    now[0] += 1.1
    assert runs_page(library).runs[0].total == 1
