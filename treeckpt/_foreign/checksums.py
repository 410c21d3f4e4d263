"""Verification of the CRC-32 of archive entries, once for each entry.

The CRC of an entry that is read as a whole (`read_whole`) is computed while it is read: each range has its own CRC,
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

from .._arrays.base import LazyArray
from .._io.comm.collective import all_gather
from .._io.comm.comm import Comm
from ..errors import CorruptError
from .files import FileRange, new_address

CHECK_BLOCK_NBYTES = 1 << 20
"""Bytes that are read at a time where an entry is read through."""
_ONE, _POLYNOMIAL = 1 << 31, 0xEDB88320
"""Polynomials over GF(2) have their lowest power in the highest bit."""


def _times(a: int, b: int) -> int:
    """Returns the product of two polynomials, modulo that of CRC-32."""
    product, mask = 0, _ONE
    while mask:
        if a & mask:
            product ^= b
        mask >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _shift(nbytes: int) -> int:
    """Returns the factor of a CRC that so many bytes follow: x to the power of their bits."""
    factor, power, bits = _ONE, _ONE >> 1, 8 * nbytes
    while bits:
        if bits & 1:
            factor = _times(power, factor)
        power = _times(power, power)
        bits >>= 1
    return factor


def _start_of(entry: EntryChecksum) -> int:
    return entry.window.start


def combine_crcs(parts: Iterable[tuple[int, int]]) -> int:
    """Returns the CRC-32 of consecutive ranges, given (bytes, CRC-32) of each."""
    crc = 0
    for nbytes, own in parts:
        crc = _times(_shift(nbytes), crc) ^ own
    return crc


class EntryChecksum:
    """An entry of an archive, whose bytes are compared with its CRC-32 when they are read.

    Args:
        crc: as the archive has it; 0 for none.
    """

    def __init__(self, window: FileRange, crc: int, name: str) -> None:
        self.window, self.crc, self.name = window, crc, name
        self.address = new_address(window.size)
        """The first address of its bytes, by which arrays in it are known."""
        self.is_storage = False
        """Whether arrays are in it."""
        self.leaf = ""
        """The path of a leaf in it, for errors."""
        self.sound = not crc or not window.size
        """Whether its bytes need not be compared any more."""
        self.read_whole = False
        """Whether this process reads each of its bytes, so that they are compared meanwhile."""
        self._lock = threading.RLock()
        self._taken: list[tuple[int, int]] = []
        """The disjoint ranges, in order, whose CRCs were or are being computed."""
        self._left = window.size
        self._crcs: dict[int, tuple[int, int]] = {}
        """The number of bytes and the CRC of each range that was read, by its start."""

    def read(self, start: int, size: int) -> np.ndarray:
        """Returns bytes of it, as uint8[size].

        Raises:
            CorruptError: bytes of it have changed.
        """
        if not self.sound and not self.read_whole:
            self.check()
        data = self.window.read(start, size)
        if not self.sound:
            self.take(start, data)
        return data

    @property
    def is_read(self) -> bool:
        """Whether bytes of it were read since it was opened."""
        return self._left < self.window.size

    def check(self) -> None:
        """Reads and compares all of it, unless it is known to be sound.

        Raises:
            CorruptError: bytes of it have changed.
        """
        with self._lock:
            if self.sound:
                return
            crc = 0
            block = np.empty(min(CHECK_BLOCK_NBYTES, self.window.size), np.uint8)
            for start in range(0, self.window.size, CHECK_BLOCK_NBYTES):
                part = block[: min(CHECK_BLOCK_NBYTES, self.window.size - start)]
                # through the page cache: the arrays are read from these bytes next
                self.window.read_into(start, part, shared=True)
                crc = zlib.crc32(part.data, crc)
            self._compare(crc)

    def take(self, start: int, data: np.ndarray) -> None:
        """Computes the CRCs of the parts of a range that were not claimed before.

        Args:
            start: where in the entry the bytes start; they may begin before it, and end behind it.

        Raises:
            CorruptError: no part of the entry is left, and bytes of it have changed.
        """
        first, last = max(-start, 0), min(len(data), self.window.size - start)
        if first >= last:
            return
        start, data = start + first, data[first:last]
        with self._lock:
            gaps = self._claim(start, start + len(data))
        # without the lock: the CRCs of several ranges are computed at the same time
        made = {low: (high - low, zlib.crc32(data[low - start : high - start].data)) for low, high in gaps}
        with self._lock:
            self._crcs |= made
            self._left -= sum(nbytes for nbytes, _ in made.values())
            if not self._left and not self.sound:
                self._compare(combine_crcs(part for _, part in sorted(self._crcs.items())))
                self._crcs.clear()

    def _claim(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Claims the parts of a range that are not claimed yet, and returns them."""
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
        self.sound = True


class ArchiveChecksums:
    """The checksums of entries of archives, of which arrays are storages.

    Args:
        alone: whether this process reads all that is converted.
    """

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self._sums: dict[tuple[str, int], EntryChecksum] = {}
        self._lock = threading.RLock()
        self._entries: list[EntryChecksum] = []
        """All entries, in the order of their addresses."""
        self._by_file: dict[str, list[EntryChecksum]] = {}
        """The entries that have a CRC, by the URL of their file and in its order."""

    def sum_of(self, window: FileRange, crc: int, name: str) -> EntryChecksum:
        """Returns the checksum of an entry: the same, however often its archive is opened."""
        label = window.label
        with self._lock:
            entry = self._sums.get((label, window.start))
            if entry is None:
                entry = self._sums[label, window.start] = EntryChecksum(window, crc, name)
                self._entries.append(entry)
                if not entry.sound:
                    bisect.insort(self._by_file.setdefault(label, []), entry, key=_start_of)
            return entry

    def take_range(self, file: str, start: int, data: memoryview) -> None:
        """Computes the CRCs of entries of a file from bytes of it that were read, whatever else these hold.

        Raises:
            CorruptError: the last bytes of an entry were among them, and bytes of it have changed.
        """
        with self._lock:
            entries = self._by_file.get(file, [])
            low = max(bisect.bisect_right(entries, start, key=_start_of) - 1, 0)
            high = bisect.bisect_left(entries, start + len(data), key=_start_of)
            met = [entry for entry in entries[low:high] if not entry.sound]
        for entry in met:
            entry.take(start - entry.window.start, np.frombuffer(data, np.uint8))

    def unverified(self, nbytes: int) -> int:
        """Returns how many of so many bytes of arrays that were read have been compared with no CRC-32."""
        entries = [entry for entry in self._entries if entry.is_storage]
        if entries and all(entry.crc and (entry.sound or not entry.is_read) for entry in entries):
            return 0
        return max(0, nbytes - sum(entry.window.size for entry in entries if entry.crc and entry.sound))

    def note(self, path: str, leaf: Any) -> EntryChecksum | None:
        """Registers a leaf that will be read; returns the entry that it is in, if any."""
        storage = leaf.storage if isinstance(leaf, LazyArray) else None
        if storage is None:
            return None
        with self._lock:  # archives may be opened while others are read
            number = bisect.bisect_right(self._entries, storage.address, key=lambda entry: entry.address) - 1
        entry = self._entries[number] if number >= 0 else None
        if entry is None or storage.address - entry.address >= entry.window.size:
            return None
        entry.leaf = entry.leaf or path
        # an array with less than the whole entry leaves bytes of it unread, and its CRC unknown
        if self.alone and storage.strides is None and storage.nbytes == entry.window.size:
            entry.read_whole = True
        return entry

    def all_read(self) -> bool:
        """Returns whether all entries that this process was to read as a whole are read and compared."""
        return all(entry.sound for entry in self._entries if entry.read_whole)

    def check(self, leaves: Sequence[tuple[str, Any]], comm: Comm, topic: str) -> None:
        """Ensures that the bytes of leaves that all ranks together are about to read are compared.

        What one process reads as a whole is compared meanwhile. Several ranks, of which each reads a part of them,
        divide the entries among themselves and read them in advance.

        Raises:
            RankError: bytes have changed; on every rank.
        """
        entries = {id(entry): entry for path, leaf in leaves if (entry := self.note(path, leaf)) is not None}
        if not self.alone:
            mine = list(entries.values())[comm.rank :: comm.size]
            # each answers with a number: only the error of a rank says anything
            all_gather(comm, f"checksums of {topic}", lambda: sum(entry.check() or 1 for entry in mine), int)
            for entry in entries.values():
                entry.sound = True
