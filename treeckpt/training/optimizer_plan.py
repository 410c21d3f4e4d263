"""The saved state that each live optimizer takes, and the differences between both.

Parameters are matched by name, through any of the names that a tied one has. A parameter that trains here must be
known to the checkpoint; one that is frozen here need not. Hyper-parameters and moments of other classes of
`torch.optim`, which the optimizer here does not have, are left out. Nothing is changed before `apply_optimizers`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from torch import Tensor

from ..arrays.plain_tensor import dtype_name
from ..arrays.stateful import object_states, plan_state
from ..core.tree.flatten import flatten
from ..core.tree.structure import DictNode, Structure, key_text
from ..errors import MismatchError
from .groups import (
    Labels,
    ParamGroup,
    common_value,
    empty_label,
    labels_by_member,
    match_empty_groups,
    match_groups,
    saved_labels,
)
from .hyperparameters import assign_value, is_same, separate_tensors, torch_options
from .moments import MomentPlacement, build_state, expected_moments, foreign_moments
from .names import Key, get_in, key_path, parse_key
from .optimizers import NamedOptimizer, groups_of, is_lbfgs, optimizer_names
from .sources import RestoreSource, children_of, descend, leaves_below, nodes_by_name
from .state_dicts import BY_GROUP, STATE_DICT_KEY, join, shared_of, split, standard_form


class Differences(msgspec.Struct):
    """Paths that only the live objects have, that only the checkpoint has, and of state without use here."""

    missing: list[str] = []
    unexpected: list[str] = []
    ignored: list[str] = []


class _SavedState(msgspec.Struct, frozen=True):
    """The saved state of one parameter."""

    path: str
    structure: Structure
    place: MomentPlacement


class OptimizerPlan(msgspec.Struct):
    """The saved state that one live optimizer, or one part of it, takes."""

    prefix: Key
    live: NamedOptimizer
    of: Labels
    """The saved labels, under the names that the parameters have here."""
    values: list[dict[str, Any]]
    """The values that each live group takes."""
    form: Any
    """The saved form of the state dict: its entries beside the state of parameters."""
    keep: tuple[str, ...]
    """Hyper-parameters that stay as they are."""
    saved: dict[Key, _SavedState] = {}
    """By live parameter."""
    moments: dict[Key, dict[Any, Any]] = {}
    """Once built: the state of each live parameter, to be filled."""

    def build_moments(self, source: RestoreSource) -> dict[Key, dict[Any, Any]]:
        """Returns the tensors to be filled, by saved key; creates those that a fresh optimizer lacks."""
        found, made = dict[Key, dict[Any, Any]](), dict[object, Tensor]()
        for key, saved in self.saved.items():
            parameter, own = self.live.parameters[key], self.live.own[key]
            built = build_state(parameter, saved.structure, own, source, path=saved.path, place=saved.place, made=made)
            self.moments[key] = built
            found[parse_key(saved.path)[1:]] = self.live.spread(key, built)
        return found


def plan_optimizers(
    lives: Sequence[NamedOptimizer],
    ties: Mapping[int, tuple[Key, ...]],
    source: RestoreSource,
    *,
    keep: tuple[str, ...],
    frozen: frozenset[str],
) -> tuple[list[OptimizerPlan], Differences]:
    """Returns the plan of each optimizer, and what does not match.

    Args:
        keep: hyper-parameters that stay as they are here.
        frozen: names of parameters that do not train here: their saved state is of no use, if no optimizer has them.

    Raises:
        MismatchError: parameters that share a group here and had different hyper-parameters, or a state that depends
            on the order of parameters when that changed.
    """
    groups_tree, differences = source.part("param_groups"), Differences()
    plans: list[OptimizerPlan] = []
    used: set[str] = set()
    for prefix in optimizer_names(lives):
        saved_groups = get_in(groups_tree, prefix, {})
        if "members" not in saved_groups or "values" not in saved_groups:
            raise MismatchError(
                key_path(("param_groups", *prefix)),
                expected="the groups of an optimizer",
                found=f"those of optimizers named {', '.join(map(repr, saved_groups))}" if saved_groups else "none",
                hint="Give as many optimizers, under the same names, as when this was saved; or, for what "
                "training.save has written, use training.load",
            )
        groups = groups_of(lives, prefix)
        matcher = _Matcher(source, prefix, ties, saved_groups, differences, groups)
        plans += [matcher.plan(live, keep) for live in lives if live.prefix == prefix]
        matcher.compare(groups, frozen)
        used |= matcher.used
    saved = (path for path in source.leaves if path.startswith("optimizer/"))
    differences.unexpected += [path for path in saved if path not in used]
    return plans, differences


class _Matcher:
    """Matches the parameters of one optimizer with what was saved."""

    def __init__(
        self,
        source: RestoreSource,
        prefix: Key,
        ties: Mapping[int, tuple[Key, ...]],
        saved_groups: Mapping[str, Any],
        differences: Differences,
        groups: Sequence[ParamGroup],
    ) -> None:
        self.source, self.prefix, self.differences = source, prefix, differences
        self.tied = {keys[0]: [key_path(key) for key in keys] for keys in ties.values()}
        self.saved_of = labels_by_member(saved_groups["members"])
        self.values: dict[str, dict[str, Any]] = saved_groups["values"]
        self.members, self.order = saved_groups["members"], saved_groups.get("order")
        self.shared, self.forms = saved_groups.get("shared", {}), saved_groups.get(STATE_DICT_KEY, {})
        self.empty = match_empty_groups(groups, self.members)
        self.position = 0
        """Of the next live group among those of all parts."""
        self.path = key_path(("param_groups", *prefix))
        found = nodes_by_name(descend(source.structure, ("optimizer", *prefix)), self.saved_of)
        self.saved_keys = {name: node for name, node in found.items() if node is not None}
        self.names: dict[Key, list[str]] = {}
        """Those found so far of the live parameters."""
        self.used: set[str] = set()
        """Saved leaves that are wanted, or known to be of no use."""
        self.expected: dict[object, frozenset[Any] | None] = {}
        """For the present optimizer: the moments of parameters of one group, number of dimensions and dtype."""

    def plan(self, live: NamedOptimizer, keep: tuple[str, ...]) -> OptimizerPlan:
        """Returns the plan of one optimizer."""
        of: dict[str, list[str]] = {}
        for key in (member for group in live.groups for member in group.members):
            if names := self._saved_names(key):
                of[key_path(key)] = list(dict.fromkeys(label for name in names for label in self.saved_of[name]))
        for here in range(len(live.groups)):
            if (label := self.empty.get(self.position + here)) is not None:
                of[empty_label(here)] = [label]
        self.position += len(live.groups)
        values = match_groups(live.groups, of, self.values, path=self.path, keep=keep)
        settings: dict[Key, dict[str, Any]] = {}
        for position, (group, found) in enumerate(zip(live.groups, values, strict=True)):
            if saved_labels(group, position, of):
                lacking = [name for name in group.values if name not in found and name not in (*keep, "name")]
                self.differences.missing += [f"{self.path}/values/{name}" for name in lacking]
            for name in [name for name in found if name not in group.values and name in torch_options()]:
                del found[name]
                if (at := f"{self.path}/values/{name}") not in self.differences.unexpected:
                    self.differences.unexpected.append(at)
            plan_state(f"{self.path}/values", None, found, live=group.values)
            merged = {**group.values, **found}
            settings.update((member, merged) for member in group.members)
        plan = OptimizerPlan(self.prefix, live, of, values, self._form_of(live, of), keep)
        innermost = live.innermost
        self.expected.clear()
        for key in live.parameters:
            self._plan_parameter(plan, key, settings.get(key), innermost)
        self._check_order(live)
        return plan

    def _form_of(self, live: NamedOptimizer, of: Labels) -> Any:
        """Returns the form that the live optimizer's state dict is to have.

        Raises:
            MismatchError: its parameters were trained by several optimizers, whose forms differed.
        """
        named = dict.fromkeys(label for labels in of.values() for label in labels if label in self.forms)
        labels = list(named or self.forms)
        path = f"{self.path}/{STATE_DICT_KEY}"
        found = [((label,), self.forms[label]) for label in labels] or [(("",), standard_form(self.shared))]
        form = common_value(found, path)
        plan_state(path, None, form, live=live.form)
        if not isinstance(form, dict) or not isinstance(live.form, dict | None):
            return form
        if live.form is None:
            more = [key for key in form if key not in standard_form()]
            self.differences.unexpected += [f"{path}/{key_text(key)}" for key in more]
            return form
        lacking = [key for key in live.form if key not in form]
        self.differences.missing += [f"{path}/{key_text(key)}" for key in lacking]
        return {**{key: live.form[key] for key in lacking}, **form}

    def _saved_names(self, key: Key) -> list[str]:
        """Returns the names under which the checkpoint has the state of a parameter, which is the same under each.

        They are those of its names here; if there are none, of the same array: a stage may have one of a tied one's.
        """
        if key in self.names:
            return self.names[key]
        known = [name for name in self.tied[key] if name in self.saved_of]
        for other in known[1:]:
            if not self._is_same_state(known[0], other):
                raise MismatchError(
                    self._state_path(other),
                    expected=f"one parameter with {known[0]}, as in the model",
                    found="two in the checkpoint, with states that differ",
                    hint="Untie the parameters",
                )
        if not known:
            there = [path for name in self.tied[key] if (path := f"model/{name}") in self.source.leaves]
            arrays = dict.fromkeys(map(self.source.identity, there))
            known = [name for one in arrays if one is not None for name in self._other_names.pop(one, ())]
        return self.names.setdefault(key, known)

    @cached_property
    def _other_names(self) -> dict[Any, list[str]]:
        """The parameters with state that no live one has the name of or has taken, by the identity of their arrays."""
        found: dict[Any, list[str]] = {}
        live = {name for names in self.tied.values() for name in names}
        for name, path in ((name, f"model/{name}") for name in self.saved_of if name not in live):
            if path in self.source.leaves:
                found.setdefault(self.source.identity(path), []).append(name)
        return found

    def _is_same_state(self, first: str, second: str) -> bool:
        """Whether the checkpoint has the same state for two parameters."""
        structure = self.saved_keys.get(first)
        ends = (leaves_below(self._state_path(name), structure) if structure else [] for name in (first, second))
        alike = structure == self.saved_keys.get(second)
        return alike and all(self._is_same_leaf(*pair) for pair in zip(*ends, strict=True))

    def _is_same_leaf(self, first: str, second: str) -> bool:
        a, b = self.source.leaves[first], self.source.leaves[second]
        if a is None or b is None:
            return a is b and is_same(self.source.value(first), self.source.value(second))
        return (a.shape, a.dtype) == (b.shape, b.dtype) and self.source.are_equal((first, second), a)

    def _state_path(self, name: str) -> str:
        return f"{key_path(('optimizer', *self.prefix))}/{name}"

    def _plan_parameter(self, plan: OptimizerPlan, key: Key, settings: dict[str, Any] | None, innermost: Any) -> None:
        """Plans the state of one parameter.

        Args:
            settings: the values that its group will have; None for a parameter of no group.
            innermost: the optimizer that creates its state, if that is known.
        """
        live, parameter = plan.live, plan.live.parameters[key]
        here, name = live.own[key], next(iter(self._saved_names(key)), None)
        path = self._state_path(name or key_path(key))
        if name is None or name not in self.saved_keys:
            if parameter.requires_grad or here:
                self.differences.missing.append(path)
            return
        structure = self.saved_keys[name]
        saved, expected = set(children_of(structure)), None
        if innermost is not None and settings:
            expected = self._expected(innermost, settings, parameter)
        foreign = foreign_moments(innermost, saved - here.keys(), expected)
        left = self.differences.ignored if plan.keep else self.differences.unexpected
        left += [f"{path}/{key_text(moment)}" for moment in sorted(foreign)]
        self.used.update(leaves_below(path, structure))
        # what another kind of optimizer kept has no place here
        structure = _without(structure, foreign if live.form is not None else {*foreign, STATE_DICT_KEY})
        counts = settings is not None and bool(settings.get("capturable") or settings.get("fused"))
        place = MomentPlacement(counts_on_device=counts, whole_shape=live.shards.get(id(parameter), ((), ()))[0])
        if (spec := self.source.leaves.get(f"model/{name}")) is not None:
            place = msgspec.structs.replace(
                place,
                was_on_device=spec.device is not None,
                was_spread=self.source.is_spread(f"model/{name}"),
                dtypes=(spec.dtype, dtype_name(parameter.dtype)),
            )
        plan.saved[key] = _SavedState(path, structure, place)
        wanted = here or (expected if saved and expected else ())
        lacking = sorted((moment for moment in wanted if moment not in saved), key=str)
        self.differences.missing += [f"{path}/{key_text(moment)}" for moment in lacking]

    def _expected(self, optimizer: Any, settings: dict[str, Any], parameter: Tensor) -> frozenset[Any] | None:
        kind = id(settings), parameter.ndim, parameter.dtype
        if kind not in self.expected:
            self.expected[kind] = expected_moments(optimizer, settings, parameter)
        return self.expected[kind]

    def _check_order(self, live: NamedOptimizer) -> None:
        if self.order is None or not is_lbfgs(live.stateful):
            return
        order = [next(iter(self._saved_names(key)), None) for key in live.parameters]
        if order != list(self.order):
            raise MismatchError(
                f"{self.path}/order",
                expected="the parameters in the order in which they were saved, which is part of what LBFGS keeps",
                found=f"{', '.join(map(str, order))[:200]}",
                hint=f"Give the optimizer {', '.join(map(str, self.order))[:200]}",
            )

    def compare(self, groups: Sequence[ParamGroup], frozen: frozenset[str]) -> None:
        """Notes the parameters and the groups without any that only the checkpoint's optimizer has."""
        left = [label for label, names in self.members.items() if not names and label not in self.empty.values()]
        self.differences.ignored += [f"{self.path}/values/{key_text(label)}" for label in left]
        known = {name for group in groups for member in group.members for name in self.tied[member]}
        for name in sorted(self.saved_of):
            path = self._state_path(name)
            below = set(leaves_below(path, self.saved_keys[name]) if name in self.saved_keys else ())
            if name in known:  # its state may be another rank's
                self.used |= below
            elif name in frozen:
                self.differences.ignored.append(path)
                self.used |= below
            elif not below:
                self.differences.unexpected.append(path)


def _without(node: Structure, keys: Container[Any]) -> Structure:
    """Returns a structure without some of its children."""
    if not isinstance(node, DictNode):
        return node
    kept = [number for number, name in enumerate(children_of(node)) if name not in keys]
    return DictNode(tuple(node.keys[n] for n in kept), tuple(node.children[n] for n in kept))


def apply_optimizers(plans: Sequence[OptimizerPlan]) -> list[str]:
    """Loads state and hyper-parameters into the optimizers; returns the paths that they did not take."""
    left: list[str] = []
    for plan in plans:  # objects in groups take their states, and stay
        pairs = zip(plan.values, plan.live.groups, strict=True)
        plan.values = [plan_state("param_groups", None, new, live=group.values).loaded() for new, group in pairs]
    separate_tensors(
        [pair for plan in plans for pair in zip(plan.live.optimizer.param_groups, plan.values, strict=True)]
    )
    for plan in plans:
        if plan.live.form is None:
            _apply_plain(plan)
        else:
            _load_state_dict(plan)
            left += [key_path(("param_groups", *plan.prefix, STATE_DICT_KEY)) + f"/{path}" for path in _not_taken(plan)]
    return left


def _not_taken(plan: OptimizerPlan) -> list[str]:
    """Returns the paths of the form that the optimizer's state dict lacks, or has with another value."""
    live = plan.live
    form = split(live.stateful.state_dict(), live.numbering).form
    here = dict(flatten(object_states(form, "param_groups"))[1])
    given = [(path, leaf) for path, leaf in flatten(plan.form)[1] if f"/{BY_GROUP}/" not in path]
    return [path for path, leaf in given if path not in here or not is_same(leaf, here[path])]


def _apply_plain(plan: OptimizerPlan) -> None:
    optimizer = plan.live.stateful
    for key, moments in plan.moments.items():
        parameter = plan.live.parameters[key]
        if moments or parameter in optimizer.state:
            optimizer.state[parameter] = {**optimizer.state.get(parameter, {}), **moments}
    optimizer.state.update(shared_of(plan.form, plan.live.numbering, plan.live.shared))
    for group, values in zip(plan.live.optimizer.param_groups, plan.values, strict=True):
        for name, value in values.items():
            group[name] = assign_value(group.get(name), value)
    own_code = not type(optimizer).__setstate__.__module__.startswith("torch.optim.")
    if own_code or any(_counts_in_numbers(moments) for moments in plan.moments.values()):
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _counts_in_numbers(moments: Mapping[Any, Any]) -> bool:
    """Whether steps are counted as before torch 1.12, which the classes of torch convert in `__setstate__`."""
    return any(isinstance(moments.get(name), (int, float)) for name in ("step", "mu_product", "eta", "mu"))


def _load_state_dict(plan: OptimizerPlan) -> None:
    """Loads an optimizer's state by its own `load_state_dict`."""
    live = plan.live
    own = {key: {**here, **plan.moments.get(key, {})} for key, here in live.own.items()}
    ours = [{**group.values, **values} for group, values in zip(live.groups, plan.values, strict=True)]

    def grouped(values: Mapping[str, Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
        if values is None:
            return ours
        path = key_path(("param_groups", *plan.prefix))
        found = match_groups(live.groups, plan.of, values, path=path, keep=plan.keep)
        return [{**group.values, **mine} for group, mine in zip(live.groups, found, strict=True)]

    before = [dict(group) for group in live.stateful.param_groups]
    state = join(plan.form, live.numbering, own, grouped, live.form)
    plan_state(key_path(("optimizer", *plan.prefix)), live.stateful, state).load()
    for group, held in zip(live.stateful.param_groups, before, strict=True):
        for name, value in held.items():
            if isinstance(value, Tensor) and name in group:  # compiled code may hold it: it stays the same object
                group[name] = assign_value(value, group[name])
