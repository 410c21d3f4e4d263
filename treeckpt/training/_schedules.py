"""The state of a scheduler, independent of the order and split of its optimizer's param groups.

torch's schedulers keep lists with one entry per group of their optimizer. Such a list becomes
`{"by_group": {label: entry}}` with the labels of `training.groups`, and is loaded as a list in the order of the live
groups. The rest of the state is unchanged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._arrays.stateful import is_stateful
from .._core.tree.containers import ObjectState
from .._core.tree.structure import key_text
from ..errors import MismatchError
from ._groups import Labels, ParamGroup, common_value, is_same, saved_labels

_log = logging.getLogger("treeckpt")

PER_GROUP = frozenset(
    (
        "base_lrs",
        "_last_lr",
        "min_lrs",
        "max_lrs",
        "lr_lambdas",
        "base_momentums",
        "max_momentums",
        "_last_momentum",
        "base_values",
    )
)
"""The entries of torch's and timm's schedulers that have one value per group."""

_MARK = "by_group"
_DICTS = dict, ObjectState
_PARTS = "_schedulers"
"""The entry, and the attribute, of torch's schedulers that consist of others."""


def to_groups(state: Any, labels: Sequence[str]) -> Any:
    """Returns a scheduler's state whose lists with one entry per group are keyed by the groups' labels."""
    if isinstance(state, list):
        return [to_groups(item, labels) for item in state]
    if type(state) not in _DICTS:
        return state
    found: dict[Any, Any] = {}
    for key, value in state.items():
        if key in PER_GROUP and isinstance(value, list) and len(value) == len(labels):
            found[key] = {_MARK: dict(zip(labels, value, strict=True))}
        else:
            found[key] = to_groups(value, labels)
    return _with_items(state, found)


def from_groups(state: Any, groups: Sequence[ParamGroup], of: Labels, *, path: str) -> Any:
    """Returns the state for a scheduler of an optimizer with these groups; the inverse of `to_groups`.

    Args:
        of: the saved labels of each parameter.

    Raises:
        MismatchError: the parameters of one live group were saved with different entries.
    """
    if isinstance(state, list):
        return [from_groups(item, groups, of, path=f"{path}/{i}") for i, item in enumerate(state)]
    if type(state) not in _DICTS:
        return state
    if set(state) == {_MARK}:
        return [_entry(group, position, state[_MARK], of, path) for position, group in enumerate(groups)]
    return _with_items(state, {k: from_groups(value, groups, of, path=f"{path}/{k}") for k, value in state.items()})


def _with_items(state: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a dict, or the state of an object, with other items."""
    return state.with_items(items) if isinstance(state, ObjectState) else items


def match_schedulers(given: Any, saved: Any, optimizer_of: Callable[[Any], Any]) -> list[tuple[str, Any, Any, Any]]:
    """Returns (path, scheduler, its optimizer, its saved state) of a scheduler, or of each in a list or dict.

    Schedulers in a list, one for each part of an optimizer (pipeline stages), may be of other parts than were saved:
    each takes what was saved of all parts, by group.

    Args:
        optimizer_of: returns the optimizer, or the part of one, whose rates a scheduler sets; None for none of these.

    Raises:
        MismatchError: other schedulers were saved.
    """
    one = is_stateful(given) or not isinstance(given, (Mapping, list, tuple))
    here: dict[Any, Any] = {None: given} if one else dict(given if isinstance(given, Mapping) else enumerate(given))
    there: dict[Any, Any] = {None: saved}
    if isinstance(saved, list):
        there = dict(enumerate(saved))
    elif isinstance(saved, Mapping) and saved and all(isinstance(part, Mapping) for part in saved.values()):
        own: Any = here[None].state_dict() if one and is_stateful(given) else {}
        there = there if own.keys() & saved.keys() else dict(saved)
    lives = [optimizer_of(scheduler) for scheduler in here.values()]
    distinct = None not in lives and len({id(live) for live in lives}) == len(lives)
    listed = not any(isinstance(key, str) for key in (*here, *there))
    if there and distinct and listed and len({live.prefix for live in lives}) == 1:
        with contextlib.suppress(ValueError):
            state = _joined(list(there.values()))
            paths = [f"scheduler/{key}" if key in there and not one else "scheduler" for key in here]
            return list(zip(paths, here.values(), lives, [state] * len(here), strict=True))
    if here.keys() != there.keys():
        raise MismatchError(
            "scheduler",
            expected="one scheduler" if one else f"schedulers {list(here)}",
            found=("one" if list(there) == [None] else f"{list(there)}") + " in the checkpoint",
            hint="Give them as they were saved, one, a list or a dict, or leave them out (scheduler=None)",
        )
    paths = ["scheduler" if key is None else f"scheduler/{key_text(key)}" for key in here]
    return list(zip(paths, here.values(), lives, [there[key] for key in here], strict=True))


def _joined(states: Sequence[Any]) -> Any:
    """Returns the state of all parts of an optimizer.

    Raises:
        ValueError: they differ in more than the groups that they have.
    """
    first = states[0]
    if all(type(state) is dict and set(state) == {_MARK} for state in states):
        joined: dict[str, Any] = {}
        for label, entry in (item for state in states for item in state[_MARK].items()):
            if not is_same(joined.setdefault(label, entry), entry):
                raise ValueError(label)
        return {_MARK: joined}
    if type(first) in _DICTS and all(type(one) is type(first) and one.keys() == first.keys() for one in states):
        return _with_items(first, {key: _joined([state[key] for state in states]) for key in first})
    if all(type(state) is list and len(state) == len(first) for state in states):
        return [_joined(parts) for parts in zip(*states, strict=True)]
    if not all(is_same(first, state) for state in states):
        raise ValueError(first)
    return first


def unused_entries(scheduler: Any, state: Any, at: tuple[str, str], *, warn: bool) -> list[str]:
    """Returns the paths of the saved entries that a scheduler's own state has not, and logs if either has others.

    The schedulers in a `SequentialLR` or `ChainedScheduler` are compared one by one. Other names with a leading
    underscore are not compared, as they change between versions of torch.

    Args:
        at: the URL of the checkpoint, and the path of the state in it.
        warn: whether this rank logs.

    Raises:
        MismatchError: the scheduler here consists of several, and another number was saved.
    """
    own = scheduler.state_dict() if is_stateful(scheduler) else None
    if not isinstance(own, Mapping) or not isinstance(state, Mapping):
        return []
    url, path = at
    here, saved = ([str(key) for key in one if not str(key).startswith("_") or key == _PARTS] for one in (own, state))
    unused, stay = [key for key in saved if key not in here], [key for key in here if key not in saved]
    if warn and (unused or stay):
        _log.warning(
            "%s: %s: other entries were saved than the %s here has: only the saved state has %s, without use; only the "
            "scheduler here has %s, which stays",
            url,
            path,
            type(scheduler).__qualname__,
            ", ".join(unused) or "nothing",
            ", ".join(stay) or "nothing",
        )
    found = [f"{path}/{key_text(key)}" for key in unused]
    parts, states = getattr(scheduler, _PARTS, ()) if _PARTS in own else (), state.get(_PARTS) or ()
    if parts and len(parts) != len(states):
        raise MismatchError(
            path,
            expected=f"the state of a {type(scheduler).__qualname__} of {len(parts)} schedulers",
            found=f"that of {len(states) or 'one scheduler alone'} in the checkpoint {url}",
            hint="Make one as the saved one, or leave it out (scheduler=None) and set it yourself",
        )
    for number, (part, one) in enumerate(zip(parts, states, strict=False)):
        found += unused_entries(part, one, (url, f"{path}/{_PARTS}/{number}"), warn=warn)
    return found


def _entry(group: ParamGroup, position: int, entries: Mapping[str, Any], of: Labels, path: str) -> Any:
    places = [(member, label) for member, label in saved_labels(group, position, of) if label in entries]
    if not places:
        raise MismatchError(
            path,
            expected="an entry for each group of the live optimizer",
            found=f"entries of the groups {', '.join(map(repr, entries))} only",
            hint="Give the optimizer parameters that were trained when this was saved, or leave the scheduler out",
        )
    return common_value([(member, entries[label]) for member, label in places], path)
