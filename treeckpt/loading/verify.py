"""Is a checkpoint what its checksums and its index say, and can a lost index be made again?"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.format.check_index import check_against_files
from ..core.format.damage import BadBytes, damaged_leaves
from ..core.format.index import INDEX_NAME, encode_index, folded_index, rebuild
from ..core.format.records import Index
from ..core.format.shard_header import ShardHeader, decode_header
from ..core.format.timings import timings_name
from ..errors import CheckpointError, CheckpointExists, TreeckptError
from ..io.storage.leftovers import list_leftovers
from ..io.storage.metadata_files import read_index, read_timings, rebuild_from_shards
from ..io.storage.shard_reader import Opened
from ..io.storage.store import Store
from ..io.timing import Recorder
from ..reports import Problem, VerifyReport
from .damage_scan import open_for_survey, survey_opened

__all__ = ["publish_rebuilt", "verify_store"]

SHOWN = 5


def verify_store(store: Store) -> VerifyReport:
    """See `treeckpt.verify`."""
    recorder, index = Recorder(0), read_index(store)
    problems: list[Problem] = []
    headers: list[tuple[int, ShardHeader]] = []
    nbytes, sizes = 0, store.sizes()
    check_against_files(index, sizes, store.url)
    for file in index.file_list:
        opened = open_for_survey(store, index, file, sizes.get(file.name), keep=True)
        bad = [opened] if isinstance(opened, BadBytes) else survey_opened(store, opened, sizes[file.name])
        problems += [_problem(index, part) for part in bad]
        if isinstance(opened, Opened) and not bad:
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
