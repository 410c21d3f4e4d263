"""The commands that write files of other formats: `convert`, `report` (one HTML page) and `trace` (for Perfetto)."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._core.text import bytes_text, count_text, seconds_text
from .._inspect.perfetto import encode_trace
from .._inspect.timing_report import TimingReport
from .._io.comm.waiting import log_if_slow
from .._report import replace_file, report
from .._report.terminal import print_json, print_line
from .._runs import catalog
from .._runs.progress_bar import counting_bar
from .command import Commands, progress_of

FORMATS = ("treeckpt", "torch", "dcp", "safetensors")
SHOWN_FINDINGS = 12
"""How many findings of each kind are printed, at most."""


def add_commands(commands: Commands) -> None:
    """Adds `convert`, `report` and `trace`."""
    parser = commands.add(
        "convert",
        _convert,
        "write a checkpoint in another format: torch.save, DCP, safetensors, or ours",
        progress=True,
    )
    parser.add_argument("source", metavar="SRC", help="also of hfai or Paddle; its format is found by looking")
    parser.add_argument("destination", metavar="DST", help="appears when it is whole")
    parser.add_argument("--to", choices=FORMATS, help="default: what DST's suffix says, and treeckpt without one")
    parser.add_argument("--dtype", help="cast arrays of floating point, e.g. to bfloat16")
    parser.add_argument("--max-shard-size", metavar="BYTES", help="start another file past this, e.g. 5GB")
    parser.add_argument("--memory", default="64MiB", metavar="BYTES", help="buffers, at most (default: 64MiB)")
    parser.add_argument("--select", action="append", metavar="GLOB", help="only these paths, and what is below them")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="not these paths, and what is below them")
    parser.add_argument("--subtree", default="", metavar="PATH", help="the tree, where all names begin")
    parser.add_argument("--lossy", action="store_true", help="go without what the format cannot hold")
    parser.add_argument("--overwrite", action="store_true", help="replace a file, or a treeckpt checkpoint")
    parser.add_argument("--step", type=int, help="of training, to be kept in a treeckpt checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be lost, and what changes its form")
    page = commands.add("report", _report, "write one HTML page of a checkpoint or a run", progress=True)
    page.add_argument("path", metavar="CKPT_OR_RUN")
    page.add_argument("--html", required=True, metavar="FILE", help="where to; an existing file is replaced")
    trace = commands.add("trace", _trace, "write the time of a save as a trace for Perfetto", progress=True)
    trace.add_argument("checkpoint", metavar="CKPT")
    trace.add_argument("--out", required=True, metavar="FILE", help="where to; an existing file is replaced")


def _report(options: argparse.Namespace) -> int:
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


def _convert(options: argparse.Namespace) -> int:
    from ..convert import convert

    with (
        _ranks() as rank,
        counting_bar("converting", of_bytes=True, shown=False if rank else progress_of(options)) as count,
    ):
        report = convert(
            options.source,
            options.destination,
            to=options.to,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            memory=options.memory,
            select=options.select,
            exclude=options.exclude,
            subtree=options.subtree,
            lossy=options.lossy,
            dry_run=options.dry_run,
            overwrite=options.overwrite,
            step=options.step,
            on_read=count,
        )
    if rank == 0:
        _print_report(report, options)
    return 0


def _print_report(report: Any, options: argparse.Namespace) -> None:
    if options.json:
        print_json(report)
        return
    for word, findings, style in (("lost", report.losses, "red"), ("note", report.notes, "dim")):
        for finding in findings[:SHOWN_FINDINGS]:
            print_line(f"{word}: {finding}", style)
        if len(findings) > SHOWN_FINDINGS:
            print_line(f"{word}: ... and {len(findings) - SHOWN_FINDINGS} more; --json gives all", style)
    what = f"{count_text(report.leaves, 'leaf', 'leaves')}, {bytes_text(report.nbytes)}"
    kinds = f"{report.source_format} to {report.format}"
    if report.dry_run:
        print_line(f"{report.destination}: nothing written; would be {what}, {kinds}")
    else:
        print_line(f"{report.destination}: {what}, {kinds}, in {seconds_text(report.seconds)}")


@contextlib.contextmanager
def _ranks() -> Iterator[int]:
    """Gives the rank of this process; under torchrun with a process group, so that the ranks share the work."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield 0
        return
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    with log_if_slow(rank, "treeckpt convert; a process without WORLD_SIZE in its environment converts alone"):
        dist.init_process_group("gloo")
        dist.barrier()  # a rank that fails at once would close the connection that another is still opening
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
