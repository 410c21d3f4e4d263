"""How does saved optimizer state meet the live optimizers: which parameter takes what, and which differences are there?

Parameters are matched by name, through any of the names that a tied one has. A parameter that trains here must be
known to the checkpoint; one that is frozen here need not. Nothing is changed before `apply_optimizers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from ..core.errors import MismatchError
from ..core.structure import Structure, key_text, paths_of
from ..core.walking import Walk, run
from ..leaves.common import dtype_name
from .groups import Group, Labels, labels_by_member, match_groups
from .moments import Place, build_state, expected_moments
from .names import Key, get_in, key_path, parse_key
from .optimizers import Live, groups_of, is_lbfgs, prefixes
from .sources import Source, children_of, descend
from .values import is_same, taken

__all__ = ["Differences", "OptimizerPlan", "apply_optimizers", "plan_optimizers"]


class Differences(msgspec.Struct):
    """Paths that are only wanted, only saved, or saved for nothing that trains here."""

    missing: list[str] = []
    unexpected: list[str] = []
    ignored: list[str] = []


class OptimizerPlan(msgspec.Struct):
    """What one live optimizer, or one part of it, takes."""

    prefix: Key
    live: Live
    of: Labels
    """As saved, under the names that the parameters have here."""
    values: list[dict[str, Any]]
    """What each live group takes."""
    saved: dict[Key, tuple[str, Structure]]
    """By live parameter: the path and the structure of its saved state."""
    places: dict[Key, Place]
    """By live parameter: how it was saved."""
    shared: dict[Any, Any]
    """State that belongs to no parameter."""
    moments: dict[Key, dict[Any, Any]] = {}
    """Once built: the state of each live parameter, to be filled."""

    def build_moments(self, source: Source) -> dict[Key, dict[Any, Any]]:
        """By saved key, the tensors to be filled; those that a fresh optimizer lacks are made."""
        found: dict[Key, dict[Any, Any]] = {}
        flags = {m: v for g, v in zip(self.live.groups, self.values, strict=True) for m in g.members}
        for key, (path, structure) in self.saved.items():
            parameter = self.live.parameters[key]
            group = flags.get(key, {})
            counts = bool(group.get("capturable") or group.get("fused"))
            place = msgspec.structs.replace(self.places[key], counts_on_device=counts)
            here = self.live.stateful.state.get(parameter, {})
            built = build_state(
                parameter,
                structure,
                here,
                path=path,
                leaves=source.leaves,
                value=source.value,
                is_spread=source.is_spread,
                place=place,
            )
            self.moments[key] = found[parse_key(path)[1:]] = built
        return found


def plan_optimizers(
    lives: Sequence[Live],
    ties: Mapping[int, tuple[Key, ...]],
    source: Source,
    *,
    keep: tuple[str, ...],
    frozen: frozenset[str],
) -> tuple[list[OptimizerPlan], Differences]:
    """What each optimizer takes, and what does not match.

    Args:
        keep: hyper-parameters that stay as they are here.
        frozen: names of parameters that do not train here: their saved state is of no use, if no optimizer has them.

    Raises:
        MismatchError: parameters that share a group here and had different hyper-parameters, or a state that depends
            on the order of parameters when that changed.
    """
    groups_tree, differences = source.part("param_groups"), Differences([], [], [])
    plans: list[OptimizerPlan] = []
    used: set[str] = set()
    for prefix in prefixes(lives):
        saved_groups = get_in(groups_tree, prefix, {})
        if "members" not in saved_groups or "values" not in saved_groups:
            raise MismatchError(
                key_path(("param_groups", *prefix)),
                expected="the groups of an optimizer",
                found=f"those of optimizers named {', '.join(map(repr, saved_groups))}" if saved_groups else "none",
                hint="Give as many optimizers, under the same names, as when this was saved; or, for what "
                "training.save has written, use training.load",
            )
        matcher = _Matcher(source, prefix, ties, saved_groups, differences)
        plans += [matcher.plan(live, keep) for live in lives if live.prefix == prefix]
        matcher.compare(groups_of(lives, prefix), frozen)
        used |= matcher.used
    saved = (path for path in source.leaves if path.startswith("optimizer/"))
    differences.unexpected += [path for path in saved if path not in used]
    return plans, differences


class _Matcher:
    """Matches the parameters of one optimizer with what was saved."""

    def __init__(
        self,
        source: Source,
        prefix: Key,
        ties: Mapping[int, tuple[Key, ...]],
        saved_groups: Mapping[str, Any],
        differences: Differences,
    ) -> None:
        self.source, self.prefix, self.differences = source, prefix, differences
        self.tied = {keys[0]: [key_path(key) for key in keys] for keys in ties.values()}
        self.saved_of = labels_by_member(saved_groups["members"])
        self.values: dict[str, dict[str, Any]] = saved_groups["values"]
        self.order, self.shared = saved_groups.get("order"), saved_groups.get("shared", {})
        self.path = key_path(("param_groups", *prefix))
        self.saved_keys = _keys_in(descend(source.structure, ("optimizer", *prefix)), self.saved_of)
        self.used: set[str] = set()
        """Saved leaves that are wanted, or known to be of no use."""

    def plan(self, live: Live, keep: tuple[str, ...]) -> OptimizerPlan:
        """What one optimizer takes."""
        of: dict[str, list[str]] = {}
        for key in (member for group in live.groups for member in group.members):
            if (name := self._saved_name(key)) is not None:
                of[key_path(key)] = self.saved_of[name]
        values = match_groups(live.groups, of, self.values, path=self.path, same=is_same, keep=keep)
        for group, found in zip(live.groups, values, strict=True):
            self._compare_values(group, found, of, keep)
        plan = OptimizerPlan(self.prefix, live, of, values, {}, {}, self.shared)
        for key, parameter in live.parameters.items():
            self._plan_parameter(plan, key, parameter)
        self._check_order(live)
        return plan

    def _saved_name(self, key: Key) -> str | None:
        """The name, of all that a parameter has here, under which the checkpoint's optimizer knew it."""
        known = [name for name in self.tied[key] if name in self.saved_of]
        if len(known) > 1:
            raise MismatchError(
                self._state_path(known[1]),
                expected=f"one parameter with {known[0]}, as in the model",
                found="two in the checkpoint, each with state of its own",
                hint="Untie the parameters",
            )
        return known[0] if known else None

    def _state_path(self, name: str) -> str:
        return f"{key_path(('optimizer', *self.prefix))}/{name}"

    def _compare_values(self, group: Group, found: Mapping[str, Any], of: Labels, keep: tuple[str, ...]) -> None:
        """Notes hyper-parameters that the checkpoint lacks; a group of new parameters is not at issue here."""
        if any(key_path(member) in of for member in group.members):
            lacking = [name for name in group.values if name not in found and name not in (*keep, "name")]
            self.differences.missing += [f"{self.path}/values/{name}" for name in lacking]

    def _plan_parameter(self, plan: OptimizerPlan, key: Key, parameter: Tensor) -> None:
        here = plan.live.stateful.state.get(parameter, {})
        name = self._saved_name(key)
        path = self._state_path(name or key_path(key))
        if name is None or name not in self.saved_keys:
            if parameter.requires_grad or here:
                self.differences.missing.append(path)
            return
        structure = self.saved_keys[name]
        self.used.update(_leaves_below(path, structure))
        plan.saved[key] = (path, structure)
        plan.places[key] = self._place_of(f"model/{name}", parameter)
        saved = set(children_of(structure))
        wanted = here if here or not saved else self._expected(plan, key, parameter)
        lacking = sorted((moment for moment in wanted if moment not in saved), key=str)
        self.differences.missing += [f"{path}/{key_text(moment)}" for moment in lacking]

    def _place_of(self, path: str, parameter: Tensor) -> Place:
        spec = self.source.leaves.get(path)
        if spec is None:
            return Place()
        dtypes = spec.dtype, dtype_name(parameter.dtype)
        return Place(spec.device is not None, was_spread=self.source.is_spread(path), dtypes=dtypes)

    def _expected(self, plan: OptimizerPlan, key: Key, parameter: Tensor) -> frozenset[Any]:
        for group, found in zip(plan.live.groups, plan.values, strict=True):
            if key in group.members:
                return expected_moments(plan.live.stateful, {**group.values, **found}, parameter)
        return frozenset()

    def _check_order(self, live: Live) -> None:
        order = [self._saved_name(key) for key in live.parameters]
        if is_lbfgs(live.stateful) and self.order is not None and order != list(self.order):
            raise MismatchError(
                f"{self.path}/order",
                expected="the parameters in the order in which they were saved, which is part of what LBFGS keeps",
                found=f"{', '.join(map(str, order))[:200]}",
                hint=f"Give the optimizer {', '.join(map(str, self.order))[:200]}",
            )

    def compare(self, groups: Sequence[Group], frozen: frozenset[str]) -> None:
        """Notes the parameters that only the checkpoint's optimizer has."""
        known = {name for group in groups for member in group.members for name in self.tied[member]}
        for name in sorted(self.saved_of):
            path, structure = self._state_path(name), self.saved_keys.get(name)
            below = set(_leaves_below(path, structure))
            if name in known:  # its state may be another rank's
                self.used |= below
            elif name in frozen:
                self.differences.ignored.append(path)
                self.used |= below
            elif not below:
                self.differences.unexpected.append(path)


def _leaves_below(path: str, structure: Structure) -> list[str]:
    return [f"{path}/{below}" if below else path for below, _ in paths_of(structure)] if structure is not None else []


def _keys_in(node: Structure, names: Labels) -> dict[str, Structure]:
    """The saved state of each parameter, by the path of its name."""
    found: dict[str, Structure] = {}

    def walk(node: Structure, prefix: Key) -> Walk[None]:
        for key, child in children_of(node).items():
            here = (*prefix, str(key))
            if key_path(here) in names:
                found[key_path(here)] = child
            else:
                yield walk(child, here)

    run(walk(node, ()))
    return found


def apply_optimizers(plans: Sequence[OptimizerPlan]) -> None:
    """Gives the optimizers their state and their groups the saved hyper-parameters."""
    for plan in plans:
        state = plan.live.stateful.state
        for key, moments in plan.moments.items():
            parameter = plan.live.parameters[key]
            if moments or parameter in state:
                state[parameter] = {**state.get(parameter, {}), **moments}
        state.update(plan.shared)
        for group, values in zip(plan.live.optimizer.param_groups, plan.values, strict=True):
            for name, value in values.items():
                group[name] = taken(group.get(name), value)
