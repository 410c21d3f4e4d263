"""Opens a path or URL as the store of a checkpoint, or as a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .local_store import LocalRun, LocalStore, is_url, local_path
from .object_store import ObjectRun, ObjectStore
from .store import RunStore, Store


def following(path: Any, follow_links: bool) -> Any:
    """Returns a local path, or those among several, as a store that follows links; without `follow_links` as it is."""
    if not follow_links:
        return path
    if isinstance(path, (list, tuple)):
        return [following(each, follow_links) for each in path]
    is_path = isinstance(path, (str, os.PathLike)) and not is_url(os.fspath(path))
    return LocalStore(local_path(os.fspath(path)), follow_links=True) if is_path else path


def is_path_or_store(given: object) -> bool:
    """Whether `open_store` takes it."""
    return isinstance(given, (str, os.PathLike, Store))


def open_store(path: str | os.PathLike[str] | Store) -> Store:
    """Returns the store of a path or URL; a store is returned as it is.

    Raises:
        StoreError: the URL's scheme is not known, or its library is not installed.
        CheckpointError: `path` is not a path, or is empty.
    """
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        return ObjectStore(text) if is_url(text) else LocalStore(local_path(text))
    if not isinstance(path, Store):
        raise CheckpointError(
            "path",
            expected="a path, a URL or a store",
            found=type(path).__qualname__,
            hint="The path comes first: save(path, tree), load(path, like)",
        )
    return path


def open_run(run: str | os.PathLike[str] | RunStore, *, follow_links: bool | None = None) -> RunStore:
    """Returns the run of a path or URL; a run is returned as it is. Raises as `open_store`."""
    if not isinstance(run, (str, os.PathLike)):
        if isinstance(run, RunStore):
            return run
        raise CheckpointError(
            "run",
            expected="the path or URL of a run, or an ObjectRun",
            found=type(run).__qualname__,
            hint="A store holds one checkpoint; a run is the directory of several" if isinstance(run, Store) else "",
        )
    text = os.fspath(run)
    return ObjectRun(text) if is_url(text) else LocalRun(local_path(text), follow_links=follow_links)


def local_directory(path: Any) -> Path | None:
    """Returns the local path that a path leads to, or in which a store has its files; None for anything else."""
    if isinstance(path, Store):
        return path.traits.local_path
    is_path = isinstance(path, (str, os.PathLike)) and os.fspath(path) and not is_url(os.fspath(path))
    return Path(local_path(os.fspath(path))) if is_path else None
