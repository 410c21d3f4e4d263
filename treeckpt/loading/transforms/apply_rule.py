"""Applying one rule: which leaves does it take, and what stands in their places afterwards?

All that a rule takes is looked up among the leaves that the rules before it left, then it is taken away, then what the
rule gives is put in its place; so one rule may exchange names. Two leaves of one name are an error, and so is a rule
that finds nothing to do. Every step leaves a trail, for errors, and the rule that undoes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ...core.tree.spec import ArraySpec
from ...errors import MismatchError, TreeckptError
from .composed_array import Part, constant, saved
from .patterns import Binding, Pattern, compile_pattern, expand, names_in, numbers_of
from .reshape_rules import NOWHERE, Array, Shaping
from .rules import Copy, Drop, Fill, Keep, OneRule, Rename, Renames, Rule

__all__ = ["InverseRules", "LeafState", "RuleContext", "Step", "chain_of", "items_of", "sources_of"]


class Step(msgspec.Struct, frozen=True, gc=False):
    """One rule on the way of a leaf."""

    rule: str
    """Its number and what it says."""
    before: str
    """What the leaf, or the first of those it is made of, was called."""


class LeafState(msgspec.Struct, frozen=True, gc=False):
    """What stands at a path, while rules are applied and after."""

    of: str
    """The path of the saved leaf, or of the first of several; empty for what was not saved."""
    place: tuple[int, ...]
    """Sorts leaves: what a rule gives stands where that stood which it took first."""
    array: Array | None = None
    """None for values and whatever else only has a name."""
    value: object = None
    """Of a value, as stored; None if it is not known."""
    trail: tuple[Step, ...] = ()


def items_of(leaves: Mapping[str, ArraySpec | None]) -> dict[str, LeafState]:
    """Saved leaves before any rule."""
    return {
        path: LeafState(path, (i,), None if spec is None else Array(spec, saved(path, spec)))
        for i, (path, spec) in enumerate(leaves.items())
    }


def chain_of(item: LeafState, path: str) -> str:
    """How a leaf came about: `model/h.0.qkv -(1: rename ...)-> model/l.0.qkv -(2: split ...)-> model/l.0.q`."""
    return "".join(f"{step.before} -({step.rule})-> " for step in item.trail) + path


class InverseRules:
    """What undoes one rule."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []
        self.steps: list[Rule] = []
        self.lost: str = ""

    def rules(self) -> list[Rule]:
        """In the order in which the rule's steps were done."""
        if self.lost:
            raise MismatchError(self.lost, expected="rules that can be undone", found="one that loses something")
        return [*self.steps, *([Renames(tuple(self.names))] if self.names else [])]


class RuleContext:
    """The leaves between two rules.

    Args:
        beside: leaves of which a parameter has one, whatever its shape, with the names that the parameter gets: they
            are shared out, never cut.
    """

    def __init__(
        self, items: Mapping[str, LeafState], strict: bool, beside: Mapping[str, tuple[str, ...]] = {}
    ) -> None:
        self.items, self.strict, self.beside = dict(items), strict, beside
        self.dropped: dict[str, None] = {}
        self.keeps: list[str] = []
        self.fills: list[Fill] = []
        self.label, self.demanding = "", strict
        self.became: dict[str, tuple[str, ...]] = {}
        """What the last rule made of each leaf, if it reshapes."""
        self.took: dict[str, LeafState] = {}
        """What the last rule was about."""

    def apply(self, rule: OneRule, label: str) -> InverseRules:
        """Applies one rule; gives what undoes it."""
        self.label, self.became, self.took, undone = label, {}, {}, InverseRules()
        self.demanding = self.strict and not rule.optional
        if isinstance(rule, Shaping):
            found = self._shape(rule, undone)
        elif isinstance(rule, (Rename, Renames)):
            found = self._rename(rule.pairs, undone)
        elif isinstance(rule, Copy):
            found = self._copy(rule, undone)
        elif isinstance(rule, Fill):
            found = self._fill(rule, undone)
        else:
            found = self._drop(rule, undone)
        if not found and self.demanding:
            raise self.nothing("leaves that the rule is about")
        return undone

    def nothing(self, expected: str) -> MismatchError:
        """A rule that finds nothing to do."""
        return MismatchError(
            f"rule {self.label}",
            expected=expected,
            found="no such leaf",
            hint="Look at the names with treeckpt show (below a dotted name is `a.*`), or pass optional=True",
        )

    def find(self, pattern: Pattern, *, below: bool = False) -> list[tuple[Binding, str]]:
        """What a pattern means, in order."""
        if pattern.regex is None and (pattern.text in self.items or not below):
            return [((), pattern.text)] if pattern.text in self.items else []
        found = ((pattern.match(path, below=below), path) for path in self.items)
        return [(binding, path) for binding, path in found if binding is not None]

    # names ----------------------------------------------------------------------------------------------------------
    def _pairs(self, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Old and new names; the first pair that means a leaf counts."""
        found: dict[str, str] = {}
        for source, target in pairs:
            meant = self.find(compile_pattern(source), below=True)
            if not meant and self.demanding:
                raise self.nothing(source)
            for binding, path in meant:
                if path not in found:
                    found[path] = expand(target, binding)
        return found

    def _rename(self, pairs: Sequence[tuple[str, str]], undone: InverseRules) -> bool:
        names = self._pairs(pairs)
        self.took = {path: self.items.pop(path) for path in names}
        for path, item in self.took.items():
            self.put(names[path], self.stepped(item, path))
        undone.names = [(new, old) for old, new in names.items()]
        return bool(names)

    def _copy(self, rule: Copy, undone: InverseRules) -> bool:
        names = self._pairs(rule.pairs)
        self.took = {path: self.items[path] for path in names}
        for path, name in names.items():
            item = self.took[path]
            self.put(name, self.stepped(msgspec.structs.replace(item, place=(*item.place, 0)), path))
        undone.steps = [Drop(name) for name in names.values()]
        return bool(names)

    def _drop(self, rule: Drop | Keep, undone: InverseRules) -> bool:
        names = [path for _, path in self.find(compile_pattern(rule.source), below=True)]
        self.took = {path: self.items.pop(path) for path in names}
        for item in self.took.values():
            self.discard(item)
        undone.lost = self.label if names else ""
        if isinstance(rule, Keep):
            self.keeps.append(rule.source)
        return bool(names) or isinstance(rule, Keep)

    def _fill(self, rule: Fill, undone: InverseRules) -> bool:
        if rule.shape is None or "*" in rule.target or "$" in rule.target:
            self.fills.append(rule)
            return True
        spec = ArraySpec(rule.shape, rule.dtype)
        made = constant(rule.shape, rule.dtype, rule.value)
        self.put(rule.target, self.stepped(LeafState("", (1 << 61,), Array(spec, made)), "nothing"))
        undone.steps = [Drop(rule.target)]
        return True

    # shapes ---------------------------------------------------------------------------------------------------------
    def _shape(self, rule: Shaping, undone: InverseRules) -> bool:
        jobs = _gather(self, rule)
        given = self.took = {path: self.items[path] for _, paths in jobs for path in paths}
        done = [(paths, *self._made(rule, binding, paths)) for binding, paths in jobs]
        for path in given:
            del self.items[path]
        for paths, names, made in done:
            first = given[paths[0]]
            for i, (name, item) in enumerate(zip(names, made, strict=True)):
                if name == NOWHERE:
                    self.discard(item)
                else:
                    place = first.place if len(names) == 1 else (*first.place, i)
                    self.put(name, self.stepped(msgspec.structs.replace(item, place=place), paths[0], len(paths) - 1))
            self.became.update((path, tuple(names)) for path in paths)
            arrays = [(path, array) for path in paths if (array := given[path].array) is not None]
            cut = len(arrays) == len(paths) and paths[0] not in self.beside
            undo = rule.undo(arrays, names) if cut else ()
            if undo is None:
                undone.lost = self.label
            else:
                undone.steps.extend(undo)
        return bool(jobs)

    def _made(self, rule: Shaping, binding: Binding, paths: Sequence[str]) -> tuple[list[str], list[LeafState]]:
        given = [self.items[path] for path in paths]
        if len(given) > 1 and not rule.joins:
            raise self.fault(paths[0], f"one array for {expand(rule.targets[0], binding)}", f"{len(given)}")
        if any(path in self.beside for path in paths):
            return self._shared(rule, paths)
        known = [item.array for item in given if item.array is not None]
        if len(known) < len(given):
            if rule.patterns == rule.targets:  # a change of dtype or order says nothing of values
                return list(paths), given
            raise self.fault(paths[0], "an array", "a value")
        try:
            made = rule.make(known)
            names = rule.names(binding, len(made))
        except TreeckptError as error:
            raise self.fault(paths[0], error.expected, error.found, error.hint) from error
        return names, [msgspec.structs.replace(given[0], array=array) for array in made]

    def _shared(self, rule: Shaping, paths: Sequence[str]) -> tuple[list[str], list[LeafState]]:
        """What a parameter has one of goes to all that it becomes."""
        given = [self.items[path] for path in paths]
        for path, item in zip(paths, given, strict=True):
            if item.array is not None and item.array.spec.shape and rule.patterns != rule.targets:
                raise self.fault(
                    path,
                    "a moment of its parameter's shape",
                    f"shape {item.array.spec.shape}",
                    "Drop it: the optimizer makes it anew, or give it a rule of its own",
                )
            if item.value != given[0].value:
                raise self.fault(path, f"one value for what becomes one, as {given[0].value!r}", f"{item.value!r}")
        names = [name for name in self.beside[paths[0]] if name != NOWHERE]
        return names, [given[0]] * len(names)

    # leaves ---------------------------------------------------------------------------------------------------------
    def put(self, path: str, item: LeafState) -> None:
        """Puts a leaf under a name.

        Raises:
            MismatchError: something stands there, or the name is none.
        """
        if path and "" in path.split("/"):
            raise MismatchError(
                chain_of(item, path),
                expected="a new name without empty steps",
                found=path,
                hint="Write no / at its ends and none twice; ~s is the key of no letters",
            )
        if path in self.items:
            raise MismatchError(
                path,
                expected="one leaf of this name",
                found=f"two: {chain_of(item, path)}, and {chain_of(self.items[path], path)}",
                hint="Drop or rename one of them before",
            )
        self.items[path] = item

    def discard(self, item: LeafState) -> None:
        """Takes note of what is not kept."""
        self.dropped.update(dict.fromkeys(sources_of(item)))

    def stepped(self, item: LeafState, before: str, others: int = 0) -> LeafState:
        """A leaf that has come one rule further."""
        if others:
            before += f" and {others} more"
        return msgspec.structs.replace(item, trail=(*item.trail, Step(self.label, before)))

    def fault(self, path: str, expected: str, found: str, hint: str = "") -> MismatchError:
        """What a rule cannot do with a leaf, and how that came about."""
        item = self.items.get(path)
        chain = chain_of(item, path) if item is not None else path
        return MismatchError(path, expected=expected, found=f"{found}, for rule {self.label} on {chain}", hint=hint)


def sources_of(item: LeafState) -> list[str]:
    """The saved leaves that an item is, or is made of; a tie is itself, not what it is tied to."""
    parts = () if item.array is None else item.array.made.parts
    sources = dict.fromkeys(part.source for part in parts if isinstance(part, Part))
    return [item.of] if len(sources) < 2 and item.of else list(sources)


def _gather(state: RuleContext, rule: Shaping) -> list[tuple[Binding, list[str]]]:
    """The leaves that a rule takes, those that become one together, in order."""
    kept = set[str]().union(*(numbers_of(target) for target in rule.targets))
    patterns = [compile_pattern(text) for text in rule.patterns]
    groups: dict[Binding, list[dict[Binding, str]]] = {}
    below = not rule.joins and rule.patterns == rule.targets
    for i, pattern in enumerate(patterns):
        for binding, path in state.find(pattern, below=below):
            shared = tuple(pair for pair in binding if pair[0] in kept or not pair[0].isidentifier())
            rest = tuple(pair for pair in binding if pair not in shared)
            groups.setdefault(shared, [{} for _ in patterns])[i][rest] = path
    return [(shared, _in_order(state, shared, found, patterns)) for shared, found in groups.items()]


def _in_order(
    state: RuleContext, shared: Binding, found: list[dict[Binding, str]], patterns: Sequence[Pattern]
) -> list[str]:
    """One group: number by number, within that pattern by pattern.

    Raises:
        MismatchError: one is missing.
    """
    own = [names_in(pattern) - {name for name, _ in shared} for pattern in patterns]
    alike = all(names == own[0] for names in own)
    rests = sorted({rest for by_rest in found for rest in by_rest}) if alike else []
    ordered: list[str] = []
    if len(own[0]) == 1 and alike:
        numbers = [int(number) for ((_, number),) in rests]
        gaps = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
        if gaps:
            path = found[0].get(rests[0]) or patterns[0].text
            raise state.fault(path, f"numbers {numbers[0]} to {numbers[-1]} without a gap", f"none of number {gaps[0]}")
    pairs = [(i, rest) for rest in rests for i in range(len(patterns))]
    if not alike:
        pairs = [(i, rest) for i, by_rest in enumerate(found) for rest in sorted(by_rest) or [()]]
    for i, rest in pairs:
        path = found[i].get(rest)
        if path is None:
            there = next(path for by_rest in found for path in by_rest.values())
            name = _spelt(patterns[i].text, tuple(sorted((*shared, *rest))))
            raise state.fault(there, f"{name} beside it", "no such leaf")
        ordered.append(path)
    return ordered


def _spelt(text: str, binding: Binding) -> str:
    try:
        return expand(text, binding)
    except TreeckptError:
        return text
