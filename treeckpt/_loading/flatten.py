"""Gives a checkpoint files of its own in the place of those that it shares with others of its run.

Each shared shard is copied into the checkpoint's directory, compared with its checksums on the way, with a header that
says what it is there. Then the index is replaced, in one step: before it the checkpoint is as it was, and behind it
names no other directory. What a process that was killed has left is written over by the next one, or goes with a
clean-up.
"""

from __future__ import annotations

import secrets

import msgspec

from .._core.format.index import INDEX_NAME, MAX_INDEX, encode_index
from .._core.format.records import File, Index, file_table
from .._core.format.shard_header import encode_header, shard_name, with_hashes
from .._io.os_errors import write_errors_wrapped
from .._io.process import this_process
from .._io.storage.checkpoint import Checkpoint, header_here, replaced_meanwhile
from .._io.storage.deletions import hold_for_repair, index_state
from .._io.storage.kept_files import hold_lease
from .._io.storage.memory import aligned_buffer
from .._io.storage.published_index import check_still_there, error_of_gone_files
from .._io.storage.shard_reader import check_blocks, read_header
from .._io.storage.store import Store
from ..errors import CheckpointError

COPIED_NBYTES = 8 << 20
"""Bytes that are copied at a time, at most, unless a block has more."""


def flatten_store(store: Store) -> list[str]:
    """Copies what a checkpoint shares into its own directory; returns the names of the new shards.

    Raises:
        CorruptError: a shared shard is missing or damaged; nothing has changed then.
        CheckpointError: another process deletes, repairs or replaces the checkpoint, or files cannot be written.
    """
    with hold_lease(store), write_errors_wrapped(store.url):
        checkpoint, before = Checkpoint(store), index_state(store)
        index, made, headers = checkpoint.index, list[str](), dict[tuple[int, int], int]()
        if not isinstance(before, bytes) or encode_index(index) != before:
            raise CheckpointError(store.url, expected="an index that stays", found="one that was replaced meanwhile")
        for file in index.file_list:
            headers[file.rank, file.part] = file.header
            if file.directory:
                name = shard_name(index.save_id, file.rank, index.world, file.part)
                headers[file.rank, file.part] = _copy_shard(checkpoint, index, file, name)
                made.append(name)
        if made:
            assert index.references is not None, "they name the files that were copied"
            own = msgspec.structs.replace(index.references, homes=(), home=(), home_part=())
            rows = [(f.rank, f.part, f.stream, f.nbytes, headers[f.rank, f.part]) for f in index.file_list]
            _publish(store, before, msgspec.structs.replace(index, files=file_table(rows), references=own))
        return made


def _publish(store: Store, before: bytes, index: Index) -> None:
    """Replaces the index that was read, in one step.

    Raises:
        CheckpointError: there is another one, or copies are gone, which a clean-up took where this process was stopped
            for minutes, or as `hold_for_repair`.
    """

    def check() -> None:
        if index_state(store) != before:
            raise replaced_meanwhile(store)

    data = encode_index(index)
    if (error := error_of_gone_files(store, index)) is not None:
        raise error
    with hold_for_repair(store):
        check()
        if store.traits.conditional:
            store.compare_and_swap(INDEX_NAME, data, holds=lambda found: found == before, limit=MAX_INDEX)
        else:
            store.publish(INDEX_NAME, data, replace=True, check=check)
    check_still_there(store, data, before)


def _copy_shard(checkpoint: Checkpoint, index: Index, file: File, name: str) -> int:
    """Copies a shared shard to a file of its own, durably; returns the bytes of its header."""
    store, place, shard = checkpoint.store, checkpoint.place, checkpoint.shard(file)
    _, header = read_header(store, file.name, file_size=checkpoint.sizes.get(file.name))
    header = header_here(index, file, header)
    head = encode_header(header)
    step = max(COPIED_NBYTES // header.block, 1) * header.block
    temporary = f".{name}.{this_process().tag}{secrets.token_hex(4)}.tmp" if place.traits.renames else name
    writer = place.create(temporary, len(head) + file.nbytes)
    try:
        first = aligned_buffer(len(head))
        first[:] = with_hashes(head, header.hashes)
        writer.write(0, first)
        for start in range(0, file.nbytes, step):
            part = aligned_buffer(min(step, file.nbytes - start))  # an upload may be sending the one before
            store.read_into(file.name, file.header + start, part)
            check_blocks(store, shard, start, part)
            writer.write(len(head) + start, part)
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    if temporary != name:
        place.rename(temporary, name, replace=True)
        place.sync()
    return len(head)
