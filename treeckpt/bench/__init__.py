"""`treeckpt bench`: measures saves and loads beside the limits of the disk and beside other libraries, in one run.

Raw limits are measured right before every trial, contenders alternate (A B C, C B A, ...), and medians and ranges are
reported. This module reads the options and runs the scenarios; torch is imported once they are parsed.

Beside treeckpt run torch.save, safetensors and DCP, and what is installed of Orbax, torch_checkpointing,
s3torchconnector and s3fs (the extra `bench`). `--only remote` saves and loads 537 MB in an S3 server of its own, with
the latency and the rate of each `--link`; the limit is the best of obstore itself in the same repetition.
`--device cuda` compares a state on a device with the copy to and from pinned memory, measured before each turn: saves,
background saves beside training steps there, and loads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from ..report.terminal import fail, print_line
from .machine import Machine, describe_machine
from .results import LINKS, AsyncSummary, AsyncTrial, Link, Trial, TrialSummary, summarize, summarize_async
from .show import async_line, print_async, print_remote, print_rows, print_targets, trials_line
from .targets import BenchTarget, compare_async_with_targets, compare_with_targets

if TYPE_CHECKING:
    from .states import BenchTask

__all__ = ["Report", "main"]

NAMES = ("gpt2", "tiny", "one", "slice", "replicated", "reshard", "host-2", "host-4", "host-8", "table", "remote",
    "async", "async-tiny", "dcp", "dcp-small", "dcp-async", "device", "device-async")  # fmt: skip
QUICK_SCALE, QUICK_REPETITIONS = 1 / 8, 2
_LINK_HELP = "only this link of remote: ms before an answer / MB/s a connection, as 40/90"
_DEVICE_HELP = "measure saves from and loads to this device of torch, as cuda: the scenarios device and device-async"
_ONLY_HELP = f"of: {', '.join(NAMES)}; dcp has all that begin so"
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
    async_trials: list[AsyncTrial] = msgspec.field(name="stays")
    async_rows: list[AsyncSummary] = msgspec.field(name="stay_rows")
    targets: list[BenchTarget] = msgspec.field(name="bars")


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
    output = sys.stdout
    alone = options.json is not None and str(options.json) == "-"  # then the tables go to the error stream
    try:
        with contextlib.redirect_stdout(sys.stderr if alone else output):
            return _run(options, scale, repetitions, output)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "treeckpt bench", description="Measure saves and loads beside the disk's limits and other libraries."
    )
    parser.add_argument("--quick", action="store_true", help="1/8 of the sizes, 2 repetitions")
    parser.add_argument("--scale", type=_positive, help="of the sizes (default: 1)")
    parser.add_argument("--repetitions", type=_count, metavar="N", help="of everything (default: 5)")
    parser.add_argument("--only", action="append", choices=NAMES, metavar="SCENARIO", help=_ONLY_HELP)
    parser.add_argument("--contender", action="append", metavar="NAME", help="only this one, as named in the table")
    parser.add_argument("--device", metavar="DEVICE", help=_DEVICE_HELP)
    parser.add_argument("--link", action="append", type=_link, metavar="MS/MBPS", help=_LINK_HELP)
    parser.add_argument("--dir", type=Path, help="where to write (default: a new directory here, removed at the end)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all trials, medians and bars; -: to stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the medians: .svg, .png or .pdf")
    parser.add_argument("--strict", action="store_true", help="end with exit code 1 where a bar is not reached")
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number <= 100:
        raise argparse.ArgumentTypeError(f"expected a number above 0, up to 100, found {text}")
    return number


def _link(text: str) -> Link:
    latency, _, rate = text.partition("/")
    link = Link(float(latency), float(rate))
    if link.latency < 0 or link.rate <= 0:
        raise argparse.ArgumentTypeError(f"expected milliseconds/MB/s, as 40/90, found {text}")
    return link


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return number


def _run(options: argparse.Namespace, scale: float, repetitions: int, output: TextIO) -> int:
    from .measure import BenchError
    from .states import SCENARIOS, BenchTask

    if options.device is not None and (problem := _no_device(options.device)):
        fail(f"treeckpt bench: {problem}")
        return 2
    try:
        if options.dir is not None:
            options.dir.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="treeckpt-bench-", dir=options.dir or Path.cwd())).absolute()
    except OSError as error:
        fail(f"treeckpt bench: {error}")
        return 2
    tasks = [
        BenchTask(
            scenario.name,
            str(directory),
            scale,
            repetitions,
            tuple(options.contender or ()),
            tuple(options.link or LINKS),
            options.device or "cpu",
        )
        for scenario in SCENARIOS
        if scenario.device == (options.device is not None)
        if not options.only or scenario.name in options.only or (scenario.dcp and "dcp" in options.only)
    ]
    if not tasks:
        fail("treeckpt bench: the scenarios device and device-async take --device, and all others do not")
        shutil.rmtree(directory, ignore_errors=True)
        return 2
    try:
        _check_space(tasks)
        trials, async_trials, failed = run_tasks(tasks)
    except (BenchError, OSError) as error:
        fail(f"treeckpt bench: {error}")
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    rows, async_rows = summarize(trials), summarize_async(async_trials)
    targets = [*compare_with_targets(rows), *compare_async_with_targets(async_rows)]
    print_targets(targets, scale)
    machine = describe_machine()
    report = Report("treeckpt.bench/3", scale, repetitions, machine, trials, rows, async_trials, async_rows, targets)
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n"
        if str(options.json) == "-":
            output.write(text)
        else:
            options.json.write_text(text)
            print_line(f"wrote {options.json}")
    if options.plot:
        from .plot import draw

        for path in draw(rows, options.plot):
            print_line(f"wrote {path}")
    return 1 if failed or (options.strict and any(target.state == "short" for target in targets)) else 0


def _no_device(device: str) -> str:
    """Returns why torch has no such device here, empty if it has."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
        found = f"{error}".splitlines()[0]
        return f"--device {device}: expected a device of torch that is here, as cpu or cuda, found: {found}"
    return ""


def _check_space(tasks: Sequence[BenchTask]) -> None:
    """Checks that there is room for a checkpoint and the file for raw limits at one time.

    Raises:
        OSError: there is less free space.
    """
    from .raw_limits import MOST
    from .states import shapes_bytes

    needed = 2 * max((shapes_bytes(task.shapes) for task in tasks if not task.scenario.remote), default=0)
    needed += MOST + MARGIN
    directory = tasks[0].path
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            f"{directory}: expected {needed / 1e9:.1f} GB of free space, found {free / 1e9:.1f} GB; see --dir"
        )


def run_tasks(tasks: Sequence[BenchTask]) -> tuple[list[Trial], list[AsyncTrial], bool]:
    """Runs all scenarios, also after one has failed; returns what was measured and whether one failed."""
    from .measure import BenchError

    trials: list[Trial] = []
    async_trials: list[AsyncTrial] = []
    failed = False
    for task in tasks:
        try:
            for found in run_task(task):
                if isinstance(found, AsyncTrial):
                    async_trials.append(found)
                    line = async_line(found, task.repetitions)
                else:
                    trials += found
                    line = trials_line(found, task.repetitions)
                print(line, file=sys.stderr, flush=True)
        except BenchError as error:
            fail(f"treeckpt bench: {task.name}: {error}")
            failed = True
        text = task.scenario.text
        if rows := [row for row in summarize(trials) if row.scenario.partition(" ")[0] == task.name]:
            (print_remote if task.scenario.remote else print_rows)(text, rows)
        if async_rows := [row for row in summarize_async(async_trials) if row.scenario == task.name]:
            print_async(text, async_rows)
    return trials, async_trials, failed


def run_task(task: BenchTask) -> Iterator[list[Trial] | AsyncTrial]:
    """Yields the trials of each turn of a scenario."""
    from .checkpointers import device_checkpointers, sync_checkpointers
    from .dcp_forms import sync_dcp_forms
    from .measure import run_alone, run_slice
    from .measure_remote import run_remote
    from .ranks import run_job
    from .tables import run_table

    scenario = task.scenario
    if scenario.beside:
        return run_job("treeckpt.bench.measure_async", task, AsyncTrial)
    if scenario.ranks > 1:
        return run_job("treeckpt.bench.ranks", task, list[Trial])
    if scenario.remote:
        return run_remote(task)
    if scenario.keyed:
        return run_table(task)
    if scenario.part > 1:
        return run_slice(task)
    contenders = device_checkpointers(task.device) if scenario.device else sync_checkpointers()
    contenders = sync_dcp_forms() if scenario.dcp else contenders
    return run_alone(task, [c for c in contenders if task.selects(c.name)])
