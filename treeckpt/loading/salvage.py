"""Finds what is damaged in a checkpoint, so that a load can leave it out.

A leaf is damaged as a whole, for every rank, whatever part of it a rank wants: otherwise some ranks would continue with
the saved half of an array and others with their own. So the ranks divide the shards among them, compare all checksums,
and exchange what they found.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..core.format.damage import BadBytes
from ..errors import MismatchError
from ..io.comm.collective import all_gather
from ..io.comm.comm import Comm
from ..io.storage.checkpoint import Checkpoint
from .damage_scan import survey_shard
from .match import LoadOptions

__all__ = ["salvaging", "survey"]


def survey(checkpoint: Checkpoint, comm: Comm) -> tuple[BadBytes, ...]:
    """Returns all bytes of a checkpoint's shards that differ from what was saved. Every rank has to call.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: there is no index that can be read.
        RankError: another rank failed.
    """

    def own() -> list[BadBytes]:
        checkpoint.check_against_files()
        index, sizes = checkpoint.index, checkpoint.sizes
        files = index.file_list[comm.rank :: comm.size]
        return [bad for file in files for bad in survey_shard(checkpoint.store, index, file, sizes.get(file.name))]

    found = [bad for part in all_gather(comm, f"load {checkpoint.url}", own, list[BadBytes]) for bad in part]
    return tuple(sorted(found, key=lambda bad: (bad.file, bad.start)))


def salvaging(checkpoints: Sequence[Checkpoint], comm: Comm, options: LoadOptions, on_corrupt: str) -> LoadOptions:
    """Returns the options of a load, with the damaged bytes where `on_corrupt` is "skip".

    Raises:
        MismatchError: another value of `on_corrupt`, or several checkpoints.
    """
    if on_corrupt == "error":
        return options
    if on_corrupt != "skip" or len(checkpoints) != 1:
        raise MismatchError(
            "on_corrupt",
            expected="'error', or 'skip' for one checkpoint",
            found=f"{on_corrupt!r:.40} for {len(checkpoints)}",
            hint="Salvage the damaged checkpoint alone, save what came of it, and load the several then",
        )
    # all is compared now: not again before the first byte is written
    verify = True if options.verify == "first" else options.verify
    return msgspec.structs.replace(options, bad=survey(checkpoints[0], comm), verify=verify)
