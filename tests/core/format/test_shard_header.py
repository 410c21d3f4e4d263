"""Shard headers: valid safetensors, exact, sealed, and refused when hostile."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.saves import SAVE_ID, saves, small
from tests.helpers.strategies import keys, regions, shapes
from treeckpt._core.format.shard_header import (
    BLOCK,
    DATA_ALIGNMENT,
    ShardEntry,
    ShardHeader,
    block_count,
    check_seal,
    decode_header,
    encode_header,
    header_nbytes,
    parse_shard_name,
    sealed,
    shard_name,
    with_hashes,
)
from treeckpt._core.sharding.dtypes import dtype_of
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.structure import key_text
from treeckpt.errors import CorruptError, FormatError, TreeckptError

FEWER = settings(max_examples=20)
"""Whole saves take a tenth of a second each to make up."""
NAMES = ["float32", "bfloat16", "complex64", "complex128", "complex32", "bytes3", "str2", "datetime64[ns]", "uint4"]
NAMES += ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu", "bool", "uint64"]


@st.composite
def headers(draw):
    paths = draw(st.lists(st.one_of(keys().map(key_text), st.text("@~,0/a", max_size=4)), unique=True, max_size=6))
    entries, at = [], 0
    for path in paths:
        dtype, shape = draw(st.sampled_from(NAMES)), draw(shapes(max_ndim=3))
        whole = Region.whole(shape)
        region = draw(st.just(whole) | regions(shape, empty=False))
        nbytes = region.size * dtype_of(dtype).itemsize
        entries.append(ShardEntry(path, dtype, shape, region, at, nbytes))
        at += nbytes
    block = draw(st.sampled_from([DATA_ALIGNMENT, BLOCK]))
    hashes = draw(
        st.lists(st.integers(0, (1 << 64) - 1), min_size=block_count(at, block), max_size=block_count(at, block))
    )
    return ShardHeader(
        save_id=SAVE_ID, rank=draw(st.integers(0, 9)), world=10, part=draw(st.integers(0, 3)),
        stream=draw(st.integers(0, 1 << 50)), entries=tuple(entries), hashes=tuple(hashes), block=block,
        manifest=draw(st.none() | st.text(min_size=1, max_size=5)),
    )  # fmt: skip


@given(headers())
def test_headers_come_back(header):
    data = encode_header(header)
    assert len(data) % DATA_ALIGNMENT == 0
    assert header_nbytes(data[:8], "f") == len(data)
    assert decode_header(data, "f") == header
    assert decode_header(memoryview(data), "f") == header


@given(headers())
def test_a_reader_that_wants_no_entries_gets_the_rest(header):
    bare = decode_header(encode_header(header), "f", entries=False)
    assert bare == msgspec.structs.replace(header, entries=())


@given(headers(), st.data())
def test_hashes_filled_in_afterwards_give_the_header_encoded_with_them(header, data):
    count = len(header.hashes)
    other = data.draw(st.lists(st.integers(0, (1 << 64) - 1), min_size=count, max_size=count))
    assert with_hashes(encode_header(header), other) == encode_header(
        msgspec.structs.replace(header, hashes=tuple(other))
    )


@given(saves())
@FEWER
def test_headers_of_whole_saves_come_back(saved):
    for size, header in saved.headers:
        data = encode_header(header)
        assert (len(data), decode_header(data, "f")) == (size, header)


def test_the_safetensors_library_reads_a_shard_and_gives_the_same_bytes():
    safetensors = pytest.importorskip("safetensors")
    names = ["float32", "bfloat16", "complex64", "uint8", "float8_e4m3fn", "bool", "int64", "str2"]
    entries, at = [], 0
    for name in names:
        nbytes = 6 * dtype_of(name).itemsize
        entries.append(ShardEntry(f"a/{name}@x", name, (2, 3), Region.whole((2, 3)), at, nbytes))
        at += nbytes
    entries.append(ShardEntry("part", "float32", (9,), Region((3,), (2,)), at, 8))
    entries.append(ShardEntry("__metadata__", "uint8", (), Region.whole(()), at + 8, 1))
    entries.append(ShardEntry("empty", "float32", (0, 3), Region.whole((0, 3)), at + 9, 0))
    area = np.random.default_rng(0).bytes(at + 9)
    header = ShardHeader(SAVE_ID, 0, 1, 0, 0, tuple(entries), (0,) * block_count(len(area)))
    found = dict(safetensors.deserialize(encode_header(header) + area))
    assert len(found) == len(entries)
    for entry in entries:
        name = {"part": "part@3", "empty": "empty"}.get(entry.path, entry.path + "@")
        assert bytes(found[name]["data"]) == area[entry.start : entry.start + entry.nbytes]
        dtype = dtype_of(entry.dtype)
        assert found[name]["dtype"] == dtype.tag
        parts = [dtype.parts] if dtype.parts > 1 else []
        assert found[name]["shape"] == [*entry.region.shape, *parts]


@given(st.integers(0, 1 << 20), st.integers(0, 4000), st.integers(1, 1 << 20))
def test_file_names_come_back(rank, part, world):
    name = shard_name(SAVE_ID, rank, world, part)
    assert parse_shard_name(name) == (SAVE_ID, rank, world, part)
    assert "/" not in name


@pytest.mark.parametrize(
    "name",
    [
        "index.json", "shard-0-of-1.0123456789abcdef.safetensors", "../" + shard_name(SAVE_ID, 0, 1), "",
        shard_name(SAVE_ID, 0, 1) + "\n", shard_name(SAVE_ID, 0, 1).replace("0", "٠"),
        shard_name("0123456789ABCDEF", 0, 1),
        shard_name(SAVE_ID, 0, 1) + ".tmp",
    ],
)  # fmt: skip
def test_other_names_are_no_shards(name):
    assert parse_shard_name(name) is None


# damage ---------------------------------------------------------------------------------------------------------------
def test_every_flipped_byte_is_found():
    _, header = small().headers[1]
    data = encode_header(header)
    length = len(data.rstrip())
    for at in [*range(length), *range(length, len(data), 97)]:
        for flip in (1, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises((CorruptError, FormatError)):
                read(bytes(damaged))


def read(data):
    """As a reader does: the length first, then that many bytes or as many as there are."""
    return decode_header(data[: header_nbytes(data[:8], "f")], "f")


@given(st.integers(0, 4200))
def test_a_truncated_header_is_found(length):
    data = encode_header(small().headers[1][1])
    if length < len(data):
        with pytest.raises(CorruptError):
            read(data[:length])


@given(st.binary(max_size=64))
def test_other_bytes_are_no_header(data):
    with pytest.raises(CorruptError):
        read(data)


@pytest.mark.parametrize("length", [0, 1, DATA_ALIGNMENT, 1 << 40, (1 << 64) - 8, (1 << 64) - 1])
def test_lengths_that_no_header_has_are_refused(length):
    with pytest.raises(CorruptError):
        header_nbytes(length.to_bytes(8, "little"), "f")


def test_errors_name_the_file():
    with pytest.raises(CorruptError, match=r"shard-7") as caught:
        check_seal(b"x" * 300, "shard-7")
    assert caught.value.hint


# hostile headers, rightly sealed --------------------------------------------------------------------------------------
def resealed(change):
    """The small save's second header after `change` was made to its JSON."""
    data = encode_header(small().headers[1][1])
    document = json.loads(data[8:])
    change(document)
    document["__metadata__"]["seal"] = "0" * 16
    text = document if isinstance(document, bytes) else json.dumps(document, separators=(",", ":")).encode()
    return sealed((len(text)).to_bytes(8, "little") + text)


def metadata(**fields):
    return lambda document: document["__metadata__"].update(fields)


def entry(**fields):
    def change(document):
        document["grid@3,0"].update(fields)

    return change


def renamed(name):
    def change(document):
        document[name] = document.pop("grid@3,0")

    return change


def nested(document):
    document["deep"] = json.loads("[" * 900 + "]" * 900)


HOSTILE = {
    "version 2": metadata(version="2"),
    "another format": metadata(format="other"),
    "unknown field": metadata(extra="1"),
    "missing field": lambda d: d["__metadata__"].pop("hashes"),
    "number for text": metadata(rank=1),
    "negative rank": metadata(rank="-1"),
    "rank outside of the world": metadata(rank="2"),
    "no rank": metadata(rank="x"),
    "giant rank": metadata(rank="9" * 4000),
    "giant digits": metadata(rank="9" * 5000),
    "negative part": metadata(part="-1"),
    "negative stream": metadata(stream="-4096"),
    "giant stream": metadata(stream=str(1 << 70)),
    "world 0": metadata(world="0"),
    "giant world": metadata(world=str(1 << 60)),
    "other save id": metadata(save_id="../../etc/passwd"),
    "short save id": metadata(save_id="ab"),
    "block 0": metadata(block="0"),
    "negative block": metadata(block="-262144"),
    "wrong number of hashes": metadata(hashes=""),
    "odd hashes": metadata(hashes="AAAA"),
    "no base64": metadata(hashes="***"),
    "partial is no JSON": metadata(partial="{"),
    "partial of text": metadata(partial='{"grid@3,0":"x"}'),
    "no partial": metadata(partial="{}"),
    "partial too small": metadata(partial='{"grid@3,0":[4,2]}'),
    "partial of other rank": metadata(partial='{"grid@3,0":[5,2,1]}'),
    "partial negative": metadata(partial='{"grid@3,0":[-5,2]}'),
    "partial giant": metadata(partial='{"grid@3,0":[' + "9" * 4000 + ",2]}"),
    "unknown dtype": metadata(dtypes='{"grid@3,0":"float7"}'),
    "dtype of another tag": metadata(dtypes='{"grid@3,0":"bfloat16"}'),
    "dtype of more parts": metadata(dtypes='{"grid@3,0":"complex64"}'),
    "unknown tag": entry(dtype="X9"),
    "other shape": entry(shape=[3, 2]),
    "negative shape": entry(shape=[-2, -2]),
    "giant shape": entry(shape=[1 << 62, 1 << 62]),
    "many dimensions": entry(shape=[1] * 1000),
    "offsets backwards": entry(data_offsets=[16, 0]),
    "offsets negative": entry(data_offsets=[-16, 0]),
    "a hole": entry(data_offsets=[1 << 20, (1 << 20) + 16]),
    "three offsets": entry(data_offsets=[0, 16, 32]),
    "unknown entry field": entry(extra=1),
    "an entry that is a list": lambda d: d.update({"grid@3,0": []}),
    "a partial name without offset": renamed("grid"),
    "a name with a bad offset": renamed("grid@x,y"),
    "deep nesting": nested,
    "an entry twice over": lambda d: d.update({"again": d["grid@3,0"]}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused(change):
    with pytest.raises(FormatError) as caught:
        decode_header(resealed(change), "shard-7")
    assert len(str(caught.value)) < 1500


def test_the_unchanged_header_is_not_refused():
    assert decode_header(resealed(lambda document: None), "f") == small().headers[1][1]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"{\xff}", b'{"__metadata__":{}}', b"[" * 100_000])
def test_sealed_bytes_that_are_no_header_are_refused(text):
    document = b'{"seal":"0000000000000000","x":' + text
    with pytest.raises(TreeckptError) as caught:
        decode_header(sealed(len(document).to_bytes(8, "little") + document), "f")
    assert isinstance(caught.value, (FormatError, CorruptError))


def test_block_counts():
    assert [block_count(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]


def is_refused(**fields):
    header = ShardHeader(SAVE_ID, 0, 1, 0, 0, (), ())
    try:
        decode_header(encode_header(msgspec.structs.replace(header, **fields)), "f")
    except FormatError:
        return True
    return False


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"world": 1 << 24}, {"world": (1 << 24) + 1}),
        ({"rank": 4, "world": 5}, {"rank": 5, "world": 5}),
        ({"part": 1 << 24}, {"part": (1 << 24) + 1}),
        ({"part": 0}, {"part": -1}),
        ({"stream": (1 << 62) - 1}, {"stream": 1 << 62}),
        ({"stream": 0}, {"stream": -1}),
        ({"block": DATA_ALIGNMENT}, {"block": DATA_ALIGNMENT // 2}),
        ({"block": 64 << 20}, {"block": (64 << 20) + DATA_ALIGNMENT}),
        ({"block": 3 * DATA_ALIGNMENT}, {"block": DATA_ALIGNMENT + 1}),
    ],
)
def test_numbers_of_a_header_have_limits(good, bad):
    assert not is_refused(**good) and is_refused(**bad)


@pytest.mark.parametrize(
    ("good", "bad"),
    [((1,) * 64, (1,) * 65), ((0, (1 << 60) - 1), (0, 1 << 60)), ((0, 1), (-1, 0))],
    ids=["dimensions", "bytes", "sign"],
)
def test_shapes_of_entries_have_limits(good, bad):
    for shape, refused in ((good, False), (bad, True)):
        entry = ShardEntry("a", "float32", shape, Region.whole(shape), 0, 0 if 0 in shape else 4)
        assert is_refused(entries=(entry,), hashes=() if 0 in shape else (0,)) is refused


def test_a_header_has_at_most_a_gibibyte():
    def length(nbytes):
        return header_nbytes((nbytes - 8).to_bytes(8, "little"), "f")

    assert length(DATA_ALIGNMENT) == DATA_ALIGNMENT and length(1 << 30) == 1 << 30
    for nbytes in ((1 << 30) + DATA_ALIGNMENT, DATA_ALIGNMENT + 8):
        with pytest.raises(CorruptError, match=f"found {nbytes}"):
            length(nbytes)
    with pytest.raises(CorruptError, match="found a file of 7 bytes"):
        header_nbytes(b"\0" * 7, "f")
