"""Comparison of hyper-parameters, and assignment of a saved one to a live param group."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..arrays.registry import is_same_value
from ..core.tree.flatten import flatten
from ..errors import TreeError

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
