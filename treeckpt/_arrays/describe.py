"""Describes the tree that one rank saves: specs, arrays, values, and digests of their contents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
import xxhash

from .._core.planning.rank_trees import GlobalTree, Inventory, LeafSpec, piece_key
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.placements import BoxLayout, MeshLayout, Replicate, layout_of_group
from .._core.sharding.region import Region, c_strides, overlapping_groups
from .._core.tree.flatten import flatten
from .._core.tree.keyed_table import TableColumn
from .._core.tree.spec import BLOB_KINDS, ArraySpec, StridedView
from .._core.tree.structure import TABLE_KEYS, Structure, index_path, rank_key
from .._core.tree.value_codec import Value
from .base import ArraySource, SourcePiece, Storage
from .digests import ComparedPart, Comparison, compared, digests_of
from .registry import BLOB_TYPES, blob_source, encode, source_of
from .sharded import Sharded
from .table_columns import column_source, shift_offsets, shift_rows


class TableReplacer(Protocol):
    """Has tables that are saved as deltas in the place of whole ones."""

    def replace(self, tree: object, columns: Sequence[tuple[str, TableColumn]]) -> object:
        """Returns the tree with such tables, or the very tree; `columns` are those in it, with their paths."""
        ...


class DescribedTree(msgspec.Struct, frozen=True):
    """The tree that one rank saves."""

    inventory: Inventory
    sources: dict[str, ArraySource]
    """The arrays by path (with `~rank*` under `PerRank`)."""
    values: dict[str, Value]
    own_values: dict[str, Value]
    """The values under `PerRank`, by path."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that this rank holds; it writes at most so many."""
        return sum(
            piece.region.size * dtype_of(array.spec.dtype).itemsize
            for array in self.sources.values()
            for piece in array.pieces
        )


def describe_tree(
    tree: object,
    *,
    rank: int,
    allow_pickle: bool = False,
    advice: str = "",
    namespace: str = "",
    members: tuple[int, ...] | None = None,
    tables: bool = False,
    blobs: bool = False,
    deltas: TableReplacer | None = None,
) -> DescribedTree:
    """Flattens a tree and describes its leaves.

    Args:
        allow_pickle, advice: as for `encode`.
        tables: there may be keyed tables; `place_table_rows` then sets the global offsets of their rows.
        blobs: texts and bytes of more than `MAX_VALUE_NBYTES` are described as arrays, with one of `BLOB_KINDS`.
        members: where a group of ranks saves, the global rank of each, which distributed arrays use.
        deltas: has tables that are saved as deltas in their place.

    Raises:
        TreeError, LayoutError: a leaf cannot be saved; it is named.
    """
    structure, leaves = _flatten(tree, rank, namespace, deltas)
    mark = rank_key(rank)
    sources: dict[str, ArraySource] = {}
    values: dict[str, Value] = {}
    own_values: dict[str, Value] = {}
    specs: list[LeafSpec] = []
    unplaced: dict[Any, str] = {}
    here = rank if members is None else members[rank]
    for path, leaf in leaves:
        # most paths have no such text: to look for it is cheaper than to split them
        own = "~rank" in path and mark in path.split("/")
        if own:
            path = index_path(path, rank)
        rows = None
        if type(leaf) is TableColumn and tables:
            source, rows = column_source(leaf, path, here, source_of, own=own)
        else:
            source = blob_source(leaf) if blobs and isinstance(leaf, BLOB_TYPES) else source_of(leaf, path, here)
        if source is None:
            (own_values if own else values)[path] = encode(leaf, path, allow_pickle=allow_pickle, advice=advice)
            specs.append(LeafSpec(path, None, per_rank=() if own else None))
        else:
            sources[path] = source
            layout, first = source.layout, None
            if layout is not None and members is not None:
                layout = layout_of_group(layout, source.spec.shape, members)
            # no aliases by memory; the same object is still one array, but each value is stored for itself
            if source.storage is None and source.spec.kind not in BLOB_KINDS:
                identity = leaf.identity if isinstance(leaf, Sharded) else id(leaf)
                first = unplaced.setdefault((identity, own), path)
            if first not in (None, path):
                specs.append(LeafSpec(path, source.spec, None, first, per_rank=() if own else None))
            else:
                specs.append(LeafSpec(path, source.spec, layout, per_rank=() if own else None, rows=rows))
    inventory = Inventory(structure, tuple(_with_aliases(specs, sources)))
    return DescribedTree(inventory, sources, values, own_values)


def _flatten(
    tree: object, rank: int, namespace: str, deltas: TableReplacer | None
) -> tuple[Structure, list[tuple[str, Any]]]:
    """Flattens a tree, with deltas in the place of tables."""
    structure, leaves = flatten(tree, rank=rank, namespace=namespace)
    if deltas is None:
        return structure, leaves
    other = deltas.replace(tree, [(path, leaf) for path, leaf in leaves if type(leaf) is TableColumn])
    return (structure, leaves) if other is tree else flatten(other, rank=rank, namespace=namespace)


def place_table_rows(described: DescribedTree, merged: GlobalTree, rank: int) -> None:
    """Sets the offsets of table rows among those of all ranks, in place, once the global tree is known."""
    tables = {spec.path for spec in described.inventory.leaves if spec.rows is not None}
    for leaf in merged.leaves if tables else ():
        if leaf.path in tables and isinstance(leaf.layout, BoxLayout):
            start = next(region.offset[0] for holder, region in leaf.layout.pieces if holder == rank)
            described.sources[leaf.path] = shift_rows(described.sources[leaf.path], start)
            above, slash, key = leaf.path.rpartition("/")
            offsets = f"{above}{slash}{TABLE_KEYS[1]}"
            if key == TABLE_KEYS[0] and offsets in described.sources and offsets not in tables:
                shift_offsets(described.sources[offsets], start)


_Stored = tuple[LeafSpec, ArraySpec, Storage]
"""A leaf whose memory is known."""


def _with_aliases(specs: list[LeafSpec], sources: dict[str, ArraySource]) -> Iterable[LeafSpec]:
    """Returns the specs, with those marked as aliases whose memory another leaf has already."""
    arrays = zip([spec for spec in specs if spec.spec is not None], sources.values(), strict=True)
    stored = [(spec, source.spec, source.storage) for spec, source in arrays if source.storage is not None]
    starts = [storage.address for _, _, storage in stored]
    stops = [storage.address + storage.nbytes for _, _, storage in stored]
    aliases: dict[str, LeafSpec] = {}
    for group in overlapping_groups(starts, stops):
        kinds: dict[tuple[str, bool, bool], list[_Stored]] = {}
        # in the order of the leaves: the first of equal ones keeps the array
        for leaf, array, storage in (stored[number] for number in sorted(group)):
            # an alias is made by the library of its array, in elements of its dtype
            key = (array.dtype, array.kind == "numpy", leaf.per_rank is not None)
            kinds.setdefault(key, []).append((leaf, array, storage))
        for alike in kinds.values():
            if len(alike) > 1:
                aliases.update(_aliases(alike))
    return (aliases.get(spec.path, spec) for spec in specs) if aliases else specs


def _aliases(group: list[_Stored]) -> dict[str, LeafSpec]:
    """Returns the aliases among leaves of one dtype whose memory overlaps."""
    found: dict[str, LeafSpec] = {}
    distinct: dict[object, _Stored] = {}
    for leaf, array, storage in group:
        key = (storage.address, storage.strides, array.shape, leaf.layout)
        first, _, _ = distinct.setdefault(key, (leaf, array, storage))
        if first is not leaf:
            found[leaf.path] = msgspec.structs.replace(leaf, alias_of=first.path, layout=None)
    found.update(_views([stored for stored in distinct.values() if stored[0].layout is None]))
    for path, leaf in found.items():
        base = found.get(leaf.alias_of or "")
        if base is not None:  # the alias of a view is a view of the same array
            found[path] = msgspec.structs.replace(leaf, alias_of=base.alias_of, view=base.view)
    return found


def _views(plain: list[_Stored]) -> dict[str, LeafSpec]:
    """Returns, of arrays with overlapping memory, those inside a contiguous one as views of it."""
    found: dict[str, LeafSpec] = {}
    base: LeafSpec | None = None
    start = stop = 0

    def order(stored: _Stored) -> tuple[int, int, bool]:
        low, high = stored[2].range
        return low, -high, stored[2].strides is not None

    # by start, the longest first, so that only the array with the highest end so far has to be compared
    for leaf, array, storage in sorted(plain, key=order):
        (low, high), itemsize = storage.range, dtype_of(array.dtype).itemsize
        if base is not None and start <= low and high <= stop and (low - start) % itemsize == 0:
            strides = c_strides(array.shape, 1) if storage.strides is None else storage.strides
            view = StridedView((low - start) // itemsize, strides)
            found[leaf.path] = msgspec.structs.replace(leaf, alias_of=base.path, view=view)
        elif high > stop and storage.strides is None:
            base, start, stop = leaf, low, high
    return found


def json_digest(value: object) -> bytes:
    """Returns 16 bytes that are equal for what is equal as JSON: an inventory, or a value."""
    return xxhash.xxh3_128_digest(msgspec.json.encode(value))


def content_digests(described: DescribedTree, compare: Comparison) -> dict[str, bytes]:
    """Returns digests of values and of replicated arrays, which must be equal on all ranks, by path.

    Pieces of distributed arrays are in `piece_digests` and `box_digests`.
    """
    parts: dict[str, ComparedPart] = {}
    for spec in described.inventory.leaves:
        source = described.sources.get(spec.path)
        if source is None or spec.per_rank is not None or source.is_stored:
            continue
        itemsize = dtype_of(source.spec.dtype).itemsize
        if spec.rows is not None and isinstance(source.layout, BoxLayout):
            # which buckets have two owners is not known here; with equal ids it is the same part of the table
            ids = spec.path.rpartition("/")[2] == TABLE_KEYS[0]
            part = _compared(source.pieces[0], itemsize, True if ids else compare, by_rows=True)
            key = piece_key(spec.path, source.layout.pieces[0][1])
        elif _is_replica(source):
            everything = source.spec.kind in BLOB_KINDS  # as of all values
            part, key = _compared(source.pieces[0], itemsize, True if everything else compare), spec.path
        else:
            continue
        if part is not None:
            parts[key] = part
    found = {path: json_digest(value) for path, value in described.values.items()}
    return found | dict(zip(parts, digests_of([*parts.values()]), strict=True))


def piece_digests(described: DescribedTree, compare: Comparison, *, world: int) -> list[dict[str, bytes]]:
    """Returns digests of the pieces of distributed arrays that other ranks hold too, or may hold.

    Ranks that hold one piece of a dict mostly hold all of them: each dict is of arrays that are sharded and replicated
    along the same dimensions of their meshes. A mesh of the whole world without replication has no dict.
    """
    groups: dict[object, dict[str, ComparedPart]] = {}
    for spec in described.inventory.leaves:
        layout = spec.layout
        if not isinstance(layout, MeshLayout) or spec.per_rank is not None:
            continue
        source = described.sources[spec.path]
        copies = tuple(isinstance(placement, Replicate) for placement in layout.placements)
        shared = math.prod(n for n, copy in zip(layout.mesh.shape, copies, strict=True) if copy) > 1
        if all(copies) or not (shared or math.prod(layout.mesh.shape) < world):
            continue
        itemsize = dtype_of(source.spec.dtype).itemsize
        for piece in source.pieces:
            if (part := _compared(piece, itemsize, compare)) is not None:
                groups.setdefault((layout.mesh.shape, copies), {})[piece_key(spec.path, piece.region)] = part
    digests = iter(digests_of([part for group in groups.values() for part in group.values()]))
    # the group stands first: at its end `zip` takes no digest of the next group
    return [dict(zip(group, digests, strict=False)) for group in groups.values()]


def box_digests(
    described: DescribedTree, boxes: Sequence[tuple[str, Region]], compare: Comparison
) -> list[tuple[int, bytes]]:
    """Returns (number of the box, digest) for each listed piece of this rank that holds a box."""
    pieces: dict[str, Sequence[SourcePiece]] = {}
    for spec in described.inventory.leaves:
        source = described.sources.get(spec.path)
        # `content_digests` has those of tables
        if source is not None and isinstance(spec.layout, BoxLayout) and spec.rows is None and not source.is_stored:
            pieces[spec.path] = source.pieces
    numbers: list[int] = []
    parts: list[ComparedPart] = []
    for number, (path, box) in enumerate(boxes):
        for piece in pieces.get(path, ()):
            if box.within(piece.region):
                itemsize = dtype_of(described.sources[path].spec.dtype).itemsize
                part = ComparedPart(piece.data, box.relative_to(piece.region), itemsize)
                if (part := compared(part, compare)) is not None:
                    numbers.append(number)
                    parts.append(part)
    # several pieces of this rank may hold one box with equal content, which is sent once
    return list(dict.fromkeys(zip(numbers, digests_of(parts), strict=True)))


def _compared(piece: SourcePiece, itemsize: int, compare: Comparison, *, by_rows: bool = False) -> ComparedPart | None:
    whole = Region.whole(piece.region.shape)
    return compared(ComparedPart(piece.data, whole, itemsize, by_rows=by_rows), compare)


def _is_replica(source: ArraySource) -> bool:
    if source.layout is None:
        return True
    if not isinstance(source.layout, MeshLayout) or not source.pieces:
        return False
    return all(isinstance(placement, Replicate) for placement in source.layout.placements)
