"""The header of a shard: a valid safetensors header that also describes and verifies the file by itself.

    u64 length | JSON, padded with spaces so that the data starts at a multiple of 4096 | data, without holes

An entry is named by its leaf's path, plus `@<offset>` when it is not the whole array. `__metadata__` (text to text, as
safetensors demands) holds the format version, the save id, rank and part, the global shape of partial entries, the
names of dtypes that safetensors lacks, and the xxh3-64 of every block of the data area. Its first field is a seal, the
xxh3-64 of the header itself with the seal's digits as zeros. The size of a header does not depend on the checksums, so
the data can be written first and hashed while it is written. Other documents have such a seal too.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
import numpy as np
import xxhash

from ...errors import CorruptError, FormatError, TreeckptError, visible
from ..sharding.dtypes import DTYPES, dtype_of
from ..sharding.region import MAX_NDIM, Region

VERSION = 1
SHARING_VERSION = 2
"""The version of the header of a shard that lists files in other directories."""
BLOCK = 256 << 10
"""Bytes of the data area under one checksum."""
DATA_ALIGNMENT = 4096
MAX_HEADER = 1 << 30
MAX_BLOCK = 64 << 20
"""Larger blocks are refused, because a reader allocates whole blocks."""
MAX_WORLD = 1 << 24
MAX_NBYTES = 1 << 62
"""More bytes than any array or rank has. The sum of two such numbers fits an int64."""
SAVE_ID = re.compile(r"[0-9a-f]{16}")
_SEAL = b'"seal":"'
_RESTORE = "The file was changed after it was written; restore it from a copy"
SEAL_WITHIN = 256
"""Bytes at the start of a document in which the seal must begin."""
_HASHES = b'"hashes":"'
_ZEROS = b"0" * 16
_NAME = re.compile(r"shard-([0-9]{5,9})(?:\.([0-9]{3,9}))?-of-([0-9]{5,9})\.([0-9a-f]{16})\.safetensors")


class ShardEntry(msgspec.Struct, frozen=True, gc=False):
    """One region of one array in the file's data area."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole array."""
    region: Region
    start: int
    nbytes: int


class ShardHeader(msgspec.Struct, frozen=True):
    """The content of a shard's header."""

    save_id: str
    rank: int
    world: int
    part: int
    stream: int
    """Start of this file in the stream of its rank's data bytes."""
    entries: tuple[ShardEntry, ...]
    hashes: tuple[int, ...]
    """The xxh3-64 of every block of `block` bytes of the data area; the last block may be shorter."""
    block: int = BLOCK
    manifest: str | None = None
    """In the coordinator's shard: the index without chunks and files, as JSON."""
    shared: str = ""
    """In the first shard of a rank: its files in the directories of other checkpoints, as JSON, see `references`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the data area."""
        return sum(entry.nbytes for entry in self.entries)


class _FrontMetadata(msgspec.Struct, forbid_unknown_fields=True):
    """The first fields of `__metadata__`; numbers and JSON as text because safetensors allows nothing else."""

    seal: str
    format: str
    version: str
    save_id: str
    rank: str
    world: str
    part: str
    stream: str
    block: str
    hashes: str


class _ShardMetadata(_FrontMetadata, forbid_unknown_fields=True):
    """All fields of `__metadata__`."""

    partial: str
    dtypes: str
    manifest: str = ""
    shared: str = ""


class _TensorEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_ENTRY = msgspec.json.Decoder(_TensorEntry)


def shard_name(save_id: str, rank: int, world: int, part: int = 0) -> str:
    """Returns the file name of a shard; part 0 is the only one unless a size limit was given."""
    number = f"{rank:05d}.{part:03d}" if part else f"{rank:05d}"
    return f"shard-{number}-of-{world:05d}.{save_id}.safetensors"


def parse_shard_name(name: str) -> tuple[str, int, int, int] | None:
    """Parses (save id, rank, world, part) from a shard's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    return (match[4], int(match[1]), int(match[3]), int(match[2] or 0)) if match else None


def saves_of_all_ranks(names: Iterable[str]) -> dict[str, int]:
    """Returns, by its id, the world of each save of which every rank has a shard among these names."""
    ranks_of: dict[tuple[str, int], set[int]] = {}
    for save_id, rank, world, _ in filter(None, map(parse_shard_name, names)):
        ranks_of.setdefault((save_id, world), set()).add(rank)
    return {save_id: world for (save_id, world), ranks in ranks_of.items() if len(ranks) == world}


def padded_nbytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes of an array with empty dimensions counted as 1. Array libraries keep this within 63 bits."""
    return math.prod([max(n, 1) for n in shape]) * itemsize


def block_count(nbytes: int, block: int = BLOCK) -> int:
    """Returns the number of checksums of a data area of `nbytes` bytes."""
    return -(-nbytes // block)


def hash_block(data: bytes | memoryview | np.ndarray) -> int:
    """Computes the checksum of one block."""
    return xxhash.xxh3_64_intdigest(data)  # pyright: ignore[reportArgumentType] (an ndarray is a buffer)


def hash_parts(parts: Sequence[memoryview]) -> int:
    """Computes the checksum of one block that lies in several pieces of memory."""
    if len(parts) == 1:
        return hash_block(parts[0])
    state = new_hash()
    for part in parts:
        state.update(part)  # pyright: ignore[reportArgumentType] (a memoryview is a buffer)
    return state.intdigest()


def new_hash() -> xxhash.xxh3_64:
    """Begins the checksum of a block whose bytes come one after the other."""
    return xxhash.xxh3_64()


_PLAIN = {dtype.tag: dtype.name for dtype in reversed(DTYPES)}
"""The dtype that each tag means in safetensors: the first that has it; an entry of any other records its name."""


def _entry_name(entry: ShardEntry, whole: bool) -> str:
    if not whole:
        return f"{entry.path}@{','.join(map(str, entry.region.offset))}"
    # an @ in a user's path, and safetensors' reserved name, must not be parsed as an offset or as metadata
    return entry.path + "@" if "@" in entry.path or entry.path == "__metadata__" else entry.path


def encode_header(header: ShardHeader) -> bytes:
    """Encodes the file up to its data. Headers that differ in hashes only have the same length."""
    partial: dict[str, tuple[int, ...]] = {}
    logical: dict[str, str] = {}
    tensors: dict[str, _TensorEntry] = {}
    for entry in header.entries:
        region, dtype = entry.region, dtype_of(entry.dtype)
        whole = region.is_whole(entry.shape)
        name = _entry_name(entry, whole)
        shape = region.shape
        if not whole:
            partial[name] = entry.shape
        if dtype.parts > 1:
            shape = (*shape, dtype.parts)
        if _PLAIN.get(dtype.tag) != entry.dtype:
            logical[name] = entry.dtype
        tensors[name] = _TensorEntry(dtype.tag, shape, (entry.start, entry.start + entry.nbytes))
    hashes = np.array(header.hashes, dtype="<u8").tobytes()
    metadata = _ShardMetadata(
        seal=_ZEROS.decode(),
        format="treeckpt",
        version=str(SHARING_VERSION if header.shared else VERSION),
        save_id=header.save_id,
        rank=str(header.rank),
        world=str(header.world),
        part=str(header.part),
        stream=str(header.stream),
        block=str(header.block),
        hashes=base64.b64encode(hashes).decode(),
        partial=msgspec.json.encode(partial).decode(),
        dtypes=msgspec.json.encode(logical).decode(),
        manifest=header.manifest or "",
        shared=header.shared,
    )
    fields = msgspec.structs.asdict(metadata)
    if not header.shared:  # a reader of version 1 does not know it
        del fields["shared"]
    # `__metadata__` comes first, so that the seal and the place of the checksums are on the first page
    text = msgspec.json.encode({"__metadata__": fields, **tensors})
    padded = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    text = text.ljust(padded - 8)
    return sealed(len(text).to_bytes(8, "little") + text)


def seal_at(encoded: bytes) -> int:
    """Returns the offset in an encoded header of the 16 digits of its seal."""
    return encoded.index(_SEAL) + len(_SEAL)


def hashes_at(encoded: bytes) -> int:
    """Returns the offset in an encoded header of the text of its checksums."""
    # only short fields of `__metadata__` come before: nothing that a user has named
    return encoded.index(_HASHES, 0, 1024) + len(_HASHES)


def with_hashes(encoded: bytes, hashes: Sequence[int]) -> bytes:
    """Replaces the checksums of an encoded header by as many others."""
    text = base64.b64encode(np.array(hashes, dtype="<u8").tobytes())
    start, seal = hashes_at(encoded), seal_at(encoded)
    unsealed = encoded[:seal] + _ZEROS + encoded[seal + 16 : start] + text + encoded[start + len(text) :]
    return sealed(unsealed)


def header_nbytes(prefix: bytes | bytearray | memoryview, name: str) -> int:
    """Returns the bytes of the whole header, from the first 8 bytes of the file.

    Raises:
        CorruptError: the length is none of a header.
    """
    length = int.from_bytes(prefix[:8], "little") + 8
    if len(prefix) < 8 or length % DATA_ALIGNMENT or not 0 < length <= MAX_HEADER:
        raise CorruptError(
            name,
            expected=f"a header of a multiple of {DATA_ALIGNMENT} bytes, at most {MAX_HEADER}",
            found=f"{length}" if len(prefix) >= 8 else f"a file of {len(prefix)} bytes",
        )
    return length


class _HeaderMetadata(msgspec.Struct):
    """The header without its entries."""

    metadata: _ShardMetadata = msgspec.field(name="__metadata__")


class _HeaderFront(msgspec.Struct):
    """The header up to the text of its checksums, completed to a document."""

    metadata: _FrontMetadata = msgspec.field(name="__metadata__")


_METADATA, _FRONT = msgspec.json.Decoder(_HeaderMetadata), msgspec.json.Decoder(_HeaderFront)


def decode_header(data: bytes | bytearray | memoryview, name: str, *, entries: bool = True) -> ShardHeader:
    """Decodes the header of the file called `name`.

    Args:
        entries: whether entries are decoded; a reader that has the index only needs the checksums.

    Raises:
        CorruptError: the seal is broken.
        FormatError: another version, or no shard of treeckpt.
    """
    check_seal(data, name)
    try:
        metadata = _METADATA.decode(memoryview(data)[8:]).metadata
        header = _header_of(metadata, name)
        if (metadata.version == str(SHARING_VERSION)) != bool(metadata.shared):
            raise ValueError(f"version {metadata.version} of a header with shared files {metadata.shared[:80]!r}")
        hashes = np.frombuffer(base64.b64decode(metadata.hashes, validate=True), "<u8")
        header = msgspec.structs.replace(
            header,
            entries=_decode_entries(data, metadata) if entries else (),
            hashes=tuple(hashes.tolist()),
            manifest=metadata.manifest or None,
            shared=metadata.shared,
        )
    except TreeckptError:
        raise
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        raise FormatError(name, expected="a treeckpt shard", found=f"{error}"[:200]) from error
    if entries:
        _check_entries(header, name)
    return header


def _header_of(metadata: _FrontMetadata, name: str) -> ShardHeader:
    """Returns the header of the file called `name` without entries and checksums.

    Raises:
        FormatError: another version, or what no shard has.
        ValueError: something is no number.
    """
    if metadata.format != "treeckpt" or metadata.version not in (str(VERSION), str(SHARING_VERSION)):
        raise FormatError(
            name,
            expected=f"treeckpt shard version {VERSION}",
            found=f"{metadata.format} version {metadata.version}"[:80],
            hint="Load it with the version of treeckpt that wrote it, or a newer one",
        )
    numbers = (int(metadata.rank), int(metadata.world), int(metadata.part), int(metadata.stream))
    header = ShardHeader(metadata.save_id, *numbers, entries=(), hashes=(), block=int(metadata.block))
    _check_origin(header, name)
    return header


def decode_front(data: bytes | bytearray, name: str) -> tuple[ShardHeader, int]:
    """Decodes the first `DATA_ALIGNMENT` bytes of a file, without the seal, which is that of the whole header.

    The header of a shard of 100 GB holds 4 MB of checksums. They are base64 text at an offset that the first page
    gives, so those of a few blocks are found by arithmetic: see `hash_text_range`.

    Returns:
        The header without entries and checksums, and the offset in the file of the text of its checksums.

    Raises:
        CorruptError, FormatError: it is no shard of treeckpt.
    """
    header_nbytes(data, name)
    start = data.find(_HASHES, 8) + len(_HASHES)
    if start < len(_HASHES):
        raise FormatError(name, expected="a treeckpt shard", found="no checksums on its first page")
    try:
        return _header_of(_FRONT.decode(bytes(data[8:start]) + b'"}}').metadata, name), start
    except (msgspec.MsgspecError, ValueError) as error:
        raise FormatError(name, expected="a treeckpt shard", found=f"{error}"[:200]) from error


def hash_text_range(first: int, count: int) -> tuple[int, int, int]:
    """Returns (start, stop) of the characters that hold the checksums of some blocks, and the bytes to skip in them."""
    start, stop = first * 8 // 3, -(-(first + count) * 8 // 3)
    return start * 4, stop * 4, first * 8 - start * 3


def decode_hashes(text: bytes | bytearray, skip: int, count: int, name: str) -> list[int]:
    """Decodes checksums in the characters that `hash_text_range` tells.

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


def _decode_entries(data: bytes | bytearray | memoryview, metadata: _ShardMetadata) -> tuple[ShardEntry, ...]:
    raw = msgspec.json.decode(bytes(data[8:]), type=dict[str, msgspec.Raw])
    del raw["__metadata__"]
    partial = msgspec.json.decode(metadata.partial, type=dict[str, tuple[int, ...]])
    logical = msgspec.json.decode(metadata.dtypes, type=dict[str, str])
    if partial.keys() - raw.keys() or logical.keys() - raw.keys():
        raise ValueError("entries are described that are not there")
    return tuple(
        _decode_entry(key, _ENTRY.decode(value), partial.get(key), logical.get(key)) for key, value in raw.items()
    )


def _decode_entry(name: str, tensor: _TensorEntry, shape: tuple[int, ...] | None, logical: str | None) -> ShardEntry:
    dtype = dtype_of(logical or _PLAIN.get(tensor.dtype, tensor.dtype))
    local = tensor.shape
    if dtype.tag != tensor.dtype or (dtype.parts > 1 and (not local or local[-1] != dtype.parts)):
        raise ValueError(f"{name[:80]!r} is {tensor.dtype} {local}, not a stored {dtype.name}")
    if dtype.parts > 1:
        local = local[:-1]
    start, stop = tensor.data_offsets
    if shape is None:
        path, region, shape = name.removesuffix("@"), Region.whole(local), local
    else:
        path, _, text = name.rpartition("@")
        region = Region(tuple(int(n) for n in text.split(",")), local)
    if len(shape) > MAX_NDIM or len(region.offset) != len(shape) or len(local) != len(shape):
        raise ValueError(f"{name[:80]!r} has shape {shape}, offset {region.offset}")
    if any(n < 0 for n in (*region.offset, *local)) or not region.within(Region.whole(shape)):
        raise ValueError(f"{name[:80]!r} lies outside of its shape {shape}")
    if padded_nbytes(shape, dtype.itemsize) >= MAX_NBYTES:
        raise ValueError(f"{name[:80]!r} is larger than any array")
    if stop - start != math.prod(local) * dtype.itemsize:
        raise ValueError(f"{name[:80]!r} has {stop - start} bytes for shape {local} of {dtype.name}")
    entry = ShardEntry(path, dtype.name, shape, region, start, stop - start)
    if (right := _entry_name(entry, region.is_whole(shape))) != name:
        raise ValueError(f"{name[:80]!r} is not how {right[:80]!r} is named")
    return entry


def _check_origin(header: ShardHeader, name: str) -> None:
    known = SAVE_ID.fullmatch(header.save_id) is not None and 0 < header.world <= MAX_WORLD
    if not known or not 0 <= header.rank < header.world or not 0 <= header.part <= MAX_WORLD:
        raise FormatError(
            name,
            expected="the save id, rank and part of a shard",
            found=f"{header.save_id:.40}, rank {header.rank} of {header.world}, part {header.part}"[:200],
        )
    if (
        not DATA_ALIGNMENT <= header.block <= MAX_BLOCK
        or header.block % DATA_ALIGNMENT
        or not 0 <= header.stream < MAX_NBYTES
    ):
        raise FormatError(
            name,
            expected=f"blocks of {DATA_ALIGNMENT} to {MAX_BLOCK} bytes, in pages",
            found=f"{header.block} from {header.stream}"[:200],
        )


def _check_entries(header: ShardHeader, name: str) -> None:
    end = 0
    # an entry without bytes lies before the one that starts at the same place
    for entry in sorted(header.entries, key=lambda e: (e.start, e.nbytes)):
        if entry.start != end:
            raise FormatError(name, expected=f"an entry at byte {end}", found=f"{entry.path[:80]} at {entry.start}")
        end += entry.nbytes
    if len(header.hashes) != block_count(end, header.block):
        raise FormatError(
            name,
            expected=f"checksums of {end} bytes in blocks",
            found=f"{len(header.hashes)} of blocks of {header.block}",
        )


# seals ----------------------------------------------------------------------------------------------------------------


def sealed(document: bytes) -> bytes:
    """Returns the JSON document with its first `"seal":"0000000000000000"` filled in."""
    start = document.index(_SEAL) + len(_SEAL)
    digest = f"{xxhash.xxh3_64_intdigest(document):016x}".encode()
    return document[:start] + digest + document[start + 16 :]


def check_seal(
    document: bytes | bytearray | memoryview, name: str, *, hint: str = _RESTORE, repairable: bool = False
) -> None:
    """Refuses a document whose seal is not its checksum.

    Args:
        hint, repairable: of the error.

    Raises:
        CorruptError: naming the file.
    """
    error = partial(CorruptError, name, hint=hint, repairable=repairable)
    data = memoryview(document)
    start = bytes(data[:SEAL_WITHIN]).find(_SEAL) + len(_SEAL)
    if start < len(_SEAL):
        raise error(expected="a sealed document", found=f"no seal in bytes 0:{min(SEAL_WITHIN, len(data))}")
    stored = bytes(data[start : start + 16])
    state = xxhash.xxh3_64()
    for part in (data[:start], _ZEROS, data[start + 16 :]):
        state.update(part)  # pyright: ignore[reportArgumentType] (a memoryview is a buffer)
    actual = f"{state.intdigest():016x}".encode()
    if stored != actual:
        expected, found = (visible(seal.decode("ascii", "backslashreplace")) for seal in (stored, actual))
        raise error(expected=f"seal {expected}", found=f"{found} for bytes 0:{len(data)}")


def check_no_zeros(part: bytes | bytearray, at: int, name: str) -> None:
    """Refuses a part of a document that contains a zero byte: a hole of a sparse file reads as zeros.

    Args:
        at: offset of `part` in the document, for errors.

    Raises:
        CorruptError: naming the file.
    """
    if (zero := part.find(0)) >= 0:
        raise CorruptError(name, expected="a document of text", found=f"a zero at byte {at + zero}", hint=_RESTORE)
