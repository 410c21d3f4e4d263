"""Loading what is left of a damaged checkpoint: all is compared with its checksums first, then the rest is loaded.

Whether a leaf can be had is a fact of the whole leaf, the same for every rank whatever part of it that rank wants:
else some would go on with the saved half of an array and others with their own. So the ranks share the shards out,
and tell each other what they found.
"""

from __future__ import annotations

from .answers import pool
from .core.damage import BadBytes
from .io.codec import read_index
from .io.comm import Comm
from .io.store import Store
from .io.survey import survey_shard

__all__ = ["survey"]


def survey(store: Store, comm: Comm) -> tuple[BadBytes, ...]:
    """All bytes of a checkpoint's shards that are not as saved. Every rank has to call.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: there is no index that can be read.
        RankError: another rank failed.
    """

    def own() -> list[BadBytes]:
        index, sizes = read_index(store), store.sizes()
        files = index.file_list[comm.rank :: comm.size]
        return [bad for file in files for bad in survey_shard(store, index, file, sizes.get(file.name))]

    found = [bad for part in pool(comm, f"load {store.url}", own, list[BadBytes]) for bad in part]
    return tuple(sorted(found, key=lambda bad: (bad.file, bad.start)))
