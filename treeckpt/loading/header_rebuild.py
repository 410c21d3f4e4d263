"""Rebuilds a shard's header from the index, and proves that it is the one that was written.

The index holds all that a header holds but the checksums. These are either computed again from the data, or taken from
the damaged header. The rebuilt header is the right one only if it has the seal that was written; then the checksums are
right, too.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np

from ..core.format.byte_map import extents_in_file
from ..core.format.damage import rank_path
from ..core.format.index import encode_manifest
from ..core.format.records import File, Index
from ..core.format.shard_header import (
    ShardEntry,
    ShardHeader,
    block_count,
    encode_header,
    hashes_at,
    seal_at,
    with_hashes,
)
from ..core.sharding.dtypes import dtype_of

__all__ = ["headers_of", "proven_header"]


def headers_of(index: Index, file: File) -> list[ShardHeader]:
    """Returns the headers that a shard may have had, with zeros for checksums.

    Mostly there is one; but an array without elements between two files of a rank may be in either.
    """
    entries = _entries(index, file)
    found: list[tuple[ShardEntry, ...]] = []
    for low, high in ((0, 1), (1, 1), (0, 0), (1, 0)):
        chosen = tuple(
            entry
            for entry in entries
            if entry.nbytes or ((low or entry.start > 0) and (high or entry.start < file.nbytes))
        )
        if chosen not in found:
            found.append(chosen)
    return [_header(index, file, chosen) for chosen in found]


def _entries(index: Index, file: File) -> list[ShardEntry]:
    """Returns the entries of a shard by offset, those of equal offset by size and leaf number."""
    entries: list[tuple[int, int, int, ShardEntry]] = []
    for extent in extents_in_file(index, file, empty=True):
        leaf = index.entries[extent.leaf]
        assert leaf.spec is not None, "only arrays have extents"
        nbytes = extent.region.size * dtype_of(leaf.spec.dtype).itemsize
        start = extent.start - file.header
        path = rank_path(leaf.path, file.rank)
        entry = ShardEntry(path, leaf.spec.dtype, leaf.spec.shape, extent.region, start, nbytes)
        entries.append((start, nbytes, extent.leaf, entry))
    entries.sort(key=lambda item: item[:3])
    return [entry for *_, entry in entries]


def _header(index: Index, file: File, entries: tuple[ShardEntry, ...]) -> ShardHeader:
    return ShardHeader(
        index.save_id,
        file.rank,
        index.world,
        file.part,
        file.stream,
        entries,
        (0,) * block_count(file.nbytes),
        manifest=encode_manifest(index) if file.rank == 0 and file.part == 0 else None,
    )


def proven_header(header: ShardHeader, old: bytes, computed: Sequence[int]) -> bytes | None:
    """Returns the bytes of the header that was written; None where nothing proves which one that is.

    Args:
        header: its content, without the checksums.
        old: the damaged header, of full length.
        computed: the checksums of the data as it is now.
    """
    bare = encode_header(header)
    if len(bare) != len(old):
        return None
    seal = slice(seal_at(bare), seal_at(bare) + 16)
    for hashes in (computed, _stored(bare, old, len(computed))):
        if hashes is None or len(hashes) != len(header.hashes):
            continue
        new = with_hashes(bare, hashes)
        rest = (new[: seal.start], new[seal.stop :])
        if new[seal] == old[seal] or rest == (old[: seal.start], old[seal.stop :]):
            return new
    return None


def _stored(bare: bytes, old: bytes, count: int) -> Sequence[int] | None:
    """Returns the checksums in the damaged header, None where they are not base64."""
    at = hashes_at(bare)
    nbytes = len(base64.b64encode(bytes(8 * count)))
    try:
        return np.frombuffer(base64.b64decode(old[at : at + nbytes], validate=True), "<u8").tolist()
    except (binascii.Error, ValueError):
        return None
