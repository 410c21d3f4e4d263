"""Finds out which program wrote files, and reads their tree."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from .._core.format.index import INDEX_NAME
from .._core.format.shard_header import MAX_NBYTES, padded_nbytes, parse_shard_name
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import MAX_NDIM
from .._core.tree.spec import ArraySpec
from .._io.storage.foreign_formats import HEAD, format_of_head, format_of_names, other_formats
from .._io.storage.store import Store
from ..errors import CheckpointNotFound, FormatError
from .checksums import ArchiveStorages
from .dcp_read import read_dcp, read_paddle
from .files import FileRange, file_window
from .pickle_values import RefusedLeaf
from .safetensors_read import read_safetensors, read_sharded
from .torch_read import read_hfai, read_torch

FOREIGN = ("torch", "dcp", "safetensors", "hfai", "paddle")
"""Formats of other programs that can be read."""
_HINT = f"Known formats are treeckpt, {', '.join(FOREIGN)}"

ForeignSource = FileRange | Store
"""One file, or a directory."""


class ForeignTree(msgspec.Struct, frozen=True):
    """What files of another program hold, with the arrays left in them."""

    tree: Any
    label: str
    """Their URL, for errors."""
    metadata: dict[str, Any] = {}
    unread: tuple[str, ...] = ()
    """Names of the files of the directory that hold arrays and are not read: of other formats, or in no index."""


def file_format(path: Path) -> str:
    """Returns the format of a file: one of `FOREIGN`.

    Raises:
        FormatError: it is of none.
    """
    head = file_window(path)
    with contextlib.closing(head.store):
        first = head.read(0, min(head.size, HEAD)).tobytes()
    found = format_of_head(path.name, first)
    old = found == "pickle"
    if found is not None and not old:
        return found
    begins = f"the bytes {first.hex(' ')}" if first else "nothing, as it is empty"
    raise FormatError(
        str(path),
        expected="a file of torch.save or safetensors",
        found="a bare pickle, as torch before 1.6 wrote it" if old else f"one that begins with {begins}",
        hint="Load it with torch, in a place where its code may run, and save it anew" if old else _HINT,
    )


def directory_format(store: Store) -> str:
    """Returns the format of a directory by its files' names: "treeckpt", or one of `FOREIGN`.

    Raises:
        FormatError: nothing that is known.
    """
    names = store.sizes()
    if INDEX_NAME in names or any(parse_shard_name(name) for name in names):
        return "treeckpt"
    if (found := format_of_names(names)) is not None:
        return found
    raise FormatError(store.url, expected="a checkpoint", found=f"{sorted(names)[:5] or 'no files'}", hint=_HINT)


def read_foreign(
    source: ForeignSource, kind: str, storages: ArchiveStorages, refused: list[RefusedLeaf]
) -> ForeignTree:
    """Reads the tree of a source.

    Args:
        refused: receives leaves that only their own code could make, which become `...`.

    Raises:
        CheckpointNotFound, FormatError, CorruptError: the state of the files.
    """
    if isinstance(source, FileRange):
        if kind == "torch":
            return ForeignTree(read_torch(source, storages, refused), source.label)
        if kind == "paddle":
            return ForeignTree(read_paddle(source.store, storages, source.name), source.label)
        return _flat_tree(source.label, *read_safetensors(source, storages))
    sizes = source.sizes()
    unread = tuple(other_formats(sizes, kind))
    if kind == "dcp":
        return ForeignTree(read_dcp(source, storages, refused), source.url, unread=unread)
    if kind == "hfai":
        return ForeignTree(read_hfai(source, storages, refused), source.url, unread=unread)
    if kind == "paddle":
        return ForeignTree(read_paddle(source, storages), source.url, unread=unread)
    arrays, metadata, names = read_sharded(source, storages)
    beside = sorted(name for name in sizes if name.endswith(".safetensors") and name not in names)
    return _flat_tree(source.url, arrays, metadata, (*beside, *unread))


def _flat_tree(
    label: str, arrays: dict[str, Any], metadata: dict[str, str], unread: tuple[str, ...] = ()
) -> ForeignTree:
    return ForeignTree(dict(arrays), label, {key: metadata[key] for key in metadata if key != "format"}, unread)


def check_shape(spec: ArraySpec, path: str, label: str) -> None:
    """Raises FormatError for an array of more dimensions, or bytes, than any library takes."""
    shape, itemsize = spec.shape, dtype_of(spec.dtype).itemsize
    if len(shape) > MAX_NDIM or padded_nbytes(shape, itemsize) >= MAX_NBYTES:
        raise FormatError(
            f"{path}: {label}",
            expected=f"an array of at most {MAX_NDIM} dimensions and {MAX_NBYTES - 1} bytes",
            found=f"{len(shape)} dimensions, {shape!r:.80}",
        )


def check_exists(path: Path) -> None:
    """Raises CheckpointNotFound where nothing is."""
    if not path.exists():
        raise CheckpointNotFound(str(path), expected="a checkpoint", found="nothing", hint="Check the path")
