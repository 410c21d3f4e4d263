"""Detection of the format of a checkpoint, and reading of its contents.

Of a checkpoint of ours, specs come from the index, arrays are left in the shards, and checksums are compared.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import Storage
from .._arrays.blobs import blob_value
from .._arrays.lazy import LazyArray
from .._arrays.registry import decode
from .._core.format.records import AliasRecord, Leaf, PerRankValues, ValueRecord
from .._core.format.shard_header import BLOCK
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.region import Region
from .._core.tree.spec import ArraySpec
from .._foreign.checksums import ArchiveStorages
from .._foreign.files import elements_of, file_window, memory_array, open_foreign, strided_array
from .._foreign.foreign_index import most_nbytes
from .._foreign.pickle_values import RefusedLeaf, refusal
from .._foreign.sources import FOREIGN, check_exists, check_shape, directory_format, file_format, read_foreign
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.counting_store import CountedStores
from .._io.storage.metadata_files import read_sidecar
from .._io.storage.open import open_store
from .._io.storage.store import Store
from .._loading.check_sizes import Claims
from .._loading.match import LoadOptions
from .._loading.read_batch import read_region
from ..errors import TreeckptError
from ._contents import Contents, contents_of, map_leaves, spread_ranks


class _NativeReader:
    def __init__(self, checkpoint: Checkpoint, storages: ArchiveStorages, refused: list[RefusedLeaf]) -> None:
        self.checkpoint, self.storages, self.refused = checkpoint, storages, refused
        self._claims = Claims(checkpoint, whole=True)
        self._bases: dict[tuple[int, int | None], LazyArray] = {}

    def leaf(self, number: int, rank: int | None) -> Any:
        """Returns a leaf, that of a rank under `PerRank`; `...` for a value that cannot be decoded."""
        leaf = self.checkpoint.index.entries[number]
        record = leaf.record
        if isinstance(record, AliasRecord):
            return self._alias(leaf, record, rank)
        if leaf.spec is not None:
            return self._whole(leaf, rank)
        if leaf.stored is not None:
            self._claims.take(leaf.path, leaf)
            whole = Region.whole(leaf.stored.shape)
            data = read_region(self.checkpoint, leaf.as_array, whole, rank=rank or 0)
            return blob_value(data.data, leaf.stored.kind, leaf.path)
        assert isinstance(record, (ValueRecord, PerRankValues)), "all other leaves have specs"
        if isinstance(record, PerRankValues):
            value = record.values[int(np.flatnonzero(decode_runs(leaf.ranks or ()) == rank)[0])]
        else:
            value = record.value
        try:
            return decode(value, leaf.path, allow_pickle=False)
        except TreeckptError as error:
            self.refused.append(RefusedLeaf(leaf.path, error.found))
            return ...

    def _whole(self, leaf: Leaf, rank: int | None) -> LazyArray:
        key = (leaf.number, rank if leaf.ranks is not None else None)
        if key not in self._bases:
            spec = _plain_spec(leaf)
            nbytes = math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
            storage = Storage(self.storages.take(nbytes), nbytes, None) if nbytes else None
            read = partial(read_region, self.checkpoint, leaf, rank=rank or 0)
            self._bases[key] = LazyArray(spec, read, storage)
        return self._bases[key]

    def _alias(self, leaf: Leaf, record: AliasRecord, rank: int | None) -> LazyArray:
        base, spec, view = self._whole(self.checkpoint.index.entries[record.of], rank), _plain_spec(leaf), record.view
        if view is None:
            return LazyArray(spec, base.read, base.storage)
        address = base.storage.address if base.storage is not None else None
        # a part of a block costs all of it, to compare its checksum
        return strided_array(spec, elements_of(base), view.offset, view.strides, address, narrow=BLOCK)


def _plain_spec(leaf: Leaf) -> ArraySpec:
    """Returns the spec of an array without its regions and device."""
    assert leaf.spec is not None, "an array has a spec"
    return msgspec.structs.replace(leaf.spec, regions=None, device=None)


def read_native(store: Store, storages: ArchiveStorages, refused: list[RefusedLeaf]) -> Contents:
    """Returns the contents of a checkpoint of ours, with a dict by rank for state that each rank has of its own.

    Args:
        refused: receives values that are pickled, or whose classes are not in this program.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
    """
    checkpoint = Checkpoint(store)
    checkpoint.check_against_files()
    index = checkpoint.index
    structure, leaves, findings = spread_ranks(index.structure, _NativeReader(checkpoint, storages, refused).leaf)
    metadata = {
        key: decode(value, f"custom_metadata/{key}", allow_pickle=False) for key, value in index.metadata.items()
    }
    sidecars = tuple((one.name, partial(read_sidecar, store, index, one.name)) for one in index.sidecars)
    present = sum(checkpoint.sizes.get(file.name, 0) for file in index.file_list)
    return Contents(
        structure,
        leaves,
        label=store.url,
        step=index.step,
        metadata=metadata,
        findings=findings,
        sidecars=sidecars,
        present=present,
    )


SOURCES = ("treeckpt", *FOREIGN)
"""Formats that can be read."""


def detect(path: str | os.PathLike[str] | Store) -> str:
    """Returns the format of the checkpoint at a path, by its files' names and first bytes: one of `SOURCES`.

    >>> tc.convert.detect("run/step_00000100")
    'treeckpt'

    Raises:
        CheckpointNotFound: there is nothing.
        FormatError: nothing that is known.
    """
    if isinstance(path, (str, os.PathLike)) and "://" not in os.fspath(path):
        local = Path(path)
        check_exists(local)
        if local.is_file():
            return file_format(local)
    return directory_format(open_foreign(path))


@contextlib.contextmanager
def open_source(
    path: str | os.PathLike[str] | Store,
    kind: str,
    storages: ArchiveStorages,
    wanted: LoadOptions,
    counted: CountedStores,
) -> Iterator[Contents]:
    """Yields the contents of a checkpoint, with its arrays left in the files, which are closed at the end.

    Args:
        wanted: what will be kept: objects elsewhere that cannot be read are no error.
        counted: counts what is read.

    Raises:
        CheckpointError: the state of the files.
        TreeError: a leaf that only its own code could make.
    """
    refused: list[RefusedLeaf] = []
    window = file_window(path) if isinstance(path, (str, os.PathLike)) and Path(path).is_file() else None
    opened = window.store if window else open_store(path) if kind == "treeckpt" else open_foreign(path)
    store = counted(opened)
    with contextlib.closing(store):
        if kind == "treeckpt":
            contents = read_native(store, storages, refused)
        else:
            source = msgspec.structs.replace(window, store=store) if window else store
            found = read_foreign(source, kind, storages, refused)
            label = f"{path}" if kind == "safetensors" else found.label
            contents = contents_of(found.tree, label, found.metadata, found.unread)
            contents = msgspec.structs.replace(contents, present=most_nbytes(sum(opened.sizes().values())))
        for one in refused:
            if wanted.selects(one.path):
                raise refusal(one, contents.label)
        yield _with_lazy_arrays(contents)


def _with_lazy_arrays(contents: Contents) -> Contents:
    """Replaces arrays in memory by lazy arrays; raises as `check_shape`."""
    made: dict[int, LazyArray] = {}

    def lazy(at: str, leaf: Any) -> Any:
        if isinstance(leaf, LazyArray):
            check_shape(leaf.spec, at, contents.label)
        return made.setdefault(id(leaf), memory_array(leaf)) if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(contents, lazy)
