"""Verification of the CRC-32 of archive entries, once for each entry.

The CRC of an entry that is read as a whole (`expect_whole`) is computed while it is read: each range has its own CRC,
in any order and from any thread; when no range is left they are combined by arithmetic over GF(2), as zlib's
crc32_combine does. Any other entry is read completely once before its first bytes are returned. A CRC of zero is not
compared: torch writes it when checksums are disabled (`set_crc32_options`).
"""

from __future__ import annotations

import bisect
import threading
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..arrays.lazy import LazyArray
from ..errors import CorruptError
from ..io.comm.collective import all_gather
from ..io.comm.comm import Comm
from .files import FileRange

__all__ = ["ArchiveStorages", "EntryChecksum", "combine_crcs"]

ADDRESSES = 1 << 60
"""Where addresses begin that stand for bytes in files: no memory is there."""
BLOCK = 1 << 20
"""Bytes that are read at a time where an entry is read through."""
_ONE, _POLYNOMIAL = 1 << 31, 0xEDB88320
"""Polynomials over GF(2) have their lowest power in the highest bit."""


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of CRC-32."""
    product, mask = 0, _ONE
    while mask:
        if a & mask:
            product ^= b
        mask >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _shift(nbytes: int) -> int:
    """What a CRC is multiplied with when so many bytes follow: x to the power of their bits."""
    found, power, bits = _ONE, _ONE >> 1, 8 * nbytes
    while bits:
        if bits & 1:
            found = _times(power, found)
        power = _times(power, power)
        bits >>= 1
    return found


def combine_crcs(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of stretches that follow each other, of (bytes, CRC-32) of each."""
    crc = 0
    for nbytes, own in parts:
        crc = _times(_shift(nbytes), crc) ^ own
    return crc


class EntryChecksum:
    """An entry of an archive, whose bytes are compared with its CRC-32 when they are read.

    Args:
        crc: as it stands in the archive; 0 for none.
        name: of the entry.
    """

    def __init__(self, window: FileRange, crc: int, name: str) -> None:
        self.window, self.crc, self.name = window, crc, name
        self.leaf = ""
        """The path of a leaf that it holds, for errors."""
        self._sound = not crc or not window.size
        self._whole = False
        self._lock = threading.Lock()
        self._taken: list[tuple[int, int]] = []
        """Stretches that were or are being summed up, in order, apart from each other."""
        self._left = window.size
        self._crcs: dict[int, tuple[int, int]] = {}
        """By where a stretch starts, its bytes and CRC."""

    def expect_whole(self) -> None:
        """Promises that each of its bytes will be read by this process."""
        self._whole = True

    def read(self, start: int, size: int) -> np.ndarray:
        """Bytes of it, as uint8[size].

        Raises:
            CorruptError: bytes of it have changed.
        """
        if not self._sound and not self._whole:
            self.check()
        data = self.window.read(start, size)
        if not self._sound:
            self._take(start, data)
        return data

    def check(self) -> None:
        """Reads it through, unless it is known to be sound.

        Raises:
            CorruptError: bytes of it have changed.
        """
        with self._lock:
            if self._sound:
                return
            crc = 0
            block = np.empty(min(BLOCK, self.window.size), np.uint8)
            for start in range(0, self.window.size, BLOCK):
                part = block[: min(BLOCK, self.window.size - start)]
                self.window.read_into(start, part, shared=True)
                crc = zlib.crc32(part.data, crc)
            self._compare(crc)

    @property
    def is_owing(self) -> bool:
        """Whether it was to be read as a whole, and was not yet."""
        return self._whole and not self._sound

    def pass_over(self) -> None:
        """It was found to be sound elsewhere."""
        self._sound = True

    def _take(self, start: int, data: np.ndarray) -> None:
        """Sums up what of this stretch was not yet."""
        with self._lock:
            gaps = self._claim(start, start + len(data))
        made = {low: (high - low, zlib.crc32(data[low - start : high - start].data)) for low, high in gaps}
        with self._lock:
            self._crcs |= made
            self._left -= sum(nbytes for nbytes, _ in made.values())
            if not self._left and not self._sound:
                self._compare(combine_crcs(part for _, part in sorted(self._crcs.items())))
                self._crcs.clear()

    def _claim(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of a stretch that nobody has taken, now taken."""
        touching = [taken for taken in self._taken if taken[0] <= stop and taken[1] >= start]
        edges = [start, *(edge for taken in touching for edge in taken), stop]
        apart = [taken for taken in self._taken if taken not in touching]
        self._taken = sorted([*apart, (min(edges), max(edges))])
        return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]

    def _compare(self, crc: int) -> None:
        if crc != self.crc:
            where = f"{self.leaf}: " if self.leaf else ""
            without = f", or leave the leaf out (exclude={self.leaf!r})" if self.leaf else ""
            raise CorruptError(
                f"{where}{self.window.label}",
                expected=f"CRC-32 {self.crc:08x} of the entry {self.name[:80]!r}, as the archive says",
                found=f"{crc:08x}",
                hint=f"The file was damaged after it was written: get it anew from where it came from{without}. "
                "torch.load compares no checksums, and would give the changed bytes",
            )
        self._sound = True


class ArchiveStorages:
    """The storages of one conversion: their addresses, and the checksums of those that are entries of archives.

    Addresses make ties and views of one storage recognizable.

    Args:
        alone: whether this process reads all that is converted.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.alone = alone
        self._next = ADDRESSES
        self._sums: dict[tuple[str, int], EntryChecksum] = {}
        self._lock = threading.Lock()
        self._starts: list[int] = []
        """Addresses of entries, which grow."""
        self._entries: list[EntryChecksum] = []

    def take(self, nbytes: int) -> int:
        """The first address of a stretch that is no other's."""
        start = self._next
        self._next += max(nbytes, 1) + 4096
        return start

    def sum_of(self, window: FileRange, crc: int, name: str) -> EntryChecksum:
        """The sum of an entry: the same, however often its archive is opened."""
        return self._sums.setdefault((window.label, window.start), EntryChecksum(window, crc, name))

    def take_entry(self, entry: EntryChecksum) -> int:
        """The first address of a stretch for all of an entry."""
        with self._lock:  # archives may be opened while others are read
            address = self.take(entry.window.size)
            self._starts.append(address)
            self._entries.append(entry)
            return address

    def note(self, path: str, leaf: Any) -> EntryChecksum | None:
        """Learns that a leaf will be read; the entry that it shows, if it shows one."""
        storage = leaf.storage if isinstance(leaf, LazyArray) else None
        entry = self._at(storage.address) if storage is not None else None
        if storage is None or entry is None:
            return None
        entry.leaf = entry.leaf or path
        whole = storage.strides is None and storage.nbytes == entry.window.size
        if self.alone and whole:
            entry.expect_whole()
        return entry

    def owing(self) -> list[str]:
        """The leaves of entries that were to be read as a whole, and were not."""
        return [entry.leaf for entry in self._entries if entry.is_owing]

    def _at(self, address: int) -> EntryChecksum | None:
        """Whose stretch an address lies in."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            found = at >= 0 and address - self._starts[at] < self._entries[at].window.size
            return self._entries[at] if found else None

    def check(self, leaves: Sequence[tuple[str, Any]], comm: Comm, topic: str) -> None:
        """Sees to it that what is about to be read of some leaves, by all ranks together, will be compared.

        What this process reads as a whole is compared meanwhile. Several ranks, of which each will read a part, share
        the entries out and read them through.

        Raises:
            RankError: bytes have changed; on every rank.
        """
        met = {id(entry): entry for path, leaf in leaves if (entry := self.note(path, leaf)) is not None}
        if not self.alone:
            shared = list(met.values())[comm.rank :: comm.size]
            all_gather(comm, f"checksums of {topic}", lambda: sum(entry.check() or 1 for entry in shared), int)
            for entry in met.values():
                entry.pass_over()
