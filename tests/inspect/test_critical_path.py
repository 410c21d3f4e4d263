"""The critical path of a save agrees with a walk that goes back from its end nanosecond by nanosecond."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.timings import Span, Timings
from treeckpt._inspect.profile import LATE_CALL, WAITING_PHASES, SpanColumns
from treeckpt._inspect.timing_report import CriticalSegment, critical_path

NAMES = st.sampled_from(["write", "hash", "agree", "gather"])


def timings_of(*spans):
    return Timings("0" * 16, 1, 8, tuple(Span(*span) for span in spans))


def path_of(*spans):
    """The critical path as (rank, phase, start, stop)."""
    found = critical_path(SpanColumns.of(timings_of(*spans)))
    return [(s.rank, s.phase, s.start_ns, s.stop_ns) for s in found]


@st.composite
def sequential(draw):
    """Spans of ranks that do one thing at a time, each recorded when it began."""
    spans = []

    def fill(rank, low, high, depth, parent):
        cuts = sorted(draw(st.sets(st.integers(low, high), max_size=6)))
        for start, stop in itertools.pairwise(cuts):
            if draw(st.booleans()):
                at = sum(span[1] == rank for span in spans)
                spans.append((draw(NAMES), rank, start, stop, 0, parent))
                if depth < 3:
                    fill(rank, start, stop, depth + 1, at)

    for rank in draw(st.sets(st.integers(0, 4), max_size=3)):
        fill(rank, 0, 24, 0, -1)
    return spans


def walk(spans):
    """The path, one nanosecond at a time."""
    below = {(span[1], span[5]) for span in spans}
    counts, work = {}, []
    for span in spans:
        at = counts.get(span[1], 0)
        counts[span[1]] = at + 1
        if (span[1], at) not in below and span[0] not in WAITING_PHASES:
            work.append(span)

    def doing(rank, now):
        """The span recorded last, and so the innermost, of those that the nanosecond before `now` is in."""
        return next((s for s in reversed(spans) if s[1] == rank and s[2] < now <= s[3]), None)

    last = min(spans, key=lambda s: (-s[3], s[1]))
    rank, now, ticks = last[1], last[3], []
    while True:
        span = doing(rank, now)
        if span is None:
            earlier = [s[3] for s in spans if s[1] == rank and s[3] < now]
            if not earlier:
                ticks += [(rank, LATE_CALL, n) for n in range(now, min(s[2] for s in spans), -1)]
                break
            now = max(earlier)
            continue
        begin = now
        while doing(rank, begin) is span:
            begin -= 1
        others = [s for s in work if s[1] != rank and begin < s[3] <= now]
        if span[0] in WAITING_PHASES and others:
            other = min(others, key=lambda s: (-s[3], s[1]))
            ticks += [(rank, span[0], n) for n in range(now, other[3], -1)]
            rank, now = other[1], other[3]
        else:
            ticks += [(rank, span[0], n) for n in range(now, begin, -1)]
            now = begin
    found = []
    for key, group in itertools.groupby(ticks, lambda tick: tick[:2]):
        times = [n for _, _, n in group]
        found.append((*key, times[-1] - 1, times[0]))
    return found[::-1]


@given(sequential())
def test_the_path_is_that_of_a_walk_back_through_time(spans):
    assert path_of(*spans) == (walk(spans) if spans else [])


def test_spans_without_duration_have_no_path():
    assert path_of() == path_of(("write", 0, 5, 5), ("write", 1, 9, 9)) == []


def test_segments_are_in_the_order_of_time_with_their_rank():
    found = critical_path(SpanColumns.of(timings_of(("flatten", 2, 3, 5), ("write", 2, 5, 9))))
    assert found == (CriticalSegment(2, "flatten", 3, 5), CriticalSegment(2, "write", 5, 9))


def test_a_wait_leads_to_the_rank_whose_work_ended_last_within_it():
    waits = ("gather", 0, 10, 50)
    assert path_of(waits, ("write", 1, 0, 20), ("write", 2, 0, 40), ("write", 3, 0, 30)) == [
        (2, "write", 0, 40), (0, "gather", 40, 50),
    ]  # fmt: skip


def test_work_that_ended_as_the_wait_began_was_not_waited_for():
    assert path_of(("gather", 0, 10, 50), ("write", 1, 0, 10)) == [(0, LATE_CALL, 0, 10), (0, "gather", 10, 50)]
    assert path_of(("gather", 0, 10, 50), ("write", 1, 0, 11)) == [(1, "write", 0, 11), (0, "gather", 11, 50)]


def test_work_that_ends_with_the_wait_takes_its_place():
    assert path_of(("gather", 0, 10, 50), ("write", 1, 0, 50)) == [(1, "write", 0, 50)]


def test_a_wait_of_another_rank_is_no_work_and_nor_is_what_takes_no_time():
    waits = [(0, LATE_CALL, 0, 10), (0, "gather", 10, 50)]
    assert path_of(("gather", 0, 10, 50), ("agree", 1, 0, 20), ("write", 1, 30, 30)) == waits


def test_what_ranks_group_their_work_in_is_no_work_itself():
    """The group ends late, after its last work; what was waited for is that work."""
    assert path_of(
        ("gather", 0, 10, 50), ("save", 1, 0, 45, 0, -1), ("write", 1, 0, 20, 0, 0), ("hash", 1, 20, 30, 0, 0)
    ) == [(1, "write", 0, 20), (1, "hash", 20, 30), (0, "gather", 30, 50)]


def test_the_last_span_of_a_rank_is_work_whatever_the_next_rank_begins_with():
    assert path_of(("gather", 0, 10, 50), ("write", 1, 0, 20), ("save", 2, 0, 12, 0, -1), ("hash", 2, 0, 11, 0, 0)) == [
        (1, "write", 0, 20),
        (0, "gather", 20, 50),
    ]


def test_of_ranks_that_end_together_the_path_starts_at_the_first():
    assert path_of(("write", 3, 0, 9), ("write", 1, 2, 9)) == [(1, LATE_CALL, 0, 2), (1, "write", 2, 9)]


def test_of_spans_that_overlap_the_one_that_began_last_counts():
    assert path_of(("write", 0, 0, 20), ("hash", 0, 10, 20)) == [(0, "write", 0, 10), (0, "hash", 10, 20)]


def test_a_pause_is_no_part_of_the_path():
    assert path_of(("flatten", 0, 0, 4), ("write", 0, 7, 9)) == [(0, "flatten", 0, 4), (0, "write", 7, 9)]


def test_neighbours_of_one_rank_and_phase_are_one_segment():
    assert path_of(("write", 0, 0, 4), ("write", 0, 4, 9)) == [(0, "write", 0, 9)]


def test_the_path_begins_with_the_late_call_of_the_rank_that_the_others_waited_for():
    """Rank 1 calls save at 40; the others wait for it in the agreement, of which it takes a part itself."""
    early = [span for rank in (0, 2) for span in (("flatten", rank, 0, 2), ("agree", rank, 2, 45))]
    late = [("flatten", 1, 40, 43), ("agree", 1, 43, 45)]
    assert path_of(*early, *late, *(("write", rank, 45, 50) for rank in range(3))) == [
        (1, LATE_CALL, 0, 40), (1, "flatten", 40, 43), (0, "agree", 43, 45), (0, "write", 45, 50),
    ]  # fmt: skip


def test_clocks_that_disagree_do_not_make_it_go_round_for_ever():
    both = [span for rank in (0, 1) for span in (("write", rank, 0, 10), ("gather", rank, 5, 10))]
    assert path_of(*both) == []


def test_a_path_has_at_most_a_thousand_segments_the_last_ones():
    spans = [("write" if n % 2 else "hash", 0, n, n + 1) for n in range(1200)]
    found = path_of(*spans)
    assert len(found) == 1000 and found[0][2] == 200 and found[-1] == (0, "write", 1199, 1200)
