"""Subtrees of a structure that are alike, as a model's and its optimizer's moments' are: each written once.

`share` takes them out and `expand` puts them back; their places are marked by custom nodes without a class, which no
tree has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from ...errors import FormatError
from .structure import LEVELS, CustomNode, Node, PerRankNode, Structure

__all__ = ["expand", "leaf_count", "share"]

MAX_SHARED = 32
"""Places in which shared subtrees may stand: what a small file can be blown up by."""
FEW = 3
"""Children that are not worth a mark."""


def share(structure: Structure) -> tuple[Structure, tuple[Structure, ...]]:
    """The structure with the largest subtrees that repeat taken out of it, and these; none is inside of another."""
    met = Counter(map(_key, _nodes(structure)))
    taken: dict[bytes, tuple[int, Structure]] = {}
    places = 0

    def without(node: Structure) -> Structure:  # of a tree that is not folded, so no deeper than LEVELS
        nonlocal places
        if node is None or isinstance(node, PerRankNode):
            return node
        key = _key(node)
        if met[key] > 1 and len(node.children) > FEW and places < MAX_SHARED:
            places += 1
            return CustomNode("", taken.setdefault(key, (len(taken), node))[0], (), ())
        children = tuple([None if child is None else without(child) for child in node.children])
        return node if children == node.children else msgspec.structs.replace(node, children=children)

    bare = without(structure)
    return bare, tuple(node for _, node in taken.values())


def _key(node: Node) -> bytes:
    return msgspec.json.encode(node)  # the keys 1 and True are equal, and not the same


def _nodes(structure: Structure) -> Iterator[Node]:
    if structure is not None and not isinstance(structure, PerRankNode):
        yield structure
        for child in structure.children:
            yield from _nodes(child) if child is not None else ()


def expand(structure: Structure, shared: tuple[Structure, ...], name: str) -> Structure:
    """The structure with the shared subtrees in their places.

    Raises:
        FormatError: there is none of that number, or they stand in too many places.
    """
    places = 0

    def full(node: Structure, depth: int) -> Structure:
        nonlocal places
        if node is None or depth > LEVELS:  # deeper ones are refused later
            return node
        if isinstance(node, CustomNode) and not node.cls:
            places += 1
            number = node.auxiliary
            if type(number) is not int or not 0 <= number < len(shared) or places > MAX_SHARED:
                raise FormatError(name, expected="one of the shared subtrees", found=f"{number!r:.80}")
            return shared[number]
        children = tuple([None if child is None else full(child, depth + 1) for child in node.children])
        return node if children == node.children else msgspec.structs.replace(node, children=children)

    return full(structure, 0)


def leaf_count(structure: Structure) -> int:
    """How many leaves a structure has."""
    if structure is None:
        return 1
    return sum(1 if child is None else leaf_count(child) for child in structure.children)
