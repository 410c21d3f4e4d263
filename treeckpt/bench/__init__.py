"""`treeckpt bench`: measures saves and loads beside the limits of the disk and beside other libraries, in one run.

Raw limits are measured right before every trial, contenders alternate (A B C, C B A, ...), and medians and ranges are
reported. This module reads the options and runs the scenarios; torch is imported once they are understood.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..report.terminal import fail, print_line
from .machine import Machine, describe_machine
from .results import AsyncSummary, AsyncTrial, Trial, TrialSummary, summarize, summarize_async
from .show import async_line, print_async, print_rows, print_targets, trials_line
from .targets import BenchTarget, compare_async_with_targets, compare_with_targets

if TYPE_CHECKING:
    from .states import Scenario

__all__ = ["Report", "main"]

NAMES = ("gpt2", "tiny", "one", "slice", "replicated", "reshard", "table", "async", "async-tiny")
QUICK_SCALE, QUICK_REPETITIONS = 1 / 8, 2
MARGIN = 1 << 30
"""Bytes of disk to leave free."""


class Report(msgspec.Struct, frozen=True):
    """What `--json` writes. Rates are bytes a second, times seconds, memory bytes."""

    format: str
    scale: float
    repetitions: int
    machine: Machine
    trials: list[Trial]
    rows: list[TrialSummary]
    stays: list[AsyncTrial]
    stay_rows: list[AsyncSummary]
    bars: list[dict[str, str | float | None]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
        0 if it ran, 1 if something failed (or, with --strict, a bar is not reached), 2 if it could not start.
    """
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        fail("treeckpt bench compares with torch, which is not installed: pip install 'treeckpt[bench]'")
        return 2
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        fail("treeckpt bench --plot draws with matplotlib, which is not installed: pip install 'treeckpt[bench]'")
        return 2
    quick_or = (QUICK_SCALE, QUICK_REPETITIONS) if options.quick else (1.0, 5)
    scale = options.scale if options.scale is not None else quick_or[0]
    repetitions = options.repetitions if options.repetitions is not None else quick_or[1]
    try:
        return _run(options, scale, repetitions)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "treeckpt bench", description="Measure saves and loads beside the disk's limits and other libraries."
    )
    parser.add_argument("--quick", action="store_true", help="1/8 of the sizes, 2 repetitions")
    parser.add_argument("--scale", type=_positive, help="of the sizes (default: 1)")
    parser.add_argument("--repetitions", type=_count, metavar="N", help="of everything (default: 5)")
    parser.add_argument("--only", action="append", choices=NAMES, metavar="SCENARIO", help=f"of: {', '.join(NAMES)}")
    parser.add_argument("--contender", action="append", metavar="NAME", help="only this one, as named in the table")
    parser.add_argument("--dir", type=Path, help="where to write (default: a new directory here, removed at the end)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all trials, medians and bars")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the medians: .svg, .png or .pdf")
    parser.add_argument("--strict", action="store_true", help="end with exit code 1 where a bar is not reached")
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number <= 100:
        raise argparse.ArgumentTypeError(f"expected a number above 0, up to 100, found {text}")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return number


def _run(options: argparse.Namespace, scale: float, repetitions: int) -> int:
    from .measure import BenchError
    from .states import SCENARIOS

    scenarios = [s for s in SCENARIOS if not options.only or s.name in options.only]
    try:
        if options.dir is not None:
            options.dir.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="treeckpt-bench-", dir=options.dir or Path.cwd()))
    except OSError as error:
        fail(f"treeckpt bench: {error}")
        return 2
    try:
        _check_space(directory, scenarios, scale)
        trials, stays, failed = _run_scenarios(scenarios, directory, scale, repetitions, options.contender or ())
    except (BenchError, OSError) as error:
        fail(f"treeckpt bench: {error}")
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    rows, stay_rows = summarize(trials), summarize_async(stays)
    bars = [*compare_with_targets(rows), *compare_async_with_targets(stay_rows)]
    print_targets(bars, scale)
    machine = describe_machine()
    report = Report("treeckpt.bench/3", scale, repetitions, machine, trials, rows, stays, stay_rows, _plain(bars))
    _write(options, report)
    return 1 if failed or (options.strict and any(bar.state == "short" for bar in bars)) else 0


def _check_space(directory: Path, scenarios: Sequence[Scenario], scale: float) -> None:
    """Checks that there is room for a checkpoint and the file for raw limits at one time.

    Raises:
        OSError: there is less free space.
    """
    from .raw_limits import MOST
    from .states import shapes_bytes

    needed = 2 * max(shapes_bytes(s.shapes(scale)) for s in scenarios) + MOST + MARGIN
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            f"{directory}: expected {needed / 1e9:.1f} GB of free space, found {free / 1e9:.1f} GB; see --dir"
        )


def _run_scenarios(
    scenarios: Sequence[Scenario], directory: Path, scale: float, repetitions: int, names: Sequence[str]
) -> tuple[list[Trial], list[AsyncTrial], bool]:
    """Runs all scenarios, also after one has failed; returns what was measured and whether one failed."""
    from .measure import BenchError

    trials: list[Trial] = []
    stays: list[AsyncTrial] = []
    failed = False

    def on_trials(new: Sequence[Trial]) -> None:
        trials.extend(new)
        print(trials_line(new, repetitions), file=sys.stderr, flush=True)

    def on_trial(stay: AsyncTrial) -> None:
        stays.append(stay)
        print(async_line(stay, repetitions), file=sys.stderr, flush=True)

    for scenario in scenarios:
        try:
            _run_scenario(scenario, directory, scale, repetitions, names, on_trials, on_trial)
        except BenchError as error:
            fail(f"treeckpt bench: {scenario.name}: {error}")
            failed = True
        if rows := [row for row in summarize(trials) if row.scenario == scenario.name]:
            print_rows(scenario.text, rows)
        if stay_rows := [row for row in summarize_async(stays) if row.scenario == scenario.name]:
            print_async(scenario.text, stay_rows)
    return trials, stays, failed


def _run_scenario(
    scenario: Scenario,
    directory: Path,
    scale: float,
    repetitions: int,
    names: Sequence[str],
    on_trials: Callable[[Sequence[Trial]], None],
    on_trial: Callable[[AsyncTrial], None],
) -> None:
    from .checkpointers import select_by_name, sync_checkpointers
    from .measure import run_alone, run_slice
    from .measure_async import run_async
    from .ranks import run_ranks
    from .tables import run_table

    how: dict[str, Any] = {"scale": scale, "repetitions": repetitions}
    if scenario.beside:
        run_async(scenario, directory, on_trial=on_trial, names=names, **how)
    elif scenario.keyed:
        run_table(scenario, directory, on_trials=on_trials, names=names, **how)
    elif scenario.ranks > 1:
        run_ranks(scenario, directory, on_trials=on_trials, names=names, **how)
    elif scenario.part > 1:
        run_slice(scenario, directory, on_trials=on_trials, names=names, **how)
    else:
        run_alone(scenario, directory, select_by_name(sync_checkpointers(1), names), on_trials=on_trials, **how)


def _plain(bars: Sequence[BenchTarget]) -> list[dict[str, str | float | None]]:
    """Returns targets as dicts, with their state, which is a property."""
    return [{**msgspec.structs.asdict(bar), "state": bar.state} for bar in bars]


def _write(options: argparse.Namespace, report: Report) -> None:
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        print_line(f"wrote {options.json}")
    if options.plot:
        from .plot import draw

        draw(report.rows, options.plot)
        print_line(f"wrote {options.plot}")
