"""Structures of any depth in documents that nest a bounded number of levels.

JSON and msgpack are read and written by nested calls, whose number is limited. What lies deeper than `DOCUMENT_DEPTH`
levels is listed beside the structure, in parts that are no deeper themselves. A custom node without a class, which no
tree has, marks the place of each.
"""

from __future__ import annotations

import msgspec

from ...errors import FormatError, TreeError
from .recursion import Recursive, trampoline
from .structure import DOCUMENT_DEPTH, MAX_DEPTH, CustomNode, Structure

__all__ = ["SplitStructure", "split_structure"]


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
