"""What changed most between two checkpoints: measured once by a job, kept, ranked by array and by layer."""

import json
import os

import numpy as np
import pytest

from tests.dashboard.helpers import client_of
from tests.helpers.background import until
from tests.helpers.samples import write_checkpoint
from treeckpt._cli.main import main


def states():
    random = np.random.default_rng(0)
    first = {f"layers.{n}.{part}": random.standard_normal(300).astype(np.float32) for n in range(3) for part in "wb"}
    second = {path: array.copy() for path, array in first.items()}
    second["layers.1.w"] = first["layers.1.w"] * np.float32(1.5)
    second["layers.2.b"] = -first["layers.2.b"]
    return first, second


@pytest.fixture
def pair(tmp_path):
    run = tmp_path / "run"
    for step, tree in zip((1, 2), states(), strict=True):
        write_checkpoint(run / f"step_{step:08d}", tree, step=step, world=1, layouts=lambda path, array: None)
    client = client_of(run, tmp_path / "cache")
    [found] = client.get("/api/v1/runs").json()["runs"]
    b, a = (row["id"] for row in found["checkpoints"])
    return client, {"a": a, "b": b}, run


def measured(client, query):
    sent = client.get("/diff/changes", params={**query, "action": "start"}, follow_redirects=False)
    assert (sent.status_code, "action" in sent.headers["location"]) == (303, False)
    assert until(lambda: not client.get("/api/v1/diff/changes", params=query).json()["running"])
    return client.get("/api/v1/diff/changes", params=query).json()


def test_a_difference_that_overflows_is_told_from_one_that_there_is_not(pair, tmp_path):
    numbers = {"over": 1.5e308, "gone": np.inf}
    for step, sign in ((1, -1), (2, 1)):
        tree = {path: np.array([sign * number]) for path, number in numbers.items()}
        write_checkpoint(tmp_path / "far" / f"step_{step:08d}", tree, step=step, world=1)
    client = client_of(tmp_path / "far", tmp_path / "cache")
    [found] = client.get("/api/v1/runs").json()["runs"]
    b, a = (row["id"] for row in found["checkpoints"])
    rows = {row["path"]: row for row in measured(client, {"a": a, "b": b})["rows"]}
    assert (rows["over"]["max_abs"], rows["over"]["change"], rows["gone"]["max_abs"]) == ("Infinity", "Infinity", None)
    query = {"a": a, "b": b, "show": "content", "read": "true"}
    rows = {row["path"]: row["delta"] for row in client.get("/api/v1/diff", params=query).json()["rows"]}
    assert (rows["over"]["max_abs"], rows["over"]["mean_abs"], rows["gone"]["max_abs"]) == (
        "Infinity",
        "Infinity",
        None,
    )
    for page in ("/diff", "/diff/changes"):
        assert "Infinity" in client.get(page, params={**query, "by": "array"}).text


def test_arrays_and_layers_are_ranked_by_relative_change(pair):
    client, query, _ = pair
    before = client.get("/api/v1/diff/changes", params=query).json()
    assert (before["known"], before["rows"]) == (False, [])
    page = measured(client, query)
    assert (page["known"], page["arrays"], page["changed"], page["layers"]) == (True, 6, 2, 3)
    most, second, *rest = page["rows"]
    assert (most["path"], most["relative"], most["cosine"]) == ("layers.2.b", pytest.approx(2), pytest.approx(-1))
    assert (second["path"], second["relative"]) == ("layers.1.w", pytest.approx(0.5))
    assert second["cosine"] == pytest.approx(1) and second["changed"] == second["elements"] == 300
    assert {row["relative"] for row in rest} == {0.0} and all(row["cosine"] for row in rest)
    layers = client.get("/api/v1/diff/changes", params={**query, "by": "layer"}).json()["rows"]
    assert [row["path"] for row in layers] == ["layers.2", "layers.1", "layers.0"]
    first, after = states()
    wanted = [np.concatenate([side[f"layers.2.{part}"] for part in "wb"]) for side in (first, after)]
    assert layers[0]["relative"] == pytest.approx(np.linalg.norm(wanted[1] - wanted[0]) / np.linalg.norm(wanted[0]))
    [found] = client.get("/api/v1/diff/changes", params={**query, "q": "1.W"}).json()["rows"]
    assert found["path"] == "layers.1.w"
    assert "layers.2.b" in client.get("/diff/changes", params=query).text


def test_optimizer_state_is_ranked_apart_and_the_command_lists_it_last(tmp_path, capsys):
    run = tmp_path / "run"
    for step in (1, 2):
        parts = {"exp_avg": np.full(9, 10.0**step), "exp_avg_sq": np.full(9, 100.0**step)}
        tree = {"model": {"h.0.w": np.full(9, 1 + step / 9), "h.1.w": np.ones(9)}, "optimizer": {"state": {0: parts}}}
        write_checkpoint(run / f"step_{step:08d}", tree, step=step, world=1)
    client = client_of(run, tmp_path / "cache")
    [found] = client.get("/api/v1/runs").json()["runs"]
    b, a = (row["id"] for row in found["checkpoints"])
    page = measured(client, {"a": a, "b": b})
    assert page["parts"] == {"parameters": 2, "optimizer": 2, "all": 4} and page["part"] == "parameters"
    assert [row["path"] for row in page["rows"]] == ["model/h.0.w", "model/h.1.w"]

    def paths(**query):
        rows = client.get("/api/v1/diff/changes", params={"a": a, "b": b, **query}).json()["rows"]
        return [row["path"] for row in rows]

    moments = ["optimizer/state/0/exp_avg_sq", "optimizer/state/0/exp_avg"]
    assert paths(part="optimizer") == moments and paths(part="all")[:2] == moments
    assert paths(by="layer") == ["model/h.0", "model/h.1"]
    assert paths(by="layer", part="optimizer") == ["optimizer/state/0"]
    assert main(["diff", "--values", "--json", *map(str, sorted(run.iterdir()))]) == 0
    assert [one["path"] for one in json.loads(capsys.readouterr().out)["values"]] == ["model/h.0.w", *moments]
    text = client.get("/diff/changes", params={"a": a, "b": b, "part": "optimizer"}).text
    assert "exp_avg_sq" in text and "model/h.0.w" not in text


def test_what_was_measured_is_kept_as_long_as_the_files_stay_the_same(pair, tmp_path):
    client, query, run = pair
    measured(client, query)
    again = client_of(run, tmp_path / "cache")
    again.get("/api/v1/runs")
    assert again.get("/api/v1/diff/changes", params=query).json()["known"]
    os.utime(next((run / "step_00000001").glob("shard-*")))
    assert not again.get("/api/v1/diff/changes", params=query).json()["known"]


def test_damage_and_other_sites_start_nothing_silently(pair):
    client, query, run = pair
    sent = client.get(
        "/api/v1/diff/changes", params={**query, "action": "start"}, headers={"Sec-Fetch-Site": "cross-site"}
    )
    assert sent.status_code == 404
    shard = next((run / "step_00000002").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-8] ^= 1
    shard.write_bytes(data)
    page = measured(client, query)
    assert not page["known"] and "checksum" in page["error"]
