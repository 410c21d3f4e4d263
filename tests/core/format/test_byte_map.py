"""The map of a shard's bytes is what its header lists, and regions are found on the ranks that held them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.indexes import index_of
from tests.helpers.saves import ranks_of, saves, small
from tests.helpers.strategies import mesh_layouts, regions, shapes
from treeckpt._core.format.byte_map import (
    chunk_columns,
    chunk_count,
    extents_in_file,
    holders_of,
    layout_of,
    locate_chunks,
)
from treeckpt._core.format.records import (
    AliasRecord,
    ArrayRecord,
    BoxChunks,
    GridChunks,
    NoChunks,
    PerRankArrays,
    ValueRecord,
    WholeChunk,
)
from treeckpt._core.sharding.int_runs import decode_runs, encode_runs
from treeckpt._core.sharding.placements import BoxLayout, Mesh, MeshLayout, Replicate, Shard, StridedShard, held_by
from treeckpt._core.sharding.region import Region, intersect
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.structure import DictNode, PerRankNode
from treeckpt.errors import FormatError, LayoutError

FEWER = settings(max_examples=15)
"""Whole saves take a tenth of a second each to make up."""


def entries_of(saved):
    """By file: the leaf's number, region, first byte and last byte + 1 of each entry of the header."""
    paths = {leaf.path: leaf.number for leaf in saved.index.entries}
    found = {}
    for file, (size, header) in zip(saved.index.file_list, saved.headers, strict=True):
        found[file.name] = [
            (paths[e.path.replace(f"~rank{file.rank}", "~rank*")], e.region, size + e.start, size + e.start + e.nbytes)
            for e in header.entries
        ]
    return found


@given(saves())
@FEWER
def test_extents_are_the_entries_of_the_header_by_offset(saved):
    entries = entries_of(saved)
    for file in saved.index.file_list:
        every = [(e.leaf, e.region, e.start, e.stop) for e in extents_in_file(saved.index, file, empty=True)]
        full = [(e.leaf, e.region, e.start, e.stop) for e in extents_in_file(saved.index, file)]
        assert {e for e in every if e[2] < e[3]} == {e for e in entries[file.name] if e[2] < e[3]}
        assert {e for e in every if e[2] == e[3]} >= {e for e in entries[file.name] if e[2] == e[3]}
        assert full == [e for e in every if e[2] < e[3]]
        assert [e[2] for e in every] == sorted(e[2] for e in every)


@given(saves(), st.data())
@FEWER
def test_chunks_are_located_where_the_headers_list_them(saved, data):
    index, entries = saved.index, entries_of(saved)
    listed = {(name, *entry) for name, found in entries.items() for entry in found if entry[2] < entry[3]}
    located = set()
    for leaf in index.entries:
        chunks = locate_chunks(index, leaf)
        if isinstance(leaf.record, AliasRecord):
            assert chunks == locate_chunks(index, index.entries[leaf.record.of]) and chunk_count(leaf) == 0
            continue
        assert chunk_count(leaf) == len(chunks)
        assert all(chunk.rank == chunk.file.rank for chunk in chunks)
        located |= {(c.file.name, leaf.number, c.region, c.start, c.stop) for c in chunks if c.start < c.stop}
        if leaf.spec is not None and math.prod(leaf.spec.shape):
            region = data.draw(regions(leaf.spec.shape, empty=False))
            inside = [c for c in chunks if intersect(c.region, region) is not None]
            assert locate_chunks(index, leaf, region) == inside
    assert located == listed


def test_a_leaf_under_per_rank_has_a_chunk_of_each_rank():
    [leaf] = small().index.by_path["own/~rank*/0"]
    assert [chunk.rank for chunk in locate_chunks(small().index, leaf)] == ranks_of(leaf) == [0, 1]
    [value] = small().index.by_path["value"]
    assert locate_chunks(small().index, value) == []


def test_chunks_in_no_file_are_refused():
    index = index_of({"w": ArrayRecord(0, -1, WholeChunk(0, 4093))}, [ArraySpec((4,), "uint8")])
    with pytest.raises(FormatError, match="w"):
        locate_chunks(index, index.entries[0])
    assert extents_in_file(index, index.file_list[0]) == []


def test_extents_of_a_file_lie_between_its_borders():
    """Rank 0 has two files; both borders of the second are the first and last bytes of an array each."""
    records = {str(n): ArrayRecord(0, -1, WholeChunk(0, n * 8)) for n in range(4)}
    files = [(0, 0, 0, 8, 100), (0, 1, 8, 16, 200), (1, 0, 0, 64, 0), (0, 2, 24, 8, 300)]
    index = index_of(records, [ArraySpec((2,), "float32")], files=files)
    found = {f.part: [(e.leaf, e.start, e.stop) for e in extents_in_file(index, f)] for f in index.files_of(0)}
    assert found == {0: [(0, 100, 108)], 1: [(1, 200, 208), (2, 208, 216)], 2: [(3, 300, 308)]}
    assert extents_in_file(index, index.files_of(1)[0]) == []


def test_arrays_without_elements_are_listed_only_where_asked_for():
    records = {"a": ArrayRecord(0, -1, WholeChunk(0, 5)), "e": ArrayRecord(1, -1, WholeChunk(0, 5))}
    index = index_of(records, [ArraySpec((3,), "uint8"), ArraySpec((0, 3), "uint8")])
    assert [e.leaf for e in extents_in_file(index, index.file_list[0])] == [0]
    assert [(e.leaf, e.start, e.stop) for e in extents_in_file(index, index.file_list[0], empty=True)] == [
        (0, 517, 520), (1, 517, 517),
    ]  # fmt: skip


def test_a_shard_of_more_chunks_than_wanted_is_refused():
    records = {str(n): ArrayRecord(0, -1, WholeChunk(0, n)) for n in range(5)}
    index = index_of(records, [ArraySpec((1,), "uint8")])
    assert len(extents_in_file(index, index.file_list[0], most=5)) == 5
    with pytest.raises(LayoutError, match="4 chunks"):
        extents_in_file(index, index.file_list[0], most=4)


def test_chunks_are_counted():
    one = [ArraySpec((6,), "uint8")]
    grid = GridChunks((((0, 2, 4),),), ((0, 0, 3),), ((0, 2, 3),))
    boxes = BoxChunks((((0, 3, 2),),), (((3, 0, 2),),), ((0, 1, 2),), ((0, 0, 2),))
    for chunks, count in ((WholeChunk(0, 0), 1), (grid, 3), (boxes, 2), (NoChunks(), 0)):
        assert chunk_count(index_of({"w": ArrayRecord(0, -1, chunks)}, one).entries[0]) == count
    assert chunk_count(index_of({"w": ValueRecord(1)}, one).entries[0]) == 0


def test_the_array_of_each_rank_is_found_in_that_ranks_file():
    structure = DictNode(("own",), (PerRankNode((encode_runs([1, 4]),), (None,)),))
    files = [(rank, 0, 0, 64, 10 * rank) for rank in range(5)]
    index = index_of(
        {"own": PerRankArrays(0, encode_runs([16, 32]))}, [ArraySpec((2,), "int32")],
        structure=structure, files=files, world=5,
    )  # fmt: skip
    found = {f.rank: [(e.start, e.stop, e.region) for e in extents_in_file(index, f)] for f in index.file_list}
    whole = Region((0,), (2,))
    assert found == {0: [], 1: [(26, 34, whole)], 2: [], 3: [], 4: [(72, 80, whole)]}


def test_the_layout_of_an_array_on_a_mesh_is_known():
    mesh = MeshLayout(Mesh((2,), encode_runs([0, 1])), (Shard(0),))
    specs = [ArraySpec((4,), "uint8")]
    for number, layout in ((0, None), (1, mesh), (-1, None), (2, None)):
        record = ArrayRecord(0, number, WholeChunk(0, 0))
        index = index_of({"w": record, "v": ValueRecord(1)}, specs, layouts=(BoxLayout(()), mesh))
        assert layout_of(index, index.entries[0]) == layout and layout_of(index, index.entries[1]) is None


@given(st.data())
def test_a_region_was_held_by_the_ranks_that_had_each_of_its_elements(data):
    shape = data.draw(shapes(max_ndim=3, min_size=1))
    layout, region = data.draw(mesh_layouts(len(shape))), data.draw(regions(shape, empty=False))
    holders = []
    for rank in decode_runs(layout.mesh.ranks).tolist():
        had = np.zeros(shape, bool)
        for held in held_by(layout, shape, rank):
            had[held.region.slices()] = True
        if had[region.slices()].all():
            holders.append(rank)
    assert holders_of(layout, shape, region) == holders


def test_a_region_may_lie_in_several_pieces_of_one_rank():
    layout = MeshLayout(Mesh((1,), encode_runs([5])), (StridedShard(0, 2),))
    assert holders_of(layout, (4,), Region((1,), (2,))) == [5]


def test_holders_are_in_the_order_of_the_mesh():
    layout = MeshLayout(Mesh((2, 2), encode_runs([3, 1, 2, 0])), (Shard(0), Replicate()))
    assert holders_of(layout, (4,), Region((2,), (2,))) == [2, 0]


@given(saves())
@FEWER
def test_columns_have_every_chunk_of_every_leaf(saved):
    index = saved.index
    columns = chunk_columns(index, 1 << 30)
    assert columns is not None and len(columns.form) == len(columns.start) == len(index.entries)
    streams = {file.name: file.stream - file.header for file in index.file_list}
    begins = [0, *columns.ends.tolist()]
    for leaf in index.entries:
        form = int(columns.form[leaf.number])
        part = slice(begins[form], begins[form + 1]) if form >= 0 else slice(0)
        places = columns.rank[part], columns.start[leaf.number] + columns.offset[part], columns.nbytes[part]
        found = [place for place in zip(*(column.tolist() for column in places), strict=True) if place[2]]
        located = [] if leaf.stored is None or isinstance(leaf.record, AliasRecord) else locate_chunks(index, leaf)
        wanted = [(one.rank, one.start + streams[one.file.name], one.stop - one.start) for one in located]
        assert sorted(found) == sorted(place for place in wanted if place[2])


def test_leaves_that_are_cut_alike_share_the_columns():
    grid, spec = encode_runs([0, 2, 4]), ArraySpec((4,), "uint8")
    cut = [GridChunks((grid,), encode_runs([0, 1]), encode_runs([start, start])) for start in (0, 2, 4)]
    other = GridChunks((grid,), encode_runs([0, 1]), encode_runs([6, 8]))
    leaves = {str(n): ArrayRecord(0, -1, chunks) for n, chunks in enumerate([*cut, other])}
    columns = chunk_columns(index_of({**leaves, "v": ValueRecord(1)}, [spec]), 8)
    assert columns.form.tolist() == [0, 0, 0, 1, -1] and columns.start.tolist() == [0, 2, 4, 6, 0]
    assert columns.ends.tolist() == [2, 4] and columns.offset.tolist() == [0, 0, 0, 2]
    assert chunk_columns(index_of(leaves, [spec]), 7) is None
