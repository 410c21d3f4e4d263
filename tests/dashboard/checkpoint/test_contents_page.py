"""The statistics of all arrays: computed by a verification, kept by save, worst first, and over the steps of a run."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.dashboard.helpers import client_of, number_of
from tests.helpers.background import until
from tests.helpers.samples import write_checkpoint
from treeckpt._cli.main import main


def state(step):
    layers = {f"layers.{n}.w": np.full(1000, step + n / 10, np.float32) for n in range(6)}
    layers["layers.3.w"] = layers["layers.3.w"] * 100
    layers["loss_scale"] = np.array([np.nan, np.inf, 1.0] if step == 2 else [1.0, 2.0, 3.0])
    return {"model": layers, "<b>": np.zeros(3)}


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3):
        directory = tmp_path / "run" / f"step_{step:08d}"
        write_checkpoint(directory, state(step), step=step, world=1, layouts=lambda path, array: None)
    return tmp_path / "run"


@pytest.fixture
def client(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    return client_of(run, tmp_path / "cache")


def addresses(client):
    [run] = client.get("/api/v1/runs").json()["runs"]
    return {row["step"]: f"/checkpoints/{row['id']}" for row in run["checkpoints"]}


def test_one_click_computes_them_and_leads_to_what_is_not_finite(client, run):
    at = addresses(client)[2]
    empty = client.get(f"/api/v1{at}/contents").json()
    assert (empty["summary"], empty["rows"]) == (None, [])
    assert "Look for NaN" in client.get(at).text
    sent = client.get(f"{at}/verify", params={"action": "start", "then": "contents"}, follow_redirects=False)
    assert sent.headers["location"] == "contents"
    assert until(lambda: not client.get(f"/api/v1{at}/contents").json()["running"])
    page = client.get(f"/api/v1{at}/contents").json()
    assert (page["summary"]["not_finite"], page["summary"]["nan"], page["summary"]["infinite"]) == (1, 1, 1)
    assert page["checkpoint"]["intact"] and page["summary"]["arrays"] == 8
    first, zeros, second = page["rows"][:3]
    assert (zeros["path"], zeros["unusual"]) == ("<b>", "all zero")
    assert (first["path"], first["unusual"]) == ("model/loss_scale", "1 NaN, 1 Inf")
    assert (first["norm"], first["count"]) == (1.0, 3)
    assert second["path"] == "model/layers.3.w" and "× that of like arrays" in second["unusual"]
    text = client.get(f"{at}/contents").text
    assert "&lt;b&gt;" in text and "<b>" not in text and "in 1 array" in client.get(at).text
    [only] = client.get(f"/api/v1{at}/contents", params={"q": "LAYERS.4", "sort": "norm"}).json()["rows"]
    assert only["path"] == "model/layers.4.w" and only["mean"] == pytest.approx(2.4)
    table = client.get(f"/api/v1{at}/contents/table.csv").text.splitlines()
    assert len(table) == 9 and "model/loss_scale" in table[1] and "deviation" in table[0]
    norms = client.get(f"/api/v1{at}/contents", params={"sort": "norm"}).json()["rows"]
    assert norms[0]["path"] == "model/layers.3.w"
    assert client.get(f"/api/v1{at}/contents", params={"sort": "other"}).status_code == 422


def test_the_command_and_the_dashboard_share_them_and_show_one_array_over_steps(client, run, capsys):
    for step in (1, 2):
        assert main(["verify", "--statistics", str(run / f"step_{step:08d}")]) == 0
    text = capsys.readouterr().out
    assert "model/loss_scale" in text and "1 NaN, 1 Inf" in text
    at = addresses(client)
    number = number_of(client, f"/api/v1{at[1]}", "model/layers.2.w")
    found = client.get(f"/api/v1{at[1]}/leaves/{number}/steps").json()
    assert (found["step"], found["unknown"]) == ([1, 2], 1) and len(found["created"]) == 2
    assert [numbers["mean"] for numbers in found["numbers"]] == pytest.approx([1.2, 2.2])
    assert "Statistics" in client.get(f"{at[1]}/leaves/{number}").text
    assert "Statistics" not in client.get(f"{at[3]}/leaves/{number}").text
    assert main(["verify", "--statistics", "--json", str(run / "step_00000002")]) == 0
    shown = json.loads(capsys.readouterr().out)["statistics"]
    assert shown[0]["path"] == "model/loss_scale" and shown[0]["nan"] == 1


def test_integers_that_float64_does_not_hold_keep_their_digits(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    step, low, high = str(tmp_path / "wide" / "step_00000001"), -(2**63), 2**63 - 1
    write_checkpoint(Path(step), {"wide": np.array([low, 5, high])}, step=1, world=1)
    for command in (["verify", "--statistics", step], ["show", step, "wide"]):
        assert main(command) == 0
        assert {str(low), str(high)} <= set(re.findall(r"-?\d+", capsys.readouterr().out))
    assert main(["verify", "--statistics", "--json", step]) == 0
    [found] = json.loads(capsys.readouterr().out)["statistics"]
    assert (found["low"], found["high"]) == (str(low), str(high))
    assert main(["show", step, "wide", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["values"]["statistics"]
    assert (found["minimum"], found["maximum"], found["mean"]) == (str(low), str(high), 4 / 3)
    client = client_of(tmp_path / "wide", tmp_path / "cache")
    at = addresses(client)[1]
    [row] = client.get(f"/api/v1{at}/contents").json()["rows"]
    assert (row["minimum"], row["maximum"], row["largest"]) == (str(low), str(high), 2.0**63)
    for page in (f"{at}/contents", f"{at}/leaves/0", f"/api/v1{at}/contents/table.csv"):
        assert f">{low}<" in (text := client.get(page).text) or f",{low}," in text
    found = client.get(f"/api/v1{at}/leaves/0/peek").json()["statistics"]
    assert (found["minimum"], found["maximum"]) == (str(low), str(high))


def test_statistics_hold_for_the_files_that_were_read_only(client, run):
    main(["verify", "--statistics", str(run / "step_00000001")])
    at = addresses(client)[1]
    assert client.get(f"/api/v1{at}/contents").json()["summary"]["not_finite"] == 0
    shard = next((run / "step_00000001").glob("shard-*"))
    os.utime(shard)
    assert client.get(f"/api/v1{at}/contents").json()["summary"] is None


def test_the_rms_is_explained_where_it_is_named(client):
    at = addresses(client)[1]
    client.get(f"{at}/verify", params={"action": "start"})
    assert until(lambda: client.get(f"/api/v1{at}/contents").json()["rows"])
    named, explained = "RMS ", "RMS is the root of the mean square"
    pages = [client.get(f"{at}/contents", params={"q": word}).text for word in ("layers.3", "loss_scale")]
    assert [(named in page.replace(explained, ""), explained in page) for page in pages] == [
        (True, True),
        (False, False),
    ]
