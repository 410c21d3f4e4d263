"""Is a checkpoint what its checksums and its index say, and can a lost index be made again?"""

from __future__ import annotations

from typing import Any

from .core.errors import CheckpointExists, CorruptError, TreeckptError
from .core.index import INDEX_NAME, encode_index, rebuild
from .core.records import Index
from .io.codec import read_index, read_timings, rebuild_from_shards
from .io.record import Recorder
from .io.shards import open_shard, read_header, verify_shard
from .io.store import Store
from .reports import Problem, VerifyReport

__all__ = ["publish_rebuilt", "verify_store"]


def verify_store(store: Store) -> VerifyReport:
    """See `treeckpt.verify`."""
    recorder, index = Recorder(0), read_index(store)
    problems: list[Problem] = []
    headers: list[Any] = []
    nbytes, sizes = 0, store.sizes()
    for file in index.file_list:
        try:
            opened = open_shard(store, index, file, sizes.get(file.name))
            headers.append(read_header(store, file.name, file_size=sizes.get(file.name)))
            nbytes += verify_shard(store, opened)
        except (TreeckptError, OSError) as error:
            problems.append(Problem(file.name, str(error)))
    if not problems:
        problems += _compare_index(index, headers, store)
    try:
        read_timings(store, index.save_id)
    except (TreeckptError, OSError) as error:
        problems.append(Problem(f"timings.{index.save_id}.json", str(error)))
    return VerifyReport(store.url, len(index.file_list), nbytes, tuple(problems), recorder.seconds)


def _compare_index(index: Index, headers: list[Any], store: Store) -> list[Problem]:
    try:
        same = rebuild(headers, store.url) == index
    except CorruptError as error:
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
