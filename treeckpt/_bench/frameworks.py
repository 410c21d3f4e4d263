"""`treeckpt bench --only frameworks`: what frameworks save themselves, and through treeckpt's adapters, in turn.

Each framework trains the same model of 201 MB, with Adam's moments, in its own loop, and saves after each step: in a
process with its own checkpoints and in one with treeckpt's, each twice, in the order A B B A. `framework_jobs` has the
loops. Of each process the first save is not counted.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from ..demo.launch import started, worker_environment
from .framework_clock import FrameworkSave, FrameworkTask, SaveClock, Side
from .framework_jobs import FRAMEWORKS
from .results import BenchError, FrameworkSummary, print_frameworks

ROUNDS: tuple[tuple[Side, Side], ...] = (("own", "treeckpt"), ("treeckpt", "own"))


def run_frameworks(
    directory: Path, scale: float, repetitions: int, names: Sequence[str]
) -> tuple[list[FrameworkSummary], list[str]]:
    """Measures each framework that is installed, of those that are named or of all, and prints the table.

    Returns:
        A row for each that was measured, and what went wrong with the others.
    """
    chosen = [framework for framework in FRAMEWORKS if not names or framework.name in names]
    rows: list[FrameworkSummary] = []
    errors: list[str] = []
    for framework in chosen:
        try:
            if framework.installed:
                rows.append(_measured(framework.name, directory, scale, repetitions))
        except BenchError as error:
            errors.append(f"{framework.name}: {error}")
    print_frameworks(rows, [framework.name for framework in chosen if not framework.installed])
    return rows, errors


def _measured(name: str, directory: Path, scale: float, repetitions: int) -> FrameworkSummary:
    saves: dict[Side, list[FrameworkSave]] = {"own": [], "treeckpt": []}
    for number, sides in enumerate(ROUNDS):
        for side in sides:
            place = directory / f"{name}-{side}-{number}"
            place.mkdir()
            count = 1 + max(1, round(repetitions / len(ROUNDS)))
            found = list(_run(FrameworkTask(name, side, str(place), count, scale)))
            saves[side] += found[1:]
            last = found[-1]
            print(f"{name} {side}: blocked {last.blocked:.3f} s, durable {last.durable:.3f} s", file=sys.stderr)
    own, ours = saves["own"], saves["treeckpt"]
    own_blocked, blocked = (median(one.blocked for one in found) for found in (own, ours))
    own_durable, durable = (median(one.durable for one in found) for found in (own, ours))
    return FrameworkSummary(
        framework=name,
        saves=len(ours),
        own_blocked=own_blocked,
        blocked=blocked,
        own_durable=own_durable,
        durable=durable,
    )


def _run(task: FrameworkTask) -> Iterator[FrameworkSave]:
    """Runs a process; yields its saves, and removes the checkpoints."""
    command = [sys.executable, "-m", __name__, msgspec.json.encode(task).decode()]
    with started(command, worker_environment(os.environ)) as process:
        said = list(process.stdout or ())
        code = process.wait()
    lines = (task.path / "saves.jsonl").read_bytes().splitlines() if not code else []
    shutil.rmtree(task.path, ignore_errors=True)
    if len(lines) < task.saves:
        sys.stderr.writelines(said[-60:])
        raise BenchError(
            f"{task.side}: exit code {code}, {len(lines)} of {task.saves} saves; what it said last is above"
        )
    for line in lines:
        yield msgspec.json.decode(line, type=FrameworkSave)


def main(text: str) -> None:
    """Does a task in this process."""
    task = msgspec.json.decode(text, type=FrameworkTask)
    next(one for one in FRAMEWORKS if one.name == task.framework).job(task, SaveClock(task))


if __name__ == "__main__":
    main(sys.argv[1])
