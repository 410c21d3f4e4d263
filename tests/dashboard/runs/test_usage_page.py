"""The page of disk usage, and the metrics."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import pytest

import treeckpt as tc
from tests.dashboard.helpers import page, under_way, usage_when_made
from tests.helpers.adapted import write_adapted
from tests.helpers.large import write_many
from tests.helpers.samples import FILES, START_NS, write_checkpoint, write_mixed_run
from treeckpt._cli.main import main
from treeckpt._core.columns import bytes_column
from treeckpt._core.format.files import PIN_NAME
from treeckpt._core.text import bytes_text
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last
from treeckpt_dashboard.pages.checkpoints import Status
from treeckpt_dashboard.pages.render import days_text, span_text
from treeckpt_dashboard.runs import usage as usage_module
from treeckpt_dashboard.runs.usage import CleanUpPlans
from treeckpt_dashboard.store.watch import ScanProgress


def write_live(run, count, seconds=60):
    """Writes checkpoints of which the last is a minute old."""
    return write_many(run, count, start_ns=time.time_ns() - (count * seconds) * 10**9)


def test_usage_adds_up_and_says_what_would_go(serve, tmp_path):
    write_many(tmp_path / "run", 6)
    client = serve(tmp_path / "run")
    size = page(client).json()["run"]["checkpoints"][0]["disk_nbytes"]
    usage = usage_when_made(client, keep="last:2 every:300")
    [run] = usage["runs"]
    assert usage["nbytes"] == run["nbytes"] == 6 * size and run["statuses"] == {"complete": 6 * size}
    assert {r["reason"]: (r["steps"], r["nbytes"], r["alone"]) for r in run["reasons"]} == {
        "newest": (1, size, 0),
        "one of the last 2": (2, 2 * size, size),
        "a multiple of 300 steps": (2, 2 * size, size),
    }
    plan = run["plan"]
    assert [row["name"] for row in plan["rows"]] == [f"step_{n:08d}" for n in (100, 200, 400)]
    assert plan["removals"] == 3 and plan["freed"] == usage["freed"] == 3 * size
    assert run["between"] == 60 and run["save_nbytes"] == size
    assert len(list((tmp_path / "run").iterdir())) == 6
    html = client.get("/usage", params={"keep": "last:2 every:300"}).text
    assert "step_00000100" in html and "Would be freed" in html
    assert "No policies of this run are known" in client.get("/usage").text


def test_bytes_of_a_reason_are_those_that_would_go_without_it(serve, tmp_path):
    run = tmp_path / "run"
    write_adapted(run)  # what is frozen lies with step 1
    origin, frozen = run / "step_00000001", tc.inspect(run / "step_00000004").shared_with["step_00000001"]
    (origin / PIN_NAME).write_bytes(b"{}")
    client = serve(run)
    own = {row["step"]: row["disk_nbytes"] for row in page(client).json()["run"]["checkpoints"]}
    rows = {r["reason"]: r for r in usage_when_made(client, keep="last:1 every:3")["runs"][0]["reasons"]}
    assert {name: (r["steps"], r["nbytes"], r["alone"]) for name, r in rows.items()} == {
        "pinned": (1, own[1], own[1] - frozen),
        "newest": (1, own[4] + frozen, 0),
        "one of the last 1": (1, own[4] + frozen, 0),
        "a multiple of 3 steps": (1, own[3] + frozen, own[3]),
    }
    (origin / PIN_NAME).unlink()
    manager = tc.Manager(run, keep=None)
    [removal] = [one for one in RunDirectory(run).clean([Last(3)]).removed if one.name == origin.name]
    assert removal.nbytes == rows["pinned"]["alone"] - len(b"{}")
    # what is left of it stays for the newest alone
    for step in (2, 3):
        manager.delete(step)
    [reason] = usage_when_made(serve(run), keep="steps:9")["runs"][0]["reasons"]
    assert (reason["reason"], reason["nbytes"], reason["alone"]) == ("newest", own[4] + frozen, own[4] + frozen)


def test_requests_at_a_time_wait_for_one_plan(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(usage_module, "PLAN_WAIT", 300.0)  # of the request that starts it
    client = serve(write_many(tmp_path / "run", 6))
    usage_when_made(client)
    plans, [run] = client.app.state.services[CleanUpPlans], client.app.state.library.runs
    with ThreadPoolExecutor(8) as pool:
        made = [one for one in pool.map(lambda _: plans.plan(run, (Last(2),)), range(64)) if one is not None]
    assert made and all(one is made[0] for one in made)


def test_a_run_that_has_ended_neither_grows_nor_fills_the_disk(serve, tmp_path):
    client = serve(write_many(tmp_path / "ended", 6), write_live(tmp_path / "live", 6))
    ended, live = usage_when_made(client)["runs"]
    assert not ended["live"] and ended["per_day"] == 0 == ended["written_per_day"]
    assert live["live"] and live["per_day"] == pytest.approx(live["save_nbytes"] * 1440)
    for row in (ended, live):  # on one disk
        assert row["disk_live"] == 1 and row["days"] == pytest.approx(row["disk_free"] / live["per_day"], rel=0.01)
    assert all(row["days"] is None for row in usage_when_made(client, keep="last:3")["runs"])
    html = client.get("/usage").text
    assert "the run has ended" in html and "by 1 live run on this disk" in html


def test_what_a_run_takes_in_a_week_is_under_its_own_policies_and_those_that_are_typed(serve, tmp_path):
    with tc.Manager(tmp_path / "run", keep="last:3", background=False) as manager:
        for step in range(1, 6):
            manager.save(step, {"w": np.ones(100, np.float32)})
    client = serve(tmp_path / "run")
    [run] = usage_when_made(client)["runs"]
    rows = {row["source"]: row for row in run["projections"]}
    assert run["keep"] == rows["recorded"]["keep"] == "last:3" and run["per_day"] == rows["recorded"]["per_day"] == 0
    assert rows["recorded"]["in_a_week"] == pytest.approx(3 * run["save_nbytes"], rel=0.05)
    assert rows["all"]["in_a_week"] > 1000 * run["nbytes"]
    [run] = usage_when_made(client, keep="last:10")["runs"]
    assert [row["source"] for row in run["projections"]] == ["given", "recorded", "all"]
    assert run["projections"][0]["in_a_week"] == pytest.approx(10 * run["save_nbytes"], rel=0.05)
    html = client.get("/usage", params={"keep": "last:10"}).text
    assert "as typed above" in html and "its own, recorded in the newest checkpoint" in html
    assert page(client).json()["run"]["keep"] == "last:3", "the page of the run retains by its own policies too"


def test_page_json_and_command_agree_about_the_growth_of_a_run(serve, tmp_path, capsys):
    run = write_live(tmp_path / "run", 8)
    keep = "last:2 every:300"
    assert main(["ls", str(run), "--usage", "--keep", keep, "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)
    client = serve(run)
    [row] = usage_when_made(client, keep=keep)["runs"]
    same = (
        "checkpoints",
        "nbytes",
        "live",
        "between",
        "save_nbytes",
        "written_per_day",
        "per_day",
        "disk",
        "disk_total",
    )
    assert {name: told[name] for name in same} == {name: row[name] for name in same}
    assert [(one["keep"], one["in_a_week"]) for one in told["projections"]] == [
        (one["keep"], one["in_a_week"]) for one in row["projections"]
    ]
    assert told["days"] == pytest.approx(row["days"], rel=0.05)
    assert main(["ls", str(run), "--usage", "--keep", keep]) == 0
    text = capsys.readouterr().out
    weeks = [one["in_a_week"] for one in row["projections"]]
    page = client.get("/usage", params={"keep": keep}).text
    assert "in a week" in text and all(week in text and week in page for week in map(bytes_column(weeks), weeks))


def test_numbers_are_told_only_once_all_directories_are_read(serve, tmp_path):
    client = serve(write_live(tmp_path / "run", 6))
    [run] = client.app.state.library.runs
    watch = client.app.state.library.watches[run.id]
    watch.refresh(wait=300)
    ended, watch.progress = watch.progress, ScanProgress(2, 6, False)
    watch.start = lambda: None  # no scan ends
    usage = client.get("/api/v1/usage").json()
    [row] = usage["runs"]
    assert not usage["complete"] and usage["freed"] is None and row["plan"] is None is row["live"] is row["per_day"]
    assert row["days"] is None and row["projections"] == [] == row["reasons"]
    html = client.get("/usage").text
    assert "2 of 6 directories are looked at" in html and 'data-busy="1"' in html and "so far" in html
    watch.progress = ended
    assert usage_when_made(client)["runs"][0]["live"]


def test_a_page_that_has_not_changed_is_not_sent_again(serve, tmp_path):
    client = serve(write_many(tmp_path / "run", 3))
    usage_when_made(client)
    first = client.get("/usage")
    again = client.get("/usage", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_what_is_on_disk_is_what_all_files_take_on_every_page(serve, tmp_path):
    run = tmp_path / "run"
    write_checkpoint(run / "step_00000700", step=700, files=FILES)
    (run / "step_00000300").mkdir()
    torn = bytes(12345)
    (run / "step_00000300" / "shard-00000-of-00001.00000000000000ff.safetensors").write_bytes(torn)
    foreign = pytest.importorskip("safetensors.numpy").save({"w": np.ones(1000, np.float32)})
    (run / "hub").mkdir()
    (run / "hub" / "model.safetensors").write_bytes(foreign)
    whole = sum(file.stat().st_size for file in (run / "step_00000700").iterdir())
    total = whole + len(torn) + len(foreign)
    client = serve(run)
    part = page(client).json()["run"]
    rows = {row["name"]: row for row in part["checkpoints"]}
    assert {name: row["disk_nbytes"] for name, row in rows.items()} == {
        "step_00000700": whole,
        "step_00000300": len(torn),
        "hub": len(foreign),
    }
    assert rows["step_00000700"]["nbytes"] < whole and part["nbytes"] == total
    usage = client.get("/api/v1/usage").json()
    assert usage["nbytes"] == usage["runs"][0]["nbytes"] == sum(usage["runs"][0]["statuses"].values()) == total
    assert usage["runs"][0]["checkpoints"] == 3
    assert f'treeckpt_checkpoint_bytes{{run="run"}} {total}' in client.get("/metrics").text
    shown = {"": total, f"runs/{part['id']}": total}
    shown |= {f"checkpoints/{row['id']}": row["disk_nbytes"] for name, row in rows.items() if name != "step_00000300"}
    for place, nbytes in shown.items():
        assert f"<dt>On disk</dt><dd>{bytes_text(nbytes)}" in client.get(f"/{place}").text


def test_usage_of_bad_directories_and_of_single_checkpoints(serve, tmp_path):
    write_mixed_run(tmp_path / "run")
    client = serve(tmp_path / "run", tmp_path / "run" / "step_00000200")
    first, second = (row["plan"] for row in usage_when_made(client, keep="last:1")["runs"])
    assert {row["name"] for row in first["rows"]} == {"step_00000100", "step_00000400"}, (
        "what no policy keeps, and failed"
    )
    assert first["problem"] is None
    assert any("damaged" in row["reason"] for row in first["left"])
    assert "by itself" in second["problem"] and client.get("/usage").status_code == 200


def test_of_several_runs_only_the_first_is_unfolded(serve, tmp_path):
    for name in "abc":
        write_many(tmp_path / name, 2)
    html = serve(*(tmp_path / name for name in "abc")).get("/usage").text
    assert html.count('<details class="run usage" open>') == 1 and html.count('<details class="run usage">') == 2


def test_time_left_is_told_in_units_that_are_not_zero():
    texts = {0.0: "0 min", 0.004: "6 min", 0.2: "4.8 h", 1.5: "36.0 h", 3.25: "3.2 days", 5000.0: "> 1,000 days"}
    assert {days: days_text(days) for days in texts} == texts


def test_an_interval_is_shown_in_one_unit_and_never_as_zero_seconds():
    texts = {0.026: "26 ms", 0.25: "0.2 s", 1.0: "1 s", 60: "60 s", 900: "15 min", 36_000: "10 h", 4 * 86_400: "4 days"}
    assert {seconds: span_text(seconds) for seconds in texts} == texts


def test_series_of_runs_of_equal_names_do_not_repeat(serve, tmp_path):
    runs = [write_many(tmp_path / stage / "model" / "run", 1) for stage in ("pretrain", "tune")]
    client = serve(*runs, write_many(tmp_path / "other", 1))
    lines = [line.rpartition(" ")[0] for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines)) and any('run="pretrain/model/run"' in line for line in lines)
    names = [run["name"] for run in client.get("/api/v1/runs").json()["runs"]]
    assert names == ["pretrain/model/run", "tune/model/run", "other"]
    assert client.get("/").text.count("tune/model/run</a>") == 1


@pytest.mark.parametrize("place", ["/usage", "/runs/{run}"])
def test_policies_that_are_none_are_told_on_a_page_that_lets_them_be_mended(serve, tmp_path, place):
    client = serve(write_many(tmp_path / "run", 1))
    run = page(client).json()["run"]["id"]
    answer = client.get(place.format(run=run), params={"keep": "lats:3", "q": "x"})
    assert answer.status_code == 422 and answer.headers["content-type"].startswith("text/html")
    assert (
        "These policies cannot be read" in answer.text
        and "lats:3" in answer.text
        and "last:3 every:1000" in answer.text
    )
    assert 'name="keep" value="lats:3"' in answer.text and answer.text.count("<h1") == 1
    assert client.get(f"/api/v1{place.format(run=run)}", params={"keep": "lats:3"}).status_code == 422


def test_the_dashboard_for_grafana_asks_for_nothing_but_what_metrics_serves(serve, tmp_path):
    run = write_many(tmp_path / "run", 4)
    under_way(run / "step_00099999", [(500, "write")])
    client = serve(run)
    page(client)
    served = set(re.findall(r"^(treeckpt_\w+)", client.get("/metrics").text, re.MULTILINE))
    dashboard = client.get("/static/grafana.json").json()
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"treeckpt_\w+", query)}
    assert asked <= served and {"treeckpt_newest_good_age_seconds", "treeckpt_save_interval_seconds"} <= asked
    assert set(re.findall(r'status=\\?"(\w+)', " ".join(queries))) <= set(get_args(Status))
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in dashboard["panels"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) == 8


def test_metrics_are_prometheus_text_with_bounded_labels(serve, tmp_path):

    write_mixed_run(tmp_path / 'a"b\\c')
    under_way(tmp_path / 'a"b\\c' / "step_00000007", [(500, "write")])
    answer = serve(tmp_path / 'a"b\\c').get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    seen = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(
                r'treeckpt_[a-z_]+(\{[a-z]+="([^"\\]|\\.)*"(,[a-z]+="[a-z_]+")*\})? -?[0-9.e+]+', line
            ), line
            name, value = line.rsplit(" ", 1)
            seen[name.replace('run="a\\"b\\\\c"', "R")] = float(value)
    assert seen['treeckpt_checkpoints{R,status="complete"}'] == 2
    assert seen['treeckpt_checkpoints{R,status="in_progress"}'] == 1
    assert seen["treeckpt_newest_step{R}"] == 200 and seen["treeckpt_save_written_bytes{R}"] == 500
    assert seen["treeckpt_runs"] == 1 and seen["treeckpt_newest_timestamp_seconds{R}"] == START_NS / 1e9 + 200
    assert answer.text.count("# TYPE") == answer.text.count("# HELP")
