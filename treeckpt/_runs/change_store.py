"""Keeps by how much the arrays of two saves differ in the user's cache directory, one file for each pair of saves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from .._core.format.records import Leaf
from .._loading.compare import Delta
from .column_files import Columns, key_of_parts, place_of, read_columns, write_columns

NUMBERS = ("elements", "changed", "not_finite", "max_abs", "before", "after", "change", "cosine")
COLUMNS = {"leaf_a": "<i8", "leaf_b": "<i8"} | {name: "<i8" if name in NUMBERS[:3] else "<f8" for name in NUMBERS}
"""The numbers of the leaves, and fields of `Delta`; NaN stands for None."""


class ComparedSave(msgspec.Struct, frozen=True):
    """One of two saves: the URL of its folder, and what its files were when they were compared."""

    url: str
    save_id: str
    fingerprint: str
    """See `_runs.verification.fingerprint_of`."""


class ChangesHead(Columns, frozen=True):
    """What a file is about."""

    a: ComparedSave
    b: ComparedSave


class ChangeStore:
    """What comparisons have measured, below a cache directory."""

    def __init__(self, cache: Path) -> None:
        self.directory = cache / "changes-1"

    def _path(self, a: ComparedSave, b: ComparedSave) -> Path:
        key = key_of_parts(place_of(a.url), a.save_id, place_of(b.url), b.save_id)
        return self.directory / f"{key}.columns"

    def find(self, a: ComparedSave, b: ComparedSave) -> dict[str, np.ndarray] | None:
        """Returns the columns of the comparison of two saves; None if there is none of their files as they are."""
        found = read_columns(self._path(a, b), COLUMNS, ChangesHead)
        if found is None:
            return None
        known = (found[0].a.save_id, found[0].a.fingerprint, found[0].b.save_id, found[0].b.fingerprint)
        return found[1] if known == (a.save_id, a.fingerprint, b.save_id, b.fingerprint) else None

    def record(self, a: ComparedSave, b: ComparedSave, measured: Iterable[tuple[Leaf, Leaf, Delta]]) -> bool:
        """Keeps the differences of pairs of arrays; returns whether they could be written."""
        rows = [
            (x.number, y.number, *(math.nan if (n := getattr(delta, name)) is None else n for name in NUMBERS))
            for x, y, delta in measured
        ]
        values = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
        columns = {name: np.array(column, COLUMNS[name]) for name, column in zip(COLUMNS, values, strict=True)}
        return write_columns(self._path(a, b), COLUMNS, ChangesHead(len(rows), a, b), columns)
