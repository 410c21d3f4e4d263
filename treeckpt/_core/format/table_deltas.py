"""Tables that were saved as deltas, as loads see them: each column is one array of all rows that were written.

An index has the columns of such a table apart: those of its whole rows, and those of each delta, see `TableNode`. Loads
see each column as the one after the other, with the chunks of all of them, and `TableParts` with it, which says where
each part begins, and which arrays hold its buckets and the ids that it deletes. Of an id that several parts have the
last row counts; `_loading.keyed_tables` finds the rows that count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ...errors import FormatError
from ..planning.load_plan import Chunk
from ..sharding.region import Region
from ..tree.spec import ArraySpec
from ..tree.structure import DELTA_KEYS, TABLE_DELTAS, TABLE_KEYS, Structure, TableNode, containers_of, deltas_of
from .records import AliasRecord, ArrayRecord, Index, Leaf, LeafRecord, encode_boxes


class TablePart(msgspec.Struct, frozen=True):
    """The rows of one part of a table, in its joined columns."""

    start: int
    stop: int
    offsets: Leaf
    """The first row of each bucket, from the start of the part on."""
    deleted: Leaf | None = None
    """The ids of the parts before that it deletes; None for the whole rows."""
    deleted_offsets: Leaf | None = None
    """The first of these of each bucket."""


class JoinedIndex(Index, frozen=True, dict=True):
    """An index whose tables have joined columns; in memory only, never in a file."""

    parts: dict[int, tuple[TablePart, ...]] = msgspec.field(default_factory=dict)
    """The parts of each joined table, by the leaf number of its ids."""
    counted: dict[int, int] = msgspec.field(default_factory=dict)
    """The rows that a load gives of each joined column, by its leaf number; see `count_rows`."""


def count_rows(index: Index, table: str) -> int | None:
    """Returns the number of rows of a table that a load gives; None if there is no such table, or one of each rank.

    Args:
        table: its path.
    """
    path = f"{table}/{TABLE_KEYS[0]}" if table else TABLE_KEYS[0]
    ids = next((leaf for number in index.tables if (leaf := index.entries[number]).path == path), None)
    if ids is None or ids.ranks is not None:
        return None
    recorded = index.references.rows.get(table) if index.references is not None else None
    return _length(ids) if recorded is None else recorded


def table_parts(index: Index, ids: Leaf) -> list[tuple[Leaf, Leaf | None]]:
    """Returns the ids of each part of a saved table, the earliest first, and the ids that it deletes of those before.

    Args:
        index: that of a file, whose tables are not joined.
        ids: of the table.
    """
    parts: list[tuple[Leaf, Leaf | None]] = [(ids, None)]
    below = f"{ids.path.removesuffix(TABLE_KEYS[0])}{TABLE_DELTAS}/"
    while ids.ranks is None and (path := f"{below}{len(parts) - 1}/{DELTA_KEYS[0]}/{TABLE_KEYS[0]}") in index.by_path:
        deleted = f"{below}{len(parts) - 1}/{DELTA_KEYS[1]}/{TABLE_KEYS[0]}"
        parts.append((_leaf(index, path), _leaf(index, deleted)))
    return parts


def parts_of(index: Index, ids: Leaf) -> tuple[TablePart, ...]:
    """Returns the parts of the table with these ids; none for one that was saved whole."""
    return index.parts.get(ids.number, ()) if isinstance(index, JoinedIndex) else ()


def join_tables(index: Index) -> Index:
    """Returns the index with joined tables; the very index where none was saved as deltas.

    Raises:
        FormatError: deltas that do not fit their table.
    """
    tables = [(path, node) for node, path, _ in containers_of(index.structure) if isinstance(node, TableNode)]
    with_deltas = {path: len(deltas_of(node)) for path, node in tables if deltas_of(node)}
    if not with_deltas:
        return index
    left_out, joined, specs = set[int](), dict[int, ArrayRecord](), list(index.specs)
    found, counted = list[tuple[int, tuple[TablePart, ...]]](), dict[int, int]()
    recorded = index.references.rows if index.references is not None else {}
    for path, count in with_deltas.items():
        prefix = f"{path}/" if path else ""
        below = f"{prefix}{TABLE_DELTAS}/"
        left_out.update(leaf.number for leaf in index.entries if leaf.path.startswith(below))
        parts = _parts(index, prefix, count)
        found.append((_leaf(index, prefix + TABLE_KEYS[0]).number, parts))
        rows = recorded.get(path)
        if rows is None or not 0 <= rows <= parts[-1].stop:
            raise FormatError(path, expected=f"the number of its rows, up to {parts[-1].stop}", found=f"{rows}")
        slots = [leaf.path for leaf in index.entries if leaf.path.startswith(f"{prefix}{TABLE_KEYS[2]}/")]
        for column in (prefix + TABLE_KEYS[0], *slots):
            own = column.removeprefix(prefix)
            leaves = [_leaf(index, column), *(_leaf(index, f"{below}{k}/{DELTA_KEYS[0]}/{own}") for k in range(count))]
            spec, joined[leaves[0].number] = _joined(index, leaves, parts, len(specs))
            counted[leaves[0].number] = rows
            specs.append(spec)
    return _without(index, left_out, joined, tuple(specs), found, counted)


def _leaf(index: Index, path: str) -> Leaf:
    """Returns the leaf of a column, or of an array beside one."""
    leaves = index.by_path.get(path, ())
    if len(leaves) != 1 or leaves[0].ranks is not None or type(leaves[0].record) is not ArrayRecord:
        raise FormatError(path, expected="an array of a table that was saved as deltas", found="something else")
    return leaves[0]


def _parts(index: Index, prefix: str, count: int) -> tuple[TablePart, ...]:
    """Returns the parts of the table whose columns have this prefix, and which has so many deltas."""
    ids, offsets, _, _ = TABLE_KEYS
    rows = _length(_leaf(index, prefix + ids))
    parts = [TablePart(0, rows, _leaf(index, prefix + offsets))]
    for number in range(count):
        own, deleted = (f"{prefix}{TABLE_DELTAS}/{number}/{key}/" for key in DELTA_KEYS)
        start, more = parts[-1].stop, _length(_leaf(index, own + ids))
        gone = _leaf(index, deleted + ids), _leaf(index, deleted + offsets)
        parts.append(TablePart(start, start + more, _leaf(index, own + offsets), *gone))
    return tuple(parts)


def _length(leaf: Leaf) -> int:
    spec = leaf.spec
    if spec is None or not spec.shape:
        raise FormatError(leaf.path, expected="a column of a table", found="no array of rows")
    return spec.shape[0]


def _joined(
    index: Index, leaves: Sequence[Leaf], parts: Sequence[TablePart], number: int
) -> tuple[ArraySpec, ArrayRecord]:
    """Returns the spec, which gets a number, and the record of a column that has one leaf for each part."""
    first = leaves[0].spec
    assert first is not None, "it has a length"
    chunks: list[Chunk] = []
    for leaf, part in zip(leaves, parts, strict=True):
        spec = leaf.spec
        if spec is None or (spec.dtype, spec.shape) != (first.dtype, (part.stop - part.start, *first.shape[1:])):
            raise FormatError(
                leaf.path,
                expected=f"{part.stop - part.start} rows of {first.dtype} of shape {first.shape[1:]}",
                found=f"{spec.dtype} of shape {spec.shape}" if spec is not None else "no array",
            )
        for chunk in index.chunks_of(leaf):
            box = chunk.region
            if box.size:
                moved = Region((box.offset[0] + part.start, *box.offset[1:]), box.shape)
                chunks.append(msgspec.structs.replace(chunk, region=moved))
    spec = msgspec.structs.replace(first, shape=(parts[-1].stop, *first.shape[1:]))
    if not chunks:
        [empty, *_] = index.chunks_of(leaves[0])
        chunks.append(empty)
    chunks.sort(key=lambda chunk: chunk.region.offset)
    offsets, shapes = (
        np.array([getattr(chunk.region, name) for chunk in chunks], np.int64) for name in ("offset", "shape")
    )
    ranks, starts = (np.array([getattr(chunk, name) for chunk in chunks], np.int64) for name in ("rank", "start"))
    return spec, ArrayRecord(number, -1, encode_boxes(spec.shape, offsets, shapes, ranks, starts))


def _without(
    index: Index,
    left_out: set[int],
    joined: dict[int, ArrayRecord],
    specs: tuple[ArraySpec, ...],
    parts: Sequence[tuple[int, tuple[TablePart, ...]]],
    counted: Mapping[int, int],
) -> JoinedIndex:
    """Returns an index without some leaves, and with other records of others."""
    kept = [number for number in range(len(index.leaves)) if number not in left_out]
    now = {number: position for position, number in enumerate(kept)}
    records: list[LeafRecord] = []
    for number in kept:
        record = joined.get(number, index.leaves[number])
        if isinstance(record, AliasRecord):
            record = msgspec.structs.replace(record, of=now[record.of])
        records.append(record)
    fields = {name: getattr(index, name) for name in index.__struct_fields__}
    fields.update(structure=_without_deltas(index.structure), specs=specs, leaves=tuple(records))
    rows = {now[number]: count for number, count in counted.items()}
    return JoinedIndex(**fields, parts={now[number]: own for number, own in parts}, counted=rows)


def _without_deltas(structure: Structure) -> Structure:
    if structure is None:
        return None
    children = tuple(None if child is None else _without_deltas(child) for child in structure.children)
    if isinstance(structure, TableNode):
        children = children[: len(TABLE_KEYS)]
    return msgspec.structs.replace(structure, children=children)
