"""An index of ranges is written in few bytes, comes back as the very same, and believes nothing when it is read."""

from __future__ import annotations

import itertools
import json
import random
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from tests.helpers.saves import Array, Saved, save, saves
from treeckpt._core.format import index as index_module
from treeckpt._core.format.index import (
    MAX_LEAVES_PER_RANGE,
    MAX_NUMBERS,
    decode_index,
    encode_index,
    pack,
    rebuild,
    unpack,
)
from treeckpt._core.format.records import ArrayRecord, BoxChunks, Leaf
from treeckpt._core.format.shard_header import sealed
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import BoxLayout, Mesh, MeshLayout, Shard
from treeckpt._core.sharding.region import Region, flat_regions
from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.structure import (
    DictNode,
    ListNode,
    expand_shared_subtrees,
    extract_shared_subtrees,
    leaf_count,
)
from treeckpt.errors import FormatError


@pytest.fixture(autouse=True, scope="module")
def however_small() -> Iterator[None]:
    """Small ones are packed too, here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "MAX_PLAIN_NBYTES", 0)
        yield


SHAPES = ((9, 7), (12,), (3, 4, 10), (5,), (60, 5), (), (0, 3))


def ranges(world: int, *, dtypes: tuple[str, ...] = ("float32",), more: dict[str, Any] | None = None) -> Saved:
    """A model and two moments, of which each rank holds a range of all arrays laid end to end."""
    names = [(group, n) for group in ("model", "m1", "m2") for n in range(len(SHAPES))]
    sizes = [int(np.prod(SHAPES[n])) for _, n in names]
    cuts = [0, *sorted(random.Random(world).sample(range(1, sum(sizes)), world - 1)), sum(sizes)]
    tree: dict[str, Any] = {group: {} for group, _ in names}
    ends = np.cumsum(sizes).tolist()
    for (group, n), last, size in zip(names, ends, sizes, strict=True):
        pieces = []
        for rank, (low, high) in enumerate(itertools.pairwise(cuts)):
            begin, stop = max(low - last + size, 0), min(high - last + size, size)
            pieces += [(rank, region) for region in flat_regions(SHAPES[n], begin, stop)]
        spec = ArraySpec(SHAPES[n], dtypes[n % len(dtypes)])
        tree[group][f"layers.{n}.weight"] = Array(spec, BoxLayout(tuple(pieces)) if size else None)
    return save(tree | (more or {}), world)


def document(saved: Saved) -> Any:
    found = json.loads(encode_index(saved.index))
    assert "ranges" in found["index"]
    return found


# what is written comes back -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16", "uint8", "complex128", "str3")], ids=str)
@pytest.mark.parametrize("world", [2, 5, 40])
def test_an_index_of_ranges_comes_back_from_fewer_bytes(world: int, dtypes: tuple[str, ...]) -> None:
    saved = ranges(world, dtypes=dtypes, more={"own": PerRank([Array(ArraySpec((3,), "int64")), 5]), "step": 1})
    data, plain = encode_index(saved.index), msgspec.json.encode(saved.index)
    assert document(saved)["index"]["ranges"]["start"] == [], "starts follow from the order of entries"
    assert len(data) < 0.75 * len(plain)
    back = decode_index(data)
    assert back == saved.index and msgspec.json.encode(back) == plain and encode_index(back) == data
    assert rebuild(saved.headers) == back


def test_beside_a_regular_layout_starts_are_told() -> None:
    mesh = Mesh((5,), encode_runs(range(5)))
    saved = ranges(5, more={"grid": Array(ArraySpec((10, 4), "float32"), MeshLayout(mesh, (Shard(0),)))})
    body = pack(saved.index)
    assert body is not None and json.loads(body)["ranges"]["start"] and unpack(body, "index") == saved.index


@pytest.mark.parametrize("world", [16, 64])
def test_uneven_rows_take_few_bytes_a_chunk(world: int) -> None:
    draw, tree = random.Random(world), {}
    for n in range(40):
        rows = [0, *sorted(draw.sample(range(1, 4096), world - 1)), 4096]
        pieces = [(rank, Region((a, 0), (b - a, 512))) for rank, (a, b) in enumerate(itertools.pairwise(rows))]
        tree[f"layers.{n}.attention.wq.weight"] = Array(ArraySpec((4096, 512), "float32"), BoxLayout(tuple(pieces)))
    saved = save(tree, world)
    data = encode_index(saved.index)
    assert len(data) <= 14 * 40 * world and decode_index(data) == saved.index


def test_uneven_rows_are_ranges_too_and_regular_ones_stay_as_they_are() -> None:
    rows = [0, 3, 4, 11, 19, 20]
    pieces = [(rank, flat_regions((20, 5), 5 * a, 5 * b)[0]) for rank, (a, b) in enumerate(itertools.pairwise(rows))]
    saved = ranges(5, more={"rows": Array(ArraySpec((20, 5), "float32"), BoxLayout(tuple(pieces)))})
    assert len(document(saved)["index"]["leaves"]) == 0 and decode_index(encode_index(saved.index)) == saved.index


@settings(max_examples=12)
@given(saves())
def test_any_index_comes_back_packed_or_not(saved: Saved) -> None:
    body = pack(saved.index)
    assert body is None or msgspec.json.encode(unpack(body, "index")) == msgspec.json.encode(saved.index)


def test_starts_that_do_not_follow_are_told() -> None:
    saved = ranges(5)
    first = next(leaf for leaf in saved.index.entries if isinstance(leaf.record.chunks, BoxChunks))
    chunks = msgspec.structs.replace(first.record.chunks, start=((64, 128, len(saved.index.chunks_of(first))),))
    leaves = list(saved.index.leaves)
    leaves[first.number] = msgspec.structs.replace(first.record, chunks=chunks)
    index = msgspec.structs.replace(saved.index, leaves=tuple(leaves))
    body = pack(index)
    assert body is not None and json.loads(body)["ranges"]["start"] and unpack(body, "index") == index


def test_an_index_without_ranges_has_only_records() -> None:
    mesh = Mesh((4,), encode_runs(range(4)))
    saved = save({"w": Array(ArraySpec((16, 4), "float32"), MeshLayout(mesh, (Shard(0),)))}, 4)
    assert pack(saved.index) is None and "ranges" not in json.loads(encode_index(saved.index))["index"]


def test_an_index_of_few_ranges_is_not_packed() -> None:
    saved = ranges(2)
    cut = [leaf for leaf in saved.index.entries if isinstance(leaf.record, ArrayRecord) and ranks_of(leaf, saved) > 1]
    most = MAX_LEAVES_PER_RANGE * sum(ranks_of(leaf, saved) for leaf in cut)
    for leaves, packed in ((most, True), (most + 1, False)):
        more = {f"v{n}": n for n in range(leaves - len(saved.index.leaves))}
        assert (pack(ranges(2, more=more).index) is not None) is packed and MAX_LEAVES_PER_RANGE == 16


def ranks_of(leaf: Leaf, saved: Saved) -> int:
    """The number of ranks that wrote an array."""
    return len({chunk.rank for chunk in saved.index.chunks_of(leaf)})


def test_a_small_index_has_records_and_a_large_one_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = ranges(40)
    size = len(msgspec.json.encode(saved.index))
    for most, packed in ((size, False), (size - 1, True)):
        monkeypatch.setattr(index_module, "MAX_PLAIN_NBYTES", most)
        data = encode_index(saved.index)
        assert ("ranges" in json.loads(data)["index"]) is packed and decode_index(data) == saved.index


# subtrees -------------------------------------------------------------------------------------------------------------
def test_only_subtrees_that_are_the_very_same_are_shared() -> None:
    leaves = (None,) * 4
    same, other, floats = (DictNode(keys, leaves) for keys in ((1, 2, 3, 4), (True, 2, 3, 4), (1.0, 2, 3, 4)))
    structure = ListNode((same, other, floats, same, ListNode((other,)), None))
    bare, shared = extract_shared_subtrees(structure)
    assert len(shared) == 2 and leaf_count(bare) == 5
    assert msgspec.json.encode(expand_shared_subtrees(bare, shared, "index")) == msgspec.json.encode(structure)


# hostile documents, rightly sealed ------------------------------------------------------------------------------------
def _column(name: str, value: Any) -> Any:
    return lambda index: index["ranges"].__setitem__(name, value)


def _blow_up(index: Any) -> None:
    index["shared"] = [["list", [None] * 100]]
    index["structure"] = ["list", [["custom", "", 0, [], []]] * 1000]


MANY = [[0, 0, 1 << 24]]
HOSTILE = {
    "more leaves than the tree has": _column("leaf", [[0, 1, 1 << 24]]),
    "a leaf below 0": _column("leaf", [[-1, 1, 21]]),
    "a leaf twice": _column("leaf", [[0, 0, 21]]),
    "no such spec": _column("spec", [[99, 0, 21]]),
    "no such layout": _column("layout", [[7, 0, 21]]),
    "no ranges": _column("count", [[0, 0, 21]]),
    "as many ranges as there may be, each": _column("count", [[MAX_NUMBERS - 1, 0, 21]]),
    "counts beyond all bounds": _column("count", [[1 << 61, 0, 21]]),
    "an endless column": _column("length", MANY),
    "a column of many runs": _column("length", [[0, 0, 2]] * 100_000),
    "a range without elements": lambda index: index["ranges"]["length"].__setitem__(0, 0),
    "a range that goes back": lambda index: index["ranges"]["length"].__setitem__(0, -5),
    "a range behind the end": lambda index: index["ranges"]["length"].__setitem__(0, 1 << 61),
    "a rank outside": _column("first", [1 << 40, [0, 0, 20]]),
    "ranks that climb outside": _column("first", [[39, 0, 21]]),
    "a rank below 0": _column("first", [-1, [0, 0, 20]]),
    "text": _column("turn", ["x"]),
    "a run of nothing": _column("turn", [[]]),
    "too few starts": _column("start", [0]),
    "no starts": lambda index: index["ranges"].pop("start"),
    "a start outside": _column("start", [[1 << 62, 0, 99]]),
    "a giant array": lambda index: index["specs"][0].update(shape=[1 << 40, 1 << 40]),
    "an array below nothing": lambda index: index["specs"][0].update(shape=[-3, 7]),
    "an array of a hundred dimensions": lambda index: index["specs"][0].update(shape=[1] * 100),
    "no such subtree": lambda index: index.__setitem__("shared", []),
    "a subtree of another kind": lambda index: index["structure"][2].__setitem__(0, ["custom", "", "x", [], []]),
    "a subtree everywhere": _blow_up,
    "an unknown column": _column("more", []),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_ranges_are_refused_soon_and_without_much_memory(change: Any) -> None:
    found = document(ranges(40))
    change(found["index"])
    found["seal"] = "0" * 16
    data = sealed(json.dumps(found, separators=(",", ":")).encode())
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(FormatError) as caught:
            decode_index(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 5 and peak < 96 << 20 and len(str(caught.value)) < 1500


def test_as_many_ranges_as_there_may_be_are_read_in_bounded_memory() -> None:
    spec = {"shape": [1 << 20], "dtype": "uint8"}
    found = document(ranges(2))
    found["index"] |= {"specs": [spec], "structure": None, "leaves": [], "world": MAX_NUMBERS}
    found["index"]["ranges"] = {
        "leaf": [[0]], "spec": [0], "layout": [-1], "count": [MAX_NUMBERS - 1], "length": [[1, 0, MAX_NUMBERS - 2]],
        "first": [0], "turn": [[1, 0, MAX_NUMBERS - 2]], "start": [],
    }  # fmt: skip
    found["seal"] = "0" * 16
    data = sealed(json.dumps(found, separators=(",", ":")).encode())
    assert len(data) < 1500
    tracemalloc.start()
    index = decode_index(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index.leaves) == 1 and peak < 96 << 20, peak >> 20
