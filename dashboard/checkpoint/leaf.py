"""The page of one leaf: its dtype, shape and layout, its values if it is no array, and its chunks."""

from __future__ import annotations

import math

import msgspec

from treeckpt._core.format.byte_map import chunk_count, layout_of
from treeckpt._core.format.records import (
    AliasRecord,
    BlobRecord,
    Index,
    Leaf,
    PerRankArrays,
    PerRankBlobs,
    PerRankValues,
    ValueRecord,
)
from treeckpt._core.sharding.dtypes import dtype_of
from treeckpt._core.sharding.int_runs import decode_runs
from treeckpt._core.sharding.placements import MeshLayout, mesh_ranks
from treeckpt._core.sharding.region import Region
from treeckpt._core.text import blob_text, count_text, layout_text, placement_text, value_text, value_type
from treeckpt._core.tree.keyed_table import table_path
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._inspect.numbers import Moments
from treeckpt._io.storage.store import Store
from treeckpt._loading.peek import MAX_NBYTES, peek_blob
from treeckpt._loading.table_row import TableRow, find_row, ids_of_table
from treeckpt._runs.nan_scan import ElementPlace, element_place, known_statistics
from treeckpt.errors import TreeckptError

from ..pages.checkpoints import PAGE_ROWS, CheckpointRow, OpenTree, shorten
from .chunks import MAX_HOLDERS, NO_FILE, ChunksPage, chunks_page, leaf_of, map_dims, parse_region, stored_leaf
from .leaf_numbers import LeafNumbers, leaf_numbers
from .tree import Fact, NodeRow, node_row
from .values import FileForm, file_forms, rank_at

KINDS = {
    ValueRecord: "value",
    PerRankValues: "value per rank",
    AliasRecord: "tie",
    PerRankArrays: "array per rank",
    BlobRecord: "value",
    PerRankBlobs: "value per rank",
}
BLOB_SHOWN = 20_000
"""Bytes of a text or bytes that are shown."""


class MeshPart(msgspec.Struct, frozen=True):
    """One dimension of a mesh and what it does to an array."""

    name: str
    size: int
    placement: str


class LeafPage(msgspec.Struct, frozen=True):
    """One leaf."""

    checkpoint: CheckpointRow
    leaf: int
    path: str
    above: list[NodeRow]
    kind: str
    dtype: str | None
    shape: list[int] | None
    nbytes: int
    facts: list[Fact]
    layout: str | None
    mesh: list[MeshPart]
    mesh_ranks: list[int]
    values: list[Fact]
    chunks: ChunksPage | None
    dims: list[str]
    """Names of the dimensions of the map; empty if there is nothing to draw."""
    dim_sizes: list[int]
    previous: int | None
    following: int | None
    region: str
    """The region whose chunks were requested, as typed; empty for all chunks."""
    found: list[int]
    """The requested region as [offset per dimension, then size per dimension]; empty for all chunks."""
    problem: str | None
    """Why the typed text is no region."""
    forms: list[FileForm]
    """The formats in which the array, or the region, can be downloaded."""
    wanted: int
    """Bytes of the array, or of the region."""
    limit: int
    """Bytes of the largest download."""
    numbers: LeafNumbers | None
    """The statistics of all its elements; None if they are not known."""
    damaged: bool
    """Whether bytes that it needs are known to be damaged."""
    first_nan: ElementPlace | None
    """The first element that is NaN; None without one, or if it is not known."""
    first_infinite: ElementPlace | None
    table: str | None
    """The path of the keyed table that it is a column of; None for any other leaf."""
    id: str
    """The id whose row was requested, as typed."""
    row: TableRow | None
    row_problem: str | None
    """Why there is no row of that id to show."""


def leaf_page(tree: OpenTree, number: int, start: int = 0, region: str = "", id: str = "") -> LeafPage:
    """One leaf, with a page of its chunks, or of those with elements of a region; of a table the row of an `id`.

    Raises:
        NotFound: there is none.
    """
    checkpoint, outline, index = tree.row, tree.outline, tree.index
    leaf = leaf_of(index, number)
    base = stored_leaf(index, leaf)
    layout = layout_of(index, base)
    wanted, problem = _chosen_region(base, region)
    moments = _moments_of(tree, base)
    firsts = (moments.first_nan, moments.first_infinite) if moments is not None else ()
    places = [element_place(index, base, at) for at in firsts] or [None, None]
    damage = tree.damage
    chunks = chunks_page(outline, damage, number, start, region=wanted) if leaf.spec else None
    # another program's array whose bytes are in no file as they are has no place on a map
    drawn = checkpoint.format is None or (chunks is not None and all(row.file != NO_FILE for row in chunks.rows))
    dims, sizes = map_dims(index, leaf) if drawn else ([], [])
    ids = ids_of_table(index, leaf)
    found, row_problem = _row_of(tree, ids.number, id) if ids is not None and id.strip() else (None, None)
    return LeafPage(
        checkpoint=checkpoint,
        leaf=number,
        path=shorten(leaf.path),
        above=[node_row(index, damage, row) for row in outline.way_to_leaf(number)[1:-1]],
        kind=KINDS.get(type(leaf.record), "array"),
        dtype=leaf.spec.dtype if leaf.spec else None,
        shape=list(leaf.spec.shape) if leaf.spec else None,
        nbytes=leaf.nbytes,
        facts=_facts(index, leaf),
        layout=_layout_text(base, layout),
        mesh=_mesh(layout) if layout else [],
        mesh_ranks=mesh_ranks(layout.mesh).tolist()[:MAX_HOLDERS] if layout else [],
        values=_blob_facts(tree, number) if leaf.spec is None and leaf.stored is not None else _values(leaf),
        chunks=chunks,
        dims=dims,
        dim_sizes=sizes,
        previous=number - 1 if number else None,
        following=number + 1 if number + 1 < len(index.entries) else None,
        region=region,
        found=[*wanted.offset, *wanted.shape] if wanted else [],
        problem=problem,
        forms=file_forms(index, number),
        wanted=_nbytes(base.spec, wanted) if base.spec else 0,
        limit=MAX_NBYTES,
        numbers=leaf_numbers(moments) if moments is not None else None,
        damaged=damage.holds(number) or (chunks is not None and any(row.damaged for row in chunks.rows)),
        first_nan=places[0],
        first_infinite=places[1],
        table=table_path(ids.path) if ids is not None else None,
        id=id,
        row=found,
        row_problem=row_problem,
    )


def _chosen_region(base: Leaf, text: str) -> tuple[Region | None, str | None]:
    """Returns the region of an array that is typed, or what is wrong with it."""
    try:
        return parse_region(text, base.spec.shape) if base.spec else None, None
    except ValueError as error:
        return None, str(error)


def _moments_of(tree: OpenTree, base: Leaf) -> Moments | None:
    """Returns the statistics of an array; None if they are not known."""
    statistics = known_statistics(tree.checkpoint.info, tree.library.cache.statistics)
    row = statistics.row_of(base.path) if statistics is not None else None
    return statistics.row(row) if statistics is not None and row is not None else None


def _row_of(tree: OpenTree, ids: int, id_text: str) -> tuple[TableRow | None, str | None]:
    """Returns the row of an id, or why there is none to show."""
    try:
        return tree.read(lambda store, index: find_row(store, index, index.entries[ids], id_text)), None
    except TreeckptError as error:
        return None, f"{error}"


def _blob_facts(tree: OpenTree, number: int) -> list[Fact]:
    """Returns the first bytes of leaf `number`, a text or bytes in shards; of one for each rank, that of the first."""

    def read(store: Store, index: Index) -> list[Fact]:
        leaf = index.entries[number]
        rank = rank_at(leaf, 0)
        text, _ = peek_blob(store, index, leaf, BLOB_SHOWN, rank=rank)
        return [*_values(leaf), Fact("" if rank is None else f"rank {rank}", "its first characters", text)]

    return tree.read(read)


def _nbytes(spec: ArraySpec, region: Region | None) -> int:
    return (math.prod(spec.shape) if region is None else region.size) * dtype_of(spec.dtype).itemsize


def _layout_text(base: Leaf, layout: MeshLayout | None) -> str | None:
    if base.spec is None:
        return None
    if isinstance(base.record, PerRankArrays):
        return f"an array of its own on each of {count_text(chunk_count(base), 'rank')}"
    return layout_text(layout)


def _mesh(layout: MeshLayout) -> list[MeshPart]:
    names = layout.mesh.names or tuple(f"{d}" for d in range(len(layout.mesh.shape)))
    return [
        MeshPart(name, size, placement_text(placement))
        for name, size, placement in zip(names, layout.mesh.shape, layout.placements, strict=False)
    ]


def _facts(index: Index, leaf: Leaf) -> list[Fact]:
    spec = leaf.spec
    if spec is None:
        return []
    facts = [Fact("elements", "", f"{math.prod(spec.shape):,}"), Fact("type", "", spec.kind)]
    facts.append(Fact("bytes per element", "", f"{dtype_of(spec.dtype).itemsize}"))
    if spec.requires_grad:
        facts.append(Fact("requires grad", "", "yes"))
    if spec.device:
        facts.append(Fact("device at save", "", spec.device))
    if isinstance(leaf.record, AliasRecord):
        target, view = shorten(index.entries[leaf.record.of].path), leaf.record.view
        text = target if view is None else f"{target}: a view at offset {view.offset}, strides {view.strides}"
        facts.append(Fact("shares storage with", "", text))
    return facts


def _values(leaf: Leaf) -> list[Fact]:
    record = leaf.record
    if leaf.spec is None and leaf.stored is not None:
        return [Fact("", leaf.stored.kind, blob_text(leaf.stored.kind, leaf.stored.nbytes))]
    if isinstance(record, ValueRecord):
        return [Fact("", value_type(record.value), value_text(record.value, 20_000))]
    if isinstance(record, PerRankValues):
        ranks = decode_runs(leaf.ranks or ()).tolist()[:PAGE_ROWS]
        return [
            Fact(f"rank {rank}", value_type(value), value_text(value, 1000))
            for rank, value in zip(ranks, record.values, strict=False)
        ]
    return []
