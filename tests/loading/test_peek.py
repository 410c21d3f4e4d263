"""A peek shows what was saved, and reads little more than that."""

import os
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.samples import BFloat16, gpt_state, mesh_layout, write_checkpoint
from treeckpt._core.format.records import ArrayRecord, Index, WholeChunk, file_table
from treeckpt._core.format.shard_header import BLOCK, ShardEntry, ShardHeader, encode_header, hash_block, shard_name
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.structure import DictNode
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._loading.peek import MAX_NBYTES, peek
from treeckpt.errors import CorruptError, LayoutError, MismatchError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("peek") / "c"
    random = np.random.default_rng(1)
    tree = gpt_state(layers=1)
    tree["deep"] = random.integers(0, 99, (6, 40, 30), np.int32)
    tree["wide"] = random.standard_normal((700, 2000)).astype(np.float32)
    tree["half"] = BFloat16(random.integers(0, 1 << 16, (64, 33), np.uint16))
    tree["scalar"] = np.array(2.5)
    index = write_checkpoint(path, tree, layouts=mesh_layout, max_shard_bytes=3_000_000)
    return LocalStore(path), index, tree


def leaf(index, path):
    return index.by_path[path][0]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_peek_of_any_region_is_that_region(saved, data):
    store, index, tree = saved
    name = data.draw(st.sampled_from(["deep", "wide", "half", "scalar"]))
    array = tree[name].bits if name == "half" else tree[name]
    low = [data.draw(st.integers(0, n - 1)) for n in array.shape]
    high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, array.shape, strict=True)]
    region = Region(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
    found = peek(store, index, leaf(index, name), region)
    wanted = np.ascontiguousarray(array[region.slices()])
    assert found.data.tobytes() == wanted.tobytes()
    assert found.read <= max(5 * found.data.nbytes, 6 * BLOCK) + 20_000


def test_each_rank_has_its_own(saved):
    store, index, tree = saved
    found = peek(store, index, leaf(index, "rng/~rank*"), Region((10,), (20,)), rank=3)
    assert found.data.tobytes() == tree["rng"].value[10:30].tobytes() and found.verified
    with pytest.raises(MismatchError):
        peek(store, index, leaf(index, "rng/~rank*"), Region((10,), (20,)), rank=9)


def test_what_cannot_be_shown_is_refused(saved):
    store, index, _ = saved
    with pytest.raises(MismatchError):
        peek(store, index, leaf(index, "scheduler/name"), Region((), ()))
    for region in (Region((0,), (1,)), Region((0, 0), (701, 1)), Region((-1, 0), (2, 1))):
        with pytest.raises(MismatchError):
            peek(store, index, leaf(index, "wide"), region)


def test_changed_bytes_are_told_where_they_are_compared(saved, tmp_path):
    _, _, tree = saved
    index = write_checkpoint(tmp_path / "c", {"wide": tree["wide"]}, world=1, layouts=lambda path, array: None)
    file = index.file_list[0]
    shard = tmp_path / "c" / file.name
    data = bytearray(shard.read_bytes())
    data[file.header + 300_000] ^= 1
    shard.write_bytes(data)
    store = LocalStore(tmp_path / "c")
    with pytest.raises(CorruptError, match="match their checksum"):
        peek(store, index, leaf(index, "wide"), Region((0, 0), (100, 2000)))
    assert peek(store, index, leaf(index, "wide"), Region((0, 0), (10, 2000))).verified
    column = peek(store, index, leaf(index, "wide"), Region((0, 7), (700, 1)))
    assert not column.verified and column.data.nbytes == 2800 and column.read < 4 * 2800 + 4096
    shard.write_bytes(data[:-1])
    with pytest.raises(CorruptError):
        peek(store, index, leaf(index, "wide"), Region((0, 0), (1, 1)))
    other = msgspec.structs.replace(index, save_id="f" * 16)
    (tmp_path / "c" / other.file_list[0].name).write_bytes(data)
    with pytest.raises(CorruptError, match="another save"):
        peek(store, other, leaf(other, "wide"), Region((0, 0), (1, 1)))


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """A tensor of 100 GB of which nearly all is a hole, with the checksum of every block."""
    path = tmp_path_factory.mktemp("huge")
    rows, columns = 25_000, 1_000_000
    nbytes = rows * columns * 4
    blocks = nbytes // BLOCK + 1
    hashes = [hash_block(bytes(BLOCK))] * (blocks - 1) + [hash_block(bytes(nbytes % BLOCK))]
    row = np.arange(columns, dtype=np.float32)
    at = 12_345 * columns * 4
    first, skip = divmod(at, BLOCK)
    part = bytes(skip) + row.tobytes()
    for number in range(-(-len(part) // BLOCK)):
        piece = part[number * BLOCK : (number + 1) * BLOCK]
        hashes[first + number] = hash_block(piece.ljust(BLOCK, b"\0"))
    entry = ShardEntry("w", "float32", (rows, columns), Region.whole((rows, columns)), 0, nbytes)
    header = encode_header(ShardHeader("a" * 16, 0, 1, 0, 0, (entry,), tuple(hashes)))
    with open(path / shard_name("a" * 16, 0, 1, 0), "wb") as file:
        file.write(header)
        file.seek(len(header) + at)
        file.write(row.tobytes())
        os.truncate(file.fileno(), len(header) + nbytes)
    spec = ArraySpec((rows, columns), "float32")
    files = file_table([(0, 0, 0, nbytes, len(header))])
    structure = DictNode(("w",), (None,))
    index = Index("a" * 16, 1, 0, 1, structure, (spec,), (), (ArrayRecord(0, -1, WholeChunk(0, 0)),), files, {})
    return LocalStore(path), index


def test_a_megabyte_of_a_hundred_gigabytes_costs_a_megabyte(huge):
    store, index = huge
    region = Region((12_345, 100_000), (1, 1 << 18))
    peek(store, index, index.entries[0], region)
    tracemalloc.start()
    try:
        found = peek(store, index, index.entries[0], region)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.data.view(np.float32)[:, 0].tolist()[:3] == [100_000, 100_001, 100_002]
    assert found.verified and found.data.nbytes == 1 << 20 and found.read <= 1.6 * found.data.nbytes
    assert peak < 8 << 20, peak


def test_what_is_too_large_to_look_at_is_said(huge):
    store, index = huge
    with pytest.raises(LayoutError):
        peek(store, index, index.entries[0], Region((0, 0), (17, 1_000_000)))
    assert MAX_NBYTES < 17 * 4_000_000
    tall = peek(store, index, index.entries[0], Region((12_000, 5), (1000, 3)))
    assert tall.data.view(np.float32).reshape(1000, 3)[345].tolist() == [5, 6, 7] and tall.read < 4 * 12_000
