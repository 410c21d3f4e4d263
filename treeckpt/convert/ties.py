"""Ties and views among the arrays of a tree, found as a save finds them."""

from __future__ import annotations

from typing import Any

import msgspec

from ..arrays.describe import describe_tree
from ..arrays.lazy import LazyArray
from ..core.planning.rank_trees import LeafSpec
from ..core.tree.spec import StridedView
from .contents import Contents, map_leaves, tree_of

__all__ = ["Tie", "ties_of"]


class Tie(msgspec.Struct, frozen=True):
    """A leaf that shows the array of another one, or a part of it."""

    of: str
    view: StridedView | None
    """None for the whole array in its own shape."""


def ties_of(contents: Contents) -> dict[str, Tie]:
    """By path, the leaves that share an array with one that stands elsewhere in the tree."""
    arrays = map_leaves(contents, lambda _, leaf: leaf if isinstance(leaf, LazyArray) else None)
    found: dict[str, Tie] = {}
    brought: Any = describe_tree(tree_of(arrays), rank=0)
    for spec in brought.inventory.leaves:
        assert isinstance(spec, LeafSpec), "an inventory is made of them"
        if spec.alias_of is not None:
            found[spec.path] = Tie(spec.alias_of, spec.view)
    return found
