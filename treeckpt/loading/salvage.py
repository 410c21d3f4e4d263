"""Loading what is left of a damaged checkpoint: all is compared with its checksums first, then the rest is loaded.

Whether a leaf can be had is a fact of the whole leaf, the same for every rank whatever part of it that rank wants:
else some would go on with the saved half of an array and others with their own. So the ranks share the shards out,
and tell each other what they found.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..core.format.check_index import check_against_files
from ..core.format.damage import BadBytes
from ..errors import MismatchError
from ..io.comm.collective import all_gather
from ..io.comm.comm import Comm
from ..io.storage.metadata_files import read_index
from ..io.storage.store import Store
from .damage_scan import survey_shard
from .match import LoadOptions

__all__ = ["salvaging", "survey"]


def survey(store: Store, comm: Comm) -> tuple[BadBytes, ...]:
    """All bytes of a checkpoint's shards that are not as saved. Every rank has to call.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: there is no index that can be read.
        RankError: another rank failed.
    """

    def own() -> list[BadBytes]:
        index, sizes = read_index(store), store.sizes()
        check_against_files(index, sizes, store.url)
        files = index.file_list[comm.rank :: comm.size]
        return [bad for file in files for bad in survey_shard(store, index, file, sizes.get(file.name))]

    found = [bad for part in all_gather(comm, f"load {store.url}", own, list[BadBytes]) for bad in part]
    return tuple(sorted(found, key=lambda bad: (bad.file, bad.start)))


def salvaging(stores: Sequence[Store], comm: Comm, options: LoadOptions, on_corrupt: str) -> LoadOptions:
    """The options of a load with what is damaged, where that is to be skipped.

    Raises:
        MismatchError: no such word, or several checkpoints.
    """
    if on_corrupt == "error":
        return options
    if on_corrupt != "skip" or len(stores) != 1:
        raise MismatchError(
            "on_corrupt",
            expected="'error', or 'skip' for one checkpoint",
            found=f"{on_corrupt!r:.40} for {len(stores)}",
            hint="Salvage the damaged checkpoint alone, save what came of it, and load the several then",
        )
    # all is compared now: not again before the first byte is written
    verify = True if options.verify == "first" else options.verify
    return msgspec.structs.replace(options, bad=survey(stores[0], comm), verify=verify)
