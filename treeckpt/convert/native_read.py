"""Checkpoints of our own as a source: specs from the index, arrays left in the shards, checksums compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..arrays.base import HostArray, Storage, TargetPiece, raw_dtype
from ..arrays.lazy import LazyArray
from ..arrays.registry import decode
from ..core.format.check_index import check_against_files
from ..core.format.chunks import BoxChunks
from ..core.format.records import AliasRecord, ArrayRecord, Index, Leaf, PerRankValues, ValueRecord
from ..core.planning.load_plan import READ_LIMIT, WantedRegion, plan_load
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.int_runs import decode_runs
from ..core.sharding.region import Region, any_overlap, flat_regions, intersect
from ..errors import FormatError, TreeckptError
from ..io.storage.metadata_files import read_index
from ..io.storage.shard_reader import Shards
from ..io.storage.store import Store
from ..io.timing import Recorder
from ..loading.read_tasks import list_readings, run_readings
from .contents import Contents, spread_ranks
from .files import AddressSpace, FlatReader, strided_array
from .pickle_values import RefusedLeaf

__all__ = ["read_native"]


class _NativeReader:
    def __init__(self, store: Store, index: Index, addresses: AddressSpace, refused: list[RefusedLeaf] | None) -> None:
        self.index, self.addresses, self.refused = index, addresses, refused
        self.shards = Shards(store, index, Recorder(0), verify=True)
        ranks = {file.rank for file in index.file_list if file.part}
        self.borders: dict[int, Sequence[int]] = {
            rank: [file.stream for file in index.files_of(rank)][1:] for rank in ranks
        }
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
        assert leaf.spec is not None, "an array has a spec"
        itemsize = dtype_of(leaf.spec.dtype).itemsize
        out = np.empty(region.shape, raw_dtype(itemsize))
        if not region.size:
            return out
        chunks = self.index.chunks_of(leaf, region, rank=rank)
        covered = sum(common.size for c in chunks if (common := intersect(c.region, region)) is not None)
        listed = isinstance(leaf.record, ArrayRecord) and isinstance(leaf.record.chunks, BoxChunks)
        if covered != region.size or (listed and any_overlap([c.region for c in chunks])):
            raise FormatError(
                leaf.path,
                expected=f"chunks that hold each of {region.size} elements once",
                found=f"{covered} elements" if covered != region.size else "chunks that overlap",
                hint="The index does not describe the whole array; try treeckpt rebuild-index",
            )
        plan = plan_load([WantedRegion(region, itemsize, chunks)], borders=self.borders)
        piece = TargetPiece(region, HostArray(out))
        readings = list_readings(
            self.shards, plan.blocks, lambda i: piece, itemsize=lambda i: itemsize, paths=lambda i: leaf.path
        )
        run_readings(self.shards, readings, memory=READ_LIMIT)
        return out


def read_native(store: Store, addresses: AddressSpace, refused: list[RefusedLeaf] | None = None) -> Contents:
    """A checkpoint of ours; state that each rank has of its own comes as a dict by rank.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
        MismatchError: a value whose class is not in this program, or which is pickled; noted in `refused` if given.
    """
    index = read_index(store)
    check_against_files(index, store.sizes(), store.url)
    checkpoint = _NativeReader(store, index, addresses, refused)
    structure, leaves, findings = spread_ranks(index.structure, checkpoint.leaf)
    metadata = {
        key: decode(value, f"custom_metadata/{key}", allow_pickle=False) for key, value in index.metadata.items()
    }
    return Contents(structure, tuple(leaves), store.url, index.step, metadata, tuple(findings))
