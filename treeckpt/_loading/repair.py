"""Repairs a damaged checkpoint: rebuilds what is proven to equal what was written, and leaves the rest alone.

The index is rebuilt from the headers of the shards. A shard's header is rebuilt from the index, which holds all of it
but the checksums; these are computed again from the data, or taken from the damaged header. The rebuilt header is the
right one only if it has the seal that was written. A sidecar file is made again from its copy, if that has the checksum
of the index. Bytes after the end of a shard are cut off where all before them are intact. Timings cannot be rebuilt:
they are a record beside the checkpoint. Each file that is replaced or removed is kept as `<name>.<id>.damaged`; the new
file takes its name in one step (in a store without renames the old one is deleted first, and the new one is a copy of
what was kept).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import secrets
from collections.abc import Sequence

import msgspec
import numpy as np

from .._core.format.byte_map import BadBytes, extents_in_file, rank_path
from .._core.format.check_index import check_against_files
from .._core.format.files import Sidecar, checksum, damaged_name, stored_name
from .._core.format.index import INDEX_NAME, encode_manifest
from .._core.format.records import File, Index
from .._core.format.references import encode_shared
from .._core.format.shard_header import (
    BLOCK,
    ShardEntry,
    ShardHeader,
    block_count,
    encode_header,
    hash_block,
    hashes_at,
    seal_at,
    with_hashes,
)
from .._core.format.timings import timings_name
from .._io.os_errors import read_failure
from .._io.process import this_process
from .._io.storage.checkpoint import (
    Checkpoint,
    read_index,
    read_sidecar,
    read_timings,
    rebuild_from_shards,
    replaced_meanwhile,
    with_shared_files,
)
from .._io.storage.deletions import hold_for_repair, index_state, legible_save_id
from .._io.storage.memory import aligned_buffer
from .._io.storage.published_index import replace_index
from .._io.storage.store import DirectoryEntry, Store, Writer
from ..errors import CheckpointError, CheckpointNotFound, CorruptError, FormatError, StoreError, TreeckptError
from ..reports import Repair, VerifyReport
from .verify import survey_shard, verify_checkpoint

COPIED_NBYTES = 8 << 20


def repair_store(store: Store) -> VerifyReport:
    """See `treeckpt.verify`."""
    repairs: list[Repair] = []
    index = _repair_index(store, repairs)
    check_against_files(index, with_shared_files(store, index).sizes(), store.url)
    for file in index.file_list:
        if not file.directory:  # of those in other directories the index there knows more
            _repair_shard(store, index, file, repairs)
    for sidecar in index.sidecars:
        _repair_sidecar(store, index, sidecar, repairs)
    report = verify_checkpoint(checkpoint := Checkpoint(store))
    if any(problem.file == INDEX_NAME for problem in report.problems):
        if (before := index_state(store)) is None or legible_save_id(before) != index.save_id:
            raise replaced_meanwhile(store)
        _replace_index(store, index.save_id, before, repairs)
        report = verify_checkpoint(checkpoint := Checkpoint(store))
    if any(problem.file == timings_name(index.save_id) for problem in report.problems):
        _drop_timings(store, index.save_id, repairs)
        report = verify_checkpoint(checkpoint := Checkpoint(store))
    # the report would be of another save than the repairs, or of files that a flattened checkpoint needs no more
    if checkpoint.index.save_id != index.save_id or read_index(store) != checkpoint.index:
        raise replaced_meanwhile(store)
    return msgspec.structs.replace(report, repairs=tuple(repairs))


# the index ------------------------------------------------------------------------------------------------------------


def _repair_index(store: Store, repairs: list[Repair]) -> Index:
    try:
        return read_index(store)
    except CheckpointNotFound:
        index = rebuild_from_shards(store)
        replace_index(store, None, index)
        repairs.append(Repair(INDEX_NAME, "was missing; made again from the headers of the shards"))
        return index
    except (CorruptError, FormatError):
        if (before := index_state(store)) is None:
            raise  # no file at all: a directory, say
        # which save it was the index of may still be legible: a later one beside it may never have been committed
        return _replace_index(store, legible_save_id(before), before, repairs)


def _replace_index(store: Store, save_id: str | None, before: bytes | int, repairs: list[Repair]) -> Index:
    index = rebuild_from_shards(store, save_id=save_id, whole=False)
    aside = replace_index(store, before, index)
    repairs.append(Repair(INDEX_NAME, "made again from the headers of the shards", aside))
    return index


def _drop_timings(store: Store, save_id: str, repairs: list[Repair]) -> None:
    name = timings_name(save_id)
    with contextlib.suppress(CheckpointError):
        read_timings(store, save_id)
        return
    with hold_for_repair(store):
        aside = _keep(store, name)
        store.delete(name)
    repairs.append(Repair(name, "taken away: how long the save took is lost, nothing else", aside))


# sidecar files --------------------------------------------------------------------------------------------------------


def _repair_sidecar(store: Store, index: Index, sidecar: Sidecar, repairs: list[Repair]) -> None:
    """Makes a sidecar file again from its copy for other programs, where that is what was saved."""
    name, sizes = stored_name(index.save_id, sidecar.name), store.sizes()
    try:
        read_sidecar(store, index, sidecar.name)
        if sizes.get(name) == sidecar.nbytes:
            return
    except (OSError, CheckpointError, StoreError) as error:
        if read_failure(error):  # it may be right
            return
    if sizes.get(sidecar.name) != sidecar.nbytes:
        return
    data = bytearray(sidecar.nbytes)
    try:
        if data:
            store.read_into(sidecar.name, 0, memoryview(data))
    except (OSError, TreeckptError):
        return
    finally:
        store.close()
    if checksum(data) != sidecar.xxh3:
        return
    with hold_for_repair(store) as names:
        if read_index(store).save_id != index.save_id:
            raise replaced_meanwhile(store)
        aside = _keep(store, name) if name in names else None
        store.publish(name, bytes(data), replace=True)
    repairs.append(Repair(name, f"made again from {sidecar.name}, the copy of it", aside))


# shards ---------------------------------------------------------------------------------------------------------------


def _repair_shard(store: Store, index: Index, file: File, repairs: list[Repair]) -> None:
    """Rebuilds the header and the length of a shard, where the seal proves the result."""
    entry = store.entry(file.name)
    size, whole = store.sizes().get(file.name), file.header + file.nbytes
    _, bad = survey_shard(store, index, file, size)
    if not bad or size is None or size < whole or any(part.unread for part in bad):
        return
    try:
        header, done = _header_again(store, index, file, bad)
    except (OSError, CheckpointError, StoreError):  # what cannot be read cannot be made again
        return
    if header is None:
        return
    if size > whole:
        done.append(f"cut off {size - whole} bytes behind the end")
    aside = _replace_shard(store, file, header, entry)
    repairs.append(Repair(file.name, " and ".join(done), aside))


def _header_again(store: Store, index: Index, file: File, bad: list[BadBytes]) -> tuple[bytes | None, list[str]]:
    """Returns the header that a shard should have, and what is done to it; None where it is unknown or right."""
    old = bytearray(file.header)
    store.read_into(file.name, 0, memoryview(old))
    if bad[0].start:
        return (bytes(old), []) if bad[-1].start >= file.header + file.nbytes else (None, [])
    hashes = _hashes(store, file)
    proven = (_proven_header(header, bytes(old), hashes) for header in _headers_of(index, file))
    made = next((header for header in proven if header is not None), None)
    return made, ["made the header again from the index, as its seal proves"]


def _hashes(store: Store, file: File) -> list[int]:
    """Returns the checksums of the data as it is now."""
    buffer = aligned_buffer(BLOCK)
    hashes: list[int] = []
    for start in range(0, file.nbytes, BLOCK):
        part = buffer[: min(BLOCK, file.nbytes - start)]
        store.read_into(file.name, file.header + start, part)
        hashes.append(hash_block(part))
    return hashes


# headers --------------------------------------------------------------------------------------------------------------


def _headers_of(index: Index, file: File) -> list[ShardHeader]:
    """Returns the headers that a shard may have had, with zeros for checksums.

    Mostly there is one; but an array without elements between two files of a rank may be in either.
    """
    entries: list[ShardEntry] = []
    for extent in sorted(extents_in_file(index, file, empty=True), key=lambda x: (x.start, x.stop, x.leaf)):
        leaf = index.entries[extent.leaf]
        assert leaf.stored is not None, "what has extents is stored"
        path, nbytes = rank_path(leaf.path, file.rank), extent.stop - extent.start
        start = extent.start - file.header
        entries.append(ShardEntry(path, leaf.stored.dtype, leaf.stored.shape, extent.region, start, nbytes))
    versions: list[tuple[ShardEntry, ...]] = []
    for low, high in ((0, 1), (1, 1), (0, 0), (1, 0)):
        chosen = tuple(
            entry
            for entry in entries
            if entry.nbytes or ((low or entry.start > 0) and (high or entry.start < file.nbytes))
        )
        if chosen not in versions:
            versions.append(chosen)
    hashes = (0,) * block_count(file.nbytes)
    manifest = encode_manifest(index) if file.rank == 0 and file.part == 0 else None
    shared = encode_shared(index.shared_of(file.rank)) if file.part == 0 else ""
    return [
        ShardHeader(
            index.save_id,
            file.rank,
            world=index.world,
            part=file.part,
            stream=file.stream,
            entries=chosen,
            hashes=hashes,
            manifest=manifest,
            shared=shared,
        )
        for chosen in versions
    ]


def _proven_header(header: ShardHeader, old: bytes, computed: Sequence[int]) -> bytes | None:
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
    text = old[hashes_at(bare) :][: len(base64.b64encode(bytes(8 * len(computed))))]
    choices = [computed]
    with contextlib.suppress(binascii.Error, ValueError):
        # where data is damaged too, the checksums that were written are in the old header alone
        choices.append(np.frombuffer(base64.b64decode(text, validate=True), "<u8").tolist())
    for hashes in choices:
        if len(hashes) != len(header.hashes):
            continue
        new = with_hashes(bare, hashes)
        rest = (new[: seal.start], new[seal.stop :])
        # the seal proves the rest; or only the seal is damaged, which then follows from the rest
        if new[seal] == old[seal] or rest == (old[: seal.start], old[seal.stop :]):
            return new
    return None


# files ----------------------------------------------------------------------------------------------------------------


def _keep(store: Store, name: str) -> str:
    """Keeps a file's content under another name, and returns that name."""
    aside = damaged_name(name, secrets.token_hex(8))
    if (directory := store.traits.local_path) is not None:
        with contextlib.suppress(OSError, NotImplementedError):  # not every file system and system has such links
            # a second name for the bytes, without a copy
            os.link(directory / name, directory / aside, follow_symlinks=False)
            store.sync()
            return aside
    if (size := store.sizes().get(name)) is None:
        raise replaced_meanwhile(store)
    _copy(store, name, aside, size)
    return aside


def _copy(store: Store, source: str, target: str, nbytes: int, header: bytes = b"") -> None:
    """Copies the first bytes of a file to a new file, durably; see `_copied`."""
    writer = _copied(store, source, target, nbytes, header)
    try:
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def _copied(store: Store, source: str, target: str, nbytes: int, header: bytes = b"") -> Writer:
    """Copies the first bytes of a file to a new file, which is to be committed.

    Args:
        header: replaces the first bytes; its size is a multiple of a page.
    """
    writer = store.create(target, nbytes)
    try:
        if header:
            first = aligned_buffer(len(header))
            first[:] = header
            writer.write(0, first)
        for start in range(len(header), nbytes, COPIED_NBYTES):
            part = aligned_buffer(min(COPIED_NBYTES, nbytes - start))  # an upload may still be sending the one before
            store.read_into(source, start, part)
            writer.write(start, part)
    except BaseException:
        writer.abort()
        raise
    return writer


def _replace_shard(store: Store, file: File, header: bytes, entry: DirectoryEntry | None) -> str:
    """Replaces a shard's header, and cuts the shard to its length; returns the name under which the old one is kept.

    It is copied before the lock is taken, for which saves wait.

    Args:
        entry: that of the shard from before it was read.

    Raises:
        CheckpointError: the shard is another one now, or as `hold_for_repair`. Nothing has changed then.
    """
    whole, writer, replaced = file.header + file.nbytes, None, False
    temporary = f".{file.name}.{this_process().tag}{secrets.token_hex(4)}.tmp"
    aside = _keep(store, file.name)
    try:
        if store.traits.renames:
            _copy(store, aside, temporary, whole, header)
        elif store.traits.atomic_uploads:
            writer = _copied(store, aside, file.name, whole, header)
        with hold_for_repair(store):
            if store.entry(file.name) != entry:
                raise replaced_meanwhile(store)
            replaced = True
            if store.traits.renames:
                store.rename(temporary, file.name, replace=True)
                store.sync()
            else:
                store.delete(file.name)
                (writer or _copied(store, aside, file.name, whole, header)).commit()
    except BaseException:
        if writer is not None:
            writer.abort()
        with contextlib.suppress(OSError, StoreError):
            if store.traits.renames:
                store.delete(temporary)
            if not replaced:
                store.delete(aside)
        raise
    store.close()  # what was read before is another file now
    return aside
