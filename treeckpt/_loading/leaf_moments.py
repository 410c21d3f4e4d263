"""Computes the statistics of every array of a checkpoint from the bytes of its shards, in whatever order they are read.

Memory follows the number of arrays and chunks. Of an element that lies in two reads, the first part is kept until the
second one comes.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from functools import cached_property

import numpy as np

from .._core.format.byte_map import locate_chunks
from .._core.format.records import AliasRecord, File, Index
from .._core.sharding.dtypes import dtype_of
from .._inspect.numbers import Moments, merged, moments_of
from .._threads import ThreadPool
from ..errors import TreeckptError

THREADS = 2
"""Threads that compute, beside one that reads and compares: a disk is rarely faster than they are."""
SHARE = 1 << 20
"""Bytes that one thread takes, at least."""
Extents = tuple[list[int], list[int], list[int]]
"""Of a shard's data area, by offset: where each chunk starts, where it ends, and the number of its leaf."""


class LeafMoments:
    """The statistics of the arrays of an index; under `PerRank` those of all ranks together."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._pool = ThreadPool(THREADS, "treeckpt-moments")
        self._found: dict[int, Moments | None] = {}
        self._parts: dict[tuple[str, int], tuple[bytearray, int]] = {}
        """Elements of which bytes are missing: by file and offset, the bytes, and how many of them are there."""

    @cached_property
    def _extents(self) -> dict[str, Extents]:
        found: dict[str, list[tuple[int, int, int]]] = {}
        for leaf in self._index.entries:
            if leaf.spec is None or isinstance(leaf.record, AliasRecord):
                continue
            self._found[leaf.number] = moments_of(np.empty(0, np.uint8), leaf.spec.dtype)
            try:
                chunks = locate_chunks(self._index, leaf)
            except TreeckptError:  # the verification says so
                return {}
            for chunk in chunks:
                header = chunk.file.header
                found.setdefault(chunk.file.name, []).append((chunk.start - header, chunk.stop - header, leaf.number))
        columns = {name: zip(*sorted(rows), strict=True) for name, rows in found.items()}
        return {name: (list(starts), list(stops), list(numbers)) for name, (starts, stops, numbers) in columns.items()}

    def clear(self) -> None:
        """Forgets what was added: everything is read again."""
        self._found, self._parts = {}, {}
        vars(self).pop("_extents", None)

    def add(self, file: File, start: int, data: memoryview) -> None:
        """Takes bytes of a shard, each of which may be given only once.

        Args:
            start: where they start in the data area.
        """
        with self._lock:
            extents = self._extents.get(file.name, ([], [], []))
        parts = range(0, len(data), max(-(-len(data) // THREADS), SHARE))
        step = parts.step
        for done in self._pool.map(
            lambda low: self._add(file.name, extents, start + low, data[low : low + step]), parts
        ):
            assert done is None, "an error is raised here"

    def _add(self, name: str, extents: Extents, start: int, data: memoryview) -> None:
        starts, stops, numbers = extents
        stop = start + len(data)
        for at in range(bisect_right(stops, start), len(starts)):
            if starts[at] >= stop:
                break
            low, high = max(start, starts[at]), min(stop, stops[at])
            self._add_piece(numbers[at], name, starts[at], low, data[low - start : high - start])

    def _add_piece(self, number: int, name: str, first: int, at: int, piece: memoryview) -> None:
        """Adds bytes of one chunk.

        Args:
            first: where the chunk starts in the data area.
            at: where the bytes start there.
        """
        spec = self._index.entries[number].spec
        assert spec is not None, "a chunk is one of an array"
        width = dtype_of(spec.dtype).itemsize
        inside = (at - first) % width
        head = min(-inside % width, len(piece))
        tail = (len(piece) - head) % width
        whole = piece[head : len(piece) - tail]
        elements = [whole] if len(whole) else []
        elements += self._join(name, at - inside, width, inside, piece[:head])
        elements += self._join(name, at + len(piece) - tail, width, 0, piece[len(piece) - tail :])
        for data in elements:
            found = moments_of(np.frombuffer(data, np.uint8), spec.dtype)
            with self._lock:
                known = self._found[number]
                self._found[number] = None if known is None or found is None else merged(known, found)

    def _join(self, name: str, element: int, width: int, at: int, piece: memoryview) -> list[bytearray]:
        """Adds bytes of an element from its byte `at` on; returns the element if it is complete now."""
        if not len(piece):
            return []
        with self._lock:
            data, there = self._parts.pop((name, element), (bytearray(width), 0))
            data[at : at + len(piece)] = piece
            if there + len(piece) == width:
                return [data]
            self._parts[name, element] = data, there + len(piece)
            return []

    def found(self) -> dict[int, Moments]:
        """Returns the statistics of all arrays of numbers, by leaf number."""
        return {number: one for number, one in sorted(self._found.items()) if one is not None}
