"""`treeckpt bench`: measures saves and loads beside the limits of the disk and beside other libraries, in one run.

Raw limits are measured right before every trial, contenders alternate (A B C, C B A, ...), and medians and ranges are
reported. Beside treeckpt run torch.save, DCP, and safetensors where it is installed (the extra `bench`). This module
reads the options and runs the scenarios; torch is imported once they are parsed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from .._report.terminal import fail, print_line
from .results import (
    BenchError,
    FrameworkSummary,
    IncrementalSummary,
    Machine,
    Trial,
    TrialSummary,
    describe_machine,
    print_rows,
    summarize,
    trials_line,
)

__all__ = ["Report", "main"]

NAMES = ("gpt2", "tiny", "one")
FRAMEWORKS = "frameworks"
INCREMENTAL = "incremental"
"""These scenarios are measured only if they are named."""
QUICK_SCALE, QUICK_REPETITIONS = 1 / 8, 2
MARGIN = 1 << 30
"""Bytes of disk to leave free."""


class Report(msgspec.Struct, frozen=True):
    """What `--json` writes. Rates are bytes a second, times seconds, memory bytes."""

    format: str
    scale: float
    repetitions: int
    machine: Machine
    trials: Sequence[Trial]
    rows: Sequence[TrialSummary]
    frameworks: Sequence[FrameworkSummary] = ()
    incremental: Sequence[IncrementalSummary] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
        0 if it ran, 1 if something failed, 2 if it could not start.
    """
    parser = argparse.ArgumentParser(
        "treeckpt bench", description="Measure saves and loads beside the disk's limits and other libraries."
    )
    add_options(parser, (*NAMES, FRAMEWORKS, INCREMENTAL))
    options = parser.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        fail("treeckpt bench compares with torch, which is not installed: pip install 'treeckpt[bench]'")
        return 2
    return run_in_directory(options, lambda directory, output: _run(options, directory, output))


def add_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Adds the options to a parser, with the scenarios of these names."""
    parser.add_argument("--quick", action="store_true", help="1/8 of the sizes, 2 repetitions")
    parser.add_argument("--scale", type=_positive, help="of the sizes (default: 1)")
    parser.add_argument("--repetitions", type=_count, metavar="N", help="of everything (default: 5)")
    parser.add_argument("--only", action="append", choices=names, metavar="SCENARIO", help=f"of: {', '.join(names)}")
    parser.add_argument("--contender", action="append", metavar="NAME", help="only this one, as named in the table")
    parser.add_argument("--dir", type=Path, help="where to write (default: a new directory here, removed at the end)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all trials and medians; -: to stdout")


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


def sizes(options: argparse.Namespace) -> tuple[float, int]:
    """Returns the scale and the repetitions that are asked for."""
    scale, repetitions = (QUICK_SCALE, QUICK_REPETITIONS) if options.quick else (1.0, 5)
    return options.scale or scale, options.repetitions or repetitions


def run_in_directory(options: argparse.Namespace, work: Callable[[Path, TextIO], int]) -> int:
    """Runs `work` with a new directory, which is removed at the end, and the standard output.

    What is printed meanwhile goes to the error stream where JSON goes to the standard output.

    Returns:
        The exit code: that of `work`, 1 for an error, 2 where there is no directory, 130 after an interrupt.
    """
    output = sys.stdout
    alone = options.json is not None and str(options.json) == "-"
    try:
        with contextlib.redirect_stdout(sys.stderr if alone else output):
            try:
                if options.dir is not None:
                    options.dir.mkdir(parents=True, exist_ok=True)
                directory = Path(tempfile.mkdtemp(prefix="treeckpt-bench-", dir=options.dir or Path.cwd())).absolute()
            except OSError as error:
                fail(f"treeckpt bench: {error}")
                return 2
            try:
                return work(directory, output)
            except (BenchError, OSError) as error:
                fail(f"treeckpt bench: {error}")
                return 1
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace, directory: Path, output: TextIO) -> int:
    from .checkpointers import sync_checkpointers
    from .frameworks import run_frameworks
    from .incremental import run_incremental
    from .measure import run_alone
    from .states import SCENARIOS, BenchTask, shapes_bytes

    scale, repetitions = sizes(options)
    chosen = [scenario for scenario in SCENARIOS if not options.only or scenario.name in options.only]
    check_space(directory, max((shapes_bytes(scenario.shapes(scale)) for scenario in chosen), default=0))
    trials: list[Trial] = []
    failed = False
    for scenario in chosen:
        task = BenchTask(scenario.name, str(directory), scale, repetitions, tuple(options.contender or ()))
        contenders = [contender for contender in sync_checkpointers() if task.selects(contender.name)]
        own: list[Trial] = []
        try:
            for found in run_alone(task, contenders):
                own += found
                print(trials_line(found, repetitions), file=sys.stderr, flush=True)
        except BenchError as error:
            fail(f"treeckpt bench: {scenario.name}: {error}")
            failed = True
        if own:
            print_rows(scenario.text, summarize(own))
        trials += own
    measured: list[FrameworkSummary] = []
    if FRAMEWORKS in (options.only or ()):
        measured, errors = run_frameworks(directory, scale, repetitions, options.contender or ())
        for error in errors:
            fail(f"treeckpt bench: {error}")
        failed = failed or bool(errors)
    report = Report(
        "treeckpt._bench/4",
        scale,
        repetitions,
        describe_machine(),
        trials,
        summarize(trials),
        frameworks=measured,
        incremental=run_incremental(directory, scale, repetitions) if INCREMENTAL in (options.only or ()) else (),
    )
    write_report(options.json, report, output)
    return 1 if failed else 0


def check_space(directory: Path, nbytes: int) -> None:
    """Checks that there is room for two checkpoints of so many bytes, and the file for raw limits.

    Raises:
        OSError: there is less free space.
    """
    from .measure import LARGEST

    needed = 2 * nbytes + LARGEST + MARGIN
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            f"{directory}: expected {needed / 1e9:.1f} GB of free space, found {free / 1e9:.1f} GB; see --dir"
        )


def write_report(path: Path | None, report: Report, output: TextIO) -> None:
    """Writes a report as JSON: to a file, to `output` for `-`, or nowhere without a path."""
    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n"
    if str(path) == "-":
        output.write(text)
    else:
        path.write_text(text)
        print_line(f"wrote {path}")
