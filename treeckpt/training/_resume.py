"""Restore of registered optimizers, which may have no state yet.

`Optimizer.state_dict` names parameters by their numbers. Moments that the live optimizer lacks are created as `restore`
creates them: of the saved dtype, with the layout of their parameter. The optimizer itself changes last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from torch import Tensor

from .._arrays.registry import build_tensor, new_array, resolve
from .._arrays.stateful import is_optimizer, load_exact_state, plan_state
from .._core.tree.flatten import flatten, replace_leaves, unflatten
from .._core.tree.structure import DictNode, Structure, key_text, paths_of
from ..errors import MismatchError
from ._groups import torch_options
from ._moments import MomentPlacement, build_state
from ._optimizers import param_groups_of
from ._sources import RestoreSource, children_of, descend, leaves_below


class ResumedOptimizer:
    """An optimizer, with a state to be filled that has all leaves of the saved one."""

    def __init__(self, optimizer: Any, state: Any) -> None:
        self.optimizer, self._state = optimizer, state

    def state_dict(self) -> Any:
        """The state to be filled."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Loads the state into the optimizer; moments keep the dtype that was saved."""
        load_exact_state("optimizer", self.optimizer, state)


def with_resumed_optimizers(
    thing: Any, keys: tuple[Any, ...], source: RestoreSource, selects: Callable[[str], bool]
) -> Any:
    """Returns a registered tree with a `ResumedOptimizer` for each optimizer that lacks some of the saved arrays.

    Args:
        keys: the keys that lead to where it was saved.
        selects: whether a saved path is asked for.

    Raises:
        MismatchError: an optimizer of other groups, or one of which only a part is asked for.
    """
    path = "/".join(map(key_text, keys))
    found: list[Any] = []
    for below, leaf in flatten(thing, namespace=source.options.namespace)[1]:
        at = f"{path}/{below}" if below else path
        found.append(_resumed(leaf, at, source, selects) if is_optimizer(leaf) else leaf)
    if not any(isinstance(leaf, ResumedOptimizer) for leaf in found):
        return thing
    return replace_leaves(thing, iter(found), namespace=source.options.namespace)


def without_resumed_optimizers(filled: Any, namespace: str) -> Any:
    """Returns a tree with the optimizers themselves in place of each `ResumedOptimizer`."""
    found = flatten(filled, namespace=namespace)[1]
    leaves = (leaf.optimizer if isinstance(leaf, ResumedOptimizer) else leaf for _, leaf in found)
    return replace_leaves(filled, leaves, namespace=namespace)


def _resumed(optimizer: Any, path: str, source: RestoreSource, selects: Callable[[str], bool]) -> Any:
    saved, live = source.structure, optimizer.state_dict()
    for step in path.split("/"):
        saved = next((child for key, child in children_of(saved).items() if key_text(key) == step), None)
    _check_names(live, path, saved, source)
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
    built = _StateDictBuilder(optimizer, source).state(saved, live, path)
    return ResumedOptimizer(optimizer, plan_state(path, None, built, live=live).placed())


class _StateDictBuilder:
    """Builds the state dict of one optimizer, to be filled."""

    def __init__(self, optimizer: Any, source: RestoreSource) -> None:
        param_groups = param_groups_of(optimizer) or []
        groups: list[Any] = [group["params"] for group in param_groups]
        self._source = source
        self._by_number: dict[Any, Tensor] = dict(enumerate(parameter for group in groups for parameter in group))
        self._by_position = {(i, j): parameter for i, group in enumerate(groups) for j, parameter in enumerate(group)}
        counts = any(group.get("capturable") or group.get("fused") for group in param_groups)
        self._made: dict[object, Tensor] = {}
        self._place = MomentPlacement(counts_on_device=counts)

    def state(self, node: Structure, live: Any, at: str) -> Any:
        """Returns the state dict, or a part of it: a wrapper's contains that of its optimizer.

        Raises:
            MismatchError: it is of other groups.
        """
        children = children_of(node)
        if not isinstance(node, DictNode):
            return self._as_saved(node, at)
        if not isinstance(live, Mapping):
            live = {}
        if {"state", "param_groups"} <= children.keys() & live.keys() and isinstance(live["state"], Mapping):
            _check_groups(live, at, node)
            own = self._moments(children["state"], live["state"], f"{at}/state", self._by_number)
            return {
                key: own if key == "state" else self.state(child, live.get(key), f"{at}/{key_text(key)}")
                for key, child in children.items()
            }
        if children and all(type(key) is tuple and key in self._by_position for key in children):
            return self._moments(node, live, at, self._by_position)
        return {key: self.state(child, live.get(key), f"{at}/{key_text(key)}") for key, child in children.items()}

    def _moments(self, node: Structure, live: Any, at: str, parameters: Mapping[Any, Tensor]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, child in children_of(node).items():
            path = f"{at}/{key_text(key)}"
            if key in parameters and isinstance(child, DictNode):
                mine = live.get(key) if isinstance(live, Mapping) else None
                arrays = (p for p in leaves_below(path, child) if self._source.leaves[p] is not None)
                place = msgspec.structs.replace(self._place, was_spread=any(map(self._source.is_spread, arrays)))
                found[key] = build_state(
                    parameters[key], child, mine or {}, self._source, path=path, place=place, made=self._made
                )
            else:
                found[key] = self._as_saved(child, path)
        return found

    def _as_saved(self, node: Structure, at: str) -> Any:
        specs = ((p, self._source.leaves[p]) for p in leaves_below(at, node))
        leaves = (self._source.value(p) if spec is None else new_array(spec, p, None).leaf for p, spec in specs)
        return unflatten(node, leaves, resolve=resolve, build=build_tensor)


def _check_groups(live: Any, path: str, saved: Structure) -> None:
    """Refuses a state of other groups, before anything changes.

    Raises:
        MismatchError: of another number of groups, or of parameters in one, or with hyper-parameters of another class.
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
    here = {name for group in live["param_groups"] for name in group}
    foreign = sorted((torch_options() & {name for group in groups.values() for name in children_of(group)}) - here)
    if foreign:
        raise MismatchError(
            f"{path}/param_groups",
            expected="the hyper-parameters of the optimizer's class",
            found=f"{', '.join(foreign)} in the checkpoint too",
            hint="Make an optimizer of the class that was saved; treeckpt.training.restore with strict=False takes "
            "what both have",
        )


def _check_names(live: Any, path: str, saved: Structure, source: RestoreSource) -> None:
    """Refuses parameters in another order, where both sides name them (`named_parameters`): state goes by number.

    Raises:
        MismatchError: a parameter stands at another place than when it was saved.
    """
    groups = live.get("param_groups") if isinstance(live, Mapping) else None
    here = [name for group in groups or () for name in group.get("param_names", ())]
    there: list[Any] = []
    for key, group in children_of(descend(saved, ("param_groups",))).items():
        names = children_of(group).get("param_names")
        at = f"{path}/param_groups/{key_text(key)}/param_names"
        there += [source.value(p) for p in leaves_below(at, names)] if names is not None else []
    moved = next((n for n, name in zip(there, here, strict=False) if n != name and n in here), None)
    if moved is not None:
        raise MismatchError(
            f"{path}/param_groups",
            expected=f"the parameters in the order in which they were saved: {', '.join(map(str, there))[:200]}",
            found=f"{moved} at another place: {', '.join(map(str, here))[:200]}",
            hint="Make the optimizer of the parameters in that order; treeckpt.training matches them by name",
        )
