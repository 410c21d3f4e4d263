"""Counts the bytes that the index claims for arrays, before memory is allocated, and compares them with the files."""

from __future__ import annotations

import math
from functools import cached_property

from .._core.format.check_index import check_claims
from .._core.format.records import AliasRecord, ArrayRecord, Leaf, WholeChunk, count_chunks
from .._core.sharding.dtypes import dtype_of
from .._core.tree.spec import ArraySpec
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.memory import available_memory
from ..errors import CorruptError, MismatchError
from ..rules._view import ComposedLeaf

VIEWS = 64 << 20
"""Bytes that views may take as arrays of their own, whatever files there are."""
TIMES = 16
"""Times the bytes of all files that they may take beyond those."""


class Claims:
    """The bytes and chunks that one load needs, by the index; those of a saved array count once.

    Args:
        whole: names a shard that is cut short, even where the wanted bytes of it are there.
    """

    def __init__(self, checkpoint: Checkpoint, *, whole: bool) -> None:
        self._checkpoint, self._whole = checkpoint, whole
        self._claimed = self._chunks = self._views = 0
        self._counted: set[int] = set()

    @cached_property
    def _unlisted(self) -> int:
        """Bytes up to which what is claimed is compared with the sizes that the index has for the shards.

        A store that is far away is not listed for them: there each shard is compared with the index when it is opened,
        before that memory is touched.
        """
        far = self._checkpoint.store.traits.far and self._whole
        return available_memory() if far else -1

    @cached_property
    def _expected(self) -> int:
        """Bytes of all shards, by the index."""
        return sum(file.header + file.nbytes for file in self._checkpoint.index.file_list)

    @cached_property
    def _present(self) -> int:
        """Bytes of all shards that are there."""
        sizes = self._checkpoint.sizes
        held = sum(sizes.get(file.name, 0) for file in self._checkpoint.index.file_list)
        return held + self._checkpoint.repeated_nbytes

    def take(self, path: str, leaf: Leaf) -> None:
        """Counts the bytes and chunks of an array, before memory is allocated for it.

        Raises:
            CorruptError: more than all the shards that are there.
        """
        for source in leaf.sources.values() if isinstance(leaf, ComposedLeaf) else (leaf,):
            spec, record = source.stored, source.record
            if source.number in self._counted or spec is None or type(record) is AliasRecord:
                continue
            self._counted.add(source.number)
            self._claimed += math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
            if isinstance(record, ArrayRecord) and type(record.chunks) is not WholeChunk:
                self._chunks += count_chunks(record.chunks)
        present = self._expected if self._claimed <= self._unlisted else self._present
        try:
            check_claims(self._claimed, self._chunks, present, f"{path}: {self._checkpoint.url}")
        except CorruptError:
            for file in self._checkpoint.index.file_list:
                if self._checkpoint.sizes.get(file.name) != file.header + file.nbytes and self._whole:
                    self._checkpoint.shard(file)  # raises an error that says what is wrong with it
            check_claims(self._claimed, self._chunks, self._present, f"{path}: {self._checkpoint.url}")

    def take_view(self, path: str, spec: ArraySpec) -> None:
        """Counts a view whose base is not loaded: it takes memory of its own, and may repeat bytes any number of times.

        Raises:
            MismatchError: it takes far more than all the shards that are there.
        """
        self._views += math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
        most = VIEWS + TIMES * sum(self._checkpoint.sizes.values()) if self._views > VIEWS else VIEWS
        if self._views > most:
            raise MismatchError(
                f"{path}: {self._checkpoint.url}",
                expected=f"views that take at most {most} bytes",
                found=f"{self._views} bytes for shape {spec.shape}",
                hint="Load the array that it is a view of too: then it takes no memory of its own",
            )
