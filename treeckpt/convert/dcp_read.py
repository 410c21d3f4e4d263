"""Directories of torch.distributed.checkpoint, read without it: `.metadata` as data, tensors left in the files.

`.metadata` names every tensor's chunks and where each lies in which file; each chunk is a small torch.save archive
inside that file, as is each other value. Only the classes of that metadata are understood.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..arrays.lazy import LazyArray
from ..core.sharding.region import Region
from ..core.tree.spec import ArraySpec
from ..core.tree.structure import MAX_DEPTH
from ..errors import CorruptError, FormatError
from ..io.storage.foreign_formats import DCP_METADATA
from ..io.storage.store import Store
from .checksums import ArchiveStorages
from .files import FileRange, store_window
from .pickle_reader import Symbol, UnbuiltObject, brief, read_pickle
from .pickle_values import PLAIN, RefusedLeaf, dtype_named
from .piecewise import from_boxes
from .torch_read import read_torch

__all__ = ["METADATA", "read_dcp"]

METADATA = DCP_METADATA
_MODULE = "torch.distributed.checkpoint.metadata"
_INFO = "torch.distributed.checkpoint.filesystem _StorageInfo"
KEPT = 4096
"""Archives of chunks whose place in the file is remembered."""


def _state_of(node: Any, symbol: str, label: str) -> Any:
    """The fields of an object of one class of the metadata.

    Raises:
        FormatError: it is of another one.
    """
    if not isinstance(node, UnbuiltObject) or node.symbol != symbol or node.args or node.items:
        found = node.symbol.replace(" ", ".") if isinstance(node, UnbuiltObject) else f"{brief(node)}"
        raise FormatError(label, expected=symbol.replace(" ", "."), found=found, hint="It is no DCP checkpoint's")
    return node.state


def _fields(node: Any, name: str, label: str, *names: str) -> list[Any]:
    state = _state_of(node, f"{_MODULE} {name}" if " " not in name else name, label)
    if not isinstance(state, dict):
        raise FormatError(label, expected=f"the fields of {name}", found=brief(state))
    return [state.get(field) for field in names]


def _sizes(node: Any, label: str) -> tuple[int, ...]:
    if not isinstance(node, tuple) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in node):
        raise FormatError(label, expected="a torch.Size", found=brief(node))
    return tuple(node)


class DcpDirectory:
    """What `.metadata` says of where things lie."""

    def __init__(self, store: Store, storages: ArchiveStorages, refused: list[RefusedLeaf] | None) -> None:
        self.store, self.storages, self.refused = store, storages, refused
        self.label = f"{store.url}/{METADATA}"
        self.files = store.sizes()
        metadata = read_pickle(store_window(store, METADATA, self.files), PLAIN).value
        self.entries, self.paths, places = _fields(
            metadata, "Metadata", self.label, "state_dict_metadata", "planner_data", "storage_data"
        )
        if not isinstance(self.entries, dict) or not isinstance(places, dict):
            raise FormatError(self.label, expected="entries and their places", found=brief(places))
        self.places = {self._key(index): info for index, info in places.items()}
        # a chunk is read box by box: its archive is looked through once
        self._chunk = lru_cache(maxsize=KEPT)(self._read_chunk)

    def _key(self, node: Any) -> tuple[str, tuple[int, ...] | None]:
        name, offset = _fields(node, "MetadataIndex", self.label, "fqn", "offset")
        return str(name), None if offset is None else _sizes(offset, self.label)

    def window(self, key: tuple[str, tuple[int, ...] | None]) -> FileRange:
        """Where an entry lies."""
        if key not in self.places:
            raise CorruptError(self.label, expected=f"the place of {key[0][:80]} at {key[1]}", found="none")
        name, start, length, packed = _fields(
            self.places[key], _INFO, self.label, "relative_path", "offset", "length", "transform_descriptors"
        )
        if packed:
            raise FormatError(
                f"{key[0][:80]}: {self.label}",
                expected="chunks that are stored as they are",
                found=brief(packed),
                hint="Load it with torch.distributed.checkpoint and save it without extensions",
            )
        if not isinstance(name, str) or "/" in name or type(start) is not int or type(length) is not int:
            raise FormatError(self.label, expected="a file and a stretch of it", found=brief(name))
        return store_window(self.store, name, self.files).within(start, length)

    def _read_chunk(self, name: str, offset: tuple[int, ...]) -> LazyArray:
        window = self.window((name, offset))
        found = read_torch(window, self.storages)
        if not isinstance(found, LazyArray):
            raise FormatError(f"{name}: {window.label}", expected="a tensor", found=f"{type(found).__name__}")
        self.storages.note(name, found)
        return found

    def leaf(self, name: str, node: Any) -> Any:
        """A tensor, left in its files, or a value."""
        if isinstance(node, UnbuiltObject) and node.symbol == f"{_MODULE} BytesStorageMetadata":
            return read_torch(self.window((name, None)), self.storages, self.refused)
        properties, size, chunks = _fields(node, "TensorStorageMetadata", self.label, "properties", "size", "chunks")
        state = _state_of(properties, f"{_MODULE} TensorProperties", self.label)
        if not isinstance(state, tuple) or not isinstance(chunks, list):
            raise FormatError(self.label, expected="a tensor's properties and chunks", found=brief(state))
        strided = Symbol("torch strided")
        if state[1] != strided and "strided" not in str(state[1]):
            raise FormatError(f"{name}: {self.label}", expected="a dense tensor", found=brief(state[1]))
        spec = ArraySpec(_sizes(size, self.label), dtype_named(state[0]), requires_grad=state[2] is True)
        pieces = [self._piece(name, chunk) for chunk in chunks]
        return from_boxes(spec, pieces, f"{name}: {self.label}")

    def _piece(self, name: str, chunk: Any) -> tuple[Region, Any]:
        offset, sizes = _fields(chunk, "ChunkStorageMetadata", self.label, "offsets", "sizes")
        region = Region(_sizes(offset, self.label), _sizes(sizes, self.label))
        return region, lambda: self._chunk(name, region.offset)


def read_dcp(store: Store, storages: ArchiveStorages, refused: list[RefusedLeaf] | None = None) -> dict[str, Any]:
    """The state dict in a DCP directory, nested as it was, with its tensors left in the files.

    Raises:
        CheckpointNotFound, FormatError, CorruptError: it is none, or damaged.
    """
    directory = DcpDirectory(store, storages, refused)
    root: dict[Any, Any] = {}
    for name, node in directory.entries.items():
        path = directory.paths.get(name) if isinstance(directory.paths, dict) else (name,)
        if (
            not isinstance(path, tuple)
            or not 0 < len(path) <= MAX_DEPTH
            or any(type(k) not in (str, int) for k in path)
        ):
            raise FormatError(directory.label, expected=f"the path of {brief(name)}", found=brief(path))
        _put(root, path, directory.leaf(name, node), directory.label)
    return {key: _with_lists(node, directory.label) for key, node in root.items()}


class _Node(dict[Any, Any]):
    """A container on the way: of a list where its keys are numbers."""


def _put(root: dict[Any, Any], path: tuple[str | int, ...], leaf: Any, label: str) -> None:
    node = root
    for key in path[:-1]:
        node = node.setdefault(key, _Node())
        if type(node) is not _Node:
            raise FormatError(label, expected="a container", found=f"a leaf, above {brief(path)}")
    if path[-1] in node:
        raise FormatError(label, expected="each path once", found=f"{brief(path)} again")
    node[path[-1]] = leaf


def _with_lists(node: Any, label: str) -> Any:
    if type(node) is not _Node:
        return node
    made = {key: _with_lists(child, label) for key, child in node.items()}
    if not any(type(key) is int for key in made):
        return made
    if sorted(made, key=str) != sorted(range(len(made)), key=str):
        raise FormatError(label, expected="a list's positions", found=brief(list(made)))
    return [made[i] for i in range(len(made))]
