"""What a run can be resumed from, whether its newest good checkpoint is late, and the lineage after rollbacks."""

import json
import subprocess
import time

import msgspec
import numpy as np
import pytest

import treeckpt as tc
from tests.dashboard.helpers import page
from tests.helpers.large import write_many
from tests.helpers.samples import write_metrics, write_mixed_run
from tests.helpers.world import on_ranks
from treeckpt._cli.main import main
from treeckpt._core.text import shell_quoted
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.statistics_store import StatisticsStore
from treeckpt._runs.verification import Verification, VerificationStore, cache_directory, verify_folder
from treeckpt.policy import Best, parse_keep
from treeckpt_dashboard.runs.summary import resume_facts

SECOND, NOW = 10**9, 2 * 10**18
INTACT = Verification(
    save_id="", ended_ns=0, fingerprint="", complete=True, by="", files=1, nbytes=1, seconds=1.0, total=0, problems=[]
)
DAMAGED = msgspec.structs.replace(INTACT, total=1)


def panel(client, query=""):
    return page(client, query).json()["resume"]


def step_of(point):
    return None if point is None else point["checkpoint"]["step"]


def saved(step, ago, **fields):
    """A complete checkpoint that was begun so many seconds ago, with its id."""
    created = NOW - int(ago * SECOND)
    return f"{step}", CheckpointInfo(
        f"step_{step:08d}", "", "complete", step, f"{step:x}", created_ns=created, **fields
    )


def facts_of(*listed, policies=(), chosen=None):
    return resume_facts(listed, policies, chosen)


def test_newest_good_best_and_newest_verified_are_told_with_what_loads_them(serve, tmp_path):
    run = write_metrics(tmp_path / "run", {1: {"loss": 3.0}, 2: {"loss": 1.5}, 3: {"loss": 2.0, "lr": 1.0}})
    client = serve(run)
    assert step_of(panel(client)["best"]) is None, "whether more is better is not known"
    found = panel(client, "?best=loss:min")
    assert [step_of(found[kind]) for kind in ("newest", "best", "intact")] == [3, 2, None]
    best = found["best"]
    assert (best["metric"], best["mode"], best["value"]) == ("loss", "min", 1.5) and found["newest"]["metric"] is None
    names = {}
    for kind in ("newest", "best"):
        for form in ("manager", "load"):
            code = found[kind]["snippets"][form]
            if kind != "newest" or form != "manager":  # that one fills a model
                exec(code, names)  # they are Python that runs, and loads the step that is shown
                assert names["state"] == {"x": 1} and "keep=None" in found[kind]["snippets"]["manager"]
    assert names["manager"].count == 2
    command = best["snippets"]["command"].split(maxsplit=1)[1]
    shown = subprocess.run(["bash", "-c", f"printf %s {command.split(maxsplit=1)[1]}"], capture_output=True, check=True)
    assert command.startswith("verify ") and shown.stdout.decode() == str(run / "step_00000002")


def test_what_two_ranks_saved_with_state_of_their_own_loads_in_one_process_as_shown(serve, tmp_path):
    def work(comm):
        manager = tc.Manager(tmp_path / "run", keep=None, background=False, comm=comm)
        for step in (50, 60):
            manager.save(step, {"x": step, "rng": tc.PerRank(comm.rank)}, metrics={"loss": step})

    on_ranks(2, work)
    found = panel(serve(tmp_path / "run"), "?best=loss:min")
    for kind, form, step in (("newest", "load", 60), ("best", "load", 50), ("best", "manager", 50)):
        names = {}
        exec(found[kind]["snippets"][form], names)
        assert (names["state"]["x"], names["state"]["rng"].value) == (step, 0)


def test_the_best_is_that_of_the_policy(serve, tmp_path):
    run = write_metrics(tmp_path / "run", {1: {"loss": 3.0, "acc": 0.1}, 2: {"loss": 1.5, "acc": 0.9}, 3: {"acc": 0.5}})
    client = serve(run, policies=parse_keep("best:acc:max"))
    assert (step_of(panel(client)["best"]), panel(client)["best"]["mode"]) == (2, "max")
    assert step_of(panel(client, "?keep=best:loss:1:max")["best"]) == 1
    assert step_of(panel(client, "?best=loss:min")["best"]) == 2, "what the user chooses goes before the policy"
    assert page(client, "?best=loss").status_code == 422, "the direction is not guessed"
    assert panel(client, "?best=acc:min:max")["best"] is None, "no metric is called acc:min"


def test_the_choice_of_the_best_is_kept_in_the_links_of_the_page(serve, tmp_path):
    client = serve(write_metrics(tmp_path / "run", {1: {"reward": 3.0}, 2: {"reward": 1.5}}))
    run = page(client).json()["run"]["id"]
    text = client.get(f"/runs/{run}?best=reward:max").text
    assert '<button name="best" value="" aria-pressed="true">highest reward</button>' in text
    assert "&amp;best=reward%3Amax" in text and '<input type="hidden" name="best" value="reward:max">' in text


def test_what_is_intact_but_not_healthy_is_passed_over_and_named(serve, tmp_path, capsys):
    run = tmp_path / "run"
    nan, cache = float("nan"), cache_directory()
    arrays = {18: [1.0, nan, float("inf")], 19: [nan, nan, 1.0]}
    with tc.Manager(run, keep=None, background=False) as manager:
        for step, loss in {10: 0.5, 15: nan, 18: 0.2, 19: 0.1}.items():
            manager.save(step, {"w": np.array(arrays.get(step, [1.0]))}, metrics={"loss": loss})
        for step in arrays:
            folder = tc.LocalStore(run / f"step_{step:08d}")
            _, found = verify_folder(folder, "test", statistics=StatisticsStore(cache))
            assert VerificationStore(cache).record(folder, found, beside=True) == []
        assert manager.best("loss") == 10
    client = serve(run)
    found = panel(client, "?best=loss:min")
    assert (step_of(found["newest"]), step_of(found["best"]), step_of(found["intact"])) == (10, 10, None)
    assert [(one["step"], one["reason"]) for one in found["passed_over"]] == [
        (19, "2 elements of arrays NaN, first in w"),
        (18, "1 element of arrays NaN, first in w"),
        (15, "loss is NaN"),
    ]
    assert "manager.restore(step=10)" in found["newest"]["snippets"]["manager"], "resume would go on from step 19"
    text = client.get(f"/runs/{found['newest']['checkpoint']['run']}").text
    assert "2 elements of arrays NaN, first in w" in text and ">not healthy<" in text
    assert main(["ls", str(run)]) == 0
    assert "step_00000015: not healthy: loss is NaN" in capsys.readouterr().out
    assert main(["ls", str(run), "--json"]) == 0
    rows = {row["step"]: row["unhealthy"] for row in json.loads(capsys.readouterr().out)}
    assert (rows[10], rows[15], rows[19]) == ("", "loss is NaN", "2 elements of arrays NaN, first in w")


def test_damaged_partial_and_abandoned_ones_are_no_good(serve, tmp_path):
    client = serve(write_mixed_run(tmp_path / "run"))
    assert step_of(panel(client)["newest"]) == 200
    listed = [
        saved(4, 1, verification=DAMAGED),
        saved(3, 2),
        saved(2, 3, verification=INTACT),
        saved(9, 0, abandoned=True),
    ]
    facts = facts_of(*listed)
    assert [pair and pair[0] for pair in (facts.newest, facts.intact)] == ["3", "2"]
    ratings = [saved(n, n, metrics={"loss": value}) for n, value in ((1, float("nan")), (2, 2.0), (3, 2.0), (4, 3.0))]
    best = facts_of(*ratings, chosen=Best("loss")).best
    assert best is not None and best[0] == "2", "of equal ones the newest, which comes first"
    assert facts_of().newest is None is facts_of(saved(1, 1), policies=(Best("loss"),)).best


def test_a_checkpoint_by_itself_has_no_manager(serve, tmp_path):
    run = write_metrics(tmp_path / "run", {1: {"loss": 3.0}})
    newest = panel(serve(run / "step_00000001"))["newest"]
    assert newest["snippets"]["manager"] is None and "tc.load(" in newest["snippets"]["load"]


@pytest.mark.parametrize(
    "name", ["plain", "with space", "it's", "$(touch x)", "a\u202eb", "tab\there", "line\nbreak", "ä'\\x", "\udcff"]
)
def test_a_shell_reads_the_quoted_name_and_no_invisible_character_is_pasted(name):
    quoted = shell_quoted(name)
    assert quoted.isascii() and quoted.isprintable()
    shown = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, check=True)
    assert shown.stdout == name.encode("utf-8", "surrogateescape")


def test_whether_a_run_trains_is_told_alike_by_pages_metrics_and_the_command(serve, tmp_path, capsys):
    start = time.time_ns() - 20 * 60 * SECOND - 6 * 60 * SECOND
    done = write_many(tmp_path / "done", 3)
    with tc.Manager(done, keep=None) as manager:
        manager.save(1000, {"x": 1})
    runs = [write_many(tmp_path / "late", 6, start_ns=start), write_many(tmp_path / "old", 6), done]
    client = serve(*runs)
    client.get("/api/v1/runs")
    for watch in client.app.state.library.watches.values():
        watch.refresh(wait=300)
    shown = client.get("/api/v1/runs").json()["runs"]
    assert [one["activity"]["state"] for one in shown] == ["late", "ended", "finished"]
    assert shown[0]["activity"]["interval"] == 60 and 1200 <= shown[0]["good_age"] < 1260
    metrics = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    home = client.get("/").text
    for run, one in zip(runs, shown, strict=True):
        state, text = one["activity"]["state"], one["activity"]["text"]
        main(["ls", str(run), "--metric", "loss", "--json"])
        [said] = json.loads(capsys.readouterr().out)
        changing = ("text",) if state == "late" else ()
        assert {k: v for k, v in said["activity"].items() if k not in changing} == {
            k: v for k, v in one["activity"].items() if k not in changing
        }
        main(["ls", str(run)])
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"{run}: {state}") and (state == "late" or last == f"{run}: {text}")
        page = client.get(f"/runs/{one['id']}").text
        assert f"{state[0].upper()}{state[1:]}" in page and text.partition(":")[2][:60] in page
        assert ('class="late"' in page) == (state == "late")
        assert f">{state}</span>" in home
        numbers = {
            s: metrics[f'treeckpt_run_state{{run="{run.name}",state="{s}"}}'] for s in ("late", "ended", "finished")
        }
        assert numbers == {s: f"{int(s == state)}" for s in numbers}
    assert metrics['treeckpt_save_interval_seconds{run="late"}'] == "60.0"
    assert 1200 <= float(metrics['treeckpt_newest_good_age_seconds{run="late"}']) < 1260
    assert metrics['treeckpt_newest_good_step{run="old"}'] == "600"
    found = client.get("/api/v1/runs", params={"q": "finished"}).json()["runs"]
    assert [one["name"] for one in found] == ["done"]


def test_an_open_page_learns_that_a_checkpoint_is_late(serve, tmp_path, monkeypatch):
    client = serve(write_many(tmp_path / "run", 4, start_ns=time.time_ns() - 241 * SECOND))
    tag = page(client).headers["etag"]
    place = f"/runs/{client.get('/api/v1/runs').json()['runs'][0]['id']}"
    tag = client.get(place).headers["etag"]
    assert client.get(place, headers={"if-none-match": tag}).status_code == 304
    now = time.time_ns() + 600 * SECOND
    monkeypatch.setattr(time, "time_ns", lambda: now)
    assert "usually every" in client.get(place, headers={"if-none-match": tag}).text


def test_the_lineage_says_from_which_step_a_run_was_resumed(serve, tmp_path):
    made = tc.Manager(tmp_path / "run", keep=None, background=False)
    for step in (10, 20, 30, 40):
        made.save(step, {"step": step})
    [only] = panel(serve(made.directory.url))["branches"]
    assert (only["first"], only["last"], only["resumed"], only["abandoned"]) == (10, 40, False, 0)
    made.restore(step=20)
    for step in (21, 22):
        made.save(step, {"step": step})
    client = serve(made.directory.url)
    newest, first = panel(client)["branches"]
    assert (newest["first"], newest["last"], newest["checkpoints"], newest["abandoned"]) == (21, 22, 2, 0)
    assert newest["resumed"] and newest["follows"] == 20 and newest["began"] > first["began"]
    assert (first["first"], first["last"], first["checkpoints"], first["abandoned"]) == (10, 40, 4, 2)
    text = client.get("/").text
    assert "resumed from step 20" in text and "2 of them abandoned" in text
    made.delete(20)
    client = serve(made.directory.url)
    assert panel(client)["branches"][0]["follows"] is None
    assert "a step that was deleted since" in client.get("/").text
