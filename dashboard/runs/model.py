"""The pages of runs: their checkpoints, filtered, sorted and paged, and why retention keeps or deletes each one."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

import msgspec

from treeckpt.core.analysis.retention_policy import Policy, kept
from treeckpt.core.format.file_names import step_name, step_of
from treeckpt.core.text import visible
from treeckpt.runs.checkpoint_info import CheckpointInfo
from treeckpt.runs.policy_text import keep_text, parse_keep
from treeckpt.runs.run import step_info

from ..pages.checkpoints import PAGE, CheckpointRow, Status, checkpoint_row, next_start, status_of
from ..store.library import Library, Run
from ..store.watch import ScanProgress
from .metric_columns import best_marks, condition_of, metric_names, metric_value

SORTS = r"newest|oldest|-?(bytes|time|step|status)|-?metric:.{1,500}"
"""Orders of a list: by age, or by a column; with a minus, the largest first."""
StatusFilter = Literal["", Status]
FIRST = 20
"""Checkpoints of each run on the page of several runs."""

T = TypeVar("T")
Listed = Sequence[tuple[str, CheckpointInfo]]
"""Checkpoints with their ids."""


class RunPart(msgspec.Struct, frozen=True):
    """One run and a page of its checkpoints, by default newest first."""

    id: str
    name: str
    path: str
    total: int
    complete: int
    nbytes: int
    newest_step: int | None
    saving: int
    """Saves in progress."""
    stalled: int
    """Saves that hang, or were killed where that cannot be seen from here."""
    statuses: dict[str, int]
    """Directories by status."""
    scan: ScanProgress
    keep: str
    """The policies from which `kept` and `goes` are computed; empty if none are known."""
    metrics: list[str]
    """The metrics that have columns."""
    goes: int
    """Checkpoints that no policy keeps."""
    goes_nbytes: int
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
    """Every run that the dashboard was given."""

    runs: list[RunPart]


class RunPage(msgspec.Struct, frozen=True):
    """One run."""

    run: RunPart


class ListQuery(msgspec.Struct, frozen=True):
    """Which checkpoints of a run a page lists, and in which order."""

    start: int = 0
    cursor: str = ""
    sort: str = "newest"
    """As SORTS."""
    status: StatusFilter = ""
    q: str = ""
    """Words that the name, the step, the error or a metric's name must contain, and conditions as `loss<2.5`."""
    keep: str | None = None
    """Policies, as in `policy_text`; None takes those that the dashboard was given."""


class CursorError(ValueError):
    """A cursor did not come from a page."""


_KEYS: dict[str, Callable[[CheckpointInfo], Any]] = {
    "bytes": attrgetter("nbytes"),
    "time": attrgetter("seconds"),
    "step": attrgetter("step"),
    "status": status_of,
}


def policies_of(library: Library, keep: str | None) -> tuple[Policy, ...]:
    """Returns the policies of a request, or those that the dashboard was given.

    Raises:
        KeepError: `keep` is not valid.
    """
    return library.policies if keep is None else parse_keep(keep)


def reasons_of(infos: Sequence[CheckpointInfo], policies: Sequence[Policy]) -> dict[str, tuple[str, ...]]:
    """Returns why complete checkpoints are kept, by name, without those that nothing keeps."""
    by_step = {step: info for info in infos if (step := _retention_step(info)) is not None}
    found = kept((step_info(info) for info in by_step.values()), policies)
    return {by_step[step].name: reasons for step, reasons in found.items()}


def _retention_step(info: CheckpointInfo) -> int | None:
    """Returns the step of a checkpoint that retention decides about, None for any other directory."""
    step = step_of(info.name)
    return step if info.status == "complete" and step is not None and step_name(step) == info.name else None


class _RunSummary(msgspec.Struct, frozen=True):
    """What one pass over the checkpoints of a run computes."""

    complete: int
    nbytes: int
    newest: int | None
    saving: int
    stalled: int
    statuses: dict[str, int]
    reasons: dict[str, tuple[str, ...]]
    gone: dict[str, int]
    """Bytes of the checkpoints that no policy keeps, by name."""
    metrics: list[str]
    """The metrics that have columns."""
    best: dict[str, dict[str, str]]
    """By the name of a checkpoint and of a metric: see `best_marks`."""
    branches: dict[str, tuple[int | None, bool]]
    """By the name of a checkpoint: the step of the one that it follows, and whether a branch begins between them."""


class _ByIdentity(Generic[T]):
    """A list that is hashed by identity: results in an `lru_cache` are valid until another list replaces it."""

    def __init__(self, rows: Sequence[T]) -> None:
        self.rows = rows

    def __hash__(self) -> int:
        return id(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.rows is self.rows


@lru_cache(64)
def _summarize(items: _ByIdentity[CheckpointInfo], policies: tuple[Policy, ...]) -> _RunSummary:
    infos = items.rows
    statuses = Counter[str](map(status_of, infos))
    saves = Counter(save.state for info in infos for save in info.saving)
    reasons = reasons_of(infos, policies)
    decided = (info for info in infos if policies and _retention_step(info) is not None)
    metrics = metric_names(infos, policies)
    gone = {info.name: info.nbytes or 0 for info in decided if info.name not in reasons}
    return _RunSummary(
        complete=sum(info.status == "complete" for info in infos),
        nbytes=sum(info.nbytes or 0 for info in infos if info.status != "foreign"),
        newest=next((info.step for info in infos if info.status == "complete"), None),
        saving=saves["in_progress"],
        stalled=saves["stalled"],
        statuses=dict(sorted(statuses.items())),
        reasons=reasons,
        gone=gone,
        metrics=metrics,
        best=best_marks(infos, metrics, policies),
        branches=_branches(infos),
    )


def _branches(infos: Sequence[CheckpointInfo]) -> dict[str, tuple[int | None, bool]]:
    """Returns the step that each checkpoint follows, and whether another one was saved between them."""
    steps = {info.save_id: info.step for info in infos if info.save_id is not None and info.sequence is not None}
    found: dict[str, tuple[int | None, bool]] = {}
    before: str | None = None
    for info in sorted((i for i in infos if i.lineage is not None), key=lambda i: (i.sequence or 0, i.step or 0)):
        assert info.lineage is not None, "others are filtered out above"
        follows = info.lineage.follows
        found[info.name] = steps.get(follows), before is not None and follows != before
        before = info.save_id
    return found


def run_tag(library: Library, runs: Sequence[Run], *, wait: float = 0.0) -> str:
    """Returns a text that changes whenever the pages of these runs do."""
    parts: list[str] = []
    library.start_scans(runs)
    for run in runs:
        library.checkpoints(run, wait=wait)
        watch = library.watches[run.id]
        progress = watch.progress
        parts.append(f"{watch.version}.{(progress.seen, progress.total) if not progress.complete else ''}")
    return "-".join(parts)


def runs_page(library: Library) -> RunsPage:
    """Returns every run with its newest checkpoints."""
    count = PAGE if len(library.runs) == 1 else FIRST
    return RunsPage([_run_part(library, run, ListQuery(), count) for run in library.runs])


def run_page(library: Library, run_id: str, query: ListQuery | None = None) -> RunPage:
    """Returns the checkpoints of one run.

    Raises:
        NotFound: there is no such run.
        KeepError, CursorError: the query is not valid.
    """
    return RunPage(_run_part(library, library.run(run_id), query or ListQuery(), PAGE))


def _run_part(library: Library, run: Run, query: ListQuery, count: int) -> RunPart:
    found, watch = library.checkpoints(run), library.watches[run.id]
    policies = policies_of(library, query.keep)
    summary = _summarize(_ByIdentity(watch.infos), policies)
    matching = _select(_ByIdentity(found), query.status, query.q, query.sort)
    start = _position_after(matching, query) if query.cursor else query.start
    shown = matching[start : start + count]
    following = next_start(start, len(matching), count)
    return RunPart(
        id=run.id,
        name=run.name,
        path=visible(run.store.url),
        total=len(found),
        complete=summary.complete,
        nbytes=summary.nbytes,
        newest_step=summary.newest,
        saving=summary.saving,
        stalled=summary.stalled,
        statuses=summary.statuses,
        scan=watch.progress,
        keep=keep_text(policies),
        metrics=summary.metrics,
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


def _row(checkpoint_id: str, run: Run, info: CheckpointInfo, summary: _RunSummary) -> CheckpointRow:
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
def _select(items: _ByIdentity[tuple[str, CheckpointInfo]], status: StatusFilter, q: str, sort: str) -> Listed:
    """Returns the checkpoints that pass a filter, sorted. The cache serves the next pages of the same query."""
    words, conditions = _parse_search(q)
    if not words and not conditions and not status:
        return _sorted(items.rows, sort)
    found = [
        (checkpoint_id, info)
        for checkpoint_id, info in items.rows
        if status in ("", status_of(info))
        and all(holds(info) for holds in conditions)
        and (not words or all(word in _searched_text(info) for word in words))
    ]
    return _sorted(found, sort)


def _parse_search(q: str) -> tuple[list[str], list[Callable[[CheckpointInfo], bool]]]:
    """Returns the words of a search and its conditions on metrics."""
    parsed = [(word, condition_of(word)) for word in q.casefold().split()]
    return [word for word, found in parsed if found is None], [found for _, found in parsed if found is not None]


def _searched_text(info: CheckpointInfo) -> str:
    return f"{info.name} {info.step} {info.save_id} {info.error or ''} {' '.join(info.metrics)}".casefold()


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
