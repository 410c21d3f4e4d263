"""The queries of runs: their checkpoints, filtered, sorted and paged, and why each of these stays or goes."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import msgspec

from treeckpt.core.analysis.retention_policy import Policy, kept
from treeckpt.core.format.file_names import step_name, step_of
from treeckpt.core.text import visible
from treeckpt.runs.catalog import CheckpointInfo
from treeckpt.runs.run import step_info

from .keeping import keep_text, parse_keep
from .library import Library, Run
from .pages import CheckpointRow
from .queries import PAGE, checkpoint_row, status_of
from .run_pages import RunPage, RunPart, RunsPage, ScanRow

__all__ = ["CursorError", "Question", "Sort", "Status", "policies_of", "reasons_of", "run_page", "run_tag", "runs_page"]

Sort = Literal["newest", "oldest", "bytes", "-bytes", "time", "-time", "step", "-step", "status", "-status"]
Status = Literal["", "complete", "saving", "partial", "corrupt", "foreign", "reading"]
FIRST = 20
"""Checkpoints that the page of several runs shows of each."""

T = TypeVar("T")
Found = Sequence[tuple[str, CheckpointInfo]]


class Question(msgspec.Struct, frozen=True):
    """Which checkpoints of a run, in which order."""

    start: int = 0
    cursor: str = ""
    sort: Sort = "newest"
    status: Status = ""
    q: str = ""
    """Words that the name, the step or the error must hold."""
    keep: str | None = None
    """Policies, as `keeping` reads them; None takes those that the dashboard was given."""


class CursorError(ValueError):
    """It is none that a page gave."""


_KEYS: dict[str, Callable[[CheckpointInfo], Any]] = {
    "bytes": lambda info: info.nbytes,
    "time": lambda info: info.seconds,
    "step": lambda info: info.step,
    "status": status_of,
}


def policies_of(library: Library, keep: str | None) -> tuple[Policy, ...]:
    """The policies of an address, or those that the dashboard was given.

    Raises:
        KeepError: it names none.
    """
    return library.policies if keep is None else parse_keep(keep)


def reasons_of(infos: Sequence[CheckpointInfo], policies: Sequence[Policy]) -> dict[str, tuple[str, ...]]:
    """Why complete checkpoints stay, by name; those that nothing keeps are not in it."""
    ours = {step: info for info in infos if (step := _step(info)) is not None}
    found = kept((step_info(info) for info in ours.values()), policies)
    return {ours[step].name: why for step, why in found.items()}


def _step(info: CheckpointInfo) -> int | None:
    """The step of a checkpoint that retention decides about."""
    step = step_of(info.name)
    return step if info.status == "complete" and step is not None and step_name(step) == info.name else None


class _Summed(msgspec.Struct, frozen=True):
    """What one pass over a run's checkpoints gives."""

    complete: int
    nbytes: int
    newest: int | None
    saving: int
    statuses: dict[str, int]
    reasons: dict[str, tuple[str, ...]]
    gone: dict[str, int]
    """Bytes of the checkpoints that no policy keeps, by name."""
    branches: dict[str, tuple[int | None, bool]]
    """Of a save id that another checkpoint follows, by the latter's name: its step, and whether a branch begins."""


class _Held(Generic[T]):
    """A list that is hashed by which one it is: what follows from it is kept until another one takes its place."""

    def __init__(self, rows: Sequence[T]) -> None:
        self.rows = rows

    def __hash__(self) -> int:
        return id(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.rows is self.rows


@lru_cache(64)
def _summed(held: _Held[CheckpointInfo], policies: tuple[Policy, ...]) -> _Summed:
    infos = held.rows
    statuses = Counter(map(status_of, infos))
    reasons = reasons_of(infos, policies)
    gone = {i.name: i.nbytes or 0 for i in infos if _step(i) is not None and i.name not in reasons} if policies else {}
    return _Summed(
        complete=statuses["complete"],
        nbytes=sum(info.nbytes or 0 for info in infos if info.status != "foreign"),
        newest=next((info.step for info in infos if info.status == "complete"), None),
        saving=sum(len(info.under_way) for info in infos),
        statuses=dict(sorted(statuses.items())),
        reasons=reasons,
        gone=gone,
        branches=_branches(infos),
    )


def _branches(infos: Sequence[CheckpointInfo]) -> dict[str, tuple[int | None, bool]]:
    """The step that each checkpoint follows, and whether it is not the one that was saved before it."""
    steps = {info.save_id: info.step for info in infos if info.save_id is not None and info.sequence is not None}
    found: dict[str, tuple[int | None, bool]] = {}
    before: str | None = None
    for info in sorted((i for i in infos if i.lineage is not None), key=lambda i: (i.sequence or 0, i.step or 0)):
        assert info.lineage is not None, "only those are sorted"
        follows = info.lineage.follows
        found[info.name] = steps.get(follows), before is not None and follows != before
        before = info.save_id
    return found


def run_tag(library: Library, runs: Sequence[Run], *, wait: float = 0.0) -> str:
    """Changes whenever what a page shows of these runs does."""
    parts: list[str] = []
    for run in runs:
        library.checkpoints(run, wait=wait)
        watch = library.watches[run.id]
        progress = watch.progress
        parts.append(f"{watch.version}.{progress.seen if not progress.complete else ''}")
    return "-".join(parts)


def runs_page(library: Library) -> RunsPage:
    """Every run with its newest checkpoints."""
    count = PAGE if len(library.runs) == 1 else FIRST
    return RunsPage([_run_part(library, run, Question(), count) for run in library.runs])


def run_page(library: Library, run_id: str, question: Question | None = None) -> RunPage:
    """One run's checkpoints.

    Raises:
        Missing: there is no such run.
        KeepError, CursorError: the question makes no sense.
    """
    return RunPage(_run_part(library, library.run(run_id), question or Question(), PAGE))


def _run_part(library: Library, run: Run, question: Question, count: int) -> RunPart:
    found = library.checkpoints(run)
    policies = policies_of(library, question.keep)
    summed = _summed(_Held(library.watches[run.id].infos), policies)
    matching = _matching(_Held(found), question.status, question.q, question.sort)
    start = _after(matching, question) if question.cursor else question.start
    shown = matching[start : start + count]
    more = start + count < len(matching)
    return RunPart(
        id=run.id,
        name=run.name,
        path=visible(run.store.url),
        total=len(found),
        complete=summed.complete,
        nbytes=summed.nbytes,
        newest_step=summed.newest,
        saving=summed.saving,
        statuses=summed.statuses,
        scan=_scan(library, run),
        keep=keep_text(policies),
        goes=len(summed.gone),
        goes_nbytes=sum(summed.gone.values()),
        sort=question.sort,
        status=question.status,
        q=question.q,
        matching=len(matching),
        start=start,
        next=start + count if more else None,
        cursor=_cursor(shown[-1][1]) if more else None,
        checkpoints=[_row(i, run, info, summed) for i, info in shown],
    )


def _scan(library: Library, run: Run) -> ScanRow:
    progress = library.watches[run.id].progress
    return ScanRow(progress.seen, progress.total, progress.complete)


def _row(checkpoint_id: str, run: Run, info: CheckpointInfo, summed: _Summed) -> CheckpointRow:
    row = checkpoint_row(checkpoint_id, run, info)
    step, branches = summed.branches.get(info.name, (None, False))
    return msgspec.structs.replace(
        row,
        kept=list(summed.reasons.get(info.name, ())),
        goes=info.name in summed.gone,
        follows_step=step,
        branches=branches,
    )


@lru_cache(64)
def _matching(held: _Held[tuple[str, CheckpointInfo]], status: Status, q: str, sort: Sort) -> Found:
    """The checkpoints that pass a filter, in their order: pages of the same question follow each other."""
    words = q.casefold().split()
    if not words and not status:
        return _sorted(held.rows, sort)
    found = [
        (checkpoint_id, info)
        for checkpoint_id, info in held.rows
        if status in ("", status_of(info)) and (not words or all(word in _text(info) for word in words))
    ]
    return _sorted(found, sort)


def _text(info: CheckpointInfo) -> str:
    return f"{info.name} {info.step} {info.save_id} {info.error or ''}".casefold()


def _order(info: CheckpointInfo, sort: Sort) -> tuple[Any, ...]:
    """What a row is sorted by: rows without the value come last, either way round."""
    kind = sort.removeprefix("-")
    value = _KEYS[kind](info) if kind in _KEYS else 0
    if sort.startswith("-") and isinstance(value, (int, float)):
        value = -value
    return (value is None, value if value is not None else 0, -(info.step or 0), info.name)


def _sorted(found: Found, sort: Sort) -> Found:
    if sort == "newest":
        return found
    if sort == "oldest":
        return found[::-1]
    ordered = sorted(found, key=lambda pair: _order(pair[1], sort))
    return ordered[::-1] if sort == "-status" else ordered


def _cursor(info: CheckpointInfo) -> str:
    """Where a page ends: the last row, by its name and place."""
    name = info.name.encode("utf-8", "surrogateescape").hex()
    present, sequence, step = _age(info)
    data = msgspec.json.encode([name, present, str(sequence), str(step)])
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _age(info: CheckpointInfo) -> tuple[bool, int, int]:
    """What the newest have most of."""
    return not info.abandoned, info.sequence or 0, info.step or 0


def _after(matching: Found, question: Question) -> int:
    """The position after the row of a cursor; of one that is gone, after those that stood before it."""
    try:
        padded = question.cursor + "=" * (-len(question.cursor) % 4)
        kind = tuple[str, bool, str, str]
        name, present, sequence, step = msgspec.json.decode(base64.urlsafe_b64decode(padded), type=kind)
        age, name = (present, int(sequence), int(step)), bytes.fromhex(name).decode("utf-8", "surrogateescape")
    except ValueError as error:
        raise CursorError("this cursor is none that a page gave") from error
    for at, (_, info) in enumerate(matching):
        if info.name == name:
            return at + 1
    if question.sort == "newest":
        return sum(_age(info) > age for _, info in matching)
    if question.sort == "oldest":
        return sum(_age(info) < age for _, info in matching)
    return len(matching)
