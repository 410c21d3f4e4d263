"""Shards as a reader sees them: opened once, known to be the files that the index means, read by verified spans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec

from ...core.format.damage import leaves_in_range
from ...core.format.records import File, Index
from ...core.format.seals import check_no_zeros
from ...core.format.shard_header import ShardHeader, block_count, decode_header, hash_block, hash_parts, header_nbytes
from ...errors import CheckpointError, CorruptError
from ..timing import Recorder
from .memory import PAGE, aligned_buffer
from .store import TEXT, Store, SupportsMappedReads

__all__ = [
    "ByteRange",
    "Opened",
    "Shards",
    "matches",
    "open_shard",
    "read_header",
    "read_stretch",
    "stretch_of",
    "verify_shard",
]

_RESTORE = "The file was lost, changed or cut short; restore it from a copy, or load with on_corrupt='skip'"


STEP = 8 << 20
"""Bytes that are verified at a time."""


class Opened(msgspec.Struct, frozen=True):
    """A shard whose header was read and found to be the one that the index means."""

    file: File
    hashes: tuple[int, ...]
    block: int
    index: Index
    header: bytes = b""
    """As it is in the file, where it was to be kept."""


def read_header(
    store: Store, name: str, *, entries: bool = True, file_size: int | None = None
) -> tuple[int, ShardHeader]:
    """(bytes of the header, what it says), without its entries if those are not wanted.

    Args:
        file_size: the file's, in bytes, where that is known; else the store is asked.

    Raises:
        CorruptError, FormatError: naming the file.
    """
    data = _header_data(store, name, file_size, None)
    return len(data), decode_header(data, f"{store.url}/{name}", entries=entries)


def _header_data(store: Store, name: str, file_size: int | None, wanted: int | None) -> bytearray:
    """The header of a shard.

    Args:
        wanted: its bytes by the index, if there is one.
    """
    label = f"{store.url}/{name}"
    prefix = bytearray(8)
    store.read_into(name, 0, memoryview(prefix))
    size = header_nbytes(prefix, label)
    if size > (actual := store.sizes().get(name, 0) if file_size is None else file_size):
        raise CorruptError(label, expected=f"a header of {size} bytes", found=f"a file of {actual}")
    if wanted not in (None, size):
        raise CorruptError(label, expected=f"a header of {wanted} bytes", found=f"one of {size}", hint=_RESTORE)
    data = bytearray(min(size, TEXT))
    store.read_into(name, 0, memoryview(data))
    if size > TEXT:
        check_no_zeros(data[8:], 8, label)
    for at in range(TEXT, size, TEXT):
        part = bytearray(min(size - at, TEXT))
        store.read_into(name, at, memoryview(part))
        check_no_zeros(part, at, label)
        data += part
    return data


def open_shard(
    store: Store, index: Index, file: File, size: int | None, *, whole: bool = True, keep: bool = False
) -> Opened:
    """Reads a shard's header and checks that it is the file that the index means.

    Args:
        size: the file's, in bytes; None where it is missing.
        whole: refuses a file that was cut short or has grown, even where its header is intact.
        keep: keeps the header, for who wants its entries too.

    Raises:
        CorruptError: missing, cut short, grown, or of another save or rank; names the leaves and the bytes.
    """
    expected = file.header + file.nbytes
    if size is None:
        where = _named(store, index, file, 0, expected)
        raise CorruptError(where, expected="a shard", found="no such file", hint=_RESTORE)
    if whole and size != expected:
        first, last = min(size, expected), max(size, expected)
        found = "are missing" if size < expected else "are too many"
        raise CorruptError(
            _named(store, index, file, first, last),
            expected=f"{expected} bytes",
            found=f"{size}: {first}:{last} of the file {found}",
            hint=_RESTORE,
        )
    try:
        data = _header_data(store, file.name, size, file.header)
        header = decode_header(data, f"{store.url}/{file.name}", entries=False)
    except CheckpointError as error:
        raise type(error)(
            _named(store, index, file, 0, file.header),
            expected=error.expected,
            found=f"{error.found}, in bytes 0:{file.header} of the file",
            hint=error.hint or _RESTORE,
        ) from error
    blocks = block_count(file.nbytes, header.block)
    found = (header.save_id, header.rank, header.part, header.stream, len(data), len(header.hashes))
    wanted = (index.save_id, file.rank, file.part, file.stream, file.header, blocks)
    if found != wanted:
        raise CorruptError(
            _named(store, index, file, 0, file.header),
            expected="save {}, rank {}, part {}, at {}, header {}, {} checksums".format(*wanted),
            found="save {}, rank {}, part {}, at {}, header {}, {} checksums".format(*found)
            + f", in bytes 0:{file.header} of the file",
            hint="The file belongs to another save; restore the right one from a copy",
        )
    return Opened(file, header.hashes, header.block, index, bytes(data) if keep else b"")


def _check_blocks(store: Store, opened: Opened, start: int, data: memoryview) -> None:
    """Compares checksums of data that starts at a border of a block."""
    for at in range(0, len(data), opened.block):
        block = data[at : at + opened.block]
        _compare(store, opened, start + at, len(block), hash_block(block))


def _check_parts(store: Store, opened: Opened, start: int, parts: Sequence[memoryview]) -> None:
    """The same of data that lies in several places."""
    if len(parts) == 1:
        _check_blocks(store, opened, start, parts[0])
        return
    at = start
    block: list[memoryview] = []
    need = opened.block
    for part in parts:
        while len(part):
            block.append(part[:need])
            part = part[need:]
            need -= len(block[-1])
            if not need:
                _compare(store, opened, at, opened.block, hash_parts(block))
                at, block, need = at + opened.block, [], opened.block
    if block:
        _compare(store, opened, at, opened.block - need, hash_parts(block))


def matches(opened: Opened, start: int, block: memoryview) -> bool:
    """Whether a block, which starts at `start` in the data area, is as it was saved."""
    return hash_block(block) == opened.hashes[start // opened.block]


def _compare(store: Store, opened: Opened, start: int, nbytes: int, found: int) -> None:
    if found != opened.hashes[start // opened.block]:
        first = start + opened.file.header
        raise CorruptError(
            _named(store, opened.index, opened.file, first, first + nbytes),
            expected="bytes that match their checksum",
            found=f"changed bytes in {first}:{first + nbytes} of the file",
            hint="Restore the file from a copy, or load with on_corrupt='skip'",
        )


def _named(store: Store, index: Index, file: File, first: int, last: int) -> str:
    """A file, after the leaves with bytes in a stretch of it, for an error."""
    paths = [index.entries[number].path or "<root>" for number in leaves_in_range(index, file, first, last)]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"{', '.join(paths[:3])}{more}: {store.url}/{file.name}" if paths else f"{store.url}/{file.name}"


class ByteRange(msgspec.Struct, frozen=True):
    """Bytes of a shard's data area, rounded out to what is read to have them verified."""

    opened: Opened
    low: int
    high: int


def stretch_of(opened: Opened, start: int, stop: int, *, verify: bool) -> ByteRange:
    """The stretch to read for bytes `start:stop` of a data area."""
    step = opened.block if verify else PAGE
    return ByteRange(opened, start // step * step, min(-(-stop // step) * step, opened.file.nbytes))


def read_stretch(store: Store, stretch: ByteRange, out: memoryview, *, verify: bool, shared: bool = False) -> None:
    """Reads it, verified if asked."""
    file = stretch.opened.file
    store.read_into(file.name, file.header + stretch.low, out, shared=shared)
    if verify:
        _check_blocks(store, stretch.opened, stretch.low, out)


class Shards:
    """The shards of one checkpoint, opened (header read and checked) when first needed.

    Args:
        whole: refuses shards that are cut short, even where what is wanted of them is there.
    """

    def __init__(self, store: Store, index: Index, recorder: Recorder, *, verify: bool, whole: bool = True) -> None:
        self.store, self.index, self.verify, self.recorder, self.whole = store, index, verify, recorder, whole
        self._lending = store if isinstance(store, SupportsMappedReads) else None
        self._opened: dict[str, Opened] = {}
        self._sizes: dict[str, int] | None = None

    def locate(self, rank: int, start: int, stop: int, path: str) -> tuple[Opened, int]:
        """The shard with bytes `start:stop` of a rank's stream, and where they start in its data area."""
        file, position = self.index.locate(rank, start, stop, path)
        if file.name not in self._opened:
            self._opened[file.name] = self._open(file)
        return self._opened[file.name], position - file.header

    def _open(self, file: File) -> Opened:
        if self._sizes is None:
            self._sizes = self.store.sizes()
        return open_shard(self.store, self.index, file, self._sizes.get(file.name), whole=self.whole)

    def read(self, stretch: ByteRange, out: memoryview, *, shared: bool = False) -> None:
        """Reads a stretch, verified if that is asked of these shards, leaving a span."""
        begin = self.recorder.now()
        read_stretch(self.store, stretch, out, verify=self.verify, shared=shared)
        self.recorder.add("read", begin, self.recorder.now(), len(out))

    @contextlib.contextmanager
    def lent(self, stretch: ByteRange, *, fetch: bool) -> Iterator[memoryview | None]:
        """A stretch where it lies, verified like one that is read, while the body runs; None if not at hand."""
        if self._lending is None:
            yield None
            return
        begin = self.recorder.now()
        file = stretch.opened.file
        start, nbytes = file.header + stretch.low, stretch.high - stretch.low
        with self._lending.mapped(file.name, start, nbytes, fetch=fetch) as memory:
            if memory is not None:
                if self.verify:
                    _check_blocks(self.store, stretch.opened, stretch.low, memory)
                self.recorder.add("read", begin, self.recorder.now(), len(memory))
            yield memory

    def read_parts(self, stretch: ByteRange, parts: Sequence[memoryview]) -> bool:
        """Reads a stretch straight to where it belongs, if its bytes are at hand; False if not."""
        begin = self.recorder.now()
        opened = stretch.opened
        if not self.store.read_parts(opened.file.name, opened.file.header + stretch.low, parts):
            return False
        if self.verify:
            _check_parts(self.store, opened, stretch.low, parts)
        self.recorder.add("read", begin, self.recorder.now(), stretch.high - stretch.low)
        return True


def verify_shard(store: Store, opened: Opened, start: int = 0, stop: int | None = None) -> int:
    """Compares every checksum of a shard, or those of bytes `start:stop` of its data; returns the bytes that were read.

    Raises:
        CorruptError: naming the file and the bytes.
    """
    step = STEP // opened.block * opened.block or opened.block
    whole = stretch_of(
        opened, start, opened.file.nbytes if stop is None else min(stop, opened.file.nbytes), verify=True
    )
    buffer = aligned_buffer(step, huge=True)
    for low in range(whole.low, whole.high, step):
        stretch = ByteRange(opened, low, min(low + step, whole.high))
        read_stretch(store, stretch, buffer[: stretch.high - stretch.low], verify=True)
    return max(whole.high - whole.low, 0)
