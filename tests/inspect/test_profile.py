"""The summary of a save's spans agrees with one that counts nanosecond by nanosecond."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.timings import BLOCKING, Host, Span, Timings
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._inspect.perfetto import encode_trace
from treeckpt._inspect.profile import (
    COORDINATOR_PHASES,
    LATE_CALL,
    WAITING_PHASES,
    SpanColumns,
    profile_of,
    span_lanes,
)
from treeckpt._inspect.timing_report import (
    CriticalSegment,
    TimingReport,
    critical_path,
    find_stragglers,
    group_phase_matrix,
    phase_matrix,
    rank_groupings,
)

NAMES = st.sampled_from(["save", "stage", "write", "hash", "agree", "gather", "publish"])


@st.composite
def nested(draw):
    """Spans on two ranks within 30 ns, each inside its parent."""
    spans: list[Span] = []
    mine: dict[int, list[Span]] = {0: [], 1: [], 5: []}
    for _ in range(draw(st.integers(0, 12))):
        rank = draw(st.sampled_from([0, 1, 5]))
        parent = draw(st.integers(-1, len(mine[rank]) - 1))
        low, high = (0, 30) if parent < 0 else (mine[rank][parent].start_ns, mine[rank][parent].stop_ns)
        start = draw(st.integers(low, high))
        span = Span(draw(NAMES), rank, start, draw(st.integers(start, high)), draw(st.integers(0, 3)), parent)
        mine[rank].append(span)
        spans.append(span)
    return Timings("0" * 16, 1, 6, tuple(spans))


def moments(spans):
    return {n for span in spans for n in range(span.start_ns, span.stop_ns)}


def moved(spans):
    def above(span):
        return span.parent >= 0 and (spans[span.parent].nbytes > 0 or above(spans[span.parent]))

    return sum(span.nbytes for span in spans if span.name != "stage" and not above(span))


@given(nested())
def test_a_profile_counts_what_a_clock_would(timings):
    profile = profile_of(timings)
    ranks = sorted({span.rank for span in timings.spans})
    assert [r.rank for r in profile.ranks] == ranks
    for found in profile.ranks:
        spans = timings.of_rank(found.rank)
        out = moments([s for s in spans if s.name in WAITING_PHASES | COORDINATOR_PHASES])
        assert found.busy_ns == len(moments(spans) - out)
        assert found.nbytes == moved(spans)
        assert (found.start_ns, found.stop_ns) == (min(s.start_ns for s in spans), max(s.stop_ns for s in spans))
    assert [p.name for p in profile.phases] == list(SpanColumns.of(timings).names)
    for phase in profile.phases:
        times = {r: len(moments([s for s in timings.of_rank(r) if s.name == phase.name])) for r in ranks
                 if any(s.name == phase.name for s in timings.of_rank(r))}  # fmt: skip
        assert phase.ranks == len(times) and phase.longest_ns == max(times.values()) == times[phase.slowest]
        assert phase.median_ns == sorted(times.values())[(len(times) - 1) // 2]
        assert phase.nbytes == sum(s.nbytes for s in timings.spans if s.name == phase.name)


@given(nested())
def test_the_matrix_holds_the_same_times_as_the_phases(timings):
    matrix, profile = phase_matrix(SpanColumns.of(timings)), profile_of(timings)
    phases = {p.name: p for p in profile.phases if p.name != "save"}
    assert set(matrix.phases) == set(phases)
    for column, name in enumerate(matrix.phases):
        times = matrix.times[:, column]
        assert times.max() == phases[name].longest_ns and (times >= 0).sum() == phases[name].ranks


@given(nested())
def test_the_critical_path_runs_backwards_from_the_end_without_overlap(timings):
    path = critical_path(SpanColumns.of(timings))
    assert all(a.stop_ns <= b.start_ns for a, b in itertools.pairwise(path))
    if any(s.stop_ns > s.start_ns for s in timings.spans):
        ends = [s.stop_ns for s in timings.spans]
        assert path[-1].stop_ns <= max(ends)
    if path and path[0].phase == LATE_CALL:
        assert path[0].start_ns == min(s.start_ns for s in timings.spans)
        assert path[0].stop_ns == min(s.start_ns for s in timings.spans if s.rank == path[0].rank)
        path = path[1:]
    for stretch in path:
        assert any(s.rank == stretch.rank and s.name == stretch.phase and s.start_ns <= stretch.start_ns
                   for s in timings.spans)  # fmt: skip


@given(nested())
def test_a_trace_has_every_span_and_its_tracks_nest(timings):
    events = [e for e in json.loads(encode_trace(timings))["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(timings.spans)
    tracks: dict = {}
    for event in events:
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for found in tracks.values():
        for a, b in ((a, b) for a in found for b in found):
            disjoint = a[1] <= b[0] + 1e-9 or b[1] <= a[0] + 1e-9
            assert disjoint or (a[0] <= b[0] and b[1] <= a[1] + 1e-9) or (b[0] <= a[0] and a[1] <= b[1] + 1e-9)


def of(*spans, hosts=(), world=8):
    return Timings("0" * 16, 1, world, tuple(Span(*span) for span in spans), None, hosts)


def save_of(write):
    """Ranks that write for the given milliseconds, then wait for the last one; rank 0 publishes."""
    done = max(write) * 10**6
    spans = []
    for rank, ms in enumerate(write):
        spans += [
            ("save", rank, 0, done + 500 if rank == 0 else done + 400, 0, -1), ("write", rank, 0, ms * 10**6, 64, 0),
            ("gather", rank, ms * 10**6, done + 100, 0, 0),
        ]  # fmt: skip
    return of(*spans, ("publish", 0, done + 100, done + 500, 0, 0), world=len(write))


def test_the_critical_path_goes_through_the_rank_that_all_waited_for():
    path = critical_path(SpanColumns.of(save_of([10, 11, 40, 10])))
    assert [(s.rank, s.phase) for s in path] == [(2, "write"), (0, "gather"), (0, "publish")]
    assert path[0] == CriticalSegment(2, "write", 0, 40 * 10**6) and path[-1].stop_ns == 40 * 10**6 + 500


def test_a_straggler_is_far_from_the_median_rank_by_the_deviation_of_all():
    timings = save_of([10, 11, 40, 10, 12, 9, 10, 11])
    spans = SpanColumns.of(timings)
    found = find_stragglers(profile_of(timings), phase_matrix(spans))
    assert [(s.rank, s.phase, s.ns, s.median_ns) for s in found] == [
        (2, "", 40_000_300, 10_000_300), (2, "write", 40_000_000, 10_000_000),
    ]  # fmt: skip
    assert found[1].score == pytest.approx(0.6745 * 30 / 1) and found[1].times == 4


def test_ranks_that_spread_widely_or_little_have_no_stragglers():
    for write in ([10, 20, 30, 40, 50, 60], [10, 10, 10, 10, 10, 11], [10, 50]):
        timings = save_of(write)
        assert find_stragglers(profile_of(timings), phase_matrix(SpanColumns.of(timings))) == (), write


def test_ranks_are_pooled_by_host_with_the_slowest_of_each():
    hosts = (Host("a", encode_runs([0, 2])), Host("b", encode_runs([1, 3])), Host("idle", ()))
    timings = save_of([10, 11, 40, 12])
    [grouping] = rank_groupings(4, hosts, None)
    found, labels = group_phase_matrix(phase_matrix(SpanColumns.of(timings)), grouping)
    write = found.phases.index("write")
    assert labels == ("a", "b") and found.times[:, write].tolist() == [40_000_000, 12_000_000]
    assert found.slowest[:, write].tolist() == [2, 3] and found.ranks.tolist() == [0, 1]


def test_mesh_dimensions_are_ways_to_put_ranks_together():
    from tests.helpers.samples import MESH
    from treeckpt._core.sharding.placements import MeshLayout, Replicate

    class Layouts:
        layouts = (MeshLayout(MESH, (Replicate(), Replicate())),)

    dp, tp = rank_groupings(6, (), Layouts())  # type: ignore[arg-type]
    assert (dp.name, dp.labels, dp.of.tolist()) == ("dp", ("dp 0", "dp 1"), [0, 0, 1, 1, -1, -1])
    assert (tp.name, tp.of.tolist()) == ("tp", [0, 1, 0, 1, -1, -1])


def test_blocking_is_a_mark_and_no_phase():
    timings = of(("save", 0, 0, 100), ("stage", 0, 5, 20, 8, 0), (BLOCKING, 0, 0, 30, 0, 0), ("save", 1, 0, 90),
                 (BLOCKING, 1, 0, 45, 0, 0))  # fmt: skip
    profile = profile_of(timings)
    assert [p.name for p in profile.phases] == ["save", "stage"] == list(SpanColumns.of(timings).names)
    assert [r.blocked_ns for r in profile.ranks] == [30, 45] and profile.blocked_seconds == 45e-9
    assert profile_of(of(("save", 0, 0, 100))).blocked_seconds == 100e-9


def test_the_spans_of_many_ranks_are_columns():
    spans = tuple(Span("save", rank, 0, 10 + rank) for rank in range(5000))
    profile = profile_of(Timings("0" * 16, 1, 5000, spans))
    assert (profile.slowest, profile.median_ns, len(profile.ranks)) == (4999, 2509, 5000)
    assert phase_matrix(SpanColumns.of(Timings("0" * 16, 1, 5000, spans))).times.shape == (5000, 0)


def test_a_chain_of_any_depth_is_no_matter():
    spans = tuple(Span("a", 0, n, 100_000 - n, 0, n - 1) for n in range(20_000))
    found = SpanColumns.of(Timings("0" * 16, 1, 1, spans))
    assert np.array_equal(found.depth, np.arange(20_000)) and found.outermost.all()


@given(nested())
def test_lanes_are_the_same_for_all_ranks_at_once(timings):
    study = TimingReport(timings)
    found = {rank: study.lanes[study.spans.rank == rank].tolist() for rank in range(6)}
    assert found == {rank: span_lanes(timings.of_rank(rank)) for rank in range(6)}
    assert [study.edges[n + 1] - study.edges[n] for n in range(len(study.profile.ranks))] == [
        len(timings.of_rank(r.rank)) for r in study.profile.ranks
    ]


def timings_of(*spans):
    return Timings("0" * 16, 1, 2, tuple(Span(*s) for s in spans))


def test_waiting_and_lone_phases_do_not_make_a_rank_slow():
    profile = profile_of(timings_of(
        ("save", 0, 0, 100), ("write", 0, 0, 20, 8, 0), ("gather", 0, 20, 60, 0, 0), ("publish", 0, 60, 100, 0, 0),
        ("save", 1, 0, 60), ("write", 1, 0, 60, 8, 0), ("fsync", 1, 50, 60, 0, 1),
    ))  # fmt: skip
    assert [(r.rank, r.busy_ns, r.nbytes) for r in profile.ranks] == [(0, 20, 8), (1, 60, 8)]
    assert (profile.slowest, profile.slowdown, profile.stop_ns) == (1, 3.0, 100)
    assert [p.name for p in profile.phases][:2] == ["save", "write"]


def test_no_spans_and_spans_of_no_length():
    assert profile_of(timings_of()).slowest is None
    assert profile_of(timings_of(("save", 0, 5, 5))).slowdown == 1.0


def test_overlapping_spans_lie_in_lanes_of_their_own():
    spans = [Span("a", 0, 0, 10), Span("b", 0, 0, 6, 0, 0), Span("c", 0, 5, 9, 0, 0), Span("d", 0, 6, 8, 0, 0)]
    assert span_lanes(spans) == [0, 1, 2, 1]
