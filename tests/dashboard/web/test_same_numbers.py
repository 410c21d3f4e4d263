"""A page, its JSON and the command line show the same numbers, for a dozen runs."""

import html
import json
import re
from datetime import UTC, datetime

import pytest
from starlette.testclient import TestClient

from tests.dashboard.helpers import page, usage_when_made
from tests.helpers.adapted import FROZEN, NBYTES, data_nbytes, write_adapted
from tests.helpers.background import until
from tests.helpers.dozen_runs import SLOW_SINCE, write_dozen
from treeckpt._cli.main import main
from treeckpt_dashboard.web.app import create_app

SAME = ("step", "save_id", "world", "leaves", "nbytes", "disk_nbytes", "seconds", "metrics", "pinned", "abandoned",
        "unhealthy", "status")  # fmt: skip
"""What `ls --json` and the JSON of a run call alike."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The runs by name, and a client that has looked at all of them; verifications lie where the commands put them."""
    runs = write_dozen(tmp_path_factory.mktemp("dozen"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREECKPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        main(["verify", str(runs["damaged"])])
        client = TestClient(create_app(list(map(str, runs.values()))), base_url="http://127.0.0.1:8265")
        assert until(lambda: '"reading"' not in client.get("/api/v1/runs").text)
        yield runs, client


@pytest.fixture
def printed(capsys):
    """What a command prints as JSON, or as text, whatever its exit code."""

    def run(*command, text=False):
        capsys.readouterr()
        main([*map(str, command), *([] if text else ["--json"])])
        said = capsys.readouterr().out
        return said if text else json.loads(said)

    return run


def of_run(client, name):
    """The JSON of a run, with all of its rows."""
    runs = client.get("/api/v1/runs").json()["runs"]
    found = next(run["id"] for run in runs if run["name"] == name)
    return client.get(f"/api/v1/runs/{found}").json()


def cells(page):
    """The texts of the cells of each row of the tables of a page, by the address that the row leads to."""
    rows = {}
    for row in re.findall(r"<tr\b.*?</tr>", page, re.DOTALL):
        at = re.search(r'href="(?:\.\./)*checkpoints/([^"/?#]+)"', row)
        if at:
            texts = re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.DOTALL)
            rows[at[1]] = [" ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split()) for text in texts]
    return rows


NAMES = ("healthy", "damaged", "killed", "rolled_back", "slow_rank", "slow_disk", "nan", "tables", "pipeline", "mesh",
         "wide", "foreign")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_listed_alike(asked, printed, name):
    runs, client = asked
    listed = {row["name"]: row for row in printed("ls", runs[name])}
    answer = of_run(client, name)["run"]
    shown = {row["name"]: row for row in answer["checkpoints"]}
    assert listed.keys() == shown.keys()
    texts = {line.split()[0]: line for line in printed("ls", runs[name], text=True).splitlines() if line[:1] != " "}
    page = cells(client.get(f"/runs/{answer['id']}").text)
    for step, row in listed.items():
        there = shown[step]
        same = [key for key in SAME if row["status"] != "foreign" or key != "disk_nbytes"]  # `ls` names their format
        assert {key: row[key] for key in same} == {key: there[key] for key in same}, step
        if row["created_ns"] is not None:
            created = datetime.fromisoformat(there["created"])
            assert abs(created - datetime.fromtimestamp(row["created_ns"] / 1e9, UTC)).total_seconds() < 0.001
        if row["status"] == "complete":  # sizes and durations are the same texts
            for cell in page[there["id"]]:
                if re.fullmatch(r"[\d.]+ (?:[kMGT]?B|[mµn]?s)", cell):
                    assert cell in texts[step], (step, cell)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_shown_alike(asked, printed, name):
    runs, client = asked
    newest = next(row for row in of_run(client, name)["run"]["checkpoints"] if row["status"] == "complete")
    said = printed("show", runs[name] / newest["name"])
    page = client.get(f"/api/v1/checkpoints/{newest['id']}").json()
    assert {key: said[key] for key in ("nbytes", "leaves", "world", "step", "save_id")} == {
        key: page["checkpoint"][key] for key in ("nbytes", "leaves", "world", "step", "save_id")
    }
    for row in page["tree"]["rows"]:
        other = next(one for one in said["rows"] if one["path"] == row["path"])
        assert (row["nbytes"], row["leaves"], row["kind"]) == (other["nbytes"], other["leaves"], other["kind"])


@pytest.mark.parametrize("name", ["healthy", "damaged", "nan", "tables", "mesh"])
def test_checkpoints_are_compared_alike(asked, printed, name):
    runs, client = asked
    after, before = [row for row in of_run(client, name)["run"]["checkpoints"] if row["status"] == "complete"][:2]
    said = printed("diff", runs[name] / before["name"], runs[name] / after["name"], "--values")
    rows, start = [], 0
    while start is not None:
        page = client.get("/api/v1/diff", params={"a": before["id"], "b": after["id"], "start": start}).json()
        rows, start = rows + page["rows"], page["next"]
    assert page["same"] == said["same"]
    shown = {(row["path"], row["before"], row["after"]) for row in rows if row["what"] != "content"}
    assert shown == {(row["path"], row["before"], row["after"]) for row in said["changes"]}
    changed = {row["path"] for row in said["values"] if row["verdict"] == "changed"}
    by_verdict = {word: {row["path"] for row in rows if row["verdict"] == word} for word in ("changed", "unknown")}
    # the command reads what checksums do not tell; the page does where it is asked to
    assert by_verdict["changed"] <= changed <= by_verdict["changed"] | by_verdict["unknown"]


def test_damage_is_told_alike(asked, printed):
    runs, client = asked
    listed = {row["name"]: row for row in printed("ls", runs["damaged"])}
    for row in of_run(client, "damaged")["run"]["checkpoints"]:
        found, there = listed[row["name"]]["verification"], row["verification"]
        assert (found is None) == (there is None), row["name"]
        if found is not None:
            assert [part["text"] for part in found["problems"]] == [part["text"] for part in there["problems"]]


@pytest.mark.parametrize("name", ["healthy", "damaged", "rolled_back", "mesh"])
def test_what_a_clean_up_frees_is_told_alike(asked, printed, name):
    runs, client = asked
    said = printed("gc", runs[name], "--keep-last", "2", "--dry-run")
    rows = usage_when_made(client, keep="last:2")["runs"]
    row = next(row for row in rows if row["name"] == name)
    assert row["plan"]["freed"] == sum(one["nbytes"] for one in said["removed"])


def without_ids(hosts):
    """The stragglers by host, without the ids of their last saves, which the command calls by name."""
    return [host | {"ranks": [rank | {"id": None} for rank in host["ranks"]]} for host in hosts]


@pytest.mark.parametrize("name", NAMES)
def test_trends_are_told_alike(asked, printed, name):
    runs, client = asked
    place = f"runs/{of_run(client, name)['run']['id']}/trends"
    [said], text = printed("ls", runs[name], "--trends"), printed("ls", runs[name], "--trends", text=True)
    answer = client.get(f"/api/v1/{place}").json()
    assert (said["text"], said["saves"]) == (answer["text"], answer["timed"])
    assert without_ids(said["hosts"]) == without_ids(answer["hosts"])
    assert (answer["text"] or "to compare them") in text
    if answer["text"]:
        assert answer["text"] in " ".join(html.unescape(client.get(f"/{place}").text).split())
    if name in ("slow_rank", "slow_disk"):
        assert answer["text"].startswith(f"Since step {SLOW_SINCE} (2025-06-15 15:47:40 UTC) saves take 275 ms")


def test_own_and_shared_bytes_are_told_alike(printed, tmp_path):
    run = tmp_path / "run"
    write_adapted(run)
    client = TestClient(create_app([str(run)]), base_url="http://127.0.0.1:8265")
    shown = {row["name"]: row for row in page(client, "?keep=last:1").json()["run"]["checkpoints"]}
    keys = ("nbytes", "disk_nbytes", "shared_nbytes", "shared_with")
    for row in printed("ls", run):
        assert {key: row[key] for key in keys} == {key: shown[row["name"]][key] for key in keys}
        assert row["shared_nbytes"] == (0 if row["step"] == 1 else FROZEN * NBYTES)
    [shared] = printed("show", run / "step_00000004")["shared_with"].items()
    assert shared == ("step_00000001", shown["step_00000004"]["shared_with"]["step_00000001"])
    origin, answer = (
        printed("show", run / "step_00000001"),
        client.get(f"/api/v1/checkpoints/{shown['step_00000001']['id']}").json(),
    )
    assert origin["needed_nbytes"] == answer["needed_nbytes"] == shared[1] < data_nbytes(run / "step_00000001")
    assert origin["needed_by"] == answer["needed_by"] == [f"step_0000000{step}" for step in (2, 3, 4)]
    # what a clean-up frees: the files of three, without those that the fourth shares
    planned = printed("gc", run, "--keep-last", "1", "--dry-run")
    freed = sum(removal["nbytes"] for removal in planned["removed"])
    usage = usage_when_made(client, keep="last:1")["runs"][0]
    assert usage["plan"]["freed"] == freed == page(client, "?keep=last:1").json()["run"]["goes_nbytes"]
    assert usage["nbytes"] == sum(row["disk_nbytes"] for row in shown.values()) < 1.1 * FROZEN * NBYTES


def test_trends_have_the_bytes_that_were_written(tmp_path):
    write_adapted(tmp_path / "run")
    client = TestClient(create_app([str(tmp_path / "run")]), base_url="http://127.0.0.1:8265")
    run = page(client).json()["run"]
    trends = client.get(f"/api/v1/runs/{run['id']}/trends").json()
    assert trends["nbytes"] == [FROZEN * (NBYTES + 4000), *[FROZEN * 4000] * 3]
    assert [row["rate"] for row in run["checkpoints"]] == trends["rate"][::-1]
