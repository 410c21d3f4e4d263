"""What does an optimizer hold, by the names of its parameters?

`survey` finds the names of an optimizer's parameters in the model, `tree_of` makes the two trees of it: `state`, by
parameter and moment, and its groups. A parameter without state is there with none, so that it can be told from one
that was never the optimizer's. LBFGS joins all its parameters into one vector: their order is stored with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..core.errors import TreeError
from ..leaves.dtensor import is_dtensor
from .groups import Group, tree_of_groups
from .modules import named
from .names import Key, key_path, put_in

__all__ = ["Live", "Optimizers", "groups_of", "is_lbfgs", "prefixes", "survey", "trees_of"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


class Live(msgspec.Struct):
    """A live optimizer, with names for its parameters."""

    prefix: Key
    optimizer: Any
    """What has the groups."""
    stateful: Any
    """What has the state: another optimizer where this one is split over ranks."""
    groups: tuple[Group, ...]
    parameters: dict[Key, Tensor]
    """Those whose state is here, in the order of the groups."""


def survey(optimizer: Optimizers | None, ties: Mapping[int, tuple[Key, ...]]) -> list[Live]:
    """The optimizers, with names for their parameters.

    Args:
        ties: the names of each parameter of the model, by identity.

    Raises:
        TreeError: a parameter that is not the model's.
    """
    if optimizer is None:
        return []
    return [_survey_one(prefix, one, ties) for prefix, one in named(optimizer, torch.optim.Optimizer, "optimizer")]


def _survey_one(prefix: Key, optimizer: Any, ties: Mapping[int, tuple[Key, ...]]) -> Live:
    groups: list[Group] = []
    for position, group in enumerate(optimizer.param_groups):
        members = tuple(_name_of(p, ties, f"param_groups/{position}") for p in group["params"])
        values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(Group(members, values))
    inner = optimizer
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        inner = optimizer.optim  # of the parameters that fell to this rank
    mine = [p for group in inner.param_groups for p in group["params"]]
    parameters = {_name_of(p, ties, "param_groups"): p for p in mine}
    live = Live(prefix, optimizer, inner, tuple(groups), parameters)
    _check(live)
    return live


def _name_of(parameter: Tensor, ties: Mapping[int, tuple[Key, ...]], where: str) -> Key:
    names = ties.get(id(parameter))
    if names is None:
        raise TreeError(
            where,
            expected="parameters of the model that is given",
            found=f"a tensor of shape {tuple(parameter.shape)} that is none of them",
            hint="Give every module whose parameters the optimizer has; if the model was moved or materialised after "
            "the optimizer was made, make the optimizer anew",
        )
    return names[0]


def _check(live: Live) -> None:
    known = {id(parameter) for parameter in live.parameters.values()}
    for key in live.stateful.state:
        if isinstance(key, Tensor) and id(key) not in known:
            raise TreeError(
                "optimizer",
                expected="state of parameters in the optimizer's groups",
                found=f"state of a tensor of shape {tuple(key.shape)} that is in none",
                hint="Remove it from optimizer.state, or add the parameter to a group",
            )
    for key, parameter in live.parameters.items():
        for name, moment in live.stateful.state.get(parameter, {}).items():
            if _is_local_part(moment, parameter):
                raise TreeError(
                    key_path(("optimizer", *live.prefix, *key, str(name))),
                    expected=f"a distributed tensor, as its parameter is, or one of shape {tuple(parameter.shape)}",
                    found=f"a plain one of shape {tuple(moment.shape)}, which is that of this rank's part",
                    hint="Ranks that hold different parts would be taken for replicas: have the optimizer keep "
                    "DTensor.from_local(moment, parameter.device_mesh, parameter.placements)",
                )
    if is_lbfgs(live.stateful) and any(is_dtensor(parameter) for parameter in live.parameters.values()):
        raise TreeError(
            "optimizer",
            expected="whole parameters under LBFGS, which joins them into one vector",
            found="distributed ones, of which it joins the local parts",
            hint="No other layout can take this state up; train LBFGS with plain parameters",
        )


def _is_local_part(moment: object, parameter: Any) -> bool:
    """Whether a plain tensor stands beside the local part of a parameter, not beside all of it."""
    if not is_dtensor(parameter) or not isinstance(moment, Tensor) or is_dtensor(moment) or moment.numel() < 2:
        return False
    return moment.shape == parameter._local_tensor.shape != parameter.shape


def is_lbfgs(optimizer: object) -> bool:
    """Whether an optimizer keeps one state for the vector of all its parameters."""
    return isinstance(optimizer, torch.optim.LBFGS)


def prefixes(lives: Sequence[Live]) -> list[Key]:
    """The names of the optimizers, each once; `()` for a single one."""
    return list(dict.fromkeys(live.prefix for live in lives))


def groups_of(lives: Sequence[Live], prefix: Key) -> list[Group]:
    """The groups of an optimizer, of all its parts."""
    return [group for live in lives if live.prefix == prefix for group in live.groups]


def trees_of(lives: Sequence[Live]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, groups) of all optimizers."""
    state: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for live in lives:
        for key, parameter in live.parameters.items():
            put_in(state, (*live.prefix, *key), dict(live.stateful.state.get(parameter, {})))
    for prefix in prefixes(lives):
        tree: dict[str, Any] = tree_of_groups(groups_of(lives, prefix))
        shared = {
            key: value
            for live in lives
            if live.prefix == prefix
            for key, value in live.stateful.state.items()
            if not isinstance(key, Tensor)
        }
        if shared:
            tree["shared"] = shared
        order = [
            key_path(k) for live in lives if live.prefix == prefix and is_lbfgs(live.stateful) for k in live.parameters
        ]
        if order:
            tree["order"] = order
        if prefix:
            put_in(groups, prefix, tree)
        else:
            groups = tree
    return state, groups
