"""Directories of paddle.distributed.save_state_dict, read without Paddle: `.metadata` and `.distcp` files as data.

`{id}.metadata` names every tensor's pieces, boxes of it or flat ranges of boxes, and the file of each; a `.distcp` file
is a pickle of a dict of numpy arrays, whose bytes stay in the file. bfloat16 is stored as uint16, and read as what the
metadata says.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import LazyArray
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, flat_regions
from .._core.tree.spec import ArraySpec
from .._io.storage.foreign_formats import PADDLE_METADATA
from .._io.storage.store import Store
from ..errors import CheckpointNotFound, CorruptError, FormatError
from .checksums import ArchiveStorages
from .dcp_read import nest, place_key, sizes_of
from .files import Open, elements_of, from_boxes, memory_array, range_of, store_window, strided_array
from .pickle_reader import UnbuiltObject, brief, read_pickle
from .pickle_values import PLAIN, build_tree
from .safetensors_read import read_safetensors

METADATA = PADDLE_METADATA
_MODULES = ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")


def _fields(node: Any, name: str, label: str) -> dict[str, Any]:
    """Returns the fields of an object of one class of the metadata.

    Raises:
        FormatError: it is of another one.
    """
    symbols = [f"{module} {name}" for module in _MODULES]
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
    """Of the whole tensor; empty where the files are of a version that does not say."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Its place in the tensor."""
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

    def __init__(self, store: Store, name: str, storages: ArchiveStorages) -> None:
        self.store, self.storages, self.label = store, storages, f"{store.url}/{name}"
        self.files = store.sizes()
        read = read_pickle(store_window(store, name, self.files), PLAIN)
        fields, self._left = _fields(read.value, "Metadata", self.label), read.steps
        tensors, places = fields.get("state_dict_metadata"), fields.get("storage_metadata")
        if not isinstance(tensors, dict) or not isinstance(places, dict):
            raise FormatError(self.label, expected="tensors and their places", found=brief(tensors))
        self.tensors, self.paths = tensors, fields.get("flat_mapping")
        self.places: dict[str, Any] = {}
        for index, file in places.items():
            place = _fields(index, "LocalTensorIndex", self.label)
            if type(named := place.get("tensor_key")) is not str:
                raise FormatError(self.label, expected="names that are texts", found=brief(named))
            offset = _sizes(place.get("global_offset"), self.label)
            self.places.setdefault(place_key(named, offset, _flat(place, self.label)), file)
        self._opened: dict[str, dict[str, Any]] = {}

    def _arrays(self, file: str) -> dict[str, Any]:
        if file not in self._opened:
            window = store_window(self.store, file, self.files)
            if file.endswith(".safetensors"):
                found: Any = read_safetensors(window, self.storages)[0]
            else:
                found = build_tree(read_pickle(window, PLAIN), window.label)
            if not isinstance(found, dict):
                raise FormatError(window.label, expected="a dict of arrays", found=type(found).__name__)
            self._opened[file] = found
        return self._opened[file]

    def _piece(self, node: Any) -> PaddlePiece:
        fields = _fields(node, "LocalTensorMetadata", self.label)
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
        found = self._arrays(file).get(name)
        size = piece.box.size if piece.flat is None else piece.flat[1] - piece.flat[0]
        label = f"{name[:80]}: {self.store.url}/{file}"
        if isinstance(found, np.ndarray):
            found = memory_array(found)
        if not isinstance(found, LazyArray) or math.prod(found.spec.shape) != size:
            raise CorruptError(label, expected=f"an array of {size} elements", found=brief(found))
        stored = found.spec.dtype
        if stored != piece.dtype and (stored, piece.dtype) != ("uint16", "bfloat16"):
            raise CorruptError(label, expected=f"an array of {piece.dtype}", found=f"one of {stored}")
        return found

    def tensor(self, name: str, nodes: Any) -> LazyArray:
        """Assembles a tensor from its pieces."""
        self._left -= len(nodes) if isinstance(nodes, list) else 0
        if not isinstance(nodes, list) or not nodes or self._left < 0:  # one list could be that of all tensors
            raise FormatError(self.label, expected=f"the pieces of {name[:80]}", found=brief(nodes))
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
        found: list[tuple[Region, Open]] = []
        start = 0
        for region in flat_regions(piece.box.shape, low, high):
            opened = partial(self._box, name, piece, ArraySpec(region.shape, dtype), start)
            found.append((region.shifted(piece.box.offset), opened))
            start += region.size
        return found

    def _box(self, name: str, piece: PaddlePiece, spec: ArraySpec, start: int) -> LazyArray:
        """Returns elements of a piece, from number `start` on, as an array."""
        data = self._data(name, piece)
        return strided_array(spec, elements_of(data), start, None, None, window=range_of(data))


def read_paddle(store: Store, storages: ArchiveStorages, name: str | None = None) -> dict[Any, Any]:
    """Returns the state dict in a Paddle directory, nested as it was, with its tensors left in the files.

    Args:
        name: of the metadata file, where there are several.

    Raises:
        CheckpointNotFound, FormatError, CorruptError: there is none, or it is damaged.
    """
    names = sorted(n for n in store.sizes() if METADATA.fullmatch(n))
    if name is None and len(names) != 1:
        kind = FormatError if names else CheckpointNotFound
        raise kind(
            store.url,
            expected="one {id}.metadata",
            found=", ".join(names[:4]) or "none",
            hint="Name the metadata file itself" if names else "The save never finished",
        )
    directory = PaddleDirectory(store, name or names[0], storages)
    tensors = {key: directory.tensor(str(key), nodes) for key, nodes in directory.tensors.items()}
    return nest(tensors, directory.paths, directory.label)
