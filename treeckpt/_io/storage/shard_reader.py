"""Opens a shard, checks that it is the file that the index describes, and reads ranges that match their checksums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from ..._core.format.byte_map import disk_text, leaves_in_range
from ..._core.format.records import File, Index
from ..._core.format.shard_header import (
    DATA_ALIGNMENT,
    ShardHeader,
    block_count,
    check_no_zeros,
    decode_front,
    decode_hashes,
    decode_header,
    hash_block,
    hash_parts,
    hash_text_range,
    header_nbytes,
    new_hash,
    parse_shard_name,
)
from ...errors import CheckpointError, CorruptError, StoreError, TreeckptError
from .memory import aligned_buffer
from .store import TEXT_PART_NBYTES, Store

_ELSE = (
    "take the step before, as Manager.resume does, or what is intact: treeckpt.load(path, "
    "fallback=treeckpt.Fallback(on_corrupt='skip'))"
)
_RESTORE = f"The file was lost, changed or cut short; restore it from a copy, {_ELSE}"
VERIFY_NBYTES = 8 << 20
"""Bytes that are verified at a time."""


class RangeChecks(Protocol):
    """The checksums of a file that are not those of blocks."""

    def take(self, start: int, data: memoryview) -> None:
        """Compares what bytes of the file that were read complete; raises CorruptError for bytes that have changed.

        Args:
            start: where they start in the data area.
        """
        ...


class OpenedShard(msgspec.Struct, frozen=True):
    """A shard whose header was read, and is the one that the index describes; or a file of another program."""

    file: File
    hashes: Sequence[int] | Mapping[int, int]
    """The checksums of the blocks, by their numbers."""
    block: int
    index: Index
    header: bytes = b""
    """The bytes of the header, where `keep` was given."""
    checks: RangeChecks | None = None
    """The checksums of a file of another program, which has none of blocks; None for a shard."""


def read_header(
    store: Store, name: str, *, entries: bool = True, file_size: int | None = None
) -> tuple[int, ShardHeader]:
    """Returns the size of a shard's header in bytes, and its content.

    Args:
        entries: decodes the entries too.
        file_size: in bytes, where it is known; else the store is listed.

    Raises:
        CorruptError, FormatError: naming the file.
    """
    data = _header_data(store, name, file_size, None)
    return len(data), decode_header(data, f"{store.url}/{name}", entries=entries)


def _header_data(store: Store, name: str, file_size: int | None, wanted: int | None) -> bytearray:
    """Returns the bytes of a shard's header; `wanted` is its size by the index, in bytes, None without an index."""
    label = f"{store.url}/{name}"
    file_size = store.sizes().get(name, 0) if file_size is None else file_size
    # one read where the index says the size, else the length first; never more memory than the file has bytes
    data = bytearray(min(wanted or 8, TEXT_PART_NBYTES, max(file_size, 8)))
    store.read_into(name, 0, memoryview(data))
    size = _header_size(data, label, file_size, wanted)
    if len(data) < min(size, TEXT_PART_NBYTES):
        data = bytearray(min(size, TEXT_PART_NBYTES))
        store.read_into(name, 0, memoryview(data))
    if size > TEXT_PART_NBYTES:
        # the length in the first 8 bytes has zeros of its own
        check_no_zeros(data[8:], 8, label)
    for start in range(TEXT_PART_NBYTES, size, TEXT_PART_NBYTES):
        part = bytearray(min(size - start, TEXT_PART_NBYTES))
        store.read_into(name, start, memoryview(part))
        check_no_zeros(part, start, label)
        data += part
    return data


def _header_size(prefix: bytearray, label: str, file_size: int, wanted: int | None) -> int:
    """Returns the size of a header by its first bytes."""
    size = header_nbytes(prefix, label)
    if size > file_size:
        raise CorruptError(label, expected=f"a header of {size} bytes", found=f"a file of {file_size}")
    if wanted not in (None, size):
        raise CorruptError(label, expected=f"a header of {wanted} bytes", found=f"one of {size}", hint=_RESTORE)
    return size


def check_missing(store: Store, name: str) -> None:
    """Looks why a file is in no listing; raises StoreError where it is a link that is not followed."""
    with contextlib.suppress(OSError, CheckpointError):
        store.read_into(name, 0, memoryview(bytearray(1)))


def _checked_size(store: Store, index: Index, file: File, size: int | None, *, whole: bool) -> int:
    """Returns the size of a shard.

    Raises:
        CorruptError: it is missing, or has another size than the index says.
        StoreError, CheckpointError: of a node-local checkpoint, it is on the disk of another host, or on none.
    """
    expected = file.header + file.nbytes
    if size is None:
        check_missing(store, file.name)
        where = _leaves_and_file(store, index, file, 0, expected)
        if (disk := elsewhere(store, index, file)) is not None:
            raise _elsewhere_error(store, disk, where)
        if file.directory:
            homes = [*index.shared_with]
            which = f"directory {homes[0]}" if len(homes) == 1 else f"directories {', '.join(homes)}"
            hint = f"Copy the {which} of the run beside this one too, or restore it from a copy"
            expected = f"a shard in the directory {file.directory} beside it, which this checkpoint shares"
            raise CorruptError(where, expected=expected, found="no such file", hint=hint)
        raise CorruptError(where, expected="a shard", found="no such file", hint=_RESTORE)
    if whole and size != expected:
        first, last = min(size, expected), max(size, expected)
        found = "are missing" if size < expected else "are too many"
        raise CorruptError(
            _leaves_and_file(store, index, file, first, last),
            expected=f"{expected} bytes",
            found=f"{size}: {first}:{last} of the file {found}",
            hint=_RESTORE,
        )
    return size


def elsewhere(store: Store, index: Index, file: File) -> str | None:
    """Returns the disk of a shard of a node-local checkpoint that is not here, nor any other shard of that disk."""
    disk = index.disk_of(file.rank) if index.disks else None
    return None if disk is None or disk not in index.disks_elsewhere(store.sizes()) else disk_text(index, disk)


def _elsewhere_error(store: Store, disk: str, where: str) -> TreeckptError:
    """Returns the error for a shard that is on no disk that is seen here: of ranks that load together, it is lost.

    Args:
        disk: as from `elsewhere`.
        where: the file, with the leaves that are in it.
    """
    if store.traits.joined:
        found = f"no rank here sees it: it was written to {disk}"
        hint = "Bring that host or its disk back, copy its files to a host of these ranks, or take another step"
        return CheckpointError(where, expected="a shard that one of the ranks that load sees", found=found, hint=hint)
    hint = "Load on all ranks of all hosts with read=treeckpt.ReadOptions(once=True), or copy its files here"
    return StoreError(where, expected="a shard on this disk", found=f"it was written to {disk}", hint=hint)


def open_shard(
    store: Store,
    index: Index,
    file: File,
    size: int | None,
    *,
    whole: bool = True,
    keep: bool = False,
    header: bytearray | None = None,
) -> OpenedShard:
    """Reads a shard's header and checks that it is the file that the index describes.

    Args:
        size: of the file, in bytes; None where it is missing.
        whole: refuses a file that was cut short or has grown, even where its header is intact.
        keep: keeps the bytes of the header, for callers that need its entries too.
        header: the bytes of the file that are its header by the index, where they have been read.

    Raises:
        CorruptError: it is missing, cut short, grown, or of another save or rank; names the leaves and the bytes.
    """
    size = _checked_size(store, index, file, size, whole=whole)
    label = f"{store.url}/{file.name}"
    with _naming_leaves(store, index, file):
        if header is None:
            data = _header_data(store, file.name, size, file.header)
        else:
            data = header
            _header_size(data, label, size, file.header)
        decoded = decode_header(data, label, entries=False)
    _check_identity(store, index, file, decoded, len(data), len(decoded.hashes))
    return OpenedShard(file, decoded.hashes, decoded.block, index, bytes(data) if keep else b"")


def open_front(store: Store, index: Index, file: File, size: int | None) -> tuple[OpenedShard, int]:
    """Reads the first page of a shard alone, and checks that it is the file that the index describes.

    The seal is not compared, because that would take the whole header: a changed checksum is found all the same,
    because its block does not match it.

    Args:
        size: as for `open_shard`.

    Returns:
        The shard without its checksums, and the offset in the file of their text; `with_hashes` reads some.

    Raises:
        CorruptError: as `open_shard`.
    """
    _checked_size(store, index, file, size, whole=True)
    data, label = bytearray(min(DATA_ALIGNMENT, file.header)), f"{store.url}/{file.name}"
    with _naming_leaves(store, index, file):
        store.read_into(file.name, 0, memoryview(data))
        decoded, at = decode_front(data, label)
    _check_identity(store, index, file, decoded, header_nbytes(data, label), block_count(file.nbytes, decoded.block))
    return OpenedShard(file, (), decoded.block, index), at


def with_hashes(store: Store, shard: OpenedShard, at: int, start: int, stop: int) -> tuple[OpenedShard, int]:
    """Reads the checksums of the blocks with bytes `start:stop` of the data area.

    Args:
        at: as `open_front` returns it.

    Returns:
        The shard with these checksums, and the bytes that were read for them.

    Raises:
        CorruptError: they are not there.
    """
    first, count = start // shard.block, block_count(stop, shard.block) - start // shard.block
    low, high, skip = hash_text_range(first, count)
    text = bytearray(max(0, min(at + high, shard.file.header) - at - low))
    store.read_into(shard.file.name, at + low, memoryview(text))
    hashes = decode_hashes(text, skip, count, f"{store.url}/{shard.file.name}")
    return msgspec.structs.replace(shard, hashes=dict(enumerate(hashes, first))), len(text)


@contextlib.contextmanager
def _naming_leaves(store: Store, index: Index, file: File) -> Iterator[None]:
    """Adds to an error about a header the leaves that it concerns, and its bytes."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(
            _leaves_and_file(store, index, file, 0, file.header),
            expected=error.expected,
            found=f"{error.found}, in bytes 0:{file.header} of the file",
            hint=error.hint or _RESTORE,
        ) from error


def _check_identity(store: Store, index: Index, file: File, found: ShardHeader, header: int, hashes: int) -> None:
    """Raises CorruptError where a header is not the one that the index describes.

    Args:
        header: its size in bytes.
        hashes: the number of its checksums.
    """
    blocks = block_count(file.nbytes, found.block)
    # the header of a file in another directory says what it is there, and where it starts in the stream there
    save_id, part = index.save_id, file.part
    if file.directory and (named := parse_shard_name(file.name)) is not None:
        save_id, part = named[0], named[3]
    start = file.stream if file.directory else found.stream
    identity = (found.save_id, found.rank, found.part, start, header, hashes)
    wanted = (save_id, file.rank, part, file.stream, file.header, blocks)
    if identity != wanted:
        raise CorruptError(
            _leaves_and_file(store, index, file, 0, file.header),
            expected="save {}, rank {}, part {}, at {}, header {}, {} checksums".format(*wanted),
            found="save {}, rank {}, part {}, at {}, header {}, {} checksums".format(*identity)
            + f", in bytes 0:{file.header} of the file",
            hint="The file belongs to another save; restore the right one from a copy",
        )


def check_blocks(store: Store, shard: OpenedShard, start: int, data: memoryview) -> None:
    """Compares data with the checksums of its blocks; raises CorruptError for the first that differs.

    Args:
        start: where the data starts in the data area, in bytes; a multiple of the block.
    """
    if shard.checks is not None:
        shard.checks.take(start, data)
        return
    for offset in range(0, len(data), shard.block):
        block = data[offset : offset + shard.block]
        check_checksum(store, shard, start + offset, len(block), hash_block(block))


def check_parts(store: Store, shard: OpenedShard, start: int, parts: Sequence[memoryview]) -> None:
    """Compares data that lies in several places of memory, in order, with the checksums of its blocks."""
    if len(parts) == 1 or shard.checks is not None:
        for part in parts:
            check_blocks(store, shard, start, part)
            start += len(part)
        return
    offset = start
    block: list[memoryview] = []
    need = shard.block
    for part in parts:
        while len(part):
            block.append(part[:need])
            part = part[need:]
            need -= len(block[-1])
            if not need:
                check_checksum(store, shard, offset, shard.block, hash_parts(block))
                offset, block, need = offset + shard.block, [], shard.block
    if block:
        check_checksum(store, shard, offset, shard.block - need, hash_parts(block))


class ArrivingBlocks:
    """Hashes whole blocks whose bytes arrive in order.

    Args:
        start: where the first block starts in the data area, in bytes.
        check: takes where a whole block starts in the data area, its size in bytes, and its checksum.
    """

    def __init__(self, shard: OpenedShard, start: int, check: Callable[[int, int, int], object]) -> None:
        self._shard, self._check, self._block = shard, check, start
        self._position, self._hash = start, None

    def add(self, data: memoryview) -> None:
        """Takes the next bytes; raises what `check` does."""
        if self._shard.checks is not None:
            self._shard.checks.take(self._position, data)
            self._position += len(data)
            return
        step, end = self._shard.block, self._shard.file.nbytes
        while len(data):
            stop = min(self._block + step, end)
            part, data = data[: stop - self._position], data[stop - self._position :]
            whole = len(part) == stop - self._block
            if not whole:
                self._hash = self._hash or new_hash()
                self._hash.update(part)
            self._position += len(part)
            if self._position == stop:
                digest = hash_block(part) if whole or self._hash is None else self._hash.intdigest()
                self._check(self._block, stop - self._block, digest)
                self._block, self._hash = stop, None


def matches(shard: OpenedShard, start: int, block: memoryview) -> bool:
    """Whether a block that starts at `start` in the data area has its checksum."""
    return hash_block(block) == shard.hashes[start // shard.block]


def check_checksum(store: Store, shard: OpenedShard, start: int, nbytes: int, found: int) -> None:
    """Raises CorruptError if `found` is not the checksum of the block that starts at `start` in the data area."""
    if found != shard.hashes[start // shard.block]:
        first = start + shard.file.header
        raise CorruptError(
            _leaves_and_file(store, shard.index, shard.file, first, first + nbytes),
            expected="bytes that match their checksum",
            found=f"changed bytes in {first}:{first + nbytes} of the file",
            hint=f"Restore the file from a copy, {_ELSE}",
        )


def _leaves_and_file(store: Store, index: Index, file: File, first: int, last: int) -> str:
    """Names a file for an error, after the leaves that have bytes in `first:last` of it."""
    paths = [index.entries[number].path or "<root>" for number in leaves_in_range(index, file, first, last)]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    place = f"{store.url}/../{file.directory}" if file.directory else store.url
    return f"{', '.join(paths[:3])}{more}: {place}/{file.name}" if paths else f"{place}/{file.name}"


def verify_shard(store: Store, shard: OpenedShard, start: int = 0, stop: int | None = None) -> int:
    """Compares all checksums of a shard, or those of bytes `start:stop` of its data; returns the bytes that it read."""
    file, block = shard.file, shard.block
    low = start // block * block
    high = file.nbytes if stop is None else min(-(-stop // block) * block, file.nbytes)
    # a block may be larger than that, up to `MAX_BLOCK`
    step = VERIFY_NBYTES // block * block or block
    buffer = aligned_buffer(step, huge=True)
    for offset in range(low, high, step):
        data = buffer[: min(step, high - offset)]
        store.read_into(file.name, file.header + offset, data)
        check_blocks(store, shard, offset, data)
    return max(high - low, 0)
