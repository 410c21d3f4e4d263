"""Reads the sidecar files that are given to a save, before anything is written, and writes them into its store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .._core.format.files import (
    MAX_SIDECAR_NBYTES,
    MAX_SIDECARS,
    MAX_SIDECARS_NBYTES,
    NAME_RULE,
    alike_names,
    checksum,
    is_sidecar_name,
    stored_name,
)
from .._io.storage.local_files import read_head
from .._io.storage.store import Store
from .._threads import ThreadPool
from ..errors import CorruptError, TreeError

WRITERS = 8
"""Files that are written at a time: to an object store each takes a request."""

SidecarContent = str | os.PathLike[str] | bytes | bytearray | memoryview
"""The path of a local file, or its content."""


def read_sidecars(files: Mapping[str, SidecarContent]) -> dict[str, bytes]:
    """Returns the contents of sidecar files by name.

    Raises:
        TreeError: as `check_files`; or a size that is not allowed, or a path that is no file that can be read.
    """
    check_files(files)
    contents: dict[str, bytes] = {}
    total = 0
    for name, given in files.items():
        contents[name] = data = _read_path(name, given) if isinstance(given, (str, os.PathLike)) else bytes(given)
        total += len(data)
        if len(data) > MAX_SIDECAR_NBYTES or total > MAX_SIDECARS_NBYTES:
            raise TreeError(
                f"files/{name}",
                expected=f"at most {MAX_SIDECAR_NBYTES} bytes a file, and {MAX_SIDECARS_NBYTES} together",
                found=f"more than {len(data) - 1} bytes, {total - 1} together",
                hint="Sidecar files are for what is small; arrays belong into the tree",
            )
    return contents


def check_files(files: Mapping[str, SidecarContent]) -> None:
    """Raises TreeError, naming the file, for names and types that are not allowed, and for too many files."""
    if not isinstance(files, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        expected, found = 'contents or paths by name, as {"config.json": path}', f"{type(files).__name__} {files!r:.60}"
        raise TreeError("files", expected=expected, found=found, hint="Say under which name each is to be kept")
    if len(files) > MAX_SIDECARS:
        hint = "Pack them into one archive"
        raise TreeError("files", expected=f"at most {MAX_SIDECARS}", found=f"{len(files)}", hint=hint)
    for name, given in files.items():
        if not isinstance(name, str) or not is_sidecar_name(name):
            raise TreeError(f"files/{name!r:.80}", expected=NAME_RULE, found=f"{name!r:.160}")
        if not isinstance(given, (str, os.PathLike, bytes, bytearray, memoryview)):
            raise TreeError(f"files/{name}", expected="a path or bytes", found=type(given).__name__)
    for name in alike_names(files):
        raise TreeError(f"files/{name}", expected="names that differ not only in case", found="two that do")


def sidecar_digests(files: Mapping[str, SidecarContent], contents: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the checksum of each file, "" for a path that was not read into `contents`."""
    found = {name: checksum(data) for name, data in contents.items()}
    for name, given in files.items():
        if name not in found:
            found[name] = "" if isinstance(given, (str, os.PathLike)) else checksum(bytes(given))
    return found


def write_sidecars(store: Store, save_id: str, contents: Mapping[str, bytes]) -> None:
    """Writes sidecar files durably, under names that no other save uses."""

    def write(name: str) -> None:
        store.publish(stored_name(save_id, name), contents[name], replace=True)

    with ThreadPool(WRITERS, "treeckpt-files") as pool:
        list(pool.map(write, contents))


def _read_path(name: str, given: str | os.PathLike[str]) -> bytes:
    path = os.fspath(given)
    expected, hint = f"a readable file at {path}", "Give a path on the host of rank 0, or the content as bytes"
    try:
        return read_head(Path(path), MAX_SIDECAR_NBYTES + 1)
    except CorruptError as error:
        raise TreeError(
            f"files/{name}", expected=expected, found=f"something else than a file: {error.found}", hint=hint
        ) from error
    except OSError as error:
        found = f"{type(error).__name__}: {error.strerror}"
        raise TreeError(f"files/{name}", expected=expected, found=found, hint=hint) from error
