"""Subtrees of a structure that repeat, such as a model's in the moments of its optimizer: each is written once.

`extract_shared_subtrees` replaces them by marks, custom nodes without a class, which no tree has;
`expand_shared_subtrees` is the inverse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from ...errors import FormatError
from .structure import DOCUMENT_DEPTH, CustomNode, Node, PerRankNode, Structure

__all__ = ["expand_shared_subtrees", "extract_shared_subtrees", "leaf_count"]

MAX_SHARED = 32
"""The number of places of shared subtrees: it limits how much larger than its file a structure can become."""
MAX_REPEATED_CHILDREN = 3
"""A node of so few children is written again: a mark would be no shorter."""


def extract_shared_subtrees(structure: Structure) -> tuple[Structure, tuple[Structure, ...]]:
    """Returns the structure without its largest repeated subtrees, and these. No subtree lies inside of another one."""
    counts = Counter(map(_key, _nodes(structure)))
    taken: dict[bytes, tuple[int, Structure]] = {}
    places = 0

    def without(node: Structure) -> Structure:  # recursive: a structure is at most DOCUMENT_DEPTH deep here
        nonlocal places
        if node is None or isinstance(node, PerRankNode):
            return node
        key = _key(node)
        if counts[key] > 1 and len(node.children) > MAX_REPEATED_CHILDREN and places < MAX_SHARED:
            places += 1
            return CustomNode("", taken.setdefault(key, (len(taken), node))[0], (), ())
        children = tuple([None if child is None else without(child) for child in node.children])
        return node if children == node.children else msgspec.structs.replace(node, children=children)

    bare = without(structure)
    return bare, tuple(node for _, node in taken.values())


def _key(node: Node) -> bytes:
    return msgspec.json.encode(node)  # the keys 1 and True are equal, but not the same


def _nodes(structure: Structure) -> Iterator[Node]:
    if structure is not None and not isinstance(structure, PerRankNode):
        yield structure
        for child in structure.children:
            yield from _nodes(child) if child is not None else ()


def expand_shared_subtrees(structure: Structure, shared: tuple[Structure, ...], name: str) -> Structure:
    """Returns the structure with the shared subtrees in their places.

    Raises:
        FormatError: there is no subtree of that number, or there are too many places.
    """
    places = 0

    def full(node: Structure, depth: int) -> Structure:
        nonlocal places
        if node is None or depth > DOCUMENT_DEPTH:  # deeper ones are refused later
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
    """Returns the number of leaves of a structure."""
    if structure is None:
        return 1
    return sum(1 if child is None else leaf_count(child) for child in structure.children)
