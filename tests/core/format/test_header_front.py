"""The first page of a shard's header holds what the whole header says."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.shard_header import (
    DATA_ALIGNMENT,
    ShardEntry,
    ShardHeader,
    decode_front,
    decode_hashes,
    encode_header,
    hash_text_range,
    header_nbytes,
)
from treeckpt._core.sharding.region import Region
from treeckpt.errors import CorruptError, FormatError


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40), st.data())
def test_any_range_of_checksums_is_found_by_arithmetic(hashes, data):
    first = data.draw(st.integers(0, len(hashes) - 1))
    count = data.draw(st.integers(1, len(hashes) - first))
    text = base64.b64encode(np.array(hashes, "<u8").tobytes())
    start, stop, skip = hash_text_range(first, count)
    assert decode_hashes(text[start:stop], skip, count, "f") == hashes[first : first + count]
    assert stop - start <= 8 * count * 4 / 3 + 8


@pytest.fixture
def header():
    n = 5 << 18
    entry = ShardEntry("a", "uint8", (n,), Region.whole((n,)), 0, n)
    return encode_header(ShardHeader("0123456789abcdef", 3, 8, 1, 4096, (entry,), (1, 2, 3, 4, 2**64 - 1)))


def test_the_first_page_of_a_shard(header):
    front, hashes = decode_front(header[:DATA_ALIGNMENT], "f")
    assert (front.save_id, front.rank, front.part, front.stream) == ("0123456789abcdef", 3, 1, 4096)
    assert header_nbytes(header, "f") == len(header) and front.block == 1 << 18
    start, stop, skip = hash_text_range(3, 2)
    assert decode_hashes(header[hashes + start : hashes + stop], skip, 2, "f") == [4, 2**64 - 1]


def test_what_is_no_shard_is_refused(header):
    for bad in (
        b"",
        header[:7],
        bytes(DATA_ALIGNMENT),
        header.replace(b'"treeckpt"', b'"whatever"'),
        header.replace(b'"1","save', b'"9","save'),
    ):
        with pytest.raises((FormatError, CorruptError)):
            decode_front(bad[:DATA_ALIGNMENT], "f")
    with pytest.raises(FormatError):
        decode_front(header.replace(b'"262144"', b'"000001"')[:DATA_ALIGNMENT], "f")
    with pytest.raises(CorruptError):
        decode_hashes(b"????", 0, 1, "f")
    with pytest.raises(CorruptError):
        decode_hashes(b"AAAA", 0, 1, "f")
