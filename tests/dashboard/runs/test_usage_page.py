"""The page of disk usage, and the metrics."""

import re
from typing import get_args

import numpy as np
import pytest

from tests.dashboard.helpers import page, under_way
from tests.helpers.large import write_many
from tests.helpers.samples import FILES, START_NS, write_checkpoint, write_mixed_run
from treeckpt._core.text import bytes_text
from treeckpt_dashboard.pages.checkpoints import Status
from treeckpt_dashboard.pages.render import days_text, span_text
from treeckpt_dashboard.runs.usage import Growth, days_until, growth_of


def test_usage_adds_up_and_says_what_would_go(serve, tmp_path):
    write_many(tmp_path / "run", 6)
    client = serve(tmp_path / "run")
    size = page(client).json()["run"]["checkpoints"][0]["disk_nbytes"]
    usage = client.get("/api/v1/usage", params={"keep": "last:2 every:300"}).json()
    [run] = usage["runs"]
    assert usage["nbytes"] == run["nbytes"] == 6 * size and run["statuses"] == {"complete": 6 * size}
    assert {r["reason"]: (r["steps"], r["nbytes"], r["alone"]) for r in run["reasons"]} == {
        "newest": (1, size, 0),
        "one of the last 2": (2, 2 * size, size),
        "a multiple of 300 steps": (2, 2 * size, size),
    }
    assert [row["name"] for row in run["rows"]] == [f"step_{n:08d}" for n in (100, 200, 400)]
    assert run["removals"] == 3 and run["freed"] == 3 * size
    assert run["per_day"] == pytest.approx(size * 86_400 / 60) and run["between"] == 60
    assert run["days"] == pytest.approx(run["disk_free"] / run["per_day"]) and run["days_after"] > run["days"]
    assert len(list((tmp_path / "run").iterdir())) == 6
    html = client.get("/usage", params={"keep": "last:2 every:300"}).text
    assert "step_00000100" in html and "would free" in html
    assert "Without policies" in client.get("/usage").text


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
    first, second = client.get("/api/v1/usage?keep=last:1").json()["runs"]
    assert {row["name"] for row in first["rows"]} == {"step_00000100", "step_00000400"}, (
        "what no policy keeps, and failed"
    )
    assert first["problem"] is None
    assert any("damaged" in row["reason"] for row in first["left"])
    assert "by itself" in second["problem"] and client.get("/usage").status_code == 200


def test_growth_is_of_the_newest_saves():
    day = 86_400 * 10**9
    assert growth_of([(0, 5), (day, 10), (2 * day, 30)]) == Growth(3, 20.0, 86_400.0)
    assert growth_of([(n * day, n) for n in range(100)], count=2) == Growth(2, 99.0, 86_400.0)
    assert growth_of([]) is None is growth_of([(5, 1)]) and growth_of([(5, 1), (5, 1)]) is None
    assert days_until(100, 50.0) == 2 and days_until(100, None) is None and days_until(100, 0.0) is None


def test_runs_on_one_disk_fill_it_together(serve, tmp_path):
    write_many(tmp_path / "a" / "run", 6)
    write_many(tmp_path / "b" / "run", 6)
    client = serve(tmp_path / "a" / "run", tmp_path / "b" / "run")
    rows = client.get("/api/v1/usage", params={"keep": "last:2"}).json()["runs"]
    for row in rows:
        assert row["disk_runs"] == 2 and row["disk_per_day"] == pytest.approx(2 * row["per_day"])
        assert row["days"] == pytest.approx(row["disk_free"] / row["disk_per_day"])
        freed = sum(other["freed"] for other in rows)
        assert row["days_after"] == pytest.approx((row["disk_free"] + freed) / row["disk_per_day"])
    assert "with the other run on this disk" in client.get("/usage").text


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
