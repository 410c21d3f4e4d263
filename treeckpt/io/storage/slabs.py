"""Fresh memory for what a load makes: carved from slabs in huge pages.

Touching new memory in pages of 4 KiB costs as much as reading it from the device. Arrays of a few megabytes are too
small to be given huge pages one by one, so they share slabs; a slab is freed with the last array in it.
"""

from __future__ import annotations

from .memory import aligned_buffer

__all__ = ["Slabs"]

SLAB = 64 << 20
"""Bytes of address space of one slab; of memory it takes what is touched."""
ALIGN = 64


class Slabs:
    """Hands out memory, one piece after the other."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Zeroed memory, aligned to 64 bytes, which no other piece shares."""
        if nbytes >= SLAB // 2:
            return aligned_buffer(nbytes, huge=True)
        if nbytes > len(self._rest):
            self._rest = aligned_buffer(SLAB, huge=True)
        piece, self._rest = self._rest[:nbytes], self._rest[-(-nbytes // ALIGN) * ALIGN :]
        return piece
