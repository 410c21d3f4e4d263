"""The hyper-parameters that each parameter trains under, whatever groups an optimizer has them in.

An optimizer keeps groups of parameters by position. What is saved is `members`, label -> the group's parameters as
keys, and `values`, label -> hyper-parameters; a label is the group's own `name`, or else its first parameter by name,
so that it stays the same from step to step and ranks that hold different parameters put theirs side by side. A
parameter that such ranks share (beside experts, say) may then stand under several labels. A live group takes each
hyper-parameter that all of its parameters agree on: their order is free, and a group may be split or joined where that
has one meaning. A group without parameters takes those of the saved one without parameters that has its name; of those
without a name the first takes those of the first, and so on, or, where there are more or fewer than were saved, of
that at its position. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import MismatchError, TreeError
from .names import Key, key_path

__all__ = [
    "Group",
    "Labels",
    "agreed",
    "empty",
    "empty_groups",
    "label_of",
    "labels_by_member",
    "labels_of",
    "match_groups",
    "places_of",
    "tree_of_groups",
]


class Group(msgspec.Struct, frozen=True):
    """One group of an optimizer: its parameters by name, and its other entries."""

    members: tuple[Key, ...]
    values: dict[str, Any]


Same = Callable[[Any, Any], bool]
Labels = Mapping[str, Sequence[str]]
"""Parameter -> the labels of its groups, as saved: one, or more where ranks that hold different parameters share it.
`empty 1` stands for the parameters of the group at that position, which has none."""


def label_of(group: Group, position: int) -> str:
    """What the group of an optimizer at a position is called."""
    name = group.values.get("name")
    if isinstance(name, str):
        return name
    return key_path(min(group.members)) if group.members else empty(position)


def empty(position: int | str) -> str:
    """What stands for the parameters of a group that has none."""
    return f"empty {position}"


def empty_groups(groups: Sequence[Group], members: Mapping[str, Mapping[str, None]]) -> dict[int, str]:
    """By position of each live group without parameters, the label of the saved one that it goes on with.

    Args:
        members: the saved groups.
    """
    labels = {i: label_of(group, i) for i, group in enumerate(groups) if not group.members}
    saved = [label for label, names in members.items() if not names]
    found = {i: label for i, label in labels.items() if label in saved}
    free = [i for i, label in labels.items() if label == empty(i)]
    numbers = [int(n) for n in (label.removeprefix(empty("")) for label in saved) if n.isdecimal()]
    if len(free) == len(numbers):
        found.update(zip(free, map(empty, sorted(numbers)), strict=True))
    return found


def places_of(group: Group, position: int, of: Labels) -> list[tuple[Key, str]]:
    """(parameter, label of its saved group), for all parameters of a group that were saved."""
    members = group.members or ((empty(position),),)
    return [(member, label) for member in members for label in of.get(key_path(member), ())]


def labels_of(groups: Sequence[Group]) -> list[str]:
    """The label of each group.

    Raises:
        TreeError: two groups have one name.
    """
    labels: list[str] = []
    for position, group in enumerate(groups):
        label = label_of(group, position)
        if label in labels:
            raise TreeError(
                f"param_groups/{position}",
                expected="a name of its own for each group of an optimizer",
                found=f"{label!r} twice",
                hint="Rename the group, or leave its name out",
            )
        labels.append(label)
    return labels


def tree_of_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """`members` and `values` of an optimizer's groups."""
    labels = labels_of(groups)
    members = {
        label: dict.fromkeys(sorted(map(key_path, group.members))) for label, group in zip(labels, groups, strict=True)
    }
    return {"members": members, "values": {label: g.values for label, g in zip(labels, groups, strict=True)}}


def labels_by_member(members: Mapping[str, Mapping[str, None]]) -> dict[str, list[str]]:
    """The labels of each parameter."""
    found: dict[str, list[str]] = {}
    for label, names in members.items():
        for name in names:
            found.setdefault(name, []).append(label)
    return found


def agreed(members: Sequence[Key], found: Sequence[Any], path: str, same: Same) -> Any:
    """The one value that was saved for the parameters of a live group.

    Raises:
        MismatchError: they were saved with different ones.
    """
    for member, value in zip(members, found, strict=True):
        if not same(found[0], value):
            raise MismatchError(
                f"{path}",
                expected=f"one value for the parameters of a group, as {found[0]!r:.60} for {key_path(members[0])}",
                found=f"{value!r:.60} for {key_path(member)}",
                hint="Split the optimizer's parameters into groups as they were when this was saved",
            )
    return found[0]


def match_groups(
    groups: Sequence[Group],
    of: Labels,
    values: Mapping[str, Mapping[str, Any]],
    *,
    path: str,
    same: Same,
    keep: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """What each live group takes from the saved ones; parameters that were in none have no say.

    Args:
        same: whether two values are one: of the same type, too.
        keep: hyper-parameters that no group takes.

    Raises:
        MismatchError: parameters of one live group were saved with different values, or only some with a value.
    """
    taken: list[dict[str, Any]] = []
    for position, group in enumerate(groups):
        places = places_of(group, position, of)
        members, labels = [member for member, _ in places], [label for _, label in places]
        found: dict[str, Any] = {}
        names = dict.fromkeys(name for label in dict.fromkeys(labels) for name in values[label])
        for name in names:
            if name != "name" and name not in keep:
                entries = [values[label].get(name, _ABSENT) for label in labels]
                found[name] = agreed(members, entries, f"{path}/{name}", same)
        taken.append(found)
    return taken


class _Absent:
    """Stands for a hyper-parameter that a group did not have."""

    def __repr__(self) -> str:
        return "no such hyper-parameter"


_ABSENT = _Absent()
