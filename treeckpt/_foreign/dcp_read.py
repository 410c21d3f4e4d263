"""Directories of torch.distributed.checkpoint, read without it: `.metadata` as data, tensors left in the files.

`.metadata` names every tensor's chunks and where each lies in which file; each chunk is a small torch.save archive
inside that file, as is each other value. Only the classes of that metadata are understood.
"""

from __future__ import annotations

from functools import lru_cache, partial, reduce
from typing import Any

from .._arrays.base import LazyArray
from .._core.sharding.region import MAX_NDIM, Region
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import MAX_DEPTH, child_path
from .._io.storage.foreign_formats import DCP_METADATA
from .._io.storage.store import Store
from ..errors import CorruptError, FormatError
from .checksums import ArchiveStorages
from .files import FileRange, Open, from_boxes, store_window
from .pickle_reader import UnbuiltObject, brief, read_pickle
from .pickle_values import PLAIN, RefusedLeaf, dtype_named
from .torch_read import read_torch

METADATA = DCP_METADATA
_MODULE = "torch.distributed.checkpoint.metadata"
_INFO = "torch.distributed.checkpoint.filesystem _StorageInfo"
REMEMBERED_ARCHIVES = 4096
"""Archives of chunks whose place in the file is remembered."""


def _state_of(node: Any, symbol: str, kind: type, label: str) -> Any:
    """Returns the state of an object of one class of the metadata.

    Raises:
        FormatError: it is of another class, or its state of another kind.
    """
    if not isinstance(node, UnbuiltObject) or node.symbol != symbol or node.args or node.items:
        found = node.symbol.replace(" ", ".") if isinstance(node, UnbuiltObject) else f"{brief(node)}"
        raise FormatError(label, expected=symbol.replace(" ", "."), found=found, hint="It is no DCP checkpoint's")
    if not isinstance(node.state, kind):
        raise FormatError(label, expected=f"the fields of {symbol.split()[1]}", found=brief(node.state))
    return node.state


def sizes_of(node: Any, label: str, expected: str = "a torch.Size") -> tuple[int, ...]:
    """Returns a shape or an offset.

    Raises:
        FormatError: it is none.
    """
    listed = isinstance(node, (tuple, list)) and len(node) <= MAX_NDIM
    if not listed or any(type(n) is not int or not 0 <= n < 1 << 62 for n in node):
        raise FormatError(label, expected=expected, found=brief(node))
    return tuple(node)


def place_key(*parts: Any) -> str:
    """Returns the key of a place: a text, because a file can choose numbers of which any count have one hash."""
    return f"{parts}"


class DcpDirectory:
    """What `.metadata` says of where things lie."""

    def __init__(self, store: Store, storages: ArchiveStorages, refused: list[RefusedLeaf]) -> None:
        self.store, self.storages, self.refused = store, storages, refused
        self.label = f"{store.url}/{METADATA}"
        self.files = store.sizes()
        read = read_pickle(store_window(store, METADATA, self.files), PLAIN)
        metadata, self._left = read.value, read.steps
        self.entries, self.paths, places = self._fields(
            metadata, "Metadata", "state_dict_metadata", "planner_data", "storage_data"
        )
        if not isinstance(self.entries, dict) or not isinstance(places, dict):
            raise FormatError(self.label, expected="entries and their places", found=brief(places))
        self.places: dict[str, Any] = {}
        for index, info in places.items():
            name, offset = self._fields(index, "MetadataIndex", "fqn", "offset")
            if type(name) is not str:
                raise FormatError(self.label, expected="names that are texts", found=brief(name))
            self.places[place_key(name, None if offset is None else sizes_of(offset, self.label))] = info
        # a chunk is read box by box: its archive is looked through once
        self._chunk = lru_cache(maxsize=REMEMBERED_ARCHIVES)(self._read_chunk)

    def _fields(self, node: Any, name: str, *names: str) -> list[Any]:
        state = _state_of(node, f"{_MODULE} {name}", dict, self.label)
        return [state.get(field) for field in names]

    def window(self, name: str, offset: tuple[int, ...] | None) -> FileRange:
        """Returns the bytes of an entry."""
        if (key := place_key(name, offset)) not in self.places:
            raise CorruptError(self.label, expected=f"the place of {name[:80]} at {offset}", found="none")
        place = _state_of(self.places[key], _INFO, dict, self.label)
        if packed := place.get("transform_descriptors"):
            raise FormatError(
                f"{name[:80]}: {self.label}",
                expected="chunks that are stored as they are",
                found=brief(packed),
                hint="Load it with torch.distributed.checkpoint and save it without extensions",
            )
        file, start, length = place.get("relative_path"), place.get("offset"), place.get("length")
        if not isinstance(file, str) or "/" in file or type(start) is not int or type(length) is not int:
            raise FormatError(self.label, expected="a file, an offset and a length", found=brief(file))
        return store_window(self.store, file, self.files).within(start, length)

    def _read_chunk(self, name: str, offset: tuple[int, ...]) -> LazyArray:
        window = self.window(name, offset)
        found = read_torch(window, self.storages)
        if not isinstance(found, LazyArray):
            raise FormatError(f"{name}: {window.label}", expected="a tensor", found=f"{type(found).__name__}")
        self.storages.note(name, found)
        return found

    def _keys(self, name: str) -> tuple[Any, ...]:
        """Returns the steps to a leaf in the tree; its name alone where they are not known."""
        path: Any = self.paths.get(name) if isinstance(self.paths, dict) and self.paths else None
        return tuple(path) if is_path(path) else (name,)

    def leaf(self, name: str, node: Any) -> Any:
        """Returns a tensor, left in its files, or a value."""
        if isinstance(node, UnbuiltObject) and node.symbol == f"{_MODULE} BytesStorageMetadata":
            inner: list[RefusedLeaf] = []
            found = read_torch(self.window(name, None), self.storages, inner)
            for one in inner:
                at = reduce(child_path, self._keys(name), "")
                self.refused.append(RefusedLeaf("/".join(filter(None, (at, one.path))), one.what, one.why))
            return found
        properties, size, chunks = self._fields(node, "TensorStorageMetadata", "properties", "size", "chunks")
        state = _state_of(properties, f"{_MODULE} TensorProperties", tuple, self.label)
        self._left -= len(chunks) if isinstance(chunks, list) else 0
        if len(state) < 3 or not isinstance(chunks, list) or self._left < 0:  # one list could be that of all tensors
            raise FormatError(self.label, expected="a tensor's properties and chunks", found=brief(state))
        dtype, layout, requires_grad, *_ = state
        if "strided" not in brief(layout):
            raise FormatError(f"{name}: {self.label}", expected="a dense tensor", found=brief(layout))
        spec = ArraySpec(sizes_of(size, self.label), dtype_named(dtype), requires_grad=requires_grad is True)
        pieces: list[tuple[Region, Open]] = []
        for chunk in chunks:
            offsets, shape = self._fields(chunk, "ChunkStorageMetadata", "offsets", "sizes")
            region = Region(sizes_of(offsets, self.label), sizes_of(shape, self.label))
            pieces.append((region, partial(self._chunk, name, region.offset)))
        return from_boxes(spec, pieces, f"{name}: {self.label}")


def read_dcp(store: Store, storages: ArchiveStorages, refused: list[RefusedLeaf]) -> dict[Any, Any]:
    """Returns the state dict in a DCP directory, nested as it was, with its tensors left in the files.

    Raises:
        CheckpointNotFound, FormatError, CorruptError: it is none, or damaged.
    """
    directory = DcpDirectory(store, storages, refused)
    leaves = {name: directory.leaf(name, node) for name, node in directory.entries.items()}
    return nest(leaves, directory.paths, directory.label)


def is_path(path: Any) -> bool:
    """Returns whether an object of a file is the path of a leaf."""
    listed = isinstance(path, (tuple, list)) and 0 < len(path) <= MAX_DEPTH
    return listed and all(type(key) is str or (type(key) is int and abs(key) < 1 << 60) for key in path)


class _Node(dict[Any, Any]):
    """A container on the way: of a list where its keys are numbers."""


def nest(leaves: dict[Any, Any], paths: Any, label: str) -> dict[Any, Any]:
    """Returns the tree of some leaves.

    Args:
        paths: of each leaf by its name; without any, names are the keys.

    Raises:
        FormatError: paths that are no tree's.
    """
    root: dict[Any, Any] = _Node()
    for name, leaf in leaves.items():
        path: Any = paths.get(name) if isinstance(paths, dict) and paths else (name,)
        if not is_path(path) and path != (name,):
            raise FormatError(label, expected=f"the path of {brief(name)}", found=brief(path))
        node = root
        *above, last = path
        for key in above:
            node = node.setdefault(key, _Node())
            if type(node) is not _Node:
                raise FormatError(label, expected="a container", found=f"a leaf, above {brief(path)}")
        if last in node:
            raise FormatError(label, expected="each path once", found=f"{brief(path)} again")
        node[last] = leaf
    return {key: _with_lists(node, label) for key, node in root.items()}


def _with_lists(node: Any, label: str) -> Any:
    if type(node) is not _Node:
        return node
    made: dict[Any, Any] = {}
    for key, child in node.items():
        made[key] = _with_lists(child, label)
    if not any(type(key) is int for key in made):
        return made
    if sorted(made, key=str) != sorted(range(len(made)), key=str):
        raise FormatError(label, expected="a list's positions", found=brief(list(made)))
    return [made[i] for i in range(len(made))]
