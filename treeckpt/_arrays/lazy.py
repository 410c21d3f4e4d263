"""Arrays that are read while they are saved, box by box, from another file for instance.

Such a leaf can be saved, by one rank or by several that hold the same one, without being in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region
from .._core.tree.spec import ArraySpec
from .base import ArraySource, Box, SourcePiece, Storage


class LazyArray:
    """An array given by its spec and by a function that reads any region of it.

    Args:
        read: returns a region's elements, of raw dtype and in the region's shape.
        storage: its range of some address space: lazy arrays that overlap there are aliases or views of each other.
            Choose addresses that no memory has.
    """

    __slots__ = ("_read", "spec", "storage")

    def __init__(self, spec: ArraySpec, read: Callable[[Region], np.ndarray], storage: Storage | None = None) -> None:
        self.spec, self._read, self.storage = spec, read, storage

    def __repr__(self) -> str:
        return f"Lazy({self.spec.dtype}, {self.spec.shape})"

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return math.prod(self.spec.shape) * dtype_of(self.spec.dtype).itemsize

    def read(self, region: Region) -> np.ndarray:
        """Returns the elements of a region, of raw dtype."""
        data = self._read(region)
        assert data.shape == region.shape, "a reader returns the region that was requested"
        return data


class _LazyReader:
    """Reads boxes of a lazy array, for a source."""

    def __init__(self, lazy: LazyArray) -> None:
        self._lazy = lazy

    def read(self, box: Box) -> np.ndarray:
        pairs = [side.indices(n) for side, n in zip(box, self._lazy.spec.shape, strict=True)]
        return self._lazy.read(Region(tuple(a for a, _, _ in pairs), tuple(max(0, b - a) for a, b, _ in pairs)))


def lazy_source(leaf: LazyArray) -> ArraySource:
    """Describes a lazy array to save."""
    return ArraySource(leaf.spec, None, (SourcePiece(Region.whole(leaf.spec.shape), _LazyReader(leaf)),), leaf.storage)
