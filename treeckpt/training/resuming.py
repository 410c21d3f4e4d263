"""Registered optimizers take the state of a checkpoint whether they have any yet or not.

What `Optimizer.state_dict` gives names parameters by their numbers. The moments that the optimizer here lacks are made
as `restore` makes them: of the saved dtype, laid out as their parameter is. The optimizer itself changes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import MismatchError
from ..core.structure import Structure, key_text, paths_of
from ..core.tree import flatten, replace_leaves, unflatten
from ..leaves.registry import new_array, resolve
from .moments import Place, build_state
from .sources import Source, children_of, descend

__all__ = ["ResumedOptimizer", "with_resumed", "without_resumed"]


class ResumedOptimizer:
    """An optimizer, with a state to be filled that has all leaves of the saved one."""

    def __init__(self, optimizer: Any, state: Any) -> None:
        self.optimizer, self._state = optimizer, state

    def state_dict(self) -> Any:
        """The state to be filled."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Loads the state into the optimizer; moments keep the dtype that was saved."""
        self.optimizer.load_state_dict(state)
        for number, parameter in enumerate(_parameters(self.optimizer)):
            here: Any = self.optimizer.state.get(parameter, {})
            for key, moment in (state["state"].get(number) or {}).items():
                other = here.get(key)
                if isinstance(moment, Tensor) and isinstance(other, Tensor) and other.dtype != moment.dtype:
                    here[key] = moment


def with_resumed(thing: Any, keys: tuple[Any, ...], source: Source, selects: Callable[[str], bool]) -> Any:
    """A registered thing; its optimizers that do not have the same arrays as the saved ones are `ResumedOptimizer`s.

    Args:
        keys: the keys that lead to where it was saved.
        selects: whether a saved path is asked for.

    Raises:
        MismatchError: an optimizer of other groups, or one of which only a part is asked for.
    """
    path = "/".join(map(key_text, keys))
    found: list[Any] = []
    for below, leaf in flatten(thing)[1]:
        at = f"{path}/{below}" if below else path
        is_optimizer = isinstance(leaf, torch.optim.Optimizer)
        found.append(_resumed(leaf, at, _node_at(source.structure, at), source, selects) if is_optimizer else leaf)
    return replace_leaves(thing, iter(found)) if any(isinstance(leaf, ResumedOptimizer) for leaf in found) else thing


def without_resumed(filled: Any) -> Any:
    """A tree with the optimizers themselves in the places of those that are `ResumedOptimizer`."""
    leaves = (leaf.optimizer if isinstance(leaf, ResumedOptimizer) else leaf for _, leaf in flatten(filled)[1])
    return replace_leaves(filled, leaves)


def _node_at(node: Structure, path: str) -> Structure:
    for step in path.split("/"):
        node = next((child for key, child in children_of(node).items() if key_text(key) == step), None)
    return node


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _resumed(optimizer: Any, path: str, saved: Structure, source: Source, selects: Callable[[str], bool]) -> Any:
    live = optimizer.state_dict()
    below = {p: f"{path}/{p}" for p, _ in paths_of(saved)} if saved is not None else {}
    arrays = {p for p, at in below.items() if source.leaves.get(at) is not None}
    here = {p for p, leaf in flatten(live)[1] if isinstance(leaf, Tensor)}
    if saved is None or arrays == here or not all(at in source.leaves for at in below.values()):
        return optimizer
    if not all(map(selects, below.values())):
        raise MismatchError(
            path,
            expected="all of an optimizer's state to be asked for, as it has none of its own here",
            found="a part",
            hint="Select the whole optimizer, or exclude it",
        )
    _check_groups(live, path, saved, source)

    def as_saved(node: Structure, at: str) -> Any:
        paths = [f"{at}/{p}" if p else at for p, _ in paths_of(node)]
        specs = ((p, source.leaves[p]) for p in paths)
        leaves = (source.value(p) if spec is None else new_array(spec, p, None).leaf for p, spec in specs)
        return unflatten(node, leaves, resolve=resolve)

    parameters = _parameters(optimizer)
    place = Place(counts_on_device=any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups))
    state = {key: as_saved(child, f"{path}/{key_text(key)}") for key, child in children_of(saved).items()
             if key != "state"}  # fmt: skip
    moments: dict[Any, Any] = {}
    for number, child in children_of(descend(saved, ("state",))).items():
        at = f"{path}/state/{key_text(number)}"
        if type(number) is int and number < len(parameters) and child is not None:
            mine = live["state"].get(number, {})
            moments[number] = build_state(
                parameters[number], child, mine, path=at, leaves=source.leaves, value=source.value,
                is_spread=source.is_spread, place=place,
            )  # fmt: skip
        else:
            moments[number] = as_saved(child, at)
    return ResumedOptimizer(optimizer, {"state": moments, **state})


def _check_groups(live: Any, path: str, saved: Structure, source: Source) -> None:
    """Refuses a state of other groups, before anything changes.

    Raises:
        MismatchError: of another number of groups, or of parameters in one.
    """
    groups = children_of(descend(saved, ("param_groups",)))
    counts = [len(children_of(descend(group, ("params",)))) for group in groups.values()]
    wanted = [len(group["params"]) for group in live["param_groups"]]
    if counts != wanted:
        raise MismatchError(
            f"{path}/param_groups",
            expected=f"groups of {', '.join(map(str, wanted))} parameters, as the optimizer has",
            found=f"groups of {', '.join(map(str, counts))} in the checkpoint",
            hint="Make the optimizer with the groups that were saved; treeckpt.training matches parameters by name",
        )
