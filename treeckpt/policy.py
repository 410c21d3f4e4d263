"""Retention policies: which checkpoints of a run stay, and why. Decisions depend on the disk only, not on memory.

A policy is plain data; `kept` returns every step that at least one policy keeps, with the reasons. The newest
checkpoint always stays: policies only add to it. A decision that is repeated after the other checkpoints were deleted
is the same. A checkpoint that is damaged counts for no policy, so that it takes the place of no good one, and stays:
a person may still want what is intact in it.

The newest is the one that was saved last. Checkpoints on abandoned branches count as older than all on the lineage of
the newest, whenever they were saved.

Policies also have a form as one line of text, for links, command line and server: `last:3 every:1000 best:loss:min:2`.
They are separated by spaces, commas or plus signs: `all`, `last:N`, `every:STEPS`, `period:SECONDS`, `steps:A;B;...`,
`best:METRIC[:min|max][:N]` and `total:N:METRIC[:min|max][:N]`. In the name of a metric these signs stand as in a URL:
`best:val%20loss:min`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from numbers import Real
from typing import Literal, SupportsIndex
from urllib.parse import quote, unquote

import msgspec

from .errors import TreeckptError

__all__ = ["All", "Best", "EveryPeriod", "EverySteps", "Last", "Policy", "StepInfo", "Steps", "Total", "kept"]
MAX_POLICIES = 16
"""Policies of one text, which may come from a link."""
_EXAMPLE = "e.g. last:3 every:1000 period:3600 best:loss:min:2 total:3:loss:min steps:100;200 all"


class StepInfo(msgspec.Struct, frozen=True):
    """The facts about one checkpoint that policies decide by.

    Attributes:
        step: of training, or the text by which it was saved.
        created_ns: Unix time at which the save began, in nanoseconds.
        metrics: that were saved with it.
        pinned: whether it is pinned.
        sequence: rises in the order in which checkpoints were saved; None where that is the order of the steps.
        abandoned: whether the newest checkpoint does not descend from it.
        damaged: whether a verification found changed bytes.
    """

    step: int | str
    created_ns: int
    metrics: dict[str, float] = {}
    pinned: bool = False
    sequence: int | None = None
    abandoned: bool = False
    damaged: bool = False

    @property
    def age(self) -> tuple[bool, int, int]:
        """Sort key; the oldest is first."""
        number = -1 if isinstance(self.step, str) else self.step
        return not self.abandoned, number if self.sequence is None else self.sequence, number


class All(msgspec.Struct, frozen=True, tag="all"):
    """Every checkpoint.

    >>> tc.Manager("job", keep=[tc.policy.All()]).close()
    """


class Last(msgspec.Struct, frozen=True, tag="last"):
    """The newest `count` checkpoints.

    >>> tc.Manager("job", keep=[tc.policy.Last(3)]).close()
    """

    count: int


class EverySteps(msgspec.Struct, frozen=True, tag="every_steps"):
    """Every checkpoint whose step is a multiple of `steps`; one with a text in the place of a step has none.

    >>> tc.Manager("job", keep=[tc.policy.Last(1), tc.policy.EverySteps(1000)]).close()
    """

    steps: int


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """The checkpoints of the given `steps`.

    >>> tc.Manager("job", keep=[tc.policy.Steps((1000, 5000))]).close()
    """

    steps: tuple[int, ...]


class EveryPeriod(msgspec.Struct, frozen=True, tag="every_period"):
    """The first checkpoint, and then each that was saved `seconds` or more after the last chosen one.

    Times are those of the clock, the order is that of the lineage: where the clock was set back, counting starts again.
    So the choice never depends on later checkpoints. Abandoned branches are counted separately.

    >>> tc.Manager("job", keep=[tc.policy.Last(1), tc.policy.EveryPeriod(3600)]).close()
    """

    seconds: float


class Best(msgspec.Struct, frozen=True, tag="best"):
    """The `count` checkpoints with the smallest `metric`, or with `mode="max"` the largest; of equal ones the later.

    A checkpoint without the metric, or whose metric is NaN, is not chosen. But as long as no checkpoint of the run has
    the metric (it is measured later, or its name is misspelt), all are kept. Abandoned branches are counted separately:
    the best of the present branch stay, whatever was better on another one.

    >>> tc.Manager("job", keep=[tc.policy.Best("accuracy", count=2, mode="max")]).close()
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


class Total(msgspec.Struct, frozen=True, tag="total"):
    """`count` checkpoints in all: the newest, the best that `including` chooses, and the last of the others beside.

    As with `Best`, all are kept as long as none has the metric.

    >>> tc.Manager("job", keep=tc.policy.Total(3, including=tc.policy.Best("loss"))).close()
    """

    count: int
    including: Best


Policy = All | Last | EverySteps | Steps | EveryPeriod | Best | Total


def best_among(policies: Iterable[Policy]) -> list[Best]:
    """Returns the policies that choose by a metric, those inside of `Total` too."""
    inner = (policy.including if isinstance(policy, Total) else policy for policy in policies)
    return [policy for policy in inner if isinstance(policy, Best)]


def check_policies(policies: Sequence[object]) -> None:
    """Refuses what is no policy, has an invalid field or mode, or keeps nothing: early, as clean-ups run later.

    Raises:
        TreeckptError: naming the policy.
    """
    for policy in policies:
        if not isinstance(policy, Policy):
            raise _refusal("policies, or a number of checkpoints", policy)
        if isinstance(policy, Total) and not isinstance(policy.including, Best):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _refusal("a policy Best in Total", policy)
        for best in best_among([policy]):
            if best.mode not in ("min", "max"):
                raise TreeckptError("keep", expected="mode 'min' or 'max'", found=f"{best.mode!r}")
        if wanted := _invalid_field(policy):
            raise _refusal(wanted, policy)
    if all(isinstance(policy, Steps) and len(policy.steps) == 0 for policy in policies):
        raise _refusal("policies that keep something", policies)


def _refusal(expected: str, found: object) -> TreeckptError:
    hint = "None keeps all; the newest checkpoint stays in any case"
    return TreeckptError("keep", expected=expected, found=f"{found!r:.60}", hint=hint)


def _invalid_field(policy: Policy) -> str:
    """Returns what a policy should have where a field is invalid; empty for a valid policy."""
    if isinstance(policy, Total):
        least = operator.index(policy.including.count) + 1 if not (wrong := _invalid_field(policy.including)) else 1
        more = f"a count of {least} or more, as the newest stays too"
        return wrong if wrong or _is_number(policy.count, least) else more
    if isinstance(policy, Last | Best) and not _is_number(policy.count, 1):
        return "a count of 1 or more"
    if isinstance(policy, Best) and not (policy.metric and isinstance(policy.metric, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        return "the name of a metric"
    if isinstance(policy, EverySteps) and not _is_number(policy.steps, 1):
        return "a number of steps, 1 or more"
    if isinstance(policy, Steps) and not (
        isinstance(policy.steps, Collection) and all(_is_number(step, 0) for step in policy.steps)  # pyright: ignore[reportUnnecessaryIsInstance]
    ):
        return "steps, each 0 or more"
    if isinstance(policy, EveryPeriod) and not (isinstance(policy.seconds, Real) and 0 <= policy.seconds < math.inf):
        return "a number of seconds"
    return ""


def _is_number(value: object, least: int) -> bool:
    """Returns whether `value` is an integer of any type, not a bool, and at least `least`."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and operator.index(value) >= least


def kept(steps: Iterable[StepInfo], policies: Sequence[Policy]) -> dict[int | str, tuple[str, ...]]:
    """Returns the steps that stay, in rising order after those with a text, each with the reasons."""
    by_age = sorted(steps, key=lambda info: info.age)
    reasons: dict[int | str, list[str]] = {info.step: ["pinned"] for info in by_age if info.pinned}
    for info in by_age:
        if info.damaged:
            reasons.setdefault(info.step, []).append("damaged: counts for no policy")
    ordered = [info for info in by_age if not info.damaged]
    for info in ordered[-1:]:
        reasons.setdefault(info.step, []).append("newest")
    for policy in policies:
        for step, reason in _chosen(ordered, policy):
            reasons.setdefault(step, []).append(reason)
    order = sorted(reasons, key=lambda step: (isinstance(step, int), step))
    return {step: tuple(reasons[step]) for step in order}


def _chosen(ordered: Sequence[StepInfo], policy: Policy) -> list[tuple[int | str, str]]:
    if isinstance(policy, All):
        return [(info.step, "all are kept") for info in ordered]
    if isinstance(policy, Last):
        last = ordered[-policy.count :] if policy.count > 0 else ordered[:0]
        return [(info.step, f"one of the last {policy.count}") for info in last]
    if isinstance(policy, EverySteps):
        every = max(1, policy.steps)
        steps = [info.step for info in ordered if isinstance(info.step, int) and info.step % every == 0]
        return [(step, f"a multiple of {every} steps") for step in steps]
    if isinstance(policy, Steps):
        named = set(policy.steps)
        return [(info.step, "asked for by number") for info in ordered if info.step in named]
    if isinstance(policy, EveryPeriod):
        branches = [[info for info in ordered if info.abandoned is which] for which in (True, False)]
        chosen = [step for branch in branches for step in _periodic(branch, policy.seconds)]
        return [(step, f"the first in {policy.seconds:g} s") for step in chosen]
    best = _best_steps(ordered, policy.including if isinstance(policy, Total) else policy)
    if not best:
        metric = best_among([policy])[0].metric
        return [(info.step, f"all are kept, as none has the metric {metric!r}") for info in ordered]
    if isinstance(policy, Best):
        return [(step, f"one of the best {policy.count} by {policy.metric}") for step in best]
    newest_first = [info.step for info in reversed(ordered)]
    steps = list(dict.fromkeys([newest_first[0], *best, *newest_first]))[: policy.count]
    why, also = (
        f"one of {policy.count} in all",
        f", as one of the best {policy.including.count} by {policy.including.metric}",
    )
    return [(step, why + also * (step in best)) for step in steps]


def _best_steps(ordered: Sequence[StepInfo], policy: Best) -> list[int | str]:
    """Returns the best steps of the present branch, then those of abandoned ones; empty if none has the metric."""
    rated = best_of(ordered, policy)
    branches = [[info.step for info in rated if info.abandoned is which] for which in (False, True)]
    return [step for branch in branches for step in branch[: max(0, policy.count)]]


def unmeasured(steps: Iterable[StepInfo], policies: Sequence[Policy]) -> list[str]:
    """Returns the metrics that no checkpoint has, if any checkpoint stays only because they are missing."""
    infos = list(steps)
    missing = [policy for policy in policies for best in best_among([policy]) if not best_of(infos, best)]
    others = [policy for policy in policies if policy not in missing]
    return [best.metric for best in best_among(missing)] if len(kept(infos, others)) < len(infos) else []


def unmeasured_text(metric: str, steps: Iterable[StepInfo]) -> str:
    """Returns the message that no checkpoint has a metric, with the names of those that there are."""
    names = ", ".join(sorted({name for info in steps for name in info.metrics})) or "none"
    return f"no checkpoint has the metric {metric!r} as a number (metrics there are: {names})"


def best_of(steps: Iterable[StepInfo], policy: Best) -> list[StepInfo]:
    """Returns the checkpoints that have the policy's metric, the best first."""
    sign = 1 if policy.mode == "min" else -1
    rated = [info for info in steps if not math.isnan(info.metrics.get(policy.metric, math.nan))]
    # The newest first: the second sort leaves those of equal metrics in this order.
    rated.sort(key=lambda info: info.age, reverse=True)
    return sorted(rated, key=lambda info: sign * info.metrics[policy.metric])


def _periodic(ordered: Sequence[StepInfo], seconds: float) -> list[int | str]:
    chosen: list[int | str] = []
    last = None
    for info in ordered:
        if last is None or info.created_ns < last or info.created_ns - last >= seconds * 1e9:
            chosen.append(info.step)
            last = info.created_ns
    return chosen


class KeepError(ValueError):
    """A text is no list of policies."""


def parse_keep(text: str) -> tuple[Policy, ...]:
    """Parses the policies of a line.

    Raises:
        KeepError: a part of it is no policy, or there are more than MAX_POLICIES.
    """
    words = [word for word in re.split(r"[\s,+]+", text) if word]
    if len(words) > MAX_POLICIES:
        raise KeepError(f"at most {MAX_POLICIES} policies")
    return tuple(_policy(word) for word in words)


def _policy(word: str) -> Policy:
    kind, _, rest = word.partition(":")
    try:
        if kind == "all" and not rest:
            return All()
        if kind == "last":
            return Last(_count(rest))
        if kind == "every":
            return EverySteps(_count(rest))
        if kind == "period":
            seconds = float(rest)
            if seconds >= 0 and math.isfinite(seconds):
                return EveryPeriod(seconds)
        if kind == "steps":
            return Steps(tuple(_count(part, least=0) for part in rest.split(";")))
        if kind == "best" and rest:
            return _parse_best(rest)
        if kind == "total":
            count, _, rest = rest.partition(":")
            best = _parse_best(rest)
            return Total(_count(count, least=best.count + 1), best)
    except ValueError as error:
        raise KeepError(f"{word[:60]!r} is no policy: {_EXAMPLE}") from error
    raise KeepError(f"{word[:60]!r} is no policy: {_EXAMPLE}")


def _parse_best(text: str) -> Best:
    best = parse_best(text)
    return Best(unquote(best.metric), best.count, best.mode)


def _count(text: str, *, least: int = 1) -> int:
    # A number of 18 digits fits 64 bits.
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= least):
        raise ValueError(f"{text!r} is not a number from {least} on")
    return int(text)


def parse_best(text: str) -> Best:
    """Parses a metric, then in any order `min` or `max` and a count; the name of the metric may contain colons.

    Raises:
        ValueError: there is no metric, or the count is 0.
    """
    metric, mode, count = text, None, None
    while ":" in metric:
        rest, _, last = metric.rpartition(":")
        if last in ("min", "max") and mode is None:
            mode = last
        elif last.isdecimal() and count is None:
            count = _count(last)
        else:
            break
        metric = rest
    if not metric:
        raise ValueError(f"{text!r} names no metric")
    return Best(metric, count or 1, "max" if mode == "max" else "min")


def keep_text(policies: Sequence[Policy]) -> str:
    """Returns the line that `parse_keep` parses to these policies."""
    return " ".join(map(_policy_text, policies))


def _policy_text(policy: Policy) -> str:
    if isinstance(policy, All):
        return "all"
    if isinstance(policy, Last):
        return f"last:{policy.count}"
    if isinstance(policy, EverySteps):
        return f"every:{policy.steps}"
    if isinstance(policy, Steps):
        return "steps:" + ";".join(map(str, policy.steps))
    if isinstance(policy, EveryPeriod):
        return f"period:{_seconds_text(float(policy.seconds))}"
    kind, best = (f"total:{policy.count}", policy.including) if isinstance(policy, Total) else ("best", policy)
    metric = re.sub(r"[\s,+%]", lambda match: quote(match[0]), best.metric)
    return f"{kind}:{metric}:{best.mode}:{best.count}"


def _seconds_text(seconds: float) -> str:
    # every digit; no plus sign, which separates policies
    return repr(seconds).removesuffix(".0").replace("+", "")
