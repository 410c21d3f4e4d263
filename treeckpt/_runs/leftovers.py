"""Removes what dead saves left beside a single checkpoint."""

from __future__ import annotations

import os
import time

import msgspec

from .._inspect.deletion import CleanReport, RetainedDirectory, foreign_files
from .._io.storage.deletions import GRACE, plan_removal, remove_leftovers, restore_plain_names
from .._io.storage.open import open_store
from .._io.storage.plain_names import copies_of
from ..errors import TreeckptError


def clean_checkpoint(path: str | os.PathLike[str], *, grace: float = GRACE, dry_run: bool = False) -> CleanReport:
    """Removes what dead saves left in a checkpoint's directory; the checkpoint itself is kept.

    Args:
        grace, dry_run: same as for `RunDirectory.clean`.
    """
    folder = open_store(path)
    entries = folder.entries()
    copies = copies_of(folder, entries)
    others = foreign_files(name for name, entry in entries.items() if entry.regular and name not in copies)
    foreign = {folder.name: others} if others else {}
    report = CleanReport(folder.place, {}, (), (), dry_run=dry_run, foreign=foreign)
    if not dry_run:
        restore_plain_names(folder, entries)
    planned = plan_removal(folder, time.time_ns(), grace)
    if planned is None:
        return report
    if isinstance(planned, RetainedDirectory):
        return msgspec.structs.replace(report, left=(planned,))
    if not dry_run:
        try:
            why = remove_leftovers(folder, planned)
        except (OSError, TreeckptError) as error:
            failed = RetainedDirectory(planned.name, f"{type(error).__name__}: {error}")
            return msgspec.structs.replace(report, failed=(failed,))
        if why:
            return msgspec.structs.replace(report, left=(RetainedDirectory(planned.name, why),))
    return msgspec.structs.replace(report, removed=(planned,))
