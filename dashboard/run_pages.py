"""What the pages of runs, of saves under way and of usage show, as data; see `pages`."""

from __future__ import annotations

import msgspec

from .pages import CheckpointRow

__all__ = [
    "LivePage",
    "LoadingPage",
    "ReadingRow",
    "ReasonRow",
    "RemovalRow",
    "RunPage",
    "RunPart",
    "RunsPage",
    "SaveRow",
    "SavingRank",
    "ScanRow",
    "UsagePage",
    "UsageRow",
]


class ReadingRow(msgspec.Struct, frozen=True):
    """How far the first reading of a large index is."""

    phase: str
    done: int
    total: int
    share: float | None
    """From 0 to 1; None where it is not known."""
    seconds: float


class LoadingPage(msgspec.Struct, frozen=True):
    """A checkpoint whose index is still being read."""

    checkpoint: CheckpointRow
    progress: ReadingRow


class ScanRow(msgspec.Struct, frozen=True):
    """How far the first look at a run is."""

    seen: int
    total: int
    complete: bool


class RunPart(msgspec.Struct, frozen=True):
    """One run and a page of its checkpoints, newest first unless asked otherwise."""

    id: str
    name: str
    path: str
    total: int
    complete: int
    nbytes: int
    newest_step: int | None
    saving: int
    """Saves under way."""
    statuses: dict[str, int]
    """Directories by status."""
    scan: ScanRow
    keep: str
    """The policies by which `kept` and `goes` were worked out; empty where none are known."""
    goes: int
    """Checkpoints that no policy keeps."""
    goes_nbytes: int
    sort: str
    status: str
    q: str
    matching: int
    """Directories that pass the filter."""
    start: int
    next: int | None
    cursor: str | None
    """Goes on where this page ends, whatever is saved meanwhile."""
    checkpoints: list[CheckpointRow]


class RunsPage(msgspec.Struct, frozen=True):
    """Every run that the dashboard was given."""

    runs: list[RunPart]


class RunPage(msgspec.Struct, frozen=True):
    """One run."""

    run: RunPart


class SavingRank(msgspec.Struct, frozen=True):
    """One rank of a save under way."""

    rank: int
    phase: str
    written: int
    planned: int
    share: float
    quiet: float
    """Seconds since its record was renewed."""


class SaveRow(msgspec.Struct, frozen=True):
    """A save under way."""

    run: str
    run_name: str
    checkpoint: str
    name: str
    save_id: str
    step: int | None
    world: int
    ranks: int
    """That have a record."""
    done: int
    """Of these, whose bytes are all durable."""
    phase: str
    stuck: str
    """In words: what it waits for."""
    stalled: bool
    written: int
    planned: int
    share: float
    seconds: float
    quiet: float
    """Seconds since any rank's record was renewed."""
    rate: float | None
    """Bytes a second, lately."""
    eta: float | None
    """Seconds that writing will take still."""
    slowest: list[SavingRank]
    """Those with the most left to write."""


class LivePage(msgspec.Struct, frozen=True):
    """Saves under way, in every run."""

    saves: list[SaveRow]
    start: int
    next: int | None


class ReasonRow(msgspec.Struct, frozen=True):
    """Why checkpoints stay."""

    reason: str
    steps: int
    nbytes: int
    alone: int
    """Bytes that only this reason keeps."""


class RemovalRow(msgspec.Struct, frozen=True):
    """What a clean-up would delete."""

    name: str
    what: str
    reason: str
    nbytes: int


class UsageRow(msgspec.Struct, frozen=True):
    """One run's bytes."""

    run: str
    name: str
    path: str
    checkpoints: int
    nbytes: int
    share: float
    """Of all runs."""
    statuses: dict[str, int]
    """Bytes by status."""
    reasons: list[ReasonRow]
    freed: int
    """Bytes that a clean-up would free."""
    removals: int
    rows: list[RemovalRow]
    next: int | None
    left: list[RemovalRow]
    """What stays though no policy keeps it, and why."""
    disk_free: int | None
    disk_total: int | None
    per_day: float | None
    """Bytes that the newest saves add in a day."""
    between: float | None
    """Seconds between saves."""
    days: float | None
    """Until the disk is full if nothing is deleted."""
    days_after: float | None
    """The same, once what would go is gone."""
    problem: str | None


class UsagePage(msgspec.Struct, frozen=True):
    """Every run's bytes, and what the policies would do about them."""

    keep: str
    nbytes: int
    freed: int
    start: int
    runs: list[UsageRow]
