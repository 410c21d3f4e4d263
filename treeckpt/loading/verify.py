"""Verifies a checkpoint against its checksums and its index, and rebuilds a lost index."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.format.damage import BadBytes, damaged_leaves
from ..core.format.index import INDEX_NAME, encode_index, folded_index, rebuild
from ..core.format.records import Index
from ..core.format.shard_header import ShardHeader, decode_header
from ..core.format.timings import timings_name
from ..errors import CheckpointError, CheckpointExists, TreeckptError
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.leftovers import list_leftovers
from ..io.storage.metadata_files import read_timings, rebuild_from_shards
from ..io.storage.store import Store
from ..io.timing import Recorder
from ..reports import Problem, VerifyReport
from .damage_scan import survey_shard

__all__ = ["publish_rebuilt", "verify_checkpoint"]

SHOWN = 5


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
        problems += _compare_index(index, headers, store)
    try:
        read_timings(store, index.save_id)
    except (TreeckptError, OSError) as error:
        problems.append(Problem(timings_name(index.save_id), str(error)))
    left = list_leftovers(store, sizes, known=index.save_id)
    return VerifyReport(store.url, len(index.file_list), nbytes, tuple(problems), recorder.seconds, leftovers=left)


def _problem(index: Index, bad: BadBytes) -> Problem:
    leaves = tuple(sorted({d.path for hurt in damaged_leaves(index, [bad]).values() for d in hurt}))
    more = f" and {len(leaves) - SHOWN} more" if len(leaves) > SHOWN else ""
    of = f" of {', '.join(path or '<root>' for path in leaves[:SHOWN])}{more}" if leaves else ""
    return Problem(bad.file, f"bytes {bad.start}:{bad.stop}{of}: {bad.why}", bad.start, bad.stop, leaves)


def _compare_index(index: Index, headers: Sequence[tuple[int, ShardHeader]], store: Store) -> list[Problem]:
    try:
        same = folded_index(rebuild(headers, store.url)) == folded_index(index)
    except CheckpointError as error:
        return [Problem(INDEX_NAME, str(error))]
    return [] if same else [Problem(INDEX_NAME, "it is not the index that the shards describe")]


def publish_rebuilt(store: Store, *, replace: bool) -> Index:
    """See `treeckpt.rebuild_index`."""
    if not replace and INDEX_NAME in store.sizes():
        raise CheckpointExists(
            store.url, expected=f"no {INDEX_NAME}", found="one", hint="Pass replace=True to make it anew"
        )
    index = rebuild_from_shards(store)
    store.publish(INDEX_NAME, encode_index(index), replace=replace)
    return index
