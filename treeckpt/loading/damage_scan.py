"""Finds all damaged bytes of a shard; `io.storage.shard_reader` stops at the first of them."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.format.damage import BadBytes
from ..core.format.records import File, Index
from ..errors import CheckpointError
from ..io.storage.memory import aligned_buffer
from ..io.storage.shard_reader import OpenedShard, matches, open_shard
from ..io.storage.store import Store

__all__ = ["open_for_survey", "survey_opened", "survey_shard"]

STEP = 8 << 20
"""Bytes that are read at a time."""


def survey_shard(store: Store, index: Index, file: File, size: int | None) -> list[BadBytes]:
    """Compares every checksum of a shard.

    Args:
        size: the file's, in bytes; None where it is missing.

    Returns:
        What is bad, by where it starts; without a header that can be believed, that is all of the file.
    """
    opened = open_for_survey(store, index, file, size)
    return [opened] if isinstance(opened, BadBytes) else survey_opened(store, opened, size or 0)


def open_for_survey(
    store: Store, index: Index, file: File, size: int | None, *, keep: bool = False
) -> OpenedShard | BadBytes:
    """A shard, or all of its bytes as bad ones where its header cannot be believed; see `open_shard`."""
    whole = file.header + file.nbytes
    if size is None:
        return BadBytes(file.name, 0, whole, "the file is missing")
    try:
        return open_shard(store, index, file, size, whole=False, keep=keep)
    except CheckpointError as error:
        why = f"no header as it was written: expected {error.expected}, found {error.found}"
    except OSError as error:
        why = f"the header cannot be read: {error}"
    return BadBytes(file.name, 0, whole, why)


def survey_opened(store: Store, opened: OpenedShard, size: int) -> list[BadBytes]:
    """Returns the damaged bytes of a shard whose header is intact, by where they start."""
    file = opened.file
    whole = file.header + file.nbytes
    found = list(_bad_blocks(store, opened, min(size, whole) - file.header))
    if size < whole:
        found.append(BadBytes(file.name, size, whole, f"the file ends at byte {size}"))
    if size > whole:
        found.append(BadBytes(file.name, whole, size, f"the file goes on after byte {whole}"))
    return _joined(found)


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


def _joined(found: list[BadBytes]) -> list[BadBytes]:
    """Joins neighbours that are damaged for the same reason."""
    joined: list[BadBytes] = []
    for bad in found:
        last = joined[-1] if joined else None
        if last is not None and last.stop == bad.start and last.why == bad.why:
            joined[-1] = BadBytes(bad.file, last.start, bad.stop, bad.why)
        else:
            joined.append(bad)
    return joined
