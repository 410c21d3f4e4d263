"""Keeps the statistics of the arrays of saves in the user's cache directory, as columns of numbers.

There is one file for each save and place: a line of JSON, then each column as 8-byte numbers. A file is mapped, so that
the statistics of one array over hundreds of steps take a few pages of each file, not all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from ..core.analysis.moments import Moments
from ..core.analysis.unusual import Ranking, rank_unusual
from ..core.format.records import Index
from ..io.storage.bucket import is_url, local_path

LIMIT = 1 << 30
"""Bytes of all files; beyond that the oldest are deleted."""
MOMENTS = ("count", "nan", "infinite", "low", "high", "mean", "spread", "norm")
COLUMNS = (
    {"leaf": "<i8", "key": "<u8"}
    | {name: "<i8" if name in MOMENTS[:3] else "<f8" for name in MOMENTS}
    | {"order": "<i8", "score": "<f8", "factor": "<f8", "peak": "<f8"}
)
"""The number of the leaf, a hash of its path, and the fields of `Moments` and of `Ranking`."""


class StatisticsHead(msgspec.Struct, frozen=True):
    """What a file of statistics is about."""

    save_id: str
    fingerprint: str
    """Of the save's files, see `runs.verification.fingerprint_of`."""
    ended_ns: int
    """Unix time at which the last byte was read."""
    rows: int


class LeafStatistics:
    """The statistics of the arrays of one save: a column for each of COLUMNS, a row for each array of numbers."""

    def __init__(self, head: StatisticsHead, columns: Mapping[str, np.ndarray]) -> None:
        self.head = head
        self.columns = columns

    def row(self, at: int) -> Moments:
        """Returns the statistics in one row."""
        return Moments(*(self.columns[name][at].item() for name in MOMENTS))

    @cached_property
    def ranking(self) -> Ranking:
        """The order of the rows, the most unusual first."""
        return Ranking(*(self.columns[name] for name in Ranking.__struct_fields__))

    def row_of(self, path: str) -> int | None:
        """Returns the row of the array at a path; None if there is none, or none of numbers."""
        found = np.flatnonzero(self.columns["key"] == np.uint64(_key(path)))
        return int(found[0]) if len(found) else None


def _key(path: str) -> int:
    return xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogatepass"))


def file_name(url: str, save_id: str, suffix: str) -> str:
    """Returns the name of the file that keeps what is known of a save in a folder."""
    place = url if is_url(url) else os.path.realpath(local_path(url))
    digest = hashlib.blake2s(f"{place}\0{save_id}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return digest + suffix


class StatisticsStore:
    """The statistics that are kept below a cache directory."""

    def __init__(self, cache: Path, limit: int = LIMIT) -> None:
        self.directory = cache / "statistics-1"
        self._limit = limit

    def find(self, url: str, save_id: str | None) -> LeafStatistics | None:
        """Returns the statistics of a save in the folder `url`, whether or not its files have changed since."""
        if save_id is None:
            return None
        path = self.directory / file_name(url, save_id, ".columns")
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError), path.open("rb") as file:
            line = file.readline(1 << 16)
            head = msgspec.json.decode(line, type=StatisticsHead)
            nbytes = path.stat().st_size - len(line)
            if head.save_id == save_id and 0 <= head.rows and nbytes == 8 * head.rows * len(COLUMNS):
                every = {
                    name: np.memmap(path, dtype, "r", len(line) + 8 * head.rows * n, (head.rows,))
                    for n, (name, dtype) in enumerate(COLUMNS.items() if head.rows else ())
                }
                return LeafStatistics(head, every or {name: np.empty(0, kind) for name, kind in COLUMNS.items()})
        return None

    def record(self, url: str, index: Index, fingerprint: str, ended_ns: int, found: Mapping[int, Moments]) -> bool:
        """Keeps the statistics of the arrays of a save, by leaf number; returns whether they could be written."""
        head = StatisticsHead(index.save_id, fingerprint, ended_ns, len(found))
        paths = [index.entries[number].path for number in found]
        columns = {"leaf": np.array(list(found), np.int64), "key": np.array([_key(path) for path in paths], np.uint64)}
        columns |= {name: np.array([getattr(row, name) for row in found.values()], COLUMNS[name]) for name in MOMENTS}
        columns |= msgspec.structs.asdict(rank_unusual(paths, columns))
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.directory, delete=False) as file:
                line = msgspec.json.encode(head)
                file.write(line + b" " * (-(len(line) + 1) % 8) + b"\n")
                for name, dtype in COLUMNS.items():
                    file.write(columns[name].astype(dtype).tobytes())
            Path(file.name).replace(self.directory / file_name(url, index.save_id, ".columns"))
            self._tidy()
        except OSError:
            return False
        return True

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):  # another program deletes there, too
            files = sorted(self.directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            over = sum(path.stat().st_size for path in files) - self._limit
            for path in files:
                if over <= 0:
                    return
                over -= path.stat().st_size
                path.unlink()
