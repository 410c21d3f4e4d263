"""Application of rules to leaves, the optimizers' state that follows its parameters, and inverse rules.

A rule first looks up all leaves that it takes, then removes them, then adds the new leaves; so one rule can exchange
names. Two leaves of one name are an error, and so is a rule that matches nothing. Every step is recorded in the leaf,
for errors, and returns the rules that undo it.

`apply_rules` applies rules in order. `Carried` rules are applied to the parameters of a training state and then, moment
by moment, to the optimizers' state of these. `inverse` does the same and collects the rules that undo each.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from .._core.tree.spec import ArraySpec
from .._core.tree.structure import key_text
from ..errors import MismatchError, TreeckptError
from ._composed_array import ComposedArray, SourceBox, constant, saved
from ._patterns import Binding, Pattern, bound_numbers, compile_pattern, expand, numbers_in
from ._rules import (
    NOWHERE,
    ArrayRule,
    Carried,
    Cast,
    Copy,
    Dequantize,
    Drop,
    Fill,
    Keep,
    OneRule,
    Rename,
    Renames,
    Rule,
    label_of,
)

SHOWN_NAMES = 8
"""Names that an error lists."""
_LOOK = "Look at the names with treeckpt show (below a dotted name is `a.*`)"


class RuleStep(msgspec.Struct, frozen=True, gc=False):
    """One rule that was applied to a leaf."""

    rule: str
    """The number and description of the rule."""
    before: str
    """The name that the leaf, or the first of its sources, had before the rule."""


class LeafState(msgspec.Struct, frozen=True, gc=False):
    """The leaf at a path while rules are applied, and after."""

    of: str
    """Path of the saved leaf, or of the first of several; empty if nothing was saved."""
    place: tuple[int, ...]
    """Sort key: the new leaves of a rule take the place of the first leaf that it took."""
    array: ComposedArray | None = None
    """How the array is composed of saved ones; None for values, and for everything else that only has a name."""
    value: object = None
    """The stored form of a value; None if it is not known."""
    trail: tuple[RuleStep, ...] = ()


def leaf_states(leaves: Mapping[str, ArraySpec | None]) -> dict[str, LeafState]:
    """Returns the states of saved leaves before any rule."""
    return {
        path: LeafState(path, (i,), None if spec is None else saved(path, spec))
        for i, (path, spec) in enumerate(leaves.items())
    }


def rule_history(item: LeafState, path: str) -> str:
    """Returns the rules that led to a leaf, as `model/h.0.qkv -(1: rename ...)-> model/l.0.qkv -(2: ...)-> ...`."""
    return "".join(f"{step.before} -({step.rule})-> " for step in item.trail) + path


class RuleContext:
    """The leaves between two rules.

    Args:
        strict: whether a rule that matches nothing is an error.
        per_parameter: leaves of which a parameter has one regardless of its shape, with the new names of the parameter:
            they are copied to each name and never cut.
    """

    def __init__(
        self, items: Mapping[str, LeafState], strict: bool, per_parameter: Mapping[str, tuple[str, ...]] = {}
    ) -> None:
        self.items, self.strict, self.per_parameter = dict(items), strict, per_parameter
        self.dropped: dict[str, None] = {}
        self.keeps: list[str] = []
        self.fills: list[Fill] = []
        self.label, self.must_match = "", strict
        self.outside: RuleContext | None = None
        """The leaves that the rules do not see, where they see those of a model alone."""
        self.new_names: dict[str, tuple[str, ...]] = {}
        """The new names of each leaf that the last rule took, if that builds arrays."""
        self.taken: dict[str, LeafState] = {}
        """The leaves that the last rule took."""
        self.undo: list[Rule] = []
        """The rules that undo the steps of the last rule, in the order of these."""
        self.lost = ""
        """The label of the last rule, or of one that it carries, if it lost data."""

    def apply(self, rule: OneRule, label: str) -> None:
        """Applies one rule."""
        self.label, self.new_names, self.taken, self.undo, self.lost = label, {}, {}, [], ""
        self.must_match = self.strict and not rule.optional
        if isinstance(rule, ArrayRule):
            matched = self._build_arrays(rule)
        elif isinstance(rule, (Rename, Renames)):
            matched = self._rename(rule.pairs)
        elif isinstance(rule, Copy):
            matched = self._copy(rule)
        elif isinstance(rule, Fill):
            matched = self._fill(rule)
        else:
            matched = self._drop(rule)
        if not matched and self.must_match:
            raise self.no_match("leaves that the rule is about")

    def no_match(self, expected: str, hint: str = "") -> MismatchError:
        """Returns the error for a rule that matches nothing.

        Args:
            hint: what to do, where that is known.
        """
        names = list(self.items)
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        return MismatchError(
            f"rule {self.label}",
            expected=expected,
            found=f"no such leaf: there are {', '.join(names[:SHOWN_NAMES])[:400] or 'none'}{more}",
            hint=hint or f"{_LOOK}, or give the rule optional=True",
        )

    def _meant(self, source: str, target: str) -> str:
        """Returns the pair that was likely meant by one that matches nothing: without the root, or a dotted name."""
        roots = {f"{root}/" for root, step, _ in (path.partition("/") for path in self.items) if step}
        for root in ("", *sorted(roots, key=lambda root: (root != "model/", root))):
            for end in ("", ".*"):
                if target and self.find(compile_pattern(f"{root}{source}{end}"), below=True):
                    now = target if target.startswith(root) else f"{root}{target}"
                    why = f"Names begin with `{root}`" if root else "Below a dotted name is `a.*`"
                    return f"{why}: write {f'{root}{source}{end}'!r}: {f'{now}{end}'!r}"
        if self.outside is not None and self.outside.find(compile_pattern(source), below=True):
            return (
                "Rules that the optimizers' state follows see `model/...` alone: pass from_root=True to restore or "
                "resume, or give the rule beside those of rules.Carried"
            )
        return ""

    def find(self, pattern: Pattern, *, below: bool = False) -> list[tuple[Binding, str]]:
        """Returns the leaves that a pattern matches, in order, with what it binds."""
        if pattern.regex is None and (pattern.text in self.items or not below):
            return [((), pattern.text)] if pattern.text in self.items else []
        matches = ((pattern.match(path, below=below), path) for path in self.items)
        return [(binding, path) for binding, path in matches if binding is not None]

    # names ----------------------------------------------------------------------------------------------------------
    def _pairs(self, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Returns new names by old name; the first pair that matches a leaf counts."""
        new_names: dict[str, str] = {}
        for source, target in pairs:
            matches = self.find(compile_pattern(source), below=True)
            if not matches and self.must_match:
                may_miss = f"{_LOOK}, or pass transforms=rules.Rename({source!r}, {target!r}, optional=True) for it"
                raise self.no_match(source, self._meant(source, target) or may_miss)
            for binding, path in matches:
                if path not in new_names:
                    new_names[path] = expand(target, binding)
        return new_names

    def _rename(self, pairs: Sequence[tuple[str, str]]) -> bool:
        names = self._pairs(pairs)
        self.taken = {path: self.items.pop(path) for path in names}
        for path, item in self.taken.items():
            self.put(names[path], self.with_step(item, path))
        self.undo = [Renames(tuple((new, old) for old, new in names.items()))] if names else []
        return bool(names)

    def _copy(self, rule: Copy) -> bool:
        names = self._pairs(rule.pairs)
        self.taken = {path: self.items[path] for path in names}
        for path, name in names.items():
            item = self.taken[path]
            # right behind the leaf that it copies
            self.put(name, self.with_step(msgspec.structs.replace(item, place=(*item.place, 0)), path))
        self.undo = [Drop(name) for name in names.values()]
        return bool(names)

    def _drop(self, rule: Drop | Keep) -> bool:
        names = [path for _, path in self.find(compile_pattern(rule.source), below=True)]
        self.taken = {path: self.items.pop(path) for path in names}
        for item in self.taken.values():
            self.discard(item)
        self.lost = self.label if names else ""
        if isinstance(rule, Keep):
            self.keeps.append(rule.source)
        return bool(names) or isinstance(rule, Keep)

    def _fill(self, rule: Fill) -> bool:
        if rule.shape is None or "*" in rule.target or "$" in rule.target:
            self.fills.append(rule)
            return True
        filled = constant(ArraySpec(rule.shape, rule.dtype), rule.value)
        # behind all saved leaves
        self.put(rule.target, self.with_step(LeafState("", (1 << 61,), filled), "nothing"))
        self.undo = [Drop(rule.target)]
        return True

    # shapes ---------------------------------------------------------------------------------------------------------
    def _build_arrays(self, rule: ArrayRule) -> bool:
        jobs = _group_leaves(self, rule)
        given = self.taken = {path: self.items[path] for _, paths in jobs for path in paths}
        done = [(paths, *self._apply_to_group(rule, binding, paths)) for binding, paths in jobs]
        for path in given:
            del self.items[path]
        for paths, names, new in done:
            first = given[paths[0]]
            for i, (name, item) in enumerate(zip(names, new, strict=True)):
                if name == NOWHERE:
                    self.discard(item)
                else:
                    place = first.place if len(names) == 1 else (*first.place, i)
                    self.put(name, self.with_step(msgspec.structs.replace(item, place=place), paths[0], len(paths) - 1))
            self.new_names.update((path, tuple(names)) for path in paths)
            arrays = [(path, array) for path in paths if (array := given[path].array) is not None]
            cut = len(arrays) == len(paths) and paths[0] not in self.per_parameter
            back = rule.undo(arrays, names) if cut else ()
            if back is None:
                self.lost = self.label
            else:
                self.undo += back
        return bool(jobs)

    def _apply_to_group(
        self, rule: ArrayRule, binding: Binding, paths: Sequence[str]
    ) -> tuple[list[str], list[LeafState]]:
        given = [self.items[path] for path in paths]
        if len(given) > 1 and not rule.joins:
            raise self.rule_error(paths[0], f"one array for {expand(rule.targets[0], binding)}", f"{len(given)}")
        if any(path in self.per_parameter for path in paths):
            return self._copy_to_all(rule, paths)
        known = [item.array for item in given if item.array is not None]
        if len(known) < len(given):
            if rule.patterns == rule.targets:  # a change of dtype or order says nothing of values
                return list(paths), given
            raise self.rule_error(paths[0], "an array", "a value")
        try:
            new = rule.make(known)
            names = rule.names(binding, len(new))
        except TreeckptError as error:
            raise self.rule_error(paths[0], error.expected, error.found, error.hint) from error
        return names, [msgspec.structs.replace(given[0], array=array) for array in new]

    def _copy_to_all(self, rule: ArrayRule, paths: Sequence[str]) -> tuple[list[str], list[LeafState]]:
        """Copies state of which a parameter has one to each parameter that it becomes."""
        given = [self.items[path] for path in paths]
        for path, item in zip(paths, given, strict=True):
            if item.array is not None and item.array.shape and rule.patterns != rule.targets:
                raise self.rule_error(
                    path,
                    "a moment of its parameter's shape",
                    f"shape {item.array.shape}",
                    "Drop it: the optimizer makes it anew, or give it a rule of its own",
                )
            if item.value != given[0].value:
                raise self.rule_error(path, f"one value for what becomes one, as {given[0].value!r}", f"{item.value!r}")
        names = [name for name in self.per_parameter[paths[0]] if name != NOWHERE]
        return names, [given[0]] * len(names)

    # leaves ---------------------------------------------------------------------------------------------------------
    def put(self, path: str, item: LeafState) -> None:
        """Adds a leaf under a name.

        Raises:
            MismatchError: the name is taken or not valid.
        """
        if path and "" in path.split("/"):
            raise MismatchError(
                rule_history(item, path),
                expected="a new name without empty steps",
                found=path,
                hint="Write no / at its ends and none twice; ~s is the key of no letters",
            )
        if path in self.items:
            raise MismatchError(
                path,
                expected="one leaf of this name",
                found=f"two: {rule_history(item, path)}, and {rule_history(self.items[path], path)}",
                hint="Drop or rename one of them before",
            )
        self.items[path] = item

    def discard(self, item: LeafState) -> None:
        """Records the saved leaves of a leaf as dropped."""
        self.dropped.update(dict.fromkeys(saved_sources(item)))

    def with_step(self, item: LeafState, before: str, others: int = 0) -> LeafState:
        """Returns a leaf with the current rule added to its steps."""
        if others:
            before += f" and {others} more"
        return msgspec.structs.replace(item, trail=(*item.trail, RuleStep(self.label, before)))

    def rule_error(self, path: str, expected: str, found: str, hint: str = "") -> MismatchError:
        """Returns the error for a leaf that the current rule cannot take, with the rules that led to the leaf."""
        item = self.items.get(path)
        chain = rule_history(item, path) if item is not None else path
        return MismatchError(path, expected=expected, found=f"{found}, for rule {self.label} on {chain}", hint=hint)


def saved_sources(item: LeafState) -> list[str]:
    """Returns the paths of the saved leaves that a leaf is composed of; a tie counts as itself, not as its target."""
    parts = () if item.array is None else item.array.parts
    sources = dict.fromkeys(part.source for part in parts if isinstance(part, SourceBox))
    return [item.of] if len(sources) < 2 and item.of else list(sources)


def _group_leaves(state: RuleContext, rule: ArrayRule) -> list[tuple[Binding, list[str]]]:
    """Returns the leaves that a rule takes, in groups that it takes together, in order."""
    kept = set[str]().union(*(numbers_in(target) for target in rule.targets))
    patterns = [compile_pattern(text) for text in rule.patterns]
    groups: dict[Binding, list[dict[Binding, str]]] = {}
    below = not rule.joins and rule.patterns == rule.targets
    for i, pattern in enumerate(patterns):
        for binding, path in state.find(pattern, below=below):
            # texts and what is below a name always tell groups apart, numbers only where a target has them
            shared = tuple(pair for pair in binding if pair[0] in kept or not pair[0].isidentifier())
            rest = tuple(pair for pair in binding if pair not in shared)
            groups.setdefault(shared, [{} for _ in patterns])[i][rest] = path
    taken = [(shared, members) for shared, members in groups.items() if rule.led_by is None or members[rule.led_by]]
    return [(shared, _in_order(state, shared, members, patterns)) for shared, members in taken]


def _in_order(
    state: RuleContext, shared: Binding, members: list[dict[Binding, str]], patterns: Sequence[Pattern]
) -> list[str]:
    """Returns the paths of one group, of which none may be missing: by number, and for each number by pattern."""
    own = [bound_numbers(pattern) - {name for name, _ in shared} for pattern in patterns]
    alike = all(names == own[0] for names in own)
    rests = sorted({rest for by_rest in members for rest in by_rest}) if alike else []
    ordered: list[str] = []
    if len(own[0]) == 1 and alike:
        numbers = [int(number) for ((_, number),) in rests]
        gaps = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
        if gaps:
            path = members[0].get(rests[0]) or patterns[0].text
            raise state.rule_error(
                path, f"numbers {numbers[0]} to {numbers[-1]} without a gap", f"none of number {gaps[0]}"
            )
    pairs = [(i, rest) for rest in rests for i in range(len(patterns))]
    if not alike:
        pairs = [(i, rest) for i, by_rest in enumerate(members) for rest in sorted(by_rest) or [()]]
    for i, rest in pairs:
        path = members[i].get(rest)
        if path is None:
            there = next(path for by_rest in members for path in by_rest.values())
            name = _expand_or_text(patterns[i].text, tuple(sorted((*shared, *rest))))
            raise state.rule_error(there, f"{name} beside it", "no such leaf")
        ordered.append(path)
    return ordered


def _expand_or_text(text: str, binding: Binding) -> str:
    try:
        return expand(text, binding)
    except TreeckptError:
        return text


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
    # a piece of a saved leaf may be dropped, and another one be there
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
"""The paths of the optimizer state of each parameter, by its name without `model/`."""


def _optimizer_states(paths: Iterable[str]) -> StateByParameter:
    """Returns the optimizer state of each parameter of a training state.

    A moment is at `optimizer/[optimizer/]name/moment`, and the membership of a parameter in a param group at
    `param_groups/[optimizer/]members/label/name`.
    """
    there = list(paths)
    states: StateByParameter = {path.removeprefix(MODEL): {} for path in there if path.startswith(MODEL)}
    quoted = {key_text(name): name for name in states}
    for path in there:
        placed = None
        if path.startswith(OPTIMIZER):
            placed = _moment(path.removeprefix(OPTIMIZER).split("/"), states)
        elif path.startswith(GROUPS) and path.split("/")[-3:-2] == ["members"]:
            before, _, name = path.rpartition("/")
            placed = (StatePath(f"{before}/", "", True), quoted[name]) if name in quoted else None
        if placed is not None:
            states[placed[1]][placed[0]] = path
    return states


def _moment(steps: list[str], parameters: Container[str]) -> tuple[StatePath, str] | None:
    for first in range(len(steps)):
        # the longest name counts: a parameter `a` may stand beside `a/b`; one without moments ends the path
        for last in (*range(len(steps) - 1, first, -1), len(steps)):
            name = "/".join(steps[first:last])
            if name in parameters:
                before, after = ("".join(f"{s}/" for s in some) for some in (steps[:first], steps[last:]))
                return StatePath(OPTIMIZER + before, f"/{after}".removesuffix("/")), name
    return None


def _apply_carried(state: RuleContext, carried: Carried, label: str) -> None:
    """Applies rules to parameters only, and then to their optimizer state."""
    back, lost = list[Rule](), ""
    states = _optimizer_states(state.items)
    # the rules see parameters alone, so that a pattern does not match their moments too
    parameters = {path: state.items.pop(path) for path in list(state.items) if path.startswith(MODEL)}
    inner = RuleContext(parameters, state.strict)
    inner.outside = state
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
