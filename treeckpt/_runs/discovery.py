"""Finds out what a directory is: a checkpoint, a run, or a directory of runs; and lists a run once."""

from __future__ import annotations

import os
from pathlib import Path

from .._core.format.index import INDEX_NAME
from .._io.os_errors import shows_damage, wrap_read_error
from .._io.storage.checkpoint import LruStatCache, NewestIndex, StatCache
from .._io.storage.local_store import is_url, local_path
from .._io.storage.open import open_run, open_store
from .._io.storage.store import RunStore
from .catalog import (
    CheckpointInfo,
    OnRead,
    in_listing_order,
    is_checkpoint_file,
    read_info,
    read_infos,
    regular_files,
)
from .step_names import has_steps, is_run, step_names


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory itself contains files of a checkpoint, complete or not.

    Raises:
        StoreError: it could not be read.
    """
    if is_url(text := os.fspath(path)):
        entries = open_store(text).entries()
        return any(map(is_checkpoint_file, regular_files(entries))) or INDEX_NAME in entries
    try:
        with os.scandir(local_path(text)) as listing:  # a run may have thousands of directories: none is opened
            return any(
                e.name == INDEX_NAME or (is_checkpoint_file(e.name) and (e.is_symlink() or e.is_file()))
                for e in listing
            )
    except OSError as error:
        if not shows_damage(error):
            raise wrap_read_error(error, text) from error
        return False


def run_exists(run: str) -> bool:
    """Whether a path or URL exists and may be a run or a checkpoint.

    Raises:
        StoreError: an object store cannot be reached, or refuses.
    """
    if is_url(run):
        return bool(open_run(run).names() or open_store(run).entries())
    return Path(local_path(run)).is_dir()


def scan(
    run: str | os.PathLike[str] | RunStore,
    *,
    cache: StatCache | None = None,
    newest: NewestIndex | None = None,
    on_read: OnRead | None = None,
) -> list[CheckpointInfo]:
    """Lists every checkpoint of a run, newest first, then foreign directories; or the one checkpoint at the path.

    Where steps of a run are below a checkpoint at the path, all are listed. The newest is the one saved last. Abandoned
    branches follow after the lineage of the newest. Names that start with a dot and entries that are no directories are
    left out. A local directory that could not be read is listed as unread.

    Args:
        newest: as for `read_info`.

    Raises:
        StoreError: the run cannot be reached, or refuses.
    """
    cache, above = cache or LruStatCache(0), list[CheckpointInfo]()
    if isinstance(run, (str, os.PathLike)) and is_checkpoint(run):
        folder = open_store(run).listed()
        above = [read_info(folder, cache=cache, follow=True, newest=newest, or_unread=True)]
        if not has_steps(folder):
            return above
    steps = read_infos(open_run(run), cache, or_unread=True, newest=newest, on_read=on_read)
    return in_listing_order([*above, *(info for _, info in steps if not above or info.files != "foreign")])


def runs_below(run: RunStore) -> list[str]:
    """Returns the paths of the directories of a run that are runs themselves."""
    return [folder.place for folder in run.folders() if has_steps(folder)]


def run_places(folder: RunStore, cache: StatCache | None = None) -> list[str]:
    """Returns the paths of the runs in a directory that has no steps itself.

    Links are not followed.

    Args:
        cache: keeps the indexes that are read.

    Raises:
        StoreError: it, or one of them, could not be read.
    """
    cache = cache or LruStatCache(0)
    if is_run(folder, cache):
        return []
    inside = [one for one in map(folder.folder, folder.names()) if one.traits.follow_links or not one.is_link]
    return [one.place for one in inside if is_run(open_run(one.place), cache)]


def runs_in(folder: RunStore, cache: StatCache | None = None) -> dict[str, int]:
    """Returns the paths of the runs in such a directory, and how many steps each has; takes and raises the same."""
    return {place: len(step_names(open_run(place), cache)) for place in run_places(folder, cache)}
