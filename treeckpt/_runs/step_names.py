"""Finds the directories of steps in a run, by their names.

A step's directory has the name `step_00000100`, with as many digits as it may have. A manager may be given another
pattern, as `checkpoint-{step}`; the index of every step that it saves records that. So of a run of which only the files
are known, a directory is that of a step where its name fits `STEP_PATTERN`, or a pattern that an index in the run
records. What has neither such a name nor such an index is no step, whatever numbers its name has.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping

from .._core.format.files import (
    STEP_PATTERN,
    CheckpointId,
    id_name,
    is_step_name,
    numbers_in,
    step_name,
    step_of,
)
from .._core.format.index import INDEX_NAME
from .._core.format.lineage import Lineage
from .._io.storage.checkpoint import LruStatCache, StatCache
from .._io.storage.open import open_run
from .._io.storage.store import RunStore, Store
from ..errors import StoreError, TreeckptError
from .index_summary import read_summary

LOOKED_AT = 3
"""Directories of names that differ in their numbers alone of which an index is looked for, at most."""
KINDS = 8
"""Kinds of such names of a directory, at most."""


def recorded_patterns(lineages: Iterable[Lineage | None]) -> frozenset[str]:
    """Returns the patterns that indexes of a run record; a text in the place of a step fits itself alone."""
    return frozenset(lineage.name for lineage in lineages if lineage is not None and lineage.name)


def pattern_recorded(folder: Store, cache: StatCache) -> str:
    """Returns the pattern, or the text in its place, that a directory's index records; empty without any.

    Raises:
        StoreError: it could not be read.
    """
    index = folder.entry(INDEX_NAME) if folder.traits.follow_links or not folder.is_link else None
    if index is None:
        return ""
    try:
        lineage = read_summary(folder, index, cache).lineage
    except StoreError:
        raise
    except TreeckptError:
        return ""
    return lineage.name if lineage is not None else ""


def step_names(run: RunStore, cache: StatCache | None = None) -> list[str]:
    """Returns the names of the directories of steps in a run; of names of another pattern few indexes are read.

    Raises:
        StoreError: it could not be read.
    """
    names, kinds = run.names(), dict[str, list[str]]()
    others = [name for name in names if numbers_in(name) and not is_step_name(name)]
    for name in sorted(others, key=numbers_in, reverse=True):
        kinds.setdefault(re.sub("[0-9]+", "0", name), []).append(name)
    looked_at = [name for kind in list(kinds.values())[:KINDS] for name in kind[:LOOKED_AT]]
    cache = cache or LruStatCache(0)
    patterns = {pattern_recorded(run.folder(name), cache) for name in looked_at}
    return [name for name in names if step_of(name, patterns) is not None]


def is_run(run: RunStore, cache: StatCache | None = None) -> bool:
    """Whether a run has directories of steps.

    Raises:
        StoreError: it could not be read.
    """
    return run.has_directory(is_step_name) or bool(step_names(run, cache))


def has_steps(folder: Store) -> bool:
    """Whether directories named as steps are below a directory; False where that could not be read."""
    with contextlib.suppress(TreeckptError):
        below = [name for name, entry in folder.entries().items() if not entry.regular]
        if any(map(is_step_name, below)):
            return True
        return any(map(numbers_in, below)) and bool(step_names(open_run(folder.place)))
    return False


def step_folder(run: RunStore, step: CheckpointId, pattern: str, cache: StatCache) -> Store:
    """Returns the directory of a step, whether or not it exists; of several of one step, that which counts.

    Args:
        pattern: by which the caller names steps.

    Raises:
        StoreError: the run could not be read.
    """
    usual = run.folder(id_name(step, pattern))
    if isinstance(step, str) or usual.entry(INDEX_NAME) is not None:
        return usual
    same = [usual]
    for name in run.names():
        if step not in numbers_in(name):
            continue
        folder = run.folder(name)
        if step in (step_of(name, (pattern,)), step_of(name, (pattern_recorded(folder, cache),))):
            same.append(folder)
    return that_counts(same, pattern)


def that_counts(folders: Iterable[Store], pattern: str = STEP_PATTERN) -> Store:
    """Returns, of directories of one step, one that has an index, if possible that with the name a manager gives."""

    def rank(folder: Store) -> tuple[bool, bool, bool]:
        shown = folder.traits.follow_links or not folder.is_link
        usual = folder.name == step_name(step_of(folder.name, (pattern,)) or 0, pattern)
        return shown and folder.entry(INDEX_NAME) is not None, folder.modified_ns() is not None, usual

    return max(folders, key=rank)


def by_step(folders: Iterable[Store], patterns: Collection[str] = ()) -> dict[int, list[Store]]:
    """Returns the directories of each step."""
    steps: dict[int, list[Store]] = {}
    for folder in folders:
        if (step := step_of(folder.name, patterns)) is not None:
            steps.setdefault(step, []).append(folder)
    return steps


def superseded(folders: Iterable[Store], patterns: Collection[str]) -> Mapping[str, str]:
    """Returns the names of directories whose step counts by another directory, with the name of that."""
    several = ((that_counts(same).name, same) for same in by_step(folders, patterns).values() if len(same) > 1)
    return {folder.name: counts for counts, same in several for folder in same if folder.name != counts}


def links_and_other_names(run: RunStore, pattern: str, patterns: Collection[str]) -> dict[int, str]:
    """Returns the names of the directories of those steps that are links, or not in one of the name a manager gives.

    Args:
        pattern: by which the manager names steps.
        patterns: of all steps of the run.
    """
    steps = by_step(map(run.folder, run.names()), patterns)
    counted = ((step, same[0] if len(same) == 1 else that_counts(same, pattern)) for step, same in steps.items())
    return {
        step: one.name
        for step, one in counted
        if one.is_link or (one.name != step_name(step, pattern) and one.entry(INDEX_NAME) is not None)
    }
