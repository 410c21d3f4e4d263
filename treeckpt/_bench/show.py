"""Prints the results of the benchmark: a table for each scenario, and a line for each turn."""

from __future__ import annotations

from collections.abc import Sequence

from .._report.terminal import print_line, print_table
from .results import Trial, TrialSummary

MIB = 1 << 20


def print_rows(text: str, rows: Sequence[TrialSummary]) -> None:
    """Prints the rows of one scenario, a group for each phase."""
    print_line("")
    print_line(text, "bold")
    columns = ("phase", "contender", "s", "range", "GB/s", "of limit", "range ", "limit", "memory", "read", "written")
    cells: list[tuple[str, ...]] = []
    previous = ""
    for row in rows:
        cells.append((row.phase if row.phase != previous else "", *_cells(row)))
        previous = row.phase
    print_table(columns, cells, right=("s", "range", "GB/s", "of limit", "range ", "memory", "read", "written"))


def _cells(row: TrialSummary) -> tuple[str, ...]:
    return (
        row.contender,
        f"{row.seconds:.3f}",
        f"{row.fastest:.3f}-{row.slowest:.3f}",
        f"{row.rate / 1e9:.2f}" if row.limit_rate else "",
        f"{row.ratio:.2f}" if row.ratio is not None else "",
        f"{row.ratio_low:.2f}-{row.ratio_high:.2f}" if row.ratio_low is not None else "",
        _limit(row),
        f"+{row.extra_rss / MIB:.0f} MiB",
        f"{row.read_bytes / row.nbytes:.2f}x",
        f"{row.write_bytes / row.nbytes:.2f}x",
    )


def _limit(row: TrialSummary) -> str:
    if row.limit_rate is None:
        return ""
    huge = f", {row.huge_rate / 1e9:.2f} in huge pages" if row.huge_rate is not None else ""
    return f"{row.limit} {row.limit_rate / 1e9:.2f}{huge}"


def trials_line(trials: Sequence[Trial], repetitions: int) -> str:
    """Returns what a turn took, as one line of progress."""
    first = trials[0]
    parts = ", ".join(f"{trial.phase} {trial.seconds:.3f} s" for trial in trials)
    return f"{first.scenario} {first.repetition + 1}/{repetitions} {first.contender}: {parts}"
