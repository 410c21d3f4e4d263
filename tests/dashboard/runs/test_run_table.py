"""The table of runs by their metrics, and the overlay of several: the page, the JSON and the command say the same."""

import json
import math

import pytest
from starlette.testclient import TestClient

import treeckpt as tc
from tests.helpers.samples import write_metrics
from treeckpt._cli.main import main
from treeckpt._core.text import json_number
from treeckpt._runs.run_metrics import in_value_order
from treeckpt.policy import parse_keep
from treeckpt_dashboard.runs.overlay import BINS, MAX_RUNS, spikes_kept
from treeckpt_dashboard.web.app import create_app

VALUES = {
    "base": {1: {"loss": 3.0, "acc": 0.1}, 2: {"loss": 1.5, "acc": 0.6}, 3: {"loss": 2.0, "acc": 0.5}},
    "nan": {1: {"loss": 1.0}, 2: {"loss": math.nan}},
    "other": {1: {"acc": 0.75}},
    "plain": {5: {}},
    "tuned": {1: {"loss": 2.5, "acc": 0.2}, 2: {"loss": 0.5, "acc": 0.9}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, values in VALUES.items():
        write_metrics(root / name, values)
    manager = tc.Manager(root / "tuned", keep=None, background=False)
    manager.restore(step=1)
    manager.save(4, {"x": 1}, metrics={"loss": 0.75, "acc": 0.8})  # step 2 is on an abandoned branch since
    manager.close()
    return root


@pytest.fixture(scope="module")
def client(folder):
    client = TestClient(create_app([folder / name for name in VALUES]), base_url="http://127.0.0.1:8265")
    client.get("/")
    for watch in client.app.state.library.watches.values():
        watch.refresh(wait=300)
    return client


def asked(client, **query):
    answer = client.get("/api/v1/runs", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rows(page, at=0):
    return {run["name"]: run["values"][at] for run in page["runs"]}


def test_each_run_has_the_last_and_the_best_value_of_the_present_branch_with_their_steps(client):
    page = asked(client, metric=["loss", "acc"], best="loss:min")
    assert [(one["metric"], one["mode"], one["chosen"]) for one in page["columns"]] == [
        ("loss", "min", True), ("acc", None, False),
    ]  # fmt: skip
    found = {name: (row["last"], row["last_step"], row["best"], row["best_step"]) for name, row in rows(page).items()}
    assert found == {
        "base": (2.0, 3, 1.5, 2), "nan": ("NaN", 2, 1.0, 1), "other": (None, None, None, None),
        "plain": (None, None, None, None), "tuned": (0.75, 4, 0.75, 4),
    }  # fmt: skip
    assert all(row["best"] is None for row in rows(page, 1).values()), "no direction is guessed"
    best = next(run["id"] for run in page["runs"] if run["name"] == "tuned")
    assert page["columns"][0]["best_runs"] == [best] and page["known"] == ["acc", "loss"]


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("best:loss", ["tuned", "nan", "base", "other", "plain"]),
        ("-best:loss", ["base", "nan", "tuned", "other", "plain"]),
        ("last:loss", ["tuned", "base", "nan", "other", "plain"]),
        ("-last:acc", ["tuned", "other", "base", "nan", "plain"]),
        ("-name", ["tuned", "plain", "other", "nan", "base"]),
        ("-good", ["plain", "tuned", "base", "nan", "other"]),
        ("best:acc", ["base", "nan", "other", "plain", "tuned"]),
    ],
)
def test_the_table_is_sorted_by_any_column_and_what_has_no_number_is_last(client, sort, names):
    page = asked(client, metric=["loss", "acc"], best="loss:min", sort=sort)
    assert [run["name"] for run in page["runs"]] == names


def test_the_direction_is_that_of_the_policy_unless_the_user_says_another(serve, folder):
    client = serve(folder / "base", folder / "tuned", policies=parse_keep("best:acc:max"))
    [column] = asked(client, metric="acc")["columns"]
    assert (column["mode"], column["chosen"]) == ("max", False)
    assert asked(client, metric="acc", best="acc:min")["columns"][0]["mode"] == "min"
    assert client.get("/api/v1/runs?best=acc").status_code == 422 and client.get("/?sort=odd").status_code == 422
    assert "acc:max" in client.get("/?metric=loss&best=acc").text


@pytest.mark.parametrize(("keeps", "mode"), [(("best:acc:max", "last:3"), "max"), (("best:acc:max", "best:acc"), None)])
def test_the_direction_is_that_which_the_runs_have_recorded_if_they_agree(serve, tmp_path, capsys, keeps, mode):
    runs = [tmp_path / f"{number}" for number in range(len(keeps))]
    for run, keep in zip(runs, keeps, strict=True):
        with tc.Manager(run, keep=keep, background=False) as manager:
            for step in (1, 2):
                manager.save(step, {"x": step}, metrics={"acc": step / 4})
    page = asked(serve(*runs), metric="acc")
    assert page["columns"][0]["mode"] == mode
    assert [run["values"][0]["best"] for run in page["runs"]] == [None if mode is None else 0.5] * 2
    assert main(["ls", "--json", "--metric", "acc", *map(str, runs)]) == 0
    assert [row["metrics"][0]["mode"] for row in json.loads(capsys.readouterr().out)] == [mode] * 2


def test_without_a_choice_the_metrics_that_stand_for_the_runs_are_columns(client):
    page = asked(client)
    assert [one["metric"] for one in page["columns"]] == ["loss", "acc"] and page["sort"] == ""
    text = client.get("/?q=base").text
    assert 'aria-label="The best is the lowest loss"' not in text, "one run alone has nothing to compare"
    assert 'aria-label="The best is the lowest loss"' in client.get("/").text


def test_ticks_metrics_and_order_are_in_the_links_of_the_page(client):
    ids = {run["name"]: run["id"] for run in asked(client)["runs"]}
    link = f"/?metric=loss&best=loss:min&sort=best:loss&run={ids['base']}&run={ids['nan']}&q=base"
    text = client.get(link).text
    assert text.count(" checked") == 2, "the run and the metric"
    assert f'<input type="hidden" form="ticks" name="run" value="{ids["nan"]}">' in text, "ticked, and filtered out"
    assert "sort=-best%3Aloss&amp;" not in text.partition("lowest loss")[0] and "sort=-best%3Aloss" in text


def test_the_command_says_the_same_as_the_page(client, folder, capsys):
    page = asked(client, metric=["loss", "acc"], best=["loss:min", "acc:max"], sort="best:loss")
    assert main(["ls", str(folder), "--metric", "loss:min", "--metric", "acc:max", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["run"].rpartition("/")[2] for row in told] == [run["name"] for run in page["runs"]]
    for row, run in zip(told, page["runs"], strict=True):
        told_of = (row["status"], row["complete"], row["nbytes"], row["newest"])
        assert told_of == (run["state"], run["complete"], run["nbytes"], run["good"]["step"])
        for metric, cell in zip(row["metrics"], run["values"], strict=True):
            for kind in ("last", "best"):
                found = metric[kind] or {"value": None, "step": None}
                assert (found["value"], found["step"]) == (cell[kind], cell[f"{kind}_step"])
    assert main(["ls", str(folder / "base"), str(folder / "nan"), "--metric", "loss"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "status", "activity", "complete", "size", "newest", "loss"]
    assert lines[0].endswith("2 at 3") and lines[1].endswith("NaN at 2")


def lines_of(client, names, **query):
    ids = {run["name"]: run["id"] for run in asked(client)["runs"]}
    found = client.get("/api/v1/overlay/lines", params={"run": [ids[name] for name in names], **query}).json()["lines"]
    named = {value: key for key, value in ids.items()}
    return {(named[line["run"]], line["metric"], line["branch"]): (line["step"], line["values"]) for line in found}


def test_the_overlay_has_a_line_for_each_branch_of_each_run_and_a_table_of_the_same_values(client):
    lines = lines_of(client, ["tuned", "nan"], metric=["loss"])
    assert lines == {
        ("tuned", "loss", 0): ([1, 4], [2.5, 0.75]), ("tuned", "loss", 1): ([2], [0.5]),
        ("nan", "loss", 0): ([1, 2], [1.0, "NaN"]),
    }  # fmt: skip
    assert lines_of(client, ["tuned"], metric=["loss"], low=2)[("tuned", "loss", 0)] == ([4], [0.75])
    ids = {run["name"]: run["id"] for run in asked(client)["runs"]}
    query = {"run": [ids["tuned"], ids["nan"], "gone"], "metric": ["loss", "acc"], "best": "loss:min"}
    page = client.get("/api/v1/overlay", params=query).json()
    table = [(row["step"], row["run_name"], row["values"]["loss"], row["abandoned"]) for row in page["rows"]]
    assert table == [
        (1, "nan", 1.0, False), (1, "tuned", 2.5, False), (2, "nan", "NaN", False), (2, "tuned", 0.5, True),
        (4, "tuned", 0.75, False),
    ]  # fmt: skip
    assert (page["unknown"], page["columns"][0]["best_runs"]) == (1, [ids["tuned"]])
    text = client.get("/overlay", params=query).text
    assert "1 run of this link is not here" in text and "abandoned branch" in text
    assert client.get("/api/v1/overlay/table.csv", params=query).text.count("\n") == 6
    assert "No runs are ticked" in client.get("/overlay").text
    assert "has a metric" in client.get("/overlay", params={"run": ids["plain"]}).text


def test_runs_beyond_the_colours_are_named_as_left_out(serve, folder, tmp_path):
    runs = [write_metrics(tmp_path / f"r{n}", {1: {"loss": 1.0}}) for n in range(MAX_RUNS + 1)]
    client = serve(*runs)
    ids = [run["id"] for run in asked(client)["runs"]]
    page = client.get("/api/v1/overlay", params={"run": ids}).json()
    assert (len(page["runs"]), page["left_out"]) == (MAX_RUNS, [f"r{MAX_RUNS}"])


def test_a_line_of_many_saves_keeps_its_ends_its_spikes_and_its_nan_and_has_few_points():
    values = [math.sin(n / 50) for n in range(10_000)]
    values[1234], values[5678], values[9000] = 9.0, -9.0, math.nan
    kept = spikes_kept(values)
    assert {0, 1234, 5678, 9000, 9999} <= set(kept) and kept == sorted(kept) and len(kept) <= 2 * BINS + 3
    assert spikes_kept(values[:480]) == list(range(480)) and spikes_kept([]) == []
    assert {0, 599} <= set(spikes_kept([math.nan] * 600)), "without a number there is still a line of marks"


def test_what_is_missing_or_no_number_is_last_in_both_orders():
    values = [2.0, None, math.nan, 1.0, math.inf]
    assert in_value_order(values) == [3, 0, 4, 1, 2] and in_value_order(values, largest_first=True) == [4, 0, 3, 1, 2]
    assert in_value_order(["b", None, "a"]) == [2, 0, 1] and json_number(math.inf) == "Infinity"


def test_of_equal_best_values_each_is_marked(serve, tmp_path):
    lowest = {"a": 1.0, "b": 0.5, "c": 0.5}
    runs = [write_metrics(tmp_path / name, {1: {"loss": low}}) for name, low in lowest.items()]
    client = serve(*runs)
    page = asked(client, metric=["loss"], best="loss:min")
    assert page["columns"][0]["best_runs"] == [run["id"] for run in page["runs"] if run["name"] in "bc"]
    assert client.get("/", params={"metric": "loss", "best": "loss:min"}).text.count('<span class="best">best') == 2
