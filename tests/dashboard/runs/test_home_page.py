"""The list of runs, one a row, and the search over runs, steps and leaves."""

import math
import shutil

import pytest

from tests.dashboard.helpers import under_way
from tests.helpers.background import until
from tests.helpers.large import write_large_checkpoint, write_many
from tests.helpers.samples import write_metrics
from treeckpt._cli.main import main
from treeckpt._core.format.index import INDEX_NAME
from treeckpt_dashboard.pages.render import sparkline
from treeckpt_dashboard.runs import finder


@pytest.fixture(autouse=True)
def unhurried_search(monkeypatch):
    monkeypatch.setattr(finder, "LEAF_SECONDS", 60.0)  # a busy machine may need more than 0.3 s to read two indexes


@pytest.fixture
def client(serve, tmp_path):
    many = write_many(tmp_path / "gpt-large", 6, metrics=lambda step: {"lr": 1.0, "loss": 700.0 / step})
    under_way(many / "step_00000700", [(500, "write")])
    few = write_metrics(tmp_path / "vit", {700: {"acc": 0.5}, 7000: {"acc": 0.75}})
    (tmp_path / "empty").mkdir()
    client = serve(many, few, tmp_path / "empty")
    client.get("/")
    for watch in client.app.state.library.watches.values():
        watch.refresh(wait=300)
    return client


def test_every_run_is_one_row_with_what_its_newest_checkpoint_is(client):
    large, vit, empty = client.get("/api/v1/runs").json()["runs"]
    assert (large["good"]["step"], large["state"]) == (600, "in_progress")
    assert [value["last"] for value in large["values"]] == [700 / 600, None], "loss and acc"
    assert large["durations"] == pytest.approx([1 + n % 7 / 3 for n in range(1, 7)])
    assert (vit["good"]["step"], vit["state"]) == (7000, "complete")
    assert [(value["last"], value["last_step"]) for value in vit["values"]] == [(None, None), (0.75, 7000)]
    assert (empty["good"], empty["state"], empty["durations"]) == (None, None, [])
    text = client.get("/").text
    assert text.count('<th scope="row">') == 3 and text.count("<polyline") == 2 and "no checkpoints" in text


@pytest.mark.parametrize(
    ("q", "names"),
    [
        ("GPT", ["gpt-large"]),
        ("in progress", ["gpt-large"]),
        ("complete", ["vit"]),
        ("vit acc", ["vit"]),
        ("none", []),
    ],
)
def test_runs_are_filtered_by_words(client, q, names):
    found = client.get("/api/v1/runs", params={"q": q}).json()
    assert [run["name"] for run in found["runs"]] == names and found["total"] == 3
    assert client.get("/", params={"q": q}).text.count('<th scope="row">') == len(names)


def test_a_single_run_is_shown_at_once(serve, tmp_path):
    client = serve(write_many(tmp_path / "run", 2))
    answer = client.get("/", follow_redirects=False)
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert (answer.status_code, answer.headers["location"]) == (307, f"runs/{run['id']}")


def found(client, q, at=""):
    answer = client.get("/api/v1/find", params={"q": q, "at": at})
    assert answer.status_code == 200
    return answer.json()


def test_a_search_finds_runs_steps_and_leaves(client):
    texts = [(item["kind"], item["text"]) for item in found(client, "vit")["items"]]
    assert texts == [("run", "vit")]
    items = found(client, "7,00")["items"]
    assert [(i["text"], i["detail"]) for i in items] == [
        ("step 700", "in progress · gpt-large"), ("step 700", "complete · vit"), ("step 7,000", "complete · vit"),
    ]  # fmt: skip
    assert [i["text"] for i in found(client, "vit step 7000")["items"]] == ["step 7,000"]
    leaves = found(client, "large QKV")["items"]
    assert {(i["kind"], i["detail"]) for i in leaves} == {("leaf", "step 600 · gpt-large")}
    assert client.get("/" + leaves[0]["href"]).status_code == 200 and "attention.qkv" in leaves[0]["text"]
    assert all(client.get("/" + i["href"]).status_code == 200 for i in items)
    assert found(client, "nothing is called so") == {
        "q": "nothing is called so",
        "items": [],
        "more": False,
        "complete": True,
    }


def test_what_the_page_shows_comes_first(client):
    _, vit, _ = client.get("/api/v1/runs").json()["runs"]
    assert found(client, "700", vit["id"])["items"][0]["detail"] == "complete · vit"
    older = vit["checkpoints"][1]
    assert [i["detail"] for i in found(client, "x", older["id"])["items"] if i["kind"] == "leaf"][:2] == [
        "step 700 · vit", "step 7,000 · vit",
    ]  # fmt: skip
    assert [i["text"] for i in found(client, "")["items"]] == ["gpt-large", "vit", "empty"]
    assert [i["text"] for i in found(client, "", vit["id"])["items"]][3:] == ["step 7,000", "step 700"]
    assert found(client, "700", "0" * 12)["items"] and found(client, "\x00\u202e")["items"] == []


def test_runs_in_a_folder_are_those_that_ls_names_and_new_ones_appear(serve, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("treeckpt_dashboard.store.library.LOOK_SECONDS", 0.05)
    write_many(tmp_path / "runs" / "b", 1)
    (tmp_path / "runs" / "logs").mkdir()
    (tmp_path / "runs" / "link").symlink_to("b")
    client = serve(tmp_path / "runs")

    def named():
        return [run["name"] for run in client.get("/api/v1/runs").json()["runs"]]

    assert named() == ["b"] and client.get("/").status_code == 200, "a list, in which others may appear"
    tag = client.get("/").headers["ETag"]
    write_many(tmp_path / "runs" / "a", 2)
    assert until(lambda: named() == ["a", "b"])
    text = client.get("/", headers={"If-None-Match": tag}).text
    assert text.count('<th scope="row">') == 2 and "no checkpoint" not in text
    [first, _] = client.get("/api/v1/runs").json()["runs"]
    assert client.get(f"/runs/{first['id']}").status_code == 200
    assert client.get(f"/api/v1/runs/{first['id']}/trends").status_code == 200
    assert main(["ls", str(tmp_path / "runs")]) == 0
    told = capsys.readouterr().out
    assert "a: a run of 2 steps" in told and "b: a run of 1 step," in told and "link: a run" not in told
    shutil.rmtree(tmp_path / "runs" / "b")
    assert until(lambda: named() == ["a"])
    watches = client.app.state.library.watches
    assert until(lambda: watches.keys() == {first["id"]}), "nothing is kept of a run that is gone"


def test_a_folder_that_becomes_a_run_or_a_folder_of_runs_is_taken_for_it(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("treeckpt_dashboard.store.library.LOOK_SECONDS", 0.05)
    (tmp_path / "new").mkdir()
    client = serve(tmp_path / "new")
    [empty] = client.get("/api/v1/runs").json()["runs"]
    assert empty["name"] == "new" and empty["total"] == 0
    write_many(tmp_path / "new" / "first", 1)
    assert until(lambda: [run["name"] for run in client.get("/api/v1/runs").json()["runs"]] == ["first"])
    write_many(tmp_path / "new", 1)  # steps of its own: it is a run, as for `ls`
    assert until(lambda: [run["id"] for run in client.get("/api/v1/runs").json()["runs"]] == [empty["id"]])


def test_there_is_a_limit_which_is_told(serve, tmp_path, monkeypatch):
    client = serve(write_many(tmp_path / "run", 30))
    client.get("/")
    for watch in client.app.state.library.watches.values():
        watch.refresh(wait=300)
    assert found(client, "step 1")["items"][0]["text"] == "step 1,900", "the path may have a 1"
    assert found(client, "100")["items"][0]["text"] == "step 100", "exactly this before what begins like it"
    answer = found(client, "step_")
    assert len(answer["items"]) == finder.MAX_STEPS and answer["more"]
    monkeypatch.setattr(finder, "LEAF_SECONDS", -1.0)
    assert not found(client, "qkv")["complete"]


def test_an_index_that_cannot_be_read_leaves_the_others_findable(serve, tmp_path, monkeypatch):
    for name in ("a", "b"):
        write_large_checkpoint(tmp_path / name / "step_00000001", leaves=8)
    client = serve(tmp_path / "a", tmp_path / "b")
    assert {i["detail"] for i in found(client, "qkv")["items"]} == {"step 1 · a", "step 1 · b"}
    for watch in client.app.state.library.watches.values():
        watch.refresh(wait=300)
        monkeypatch.setattr(watch, "_fresh_until", math.inf)  # however long it takes, the list stays as it was
    (tmp_path / "a" / "step_00000001" / INDEX_NAME).write_bytes(b"{}")  # since the list was made
    answer = found(client, "qkv")
    assert {i["detail"] for i in answer["items"]} == {"step 1 · b"} and not answer["complete"]


def test_a_sparkline_stands_on_zero_and_takes_any_number():
    assert sparkline([1.0, 2.0, 0.0]) == "0.0,10.0 50.0,1.0 100.0,19.0"
    assert sparkline([]) == "" and sparkline([0.0, float("inf"), float("nan"), -1.0]).count(",19.0") == 4
