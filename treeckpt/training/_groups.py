"""The param groups of an optimizer as plain data, matched by parameter names, and the states of its schedulers.

An optimizer keeps groups of parameters by position. Saved are `members`, label -> the group's parameters as keys, and
`values`, label -> hyper-parameters. A label is the group's own `name` where no other group has it, or its first
parameter by name, so it stays the same from step to step, and ranks with different parameters save theirs side by
side; a parameter that such ranks share (beside experts, for example) may then have several labels. A live group takes
each hyper-parameter on which all its parameters agree: their order is free, and a group may be split, or joined where
the values are equal. A group without parameters takes those of the saved empty group with its name; unnamed ones are
matched in order if there are as many as were saved, otherwise by position.

torch's schedulers keep lists with one entry per group of their optimizer. Such a list becomes
`{"by_group": {label: entry}}`, and is loaded as a list in the order of the live groups. The rest of a scheduler's state
is unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor

from .._arrays.registry import is_same_value
from .._arrays.stateful import is_stateful
from .._core.tree.containers import ObjectState
from .._core.tree.flatten import flatten
from .._core.tree.structure import key_text
from ..errors import MismatchError, TreeError
from ._modules import Key, key_path

BY_SCHEDULERS = frozenset(("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"))
"""The entries that torch's schedulers add to the param groups."""


@cache
def torch_options() -> frozenset[str]:
    """Returns the names of the hyper-parameters of all classes of `torch.optim`."""
    kinds = (value for value in vars(torch.optim).values() if isinstance(value, type))
    return frozenset(name for kind in kinds for name in inspect.signature(kind).parameters)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are equal, type included; Python's == also holds for 1, 1.0 and True."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        # On the host, as torch.equal refuses tensors on two devices.
        return both and a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))
    if type(a) is not type(b):
        return False
    try:
        (first, left), (second, right) = flatten(a), flatten(b)
        if not left or left[0][1] is not a:  # containers
            pairs = zip(left, right, strict=False)
            return first == second and all(is_same(x, y) for (_, x), (_, y) in pairs)
        return is_same_value(a, b)
    except TreeError:
        # A value of a kind that cannot be saved has no stored form to compare.
        return bool(a == b)


def copied_value(saved: Any) -> Any:
    """Returns a saved value for one group alone: several groups may take it, and a tree in memory keeps its own."""
    return saved.detach().clone() if isinstance(saved, Tensor) else copy.deepcopy(saved)


def separate_tensors(groups: Sequence[tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
    """Gives groups a tensor of their own in place of one that they share with others and that is to differ there.

    torch puts one tensor, as `lr`, into all groups that an optimizer is made of. The first group keeps the object.

    Args:
        groups: live groups, each with the values that it will take.
    """
    shared: dict[int, list[tuple[dict[str, Any], str, Any]]] = {}
    for group, values in groups:
        for name, live in group.items():
            if isinstance(live, Tensor):
                shared.setdefault(id(live), []).append((group, name, values.get(name, live)))
    for (_, _, first), *others in shared.values():
        for group, name, value in others:
            if not is_same(first, value):
                group[name] = group[name].detach().clone()


def assign_value(live: Any, saved: Any) -> Any:
    """Returns the new value of a group; a live tensor is filled and stays the object that compiled code holds.

    A saved value that its dtype would round takes its place, a tensor of another dtype or a float beside integers, and
    so does one of another shape.
    """
    if not isinstance(live, Tensor) or isinstance(saved, bool) or not isinstance(saved, (Tensor, int, float)):
        return saved
    if isinstance(saved, Tensor) and (saved.shape, saved.dtype) != (live.shape, live.dtype):
        return saved.to(live.device)
    if not isinstance(saved, Tensor) and (live.ndim or (isinstance(saved, float) and not live.is_floating_point())):
        return saved
    with torch.no_grad():
        # torch refuses to change a tensor in place that gradients are recorded for.
        live.copy_(torch.as_tensor(saved))
    return live


HeldValues = list[tuple[dict[str, Any], dict[str, tuple[Any, Any]]]]
"""Groups, each with its values by name: the object, and a copy of it where it is a tensor or a list."""


def held_values(groups: Iterable[dict[str, Any]]) -> HeldValues:
    """Returns the values that groups have now, for `put_back`."""
    # These alone may change in place; of any other value the object itself is the copy.
    kinds = Tensor, list, dict
    return [
        (group, {k: (v, copied_value(v) if isinstance(v, kinds) else v) for k, v in group.items() if k != "params"})
        for group in groups
    ]


def put_back(held: HeldValues) -> None:
    """Gives groups the values that they had; a tensor stays the object that it was."""
    for group, values in held:
        for name, (live, value) in values.items():
            if name not in group or group[name] is not live or not is_same(live, value):
                group[name] = assign_value(live, value)


class ParamGroup(msgspec.Struct, frozen=True):
    """One group of an optimizer: its parameters by name, and its other entries."""

    members: tuple[Key, ...]
    values: dict[str, Any]


Labels = Mapping[str, Sequence[str]]
"""Parameter -> the labels of its saved groups: one, or more where ranks with different parameters share it.
`empty 1` stands for the parameters of the empty group at that position."""


def empty_label(position: int | str) -> str:
    """Returns the text that stands for the parameters of an empty group."""
    return f"empty {position}"


def match_empty_groups(groups: Sequence[ParamGroup], members: Mapping[str, Mapping[str, None]]) -> dict[int, str]:
    """Returns, by position of each live group without parameters, the label of the saved group that it takes.

    Args:
        members: the saved groups.
    """
    labels = {i: label for i, label in enumerate(labels_of(groups)) if not groups[i].members}
    saved = [label for label, names in members.items() if not names]
    matched = {i: label for i, label in labels.items() if label in saved}
    free = [i for i, label in labels.items() if label == empty_label(i)]
    numbers = [int(n) for n in (label.removeprefix(empty_label("")) for label in saved) if n.isdecimal()]
    if len(free) == len(numbers):
        matched.update(zip(free, map(empty_label, sorted(numbers)), strict=True))
    return matched


def saved_labels(group: ParamGroup, position: int, of: Labels) -> list[tuple[Key, str]]:
    """Returns (parameter, label of its saved group) for all parameters of a group that were saved."""
    members = group.members or ((empty_label(position),),)
    return [(member, label) for member in members for label in of.get(key_path(member), ())]


def labels_of(groups: Sequence[ParamGroup]) -> list[str]:
    """Returns the label of each group of an optimizer, of all its parts: no two have the same."""
    names = [group.values.get("name") for group in groups]
    labels: list[str] = []
    for position, group in enumerate(groups):
        name = names[position]
        if not isinstance(name, str) or names.count(name) > 1:
            name = key_path(min(group.members)) if group.members else empty_label(position)
        labels.append(name if name not in labels else empty_label(position))
    return labels


def tree_of_groups(groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Returns `members` and `values` of an optimizer's groups."""
    labels = labels_of(groups)
    members = {
        label: dict.fromkeys(sorted(map(key_path, group.members))) for label, group in zip(labels, groups, strict=True)
    }
    return {"members": members, "values": {label: g.values for label, g in zip(labels, groups, strict=True)}}


def labels_by_member(members: Mapping[str, Mapping[str, None]]) -> dict[str, list[str]]:
    """Returns the labels of each parameter."""
    labels: dict[str, list[str]] = {}
    for label, names in members.items():
        for name in names:
            labels.setdefault(name, []).append(label)
    return labels


def common_value(saved: Sequence[tuple[Key, Any]], path: str) -> Any:
    """Returns the one value that was saved, by parameter, for those of a live group.

    Raises:
        MismatchError: they were saved with different values.
    """
    first, expected = saved[0]
    for member, value in saved:
        if not is_same(expected, value):
            raise MismatchError(
                path,
                expected=f"one value for the parameters of a group, as {expected!r:.60} for {key_path(first)}",
                found=f"{value!r:.60} for {key_path(member)}",
                hint="Split the optimizer's parameters into groups as they were when this was saved",
            )
    return expected


def match_groups(
    groups: Sequence[ParamGroup],
    of: Labels,
    values: Mapping[str, Mapping[str, Any]],
    *,
    path: str,
    keep: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Returns the values that each live group takes from the saved ones; parameters without a saved group are ignored.

    Args:
        keep: hyper-parameters that no group takes.

    Raises:
        MismatchError: parameters of one live group were saved with different values, or only some with a value.
    """
    taken: list[dict[str, Any]] = []
    for position, group in enumerate(groups):
        places = saved_labels(group, position, of)
        names = dict.fromkeys(name for label in dict.fromkeys(label for _, label in places) for name in values[label])
        taken.append(
            {
                name: copied_value(
                    common_value([(m, values[label].get(name, _ABSENT)) for m, label in places], f"{path}/{name}")
                )
                for name in names
                # The name of a group is its label, not an option: a live group keeps its own.
                if name != "name" and name not in keep
            }
        )
    return taken


class _Absent:
    """Placeholder for a hyper-parameter that a group did not have."""

    def __repr__(self) -> str:
        return "no such hyper-parameter"


_ABSENT = _Absent()


# schedulers -----------------------------------------------------------------------------------------------------------

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
    items: dict[Any, Any] = {}
    for key, value in state.items():
        if key in PER_GROUP and isinstance(value, list) and len(value) == len(labels):
            items[key] = {_MARK: dict(zip(labels, value, strict=True))}
        else:
            items[key] = to_groups(value, labels)
    return _with_items(state, items)


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
    is_single = is_stateful(given) or not isinstance(given, (Mapping, list, tuple))
    here: dict[Any, Any] = (
        {None: given} if is_single else dict(given if isinstance(given, Mapping) else enumerate(given))
    )
    there: dict[Any, Any] = {None: saved}
    if isinstance(saved, list):
        there = dict(enumerate(saved))
    elif isinstance(saved, Mapping) and saved and all(isinstance(part, Mapping) for part in saved.values()):
        own: Any = here[None].state_dict() if is_single and is_stateful(given) else {}
        # The state of one scheduler may have dicts alone too: the keys of its own state tell it from that of several.
        there = there if own.keys() & saved.keys() else dict(saved)
    lives = [optimizer_of(scheduler) for scheduler in here.values()]
    distinct = None not in lives and len({id(live) for live in lives}) == len(lives)
    listed = not any(isinstance(key, str) for key in (*here, *there))
    if there and distinct and listed and len({live.prefix for live in lives}) == 1:
        # Parts that differ in more than their groups are matched one by one below.
        with contextlib.suppress(ValueError):
            state = _joined(list(there.values()))
            paths = [f"scheduler/{key}" if key in there and not is_single else "scheduler" for key in here]
            return list(zip(paths, here.values(), lives, [state] * len(here), strict=True))
    if here.keys() != there.keys():
        raise MismatchError(
            "scheduler",
            expected="one scheduler" if is_single else f"schedulers {list(here)}",
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
    if type(first) in _DICTS and all(type(state) is type(first) and state.keys() == first.keys() for state in states):
        return _with_items(first, {key: _joined([state[key] for state in states]) for key in first})
    if all(type(state) is list and len(state) == len(first) for state in states):
        return [_joined(parts) for parts in zip(*states, strict=True)]
    if not all(is_same(first, state) for state in states):
        raise ValueError(first)
    return first


def unused_entries(scheduler: Any, state: Any, where: tuple[str, str], *, warn: bool) -> list[str]:
    """Returns the paths of the saved entries that a scheduler's own state has not, and logs if either has others.

    The schedulers in a `SequentialLR` or `ChainedScheduler` are compared one by one. Other names with a leading
    underscore are not compared, as they change between versions of torch.

    Args:
        where: the URL of the checkpoint, and the path of the state in it.
        warn: whether this rank logs.

    Raises:
        MismatchError: the scheduler here consists of several, and another number was saved.
    """
    own = scheduler.state_dict() if is_stateful(scheduler) else None
    if not isinstance(own, Mapping) or not isinstance(state, Mapping):
        return []
    url, path = where
    here, saved = ([str(key) for key in side if not str(key).startswith("_") or key == _PARTS] for side in (own, state))
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
    paths = [f"{path}/{key_text(key)}" for key in unused]
    parts, states = getattr(scheduler, _PARTS, ()) if _PARTS in own else (), state.get(_PARTS) or ()
    if parts and len(parts) != len(states):
        raise MismatchError(
            path,
            expected=f"the state of a {type(scheduler).__qualname__} of {len(parts)} schedulers",
            found=f"that of {len(states) or 'one scheduler alone'} in the checkpoint {url}",
            hint="Make one as the saved one, or leave it out (scheduler=None) and set it yourself",
        )
    for number, (part, part_state) in enumerate(zip(parts, states, strict=False)):
        paths += unused_entries(part, part_state, (url, f"{path}/{_PARTS}/{number}"), warn=warn)
    return paths


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
