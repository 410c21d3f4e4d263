"""The saved state that each live optimizer takes, and the differences between both.

Parameters are matched by name, through any of the names that a tied one has. A parameter that trains here must be
known to the checkpoint; one that is frozen here need not. Hyper-parameters and moments of other classes of
`torch.optim`, which the optimizer here does not have, are left out. A parameter whose weight is taken and of which the
checkpoint has no state, as before its first gradient, has none afterwards. A state that is there has to be complete.
Nothing is changed before `apply_optimizers`.

`taken_options` names the options that were others here, of what a training does not change by itself. Of param groups,
these are the constructor's arguments but `lr`; `momentum`, `betas` and `weight_decay` count among them unless a
scheduler changes them: one of torch that cycles the momentum, one that noted the first value as `initial_<name>`, or
one with a `step` that is not torch's. Of torch's schedulers, these are the constructor's arguments but `last_epoch`; of
others it is not known which they change.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from torch import Tensor

from .._arrays.stateful import object_states, plan_state
from .._arrays.torch import dtype_name
from .._core.tree.flatten import flatten
from .._core.tree.leaf_differences import some_of
from .._core.tree.structure import DictNode, Structure, key_text
from ..errors import MismatchError
from ._groups import (
    BY_SCHEDULERS,
    Labels,
    ParamGroup,
    assign_value,
    common_value,
    empty_label,
    is_same,
    labels_by_member,
    match_empty_groups,
    match_groups,
    saved_labels,
    separate_tensors,
    torch_options,
)
from ._modules import Key, get_in, key_path, parse_key
from ._moments import MomentPlacement, build_state, expected_moments, foreign_moments
from ._optimizers import (
    BY_GROUP,
    STATE_DICT_KEY,
    NamedOptimizer,
    check_own,
    groups_of,
    is_lbfgs,
    join,
    optimizer_chain,
    optimizer_names,
    options_of,
    param_groups_of,
    shared_of,
    split,
    standard_form,
    without_own,
)
from ._sources import RestoreSource, children_of, descend, leaves_below, nodes_by_name

_log = logging.getLogger("treeckpt")
_LATER = (
    "Steps after the save have made it, or it was given here and not when this was saved. Restore into a fresh "
    "optimizer, as it was made then; strict=False leaves what is here"
)


class Differences(msgspec.Struct):
    """Paths that only the live objects have, that only the checkpoint has, and of state without use here."""

    missing: list[str] = []
    unexpected: list[str] = []
    ignored: list[str] = []
    frozen: list[str] = []
    """The paths among `ignored` that are moments of parameters that are frozen here."""
    cleared: list[str] = []
    """State here that the checkpoint has none of, and that is gone afterwards."""
    reasons: dict[str, str] = {}
    """Why only one side has a path, and what to do, where that is known."""


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
    dropped: list[frozenset[str]] = []
    """The entries that steps have added to each live group, of which the checkpoint is from before."""
    saved: dict[Key, _SavedState] = {}
    """The saved state that each live parameter takes."""
    cleared: dict[tuple[Key, str], str] = {}
    """The paths of state here that is to be none afterwards, by parameter and place in the state dict."""
    kept: dict[Key, dict[Any, Any]] = {}
    """The part of the state of each live parameter that stays."""
    moments: dict[Key, dict[Any, Any]] = {}
    """Once built: the state of each live parameter, to be filled."""

    def state_of(self, key: Key) -> dict[Any, Any]:
        """Returns the state that a live parameter has afterwards."""
        return _merged(self.kept.get(key, {}), self.moments.get(key, {}))

    def values_of(self, taken: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the hyper-parameters that each live group has afterwards.

        Args:
            taken: the saved ones that each takes.
        """
        groups = zip(self.live.groups, taken, self.dropped, strict=True)
        return [
            {k: v for k, v in {**group.values, **mine}.items() if k not in dropped} for group, mine, dropped in groups
        ]

    def build_moments(self, source: RestoreSource) -> dict[Key, dict[Any, Any]]:
        """Returns the tensors to be filled, by saved key; creates those that a fresh optimizer lacks."""
        moments, made = dict[Key, dict[Any, Any]](), dict[object, Tensor]()
        for key, saved in self.saved.items():
            parameter, own = self.live.parameters[key], self.live.own[key]
            built = build_state(parameter, saved.structure, own, source, path=saved.path, place=saved.place, made=made)
            self.moments[key] = built
            moments[parse_key(saved.path)[1:]] = self.live.spread(key, built, saved.place.own)
        return moments


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
    left = [path for path in source.leaves if path.startswith("optimizer/") and path not in used]
    differences.unexpected += left
    for name in () if "members" in groups_tree else groups_tree.keys() - {live.prefix[0] for live in lives}:
        why = f"The optimizer {name!r} was saved, and is not given. Give it, or pass strict='missing', which leaves it"
        differences.reasons |= {path: why for path in left if path.startswith(f"optimizer/{key_text(name)}/")}
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
        self.of_model = ties.keys()
        self.tied = {keys[0]: [key_path(key) for key in keys] for keys in ties.values()}
        self.saved_of = labels_by_member(saved_groups["members"])
        self.values: dict[str, dict[str, Any]] = saved_groups["values"]
        self.members, self.order = saved_groups["members"], saved_groups.get("order")
        self.shared, self.forms = saved_groups.get("shared", {}), saved_groups.get(STATE_DICT_KEY, {})
        self.empty = match_empty_groups(groups, self.members)
        self.position = 0
        """The position of the next live group among those of all parts."""
        self.path = key_path(("param_groups", *prefix))
        nodes = nodes_by_name(descend(source.structure, ("optimizer", *prefix)), self.saved_of)
        self.saved_keys = {name: node for name, node in nodes.items() if node is not None}
        self.names: dict[Key, list[str]] = {}
        """The saved names that were found so far of live parameters."""
        self.used: set[str] = set()
        """Saved leaves that are wanted, or known to be of no use."""
        self.stays: tuple[str, ...] = ()
        """How the places in the state dict of the present optimizer begin that stay as they are."""
        self.expected: dict[object, frozenset[Any] | None] = {}
        """The moments that the present optimizer makes for parameters of one group, number of dimensions and dtype."""

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
        plan = OptimizerPlan(self.prefix, live, of, values, self._form_of(live, of), keep)
        self._plan_groups(plan)
        settings = {
            key: merged
            for group, merged in zip(live.groups, plan.values_of(values), strict=True)
            for key in group.members
        }
        innermost = live.innermost
        self.expected.clear()
        for key in live.parameters:
            self._plan_parameter(plan, key, settings.get(key), innermost)
        if live.form is None:
            lost = live.shared.keys() - shared_of(plan.form, live.numbering, live.shared).keys()
            self.differences.cleared += [f"{self.path}/shared/{key_text(key)}" for key in sorted(lost, key=str)]
        self._check_order(live)
        return plan

    def _plan_groups(self, plan: OptimizerPlan) -> None:
        """Compares the hyper-parameters of each group, and finds those that its steps have added."""
        live = plan.live
        options = BY_SCHEDULERS | options_of(live.optimizer) | {*optimizer_chain(live.optimizer)[-1].defaults}
        for position, (group, saved) in enumerate(zip(live.groups, plan.values, strict=True)):
            dropped = frozenset[str]()
            if saved_labels(group, position, plan.of):
                lacking = [name for name in group.values if name not in saved and name not in (*plan.keep, "name")]
                if lacking and any(self._is_later(live, key) for key in group.members):
                    dropped = frozenset(lacking) - options
                self.differences.cleared += [f"{self.path}/values/{name}" for name in lacking if name in dropped]
                paths = {name: f"{self.path}/values/{name}" for name in lacking if name not in dropped}
                self.differences.missing += paths.values()
                self.differences.reasons |= {path: _LATER for name, path in paths.items() if name not in options}
            plan.dropped.append(dropped)
            for name in [name for name in saved if name not in group.values and name in torch_options()]:
                del saved[name]
                if (value_path := f"{self.path}/values/{name}") not in self.differences.unexpected:
                    self.differences.unexpected.append(value_path)
            plan_state(f"{self.path}/values", None, saved, live=group.values)

    def _is_later(self, live: NamedOptimizer, key: Key) -> bool:
        """Whether a parameter has state here, at some place of the state dict, and the checkpoint has none there."""
        state: Any = getattr(optimizer_chain(live.stateful)[-1], "state", {})
        name = next(iter(self._saved_names(key)), None)
        if name is None or key not in live.parameters or not (live.own[key] or live.parameters[key] in state):
            return False
        saved = _saved_places(self.saved_keys.get(name))
        here = [place for place, moments in _live_places(live.own[key]).items() if moments]
        return any(not saved.get(place) for place in here) if here else not any(saved.values())

    def _form_of(self, live: NamedOptimizer, of: Labels) -> Any:
        """Returns the form that the live optimizer's state dict is to have.

        Raises:
            MismatchError: its parameters were trained by several optimizers, whose forms differed.
        """
        named = dict.fromkeys(label for labels in of.values() for label in labels if label in self.forms)
        labels = list(named or self.forms)
        path = f"{self.path}/{STATE_DICT_KEY}"
        forms = [((label,), self.forms[label]) for label in labels] or [(("",), standard_form(self.shared))]
        form = common_value(forms, path)
        plan_state(path, None, form, live=live.form)
        self.stays = ()
        if not isinstance(form, dict) or not isinstance(live.form, dict | None):
            return form
        if live.form is None:
            more = [key for key in form if key not in standard_form()]
            self.differences.unexpected += [f"{path}/{key_text(key)}" for key in more]
            return form
        lacking = [key for key in live.form if key not in form]
        self.stays = tuple(f"{key}." for key in lacking)
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
            known = [name for array in arrays if array is not None for name in self._other_names.pop(array, ())]
        return self.names.setdefault(key, known)

    @cached_property
    def _other_names(self) -> dict[Any, list[str]]:
        """The parameters with state that no live one has the name of or has taken, by the identity of their arrays."""
        names_by_array: dict[Any, list[str]] = {}
        live = {name for names in self.tied.values() for name in names}
        for name, path in ((name, f"model/{name}") for name in self.saved_of if name not in live):
            if path in self.source.leaves:
                names_by_array.setdefault(self.source.identity(path), []).append(name)
        return names_by_array

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
            is_filled = any(f"model/{tied}" in self.source.leaves for tied in self.tied[key])
            if is_filled and name is None:
                self.differences.reasons[path] = (
                    f"{key_path(key)} was not in the optimizer when this was saved, as it was frozen or added later. "
                    "Add it after the restore, or pass strict=False: its state begins anew"
                )
            plan.kept[key] = {} if is_filled else dict(here)
            self.differences.cleared += [path] if is_filled and here else []
            return
        structure = self.saved_keys[name]
        places = _saved_places(structure)
        saved, expected = set(children_of(structure)), None
        if innermost is not None and settings:
            expected = self._expected(innermost, settings, parameter)
        foreign = foreign_moments(innermost, saved - here.keys(), expected)
        left = self.differences.ignored if plan.keep else self.differences.unexpected
        left += [f"{path}/{key_text(moment)}" for moment in sorted(foreign)]
        self.used.update(leaves_below(path, structure))
        # what another kind of optimizer kept has no place here
        structure = _without(structure, foreign if live.form is not None else {*foreign, STATE_DICT_KEY})
        weight = f"model/{name}"
        place = MomentPlacement(
            counts_on_device=settings is not None and bool(settings.get("capturable") or settings.get("fused")),
            whole_shape=live.shards.get(id(parameter), ((), ()))[0],
            own=check_own(live, key, self.source, (path, weight), structure),
        )
        if (spec := self.source.leaves.get(weight)) is not None:
            place = msgspec.structs.replace(
                place,
                was_on_device=spec.device is not None,
                was_ordered=spec.order is not None,
                was_spread=self.source.is_spread(weight),
                dtypes=(spec.dtype, dtype_name(parameter.dtype)) if id(parameter) in self.of_model else ("", ""),
            )
        plan.saved[key] = _SavedState(path, without_own(structure), place)
        plan.kept[key] = self._kept(plan, key, places, expected or ())

    def _kept(
        self, plan: OptimizerPlan, key: Key, saved: Mapping[str, Mapping[Any, Any]], expected: Collection[Any]
    ) -> dict[Any, Any]:
        """Returns the part of the live state of a parameter that stays, as it is missing in the checkpoint.

        Of a place where the checkpoint has nothing of the parameter none stays, unless the place itself is missing.

        Args:
            saved: the saved moments by place.
            expected: the moments that the first step creates.
        """
        kept: dict[Any, Any] = {}
        path = plan.saved[key].path
        for place, mine in _live_places(plan.live.own[key]).items():
            base = f"{path}/{STATE_DICT_KEY}/{key_text(place)}" if place else path
            theirs = saved.get(place, {})
            if not theirs and not f"{place}.".startswith(self.stays):
                if mine:
                    self.differences.cleared.append(base)
                    plan.cleared[key, place] = base
                continue
            wanted = mine or (expected if not place else ())
            lacking = sorted((moment for moment in wanted if moment not in theirs), key=str)
            paths = {moment: f"{base}/{key_text(moment)}" if moment != "" else base for moment in lacking}
            self.differences.missing += paths.values()
            if all(moment in expected for moment in theirs):
                why = "A part of this state was not saved, or an option in keep= was off. strict=False takes the rest"
                self.differences.reasons |= dict.fromkeys(paths.values(), why)
            self.differences.reasons |= {
                paths[moment]: _LATER for moment in lacking if moment in mine and moment not in expected
            }
            stay = {moment: mine[moment] for moment in lacking if moment in mine}
            if place and stay:
                kept.setdefault(STATE_DICT_KEY, {})[place] = stay.get("", stay)
            kept |= stay if not place else {}
        return kept

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
        here = {name for names in self.tied.values() for name in names}
        for name in sorted(self.saved_of):
            path = self._state_path(name)
            below = set(leaves_below(path, self.saved_keys[name]) if name in self.saved_keys else ())
            if name in known:  # its state may be another rank's
                self.used |= below
            elif name in frozen:
                self.differences.ignored.append(path)
                self.differences.frozen += [path] if below else []
                self.used |= below
            else:
                self.differences.unexpected += [] if below else [path]
                if name in here:
                    why = (
                        f"{name} was in the optimizer when this was saved, and is not in it here. Give it to the "
                        "optimizer, or pass strict='missing', which leaves its state"
                    )
                    self.differences.reasons |= dict.fromkeys(below or (path,), why)


def _by_place(own: Mapping[Any, Any], children: Callable[[Any], Mapping[Any, Any]]) -> dict[str, Mapping[Any, Any]]:
    """Returns the moments of a parameter by the place that they have in the state dict, "" for its root.

    Args:
        children: returns those of a dict; what is no dict has the name "".
    """
    root = {name: moment for name, moment in own.items() if name != STATE_DICT_KEY}
    beside = children(own[STATE_DICT_KEY]) if STATE_DICT_KEY in own else {}
    return {"": root} | {place: children(part) for place, part in beside.items()}


def _live_places(own: Mapping[Any, Any]) -> dict[str, Mapping[Any, Any]]:
    return _by_place(own, lambda part: part if isinstance(part, Mapping) else {"": part})


def _saved_places(structure: Structure) -> dict[str, Mapping[Any, Any]]:
    return _by_place(
        children_of(structure), lambda node: children_of(node) if isinstance(node, DictNode) else {"": node}
    )


def _merged(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the entries of both; dicts that both have are merged."""
    return {**first, **{k: _merged(first[k], part) if k in first else part for k, part in second.items()}}


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
        [pair for plan in plans for pair in zip(param_groups_of(plan.live.optimizer), plan.values, strict=True)]
    )
    for plan in plans:
        if plan.live.form is None:
            _apply_plain(plan)
        else:
            _load_state_dict(plan)
            left += _not_taken(plan)
    return left


def _not_taken(plan: OptimizerPlan) -> list[str]:
    """Returns the paths that the optimizer's state dict lacks, or has with another value, or still has."""
    live = plan.live
    now = split(live.stateful.state_dict(), live.numbering)
    form = key_path(("param_groups", *plan.prefix, STATE_DICT_KEY))
    here = dict(flatten(object_states(now.form, form))[1])
    given = [(path, leaf) for path, leaf in flatten(plan.form)[1] if f"/{BY_GROUP}/" not in path]
    stay = [path for (key, place), path in plan.cleared.items() if _live_places(now.own[key]).get(place)]
    if stay:
        what = f"{type(live.stateful).__qualname__}.load_state_dict keeps state that is not in what it loads"
        _log.warning("%s, %s. Restore into a fresh optimizer", what, some_of("parts", stay))
    return [f"{form}/{path}" for path, leaf in given if path not in here or not is_same(leaf, here[path])] + stay


def _apply_plain(plan: OptimizerPlan) -> None:
    optimizer = plan.live.stateful
    for key, parameter in plan.live.parameters.items():
        optimizer.state.pop(parameter, None)
        if own := plan.state_of(key):
            optimizer.state[parameter] = own
    for key in plan.live.shared:
        optimizer.state.pop(key, None)
    optimizer.state.update(shared_of(plan.form, plan.live.numbering, plan.live.shared))
    for group, values, dropped in zip(param_groups_of(plan.live.optimizer), plan.values, plan.dropped, strict=True):
        for name in dropped:
            group.pop(name, None)
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
    own = {key: plan.state_of(key) for key in live.own}

    def grouped(values: Mapping[str, Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
        path = key_path(("param_groups", *plan.prefix))
        taken = plan.values
        if values is not None:
            taken = match_groups(live.groups, plan.of, values, path=path, keep=plan.keep)
        return plan.values_of(taken)

    before = [dict(group) for group in param_groups_of(live.stateful)]
    state = join(plan.form, live.numbering, own, grouped, live.form)
    plan_state(key_path(("optimizer", *plan.prefix)), live.stateful, state).load()
    for group, held in zip(param_groups_of(live.stateful), before, strict=True):
        for name, value in held.items():
            if isinstance(value, Tensor) and name in group:  # compiled code may hold it: it stays the same object
                group[name] = assign_value(value, group[name])


# options that are replaced --------------------------------------------------------------------------------------------

_CYCLED = frozenset(("momentum", "betas"))
_SCHEDULED = _CYCLED | {"weight_decay"}
_WITH_MOMENTS = frozenset(("amsgrad", "centered", "momentum"))
"""Options that have moments of their own, unless they are off."""

Schedule = tuple[str, Any, Any]
"""(path, scheduler, its saved state)."""


def taken_options(plans: Sequence[OptimizerPlan], schedules: Sequence[Schedule]) -> list[str]:
    """Returns a text for each option that is another here than in the checkpoint, before anything is changed."""
    numbers_of: dict[tuple[str, str, bool, str, str], list[int]] = {}
    parts = [part for schedule in schedules for part in _parts_of(schedule)]
    moving = frozenset[str]().union(*(_changed_by(scheduler, state) for _, scheduler, state in parts))
    for plan in plans:
        known = options_of(plan.live.optimizer)
        of = f"{key_path(('optimizer', *plan.prefix))}: " if plan.prefix else ""
        for number, (group, values) in enumerate(zip(plan.live.groups, plan.values, strict=True)):
            for name in _fixed(group, values, moving) & known:
                if texts := _differing(group.values[name], values[name]):
                    unsaved = name in _WITH_MOMENTS and not values[name]
                    numbers_of.setdefault((of, name, unsaved, *texts), []).append(number)
    return [
        f"{of}param group{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {name} {here} here, {there} "
        "in the checkpoint, which is taken" + ("" if unsaved else f"; keep=({name!r},) keeps yours")
        for (of, name, unsaved, here, there), numbers in sorted(numbers_of.items())
    ] + [text for part in parts for text in _arguments(*part)]


def _fixed(group: ParamGroup, values: Mapping[str, Any], moving: frozenset[str]) -> set[str]:
    """Returns the names in both that no scheduler changes."""
    cycled = _CYCLED if "max_momentum" in values or "base_momentum" in values else frozenset[str]()
    both = (group.values.keys() & values.keys()) - BY_SCHEDULERS - moving - cycled - {"lr"}
    return {name for name in both if f"initial_{name}" not in values}


def _parts_of(schedule: Schedule) -> Iterator[Schedule]:
    """Yields a scheduler of which a state was saved, and those that it consists of."""
    path, scheduler, state = schedule
    yield schedule
    states = state.get("_schedulers") if isinstance(state, Mapping) else None
    for number, pair in enumerate(zip(getattr(scheduler, "_schedulers", ()), states or (), strict=False)):
        yield from _parts_of((f"{path}/_schedulers/{number}", *pair))


def _changed_by(scheduler: Any, state: Any) -> frozenset[str]:
    """Returns the options beside the learning rate that a scheduler may change, or may have before it was saved."""
    if not getattr(getattr(type(scheduler), "step", None), "__module__", "").startswith("torch."):
        return _SCHEDULED
    cycles = getattr(scheduler, "cycle_momentum", False) or (isinstance(state, Mapping) and state.get("cycle_momentum"))
    return _CYCLED if cycles else frozenset()


def _arguments(path: str, scheduler: Any, state: Any) -> Iterator[str]:
    """Yields a text for each argument of a scheduler that differs in its saved state."""
    kinds = [kind for kind in type(scheduler).__mro__ if kind.__module__.startswith("torch.optim.")]
    known = {name for kind in kinds for name in inspect.signature(kind).parameters} - {"last_epoch", "verbose"}
    own: Mapping[str, Any] = scheduler.state_dict() if known and isinstance(state, Mapping) else {}
    for key, value in own.items():
        if (name := key.removeprefix("_")) in known and key in state and (texts := _differing(value, state[key])):
            yield (
                f"{path}: {name} {texts[0]} here, {texts[1]} in the checkpoint, which is taken; to keep yours, set it "
                "after the restore"
            )


def _differing(here: Any, there: Any) -> tuple[str, str] | None:
    """Returns both values as text if they are plain and differ; numbers of several types may be equal."""
    first, second = _plain(here), _plain(there)
    return None if first == second or ... in (first, second) else (f"{first!r:.60}", f"{second!r:.60}")


def _plain(value: Any) -> Any:
    """Returns a number, a text, None or a tuple of these; `...` for what is none, as a tensor."""
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, (list, tuple)):
        items = tuple(map(_plain, value))
        return ... if ... in items else items
    return value if value is None or isinstance(value, (bool, int, float, str)) else ...
