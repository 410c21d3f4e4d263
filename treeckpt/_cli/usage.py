"""`ls --usage`: how many bytes runs take, how they grow under their policies or others, and when their disk is full."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .._core.columns import bytes_column
from .._core.text import bytes_text, count_text, seconds_text
from .._io.storage.local_store import is_url, local_path
from .._report.terminal import print_json, print_line, print_table
from .._runs.catalog import CheckpointInfo
from .._runs.usage import RunUsage, Source, UsageFigures, disk_of, usage_figures, usage_of_run
from ..policy import KeepError, Policy, parse_keep

_SOURCES: Mapping[Source, str] = {"given": "--keep", "recorded": "its own", "all": "nothing deleted"}


def policies_from(text: str) -> tuple[Policy, ...]:
    """Parses the policies of an option."""
    try:
        return parse_keep(text)
    except KeepError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def show_usage(runs: Mapping[str, Sequence[CheckpointInfo]], given: Sequence[Policy], *, as_json: bool) -> None:
    """Prints what each run takes, and will take.

    Args:
        runs: the checkpoints of each run, newest first.
        given: policies to try.
    """
    now_ns = time.time_ns()
    usages = [usage_of_run(infos, now_ns, given=given) for infos in runs.values()]
    figures = usage_figures(usages, [None if is_url(run) else disk_of(Path(local_path(run))) for run in runs])
    if as_json:
        found = zip(runs, usages, figures, strict=True)
        rows = [
            {"run": r, "checkpoints": u.checkpoints, "nbytes": u.nbytes} | msgspec.structs.asdict(f)
            for r, u, f in found
        ]
        print_json(rows)
        return
    for run, usage, known in zip(runs, usages, figures, strict=True):
        print_line(f"{run}: {bytes_text(usage.nbytes)} in {count_text(usage.checkpoints, 'checkpoint')}")
        _print_growth(usage, known)
        if known.disk_free is not None:
            free, total = bytes_text(known.disk_free), bytes_text(known.disk_total or 0)
            full = f"full in {known.days:.1f} days" if known.days is not None else "does not fill"
            by = count_text(known.disk_live or 0, "live run")
            print_line(f"disk: {free} free of {total}, {full}, by {by} of those named")


def _print_growth(usage: RunUsage, known: UsageFigures) -> None:
    if known.between is None or known.save_nbytes is None:
        print_line("fewer than three saves follow each other: how often it saves is not known")
        return
    ended = "" if usage.live else "the run has ended, and does not grow; if it went on: "
    print_line(f"{ended}a save of {bytes_text(known.save_nbytes)} every {seconds_text(known.between)}")
    size = bytes_column([one.in_a_week for one in known.projections])
    growth = bytes_column([one.per_day for one in known.projections])
    rows = [
        (_SOURCES[one.source], one.keep, size(one.in_a_week), f"{growth(one.per_day)} a day")
        for one in known.projections
    ]
    print_table(("policies", "keep", "in a week", "growth after that"), rows, right=("in a week", "growth after that"))
