"""What the page of a slow save says first: how slow it was, and where the time went."""

import pytest

from tests.helpers.samples import START_NS, write_checkpoint
from treeckpt.core.format.timings import Host, Span, Timings, encode_timings, timings_name
from treeckpt.core.sharding.int_runs import encode_runs

MS = 1_000_000


def save(run, step, fsync, *, hosts=()):
    """Writes a save of 4 ranks whose rank 3 takes `fsync` milliseconds to make its bytes durable, the others 20."""
    path = run / f"step_{step:08d}"
    index = write_checkpoint(path, {"x": 1}, step=step)
    at, end = START_NS, START_NS + (78 + fsync) * MS
    spans = []
    for rank in range(4):
        own = fsync if rank == 3 else 20
        rows = [
            ("save", at, end, -1),
            ("plan", at, at + 1 * MS, 0),
            ("write", at + 1 * MS, at + (71 + own) * MS, 0),
            ("hash", at + 1 * MS, at + 71 * MS, 2),
            ("fsync", at + 71 * MS, at + (71 + own) * MS, 2),
            ("gather", at + (71 + own) * MS, end - (7 * MS if rank == 0 else 0), 0),
        ]
        rows += [("publish", end - 7 * MS, end, 0)] if rank == 0 else []
        spans += [Span(name, rank, start, stop, 0, parent) for name, start, stop, parent in rows]
    timings = Timings(index.save_id, step, 4, tuple(spans), None, hosts)
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
    said = "24 x the median of the last 20 saves, 100 ms; 97 % of it is fsync on rank 3 (host b<i>)."
    assert page["diagnosis"] == said
    assert "24 x the median of the last 20 saves" in html and "host b&lt;i&gt;" in html


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
        "As long as usual: 1 x the median of the last 20 saves, 100 ms; 70 % of it is hash"
    )
    page, _ = timing(client, 2)
    assert page["diagnosis"].startswith("100 ms, with too few saves before it to compare with; ")
