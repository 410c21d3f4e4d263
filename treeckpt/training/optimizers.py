"""The state of optimizers, keyed by the names of their parameters.

`name_optimizers` finds the names of an optimizer's parameters in the model, `trees_of` builds its two trees: `state`,
by parameter and moment, and its groups. A parameter without state is kept with an empty one, which differs from one
that is not the optimizer's. LBFGS joins all its parameters into one vector, so their order is saved too.

The state is that of `.state`; for an optimizer that changes `state_dict` or `load_state_dict`, by a method or a hook,
as wrappers do, it is the result of `state_dict()`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..arrays.dtensor import is_dtensor
from ..arrays.sharded import Sharded
from ..arrays.stateful import is_optimizer
from ..errors import TreeError
from .groups import ParamGroup, label_of, tree_of_groups
from .hyperparameters import is_same
from .modules import ModelEntries, named_objects
from .names import Key, key_path, put_in
from .own_moments import ParameterPart, is_spread, own_moments, with_own
from .state_dicts import STATE_DICT_KEY, ParameterNumbering, has_own_forms, split, standard_form

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


class NamedOptimizer(msgspec.Struct, dict=True):
    """A live optimizer, with names for its parameters."""

    prefix: Key
    optimizer: Any
    """The optimizer that has the groups."""
    stateful: Any
    """The optimizer that has the state: another one where this one is split over ranks."""
    groups: tuple[ParamGroup, ...]
    numbering: ParameterNumbering
    """The parameters whose state is here, in the order of the groups."""
    own: dict[Key, Mapping[Any, Any]]
    """The state of each parameter."""
    shared: dict[Any, Any]
    """State that belongs to no parameter."""
    shards: Mapping[int, tuple[Any, Any]]
    """(global shape, offset) of parameters that are shards of an array, by identity."""
    form: Any = None
    """The rest of the state dict, for an optimizer whose `state_dict` is used; None for those of torch."""

    @property
    def parameters(self) -> Mapping[Key, Tensor]:
        """Those whose state is here, in the order of the groups."""
        return self.numbering.parameters

    @property
    def innermost(self) -> Any:
        """The innermost optimizer, which creates the state of parameters; None if its wrappers add state."""
        inner = optimizer_chain(self.stateful)[-1]
        if self.form is not None and has_own_forms(self.form):
            return None
        theirs = {id(p) for group in inner.param_groups for p in group["params"]}
        return inner if theirs == set(map(id, self.parameters.values())) else None

    @cached_property
    def own_moments(self) -> frozenset[str]:
        """The names of the moments that each rank has of its own, see `training.own_moments`."""
        return own_moments(self.parameters, self.own, self.shards)

    def part(self, key: Key) -> ParameterPart:
        """Returns a parameter as this rank holds it, with its state."""
        parameter, innermost = self.parameters[key], type(self.innermost)
        return ParameterPart(
            parameter,
            self.shards.get(id(parameter)),
            self.own[key],
            self.own_moments,
            f"{innermost.__module__}.".startswith("torch.optim."),
        )

    def spread(self, key: Key, own: Mapping[Any, Any], own_moments: frozenset[str]) -> dict[Any, Any]:
        """The state of a parameter, where what has its shape is a part of an array if the parameter is.

        Args:
            own_moments: names of what each rank has of its own, if the parameter is spread.
        """
        parameter = self.parameters[key]
        shard = self.shards.get(id(parameter))
        if shard is not None:
            found = parameter.shape
            own = {k: Sharded(v, *shard) if isinstance(v, Tensor) and v.shape == found else v for k, v in own.items()}
        return with_own(own, own_moments) if own_moments and is_spread(parameter, shard) else dict(own)

    @property
    def label(self) -> str:
        """A name that other optimizers of the same prefix, with other parameters, do not have."""
        return self.numbering.labels[0] if self.numbering.labels else ""


def name_optimizers(optimizer: Optimizers | None, model: ModelEntries) -> list[NamedOptimizer]:
    """Returns the optimizers with names for their parameters.

    Raises:
        TreeError: a parameter that is not the model's.
    """
    if optimizer is None:
        return []
    lives: list[NamedOptimizer] = []
    for prefix, one in named_objects(optimizer, torch.optim.Optimizer, "optimizer"):
        lives.append(_name_one(prefix, one, model, len(groups_of(lives, prefix))))
    return lives


def _name_one(prefix: Key, optimizer: Any, model: ModelEntries, before: int) -> NamedOptimizer:
    ties = model.ties
    zero = (one for one in optimizer_chain(optimizer) if type(one).__name__ == "ZeroRedundancyOptimizer")
    stateful = next((one.optim for one in zero), optimizer)  # which has the parameters of this rank alone
    members = [
        tuple(_name_of(p, ties, f"param_groups/{position}") for p in group["params"])
        for position, group in enumerate(optimizer.param_groups)
    ]
    names = [tuple(_name_of(p, ties, "param_groups") for p in group["params"]) for group in stateful.param_groups]
    mine = [p for group in stateful.param_groups for p in group["params"]]
    parameters = dict(zip((key for group in names for key in group), mine, strict=True))
    groups = [
        ParamGroup(keys, {k: v for k, v in group.items() if k not in ("params", "param_names")})
        for keys, group in zip(members, optimizer.param_groups, strict=True)
    ]
    labels = [label_of(group, position) for position, group in enumerate(groups, before)]
    numbering = ParameterNumbering(names, labels, parameters)
    form, shared = None, {}
    if is_plain(stateful):
        own = {key: stateful.state.get(parameter, {}) for key, parameter in parameters.items()}
        shared = {key: value for key, value in stateful.state.items() if not isinstance(key, Tensor)}
    else:
        found = split(stateful.state_dict(), numbering)
        form, own, shared = found.form, found.own, found.shared or {}
        if found.values is not None and stateful is optimizer:
            groups = [ParamGroup(keys, values) for keys, values in zip(members, found.values, strict=True)]
    live = NamedOptimizer(prefix, optimizer, stateful, tuple(groups), numbering, dict(own), shared, model.shards, form)
    _check(live)
    return live


def is_plain(optimizer: Any) -> bool:
    """Whether `.state` and `.param_groups` are all of an optimizer's state: it does not change torch's own methods."""
    if not isinstance(optimizer, torch.optim.Optimizer) or _METHODS & vars(optimizer).keys():
        return False
    kind, base = type(optimizer), torch.optim.Optimizer
    return all(getattr(kind, name) is getattr(base, name) for name in _METHODS) and not any(
        getattr(optimizer, name, None) for name in _HOOKS
    )


_METHODS = {"state_dict", "load_state_dict"}
_HOOKS = tuple(f"_optimizer_{method}_{when}_hooks" for method in sorted(_METHODS) for when in ("pre", "post"))


def optimizer_chain(optimizer: Any) -> list[Any]:
    """Returns an optimizer and those that it wraps, from the outside in."""
    found = [optimizer]
    while not is_plain(found[-1]):
        attributes = getattr(found[-1], "__dict__", {}).values()
        inner = next((one for one in attributes if is_optimizer(one) and one not in found), None)
        if inner is None:
            break
        found.append(inner)
    return found


def _name_of(parameter: Tensor, ties: Mapping[int, tuple[Key, ...]], where: str) -> Key:
    names = ties.get(id(parameter))
    if names is None:
        raise TreeError(
            where,
            expected="parameters of the model that is given",
            found=f"a tensor of shape {tuple(parameter.shape)} that is none of them",
            hint="Give every module whose parameters the optimizer has. If the model was moved, materialised or "
            "sharded (fully_shard, parallelize_module) after the optimizer was made, make the optimizer after that",
        )
    return names[0]


def _check(live: NamedOptimizer) -> None:
    known = {id(parameter) for parameter in live.parameters.values()}
    for key in live.stateful.state if live.form is None else ():
        if isinstance(key, Tensor) and id(key) not in known:
            raise TreeError(
                "optimizer",
                expected="state of parameters in the optimizer's groups",
                found=f"state of a tensor of shape {tuple(key.shape)} that is in none",
                hint="Remove it from optimizer.state, or add the parameter to a group",
            )
    if is_lbfgs(live.stateful) and any(is_dtensor(parameter) for parameter in live.parameters.values()):
        raise TreeError(
            "optimizer",
            expected="whole parameters under LBFGS, which joins them into one vector",
            found="distributed ones, of which it joins the local parts",
            hint="No other layout can take this state up; train LBFGS with plain parameters",
        )


def is_lbfgs(optimizer: object) -> bool:
    """Whether an optimizer keeps one state for the vector of all its parameters."""
    return isinstance(optimizer_chain(optimizer)[-1], torch.optim.LBFGS)


def optimizer_names(lives: Sequence[NamedOptimizer]) -> list[Key]:
    """Returns the names of the optimizers, each once; `()` for a single one."""
    return list(dict.fromkeys(live.prefix for live in lives))


def groups_of(lives: Sequence[NamedOptimizer], prefix: Key) -> list[ParamGroup]:
    """Returns the groups of an optimizer, of all its parts."""
    return [group for live in lives if live.prefix == prefix for group in live.groups]


def trees_of(lives: Sequence[NamedOptimizer], left_out: Container[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (state, groups) of all optimizers, without the state of the parameters that are left out, by name."""
    state: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for live in lives:
        for key, own in live.own.items():
            if key_path(key) not in left_out:
                put_in(state, (*live.prefix, *key), live.spread(key, own, live.own_moments))
    for prefix in optimizer_names(lives):
        parts = [live for live in lives if live.prefix == prefix]
        tree: dict[str, Any] = {**tree_of_groups(groups_of(lives, prefix)), **_beside(parts)}
        order = [key_path(key) for live in parts if is_lbfgs(live.stateful) for key in live.parameters]
        if order:
            tree["order"] = order
        if prefix:
            put_in(groups, prefix, tree)
        else:
            groups = tree
    return state, groups


def _beside(parts: Sequence[NamedOptimizer]) -> dict[str, Any]:
    """Returns the state that belongs to no parameter: `shared` where all parts agree, else by part."""
    forms = {
        live.label: live.form for live in parts if live.form is not None and live.form != standard_form(live.shared)
    }
    if not forms and all(is_same(parts[0].shared, live.shared) for live in parts):
        return {"shared": parts[0].shared} if parts[0].shared else {}
    return {STATE_DICT_KEY: {live.label: forms.get(live.label, standard_form(live.shared)) for live in parts}}
