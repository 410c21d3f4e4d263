"""The prefix of a shard header holds what the whole header says."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt.core.format.shard_header import ShardEntry, ShardHeader, encode_header
from treeckpt.core.sharding.region import Region
from treeckpt.errors import CorruptError, FormatError
from treeckpt.loading.peek import PREFIX_NBYTES, decode_hashes, decode_prefix, hash_text_range


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


def test_the_prefix_of_a_shard(header):
    front = decode_prefix(header[:PREFIX_NBYTES], "f")
    assert (front.save_id, front.rank, front.part, front.stream) == ("0123456789abcdef", 3, 1, 4096)
    assert front.header == len(header) and front.block == 1 << 18
    start, stop, skip = hash_text_range(3, 2)
    assert decode_hashes(header[front.hashes + start : front.hashes + stop], skip, 2, "f") == [4, 2**64 - 1]


def test_what_is_no_shard_is_refused(header):
    for bad in (
        b"",
        header[:7],
        bytes(PREFIX_NBYTES),
        header.replace(b'"treeckpt"', b'"whatever"'),
        header.replace(b'"1","save', b'"9","save'),
    ):
        with pytest.raises((FormatError, CorruptError)):
            decode_prefix(bad[:PREFIX_NBYTES], "f")
    with pytest.raises(FormatError):
        decode_prefix(header.replace(b'"262144"', b'"000001"')[:PREFIX_NBYTES], "f")
    with pytest.raises(CorruptError):
        decode_hashes(b"????", 0, 1, "f")
    with pytest.raises(CorruptError):
        decode_hashes(b"AAAA", 0, 1, "f")
