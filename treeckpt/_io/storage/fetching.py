"""What stores that are far take and give: they fetch many ranges at once, because each request takes long."""

from __future__ import annotations

from collections.abc import Callable

FETCH_MEMORY = 512 << 20
"""Bytes that are on their way from a store that fetches, by default: 64 requests of 8 MiB."""

FileRange = tuple[str, int, int]
"""(name, offset, bytes) of a part of a file."""
Consume = Callable[[int, int, memoryview, int | None], object]
"""Takes the number of a range, where in it bytes start, the bytes, and the size of the whole file if that is known.

The bytes of one range come in order and one call at a time, those of several ranges from several threads. They last
until the call ends. What lies behind the end of the file is left out; for a range without any byte in the file one call
has no bytes.
"""
