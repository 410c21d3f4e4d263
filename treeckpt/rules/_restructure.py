"""The structure of a tree whose leaves have new names, with containers of their saved kinds where possible.

A container that is still at its path, or that moved together with its children, keeps its kind if its children allow
it: a list needs all positions from 0 on, a class all its fields. Every other container is a dict, with integer keys
where a step is a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from .._core.sharding.int_runs import decode_runs, encode_runs
from .._core.tree.dict_attributes import DictAttributes, metadata_of, renamed_modules
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
    key_text,
    keys_of,
)
from .._core.tree.value_codec import Value
from ..errors import MismatchError, TreeError

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
    found: list[tuple[str, int]] = []
    leaves = 0

    def walk(node: Structure, path: str, prefix: str) -> None:
        nonlocal leaves
        if node is None:
            leaves += 1
            return
        if not node.children:
            found.append((path, leaves))
        keys = [OWN] * len(node.children) if isinstance(node, PerRankNode) else map(key_text, keys_of(node, path))
        for key, child in zip(keys, node.children, strict=True):
            walk(child, prefix + key, f"{prefix}{key}/")

    walk(structure, "", "")
    return found


def _nodes(structure: Structure, rank: int | None) -> dict[Steps, Node]:
    """Returns every container by its path; under `PerRank` those of one rank, or of the first."""
    found: dict[Steps, Node] = {}

    def walk(node: Structure, steps: Steps) -> None:
        if node is None:
            return
        found[steps] = node
        if isinstance(node, PerRankNode):
            own = [c for g, c in zip(node.ranks, node.children, strict=True) if rank in decode_runs(g).tolist()]
            for child in (own or list(node.children))[:1]:
                walk(child, (*steps, OWN))
            return
        for key, child in zip(keys_of(node, "/".join(steps)), node.children, strict=True):
            walk(child, (*steps, key_text(key)))

    walk(structure, ())
    return found


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
