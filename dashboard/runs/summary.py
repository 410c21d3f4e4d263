"""What the checkpoints of a run say together: counts, what retention decides, metrics, branches, where to resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from treeckpt._core.format.files import step_name, step_of
from treeckpt._runs.catalog import CheckpointInfo, step_info
from treeckpt.policy import Policy, kept, parse_keep

from ..pages.checkpoints import status_of
from ..store.foreign_trees import ForeignInfo
from ..store.last_result import LastResult
from ..store.library import Library, Listed, Run
from .metric_columns import best_marks, first_metric, metric_names
from .resume import ResumeFacts, resume_facts

DURATIONS = 40
"""Saves of a run whose durations are drawn as a line."""


def policies_of(library: Library, keep: str | None) -> tuple[Policy, ...]:
    """Returns the policies of a request, or those that the dashboard was given.

    Raises:
        KeepError: `keep` is not valid.
    """
    return library.policies if keep is None else parse_keep(keep)


def sum_nbytes(infos: Sequence[CheckpointInfo]) -> int:
    """Adds up the bytes that the files of checkpoints take."""
    return sum(info.disk_nbytes or 0 for info in infos)


def reasons_of(infos: Sequence[CheckpointInfo], policies: Sequence[Policy]) -> dict[str, tuple[str, ...]]:
    """Returns why complete checkpoints are kept, by name, without those that nothing keeps."""
    by_step = {step: info for info in infos if (step := _retention_step(info)) is not None}
    found = kept((step_info(info) for info in by_step.values()), policies)
    return {by_step[step].name: reasons for step, reasons in found.items()}


def _retention_step(info: CheckpointInfo) -> int | None:
    """Returns the step of a checkpoint that retention decides about, None for any other directory."""
    step = step_of(info.name)
    return step if info.status == "complete" and step is not None and step_name(step) == info.name else None


class RunSummary(msgspec.Struct, frozen=True):
    """What one pass over the checkpoints of a run computes."""

    complete: int
    others: int
    nbytes: int
    """Bytes of all files."""
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
    metric: str | None
    value: float | None
    """The newest value of `metric`."""
    durations: list[float]
    resume: ResumeFacts


@lru_cache(512)
def _last_summary(run_id: str, policies: tuple[Policy, ...]) -> LastResult[Listed, RunSummary]:
    return LastResult()


def summarize_run(run: Run, listed: Listed, policies: tuple[Policy, ...]) -> RunSummary:
    """Returns the summary of the checkpoints of a run, as `Library.checkpoints` lists them; computed once a list."""
    return _last_summary(run.id, policies).of(listed, lambda found: _summarize(found, policies))


def _summarize(listed: Listed, policies: tuple[Policy, ...]) -> RunSummary:
    infos = [info for _, info in listed]
    statuses = Counter[str](map(status_of, infos))
    saves = Counter(save.state for info in infos for save in info.saving)
    reasons = reasons_of(infos, policies)
    decided = (info for info in infos if policies and _retention_step(info) is not None)
    metrics = metric_names(infos, policies)
    gone = {info.name: info.disk_nbytes or 0 for info in decided if info.name not in reasons}
    complete = [info for info in infos if info.status == "complete" and not info.abandoned]
    metric = first_metric(metrics)
    values = (info.metrics[metric] for info in complete if metric is not None and metric in info.metrics)
    return RunSummary(
        complete=sum(info.status == "complete" for info in infos),
        others=sum(isinstance(info, ForeignInfo) for info in infos),
        nbytes=sum_nbytes(infos),
        newest=next((info.step for info in infos if info.status == "complete"), None),
        saving=saves["in_progress"],
        stalled=saves["stalled"],
        statuses=dict(sorted(statuses.items())),
        reasons=reasons,
        gone=gone,
        metrics=metrics,
        best=best_marks(infos, metrics, policies),
        branches=_branches(infos),
        metric=metric,
        value=next(values, None),
        durations=[info.seconds for info in complete if info.seconds is not None][DURATIONS - 1 :: -1],
        resume=resume_facts(listed, policies, metrics),
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
