"""Structures in documents: parts that are stored beside the structure. A custom node without a class marks each place.

JSON and msgpack are read and written by nested calls, whose number is limited, so what lies deeper than
`DOCUMENT_DEPTH` levels is stored apart, in parts that are no deeper themselves (`split_structure`). Subtrees that
repeat, such as a model's in the moments of its optimizer, are stored once (`extract_shared_subtrees`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from ...errors import FormatError, TreeError
from .recursion import Recursive, trampoline
from .structure import DOCUMENT_DEPTH, MAX_DEPTH, CustomNode, Node, OrderedDictNode, PerRankNode, Structure
from .value_codec import Value

MAX_SHARED = 32
"""The number of places of shared subtrees: it limits how much larger than its file a structure can become."""
MAX_REPEATED_CHILDREN = 3
"""A node of so few children is written again: a mark would be no shorter."""


class SplitStructure(msgspec.Struct, frozen=True, array_like=True):
    """A structure of bounded depth, and the deep parts that were cut from it."""

    top: Structure
    below: tuple[Structure, ...] = ()
    """The parts; each is marked at one place, by its number."""

    def whole(self, path: str = "") -> Structure:
        """Returns the structure with its deep parts in their places.

        Args:
            path: of the structure, for errors.

        Raises:
            FormatError: parts that are missing, used twice, or not used; a structure deeper than `MAX_DEPTH`.
        """
        if not self.below:
            return self.top
        parts = dict(enumerate(self.below))
        found = trampoline(_join(self.top, 0, parts, path))
        if parts:
            raise FormatError(path, expected="pieces that belong to the structure", found=f"{len(parts)} others")
        return found


def _join(node: Structure, depth: int, parts: dict[int, Structure], path: str) -> Recursive[Structure]:
    """Returns the node with the deep parts below it in their places, and removes these from `parts`."""
    if node is None:
        return None
    if depth == MAX_DEPTH:
        raise FormatError(path, expected=f"at most {MAX_DEPTH} levels", found="a deeper structure")
    if isinstance(node, CustomNode) and not node.cls:
        number = node.auxiliary
        part = parts.pop(number, None) if type(number) is int else None
        if part is None:
            raise FormatError(path, expected="a piece of the structure", found=f"{number!r:.80}")
        return (yield _join(part, depth, parts, path))
    children = list(node.children)
    for at, child in enumerate(children):
        if child is not None:
            children[at] = yield _join(child, depth + 1, parts, path)
    return msgspec.structs.replace(node, children=tuple(children))


def split_structure(structure: Structure) -> SplitStructure:
    """Cuts a structure that is deeper than `DOCUMENT_DEPTH` levels into parts that are not.

    Raises:
        TreeError: it is deeper than `MAX_DEPTH`.
    """
    level, depth = [structure] if structure is not None else [], 0
    while level:
        level = [child for node in level for child in node.children if child is not None]
        depth += 1
    if depth <= DOCUMENT_DEPTH:
        return SplitStructure(structure)
    if depth > MAX_DEPTH:
        raise TreeError("", expected=f"a tree at most {MAX_DEPTH} levels deep", found="a deeper one")
    parts: list[Structure] = []
    return SplitStructure(trampoline(_cut(structure, 0, parts)), tuple(parts))


def _cut(node: Structure, depth: int, parts: list[Structure]) -> Recursive[Structure]:
    """Returns the node at `depth` with marks for the deep parts below it, and adds these to `parts`."""
    if node is None:
        return None
    children = list(node.children)
    for at, child in enumerate(children):
        if child is not None:
            children[at] = yield _cut(child, depth + 1, parts)
    bare = msgspec.structs.replace(node, children=tuple(children))
    if not depth or depth % DOCUMENT_DEPTH:
        return bare
    parts.append(bare)
    return CustomNode("", len(parts) - 1, (), ())


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


class BareOrderedDict(msgspec.Struct, frozen=True, tag="OrderedDict", array_like=True):
    """An `OrderedDictNode` without attributes in a document, in which such a struct cannot leave out a field."""

    keys: tuple[Value, ...]
    children: tuple[Structure, ...]


def without_absent_attributes(structure: Structure) -> Structure:
    """Returns a structure, at most `DOCUMENT_DEPTH` deep, as a document has it: in the form of before attributes."""
    if structure is None:
        return None
    children = structure.children
    if children.count(None) < len(children):
        made = tuple([None if child is None else without_absent_attributes(child) for child in children])
        if any(child is not old for child, old in zip(made, children, strict=True)):
            structure = msgspec.structs.replace(structure, children=made)
    if isinstance(structure, OrderedDictNode) and structure.attributes is None:
        return cast(Any, BareOrderedDict(structure.keys, structure.children))
    return structure


def leaf_count(structure: Structure) -> int:
    """Returns the number of leaves of a structure."""
    if structure is None:
        return 1
    return sum(1 if child is None else leaf_count(child) for child in structure.children)
