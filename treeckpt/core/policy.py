"""Retention: which checkpoints of a run stay, and why. Decided from what is on disk, never from memory.

A policy is plain data; `kept` gives every step that at least one policy keeps, with its reasons. The newest
checkpoint always stays: a policy may only add to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

__all__ = ["Best", "EveryPeriod", "EverySteps", "Last", "Policy", "StepInfo", "kept"]


class StepInfo(msgspec.Struct, frozen=True):
    """What retention needs to know of one checkpoint."""

    step: int
    created_ns: int
    metrics: dict[str, float] = {}
    pinned: bool = False


class Last(msgspec.Struct, frozen=True, tag="last"):
    """The newest `count` checkpoints."""

    count: int


class EverySteps(msgspec.Struct, frozen=True, tag="every_steps"):
    """Each checkpoint whose step is a multiple of `steps`."""

    steps: int


class EveryPeriod(msgspec.Struct, frozen=True, tag="every_period"):
    """The first checkpoint of each `seconds` of time, counted from the oldest."""

    seconds: float


class Best(msgspec.Struct, frozen=True, tag="best"):
    """The `count` checkpoints with the smallest (or largest) metric; later ones win ties."""

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


Policy = Last | EverySteps | EveryPeriod | Best


def kept(steps: Iterable[StepInfo], policies: Sequence[Policy]) -> dict[int, tuple[str, ...]]:
    """The steps that stay, each with the reasons why, in rising order."""
    ordered = sorted(steps, key=lambda info: info.step)
    reasons: dict[int, list[str]] = {info.step: ["pinned"] for info in ordered if info.pinned}
    for info in ordered[-1:]:
        reasons.setdefault(info.step, []).append("newest")
    for policy in policies:
        for step, reason in _chosen(ordered, policy):
            reasons.setdefault(step, []).append(reason)
    return {step: tuple(reasons[step]) for step in sorted(reasons)}


def _chosen(ordered: Sequence[StepInfo], policy: Policy) -> list[tuple[int, str]]:
    if isinstance(policy, Last):
        last = ordered[-policy.count :] if policy.count > 0 else ordered[:0]
        return [(info.step, f"one of the last {policy.count}") for info in last]
    if isinstance(policy, EverySteps):
        every = max(1, policy.steps)
        return [(info.step, f"a multiple of {every} steps") for info in ordered if info.step % every == 0]
    if isinstance(policy, EveryPeriod):
        return [(step, f"the first in {policy.seconds:g} s") for step in _periodic(ordered, policy.seconds)]
    sign = 1 if policy.mode == "min" else -1
    # a metric that is not a number is never the best
    ranked = sorted(
        (sign * info.metrics[policy.metric], -info.step)
        for info in ordered
        if info.metrics.get(policy.metric, float("nan")) == info.metrics.get(policy.metric)
    )
    return [(-step, f"one of the best {policy.count} by {policy.metric}") for _, step in ranked[: max(0, policy.count)]]


def _periodic(ordered: Sequence[StepInfo], seconds: float) -> list[int]:
    chosen: list[int] = []
    following = None
    for info in sorted(ordered, key=lambda i: (i.created_ns, i.step)):
        if following is None or info.created_ns >= following:
            chosen.append(info.step)
            following = info.created_ns + int(seconds * 1e9)
    return chosen
