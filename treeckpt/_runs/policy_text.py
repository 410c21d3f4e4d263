"""Retention policies as one line of text, for links, command line and server: `last:3 every:1000 best:loss:min:2`.

Policies are separated by spaces, commas or plus signs: `all`, `last:N`, `every:STEPS`, `period:SECONDS`,
`steps:A;B;...` and `best:METRIC[:min|max][:N]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..policy import All, Best, EveryPeriod, EverySteps, Last, Policy, Steps

MAX_POLICIES = 16
"""Policies of one text, which may come from a link."""
_EXAMPLE = "e.g. last:3 every:1000 period:3600 best:loss:min:2 steps:100;200 all"


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
            return Steps(tuple(_count(part, least=0) for part in rest.split(";")[:1000]))
        if kind == "best" and rest:
            return parse_best(rest)
    except ValueError as error:
        raise KeepError(f"{word[:60]!r} is no policy: {_EXAMPLE}") from error
    raise KeepError(f"{word[:60]!r} is no policy: {_EXAMPLE}")


def _count(text: str, *, least: int = 1) -> int:
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
        return f"period:{policy.seconds:g}"
    return f"best:{policy.metric}:{policy.mode}:{policy.count}"
