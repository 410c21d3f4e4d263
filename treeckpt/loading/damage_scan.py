"""Finds all damaged bytes of a shard; `io.storage.shard_reader` stops at the first of them."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.format.damage import BadBytes
from ..core.format.records import File, Index
from ..errors import CheckpointError
from ..io.comm.collective import all_gather
from ..io.comm.comm import Comm
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.memory import aligned_buffer
from ..io.storage.shard_reader import OpenedShard, matches, open_shard
from ..io.storage.store import Store

__all__ = ["survey", "survey_shard"]

STEP = 8 << 20
"""Bytes that are read at a time."""


def survey_shard(
    store: Store, index: Index, file: File, size: int | None, *, keep: bool = False
) -> tuple[OpenedShard | None, list[BadBytes]]:
    """Compares every checksum of a shard.

    Args:
        size: the file's, in bytes; None where it is missing.
        keep: as for `open_shard`.

    Returns:
        The shard, and its bad bytes by where they start. Without a header that can be believed there is no shard, and
        all of the file is bad.
    """
    whole = file.header + file.nbytes
    if size is None:
        return None, [BadBytes(file.name, 0, whole, "the file is missing")]
    try:
        opened = open_shard(store, index, file, size, whole=False, keep=keep)
    except CheckpointError as error:
        why = f"no header as it was written: expected {error.expected}, found {error.found}"
        return None, [BadBytes(file.name, 0, whole, why)]
    except OSError as error:
        return None, [BadBytes(file.name, 0, whole, f"the header cannot be read: {error}")]
    found: list[BadBytes] = []
    for bad in _bad_blocks(store, opened, min(size, whole) - file.header):
        if found and found[-1].stop == bad.start and found[-1].why == bad.why:
            bad = BadBytes(bad.file, found.pop().start, bad.stop, bad.why)
        found.append(bad)
    if size < whole:
        found.append(BadBytes(file.name, size, whole, f"the file ends at byte {size}"))
    if size > whole:
        found.append(BadBytes(file.name, whole, size, f"the file goes on after byte {whole}"))
    return opened, found


def survey(checkpoint: Checkpoint, comm: Comm) -> tuple[BadBytes, ...]:
    """Returns all bytes of a checkpoint's shards that differ from what was saved. Every rank has to call.

    The ranks divide the shards among them, and exchange what they found.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: there is no index that can be read.
        RankError: another rank failed.
    """

    def own() -> list[BadBytes]:
        checkpoint.check_against_files()
        store, index, sizes = checkpoint.store, checkpoint.index, checkpoint.sizes
        files = index.file_list[comm.rank :: comm.size]
        return [bad for file in files for bad in survey_shard(store, index, file, sizes.get(file.name))[1]]

    found = [bad for part in all_gather(comm, f"load {checkpoint.url}", own, list[BadBytes]) for bad in part]
    return tuple(sorted(found, key=lambda bad: (bad.file, bad.start)))


def _bad_blocks(store: Store, opened: OpenedShard, there: int) -> Iterator[BadBytes]:
    """The blocks that differ from their checksums, of a data area with its first `there` bytes left."""
    file, block = opened.file, opened.block
    step = max(STEP // block, 1) * block
    buffer = aligned_buffer(step)
    for start in range(0, max(there, 0), step):
        data = buffer[: min(step, there - start)]
        failed, all_read = _error_of(store, opened, start, data), True
        for at in range(start, start + len(data), block):
            part = data[at - start : at - start + block]
            first = file.header + at
            if failed and (error := _error_of(store, opened, at, part)):
                all_read = False
                yield BadBytes(file.name, first, first + len(part), f"they cannot be read: {error}")
            elif not matches(opened, at, part):
                yield BadBytes(file.name, first, first + len(part), "they differ from their checksum")
        if failed and all_read:
            first = file.header + start
            yield BadBytes(file.name, first, first + len(data), f"only a second try could read them: {failed}")


def _error_of(store: Store, opened: OpenedShard, start: int, out: memoryview) -> str:
    """Returns the text of the error of a read; empty if it succeeds."""
    try:
        store.read_into(opened.file.name, opened.file.header + start, out)
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""
