"""Lists and tuples that hold only values: each is one value, which a load replaces as a whole.

If such a sequence in the target and the saved one have the same keys at all levels, their leaves match one by one, like
all other leaves. If they differ (a list that grew), the whole content comes from the saved one.
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
from .containers import PerRank, flatten_one_level, is_leaf_type
from .flatten import child_of_rank, flatten, unflatten
from .keyed_table import KeyedTable
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
from .value_codec import Resolver

_SEQUENCES = (ListNode, TupleNode, DequeNode, NamedTupleNode)


class SequenceReplacement(msgspec.Struct, frozen=True):
    """A sequence in the target, and the saved one that replaces it."""

    path: str
    here: Any
    saved: Node

    @property
    def paths(self) -> list[str]:
        """The paths of the saved leaves."""
        return [f"{self.path}/{below}" if self.path else below for below, _ in paths_of(self.saved)]

    def content(self, leaves: Iterator[object], *, resolve: Resolver, namespace: str = "") -> Any:
        """Returns the saved content, in a container like the one of the target.

        Raises:
            MismatchError: a deque of the target is too short for it.
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


def differing_sequences(
    tree: object,
    saved: Structure,
    *,
    is_value: Callable[[object], bool],
    is_saved_value: Callable[[str], bool],
    rank: int,
    source_rank: int,
    namespace: str = "",
) -> dict[str, SequenceReplacement]:
    """Returns the sequences of values in a tree that differ from the saved ones in more than their leaves, by path.

    Args:
        is_value: returns whether a leaf of the tree is a value.
        is_saved_value: returns whether a value was saved at a path (with `~rank*`), and is requested.
        source_rank: the rank whose subtrees of the saved structure are used under `PerRank`.
    """
    found: dict[str, SequenceReplacement] = {}
    equal: list[SequenceReplacement] = []

    def walk(here: Any, node: Structure, path: str, prefix: str) -> bool:
        """Returns whether the keys are the same at all levels, or become so by the replacements found."""
        if here is ... or type(here) is KeyedTable:
            return True
        taken = flatten_one_level(here, path, namespace, rank)
        if taken is None or node is None:
            return taken is None and node is None
        if isinstance(node, PerRankNode):
            if type(here) is PerRank and any(source_rank in decode_runs(group) for group in node.ranks):
                below = f"{prefix}~rank*"
                return walk(here.value, child_of_rank(node, source_rank, path), below, below + "/")
            return False
        texts = [key_text(key) for key in taken.keys]
        children = dict(zip((key_text(key) for key in keys_of(node, path)), node.children, strict=True))
        same = set(texts) == children.keys()
        for text, child in zip(texts, taken.children, strict=True):
            if text in children and not (children[text] is None and is_leaf_type(type(child))):
                fits = walk(child, children[text], prefix + text, f"{prefix}{text}/")
                same = same and fits
        if not isinstance(here, (list, tuple, collections.deque)) or not isinstance(node, _SEQUENCES):
            return same
        one = SequenceReplacement(path, here, node)
        if same:
            equal.append(one)
        elif hasattr(here, "_fields") and set(texts) != children.keys():
            return False
        elif all(is_value(leaf) for _, leaf in flatten(here, rank=rank, namespace=namespace)[1]) and all(
            map(is_saved_value, one.paths)
        ):
            found[path] = one
            return True
        return same

    walk(tree, saved, "", "")
    # an object at two places is replaced at both
    ids = {id(one.here) for one in found.values()}
    found.update((one.path, one) for one in equal if id(one.here) in ids)
    return found
