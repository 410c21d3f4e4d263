"""Files of torch.save, and directories that DCP loads, written without ever holding the tensors.

The pickle of a file comes first, and the storages are streamed into place. The pickle is Python's own, of a tree in
which each tensor is rebuilt by torch's function from a storage named by a persistent id, as torch writes it, so
`torch.load(weights_only=True)` takes it. Tied tensors and views share a storage. The place of every byte of the zip
archive is known before the first is written; checksums come last, into their places. A DCP directory has such an
archive for each chunk of a tensor and for each other value, and torch's own classes in `.metadata`.
"""

from __future__ import annotations

import collections
import importlib
import io
import math
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from .._arrays.base import LazyArray
from .._arrays.torch import torch_dtype
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, strides_in, tiles
from .._core.tree.flatten import flatten, replace_leaves
from .._core.tree.spec import ArraySpec
from .._foreign.torch_read import STORAGES
from .._io.storage.foreign_formats import DCP_METADATA
from ..errors import TreeError
from ._contents import tree_of
from ._format_fit import FittedContents, Tie
from ._output import Output, OutputFile, OutputPart

_KINDS = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}


class PickledStorage(msgspec.Struct, frozen=True):
    """What a persistent id stands for."""

    key: str
    dtype: str
    size: int


class PickledTensor(msgspec.Struct, eq=False):
    """A tensor in the tree that is pickled."""

    spec: ArraySpec
    storage: PickledStorage
    offset: int
    strides: tuple[int, ...]


class TorchArchive(msgspec.Struct, frozen=True):
    """The layout of an archive: its known bytes with their places, and the arrays that its storages are."""

    nbytes: int
    literals: tuple[tuple[int, bytes], ...]
    parts: tuple[OutputPart, ...]

    def moved(self, file: int, offset: int) -> TorchArchive:
        """Returns the same archive at byte `offset` of file number `file`."""
        literals = tuple((offset + start, data) for start, data in self.literals)
        parts: list[OutputPart] = []
        for part in self.parts:
            crcs = tuple(offset + place for place in part.crcs)
            parts.append(msgspec.structs.replace(part, file=file, start=offset + part.start, crcs=crcs))
        return TorchArchive(self.nbytes, literals, tuple(parts))


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, PickledStorage):
            return None
        kind = _KINDS.get(obj.dtype)
        if kind is None:  # torch has no class for the dtype: a storage of bytes
            return ("storage", torch.UntypedStorage, obj.key, "cpu", obj.size * dtype_of(obj.dtype).itemsize)
        return ("storage", kind, obj.key, "cpu", obj.size)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, PickledTensor):
            return NotImplemented
        # the parameter requires grad, and not the tensor that it is made of
        requires_grad = obj.spec.requires_grad and obj.spec.kind != "parameter"
        args = (obj.storage, obj.offset, obj.spec.shape, obj.strides, requires_grad, collections.OrderedDict())
        utilities: Any = importlib.import_module("torch._utils")
        function = utilities._rebuild_tensor_v2
        if obj.storage.dtype not in _KINDS:
            function, args = utilities._rebuild_tensor_v3, (*args, torch_dtype(obj.storage.dtype))
        if obj.spec.kind != "parameter":
            return function, args
        inner = _PickledCall(function, args)
        return utilities._rebuild_parameter, (inner, obj.spec.requires_grad, collections.OrderedDict())


class _PickledCall:
    """A call, as an argument of another one."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def lay_out_torch(held: FittedContents) -> Output:
    """Lays out one file of torch.save."""
    archive = build_archive(tree_of(held.contents), held.contents.leaves, held.ties)
    return Output((OutputFile("", archive.nbytes, archive.literals),), archive.parts, False)


def build_archive(tree: Any, leaves: Sequence[tuple[str, Any]], ties: Mapping[str, Tie]) -> TorchArchive:
    """Returns the archive of a tree, at the beginning of the first file.

    Args:
        leaves: of the tree, with their paths; the tree holds the lazy arrays among them by identity.
        ties: by path, leaves that show the array of another one.
    """
    bases: dict[str, PickledStorage] = {}
    arrays: list[tuple[str, LazyArray]] = []
    for path, leaf in leaves:
        if isinstance(leaf, LazyArray) and path not in ties:
            bases[path] = PickledStorage(str(len(arrays)), leaf.spec.dtype, math.prod(leaf.spec.shape))
            arrays.append((path, leaf))
    tensors = [
        _tensor(path, leaf, bases, ties) if isinstance(leaf, LazyArray) else _ordered(leaf) for path, leaf in leaves
    ]
    stream = io.BytesIO()
    # the protocol that torch.save writes, and the one that torch.load reads with weights_only=True
    _Pickler(stream, protocol=2).dump(replace_leaves(tree, iter(tensors)))
    entries: dict[str, bytes | int] = {
        "archive/data.pkl": stream.getvalue(),
        "archive/.format_version": b"1",
        "archive/.storage_alignment": b"64",
        "archive/byteorder": b"little",
        **{f"archive/data/{i}": lazy.nbytes for i, (_, lazy) in enumerate(arrays)},
        "archive/version": b"3\n",
    }
    layout = lay_out(entries)
    parts: list[OutputPart] = []
    for i, (path, lazy) in enumerate(arrays):
        start, crcs = layout.starts[f"archive/data/{i}"], layout.crcs[f"archive/data/{i}"]
        lazy = _as_in_memory(lazy)
        parts.append(OutputPart(0, start, path, lazy, Region.whole(lazy.spec.shape), crcs))
    return TorchArchive(layout.nbytes, layout.literals, tuple(parts))


def _ordered(leaf: Any) -> Any:
    """Returns a value with the same pickle in every process: the order of a set differs."""
    return _PickledCall(set, (sorted(leaf, key=repr),)) if type(leaf) is set else leaf


def _tensor(path: str, leaf: LazyArray, bases: Mapping[str, PickledStorage], ties: Mapping[str, Tie]) -> PickledTensor:
    tie = ties.get(path)
    if tie is None or tie.view is None:
        strides = strides_in(leaf.spec.shape, leaf.spec.order, 1)
        return PickledTensor(leaf.spec, bases[path if tie is None else tie.of], 0, strides)
    return PickledTensor(leaf.spec, bases[tie.of], tie.view.offset, tie.view.strides)


def _as_in_memory(lazy: LazyArray) -> LazyArray:
    """Returns an array with its dimensions in the order in which they lie in memory, and in a storage."""
    spec, order = lazy.spec, lazy.spec.order
    if order is None:
        return lazy

    def read(region: Region) -> np.ndarray:
        offset, shape = ([one[order.index(d)] for d in range(len(order))] for one in (region.offset, region.shape))
        return lazy.read(Region(tuple(offset), tuple(shape))).transpose(order)

    return LazyArray(msgspec.structs.replace(spec, shape=tuple(spec.shape[d] for d in order), order=None), read)


ALIGN_NBYTES = 64
"""Data begins at a multiple of so many bytes, as torch aligns it, so that it can be mapped."""
_DATE = (0, 0x21)  # 1980-01-01


class ZipLayout(msgspec.Struct, frozen=True):
    """A new archive: bytes that are known, by their place, and the places of what is not."""

    nbytes: int
    literals: tuple[tuple[int, bytes], ...]
    starts: dict[str, int]
    """The offset of each entry's contents."""
    crcs: dict[str, tuple[int, int]]
    """The two offsets at which each entry's checksum is written."""


def lay_out(entries: Mapping[str, bytes | int]) -> ZipLayout:
    """Lays out the archive of some entries, in their order.

    Args:
        entries: by name the contents, or the number of bytes that are written later.
    """
    literals: list[tuple[int, bytes]] = []
    starts: dict[str, int] = {}
    heads: list[tuple[str, int, int, int]] = []
    position = 0
    for text, data in entries.items():
        name = text.encode()
        nbytes, crc = (data, 0) if isinstance(data, int) else (len(data), zlib.crc32(data))
        gap = -(position + 30 + len(name) + 20 + 4) % ALIGN_NBYTES
        # wide sizes whatever they are, then the padding as torch writes it, in a field `FB`
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) + struct.pack("<HH", 0x4246, gap) + b"Z" * gap
        head = b"PK\3\4" + _common(name, crc, extra)[2:] + name + extra
        literals.append((position, head))
        heads.append((text, position, nbytes, crc))
        position += len(head)
        starts[text] = position
        if not isinstance(data, int):
            literals.append((position, data))
        position += nbytes
    directory = position
    records: list[bytes] = []
    crcs: dict[str, tuple[int, int]] = {}
    for text, head, nbytes, crc in heads:
        name, extra = text.encode(), struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, head)
        record = b"PK\1\2" + _common(name, crc, extra) + struct.pack("<HHHII", 0, 0, 0, 0, 0xFFFFFFFF) + name + extra
        crcs[text] = head + 14, position + 16
        records.append(record)
        position += len(record)
    end = b"".join((*records, _end(len(entries), directory, position)))
    return ZipLayout(directory + len(end), _joined([*literals, (directory, end)]), starts, crcs)


def _joined(literals: Sequence[tuple[int, bytes]]) -> tuple[tuple[int, bytes], ...]:
    """Joins bytes that lie one behind the other."""
    joined: list[tuple[int, list[bytes]]] = []
    reached = -1
    for start, data in literals:
        if start != reached:
            joined.append((start, []))
        joined[-1][1].append(data)
        reached = start + len(data)
    return tuple((start, b"".join(parts)) for start, parts in joined)


def _common(name: bytes, crc: int, extra: bytes) -> bytes:
    """Returns the common fields of an entry's header and its directory record; sizes are in the extra field."""
    sizes = struct.pack("<III", crc, 0xFFFFFFFF, 0xFFFFFFFF)
    return struct.pack("<HHHHHH", 45, 45, 0, 0, *_DATE) + sizes + struct.pack("<HH", len(name), len(extra))


def _end(count: int, start: int, stop: int) -> bytes:
    size = stop - start
    wide = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, start)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, stop, 1)
    few = min(count, 0xFFFF)
    return wide + locator + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, few, few, 0xFFFFFFFF, 0xFFFFFFFF, 0)


CHUNK_NBYTES = 256 << 20
"""Bytes of a chunk, at most: what a reader, or a rank that writes, has to take at once."""


Item = tuple[dcp.MetadataIndex, TorchArchive]
"""An entry of a file: a chunk of a tensor, or another value."""


def lay_out_dcp(held: FittedContents, *, max_shard_size: int) -> Output:
    """Returns the files of a DCP directory.

    Raises:
        TreeError: DCP would give two leaves one name.
    """
    tree = tree_of(held.contents)
    arrays: dict[int, tuple[str, LazyArray]] = {}
    leaves: list[Any] = []
    for path, leaf in held.contents.leaves:
        if isinstance(leaf, LazyArray):  # DCP's own traversal decides what is an entry: it looks for tensors
            mark = torch.empty(leaf.spec.shape, dtype=torch_dtype(leaf.spec.dtype, path), device="meta")
            arrays[id(mark)] = path, leaf
            leaf = mark
        leaves.append(leaf)
    try:
        marked: Any = replace_leaves(tree, iter(leaves))
        flat, paths = flatten_state_dict(marked)
    except ValueError as error:
        raise TreeError(held.contents.label, expected="a name of its own for each leaf", found=f"{error}") from error
    entries: dict[str, Any] = {}
    forms: dict[ArraySpec, TorchArchive] = {}
    items: list[Item] = []
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            entries[name], chunks = _tensor_entry(name, *arrays[id(value)], forms)
            items += chunks
        else:
            entries[name] = dcp.BytesStorageMetadata()
            items.append((dcp.MetadataIndex(name), _value_archive(name, value, arrays)))
    return _packed(entries, paths, items, max_shard_size)


def _tensor_entry(
    name: str, path: str, lazy: LazyArray, forms: dict[ArraySpec, TorchArchive]
) -> tuple[Any, list[Item]]:
    """Returns the entry of a tensor, and its chunks.

    Args:
        forms: the archive of a chunk by its spec: another chunk has the same one, with its own elements.
    """
    dtype = torch_dtype(lazy.spec.dtype, path)
    chunks: list[Any] = []
    items: list[Item] = []
    itemsize = dtype_of(lazy.spec.dtype).itemsize
    for number, box in enumerate(tiles(Region.whole(lazy.spec.shape), CHUNK_NBYTES // itemsize)):
        chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
        piece = _slice_of(lazy, box)
        index = dcp.MetadataIndex(name, box.offset, number)
        if piece.spec not in forms:
            forms[piece.spec] = build_archive(piece, [(path, piece)], {})
        form = forms[piece.spec]
        parts = tuple(msgspec.structs.replace(part, path=path, lazy=piece) for part in form.parts)
        items.append((index, msgspec.structs.replace(form, parts=parts)))
    properties = dcp.TensorProperties(dtype=dtype)
    return dcp.TensorStorageMetadata(properties, torch.Size(lazy.spec.shape), chunks), items


def _slice_of(lazy: LazyArray, box: Region) -> LazyArray:
    """Returns a box of an array as an array."""
    spec = msgspec.structs.replace(lazy.spec, shape=box.shape, order=None)
    return LazyArray(spec, lambda region: lazy.read(region.shifted(box.offset)))


def _value_archive(name: str, value: Any, arrays: dict[int, tuple[str, LazyArray]]) -> TorchArchive:
    """Returns the archive of a value, which may hold tensors: a tuple is one entry."""
    leaves = [arrays.get(id(leaf), (f"{name}/{below}", leaf)) for below, leaf in flatten(value)[1]]
    return build_archive(value, leaves, {})


def _packed(entries: dict[str, Any], paths: Any, items: Sequence[Item], limit: int) -> Output:
    """Items one after the other, in files of at most `limit` bytes; a larger item alone."""
    files: list[OutputFile] = []
    parts: list[OutputPart] = []
    places: dict[Any, Any] = {}
    literals: list[tuple[int, bytes]] = []
    position = 0
    for index, archive in items:
        if position and position + archive.nbytes > limit:
            files.append(OutputFile(_file_name(len(files)), position, tuple(literals)))
            literals, position = [], 0
        placed = archive.moved(len(files), position)
        literals += placed.literals
        parts += placed.parts
        places[index] = filesystem._StorageInfo(_file_name(len(files)), position, archive.nbytes)
        position += archive.nbytes
    files.append(OutputFile(_file_name(len(files)), position, _joined(literals)))
    metadata = dcp.Metadata(entries, paths, places, dcp.StorageMeta())
    # older versions of torch have no such number
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    data = pickle.dumps(metadata, protocol=4)
    files.append(OutputFile(DCP_METADATA, len(data), ((0, data),)))
    return Output(tuple(files), tuple(parts), True)


def _file_name(number: int) -> str:
    return f"__{number}_0.distcp"
