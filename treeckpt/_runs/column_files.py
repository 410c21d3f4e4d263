"""Files in the user's cache directory that hold columns of numbers: a line of JSON, then each column as 8-byte numbers.

A file is mapped, so that one row of hundreds of files takes a few pages of each, not all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from .._core.format.decoding import decode_json
from .._io.storage.local_store import is_url, local_path

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
