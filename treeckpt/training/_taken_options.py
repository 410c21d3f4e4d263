"""Hyper-parameters and arguments of schedulers that a restore takes from the checkpoint, where others were given here.

Compared is what a training does not change by itself. Of param groups, these are the constructor's arguments but `lr`;
`momentum`, `betas` and `weight_decay` count among them unless a scheduler changes them: one of torch that cycles the
momentum, one that noted the first value as `initial_<name>`, or one with a `step` that is not torch's. Of torch's
schedulers, these are the constructor's arguments but `last_epoch`; of others it is not known which they change.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._groups import BY_SCHEDULERS, ParamGroup
from ._names import key_path
from ._optimizer_plan import OptimizerPlan
from ._optimizers import options_of

_CYCLED = frozenset(("momentum", "betas"))
_SCHEDULED = _CYCLED | {"weight_decay"}
_WITH_MOMENTS = frozenset(("amsgrad", "centered", "momentum"))
"""Options that have moments of their own, unless they are off."""

Schedule = tuple[str, Any, Any]
"""(path, scheduler, its saved state)."""


def taken_options(plans: Sequence[OptimizerPlan], schedules: Sequence[Schedule]) -> list[str]:
    """Returns a text for each option that is another here than in the checkpoint, before anything is changed."""
    found: dict[tuple[str, str, bool, str, str], list[int]] = {}
    parts = [part for schedule in schedules for part in _parts_of(schedule)]
    moving = frozenset[str]().union(*(_changed_by(one, state) for _, one, state in parts))
    for plan in plans:
        known = options_of(plan.live.optimizer)
        of = f"{key_path(('optimizer', *plan.prefix))}: " if plan.prefix else ""
        for number, (group, values) in enumerate(zip(plan.live.groups, plan.values, strict=True)):
            for name in _fixed(group, values, moving) & known:
                if texts := _differing(group.values[name], values[name]):
                    unsaved = name in _WITH_MOMENTS and not values[name]
                    found.setdefault((of, name, unsaved, *texts), []).append(number)
    return [
        f"{of}param group{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {name} {here} here, {there} "
        "in the checkpoint, which is taken" + ("" if unsaved else f"; keep=({name!r},) keeps yours")
        for (of, name, unsaved, here, there), numbers in sorted(found.items())
    ] + [text for part in parts for text in _arguments(*part)]


def _fixed(group: ParamGroup, values: Mapping[str, Any], moving: frozenset[str]) -> set[str]:
    """Returns the names in both that no scheduler changes."""
    cycled = _CYCLED if "max_momentum" in values or "base_momentum" in values else frozenset[str]()
    both = (group.values.keys() & values.keys()) - BY_SCHEDULERS - moving - cycled - {"lr"}
    return {name for name in both if f"initial_{name}" not in values}


def _parts_of(schedule: Schedule) -> Iterator[Schedule]:
    """Yields a scheduler of which a state was saved, and those that it consists of."""
    path, one, state = schedule
    yield schedule
    states = state.get("_schedulers") if isinstance(state, Mapping) else None
    for number, pair in enumerate(zip(getattr(one, "_schedulers", ()), states or (), strict=False)):
        yield from _parts_of((f"{path}/_schedulers/{number}", *pair))


def _changed_by(scheduler: Any, state: Any) -> frozenset[str]:
    """Returns the options beside the learning rate that a scheduler may change, or may have before it was saved."""
    if not getattr(getattr(type(scheduler), "step", None), "__module__", "").startswith("torch."):
        return _SCHEDULED
    cycles = getattr(scheduler, "cycle_momentum", False) or (isinstance(state, Mapping) and state.get("cycle_momentum"))
    return _CYCLED if cycles else frozenset()


def _arguments(path: str, scheduler: Any, state: Any) -> Iterator[str]:
    """Yields a text for each argument of a scheduler that differs in its saved state."""
    kinds = [kind for kind in type(scheduler).__mro__ if kind.__module__.startswith("torch.optim.")]
    known = {name for kind in kinds for name in inspect.signature(kind).parameters} - {"last_epoch", "verbose"}
    own: Mapping[str, Any] = scheduler.state_dict() if known and isinstance(state, Mapping) else {}
    for key, value in own.items():
        if (name := key.removeprefix("_")) in known and key in state and (texts := _differing(value, state[key])):
            yield (
                f"{path}: {name} {texts[0]} here, {texts[1]} in the checkpoint, which is taken; to keep yours, set it "
                "after the restore"
            )


def _differing(here: Any, there: Any) -> tuple[str, str] | None:
    """Returns both values as text if they are plain and differ; numbers of several types may be equal."""
    first, second = _plain(here), _plain(there)
    return None if first == second or ... in (first, second) else (f"{first!r:.60}", f"{second!r:.60}")


def _plain(value: Any) -> Any:
    """Returns a number, a text, None or a tuple of these; `...` for what is none, as a tensor."""
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, (list, tuple)):
        items = tuple(map(_plain, value))
        return ... if ... in items else items
    return value if value is None or isinstance(value, (bool, int, float, str)) else ...
