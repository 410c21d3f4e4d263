"""The timing report of one save; each part is computed once, on first access."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .._core.format.timings import BLOCKING, Timings
from .clocks import clocks_text
from .critical_path import CriticalSegment, critical_path
from .late_calls import late_call_text
from .profile import SaveProfile, SpanColumns, profile_of_spans, span_lanes
from .stragglers import PhaseMatrix, Straggler, find_stragglers, phase_matrix


@dataclass(frozen=True)
class TimingReport:
    """The timings of a save and all analyses of them. Threads may share it."""

    timings: Timings

    @cached_property
    def spans(self) -> SpanColumns:
        return SpanColumns.of(self.timings)

    @cached_property
    def profile(self) -> SaveProfile:
        return profile_of_spans(self.timings, self.spans)

    @cached_property
    def matrix(self) -> PhaseMatrix:
        return phase_matrix(self.spans)

    @cached_property
    def stragglers(self) -> tuple[Straggler, ...]:
        return find_stragglers(self.profile, self.matrix)

    @cached_property
    def critical(self) -> tuple[CriticalSegment, ...]:
        return critical_path(self.spans)

    @cached_property
    def late_call(self) -> str:
        """In a sentence: which rank called save late; empty if none did."""
        return late_call_text(self.profile, self.timings.hosts)

    @cached_property
    def clocks(self) -> str:
        """In two sentences: which clocks of hosts differ; empty if none do."""
        return clocks_text(self.spans.clocks)

    @cached_property
    def edges(self) -> np.ndarray:
        """int64[ranks + 1]: the first span of each rank of the profile, then the number of spans."""
        ranks = [r.rank for r in self.profile.ranks]
        return np.append(np.searchsorted(self.spans.rank, ranks), len(self.spans.rank))

    @cached_property
    def lanes(self) -> np.ndarray:
        """int64[spans]: the row of each span within its rank, as `span_lanes` returns it.

        It is the depth of the span on ranks where no two spans of one depth overlap, which is the case on most.
        """
        spans = self.spans
        lanes = spans.depth.copy()
        order = np.lexsort((-spans.stop, spans.start, spans.depth, spans.rank))
        same = (np.diff(spans.rank[order]) == 0) & (np.diff(spans.depth[order]) == 0)
        crowded = same & (spans.start[order][1:] < spans.stop[order][:-1])
        for rank in np.unique(spans.rank[order][1:][crowded]).tolist():
            mine = self.timings.of_rank(rank)
            found = [lane for lane, span in zip(span_lanes(mine), mine, strict=True) if span.name != BLOCKING]
            lanes[spans.rank == rank] = found
        return lanes
