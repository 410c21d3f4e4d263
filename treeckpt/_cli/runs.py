"""The commands about runs: `ls` lists checkpoints; `gc`, `rm`, `pin` and `unpin` change a run, and say what they did.

`gc` deletes no checkpoint unless a policy is given: without one it only removes files that crashed saves left, in a run
or in the directory of one checkpoint.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from .._core.columns import bytes_column, numbers_column, seconds_column
from .._core.format.files import MAX_STEP, CheckpointId, check_id, id_text, is_number_text, is_step_name
from .._core.text import ago_text, bytes_text, count_text, json_number, time_text
from .._inspect.deletion import CleanReport, Removal, RetainedDirectory
from .._io.storage.deletions import GRACE
from .._io.storage.foreign_formats import describe_foreign
from .._io.storage.local_store import local_path
from .._io.storage.open import open_run, open_store
from .._report.terminal import fail, print_json, print_line, print_table
from .._runs import discovery
from .._runs.active_saves import under_way_text
from .._runs.catalog import STATUS_TEXTS, CheckpointInfo, Status, id_of, sum_nbytes, with_verification
from .._runs.discovery import is_checkpoint, scan
from .._runs.failures import SHOWN_DAYS
from .._runs.progress_bar import counting_bar
from .._runs.reduced_timings import ReducedTimingsCache
from .._runs.removal import clean_checkpoint
from .._runs.repair_advice import repair_advice
from .._runs.run import RunDirectory, loadable_text
from .._runs.run_metrics import (
    MetricValue,
    Mode,
    RunMetric,
    agreed_mode,
    in_value_order,
    is_good,
    parse_metric,
    run_metric,
)
from .._runs.run_state import RunActivity, activity_at, signs_of_run, status_of_run
from .._runs.usage import recorded_policies
from .._runs.verification import VerificationStore, cache_directory
from ..errors import CheckpointError, CheckpointNotFound, TreeckptError, visible
from ..policy import All, Best, EveryPeriod, EverySteps, Last, Policy, Steps, parse_best
from .command import SHOWN_NAMES, Commands, no_such_run, progress_of, usage_error
from .failures import show_failures
from .trends import show_trends
from .usage import policies_from, show_usage

METRICS = 4
"""Metrics of a checkpoint that are listed, at most."""
_COLUMNS = f"""\
columns, the newest checkpoint first; where the terminal is too narrow some are left out:
  name      of the directory, in the run
  status    complete: the index is published, and its files are there with the right sizes; damaged: files are missing
            or cut short, or a verification found changed bytes; partial: no index, of a save that failed or was
            killed; in progress, stalled: a save that may still publish one; unread: it could not be read, and nothing
            is known; foreign: files of another program; run: a run itself. What is not healthy, as a metric or
            elements that are NaN, is named below. "abandoned branch": the newest checkpoint does not descend from it,
            as the training went back before it. Below is whether the run is finished, stopped, alive or late
  step      of the training
  size      of all arrays, replicas once; of a partial checkpoint, what its shards have
  leaves    arrays and values
  ranks     that saved it
  saved     when the save began, in UTC
  age       time since then
  took      duration of the save, from the first rank's start to the last one's end
only where a checkpoint has it:
  shared    bytes of the size that were not written, as other checkpoints of the run have them
  after     the step from which the training went on; "not here": that one is deleted
  verified  what treeckpt verify or the dashboard found: damage anywhere, all intact on this machine; and how long
            ago; "-": not verified
  pinned    whether treeckpt pin keeps it
  metrics   that it was saved with, the first {METRICS} by name"""
LEFT_OUT_FIRST = ("leaves", "ranks", "took", "saved", "pinned", "shared", "after")
"""Columns that a narrow terminal does not show, in this order."""


def add_ls(commands: Commands) -> None:
    """Adds `ls`."""
    ls = commands.add("ls", _ls, "list the checkpoints of a run", progress=True)
    assert ls.description is not None, "each command has one"
    ls.description += f"\n\n{_COLUMNS}"
    ls.add_argument("runs", metavar="RUN", nargs="+")
    of_runs = ls.add_mutually_exclusive_group()
    of_runs.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="METRIC[:min|max]",
        help="list runs in the place of checkpoints, one a row, with the last value of a metric, and with min or max, "
        "or where their own policies agree on that, its best one, by which they are sorted; of a directory of runs all "
        "of them. Can be given several times",
    )
    of_runs.add_argument("--usage", action="store_true", help="print how many bytes each run takes, now and in a week")
    ls.add_argument(
        "--keep",
        type=policies_from,
        default=(),
        metavar="POLICIES",
        help="with --usage: try these policies too, as 'last:3 every:1000 best:loss:min:2'",
    )
    of_runs.add_argument(
        "--failures",
        action="store_true",
        help="list the saves that failed or were killed, also those whose files are gone, with their errors",
    )
    ls.add_argument(
        "--days", type=_days, metavar="N", help=f"with --failures: of the last N days (default: {SHOWN_DAYS:g})"
    )
    of_runs.add_argument(
        "--trends",
        action="store_true",
        help="say since which step and time saves take longer or less, by how much, in which phase, on which ranks",
    )


def _ls(options: argparse.Namespace) -> int:
    if options.keep and not options.usage:
        return usage_error("--keep goes with --usage")
    if options.days is not None and not options.failures:
        return usage_error("--days goes with --failures")
    if options.metric or options.usage or options.failures or options.trends:
        return _ls_runs(options)
    listed: list[CheckpointInfo] = []
    infos_of: dict[str, list[CheckpointInfo]] = {}
    runs: dict[str, int] = {}
    others: dict[str, tuple[str, str]] = {}
    for run in options.runs:
        with counting_bar(f"reading {run}", shown=progress_of(options)) as count:
            infos = discovery.scan(run, on_read=count)
        if not infos and (problem := no_such_run(run)):
            return usage_error(problem)
        listed += infos
        infos_of[run] = infos
        if not options.json:
            runs |= _runs_below(run, infos)
            others |= _others_among(run, infos)
    known = VerificationStore(cache_directory())
    listed = [with_verification(info, open_store(info.path), known) for info in listed]
    if options.json:
        print_json([_json_of(info) for info in listed])
        return 0
    if not listed and not others:
        print_line("no checkpoints")
    columns = _fitting(_columns(listed, runs))
    rows = list(zip(*columns.values(), strict=True))
    if rows:
        print_table(list(columns), rows, right=("step", "size", "shared", "leaves", "ranks", "took", "after"))
    for place, (what, hint) in others.items():
        print_line(f"{place}: {what}. {hint}")
    for info in listed:
        if info.problem and (info.status != "foreign" or is_step_name(info.name)):
            print_line(f"{info.name}: {info.problem}", "dim")
        if (advice := repair_advice(info)) is not None:
            print_line(f"{info.name}: {advice.text}", "dim")
        if info.unhealthy:
            print_line(f"{info.name}: not healthy: {info.unhealthy}", "dim")
        print_saves_under_way(info)
        if steps := runs.get(info.path):
            print_line(f"{info.name}: a run of {count_text(steps, 'step')}, which treeckpt ls {info.path} lists")
    for run, infos in infos_of.items():
        if any(info.status != "foreign" for info in infos) and not is_checkpoint(run):
            print_line(f"{visible(run)}: {activity_at(signs_of_run(infos), time.time_ns()).text}")
    return 0


def _runs_below(run: str, infos: Sequence[CheckpointInfo]) -> dict[str, int]:
    """Returns the runs in a directory of runs and how many steps each has, {} for a run or a checkpoint."""
    return {} if any(info.files != "foreign" for info in infos) else discovery.runs_in(open_run(run))


class RunRow(msgspec.Struct, frozen=True):
    """One run of `ls --metric`."""

    run: str
    status: Status | None
    """What `status_of_run` says; None without a directory."""
    activity: RunActivity
    """Whether it still trains."""
    complete: int
    """Complete checkpoints."""
    nbytes: int
    """Bytes of all files of its checkpoints."""
    newest: CheckpointInfo | None
    """The newest good checkpoint."""
    metrics: tuple[RunMetric, ...]


def _ls_runs(options: argparse.Namespace) -> int:
    """Lists runs by their metrics, their bytes, the saves that failed or their trends; of a directory of runs all."""
    known, runs = VerificationStore(cache_directory()), dict[str, list[CheckpointInfo]]()
    timings = ReducedTimingsCache() if options.trends else None
    for run in options.runs:
        with counting_bar(f"reading {run}", shown=progress_of(options)) as count:
            infos = discovery.scan(run, cache=timings, on_read=count)
            if not infos and (problem := no_such_run(run)):
                return usage_error(problem)
            if options.failures and len(infos) == 1 and is_checkpoint(run):
                return usage_error(f"{run} is one checkpoint: failed saves are kept in a run, the directory above it")
            below = _runs_below(run, infos)
            found = {path: discovery.scan(path, cache=timings, on_read=count) for path in below} or {run: infos}
        for path, listed in found.items():
            runs[path] = [with_verification(info, open_store(info.path), known) for info in listed]
    if options.usage:
        show_usage(runs, options.keep, as_json=options.json)
    elif options.failures:
        show_failures(runs, SHOWN_DAYS if options.days is None else options.days, as_json=options.json)
    elif timings is not None:
        show_trends(runs, timings, as_json=options.json)
    else:
        _show_metrics(runs, options.metric, as_json=options.json)
    return 0


def _show_metrics(runs: Mapping[str, Sequence[CheckpointInfo]], metrics: Sequence[str], *, as_json: bool) -> None:
    """Prints the last and the best values of metrics, a run a row."""
    own, rows = [recorded_policies(listed) for listed in runs.values()], list[RunRow]()
    asked: list[tuple[str, Mode | None]] = [
        (name, mode or agreed_mode(name, own)) for name, mode in map(parse_metric, metrics)
    ]
    for path, listed in runs.items():
        row = RunRow(
            run=path,
            status=status_of_run(listed),
            activity=activity_at(signs_of_run(listed), time.time_ns()),
            complete=sum(info.status == "complete" for info in listed),
            nbytes=sum_nbytes(listed),
            newest=next(filter(is_good, listed), None),
            metrics=tuple(run_metric(listed, name, mode) for name, mode in asked),
        )
        rows.append(row)
    best = next((n for n, (_, mode) in enumerate(asked) if mode is not None), None)
    if best is not None:
        values = [None if (one := row.metrics[best].best) is None else one.value for row in rows]
        rows = [rows[at] for at in in_value_order(values, largest_first=asked[best][1] == "max")]
    if as_json:
        print_json([_json_of_run(row) for row in rows])
    else:
        columns = _metric_columns(rows)
        print_table(
            list(columns),
            list(zip(*columns.values(), strict=True)),
            right=[name for name in columns if name not in ("run", "status", "activity")],
        )


def _metric_columns(rows: Sequence[RunRow]) -> dict[str, list[str]]:
    size = bytes_column([row.nbytes for row in rows])
    columns = {
        "run": [visible(row.run) for row in rows],
        "status": [STATUS_TEXTS.get(row.status, row.status) if row.status else "-" for row in rows],
        "activity": [row.activity.state for row in rows],
        "complete": [f"{row.complete}" for row in rows],
        "size": [size(row.nbytes) for row in rows],
        "newest": ["-" if row.newest is None else f"{id_of(row.newest)}" for row in rows],
    }
    for at, metric in enumerate(rows[0].metrics if rows else ()):
        name = visible(metric.metric)
        found = [(row.metrics[at].last, row.metrics[at].best) for row in rows]
        figure = numbers_column([one.value for pair in found for one in pair if one is not None])
        columns[name] = [_value_text(last, figure) for last, _ in found]
        if metric.mode is not None:
            ways = {"min": "lowest", "max": "highest"}
            columns[f"{ways[metric.mode]} {name}"] = [_value_text(best, figure) for _, best in found]
    return columns


def _value_text(found: MetricValue | None, figure: Callable[[float], str]) -> str:
    return "-" if found is None else f"{figure(found.value)} at {id_of(found.info)}"


def _json_of_run(row: RunRow) -> Mapping[str, object]:
    def value(found: MetricValue | None) -> Mapping[str, object] | None:
        return None if found is None else {"value": json_number(found.value), "step": id_of(found.info)}

    metrics = [
        {"metric": one.metric, "mode": one.mode, "last": value(one.last), "best": value(one.best)}
        for one in row.metrics
    ]
    newest = None if row.newest is None else id_of(row.newest)
    return msgspec.structs.asdict(row) | {"newest": newest, "metrics": metrics}


def _json_of(info: CheckpointInfo) -> Mapping[str, object]:
    metrics = {name: json_number(value) for name, value in info.metrics.items()}
    facts = {name: part for name, part in msgspec.structs.asdict(info).items() if name != "files"}
    facts |= {"metrics": metrics, "unhealthy": info.unhealthy}
    return {"name": info.name, "status": info.status, "intact": info.intact} | facts


def _others_among(run: str, found: Sequence[CheckpointInfo]) -> dict[str, tuple[str, str]]:
    """Returns by path what the checkpoints of other programs are, and what reads them; links are not followed."""
    foreign = [info.path for info in found if info.status == "foreign" and not Path(info.path).is_symlink()]
    # Where nothing of ours was found, the path itself may be a checkpoint of another program.
    places = foreign if len(foreign) < len(found) else [local_path(run), *foreign]
    return {place: described for place in places if (described := describe_foreign(place))}


def _columns(found: Sequence[CheckpointInfo], runs: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the cells of each column; what only some checkpoints have has a column only where one does."""
    size, took = bytes_column([info.nbytes for info in found]), seconds_column([info.seconds for info in found])
    shared = bytes_column([info.shared_nbytes for info in found if info.shared_nbytes])
    now, ids = time.time_ns(), {info.save_id: id_of(info) for info in found if info.save_id is not None}
    columns = {
        "name": [info.name for info in found],
        "status": ["run" if info.path in runs else info.status_text for info in found],
        "step": [_or_dash(info.step) for info in found],
        "size": [size(info.nbytes) if info.nbytes is not None else "-" for info in found],
        "leaves": [_or_dash(info.leaves) for info in found],
        "ranks": [_or_dash(info.world) for info in found],
        "saved": [time_text(info.created_ns) for info in found],
        "age": ["-" if ns is None else ago_text((now - ns) / 1e9) for ns in (info.created_ns for info in found)],
        "took": [took(info.seconds) if info.seconds is not None else "-" for info in found],
    }
    more = {
        "shared": [shared(info.shared_nbytes) if info.shared_nbytes else "-" for info in found],
        "after": [_after_text(info, ids) for info in found],
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


def _after_text(info: CheckpointInfo, ids: Mapping[str, CheckpointId | None]) -> str:
    """Returns the step, or the text in its place, from which the training went on to a checkpoint."""
    if info.lineage is None or not info.lineage.follows:
        return "-"
    before = ids.get(info.lineage.follows)
    return "not here" if before is None else f"{before}"


def _verified_text(info: CheckpointInfo, now: int) -> str:
    verification = info.verification
    if verification is None:
        return "-"
    what = "intact" if verification.ok else count_text(verification.total, "problem")
    return f"{what}, {ago_text((now - verification.ended_ns) / 1e9)}"


def _metrics_text(info: CheckpointInfo) -> str:
    named = [f"{name}={value:.6g}" for name, value in sorted(info.metrics.items())]
    return " ".join(named[:METRICS]) + f" and {len(named) - METRICS} more" * (len(named) > METRICS) or "-"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else f"{number}"


def print_saves_under_way(info: CheckpointInfo) -> None:
    """Prints a line for each save into a checkpoint's directory that has not ended."""
    for save in info.saving:
        print_line(f"{info.name}: {under_way_text(save, time.time_ns())}", "yellow")


def add_commands(commands: Commands) -> None:
    """Adds `gc`, `rm`, `pin` and `unpin`."""
    gc = commands.add("gc", _gc, "delete what no policy keeps, and what crashed saves left behind", progress=True)
    gc.add_argument("run_path", metavar="RUN", help="or a single checkpoint, beside which only leftovers go")
    gc.add_argument("--keep-last", type=_count, metavar="N", help="keep the newest N checkpoints")
    gc.add_argument("--every", type=_count, metavar="K", help="keep each step that is a multiple of K")
    gc.add_argument("--period", type=_seconds, metavar="S", help="keep the first checkpoint of every S seconds")
    gc.add_argument("--steps", type=_steps, metavar="A,B,...", help="keep these steps, each of which must be there")
    gc.add_argument(
        "--best",
        type=_best,
        action="append",
        default=[],
        metavar="METRIC[:min|max][:N]",
        help="keep the best N by a metric (default: the smallest one)",
    )
    gc.add_argument(
        "--grace",
        type=_seconds,
        default=GRACE,
        metavar="S",
        help=f"leave files of unfinished saves that may be alive alone for S seconds (default: {GRACE:g})",
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would be done")
    rm = commands.add("rm", _rm, "delete steps of a run, also those that are damaged or were never finished")
    assert rm.description is not None, "each command has one"
    rm.description += (
        " Asks before it does on a terminal. Nothing goes if one of the steps is not there, pinned, being read or "
        "being written. Of a step that is a link, the link goes."
    )
    rm.add_argument("run_path", metavar="RUN")
    rm.add_argument("steps", metavar="STEP", type=_id, nargs="+")
    rm.add_argument("--yes", action="store_true", help="do not ask; a must where the input is no terminal")
    rm.add_argument(
        "--grace",
        type=_seconds,
        default=GRACE,
        metavar="S",
        help=f"take a save of which nothing shows whether it is alive for dead after S seconds (default: {GRACE:g})",
    )
    for name, act, text in (
        ("pin", partial(_pin, pinned=True), "keep a step, whatever the policies say"),
        ("unpin", partial(_pin, pinned=False), "let the policies decide about a step again"),
    ):
        pin = commands.add(name, act, text)
        pin.add_argument("run_path", metavar="RUN")
        pin.add_argument("step", metavar="STEP", type=_id)


def _number(text: str, kind: type[int] | type[float], least: float, what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _count(text: str) -> int:
    return _number(text, int, 1, "a number from 1 on")


def _days(text: str) -> float:
    return _number(text, float, 0, "a number of days")


def _seconds(text: str) -> float:
    return _number(text, float, 0, "a number of seconds")


def _id(text: str) -> CheckpointId:
    """Parses a step, or the name by which a checkpoint was saved."""
    if is_number_text(text.removeprefix("step_")):
        return _step(text)
    try:
        return check_id(text)
    except TreeckptError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error


def _step(text: str) -> int:
    step = _number(text.removeprefix("step_"), int, 0, "a step")
    if step > MAX_STEP:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a step: the highest is {MAX_STEP}")
    return step


def _steps(text: str) -> tuple[int, ...]:
    return tuple(_step(part) for part in text.split(","))


def _best(text: str) -> Best:
    try:
        return parse_best(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _policies(options: argparse.Namespace) -> list[Policy]:
    named: list[Policy] = [*options.best]
    if options.keep_last is not None:
        named.append(Last(options.keep_last))
    if options.every is not None:
        named.append(EverySteps(options.every))
    if options.period is not None:
        named.append(EveryPeriod(options.period))
    if options.steps is not None:
        named.append(Steps(options.steps))
    return named or [All()]


def _gc(options: argparse.Namespace) -> int:
    if problem := no_such_run(options.run_path):
        return usage_error(problem)
    run, alone = RunDirectory(options.run_path), is_checkpoint(options.run_path)
    # A checkpoint may have steps of a run below it: such a path is cleaned as a run.
    alone = alone and not run.checkpoints()
    policies = _policies(options)
    problem = _no_run(options.run_path, run, policies) if alone else _no_runs(options.run_path, run)
    if problem := problem or _misses(run, options):
        return usage_error(problem)
    if alone:
        report = clean_checkpoint(options.run_path, grace=options.grace, dry_run=options.dry_run)
    else:
        what = "reading" if options.dry_run else "deleting from"
        with counting_bar(f"{what} {options.run_path}", shown=progress_of(options)) as count:
            report = run.clean(policies, grace=options.grace, dry_run=options.dry_run, on_removal=count)
    if options.json:
        print_json(report)
    else:
        _print_report(report, alone=alone)
    return 1 if report.failed else 0


def _no_runs(path: str, run: RunDirectory) -> str:
    """Returns the error where a directory of runs is named in place of one of them, empty if it is none."""
    runs = [place.rstrip("/").rpartition("/")[2] for place in discovery.runs_in(run.store)]
    if not runs:
        return ""
    more = f" and {len(runs) - SHOWN_NAMES} more" * (len(runs) > SHOWN_NAMES)
    return f"{path}: a directory of runs, not a run. Name one of them: {', '.join(runs[:SHOWN_NAMES])}{more}"


def _rm(options: argparse.Namespace) -> int:
    run = RunDirectory(options.run_path)
    if problem := no_such_run(options.run_path) or _no_runs(options.run_path, run):
        return usage_error(problem)
    planned, problems, absent = list[tuple[CheckpointId, CheckpointInfo, Removal]](), list[str](), False
    # A step that is named twice is deleted once.
    for step in dict.fromkeys(options.steps):
        try:
            planned.append((step, *run.plan_deletion(step, force=True, grace=options.grace)))
        except CheckpointError as error:
            problems.append(f"{error}")
            absent = absent or isinstance(error, CheckpointNotFound)
    for problem in problems:
        fail(f"treeckpt: {problem}")
    if problems:
        return 2 if absent else 1
    if not options.json or not options.yes:
        size = bytes_column([removal.nbytes for _, _, removal in planned])
        rows = [
            (
                info.name,
                "link" if run.store.folder(info.name).is_link else info.status_text,
                size(removal.nbytes),
                info.error or "",
            )
            for _, info, removal in planned
        ]
        print_table(("step", "status", "size", "problem"), rows, right=("size",))
    if not options.yes and not _confirmed(count_text(len(planned), "step")):
        return 2
    gone, failed = list[tuple[CheckpointInfo, Removal]](), list[RetainedDirectory]()
    for step, info, removal in planned:
        try:
            run.delete(step, force=True, grace=options.grace)
        except (OSError, TreeckptError) as error:
            failed.append(RetainedDirectory(info.name, f"{type(error).__name__}: {error}"))
        else:
            gone.append((info, removal))
    if options.json:
        removed = [{"name": info.name, "status": info.status, "nbytes": removal.nbytes} for info, removal in gone]
        print_json({"run": run.url, "removed": removed, "failed": failed})
    else:
        freed = bytes_text(sum(removal.nbytes for _, removal in gone))
        names = f" ({', '.join(info.name for info, _ in gone)})" if failed and gone else ""
        print_line(f"{count_text(len(gone), 'step')} removed{names}, {freed} freed", "dim")
    for one in failed:
        fail(f"treeckpt: {one.name} was not removed, or not all of it: {one.why}")
    return 1 if failed else 0


def _confirmed(what: str) -> bool:
    """Asks on a terminal whether so many steps are to be deleted; without a terminal, says what is missing."""
    if not sys.stdin.isatty():
        fail("treeckpt: nothing was removed: --yes is needed where the input is no terminal")
        return False
    # On the error stream, because the standard output may be read as JSON. `input` would write to that.
    sys.stderr.write(f"Delete {what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    fail("treeckpt: nothing was removed")
    return False


def _no_run(path: str, run: RunDirectory, policies: Sequence[Policy]) -> str:
    """Returns the error where policies are given for a checkpoint in place of its run, empty if there is none."""
    if policies == [All()]:
        return ""
    return f"{path}: a checkpoint, not a run. Name the run that it is in: {run.url.rstrip('/').rpartition('/')[0]}"


def no_checkpoint(options: argparse.Namespace) -> str:
    """Returns the error where a run is named in place of one of its checkpoints, empty if there is none."""
    for path in (getattr(options, name, None) for name in ("checkpoint", "first", "second")):
        if path is None or is_checkpoint(path):
            continue
        newest = next((info.path for info in scan(path) if info.status != "foreign" and id_of(info) is not None), None)
        if newest is not None:
            return f"{path}: a run, not a checkpoint. Name one that it has, as {newest}; treeckpt ls {path} lists all"
    return ""


def _misses(run: RunDirectory, options: argparse.Namespace) -> str:
    """Returns the error where steps or a metric are named that no checkpoint has, empty if there is none."""
    if not options.steps and not options.best:
        return ""
    infos = run.checkpoints()
    return _no_steps(run, infos, options.steps or ()) or _no_metric(run, infos, options.best)


def _no_steps(run: RunDirectory, infos: Sequence[CheckpointInfo], steps: Sequence[int]) -> str:
    """Returns the error, with the steps that can be loaded, where steps are named that the run has not."""
    there = {info.named_step for info in infos if info.status in ("complete", "damaged")}
    absent = [str(step) for step in steps if step not in there]
    if not absent:
        return ""
    word = "step" if len(absent) == 1 else "steps"
    return f"--steps: {run.url} has no {word} {', '.join(absent)}. {loadable_text(infos, int(absent[0]))}"


def _no_metric(run: RunDirectory, infos: Sequence[CheckpointInfo], policies: Sequence[Best]) -> str:
    """Returns the error, with the known metrics, where a metric is named that no checkpoint has; empty otherwise."""
    infos = [info for info in infos if info.status == "complete"] if policies else []
    there = {name for info in infos for name in info.metrics}
    unknown = [policy.metric for policy in policies if policy.metric not in there]
    if not infos or not unknown:
        return ""
    names = f"there are: {', '.join(sorted(there))}" if there else "none has any"
    hint = ". Behind a metric come :min or :max, and :N" if ":" in unknown[0] else ""
    return f"--best: no checkpoint of {run.url} has the metric {unknown[0]!r}; {names}{hint}"


def _print_report(report: CleanReport, *, alone: bool) -> None:
    rows = [("kept", id_text(step), "", report.why(step)) for step in report.kept]
    word = "would go" if report.dry_run else "removed"
    size = bytes_column([one.nbytes for one in report.removed])
    for one in report.removed:
        files = count_text(len(one.files), "file") if one.files else "directory"
        what = "checkpoint" if one.what == "checkpoint" else files
        rows.append((word, one.name, size(one.nbytes), f"{what}: {one.reason}"))
    rows += [("left", one.name, "", one.why) for one in report.left]
    rows += [("failed", one.name, "", one.why) for one in report.failed]
    for name, files in report.foreign.items():
        rows.append(("left", name, "", f"files of others: {', '.join(files[:8])}{' ...' if len(files) > 8 else ''}"))
    if rows:
        print_table(("what", "step", "size", "why"), rows, right=("size",))
    for warning in report.warnings:
        print_line(warning, "yellow")
    freed = "would be freed" if report.dry_run else "freed"
    gone = sum(len(one.files) for one in report.removed)
    what = f"{count_text(gone, 'file')} {word}" if alone else f"{len(report.kept)} kept, {len(report.removed)} {word}"
    print_line(f"{what}, {bytes_text(report.nbytes)} {freed}", "dim")


def _pin(options: argparse.Namespace, *, pinned: bool) -> int:
    run = RunDirectory(options.run_path)
    (run.pin if pinned else run.unpin)(options.step)
    if options.json:
        print_json({"run": options.run_path, "step": options.step, "pinned": pinned})
    else:
        print_line(f"{run.folder(options.step).place} is {'' if pinned else 'no longer '}pinned")
    return 0
