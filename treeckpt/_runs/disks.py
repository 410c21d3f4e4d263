"""Joins what ranks see of a run whose checkpoints lie on the private disks of several hosts.

A checkpoint is complete if it was committed on one disk at least, and every shard is on a disk that some rank sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .._core.format.files import parse_file_name
from .catalog import CheckpointInfo, disks_of, in_listing_order, prepared_summary
from .run import RunDirectory


def seen_here(run: RunDirectory) -> list[CheckpointInfo]:
    """Returns the checkpoints that this rank sees, and saves whose commit is not known on its disk, beside them."""
    infos: list[CheckpointInfo] = []
    for info in run.checkpoints(or_unread=True):
        infos.append(msgspec.structs.replace(info, saving=(), verification=None))
        if info.files in ("partial", "unread"):  # of a partial one the catalog has read the prepared index
            continue
        folder = run.store.folder(info.name)
        files = {name: entry for name, entry in folder.entries().items() if entry.regular}
        for name in files:
            if (kind := parse_file_name(name)) is None or kind.kind != "prepared" or kind.save_id == info.save_id:
                continue
            if (summary := prepared_summary(folder, name)) is not None:
                disks, save_id = disks_of(summary, files), summary.save_id
                other = CheckpointInfo(info.name, info.path, "partial", info.step, save_id, disks=disks)
                infos.append(msgspec.structs.replace(other, named_step=info.named_step))
    return infos


def joined_infos(views: Iterable[Sequence[CheckpointInfo]]) -> list[CheckpointInfo]:
    """Joins what several ranks see of one run into the list of its checkpoints over all disks.

    Args:
        views: of each rank, by rank.
    """
    by_name: dict[str, list[CheckpointInfo]] = {}
    for infos in views:
        for info in infos:
            by_name.setdefault(info.name, []).append(info)
    return in_listing_order(map(_joined, by_name.values()))


def _joined(infos: Sequence[CheckpointInfo]) -> CheckpointInfo:
    """Joins what several ranks see of one step: of several saves, the last that was committed on any disk."""
    committed = [info for info in infos if info.files in ("complete", "damaged") and info.save_id is not None]
    unread = next((info for info in infos if info.files == "unread"), None)
    if not committed:
        return unread or next((info for info in infos if info.files == "damaged"), infos[0])
    newest = max(committed, key=lambda info: (info.created_ns or 0, info.save_id or ""))
    same = [info for info in infos if info.save_id == newest.save_id]
    # of several with one status the first one, of the lowest rank
    base = next((info for info in same if info.files == "complete"), newest)
    disks = tuple(max(seen, key=lambda disk: disk.here) for seen in zip(*(info.disks for info in same), strict=True))
    base = msgspec.structs.replace(
        base,
        disks=disks,
        pinned=any(info.pinned for info in same),
        found_damaged=any(info.found_damaged for info in same),
    )
    lost = [disk.text for disk in disks if disk.here < disk.shards]
    if base.files == "complete" and lost:
        if unread is not None:
            return msgspec.structs.replace(base, files="unread", error=unread.error)
        return msgspec.structs.replace(
            base, files="damaged", error=f"on no disk that these ranks see: {'; '.join(lost)}"
        )
    return base
