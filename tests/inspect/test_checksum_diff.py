"""Checksums say of two arrays no more than their blocks prove."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.indexes import index_of
from treeckpt._core.format.records import ArrayRecord, GridChunks, WholeChunk
from treeckpt._core.format.shard_header import hash_block
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._inspect.diff import Checksums, compare_checksums


def stored(start, size, header=100, chunks=None):
    """An index with one array of bytes, whose first byte is at `start` of its file's data area."""
    record = ArrayRecord(0, -1, chunks or WholeChunk(0, start))
    files = [(0, 0, 0, 64, header), (1, 0, 0, 64, header + 7)]
    return index_of({"w": record}, [ArraySpec((size,), "uint8")], files=files)


def reader(*areas, block=4):
    """Reads the checksums of the data areas of ranks 0, 1, ..."""
    hashes = [
        np.array([hash_block(area[n : n + block]) for n in range(0, len(area), block)], np.uint64) for area in areas
    ]
    return lambda file: Checksums(hashes[file.rank], block)


def compared(a, b, areas, others, *, blocks=(4, 4)):
    checksums = (reader(*areas, block=blocks[0]), reader(*others, block=blocks[1]))
    return compare_checksums(a, a.entries[0], b, b.entries[0], checksums)


@given(st.data())
def test_an_array_is_equal_or_changed_only_where_its_blocks_prove_it(data):
    size = data.draw(st.integers(0, 12))
    starts = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
    areas = [bytearray(data.draw(st.binary(min_size=26, max_size=26))) for _ in starts]
    if data.draw(st.booleans()):  # the same bytes around the array, as far as both have them
        before = min(starts)
        for n in range(-before, 26 - max(starts)):
            areas[1][starts[1] + n] = areas[0][starts[0] + n]
        for _ in range(data.draw(st.integers(0, 2))):
            areas[1][data.draw(st.integers(0, 25))] ^= 1
    first, second = (bytes(area[at : at + size]) for area, at in zip(areas, starts, strict=True))
    found = compared(stored(starts[0], size), stored(starts[1], size, 33), areas[:1], areas[1:])
    assert found != "equal" or first == second
    assert found != "changed" or first != second
    if (starts[1] - starts[0]) % 4 or not size:
        assert found == ("unknown" if size else "equal")
        return
    proofs = []
    for low in range(starts[0] // 4 * 4, starts[0] + size, 4):
        other = low + starts[1] - starts[0]
        if areas[0][low : low + 4] != areas[1][other : other + 4]:
            proofs.append("changed" if low >= starts[0] and low + 4 <= starts[0] + size else "unknown")
    assert found == min(proofs, default="equal")


def test_a_difference_beside_the_array_in_its_block_is_unknown():
    area = bytes(range(16))
    for at, found in (
        (3, "unknown"),
        (4, "unknown"),
        (8, "changed"),
        (11, "changed"),
        (12, "unknown"),
        (15, "unknown"),
    ):
        other = bytearray(area)
        other[at] ^= 1
        low = 4 if at == 3 else 5
        verdict = compared(stored(low, 8), stored(low, 8), [area], [bytes(other)])
        assert verdict == (found if low == 5 or at != 3 else "equal"), at


def test_blocks_of_other_sizes_prove_nothing():
    area = bytes(16)
    assert compared(stored(0, 8), stored(0, 8), [area], [area], blocks=(4, 8)) == "unknown"
    assert compared(stored(0, 0), stored(3, 0), [area], [area], blocks=(4, 8)) == "equal"


def halves(first, second):
    return GridChunks((((0, 8, 3),),), ((0, 1, 2),), ((first,), (second,)))


@pytest.mark.parametrize(
    ("changed", "found"),
    [([], "equal"), ([(0, 4)], "changed"), ([(1, 5)], "changed"), ([(1, 1)], "unknown"), ([(1, 1), (0, 4)], "changed"),
     ([(0, 0), (1, 5)], "changed"), ([(0, 0), (1, 0)], "unknown")],
)  # fmt: skip
def test_one_changed_chunk_is_enough_and_all_must_be_equal(changed, found):
    """Two chunks of 8 bytes, each from byte 2 of a rank's data area: blocks 1 alone lie inside of them."""
    areas = [bytes(range(16)), bytes(range(16, 32))]
    others = [bytearray(area) for area in areas]
    for rank, at in changed:
        others[rank][at] ^= 1
    index = stored(0, 16, chunks=halves(2, 2))
    assert compared(index, index, areas, others) == found


def test_arrays_that_are_cut_otherwise_are_not_compared():
    areas = [bytes(32), bytes(32)]
    assert compared(stored(0, 16), stored(0, 16, chunks=halves(0, 0)), areas, areas) == "unknown"
