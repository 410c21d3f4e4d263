"""The leaves of a tree that is filled, and what each takes of another tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..arrays.registry import is_value, resolve
from ..core.tree.flatten import flatten
from ..core.tree.sequences import differing_sequences
from ..core.tree.structure import Structure, index_path

__all__ = ["Matched", "matched"]


class Matched(msgspec.Struct, frozen=True):
    """The leaves of a tree, and what they take."""

    before: list[tuple[str, object]]
    given: dict[str, object]
    """By the same paths; those that are not in it stay."""
    whole: frozenset[int]
    """The ids of sequences of values that are leaves here, as they take the whole content of others."""
    taken: frozenset[str]
    """The leaves of the other tree that they take, with `~rank*` for the rank."""


def matched(
    into: Any,
    saved: Structure,
    given: Mapping[str, object],
    copied: Callable[[object, str], object],
    *,
    rank: int,
    namespace: str = "",
) -> Matched:
    """Matches the leaves of a tree with those of another one.

    Args:
        saved, given: the other tree's structure and leaves, with `~rank*` for the rank.
        copied: makes the value that a sequence takes of a leaf.
    """
    sequences = differing_sequences(
        into,
        saved,
        is_value=is_value,
        is_saved_value=lambda path: path in given and is_value(given[path]),
        rank=rank,
        source_rank=rank,
        namespace=namespace,
    )
    whole = frozenset(id(one.here) for one in sequences.values())
    _, before = flatten(into, rank=rank, namespace=namespace, whole=whole)
    found: dict[str, object] = {}
    for path, leaf in before:
        name = index_path(path, rank)
        if leaf is not ... and name in given:
            found[path] = given[name]
        elif id(leaf) in whole and name in sequences:
            one = sequences[name]
            leaves = iter([copied(given[below], below) for below in one.paths])
            found[path] = one.content(leaves, resolve=resolve, namespace=namespace)
    taken = frozenset(path for one in sequences.values() for path in one.paths)
    return Matched(before, found, whole, taken)
