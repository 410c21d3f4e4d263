"""Extracts from the index of a checkpoint what lists of checkpoints need."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import msgspec

from .._core.format.files import stored_name
from .._core.format.lineage import Lineage
from .._core.format.records import Index
from .._core.text import ranks_text
from .._core.tree.value_codec import Value, decode_value
from .._io.storage.checkpoint import KnownIndex, NewestIndex, StatCache, decode_and_check, read_index_bytes
from .._io.storage.store import DirectoryEntry, Store
from ..errors import TreeckptError

METRICS = "metrics"
"""The key of custom metadata that holds a checkpoint's metrics: a dict of names and numbers."""


class Summary(msgspec.Struct, frozen=True, gc=False):
    """The parts of an index that a list of checkpoints needs."""

    save_id: str
    step: int | None
    world: int
    leaves: int
    nbytes: int
    created_ns: int
    sizes: tuple[tuple[str, int], ...]
    """Every shard and the size of its file."""
    metrics: dict[str, float]
    held_nbytes: int
    lineage: Lineage | None = None
    sidecars: tuple[tuple[str, int], ...] = ()
    """Every sidecar file, by its name in the directory, and its size."""
    disks: tuple[tuple[str, ...], ...] = ()
    """Of a node-local checkpoint, the shards of each disk."""
    hosts: tuple[str, ...] = ()
    """The host of each of these disks, with the ranks that wrote there, as text."""
    shared: dict[str, str] = {}
    """The directory of each shard that lies in that of another checkpoint."""
    shared_with: dict[str, int] = {}
    """Bytes of these files in each of these directories."""
    shared_nbytes: int = 0
    """Bytes of the arrays in these files."""

    def disks_here(self, files: Container[str]) -> list[int]:
        """Returns the numbers of the disks of which a shard is among these files."""
        return [number for number, names in enumerate(self.disks) if any(name in files for name in names)]

    def sizes_here(self, files: Container[str]) -> tuple[tuple[str, int], ...]:
        """Returns the shards that belong here, and their sizes: all, or those of the disks that have some here."""
        here = self.disks_here(files)
        others = {name for number, names in enumerate(self.disks) if number not in here for name in names}
        return tuple(row for row in self.sizes if row[0] not in others) if here else self.sizes


def read_summary(folder: Store, index: DirectoryEntry, cache: StatCache, newest: NewestIndex | None = None) -> Summary:
    """Returns the summary of a folder's index.

    Args:
        index: the file, as it is now.
        newest: is offered the index, if it is not in the cache, and in an object store or `newest.local`.

    Raises:
        CheckpointError: it cannot be read.
    """

    def read() -> Summary:
        data = read_index_bytes(folder)
        decoded = decode_and_check(folder, data)
        if newest is not None and (newest.local or folder.traits.far):
            newest.offer(KnownIndex(folder.place, data, decoded))
        return summarize_index(decoded)

    return cache.get_or_read((folder.place, "summary"), index, read)


def summarize_index(index: Index) -> Summary:
    """Extracts from an index what a list of checkpoints needs."""
    sizes = tuple((file.name, file.header + file.nbytes) for file in index.file_list)
    return Summary(
        save_id=index.save_id,
        step=index.step,
        world=index.world,
        leaves=len(index.leaves),
        nbytes=index.nbytes,
        created_ns=index.created_ns,
        sizes=sizes,
        metrics=_metrics(index.metadata.get(METRICS)),
        held_nbytes=index.held_nbytes,
        lineage=index.lineage,
        sidecars=tuple((stored_name(index.save_id, one.name), one.nbytes) for one in index.sidecars),
        disks=tuple(tuple(file.name for file in index.disk_files(disk)) for disk in index.disks),
        hosts=tuple(f"host {disk.host}, with {ranks_text(disk.ranks)}" for disk in index.disks),
        shared=index.shared_names,
        shared_with=index.shared_with,
        shared_nbytes=index.shared_nbytes,
    )


def _metrics(value: Value) -> dict[str, float]:
    """Returns the numbers of a dict; empty for other values, which users may keep under this key."""
    try:
        metadata = decode_value(value, METRICS)
    except TreeckptError:
        return {}
    pairs: dict[Any, Any] = metadata if isinstance(metadata, dict) else {}
    return {k: float(v) for k, v in pairs.items() if isinstance(k, str) and _is_number(v)}


def _is_number(value: object) -> bool:
    # A larger integer does not fit a float.
    return isinstance(value, float) or (type(value) is int and math.log2(abs(value) + 1) < 1023)
