"""What the page of a slow save says first: how slow it was, and where the time went."""

import json

import pytest

from tests.helpers.samples import START_NS, write_checkpoint
from treeckpt._cli.main import main
from treeckpt._core.format.timings import Host, Span, Timings, encode_timings, timings_name
from treeckpt._core.sharding.int_runs import encode_runs

MS = 1_000_000


def save(run, step, fsync, *, hosts=(), late=0, world=4, all_ranks=()):
    """Writes a save whose last rank takes `fsync` milliseconds to make its bytes durable, the others 20.

    So do those in `all_ranks`, or all where it is True.

    The last rank calls it `late` milliseconds after the others.
    """
    last = world - 1
    path = run / f"step_{step:08d}"
    index = write_checkpoint(path, {"x": 1}, step=step)
    at, end = START_NS + late * MS, START_NS + (78 + fsync + late) * MS
    spans = []
    for rank in range(world):
        own = fsync if rank == last or all_ranks is True or (all_ranks and rank in all_ranks) else 20
        rows = [
            ("save", at if rank == last else START_NS, end, -1),
            ("plan", at, at + 1 * MS, 0),
            ("write", at + 1 * MS, at + (71 + own) * MS, 0),
            ("hash", at + 1 * MS, at + 71 * MS, 2),
            ("fsync", at + 71 * MS, at + (71 + own) * MS, 2),
            ("gather", at + (71 + own) * MS, end - (7 * MS if rank == 0 else 0), 0),
        ]
        rows += [("publish", end - 7 * MS, end, 0)] if rank == 0 else []
        rows += [("agree", START_NS, at, 0)] if late and rank < last else []
        spans += [Span(name, rank, start, stop, 0, parent) for name, start, stop, parent in rows]
    timings = Timings(index.save_id, step, world, tuple(spans), None, hosts)
    (path / timings_name(index.save_id)).write_bytes(encode_timings(timings))


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """21 saves of 0.1 s, the last on named hosts, then one of 2.4 s."""
    run = tmp_path_factory.mktemp("slow") / "run"
    hosts = (Host("a", encode_runs([0, 1])), Host("b<i>", encode_runs([2, 3])))
    for step in range(1, 22):
        save(run, step, 22)
    save(run, 22, 2322, hosts=hosts)
    return run


def timing(client, step):
    [run] = client.get("/api/v1/runs").json()["runs"]
    found = next(row["id"] for row in run["checkpoints"] if row["step"] == step)
    return client.get(f"/api/v1/checkpoints/{found}/timing").json(), client.get(f"/checkpoints/{found}/timing").text


def test_a_slow_save_is_told_beside_the_last_ones_with_its_phase_rank_and_host(serve, slow):
    page, html = timing(serve(slow), 22)
    said = (
        "24 x the median of the 21 saves before it, 100 ms; "
        "97 % of it is fsync on rank 3 (host b<i>), where the others took 20 ms."
    )
    assert page["diagnosis"] == said
    assert "24 x the median of the 21 saves before it" in html and "host b&lt;i&gt;" in html


def test_of_a_rank_that_calls_save_late_every_page_tells_and_none_blames_those_that_waited(serve, tmp_path, capsys):
    hosts = (Host("a", encode_runs([0, 1])), Host("b", encode_runs([2, 3])))
    for step in range(1, 7):
        save(tmp_path / "run", step, 22, hosts=hosts, late=2000 if step > 4 else 0)
    client = serve(tmp_path / "run")
    page, html = timing(client, 5)
    late = "rank 3 (host b) called save 2 s after the others; they waited for it"
    assert page["diagnosis"] == f"21 x the median of the 4 saves before it, 100 ms; 95 % of it is a late call: {late}."
    assert [(part["rank"], part["phase"]) for part in page["parts"]] == [(3, "late call"), (3, "hash"), (3, "fsync")]
    assert [(one["rank"], one["phase"]) for one in page["stragglers"]] == [(3, "late call")]
    assert page["trend"] == "Not a trend: rank 3 (host b) stood out in 0 of the 4 saves before."
    assert "the others; they waited for it" in html and '<th scope="row">late call</th><td>rank 3' in html
    [run] = client.get("/api/v1/runs").json()["runs"]
    trends = client.get(f"/api/v1/runs/{run['id']}/trends").json()
    assert trends["phase"][3:] == ["hash", "late call", "late call"] and trends["slow"][3:] == [None, 3, 3]
    step = str(tmp_path / "run" / "step_00000005")
    assert main(["trace", step, "--out", str(tmp_path / "trace.json")]) == 0
    assert late in capsys.readouterr().out
    assert main(["trace", step, "--json", "--out", str(tmp_path / "trace.json")]) == 0
    assert json.loads(capsys.readouterr().out)["late_call"] == late
    assert main(["report", step, "--html", str(tmp_path / "report.html")]) == 0
    assert f"R{late[1:]}." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_hosts_whose_clocks_differ_are_named_above_the_pictures(serve, tmp_path):
    index = write_checkpoint(tmp_path / "step_00000001", {"x": 1}, step=1)
    spans = [Span("agree", rank, START_NS + rank * 3000 * MS, START_NS + (3000 * rank + 9) * MS) for rank in (0, 1)]
    hosts = (Host("a", encode_runs([0])), Host("b<i>", encode_runs([1])))
    timings = Timings(index.save_id, 1, 2, tuple(spans), None, hosts)
    (tmp_path / "step_00000001" / timings_name(index.save_id)).write_bytes(encode_timings(timings))
    page, html = timing(serve(tmp_path), 1)
    assert page["clocks"].startswith("The clocks of the hosts differ: that of b<i> is 3 s ahead.")
    assert "b&lt;i&gt; is 3 s ahead" in html and page["seconds"] == pytest.approx(0.009)


def test_the_critical_path_is_by_share_with_small_parts_folded(serve, slow):
    page, html = timing(serve(slow), 22)
    [fsync, hashed] = page["parts"]
    assert (fsync["rank"], fsync["phase"], fsync["host"]) == (3, "fsync", "b<i>") and hashed["phase"] == "hash"
    assert fsync["share"] > hashed["share"] >= 0.01 and page["rest"]["share"] < 0.01 and page["rest"]["parts"] == 2
    assert fsync["share"] + hashed["share"] + page["rest"]["share"] == pytest.approx(1)
    assert "2 parts below 1 % each" in html


def test_a_usual_save_is_not_called_slow_and_few_saves_are_no_measure(serve, slow):
    client = serve(slow)
    page, _ = timing(client, 21)
    assert page["diagnosis"].startswith(
        "As long as usual: 1 x the median of the 20 saves before it, 100 ms; 70 % of it is hash on all 4 ranks alike"
    )
    page, _ = timing(client, 2)
    assert page["diagnosis"].startswith("100 ms, with too few saves before it to compare with; ")


def test_a_disk_that_is_slow_for_all_ranks_is_no_fault_of_one(serve, tmp_path):
    run = tmp_path / "run"
    for step in range(1, 8):
        save(run, step, 20 if step < 5 else 530, all_ranks=step >= 5)
    page, _ = timing(serve(run), 7)
    assert "of it is fsync on all 4 ranks alike, 530 ms" in page["diagnosis"] and "rank 3" not in page["diagnosis"]
    assert "; since step 5 (" in page["diagnosis"] and page["trend"] == ""
    assert page["stragglers"] == []


def test_of_a_host_whose_ranks_are_all_slow_the_host_is_named(serve, tmp_path):
    hosts = (Host("a", encode_runs(range(4))), Host("b", encode_runs(range(4, 8))))
    save(tmp_path / "run", 1, 530, hosts=hosts, world=8, all_ranks=range(4, 8))
    page, _ = timing(serve(tmp_path / "run"), 1)
    assert "of it is fsync on all 4 ranks of host b, where the others took 20 ms." in page["diagnosis"]


def test_of_two_ranks_the_page_names_the_slower_and_does_not_say_that_none_stands_out(serve, tmp_path):
    for world in (2, 4):
        save(tmp_path / "run", world, 20 if world == 4 else 2322, world=world)
    page, html = timing(serve(tmp_path / "run"), 2)
    assert page["slowest"] == 1 and page["stragglers"] == []
    assert "the table Ranks compares them" in html and "No rank stands out" not in html
    assert "No rank stands out" in timing(serve(tmp_path / "run"), 4)[1]
