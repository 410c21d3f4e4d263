"""`ls --failures`: the saves of runs that failed or were killed, also once their files are gone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from .._core.text import ago_text, time_text
from .._io.storage.open import open_run
from .._report.terminal import print_json, print_line
from .._runs.catalog import CheckpointInfo
from .._runs.failures import failures_of


def show_failures(runs: Mapping[str, Sequence[CheckpointInfo]], days: float, *, as_json: bool) -> None:
    """Prints the failed and killed saves of each run, the last one first.

    Args:
        runs: the checkpoints of each run.
        days: only saves that ended in the last so many days.
    """
    now_ns = time.time_ns()
    found = {run: failures_of(open_run(run), infos).of_days(days, now_ns) for run, infos in runs.items()}
    if as_json:
        rows = {
            run: [msgspec.structs.asdict(row) | {"text": row.text} for row in known.rows]
            for run, known in found.items()
        }
        print_json(
            [
                {"run": run, "days": days, "older": known.older, "problem": known.problem, "failures": rows[run]}
                for run, known in found.items()
            ]
        )
        return
    for run, known in found.items():
        before = "" if len(found) == 1 else f"{run}: "
        if known.problem:
            print_line(f"{before}not all is known: {known.problem}", "yellow")
        if not known.rows:
            print_line(f"{before}{known.none_text(days)}")
        for row in known.rows:
            ago = ago_text((now_ns - row.ended_ns) / 1e9)
            print_line(f"{before}{time_text(row.ended_ns)}, {ago}: {row.name}, save {row.save_id}. {row.text}")
            if row.error:
                print_line(f"  {row.error}", "dim")
        if known.rows and known.older:
            print_line(f"{before}{known.older} before that: --days says how far back")
