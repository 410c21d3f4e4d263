"""The leaves that a load can match, and their tree: those of an index, or those that rules build from them.

Without rules a view is the index itself. With rules, a renamed leaf is the saved one under its new name, ties included;
a leaf that is composed of others is a `ComposedLeaf`. Under `PerRank` it has the leaves of one rank.

The tree has containers of their saved kinds where possible. A container that is still at its path, or that moved
together with its children, keeps its kind if its children allow it: a list needs all positions from 0 on, a class all
its fields. Every other container is a dict, with integer keys where a step is a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from .._core.format.records import AliasRecord, ArrayRecord, Index, Leaf, NoChunks, ValueRecord
from .._core.sharding.int_runs import Runs, decode_runs, encode_runs
from .._core.tree.dict_attributes import DictAttributes, metadata_of, renamed_modules
from .._core.tree.paths import with_field_names
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import (
    MAX_DEPTH,
    CustomNode,
    DataclassNode,
    DefaultDictNode,
    DequeNode,
    DictNode,
    ListNode,
    NamedTupleNode,
    Node,
    OrderedDictNode,
    PerRankNode,
    StructSequenceNode,
    Structure,
    TableNode,
    TensorNode,
    TupleNode,
    empty_container_paths,
    key_text,
    keys_of,
    paths_of,
)
from .._core.tree.value_codec import Value
from ..errors import MismatchError, TreeError
from ._apply_rules import LeafState, TransformedLeaves, apply_rules, rule_history
from ._composed_array import ComposedArray, SourceBox, constant, saved
from ._patterns import compile_pattern
from ._rules import Rule, with_names


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
        return {path: _own(leaves, self.source_rank).spec for path, leaves in self.by_path.items()}

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

    def chain(self, path: str) -> str:
        """Returns the rules that led to a leaf, for errors; empty where no rule changed it."""
        item = self.transformed.items.get(path)
        return rule_history(item, path) if item is not None and item.trail else ""

    @cached_property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """(saved path, new path) of leaves that only have another name."""
        leaves = ((item.of, path, self.by_path.get(path)) for path, item in self.transformed.items.items())
        return tuple(
            (of, path) for of, path, own in leaves if path != of and own and not isinstance(own[0], ComposedLeaf)
        )


def unscaled_sources(index: Index, leaf: Leaf) -> list[tuple[str, str]]:
    """Returns (saved path, dtype) of the arrays that a leaf takes as they are, neither scaled nor cast by rules."""
    if not isinstance(leaf, ComposedLeaf):
        return [(index.entries[leaf.number].path, leaf.spec.dtype)] if leaf.spec is not None else []
    parts = (part for part in leaf.array.parts if isinstance(part, SourceBox))
    return [(part.source, part.dtypes[0]) for part in parts if part.scales is None and len(part.dtypes) == 1]


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
    rules = with_names(rules, with_field_names(index.structure))
    own = {path: _own(leaves, source_rank) for path, leaves in index.by_path.items()}
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


def _own(leaves: Sequence[Leaf], rank: int) -> Leaf:
    """Returns the leaf of one rank at a path; the first if that rank has none, which a load then refuses."""
    if leaves[0].ranks is None:
        return leaves[0]
    return next((leaf for leaf in leaves if rank in decode_runs(leaf.ranks or ())), leaves[0])


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
    # constants are equal wherever they are: each is an array of its own
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


OWN = "~rank*"
_FIELDS = (NamedTupleNode, StructSequenceNode, DataclassNode, CustomNode, TensorNode, TableNode)
"""Kinds that need all their children."""
Steps = tuple[str, ...]


class NodeBuilder:
    """A node of the new tree while it is built."""

    def __init__(self) -> None:
        self.children: dict[str, NodeBuilder | None] = {}
        self.saved_path: Steps | None = None
        """Path of the saved container whose kind it may take."""
        self.sources: dict[str, Steps] = {}
        """Saved path of each child that is a leaf."""


def empty_containers(structure: Structure) -> list[tuple[str, int]]:
    """Returns the path of each empty container, which no leaf path contains, and the number of leaves before it."""
    empty: list[tuple[str, int]] = []
    leaves = 0

    def walk(node: Structure, path: str, prefix: str) -> None:
        nonlocal leaves
        if node is None:
            leaves += 1
            return
        if not node.children:
            empty.append((path, leaves))
        keys = [OWN] * len(node.children) if isinstance(node, PerRankNode) else map(key_text, keys_of(node, path))
        for key, child in zip(keys, node.children, strict=True):
            walk(child, prefix + key, f"{prefix}{key}/")

    walk(structure, "", "")
    return empty


def _nodes(structure: Structure, rank: int | None) -> dict[Steps, Node]:
    """Returns every container by its path; under `PerRank` those of one rank, or of the first."""
    nodes: dict[Steps, Node] = {}

    def walk(node: Structure, steps: Steps) -> None:
        if node is None:
            return
        nodes[steps] = node
        if isinstance(node, PerRankNode):
            own = [c for g, c in zip(node.ranks, node.children, strict=True) if rank in decode_runs(g).tolist()]
            for child in (own or list(node.children))[:1]:
                walk(child, (*steps, OWN))
            return
        for key, child in zip(keys_of(node, "/".join(steps)), node.children, strict=True):
            walk(child, (*steps, key_text(key)))

    walk(structure, ())
    return nodes


def rebuild_structure(
    structure: Structure, names: Iterable[tuple[str, str]], *, source_rank: int, rank: int
) -> Structure:
    """Returns the structure of a tree with these leaves, in this order.

    Args:
        names: (new path, saved path) of each leaf or empty container; the saved path is empty for an added one.
        source_rank: the rank whose subtrees of the saved structure count, under `PerRank`.
        rank: the rank that they belong to now.

    Raises:
        MismatchError: a path is both a leaf and a container.
        TreeError: a path of more levels than a tree may have.
    """
    nodes, root = _nodes(structure, source_rank), NodeBuilder()
    pairs = list(names)
    for now, before in pairs:
        if not now:
            if len(pairs) > 1:
                raise _path_conflict("")
            return nodes.get(tuple(before.split("/")) if before else ())
        old = tuple(before.split("/")) if before else ()
        _insert(root, tuple(now.split("/")), old, nodes, is_node=bool(old) and old in nodes)
    root.saved_path = ()
    return _build(root, (), nodes, rank)


def _insert(root: NodeBuilder, steps: Steps, old: Steps, nodes: dict[Steps, Node], *, is_node: bool) -> None:
    if len(steps) > MAX_DEPTH:
        raise TreeError(
            "/".join(steps)[:200],
            expected=f"a tree at most {MAX_DEPTH} levels deep",
            found=f"a name of {len(steps)} levels",
            hint="Give it a shorter name",
        )
    builder = root
    for depth, step in enumerate(steps):
        last = depth == len(steps) - 1 and not is_node
        child = builder.children.get(step)
        if step in builder.children and (child is None or last):
            raise _path_conflict("/".join(steps[: depth + 1]))
        if last:
            builder.children[step], builder.sources[step] = None, old
            return
        if child is None:
            child = builder.children[step] = NodeBuilder()
        if child.saved_path is None:
            child.saved_path = _saved_path(steps, old, depth + 1, nodes)
        builder = child


def _path_conflict(path: str) -> MismatchError:
    return MismatchError(
        path, expected="a leaf, or leaves below it", found="both", hint="Give one of them another name"
    )


def _saved_path(steps: Steps, old: Steps, depth: int, nodes: dict[Steps, Node]) -> Steps | None:
    """Returns the saved path of the container at a depth of a leaf's new path, or None."""
    if steps[:depth] in nodes:
        return steps[:depth]
    above = len(old) - (len(steps) - depth)
    moved = above >= 0 and steps[depth:-1] == old[above:-1] and old[:above] in nodes
    return old[:above] if moved else None


def _build(builder: NodeBuilder, steps: Steps, nodes: dict[Steps, Node], rank: int) -> Node:
    was = nodes.get(builder.saved_path) if builder.saved_path is not None else None
    texts, is_complete = list(builder.children), False
    if isinstance(was, (ListNode, TupleNode, DequeNode)):
        texts.sort(key=lambda text: (not text.isdecimal(), int(text) if text.isdecimal() else 0))
        is_complete = texts == [str(i) for i in range(len(texts))]
    elif isinstance(was, _FIELDS):
        known = [key_text(key) for key in keys_of(was, "")]
        is_complete = set(known) == set(texts)
        texts = known if is_complete else texts
    built: list[Structure] = []
    for text in texts:
        child = builder.children[text]
        built.append(None if child is None else _build(child, (*steps, text), nodes, rank))
    children = tuple(built)
    if texts == [OWN]:
        return PerRankNode((encode_runs([rank]),), children)
    if was is not None and is_complete:
        return msgspec.structs.replace(was, children=children)
    stored: dict[str, Value] = {}
    if isinstance(was, (DictNode, OrderedDictNode, DefaultDictNode)):
        stored = {key_text(key): value for key, value in zip(keys_of(was, ""), was.keys, strict=True)}
    keys = tuple(stored[text] if text in stored else _key(text, steps) for text in texts)
    if isinstance(was, OrderedDictNode):
        return OrderedDictNode(_attributes(was, dict(zip(texts, keys, strict=True)), builder, nodes), keys, children)
    if isinstance(was, (DictNode, DefaultDictNode)):
        return msgspec.structs.replace(was, keys=keys, children=children)
    return DictNode(keys, children)


def _attributes(
    was: OrderedDictNode, keys: Mapping[str, Value], builder: NodeBuilder, nodes: dict[Steps, Node]
) -> DictAttributes | None:
    """Returns the attributes of an OrderedDict whose entries have new names, which those of modules follow.

    Args:
        was: the saved container whose kind it takes.
        keys: of its entries, by their text.
    """
    moves: dict[Steps, list[tuple[str, str]]] = {}
    for text, old in builder.sources.items():
        source, now = nodes.get(old[:-1]), keys[text]
        if isinstance(source, OrderedDictNode) and source.attributes is not None and type(now) is str:
            before = _key(old[-1], old[:-1]) if "~" in old[-1] else old[-1]
            moves.setdefault(old[:-1], []).append((str(before), now))
    stored: dict[str, Value] = {}
    for path, pairs in moves.items():
        source = nodes[path]
        assert isinstance(source, OrderedDictNode) and source.attributes is not None, "only these are in moves"
        if (metadata := source.attributes.metadata) is not None:
            stored = renamed_modules(metadata.by_name(), [k for k in source.keys if type(k) is str], pairs) | stored
    others = None if was.attributes is None else was.attributes.others
    return DictAttributes(metadata_of(stored) if stored else None, others) if stored or others is not None else None


def _key(text: str, steps: Steps) -> Value:
    """Returns the key for a path step that no saved container had."""
    if text.startswith("~s"):
        return text.removeprefix("~s")
    if re.fullmatch("-?[0-9]+", text):
        return int(text)
    if text.startswith("~") and text[:2] not in ("~0", "~1"):
        raise MismatchError(
            "/".join((*steps, text)),
            expected="a new name of text and whole numbers",
            found=text,
            hint="Write ~0 for ~ and ~1 for / inside of a step",
        )
    return text.replace("~1", "/").replace("~0", "~")
