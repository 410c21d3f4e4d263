"""Shards that several checkpoints of a run share, and which of them must stay when one of these is deleted.

An index may name shards in the directory of another checkpoint of its run, see `_core.format.references`. Nobody counts
them: who deletes files of a save there reads the indexes beside it, where other checkpoints may name any. They name no
first shard of a rank, and none of a save that was not incremental, as the manifest in its first shard says.

A save and a deletion find each other as in `deletions`. The save writes a lease and `shared.<save id>.json`, the mark,
into the directory of each save whose files its index names, before it publishes the index
(`deletions.mark_shared_files`). Then it looks for the lock of a deletion there, and looks for the files when there is
none; the deletion writes the lock before it looks for the mark. A deletion that finds a mark cannot see the index of a
save that is not committed yet, and so it deletes nothing where there is a lease. Before that the save holds a lease on
the checkpoint that it follows, whose index names the same files. The mark stays as long as a file that is named.

Where an index beside it cannot be read, or was taken away from a checkpoint that is still being read, no file of a save
with a mark is deleted. An index that is missing can be made again from the headers of the shards, which name the same
files. Where something has deleted the mark, what indexes name stays all the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping

import msgspec

from ..._core.format.files import parse_file_name
from ..._core.format.references import decode_shared
from ..._core.format.shard_header import parse_shard_name, shard_name
from ..._inspect.deletion import NeededFiles
from ...errors import CheckpointNotFound, TreeckptError
from .checkpoint import read_index
from .kept_files import has_readers
from .shard_reader import read_header
from .store import Store, for_each

Sharing = Mapping[str, Mapping[str, str] | None]
"""Of each directory of a run the shards that its index names in other directories, with the names of these directories;
None where the index could not be read, or was taken away from one that is still being read."""


def needed_files(folder: Store, names: Collection[str], sharing: Sharing | None = None) -> NeededFiles:
    """Returns which files of a directory other checkpoints of its run need, or may need.

    Args:
        names: the files there.
        sharing: what the other directories share; by default it is read.

    Raises:
        StoreError: the run could not be listed.
    """
    kinds = [kind for name in names if (kind := parse_file_name(name)) is not None]
    marked = {kind.save_id for kind in kinds if kind.kind == "shared"}
    parsed = {name: named for name in names if (named := parse_shard_name(name)) is not None}
    shards = frozenset(name for name, (save_id, _, _, part) in parsed.items() if part or save_id in marked)
    if sharing is None:  # else it costs nothing to look
        alone = {save for save in {parsed[name][0] for name in shards} - marked if _was_alone(folder, save, parsed)}
        shards = frozenset(name for name in shards if parsed[name][0] not in alone)
    if not shards:
        return NeededFiles()
    # first of all: whose lease is gone by then has published its index before that is read
    held = bool(marked) and has_readers(folder, time.time_ns())
    if sharing is None:
        others = folder.run().folders()
        sharing = dict(zip([other.name for other in others], for_each(folder, read_shared, others), strict=True))
    found: dict[str, frozenset[str]] = {}
    for other, shared in sharing.items():
        if other != folder.name and shared:
            found[other] = shards & {name for name, directory in shared.items() if directory == folder.name}
    unread = tuple(sorted(other for other, shared in sharing.items() if shared is None and other != folder.name))
    named = frozenset(name for needed in found.values() for name in needed)
    by = tuple(sorted(other for other, needed in found.items() if needed))
    perhaps = frozenset(name for name in shards if (unread or held) and parsed[name][0] in marked)
    return NeededFiles(named | perhaps, by, unread if perhaps else (), held and bool(perhaps))


class _Manifest(msgspec.Struct):
    """What is read of a manifest."""

    references: object = None


def _was_alone(folder: Store, save_id: str, shards: Mapping[str, tuple[str, int, int, int]]) -> bool:
    """Whether a save was not incremental; False where that is not known.

    Args:
        shards: those of the directory, as `parse_shard_name` takes their names apart.
    """
    with contextlib.suppress(TreeckptError, OSError, msgspec.MsgspecError):
        for name, (owner, rank, _, part) in shards.items():
            if (owner, rank, part) == (save_id, 0, 0):
                manifest = read_header(folder, name)[1].manifest
                return manifest is not None and msgspec.json.decode(manifest, type=_Manifest).references is None
    return False


def read_shared(folder: Store) -> Mapping[str, str] | None:
    """Returns which shards in other directories of the run a checkpoint needs, as `Sharing` has it."""
    try:
        return read_index(folder).shared_names
    except CheckpointNotFound:
        names = list(folder.sizes())
        kinds = {kind.kind for name in names if (kind := parse_file_name(name)) is not None}
        if not kinds & {"deleted", "progress"}:
            return _shared_by_headers(folder, names)
        if not has_readers(folder, time.time_ns()):
            return {}  # a save that is under way holds a lease on the checkpoint that it follows
        # whoever reads it has opened it before its index was taken away, or makes that again
        return None if "deleted" in kinds else _shared_by_headers(folder, names)
    except TreeckptError:
        return None


def _shared_by_headers(folder: Store, names: Collection[str]) -> Mapping[str, str] | None:
    found: dict[str, str] = {}
    try:
        for name in names:
            if (named := parse_shard_name(name)) is not None and not named[3]:
                _, header = read_header(folder, name)
                for file in decode_shared(header.shared, name):
                    home = file.home
                    found[shard_name(home.save_id, header.rank, header.world, file.home_part)] = home.directory
    except (TreeckptError, OSError):
        return None
    finally:
        folder.close()  # a deletion that follows would free no byte of a shard that stays open
    return found
