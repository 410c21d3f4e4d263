"""An index looks up its leaves, files and bytes, and counts them without expanding what it lists."""

import pytest

from tests.helpers.indexes import index_of
from treeckpt._core.format.records import (
    AliasRecord,
    ArrayRecord,
    BoxChunks,
    FileTable,
    GridChunks,
    IndexCounts,
    PerRankArrays,
    PerRankValues,
    ValueRecord,
    WholeChunk,
    file_table,
)
from treeckpt._core.format.shard_header import shard_name
from treeckpt._core.planning.load_plan import Chunk
from treeckpt._core.sharding.int_runs import decode_runs
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.spec import ArraySpec, StridedView, TableSpec
from treeckpt._core.tree.structure import DictNode, PerRankNode, TableNode
from treeckpt.errors import FormatError, MismatchError

FILES = [(0, 0, 0, 64, 500), (0, 1, 64, 0, 600), (0, 2, 64, 32, 700), (2, 0, 0, 16, 800)]
"""Rank 0 has three files, of which the second is empty; rank 1 has none."""
GRID = GridChunks((((0, 2, 4),),), ((0, 0, 3),), ((0, 2, 3),))
BOXES = BoxChunks((((0, 1, 5),),), (((1, 0, 5),),), ((0, 0, 5),), ((0, 1, 5),))


def of_rank_0(**fields):
    return index_of({}, [], files=FILES, world=3, **fields)


def test_a_table_of_files_is_sorted_by_rank_and_part():
    found = file_table(reversed(FILES))
    columns = [decode_runs(getattr(found, name)).tolist() for name in ("rank", "part", "stream", "nbytes", "header")]
    assert list(zip(*columns, strict=True)) == FILES
    assert file_table([]) == FileTable()


def test_files_are_listed_by_rank_with_their_names():
    index = of_rank_0()
    assert [(f.rank, f.part, f.stream, f.nbytes, f.header) for f in index.file_list] == FILES
    assert [f.name for f in index.file_list] == [shard_name(index.save_id, rank, 3, part) for rank, part, *_ in FILES]
    assert index.file_names == {f.name: f for f in index.file_list}
    assert [[f.part for f in index.files_of(rank)] for rank in range(4)] == [[0, 1, 2], [], [0], []]
    assert index.nbytes == 112 and index_of({}, [], files=[]).nbytes == 0


def test_the_bytes_of_many_equal_files_are_their_sum():
    assert index_of({}, [], files=FileTable(nbytes=((5, 0, 1000), (7,), (1, 2, 3)))).nbytes == 5016


@pytest.mark.parametrize(
    ("rank", "start", "stop", "part", "at"),
    [
        (0, 0, 64, 0, 500), (0, 63, 64, 0, 563), (0, 64, 65, 2, 700), (0, 64, 64, 2, 700), (0, 95, 96, 2, 731),
        (0, 96, 96, 2, 732), (2, 0, 16, 0, 800), (2, 16, 16, 0, 816),
    ],
)  # fmt: skip
def test_bytes_are_located_in_the_file_that_holds_them(rank, start, stop, part, at):
    file, found = of_rank_0().locate(rank, start, stop, "w")
    assert (file.rank, file.part, found) == (rank, part, at)


@pytest.mark.parametrize(
    ("rank", "start", "stop"), [(0, 63, 65), (0, 96, 97), (0, -1, 0), (0, 5, 4), (1, 0, 0), (3, 0, 0), (2, 0, 17)]
)
def test_bytes_that_no_file_holds_are_refused(rank, start, stop):
    with pytest.raises(FormatError, match=f"rank {rank}"):
        of_rank_0().locate(rank, start, stop, "w")


def everything():
    """A leaf of each kind; two groups of ranks have an array of their own."""
    structure = DictNode(
        ("grid", "boxes", "whole", "tie", "value", "own", "values"),
        (None,) * 5 + (PerRankNode((((0, 1, 2),), ((2,),)), (None, None)), PerRankNode((((0, 1, 3),),), (None,))),
    )
    records = {
        "grid": ArrayRecord(0, -1, GRID), "boxes": ArrayRecord(0, -1, BOXES),
        "whole": ArrayRecord(1, -1, WholeChunk(0, 8)),
        "tie": AliasRecord(0, 0), "value": ValueRecord(5), "own": PerRankArrays(1, ((0, 8, 2),)),
        "own2": PerRankArrays(1, ((9,),)), "values": PerRankValues((1, 2, 3)),
    }  # fmt: skip
    specs = [ArraySpec((6,), "uint8"), ArraySpec((), "int64")]
    return index_of(records, specs, structure=structure, files=FILES, world=3)


def test_leaves_have_numbers_paths_ranks_and_specs():
    index = everything()
    assert [(e.number, e.path, e.spec and e.spec.shape) for e in index.entries] == [
        (0, "grid", (6,)), (1, "boxes", (6,)), (2, "whole", ()), (3, "tie", (6,)), (4, "value", None),
        (5, "own/~rank*", ()), (6, "own/~rank*", ()), (7, "values/~rank*", None),
    ]  # fmt: skip
    assert [decode_runs(e.ranks).tolist() for e in index.entries[5:]] == [[0, 1], [2], [0, 1, 2]]
    assert {path: [e.number for e in found] for path, found in index.by_path.items()} == {
        "grid": [0], "boxes": [1], "whole": [2], "tie": [3], "value": [4], "own/~rank*": [5, 6], "values/~rank*": [7],
    }  # fmt: skip


def test_entries_are_counted_without_those_of_one_chunk_and_values():
    assert everything().listed == IndexCounts(files=4, most=5, total=3 + 5 + 2 + 1)
    assert index_of({}, []).listed == IndexCounts(2, 0, 0)


def test_chunks_of_a_leaf_are_those_of_its_record():
    index = everything()
    [grid, boxes, whole, tie, value, own, other, values] = index.entries
    cells = [Chunk(Region((n,), (2,)), 0, n) for n in (0, 2, 4)]
    assert index.chunks_of(grid) == index.chunks_of(tie) == cells
    assert index.chunks_of(grid, Region((3,), (2,))) == index.chunks_of(tie, Region((3,), (2,))) == cells[1:]
    assert [c.start for c in index.chunks_of(boxes, Region((1,), (2,)))] == [1, 2]
    assert index.chunks_of(whole) == [Chunk(Region((), ()), 0, 8)]
    assert index.chunks_of(value) == index.chunks_of(values, rank=0) == []
    assert [index.chunks_of(own, rank=rank) for rank in (0, 1)] == [[Chunk(Region((), ()), n, 8 * n)] for n in (0, 1)]
    assert index.chunks_of(other, rank=2) == [Chunk(Region((), ()), 2, 9)]


def test_a_region_of_a_view_is_not_one_of_its_array():
    view = AliasRecord(0, 0, StridedView(1, (2,)))
    index = index_of(
        {"a": ArrayRecord(1, -1, GRID), "view": view}, [ArraySpec((3,), "uint8"), ArraySpec((6,), "uint8")]
    )
    assert len(index.chunks_of(index.entries[1], Region((0,), (1,)))) == 3


@pytest.mark.parametrize(("rank", "found"), [(None, "no rank"), (2, "rank 2"), (-1, "rank -1")])
def test_the_array_of_a_rank_that_has_none_is_missing(rank, found):
    index = everything()
    with pytest.raises(MismatchError) as caught:
        index.chunks_of(index.entries[5], rank=rank)
    assert (caught.value.path, caught.value.found) == ("own/~rank*", found)


def test_tables_are_known_by_the_number_of_their_ids():
    spec = TableSpec("u64_mod", 1, 4)
    node = TableNode(spec, (None, None, DictNode(("w",), (None,)), DictNode((), ())))
    records = {str(n): ArrayRecord(0, -1, WholeChunk(0, 0)) for n in range(4)}
    index = index_of(records, [ArraySpec((), "int64")], structure=DictNode(("x", "emb"), (None, node)))
    assert index.tables == {1: spec} and index.offsets == {2}
    assert everything().tables == {} and everything().offsets == frozenset()


def test_what_an_index_looks_up_is_made_once():
    index = everything()
    for part in ("paths", "entries", "by_path", "listed", "tables", "offsets", "file_list", "file_names"):
        assert getattr(index, part) is getattr(index, part)


def test_a_notebook_shows_the_largest_arrays_and_how_many_others():
    def shown(count):
        leaves = {f"<w{n}>": ArrayRecord(n, -1, WholeChunk(0, 0)) for n in range(count)}
        specs = [ArraySpec((n + 1, 1000), "uint8") for n in range(count)]
        return index_of(leaves | {"tie": AliasRecord(0, 0), "v": ValueRecord(1)}, specs, files=FILES)._repr_html_()

    page = shown(13)
    names = [page.index(f"&lt;w{n}&gt;") for n in range(12, 0, -1)]
    assert names == sorted(names) and "&lt;w0&gt;" not in page and "tie" not in page and page.count("<tr>") == 13
    assert "[13, 1000]" in page and '<td class="n">13 kB</td>' in page and "112 B in 4 shards" in page
    assert page.endswith("<p>and 1 smaller array</p>") and "smaller" not in shown(12) and "<dd>14</dd>" in shown(12)
