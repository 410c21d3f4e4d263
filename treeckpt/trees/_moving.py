"""Copies trees on this rank: into new arrays, or into existing ones.

The adapters of the array libraries describe each array as a list of regions with memory, so every kind of leaf is
treated alike. Nothing here exchanges messages with other ranks.
"""

from __future__ import annotations

import copy as copying
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import ArraySource, ArrayTarget, HostArray, SourcePiece, Storage, TargetPiece
from .._arrays.overlaps import conflicting_pair, in_same_memory, is_equal, pieces_in_one_place
from .._arrays.registry import (
    abstract_of,
    decode,
    encodable,
    encode,
    is_same_value,
    is_value,
    library_of,
    like_of,
    mark_written,
    resolve,
    source_of,
    target_of,
)
from .._arrays.stateful import expand_states, state_tree
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, intersect, subtract
from .._core.tree.flatten import flatten, replace_leaves, update_in_place
from .._core.tree.leaf_differences import LeafDifferences, compare_leaves, differing_sequences, some_of
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import Structure, index_path
from .._core.tree.tensor_parts import check_no_tensors, check_same_tensors
from .._io.comm.comm import default_comm, global_rank
from ..errors import LayoutError, MismatchError, RankError, TreeError

_log = logging.getLogger("treeckpt")

TYPE_CHECK_ADVICE = "Or pass type_check=False, which copies it by copy.deepcopy, or sends its pickle"
BLOCK = 16 << 20
"""Bytes that are compared at a time."""


def chosen_ranks(ranks: Sequence[int] | None, size: int) -> list[int]:
    """Returns the ranks that an argument `ranks` names, in order; all for None.

    Raises:
        TreeError, RankError: it is no list, or there is no such rank.
    """
    if isinstance(ranks, (int, str)):
        raise TreeError("ranks", expected="a list of ranks", found=f"{ranks!r:.60}", hint=f"Pass ranks=[{ranks}]")
    chosen = sorted(set(range(size) if ranks is None else ranks))
    if not all(0 <= rank < size for rank in chosen):
        raise RankError(
            "ranks", ranks={}, expected=f"ranks of 0 to {size - 1}", found=f"{chosen}",
            hint="Ranks are counted within the group",
        )  # fmt: skip
    return chosen


class MatchedLeaves(msgspec.Struct, frozen=True):
    """The leaves of a tree, and the new leaf for each."""

    before: list[tuple[str, object]]
    given: dict[str, object]
    """New leaves by path; a leaf without an entry stays."""
    whole: frozenset[int]
    """The ids of sequences of values that are single leaves here, because their whole content is replaced."""
    differences: LeafDifferences
    """The leaves that only one of the trees has."""


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
    whole = frozenset(id(sequence.here) for sequence in sequences.values())
    structure, before = flatten(into, rank=rank, namespace=namespace, whole=whole)
    check_same_tensors(structure, saved, rank, given)
    wanted = {index_path(path, rank): leaf for path, leaf in before}
    differences = compare_leaves(wanted, given, whole=sequences)
    check_no_tensors(differences.missing, saved)
    taken: dict[str, object] = {}
    for path, leaf in before:
        name = index_path(path, rank)
        if leaf is not ... and name in given:
            taken[path] = given[name]
        elif id(leaf) in whole and name in sequences:
            sequence = sequences[name]
            leaves = iter([copied(given[below], below) for below in sequence.paths])
            taken[path] = sequence.content(leaves, resolve=resolve, namespace=namespace)
    return MatchedLeaves(before, taken, whole, differences)


class ValueCopies:
    """Copies values of one tree, which share no object with them.

    Args:
        type_check: refuses values of unknown kinds, which cannot be copied reliably; without it `copy.deepcopy` copies
            them, an object that stands at several places once.
    """

    def __init__(self, type_check: bool) -> None:
        self.type_check = type_check
        self.memo: dict[int, Any] = {}
        """As of `copy.deepcopy`: the copy of each object by its id."""

    def __call__(self, leaf: object, path: str) -> object:
        """Returns a copy of a value.

        Raises:
            TreeError: it is of an unknown kind, or cannot be copied.
        """
        try:
            return decode(encode(leaf, path, advice=TYPE_CHECK_ADVICE), path, allow_pickle=False)
        except TreeError:
            if self.type_check:
                raise
        try:
            return copying.deepcopy(leaf, self.memo)
        except Exception as error:  # raised by the object
            raise TreeError(path, expected="a value that copy.deepcopy takes", found=f"{error}"[:200]) from error

    def replaced(self, old: object, new: object, path: str) -> object:
        """Returns `old` where both values are equal, and a copy of `new` where they differ."""
        alike = encodable(old) and encodable(new) and is_same_value(old, new, path)
        return old if alike else self(new, path)


def distribute_local(
    tree: Any, like: Any, *, strict: bool, device: str | None, type_check: bool, namespace: str
) -> Any:
    """Does `treeckpt.trees.distribute` where every rank has the tree."""
    rank = global_rank(default_comm())
    tree, like = (state_tree(side, rank=rank, namespace=namespace) for side in (tree, like))
    given = dict(flatten(tree, rank=rank, namespace=namespace)[1])
    made: dict[tuple[int, int], object] = {}
    _, leaves = flatten(like, rank=rank, namespace=namespace)
    lacking = lacking_leaves([path for path, leaf in leaves if leaf is not ...], given, strict)
    log_kept_leaves(lacking)
    copied = ValueCopies(type_check)

    def new(path: str, leaf: object) -> object:
        if leaf is ... or path in lacking:
            return leaf
        # one leaf of like at two places takes two arrays, unless one array is given for both
        key = id(leaf), id(given[path])
        if key not in made:
            made[key] = _distributed_leaf(leaf, given[path], path, rank, device, copied)
        return made[key]

    return replace_leaves(like, iter([new(path, leaf) for path, leaf in leaves]), namespace=namespace)


def lacking_leaves(wanted: Sequence[str], given: Container[str], strict: bool) -> frozenset[str]:
    """Returns the paths of wanted leaves that a tree lacks: these stay as they are in like.

    Raises:
        MismatchError: `strict`, and it lacks one; or it has none of them.
    """
    lacking = [path for path in wanted if path not in given]
    if lacking and (strict or len(lacking) == len(wanted)):
        raise MismatchError(
            lacking[0],
            expected="every leaf of like in the tree" if strict else "one leaf at least that like and the tree have",
            found=some_of("not in the tree", lacking),
            hint="Put `...` into like for what is not wanted"
            + (", or pass strict=False to keep what like has there" if strict else ""),
        )
    return frozenset(lacking)


def log_kept_leaves(lacking: Collection[str]) -> None:
    """Logs which leaves of like stay, because the tree that is distributed lacks them."""
    if lacking:
        _log.warning("treeckpt.trees.distribute keeps leaves of like, %s", some_of("not in the tree", sorted(lacking)))


def _distributed_leaf(
    leaf: object, given: object, path: str, rank: int, device: str | None, copied: ValueCopies
) -> object:
    source = source_of(given, path, rank)
    if source is None:
        if abstract_of(leaf, path, rank) is not None:
            raise MismatchError(path, expected="an array", found="a value in the tree", hint="Put a value into like")
        return copied(given, path)
    target = like_of(leaf, path, rank, device)
    if target is None:
        raise MismatchError(path, expected="a value", found="an array", hint="Put an array or an ArraySpec into like")
    check_held(target, source, path)
    check_dtype(target.spec.dtype, source.spec.dtype, path)
    fill(target.pieces, source.pieces)
    return target.leaf


def fill(pieces: Sequence[TargetPiece], parts: Sequence[SourcePiece], *, non_blocking: bool = False) -> None:
    """Copies local pieces into the pieces of a target; call `check_held` first.

    Args:
        non_blocking: copies to and from a device may still be under way when it returns.
    """
    for piece in pieces:
        for part in parts:
            if (common := intersect(piece.region, part.region)) is not None:
                box, given = (common.relative_to(one.region).slices() for one in (piece, part))
                on_device: Any = next((data for data in (piece.data, part.data) if hasattr(data, "copy_box")), None)
                if on_device is None or not on_device.copy_box(
                    piece.data, box, part.data, given, non_blocking=non_blocking
                ):
                    piece.data.write(box, part.data.read(given))


def check_held(target: ArrayTarget, source: ArraySource, path: str) -> None:
    """Checks that this rank holds all elements that a target needs.

    Raises:
        MismatchError: the shapes differ.
        LayoutError: an element of the target is not in this rank's part of the source.
    """
    if target.spec.shape != source.spec.shape:
        raise MismatchError(path, expected=f"shape {target.spec.shape}", found=f"{source.spec.shape}")
    for piece in target.pieces:
        gaps = (piece.region,) if piece.region.size else ()
        for part in source.pieces:
            gaps = tuple(rest for gap in gaps for rest in subtract(gap, part.region))
        if gaps:
            raise LayoutError(
                path,
                expected="all elements of the target in what this rank holds of the source",
                found=f"none at offset {gaps[0].offset}, shape {gaps[0].shape}",
                hint="treeckpt.trees.gather brings them here, distribute with src= sends them",
            )


class _CastingTarget:
    """A writer that converts elements to the target's dtype."""

    def __init__(self, inner: Any, spec: ArraySpec, given: str) -> None:
        self.inner, self.spec, self.given = inner, spec, given

    def write(self, box: tuple[slice, ...], data: np.ndarray) -> None:
        self.inner.write(box, library_of(self.spec).cast(data, self.given, self.spec.dtype))


class _ArrayCopy(msgspec.Struct, frozen=True):
    """One array to be filled, and its source."""

    path: str
    target: ArrayTarget
    """The pieces to write to."""
    source: ArraySource
    storage: Storage | None = None
    """The target's memory; None where it is not known."""

    @property
    def nbytes(self) -> int:
        itemsize = dtype_of(self.source.spec.dtype).itemsize
        return sum(piece.region.size for piece in self.target.pieces) * itemsize

    def put(self, pieces: Sequence[TargetPiece], *, non_blocking: bool = False) -> None:
        """Fills pieces of the target's shape and dtype from the source."""
        wanted, given = self.target.spec, self.source.spec.dtype
        if wanted.dtype != given:
            pieces = [TargetPiece(piece.region, _CastingTarget(piece.data, wanted, given)) for piece in pieces]
        fill(pieces, self.source.pieces, non_blocking=non_blocking)


def copy_into(
    tree: Any,
    into: Any,
    *,
    cast: bool = False,
    non_blocking: bool = False,
    type_check: bool = True,
    namespace: str = "",
) -> None:
    """Copies the arrays of `tree` into those of `into`, in place; replaces values where their containers are mutable.

    Each array is filled from what this rank holds of the source, whatever the two layouts: whole arrays fill the local
    part of a DTensor. The trees may share memory. Every check is made before the first byte is written.

    >>> target = {"w": np.zeros(3)}
    >>> tc.trees.copy_into({"w": np.ones(3)}, target)
    >>> target
    {'w': array([1., 1., 1.])}

    Args:
        cast: converts dtypes instead of refusing them.
        non_blocking: copies from and to a device may still be under way at the return, as of `Tensor.copy_`:
            synchronise the device before the host reads what arrived, or changes what was copied.
        type_check: False takes values of unknown kinds, as deep copies.

    Raises:
        MismatchError: other leaves, shapes or dtypes; two arrays with different bytes for one place in memory; a value
            in a tuple that would have to change; a target on the meta device, or with less memory than elements.
        TreeError: a source on the meta device.
        LayoutError: this rank does not hold all elements that a target needs.
    """
    rank = global_rank(default_comm())
    tree = state_tree(tree, rank=rank, namespace=namespace)
    structure, leaves = flatten(tree, rank=rank, namespace=namespace)
    given = {index_path(path, rank): leaf for path, leaf in leaves}
    copied = ValueCopies(type_check)

    def fill(target: Any) -> int:
        matched = match_leaves(target, structure, given, copied, rank=rank, namespace=namespace)
        _check_same_leaves(matched.differences)
        return put_leaves(
            target,
            matched,
            # what is whole consists of copies already
            lambda old, value, path: value if id(old) in matched.whole else copied.replaced(old, value, path),
            rank=rank,
            cast=cast,
            non_blocking=non_blocking,
            namespace=namespace,
        )

    states = expand_states(into, rank=rank, namespace=namespace, mappings=True)
    if states is None:
        fill(into)
    else:
        states.restore(lambda path, arrays: tree, fill)


def _check_same_leaves(differences: LeafDifferences) -> None:
    if differences.paths:
        missing, unexpected = len(differences.missing), len(differences.unexpected)
        raise MismatchError(
            differences.paths[0],
            expected="the same leaves in both trees",
            found=f"{missing} missing in the source, {unexpected} of it not in the target",
            hint="treeckpt.trees.same_structure lists the differences",
        )


def put_leaves(
    into: Any,
    matched: MatchedLeaves,
    value: Callable[[Any, Any, str], object],
    *,
    rank: int,
    cast: bool,
    non_blocking: bool = False,
    namespace: str = "",
) -> int:
    """Copies arrays into those of a tree, and replaces values; every check comes first.

    Args:
        matched: the leaves of `into`, and the new leaf for each.
        value: (old, new, path) -> the value to store, `old` itself where they are equal.

    Returns:
        bytes of the filled arrays.
    """
    before, given = matched.before, matched.given
    new: list[object] = []
    copies: list[_ArrayCopy] = []
    for path, leaf in before:
        if path not in given:
            new.append(leaf)
            continue
        target, source = target_of(leaf, path, rank), source_of(given[path], path, rank)
        if (target is None) != (source is None):
            words = ("a value", "an array") if target is None else ("an array", "a value")
            raise MismatchError(path, expected=words[0], found=words[1])
        if target is None or source is None:
            new.append(value(leaf, given[path], path))
            continue
        new.append(leaf)
        present = source_of(leaf, path, rank)
        storage = present.storage if present is not None else None
        check_held(target, source, path)
        if not cast:
            check_dtype(target.spec.dtype, source.spec.dtype, path)
        copies.append(_ArrayCopy(path, target, source, storage))
    _check_ties(copies)
    # an array that stands at several places is filled once
    copies = list({id(copy.target.leaf): copy for copy in copies}.values())
    _put(into, matched, new, copies, non_blocking=non_blocking, namespace=namespace)
    return sum(copy.nbytes for copy in copies)


def _put(
    into: Any,
    matched: MatchedLeaves,
    new: list[object],
    copies: list[_ArrayCopy],
    *,
    non_blocking: bool,
    namespace: str,
) -> None:
    filled = replace_leaves(into, iter(new), namespace=namespace, whole=matched.whole)
    stuck = update_in_place(into, filled, is_value=is_value, namespace=namespace, dry=True)
    if stuck:
        raise MismatchError(
            stuck[0][0],
            expected="a value that is the same, or in a container that can change",
            found=f"{stuck[0][1]!r:.60}",
            hint="Put it into a dict, a list or a dataclass that is not frozen",
        )
    # before the first byte: a copy that fails midway has changed arrays too
    mark_written(copy.target.leaf for copy in copies)
    for copy in _without_overlaps(copies):
        copy.put(copy.target.pieces, non_blocking=non_blocking)
    update_in_place(into, filled, is_value=is_value, namespace=namespace)


def _check_ties(copies: Sequence[_ArrayCopy]) -> None:
    """Refuses different bytes for one place in memory, where the last write would win."""

    def is_one(first: int, second: int) -> bool:
        memory = copies[first].source.storage
        alike = memory is not None and memory == copies[second].source.storage
        return alike and in_same_memory(copies[first].target, copies[second].target)

    pair = conflicting_pair([copy.target for copy in copies], is_one, partial(_put_all, copies), BLOCK)
    if pair is not None:
        first, second = (copies[number].path for number in pair)
        if first == second:
            raise pieces_in_one_place(first)
        raise MismatchError(
            second,
            expected=f"the bytes of {first}, with which it shares memory in the target",
            found="others",
            hint="Untie the two in the target",
        )


def are_equal(first: object, second: object, wanted: object, path: str, rank: int) -> bool:
    """Returns whether two arrays have the same bytes in the regions and the dtype of `wanted`."""
    spec = abstract_of(wanted, path, rank)
    assert spec is not None, "only arrays are compared"
    regions = (Region.whole(spec.shape),) if spec.regions is None else spec.regions
    # without memory: `check_held` looks at the regions alone
    target = ArrayTarget(spec, None, [TargetPiece(region, HostArray(np.empty(0))) for region in regions])
    copies: list[_ArrayCopy] = []
    for leaf in (first, second):
        if (source := source_of(leaf, path, rank)) is None:
            return False
        check_held(target, source, path)
        copies.append(_ArrayCopy(path, target, source))

    return first is second or is_equal(spec, partial(_put_all, copies), BLOCK)


def _put_all(copies: Sequence[_ArrayCopy], wanted: Sequence[tuple[int, Sequence[TargetPiece]]]) -> None:
    """Fills other pieces of numbered copies."""
    for number, pieces in wanted:
        copies[number].put(pieces)


def check_dtype(wanted: str, given: str, path: str) -> None:
    """Checks that two dtypes are the same.

    Raises:
        MismatchError: they differ.
    """
    if wanted != given:
        raise MismatchError(path, expected=wanted, found=given, hint="Convert one of them first")


def _without_overlaps(copies: list[_ArrayCopy]) -> list[_ArrayCopy]:
    """Returns the copies, with sources that a copy would overwrite duplicated: trees may share memory, as in a swap."""
    ranges = sorted(copy.storage.range for copy in copies if copy.storage is not None)
    starts = [low for low, _ in ranges]
    longest = max((high - low for low, high in ranges), default=0)

    def overlaps_of(source: ArraySource) -> bool:
        if source.storage is None:
            return False
        low, high = source.storage.range
        # no range that begins earlier reaches so far
        near = ranges[bisect_left(starts, low - longest) : bisect_left(starts, high)]
        return any(a < high and low < b for a, b in near)

    return [
        msgspec.structs.replace(copy, source=_duplicated(copy.source)) if overlaps_of(copy.source) else copy
        for copy in copies
    ]


def _duplicated(source: ArraySource) -> ArraySource:
    kept = [
        SourcePiece(p.region, HostArray(p.data.read(tuple(slice(0, n) for n in p.region.shape)).copy()))
        for p in source.pieces
    ]
    return msgspec.structs.replace(source, pieces=kept)
