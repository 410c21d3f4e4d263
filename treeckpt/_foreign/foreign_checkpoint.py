"""Files of another program as a checkpoint, which holds what the reader of their format returns.

A conversion reads the arrays in it (`contents`). What else reads a checkpoint takes the index, which is made of the
same contents when it is first asked for, in the form of ours: arrays are then read from the files in place. Each file
stands for the stream of one rank, in which bytes have the offsets that they have in the file. An array whose bytes
are not in a file as they are (odd strides, values of a pickle) stands for a file of its own, which is computed when
it is read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from .._arrays.base import LazyArray
from .._arrays.describe import describe_tree
from .._arrays.registry import encode, resolve
from .._core.format.check_index import FREE_VIEW_NBYTES, VIEW_TIMES
from .._core.format.records import (
    ArrayRecord,
    BoxChunks,
    Chunks,
    DeferredChunks,
    File,
    Index,
    LeafRecord,
    WholeChunk,
    build_index,
    encode_boxes,
    file_table,
)
from .._core.format.shard_header import MAX_NBYTES, padded_nbytes
from .._core.planning.load_plan import Chunk
from .._core.planning.rank_trees import RankClass, merge_rank_trees
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs, encode_runs
from .._core.sharding.region import MAX_NDIM, Region
from .._core.tree.flatten import flatten, unflatten
from .._core.tree.spec import ArraySpec, TableSpec
from .._core.tree.structure import DictNode, Node, Structure, TableNode
from .._core.tree.value_codec import TypedValue
from .._inspect.diff import Checksums
from .._io.comm.comm import launched_rank
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.foreign_formats import describe_foreign, names_text, other_formats
from .._io.storage.memory import PAGE_NBYTES
from .._io.storage.shard_reader import OpenedShard
from ..errors import CheckpointError, FormatError
from .checksums import ArchiveChecksums
from .files import (
    ArrayPart,
    FileArray,
    FileRange,
    FlatReader,
    ForeignStore,
    ForeignTree,
    elements_of,
    memory_array,
    range_of,
    store_window,
)

if TYPE_CHECKING:
    from .pickle_values import RefusedLeaf


_log = logging.getLogger("treeckpt")


class _EntryChecks(msgspec.Struct, frozen=True):
    """The checksums of one file: those of entries of zip archives in it."""

    sums: ArchiveChecksums
    url: str

    def take(self, start: int, data: memoryview) -> None:
        self.sums.take_range(self.url, start, data)


class ForeignContents(msgspec.Struct, frozen=True):
    """What files of another program hold, with the arrays left in them."""

    structure: Structure
    untabled: Structure
    """The same with a dict in the place of each keyed table."""
    leaves: tuple[tuple[str, Any], ...]
    """The leaves with their paths, in the structure's order: lazy arrays, values, and `...` for each refused one."""
    refused: tuple[RefusedLeaf, ...]
    """The leaves that only their own code could make."""
    metadata: dict[str, str]
    unread: tuple[str, ...]
    """Names of the files of the directory that hold arrays and are not read: of other formats, or in no index."""


class ForeignCheckpoint(Checkpoint):
    """Files of another program that are read in place.

    They have no version: what another process changes meanwhile is not noticed, unless a CRC-32 shows it.

    Args:
        alone: this process reads all that is read: checksums of what it reads as a whole are compared meanwhile.
    """

    has_checksums = False

    def __init__(self, store: ForeignStore, *, alone: bool = False) -> None:
        super().__init__(store)
        self._files, self.kind, self.url = store, store.kind, store.label
        self.is_file = bool(store.file)
        """Whether one file of its directory is meant."""
        self.sums = ArchiveChecksums(alone=alone)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return self.place.sizes()

    @cached_property
    def contents(self) -> ForeignContents:
        """What the reader of the format returns.

        Raises:
            CheckpointNotFound, FormatError, CorruptError: the state of the files, or an array that no library takes.
        """
        refused: list[RefusedLeaf] = []
        read = READERS[self.kind](self._files, self.sums, refused)
        unread = read.unread if self._files.file else (*read.unread, *other_formats(self.sizes, self.kind))
        structure, leaves = flatten(read.tree)
        made: dict[int, LazyArray] = {}
        arrays: list[tuple[str, Any]] = []
        for path, leaf in leaves:
            if isinstance(leaf, np.ndarray):
                # one lazy array for one object, so that ties stay
                leaf = made.setdefault(id(leaf), memory_array(leaf))
            if isinstance(leaf, LazyArray):
                _check_shape(leaf.spec, path, self.url)
            arrays.append((path, leaf))
        tabled = structure
        for keys, spec in read.tables.items():
            tabled = _with_table(tabled, keys, spec)
        return ForeignContents(tabled, structure, tuple(arrays), tuple(refused), read.metadata, unread)

    @cached_property
    def index_bytes(self) -> bytes:
        return b""

    @cached_property
    def index(self) -> ForeignIndex:
        contents = self.contents
        # one warning, not one of each rank
        if contents.unread and ((launched := launched_rank()) is None or launched.rank == 0):
            text = "%s: files of %s are read, and beside them these are not: %s. Give the path of one to load it"
            _log.warning(text, self.url, self.kind, names_text(contents.unread))
        for path, leaf in contents.leaves:
            self.sums.note(path, leaf)
        return index_files(contents, self._files)

    def own(self) -> Checkpoint:
        found, _ = describe_foreign(self.url) or ("files of another program", "")
        raise FormatError(
            self.url,
            expected="a checkpoint of treeckpt, which has checksums of all its bytes",
            found=found,
            hint="A load compares the CRC-32s that files of torch.save and DCP have; convert writes all checksums",
        )

    def checksums(self, file: File) -> Checksums:
        return self.own().checksums(file)

    def reopened(self) -> Checkpoint:
        return ForeignCheckpoint(self._files)

    def check_against_files(self) -> None:
        # sizes are taken from the files themselves, so nothing claims others
        pass

    @property
    def repeated_nbytes(self) -> int:
        return self.index.repeated_nbytes

    def shard(self, file: File, *, whole: bool = True) -> OpenedShard:
        checks = _EntryChecks(self.sums, f"{self.store.url}/{file.name}")
        # no blocks have checksums: reads are rounded out to pages
        return OpenedShard(file, (), PAGE_NBYTES, self.index, checks=checks)

    def is_open(self, file: File, *, whole: bool) -> bool:
        return True

    def is_replaced(self) -> bool:
        return False

    def unverified(self, nbytes: int) -> int:
        return self.sums.unverified(nbytes)


def _with_table(structure: Structure, keys: Sequence[str], spec: TableSpec) -> Node:
    """Returns a structure with a keyed table in the place of the dict at some keys, which has its columns."""
    assert isinstance(structure, DictNode), "a table is below dicts"
    if not keys:
        return TableNode(spec, structure.children)
    children, position = list(structure.children), structure.keys.index(keys[0])
    children[position] = _with_table(children[position], keys[1:], spec)
    return DictNode(structure.keys, tuple(children))


Read = Callable[[ForeignStore, ArchiveChecksums, "list[RefusedLeaf]"], ForeignTree]
"""Reads the files of a format; the list receives leaves that only their own code could make, which become `...`."""
READERS: dict[str, Read] = {}
"""What reads each format of other programs. Modules of readers are imported by their first call: each takes as long
as all the rest of a load."""


def add_reader(kind: str) -> Callable[[Read], Read]:
    """Registers a function as the reader of a format, which `foreign_formats.add_format` has recognised."""

    def add(read: Read) -> Read:
        READERS[kind] = read
        return read

    return add


@add_reader("torch")
def _read_torch(store: ForeignStore, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> ForeignTree:
    from .torch_read import read_torch

    return ForeignTree(read_torch(store_window(store, store.file), sums, refused))


@add_reader("dcp")
def _read_dcp(store: ForeignStore, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> ForeignTree:
    from .dcp_read import read_dcp

    return ForeignTree(read_dcp(store, sums, refused))


@add_reader("safetensors")
def _read_safetensors(store: ForeignStore, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> ForeignTree:
    from .safetensors_read import read_safetensors, read_sharded

    read = ForeignTree(*read_safetensors(store_window(store, store.file))) if store.file else read_sharded(store)
    # `format` names the library that the file was written for
    metadata = {key: text for key, text in read.metadata.items() if key != "format"}
    return ForeignTree(dict(read.tree), metadata, read.unread)


@add_reader("recis")
def _read_recis(store: ForeignStore, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> ForeignTree:
    from .recis_read import read_recis

    return read_recis(store, sums, refused)


@add_reader("hfai")
def _read_hfai(store: ForeignStore, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> ForeignTree:
    from .torch_read import read_hfai

    return ForeignTree(read_hfai(store, sums, refused))


@add_reader("paddle")
def _read_paddle(store: ForeignStore, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> ForeignTree:
    from .dcp_read import read_paddle

    return ForeignTree(read_paddle(store, store.file))


def _check_shape(spec: ArraySpec, path: str, label: str) -> None:
    """Raises FormatError for an array of more dimensions, or bytes, than any library takes."""
    shape, itemsize = spec.shape, dtype_of(spec.dtype).itemsize
    if len(shape) > MAX_NDIM or padded_nbytes(shape, itemsize) >= MAX_NBYTES:
        raise FormatError(
            f"{path}: {label}",
            expected=f"an array of at most {MAX_NDIM} dimensions and {MAX_NBYTES - 1} bytes",
            found=f"{len(shape)} dimensions, {shape!r:.80}",
        )


PART_BITS = 24
"""The number of bits of a part's number in the rank of an array that is computed."""
REFUSED = "refused"
"""The kind of a stored value that could not be read: an error where it is asked for."""


class ForeignIndex(Index, frozen=True, dict=True):
    """The index of files that another program wrote."""

    names: tuple[str, ...] = ()
    """The names of the files; the number of a file is the rank whose stream it is."""
    computed: dict[int, int] = msgspec.field(default_factory=dict)
    """The bytes of each array that is computed when it is read, by the rank whose stream it is."""

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
    return nbytes + FREE_VIEW_NBYTES + VIEW_TIMES * nbytes


def _computed_rank(files: int, number: int, part: int) -> int:
    """Returns the rank whose stream an array is that is computed: part `part` of leaf `number`."""
    return files + (number << PART_BITS) + part


class _ChunkFinder:
    """Finds the chunks of arrays, and registers those that are computed.

    Args:
        names: of the files; the number of each is a rank.
        computed: receives the bytes of arrays that are computed, by rank; `store` receives what computes them.
    """

    def __init__(self, names: Sequence[str], computed: dict[int, int], store: ForeignStore) -> None:
        self._ranks = {name: number for number, name in enumerate(names)}
        self._computed, self._store = computed, store

    def chunks(self, number: int, array: LazyArray) -> Chunks:
        """Returns the chunks of the array of a leaf."""
        if isinstance(array, FileArray) and not array.deferred and (window := range_of(array)) is not None:
            return WholeChunk(self._ranks[window.name], window.start)
        if not isinstance(array, FileArray):
            return WholeChunk(self._register(number, 0, array), 0)
        return DeferredChunks(partial(self._find, number, array), array.count)

    def _find(self, number: int, array: FileArray, region: Region | None) -> list[Chunk]:
        return [self._chunk(number, part) for part in array.parts(region)]

    def _chunk(self, number: int, part: ArrayPart) -> Chunk:
        if isinstance(part.data, FileRange):
            return Chunk(part.region, self._ranks[part.data.name], part.data.start)
        return Chunk(part.region, self._register(number, part.number, part.data), 0)

    def _register(self, number: int, part: int, array: LazyArray) -> int:
        """Registers an array under a rank that is the same in every process; returns the rank."""
        rank = _computed_rank(len(self._ranks), number, part)
        self._computed[rank] = array.nbytes
        read = partial(_fill, elements_of(array), dtype_of(array.spec.dtype).itemsize)
        self._store.computed[computed_name(rank)] = read
        return rank


def _fill(flat: FlatReader, itemsize: int, offset: int, out: memoryview) -> None:
    """Fills memory with the bytes of elements from byte `offset` on."""
    first, last = offset // itemsize, -(-(offset + len(out)) // itemsize)
    data = np.ascontiguousarray(flat(first, last - first)).view(np.uint8).reshape(-1)
    out[:] = data[offset - first * itemsize :][: len(out)].data


def index_files(contents: ForeignContents, store: ForeignStore) -> ForeignIndex:
    """Returns the index of a tree whose arrays are in files; those that are computed are registered with the store.

    Raises:
        TreeError, FormatError: a leaf that no checkpoint holds.
    """
    entries = {name: entry for name, entry in store.entries().items() if entry.regular}
    sizes = {name: entry.nbytes for name, entry in sorted(entries.items()) if not name.startswith(".")}
    # refused leaves are described as None; their values are replaced below
    # a keyed table would be described by sorting its ids
    tree = unflatten(
        contents.untabled, iter([None if leaf is ... else leaf for _, leaf in contents.leaves]), resolve=resolve
    )
    described = describe_tree(tree, rank=0)
    refused = {leaf.path: TypedValue(REFUSED, (leaf.what[:200], leaf.why)) for leaf in contents.refused}
    index = build_index(
        merge_rank_trees([RankClass(encode_runs([0]), described.inventory)], 1),
        None,
        file_table((number, 0, 0, nbytes, 0) for number, nbytes in enumerate(sizes.values())),
        values=described.values | refused,
        own_values={},
        # the same in every process, and another one where a file has another size
        save_id=xxhash.xxh3_64_hexdigest(repr(list(sizes.items())).encode()),
        step=None,
        created_ns=max((entry.modified_ns for entry in entries.values()), default=0),
        metadata={key: encode(value, f"metadata/{key}") for key, value in contents.metadata.items()},
    )
    computed: dict[int, int] = {}
    finder = _ChunkFinder(list(sizes), computed, store)
    arrays = dict(contents.leaves)
    leaves: list[LeafRecord] = []
    for number, ((path, _), record) in enumerate(zip(index.paths, index.leaves, strict=True)):
        if isinstance(record, ArrayRecord):
            record = ArrayRecord(record.spec, record.layout, finder.chunks(number, arrays[path]))
        leaves.append(record)
    fields = {name: getattr(index, name) for name in index.__struct_fields__}
    fields |= {"leaves": tuple(leaves), "structure": contents.structure}
    return ForeignIndex(**fields, names=tuple(sizes), computed=computed)


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


def _boxes(chunks: Sequence[Chunk], shape: tuple[int, ...]) -> Chunks:
    """Encodes the chunks of an array; there are none of an empty one."""
    if not chunks:
        empty = encode_runs([])
        return BoxChunks((empty,) * len(shape), (empty,) * len(shape), empty, empty)
    chunks = sorted(chunks, key=lambda chunk: chunk.region.offset)
    columns = ([chunk.region.offset for chunk in chunks], [chunk.region.shape for chunk in chunks])
    offsets, shapes = (np.array(column, np.int64).reshape(len(chunks), len(shape)) for column in columns)
    ranks, starts = np.array([chunk.rank for chunk in chunks]), np.array([chunk.start for chunk in chunks])
    return encode_boxes(shape, offsets, shapes, ranks, starts)
