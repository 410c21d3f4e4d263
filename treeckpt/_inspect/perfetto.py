"""Exports timings in the Trace Event Format, which Perfetto and chrome://tracing show: one process for each rank.

A track holds spans that nest; a span that overlaps another without being inside it (threads) gets another track.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .._core.format.timings import Span, Timings
from .._core.sharding.int_runs import decode_runs
from .profile import ahead_by_rank, differing_clocks


def encode_trace(timings: Timings, *, on_rank: Callable[[int, int], object] = lambda done, total: None) -> bytes:
    """Encodes the JSON of a trace file; its times are microseconds since the start of the first span.

    Args:
        on_rank: takes how many ranks are done, and how many there are, after each.
    """
    ahead = ahead_by_rank(differing_clocks(timings))
    origin = min((span.start_ns - ahead.get(span.rank, 0) for span in timings.spans), default=0)
    hosts = {rank: host.name for host in timings.hosts for rank in decode_runs(host.ranks).tolist()}
    by_rank: dict[int, list[Span]] = {}
    for span in timings.spans:
        by_rank.setdefault(span.rank, []).append(span)
    events: list[dict[str, Any]] = []
    for number, (rank, spans) in enumerate(sorted(by_rank.items()), 1):
        name = f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for span, track in zip(spans, _tracks(spans), strict=True):
            ts, dur = (span.start_ns - ahead.get(rank, 0) - origin) / 1e3, (span.stop_ns - span.start_ns) / 1e3
            args = {"args": {"nbytes": span.nbytes}} if span.nbytes else {}
            events.append({"ph": "X", "name": span.name, "pid": rank, "tid": track, "ts": ts, "dur": dur, **args})
        on_rank(number, len(by_rank))
    about = {"save_id": timings.save_id, "step": timings.step, "world": timings.world, "error": timings.error}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _tracks(spans: Sequence[Span]) -> list[int]:
    """Returns for each span the first track on which it lies inside the open span, or no span is open."""
    tracks = [0] * len(spans)
    opened: list[list[int]] = []
    # Of spans that begin at one time the longest is first, as it is around the others.
    for at in sorted(range(len(spans)), key=lambda at: (spans[at].start_ns, -spans[at].stop_ns, at)):
        span, track = spans[at], 0
        while track < len(opened):
            stack = opened[track]
            while stack and stack[-1] <= span.start_ns:
                stack.pop()
            if not stack or stack[-1] >= span.stop_ns:
                break
            track += 1
        opened += [[] for _ in range(track + 1 - len(opened))]
        opened[track].append(span.stop_ns)
        tracks[at] = track
    return tracks
