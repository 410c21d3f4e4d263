"""Structures of any depth in documents that nest a bounded number of levels.

JSON and msgpack are read and written by calls within calls, of which there is a limit. What lies deeper than `LEVELS`
levels is listed beside the structure, in pieces that are no deeper themselves; a custom node without a class, which no
tree has, marks the place of each.
"""

from __future__ import annotations

import msgspec

from ...errors import FormatError, TreeError
from .recursion import Walk, run
from .structure import LEVELS, MAX_DEPTH, CustomNode, Structure

__all__ = ["Folded", "fold"]


class Folded(msgspec.Struct, frozen=True, array_like=True):
    """A structure whose deep parts stand beside it."""

    top: Structure
    below: tuple[Structure, ...] = ()
    """Pieces; each is marked in one place, by its number."""

    def whole(self, path: str = "") -> Structure:
        """The structure itself.

        Args:
            path: where it stands, for errors.

        Raises:
            FormatError: pieces that are missing, or used twice, or not at all; a structure deeper than `MAX_DEPTH`.
        """
        if not self.below:
            return self.top
        left = dict(enumerate(self.below))

        def full(node: Structure, depth: int) -> Walk[Structure]:
            if node is None:
                return None
            if depth == MAX_DEPTH:
                raise FormatError(path, expected=f"at most {MAX_DEPTH} levels", found="a deeper structure")
            if isinstance(node, CustomNode) and not node.cls:
                number = node.auxiliary
                piece = left.pop(number, None) if type(number) is int else None
                if piece is None:
                    raise FormatError(path, expected="a piece of the structure", found=f"{number!r:.80}")
                return (yield full(piece, depth))
            children = list(node.children)
            for at, child in enumerate(children):
                if child is not None:
                    children[at] = yield full(child, depth + 1)
            return msgspec.structs.replace(node, children=tuple(children))

        found = run(full(self.top, 0))
        if left:
            raise FormatError(path, expected="pieces that belong to the structure", found=f"{len(left)} others")
        return found


def fold(structure: Structure) -> Folded:
    """The structure, with what lies deeper than `LEVELS` levels beside it.

    Raises:
        TreeError: it is deeper than `MAX_DEPTH`.
    """
    depth = _depth(structure)
    if depth <= LEVELS:
        return Folded(structure)
    if depth > MAX_DEPTH:
        raise TreeError("", expected=f"a tree at most {MAX_DEPTH} levels deep", found="a deeper one")
    pieces: list[Structure] = []

    def cut(node: Structure, depth: int) -> Walk[Structure]:
        if node is None:
            return None
        children = list(node.children)
        for at, child in enumerate(children):
            if child is not None:
                children[at] = yield cut(child, depth + 1)
        bare = msgspec.structs.replace(node, children=tuple(children))
        if not depth or depth % LEVELS:
            return bare
        pieces.append(bare)
        return CustomNode("", len(pieces) - 1, (), ())

    return Folded(run(cut(structure, 0)), tuple(pieces))


def _depth(structure: Structure) -> int:
    """Levels of containers."""
    level, depth = [structure] if structure is not None else [], 0
    while level:
        level = [child for node in level for child in node.children if child is not None]
        depth += 1
    return depth
