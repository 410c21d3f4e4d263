"""The structure of a tree whose leaves have new names: containers of the kinds that they had, as far as that goes.

A container that still stands where it stood, or moved with what is in it, keeps its kind where its children allow it: a
list needs all positions from 0 on, a class all its fields. Any other one is a dict, with integers as keys where a step
is a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from ...core.sharding.int_runs import decode_runs, encode_runs
from ...core.tree.recursion import Recursive, trampoline
from ...core.tree.structure import (
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
    TupleNode,
    key_text,
    keys_of,
)
from ...core.tree.value_codec import Value
from ...errors import MismatchError

__all__ = ["empty_nodes", "regrow"]

OWN = "~rank*"
_FIELDS = (NamedTupleNode, StructSequenceNode, DataclassNode, CustomNode, TableNode)
"""Kinds that need all of their children."""
Steps = tuple[str, ...]


class NodeBuilder:
    """A node of the new tree while it grows."""

    def __init__(self) -> None:
        self.children: dict[str, NodeBuilder | None] = {}
        self.was: Steps | None = None
        """Where a container stood whose kind it may take."""


def empty_nodes(structure: Structure) -> list[tuple[str, int]]:
    """Containers without anything in them, which no leaf tells of: the path, and how many leaves stand before it."""
    found: list[tuple[str, int]] = []
    leaves = 0

    def walk(node: Structure, path: str, prefix: str) -> Recursive[None]:
        nonlocal leaves
        if node is None:
            leaves += 1
            return
        if not node.children:
            found.append((path, leaves))
        keys = [OWN] * len(node.children) if isinstance(node, PerRankNode) else map(key_text, keys_of(node, path))
        for key, child in zip(keys, node.children, strict=True):
            yield walk(child, prefix + key, f"{prefix}{key}/")

    trampoline(walk(structure, "", ""))
    return found


def _nodes(structure: Structure, rank: int | None) -> dict[Steps, Node]:
    """Every container by its path; of those under `PerRank` one rank's, or the first."""
    found: dict[Steps, Node] = {}

    def walk(node: Structure, steps: Steps) -> Recursive[None]:
        if node is None:
            return
        found[steps] = node
        if isinstance(node, PerRankNode):
            own = [c for g, c in zip(node.ranks, node.children, strict=True) if rank in decode_runs(g).tolist()]
            for child in (own or list(node.children))[:1]:
                yield walk(child, (*steps, OWN))
            return
        for key, child in zip(keys_of(node, "/".join(steps)), node.children, strict=True):
            yield walk(child, (*steps, key_text(key)))

    trampoline(walk(structure, ()))
    return found


def regrow(structure: Structure, names: Iterable[tuple[str, str]], *, source_rank: int, rank: int) -> Structure:
    """The structure of a tree with these leaves, in this order.

    Args:
        names: of each leaf or empty container, how it is called now, and how it was; empty for what is new.
        source_rank: whose subtrees of the saved structure count, under `PerRank`.
        rank: whose they are now.

    Raises:
        MismatchError: a leaf stands where others lie below.
    """
    nodes, root = _nodes(structure, source_rank), NodeBuilder()
    pairs = list(names)
    for now, before in pairs:
        if not now:
            if len(pairs) > 1:
                raise _both("")
            return nodes.get(tuple(before.split("/")) if before else ())
        old = tuple(before.split("/")) if before else ()
        _add(root, tuple(now.split("/")), old, nodes, is_node=bool(old) and old in nodes)
    root.was = ()
    return trampoline(_grown(root, (), nodes, rank))


def _add(root: NodeBuilder, steps: Steps, old: Steps, nodes: dict[Steps, Node], *, is_node: bool) -> None:
    twig = root
    for depth, step in enumerate(steps):
        last = depth == len(steps) - 1 and not is_node
        child = twig.children.get(step)
        if step in twig.children and (child is None or last):
            raise _both("/".join(steps[: depth + 1]))
        if last:
            twig.children[step] = None
            return
        if child is None:
            child = twig.children[step] = NodeBuilder()
        if child.was is None:
            child.was = _origin(steps, old, depth + 1, nodes)
        twig = child


def _both(path: str) -> MismatchError:
    return MismatchError(
        path, expected="a leaf, or leaves below it", found="both", hint="Give one of them another name"
    )


def _origin(steps: Steps, old: Steps, depth: int, nodes: dict[Steps, Node]) -> Steps | None:
    """Where the container stood that a leaf now has at a depth."""
    if steps[:depth] in nodes:
        return steps[:depth]
    above = len(old) - (len(steps) - depth)
    moved = above >= 0 and steps[depth:-1] == old[above:-1] and old[:above] in nodes
    return old[:above] if moved else None


def _grown(twig: NodeBuilder, steps: Steps, nodes: dict[Steps, Node], rank: int) -> Recursive[Node]:
    was = nodes.get(twig.was) if twig.was is not None else None
    texts = list(twig.children)
    if isinstance(was, (ListNode, TupleNode, DequeNode)):
        texts.sort(key=lambda text: (not text.isdecimal(), int(text) if text.isdecimal() else 0))
    elif isinstance(was, _FIELDS):
        known = [key_text(key) for key in keys_of(was, "")]
        texts = known if set(known) == set(texts) else texts
    grown: list[Structure] = []
    for text in texts:
        child = twig.children[text]
        grown.append(None if child is None else (yield _grown(child, (*steps, text), nodes, rank)))
    children = tuple(grown)
    if texts == [OWN]:
        return PerRankNode((encode_runs([rank]),), children)
    if isinstance(was, (ListNode, TupleNode, DequeNode)) and texts == [str(i) for i in range(len(texts))]:
        return msgspec.structs.replace(was, children=children)
    if isinstance(was, _FIELDS) and texts == [key_text(key) for key in keys_of(was, "")]:
        return msgspec.structs.replace(was, children=children)
    stored: dict[str, Value] = {}
    if isinstance(was, (DictNode, OrderedDictNode, DefaultDictNode)):
        stored = {key_text(key): value for key, value in zip(keys_of(was, ""), was.keys, strict=True)}
    keys = tuple(stored[text] if text in stored else _key(text, steps) for text in texts)
    if isinstance(was, (DictNode, OrderedDictNode, DefaultDictNode)):
        return msgspec.structs.replace(was, keys=keys, children=children)
    return DictNode(keys, children)


def _key(text: str, steps: Steps) -> Value:
    """The key of a step that no saved container had."""
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
