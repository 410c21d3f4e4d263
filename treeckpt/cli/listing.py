"""The command `ls`: lists the checkpoints of runs."""

from __future__ import annotations

import argparse
import time

import msgspec

from ..core.text import bytes_text, seconds_text, time_text
from ..io.storage.open import open_folder
from ..report.terminal import print_json, print_line, print_table
from ..runs import catalog
from ..runs.active_saves import under_way_text
from ..runs.checkpoint_info import CheckpointInfo
from ..runs.progress_bar import counting_bar
from ..runs.verification import VerificationStore, cache_directory
from .command import Commands, no_such_run, usage_error


def add_ls(commands: Commands) -> None:
    """Adds `ls`."""
    commands.add("ls", _ls, "list the checkpoints of a run").add_argument("runs", metavar="RUN", nargs="+")


def _ls(options: argparse.Namespace) -> int:
    found: list[CheckpointInfo] = []
    for run in options.runs:
        with counting_bar(f"reading {run}", quiet=options.json) as count:
            infos = catalog.scan(run, on_read=count)
        if not infos and (problem := no_such_run(run)):
            return usage_error(problem)
        found += infos
    known = VerificationStore(cache_directory())
    found = [
        msgspec.structs.replace(info, verification=known.find(open_folder(info.path), info.save_id))
        if info.status == "complete"
        else info
        for info in found
    ]
    if options.json:
        print_json(found)
        return 0
    if not found:
        print_line("no checkpoints")
        return 0
    columns = ("name", "status", "step", "size", "leaves", "ranks", "saved", "took")
    rows = [
        (
            info.name,
            info.state,
            _or_dash(info.step),
            bytes_text(info.nbytes) if info.nbytes is not None else "-",
            _or_dash(info.leaves),
            _or_dash(info.world),
            time_text(info.created_ns, None),
            seconds_text(info.seconds) if info.seconds is not None else "-",
        )
        for info in found
    ]
    print_table(columns, rows, right=("step", "size", "leaves", "ranks", "took"))
    for info in found:
        if info.error and info.status != "foreign":
            print_line(f"{info.name}: {info.error}", "dim")
        print_saves_under_way(info)
    return 0


def _or_dash(number: int | None) -> str:
    return "-" if number is None else f"{number}"


def print_saves_under_way(info: CheckpointInfo) -> None:
    """Prints a line for each save into a checkpoint's directory that has not ended."""
    for save in info.saving:
        print_line(f"{info.name}: {under_way_text(save, time.time_ns())}", "yellow")
