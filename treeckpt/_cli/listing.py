"""The command `ls`: lists the checkpoints of runs."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .._core.format.files import is_step_name
from .._core.text import ago_text, bytes_text, count_text, json_number, seconds_text, time_text
from .._io.storage.foreign_formats import describe_foreign
from .._io.storage.local_store import local_path
from .._io.storage.open import open_run, open_store
from .._report.terminal import print_json, print_line, print_table
from .._runs import catalog
from .._runs.active_saves import under_way_text
from .._runs.catalog import CheckpointInfo, with_verification
from .._runs.progress_bar import counting_bar
from .._runs.verification import VerificationStore, cache_directory
from .command import Commands, no_such_run, progress_of, usage_error

METRICS = 4
"""Metrics of a checkpoint that are listed, at most."""
_COLUMNS = f"""\
columns, the newest checkpoint first; where the terminal is too narrow some are left out:
  name      of the directory, in the run
  status    complete; partial: shards without an index, of a save that is under way or was killed; corrupt: shards
            are missing or cut short, or the index is damaged; damaged: a verification found changed bytes (--json has
            that in "verification"); unread: it could not be read, and nothing is known; foreign: files of another
            program; run: a run itself.
            "abandoned branch": the newest checkpoint does not descend from it, as the training went back before it
  step      of the training
  size      of all arrays, replicas once; of a partial checkpoint, what its shards have
  leaves    arrays and values
  ranks     that saved it
  saved     when the save began, in local time
  age       time since then
  took      duration of the save, from the first rank's start to the last one's end
only where a checkpoint has it:
  after     the step from which the training went on; "not here": that one is deleted
  verified  what treeckpt verify or the dashboard found: damage anywhere, all intact on this machine; and how long
            ago; "-": not verified
  pinned    whether treeckpt pin keeps it
  metrics   that it was saved with, the first {METRICS} by name"""
LEFT_OUT_FIRST = ("leaves", "ranks", "took", "saved", "pinned", "after")
"""Columns that a narrow terminal does not show, in this order."""


def add_ls(commands: Commands) -> None:
    """Adds `ls`."""
    ls = commands.add("ls", _ls, "list the checkpoints of a run", progress=True)
    assert ls.description is not None, "each command has one"
    ls.description += f"\n\n{_COLUMNS}"
    ls.add_argument("runs", metavar="RUN", nargs="+")


def _ls(options: argparse.Namespace) -> int:
    found: list[CheckpointInfo] = []
    runs: dict[str, int] = {}
    others: dict[str, tuple[str, str]] = {}
    for run in options.runs:
        with counting_bar(f"reading {run}", shown=progress_of(options)) as count:
            infos = catalog.scan(run, on_read=count)
        if not infos and (problem := no_such_run(run)):
            return usage_error(problem)
        found += infos
        if not options.json:
            runs |= _runs_among(infos)
            others |= _others_among(run, infos)
    known = VerificationStore(cache_directory())
    found = [with_verification(info, open_store(info.path), known) for info in found]
    if options.json:
        print_json([_json_of(info) for info in found])
        return 0
    if not found and not others:
        print_line("no checkpoints")
    columns = _fitting(_columns(found, runs))
    rows = list(zip(*columns.values(), strict=True))
    if rows:
        print_table(list(columns), rows, right=("step", "size", "leaves", "ranks", "took", "after"))
    for place, (what, hint) in others.items():
        print_line(f"{place}: {what}. {hint}")
    for info in found:
        if info.problem and info.status != "foreign":
            print_line(f"{info.name}: {info.problem}", "dim")
        print_saves_under_way(info)
        if steps := runs.get(info.path):
            print_line(f"{info.name}: a run of {count_text(steps, 'step')}, which treeckpt ls {info.path} lists")
    return 0


def _json_of(info: CheckpointInfo) -> Mapping[str, object]:
    metrics = {name: json_number(value) for name, value in info.metrics.items()}
    return msgspec.structs.asdict(info) | {"metrics": metrics}


def _runs_among(found: Sequence[CheckpointInfo]) -> dict[str, int]:
    """Returns the steps of each directory that is a run itself, by its path, where no checkpoint was found."""
    if any(info.status != "foreign" for info in found):
        return {}
    counts = {info.path: sum(map(is_step_name, open_run(info.path).names())) for info in found}
    return {path: steps for path, steps in counts.items() if steps}


def _others_among(run: str, found: Sequence[CheckpointInfo]) -> dict[str, tuple[str, str]]:
    """Returns by path what the checkpoints of other programs are, and what reads them; links are not followed."""
    foreign = [info.path for info in found if info.status == "foreign" and not Path(info.path).is_symlink()]
    places = foreign if len(foreign) < len(found) else [local_path(run), *foreign]
    return {place: described for place in places if (described := describe_foreign(place))}


def _columns(found: Sequence[CheckpointInfo], runs: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the cells of each column; what only some checkpoints have has a column only where one does."""
    now, steps = time.time_ns(), {info.save_id: info.step for info in found}
    columns = {
        "name": [info.name for info in found],
        "status": ["run" if info.path in runs else info.status_text for info in found],
        "step": [_or_dash(info.step) for info in found],
        "size": [bytes_text(info.nbytes) if info.nbytes is not None else "-" for info in found],
        "leaves": [_or_dash(info.leaves) for info in found],
        "ranks": [_or_dash(info.world) for info in found],
        "saved": [time_text(info.created_ns, None) for info in found],
        "age": ["-" if ns is None else ago_text((now - ns) / 1e9) for ns in (info.created_ns for info in found)],
        "took": [seconds_text(info.seconds) if info.seconds is not None else "-" for info in found],
    }
    more = {
        "after": [_after_text(info, steps) for info in found],
        "verified": [_verified_text(info, now) for info in found],
        "pinned": ["yes" if info.pinned else "-" for info in found],
        "metrics": [_metrics_text(info) for info in found],
    }
    return columns | {name: cells for name, cells in more.items() if any(cell != "-" for cell in cells)}


def _fitting(columns: Mapping[str, list[str]]) -> Mapping[str, list[str]]:
    """Leaves out the columns that a terminal is too narrow for; a file or a pipe gets all."""
    if not sys.stdout.isatty():
        return columns
    space = shutil.get_terminal_size().columns
    for name in LEFT_OUT_FIRST:
        if sum(max(map(len, (head, *cells))) + 2 for head, cells in columns.items()) - 2 <= space:
            break
        columns = {head: cells for head, cells in columns.items() if head != name}
    return columns


def _after_text(info: CheckpointInfo, steps: Mapping[str | None, int | None]) -> str:
    """Returns the step from which the training went on to a checkpoint."""
    if info.lineage is None or not info.lineage.follows:
        return "-"
    step = steps.get(info.lineage.follows)
    return "not here" if step is None else f"{step}"


def _verified_text(info: CheckpointInfo, now: int) -> str:
    found = info.verification
    if found is None:
        return "-"
    what = "intact" if found.ok else count_text(found.total, "problem")
    return f"{what}, {ago_text((now - found.ended_ns) / 1e9)}"


def _metrics_text(info: CheckpointInfo) -> str:
    named = [f"{name}={value:.6g}" for name, value in sorted(info.metrics.items())]
    return " ".join(named[:METRICS]) + f" and {len(named) - METRICS} more" * (len(named) > METRICS) or "-"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else f"{number}"


def print_saves_under_way(info: CheckpointInfo) -> None:
    """Prints a line for each save into a checkpoint's directory that has not ended."""
    for save in info.saving:
        print_line(f"{info.name}: {under_way_text(save, time.time_ns())}", "yellow")
