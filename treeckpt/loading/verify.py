"""Verifies a checkpoint against its checksums and its index, and rebuilds a lost index.

`survey_shard` finds all damaged bytes of a shard; `io.storage.shard_reader` stops at the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.format.damage import BadBytes, damaged_leaves
from ..core.format.index import INDEX_NAME, encode_index, folded_index, rebuild
from ..core.format.records import File, Index
from ..core.format.shard_header import ShardHeader, decode_header
from ..core.format.sidecars import stored_name
from ..core.format.timings import timings_name
from ..errors import CheckpointError, CheckpointExists, TreeckptError
from ..io.comm.collective import all_gather
from ..io.comm.comm import Comm
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.leftovers import list_leftovers
from ..io.storage.memory import aligned_buffer
from ..io.storage.metadata_files import read_sidecar, read_timings, rebuild_from_shards
from ..io.storage.shard_reader import OpenedShard, matches, open_shard
from ..io.storage.store import Store
from ..io.timing import Recorder
from ..reports import Problem, VerifyReport

SHOWN = 5
STEP = 8 << 20
"""Bytes that are read at a time."""


def verify_checkpoint(checkpoint: Checkpoint) -> VerifyReport:
    """See `treeckpt.verify`."""
    recorder = Recorder(0)
    store, index, sizes = checkpoint.store, checkpoint.index, checkpoint.sizes
    checkpoint.check_against_files()
    problems: list[Problem] = []
    headers: list[tuple[int, ShardHeader]] = []
    nbytes = 0
    for file in index.file_list:
        opened, bad = survey_shard(store, index, file, sizes.get(file.name), keep=True)
        problems += [_problem(index, part) for part in bad]
        if opened is not None and not bad:
            nbytes += file.nbytes
            try:
                headers.append((file.header, decode_header(opened.header, f"{store.url}/{file.name}")))
            except TreeckptError as error:
                problems.append(Problem(file.name, str(error), 0, file.header))
    if not problems:
        try:
            if folded_index(rebuild(headers, store.url)) != folded_index(index):
                problems.append(Problem(INDEX_NAME, "it is not the index that the shards describe"))
        except CheckpointError as error:
            problems.append(Problem(INDEX_NAME, str(error)))
    try:
        read_timings(store, index.save_id)
    except (TreeckptError, OSError) as error:
        problems.append(Problem(timings_name(index.save_id), str(error)))
    problems += _sidecar_problems(checkpoint)
    left = list_leftovers(store, sizes, known=index.save_id)
    return VerifyReport(store.url, len(index.file_list), nbytes, tuple(problems), recorder.seconds, leftovers=left)


def _problem(index: Index, bad: BadBytes) -> Problem:
    leaves = tuple(sorted({d.path for hurt in damaged_leaves(index, [bad]).values() for d in hurt}))
    more = f" and {len(leaves) - SHOWN} more" if len(leaves) > SHOWN else ""
    of = f" of {', '.join(path or '<root>' for path in leaves[:SHOWN])}{more}" if leaves else ""
    return Problem(bad.file, f"bytes {bad.start}:{bad.stop}{of}: {bad.why}", bad.start, bad.stop, leaves)


def _sidecar_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    store, index = checkpoint.store, checkpoint.index
    for sidecar in index.sidecars:
        name = stored_name(index.save_id, sidecar.name)
        found = checkpoint.sizes.get(name)
        try:
            if found is not None and found > sidecar.nbytes:
                yield Problem(name, f"the file goes on after byte {sidecar.nbytes}", sidecar.nbytes, found)
            read_sidecar(store, index, sidecar.name)
        except (TreeckptError, OSError) as error:
            yield Problem(name, str(error), 0, sidecar.nbytes)


def publish_rebuilt(store: Store, *, replace: bool) -> Index:
    """See `treeckpt.rebuild_index`."""
    if not replace and INDEX_NAME in store.sizes():
        raise CheckpointExists(
            store.url, expected=f"no {INDEX_NAME}", found="one", hint="Pass replace=True to make it anew"
        )
    index = rebuild_from_shards(store)
    store.publish(INDEX_NAME, encode_index(index), replace=replace)
    return index


# damaged bytes -------------------------------------------------------------------------------------------------------
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
