"""The param groups of an optimizer as plain data, matched by parameter names, and their hyper-parameters.

An optimizer keeps groups of parameters by position. Saved are `members`, label -> the group's parameters as keys, and
`values`, label -> hyper-parameters. A label is the group's own `name` where no other group has it, or its first
parameter by name, so it stays the same from step to step, and ranks with different parameters save theirs side by
side; a parameter that such ranks share (beside experts, for example) may then have several labels. A live group takes
each hyper-parameter on which all its parameters agree: their order is free, and a group may be split, or joined where
the values are equal. A group without parameters takes those of the saved empty group with its name; unnamed ones are
matched in order if there are as many as were saved, otherwise by position.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor

from .._arrays.registry import is_same_value
from .._core.tree.flatten import flatten
from ..errors import MismatchError, TreeError
from ._names import Key, key_path

BY_SCHEDULERS = frozenset(("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"))
"""The entries that torch's schedulers add to the param groups."""


@cache
def torch_options() -> frozenset[str]:
    """Returns the names of the hyper-parameters of all classes of `torch.optim`."""
    kinds = (one for one in vars(torch.optim).values() if isinstance(one, type))
    return frozenset(name for kind in kinds for name in inspect.signature(kind).parameters)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are equal, type included; Python's == also holds for 1, 1.0 and True."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
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
        live.copy_(torch.as_tensor(saved))
    return live


HeldValues = list[tuple[dict[str, Any], dict[str, tuple[Any, Any]]]]
"""Groups, each with its values by name: the object, and a copy of it where it is a tensor or a list."""


def held_values(groups: Iterable[dict[str, Any]]) -> HeldValues:
    """Returns the values that groups have now, for `put_back`."""
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
    found = {i: label for i, label in labels.items() if label in saved}
    free = [i for i, label in labels.items() if label == empty_label(i)]
    numbers = [int(n) for n in (label.removeprefix(empty_label("")) for label in saved) if n.isdecimal()]
    if len(free) == len(numbers):
        found.update(zip(free, map(empty_label, sorted(numbers)), strict=True))
    return found


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
    found: dict[str, list[str]] = {}
    for label, names in members.items():
        for name in names:
            found.setdefault(name, []).append(label)
    return found


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
                if name != "name" and name not in keep
            }
        )
    return taken


class _Absent:
    """Placeholder for a hyper-parameter that a group did not have."""

    def __repr__(self) -> str:
        return "no such hyper-parameter"


_ABSENT = _Absent()
