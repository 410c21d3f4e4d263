"""Lists and tuples that hold values only: each is one value, which a load takes as a whole.

Where such a sequence here and the saved one have the same keys all the way down, their leaves match one by one, as all
others do. Where they differ (a list that grew) the whole content is the saved one.
"""

# A tree holds objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ...errors import MismatchError
from ..sharding.int_runs import decode_runs
from .containers import PerRank, is_common_leaf, take
from .flatten import flatten, own_child, unflatten
from .keyed_table import KeyedTable
from .recursion import Walk, run
from .spec import Resolver
from .structure import (
    DequeNode,
    ListNode,
    NamedTupleNode,
    Node,
    PerRankNode,
    Structure,
    TupleNode,
    key_text,
    keys_of,
    paths_of,
)

__all__ = ["Taking", "differing"]

_SEQUENCES = (ListNode, TupleNode, DequeNode, NamedTupleNode)


class Taking(msgspec.Struct, frozen=True):
    """A sequence here, and the saved one that it takes."""

    path: str
    here: Any
    saved: Node

    @property
    def paths(self) -> list[str]:
        """Of the saved leaves."""
        return [f"{self.path}/{below}" if self.path else below for below, _ in paths_of(self.saved)]

    def content(self, leaves: Iterator[object], *, resolve: Resolver, namespace: str = "") -> Any:
        """The saved content, in a container as the one here.

        Raises:
            MismatchError: a deque here has no room for it.
        """
        found: Any = unflatten(self.saved, leaves, resolve=resolve, namespace=namespace)
        if isinstance(self.here, collections.deque):
            if self.here.maxlen is not None and len(found) > self.here.maxlen:
                raise MismatchError(
                    self.path,
                    expected=f"at most {self.here.maxlen} items, as the deque has room for",
                    found=f"{len(found)} in the checkpoint",
                    hint="Make the deque with a larger maxlen",
                )
            return collections.deque(found, self.here.maxlen)
        kind = type(self.here)
        return kind._make(found) if hasattr(kind, "_make") else kind(found)


def differing(
    tree: object,
    saved: Structure,
    *,
    is_value: Callable[[object], bool],
    is_saved_value: Callable[[str], bool],
    rank: int,
    source_rank: int,
    namespace: str = "",
) -> dict[str, Taking]:
    """The sequences of values in a tree that differ from the saved ones in more than their leaves, by path.

    Args:
        is_value: whether a leaf here is a value.
        is_saved_value: whether a value was saved at a path (with `~rank*`), and is asked for.
        source_rank: whose subtrees of the saved structure count, under `PerRank`.
    """
    found: dict[str, Taking] = {}
    alike: list[Taking] = []

    def walk(here: Any, node: Structure, path: str, prefix: str) -> Walk[bool]:
        """Whether the keys are the same all the way down, or have been made so."""
        if here is ... or type(here) is KeyedTable:
            return True
        taken = take(here, path, namespace, rank)
        if taken is None or node is None:
            return taken is None and node is None
        if isinstance(node, PerRankNode):
            if type(here) is PerRank and any(source_rank in decode_runs(group) for group in node.ranks):
                below = f"{prefix}~rank*"
                return (yield walk(here.value, own_child(node, source_rank, path), below, below + "/"))
            return False
        texts = [key_text(key) for key in taken.keys]
        children = dict(zip((key_text(key) for key in keys_of(node, path)), node.children, strict=True))
        same = set(texts) == children.keys()
        for text, child in zip(texts, taken.children, strict=True):
            if text in children and not (children[text] is None and is_common_leaf(type(child))):
                fits = yield walk(child, children[text], prefix + text, f"{prefix}{text}/")
                same = same and fits
        if not isinstance(here, (list, tuple, collections.deque)) or not isinstance(node, _SEQUENCES):
            return same
        one = Taking(path, here, node)
        if same:
            alike.append(one)
        elif hasattr(here, "_fields") and set(texts) != children.keys():
            return False
        elif all(is_value(leaf) for _, leaf in flatten(here, rank=rank, namespace=namespace)[1]) and all(
            map(is_saved_value, one.paths)
        ):
            found[path] = one
            return True
        return same

    run(walk(tree, saved, "", ""))
    # an object in two places is a leaf in both
    ids = {id(one.here) for one in found.values()}
    found.update((one.path, one) for one in alike if id(one.here) in ids)
    return found
