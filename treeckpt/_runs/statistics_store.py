"""Keeps numbers of the arrays of saves in the user's cache directory: statistics, and by how much two saves differ.

There is one file for each save and place, or pair of them: a line of JSON, then each column as 8-byte numbers. A file
is mapped, so that one row of hundreds of files takes a few pages of each, not all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

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
COUNTS = ("count", "nan", "infinite", "first_nan", "first_infinite")
MOMENTS = (*COUNTS, "low", "high", "mean", "spread", "norm")
STATISTICS_COLUMNS = (
    {"leaf": "<i8", "key": "<u8"}
    | {name: "<i8" if name in COUNTS else "<f8" for name in MOMENTS}
    | {"low_rest": "<f8", "high_rest": "<f8"}
    | {"order": "<i8", "score": "<f8", "factor": "<f8", "peak": "<f8"}
)
"""The number of the leaf, a hash of its path, and the fields of `Moments` and of `Ranking`.

`low_rest` is what an integer `low` has beyond its float64, NaN where `low` is no integer; `high_rest` likewise.
"""
NUMBERS = ("elements", "changed", "not_finite", "max_abs", "before", "after", "change", "cosine")
CHANGE_COLUMNS = {"leaf_a": "<i8", "leaf_b": "<i8"} | {
    name: "<i8" if name in NUMBERS[:3] else "<f8" for name in NUMBERS
}
"""The numbers of the leaves, and fields of `Delta`; NaN stands for None."""


class Columns(msgspec.Struct, frozen=True):
    """The line of JSON of a file."""

    rows: int


C = TypeVar("C", bound=Columns)


def cache_key(*saves: tuple[str, str]) -> str:
    """Returns the name under which is kept what is known of saves, each given by URL and id: the same for all links."""
    parts = [part for url, save_id in saves for part in (place_of(url), save_id)]
    return hashlib.blake2s("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def place_of(url: str) -> str:
    """Returns the URL of a folder, the same for all links to it."""
    return url if is_url(url) else os.path.realpath(local_path(url))


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Writes a file of the cache; readers, of other processes too, see the old one or the whole new one.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


class _ColumnFiles(Generic[C]):
    """Files of columns of numbers in a directory.

    Args:
        kinds: the dtypes of the columns, of 8 bytes.
        head: the line of JSON.
        limit: bytes of all files; beyond it the oldest are deleted.
    """

    def __init__(self, directory: Path, kinds: Mapping[str, str], head: type[C], limit: int) -> None:
        self.directory, self._kinds, self._head, self._limit = directory, kinds, head, limit

    def read(self, key: str) -> tuple[C, dict[str, np.ndarray]] | None:
        """Returns what a file holds; None if there is none, or a damaged one."""
        path, kinds = self.directory / f"{key}.columns", self._kinds
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError), path.open("rb") as file:
            line = file.readline(MAX_LINE)
            head = decode_json(line, self._head)
            if (rows := head.rows) < 0 or path.stat().st_size - len(line) != 8 * rows * len(kinds):
                return None
            # Nothing of length 0 can be mapped.
            if not rows:
                return head, {name: np.empty(0, kind) for name, kind in kinds.items()}
            starts = {name: len(line) + 8 * rows * number for number, name in enumerate(kinds)}
            return head, {name: np.memmap(path, kinds[name], "r", start, (rows,)) for name, start in starts.items()}
        return None

    def write(self, key: str, head: C, columns: Mapping[str, Sequence[float] | np.ndarray]) -> bool:
        """Writes a file; returns whether it could be written."""
        line = msgspec.json.encode(head)
        # The line is filled up, so that the columns of 8-byte numbers are aligned where the file is mapped.
        start = line + b" " * (-(len(line) + 1) % 8) + b"\n"
        parts = (np.asarray(columns[name], kind).tobytes() for name, kind in self._kinds.items())
        written = self.directory / f"{key}.columns"
        try:
            replace_file(written, itertools.chain([start], parts))
        except OSError:
            return False
        with contextlib.suppress(OSError):  # another program deletes there, too
            # several files may have one time, as clocks of file systems tick every few milliseconds
            files = sorted(self.directory.iterdir(), key=lambda path: (path == written, path.stat().st_mtime_ns))
            over = sum(path.stat().st_size for path in files) - self._limit
            for path in files:
                if over <= 0:
                    break
                over -= path.stat().st_size
                path.unlink()
        return True


class StatisticsHead(Columns, frozen=True):
    """What a file of statistics is about."""

    save_id: str
    fingerprint: str
    """The fingerprint of the files of the save, as `_runs.verification.fingerprint_of` makes it."""
    ended_ns: int
    """Unix time at which the last byte was read."""


class LeafStatistics:
    """The statistics of the arrays of one save: one row for each array of numbers."""

    def __init__(self, head: StatisticsHead, columns: Mapping[str, np.ndarray]) -> None:
        self.head = head
        self.columns = columns

    def row(self, at: int) -> Moments:
        """Returns the statistics in one row."""
        values = {name: self.columns[name][at].item() for name in MOMENTS}
        for name in ("low", "high"):
            if not math.isnan(rest := self.columns[f"{name}_rest"][at].item()):
                values[name] = int(values[name]) + int(rest)
        return Moments(**values)

    @cached_property
    def ranking(self) -> Ranking:
        """The order of the rows, the most unusual first."""
        return Ranking(*(self.columns[name] for name in Ranking.__struct_fields__))

    def row_of(self, path: str) -> int | None:
        """Returns the row of the array at a path; None if there is none, or none of numbers."""
        rows = np.flatnonzero(self.columns["key"] == np.uint64(_key(path)))
        return int(rows[0]) if len(rows) else None


def _rest(number: float) -> float:
    return number - int(float(number)) if isinstance(number, int) else math.nan


def _key(path: str) -> int:
    return xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogatepass"))


class StatisticsStore(_ColumnFiles[StatisticsHead]):
    """The statistics that are kept below a cache directory.

    Args:
        limit: bytes of all files.
    """

    def __init__(self, cache: Path, limit: int = MAX_DIRECTORY_NBYTES) -> None:
        super().__init__(cache / "statistics-1", STATISTICS_COLUMNS, StatisticsHead, limit)

    def find(self, url: str, save_id: str | None) -> LeafStatistics | None:
        """Returns the statistics of a save in the folder `url`, whether or not its files have changed since."""
        kept = self.read(cache_key((url, save_id))) if save_id is not None else None
        return LeafStatistics(*kept) if kept is not None and kept[0].save_id == save_id else None

    def record(self, url: str, index: Index, fingerprint: str, ended_ns: int, found: Mapping[int, Moments]) -> bool:
        """Keeps the statistics of the arrays of a save, by leaf number; returns whether they could be written."""
        head = StatisticsHead(len(found), index.save_id, fingerprint, ended_ns)
        paths, rows = [index.entries[number].path for number in found], found.values()
        columns = {
            name: np.array([getattr(row, name) for row in rows], kind)
            for name, kind in STATISTICS_COLUMNS.items()
            if name in MOMENTS
        }
        for name in ("low", "high"):
            columns[f"{name}_rest"] = np.array([_rest(getattr(row, name)) for row in rows])
        keys = {"leaf": list(found), "key": [_key(path) for path in paths]}
        ranking = asdict(rank_unusual(paths, columns))
        return self.write(cache_key((url, index.save_id)), head, {**keys, **columns, **ranking})


class ComparedSave(msgspec.Struct, frozen=True):
    """One of two saves: the URL of its folder, and what its files were when they were compared."""

    url: str
    save_id: str
    fingerprint: str
    """The fingerprint of its files, as `_runs.verification.fingerprint_of` makes it."""


class ChangesHead(Columns, frozen=True):
    """What a file is about."""

    a: ComparedSave
    b: ComparedSave


class ChangeStore(_ColumnFiles[ChangesHead]):
    """What comparisons have measured, below a cache directory."""

    def __init__(self, cache: Path) -> None:
        super().__init__(cache / "changes-1", CHANGE_COLUMNS, ChangesHead, MAX_DIRECTORY_NBYTES)

    def find(self, a: ComparedSave, b: ComparedSave) -> dict[str, np.ndarray] | None:
        """Returns the columns of the comparison of two saves; None if there is none of their files as they are."""
        kept = self.read(cache_key((a.url, a.save_id), (b.url, b.save_id)))
        if kept is None:
            return None
        known = (kept[0].a.save_id, kept[0].a.fingerprint, kept[0].b.save_id, kept[0].b.fingerprint)
        return kept[1] if known == (a.save_id, a.fingerprint, b.save_id, b.fingerprint) else None

    def record(self, a: ComparedSave, b: ComparedSave, measured: Iterable[tuple[Leaf, Leaf, Delta]]) -> bool:
        """Keeps the differences of pairs of arrays; returns whether they could be written."""
        pairs = list(measured)
        columns = {name: [getattr(delta, name) for _, _, delta in pairs] for name in NUMBERS}
        columns = {name: [math.nan if n is None else n for n in column] for name, column in columns.items()}
        columns |= {"leaf_a": [x.number for x, _, _ in pairs], "leaf_b": [y.number for _, y, _ in pairs]}
        return self.write(cache_key((a.url, a.save_id), (b.url, b.save_id)), ChangesHead(len(pairs), a, b), columns)
