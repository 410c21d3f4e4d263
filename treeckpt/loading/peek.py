"""Reads a part of an array by its byte ranges alone, for display.

The region's chunks are planned as a load plans them (`core.planning.load_plan`). Where rounding out to blocks of
checksums costs at most four times what is shown, or no more than a few blocks, they are compared; only the checksums
of those blocks are taken from the shard's header, which of a large shard is megabytes. Else the bytes are read as they
are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ..core.format.records import AliasRecord, File, Index, Leaf
from ..core.format.shard_header import BLOCK, block_count, hash_block
from ..core.planning.load_plan import BoxCopy, ReadBlock, WantedRegion, plan_load
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region, c_strides
from ..errors import CorruptError, LayoutError, MismatchError
from ..io.storage.store import Store
from .header_probe import PREFIX_NBYTES, HeaderPrefix, decode_hashes, decode_prefix, hash_text_range

__all__ = ["MAX_NBYTES", "Peek", "peek"]

MAX_NBYTES = 64 << 20
"""Bytes that one peek may show."""
ROUNDING = 4
"""Times of what is shown that may be read to compare checksums."""
FEW = 4 * BLOCK
"""Bytes that are read to compare checksums, however little is shown."""
GAP = 512
"""Unneeded bytes between two rows that are rather read than skipped."""
MAX_READS = 1 << 16


class Peek(msgspec.Struct, frozen=True):
    """A region and its bytes."""

    region: Region
    data: np.ndarray
    """uint8[elements, itemsize], in C order of the region."""
    read: int
    """Bytes that were read, checksums included."""
    verified: bool
    """Whether all that is shown matches its checksums."""


def peek(store: Store, index: Index, leaf: Leaf, region: Region, *, rank: int | None = None) -> Peek:
    """Reads a region of an array.

    Args:
        rank: whose array, for a leaf under `PerRank`.

    Raises:
        MismatchError: the leaf has no elements there, or is a view of another leaf.
        LayoutError: more than MAX_NBYTES, or too many rows that lie apart.
        CorruptError: bytes are missing, or differ from their checksum.
    """
    if leaf.spec is None or (isinstance(leaf.record, AliasRecord) and leaf.record.view is not None):
        raise MismatchError(leaf.path, expected="an array of its own", found="a view" if leaf.spec else "a value")
    if len(region.offset) != len(leaf.spec.shape) or not region.within(Region.whole(leaf.spec.shape)):
        raise MismatchError(leaf.path, expected=f"a region of {leaf.spec.shape}", found=f"{region}")
    itemsize = dtype_of(leaf.spec.dtype).itemsize
    if (nbytes := region.size * itemsize) > MAX_NBYTES:
        raise LayoutError(leaf.path, expected=f"a region of at most {MAX_NBYTES} bytes", found=f"{nbytes}")
    chunks = index.chunks_of(leaf, region, rank=rank)
    blocks = plan_load([WantedRegion(region, itemsize, chunks)], gap=GAP, borders=index.borders)
    if len(blocks) > MAX_READS:
        raise LayoutError(leaf.path, expected=f"rows that lie in at most {MAX_READS} places", found=f"{len(blocks)}")
    copied = sum(copy.box.size for block in blocks for copy in block.copies)
    if copied != region.size:
        raise CorruptError(leaf.path, expected=f"chunks with {region.size} elements", found=f"{copied}")
    return _read(store, index, leaf, region, blocks)


def _read(store: Store, index: Index, leaf: Leaf, region: Region, blocks: Sequence[ReadBlock]) -> Peek:
    assert leaf.spec is not None, "checked before"
    itemsize = dtype_of(leaf.spec.dtype).itemsize
    data = np.empty((*region.shape, itemsize), np.uint8)
    places = [(block, *index.locate(block.rank, block.start, block.stop, leaf.path)) for block in blocks]
    sizes = store.sizes()
    files = {file.name: file for _, file, _ in places}
    fronts = {name: _front(store, index, file, sizes.get(name)) for name, file in files.items()}
    rounded = [_rounded(file, at, block.stop - block.start, fronts[file.name].block) for block, file, at in places]
    verify = sum(high - low for low, high in rounded) <= max(ROUNDING * data.nbytes, FEW)
    read = PREFIX_NBYTES * len(fronts)
    for (block, file, at), (low, high) in zip(places, rounded, strict=True):
        if not verify:
            low, high = at - file.header, at - file.header + block.stop - block.start
        out = np.empty(high - low, np.uint8)
        store.read_into(file.name, file.header + low, out.data)
        read += len(out)
        if verify:
            read += _compare(store, file, fronts[file.name], low, out)
        inside = out[at - file.header - low :]
        for copy in block.copies:
            _copy(inside, block, copy, region, data, itemsize)
    return Peek(region, data.reshape(-1, itemsize), read, verify)


def _rounded(file: File, at: int, nbytes: int, block: int) -> tuple[int, int]:
    """Bytes of the data area, out to the borders of checksums."""
    low = at - file.header
    return low // block * block, min(-(-(low + nbytes) // block) * block, file.nbytes)


def _copy(data: np.ndarray, block: ReadBlock, copy: BoxCopy, region: Region, out: np.ndarray, itemsize: int) -> None:
    span = data[copy.start - block.start : copy.stop - block.start]
    strides = (*c_strides(copy.chunk.shape, itemsize), 1)
    box = np.lib.stride_tricks.as_strided(span, (*copy.box.shape, itemsize), strides)
    out[copy.box.relative_to(region).slices()] = box


def _front(store: Store, index: Index, file: File, size: int | None) -> HeaderPrefix:
    """Reads the front of a shard, and checks that it is the file that the index describes."""
    label = f"{store.url}/{file.name}"
    if size != file.header + file.nbytes:
        raise CorruptError(
            label,
            expected=f"a shard of {file.header + file.nbytes} bytes",
            found="no such file" if size is None else f"{size} bytes",
            hint="The file was lost, changed or cut short; restore it from a copy",
        )
    data = bytearray(min(PREFIX_NBYTES, file.header))
    store.read_into(file.name, 0, memoryview(data))
    front = decode_prefix(data, label)
    found = (front.save_id, front.rank, front.part, front.stream, front.header)
    if found != (wanted := (index.save_id, file.rank, file.part, file.stream, file.header)):
        raise CorruptError(
            label,
            expected="save {}, rank {}, part {}, at {}, header {}".format(*wanted),
            found="save {}, rank {}, part {}, at {}, header {}".format(*found),
            hint="The file belongs to another save; restore the right one from a copy",
        )
    return front


def _compare(store: Store, file: File, front: HeaderPrefix, low: int, data: np.ndarray) -> int:
    """Compares the checksums of data that starts at a border; returns the bytes that this took."""
    label = f"{store.url}/{file.name}"
    first, count = low // front.block, block_count(len(data), front.block)
    start, stop, skip = hash_text_range(first, count)
    text = bytearray(max(0, min(stop, front.header - front.hashes) - start))
    store.read_into(file.name, front.hashes + start, memoryview(text))
    for number, expected in enumerate(decode_hashes(text, skip, count, label)):
        if hash_block(data[number * front.block : (number + 1) * front.block]) != expected:
            begin = file.header + (first + number) * front.block
            raise CorruptError(
                label,
                expected="bytes that match their checksum",
                found=f"changed bytes in {begin}:{begin + front.block} of the file",
                hint="Restore the file from a copy",
            )
    return len(text)
