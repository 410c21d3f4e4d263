"""The commands that export a file: `report` (one HTML page) and `trace` (the timings of a save for Perfetto)."""

from __future__ import annotations

import argparse
from pathlib import Path

from .._core.text import bytes_text, count_text
from .._inspect.perfetto import encode_trace
from .._inspect.timing_report import TimingReport
from .._report.output_file import replace_file
from .._report.terminal import print_json, print_line
from .._runs import catalog
from .._runs.progress_bar import counting_bar
from .command import Commands, progress_of


def add_commands(commands: Commands) -> None:
    """Adds `report` and `trace`."""
    report = commands.add("report", _report, "write one HTML page of a checkpoint or a run", progress=True)
    report.add_argument("path", metavar="CKPT_OR_RUN")
    report.add_argument("--html", required=True, metavar="FILE", help="where to; an existing file is replaced")
    trace = commands.add("trace", _trace, "write the time of a save as a trace for Perfetto", progress=True)
    trace.add_argument("checkpoint", metavar="CKPT")
    trace.add_argument("--out", required=True, metavar="FILE", help="where to; an existing file is replaced")


def _report(options: argparse.Namespace) -> int:
    from .._report import report

    with counting_bar(f"reading {options.path}", shown=progress_of(options)) as count:
        text = report(options.path, options.html, on_read=count)
    if options.json:
        print_json({"file": options.html, "nbytes": len(text.encode())})
        return 0
    print_line(f"{options.html}: {bytes_text(len(text.encode()))}, needs nothing else to be read")
    return 0


def _trace(options: argparse.Namespace) -> int:
    with counting_bar("writing the spans of ranks", shown=progress_of(options)) as count:
        timings = catalog.read_timings(options.checkpoint)
        replace_file(Path(options.out), encode_trace(timings, on_rank=count))
        study = TimingReport(timings)
        about = {"late_call": study.late_call or None, "clocks": study.clocks or None}
    if options.json:
        print_json({"file": options.out, "spans": len(timings.spans), **about})
        return 0
    print_line(f"{options.out}: {count_text(len(timings.spans), 'span')}; open it at https://ui.perfetto.dev")
    for text in filter(None, about.values()):
        print_line(text)
    return 0
