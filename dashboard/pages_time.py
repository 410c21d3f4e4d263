"""What the pages of time and of differences show, as data; see `pages`.

Times are seconds from the start of the save; names of phases and hosts are as stored, and whoever draws them escapes.
"""

from __future__ import annotations

import msgspec

from .pages import CheckpointRow

__all__ = [
    "CriticalRow",
    "DeltaRow",
    "DiffPage",
    "DiffRow",
    "HeatData",
    "HeatRow",
    "PhaseRow",
    "RankRow",
    "SpanRow",
    "StragglerRow",
    "TimingPage",
    "TrendsPage",
    "WaterfallData",
]


class PhaseRow(msgspec.Struct, frozen=True):
    """One phase over all ranks."""

    name: str
    ranks: int
    median: float
    longest: float
    slowest: int
    nbytes: int
    rate: float | None
    """Bytes a second over the longest time."""
    waiting: bool
    """Whether ranks mostly wait for others in it."""


class RankRow(msgspec.Struct, frozen=True):
    """One rank's save."""

    rank: int
    seconds: float
    busy: float
    nbytes: int
    slowdown: float
    """Its own work over the median rank's."""
    blocked: float | None
    """Until its call returned; None where that was the end of the save."""


class SpanRow(msgspec.Struct, frozen=True):
    """One span; times from the start of the save."""

    name: str
    rank: int
    start: float
    seconds: float
    nbytes: int
    rate: float | None
    depth: int
    lane: int


class StragglerRow(msgspec.Struct, frozen=True):
    """A rank that stands out."""

    rank: int
    at: int
    """Its position among the ranks."""
    phase: str
    """Empty for all of its own work."""
    seconds: float
    median: float
    times: float | None
    """Over the median rank's time; None where that is zero."""
    score: float | None
    """Modified z-score; None where the other ranks do not differ at all."""


class CriticalRow(msgspec.Struct, frozen=True):
    """A stretch of the critical path."""

    rank: int
    phase: str
    start: float
    seconds: float
    share: float
    """Of the whole save."""


class HeatRow(msgspec.Struct, frozen=True):
    """One row of the heat map: the time in each phase, None where there is none, and whose it is."""

    label: str
    seconds: list[float | None]
    slowest: list[int]


class TimingPage(msgspec.Struct, frozen=True):
    """Where the time of one save went."""

    checkpoint: CheckpointRow
    problem: str | None
    """Why there is nothing to show."""
    error: str | None
    """What the save failed with."""
    seconds: float
    blocked: float | None
    """Until the last rank's call returned; None where the save was not in the background."""
    rate: float | None
    slowest: int | None
    slowdown: float
    world: int
    start: int
    next: int | None
    phases: list[PhaseRow]
    ranks: list[RankRow]
    spans: list[SpanRow]
    stragglers: list[StragglerRow]
    straggling: int
    """How many stragglers there are; the worst are listed."""
    critical: list[CriticalRow]
    groups: list[str]
    """By what ranks can be put together: host, and the names of mesh dimensions."""
    by: str
    columns: list[str]
    """The phases of the heat map."""
    heat: list[HeatRow]
    rows: int
    """Rows of the whole heat map."""


class WaterfallData(msgspec.Struct, frozen=True):
    """Every span of a save in columns, by rank; times in units."""

    unit: float
    """Seconds."""
    total: int
    phases: list[str]
    waiting: list[bool]
    ranks: list[int]
    counts: list[int]
    """Spans of each rank."""
    busy: list[int]
    """Own work of each rank."""
    blocked: list[int | None]
    """When each rank's call returned."""
    phase: list[int]
    start: list[int]
    length: list[int]
    lane: list[int]
    nbytes: list[int]
    critical: list[list[int]]
    """[position of the rank, start, length] of each stretch."""
    stragglers: list[int]


class HeatData(msgspec.Struct, frozen=True):
    """The heat map in columns."""

    by: str
    phases: list[str]
    waiting: list[bool]
    unit: float
    labels: list[str]
    medians: list[int]
    """Of each phase, the median rank's time."""
    times: list[list[int]]
    """Of each phase, the time of each row in units; -1 where there is none."""
    slowest: list[list[int]]
    """Whose time it is; empty where rows are ranks."""


class TrendsPage(msgspec.Struct, frozen=True):
    """The saves of a run by step, oldest first, in columns; then a page of the same as rows."""

    run: str
    name: str
    ids: list[str]
    step: list[int]
    seconds: list[float | None]
    blocked: list[float | None]
    nbytes: list[int]
    rate: list[float | None]
    dedupe: list[float | None]
    """Bytes written over bytes that all ranks held."""
    world: list[int]
    start: int
    next: int | None


class DiffRow(msgspec.Struct, frozen=True):
    """One difference of two checkpoints."""

    what: str
    """added, removed, moved; kind, shape, dtype, layout, value; content: the bytes of an array."""
    path: str
    before: str
    after: str
    verdict: str
    """Of content: equal, changed, unknown (the checksums cannot tell), unreadable."""
    pair: int | None
    """The number under which contents can be compared."""
    leaf_a: int | None
    leaf_b: int | None
    nbytes: int
    delta: DeltaRow | None
    """Of content that was read."""


class DeltaRow(msgspec.Struct, frozen=True):
    """How two arrays differ, element by element."""

    path: str
    elements: int
    compared: int
    changed: int
    max_abs: float | None
    mean_abs: float | None
    not_finite: int


class DiffPage(msgspec.Struct, frozen=True):
    """In what two checkpoints differ."""

    a: CheckpointRow
    b: CheckpointRow
    show: str
    q: str
    start: int
    next: int | None
    counts: dict[str, int]
    """Differences of the indexes by kind."""
    same: int
    """Leaves that are alike in the indexes."""
    arrays: int
    """Whose contents can be compared."""
    known: dict[str, int]
    """Verdicts on contents so far."""
    rows: list[DiffRow]
    read: bool
    """Whether contents were read where checksums cannot tell."""
    delta: DeltaRow | None
    problem: str | None
    """Why contents could not be compared."""
