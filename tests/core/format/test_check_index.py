"""The checks of an index: what may still be missing, and the limits; test_index changes real indexes besides."""

import msgspec
import pytest

from tests.helpers.indexes import index_of
from tests.helpers.saves import small
from treeckpt._core.format.check_index import check_against_files, check_index, needs_file_sizes
from treeckpt._core.format.index import encode_manifest
from treeckpt._core.format.records import (
    AliasRecord,
    ArrayRecord,
    BoxChunks,
    FileTable,
    GridChunks,
    Index,
    PerRankArrays,
    PerRankValues,
    ValueRecord,
    WholeChunk,
)
from treeckpt._core.sharding.placements import BoxLayout, Mesh, MeshLayout, Replicate, Shard, StridedShard
from treeckpt._core.tree.spec import ArraySpec, StridedView
from treeckpt._core.tree.structure import DictNode, PerRankNode
from treeckpt.errors import CorruptError, FormatError


def test_a_good_index_passes():
    check_index(small().index, "index.json")


def test_a_manifest_passes_as_such_only():
    manifest = msgspec.json.decode(encode_manifest(small().index), type=Index)
    check_index(manifest, "shard", manifest=True)
    with pytest.raises(FormatError):
        check_index(manifest, "index.json")


def test_errors_name_the_leaf_or_the_file():
    index = small().index
    with pytest.raises(FormatError) as caught:
        check_index(msgspec.structs.replace(index, world=0), "run/index.json")
    assert caught.value.path == "run/index.json"
    broken = (msgspec.structs.replace(index.leaves[0], spec=99), *index.leaves[1:])
    with pytest.raises(FormatError) as caught:
        check_index(msgspec.structs.replace(index, leaves=broken), "run/index.json")
    assert caught.value.path == "grid"


def test_a_bad_record_is_found_among_good_ones_that_are_alike():
    index = small().index
    for leaf in index.entries:
        if not isinstance(leaf.record, ArrayRecord):
            continue
        for change in (
            {"spec": len(index.specs)},
            {"layout": len(index.layouts)},
            {"chunks": WholeChunk(index.world, 0)},
        ):
            broken = list(index.leaves)
            broken[leaf.number] = msgspec.structs.replace(leaf.record, **change)
            with pytest.raises(FormatError) as caught:
                check_index(msgspec.structs.replace(index, leaves=tuple(broken)), "index.json")
            assert caught.value.path == leaf.path


# limits: the last number that passes, and the first one that does not -------------------------------------------------
def passes(index):
    try:
        check_index(index, "index.json")
    except FormatError:
        return False
    return True


def an_index(**fields):
    return index_of({"w": ArrayRecord(0, -1, WholeChunk(0, 0))}, [ArraySpec((2,), "uint8")], **fields)


def rows(count, **columns):
    """A table of one file of each rank."""
    zeros = ((0, 0, count),) if count > 1 else ((0,),) * count
    ranks = ((0, 1, count),) if count > 1 else zeros
    return FileTable(**{"rank": ranks, "part": zeros, "stream": zeros, "nbytes": zeros, "header": zeros} | columns)


def array_of(shape, chunks, dtype="uint8", **fields):
    return index_of({"w": ArrayRecord(0, -1, chunks)}, [ArraySpec(shape, dtype)], **fields)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (an_index(world=1, files=rows(1)), an_index(world=0, files=rows(1))),
        (an_index(world=1 << 24), an_index(world=(1 << 24) + 1)),
        (an_index(created_ns=(1 << 62) - 1), an_index(created_ns=1 << 62)),
        (an_index(created_ns=1 - (1 << 62)), an_index(created_ns=-(1 << 62))),
        (an_index(files=rows(2)), an_index(files=rows(3))),
        (an_index(files=rows(1, part=(((1 << 24) - 1,),))), an_index(files=rows(1, part=((1 << 24,),)))),
        (an_index(files=rows(1, stream=(((1 << 62) - 1,),))), an_index(files=rows(1, stream=((1 << 62,),)))),
        (an_index(files=rows(1, nbytes=(((1 << 62) - 1,),))), an_index(files=rows(1, nbytes=((1 << 62,),)))),
        (an_index(files=rows(1, header=((1 << 30,),))), an_index(files=rows(1, header=(((1 << 30) + 1,),)))),
        (an_index(files=rows(1, header=((0,),))), an_index(files=rows(1, header=((-1,),)))),
        (an_index(files=rows(1)), an_index(files=rows(0))),
        (an_index(files=rows(1 << 20), world=1 << 24), an_index(files=rows((1 << 20) + 1), world=1 << 24)),
        (an_index(files=rows(2, rank=((0,), (0,)), part=((0, 1, 2),))), an_index(files=rows(2, rank=((0,), (0,))))),
        (
            an_index(files=rows(2, part=((5,), (0,)))),
            an_index(files=rows(2, rank=((1, -1, 2),), part=((0,), (5,)))),
        ),
    ],
)  # fmt: skip
def test_worlds_times_and_files_have_limits(good, bad):
    assert passes(good) and not passes(bad)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (ArraySpec((1,) * 64, "uint8"), ArraySpec((1,) * 65, "uint8")),
        (ArraySpec((0, 3), "uint8"), ArraySpec((-1, 3), "uint8")),
        (ArraySpec((), "uint8"), ArraySpec((-1,), "uint8")),
        (ArraySpec(((1 << 62) - 1,), "uint8"), ArraySpec((1 << 62,), "uint8")),
        (ArraySpec(((1 << 59) - 1,), "float64"), ArraySpec((1 << 59,), "float64")),
        (ArraySpec((0, (1 << 62) - 1), "uint8"), ArraySpec((0, 1 << 62), "uint8")),
        (ArraySpec((4,), "uint8"), ArraySpec((4,), "uint8", regions=())),
    ],
)
def test_specs_have_limits(good, bad):
    for spec, fine in ((good, True), (bad, False)):
        assert passes(index_of({"w": ArrayRecord(0, -1, WholeChunk(0, 0))}, [spec])) is fine


def meshed(mesh, *placements, **fields):
    return an_index(layouts=(MeshLayout(mesh, placements or (Replicate(),) * len(mesh.shape)),), **fields)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (meshed(Mesh((1,) * 64, ((0,),))), meshed(Mesh((1,) * 65, ((0,),)))),
        (meshed(Mesh((1,), ((0,),))), meshed(Mesh((), ((0,),)))),
        (meshed(Mesh((1,), ((0,),))), meshed(Mesh((0,), ()))),
        (meshed(Mesh((1, 2), ((0, 1, 2),), ("a", "b"))), meshed(Mesh((1, 2), ((0, 1, 2),), ("a",)))),
        (meshed(Mesh((1, 2), ((0, 1, 2),))), meshed(Mesh((1, 2), ((0, 1, 2),), ("a", "b", "c")))),
        (meshed(Mesh((2,), ((0, 1, 2),))), meshed(Mesh((3,), ((0, 1, 3),)))),
        (meshed(Mesh((3,), ((0, 1, 3),)), world=3), meshed(Mesh((3,), ((0, 1, 3),)), world=2)),
        (meshed(Mesh((2,), ((0, 1, 2),))), meshed(Mesh((2,), ((0,),)))),
        (meshed(Mesh((2,), ((0, 1, 2),))), meshed(Mesh((2,), ((1, 1, 2),)))),
        (
            meshed(Mesh((1 << 17,), ((0, 1, 1 << 17),)), world=1 << 20),
            meshed(Mesh(((1 << 17) + 1,), ((0, 1, (1 << 17) + 1),)), world=1 << 20),
        ),
        (
            meshed(Mesh((1 << 18,), ((0, 1, 1 << 18),)), world=1 << 20, files=rows(1 << 18)),
            meshed(Mesh((1 << 18,), ((0, 1, 1 << 18),)), world=1 << 20, files=rows((1 << 18) - 1)),
        ),
        (
            meshed(Mesh((1,), ((0,),)), StridedShard(0, 1 << 16)),
            meshed(Mesh((1,), ((0,),)), StridedShard(0, (1 << 16) + 1)),
        ),
        (
            meshed(Mesh((1,), ((0,),)), StridedShard(0, 1 << 20), world=1 << 20),
            meshed(Mesh((1,), ((0,),)), StridedShard(0, (1 << 20) + 1), world=1 << 20),
        ),
        (an_index(), an_index(layouts=(BoxLayout(()),))),
    ],
)  # fmt: skip
def test_layouts_have_limits(good, bad):
    assert passes(good) and not passes(bad)


TOP = 1 << 62


def grid(*cuts, rank=((0, 1, 2),), start=((0, 4, 2),)):
    return GridChunks(cuts, rank, start)


def boxes(count, ndim, **columns):
    many = ((0, 0, count),) if count > 1 else ((0,),) * count
    ones = ((1, 0, count),) if count > 1 else ((1,),) * count
    found = {"offset": (many,) * ndim, "shape": (ones,) * ndim, "rank": many, "start": many} | columns
    return BoxChunks(**found)


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        ((2,), WholeChunk(1, 0), WholeChunk(2, 0)),
        ((2,), WholeChunk(0, 0), WholeChunk(-1, 0)),
        ((2,), WholeChunk(0, (1 << 62) - 1), WholeChunk(0, 1 << 62)),
        ((2,), WholeChunk(0, 0), WholeChunk(0, -1)),
        ((5,), grid(((0, 3, 2), (5,))), grid(((0, 3, 2), (6,)))),
        ((5,), grid(((0, 3, 2), (5,))), grid(((1, 2, 2), (5,)))),
        ((5,), grid(((0, 3, 2), (5,))), grid(((0, 3, 2), (3,), (5,)))),
        ((5,), grid(((0, 3, 2), (5,))), grid()),
        ((5,), grid(((0, 3, 2), (5,))), grid(((0, 3, 2), (5,)), ((0, 3, 2), (5,)))),
        ((0,), WholeChunk(0, 0), GridChunks((((0,),),), (), ())),
        ((5,), grid(((0, 3, 2), (5,))), grid(((0, 3, 2), (5,)), rank=((0, 1, 3),))),
        ((5,), grid(((0, 3, 2), (5,))), grid(((0, 3, 2), (5,)), rank=((1, 1, 2),))),
        ((5,), grid(((0, 3, 2), (5,)), rank=((1,), (0,))), grid(((0, 3, 2), (5,)), rank=((-1, 1, 2),))),
        ((5,), grid(((0, 3, 2), (5,))), grid(((0, 3, 2), (5,)), start=((0,),))),
        ((5,), grid(((0, 3, 2), (5,))), grid(((0, 3, 2), (5,)), start=((-4, 4, 2),))),
        ((5,), grid(((0, 3, 2), (5,)), start=((0,), (TOP - 1,))), grid(((0, 3, 2), (5,)), start=((0,), (TOP,)))),
        ((4, 6), grid(((0, 4, 2),), ((0, 3, 3),)), grid(((0, 4, 2),), ((0, 3, 3),), rank=((0, 1, 2), (0, 1, 2)))),
        ((3,), boxes(1, 1), boxes(0, 1)),
        ((3,), boxes(2, 1), boxes(2, 2)),
        ((3,), boxes(2, 1), boxes(2, 1, shape=())),
        ((3,), boxes(2, 1), boxes(2, 1, offset=(((0, 0, 2),),) * 2)),
        ((3,), boxes(2, 1, offset=(((1, 1, 2),),)), boxes(2, 1, offset=(((2, 1, 2),),))),
        ((3,), boxes(2, 1), boxes(2, 1, offset=(((-1, 1, 2),),))),
        ((3,), boxes(2, 1, shape=(((2, 1, 2),),)), boxes(2, 1, shape=(((3, 1, 2),),))),
        ((3,), boxes(2, 1), boxes(2, 1, shape=(((0, 1, 2),),))),
        ((3,), boxes(2, 1, rank=((0, 1, 2),)), boxes(2, 1, rank=((1, 1, 2),))),
        ((3,), boxes(2, 1), boxes(2, 1, start=((0,),))),
        ((3,), boxes(2, 1), boxes(2, 1, start=((-1, 1, 2),))),
        ((3,), boxes(2, 1), boxes(2, 1, offset=(((0, 0, 3),),))),
        ((3,), boxes(2, 1), boxes(2, 1, shape=(((1, 0, 3),),))),
        ((3,), boxes(1 << 22, 1), boxes((1 << 22) + 1, 1)),
        ((3, 3), boxes(1 << 21, 2), boxes((1 << 21) + 1, 2)),
        ((), boxes(1 << 22, 0), boxes((1 << 22) + 1, 0)),
    ],
)  # fmt: skip
def test_chunks_have_limits(shape, good, bad):
    assert passes(array_of(shape, good)) and not passes(array_of(shape, bad))


def aliased(spec, view=None, *, of=0, base=None):
    base = base or ArraySpec((4, 3), "float32")
    return index_of({"base": ArrayRecord(0, -1, WholeChunk(0, 0)), "tie": AliasRecord(1, of, view)}, [base, spec])


@pytest.mark.parametrize(
    ("spec", "view", "fine"),
    [
        (ArraySpec((4, 3), "float32"), None, True),
        (ArraySpec((4, 3), "float32", kind="parameter"), None, True),
        (ArraySpec((3, 4), "float32"), None, False),
        (ArraySpec((4, 3), "int32"), None, False),
        (ArraySpec((4, 3), "float32", kind="numpy"), None, False),
        (ArraySpec((3, 4), "float32"), StridedView(0, (1, 3)), True),
        (ArraySpec((3, 4), "int32"), StridedView(0, (1, 3)), False),
        (ArraySpec((4, 3), "float32"), StridedView(1, (3, 1)), False),
        (ArraySpec((3, 3), "float32"), StridedView(3, (3, 1)), True),
        (ArraySpec((3, 3), "float32"), StridedView(4, (3, 1)), False),
        (ArraySpec((2,), "float32"), StridedView(0, (11,)), True),
        (ArraySpec((2,), "float32"), StridedView(0, (12,)), False),
        (ArraySpec((9, 4), "float32"), StridedView(11, (0, 0)), True),
        (ArraySpec((), "float32"), StridedView(11, ()), True),
        (ArraySpec((), "float32"), StridedView(12, ()), False),
        (ArraySpec((2,), "float32"), StridedView(0, (1, 1)), False),
        (ArraySpec((2,), "float32"), StridedView(0, ()), False),
        (ArraySpec((2,), "float32"), StridedView(-1, (1,)), False),
        (ArraySpec((2,), "float32"), StridedView(5, (-1,)), False),
        (ArraySpec((0, 9), "float32"), StridedView(50, (9, 9)), True),
        (ArraySpec((0, 9), "float32"), StridedView(0, (1,)), False),
    ],
)
def test_a_view_lies_inside_of_its_array(spec, view, fine):
    assert passes(aliased(spec, view)) is fine


def test_an_alias_is_of_an_array():
    same = ArraySpec((4, 3), "float32")
    assert [passes(aliased(same, of=of)) for of in (-1, 0, 1, 2)] == [False, True, False, False]
    value = index_of({"v": ValueRecord(1), "tie": AliasRecord(0, 0)}, [same])
    assert not passes(value)


def own(ranks, *children):
    return DictNode(("own",), (PerRankNode(ranks, children),))


ALL, FIRST, SECOND = ((0, 1, 2),), ((0,),), ((1,),)


def owned(record, ranks=ALL):
    return index_of({"own": record}, [ArraySpec((), "int64")], structure=own((ranks,), None))


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (owned(PerRankValues((1, 2))), owned(PerRankValues((1,)))),
        (owned(PerRankValues((1,)), FIRST), owned(ValueRecord(1), FIRST)),
        (owned(PerRankArrays(0, ((0, 8, 2),))), owned(PerRankArrays(0, ((0,),)))),
        (owned(PerRankArrays(0, ((0, 8, 2),))), owned(PerRankArrays(1, ((0, 8, 2),)))),
        (owned(PerRankArrays(0, ((0, 8, 2),))), owned(PerRankArrays(-1, ((0, 8, 2),)))),
        (owned(PerRankArrays(0, ((0,), ((1 << 62) - 1,)))), owned(PerRankArrays(0, ((0,), (1 << 62,))))),
        (owned(PerRankArrays(0, ((0, 8, 2),))), owned(PerRankArrays(0, ((-8, 8, 2),)))),
        (owned(PerRankArrays(0, ((0, 8, 2),))), owned(PerRankArrays(0, ((0, 8, 2),)), ((1, 1, 2),))),
        (owned(PerRankArrays(0, ((0, 8, 2),))), owned(ArrayRecord(0, -1, WholeChunk(0, 0)))),
        (an_index(), index_of({"w": PerRankArrays(0, ((0,),))}, [ArraySpec((), "int64")])),
        (an_index(), index_of({"w": PerRankValues((1,))}, [])),
        (an_index(), index_of({"w": PerRankValues(())}, [])),
    ],
)
def test_what_each_rank_has_of_its_own_is_under_per_rank_and_complete(good, bad):
    assert passes(good) and not passes(bad)


def test_a_path_may_repeat_for_other_ranks_only():
    def of(*groups):
        records = {str(n): PerRankValues((1,)) for n in range(len(groups))}
        return passes(index_of(records, [], structure=own(groups, *[None] * len(groups))))

    assert of(FIRST, SECOND) and not of(FIRST, FIRST)


def test_there_are_as_many_records_as_leaves():
    assert not passes(an_index(structure=DictNode(("a", "b"), (None, None))))
    assert not passes(an_index(structure=DictNode((), ())))


def tied(group, others, world=1 << 24):
    """An array of a group of ranks, and ties to it of other groups."""
    spec = ArraySpec((), "int64")
    inner = DictNode(("a", "b"), (None, None))
    base = PerRankArrays(0, group)
    leaves = {"a": base, "b": AliasRecord(0, 0)} | {str(n): AliasRecord(0, 0) for n in range(len(others))}
    return index_of(leaves, [spec], structure=own((group, *others), inner, *[None] * len(others)), world=world)


def test_an_alias_is_of_an_array_that_all_its_ranks_have():
    assert passes(tied(ALL, [])) and passes(tied(ALL, [FIRST])) and passes(tied(ALL, [FIRST, SECOND]))
    assert not passes(tied(FIRST, [SECOND])) and not passes(tied(FIRST, [((0, 1, 2),)]))
    base = index_of(
        {"a": PerRankArrays(0, ALL), "b": AliasRecord(0, 0)}, [ArraySpec((), "int64")],
        structure=DictNode(("own", "b"), (PerRankNode((ALL,), (None,)), None)),
    )  # fmt: skip
    assert not passes(base)


def test_ranks_of_aliases_are_compared_up_to_four_million():
    group = ((0, 1, (1 << 22) - 2),)
    assert passes(tied(group, [((0, 1, 2),)])) and not passes(tied(group, [((0, 1, 3),)]))
    half = ((0, 1, (1 << 21) - 2),)
    assert passes(tied(half, [((0, 1, 2),), ((1, 1, 2),)])) and not passes(tied(half, [((0, 1, 2),), ((1, 1, 3),)]))


def test_values_fit_their_layout():
    layout = MeshLayout(Mesh((2,), ((0, 1, 2),)), (Shard(1),))
    for number, shape, fine in ((0, (2, 2), True), (0, (2,), False), (-1, (2,), True), (1, (2, 2), False)):
        record = ArrayRecord(0, number, WholeChunk(0, 0))
        assert passes(index_of({"w": record}, [ArraySpec(shape, "uint8")], layouts=(layout,))) is fine
    assert not passes(index_of({"w": ArrayRecord(0, -2, WholeChunk(0, 0))}, [ArraySpec((2,), "uint8")]))


# numbers of entries against files -------------------------------------------------------------------------------------
def listing(files, chunks):
    """An index of files, and of an array of that many chunks."""
    array = GridChunks((((0, 1, chunks + 1),),), ((0, 0, chunks),), ((0, 1, chunks),))
    return array_of((chunks,), array, files=rows(files), world=1 << 24)


def test_an_index_is_compared_with_files_from_131_072_entries_on():
    few = 1 << 17
    assert not needs_file_sizes(listing(few, few), 0)
    assert needs_file_sizes(listing(few + 1, 2), few) and needs_file_sizes(listing(2, few + 1), few)
    assert not needs_file_sizes(listing(few + 1, few + 1), few + 1)


def agrees(index, count, nbytes):
    try:
        check_against_files(index, {str(n): nbytes if n == 0 else 0 for n in range(count)}, "run")
    except CorruptError:
        return False
    return True


def test_an_index_lists_at_most_twice_the_files_that_exist():
    assert agrees(listing(1024, 2), 1, 0) and not agrees(listing(1025, 2), 1, 0)
    assert agrees(listing(2000, 2), 1000, 0) and not agrees(listing(2001, 2), 1000, 0)


def test_an_index_lists_no_more_chunks_than_the_files_can_hold():
    free = 1 << 15
    assert agrees(listing(2, free), 1, 0) and not agrees(listing(2, free + 1), 1, 47)
    assert agrees(listing(2, free + 1), 1, 48) and agrees(listing(2, free + 10), 2, 480)
    assert not agrees(listing(2, free + 10), 2, 479)
