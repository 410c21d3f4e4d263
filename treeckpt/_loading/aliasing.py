"""Checks leaves of a target that share memory: two different saved arrays are never written to the same memory.

Leaves of a target may be one tensor, or views of one. That is allowed where the saved leaves are one array too, by the
index, or have the same bytes; then these are read into other memory and compared, before anything is written. A leaf
that the checkpoint lacks is not missing where it is one array with another that is filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from .._arrays.base import ArrayTarget, StridedMemory, TargetPiece
from .._arrays.overlaps import conflicting_pair, in_same_memory, is_equal, memory_key, pieces_in_one_place
from .._arrays.registry import target_of
from .._core.format.records import AliasRecord, Leaf
from .._core.sharding.region import c_strides
from .._core.tree.spec import ArraySpec
from ..errors import MismatchError, TreeckptError
from ..rules._view import ComposedLeaf
from .match import Load
from .read_batch import BatchOptions, FilledArray, ReadBatch

T = TypeVar("T")


Filled = tuple[Load, FilledArray]
"""An array that is filled, and the load that does it."""


def check_ties(wanted: Sequence[Filled]) -> None:
    """Refuses arrays that differ where they would be written to the same memory.

    Raises:
        MismatchError: naming two of them.
        CorruptError: what had to be read to compare them is damaged.
    """
    if not wanted:
        return
    found = conflicting_pair(
        [filled.target for _, filled in wanted],
        lambda first, second: _is_one(wanted[first], wanted[second]),
        lambda pieces: read_pieces(wanted, pieces),
        wanted[0][0].memory,
    )
    if found is not None:
        first, second = (wanted[number][1].path for number in found)
        if first == second:
            raise pieces_in_one_place(first)
        raise MismatchError(
            second,
            expected=f"the bytes of {first}, with which it shares memory in the target",
            found="others in the checkpoint",
            hint="Untie the two, or put `...` in the place of one to fill the other alone",
        )


def tied_to(
    lacking: Sequence[tuple[str, Any]], there: Sequence[tuple[T, Any]], rank: int, *, in_place: bool
) -> dict[str, T]:
    """Returns the leaves that a checkpoint lacks and that are one array with one that it has, each with that one.

    Args:
        lacking: (path, leaf).
        there: (a name for it, leaf).
        in_place: whether one object in both places is one array; as a pattern of new arrays it may mean two.
    """
    shapes = {leaf.shape for _, leaf in lacking if hasattr(leaf, "shape")}
    # only leaves of a missing shape are looked at: each look describes a target
    alike = [(name, leaf) for name, leaf in there if getattr(leaf, "shape", None) in shapes] if shapes else []
    places = {place: (name, leaf) for name, leaf in alike if (place := _place_of(leaf, rank)) is not None}
    objects = {id(leaf): name for name, leaf in alike} if in_place else {}
    found: dict[str, T] = {}
    for path, leaf in lacking:
        if id(leaf) in objects:
            found[path] = objects[id(leaf)]
        elif (place := _place_of(leaf, rank)) in places and (in_place or places[place][1] is not leaf):
            found[path] = places[place][0]
    return found


def _place_of(leaf: object, rank: int) -> object:
    """Returns a key, equal for leaves that are filled together; None for a leaf without memory."""
    try:
        target = target_of(leaf, "", rank)
    # the match of this leaf names what is wrong with it
    except TreeckptError:
        return None
    return memory_key(target) if target is not None else None


def are_equal(first: tuple[Load, str], second: tuple[Load, str], spec: ArraySpec) -> bool:
    """Whether two saved arrays, each a path in a load, have the same bytes in the regions and the dtype of a spec."""
    wanted: list[Filled] = []
    for job, path in (first, second):
        leaf = job.find(path) or job.filled(path, spec)
        assert leaf is not None, "the caller has found it"
        wanted.append((job, FilledArray(path, leaf, ArrayTarget(spec, None, ()))))
    return is_equal(spec, lambda pieces: read_pieces(wanted, pieces), first[0].memory)


def read_pieces(wanted: Sequence[Filled], pieces: Sequence[tuple[int, Sequence[TargetPiece]]]) -> None:
    """Reads what is wanted for targets into other memory."""
    batches: dict[Load, ReadBatch] = {}
    for number, parts in pieces:
        job, filled = wanted[number]
        batch = batches.setdefault(job, job.new_batch())
        batch.add_target(filled.path, filled.leaf, msgspec.structs.replace(filled.target, pieces=parts))
    for job, batch in batches.items():
        batch.run(BatchOptions(job.memory, job.options.read.verify))
        job.batch.read_nbytes += batch.read_nbytes


def _is_one(first: Filled, second: Filled) -> bool:
    """Whether two targets take the same saved bytes wherever they share memory, by the index."""
    (job, a), (other, b) = first, second
    if job is not other or a.target.spec.dtype != b.target.spec.dtype:
        return False
    if identity_of(a.leaf) == identity_of(b.leaf) and in_same_memory(a.target, b.target):
        return True
    places = _place(a.leaf, a.target), _place(b.leaf, b.target)
    return places[0] is not None and places[0] == places[1]


def identity_of(leaf: Leaf) -> object:
    """Returns a key, equal for saved leaves that are one array, or the same view of one."""
    record = leaf.record
    return (record.of, record.view) if isinstance(record, AliasRecord) else (leaf.number, None)


def _place(leaf: Leaf, target: ArrayTarget) -> tuple[int, int] | None:
    """Returns the number of the saved array of a leaf, and the address at which all of it would start in memory.

    None where the elements do not lie as they did when they were saved.
    """
    record, spec = leaf.record, leaf.spec
    if isinstance(leaf, ComposedLeaf) or spec is None or spec.dtype != target.spec.dtype or len(target.pieces) != 1:
        return None
    window: StridedMemory | None = getattr(target.pieces[0].data, "window", None)
    if window is None or window.shape != spec.shape:
        return None
    offset, strides = 0, c_strides(spec.shape, 1)
    if isinstance(record, AliasRecord) and record.view is not None:
        offset, strides = record.view.offset, record.view.strides
    steps = zip(spec.shape, window.strides, strides, strict=True)
    if any(n > 1 and step != stride * window.itemsize for n, step, stride in steps):
        return None
    number = record.of if isinstance(record, AliasRecord) else leaf.number
    return number, window.address - offset * window.itemsize
