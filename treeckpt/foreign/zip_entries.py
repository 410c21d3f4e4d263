"""Finds the entries of zip archives as torch.save writes them: not compressed, so each is a range of the file."""

from __future__ import annotations

import struct
import zipfile
from typing import Any

import msgspec

from ..errors import CorruptError, FormatError
from .files import FileRange

MAX_ENTRIES = 1 << 22


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
