"""Damaged bytes name the leaves that need them, and those that share their storage or their rows."""

import pytest

from tests.helpers.indexes import index_of
from treeckpt._core.format.byte_map import (
    BadBytes,
    DamagedLeaf,
    damaged_leaves,
    leaves_in_range,
    rank_path,
    unreadable_leaves,
)
from treeckpt._core.format.records import AliasRecord, ArrayRecord, PerRankArrays, ValueRecord, WholeChunk
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.tree.spec import ArraySpec, StridedView, TableSpec
from treeckpt._core.tree.structure import DictNode, PerRankNode, TableNode

BYTES = ArraySpec((8,), "uint8")


def at(start, rank=0):
    """Eight bytes of a rank's stream."""
    return ArrayRecord(0, -1, WholeChunk(rank, start))


@pytest.fixture
def plain():
    """Arrays a and b of rank 0, c of rank 1; ties to a, and a value. Headers of 512 and 256 bytes."""
    tie, view = AliasRecord(0, 0), AliasRecord(1, 0, StridedView(0, (1,)))
    leaves = {"a": at(0), "b": at(8), "c": at(0, 1), "tie": tie, "view": view, "v": ValueRecord(1)}
    return index_of(leaves, [BYTES, ArraySpec((2,), "uint8")])


@pytest.mark.parametrize(
    ("start", "stop", "hit"),
    [
        (512, 513, [0]), (519, 520, [0]), (519, 521, [0, 1]), (520, 521, [1]), (527, 528, [1]), (528, 600, []),
        (511, 512, [0, 1]), (0, 1, [0, 1]), (600, 601, []),
    ],
)  # fmt: skip
def test_bytes_hit_the_leaves_they_overlap_and_a_header_hits_all(plain, start, stop, hit):
    assert leaves_in_range(plain, plain.file_list[0], start, stop) == hit


def test_leaves_that_share_storage_are_damaged_too(plain):
    [first, second] = [file.name for file in plain.file_list]
    assert damaged_leaves(plain, [BadBytes(first, 512, 513, "changed")]) == {
        number: (DamagedLeaf(path, first, 512, 513),) for number, path in ((0, "a"), (3, "tie"), (4, "view"))
    }
    assert list(damaged_leaves(plain, [BadBytes(first, 520, 521, "gone")])) == [1]
    assert list(damaged_leaves(plain, [BadBytes(second, 0, 300, "gone"), BadBytes(first, 520, 521, "gone")])) == [1, 2]
    assert damaged_leaves(plain, []) == {}


def test_each_damaged_part_of_a_leaf_is_named(plain):
    name = plain.file_list[0].name
    parts = [BadBytes(name, 516, 517, "changed"), BadBytes(name, 512, 513, "changed")]
    found = damaged_leaves(plain, parts)
    assert [(d.start, d.stop) for d in found[0]] == [(516, 517), (512, 513)]
    assert found[3] == (DamagedLeaf("tie", name, 512, 513), DamagedLeaf("tie", name, 516, 517))


def test_a_damaged_leaf_reads_as_its_path_and_bytes():
    assert str(DamagedLeaf("a/b", "x.shard", 4, 9)) == "a/b: bytes 4:9 of x.shard"
    assert str(DamagedLeaf("", "x.shard", 4, 9)) == "<root>: bytes 4:9 of x.shard"


@pytest.fixture
def own():
    """An array of each rank's own, and one that the ranks share."""
    structure = DictNode(("own", "all"), (PerRankNode((encode_runs([0, 1]),), (None,)), None))
    return index_of({"own": PerRankArrays(0, ((0,), (8,))), "all": at(8)}, [BYTES], structure=structure)


def test_the_state_of_one_rank_is_damaged_for_that_rank_alone(own):
    [first, second] = [file.name for file in own.file_list]
    bad = [BadBytes(first, 512, 513, "changed"), BadBytes(second, 264, 265, "changed")]
    every = (DamagedLeaf("own/~rank0", first, 512, 513), DamagedLeaf("own/~rank1", second, 264, 265))
    assert damaged_leaves(own, bad) == {0: every}
    assert damaged_leaves(own, bad, rank=0) == {0: (DamagedLeaf("own/~rank*", first, 512, 513),)}
    assert damaged_leaves(own, bad, rank=1) == {0: (DamagedLeaf("own/~rank*", second, 264, 265),)}
    assert damaged_leaves(own, bad, rank=2) == {}


def test_what_ranks_share_is_damaged_for_all_of_them(own):
    [first, _] = [file.name for file in own.file_list]
    for rank in (None, 0, 1):
        found = damaged_leaves(own, [BadBytes(first, 520, 521, "changed")], rank=rank)
        assert found == {1: (DamagedLeaf("all", first, 520, 521),)}


def test_a_path_of_the_index_names_a_rank():
    assert rank_path("own/~rank*/a", 12) == "own/~rank12/a" and rank_path("all", 12) == "all"


@pytest.fixture
def tables():
    """Two tables of ids, offsets, one slot and a scalar; a tie to the first one's slot, and an array beside them."""

    def table():
        return TableNode(TableSpec("u64_mod", 1, 4), (None, None, DictNode(("w",), (None,)), DictNode(("n",), (None,))))

    structure = DictNode(("emb", "emb2", "tie", "x"), (table(), table(), None, None))
    names = "emb/ids emb/offsets emb/slots/w emb/scalars/n emb2/ids emb2/offsets emb2/slots/w emb2/scalars/n tie x"
    records = {name: at(8 * n) for n, name in enumerate(names.split())}
    records |= {"tie": AliasRecord(0, 2), "emb/scalars/n": ValueRecord(1), "emb2/scalars/n": ValueRecord(1)}
    return index_of(records, [BYTES], structure=structure)


@pytest.mark.parametrize(
    ("leaf", "damaged"),
    [(0, [0, 1, 2, 8]), (1, [0, 1, 2, 8]), (2, [0, 1, 2, 8]), (4, [4, 5, 6]), (6, [4, 5, 6]), (9, [9])],
)
def test_columns_of_a_table_are_damaged_together(tables, leaf, damaged):
    name, start = tables.file_list[0].name, 512 + 8 * leaf
    found = damaged_leaves(tables, [BadBytes(name, start, start + 1, "changed")])
    assert found == {n: (DamagedLeaf(tables.entries[n].path, name, start, start + 1),) for n in damaged}


def test_a_table_at_the_root_is_damaged_as_one():
    node = TableNode(TableSpec("u64_mod", 1, 4), (None, None, DictNode(("w",), (None,)), DictNode((), ())))
    index = index_of({"ids": at(0), "offsets": at(8), "w": at(16)}, [BYTES], structure=node)
    name = index.file_list[0].name
    assert list(damaged_leaves(index, [BadBytes(name, 528, 529, "changed")])) == [0, 1, 2]


def test_tables_of_each_rank_are_damaged_apart():
    def table():
        return TableNode(TableSpec("u64_mod", 1, 4), (None, None, DictNode(("w",), (None,)), DictNode((), ())))

    structure = DictNode(("own",), (PerRankNode((((0,),), ((1,),)), (table(), table())),))
    records = {str(n): PerRankArrays(0, ((8 * (n % 3),),)) for n in range(6)}
    index = index_of(records, [BYTES], structure=structure)
    name = index.file_list[1].name
    assert list(damaged_leaves(index, [BadBytes(name, 256, 257, "changed")])) == [3, 4, 5]


def test_many_ranges_at_once_hit_what_each_alone_does(plain):
    names = [file.name for file in plain.file_list]
    bad = [BadBytes(name, start, stop, "changed") for name in names for start in range(0, 540, 7)
           for stop in (start + 1, start + 9, start + 300)]  # fmt: skip
    together = [numbers.tolist() for numbers in unreadable_leaves(plain, bad)]
    assert together == [list(damaged_leaves(plain, [one])) for one in bad]
    assert [[n for n in numbers if n < 3] for numbers in together] == [
        sorted(leaves_in_range(plain, plain.file_names[one.file], one.start, one.stop)) for one in bad
    ]
    assert unreadable_leaves(plain, []) == []
