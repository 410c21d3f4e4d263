"""What an index says that arrays take, counted before memory is allocated for it and compared with the files there."""

from __future__ import annotations

import math

from ..core.format.check_index import FREE_CHUNKS, MIN_ENTRY_NBYTES
from ..core.format.chunks import WholeChunk, count_chunks
from ..core.format.records import AliasRecord, ArrayRecord, Index, Leaf
from ..core.sharding.dtypes import dtype_of
from ..core.tree.spec import ArraySpec
from ..errors import CorruptError, MismatchError
from ..io.storage.shard_reader import open_shard
from ..io.storage.store import Store

__all__ = ["Claims"]

VIEWS = 64 << 20
"""Bytes that views may take as arrays of their own, whatever files there are."""
TIMES = 16
"""Times the bytes of all files that they may take beyond those."""


class Claims:
    """The bytes and chunks that one load asks for.

    Args:
        whole: whether a shard that is cut short is named even where what is wanted of it is there.
    """

    def __init__(self, store: Store, index: Index, *, whole: bool) -> None:
        self.store, self.index, self.whole = store, index, whole
        self._claimed = self._chunks = self._views = self._present = 0
        self._sizes: dict[str, int] | None = None

    def take(self, path: str, leaf: Leaf) -> None:
        """Counts what the index says an array takes, before memory is allocated for it.

        Raises:
            CorruptError: more than all the shards that are there.
        """
        spec, record = leaf.spec, leaf.record
        if spec is None or type(record) is AliasRecord:
            return
        if self._sizes is None:
            self._sizes = self.store.sizes()
            self._present = sum(self._sizes.get(file.name, 0) for file in self.index.file_list)
        self._claimed += math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
        if type(record) is ArrayRecord and type(record.chunks) is not WholeChunk:
            self._chunks += count_chunks(record.chunks)
        if self._claimed > self._present or (self._chunks - FREE_CHUNKS) * MIN_ENTRY_NBYTES > self._present:
            raise self._short(path, self._sizes)

    def take_view(self, path: str, spec: ArraySpec) -> None:
        """The same of a view without its array, which takes memory of its own: it may repeat bytes any number of times.

        Raises:
            MismatchError: it takes far more than all the shards that are there.
        """
        self._views += math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
        most = VIEWS + TIMES * sum(self.store.sizes().values()) if self._views > VIEWS else VIEWS
        if self._views > most:
            raise MismatchError(
                f"{path}: {self.store.url}",
                expected=f"views that take at most {most} bytes",
                found=f"{self._views} bytes for shape {spec.shape}",
                hint="Load the array that it is a view of too: then it takes no memory of its own",
            )

    def _short(self, path: str, sizes: dict[str, int]) -> CorruptError:
        for file in self.index.file_list:
            if (found := sizes.get(file.name)) != file.header + file.nbytes and self.whole:
                open_shard(self.store, self.index, file, found)  # says what is wrong with it
        return CorruptError(
            f"{path}: {self.store.url}",
            expected=f"shards that hold {self._claimed} bytes of arrays in {self._chunks} chunks, as the index says",
            found=f"{self._present} bytes in all shards",
            hint="The index is not that of these shards; try treeckpt verify --repair",
        )
