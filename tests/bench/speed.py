"""`python -m tests.bench speed`: all that `treeckpt bench` measures, and what developers compare beside that.

Beside treeckpt run torch.save, safetensors and DCP, and what is installed of Orbax, torch_checkpointing,
s3torchconnector and s3fs. `--only remote` saves and loads 537 MB in an S3 server of its own over HTTPS, with the
latency and the rate of each `--link`; the limit is the best of obstore itself in the same repetition.
`--device cuda` compares a state on a device with the copy to and from pinned memory, measured before each turn: saves,
background saves beside training steps there, and loads. Medians are compared with the figures that treeckpt has to
reach (bars).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from tests.bench.checkpointers import device_checkpointers, sync_checkpointers
from tests.bench.dcp_forms import sync_dcp_forms
from tests.bench.device_limits import DeviceMeasurement
from tests.bench.measure_remote import run_remote
from tests.bench.ranks import run_job
from tests.bench.results import (
    LINKS,
    AsyncSummary,
    AsyncTrial,
    Link,
    RankTrial,
    summarize_all,
    summarize_async,
    summarize_remote,
)
from tests.bench.show import async_line, print_async, print_remote, print_targets
from tests.bench.slices import run_slice
from tests.bench.states import SCENARIOS, SpeedTask
from tests.bench.tables import run_table
from tests.bench.targets import BenchTarget, compare_async_with_targets, compare_with_targets
from treeckpt._bench import Report, add_options, check_space, run_in_directory, sizes, write_report
from treeckpt._bench.measure import run_alone, run_turns
from treeckpt._bench.results import BenchError, Trial, describe_machine, print_rows, summarize, trials_line
from treeckpt._bench.states import make_state, shapes_bytes
from treeckpt._report.terminal import fail, print_line

NAMES = [scenario.name for scenario in SCENARIOS]


class SpeedReport(Report, frozen=True, kw_only=True):
    """What `--json` writes."""

    stays: Sequence[AsyncTrial]
    stay_rows: Sequence[AsyncSummary]
    bars: Sequence[BenchTarget]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
        0 if it ran, 1 if something failed (or, with --strict, a bar is not reached), 2 if it could not start.
    """
    parser = argparse.ArgumentParser("python -m tests.bench speed", description=__doc__)
    add_options(parser, NAMES)
    parser.add_argument("--device", help="measure saves from and loads to this device of torch, as cuda")
    parser.add_argument("--link", action="append", type=_link, metavar="MS/MBPS", help="only this link of remote")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the medians: .svg, .png or .pdf")
    parser.add_argument("--strict", action="store_true", help="end with exit code 1 where a bar is not reached")
    options = parser.parse_args(argv)
    if problem := _no_device(options.device):
        fail(problem)
        return 2
    scale, repetitions = sizes(options)
    chosen = [
        scenario.name
        for scenario in SCENARIOS
        if scenario.device == (options.device is not None)
        if not options.only or scenario.name in options.only or (scenario.dcp and "dcp" in options.only)
    ]
    if not chosen:
        fail("the scenarios device and device-async take --device, and all others do not")
        return 2

    def work(directory: Path, output: TextIO) -> int:
        names, links = tuple(options.contender or ()), tuple(options.link or LINKS)
        device = options.device or "cpu"
        tasks = [SpeedTask(name, str(directory), scale, repetitions, names, links, device) for name in chosen]
        local = [shapes_bytes(task.shapes) for task in tasks if not task.scenario.remote]
        check_space(directory, max(local, default=0))
        return _run(tasks, options, output)

    return run_in_directory(options, work)


def _link(text: str) -> Link:
    latency, _, rate = text.partition("/")
    link = Link(float(latency), float(rate))
    if link.latency < 0 or link.rate <= 0:
        raise argparse.ArgumentTypeError(f"expected milliseconds/MB/s, as 40/90, found {text}")
    return link


def _no_device(device: str | None) -> str:
    """Returns why torch has no such device here, empty if it has."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
        found = f"{error}".splitlines()[0]
        return f"--device {device}: expected a device of torch that is here, as cpu or cuda, found: {found}"
    return ""


def _run(tasks: Sequence[SpeedTask], options: argparse.Namespace, output: TextIO) -> int:
    trials, async_trials, failed = run_tasks(tasks)
    rows, async_rows = summarize_all(trials), summarize_async(async_trials)
    bars = [*compare_with_targets(rows), *compare_async_with_targets(async_rows)]
    print_targets(bars, tasks[0].scale)
    report = SpeedReport(
        "treeckpt._bench/4",
        tasks[0].scale,
        tasks[0].repetitions,
        describe_machine(),
        trials,
        rows,
        stays=async_trials,
        stay_rows=async_rows,
        bars=bars,
    )
    write_report(options.json, report, output)
    if options.plot:
        from tests.bench.plot import draw

        for path in draw(rows, options.plot):
            print_line(f"wrote {path}")
    return 1 if failed or (options.strict and any(bar.state == "short" for bar in bars)) else 0


def run_tasks(tasks: Sequence[SpeedTask]) -> tuple[list[Trial], list[AsyncTrial], bool]:
    """Runs all scenarios, also after one has failed; returns what was measured and whether one failed."""
    trials: list[Trial] = []
    async_trials: list[AsyncTrial] = []
    failed = False
    for task in tasks:
        own: list[Any] = []
        try:
            for found in run_task(task):
                own += [found] if isinstance(found, AsyncTrial) else found
                line = async_line if isinstance(found, AsyncTrial) else trials_line
                print(line(found, task.repetitions), file=sys.stderr, flush=True)
        except BenchError as error:
            fail(f"{task.name}: {error}")
            failed = True
        text = task.scenario.text
        if own and task.scenario.beside:
            async_trials += own
            print_async(text, summarize_async(own))
        elif own:
            trials += own
            print_remote(text, summarize_remote(own)) if task.scenario.remote else print_rows(text, summarize(own))
    return trials, async_trials, failed


def run_task(task: SpeedTask) -> Iterator[list[Trial] | AsyncTrial]:
    """Yields the trials of each turn of a scenario."""
    scenario = task.scenario
    if scenario.beside:
        return run_job("tests.bench.measure_async", task, AsyncTrial)
    if scenario.ranks > 1:
        return run_job("tests.bench.ranks", task, list[RankTrial])
    if scenario.remote:
        return run_remote(task)
    if scenario.keyed:
        return run_table(task)
    if scenario.part > 1:
        return run_slice(task)
    if scenario.device:
        contenders = [c for c in device_checkpointers(task.device) if task.selects(c.name)]
        state = {name: leaf.to(task.device) for name, leaf in make_state(task.shapes).items()}
        return run_turns(task, contenders, DeviceMeasurement(task), state)
    contenders = sync_dcp_forms() if scenario.dcp else sync_checkpointers()
    return run_alone(task, [c for c in contenders if task.selects(c.name)])
