"""Application of a list of rules, the optimizers' state that follows its parameters, and inverse rules.

`apply_rules` applies the rules in order. `Carried` rules are applied to the parameters of a training state and then,
moment by moment, to the optimizers' state of these. `inverse` does the same and collects the rules that undo each.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import msgspec

from .._core.tree.spec import ArraySpec
from .._core.tree.structure import key_text
from ..errors import MismatchError
from ._apply_rule import LeafState, RuleContext, RuleStep, leaf_states, saved_sources
from ._reshape_rules import Cast, Dequantize
from ._rules import Carried, Fill, OneRule, Rule, label_of


class TransformedLeaves(msgspec.Struct, frozen=True):
    """The leaves after all rules."""

    items: dict[str, LeafState] = {}
    """Leaves by path, in order."""
    dropped: tuple[str, ...] = ()
    """Saved leaves that rules dropped, by their names in the checkpoint."""
    keeps: tuple[str, ...] = ()
    """Patterns of paths where the target keeps its values."""
    fills: tuple[Fill, ...] = ()
    """Arrays of one value whose shape is that of the target."""


def apply_rules(items: Mapping[str, LeafState], rules: Iterable[Rule], *, strict: bool = True) -> TransformedLeaves:
    """Applies rules in order.

    Args:
        strict: whether a rule that matches nothing is an error, unless it is optional.

    Raises:
        MismatchError: with the rule, and the rules before it that led to the leaf.
    """
    state = RuleContext(items, strict)
    for number, rule in enumerate(rules, 1):
        _apply(state, rule, number)
    order = sorted(state.items.items(), key=lambda pair: pair[1].place)
    used = {path for item in state.items.values() for path in saved_sources(item)}
    dropped = tuple(path for path in state.dropped if path not in used)
    return TransformedLeaves(dict(order), dropped, tuple(state.keeps), tuple(state.fills))


def inverse(rules: Iterable[Rule], leaves: Mapping[str, ArraySpec | None]) -> tuple[Rule, ...]:
    """Returns rules that undo `rules` on these leaves; they are valid for these names and shapes only.

    Raises:
        MismatchError: a rule loses data (drop, slice, a cast to a narrower dtype).
    """
    state = RuleContext(leaf_states(leaves), strict=False)
    back: list[Rule] = []
    for number, rule in enumerate(rules, 1):
        _apply(state, rule, number)
        if state.lost:
            raise MismatchError(state.lost, expected="rules that can be undone", found="one that loses something")
        back += reversed(state.undo)
    return tuple(reversed(back))


def _apply(state: RuleContext, rule: Rule, number: int) -> None:
    label = f"{number}: {label_of(rule)}"
    if isinstance(rule, Carried):
        _apply_carried(state, rule, label)
    else:
        state.apply(rule, label)


# optimizer state that follows its parameters -----------------------------------------------------------------------
MODEL, OPTIMIZER, GROUPS = "model/", "optimizer/", "param_groups/"
_ONCE = frozenset(("step", "mu_product"))
"""State of which a parameter has one value, also where the parameter has no dimensions itself."""


class StatePath(msgspec.Struct, frozen=True):
    """The paths of one moment of all parameters, as the text before and after the parameter's name."""

    before: str
    after: str
    quoted: bool = False
    """Whether the name is a single key, as among the members of param groups."""

    def path(self, name: str) -> str:
        """Returns the path of the moment of a parameter."""
        return self.before + (key_text(name) if self.quoted else name) + self.after


StateByParameter = dict[str, dict[StatePath, str]]
"""By parameter name, without `model/`: the paths of its optimizer state."""


def _optimizer_states(paths: Iterable[str]) -> StateByParameter:
    """Returns the optimizer state of each parameter of a training state.

    A moment is at `optimizer/[optimizer/]name/moment`, and the membership of a parameter in a param group at
    `param_groups/[optimizer/]members/label/name`.
    """
    there = list(paths)
    found: StateByParameter = {path.removeprefix(MODEL): {} for path in there if path.startswith(MODEL)}
    quoted = {key_text(name): name for name in found}
    for path in there:
        placed = None
        if path.startswith(OPTIMIZER):
            placed = _moment(path.removeprefix(OPTIMIZER).split("/"), found)
        elif path.startswith(GROUPS) and path.split("/")[-3] == "members":
            before, _, name = path.rpartition("/")
            placed = (StatePath(f"{before}/", "", True), quoted[name]) if name in quoted else None
        if placed is not None:
            found[placed[1]][placed[0]] = path
    return found


def _moment(steps: list[str], parameters: Container[str]) -> tuple[StatePath, str] | None:
    for first in range(len(steps)):
        for last in range(len(steps) - 1, first, -1):
            name = "/".join(steps[first:last])
            if name in parameters:
                return StatePath(
                    OPTIMIZER + "".join(f"{s}/" for s in steps[:first]), f"/{'/'.join(steps[last:])}"
                ), name
    return None


def _apply_carried(state: RuleContext, carried: Carried, label: str) -> None:
    """Applies rules to parameters only, and then to their optimizer state."""
    back, lost = list[Rule](), ""
    states = _optimizer_states(state.items)
    parameters = {path: state.items.pop(path) for path in list(state.items) if path.startswith(MODEL)}
    inner = RuleContext(parameters, state.strict)
    for number, rule in enumerate(_flat(carried), 1):
        inner.apply(rule, f"{label.partition(':')[0]}.{number}: {label_of(rule)}")
        lost = lost or inner.lost
        back += reversed(inner.undo)
        if isinstance(rule, (Cast, Dequantize, Fill)):
            continue
        moments_by_path: dict[StatePath, dict[str, str]] = {}
        for path in inner.taken:
            for state_path, moment_path in states.get(path.removeprefix(MODEL), {}).items():
                moments_by_path.setdefault(state_path, {})[path] = moment_path
        for state_path, paths in moments_by_path.items():
            _apply_to_moment(state, inner, rule, state_path, paths, states)
    for path, item in inner.items.items():
        _name_of(path, inner.label)
        state.put(path, item)
    state.keeps += inner.keeps
    state.fills += inner.fills
    state.dropped.update(inner.dropped)
    state.undo, state.lost = [], lost
    if back:
        state.undo.append(Carried(tuple(reversed(back))))


def _flat(carried: Carried) -> Iterable[OneRule]:
    for rule in carried.rules:
        if isinstance(rule, Carried):
            yield from _flat(rule)
        else:
            yield rule


def _name_of(path: str, label: str) -> str:
    if path.startswith(MODEL):
        return path.removeprefix(MODEL)
    raise MismatchError(
        path,
        expected=f"a new name below {MODEL}, for optimizers to follow",
        found=f"rule {label}",
        hint="Give such a rule beside the carried ones, and one for the optimizer's state",
    )


def _apply_to_moment(
    state: RuleContext,
    inner: RuleContext,
    rule: OneRule,
    state_path: StatePath,
    paths: Mapping[str, str],
    states: StateByParameter,
) -> None:
    """Applies a rule to one moment of the parameters that it took.

    Args:
        paths: of the moment, by the path of its parameter.
    """
    own = {path: state.items[moment_path] for path, moment_path in paths.items()}
    per_parameter = {
        path: inner.new_names.get(path, ())
        for path, item in own.items()
        if _is_per_parameter(item, inner.taken[path], state_path)
    }
    moments = RuleContext(own, strict=False, per_parameter=per_parameter)
    moments.apply(rule, inner.label)
    for path, item in own.items():
        if moments.items.get(path) is not item:
            del state.items[paths[path]]
            del states[path.removeprefix(MODEL)][state_path]
    for path, item in moments.items.items():
        if own.get(path) is item:
            continue
        name, last = _name_of(path, inner.label), item.trail[-1]
        before = paths.get(last.before, last.before)
        named = msgspec.structs.replace(item, trail=(*item.trail[:-1], RuleStep(last.rule, before)))
        states.setdefault(name, {})[state_path] = state_path.path(name)
        state.put(state_path.path(name), named)
    state.dropped.update(moments.dropped)


def _is_per_parameter(moment: LeafState, parameter: LeafState, state_path: StatePath) -> bool:
    """Whether a parameter has one value of this state, and not one for each element."""
    if moment.array is None or parameter.array is None or state_path.after.removeprefix("/") in _ONCE:
        return True
    return moment.array.shape != parameter.array.shape
