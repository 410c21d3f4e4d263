"""The pages of runs: their checkpoints, filtered, sorted and paged, and why retention keeps or deletes each one."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Literal

import msgspec

from treeckpt._runs.catalog import CheckpointInfo, Status
from treeckpt._runs.run_metrics import in_value_order
from treeckpt._runs.run_state import RunActivity, activity_at
from treeckpt.errors import visible
from treeckpt.policy import keep_text

from ..pages.checkpoints import PAGE_ROWS, CheckpointRow, checkpoint_row, filled, iso_time, next_start
from ..store.library import LastResult, Library, Listed, Run
from ..store.watch import ScanProgress
from .failures import FailuresPage
from .run_table import (
    MAX_KNOWN,
    MetricCell,
    MetricColumn,
    TableQuery,
    known_metrics,
    metric_cells,
    metric_columns,
    shown_columns,
)
from .summary import (
    ResumePanel,
    RunSummary,
    choice_of,
    condition_of,
    good_age,
    metric_value,
    policies_of,
    resume_panel,
    summarize_run,
)

SORTS = r"newest|oldest|-?(bytes|time|step|status)|-?metric:.{1,500}"
"""Orders of a list: by age, or by a column; with a minus, the largest first."""
RUN_SORTS = r"-?(name|good|age|status|bytes|checkpoints|time)|-?(last|best):.{1,500}"
"""Orders of the table of runs: by a column, or by the last or the best value of a metric; see SORTS."""
StatusFilter = Literal["", Status]
FIRST = 5
"""Checkpoints of each run in the answer about several runs."""
_KEYS: dict[str, Callable[[CheckpointInfo], Any]] = {
    "bytes": attrgetter("nbytes"),
    "time": attrgetter("seconds"),
    "step": attrgetter("step"),
    "status": attrgetter("status"),
}


class RunPart(msgspec.Struct, frozen=True):
    """One run and a page of its checkpoints, by default newest first."""

    id: str
    name: str
    path: str
    total: int
    complete: int
    intact: int
    """How many of the complete ones are intact: their bytes were compared since they were written."""
    others: int
    """Checkpoints of other formats, whose trees can be browsed."""
    nbytes: int
    """Bytes of all files of its checkpoints."""
    newest_step: int | None
    state: Status | None
    """What the run shows: see `status_of_run`."""
    good: CheckpointRow | None
    """The newest good checkpoint, as in `ResumePanel`."""
    good_age: float | None
    """Seconds since that was begun."""
    activity: RunActivity | None
    """Whether the run still trains; None while its directories are read for the first time, or cannot be read."""
    values: list[MetricCell]
    """The last and the best value of each metric that is a column of the table of runs."""
    durations: list[float]
    """Seconds that the newest DURATIONS complete saves took, oldest first."""
    saving: int
    """Saves in progress."""
    stalled: int
    """Saves that hang, or were killed where that cannot be seen from here."""
    statuses: dict[str, int]
    """Directories by status."""
    changed: str | None
    """When anything of it last changed, as far as this server has seen."""
    scan: ScanProgress
    keep: str
    """The policies from which `kept` and `goes` are computed; empty if none are known."""
    metrics: list[str]
    """The metrics that have columns."""
    goes: int
    """Checkpoints that no policy keeps."""
    goes_nbytes: int
    """Bytes that go with the checkpoints that no policy keeps: of all files, but those that other ones share."""
    sort: str
    status: str
    q: str
    matching: int
    """Directories that pass the filter."""
    start: int
    next: int | None
    cursor: str | None
    """The position after the last row of this page, valid even if checkpoints are added or removed meanwhile."""
    checkpoints: list[CheckpointRow]


class RunsPage(msgspec.Struct, frozen=True):
    """The runs that the dashboard was given."""

    q: str
    """Words that the name, the path or the state of a run must contain."""
    total: int
    """How many runs there are, whatever they are called."""
    columns: list[MetricColumn]
    """The metrics that have columns."""
    known: list[str]
    """The metrics that can be chosen, those of the most runs first; the first MAX_KNOWN."""
    known_more: int
    """How many more there are."""
    sort: str
    ticked: list[str]
    """The runs that are ticked, among them those that are filtered out."""
    runs: list[RunPart]


class RunPage(msgspec.Struct, frozen=True):
    """One run."""

    run: RunPart
    resume: ResumePanel
    failures: FailuresPage
    """The saves that failed or were killed in the last week, the first of them."""


class ListQuery(msgspec.Struct, frozen=True):
    """Which checkpoints of a run a page lists, and in which order."""

    start: int = 0
    cursor: str = ""
    sort: str = "newest"
    """The order of the list, as SORTS has it."""
    status: StatusFilter = ""
    q: str = ""
    """Words that the name, the step, the error or a metric's name must contain, or `intact`; and conditions as
    `loss<2.5`."""
    best: str = ""
    """The metric and direction by which a checkpoint is the best, as `loss:min`; empty takes those of a policy."""
    keep: str | None = None
    """Policies, as in `treeckpt.policy`; None takes those that the dashboard was given."""


class CursorError(ValueError):
    """A cursor did not come from a page."""


def run_tag(library: Library, runs: Sequence[Run], *, wait: float = 0.0) -> str:
    """Returns a text that changes whenever the pages of these runs do."""
    parts: list[str] = []
    library.start_scans(runs)
    for run in runs:
        listed = library.checkpoints(run, wait=wait)
        watch = library.watch(run)
        progress = watch.progress
        activity = run_activity(library, run, summarize_run(run, listed, policies_of(library, listed)))
        minute = time.time_ns() // 60_000_000_000 if activity is not None and activity.state == "late" else ""
        scanned = (progress.seen, progress.total) if not progress.complete else ""
        parts.append(f"{run.id}.{watch.version}.{scanned}.{activity.state if activity else ''}{minute}")
    return "-".join(parts)


def runs_page(library: Library, query: TableQuery | None = None) -> RunsPage:
    """Returns the runs of whose name, path, state or metrics every word of `query.q` is a part, with their newest rows.

    The state of a run has that of its activity, as `late`.

    Raises:
        KeepError: the query is not valid.
    """
    query = query or TableQuery()
    count, words = PAGE_ROWS if len(library.runs) == 1 else FIRST, query.q.casefold().split()
    library.start_scans(library.runs)
    columns, known = metric_columns(library, query), known_metrics(library, library.runs)
    parts = [_run_part(library, run, ListQuery(), count, columns)[0] for run in library.runs]
    matching = [part for part in parts if all(word in _text_of_run(part) for word in words)]
    return RunsPage(
        q=query.q,
        total=len(parts),
        columns=shown_columns(columns, {part.id: part.values for part in matching}),
        known=known[:MAX_KNOWN],
        known_more=max(0, len(known) - MAX_KNOWN),
        sort=query.sort,
        ticked=[run.id for run in library.runs if run.id in query.run],
        runs=_in_order(matching, columns, query.sort),
    )


_RUN_KEYS: dict[str, Callable[[RunPart], float | str | None]] = {
    "name": attrgetter("name"),
    "good": lambda part: part.good.step if part.good is not None else None,
    "age": attrgetter("good_age"),
    "status": attrgetter("state"),
    "bytes": attrgetter("nbytes"),
    "checkpoints": attrgetter("complete"),
    "time": lambda part: part.durations[-1] if part.durations else None,
}


def _in_order(parts: Sequence[RunPart], columns: Sequence[MetricColumn], sort: str) -> list[RunPart]:
    """Returns the runs in an order; those without the value are last either way."""
    if not sort:
        return list(parts)
    kind, _, metric = sort.removeprefix("-").partition(":")
    values = [_RUN_KEYS[kind](part) for part in parts] if kind in _RUN_KEYS else [None] * len(parts)
    for at, column in enumerate(columns):
        if column.metric == metric and kind in ("last", "best"):
            found = [getattr(part.values[at], kind) for part in parts]
            values = [None if value is None else float(value) for value in found]
    return [parts[at] for at in in_value_order(values, largest_first=sort.startswith("-"))]


def _text_of_run(part: RunPart) -> str:
    state = (part.state or "").replace("_", " ")
    activity = part.activity.state if part.activity is not None else ""
    return f"{part.name} {part.path} {state} {activity} {' '.join(part.metrics)}".casefold()


def run_activity(library: Library, run: Run, summary: RunSummary, now_ns: int | None = None) -> RunActivity | None:
    """Returns whether a run still trains; None until all of its directories are read, or if they cannot be."""
    progress = library.watch(run).progress
    if not progress.complete or progress.problem is not None:
        return None
    return activity_at(summary.signs, time.time_ns() if now_ns is None else now_ns)


def run_page(library: Library, failures: FailuresPage, query: ListQuery | None = None) -> RunPage:
    """Returns the checkpoints of one run, that of `failures`.

    Raises:
        KeepError, CursorError: the query is not valid.
    """
    run, query = library.run(failures.run), query or ListQuery()
    part, summary = _run_part(library, run, query, PAGE_ROWS)
    return RunPage(part, resume_panel(library, run, summary.resume, query.best), failures)


def _run_part(
    library: Library, run: Run, query: ListQuery, count: int, columns: Sequence[MetricColumn] = ()
) -> tuple[RunPart, RunSummary]:
    listed, watch = library.checkpoints(run), library.watch(run)
    policies = policies_of(library, listed, query.keep)
    summary = summarize_run(run, listed, policies, choice_of(query.best))
    good = summary.resume.newest
    select = partial(_select, status=query.status, q=query.q, sort=query.sort)
    matching = _last_selection(run.id, query.status, query.q, query.sort).of(listed, select)
    start = _position_after(matching, query) if query.cursor else query.start
    shown = matching[start : start + count]
    following = next_start(start, len(matching), count)
    part = filled(
        RunPart,
        summary,
        id=run.id,
        name=run.name,
        path=visible(run.store.url),
        total=len(listed),
        newest_step=summary.newest,
        good=_row(good[0], run, good[1], summary) if good else None,
        good_age=good_age(summary.resume, time.time_ns()),
        activity=run_activity(library, run, summary),
        values=metric_cells(run, listed, columns),
        changed=iso_time(watch.changed_ns),
        scan=watch.progress,
        keep=keep_text(policies),
        goes=len(summary.gone),
        goes_nbytes=sum(summary.gone.values()),
        sort=query.sort,
        status=query.status,
        q=query.q,
        matching=len(matching),
        start=start,
        next=following,
        cursor=_cursor(shown[-1][1]) if following is not None else None,
        checkpoints=[_row(i, run, info, summary) for i, info in shown],
    )
    return part, summary


def _row(checkpoint_id: str, run: Run, info: CheckpointInfo, summary: RunSummary) -> CheckpointRow:
    row = checkpoint_row(checkpoint_id, run, info)
    step, branches = summary.branches.get(info.name, (None, False))
    return msgspec.structs.replace(
        row,
        kept=list(summary.reasons.get(info.name, ())),
        goes=info.name in summary.gone,
        best=summary.best.get(info.name, {}),
        follows_step=step,
        branches=branches,
    )


@lru_cache(64)
def _last_selection(run_id: str, status: StatusFilter, q: str, sort: str) -> LastResult[Listed, Listed]:
    """Returns the cache that serves the next pages of the same query."""
    return LastResult()


def _select(listed: Listed, status: StatusFilter, q: str, sort: str) -> Listed:
    """Returns the checkpoints that pass a filter, sorted."""
    words, conditions = _parse_search(q)
    if not words and not conditions and not status:
        return _sorted(listed, sort)
    matching = [
        (checkpoint_id, info)
        for checkpoint_id, info in listed
        if status in ("", info.status)
        and all(holds(info) for holds in conditions)
        and (not words or all(word in _searched_text(info) for word in words))
    ]
    return _sorted(matching, sort)


def _parse_search(q: str) -> tuple[list[str], list[Callable[[CheckpointInfo], bool]]]:
    """Returns the words of a search and its conditions on metrics."""
    parsed = [(word, condition_of(word)) for word in q.casefold().split()]
    return [word for word, found in parsed if found is None], [found for _, found in parsed if found is not None]


def _searched_text(info: CheckpointInfo) -> str:
    marks = "intact" * info.intact
    return f"{info.name} {info.step} {info.save_id} {marks} {info.error or ''} {' '.join(info.metrics)}".casefold()


def _sort_key(info: CheckpointInfo, sort: str) -> tuple[Any, ...]:
    """Returns the sort key of a row; rows without the value come last in both directions."""
    kind = sort.removeprefix("-")
    value = metric_value(info, kind.removeprefix("metric:")) if kind not in _KEYS else _KEYS[kind](info)
    if sort.startswith("-") and isinstance(value, (int, float)):
        value = -value
    return (value is None, value if value is not None else 0, -(info.step or 0), info.name)


def _sorted(found: Listed, sort: str) -> Listed:
    if sort == "newest":
        return found
    if sort == "oldest":
        return found[::-1]
    ordered = sorted(found, key=lambda pair: _sort_key(pair[1], sort))
    # A text has no negative by which `_sort_key` could reverse the order.
    return ordered[::-1] if sort == "-status" else ordered


def _cursor(info: CheckpointInfo) -> str:
    """Encodes the last row of a page by its name and age."""
    name = info.name.encode("utf-8", "surrogateescape").hex()
    present, sequence, step = _age(info)
    data = msgspec.json.encode([name, present, str(sequence), str(step)])
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _age(info: CheckpointInfo) -> tuple[bool, int, int]:
    """Returns what the order `newest` sorts by, largest first."""
    return not info.abandoned, info.sequence or 0, info.step or 0


def _position_after(matching: Listed, query: ListQuery) -> int:
    """Returns the position after the row of a cursor; if that is gone, after the rows that came before it."""
    try:
        padded = query.cursor + "=" * (-len(query.cursor) % 4)
        kind = tuple[str, bool, str, str]
        name, present, sequence, step = msgspec.json.decode(base64.urlsafe_b64decode(padded), type=kind)
        age, name = (present, int(sequence), int(step)), bytes.fromhex(name).decode("utf-8", "surrogateescape")
    except ValueError as error:
        raise CursorError("this cursor did not come from a page") from error
    for at, (_, info) in enumerate(matching):
        if info.name == name:
            return at + 1
    if query.sort == "newest":
        return sum(_age(info) > age for _, info in matching)
    if query.sort == "oldest":
        return sum(_age(info) < age for _, info in matching)
    return len(matching)
