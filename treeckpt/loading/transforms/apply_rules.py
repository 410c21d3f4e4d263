"""Applying rules in order: what is there afterwards, what follows a parameter, and which rules lead back?

`apply_rules` walks once over the rules. `Carried` ones it applies to the parameters of a training state, and then,
moment by moment, to what the optimizers keep of these. `inverse` walks the same way and writes down what undoes it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import msgspec

from ...core.tree.spec import ArraySpec
from ...core.tree.structure import key_text
from ...errors import MismatchError
from .apply_rule import InverseRules, LeafState, RuleContext, Step, items_of, sources_of
from .composed_array import ComposedArray, constant
from .patterns import compile_pattern
from .reshape_rules import Cast
from .rules import Carried, Fill, OneRule, Rule, label_of

__all__ = ["Ruled", "apply_rules", "inverse"]


class Ruled(msgspec.Struct, frozen=True):
    """What rules made of saved leaves."""

    items: dict[str, LeafState]
    """By path, in order."""
    dropped: tuple[str, ...]
    """Saved leaves that rules have dropped, as they are called in the checkpoint."""
    keeps: tuple[str, ...]
    """Patterns of what stays as it is wanted."""
    fills: tuple[Fill, ...]
    """Arrays of one value, whose shape is left to what is wanted."""

    def is_kept(self, path: str) -> bool:
        """Whether what is wanted at a path stays as it is."""
        return any(compile_pattern(text).match(path, below=True) is not None for text in self.keeps)

    def fill_at(self, path: str, wanted: ArraySpec) -> ComposedArray | None:
        """The array of one value that rules put at a path, of the shape and dtype that are wanted there."""
        for fill in self.fills:
            if compile_pattern(fill.target).match(path) is not None:
                return constant(fill.shape or wanted.shape, wanted.dtype, fill.value)
        return None


def apply_rules(items: Mapping[str, LeafState], rules: Iterable[Rule], *, strict: bool = True) -> Ruled:
    """What is there after rules.

    Args:
        strict: a rule that finds nothing to do is an error, unless it is optional.

    Raises:
        MismatchError: with the rule, and the chain of those before it that led to the leaf.
    """
    state = RuleContext(items, strict)
    for number, rule in enumerate(rules, 1):
        _apply(state, rule, number)
    return _ruled(state)


def inverse(rules: Iterable[Rule], leaves: Mapping[str, ArraySpec | None]) -> tuple[Rule, ...]:
    """Rules that take what `rules` make of these leaves back to them; concrete, for these names and shapes alone.

    Raises:
        MismatchError: a rule that loses something (drop, slice, a cast to less).
    """
    state = RuleContext(items_of(leaves), strict=False)
    back: list[Rule] = []
    for number, rule in enumerate(rules, 1):
        undone = _apply(state, rule, number)
        back += reversed(undone.rules())
    return tuple(reversed(back))


def _apply(state: RuleContext, rule: Rule, number: int) -> InverseRules:
    label = f"{number}: {label_of(rule)}"
    return _apply_carried(state, rule, label) if isinstance(rule, Carried) else state.apply(rule, label)


def _ruled(state: RuleContext) -> Ruled:
    order = sorted(state.items.items(), key=lambda pair: pair[1].place)
    used = {path for item in state.items.values() for path in sources_of(item)}
    dropped = tuple(path for path in state.dropped if path not in used)
    return Ruled(dict(order), dropped, tuple(state.keeps), tuple(state.fills))


# what follows parameters ------------------------------------------------------------------------------------------
MODEL, OPTIMIZER, GROUPS = "model/", "optimizer/", "param_groups/"
_ONCE = frozenset(("step", "mu_product"))
"""Moments that a parameter has one of, also where it has no dimensions itself."""


class Family(msgspec.Struct, frozen=True):
    """One moment of all parameters: where it stands for each, as text before and after the parameter's name."""

    before: str
    after: str
    quoted: bool = False
    """Whether the name is one key, as among the members of groups."""

    def path(self, name: str) -> str:
        """Where the moment of a parameter stands."""
        return self.before + (key_text(name) if self.quoted else name) + self.after


Followers = dict[str, dict[Family, str]]
"""By parameter, without `model/`, where what follows it stands."""


def _followers(paths: Iterable[str]) -> Followers:
    """What a training state keeps of parameters.

    A moment stands at `optimizer/[optimizer/]name/moment`, and a parameter among the members of its group at
    `param_groups/[optimizer/]members/label/name`.
    """
    there = list(paths)
    found: Followers = {path.removeprefix(MODEL): {} for path in there if path.startswith(MODEL)}
    quoted = {key_text(name): name for name in found}
    for path in there:
        placed = None
        if path.startswith(OPTIMIZER):
            placed = _moment(path.removeprefix(OPTIMIZER).split("/"), found)
        elif path.startswith(GROUPS) and path.split("/")[-3] == "members":
            before, _, name = path.rpartition("/")
            placed = (Family(f"{before}/", "", True), quoted[name]) if name in quoted else None
        if placed is not None:
            found[placed[1]][placed[0]] = path
    return found


def _moment(steps: list[str], parameters: Container[str]) -> tuple[Family, str] | None:
    for first in range(len(steps)):
        for last in range(len(steps) - 1, first, -1):
            name = "/".join(steps[first:last])
            if name in parameters:
                return Family(OPTIMIZER + "".join(f"{s}/" for s in steps[:first]), f"/{'/'.join(steps[last:])}"), name
    return None


def _apply_carried(state: RuleContext, carried: Carried, label: str) -> InverseRules:
    """Applies rules to parameters, which are all that they see, and to what follows them."""
    undone, back = InverseRules(), list[Rule]()
    followers = _followers(state.items)
    parameters = {path: state.items.pop(path) for path in list(state.items) if path.startswith(MODEL)}
    inner = RuleContext(parameters, state.strict)
    for number, rule in enumerate(_flat(carried), 1):
        one = inner.apply(rule, f"{label.partition(':')[0]}.{number}: {label_of(rule)}")
        undone.lost = undone.lost or one.lost
        back += [] if one.lost else reversed(one.rules())
        if isinstance(rule, (Cast, Fill)):
            continue
        families: dict[Family, dict[str, str]] = {}
        for path in inner.took:
            for family, follower in followers.get(path.removeprefix(MODEL), {}).items():
                families.setdefault(family, {})[path] = follower
        for family, paths in families.items():
            _follow(state, inner, rule, family, paths, followers)
    for path, item in inner.items.items():
        _name_of(path, inner.label)
        state.put(path, item)
    state.keeps += inner.keeps
    state.fills += inner.fills
    state.dropped.update(inner.dropped)
    undone.steps = [Carried(tuple(reversed(back)))] if back else []
    return undone


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


def _follow(
    state: RuleContext,
    inner: RuleContext,
    rule: OneRule,
    family: Family,
    paths: Mapping[str, str],
    followers: Followers,
) -> None:
    """Does with one moment what a rule did with the parameters that it took.

    Args:
        paths: where the moment stands, by the path of its parameter.
    """
    own = {path: state.items[follower] for path, follower in paths.items()}
    beside = {path: inner.became.get(path, ()) for path, item in own.items() if _is_one(item, inner.took[path], family)}
    moments = RuleContext(own, strict=False, beside=beside)
    moments.apply(rule, inner.label)
    for path, item in own.items():
        if moments.items.get(path) is not item:
            del state.items[paths[path]]
            del followers[path.removeprefix(MODEL)][family]
    for path, item in moments.items.items():
        if own.get(path) is item:
            continue
        name, last = _name_of(path, inner.label), item.trail[-1]
        before = paths.get(last.before, last.before)
        named = msgspec.structs.replace(item, trail=(*item.trail[:-1], Step(last.rule, before)))
        followers.setdefault(name, {})[family] = family.path(name)
        state.put(family.path(name), named)
    state.dropped.update(moments.dropped)


def _is_one(moment: LeafState, parameter: LeafState, family: Family) -> bool:
    """Whether a parameter has one of these, whatever its shape, and not one for each element."""
    if moment.array is None or parameter.array is None or family.after.removeprefix("/") in _ONCE:
        return True
    return moment.array.spec.shape != parameter.array.spec.shape
