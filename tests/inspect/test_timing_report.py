"""A timing report holds every analysis of a save's timings, each computed once."""

import pytest

from treeckpt._core.format.timings import BLOCKING, Span, Timings
from treeckpt._inspect.profile import SpanColumns, profile_of
from treeckpt._inspect.timing_report import TimingReport, critical_path, find_stragglers, phase_matrix

MS = 10**6


def report_of(*spans):
    return TimingReport(Timings("0" * 16, 1, 64, tuple(Span(*span) for span in spans)))


@pytest.fixture
def report():
    return report_of(*(("write", rank, 0, (90 if rank == 3 else 10) * MS, 8) for rank in range(5)))


def test_a_report_holds_what_the_analyses_find(report):
    spans = SpanColumns.of(report.timings)
    assert report.profile == profile_of(report.timings)
    assert report.matrix.times.tolist() == phase_matrix(spans).times.tolist()
    assert report.stragglers == find_stragglers(report.profile, report.matrix) != ()
    assert report.critical == critical_path(spans) != ()
    assert report.spans.names == ("write",) and report.spans.rank.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "part", ["spans", "profile", "matrix", "stragglers", "critical", "late_call", "clocks", "edges", "lanes"]
)
def test_each_part_is_computed_once(report, part):
    assert getattr(report, part) is getattr(report, part)


def test_edges_are_where_the_spans_of_each_rank_begin():
    report = report_of(
        ("a", 4, 0, 1), ("a", 2, 0, 1), ("b", 4, 1, 2), (BLOCKING, 2, 0, 2), ("b", 4, 2, 3), ("a", 9, 0, 1)
    )
    assert report.edges.tolist() == [0, 1, 4, 5]
    assert report_of().edges.tolist() == [0]


def test_spans_lie_in_the_rows_of_their_depth_unless_they_overlap():
    outer = [("save", rank, 0, 90, 0, -1) for rank in (1, 2, 3, 4)]
    report = report_of(
        *outer,
        ("write", 1, 0, 10, 0, 0), ("hash", 1, 10, 20, 0, 0),
        ("write", 2, 0, 10, 0, 0), ("hash", 2, 9, 20, 0, 0), ("fsync", 2, 20, 30, 0, 0),
        (BLOCKING, 3, 0, 50), ("write", 3, 5, 10, 0, 0), ("hash", 3, 5, 6, 0, 0), ("sum", 3, 5, 6, 0, 3),
        ("write", 4, 5, 5, 0, 0), ("hash", 4, 5, 9, 0, 0),
    )  # fmt: skip
    assert report.lanes.tolist() == [0, 1, 1, 0, 1, 2, 1, 0, 1, 2, 3, 0, 2, 1]
