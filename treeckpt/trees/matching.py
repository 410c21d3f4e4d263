"""Matches the leaves of a tree that is filled with the leaves of another tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..arrays.registry import is_value, resolve
from ..core.tree.flatten import flatten
from ..core.tree.sequences import differing_sequences
from ..core.tree.structure import Structure, index_path
from ..core.tree.tensor_parts import check_no_tensors, check_same_tensors


class MatchedLeaves(msgspec.Struct, frozen=True):
    """The leaves of a tree, and the new leaf for each."""

    before: list[tuple[str, object]]
    given: dict[str, object]
    """New leaves by path; a leaf without an entry stays."""
    whole: frozenset[int]
    """The ids of sequences of values that are single leaves here, because their whole content is replaced."""
    taken: frozenset[str]
    """Paths of the other tree's leaves in such sequences, with `~rank*` for the rank."""


def match_leaves(
    into: Any,
    saved: Structure,
    given: Mapping[str, object],
    copied: Callable[[object, str], object],
    *,
    rank: int,
    namespace: str = "",
) -> MatchedLeaves:
    """Matches the leaves of a tree with those of another tree.

    Args:
        saved, given: the other tree's structure and leaves, with `~rank*` for the rank.
        copied: returns a copy of a value, for a sequence.
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
    structure, before = flatten(into, rank=rank, namespace=namespace, whole=whole)
    check_same_tensors(structure, saved, rank, given)
    found: dict[str, object] = {}
    missing: list[str] = []
    for path, leaf in before:
        name = index_path(path, rank)
        if leaf is not ... and name in given:
            found[path] = given[name]
        elif id(leaf) in whole and name in sequences:
            one = sequences[name]
            leaves = iter([copied(given[below], below) for below in one.paths])
            found[path] = one.content(leaves, resolve=resolve, namespace=namespace)
        elif leaf is not ...:
            missing.append(name)
    check_no_tensors(missing, saved)
    taken = frozenset(path for one in sequences.values() for path in one.paths)
    return MatchedLeaves(before, found, whole, taken)
