"""Timings reduced for trends: what is kept of a save, and that each file is read once."""

import contextlib
import json
import sqlite3

import numpy as np
import pytest

from tests.dashboard.helpers import client_of
from tests.helpers.large import spans_of_ranks, write_timed
from treeckpt._core.format.timings import Host, Span, Timings
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._inspect.timing_report import TimingReport
from treeckpt._runs import catalog
from treeckpt._runs.reduced_timings import MAX_LINES, MAX_PHASES, MAX_SLOW, MAX_TEXT, OTHER, reduce_timings

SAVE_ID = "00000000000000aa"


def reduced_of(spans, world, hosts=()):
    return reduce_timings(TimingReport(Timings(SAVE_ID, 1, world, tuple(spans), None, hosts)))


def test_the_phases_of_the_critical_path_add_up_to_the_duration():
    reduced = reduced_of(spans_of_ranks(64), 64)
    assert sum(reduced.phases.values()) == pytest.approx(reduced.seconds, rel=0.01)
    assert reduced.longest_phase == max(reduced.phases, key=reduced.phases.get)


@pytest.mark.parametrize("world", [1, 3, MAX_LINES, MAX_LINES + 1, 5 * MAX_LINES])
def test_of_many_ranks_each_line_is_the_longest(world):
    timings = Timings(SAVE_ID, 1, world, tuple(spans_of_ranks(world, phases=["write"], slow=world // 2)))
    reduced, profile = reduce_timings(TimingReport(timings)), TimingReport(timings).profile
    busy = np.array([rank.busy_ns for rank in profile.ranks]) / 1e9
    block, lines = reduced.block, reduced.lines(reduced.block)
    assert len(lines) == -(-world // block) <= MAX_LINES
    expected = [busy[at : at + block].max() for at in range(0, world, block)]
    assert lines.tolist() == pytest.approx(expected, rel=1e-3)
    assert reduced.lines(2 * block).tolist() == [lines[at : at + 2].max() for at in range(0, len(lines), 2)]
    assert reduced.median == pytest.approx(sorted(busy)[(world - 1) // 2])


def test_a_rank_without_spans_has_no_work():
    lines = reduced_of([Span("write", rank, 0, 10**9) for rank in (0, 2)], 4).lines(1)
    assert np.isnan(lines).tolist() == [False, True, False, True]


def test_stragglers_keep_their_host_and_worst_phase():
    hosts = (Host("a", encode_runs(range(32))), Host("b" * 999, encode_runs(range(32, 64))))
    [slow] = reduced_of(spans_of_ranks(64, slow=40), 64, hosts).slow
    assert (slow.rank, slow.host, slow.phase) == (40, "b" * MAX_TEXT, "write") and 3 < slow.times < 5


def test_what_is_kept_does_not_grow_with_phases_names_and_stragglers():
    names = [f"{n} " + "x" * 1000 for n in range(100)]
    spans = [Span(name, 0, n * 10**9, (n + 1) * 10**9) for n, name in enumerate(names)]
    spans += [Span("write", rank, 0, 10**9 * (1 + 9 * (rank < 100))) for rank in range(1, 1000)]
    reduced = reduced_of(spans, 1000)
    assert len(reduced.phases) == MAX_PHASES + 1 and reduced.phases[OTHER] == pytest.approx(100 - MAX_PHASES)
    assert len(reduced.slow) == MAX_SLOW and max(map(len, reduced.phases)) == MAX_TEXT
    assert len(reduced.work) <= 2 * MAX_LINES


@pytest.fixture
def reads(monkeypatch):
    """Counts how often the timings of each save are read."""
    found, read = [], catalog.read_timings_file

    def counted(folder, name):
        found.append(name)
        return read(folder, name)

    monkeypatch.setattr(catalog, "read_timings_file", counted)
    return found


def trends(run, cache):
    """The answers about trends of a dashboard that has scanned its run."""
    with client_of(run, cache) as client:
        [found] = client.get("/api/v1/runs").json()["runs"]
        client.app.state.library.watches[found["id"]].refresh(wait=300)
        return [client.get(f"/api/v1/runs/{found['id']}/trends{rest}").json() for rest in ("", "/bins")]


def test_the_timings_of_a_save_are_read_once_and_the_next_dashboard_reads_none(tmp_path, reads):
    write_timed(tmp_path / "run", 6, lambda n: spans_of_ranks(4, slow=n % 4))
    first = trends(tmp_path / "run", tmp_path / "cache")
    assert len(reads) == len(set(reads)) == 6 and first[1]["saves"] == 6
    assert trends(tmp_path / "run", tmp_path / "cache") == first and len(reads) == 6


def test_durations_in_a_cache_of_an_older_version_are_read_again(tmp_path, reads):
    write_timed(tmp_path / "run", 3, lambda n: spans_of_ranks(4))
    first = trends(tmp_path / "run", tmp_path / "cache")
    [file] = (tmp_path / "cache").glob("*/summaries.db")
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        for key, data in database.execute("SELECT key, data FROM summary").fetchall():
            if "names" in (kept := json.loads(data)):
                old = {name: kept[name] for name in ("seconds", "blocked_seconds", "error")}
                database.execute("UPDATE summary SET data = ? WHERE key = ?", (json.dumps(old), key))
    assert trends(tmp_path / "run", tmp_path / "cache") == first and len(reads) == 6
