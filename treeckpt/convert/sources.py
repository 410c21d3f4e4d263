"""Detection of the format of a checkpoint, and reading of its contents."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays.lazy import LazyArray
from ..core.format.index import INDEX_NAME
from ..core.format.shard_header import MAX_NBYTES, padded_nbytes, parse_shard_name
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import MAX_NDIM
from ..core.tree.globs import Globs
from ..errors import CheckpointNotFound, FormatError
from ..io.storage.foreign_formats import HEAD, format_of_head, format_of_names
from ..io.storage.open import open_store
from ..io.storage.store import Store
from .checksums import ArchiveStorages
from .contents import Contents, contents_of, map_leaves
from .dcp_read import read_dcp
from .files import FileRange, file_window, memory_array, open_foreign
from .hfai_read import read_hfai
from .native_read import read_native
from .paddle_read import read_paddle
from .pickle_values import RefusedLeaf, refusal
from .safetensors_read import read_safetensors, read_sharded
from .torch_read import read_torch

SOURCES = ("treeckpt", "torch", "dcp", "safetensors", "hfai", "paddle")
"""Formats that can be read."""
_HINT = f"Known formats are {', '.join(SOURCES)}"


def detect(path: str | os.PathLike[str] | Store) -> str:
    """Returns the format of the checkpoint at a path, by its files' names and first bytes: one of `SOURCES`.

    Raises:
        CheckpointNotFound: there is nothing.
        FormatError: nothing that is known.
    """
    if isinstance(path, (str, os.PathLike)) and "://" not in os.fspath(path):
        local = Path(path)
        if not local.exists():
            raise CheckpointNotFound(str(local), expected="a checkpoint", found="nothing", hint="Check the path")
        if local.is_file():
            return _of_file(local)
    store = open_foreign(path)
    names = store.sizes()
    if INDEX_NAME in names or any(parse_shard_name(name) for name in names):
        return "treeckpt"
    if (found := format_of_names(names)) is not None:
        return found
    raise FormatError(store.url, expected="a checkpoint", found=f"{sorted(names)[:5] or 'no files'}", hint=_HINT)


def _of_file(path: Path) -> str:
    head = file_window(path)
    with contextlib.closing(head.store):
        first = head.read(0, min(head.size, HEAD)).tobytes()
    found = format_of_head(path.name, first)
    old = found == "pickle"
    if found is not None and not old:
        return found
    raise FormatError(
        str(path),
        expected="a file of torch.save or safetensors",
        found="a bare pickle, as torch before 1.6 wrote it" if old else f"one that begins with {first!r}",
        hint="Load it with torch, in a place where its code may run, and save it anew" if old else _HINT,
    )


@contextlib.contextmanager
def open_source(
    path: str | os.PathLike[str] | Store, kind: str, storages: ArchiveStorages, exclude: Sequence[str]
) -> Iterator[Contents]:
    """Yields the contents of a checkpoint, with its arrays left in the files, which are closed at the end.

    Args:
        exclude: globs over paths that will be left out: objects there that cannot be read are no error.

    Raises:
        CheckpointError: the state of the files.
        TreeError: a leaf that only its own code could make.
    """
    refused: list[RefusedLeaf] = []
    window = file_window(path) if isinstance(path, (str, os.PathLike)) and Path(path).is_file() else None
    store = window.store if window else open_store(path) if kind == "treeckpt" else open_foreign(path)
    with contextlib.closing(store):
        contents = _read(kind, window or store, f"{path}", storages, refused)
        left_out = Globs(exclude)
        for one in refused:
            if not left_out.match(one.path):
                raise refusal(one, contents.label)
        yield _with_lazy_arrays(contents)


def _read(
    kind: str, source: FileRange | Store, label: str, storages: ArchiveStorages, refused: list[RefusedLeaf]
) -> Contents:
    if isinstance(source, FileRange):
        if kind == "torch":
            return contents_of(read_torch(source, storages, refused), source.label)
        if kind == "paddle":
            return contents_of(read_paddle(source.store, storages, source.name), source.label)
        arrays, metadata = read_safetensors(source, storages)
    elif kind == "treeckpt":
        return read_native(source, storages, refused)
    elif kind == "dcp":
        return contents_of(read_dcp(source, storages, refused), source.url)
    elif kind == "hfai":
        return contents_of(read_hfai(source, storages, refused), source.url)
    elif kind == "paddle":
        return contents_of(read_paddle(source, storages), source.url)
    else:
        arrays, metadata = read_sharded(source, storages)
    return contents_of(dict(arrays), label, metadata={key: metadata[key] for key in metadata if key != "format"})


def _with_lazy_arrays(contents: Contents) -> Contents:
    """Replaces arrays in memory by lazy arrays.

    Raises:
        FormatError: an array has more dimensions, or bytes, than any library takes.
    """
    made: dict[int, LazyArray] = {}

    def lazy(at: str, leaf: Any) -> Any:
        if isinstance(leaf, LazyArray):
            shape, itemsize = leaf.spec.shape, dtype_of(leaf.spec.dtype).itemsize
            if len(shape) > MAX_NDIM or padded_nbytes(shape, itemsize) >= MAX_NBYTES:
                raise FormatError(
                    f"{at}: {contents.label}",
                    expected=f"an array of at most {MAX_NDIM} dimensions and {MAX_NBYTES - 1} bytes",
                    found=f"{len(shape)} dimensions, {shape!r:.80}",
                )
        return made.setdefault(id(leaf), memory_array(leaf)) if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(contents, lazy)
