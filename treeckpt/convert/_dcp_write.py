"""Directories that torch.distributed.checkpoint loads: its classes for `.metadata`, archives streamed into files."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from .._arrays.base import LazyArray
from .._arrays.torch import torch_dtype
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, tiles
from .._core.tree.flatten import flatten, replace_leaves
from .._foreign.dcp_read import METADATA
from ..errors import TreeError
from ._contents import tree_of
from ._format_fit import FittedContents
from ._output import Output, OutputFile, OutputPart
from ._torch_write import TorchArchive, build_archive

CHUNK = 256 << 20
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
    items: list[Item] = []
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            entries[name], chunks = _tensor(name, *arrays[id(value)])
            items += chunks
        else:
            entries[name] = dcp.BytesStorageMetadata()
            items.append((dcp.MetadataIndex(name), _value(name, value, arrays)))
    return _packed(entries, paths, items, max_shard_size)


def _tensor(name: str, path: str, lazy: LazyArray) -> tuple[Any, list[Item]]:
    dtype = torch_dtype(lazy.spec.dtype, path)
    chunks: list[Any] = []
    items: list[Item] = []
    itemsize = dtype_of(lazy.spec.dtype).itemsize
    for number, box in enumerate(tiles(Region.whole(lazy.spec.shape), CHUNK // itemsize)):
        chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
        piece = _slice_of(lazy, box)
        index = dcp.MetadataIndex(name, box.offset, number)
        items.append((index, build_archive(piece, [(path, piece)], {})))
    properties = dcp.TensorProperties(dtype=dtype)
    return dcp.TensorStorageMetadata(properties, torch.Size(lazy.spec.shape), chunks), items


def _slice_of(lazy: LazyArray, box: Region) -> LazyArray:
    """Returns a box of an array as an array."""
    spec = msgspec.structs.replace(lazy.spec, shape=box.shape, order=None)
    return LazyArray(spec, lambda region: lazy.read(region.shifted(box.offset)))


def _value(name: str, value: Any, arrays: dict[int, tuple[str, LazyArray]]) -> TorchArchive:
    """Returns the archive of a value, which may hold tensors: a tuple is one entry."""
    leaves = [arrays.get(id(leaf), (f"{name}/{below}", leaf)) for below, leaf in flatten(value)[1]]
    return build_archive(value, leaves, {})


def _packed(entries: dict[str, Any], paths: Any, items: Sequence[Item], limit: int) -> Output:
    """Items one after the other, in files of at most `limit` bytes; a larger item alone."""
    files: list[OutputFile] = []
    parts: list[OutputPart] = []
    places: dict[Any, Any] = {}
    literals: list[tuple[int, bytes]] = []
    at = 0
    for index, archive in items:
        if at and at + archive.nbytes > limit:
            files.append(OutputFile(_file_name(len(files)), at, tuple(literals)))
            literals, at = [], 0
        placed = archive.moved(len(files), at)
        literals += placed.literals
        parts += placed.parts
        places[index] = filesystem._StorageInfo(_file_name(len(files)), at, archive.nbytes)
        at += archive.nbytes
    files.append(OutputFile(_file_name(len(files)), at, tuple(literals)))
    metadata = dcp.Metadata(entries, paths, places, dcp.StorageMeta())
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    data = pickle.dumps(metadata, protocol=4)
    files.append(OutputFile(METADATA, len(data), ((0, data),)))
    return Output(tuple(files), tuple(parts), True)


def _file_name(number: int) -> str:
    return f"__{number}_0.distcp"
