"""The page of what changed most between two checkpoints: arrays and layers by relative change.

A process reads both checkpoints once, and prints how many bytes it has read. What it has measured is kept in the cache
as long as the files stay the same.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from treeckpt._core.text import json_number
from treeckpt._core.tree.spec import BLOB_KINDS
from treeckpt._inspect.diff import comparable, diff
from treeckpt._inspect.outline import Outline, words_in
from treeckpt._inspect.ranking import LayerChange, is_optimizer_state, layer_changes, relative_changes
from treeckpt._io.storage.local_store import for_reading
from treeckpt._io.storage.store import DirectoryEntry, Store
from treeckpt._io.storage.wrapped_store import CountingStore
from treeckpt._loading.compare import measured_pairs
from treeckpt._loading.run_load import opened
from treeckpt._runs.statistics_store import ChangeStore, ComparedSave
from treeckpt._runs.verification import fingerprint_of
from treeckpt.errors import visible

from ..pages.checkpoints import PAGE_ROWS, CheckpointRow, next_start, shorten
from ..store.jobs import Failed, JobQueue, ProcessJob, ReadPrinter, folder_at, place_of, send
from ..store.library import Library, NotFound
from .diff import OpenPair

ChangesBy = Literal["array", "layer"]
ChangesPart = Literal["parameters", "optimizer", "all"]
"""What is ranked: what is no state of an optimizer, that state, or both together."""
KEPT_COMPARISONS = 4
"""Comparisons whose order stays in memory."""


def main(arguments: Sequence[str]) -> None:
    """Measures two checkpoints.

    Args:
        arguments: the URL of a run, empty for a local folder, and the name of the folder in it, or its path, of the
            first checkpoint and of the second one; the cache directory.
    """
    run_a, name_a, run_b, name_b, cache = arguments
    printer = ReadPrinter()
    folders = [folder_at(run_a, name_a), folder_at(run_b, name_b)]
    # Before anything is read: files that change meanwhile have another fingerprint.
    before = [folder.listed().entries() for folder in folders]
    first, second = (CountingStore(for_reading(folder), printer.add) for folder in folders)
    with opened(first) as a, opened(second) as b:
        a.check_against_files()
        b.check_against_files()
        saves = (_save(folders[0], before[0], a.index.save_id), _save(folders[1], before[1], b.index.save_id))
        both = comparable(a.index, b.index, diff(a.index, b.index))
        pairs = [(x, y) for x, y in both if x.spec is not None and x.spec.kind not in BLOB_KINDS]
        if not ChangeStore(Path(cache)).record(*saves, measured_pairs(a, b, pairs)):
            send(Failed("the result could not be written to the cache"))


def _save(folder: Store, entries: Mapping[str, DirectoryEntry], save_id: str) -> ComparedSave:
    return ComparedSave(folder.place, save_id, fingerprint_of(entries, save_id))


class ChangeRow(msgspec.Struct, frozen=True):
    """By how much an array, or all arrays of a layer, differ. None for what no number holds."""

    path: str
    """The path of the array in the second checkpoint, or of the layer."""
    leaf_a: int | None
    leaf_b: int | None
    """Numbers of the leaves; None for a layer."""
    arrays: int
    changed: int
    """Arrays of the layer, or elements of the array, of which a bit differs."""
    elements: int | None
    not_finite: int
    """Changed elements of which one is infinite or not a number."""
    before: float | str | None
    """Euclidean norm in the first checkpoint; "Infinity" where it overflows, as `change` and `max_abs`."""
    change: float | str | None
    """Norm of the difference."""
    relative: float | None
    """`change` over `before`; None for infinity: zeros that changed, or elements that are not finite."""
    cosine: float | None
    max_abs: float | str | None
    """Largest difference; None where no two elements are finite, and for a layer."""


class ChangesPage(msgspec.Struct, frozen=True):
    """What changed most between two checkpoints."""

    a: CheckpointRow | None
    b: CheckpointRow | None
    known: bool
    """Whether it was measured, and the files are still the same."""
    running: bool
    """Whether it is being measured: ask again."""
    share: float
    """How much of it is read, from 0 to 1."""
    error: str | None
    """Why it could not be measured."""
    by: ChangesBy
    part: ChangesPart
    parts: dict[ChangesPart, int]
    """How many arrays each part has."""
    q: str
    start: int
    next: int | None
    arrays: int
    changed: int
    """Arrays of which a bit differs."""
    layers: int
    """Layers of the part."""
    rows: list[ChangeRow]


class _ChangeJob(ProcessJob):
    task = "measured it"


class _Ranked:
    """What was measured of two checkpoints, with the order of its arrays and layers."""

    def __init__(self, columns: dict[str, np.ndarray], a: Outline, b: Outline) -> None:
        self.columns, self._a, self._b = columns, a, b
        self._relative = relative_changes(columns["before"], columns["change"], columns["not_finite"])
        self._order = np.lexsort((-columns["changed"], -self._relative))
        self._layers: dict[ChangesPart, list[LayerChange]] = {}

    @cached_property
    def parts(self) -> dict[ChangesPart, np.ndarray]:
        """Whether each row is in a part."""
        entries, numbers = self._b.index.entries, self.columns["leaf_b"].tolist()
        optimizer = np.fromiter((is_optimizer_state(entries[number].path) for number in numbers), bool, len(numbers))
        return {"parameters": ~optimizer, "optimizer": optimizer, "all": np.ones_like(optimizer)}

    def order(self, part: ChangesPart, q: str) -> np.ndarray:
        """Returns the rows of a part whose path contains all words, the largest relative change first."""
        order = self._order[self.parts[part][self._order]]
        if not q.strip():
            return order
        wanted = np.fromiter(self._b.matches(q), np.int64)
        return order[np.isin(self.columns["leaf_b"][order], wanted)]

    def layers(self, part: ChangesPart) -> list[LayerChange]:
        """Returns the layers of the arrays of a part, the largest relative change first."""
        if part not in self._layers:
            rows, entries = np.flatnonzero(self.parts[part]), self._a.index.entries
            columns = {name: column[rows] for name, column in self.columns.items()}
            paths = (entries[number].path for number in columns["leaf_a"].tolist())
            self._layers[part] = layer_changes(paths, columns)
        return self._layers[part]

    @cached_property
    def changed(self) -> int:
        return int(np.count_nonzero(self.columns["changed"]))

    def array_row(self, row: int) -> ChangeRow:
        values = {name: column[row].item() for name, column in self.columns.items()}
        return ChangeRow(
            path=shorten(self._b.index.entries[values["leaf_b"]].path),
            leaf_a=values["leaf_a"],
            leaf_b=values["leaf_b"],
            arrays=1,
            changed=values["changed"],
            elements=values["elements"],
            not_finite=values["not_finite"],
            before=json_number(values["before"]),
            change=json_number(values["change"]),
            relative=_finite(float(self._relative[row])),
            cosine=_finite(values["cosine"]),
            max_abs=None if math.isnan(values["max_abs"]) else json_number(values["max_abs"]),
        )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _layer_row(one: LayerChange) -> ChangeRow:
    norms = (json_number(one.before), json_number(one.change), _finite(one.relative), one.cosine)
    return ChangeRow(shorten(one.layer), None, None, one.arrays, one.changed, None, one.not_finite, *norms, None)


class ChangeJobs(JobQueue[_ChangeJob]):
    """The comparisons that measure arrays, one at a time, and the last that were looked at."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library
        self._ranked: OrderedDict[tuple[ComparedSave, ComparedSave], _Ranked] = OrderedDict()

    def start(self, pair: OpenPair) -> None:
        """Starts to measure two checkpoints, unless a job does, or what it finds is known.

        Raises:
            NotFound: another process cannot open one of them.
        """
        if self.ranked(pair) is not None:
            return
        places: list[str] = []
        for one in (pair.a, pair.b):
            if (place := place_of(one.run.url, one.folder)) is None:
                raise NotFound("This store is in the memory of this process: no other one can read it.")
            places += place
        arguments = [*places, str(self.library.cache.shared)]
        nbytes = sum(one.info.nbytes or 0 for one in (pair.a, pair.b))
        self.add(f"{pair.a.id} {pair.b.id}", lambda: _ChangeJob("compare.changes", arguments, nbytes))

    def ranked(self, pair: OpenPair) -> _Ranked | None:
        """Returns what is known of two checkpoints as they are now; None if that is nothing."""
        saves = [_save(one.folder, one.folder.entries(), one.info.save_id or "") for one in (pair.a, pair.b)]
        key = saves[0], saves[1]
        if key in self._ranked:
            self._ranked.move_to_end(key)
            return self._ranked[key]
        columns = self.library.cache.changes.find(*key)
        if columns is None:
            return None
        first, second = self.library.outline(pair.a), self.library.outline(pair.b)
        for name, outline in (("leaf_a", first), ("leaf_b", second)):
            numbers = columns[name]
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(outline.index.entries):
                return None  # a damaged file of the cache
        ranked = self._ranked[key] = _Ranked(columns, first, second)
        while len(self._ranked) > KEPT_COMPARISONS:
            self._ranked.popitem(last=False)
        return ranked


def changes_page(
    changes: ChangeJobs, pair: OpenPair, *, by: ChangesBy, part: ChangesPart, q: str, start: int
) -> ChangesPage:
    """Returns what changed most between two checkpoints, from position `start` on.

    Args:
        q: words that a path must contain.
    """
    job, ranked = changes.get(f"{pair.a.id} {pair.b.id}"), changes.ranked(pair)
    rows: list[ChangeRow] = []
    total = 0
    if ranked is not None and by == "array":
        matching = ranked.order(part, q)
        total = len(matching)
        rows = [ranked.array_row(row) for row in matching[start : start + PAGE_ROWS].tolist()]
    elif ranked is not None:
        holds = words_in(q)
        layers = [one for one in ranked.layers(part) if holds(one.layer.casefold())]
        total = len(layers)
        rows = [_layer_row(one) for one in layers[start : start + PAGE_ROWS]]
    return ChangesPage(
        a=pair.row_a,
        b=pair.row_b,
        known=ranked is not None,
        running=job is not None and job.open,
        share=job.share if job is not None else 0.0,
        error=visible(job.error) if job is not None and job.error else None,
        by=by,
        part=part,
        parts={name: int(rows.sum()) for name, rows in ranked.parts.items()} if ranked is not None else {},
        q=q,
        start=start,
        next=next_start(start, total),
        arrays=len(ranked.columns["change"]) if ranked is not None else 0,
        changed=ranked.changed if ranked is not None else 0,
        layers=len(ranked.layers(part)) if ranked is not None else 0,
        rows=rows,
    )
