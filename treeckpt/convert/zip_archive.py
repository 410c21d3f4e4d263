"""Zip archives as torch.save writes them: finding the stored entries of one, and laying out a new one.

Entries are stored, not compressed, so each is a contiguous range of the file. In a new archive the place of every
byte is known before the first is written; checksums come last, each into its place.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import CorruptError, FormatError
from .files import FileRange

MAX_ENTRIES = 1 << 22
ALIGN = 64
"""Bytes; as torch aligns data, so that it can be mapped."""
_DATE = (0, 0x21)  # 1980-01-01


class _RangeFile:
    """A window as zipfile reads it."""

    def __init__(self, window: FileRange) -> None:
        self._window, self._at = window, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._window.size)[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._window.size - self._at)
        count = left if count < 0 else min(count, left)
        data = self._window.read(self._at, count).tobytes() if count else b""
        self._at += count
        return data


class ZipEntry(msgspec.Struct, frozen=True):
    """An entry of an archive that is read."""

    window: FileRange
    """Its contents."""
    crc: int
    """CRC-32 of these, as the archive's directory has it."""


def find_entries(window: FileRange) -> dict[str, ZipEntry]:
    """Finds the contents of a zip archive's entries, by name.

    Raises:
        FormatError: no zip archive, or one with compressed or encrypted entries.
        CorruptError: entries that do not lie in it.
    """
    reader: Any = _RangeFile(window)
    try:
        with zipfile.ZipFile(reader) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, struct.error, EOFError) as error:
        raise FormatError(
            window.label,
            expected="a zip archive, as torch.save writes it",
            found=f"{error}"[:200] or "none",
            hint="It is damaged, or older than torch 1.6: load it there and save it anew",
        ) from error
    if len(infos) > MAX_ENTRIES:
        raise FormatError(window.label, expected=f"at most {MAX_ENTRIES} entries", found=f"{len(infos)}")
    return {info.filename: ZipEntry(_contents(window, info), info.CRC) for info in infos}


def _contents(window: FileRange, info: zipfile.ZipInfo) -> FileRange:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise FormatError(
            window.label, expected="entries that are stored as they are", found=f"{info.filename[:80]!r}, packed"
        )
    head = window.read(info.header_offset, 30).tobytes()
    if head[:4] != b"PK\3\4":
        raise CorruptError(window.label, expected=f"entry {info.filename[:80]!r}", found="no such entry at its place")
    name, extra = struct.unpack_from("<HH", head, 26)
    return window.within(info.header_offset + 30 + name + extra, info.file_size)


class ZipLayout(msgspec.Struct, frozen=True):
    """A new archive: bytes that are known, by their place, and the places of what is not."""

    nbytes: int
    literals: tuple[tuple[int, bytes], ...]
    starts: dict[str, int]
    """Of each entry's contents."""
    crcs: dict[str, tuple[int, int]]
    """Where each entry's checksum goes, twice."""


def lay_out(entries: Mapping[str, bytes | int]) -> ZipLayout:
    """Lays out the archive of some entries, in their order.

    Args:
        entries: by name the contents, or the number of bytes that are written later.
    """
    literals: list[tuple[int, bytes]] = []
    starts: dict[str, int] = {}
    heads: list[tuple[str, int, int, int]] = []
    at = 0
    for text, data in entries.items():
        name = text.encode()
        nbytes, crc = (data, 0) if isinstance(data, int) else (len(data), zlib.crc32(data))
        gap = -(at + 30 + len(name) + 20 + 4) % ALIGN
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) + struct.pack("<HH", 0x4246, gap) + b"Z" * gap
        head = b"PK\3\4" + _common(name, crc, extra)[2:] + name + extra
        literals.append((at, head))
        heads.append((text, at, nbytes, crc))
        at += len(head)
        starts[text] = at
        if not isinstance(data, int):
            literals.append((at, data))
        at += nbytes
    directory = at
    crcs: dict[str, tuple[int, int]] = {}
    for text, head, nbytes, crc in heads:
        name, extra = text.encode(), struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, head)
        record = b"PK\1\2" + _common(name, crc, extra) + struct.pack("<HHHII", 0, 0, 0, 0, 0xFFFFFFFF) + name + extra
        crcs[text] = head + 14, at + 16
        literals.append((at, record))
        at += len(record)
    literals.append((at, _end(len(entries), directory, at)))
    return ZipLayout(at + len(literals[-1][1]), tuple(literals), starts, crcs)


def _common(name: bytes, crc: int, extra: bytes) -> bytes:
    """Returns the common fields of an entry's header and its directory record; sizes are in the extra field."""
    sizes = struct.pack("<III", crc, 0xFFFFFFFF, 0xFFFFFFFF)
    return struct.pack("<HHHHHH", 45, 45, 0, 0, *_DATE) + sizes + struct.pack("<HH", len(name), len(extra))


def _end(count: int, start: int, stop: int) -> bytes:
    size = stop - start
    wide = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, start)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, stop, 1)
    few = min(count, 0xFFFF)
    return wide + locator + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, few, few, 0xFFFFFFFF, 0xFFFFFFFF, 0)
