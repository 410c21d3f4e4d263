"""Opens what a path or URL names: the store of a checkpoint, its directory, or a run."""

from __future__ import annotations

import os

from ...errors import CheckpointError
from .bucket import check_path, is_url, local_path
from .object_store import ObjectFolder, ObjectRun, ObjectStore
from .run_store import Folder, LocalFolder, LocalRun, RunStore
from .store import LocalStore, Store

__all__ = ["open_folder", "open_run", "open_store"]


def open_store(path: str | os.PathLike[str] | Store) -> Store:
    """The store of a path or URL, or the store itself.

    Raises:
        StoreError: a URL of a kind that is not known, or whose library is not installed.
        CheckpointError: nothing like a path, or an empty one.
    """
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        check_path(text)
        if is_url(text):
            return ObjectStore(text)
        return LocalStore(local_path(text))
    if not hasattr(path, "sizes"):
        raise CheckpointError(
            "path",
            expected="a path, a URL or a store",
            found=type(path).__qualname__,
            hint="The path comes first: save(path, tree), load(path, like)",
        )
    return path


def open_run(run: str | os.PathLike[str] | RunStore) -> RunStore:
    """The run of a path or URL, or the run itself.

    Raises:
        StoreError: a URL of a kind that is not known, or whose library is not installed.
        CheckpointError: an empty path.
    """
    if not isinstance(run, (str, os.PathLike)):
        return run
    text = os.fspath(run)
    check_path(text)
    if is_url(text):
        return ObjectRun(text)
    return LocalRun(local_path(text))


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """The directory of a checkpoint's path or URL.

    Raises:
        StoreError: as `open_run`.
    """
    text = os.fspath(path)
    check_path(text)
    if is_url(text):
        return ObjectFolder(ObjectStore(text))
    return LocalFolder(local_path(text))
