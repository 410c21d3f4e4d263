"""The page of the first NaN agrees with the command, and what its scan finds is passed over where a run is resumed."""

import json
import shutil

import httpx
import numpy as np
import pytest

from tests.dashboard.helpers import client_of, page
from tests.helpers.background import until
from tests.helpers.corruption import flip
from tests.helpers.samples import write_checkpoint
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Six steps without metrics, with a NaN from the third one on."""
    run = tmp_path_factory.mktemp("saved") / "run"
    for step in range(1, 7):
        weight = np.full((16, 8), step, np.float32)
        if step > 2:
            weight[11, 3] = np.nan
        write_checkpoint(run / step_name(step), {"model": {"w": weight}, "n": step}, step=step)
    return run


@pytest.fixture
def run(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(saved, tmp_path / "run")


def scanned(client):
    """Starts a scan through the page, as its form does, and waits for its end; returns the answer and the page."""
    at = f"/runs/{page(client).json()['run']['id']}/first-nan"
    sent = client.get(at, params={"action": "start"}, follow_redirects=False)
    assert (sent.status_code, sent.headers["location"]) == (303, "first-nan")
    assert until(lambda: not client.get(f"/api/v1{at}").json()["running"])
    return client.get(f"/api/v1{at}").json(), client.get(at).text


def test_a_scan_finds_what_the_command_finds_and_resume_passes_over_it(run, tmp_path, capsys):
    client = client_of(run, tmp_path / "cache")
    assert page(client).json()["resume"]["newest"]["checkpoint"]["step"] == 6, "nothing is known yet"
    found, text = scanned(client)
    assert (found["job"]["state"], found["job"]["error"], found["job"]["read"]) == ("ended", None, 6)
    assert main(["show", "--stats", "--json", str(run)]) == 0
    assert json.loads(capsys.readouterr().out) == found["report"]
    [row] = found["report"]["nan"]["rows"]
    assert (row["path"], row["first_nan"]["index"]) == ("model/w", [11, 3])
    assert "Step 3 is the first with NaN" in text and "[11, 3]" in text and f"leaves/{row['leaf']}" in text
    after = page(client).json()
    assert after["resume"]["newest"]["checkpoint"]["step"] == 2
    assert [one["step"] for one in after["resume"]["passed_over"]] == [6, 5, 4, 3]
    leaf = client.get(f"/checkpoints/{found['ids']['step_00000003']}/leaves/{row['leaf']}").text
    assert "[11, 3]" in leaf


def test_damage_is_named_and_a_second_start_reads_nothing(run, tmp_path):
    shard = sorted((run / step_name(1)).glob("shard-*"))[0]
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 9))
    client = client_of(run, tmp_path / "cache")
    found, text = scanned(client)
    assert [one["name"] for one in found["report"]["unread"]] == ["step_00000001"] and "differ from" in text
    again, _ = scanned(client)
    assert again == found, "the same job, as none was started"


def test_a_page_of_another_site_starts_no_scan(run, tmp_path):
    client = client_of(run, tmp_path / "cache")
    at = f"/api/v1/runs/{page(client).json()['run']['id']}/first-nan"
    other = httpx.Headers({"sec-fetch-site": "cross-site"})
    assert client.get(at, params={"action": "start"}, headers=other).status_code == 404
    assert client.get(at).json()["job"] is None
