"""A trace is what Perfetto reads: every span once, in microseconds, on tracks whose spans nest."""

import json

from treeckpt._core.format.timings import Host, Span, Timings
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._inspect.perfetto import encode_trace


def events_of(*spans, hosts=()):
    document = json.loads(encode_trace(Timings("0" * 16, 1, 8, tuple(Span(*span) for span in spans), hosts=hosts)))
    return document["traceEvents"]


def tracks_of(*intervals):
    found = events_of(*(("write", 0, start, stop) for start, stop in intervals))
    return [event["tid"] for event in found if event["ph"] == "X"]


def test_a_trace_names_each_rank_and_then_lists_its_spans():
    spans = (Span("save", 1, 5_000, 9_500), Span("save", 0, 3_000, 9_000), Span("write", 1, 6_000, 7_250, 64, 0))
    hosts = (Host("node7", encode_runs([1, 2])),)
    assert json.loads(encode_trace(Timings("f" * 16, 7, 3, spans, "rank 2: no space", hosts))) == {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
            {"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": 0}},
            {"ph": "X", "name": "save", "pid": 0, "tid": 0, "ts": 0, "dur": 6},
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 1 on node7"}},
            {"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": 1}},
            {"ph": "X", "name": "save", "pid": 1, "tid": 0, "ts": 2, "dur": 4.5},
            {"ph": "X", "name": "write", "pid": 1, "tid": 0, "ts": 3, "dur": 1.25, "args": {"nbytes": 64}},
        ],
        "displayTimeUnit": "ms",
        "otherData": {"save_id": "f" * 16, "step": 7, "world": 3, "error": "rank 2: no space"},
    }


def test_a_trace_without_spans_has_no_events():
    assert events_of(hosts=(Host("node7", encode_runs([1, 2])),)) == []


def test_spans_that_follow_or_hold_each_other_share_a_track():
    assert tracks_of((0, 5), (5, 9), (5, 6), (6, 9)) == [0, 0, 0, 0]
    assert tracks_of((0, 9), (0, 9), (0, 4), (4, 9)) == [0, 0, 0, 0]


def test_spans_that_overlap_lie_on_tracks_of_their_own():
    assert tracks_of((0, 5), (4, 9)) == [0, 1]
    assert tracks_of((0, 5), (3, 6), (4, 9), (7, 8)) == [0, 1, 2, 0]
    assert tracks_of((0, 5), (3, 8), (4, 7), (6, 9)) == [0, 1, 1, 0]


def test_tracks_follow_time_and_not_the_order_of_the_record():
    assert tracks_of((4, 9), (0, 5)) == [1, 0]
    assert tracks_of((0, 4), (0, 9)) == [0, 0]


def test_a_span_that_outlasts_the_one_it_is_in_is_not_inside_it():
    assert tracks_of((0, 9), (2, 5), (4, 7)) == [0, 0, 1]
