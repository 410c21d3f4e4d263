"""Subtrees that repeat in a structure, such as a model's in the moments of its optimizer: an index stores them once.

In the structure, a custom node without a class stands in the place of a shared subtree; its auxiliary data is the
number of the subtree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from ...errors import FormatError
from .structure import CustomNode, Node, PerRankNode, Structure

MAX_SHARED = 32
"""The number of places of shared subtrees: it limits how much larger than its file a structure can become."""
MAX_REPEATED_CHILDREN = 3
"""A node of so few children is written again: a mark would be no shorter."""


def extract_shared_subtrees(structure: Structure) -> tuple[Structure, tuple[Structure, ...]]:
    """Returns the structure without its largest repeated subtrees, and these. No subtree lies inside of another one."""
    counts = Counter(map(_key, _nodes(structure)))
    taken: dict[bytes, tuple[int, Structure]] = {}
    places = 0

    def without(node: Structure) -> Structure:
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
    waiting = [structure]
    while waiting:
        node = waiting.pop()
        if node is not None and not isinstance(node, PerRankNode):
            yield node
            waiting += node.children


def expand_shared_subtrees(structure: Structure, shared: tuple[Structure, ...], name: str) -> Structure:
    """Returns the structure with the shared subtrees in their places.

    Raises:
        FormatError: there is no subtree of that number, or there are too many places.
    """
    places = 0

    def full(node: Structure) -> Structure:
        nonlocal places
        if node is None:
            return None
        if isinstance(node, CustomNode) and not node.cls:
            places += 1
            number = node.auxiliary
            if type(number) is not int or not 0 <= number < len(shared) or places > MAX_SHARED:
                raise FormatError(name, expected="one of the shared subtrees", found=f"{number!r:.80}")
            return shared[number]
        children = list(node.children)
        for at, child in enumerate(children):
            if child is not None:
                children[at] = full(child)
        made = tuple(children)
        return node if made == node.children else msgspec.structs.replace(node, children=made)

    return full(structure)
