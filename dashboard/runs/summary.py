"""What the checkpoints of a run say together: counts, retention, metrics, branches, and what it can be resumed from."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from treeckpt._core.text import json_number, shell_quoted
from treeckpt._runs.catalog import CheckpointInfo, Status, id_of, mark_of, needed_nbytes, step_info, sum_nbytes
from treeckpt._runs.run_metrics import best_checkpoint, metrics_among, parse_metric
from treeckpt._runs.run_state import RunSigns, signs_of_run, status_of_run
from treeckpt._runs.usage import recorded_policies
from treeckpt.errors import visible
from treeckpt.policy import Best, KeepError, Policy, best_among, kept, parse_keep

from ..pages.checkpoints import (
    CheckpointRow,
    checkpoint_row,
    iso_time,
    lineage_branches,
    per_rank_keyword,
    shorten,
)
from ..store.foreign_trees import ForeignInfo
from ..store.library import LastResult, Library, Listed, Run

COLUMNS = 4
"""Metrics that have a column in a list of checkpoints."""
_CONDITION = re.compile(r"(.+?)(<=|>=|<|>|=)([-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|inf|nan))")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "=": lambda a, b: a == b or (math.isnan(a) and math.isnan(b)),
}
MAX_BRANCHES = 100
"""Branches of a run that are listed."""
MAX_PASSED_OVER = 5
"""Checkpoints that are listed as passed over."""
DURATIONS = 40
"""Saves of a run whose durations are drawn as a line."""


def metric_names(infos: Iterable[CheckpointInfo], policies: Sequence[Policy]) -> list[str]:
    """Returns the metrics that have columns: those that policies name, then those that most checkpoints have."""
    counts = metrics_among(infos)
    named = [best.metric for best in best_among(policies) if best.metric in counts]
    return list(dict.fromkeys([*named, *(name for name, _ in counts.most_common(COLUMNS))]))[:COLUMNS]


def first_metric(names: Sequence[str]) -> str | None:
    """Returns the metric that stands for a run: its loss, or the first that has a column."""
    return "loss" if "loss" in names else next(iter(names), None)


def best_marks(
    infos: Sequence[CheckpointInfo], names: Sequence[str], policies: Sequence[Policy]
) -> dict[str, dict[str, str]]:
    """Returns, by the name of a checkpoint and of a metric, what its value is among those of the complete checkpoints.

    It is "best" by a policy for the metric. Where no policy says which way is better, it is "lowest" or "highest".
    Abandoned branches, and metrics that have one value only, are left out.
    """
    marks: dict[str, dict[str, str]] = {}
    for name in names:
        rated = [
            (info.metrics[name], info.name)
            for info in infos
            if info.status == "complete" and not info.abandoned and not math.isnan(info.metrics.get(name, math.nan))
        ]
        if len({value for value, _ in rated}) < 2:
            continue
        modes = {best.mode for best in best_among(policies) if best.metric == name}
        for mode, pick, text in (("min", min, "lowest"), ("max", max, "highest")):
            if not modes or mode in modes:
                # of equal ones the newest, which is the first in a list
                value = pick(value for value, _ in rated)
                best = next(one for other, one in rated if other == value)
                marks.setdefault(best, {})[name] = "best" if modes else text
    return marks


def metric_value(info: CheckpointInfo, name: str) -> float | None:
    """Returns a metric of a checkpoint; None if it has none, or NaN."""
    value = info.metrics.get(name, math.nan)
    return None if math.isnan(value) else value


def condition_of(word: str) -> Callable[[CheckpointInfo], bool] | None:
    """Parses a word of a search that compares a metric, as `loss<2.5`; None for any other word."""
    if (match := _CONDITION.fullmatch(word)) is None:
        return None
    try:
        wanted = float(match[3])
    except ValueError:
        return None
    name, compare = match[1].casefold(), _COMPARISONS[match[2]]
    return lambda info: any(compare(value, wanted) for key, value in info.metrics.items() if key.casefold() == name)


class ResumeSnippets(msgspec.Struct, frozen=True):
    """How to load one checkpoint."""

    manager: str | None
    """Python that continues the run from it; None of a directory that no manager restores."""
    load: str
    """Python that loads its tree."""
    command: str
    """The shell's command that compares every checksum."""


class ResumePoint(msgspec.Struct, frozen=True):
    """A checkpoint that a run can be resumed from."""

    metric: str | None
    """The metric by which it is the best; None if it was not chosen by a metric."""
    mode: Literal["min", "max"] | None
    value: float | str | None
    checkpoint: CheckpointRow
    snippets: ResumeSnippets


class LineageBranch(msgspec.Struct, frozen=True):
    """Checkpoints that were saved one after the other without a rollback between them."""

    first: int
    last: int
    checkpoints: int
    abandoned: int
    """How many of them the newest checkpoint does not descend from."""
    began: str | None
    resumed: bool
    """Whether it begins after a rollback."""
    follows: int | None
    """The step from which it was resumed; None without one, or if that checkpoint is deleted."""


class ResumePanel(msgspec.Struct, frozen=True):
    """What a run can be resumed from, and what it was resumed from."""

    newest: ResumePoint | None
    """The newest good checkpoint: complete, intact and healthy as far as known, and on no abandoned branch."""
    best: ResumePoint | None
    """The good one with the best metric, by the run's policy or by the choice of the user; None without either."""
    intact: ResumePoint | None
    """The newest good one whose bytes were compared since they were written."""
    passed_over: list[PassedOver]
    """The checkpoints that are newer than the newest good one, and why they are none; the newest first."""
    passed_over_more: int
    """How many more there are."""
    chosen: str
    """The user's choice of a metric and direction, as `loss:min`."""
    branches: list[LineageBranch]
    """The newest first. One, unless the run went back to an earlier step."""


class PassedOver(msgspec.Struct, frozen=True):
    """A checkpoint that is not resumed from."""

    id: str
    name: str
    step: int | None
    reason: str


class ResumeFacts(msgspec.Struct, frozen=True):
    """What the list of a run's checkpoints says of resuming, whatever the time is."""

    newest: tuple[str, CheckpointInfo] | None
    best: tuple[str, CheckpointInfo] | None
    rating: Best | None
    """The policy by which the best is chosen."""
    intact: tuple[str, CheckpointInfo] | None
    passed_over: tuple[PassedOver, ...]
    branches: tuple[LineageBranch, ...]


def resume_facts(listed: Listed, policies: Sequence[Policy], chosen: Best | None = None) -> ResumeFacts:
    """Returns what can be resumed from.

    The best is that by the user's choice, else by the first policy for a metric. Without either there is none: of a
    metric alone it is not known whether more is better.

    Args:
        listed: of a run, newest first.
        chosen: what the user has chosen.
    """
    passed_over: list[PassedOver] = []
    good: Listed = []
    for checkpoint_id, info in listed:
        reason = _why_not_good(info)
        if not reason:
            good.append((checkpoint_id, info))
        elif not good and reason != _NO_CHECKPOINT:
            passed_over.append(PassedOver(checkpoint_id, visible(info.name), info.step, reason))
    rating = chosen or next(iter(best_among(policies)), None)
    rated = best_checkpoint((info for _, info in good), rating) if rating is not None else None
    best = next((pair for pair in good if pair[1] is rated), None)
    infos = [info for _, info in listed]
    return ResumeFacts(
        newest=good[0] if good else None,
        best=best,
        rating=rating if best is not None else None,
        intact=next((pair for pair in good if pair[1].intact), None),
        passed_over=tuple(passed_over),
        branches=tuple(_lineage(infos)),
    )


_NO_CHECKPOINT = "no checkpoint"


def _why_not_good(info: CheckpointInfo) -> str:
    """Returns why a run is not resumed from a directory; empty for a good checkpoint."""
    if (status := info.status) != "complete":
        known = status in ("damaged", "partial", "unread")
        return f"{status}: {info.problem}" if known and info.problem else status if known else _NO_CHECKPOINT
    return "it is on an abandoned branch" if info.abandoned else info.unhealthy


def good_age(facts: ResumeFacts, now_ns: int) -> float | None:
    """Returns the seconds since the newest good checkpoint was begun."""
    created_ns = facts.newest[1].created_ns if facts.newest is not None else None
    return max(0.0, (now_ns - created_ns) / 1e9) if created_ns is not None else None


def _lineage(infos: Sequence[CheckpointInfo]) -> list[LineageBranch]:
    """Returns rows of the branches of a run, the newest first."""
    groups = lineage_branches(infos)
    steps = {info.save_id: info.step for group in groups for info in group}
    return [
        LineageBranch(
            first=group[0].step or 0,
            last=group[-1].step or 0,
            checkpoints=len(group),
            abandoned=sum(info.abandoned for info in group),
            began=iso_time(group[0].created_ns),
            resumed=group is not groups[0],
            follows=steps.get(group[0].lineage.follows) if group[0].lineage else None,
        )
        for group in groups[: -MAX_BRANCHES - 1 : -1]
    ]


def resume_panel(library: Library, run: Run, facts: ResumeFacts, chosen: str) -> ResumePanel:
    """Returns the panel of a run; `chosen` is the user's choice of the best."""

    def point(pair: tuple[str, CheckpointInfo] | None, rating: Best | None = None) -> ResumePoint | None:
        if pair is None:
            return None
        checkpoint_id, info = pair
        return ResumePoint(
            metric=shorten(rating.metric) if rating else None,
            mode=rating.mode if rating else None,
            value=json_number(info.metrics[rating.metric]) if rating else None,
            checkpoint=checkpoint_row(checkpoint_id, run, info),
            snippets=_snippets(library, run, info, newest=pair is facts.newest and not facts.passed_over),
        )

    best = point(facts.best, facts.rating)
    return ResumePanel(
        newest=point(facts.newest),
        best=best,
        intact=point(facts.intact),
        passed_over=list(facts.passed_over[:MAX_PASSED_OVER]),
        passed_over_more=max(0, len(facts.passed_over) - MAX_PASSED_OVER),
        chosen=chosen,
        branches=list(facts.branches),
    )


def _snippets(library: Library, run: Run, info: CheckpointInfo, *, newest: bool) -> ResumeSnippets:
    """Returns how to load a checkpoint. Names are written as ASCII, so that no invisible character is pasted.

    A manager is created with `keep=None`: what is pasted must not delete checkpoints at the next save.
    """
    take = per_rank_keyword(info)
    manager = None
    if library.is_run(run) and (mark := mark_of(info)) is not None:
        call = f"state = manager.restore(step={mark.step!a}{take})"
        if newest:
            call = "manager.resume(model, optimizer)  # and scheduler=, loader=, extra= where they were saved"
        manager = f"import treeckpt as tc\nmanager = tc.Manager({run.store.url!a}, keep=None)\n{call}"
    load = f"import treeckpt as tc\nstate = tc.load({info.path!a}{take})"
    return ResumeSnippets(manager, load, f"treeckpt verify {shell_quoted(info.path)}")


def policies_of(library: Library, listed: Listed, keep: str | None = None) -> tuple[Policy, ...]:
    """Returns the policies of a request, else those that the run has recorded, else those of the dashboard.

    Raises:
        KeepError: `keep` is not valid.
    """
    if keep is not None:
        return parse_keep(keep)
    return recorded_policies(info for _, info in listed) or library.policies


def choice_of(text: str) -> Best | None:
    """Returns the metric and direction that a user has chosen, given as `loss:min`; None of an empty text.

    Raises:
        KeepError: it is not of this form.
    """
    if not text:
        return None
    metric, mode = parse_metric(text)
    if mode is None:
        raise KeepError(f"{text[:60]!r} names no direction: {text[:60]}:min or {text[:60]}:max")
    return Best(metric, mode=mode)


def reasons_of(infos: Sequence[CheckpointInfo], policies: Sequence[Policy]) -> dict[str, tuple[str, ...]]:
    """Returns why checkpoints are kept, by name, without those that nothing keeps."""
    by_step = {step: info for info in infos if info.files == "complete" and (step := id_of(info)) is not None}
    found = kept((step_info(info) for info in by_step.values()), policies)
    return {by_step[step].name: reasons for step, reasons in found.items()}


class RunSummary(msgspec.Struct, frozen=True):
    """What one pass over the checkpoints of a run computes."""

    complete: int
    intact: int
    others: int
    nbytes: int
    """Bytes of all files."""
    newest: int | None
    state: Status | None
    saving: int
    stalled: int
    statuses: dict[str, int]
    reasons: dict[str, tuple[str, ...]]
    gone: dict[str, int]
    """Bytes of the checkpoints that no policy keeps, by name, without those that others share, which stay."""
    metrics: list[str]
    """The metrics that have columns."""
    best: dict[str, dict[str, str]]
    """What the values of checkpoints are, by the names of checkpoint and metric: see `best_marks`."""
    branches: dict[str, tuple[int | None, bool]]
    """The step that each checkpoint follows, and whether a branch begins between them, by its name."""
    durations: list[float]
    resume: ResumeFacts
    signs: RunSigns
    """What says whether the run still trains."""


@lru_cache(512)
def _last_summary(run_id: str, policies: tuple[Policy, ...], chosen: Best | None) -> LastResult[Listed, RunSummary]:
    return LastResult()


def summarize_run(run: Run, listed: Listed, policies: tuple[Policy, ...], chosen: Best | None = None) -> RunSummary:
    """Returns the summary of the checkpoints of a run, as `Library.checkpoints` lists them; computed once a list."""
    return _last_summary(run.id, policies, chosen).of(listed, lambda found: _summarize(found, policies, chosen))


def _summarize(listed: Listed, policies: tuple[Policy, ...], chosen: Best | None) -> RunSummary:
    infos = [info for _, info in listed]
    statuses = Counter[str](info.status for info in infos)
    saves = Counter(save.state for info in infos for save in info.saving)
    reasons = reasons_of(infos, policies)
    decided = (info for info in infos if policies and info.files == "complete" and id_of(info) is not None)
    metrics = metric_names(infos, policies)
    needed = needed_nbytes(info.shared_with for info in infos)
    gone = {i.name: (i.disk_nbytes or 0) - needed.get(i.name, 0) for i in decided if i.name not in reasons}
    complete = [info for info in infos if info.files == "complete" and not info.abandoned]
    return RunSummary(
        complete=statuses["complete"],
        intact=sum(info.intact for info in infos),
        others=sum(isinstance(info, ForeignInfo) for info in infos),
        nbytes=sum_nbytes(infos),
        newest=next((info.step for info in infos if info.status == "complete"), None),
        state=status_of_run(infos),
        saving=saves["in_progress"],
        stalled=saves["stalled"],
        statuses=dict(sorted(statuses.items())),
        reasons=reasons,
        gone=gone,
        metrics=metrics,
        best=best_marks(infos, metrics, policies),
        branches=_branches(infos),
        # The list of checkpoints begins with the newest, the line that is drawn with the oldest.
        durations=[info.seconds for info in complete if info.seconds is not None][DURATIONS - 1 :: -1],
        resume=resume_facts(listed, policies, chosen),
        signs=signs_of_run(infos),
    )


def _branches(infos: Sequence[CheckpointInfo]) -> dict[str, tuple[int | None, bool]]:
    """Returns the step that each checkpoint follows, and whether another one was saved between them."""
    steps = {info.save_id: info.step for info in infos if info.save_id is not None and info.sequence is not None}
    branches: dict[str, tuple[int | None, bool]] = {}
    before: str | None = None
    for info in sorted((i for i in infos if i.lineage is not None), key=lambda i: (i.sequence or 0, i.step or 0)):
        assert info.lineage is not None, "others are filtered out above"
        follows = info.lineage.follows
        branches[info.name] = steps.get(follows), before is not None and follows != before
        before = info.save_id
    return branches
