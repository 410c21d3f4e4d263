"""Checkpoints of our own as a source: specs from the index, arrays left in the shards, checksums compared."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ..arrays.base import Storage, raw_dtype
from ..arrays.lazy import LazyArray
from ..arrays.registry import decode
from ..core.format.records import AliasRecord, Leaf, PerRankValues, ValueRecord
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.int_runs import decode_runs
from ..core.sharding.region import Region, flat_regions
from ..errors import TreeckptError
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.store import Store
from ..loading.read_batch import read_region
from .contents import Contents, spread_ranks
from .files import AddressSpace, FlatReader, strided_array
from .pickle_values import RefusedLeaf

__all__ = ["read_native"]


class _NativeReader:
    def __init__(self, checkpoint: Checkpoint, addresses: AddressSpace, refused: list[RefusedLeaf] | None) -> None:
        self._checkpoint, self.index, self.addresses, self.refused = checkpoint, checkpoint.index, addresses, refused
        self._bases: dict[tuple[int, int | None], int] = {}

    def leaf(self, number: int, rank: int | None) -> tuple[str, Any]:
        """A leaf, as of a rank where each has its own."""
        leaf = self.index.entries[number]
        record = leaf.record
        if isinstance(record, AliasRecord):
            return leaf.path, self._alias(leaf, record, rank)
        if leaf.spec is not None:
            return leaf.path, self._whole(leaf, rank)
        assert isinstance(record, (ValueRecord, PerRankValues)), "all other leaves have specs"
        if isinstance(record, PerRankValues):
            value = record.values[int(np.flatnonzero(decode_runs(leaf.ranks or ()) == rank)[0])]
        else:
            value = record.value
        try:
            return leaf.path, decode(value, leaf.path, allow_pickle=False)
        except TreeckptError as error:
            if self.refused is None:
                raise
            self.refused.append(RefusedLeaf(leaf.path, error.found))
            return leaf.path, ...

    def _address(self, leaf: Leaf, rank: int | None) -> int:
        key = (leaf.number, rank if leaf.ranks is not None else None)
        if key not in self._bases:
            assert leaf.spec is not None, "only arrays have addresses"
            self._bases[key] = self.addresses.take(
                Region.whole(leaf.spec.shape).size * dtype_of(leaf.spec.dtype).itemsize
            )
        return self._bases[key]

    def _whole(self, leaf: Leaf, rank: int | None) -> LazyArray:
        assert leaf.spec is not None, "an array has a spec"
        spec = msgspec.structs.replace(leaf.spec, regions=None, device=None)
        nbytes = Region.whole(spec.shape).size * dtype_of(spec.dtype).itemsize
        storage = Storage(self._address(leaf, rank), nbytes, None) if nbytes else None
        return LazyArray(spec, lambda region: self.read(leaf, region, rank), storage)

    def _alias(self, leaf: Leaf, record: AliasRecord, rank: int | None) -> LazyArray:
        base = self.index.entries[record.of]
        assert leaf.spec is not None and base.spec is not None, "an array has a spec"
        spec = msgspec.structs.replace(leaf.spec, regions=None, device=None)
        view = record.view
        address = self._address(base, rank)
        if view is None:
            whole = self._whole(base, rank)
            return LazyArray(spec, whole.read, whole.storage)
        return strided_array(spec, self._flat(base, rank), view.offset, view.strides, address)

    def _flat(self, leaf: Leaf, rank: int | None) -> FlatReader:
        assert leaf.spec is not None, "an array has a spec"
        shape, raw = leaf.spec.shape, raw_dtype(dtype_of(leaf.spec.dtype).itemsize)

        def flat(start: int, count: int) -> np.ndarray:
            out = np.empty(count, raw)
            at = 0
            for part in flat_regions(shape, start, start + count):
                out[at : at + part.size] = self.read(leaf, part, rank).reshape(-1)
                at += part.size
            return out

        return flat

    def read(self, leaf: Leaf, region: Region, rank: int | None) -> np.ndarray:
        """A region of an array, its checksums compared."""
        return read_region(self._checkpoint, leaf, region, rank=rank or 0)


def read_native(store: Store, addresses: AddressSpace, refused: list[RefusedLeaf] | None = None) -> Contents:
    """A checkpoint of ours; state that each rank has of its own comes as a dict by rank.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
        MismatchError: a value whose class is not in this program, or which is pickled; noted in `refused` if given.
    """
    checkpoint = Checkpoint(store)
    checkpoint.check_against_files()
    index = checkpoint.index
    saved = _NativeReader(checkpoint, addresses, refused)
    structure, leaves, findings = spread_ranks(index.structure, saved.leaf)
    metadata = {
        key: decode(value, f"custom_metadata/{key}", allow_pickle=False) for key, value in index.metadata.items()
    }
    return Contents(structure, tuple(leaves), store.url, index.step, metadata, tuple(findings))
