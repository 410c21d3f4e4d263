"""Lays out a zip archive as torch.save writes it.

The place of every byte is known before the first is written; checksums come last, each into its place.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import msgspec

ALIGN = 64
"""Bytes; as torch aligns data, so that it can be mapped."""
_DATE = (0, 0x21)  # 1980-01-01


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
