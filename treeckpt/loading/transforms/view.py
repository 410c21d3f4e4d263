"""A checkpoint as a load sees it: the leaves of its index, or what rules make of them.

Without rules a view is the index itself. With rules, a leaf that only has another name is the saved one under that
name, ties and all; one that is made of others is a `MadeLeaf`. Under `PerRank` a view has one rank's leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from ...core.format.chunks import NoChunks
from ...core.format.records import AliasRecord, ArrayRecord, Index, Leaf, ValueRecord
from ...core.sharding.int_runs import Runs, decode_runs
from ...core.tree.spec import ArraySpec
from ...core.tree.structure import Structure, empty_containers, paths_of
from ...errors import MismatchError
from .apply_rule import LeafState, chain_of
from .apply_rules import Ruled, apply_rules
from .composed_array import ComposedArray, Part, is_saved, saved
from .reshape_rules import Array
from .restructure import empty_nodes, regrow
from .rules import Rule

__all__ = ["MadeLeaf", "View", "plain_view", "ruled_view"]


class MadeLeaf(Leaf, frozen=True, gc=False):
    """An array that rules made. Its record has no chunks: these are those of the leaves it is made of."""

    made: ComposedArray
    sources: dict[str, Leaf]
    """The saved leaves, by their paths."""


class View(msgspec.Struct, frozen=True, dict=True):
    """What is there to be loaded."""

    index: Index
    by_path: Mapping[str, tuple[Leaf, ...]]
    ruled: Ruled | None = None
    empty: tuple[tuple[str, str], ...] = ()
    """Names of empty containers, and what they were."""
    source_rank: int = 0
    rank: int = 0

    @cached_property
    def structure(self) -> Structure:
        """Of the tree; of this rank alone where there are rules."""
        if self.ruled is None:
            return self.index.structure
        places = {path: item.place for path, item in self.ruled.items.items()}
        names = [(path, item.of) for path, item in self.ruled.items.items() if path in self.by_path]
        names = sorted([*names, *self.empty], key=lambda pair: places[pair[0]])
        return regrow(self.index.structure, names, source_rank=self.source_rank, rank=self.rank)

    @cached_property
    def names(self) -> frozenset[str]:
        """Of leaves, and of containers with nothing in them: what globs may mean."""
        return frozenset((*self.by_path, *empty_containers(self.structure)))

    @cached_property
    def entries(self) -> Sequence[Leaf]:
        """Every leaf, in the order of the structure; without rules also those of other ranks."""
        if self.ruled is None:
            return self.index.entries
        return [self.by_path[path][0] for path, _ in paths_of(self.structure)]

    @cached_property
    def specs(self) -> dict[str, ArraySpec | None]:
        """What each leaf is, by path; None for values."""
        return {path: found[0].spec for path, found in self.by_path.items()}

    def is_kept(self, path: str) -> bool:
        """Whether a rule says that what is wanted there stays as it is."""
        return self.ruled is not None and self.ruled.is_kept(path)

    def filled(self, path: str, wanted: ArraySpec | None) -> Leaf | None:
        """An array of one value, if rules put one where an array is wanted and none was saved."""
        made = self.ruled.fill_at(path, wanted) if self.ruled is not None and wanted is not None else None
        if made is None or wanted is None:
            return None
        return _made_leaf(self._filled.setdefault(path, -1 - len(self._filled)), path, None, Array(wanted, made), {})

    def check_fills(self) -> None:
        """Refuses rules that leave a shape to what is wanted, where nothing says what is wanted.

        Raises:
            MismatchError: naming one.
        """
        for fill in self.ruled.fills if self.ruled is not None else ():
            raise MismatchError(
                fill.target,
                expected="a shape, to fill an array",
                found="none, and no like to take it from",
                hint="Give the rule shape=... and a name without a pattern, or pass like=",
            )

    @cached_property
    def _filled(self) -> dict[str, int]:
        """Numbers of what was not saved at all."""
        return {}

    def chain(self, path: str) -> str:
        """How a leaf came about, for errors; empty where no rule had to do with it."""
        item = self.ruled.items.get(path) if self.ruled is not None else None
        return chain_of(item, path) if item is not None and item.trail else ""

    @cached_property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Leaves that only have another name, as saved and now."""
        if self.ruled is None:
            return ()
        leaves = ((path, self.ruled.items[path].of, found[0]) for path, found in self.by_path.items())
        return tuple((of, path) for path, of, leaf in leaves if path != of and not isinstance(leaf, MadeLeaf))


def plain_view(index: Index) -> View:
    """An index as it is."""
    return View(index, index.by_path)


def ruled_view(index: Index, rules: Sequence[Rule], *, source_rank: int, rank: int, strict: bool = True) -> View:
    """What rules make of an index.

    Args:
        source_rank: whose leaves count, under `PerRank`.
        rank: that they are for.
        strict: rules that find nothing to do are an error.

    Raises:
        MismatchError: a rule that cannot be applied.
    """
    own = {path: _own(found, source_rank) for path, found in index.by_path.items()}
    items = {path: _item(index, leaf) for path, leaf in own.items()}
    empty = empty_nodes(index.structure)
    # an empty container stands behind the leaf before it, and all that rules make of that
    items.update((path, LeafState(path, (before - 1, 1 << 60, i))) for i, (path, before) in enumerate(empty))
    ruled = apply_rules(items, rules, strict=strict)
    numbers: dict[object, int] = {}
    by_path: dict[str, tuple[Leaf, ...]] = {}
    for path, item in ruled.items.items():
        if item.of in own or item.array is not None:
            by_path[path] = (_leaf(index, own, path, item, numbers),)
    names = tuple((path, item.of) for path, item in ruled.items.items() if path not in by_path)
    return View(index, by_path, ruled, names, source_rank, rank)


def _own(found: Sequence[Leaf], rank: int) -> Leaf:
    """One rank's leaf of a path; the first where it has none, which a load then refuses."""
    if found[0].ranks is None:
        return found[0]
    return next((leaf for leaf in found if rank in decode_runs(leaf.ranks or ())), found[0])


def _source(index: Index, leaf: Leaf) -> str:
    """The path of the array that a leaf is: ties are one."""
    record = leaf.record
    return index.entries[record.of].path if isinstance(record, AliasRecord) and record.view is None else leaf.path


def _item(index: Index, leaf: Leaf) -> LeafState:
    value = leaf.record.value if isinstance(leaf.record, ValueRecord) else None
    spec = leaf.spec
    if not isinstance(spec, ArraySpec):
        return LeafState(leaf.path, (leaf.number,), value=value)
    return LeafState(leaf.path, (leaf.number,), Array(spec, saved(_source(index, leaf), spec)))


def _leaf(index: Index, own: Mapping[str, Leaf], path: str, item: LeafState, numbers: dict[object, int]) -> Leaf:
    """The leaf of an item; what is made of the same parts has the same number, and so is one array."""
    leaf, array = own.get(item.of), item.array
    if leaf is not None and (array is None or _is_untouched(index, leaf, array)):
        return leaf if leaf.path == path else msgspec.structs.replace(leaf, path=path)
    assert array is not None, "only arrays are new"
    sources = {part.source: own[part.source] for part in array.made.parts if isinstance(part, Part)}
    ranks = next((source.ranks for source in sources.values() if source.ranks is not None), None)
    number = numbers.setdefault((array.spec, array.made) if sources else path, len(index.entries) + len(numbers))
    return _made_leaf(number, path, ranks, array, sources)


def _made_leaf(number: int, path: str, ranks: Runs | None, array: Array, sources: dict[str, Leaf]) -> MadeLeaf:
    return MadeLeaf(number, path, ArrayRecord(-1, -1, NoChunks()), ranks, array.spec, array.made, sources)


def _is_untouched(index: Index, leaf: Leaf, array: Array) -> bool:
    return leaf.spec == array.spec and is_saved(array.made, _source(index, leaf), array.spec)
