"""Keeps numbers of the arrays of saves in the user's cache directory: statistics, and by how much two saves differ.

There is one file for each save and place, or pair of them: a line of JSON, then each column as 8-byte numbers. A file
is mapped, so that one row of hundreds of files takes a few pages of each, not all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec.structs import asdict

from .._core.format.decoding import decode_json
from .._core.format.records import Index, Leaf
from .._inspect.numbers import Moments
from .._inspect.ranking import Ranking, rank_unusual
from .._io.storage.local_store import is_url, local_path
from .._loading.compare import Delta

MAX_LINE = 1 << 16
"""Bytes of the line of JSON."""
MAX_DIRECTORY_NBYTES = 1 << 30
"""Bytes of all files of a directory; beyond that the oldest are deleted."""


class Columns(msgspec.Struct, frozen=True):
    """The line of JSON of a file."""

    rows: int


C = TypeVar("C", bound=Columns)


def place_of(url: str) -> str:
    """Returns the name of a folder under which what is known of it is kept, the same for all links to it."""
    return url if is_url(url) else os.path.realpath(local_path(url))


def key_of_parts(*parts: str) -> str:
    """Returns a hash of texts."""
    return hashlib.blake2s("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def read_columns(path: Path, kinds: Mapping[str, str], head: type[C]) -> tuple[C, dict[str, np.ndarray]] | None:
    """Returns what a file holds; None if there is none, or a damaged one.

    Args:
        kinds: the dtypes of the columns, of 8 bytes.
    """
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError), path.open("rb") as file:
        line = file.readline(MAX_LINE)
        found = decode_json(line, head)
        if found.rows < 0 or path.stat().st_size - len(line) != 8 * found.rows * len(kinds):
            return None
        if not found.rows:
            return found, {name: np.empty(0, kind) for name, kind in kinds.items()}
        starts = {name: len(line) + 8 * found.rows * number for number, name in enumerate(kinds)}
        return found, {name: np.memmap(path, kinds[name], "r", start, (found.rows,)) for name, start in starts.items()}
    return None


def write_columns(
    path: Path,
    kinds: Mapping[str, str],
    head: Columns,
    columns: Mapping[str, np.ndarray],
    *,
    limit: int = MAX_DIRECTORY_NBYTES,
) -> bool:
    """Writes a file, and deletes the oldest ones beside it beyond a limit; returns whether it could be written.

    Args:
        limit: bytes of all files of the directory.
    """
    line = msgspec.json.encode(head)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(line + b" " * (-(len(line) + 1) % 8) + b"\n")
            for name, kind in kinds.items():
                file.write(columns[name].astype(kind).tobytes())
        Path(file.name).replace(path)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # another program deletes there, too
        files = sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime_ns)
        over = sum(one.stat().st_size for one in files) - limit
        for one in files:
            if over <= 0:
                break
            over -= one.stat().st_size
            one.unlink()
    return True


MOMENTS = ("count", "nan", "infinite", "low", "high", "mean", "spread", "norm")
STATISTICS_COLUMNS = (
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
    """The statistics of the arrays of one save: one row for each array of numbers."""

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
        if (
            save_id is None
            or (found := read_columns(self._path(url, save_id), STATISTICS_COLUMNS, StatisticsHead)) is None
        ):
            return None
        return LeafStatistics(*found) if found[0].save_id == save_id else None

    def record(self, url: str, index: Index, fingerprint: str, ended_ns: int, found: Mapping[int, Moments]) -> bool:
        """Keeps the statistics of the arrays of a save, by leaf number; returns whether they could be written."""
        head = StatisticsHead(len(found), index.save_id, fingerprint, ended_ns)
        paths = [index.entries[number].path for number in found]
        columns = {"leaf": np.array(list(found), np.int64), "key": np.array([_key(path) for path in paths], np.uint64)}
        columns |= {
            name: np.array([getattr(row, name) for row in found.values()], STATISTICS_COLUMNS[name]) for name in MOMENTS
        }
        for name in ("low", "high"):
            columns[f"{name}_rest"] = np.array([_rest(getattr(row, name)) for row in found.values()], np.float64)
        columns |= asdict(rank_unusual(paths, columns))
        return write_columns(self._path(url, index.save_id), STATISTICS_COLUMNS, head, columns, limit=self._limit)


NUMBERS = ("elements", "changed", "not_finite", "max_abs", "before", "after", "change", "cosine")
CHANGE_COLUMNS = {"leaf_a": "<i8", "leaf_b": "<i8"} | {
    name: "<i8" if name in NUMBERS[:3] else "<f8" for name in NUMBERS
}
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
        found = read_columns(self._path(a, b), CHANGE_COLUMNS, ChangesHead)
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
        values = zip(*rows, strict=True) if rows else ((),) * len(CHANGE_COLUMNS)
        columns = {
            name: np.array(column, CHANGE_COLUMNS[name]) for name, column in zip(CHANGE_COLUMNS, values, strict=True)
        }
        return write_columns(self._path(a, b), CHANGE_COLUMNS, ChangesHead(len(rows), a, b), columns)
