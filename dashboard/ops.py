"""The queries of what goes on: saves under way, bytes and what a clean-up would free, and numbers for Prometheus."""

from __future__ import annotations

import contextlib
import shutil
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from treeckpt.core.analysis.deletion import Removal, RetainedDirectory
from treeckpt.core.analysis.retention_policy import All, Policy
from treeckpt.core.format.save_progress import Progress
from treeckpt.core.text import visible
from treeckpt.errors import TreeckptError
from treeckpt.io.storage.progress_file import read_progress
from treeckpt.runs.active_saves import STALLED, SaveUnderWay
from treeckpt.runs.catalog import CheckpointInfo
from treeckpt.runs.disk_growth import days_until, growth_of
from treeckpt.runs.run import CleanReport
from treeckpt.runs.run import RunDirectory as CleaningRun

from .keeping import keep_text
from .library import Library, Run
from .queries import PAGE, status_of
from .run_pages import LivePage, ReasonRow, RemovalRow, SaveRow, SavingRank, UsagePage, UsageRow
from .runs import policies_of, reasons_of

__all__ = ["Speeds", "live_page", "metrics_text", "usage_page"]

SHOWN_RANKS = 12
WINDOW = 15.0
"""Seconds over which the rate of a save under way is taken."""
KEPT = 256
"""Saves whose progress is remembered."""


class Speeds:
    """What saves under way had written when somebody looked: their rate lately, not since they began."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, deque[tuple[int, int]]] = OrderedDict()

    def rate(self, save: SaveUnderWay) -> float | None:
        """Bytes a second, from what was seen in the last seconds, else since the save began; None where it is new."""
        seen = self._seen.setdefault(save.save_id, deque(maxlen=64))
        self._seen.move_to_end(save.save_id)
        while len(self._seen) > KEPT:
            self._seen.popitem(last=False)
        if not seen or seen[-1][0] < save.updated_ns:
            seen.append((save.updated_ns, save.written))
        while len(seen) > 2 and seen[0][0] < save.updated_ns - WINDOW * 1e9:
            seen.popleft()
        first_ns, first = seen[0] if len(seen) > 1 else (save.started_ns, 0)
        seconds = (save.updated_ns - first_ns) / 1e9
        return max(0, save.written - first) / seconds if seconds > 0 else None


# saves under way -----------------------------------------------------------------------------------------------------


def live_page(library: Library, speeds: Speeds, start: int, *, now_ns: int) -> LivePage:
    """Saves under way, in every run, those that began last first."""
    found = [
        (run, checkpoint_id, info, save)
        for run in library.runs
        for checkpoint_id, info in library.checkpoints(run, wait=1.0)
        for save in info.saving
    ]
    found.sort(key=lambda one: -one[3].started_ns)
    rows = [_save_row(*one, speeds, now_ns) for one in found[start : start + PAGE]]
    return LivePage(rows, start, start + PAGE if start + PAGE < len(found) else None)


def _save_row(
    run: Run, checkpoint_id: str, info: CheckpointInfo, save: SaveUnderWay, speeds: Speeds, now_ns: int
) -> SaveRow:
    quiet = max(0.0, (now_ns - save.updated_ns) / 1e9)
    rate = speeds.rate(save)
    left = max(0, save.planned - save.written)
    ranks = _ranks(run, info, save)
    behind = sorted(ranks, key=lambda one: (one.phase == "commit", one.written - one.planned, one.rank))
    return SaveRow(
        run=run.id,
        run_name=run.name,
        checkpoint=checkpoint_id,
        name=visible(info.name),
        save_id=save.save_id,
        step=save.step,
        world=save.world,
        ranks=save.ranks,
        done=save.done,
        phase=save.phase,
        stuck=_stuck(save, behind, quiet),
        stalled=quiet > STALLED or save.alive is False,
        written=save.written,
        planned=save.planned,
        share=save.fraction,
        seconds=max(0.0, (now_ns - save.started_ns) / 1e9),
        quiet=quiet,
        rate=rate,
        eta=left / rate if rate and save.phase == "write" and quiet <= STALLED and save.alive is not False else None,
        slowest=[_saving_rank(one, now_ns) for one in behind[:SHOWN_RANKS]],
    )


def _ranks(run: Run, info: CheckpointInfo, save: SaveUnderWay) -> list[Progress]:
    folder = run.store.folder(info.name)
    with contextlib.suppress(TreeckptError, OSError):
        return [one for one in read_progress(folder.store, folder.entries()) if one.save_id == save.save_id]
    return []


def _saving_rank(one: Progress, now_ns: int) -> SavingRank:
    quiet = max(0.0, (now_ns - one.updated_ns) / 1e9)
    return SavingRank(one.rank, one.phase, one.written, one.planned, one.fraction, quiet)


def _stuck(save: SaveUnderWay, behind: Sequence[Progress], quiet: float) -> str:
    """What the save waits for, in words."""
    writing = [one.rank for one in behind if one.phase == "write"]
    if save.alive is False:
        return "It was killed: the process that was to commit it has ended."
    if quiet > STALLED:
        what = f"ranks {_few(writing)} in writing" if writing else "the commit"
        return f"It hangs or was killed: nothing new from {what}."
    if not writing:
        return "Every rank's bytes are durable; the coordinator is to commit."
    if save.done:
        return f"{save.done} of {save.world} ranks wait for {_few(writing)}, still writing."
    return f"{len(writing)} of {save.world} ranks are writing."


def _few(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, sorted(ranks)[:6]))
    return text if len(ranks) <= 6 else f"{text} and {len(ranks) - 6} more"


# usage ---------------------------------------------------------------------------------------------------------------


def usage_page(library: Library, keep: str | None, start: int) -> UsagePage:
    """Every run's bytes, and what a clean-up by these policies would free. Nothing is deleted.

    Raises:
        KeepError: the text names no policies.
    """
    policies = policies_of(library, keep)
    infos = {run.id: [info for _, info in library.checkpoints(run)] for run in library.runs}
    total = sum(_nbytes(found) for found in infos.values())
    rows = [_usage_row(library, run, infos[run.id], policies, total, start) for run in library.runs]
    return UsagePage(keep_text(policies), total, sum(row.freed for row in rows), start, rows)


def _nbytes(infos: Sequence[CheckpointInfo]) -> int:
    return sum(info.nbytes or 0 for info in infos if info.status != "foreign")


def _usage_row(
    library: Library, run: Run, infos: Sequence[CheckpointInfo], policies: tuple[Policy, ...], total: int, start: int
) -> UsageRow:
    nbytes, statuses = _nbytes(infos), dict[str, int]()
    for info in infos:
        if info.status != "foreign":
            statuses[status_of(info)] = statuses.get(status_of(info), 0) + (info.nbytes or 0)
    report, problem = _dry_run(library, run, policies or (All(),))
    freed = report.nbytes if report else 0
    removed = report.removed if report else ()
    growth = growth_of(
        [(i.created_ns, i.nbytes) for i in infos if i.status == "complete" and i.created_ns and i.nbytes]
    )
    free, disk = _disk(run)
    return UsageRow(
        run=run.id,
        name=run.name,
        path=visible(run.store.url),
        checkpoints=sum(info.status != "foreign" for info in infos),
        nbytes=nbytes,
        share=nbytes / total if total else 0.0,
        statuses=statuses,
        reasons=_reasons(infos, policies),
        freed=freed,
        removals=len(removed),
        rows=[_removal_row(one) for one in removed[start : start + PAGE]],
        next=start + PAGE if start + PAGE < len(removed) else None,
        left=[_removal_row(one) for one in (report.left if report else ())[:PAGE]],
        disk_free=free,
        disk_total=disk,
        per_day=growth.nbytes_per_day if growth else None,
        between=growth.seconds_between if growth else None,
        days=days_until(free, growth) if free is not None else None,
        days_after=days_until(free + freed, growth) if free is not None else None,
        problem=problem,
    )


def _dry_run(library: Library, run: Run, policies: Sequence[Policy]) -> tuple[CleanReport | None, str | None]:
    if not library.is_run(run):
        return None, "A checkpoint by itself: policies decide about runs."
    try:
        return CleaningRun(run.store, cache=library.remembering(run)).clean(policies, dry_run=True), None
    except (TreeckptError, OSError) as error:
        return None, visible(str(error))


def _removal_row(one: Removal | RetainedDirectory) -> RemovalRow:
    if isinstance(one, RetainedDirectory):
        return RemovalRow(visible(one.name), "left", visible(one.why), 0)
    return RemovalRow(visible(one.name), one.what, visible(one.reason), one.nbytes)


def _reasons(infos: Sequence[CheckpointInfo], policies: tuple[Policy, ...]) -> list[ReasonRow]:
    by_name = {info.name: info for info in infos}
    found: dict[str, list[int]] = {}
    for name, reasons in reasons_of(infos, policies).items():
        nbytes = by_name[name].nbytes or 0
        for reason in reasons:
            row = found.setdefault(reason, [0, 0, 0])
            row[0], row[1], row[2] = row[0] + 1, row[1] + nbytes, row[2] + (nbytes if len(reasons) == 1 else 0)
    return [ReasonRow(visible(reason), *row) for reason, row in sorted(found.items(), key=lambda pair: -pair[1][1])]


def _disk(run: Run) -> tuple[int | None, int | None]:
    if run.place:
        return None, None
    try:
        usage = shutil.disk_usage(run.path)
    except OSError:
        return None, None
    return usage.free, usage.total


# metrics -------------------------------------------------------------------------------------------------------------


def metrics_text(library: Library) -> str:
    """Prometheus' text format. The only labels are the runs that were given and six statuses."""
    rows: dict[str, list[str]] = {}
    for run in library.runs:
        for name, labels, value in _run_metrics(library, run):
            rows.setdefault(name, []).append(f"treeckpt_{name}{{{_labels({'run': run.name, **labels})}}} {value}")
    rows["runs"] = [f"treeckpt_runs {len(library.runs)}"]
    lines: list[str] = []
    for name, text in _HELP.items():
        if name in rows:
            lines += [f"# HELP treeckpt_{name} {text}", f"# TYPE treeckpt_{name} gauge", *rows[name]]
    return "\n".join(lines) + "\n"


_STATUSES = ("complete", "saving", "partial", "corrupt", "foreign", "reading")
_HELP = {
    "runs": "Runs that the dashboard was given.",
    "checkpoints": "Directories of a run by what they are.",
    "checkpoint_bytes": "Bytes of a run's checkpoints.",
    "newest_step": "Step of the newest complete checkpoint.",
    "newest_timestamp_seconds": "Unix time at which the newest complete checkpoint was begun.",
    "newest_bytes": "Bytes of the newest complete checkpoint.",
    "newest_save_seconds": "Seconds that the newest complete save took.",
    "saves_under_way": "Saves that have not ended.",
    "save_written_bytes": "Bytes that saves under way have written.",
    "save_planned_bytes": "Bytes that saves under way come to.",
    "disk_free_bytes": "Free bytes of the file system that holds the run.",
    "scan_complete": "1 once every directory of the run was looked at.",
}


def _run_metrics(library: Library, run: Run) -> Iterator[tuple[str, dict[str, str], float]]:
    infos = [info for _, info in library.checkpoints(run, wait=1.0)]
    statuses = [status_of(info) for info in infos]
    for status in _STATUSES:
        yield "checkpoints", {"status": status}, statuses.count(status)
    yield "checkpoint_bytes", {}, _nbytes(infos)
    newest = next((info for info in infos if info.status == "complete"), None)
    for name, value in (
        ("newest_step", newest.step if newest else None),
        ("newest_timestamp_seconds", newest.created_ns / 1e9 if newest and newest.created_ns else None),
        ("newest_bytes", newest.nbytes if newest else None),
        ("newest_save_seconds", newest.seconds if newest else None),
        ("disk_free_bytes", _disk(run)[0]),
    ):
        if value is not None:
            yield name, {}, value
    saves = [save for info in infos for save in info.under_way]
    yield "saves_under_way", {}, len(saves)
    yield "save_written_bytes", {}, sum(save.written for save in saves)
    yield "save_planned_bytes", {}, sum(save.planned for save in saves)
    yield "scan_complete", {}, int(library.watches[run.id].progress.complete)


def _labels(labels: dict[str, str]) -> str:
    escaped = {k: v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for k, v in labels.items()}
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())
