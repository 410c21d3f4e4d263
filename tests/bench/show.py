"""Prints developers' measurements: object stores, background saves, and the targets at the end."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.results import RAW, REMOTE_PHASES, AsyncSummary, AsyncTrial, RemoteSummary
from tests.bench.targets import BenchTarget
from treeckpt._report.terminal import print_line, print_table

MIB = 1 << 20


def print_remote(text: str, rows: Sequence[RemoteSummary]) -> None:
    """Prints a line for each contender on each link; the raw ones as the limits that they make."""
    print_line("")
    print_line(f"{text}: GB/s, and as a part of raw; memory beyond what is loaded", "bold")
    table = {(row.scenario, row.contender, row.phase): row for row in rows}
    cells: list[tuple[str, ...]] = []
    for scenario in dict.fromkeys(row.scenario for row in rows):
        found = [row for row in rows if row.scenario == scenario]
        own = {row.phase: row for row in found if not row.contender.startswith(RAW)} or {r.phase: r for r in found}
        limits = [_gb(own[phase].limit_rate) if phase in own else "" for phase in REMOTE_PHASES]
        cells.append((scenario, RAW, *limits, "", ""))
        for contender in dict.fromkeys(row.contender for row in found if not row.contender.startswith(RAW)):
            phases = [table.get((scenario, contender, phase)) for phase in REMOTE_PHASES]
            memory = max(row.extra_rss - row.loaded for row in phases if row) / MIB
            requests = "/".join(str(row.requests) for row in phases if row)
            cells.append(("", contender, *map(_remote_cell, phases), f"+{memory:.0f} MiB", requests))
    columns = ("link", "contender", *(phase.split()[0] for phase in REMOTE_PHASES), "memory", "requests")
    print_table(columns, cells, right=columns[2:])


def _remote_cell(row: RemoteSummary | None) -> str:
    if row is None or row.cut:
        return "" if row is None else f"> {row.seconds:.0f} s"
    return f"{_gb(row.rate)} ({row.ratio:.2f})" if row.ratio is not None else _gb(row.rate)


def _gb(rate: float | None) -> str:
    return f"{rate / 1e9:.2f}" if rate else ""


def print_async(text: str, rows: Sequence[AsyncSummary]) -> None:
    """Prints the rows of a scenario of background saves."""
    print_line("")
    print_line(text, "bold")
    columns = ("contender", "blocked", "range", "first", "of a copy", "durable", "steps slower", "longest gap")
    cells = [
        (
            row.contender,
            f"{row.blocked:.3f} s",
            f"{row.blocked_low:.3f}-{row.blocked_high:.3f}",
            f"{row.first:.3f} s",
            f"{row.stall:.2f}x" if row.stall is not None else "",
            f"{row.durable:.3f} s",
            f"{row.interference:.1%}" if row.interference is not None else "",
            f"{row.gap * 1e3:.0f} ms" if row.gap is not None else "",
        )
        for row in rows
    ]
    print_table(columns, cells, right=columns[1:])


def async_line(trial: AsyncTrial, repetitions: int) -> str:
    """Returns what a background save took, as one line of progress."""
    which = "first" if trial.repetition == 0 else f"{trial.repetition}/{repetitions}"
    return f"{trial.scenario} {which} {trial.contender}: blocked {trial.blocked:.3f} s, durable {trial.durable:.3f} s"


def print_targets(targets: Sequence[BenchTarget], scale: float) -> None:
    """Prints each target that was measured, with its figure."""
    measured = [(target, target.figure) for target in targets if target.figure is not None]
    print_line("")
    print_line("bars", "bold")
    columns = ("scenario", "of treeckpt", "figure", "target", "state")
    cells = [
        (t.scenario, t.text, _amount(t, figure), f"{t.sense} {_amount(t, t.target)}", t.state) for t, figure in measured
    ]
    print_table(columns, cells, right=("figure", "target"))
    if len(measured) < len(targets):
        print_line(f"{len(targets) - len(measured)} more were not measured", "dim")
    if scale != 1:
        print_line(f"the targets are meant for full sizes; this run has {scale:g} of them", "dim")


def _amount(target: BenchTarget, figure: float) -> str:
    return f"{figure:.2f}" if target.unit == "x" else f"{figure:.0f} {target.unit}"
