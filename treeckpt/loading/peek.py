"""Reads a part of an array by its byte ranges alone, for display.

The reads are planned as those of a load (`join_boxes`). Where rounding out to blocks of
checksums costs at most four times what is shown, or no more than a few blocks, they are compared; only the checksums
of those blocks are taken from the shard's header. Else the bytes are read as they are.

The header of a shard of 100 GB holds 4 MB of checksums. They are base64 text at an offset that the first page gives, so
those of a few blocks are found by arithmetic. Files of other programs have no such header, and nothing of theirs is
compared. The seal is not compared, because that would take the whole header: a
changed checksum is found all the same, because its block does not match it.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Sequence

import msgspec
import numpy as np

from ..arrays.base import HostArray, TargetPiece, raw_dtype
from ..core.format.records import AliasRecord, File, Index, Leaf
from ..core.format.shard_header import BLOCK, MAX_BLOCK, PAGE, VERSION, block_count, hash_block, header_nbytes
from ..core.planning.load_plan import READ_LIMIT
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region, intersect
from ..errors import CorruptError, FormatError, LayoutError, MismatchError
from ..foreign.foreign_records import ForeignIndex
from ..io.storage.store import Store
from .read_request import Boxes, ReadRequest, request_for
from .read_tasks import join_boxes

MAX_NBYTES = 64 << 20
"""Bytes that one peek may show."""
ROUNDING = 4
"""Times of what is shown that may be read to compare checksums."""
FEW = 4 * BLOCK
"""Bytes that are read to compare checksums, however little is shown."""
GAP = 512
"""Unneeded bytes between two rows that are rather read than skipped."""
MAX_READS = 1 << 16
PREFIX_NBYTES = PAGE
"""Bytes at the start of a file that `decode_prefix` needs."""
_PREFIX = re.compile(
    rb'\{"__metadata__":\{"seal":"[0-9a-f]{16}","format":"treeckpt","version":"([0-9]{1,9})","save_id":"([0-9a-f]{16})",'
    rb'"rank":"([0-9]{1,9})","world":"[0-9]{1,9}","part":"([0-9]{1,9})","stream":"([0-9]{1,19})",'
    rb'"block":"([0-9]{1,9})","hashes":"'
)


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
    boxes = [
        request_for(leaf.path, chunk, piece, box, itemsize) for chunk, box in chunks if box is not None and box.size
    ]
    reads = list(join_boxes(index, boxes, READ_LIMIT, gap=GAP))
    if len(reads) > MAX_READS:
        raise LayoutError(leaf.path, expected=f"rows that lie in at most {MAX_READS} places", found=f"{len(reads)}")
    copied = sum(request.destination.box.size for request in boxes)
    if copied != region.size:
        raise CorruptError(leaf.path, expected=f"chunks with {region.size} elements", found=f"{copied}")
    nbytes, verified = _read(store, index, reads, data.nbytes)
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


def _read(store: Store, index: Index, reads: Sequence[ReadRequest[Boxes]], shown: int) -> tuple[int, bool]:
    """Reads boxes to where they belong; returns the bytes that were read, and whether checksums were compared."""
    sizes = store.sizes()
    fronts: dict[str, HeaderPrefix] = {}
    places: list[tuple[File, int, int, int]] = []
    for request in reads:
        rank, start, nbytes = request.byte_range
        file, at = index.locate(rank, start, start + nbytes, request.path)
        if isinstance(index, ForeignIndex):
            if rank in index.computed:
                raise LayoutError(
                    request.path,
                    expected="elements that lie in a file as they are",
                    found="an array that is computed as a whole",
                    hint="Load it",
                )
            places.append((file, at, at, at + nbytes))
            continue
        if file.name not in fronts:
            fronts[file.name] = _front(store, index, file, sizes.get(file.name))
        block, first = fronts[file.name].block, at - file.header
        high = min(-(-(first + nbytes) // block) * block, file.nbytes)
        places.append((file, first, first // block * block, high))
    verify = bool(fronts) and sum(high - low for _, _, low, high in places) <= max(ROUNDING * shown, FEW)
    read = PREFIX_NBYTES * len(fronts)
    for request, (file, first, low, high) in zip(reads, places, strict=True):
        _, start, nbytes = request.byte_range
        if not verify:
            low, high = first, first + nbytes
        out = np.empty(high - low, np.uint8)
        store.read_into(file.name, file.header + low, out.data)
        read += len(out)
        if verify:
            read += _compare(store, file, fronts[file.name], low, out)
        request.destination.write(start - (first - low), out.data)
    return read, verify


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


# the front of a header ----------------------------------------------------------------------------------------------
class HeaderPrefix(msgspec.Struct, frozen=True):
    """The identity of a shard, and where its checksums are."""

    save_id: str
    rank: int
    part: int
    stream: int
    header: int
    """Bytes before the data area."""
    block: int
    """Bytes under one checksum."""
    hashes: int
    """Offset in the file of the text of the checksums."""


def decode_prefix(data: bytes | bytearray, name: str) -> HeaderPrefix:
    """Decodes the first PREFIX_NBYTES bytes of the file called `name`.

    Raises:
        CorruptError, FormatError: it is no shard of treeckpt.
    """
    header = header_nbytes(data, name)
    found = _PREFIX.match(data, 8)
    if found is None or found[1] != str(VERSION).encode():
        raise FormatError(name, expected=f"a treeckpt shard of version {VERSION}", found="another header")
    block = int(found[6])
    if not PAGE <= block <= MAX_BLOCK or block % PAGE:
        raise FormatError(name, expected=f"blocks of {PAGE} to {MAX_BLOCK} bytes, in pages", found=f"{block}")
    return HeaderPrefix(found[2].decode(), int(found[3]), int(found[4]), int(found[5]), header, block, found.end())


def hash_text_range(first: int, count: int) -> tuple[int, int, int]:
    """Returns (start, stop) of the characters that hold the checksums of some blocks, and the bytes to skip in them."""
    start, stop = first * 8 // 3, -(-(first + count) * 8 // 3)
    return start * 4, stop * 4, first * 8 - start * 3


def decode_hashes(text: bytes | bytearray, skip: int, count: int, name: str) -> list[int]:
    """Decodes the checksums in those characters.

    Raises:
        CorruptError: they are not base64, or too few.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise CorruptError(name, expected="checksums", found=str(error)) from error
    if len(data) < skip + 8 * count:
        raise CorruptError(name, expected=f"{count} checksums", found=f"{len(data)} bytes")
    return np.frombuffer(data, "<u8", count, skip).tolist()
