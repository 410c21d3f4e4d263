"""Compares two checkpoints by their indexes, and by the checksums of their blocks; no array is read.

Leaves are compared by path: kind, shape, dtype, layout, and the values of Python leaves; beside them ranks and meshes,
custom metadata, sidecar files and containers. A leaf that is missing on one side and an equal one that is new on the
other are reported as moved where exactly one partner fits: the one that shares the longest end of the path.

The contents of arrays are in the shards, not in the index: `comparable` lists the arrays that can be compared, and
`compare_checksums` compares two of them by the checksums in the shards' headers, chunk by chunk. Where two chunks have
the same offset within a block, equal checksums of all their blocks prove equal bytes, and a block that differs and lies
inside both chunks proves changed bytes. In all other cases (other chunks, another offset, a difference in a block that
neighbours share) the result is unknown, and only `treeckpt._loading.compare`, which reads the arrays, tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec
import numpy as np

from .._core.format.byte_map import ChunkLocation, layout_of, locate_chunks
from .._core.format.records import (
    AliasRecord,
    ArrayRecord,
    BlobRecord,
    File,
    Index,
    Leaf,
    PerRankArrays,
    PerRankBlobs,
    PerRankValues,
    ValueRecord,
)
from .._core.format.table_deltas import count_rows
from .._core.sharding.int_runs import length_of
from .._core.sharding.placements import Mesh, MeshLayout
from .._core.sharding.region import Region
from .._core.text import blob_text, bytes_text, count_text, layout_text, region_text, shape_text, value_text, value_type
from .._core.tree.structure import OrderedDictNode, Structure, containers_of
from .._core.tree.value_codec import TypedValue, Value

Aspect = Literal["kind", "shape", "dtype", "layout", "value"]

MAX_CHUNKS = 10_000
"""Explicit pieces of one array that are compared."""
MAX_DEPTH = 8
"""Dicts in dicts of custom metadata whose entries are compared one by one."""
MAX_VALUE_TEXT = 500
"""Characters of the text of a value of custom metadata."""
_KINDS = {
    AliasRecord: "tie",
    ValueRecord: "value",
    PerRankValues: "value per rank",
    PerRankArrays: "array per rank",
    ArrayRecord: "array",
    BlobRecord: "value",
    PerRankBlobs: "value per rank",
}


class Added(msgspec.Struct, frozen=True, tag="added"):
    """A leaf that only the second checkpoint has."""

    path: str
    leaf: str


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """A leaf that only the first checkpoint has."""

    path: str
    leaf: str


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """An equal leaf under another path."""

    path: str
    to: str


class Changed(msgspec.Struct, frozen=True, tag="differs"):
    """A leaf that both checkpoints have, and the aspect in which it differs."""

    path: str
    aspect: Aspect
    before: str
    after: str


Change = Added | Removed | Moved | Changed


class BesideLeaves(msgspec.Struct, frozen=True):
    """Something that was saved beside the leaves, before and after."""

    name: str
    """As `custom metadata note`; an entry of a dict has the keys that lead to it."""
    what: Literal["changed", "added", "removed", "same"]
    before: str
    """The value as text; empty where there is none, and of containers, which are only named."""
    after: str


class Diff(msgspec.Struct, frozen=True):
    """Every difference by path, and the number of equal leaves."""

    changes: tuple[Change, ...]
    same: int
    beside: tuple[BesideLeaves, ...] = ()
    """Ranks, meshes, custom metadata and sidecar files by name, and containers that differ; the same ones last."""

    @property
    def also(self) -> tuple[str, ...]:
        """The names of what differs beside the leaves."""
        return tuple(one.name for one in self.beside if one.what != "same")

    def count(self, what: str) -> int:
        """Counts the changes of a kind: "added", "removed", "moved", or an aspect."""
        return sum(what == (c.aspect if isinstance(c, Changed) else c.__struct_config__.tag) for c in self.changes)


def diff(a: Index, b: Index) -> Diff:
    """Returns the differences that lead from `a` to `b`."""
    before, after = _by_name(a), _by_name(b)
    changes: list[Change] = []
    same = 0
    for name in before.keys() & after.keys():
        differences = _compare(a, before[name], b, after[name])
        same += not differences
        changes += differences
    removed = {n: leaf for n, leaf in before.items() if n not in after}
    added = {n: leaf for n, leaf in after.items() if n not in before}
    for old, new in _moves(a, removed, b, added):
        x, y = removed.pop(old), added.pop(new)
        changes.append(Moved(x.path, y.path))
        changes += _compare(a, x, b, y)
    changes += [Removed(leaf.path, leaf_text(a, leaf)) for leaf in removed.values()]
    changes += [Added(leaf.path, leaf_text(b, leaf)) for leaf in added.values()]
    in_order = sorted(changes, key=lambda c: (c.path, str(c.__struct_config__.tag)))
    return Diff(tuple(in_order), same, tuple(_beside_leaves(a, b)))


def _beside_leaves(a: Index, b: Index) -> list[BesideLeaves]:
    before, after = _named_values(a), _named_values(b)
    rows = [_beside(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])]
    # a change of the metadata of module versions or of containers shows only where the leaves are the same
    if a.by_path.keys() == b.by_path.keys() and a.world == b.world and a.structure != b.structure:
        noted = [_attributes(index) for index in (a, b)]
        names = [f"versions of modules or other attributes of {path or '<root>'}" for path in _different(*noted)]
        bare = [_without_attributes(index.structure) for index in (a, b)]
        names += ["containers, by kind or by the order of keys"] if bare[0] != bare[1] else []
        rows += [BesideLeaves(name, "changed", "", "") for name in names]
    # the shapes of columns are those of what was written
    for table in sorted({*_counted_tables(a), *_counted_tables(b)}):
        before, after = ("" if (count := count_rows(index, table)) is None else f"{count}" for index in (a, b))
        if before and after:
            rows.append(BesideLeaves(f"rows of table {table}", "same" if before == after else "changed", before, after))
    return sorted(rows, key=lambda row: row.what == "same")


def _counted_tables(index: Index) -> Mapping[str, int]:
    return index.references.rows if index.references is not None else {}


def _named_values(index: Index) -> dict[str, tuple[bytes, str]]:
    """Returns what was saved beside the leaves by name: what is equal for equal values, and a text."""
    meshes = dict.fromkeys(_mesh_text(layout.mesh) for layout in index.layouts if isinstance(layout, MeshLayout))
    values = {"ranks": (str(index.world).encode(), f"{index.world}")}
    if meshes:
        text = ", ".join(meshes)
        values["meshes of arrays"] = (text.encode(), text)
    for name, value in sorted(index.metadata.items()):
        values |= {f"custom metadata {key}": found for key, found in _entries(name, value)}
    for one in sorted(index.sidecars, key=lambda one: one.name):
        values[f"sidecar file {one.name}"] = (one.xxh3.encode(), f"{bytes_text(one.nbytes)}, xxh3 {one.xxh3}")
    return values


def _entries(name: str, value: Value, depth: int = 0) -> Iterator[tuple[str, tuple[bytes, str]]]:
    """Gives the entries of dicts with texts as keys one by one, and every other value as a whole."""
    items = value.items if isinstance(value, TypedValue) and value.kind == "dict" else ()
    keys = items[::2]
    if items and depth < MAX_DEPTH and all(isinstance(key, str) for key in keys):
        for key, one in zip(keys, items[1::2], strict=True):
            yield from _entries(f"{name}/{key}", one, depth + 1)
    else:
        yield name, (msgspec.json.encode(value), value_text(value, MAX_VALUE_TEXT))


def _beside(name: str, before: tuple[bytes, str] | None, after: tuple[bytes, str] | None) -> BesideLeaves:
    what = "added" if before is None else "removed" if after is None else "same" if before[0] == after[0] else "changed"
    return BesideLeaves(name, what, before[1] if before else "", after[1] if after else "")


def _mesh_text(mesh: Mesh) -> str:
    if not mesh.names:
        return shape_text(mesh.shape)
    return " x ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.shape, strict=True))


def _attributes(index: Index) -> dict[str, object]:
    """Returns the attributes of each OrderedDict that has any, by path."""
    nodes = ((path, node) for node, path, _ in containers_of(index.structure) if isinstance(node, OrderedDictNode))
    return {path: node.attributes for path, node in nodes if node.attributes is not None}


def _without_attributes(node: Structure) -> Structure:
    if node is None:
        return None
    children = tuple([None if child is None else _without_attributes(child) for child in node.children])
    if isinstance(node, OrderedDictNode):
        return OrderedDictNode(None, node.keys, children)
    return msgspec.structs.replace(node, children=children)


def _different(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def comparable(a: Index, b: Index, found: Diff) -> list[tuple[Leaf, Leaf]]:
    """Returns the arrays that both have with equal kind, shape and dtype, also moved ones; aliases are left out.

    Texts and bytes in shards are among them, as arrays of bytes.
    """
    before, after = _by_name(a), _by_name(b)
    moved = {change.path: change.to for change in found.changes if isinstance(change, Moved)}
    pairs: list[tuple[Leaf, Leaf]] = []
    for (path, number), leaf in before.items():
        other = after.get((path, number)) or after.get((moved.get(path, path), number))
        if other is None or leaf.stored is None or other.stored is None or _kind(leaf) != _kind(other):
            continue
        alike = (leaf.stored.shape, leaf.stored.dtype) == (other.stored.shape, other.stored.dtype)
        if leaf.spec is None or other.spec is None:  # of another type they differ already by the indexes
            alike = alike and leaf.stored.kind == other.stored.kind
        if alike and not isinstance(leaf.record, AliasRecord):
            pairs.append((leaf.as_array, other.as_array))
    return pairs


def _by_name(index: Index) -> dict[tuple[str, int], Leaf]:
    """Returns leaves by path, and by a number where groups of ranks share a path."""
    return {(path, number): leaf for path, leaves in index.by_path.items() for number, leaf in enumerate(leaves)}


def _kind(leaf: Leaf) -> str:
    return _KINDS[type(leaf.record)]


def leaf_text(index: Index, leaf: Leaf) -> str:
    """Describes a leaf in one line."""
    if leaf.spec is None:
        return f"{_kind(leaf)} {_values_text(leaf)}"
    return f"{_kind(leaf)} {leaf.spec.dtype} {shape_text(leaf.spec.shape)}"


def rows_text(index: Index, path: str) -> str:
    """Returns ` of 3 rows` for the path of a keyed table; nothing where each rank has its own."""
    rows = count_rows(index, path)
    return "" if rows is None else f" of {count_text(rows, 'row')}"


def _values_text(leaf: Leaf) -> str:
    record = leaf.record
    if leaf.stored is not None:
        return blob_text(leaf.stored.kind, leaf.stored.nbytes)
    if isinstance(record, ValueRecord):
        return f"{value_type(record.value)} {value_text(record.value)}"
    if isinstance(record, PerRankValues):
        return f"[{', '.join(value_text(v, 40) for v in record.values[:8])}{', …' if len(record.values) > 8 else ''}]"
    return ""


def _exact(leaf: Leaf) -> bytes:
    """Encodes a value for an exact comparison: in Python 1 equals True and 1.0, and 0.0 equals -0.0.

    Of one in shards only type and length are known.
    """
    if leaf.stored is not None:
        return _values_text(leaf).encode()
    return msgspec.json.encode(leaf.record)


def _compare(a: Index, x: Leaf, b: Index, y: Leaf) -> list[Change]:
    if _kind(x) != _kind(y) or x.spec is None or y.spec is None:
        if _kind(x) != _kind(y):
            return [Changed(x.path, "kind", leaf_text(a, x), leaf_text(b, y))]
        same = _exact(x) == _exact(y)
        return [] if same else [Changed(x.path, "value", _values_text(x), _values_text(y))]
    changes: list[Change] = []
    if x.spec.shape != y.spec.shape:
        changes.append(Changed(x.path, "shape", shape_text(x.spec.shape), shape_text(y.spec.shape)))
    if x.spec.dtype != y.spec.dtype:
        changes.append(Changed(x.path, "dtype", x.spec.dtype, y.spec.dtype))
    if _layout(a, x) != _layout(b, y):
        changes.append(Changed(x.path, "layout", _layout_text(a, x), _layout_text(b, y)))
    return changes


def _layout(index: Index, leaf: Leaf) -> object:
    """Returns what is equal for equal layouts of leaves."""
    record = leaf.record
    if isinstance(record, AliasRecord):
        return index.entries[record.of].path, record.view
    if isinstance(record, PerRankArrays):
        return leaf.ranks
    assert isinstance(record, ArrayRecord), "values have no layout"
    layout = layout_of(index, leaf)
    return layout if layout is not None else tuple(_pieces(index, leaf)[:MAX_CHUNKS])


def _pieces(index: Index, leaf: Leaf) -> list[tuple[int, Region]]:
    return [(chunk.rank, chunk.region) for chunk in index.chunks_of(leaf)]


def _layout_text(index: Index, leaf: Leaf) -> str:
    record = leaf.record
    if isinstance(record, AliasRecord):
        return f"{'the storage' if record.view is None else 'a view'} of {index.entries[record.of].path}"
    if isinstance(record, PerRankArrays):
        return count_text(length_of(leaf.ranks or ()), "rank")
    layout = layout_of(index, leaf)
    if layout is not None:
        return layout_text(layout)
    pieces = _pieces(index, leaf)
    shown = "; ".join(f"rank {rank} {region_text(region)}" for rank, region in pieces[:4])
    return f"{count_text(len(pieces), 'piece')}: {shown}{'; …' if len(pieces) > 4 else ''}"


def _signature(index: Index, leaf: Leaf) -> object:
    if leaf.spec is not None:
        return _kind(leaf), leaf.spec.shape, leaf.spec.dtype
    return _kind(leaf), _exact(leaf)


def _moves(
    a: Index, removed: dict[tuple[str, int], Leaf], b: Index, added: dict[tuple[str, int], Leaf]
) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Pairs old with new names: by the longest common ends of paths first, and only where both are unique."""
    old = {name: (_signature(a, leaf), _steps(leaf.path)) for name, leaf in removed.items()}
    new = {name: (_signature(b, leaf), _steps(leaf.path)) for name, leaf in added.items()}
    pairs: list[tuple[tuple[str, int], tuple[str, int]]] = []
    longest = min(max((len(s) for _, s in side.values()), default=0) for side in (old, new))
    for length in range(longest, 0, -1):
        left, right = _by_end(old, length), _by_end(new, length)
        for key in left.keys() & right.keys():
            if len(left[key]) == len(right[key]) == 1:
                pair = left[key][0], right[key][0]
                pairs.append(pair)
                del old[pair[0]], new[pair[1]]
    return pairs


def _by_end(
    names: dict[tuple[str, int], tuple[object, list[str]]], length: int
) -> dict[tuple[object, tuple[str, ...]], list[tuple[str, int]]]:
    by_end: dict[tuple[object, tuple[str, ...]], list[tuple[str, int]]] = {}
    for name, (signature, steps) in names.items():
        if len(steps) >= length:
            by_end.setdefault((signature, tuple(steps[-length:])), []).append(name)
    return by_end


def _steps(path: str) -> list[str]:
    """Splits a path into keys, and keys at dots into names of modules."""
    return re.split(r"[/.]", path)


ByteComparison = Literal["equal", "changed", "unknown"]


class Checksums(msgspec.Struct, frozen=True):
    """The checksums of a shard's data area."""

    hashes: np.ndarray
    """uint64[blocks]."""
    block: int
    """Bytes of each block, except the last."""


ChecksumReader = Callable[[File], Checksums]


def compare_checksums(
    a: Index, x: Leaf, b: Index, y: Leaf, checksums: tuple[ChecksumReader, ChecksumReader]
) -> ByteComparison:
    """Compares leaf `x` of index `a` with leaf `y` of index `b`, which have one shape and dtype.

    Args:
        checksums: readers of the checksums of the files of `a` and of `b`.
    """
    left, right = (sorted(locate_chunks(i, leaf), key=lambda c: (c.region, c.rank)) for i, leaf in ((a, x), (b, y)))
    if [c.region for c in left] != [c.region for c in right]:
        return "unknown"
    verdict: ByteComparison = "equal"
    for chunk, other in zip(left, right, strict=True):
        result = _compare_chunks(chunk, other, checksums[0](chunk.file), checksums[1](other.file))
        if result == "changed":
            return "changed"
        verdict = verdict if result == "equal" else "unknown"
    return verdict


def _compare_chunks(one: ChunkLocation, other: ChunkLocation, sums: Checksums, others: Checksums) -> ByteComparison:
    start, stop = one.start - one.file.header, one.stop - one.file.header
    shift = other.start - other.file.header - start
    if start == stop:
        return "equal"
    if sums.block != others.block or shift % sums.block:
        return "unknown"
    block, moved = sums.block, shift // sums.block
    low, high = start // block, -(-stop // block)
    differs = np.flatnonzero(sums.hashes[low:high] != others.hashes[low + moved : high + moved]) + low
    if not len(differs):
        return "equal"  # all blocks that cover the chunk are equal
    inside = (differs * block >= start) & ((differs + 1) * block <= stop)
    return "changed" if inside.any() else "unknown"
