"""Detection of the format of a checkpoint, and reading of its contents."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..arrays.lazy import LazyArray
from ..foreign.checksums import ArchiveStorages
from ..foreign.file_arrays import memory_array
from ..foreign.files import file_window, open_foreign
from ..foreign.foreign_records import most_nbytes
from ..foreign.pickle_values import RefusedLeaf, refusal
from ..foreign.sources import FOREIGN, check_exists, check_shape, directory_format, file_format, read_foreign
from ..io.storage.counting_store import CountedStores
from ..io.storage.open import open_store
from ..io.storage.store import Store
from ..loading.match import LoadOptions
from .contents import Contents, contents_of, map_leaves
from .native_read import read_native

SOURCES = ("treeckpt", *FOREIGN)
"""Formats that can be read."""


def detect(path: str | os.PathLike[str] | Store) -> str:
    """Returns the format of the checkpoint at a path, by its files' names and first bytes: one of `SOURCES`.

    >>> tc.convert.detect("run/step_00000100")
    'treeckpt'

    Raises:
        CheckpointNotFound: there is nothing.
        FormatError: nothing that is known.
    """
    if isinstance(path, (str, os.PathLike)) and "://" not in os.fspath(path):
        local = Path(path)
        check_exists(local)
        if local.is_file():
            return file_format(local)
    return directory_format(open_foreign(path))


@contextlib.contextmanager
def open_source(
    path: str | os.PathLike[str] | Store,
    kind: str,
    storages: ArchiveStorages,
    wanted: LoadOptions,
    counted: CountedStores,
) -> Iterator[Contents]:
    """Yields the contents of a checkpoint, with its arrays left in the files, which are closed at the end.

    Args:
        wanted: what will be kept: objects elsewhere that cannot be read are no error.
        counted: counts what is read.

    Raises:
        CheckpointError: the state of the files.
        TreeError: a leaf that only its own code could make.
    """
    refused: list[RefusedLeaf] = []
    window = file_window(path) if isinstance(path, (str, os.PathLike)) and Path(path).is_file() else None
    opened = window.store if window else open_store(path) if kind == "treeckpt" else open_foreign(path)
    store = counted(opened)
    with contextlib.closing(store):
        if kind == "treeckpt":
            contents = read_native(store, storages, refused)
        else:
            source = msgspec.structs.replace(window, store=store) if window else store
            found = read_foreign(source, kind, storages, refused)
            label = f"{path}" if kind == "safetensors" else found.label
            contents = contents_of(found.tree, label, found.metadata, found.unread)
            contents = msgspec.structs.replace(contents, present=most_nbytes(sum(opened.sizes().values())))
        for one in refused:
            if wanted.selects(one.path):
                raise refusal(one, contents.label)
        yield _with_lazy_arrays(contents)


def _with_lazy_arrays(contents: Contents) -> Contents:
    """Replaces arrays in memory by lazy arrays; raises as `check_shape`."""
    made: dict[int, LazyArray] = {}

    def lazy(at: str, leaf: Any) -> Any:
        if isinstance(leaf, LazyArray):
            check_shape(leaf.spec, at, contents.label)
        return made.setdefault(id(leaf), memory_array(leaf)) if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(contents, lazy)
