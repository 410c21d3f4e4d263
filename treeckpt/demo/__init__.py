"""The main job from end to end: train on 4 ranks, save, start again on 2 ranks and on 1, compare, browse.

This module reads the options and runs the jobs; `train` runs on the ranks, in processes of their own, so that torch is
never imported here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .._report.terminal import print_json
from .launch import JobFailed, run_job
from .tasks import (
    LAYOUTS,
    LOSS_TOLERANCE,
    RANKS,
    DemoComparison,
    Layout,
    Outcome,
    Resume,
    Resumed,
    Saved,
    Task,
    Train,
    Trained,
    compare_runs,
)

__all__ = ["main"]

MIN_STEPS = 4  # three checkpoints, and a step after the last
STEPS = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        0 if every leaf came back bit for bit and the losses agree, 1 if not or if a job failed, 2 if it
        could not start.
    """
    parser = argparse.ArgumentParser(
        "treeckpt demo", description="Train on 4 ranks, save, load on 2 and on 1, compare everything, browse the run."
    )
    parser.add_argument("--run", type=Path, help="a new or empty directory (default: a new one in ./demo-runs)")
    parser.add_argument("--steps", type=_steps, default=STEPS, help=f"of training, {MIN_STEPS} or more ({STEPS})")
    parser.add_argument("--no-serve", action="store_true", help="end instead of serving the dashboard")
    parser.add_argument("--json", action="store_true", help="print JSON; the rest goes to the error stream")
    options = parser.parse_args(argv)
    console, errors = Console(stderr=options.json), Console(stderr=True, soft_wrap=True, highlight=False)
    if importlib.util.find_spec("torch") is None:
        errors.print("treeckpt demo trains with torch, which is not installed: pip install 'treeckpt\\[torch]'")
        return 2
    try:
        run = prepare_run(options.run)
    except OSError as error:
        errors.print(f"treeckpt demo: {error}", markup=False)
        return 2
    try:
        verdicts = run_jobs(console, run, options.steps)
    except JobFailed as error:
        errors.print(f"treeckpt demo: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        print_json({"run": str(run), "ok": all(verdict.ok for verdict in verdicts), "comparisons": verdicts})
    complaints = [text for verdict in verdicts for text in verdict.complaints()]
    for text in complaints:
        errors.print(text, style="bold red", markup=False)
    if complaints:
        return 1
    console.print(f"Every leaf came back bit for bit; losses agree within {LOSS_TOLERANCE:g}.", style="bold green")
    return 0 if options.no_serve else serve(run, errors, json=options.json)


def _steps(text: str) -> int:
    steps = int(text)
    if steps < MIN_STEPS:
        raise argparse.ArgumentTypeError(f"expected {MIN_STEPS} or more steps, found {steps}")
    return steps


def prepare_run(asked: Path | None) -> Path:
    """Returns the directory to work in, and creates it where it is missing.

    Raises:
        OSError: it cannot be made, or it holds something.
    """
    if asked is None:
        try:
            Path("demo-runs").mkdir(exist_ok=True)
            asked = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir="demo-runs"))
        except OSError:  # not a place to write to
            asked = Path(tempfile.mkdtemp(prefix="treeckpt-demo-"))
    asked.mkdir(parents=True, exist_ok=True)
    if any(asked.iterdir()):
        raise FileExistsError(f"{asked}: expected a new or empty directory, found files. Name another with --run")
    return asked.resolve()


def run_jobs(console: Console, run: Path, steps: int) -> list[DemoComparison]:
    """Runs the three jobs and prints the table."""
    saves = tuple(steps * quarter // 4 for quarter in (1, 2, 3))
    train = Train(str(run), "hsdp", saves, steps)
    resumes = (Resume(str(run), "tp", saves[-1], steps), Resume(str(run), "plain", saves[-1], steps, saves[:-1]))
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        trained = _run_task(train, "train on {} and save", progress)
        assert isinstance(trained, Trained), "the outcome of Train"
        verdicts: list[DemoComparison] = []
        for task in resumes:
            resumed = _run_task(task, "load on {} and go on", progress)
            assert isinstance(resumed, Resumed), "the outcome of Resume"
            verdicts.append(compare_runs(trained, resumed, task))
    console.print(build_table(trained.saves, train.layout, verdicts))
    console.print(f"run: {run}", markup=False, highlight=False, soft_wrap=True)
    return verdicts


def build_table(saves: Sequence[Saved], source: Layout, verdicts: Sequence[DemoComparison]) -> Table:
    """Builds the table that the demo prints last; it fits into 80 columns."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("what", no_wrap=True)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for name in ("MB", "seconds", "GB/s", "bit-equal", "loss gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for saved in saves:
        table.add_row(f"save {saved.step}", *_cost(source, saved.nbytes, saved.seconds), "", "")
    for found in verdicts:
        equal = f"{found.leaves - len(found.different)}/{found.leaves}"
        cost = _cost(found.task.layout, found.nbytes, found.seconds)
        style = "green" if found.ok else "bold red"
        table.add_row(f"load {found.task.step}", *cost, equal, f"{found.gap:.1e}", style=style)
    return table


def _cost(layout: Layout, nbytes: int, seconds: float) -> tuple[str, str, str, str, str]:
    rate = f"{nbytes / 1e9 / seconds:.3f}" if seconds > 0 else "-"
    return f"{RANKS[layout]}", LAYOUTS[layout], f"{nbytes / 1e6:.1f}", f"{seconds:.3f}", rate


def _run_task(task: Task, text: str, progress: Progress) -> Outcome:
    """Runs a task, under a bar on a terminal, with a line at its end elsewhere."""
    text = text.format(f"{RANKS[task.layout]} ranks" if RANKS[task.layout] > 1 else "1 process")
    bar = progress.add_task(text, total=None)  # it pulses until the processes are up
    began = time.monotonic()
    outcome = run_job(task, lambda _: progress.update(bar, total=task.steps, advance=1), environment=os.environ)
    if not progress.console.is_terminal:
        took = time.monotonic() - began
        progress.console.print(f"{text}: {LAYOUTS[task.layout]}, {task.steps} steps, {took:.1f} s", highlight=False)
    return outcome


def serve(run: Path, errors: Console, *, json: bool = False) -> int:
    """Serves the dashboard on the run until Ctrl-C, at its usual port or else at a free one."""
    try:
        from treeckpt_dashboard.web import server
    except ModuleNotFoundError as error:
        errors.print(f"The dashboard needs {error.name}: pip install 'treeckpt[dashboard]'", markup=False)
        return 2
    started = server.announce_json if json else None
    try:
        return server.serve([run], started=started)
    except server.ServeError:
        return server.serve([run], port=0, started=started)
