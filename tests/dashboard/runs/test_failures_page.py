"""The page of failed and killed saves agrees with the page of the run and with the command."""

import json
import time

import pytest

import treeckpt as tc
from tests.dashboard.helpers import client_of, page
from tests.helpers.background import until
from tests.helpers.killed_saves import DEAD, leave_killed
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name
from treeckpt._runs.failures import SaveFailure
from treeckpt._runs.run import RunDirectory
from treeckpt.errors import visible
from treeckpt_dashboard.pages.checkpoints import iso_time

HOSTILE = "<img src=x>\u202e"


def test_pages_json_and_command_list_the_same_failures(tmp_path, capsys):
    run = tmp_path / "run"
    tc.save(run / step_name(1), {"s": 1}, step=1)
    client = client_of(run, tmp_path / "cache")
    before = page(client)
    at = f"/runs/{before.json()['run']['id']}"
    assert before.json()["failures"]["known"] and not before.json()["failures"]["rows"]
    assert "No failed or killed save is known" in client.get(at).text
    with pytest.raises(tc.TreeError), tc.Manager(run, background=False) as manager:
        manager.save("tuned", {"s": object()})
    leave_killed(run)
    history, now = RunDirectory(run).failures, time.time_ns()
    history.keep(SaveFailure(f"{n:016x}", step_name(n), n, "failed", now - 9, now - n, error=HOSTILE) for n in range(4))
    history.keep([SaveFailure("f" * 16, step_name(9), 9, "failed", 1, now - 9 * 86_400 * 10**9)])
    assert until(lambda: page(client).json()["failures"]["total"] == 6)
    after = page(client).json()["failures"]
    found = client.get(f"/api/v1{at}/failures").json()
    assert (after["total"], after["older"], len(after["rows"])) == (6, 1, 3) == (found["total"], found["older"], 3)
    assert after["rows"] == found["rows"][:3] and "All 6" in client.get(at).text
    assert main(["ls", "--failures", "--json", str(run)]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    shared = found["rows"][0].keys() & listed["failures"][0].keys()
    assert shared >= {"save_id", "name", "step", "what", "error", "text", "world", "written"}
    rows = [[{name: row[name] for name in shared} for row in rows] for rows in (found["rows"], listed["failures"])]
    assert [row | {"error": visible(row["error"])} for row in rows[1]] == rows[0]
    assert [row["ended"] for row in found["rows"]] == [iso_time(row["ended_ns"]) for row in listed["failures"]]
    assert found["rows"][-1]["save_id"] == DEAD and found["rows"][-1]["checkpoint"], "its files are still there"
    text = client.get(f"{at}/failures").text
    assert HOSTILE not in text and "&lt;img src=x&gt;\\u202e" in text
    assert client.get(f"/api/v1{at}/failures?days=36500").json()["total"] == 7
    assert client.get(f"/api/v1{at}/failures/table.csv").text.count("\n") == 7
