"""Metrics of runs in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import get_args

from treeckpt._runs.catalog import Status, sum_nbytes
from treeckpt._runs.run_state import ActivityState
from treeckpt._runs.usage import disk_of

from ..store.library import Library, Run
from .model import run_activity
from .summary import good_age, policies_of, summarize_run

_STATUSES, _STATES = get_args(Status), get_args(ActivityState)
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
"""How characters of labels are written."""
_HELP = {
    "runs": "Runs that the dashboard was given.",
    "checkpoints": "Directories of a run by status.",
    "checkpoints_intact": "Complete checkpoints whose bytes were compared since they were written, and match.",
    "checkpoint_bytes": "Bytes of all files of a run's checkpoints.",
    "newest_step": "Step of the newest complete checkpoint.",
    "newest_timestamp_seconds": "Unix time at which the newest complete checkpoint was begun.",
    "newest_bytes": "Bytes of the arrays of the newest complete checkpoint.",
    "newest_save_seconds": "Seconds that the newest complete save took.",
    "newest_good_step": "Step of the newest checkpoint that is complete and not known to be damaged.",
    "newest_good_age_seconds": "Seconds since that checkpoint was begun.",
    "save_interval_seconds": "Usual seconds from one save to the next: the median of the newest.",
    "run_state": "1 for the state that the run is in: whether it still trains, as far as is known.",
    "saves_under_way": "Saves in progress.",
    "saves_stalled": "Saves that hang, or were killed where that cannot be seen.",
    "save_written_bytes": "Bytes that saves in progress have written.",
    "save_planned_bytes": "Bytes that saves in progress have planned.",
    "disk_free_bytes": "Free bytes of the file system that holds the run.",
    "scan_complete": "1 once every directory of the run was looked at, and as long as the last look did not fail.",
}


def metrics_text(library: Library) -> str:
    """Returns all metrics. Labels are bounded: the names of the runs that were given, statuses and states."""
    rows: dict[str, list[str]] = {}
    library.start_scans(library.runs)
    for run in library.runs:
        for name, labels, value in _run_metrics(library, run):
            escaped = {k: v.translate(_ESCAPES) for k, v in {"run": run.name, **labels}.items()}
            text = ",".join(f'{label}="{of}"' for label, of in escaped.items())
            rows.setdefault(name, []).append(f"treeckpt_{name}{{{text}}} {value}")
    rows["runs"] = [f"treeckpt_runs {len(library.runs)}"]
    lines: list[str] = []
    for name, text in _HELP.items():
        if name in rows:
            lines += [f"# HELP treeckpt_{name} {text}", f"# TYPE treeckpt_{name} gauge", *rows[name]]
    return "\n".join(lines) + "\n"


def _run_metrics(library: Library, run: Run) -> Iterator[tuple[str, dict[str, str], float]]:
    listed = library.checkpoints(run, wait=1.0)
    infos = [info for _, info in listed]
    statuses = [info.status for info in infos]
    for status in _STATUSES:
        yield "checkpoints", {"status": status}, statuses.count(status)
    yield "checkpoints_intact", {}, sum(info.intact for info in infos)
    yield "checkpoint_bytes", {}, sum_nbytes(infos)
    newest = next((info for info in infos if info.status == "complete"), None)
    summary = summarize_run(run, listed, policies_of(library, listed))
    disk = None if run.url else disk_of(run.path)
    resume, pattern = summary.resume, summary.signs.pattern
    if (activity := run_activity(library, run, summary)) is not None:
        for state in _STATES:
            yield "run_state", {"state": state}, int(state == activity.state)
    for name, value in (
        ("newest_step", newest.step if newest else None),
        ("newest_timestamp_seconds", newest.created_ns / 1e9 if newest and newest.created_ns else None),
        ("newest_bytes", newest.nbytes if newest else None),
        ("newest_save_seconds", newest.seconds if newest else None),
        ("newest_good_step", resume.newest[1].step if resume.newest else None),
        ("newest_good_age_seconds", good_age(resume, time.time_ns())),
        ("save_interval_seconds", pattern.seconds if pattern is not None else None),
        ("disk_free_bytes", disk.free if disk is not None else None),
    ):
        if value is not None:
            yield name, {}, value
    saves = [save for info in infos for save in info.saving if save.state == "in_progress"]
    yield "saves_stalled", {}, sum(save.state == "stalled" for info in infos for save in info.saving)
    yield "saves_under_way", {}, len(saves)
    yield "save_written_bytes", {}, sum(save.written for save in saves)
    yield "save_planned_bytes", {}, sum(save.planned for save in saves)
    progress = library.watch(run).progress
    yield "scan_complete", {}, int(progress.complete and progress.problem is None)
