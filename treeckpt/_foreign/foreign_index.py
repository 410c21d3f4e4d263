"""An index of files of other programs, in the form of ours: what reads a checkpoint then reads them in place.

Each file stands for the stream of one rank, in which bytes have the offsets that they have in the file. An array whose
bytes are not in a file as they are (odd strides, values of a pickle) stands for a file of its own, which is computed
when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np
import xxhash

from .._arrays.describe import describe_tree
from .._arrays.lazy import LazyArray
from .._arrays.registry import encode
from .._core.format.build_index import build_index
from .._core.format.chunks import BoxChunks, Chunks, DeferredChunks, WholeChunk, encode_boxes
from .._core.format.records import ArrayRecord, File, Index, LeafRecord, file_table
from .._core.planning.load_plan import Chunk
from .._core.planning.rank_trees import RankClass, merge_rank_trees
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs, encode_runs
from .._core.sharding.region import Region
from .._core.tree.flatten import flatten, replace_leaves
from .._core.tree.value_codec import TypedValue
from ..errors import CheckpointError
from .files import (
    ArrayPart,
    FileArray,
    FileRange,
    FlatReader,
    ForeignStore,
    ReadComputed,
    elements_of,
    memory_array,
    range_of,
)
from .pickle_values import RefusedLeaf
from .sources import ForeignTree, check_shape

PARTS = 24
"""Bits of a part's number in the rank of an array that is computed."""
REFUSED = "refused"
"""The kind of a stored value that could not be read: an error where it is asked for."""


def _computed_rank(files: int, number: int, part: int) -> int:
    """Returns the rank whose stream an array is that is computed: part `part` of leaf `number`."""
    return files + (number << PARTS) + part


class _ChunkFinder:
    """Finds the chunks of arrays, and registers those that are computed.

    Args:
        add: takes the rank, the size and the reader of an array that is computed.
    """

    def __init__(self, files: dict[str, int], add: Callable[[int, int, ReadComputed], object]) -> None:
        self._ranks = {name: number for number, name in enumerate(files)}
        self._add = add

    def chunks(self, number: int, array: LazyArray) -> Chunks:
        """Returns the chunks of the array of a leaf."""
        if isinstance(array, FileArray) and not array.deferred and (window := range_of(array)) is not None:
            return WholeChunk(self._ranks[window.name], window.start)
        if not isinstance(array, FileArray):
            return WholeChunk(self._computed(number, 0, array), 0)
        return DeferredChunks(partial(self._find, number, array), array.count)

    def _find(self, number: int, array: FileArray, region: Region | None) -> list[Chunk]:
        return [self._chunk(number, part) for part in array.parts(region)]

    def _chunk(self, number: int, part: ArrayPart) -> Chunk:
        if isinstance(part.data, FileRange):
            return Chunk(part.region, self._ranks[part.data.name], part.data.start)
        return Chunk(part.region, self._computed(number, part.number, part.data), 0)

    def _computed(self, number: int, part: int, array: LazyArray) -> int:
        """Registers an array under a rank that is the same in every process; returns the rank."""
        rank = _computed_rank(len(self._ranks), number, part)
        self._add(rank, array.nbytes, partial(_fill, elements_of(array), dtype_of(array.spec.dtype).itemsize))
        return rank


def _fill(flat: FlatReader, itemsize: int, offset: int, out: memoryview) -> None:
    """Fills memory with the bytes of elements from byte `offset` on."""
    first, last = offset // itemsize, -(-(offset + len(out)) // itemsize)
    data = np.ascontiguousarray(flat(first, last - first)).view(np.uint8).reshape(-1)
    out[:] = data[offset - first * itemsize :][: len(out)].data


def index_files(
    found: ForeignTree, files: dict[str, int], created_ns: int, refused: Sequence[RefusedLeaf], store: ForeignStore
) -> ForeignIndex:
    """Returns the index of a tree whose arrays are in files.

    Args:
        files: their sizes by name.
        refused: the leaves that could not be read.
        store: where arrays that are computed are registered.

    Raises:
        TreeError, FormatError: a leaf that no checkpoint holds.
    """
    names = sorted(files)
    made: dict[int, LazyArray] = {}
    arrays: dict[str, LazyArray] = {}
    leaves: list[Any] = []
    for path, leaf in flatten(found.tree)[1]:
        if isinstance(leaf, np.ndarray):
            leaf = made.setdefault(id(leaf), memory_array(leaf))
        if isinstance(leaf, LazyArray):
            check_shape(leaf.spec, path, found.label)
            arrays[path] = leaf
        leaves.append(None if leaf is ... else leaf)
    described = describe_tree(replace_leaves(found.tree, iter(leaves)), rank=0)
    values = described.values | {one.path: TypedValue(REFUSED, (one.what[:200], one.why)) for one in refused}
    index = build_index(
        merge_rank_trees([RankClass(encode_runs([0]), described.inventory)], 1),
        None,
        file_table((number, 0, 0, files[name], 0) for number, name in enumerate(names)),
        values=values,
        own_values={},
        save_id=xxhash.xxh3_64_hexdigest(repr([(name, files[name]) for name in names]).encode()),
        step=None,
        created_ns=created_ns,
        metadata={key: encode(value, f"metadata/{key}", allow_pickle=False) for key, value in found.metadata.items()},
    )
    computed: dict[int, int] = {}

    def add(rank: int, nbytes: int, read: ReadComputed) -> None:
        computed[rank] = nbytes
        store.computed[computed_name(rank)] = read

    finder = _ChunkFinder({name: files[name] for name in names}, add)
    records: list[LeafRecord] = []
    for number, ((path, _), record) in enumerate(zip(index.paths, index.leaves, strict=True)):
        if isinstance(record, ArrayRecord):
            record = ArrayRecord(record.spec, record.layout, finder.chunks(number, arrays[path]))
        records.append(record)
    fields = {name: getattr(index, name) for name in index.__struct_fields__}
    return ForeignIndex(**{**fields, "leaves": tuple(records)}, names=tuple(names), computed=computed)


def with_found_chunks(index: ForeignIndex) -> ForeignIndex:
    """Returns the index with the places of all chunks, so that it can be stored.

    An array whose files cannot be read is in none, as one that is computed: a load says what is wrong with them.
    """
    leaves: list[LeafRecord] = []
    for number, record in enumerate(index.leaves):
        if isinstance(record, ArrayRecord) and isinstance(record.chunks, DeferredChunks):
            spec = index.specs[record.spec]
            try:
                chunks = _boxes(record.chunks.find(None), spec.shape)
            except CheckpointError:
                rank = _computed_rank(len(index.names), number, 0)
                index.computed[rank] = math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
                chunks = WholeChunk(rank, 0)
            record = msgspec.structs.replace(record, chunks=chunks)
        leaves.append(record)
    fields = {name: getattr(index, name) for name in index.__struct_fields__}
    return ForeignIndex(**{**fields, "leaves": tuple(leaves)})


def _boxes(found: Sequence[Chunk], shape: tuple[int, ...]) -> Chunks:
    """Encodes the chunks of an array; there are none of an empty one."""
    if not found:
        empty = encode_runs([])
        return BoxChunks((empty,) * len(shape), (empty,) * len(shape), empty, empty)
    found = sorted(found, key=lambda chunk: chunk.region.offset)
    columns = ([chunk.region.offset for chunk in found], [chunk.region.shape for chunk in found])
    offsets, shapes = (np.array(column, np.int64).reshape(len(found), len(shape)) for column in columns)
    ranks, starts = np.array([chunk.rank for chunk in found]), np.array([chunk.start for chunk in found])
    return encode_boxes(shape, offsets, shapes, ranks, starts)


FREE = 64 << 20
"""Bytes that arrays may take beyond those of all files, whatever these are: views show bytes repeatedly."""
TIMES = 16
"""Times the bytes of all files that they may take beyond that."""


class ForeignIndex(Index, frozen=True, dict=True):
    """The index of files that another program wrote."""

    names: tuple[str, ...] = ()
    """Of the files; the number of a file is the rank whose stream it is."""
    computed: dict[int, int] = msgspec.field(default_factory=dict)
    """Bytes of each array that is computed when it is read, by the rank whose stream it is."""

    @cached_property
    def file_list(self) -> tuple[File, ...]:
        sizes = decode_runs(self.files.nbytes).tolist()
        return tuple(File(name, n, 0, 0, size, 0) for n, (name, size) in enumerate(zip(self.names, sizes, strict=True)))

    @property
    def file_kind(self) -> str:
        return "file"

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.entries)

    @property
    def repeated_nbytes(self) -> int:
        """Bytes that arrays may take beside those of the files, where several of them show the same bytes."""
        nbytes = int(decode_runs(self.files.nbytes).sum())
        return most_nbytes(nbytes) - nbytes

    def locate(self, rank: int, start: int, stop: int, path: str) -> tuple[File, int]:
        if rank in self.computed:
            return File(computed_name(rank), rank, 0, 0, self.computed[rank], 0), start
        return super().locate(rank, start, stop, path)


def computed_name(rank: int) -> str:
    """Returns the name under which a store has an array that is computed; no file has it."""
    return f"{rank}/computed"


def most_nbytes(nbytes: int) -> int:
    """Returns the bytes that the arrays in files of so many bytes may take."""
    return nbytes + FREE + TIMES * nbytes
