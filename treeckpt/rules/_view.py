"""The leaves that a load can match: those of an index, or those that rules build from them.

Without rules a view is the index itself. With rules, a renamed leaf is the saved one under its new name, ties included;
a leaf that is composed of others is a `ComposedLeaf`. Under `PerRank` it has the leaves of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from .._core.format.records import AliasRecord, ArrayRecord, Index, Leaf, NoChunks, ValueRecord
from .._core.sharding.int_runs import Runs, decode_runs
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import Structure, empty_container_paths, paths_of
from ..errors import MismatchError
from ._apply_rule import LeafState, rule_history
from ._apply_rules import TransformedLeaves, apply_rules
from ._composed_array import ComposedArray, SourceBox, constant, saved
from ._patterns import compile_pattern
from ._restructure import empty_containers, rebuild_structure
from ._rules import Rule


class ComposedLeaf(Leaf, frozen=True, gc=False):
    """An array that rules composed. Its record has no chunks: those of its sources are read."""

    array: ComposedArray
    sources: dict[str, Leaf]
    """The saved leaves that it is composed of, by path."""


class View(msgspec.Struct, frozen=True, dict=True):
    """The leaves that can be loaded."""

    index: Index
    by_path: Mapping[str, tuple[Leaf, ...]]
    rules: Sequence[Rule] = ()
    transformed: TransformedLeaves = TransformedLeaves()
    """The leaves after the rules."""
    empty: tuple[tuple[str, str], ...] = ()
    """(new path, saved path) of empty containers."""
    source_rank: int = 0
    rank: int = 0

    @cached_property
    def structure(self) -> Structure:
        """Structure of the tree; that of this rank alone where there are rules."""
        if not self.rules:
            return self.index.structure
        places = {path: item.place for path, item in self.transformed.items.items()}
        names = [(path, item.of) for path, item in self.transformed.items.items() if path in self.by_path]
        names = sorted([*names, *self.empty], key=lambda pair: places[pair[0]])
        return rebuild_structure(self.index.structure, names, source_rank=self.source_rank, rank=self.rank)

    @cached_property
    def names(self) -> frozenset[str]:
        """Paths of leaves and of empty containers: those that globs are matched with."""
        return frozenset((*self.by_path, *empty_container_paths(self.structure)))

    @cached_property
    def entries(self) -> Sequence[Leaf]:
        """Every leaf, in the order of the structure; without rules also those of other ranks."""
        if not self.rules:
            return self.index.entries
        return [self.by_path[path][0] for path, _ in paths_of(self.structure)]

    @cached_property
    def specs(self) -> dict[str, ArraySpec | None]:
        """Spec of each leaf by path, under `PerRank` of the source rank's; None for values."""
        return {path: _own(found, self.source_rank).spec for path, found in self.by_path.items()}

    def is_kept(self, path: str) -> bool:
        """Whether a `Keep` rule leaves the target's value at a path unchanged."""
        keeps = self.transformed.keeps
        return bool(keeps) and any(compile_pattern(text).match(path, below=True) is not None for text in keeps)

    def filled(self, path: str, wanted: ArraySpec | None) -> Leaf | None:
        """Returns the array that a `Fill` rule puts where one is wanted and none was saved; None if no rule does."""
        for fill in self.transformed.fills:
            if wanted is not None and compile_pattern(fill.target).match(path) is not None:
                shape = wanted.shape if fill.shape is None else fill.shape
                number = self._filled.setdefault(path, -1 - len(self._filled))
                array = constant(msgspec.structs.replace(wanted, shape=shape), fill.value)
                return _composed_leaf(number, path, None, array, {})
        return None

    def check_fills(self) -> None:
        """Checks that no `Fill` rule takes its shape from a `like`, for a load without one.

        Raises:
            MismatchError: with the name of such a rule.
        """
        for fill in self.transformed.fills:
            raise MismatchError(
                fill.target,
                expected="a shape, to fill an array",
                found="none, and no like to take it from",
                hint="Give the rule shape=... and a name without a pattern, or pass like=",
            )

    @cached_property
    def _filled(self) -> dict[str, int]:
        """Leaf numbers of filled arrays, which were not saved."""
        return {}

    def unscaled(self, leaf: Leaf) -> list[tuple[str, str]]:
        """Returns (saved path, dtype) of the arrays that a leaf takes as they are, neither scaled nor cast by rules."""
        if not isinstance(leaf, ComposedLeaf):
            return [(self.index.entries[leaf.number].path, leaf.spec.dtype)] if leaf.spec is not None else []
        parts = (part for part in leaf.array.parts if isinstance(part, SourceBox))
        return [(part.source, part.dtypes[0]) for part in parts if part.scales is None and len(part.dtypes) == 1]

    def chain(self, path: str) -> str:
        """Returns the rules that led to a leaf, for errors; empty where no rule changed it."""
        item = self.transformed.items.get(path)
        return rule_history(item, path) if item is not None and item.trail else ""

    @cached_property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """(saved path, new path) of leaves that only have another name."""
        leaves = ((item.of, path, self.by_path.get(path)) for path, item in self.transformed.items.items())
        return tuple(
            (of, path) for of, path, found in leaves if path != of and found and not isinstance(found[0], ComposedLeaf)
        )


def view_of(index: Index, rules: Sequence[Rule], *, source_rank: int, rank: int, strict: bool = True) -> View:
    """Returns the view of an index after rules.

    Args:
        source_rank: the rank whose leaves count, under `PerRank`.
        rank: the rank that they are for.
        strict: whether rules that match nothing are an error.

    Raises:
        MismatchError: a rule that cannot be applied.
    """
    if not rules:
        return View(index, index.by_path, source_rank=source_rank, rank=rank)
    own = {path: _own(found, source_rank) for path, found in index.by_path.items()}
    items: dict[str, LeafState] = {}
    for path, leaf in own.items():
        value = leaf.record.value if isinstance(leaf.record, ValueRecord) else None
        array = saved(_source(index, leaf), leaf.spec) if isinstance(leaf.spec, ArraySpec) else None
        items[path] = LeafState(leaf.path, (leaf.number,), array, value)
    empty = empty_containers(index.structure)
    # an empty container comes after the leaf before it, and after all that rules build from that leaf
    items.update((path, LeafState(path, (before - 1, 1 << 60, i))) for i, (path, before) in enumerate(empty))
    transformed = apply_rules(items, rules, strict=strict)
    numbers: dict[object, int] = {}
    by_path: dict[str, tuple[Leaf, ...]] = {}
    for path, item in transformed.items.items():
        if item.of in own or item.array is not None:
            by_path[path] = (_leaf(index, own, path, item, numbers),)
    names = tuple((path, item.of) for path, item in transformed.items.items() if path not in by_path)
    return View(index, by_path, rules=rules, transformed=transformed, empty=names, source_rank=source_rank, rank=rank)


def _own(found: Sequence[Leaf], rank: int) -> Leaf:
    """Returns the leaf of one rank at a path; the first if that rank has none, which a load then refuses."""
    if found[0].ranks is None:
        return found[0]
    return next((leaf for leaf in found if rank in decode_runs(leaf.ranks or ())), found[0])


def _source(index: Index, leaf: Leaf) -> str:
    """Returns the path of the array of a leaf: that of its target for a tie without a view."""
    record = leaf.record
    return index.entries[record.of].path if isinstance(record, AliasRecord) and record.view is None else leaf.path


def _leaf(index: Index, own: Mapping[str, Leaf], path: str, item: LeafState, numbers: dict[object, int]) -> Leaf:
    """Returns the leaf for a state; arrays composed of the same parts get one number, so they are one array."""
    leaf, array = own.get(item.of), item.array
    if leaf is not None and (array is None or (leaf.spec and array == saved(_source(index, leaf), leaf.spec))):
        return leaf if leaf.path == path else msgspec.structs.replace(leaf, path=path)
    assert array is not None, "only arrays are new"
    boxes = [part for part in array.parts if isinstance(part, SourceBox)]
    names = {name: None for box in boxes for name in (box.source, *([box.scales.source] if box.scales else []))}
    sources = {name: own[name] for name in names}
    ranks = next((source.ranks for source in sources.values() if source.ranks is not None), None)
    number = numbers.setdefault(array if sources else path, len(index.entries) + len(numbers))
    return _composed_leaf(number, path, ranks, array, sources)


def _composed_leaf(
    number: int, path: str, ranks: Runs | None, array: ComposedArray, sources: dict[str, Leaf]
) -> ComposedLeaf:
    return ComposedLeaf(
        number,
        path,
        record=ArrayRecord(-1, -1, NoChunks()),
        ranks=ranks,
        spec=array.spec,
        stored=array.spec,
        array=array,
        sources=sources,
    )
