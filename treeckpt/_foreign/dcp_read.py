"""Directories of torch.distributed.checkpoint and of Paddle, read without them: metadata as data, arrays in the files.

Both have a pickle that names the chunks of each tensor, and the file of each. DCP's `.metadata` has offsets in files:
each chunk is a small torch.save archive there, as is each other value. Paddle's `{id}.metadata` has boxes of tensors,
or flat ranges of boxes; a `.distcp` file of it is a pickle of a dict of numpy arrays, with bfloat16 stored as uint16.
Only the classes of these metadata are understood.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache, partial, reduce
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import LazyArray
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, flat_regions
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import MAX_DEPTH, child_path
from .._io.storage.foreign_formats import DCP_METADATA, PADDLE_METADATA
from .._io.storage.store import Store
from ..errors import CheckpointNotFound, CorruptError, FormatError
from .checksums import ArchiveChecksums
from .files import (
    FileRange,
    Open,
    elements_of,
    flat_of,
    from_boxes,
    memory_array,
    range_of,
    store_window,
    strided_array,
)
from .pickle_reader import UnbuiltObject, brief, read_pickle
from .pickle_values import PLAIN, RefusedLeaf, build_tree, dtype_named, size_as_tuple, sizes_of
from .safetensors_read import read_safetensors
from .torch_read import entry_places, read_torch

_MODULE = "torch.distributed.checkpoint.metadata"
_INFO = "torch.distributed.checkpoint.filesystem _StorageInfo"
_METADATA = {**PLAIN, "torch Size": size_as_tuple}
"""Constructors of what `.metadata` holds."""
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


def place_key(*parts: Any) -> str:
    """Returns the key of a place: a text, because a file can choose numbers of which any count have one hash."""
    return f"{parts}"


SMALL_NBYTES = 64 << 10
"""Bytes of an archive, at most, that is compared with others of its size."""


class ChunkForm(msgspec.Struct, frozen=True):
    """What the archives of chunks of one shape and dtype have in common: all but the contents of entries like storages.

    The pickle and the byte order are among it: an archive that has it holds an array of the same spec.
    """

    fixed: tuple[tuple[int, bytes], ...]
    """The bytes that are equal, with their places in the archive."""
    crc: int
    """The place of the CRC-32 of the elements."""
    start: int
    nbytes: int
    """The place and the number of the bytes of the elements."""
    name: str
    spec: ArraySpec

    def chunk(self, window: FileRange, sums: ArchiveChecksums) -> LazyArray | None:
        """Returns the array in an archive; None where the archive is another one."""
        data = window.read(0, window.size).tobytes()
        if any(data[place : place + len(part)] != part for place, part in self.fixed):
            return None
        elements = window.within(self.start, self.nbytes)
        entry = sums.sum_of(elements, int.from_bytes(data[self.crc : self.crc + 4], "little"), self.name)
        entry.is_storage = True
        flat = flat_of(entry.read, dtype_of(self.spec.dtype).itemsize)
        return strided_array(self.spec, flat, 0, None, entry.address, window=elements)


def form_of(window: FileRange, chunk: LazyArray, sums: ArchiveChecksums) -> ChunkForm | None:
    """Returns the form of an archive that was read; None where its array is not all of one entry in C order."""
    elements, entry = range_of(chunk), sums.note("", chunk)
    if elements is None or entry is None or (entry.window.start, entry.window.size) != (elements.start, elements.size):
        return None
    start, crc = elements.start - window.start, 0
    free: list[tuple[int, int]] = []
    for place in entry_places(window):
        if not place.is_read:
            free += [(place.start, place.nbytes), *((one, 4) for one in (place.crc, *place.copies))]
        if place.start == start and place.nbytes == elements.size:
            crc = place.crc
    data, fixed, reached = window.read(0, window.size).tobytes(), list[tuple[int, bytes]](), 0
    for gap, size in sorted(free):
        fixed.append((reached, data[reached:gap]))
        reached = gap + size
    fixed.append((reached, data[reached:]))
    return ChunkForm(tuple(fixed), crc, start, elements.size, entry.name, chunk.spec)


class DcpDirectory:
    """What `.metadata` says of where things lie."""

    def __init__(self, store: Store, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> None:
        self.store, self.sums, self.refused = store, sums, refused
        self.label = f"{store.url}/{DCP_METADATA}"
        self.files = store.sizes()
        read = read_pickle(store_window(store, DCP_METADATA, self.files), _METADATA)
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
        self._forms: dict[int, ChunkForm] = {}
        """The form of the last archive of each size."""
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
        # a name with a slash could be a file anywhere
        if not isinstance(file, str) or "/" in file or type(start) is not int or type(length) is not int:
            raise FormatError(self.label, expected="a file, an offset and a length", found=brief(file))
        return store_window(self.store, file, self.files).within(start, length)

    def _read_chunk(self, name: str, offset: tuple[int, ...]) -> LazyArray:
        window = self.window(name, offset)
        form = self._forms.get(window.size)
        chunk = form.chunk(window, self.sums) if form is not None else None
        if chunk is None:
            chunk = read_torch(window, self.sums)
            if not isinstance(chunk, LazyArray):
                raise FormatError(f"{name}: {window.label}", expected="a tensor", found=f"{type(chunk).__name__}")
            if window.size <= SMALL_NBYTES and (form := form_of(window, chunk, self.sums)) is not None:
                self._forms[window.size] = form
        self.sums.note(name, chunk)
        return chunk

    def _keys(self, name: str) -> tuple[Any, ...]:
        """Returns the steps to a leaf in the tree; its name alone where they are not known."""
        path: Any = self.paths.get(name) if isinstance(self.paths, dict) and self.paths else None
        return tuple(path) if is_path(path) else (name,)

    def leaf(self, name: str, node: Any) -> Any:
        """Returns a tensor, left in its files, or a value."""
        if isinstance(node, UnbuiltObject) and node.symbol == f"{_MODULE} BytesStorageMetadata":
            inner: list[RefusedLeaf] = []
            value = read_torch(self.window(name, None), self.sums, inner)
            for leaf in inner:
                above = reduce(child_path, self._keys(name), "")
                self.refused.append(RefusedLeaf("/".join(filter(None, (above, leaf.path))), leaf.what, leaf.why))
            return value
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


def read_dcp(store: Store, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> dict[Any, Any]:
    """Returns the state dict in a DCP directory, nested as it was, with its tensors left in the files.

    Raises:
        CheckpointNotFound, FormatError, CorruptError: it is none, or damaged.
    """
    directory = DcpDirectory(store, sums, refused)
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
    # by text: keys of a file may be numbers and texts, which cannot be compared
    if sorted(made, key=str) != sorted(range(len(made)), key=str):
        raise FormatError(label, expected="a list's positions", found=brief(list(made)))
    return [made[i] for i in range(len(made))]


_PADDLE_MODULES = ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")


def _paddle_fields(node: Any, name: str, label: str) -> dict[str, Any]:
    """Returns the fields of an object of one class of the metadata.

    Raises:
        FormatError: it is of another one.
    """
    symbols = [f"{module} {name}" for module in _PADDLE_MODULES]
    if not isinstance(node, UnbuiltObject) or node.symbol not in symbols or not isinstance(node.state, dict):
        found = node.symbol.replace(" ", ".") if isinstance(node, UnbuiltObject) else f"{brief(node)}"
        raise FormatError(label, expected=f"Paddle's {name}", found=found, hint="It is no Paddle checkpoint's")
    return node.state


def _sizes(node: Any, label: str) -> tuple[int, ...]:
    return sizes_of(node, label, "a shape or an offset")


class PaddlePiece(msgspec.Struct, frozen=True):
    """A box of a tensor, or a flat range of it."""

    box: Region
    flat: tuple[int, int] | None
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor; empty where the files are of a version that does not say."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The place of the piece in the tensor."""
        return self.box.offset, self.flat


def _flat(fields: dict[str, Any], label: str) -> tuple[int, int] | None:
    if not fields.get("is_flattened"):
        return None
    bounds = fields.get("flattened_range")
    pair = (bounds.start, bounds.stop) if isinstance(bounds, slice) else bounds
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise FormatError(label, expected="a flattened range", found=brief(bounds))
    low, high = _sizes(pair, label)
    return low, max(low, high)


class PaddleDirectory:
    """The files of a checkpoint of Paddle, and the tensors that are stored in them."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.label = store, f"{store.url}/{name}"
        self.files = store.sizes()
        read = read_pickle(store_window(store, name, self.files), PLAIN)
        fields, self._left = _paddle_fields(read.value, "Metadata", self.label), read.steps
        tensors, places = fields.get("state_dict_metadata"), fields.get("storage_metadata")
        if not isinstance(tensors, dict) or not isinstance(places, dict):
            raise FormatError(self.label, expected="tensors and their places", found=brief(tensors))
        self.tensors, self.paths = tensors, fields.get("flat_mapping")
        self.places: dict[str, Any] = {}
        for index, file in places.items():
            place = _paddle_fields(index, "LocalTensorIndex", self.label)
            if type(named := place.get("tensor_key")) is not str:
                raise FormatError(self.label, expected="names that are texts", found=brief(named))
            offset = _sizes(place.get("global_offset"), self.label)
            # replicas lie in several files: the first one is read
            self.places.setdefault(place_key(named, offset, _flat(place, self.label)), file)
        self._opened: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()

    def _arrays(self, file: str) -> dict[str, Any]:
        with self._lock:  # several threads read arrays: each file is read once
            if file not in self._opened:
                self._opened[file] = self._read_file(file)
            return self._opened[file]

    def _read_file(self, file: str) -> dict[str, Any]:
        window = store_window(self.store, file, self.files)
        if file.endswith(".safetensors"):
            return read_safetensors(window)[0]
        arrays = build_tree(read_pickle(window, PLAIN), window.label)
        if not isinstance(arrays, dict):
            raise FormatError(window.label, expected="a dict of arrays", found=type(arrays).__name__)
        return arrays

    def _piece(self, node: Any) -> PaddlePiece:
        fields = _paddle_fields(node, "LocalTensorMetadata", self.label)
        offset = _sizes(fields.get("global_offset"), self.label)
        box = Region(offset, _sizes(fields.get("local_shape"), self.label))
        if len(box.offset) != len(box.shape):
            raise FormatError(self.label, expected="an offset for each dimension", found=f"{box}")
        named = fields.get("dtype")
        dtype = (named if type(named) is str else brief(named)).removeprefix("paddle.")
        whole = fields.get("global_shape")
        return PaddlePiece(
            box, _flat(fields, self.label), dtype_of(dtype).name, () if whole is None else _sizes(whole, self.label)
        )

    def _data(self, name: str, piece: PaddlePiece) -> LazyArray:
        """Returns the array of a piece as its file has it."""
        file = self.places.get(place_key(name, *piece.key))
        if not isinstance(file, str) or file not in self.files:
            raise CorruptError(self.label, expected=f"the file of {name[:80]} at {piece.box.offset}", found=brief(file))
        array = self._arrays(file).get(name)
        size = piece.box.size if piece.flat is None else piece.flat[1] - piece.flat[0]
        label = f"{name[:80]}: {self.store.url}/{file}"
        if isinstance(array, np.ndarray):
            array = memory_array(array)
        if not isinstance(array, LazyArray) or math.prod(array.spec.shape) != size:
            raise CorruptError(label, expected=f"an array of {size} elements", found=brief(array))
        stored = array.spec.dtype
        if stored != piece.dtype and (stored, piece.dtype) != ("uint16", "bfloat16"):
            raise CorruptError(label, expected=f"an array of {piece.dtype}", found=f"one of {stored}")
        return array

    def tensor(self, name: str, nodes: Any) -> LazyArray:
        """Assembles a tensor from its pieces."""
        self._left -= len(nodes) if isinstance(nodes, list) else 0
        if not isinstance(nodes, list) or not nodes or self._left < 0:  # one list could be that of all tensors
            raise FormatError(self.label, expected=f"the pieces of {name[:80]}", found=brief(nodes))
        # each replica has an entry of its own for the same piece
        pieces = list({place_key(*piece.key): piece for piece in map(self._piece, nodes)}.values())
        if len({len(piece.box.shape) for piece in pieces}) > 1:
            raise FormatError(self.label, expected=f"pieces of {name[:80]} of as many dimensions", found=brief(nodes))
        shape = pieces[0].shape or tuple(max(stops) for stops in zip(*(p.box.stop for p in pieces), strict=True))
        spec = ArraySpec(shape, pieces[0].dtype)
        boxes = [box for piece in pieces for box in self._boxes(name, spec.dtype, piece)]
        return from_boxes(spec, boxes, f"{name[:80]}: {self.label}")

    def _boxes(self, name: str, dtype: str, piece: PaddlePiece) -> list[tuple[Region, Open]]:
        """Returns a piece as boxes of the tensor: a flat range becomes several."""
        size = piece.box.size
        low, high = piece.flat or (0, size)
        if not 0 <= low <= high <= size:
            raise FormatError(self.label, expected=f"a range within {size} elements", found=f"{piece.flat}")
        boxes: list[tuple[Region, Open]] = []
        start = 0
        for region in flat_regions(piece.box.shape, low, high):
            opened = partial(self._box, name, piece, ArraySpec(region.shape, dtype), start)
            boxes.append((region.shifted(piece.box.offset), opened))
            start += region.size
        return boxes

    def _box(self, name: str, piece: PaddlePiece, spec: ArraySpec, start: int) -> LazyArray:
        """Returns elements of a piece, from number `start` on, as an array."""
        data = self._data(name, piece)
        return strided_array(spec, elements_of(data), start, None, None, window=range_of(data))


def read_paddle(store: Store, name: str = "") -> dict[Any, Any]:
    """Returns the state dict in a Paddle directory, nested as it was, with its tensors left in the files.

    Args:
        name: of the metadata file, where there are several.

    Raises:
        CheckpointNotFound, FormatError, CorruptError: there is none, or it is damaged.
    """
    names = sorted(n for n in store.sizes() if PADDLE_METADATA.fullmatch(n))
    if not name and len(names) != 1:
        kind = FormatError if names else CheckpointNotFound
        raise kind(
            store.url,
            expected="one {id}.metadata",
            found=", ".join(names[:4]) or "none",
            hint="Name the metadata file itself" if names else "The save never finished",
        )
    directory = PaddleDirectory(store, name or names[0])
    tensors = {key: directory.tensor(str(key), nodes) for key, nodes in directory.tensors.items()}
    return nest(tensors, directory.paths, directory.label)
