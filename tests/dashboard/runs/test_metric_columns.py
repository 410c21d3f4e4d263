"""Metrics in the list of checkpoints: columns, orders, the best of a run, searches, and their trends."""

import math

import pytest

from tests.dashboard.helpers import page, steps
from tests.helpers.samples import write_checkpoint, write_metrics

VALUES = {
    100: {"loss": 3.5, "accuracy": 0.2},
    200: {"loss": 2.25, "accuracy": 0.4},
    300: {"loss": math.nan, "accuracy": 0.3},
    400: {"loss": 2.5},
    500: {"accuracy": 0.1},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    run = write_metrics(tmp_path_factory.mktemp("measured") / "run", VALUES)
    write_checkpoint(run / "step_00000600", {"x": 1}, step=600, world=1, metadata={"metrics": 7})  # a user's own
    return run


def test_metrics_are_columns_with_the_best_of_the_run(serve, measured):
    client = serve(measured)
    run = page(client, "?keep=best:loss:min:2").json()["run"]
    assert run["metrics"] == ["loss", "accuracy"], "those that a policy names come first"
    rows = {row["step"]: row for row in run["checkpoints"]}
    assert rows[200]["metrics"] == {"loss": 2.25, "accuracy": 0.4} and rows[600]["metrics"] == {}
    assert rows[300]["metrics"]["loss"] == "NaN", "logged, but no number"
    assert [(step, row["best"]) for step, row in rows.items() if row["best"]] == [
        (500, {"accuracy": "lowest"}), (200, {"loss": "best", "accuracy": "highest"}),
    ]  # fmt: skip
    assert "one of the best 2 by loss" in rows[400]["kept"]
    html = client.get(f"/runs/{run['id']}?keep=best:loss:min:2").text
    assert "sort=-metric%3Aloss" in html and "2.25" in html and 'class="best">best<' in html
    assert "2.25" in client.get(f"/checkpoints/{rows[200]['id']}").text


def test_a_newest_metric_that_is_not_finite_is_shown_and_not_an_older_one(serve, tmp_path):
    run = write_metrics(tmp_path / "run", {1: {"loss": 2.0}, 2: {"loss": -math.inf}, 3: {"loss": math.nan}, 4: {}})
    client = serve(run)
    page(client)
    [row] = client.get("/api/v1/runs").json()["runs"]
    assert row["values"][0]["last"] == "NaN", "the newest one that was logged"
    trends = client.get(f"/api/v1/runs/{row['id']}/trends").json()
    assert trends["metrics"] == {"loss": [2.0, "-Infinity", "NaN", None]}
    html = client.get(f"/runs/{row['id']}/trends").text
    assert '<td class="n">NaN</td>' in html and '<td class="n">-Infinity</td>' in html
    table = client.get(f"/api/v1/runs/{row['id']}/trends/table.csv").text
    assert "NaN" in table and "-Infinity" in table
    found = {q: steps(page(client, f"?q={q}")) for q in ("loss=nan", "loss=NaN", "loss>=nan", "loss=-inf")}
    assert found == {"loss=nan": [3], "loss=NaN": [3], "loss>=nan": [], "loss=-inf": [2]}


def test_metrics_sort_both_ways_and_what_has_none_comes_last(serve, measured):
    client = serve(measured)
    assert steps(page(client, "?sort=metric:loss"))[:3] == [200, 400, 100]
    assert steps(page(client, "?sort=-metric:accuracy")) == [200, 300, 100, 500, 600, 400]
    assert page(client, "?sort=metric:").status_code == 422 == page(client, "?sort=name").status_code
    html = client.get(f"/runs/{page(client).json()['run']['id']}?sort=-metric%3Aloss").text
    assert 'aria-sort="descending"' in html


def test_metrics_are_searched_by_value_and_by_name(serve, measured):
    client = serve(measured)
    for q, expected in [
        ("loss<3", [400, 200]), ("loss>=2.5", [400, 100]), ("loss=2.25", [200]),
        ("accuracy>1.5e-1 loss<inf", [200, 100]),
        ("LOSS<3 step_00000200", [200]), ("accuracy", [500, 300, 200, 100]), ("nothing<3", []),
    ]:  # fmt: skip
        found = client.get(f"/api/v1/runs/{page(client).json()['run']['id']}", params={"q": q})
        assert steps(found) == expected, q


def test_metrics_are_trends_beside_size_and_duration(serve, measured):
    client = serve(measured)
    run = page(client).json()["run"]
    found = client.get(f"/api/v1/runs/{run['id']}/trends").json()
    assert found["metrics"] == {
        "accuracy": [0.2, 0.4, 0.3, None, 0.1, None],
        "loss": [3.5, 2.25, "NaN", 2.5, None, None],
    }
    assert "loss by step" in client.get(f"/runs/{run['id']}/trends").text
