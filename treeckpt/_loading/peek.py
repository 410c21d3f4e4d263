"""Reads a part of an array by its byte ranges alone, for display.

The reads are planned as those of a load (`plan_reads`). Where rounding out to blocks of checksums costs at most four
times what is shown, or no more than a few blocks, they are compared; only the checksums of those blocks are taken from
the shard's header. Else the bytes are read as they are, as are those of files of other programs.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec
import numpy as np

from .._arrays.base import HostArray, TargetPiece, raw_dtype
from .._core.format.records import AliasRecord, Index, Leaf
from .._core.format.shard_header import BLOCK, DATA_ALIGNMENT
from .._core.planning.load_plan import READ_LIMIT
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, intersect
from .._foreign.foreign_checkpoint import ForeignIndex
from .._io.storage.shard_reader import OpenedShard, check_blocks, open_front, with_hashes
from .._io.storage.store import Store
from ..errors import CorruptError, LayoutError, MismatchError
from .plan import Read, plan_reads, read_for, rounded_out

MAX_NBYTES = 64 << 20
"""Bytes that one peek may show."""
ROUNDING = 4
"""Times of what is shown that may be read to compare checksums."""
MIN_COMPARED_NBYTES = 4 * BLOCK
"""Bytes that are read to compare checksums, however little is shown."""
MAX_ROW_GAP = 512
"""Unneeded bytes between two rows that are rather read than skipped."""
MAX_READS = 1 << 16
"""Reads of one peek, at most: rows that lie far apart take one each."""


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
    data = np.empty(region.shape, raw_dtype(itemsize))
    piece = TargetPiece(region, HostArray(data))
    chunks = [(chunk, intersect(chunk.region, region)) for chunk in index.chunks_of(leaf, region, rank=rank)]
    wanted = [
        read_for(index, leaf.path, chunk, piece, box, itemsize) for chunk, box in chunks if box is not None and box.size
    ]
    reads = plan_reads(wanted, {}, limit=READ_LIMIT, size=READ_LIMIT, gap=MAX_ROW_GAP)
    if len(reads) > MAX_READS:
        raise LayoutError(leaf.path, expected=f"rows that lie in at most {MAX_READS} places", found=f"{len(reads)}")
    copied = sum(box.size for _, box in chunks if box is not None)
    if copied != region.size:
        raise CorruptError(leaf.path, expected=f"chunks with {region.size} elements", found=f"{copied}")
    nbytes, verified = _read(store, index, leaf.path, reads, data.nbytes)
    return Peek(region, data.reshape(-1).view(np.uint8).reshape(-1, itemsize), nbytes, verified)


def peek_blob(store: Store, index: Index, leaf: Leaf, most: int, *, rank: int | None = None) -> tuple[str, Peek]:
    """Reads the first `most` bytes of a text or bytes in shards; returns them as Python shows them, and what was read.

    Args:
        rank: as for `peek`, which says what is raised.
    """
    assert leaf.stored is not None, "a blob is stored"
    size = leaf.stored.nbytes
    found = peek(store, index, leaf.as_array, Region((0,), (min(size, most),)), rank=rank)
    data = found.data.tobytes()
    if leaf.stored.kind == "str":  # a character that is cut at the end is left out
        shown = repr(codecs.getincrementaldecoder("utf-8")("surrogatepass").decode(data, size <= most))
    else:
        shown = repr(data)
    return shown + ("" if size <= most else "…"), found


def _read(store: Store, index: Index, path: str, reads: Sequence[Read], shown: int) -> tuple[int, bool]:
    """Reads boxes of the leaf at `path`; returns the bytes that were read, and whether checksums were compared."""
    sizes = store.sizes()
    fronts: dict[str, tuple[OpenedShard, int]] = {}
    for file in {read.file.name: read.file for read in reads}.values():
        # files of other programs have no header with checksums of blocks
        if not isinstance(index, ForeignIndex):
            fronts[file.name] = open_front(store, index, file, sizes.get(file.name))
        # to show a few elements all of it would be computed
        elif file.rank in index.computed:
            raise LayoutError(
                path,
                expected="elements that lie in a file as they are",
                found="an array that is computed as a whole",
                hint="Load it",
            )
    whole = [rounded_out(read, fronts[read.file.name][0].block) for read in reads] if fronts else reads
    verify = bool(fronts) and sum(read.nbytes for read in whole) <= max(ROUNDING * shown, MIN_COMPARED_NBYTES)
    total = sum(min(DATA_ALIGNMENT, shard.file.header) for shard, _ in fronts.values())
    for read in whole if verify else reads:
        out = np.empty(read.nbytes, np.uint8)
        store.read_into(read.file.name, read.file.header + read.start, out.data)
        total += read.nbytes
        if verify:
            shard, nbytes = with_hashes(store, *fronts[read.file.name], read.start, read.stop)
            check_blocks(store, shard, read.start, out.data)
            total += nbytes
        for box in read.destinations:
            box.write(out.data[box.start - read.start : box.stop - read.start])
    return total, verify
