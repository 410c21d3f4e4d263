"""Finds runs, steps and leaves by words, for the search that every page opens with Ctrl-K."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

import msgspec

from treeckpt._runs.catalog import CheckpointInfo
from treeckpt.errors import TreeckptError, visible

from ..pages.checkpoints import shorten
from ..store.index_reader import StillReading
from ..store.library import Library, Listed, Run
from .summary import summarize_run

MAX_RUNS, MAX_STEPS, MAX_LEAVES = 6, 8, 12
"""Items of each kind."""
LEAF_SECONDS = 0.3
"""Seconds after which no leaves of another run are searched."""

_UNREADABLE = (StillReading, TreeckptError, OSError, ArithmeticError, RecursionError)
"""What the index of one checkpoint may raise; the others are searched all the same."""


class FoundItem(msgspec.Struct, frozen=True):
    """A run, a checkpoint or a leaf."""

    kind: Literal["run", "step", "leaf"]
    text: str
    detail: str
    """Where it is, in a few words."""
    href: str
    """The address of its page, relative to the root of the dashboard."""


class FindPage(msgspec.Struct, frozen=True):
    """What was found: runs, then steps, then leaves, at most a few of each."""

    q: str
    items: list[FoundItem]
    more: bool
    """Whether more runs, steps or leaves are called so."""
    complete: bool
    """Whether the leaves of every run were searched: a large index may still be read, and time is limited."""


def find_page(library: Library, q: str = "", at: str = "") -> FindPage:
    """Runs, steps and leaves whose names have all words of `q`.

    A word may also be part of the name of the run of a step; a number is the beginning of a step, with or without
    commas. Leaves are those of the checkpoint `at`, and of the newest good checkpoint of each run.

    Args:
        at: the id of a run or a checkpoint, which comes first; of any other id nothing is known.
    """
    words = q.casefold().split()
    library.start_scans(library.runs)
    listed = {run.id: library.checkpoints(run) for run in library.runs}
    pairs = ((run, *pair) for run in library.runs for pair in listed[run.id])
    shown = next((one for one in pairs if one[1] == at), None)
    first = shown[0].id if shown is not None else at
    runs = sorted(library.runs, key=lambda run: run.id != first)
    kinds = [
        list(islice(_found_runs(library.runs, words), MAX_RUNS + 1)),
        list(islice(_found_steps(runs if words else runs[: 1 if at else 0], listed, words), MAX_STEPS + 1)),
    ]
    trees = [shown] if shown is not None and shown[2].leaves is not None else []
    for run in runs:
        newest = summarize_run(run, listed[run.id], library.policies).resume.newest
        if newest is not None and (shown is None or newest[0] != shown[1]):
            trees.append((run, *newest))
    leaves, complete = _found_leaves(library, trees, words) if words else ([], True)
    kinds.append(leaves)
    limits = (MAX_RUNS, MAX_STEPS, MAX_LEAVES)
    items = [item for kind, limit in zip(kinds, limits, strict=True) for item in kind[:limit]]
    more = any(len(kind) > limit for kind, limit in zip(kinds, limits, strict=True))
    return FindPage(q, items, more, complete)


def _is_of_run(word: str, run: Run) -> bool:
    return word in f"step {run.name.casefold()}"


def _title(info: CheckpointInfo) -> str:
    return f"step {info.step:,}" if info.step is not None else visible(info.name)


def _found_runs(runs: Sequence[Run], words: Sequence[str]) -> Iterator[FoundItem]:
    for run in runs:
        path = visible(run.store.url)
        if all(word in f"{run.name} {path}".casefold() for word in words):
            yield FoundItem("run", run.name, path, f"runs/{run.id}")


def _found_steps(runs: Sequence[Run], listed: Mapping[str, Listed], words: Sequence[str]) -> Iterator[FoundItem]:
    """Returns checkpoints, newest first; those of exactly the number before those of which it is the beginning."""
    plain = {word: word.replace(",", "").replace("_", "") for word in words}
    numbers = {word: digits.lstrip("0") or "0" for word, digits in plain.items() if digits.isdecimal()}
    later: list[FoundItem] = []
    for run in runs:
        rest = [word for word in words if word in numbers or not _is_of_run(word, run)]
        if words and not rest:
            continue  # the run is found, which leads to all of them
        for checkpoint_id, info in listed[run.id]:
            step = "" if info.step is None else str(info.step)
            if not all(
                step.startswith(numbers[word]) if word in numbers and step else word in info.name.casefold()
                for word in rest
            ):
                continue
            detail = f"{info.status_text} · {run.name}"
            item = FoundItem("step", _title(info), detail, f"checkpoints/{checkpoint_id}")
            if not numbers or step in numbers.values():
                yield item
            elif len(later) <= MAX_STEPS:
                later.append(item)
    yield from later


def _found_leaves(
    library: Library, trees: Sequence[tuple[Run, str, CheckpointInfo]], words: Sequence[str]
) -> tuple[list[FoundItem], bool]:
    """Returns leaves of these checkpoints until there are more than MAX_LEAVES, and whether none was left out."""
    items: list[FoundItem] = []
    complete, end = True, time.monotonic() + LEAF_SECONDS
    for run, checkpoint_id, info in trees:
        if len(items) > MAX_LEAVES:
            break
        if time.monotonic() > end:
            return items, False
        rest = [word for word in words if not _is_of_run(word, run)] or words
        try:
            leaves, _ = library.outline(library.listed(checkpoint_id, run, info)).search(
                " ".join(rest), count=MAX_LEAVES + 1
            )
        except _UNREADABLE:
            complete = False
            continue
        place, at = f"{_title(info)} · {run.name}", f"checkpoints/{checkpoint_id}/leaves"
        items += [FoundItem("leaf", shorten(leaf.path), place, f"{at}/{leaf.number}") for leaf in leaves]
    return items, complete
