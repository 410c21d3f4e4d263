"""Keeps the statistics of the arrays of saves in the user's cache directory, one file for each save and place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash
from msgspec.structs import asdict

from .._core.format.records import Index
from .._inspect.moments import Moments
from .._inspect.unusual import Ranking, rank_unusual
from .column_files import MAX_DIRECTORY_NBYTES, Columns, key_of_parts, place_of, read_columns, write_columns

MOMENTS = ("count", "nan", "infinite", "low", "high", "mean", "spread", "norm")
COLUMNS = (
    {"leaf": "<i8", "key": "<u8"}
    | {name: "<i8" if name in MOMENTS[:3] else "<f8" for name in MOMENTS}
    | {"low_rest": "<f8", "high_rest": "<f8"}
    | {"order": "<i8", "score": "<f8", "factor": "<f8", "peak": "<f8"}
)
"""The number of the leaf, a hash of its path, and the fields of `Moments` and of `Ranking`.

`low_rest` is what an integer `low` has beyond its float64, NaN where `low` is no integer; `high_rest` likewise.
"""


class StatisticsHead(Columns, frozen=True):
    """What a file of statistics is about."""

    save_id: str
    fingerprint: str
    """Of the save's files, see `_runs.verification.fingerprint_of`."""
    ended_ns: int
    """Unix time at which the last byte was read."""


class LeafStatistics:
    """The statistics of the arrays of one save: a column for each of COLUMNS, a row for each array of numbers."""

    def __init__(self, head: StatisticsHead, columns: Mapping[str, np.ndarray]) -> None:
        self.head = head
        self.columns = columns

    def row(self, at: int) -> Moments:
        """Returns the statistics in one row."""
        found = {name: self.columns[name][at].item() for name in MOMENTS}
        for name in ("low", "high"):
            if not math.isnan(rest := self.columns[f"{name}_rest"][at].item()):
                found[name] = int(found[name]) + int(rest)
        return Moments(**found)

    @cached_property
    def ranking(self) -> Ranking:
        """The order of the rows, the most unusual first."""
        return Ranking(*(self.columns[name] for name in Ranking.__struct_fields__))

    def row_of(self, path: str) -> int | None:
        """Returns the row of the array at a path; None if there is none, or none of numbers."""
        found = np.flatnonzero(self.columns["key"] == np.uint64(_key(path)))
        return int(found[0]) if len(found) else None


def _rest(number: float) -> float:
    return number - int(float(number)) if isinstance(number, int) else math.nan


def _key(path: str) -> int:
    return xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogatepass"))


class StatisticsStore:
    """The statistics that are kept below a cache directory.

    Args:
        limit: bytes of all files.
    """

    def __init__(self, cache: Path, limit: int = MAX_DIRECTORY_NBYTES) -> None:
        self.directory = cache / "statistics-1"
        self._limit = limit

    def _path(self, url: str, save_id: str) -> Path:
        return self.directory / f"{key_of_parts(place_of(url), save_id)}.columns"

    def find(self, url: str, save_id: str | None) -> LeafStatistics | None:
        """Returns the statistics of a save in the folder `url`, whether or not its files have changed since."""
        if save_id is None or (found := read_columns(self._path(url, save_id), COLUMNS, StatisticsHead)) is None:
            return None
        return LeafStatistics(*found) if found[0].save_id == save_id else None

    def record(self, url: str, index: Index, fingerprint: str, ended_ns: int, found: Mapping[int, Moments]) -> bool:
        """Keeps the statistics of the arrays of a save, by leaf number; returns whether they could be written."""
        head = StatisticsHead(len(found), index.save_id, fingerprint, ended_ns)
        paths = [index.entries[number].path for number in found]
        columns = {"leaf": np.array(list(found), np.int64), "key": np.array([_key(path) for path in paths], np.uint64)}
        columns |= {name: np.array([getattr(row, name) for row in found.values()], COLUMNS[name]) for name in MOMENTS}
        for name in ("low", "high"):
            columns[f"{name}_rest"] = np.array([_rest(getattr(row, name)) for row in found.values()], np.float64)
        columns |= asdict(rank_unusual(paths, columns))
        return write_columns(self._path(url, index.save_id), COLUMNS, head, columns, limit=self._limit)
