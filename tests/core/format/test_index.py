"""The index: exact, sealed, rebuilt from the shards alone, and refused when hostile, before much is allocated."""

import json
import random
import time
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.saves import SAVE_ID, Array, ranks_of, save, saves, small
from tests.helpers.strategies import regions
from treeckpt._core.format.index import decode_index, encode_index, rebuild
from treeckpt._core.format.records import AliasRecord, ArrayRecord, PerRankArrays, WholeChunk
from treeckpt._core.format.shard_header import decode_header, encode_header, sealed, shard_name
from treeckpt._core.sharding.int_runs import decode_runs, encode_runs
from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.spec import ArraySpec
from treeckpt.errors import CorruptError, FormatError, MismatchError

FEWER = settings(max_examples=20)
"""Whole saves take a tenth of a second each to make up."""


@given(saves())
@FEWER
def test_indexes_come_back(saved):
    assert decode_index(encode_index(saved.index)) == saved.index


@given(saves(), st.randoms())
@FEWER
def test_a_lost_index_is_rebuilt_from_the_headers_in_any_order(saved, order):
    headers = [(size, decode_header(encode_header(header), "f")) for size, header in saved.headers]
    order.shuffle(headers)
    assert rebuild(headers) == saved.index


@given(saves())
@FEWER
def test_files_are_named_and_found_by_rank_and_part(saved):
    index = saved.index
    assert [(f.name, f.rank, f.part, f.stream, f.nbytes, f.header) for f in index.file_list] == [
        (shard_name(SAVE_ID, h.rank, h.world, h.part), h.rank, h.part, h.stream, h.nbytes, size)
        for size, h in saved.headers
    ]
    assert index.nbytes == sum(h.nbytes for _, h in saved.headers)
    for rank in range(index.world):
        assert [f.part for f in index.files_of(rank)] == list(range(len(index.files_of(rank))))
    assert index.files_of(index.world) == ()


@given(saves(), st.data())
@FEWER
def test_every_chunk_is_an_entry_of_the_file_that_it_is_located_in(saved, data):
    index = saved.index
    entries = {}
    for size, header in saved.headers:
        name = shard_name(SAVE_ID, header.rank, header.world, header.part)
        for entry in header.entries:
            entries[entry.path, entry.region, header.rank] = (name, size + entry.start)
    arrays = 0
    for leaf in index.entries:
        if leaf.spec is None or isinstance(leaf.record, AliasRecord):
            continue
        for rank in ranks_of(leaf) or [None]:
            region = data.draw(regions(leaf.spec.shape))
            every = index.chunks_of(leaf, rank=rank)
            some = index.chunks_of(leaf, region, rank=rank)
            assert set(some) <= set(every)
            marks = np.zeros(leaf.spec.shape, int)
            for chunk in every:
                marks[chunk.region.slices()] += 1
                path = leaf.path.replace("~rank*", f"~rank{chunk.rank}")
                start = chunk.start
                file, at = index.locate(chunk.rank, start, start + 1 if chunk.region.size else start, path)
                if chunk.region.size:
                    assert (file.name, at) == entries[path, chunk.region, chunk.rank]
            assert (marks == 1).all()
            arrays += 1
    assert arrays >= 2


def test_a_tie_has_the_chunks_of_its_base():
    index = small().index
    [base], [tie], [view] = (index.by_path[path] for path in ("whole", "tie", "view"))
    assert index.chunks_of(tie) == index.chunks_of(view) == index.chunks_of(base) != []


def test_the_array_of_a_rank_that_did_not_save_is_missing():
    [leaf] = small().index.by_path["own/~rank*/0"]
    with pytest.raises(MismatchError, match="own"):
        small().index.chunks_of(leaf, rank=2)
    with pytest.raises(MismatchError, match="own"):
        small().index.chunks_of(leaf)


@pytest.mark.parametrize("extent", [(0, -8, 0), (0, 0, 1 << 40), (7, 0, 1), (0, 5, 3)])
def test_bytes_in_no_file_are_refused(extent):
    with pytest.raises(FormatError, match="model/w"):
        small().index.locate(*extent, "model/w")


def test_a_regular_sharding_costs_a_few_bytes_per_leaf_at_any_world_size():
    from treeckpt._core.sharding.placements import Mesh, MeshLayout, Shard

    sizes = []
    for side in (4, 32):
        mesh = Mesh((side, side), encode_runs(range(side * side)))
        tree = {
            f"l{i}": Array(ArraySpec((256, 256), "float32"), MeshLayout(mesh, (Shard(0), Shard(1)))) for i in range(20)
        }
        index = save(tree, side * side).index
        sizes.append(len(encode_index(index)))
    assert sizes[1] < sizes[0] * 1.2


# damage ---------------------------------------------------------------------------------------------------------------
def test_every_flipped_byte_is_found():
    data = encode_index(small().index)
    for at in range(len(data)):
        for flip in (1, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises((CorruptError, FormatError)):
                decode_index(bytes(damaged))


@given(st.data())
def test_a_truncated_or_longer_index_is_found(data):
    whole = encode_index(small().index)
    length = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (whole[:length], whole + b" ", whole + whole[:length] + b"\0"):
        with pytest.raises(CorruptError):
            decode_index(damaged)


@given(st.binary(max_size=60))
def test_other_bytes_are_no_index(data):
    with pytest.raises(CorruptError, match=r"run/index\.json"):
        decode_index(data, "run/index.json")


def test_shards_of_another_save_or_missing_ones_do_not_make_an_index():
    headers = small().headers
    other = [(n, msgspec.structs.replace(h, save_id="f" * 16)) for n, h in headers]
    for wrong in ([], headers[1:], headers[:1], [headers[0], other[1]], [*headers, headers[1]]):
        with pytest.raises(CorruptError):
            rebuild(wrong)


def test_entries_of_another_shape_do_not_make_an_index():
    size, header = small().headers[0]
    entries = tuple(msgspec.structs.replace(e, dtype="float16") if e.path == "whole" else e for e in header.entries)
    with pytest.raises(FormatError, match="whole"):
        rebuild([(size, msgspec.structs.replace(header, entries=entries)), small().headers[1]])


def test_arrays_of_each_rank_of_another_shape_or_dtype_or_number_do_not_make_an_index():
    saved = small()
    path = "own/~rank1/0"
    [own] = [entry for entry in saved.headers[1][1].entries if entry.path == path]
    rest = tuple(entry for entry in saved.headers[1][1].entries if entry.path != path)

    def rebuilt(*entries):
        size, header = saved.headers[1]
        return rebuild([saved.headers[0], (size, msgspec.structs.replace(header, entries=(*rest, *entries)))])

    assert rebuilt(own) == saved.index
    other_shape, other_dtype = (msgspec.structs.replace(own, **c) for c in ({"shape": (1,)}, {"dtype": "uint64"}))
    for entries in ([], [own, own], [other_shape], [other_dtype]):
        with pytest.raises(CorruptError, match="rank 1's own array"):
            rebuilt(*entries)


# hostile indexes, rightly sealed --------------------------------------------------------------------------------------
def resealed(change):
    """The small index after `change` was made to its JSON."""
    document = json.loads(encode_index(small().index))
    found = change(document["index"], document)
    document["seal"] = "0" * 16
    text = json.dumps(document, separators=(",", ":")) if found is None else found
    return sealed(text.encode())


def leaf_number(path):
    return next(leaf.number for leaf in small().index.entries if leaf.path == path)


def record(path, at, value):
    """Changes one field of a leaf's record, in JSON an array that starts with its tag."""

    def change(index, document):
        found = index["leaves"][leaf_number(path)]
        for step in at[:-1]:
            found = found[step]
        assert found[at[-1]] != value
        found[at[-1]] = value

    return change


def field(*at, value):
    def change(index, document):
        found = index
        for step in at[:-1]:
            found = found[step]
        found[at[-1]] = value

    return change


def nested(index, document):
    inner = None
    for _ in range(450):
        inner = ["list", [inner]]
    index["structure"] = inner


def giant_value(index, document):
    inner = ["list", []]
    for _ in range(400):
        inner = ["list", [inner]]
    index["metadata"] = {"x": inner}


def giant_keys(index, document):
    inner = ["tuple", []]
    for _ in range(300):
        inner = ["tuple", [inner]]
    index["structure"] = ["dict", [inner], [None]]
    index["leaves"] = [["v", 1]]


def same_keys(index, document):
    index["structure"] = ["dict", ["a", "a"], [None, None]]
    index["leaves"] = [["v", 1], ["v", 2]]


def unknown_top(index, document):
    document["extra"] = 1


GIANT = [[0, 1, 1 << 60]]
LEVELS = [[0, *[0, 2] * 4000]]
HOSTILE = {
    "version 2": lambda i, d: d.update(version=2),
    "another format": lambda i, d: d.update(format="other"),
    "unknown field outside": unknown_top,
    "unknown field": field("extra", value=1),
    "missing field": lambda i, d: i.pop("files") and None,
    "save id": field("save_id", value="../../../etc/pas"),
    "long save id": field("save_id", value="0" * 17),
    "world 0": field("world", value=0),
    "world negative": field("world", value=-1),
    "world giant": field("world", value=1 << 40),
    "more leaves": lambda i, d: i["leaves"].append(["v", 1]),
    "fewer leaves": lambda i, d: i["leaves"].pop() and None,
    "unknown record": record("value", [0], "zz"),
    "deep structure": nested,
    "deep keys": giant_keys,
    "the same key twice": same_keys,
    "unknown node": field("structure", 0, value="object"),
    "unhashable key": field("structure", 1, 0, value=["list", []]),
    "key of unknown kind": field("structure", 1, 0, value=["os.system", ["true"]]),
    "fewer children": lambda i, d: i["structure"][2].pop() and None,
    "files negative": field("files", "stream", value=[[-4096, 8192, 2]]),
    "files giant": field("files", "rank", value=GIANT),
    "files all giant": lambda i, d: i.update(
        files={key: [[0, 0, 1 << 40]] for key in ("rank", "part", "stream", "nbytes", "header")}
    ),
    "files of unequal columns": field("files", "part", value=[[0]]),
    "files of levels": field("files", "rank", value=LEVELS),
    "files of a rank outside": field("files", "rank", value=[[0, 5, 2]]),
    "files header giant": field("files", "header", value=[[1 << 50, 0, 2]]),
    "files overflow": field("files", "nbytes", value=[[1 << 62, 0, 2]]),
    "files beyond 64 bits": field("files", "nbytes", value=[[1 << 70, 0, 2]]),
    "files empty": field("files", value={}),
    "run of even length": field("files", "rank", value=[[0, 1]]),
    "run of count 0": field("files", "rank", value=[[0, 1, 0]]),
    "run empty": field("files", "rank", value=[[]]),
    "run of text": field("files", "rank", value=[["0"]]),
    "spec negative": field("specs", 0, "shape", value=[-1, 2]),
    "spec giant": field("specs", 0, "shape", value=[1 << 62, 1 << 62]),
    "spec giant and empty": field("specs", 0, "shape", value=[1 << 63, 0]),
    "spec of many dimensions": field("specs", 0, "shape", value=[1] * 65),
    "spec of unknown dtype": field("specs", 0, "dtype", value="float7"),
    "layout of giant mesh": field("layouts", 0, 1, value=[[1 << 60], GIANT]),
    "layout of other count": field("layouts", 0, 1, value=[[3], [[0, 1, 2]]]),
    "layout of negative mesh": field("layouts", 0, 1, value=[[-2], [[0, 1, 2]]]),
    "layout of too many names": field("layouts", 0, 1, value=[[2], [[0, 1, 2]], ["a", "b"]]),
    "layout of rank outside": field("layouts", 0, 1, value=[[2], [[1, 1, 2]]]),
    "layout of no such dim": field("layouts", 0, 2, value=[["s", 9]]),
    "layout of negative dim": field("layouts", 0, 2, value=[["s", -1]]),
    "layout of few placements": field("layouts", 0, 2, value=[]),
    "layout of factor 0": field("layouts", 0, 2, value=[["t", 0, 0]]),
    "layout of giant factor": field("layouts", 0, 2, value=[["t", 0, 1 << 40]]),
    "layout of pieces": field("layouts", 0, value=["boxes", []]),
    "record of no such spec": record("grid", [1], 99),
    "record of negative spec": record("grid", [1], -1),
    "record of no such layout": record("grid", [2], 99),
    "record of layout -2": record("grid", [2], -2),
    "grid of other dims": record("grid", [3, 1], [[[0, 3, 2], [5]]]),
    "grid of falling cuts": record("grid", [3, 1, 0], [[0], [3, -1, 2], [5]]),
    "grid not from 0": record("grid", [3, 1, 0], [[1, 2, 3]]),
    "grid not to size": record("grid", [3, 1, 0], [[0, 3, 2], [6]]),
    "grid of giant cuts": record("grid", [3, 1, 0], [[0, 0, 1 << 40]]),
    "grid of one cut": record("grid", [3, 1, 0], [[0]]),
    "grid of no cut": record("grid", [3, 1, 0], []),
    "grid of few ranks": record("grid", [3, 2], [[0]]),
    "grid of rank outside": record("grid", [3, 2], [[1, 1, 2]]),
    "grid of negative rank": record("grid", [3, 2], [[0, -1, 2]]),
    "grid of many starts": record("grid", [3, 3], [[0, 8, 3]]),
    "grid of negative start": record("grid", [3, 3], [[0, -8, 2]]),
    "boxes of other dims": record("boxes", [3, 1], [[[0, 0, 3]]]),
    "boxes of unequal columns": record("boxes", [3, 4], [[0]]),
    "boxes outside": record("boxes", [3, 1, 0], [[0, 9, 3]]),
    "boxes negative": record("boxes", [3, 1, 0], [[0, -1, 3]]),
    "boxes without elements": record("boxes", [3, 2, 0], [[0, 0, 3]]),
    "boxes larger than all": record("boxes", [3, 2, 0], [[9, 0, 3]]),
    "boxes none": record("boxes", [3], ["b", [[], []], [[], []], [], []]),
    "boxes giant": record(
        "boxes", [3], ["b", [[[0, 0, 1 << 23]]] * 2, [[[1, 0, 1 << 23]]] * 2, [[0, 0, 1 << 23]], [[0, 0, 1 << 23]]]
    ),
    "boxes of rank outside": record("boxes", [3, 3], [[7, 0, 3]]),
    "whole of rank outside": record("whole", [3, 1], 2),
    "whole of negative rank": record("whole", [3, 1], -1),
    "whole of negative start": record("whole", [3, 2], -1),
    "whole of giant start": record("whole", [3, 2], (1 << 63) - 1),
    "no chunks": record("whole", [3], ["n"]),
    "unknown chunks": record("whole", [3, 0], "z"),
    "tie of itself": record("tie", [2], leaf_number("tie")),
    "tie of a tie": record("view", [2], leaf_number("tie")),
    "tie of a value": record("tie", [2], leaf_number("value")),
    "tie of nothing": record("tie", [2], 99),
    "tie of -1": record("tie", [2], -1),
    "tie of another shape": record("tie", [2], leaf_number("grid")),
    "tie of a rank's own": record("tie", [2], leaf_number("own/~rank*/0")),
    "view outside": record("view", [3, 0], 2),
    "view of many strides": record("view", [3, 1], [1, 1]),
    "view of negative stride": record("view", [3, 1], [-1]),
    "view of negative offset": record("view", [3, 0], -1),
    "value for all under PerRank": record("own/~rank*/1", [0], "v"),
    "values of fewer ranks": record("own/~rank*/1", [1], [1]),
    "array for all under PerRank": lambda i, d: i["leaves"].__setitem__(
        leaf_number("own/~rank*/0"), ["a", 0, -1, ["w", 0, 0]]
    ),
    "own array without starts": record("own/~rank*/0", [2], []),
    "own arrays outside of PerRank": record("whole", [0], "pa"),
    "PerRank of giant group": lambda i, d: set_group(i, GIANT),
    "PerRank of levels": lambda i, d: set_group(i, LEVELS),
    "PerRank of rank outside": lambda i, d: set_group(i, [[1, 1, 2]]),
    "PerRank of negative rank": lambda i, d: set_group(i, [[0, -1, 2]]),
    "PerRank of no groups": lambda i, d: own_node(i).__setitem__(1, []),
}


def own_node(index):
    structure = index["structure"]
    return structure[2][structure[1].index("own")]


def set_group(index, runs):
    own_node(index)[1][0] = runs


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_indexes_are_refused_soon_and_without_much_memory(change):
    data = resealed(change)
    assert data != encode_index(small().index)
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises(FormatError) as caught:
            decode_index(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.thread_time() - started < 10, "of computing; what an index claims would take for ever"
    assert peak < 20 << 20
    assert len(str(caught.value)) < 1500


def test_the_unchanged_index_is_not_refused():
    assert decode_index(resealed(lambda index, document: None)) == small().index


def test_a_deep_value_is_refused_when_it_is_read():
    from treeckpt._core.tree.value_codec import decode_value

    index = decode_index(resealed(giant_value))
    with pytest.raises(FormatError):
        decode_value(index.metadata["x"], "x")


def test_random_changes_never_raise_anything_but_our_errors():
    """Numbers and texts of the index replaced at random: decoded, it is either refused or can be asked everything."""
    chance = random.Random(7)
    plain = json.loads(encode_index(small().index))
    refused = 0
    for _ in range(1500):
        document = json.loads(json.dumps(plain))
        spots = list(places(document["index"]))
        container, key = chance.choice(spots)
        container[key] = chance.choice(
            [0, -1, 1, 2, 7, 1 << 31, 1 << 62, (1 << 64) - 1, "", "x", None, [], [0], {}, 1.5]
        )
        document["seal"] = "0" * 16
        data = sealed(json.dumps(document, separators=(",", ":")).encode())
        try:
            index = decode_index(data)
        except (FormatError, CorruptError):
            refused += 1
            continue
        for leaf in index.entries:
            for rank in ranks_of(leaf) or [None]:
                for chunk in index.chunks_of(leaf, rank=rank):
                    assert chunk.region.size >= 0
        assert all(file.name.startswith("shard-") for file in index.file_list)
        assert index.nbytes >= 0
    assert refused > 700


def places(value):
    """Every (container, key) inside a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(children):
        yield value, key
        if isinstance(child, (dict, list)):
            yield from places(child)


def test_every_kind_of_record_is_in_the_small_index():
    """What the tests above stand on."""
    index = small().index
    kinds = {type(leaf.record).__name__ for leaf in index.entries}
    chunks = {type(r.chunks).__name__ for r in index.leaves if isinstance(r, ArrayRecord)}
    assert kinds == {"ArrayRecord", "AliasRecord", "ValueRecord", "PerRankArrays", "PerRankValues"}
    assert chunks == {"WholeChunk", "GridChunks", "BoxChunks"}
    assert isinstance(index.leaves[leaf_number("whole")].chunks, WholeChunk)
    own = index.leaves[leaf_number("own/~rank*/0")]
    assert isinstance(own, PerRankArrays) and len(decode_runs(own.start)) == 2
    assert isinstance(small().tree["own"], PerRank)
