"""The page of the timing of a save, its charts and its trace."""

import json

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.samples import START_NS, write_checkpoint
from treeckpt._core.format.timings import BLOCKING, Host, Span, Timings, encode_timings, timings_name
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._io.storage.checkpoint import read_timings
from treeckpt._io.storage.local_store import LocalStore


def test_timing_names_the_slow_rank_and_nests_spans(client, newest):
    page = client.get(f"{newest}/timing").json()
    assert (page["slowest"], page["world"], page["problem"]) == (2, 4, None)
    assert page["slowdown"] > 3
    write = next(p for p in page["phases"] if p["name"] == "write")
    assert write["slowest"] == 2 and write["nbytes"] == sum(r["nbytes"] for r in page["ranks"])
    assert {s["name"]: s["depth"] for s in page["spans"]}["hash"] == 2
    assert min(s["start"] for s in page["spans"]) == 0


def test_a_background_save_counts_what_it_wrote_and_not_what_it_copied_to_memory(serve, tmp_path):
    tc.save_async(tmp_path / "step_00000001", {"w": np.zeros(1 << 18, np.float32)}).wait()
    client = serve(tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    page = client.get(f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}/timing").json()
    moved = {phase["name"]: phase["nbytes"] for phase in page["phases"]}
    assert moved["stage"] == 1 << 20 <= moved["write"] == page["ranks"][0]["nbytes"]
    assert page["rate"] == page["checkpoint"]["rate"] == pytest.approx((1 << 20) / page["seconds"])


def test_a_failed_save_still_has_its_timing(client, ids):
    page = client.get(f"/api/v1/checkpoints/{ids['step_00000400']}/timing").json()
    assert "No space left" in page["error"] and page["spans"]


@pytest.fixture
def timed(serve, tmp_path):
    """Serves a checkpoint of 100 ranks on 50 hosts, in the background, of which rank 70 is slow in a hostile phase."""
    index = write_checkpoint(tmp_path / "step_00000001", {"x": 1}, step=1, world=100)
    spans = []
    for rank in range(100):
        wrote = START_NS + (90 if rank == 70 else 20 + rank % 3) * 10**6
        spans += [
            Span("save", rank, START_NS, START_NS + 10**8), Span("<b>write</b>", rank, START_NS, wrote, 64, 0),
            Span("gather", rank, wrote, START_NS + 10**8, 0, 0), Span(BLOCKING, rank, START_NS, START_NS + 10**7, 0, 0),
        ]  # fmt: skip
    hosts = tuple(Host(f"<i>node{n}", encode_runs([2 * n, 2 * n + 1])) for n in range(50))
    timings = Timings(index.save_id, 1, 100, tuple(spans), None, hosts)
    (tmp_path / "step_00000001" / timings_name(index.save_id)).write_bytes(encode_timings(timings))
    client = serve(tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    return client, f"checkpoints/{run['checkpoints'][0]['id']}"


def test_stragglers_and_the_critical_path_are_named(client, newest):
    page = client.get(f"{newest}/timing").json()
    assert {(s["rank"], s["phase"]) for s in page["stragglers"]} == {(2, p) for p in ("", "write", "hash", "fsync")}
    assert {s["rank"] for s in page["critical"][:-2]} == {2} and page["critical"][-1]["phase"] == "publish"
    assert sum(s["share"] for s in page["critical"]) == pytest.approx(1, abs=0.01)


def test_the_waterfall_has_every_span_of_every_rank(client, newest, run):
    data = client.get(f"{newest}/timing/waterfall").json()
    [name] = [p.name for p in (run / "step_00000700").glob("timings.*.json")]
    timings = read_timings(LocalStore(run / "step_00000700"), name.split(".")[1])
    assert data["ranks"] == [0, 1, 2, 3] and sum(data["counts"]) == len(timings.spans)
    expected = [(s.name, s.nbytes, s.seconds) for rank in range(4) for s in timings.of_rank(rank)]
    found = zip(data["phase"], data["nbytes"], data["length"], strict=True)
    for (phase, nbytes, length), (name, moved, seconds) in zip(found, expected, strict=True):
        assert (data["phases"][phase], nbytes) == (name, moved)
        assert length * data["unit"] == pytest.approx(seconds, abs=2 * data["unit"])
    assert data["ranks"][data["critical"][0][0]] == 2 and data["stragglers"] == [2]


RANKS = [f"rank {n}" for n in range(4)]


@pytest.mark.parametrize(("by", "labels"), [("rank", RANKS), ("dp", ["dp 0", "dp 1"]), ("tp", ["tp 0", "tp 1"])])
def test_the_heat_map_is_regrouped_by_mesh_dimension(client, newest, by, labels):
    data = client.get(f"{newest}/timing/heat", params={"by": by}).json()
    page = client.get(f"{newest}/timing", params={"by": by, "sort": "rank"}).json()
    assert data["labels"] == labels == [row["label"] for row in page["heat"]]
    assert page["groups"] == ["dp", "tp"] and page["columns"] == data["phases"]
    write = data["phases"].index("write")
    slowest = max(range(len(labels)), key=lambda row: data["times"][write][row])
    assert slowest == {"rank": 2, "dp": 1, "tp": 0}[by]
    cell = page["heat"][slowest]
    assert cell["slowest"][write] == 2
    assert cell["seconds"][write] == pytest.approx(data["times"][write][slowest] * data["unit"], rel=1e-3)


def test_a_grouping_that_a_save_does_not_have_is_refused_with_those_it_has(client, newest):
    for part in ("/timing", "/timing/heat", "/timing/table.csv"):
        answer = client.get(f"{newest}{part}", params={"by": "<x>"})
        assert answer.status_code == 422
        assert answer.json()["error"] == "by: the ranks of this save are grouped by one of rank, dp, tp, not by '<x>'"
    page = client.get(f"{newest.removeprefix('/api/v1')}/timing", params={"by": "<x>"})
    assert page.status_code == 422 and "<x>" not in page.text


def test_hosts_and_the_end_of_blocking_come_from_the_record(timed):
    client, at = timed
    page = client.get(f"/api/v1/{at}/timing", params={"by": "host", "sort": "rank"}).json()
    assert page["groups"] == ["host"] and page["rows"] == 50 and page["blocked"] == 0.01
    assert page["heat"][35]["label"] == "<i>node35" and page["heat"][35]["slowest"][0] == 70
    assert [s["rank"] for s in page["stragglers"]] == [70, 70] and page["stragglers"][0]["at"] == 70
    assert page["next"] == 32 and {s["rank"] for s in page["spans"]} == set(range(32))
    text = client.get(f"/{at}/timing?by=host&sort=rank&start=64").text
    assert "&lt;i&gt;node35" in text and "<i>node" not in text and "<b>write" not in text
    assert "?r=62-78" in text and "in the background" in text and "rank 64" in text


def test_tables_of_many_ranks_list_the_slowest_first(timed):
    client, at = timed
    page = client.get(f"/api/v1/{at}/timing").json()
    assert page["sort"] == "slow" and page["ranks"][0]["rank"] == page["spans"][0]["rank"] == 70
    busy = [row["busy"] for row in page["ranks"]]
    assert busy == sorted(busy, reverse=True) and page["next"] == len(busy) == 32
    assert [row["label"] for row in page["heat"]] == [f"rank {row['rank']}" for row in page["ranks"]]
    assert list(dict.fromkeys(s["rank"] for s in page["spans"])) == [row["rank"] for row in page["ranks"]]
    pages = [client.get(f"/api/v1/{at}/timing", params={"start": start}).json() for start in (0, 32, 64, 96)]
    assert sorted(row["rank"] for one in pages for row in one["ranks"]) == list(range(100))
    hosts = client.get(f"/api/v1/{at}/timing", params={"by": "host"}).json()["heat"]
    assert hosts[0]["label"] == "<i>node35" and len(hosts) == 50
    assert client.get(f"/api/v1/{at}/timing", params={"sort": "<x>"}).status_code == 422


def test_the_trace_opens_in_perfetto_with_a_process_for_each_rank(timed):
    client, at = timed
    answer = client.get(f"/api/v1/{at}/trace.json")
    assert "attachment" in answer.headers["content-disposition"]
    events = json.loads(answer.content)["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 400
    assert {"ph": "M", "name": "process_name", "pid": 70, "args": {"name": "rank 70 on <i>node35"}} in events


def test_what_has_no_timings_answers_404_as_data_and_a_page_as_html(client, ids):
    for name in ("latest", "step_00000500"):
        at = f"checkpoints/{ids[name]}"
        answers = [client.get(f"/api/v1/{at}/{p}") for p in ("timing/waterfall", "timing/heat", "trace.json")]
        assert {a.status_code for a in answers} <= {200, 404} and client.get(f"/{at}/timing").status_code == 200
    assert client.get(f"/api/v1/checkpoints/{ids['latest']}/trace.json").status_code == 404


def test_the_scale_of_lost_time_ends_at_the_longest_loss_and_waiting_loses_nothing(timed):
    client, at = timed
    heat = client.get(f"/api/v1/{at}/timing/heat").json()
    write = heat["phases"].index("<b>write</b>")
    assert heat["waiting"] == [name == "gather" for name in heat["phases"]]
    assert heat["most_lost"] == heat["times"][write][70] - heat["medians"][write]
    assert heat["most_lost"] * heat["unit"] == pytest.approx(0.069, abs=1e-4)
    [row] = [row for row in client.get(f"/api/v1/{at}/timing").json()["phases"] if row["name"] == "<b>write</b>"]
    assert [row[key] for key in ("median", "p95", "longest")] == [0.021, 0.022, 0.09]
