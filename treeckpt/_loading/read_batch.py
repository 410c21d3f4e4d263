"""Collects what one load reads, and has it planned and read.

A whole array that one chunk holds becomes a view of the page-aligned memory that its range of the file is read into,
once. Everything else (regions, several chunks, other devices, other dtypes, targets that exist) is read through a few
buffers and copied to its place, or straight into the target where it is contiguous and in the page cache.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import msgspec
import numpy as np

from .._arrays.base import ArrayTarget, HostArray, HostMemory, TargetPiece, raw_dtype
from .._arrays.registry import mark_written
from .._core.format.byte_map import extents_in_file
from .._core.format.records import AliasRecord, ArrayRecord, BoxChunks, File, Leaf, LeafRecord, WholeChunk
from .._core.format.shard_header import BLOCK
from .._core.planning.load_plan import READ_LIMIT, Chunk
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.placements import MeshLayout, replicas_of
from .._core.sharding.region import Region, any_overlap, coalesce, intersect, is_c_order
from .._core.tree.spec import ArraySpec
from .._io.comm.comm import Comm
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.memory import PAGE_NBYTES, aligned_buffer, available_memory
from .._io.storage.store import FETCH_MEMORY, StoreTraits
from .._io.timing import Recorder
from ..errors import FormatError, TreeckptError
from ..rules._assemble import only_chunk, pieces_of
from ..rules._view import ComposedLeaf
from .execute_local import READERS, ReadRun, execute_local
from .execute_remote import execute_remote
from .execute_shared import SharedRead, open_shared_read
from .options import Verify
from .plan import (
    ContiguousMemory,
    LeafPlaceholder,
    NewArray,
    Read,
    cut_memory,
    in_turns,
    place_of,
    plan_reads,
    read_for,
    wrap_new_arrays,
)

PATHS_SHOWN = 5
"""Paths that an error names."""
REGION_MEMORY = 16 << 20
"""Bytes of buffers for one region."""


MEMORY = 64 << 20
"""Bytes of buffers that a load from local files may take, by default; from other stores it is `FETCH_MEMORY`."""


def default_memory(traits: StoreTraits) -> int:
    """Returns the bytes of buffers that a load may take, where its options do not say."""
    return FETCH_MEMORY if traits.far else MEMORY


class BatchOptions(msgspec.Struct, frozen=True):
    """How a batch is read."""

    memory: int
    """Bytes of buffers, at most."""
    verify: Verify = True
    """Compares checksums; "first" all of them before any target in place is written, which reads twice."""
    in_place: bool = False
    """Targets exist already; their version counters for autograd rise."""
    mapped: bool = False
    """Maps whole arrays instead of reading them."""
    ahead: bool = False
    """Requests the data of shards in a store that is far away at once, and opens the shards meanwhile."""
    relay: SharedRead | None = None
    """The ranks that share their reads; None if each rank reads for itself."""


def open_relay(comm: Comm, checkpoints: Sequence[Checkpoint], once: bool | None) -> SharedRead | None:
    """Returns what `open_shared_read` does; None if each rank reads for itself, and if this process is alone."""
    return open_shared_read(comm, checkpoints) if once and comm.size > 1 else None


def together(relay: SharedRead | None, step: str = "") -> AbstractContextManager[None]:
    """Returns `relay.together(step)`; for None a context that does nothing."""
    return contextlib.nullcontext() if relay is None else relay.together(step)


class FilledArray(msgspec.Struct, frozen=True, gc=False):
    """An array that is filled, and the saved leaf whose elements it takes."""

    path: str
    leaf: Leaf
    target: ArrayTarget


class ReadBatch:
    """What one load reads from one checkpoint.

    Args:
        source_rank: whose array is read, of arrays that each rank has of its own.
        whole: refuses shards that are cut short, even where the wanted bytes are there.
        here: this rank, and all ranks of this host that read for themselves what they want, by global number.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        source_rank: int,
        recorder: Recorder,
        *,
        whole: bool = True,
        here: tuple[int, Sequence[int]] = (0, (0,)),
    ) -> None:
        self.checkpoint, self.whole, self._here = checkpoint, whole, here
        self._others = frozenset(here[1]) - {here[0]}
        self._index, self._source_rank, self._recorder = checkpoint.index, source_rank, recorder
        self.nbytes = self.read_nbytes = 0
        self.wanted: list[Read] = []
        """What is to be read, each with one destination."""
        self._file: File | None = None
        """The file in which the last array was found."""
        self._first: ReadBatch | None = None
        """What has to be there before all else is read: the scales of arrays."""
        self.after: list[Callable[[], object]] = []
        """What is called when everything has been read."""
        self.filled: list[FilledArray] = []
        self.written: list[Read] = []
        """Reads whose bytes have reached their targets, or may have."""
        self._work: list[tuple[Sequence[int], list[Read]]] = []
        """Reads, and the ranks that share them."""

    def add_new_array(self, path: str, leaf: Leaf, spec: ArraySpec) -> LeafPlaceholder | None:
        """Adds a whole array that becomes a view of what is read; None if it does not lie in one chunk.

        Bytes of files are in C order: None for an array that lies otherwise in memory.
        """
        record, size = leaf.record, math.prod(spec.shape)
        if not size or (isinstance(record, AliasRecord) and record.view is not None):
            return None
        if spec.order is not None and not is_c_order(spec.shape, spec.order):
            return None
        chunk: WholeChunk | Chunk | None = None
        if isinstance(record, ArrayRecord) and isinstance(record.chunks, WholeChunk):
            chunk = record.chunks  # the usual case, without a list
        elif isinstance(leaf, ComposedLeaf):
            chunk = only_chunk(self._index, leaf, self._source_rank)
        elif len(chunks := self._index.chunks_of(leaf, rank=self._source_rank)) == 1:
            chunk = chunks[0]
        dtype = dtype_of(spec.dtype)
        # what was read may begin at any block, so an element's alignment follows from its place in the stream
        if chunk is None or chunk.start % (dtype.itemsize // dtype.parts):
            return None
        placeholder, nbytes = LeafPlaceholder(), size * dtype.itemsize
        shared = bool(self._others) and self._is_shared(leaf, None)
        file, start = self._locate(path, chunk, nbytes)
        array = NewArray(start, start + nbytes, placeholder, spec)
        self.wanted.append(Read(file, start, start + nbytes, (array,), None, shared))
        self.nbytes += nbytes
        return placeholder

    def _locate(self, path: str, chunk: Chunk | WholeChunk, nbytes: int) -> tuple[File, int]:
        """Does what `place_of` does; most arrays lie in the file of the one before."""
        file = self._file
        if file is not None and file.rank == chunk.rank:
            start = chunk.start - file.stream
            if start >= 0 and start + nbytes <= file.nbytes:
                return file, start
        self._file, start = place_of(self._index, path, chunk, nbytes)
        return self._file, start

    def add_target(self, path: str, leaf: Leaf, target: ArrayTarget) -> None:
        """Adds the regions of a target, into which a saved array is copied.

        Raises:
            FormatError: the index does not have every element once.
        """
        spec = leaf.spec
        assert spec is not None, "values are decoded, not read"
        self.filled.append(FilledArray(path, leaf, target))
        shared = bool(self._others) and self._is_shared(leaf, target)
        if isinstance(leaf, ComposedLeaf) or target.spec.dtype != spec.dtype:
            by_source, fills = pieces_of(leaf, target, self._read_first)
            self.after += fills
            for source, pieces in by_source:
                self._add_pieces(path, source, pieces, shared=shared)
        elif not self._add_whole(path, leaf.record, target, spec, shared=shared):
            self._add_pieces(path, leaf, target.pieces, shared=shared)

    def _read_first(self, leaf: Leaf, region: Region) -> np.ndarray:
        """Returns memory into which a region of a saved array will have been read before all else is."""
        if self._first is None:
            self._first = ReadBatch(self.checkpoint, self._source_rank, self._recorder, whole=self.whole)
        return self._first.add_region(leaf, region)

    def add_region(self, leaf: Leaf, region: Region) -> np.ndarray:
        """Adds a region of a saved array; returns the memory that it is read into, for raw elements in C order."""
        assert leaf.spec is not None, "values are in the index"
        memory = np.empty(region.shape, raw_dtype(dtype_of(leaf.spec.dtype).itemsize))
        self.add_target(leaf.path, leaf, ArrayTarget(leaf.spec, memory, [TargetPiece(region, HostArray(memory))]))
        return memory

    def _is_shared(self, leaf: Leaf, target: ArrayTarget | None) -> bool:
        """Whether other ranks of this host probably want the same bytes: the whole of what all have, or a replica.

        Args:
            target: None for a whole array.
        """
        if leaf.ranks is not None:
            return False
        if target is not None and isinstance(target.layout, MeshLayout):
            return not self._others.isdisjoint(replicas_of(target.layout, self._here[0]))
        return target is None or sum(piece.region.size for piece in target.pieces) == math.prod(target.spec.shape)

    def _add_whole(self, path: str, record: LeafRecord, target: ArrayTarget, spec: ArraySpec, *, shared: bool) -> bool:
        """Adds an array whose one chunk has the bytes of a contiguous target; False for any other."""
        if not isinstance(record, ArrayRecord) or not isinstance(record.chunks, WholeChunk) or len(target.pieces) != 1:
            return False
        memory = target.pieces[0].data
        if not isinstance(memory, HostMemory) or memory.shape != spec.shape:
            return False
        nbytes = math.prod(spec.shape) * memory.itemsize
        self.nbytes += nbytes
        file, start = self._locate(path, record.chunks, nbytes)
        where = ContiguousMemory(start, start + nbytes, memory.address, memory)
        self.wanted.append(Read(file, start, start + nbytes, (where,), None, shared))
        return True

    def _add_pieces(self, path: str, leaf: Leaf, pieces: Sequence[TargetPiece], *, shared: bool) -> None:
        """Adds regions of a saved array, or of a view of one."""
        assert leaf.spec is not None, "values are decoded, not read"
        itemsize, record = dtype_of(leaf.spec.dtype).itemsize, leaf.record
        self.nbytes += sum(piece.region.size for piece in pieces) * itemsize
        if isinstance(record, AliasRecord) and record.view is not None:
            self._add_view(path, leaf, record, pieces, shared=shared)
        else:
            for piece in pieces:
                self._add_piece(path, leaf, piece, itemsize, shared=shared)

    def _add_piece(self, path: str, leaf: Leaf, piece: TargetPiece, itemsize: int, *, shared: bool) -> None:
        if not piece.region.size:
            return
        chunks = self._index.chunks_of(leaf, piece.region, rank=self._source_rank)
        boxes = [intersect(chunk.region, piece.region) for chunk in chunks]
        covered = sum(box.size for box in boxes if box is not None)
        listed = isinstance(leaf.record, ArrayRecord) and isinstance(leaf.record.chunks, BoxChunks)
        if covered != piece.region.size or (listed and any_overlap([chunk.region for chunk in chunks])):
            raise FormatError(
                path,
                expected=f"chunks that hold each of {piece.region.size} elements once",
                found=f"{covered} elements" if covered != piece.region.size else "chunks that overlap",
                hint="The index does not describe the whole array; try treeckpt verify --repair",
            )
        for chunk, box in zip(chunks, boxes, strict=True):
            if box is not None and box.size:
                self.wanted.append(read_for(self._index, path, chunk, piece, box, itemsize, shared=shared))

    def _add_view(
        self, path: str, leaf: Leaf, record: AliasRecord, pieces: Sequence[TargetPiece], *, shared: bool
    ) -> None:
        """Adds the whole base of a view, from which the view is copied."""
        base, view, spec = self._index.entries[record.of], record.view, leaf.spec
        assert base.spec is not None and view is not None and spec is not None, "checked when the index was read"
        raw = raw_dtype(dtype_of(spec.dtype).itemsize)
        memory = np.empty(base.spec.shape, raw)
        whole = TargetPiece(Region.whole(base.spec.shape), HostArray(memory))
        self._add_piece(path, base, whole, raw.itemsize, shared=shared)
        strides = tuple(s * raw.itemsize for s in view.strides)
        window = np.ndarray(spec.shape, raw, memory, view.offset * raw.itemsize, strides)
        for piece in pieces:
            box = tuple(slice(0, n) for n in piece.region.shape)
            part = window[(*piece.region.slices(), ...)]  # an array, not a number, also without dimensions
            self.after.append(partial(piece.data.write, box, part))

    def run(self, options: BatchOptions) -> None:
        """Reads everything."""
        self.prepare(options)
        self.put(options)

    def prepare(self, options: BatchOptions) -> None:
        """Opens the shards that are needed, and plans what is to be read. No target is written.

        Raises:
            CorruptError: a shard is missing, cut short, or of another save.
        """
        first = options.verify == "first" and options.in_place
        verify, relay, wanted, mapped = options.verify is not False, options.relay, self.wanted, list[Read]()
        executor = execute_remote if self.checkpoint.store.traits.far else execute_local
        self._run = ReadRun(self.checkpoint, self._recorder, verify, self.whole, self.written, executor)
        if options.mapped:
            mapped = [read for read in wanted if type(read.destinations[0]) is NewArray]
            wanted = [read for read in wanted if type(read.destinations[0]) is not NewArray]
        limit, size = self._request_nbytes(options.memory)
        parts: list[tuple[Sequence[int], Sequence[Read]]] = [((self._here[0],), wanted)]
        if relay is not None:
            parts[:] = relay.agree(self._index.save_id, wanted, min(limit, size))
        with together(relay):  # once the ranks have agreed: one that fails here is told of to the others
            steps = self._open_shards(verify, ahead=options.ahead and not first and not options.mapped)
            self._map_arrays(mapped)
            if self._first is not None:
                self._first.run(BatchOptions(REGION_MEMORY, bool(options.verify), ahead=True))
                self.nbytes += self._first.nbytes
                self.read_nbytes += self._first.read_nbytes
                self._first = None
            self._work = [(members, self._plan(part, steps, limit, size)) for members, part in parts]
        if relay is None and self._others:
            position = self._here[1].index(self._here[0])
            self._work = [(members, in_turns(reads, position, len(self._here[1]))) for members, reads in self._work]
        if first:
            self._verify_first(options)

    def _request_nbytes(self, memory: int) -> tuple[int, int]:
        """Returns the bytes of one read into a buffer, at most, and of one where any size would do."""
        # so that a few, rounded out to whole blocks with checksums, fit into the memory
        limit = min(READ_LIMIT, max(memory // READERS // BLOCK * BLOCK - 2 * BLOCK, BLOCK))
        return limit, self.checkpoint.store.traits.request_nbytes

    def requests(self, *, verify: bool = True) -> list[Read]:
        """Returns the reads that a load carries out, each one request; opens no shard and takes no memory.

        Args:
            verify: compares checksums, of blocks of the usual size, as a load does by default.
        """
        limit, size = self._request_nbytes(default_memory(self.checkpoint.store.traits))
        steps = {read.file.name: BLOCK if verify else PAGE_NBYTES for read in self.wanted}
        return self._plan(self.wanted, steps, limit, size, allocate=False)

    @property
    def _far(self) -> bool:
        return self.checkpoint.store.traits.far

    def _open_shards(self, verify: bool, *, ahead: bool) -> dict[str, int]:
        """Opens the shards that are needed; returns by name how many bytes of each are read together, at least.

        Args:
            ahead: leaves shards in a store that is far away to the first read of them.
        """
        files = {read.file.name: read.file for read in self.wanted}
        if self._far and not ahead:
            self.checkpoint.open_shards(files.values(), whole=self.whole)
        steps: dict[str, int] = {}
        for name, file in files.items():
            later = self._far and ahead and not self.checkpoint.is_open(file, whole=self.whole)
            # of a shard that is not open yet the usual size is assumed; `execute_remote` looks whether it is
            block = BLOCK if later else self._run.shard(file).block
            steps[name] = block if verify else PAGE_NBYTES
        return steps

    def _map_arrays(self, wanted: Sequence[Read]) -> None:
        """Maps arrays copy-on-write: bytes are read when they are touched, and never compared with checksums."""
        pages = {read.file.name: PAGE_NBYTES for read in wanted}
        for read in plan_reads(wanted, pages, limit=READ_LIMIT, size=READ_LIMIT):
            position = read.file.header + read.start
            wrap_new_arrays(read, self.checkpoint.store.map(read.file.name, position, read.nbytes))

    def _plan(
        self, wanted: Sequence[Read], steps: dict[str, int], limit: int, size: int, *, allocate: bool = True
    ) -> list[Read]:
        """Plans reads; with `allocate` new arrays exist then, without their bytes."""
        reads: list[Read] = []
        for read in plan_reads(wanted, steps, limit=limit, size=min(limit, size)):
            if read.destinations and type(read.destinations[0]) is NewArray:
                memory, step = None, steps[read.file.name]
                if allocate:
                    memory = aligned_buffer(read.nbytes, huge=True)
                    wrap_new_arrays(read, memory)
                reads += cut_memory(read, memory, max(size // step, 1) * step)
            else:
                reads.append(read)
        return reads

    def put(self, options: BatchOptions) -> None:
        """Reads what was planned and puts it in place; each block is compared with its checksum on the way."""
        if options.in_place:
            # before the first byte: a fill that fails midway has changed tensors too
            mark_written([filled.target.leaf for filled in self.filled])
        relay = options.relay
        with together(relay):
            if relay is not None:
                self.read_nbytes += relay.run(self._run, self._work, memory=options.memory)
            else:
                for _, reads in self._work:
                    self._run.execute(reads, options.memory)
                    self.read_nbytes += sum(read.nbytes for read in reads)
            after, self.after = self.after, []  # what they hold is freed with them
            for act in after:
                act()

    def changed(self) -> list[str]:
        """Returns the paths of targets that may hold some of what was read, after a failure.

        Those may that have bytes in a range of a shard that was written to its targets.
        """
        written: dict[str, tuple[File, list[tuple[int, int]]]] = {}
        for read in self.written:
            places = written.setdefault(read.file.name, (read.file, []))[1]
            places.append((read.file.header + read.start, read.file.header + read.stop))
        met: set[int] = set()
        for file, ranges in written.values():
            starts, stops = np.array(sorted(ranges), np.int64).T
            starts, stops = coalesce(starts, stops, 0)[0].T.tolist()
            for extent in extents_in_file(self._index, file):
                number = bisect_right(stops, extent.start)
                if number < len(starts) and starts[number] < extent.stop:
                    met.add(extent.leaf)
        changed: list[str] = []
        for filled in self.filled:
            sources = filled.leaf.sources.values() if isinstance(filled.leaf, ComposedLeaf) else [filled.leaf]
            arrays = [
                source.record.of if isinstance(source.record, AliasRecord) else source.number for source in sources
            ]
            if not met.isdisjoint(arrays):
                changed.append(filled.path)
        return changed

    def _verify_first(self, options: BatchOptions) -> None:
        """Compares the checksums of all that is to be read; where there is room, it stays in the page cache."""
        total = sum(read.nbytes for _, reads in self._work for read in reads)
        stays = total < available_memory() // 2
        relay = options.relay
        with together(relay):
            for members, reads in self._work:
                mine = relay.owned(reads, members) if relay is not None else reads
                # without destinations: the bytes are compared in a buffer, and no target is written
                checks = [Read(read.file, read.start, read.stop, shared=read.shared or stays) for read in mine]
                self._run.execute(checks, options.memory)


def read_region(checkpoint: Checkpoint, leaf: Leaf, region: Region, *, rank: int = 0) -> np.ndarray:
    """Reads a region of an array, as raw elements in C order, and compares its bytes with their checksums.

    Args:
        rank: whose array, under `PerRank`.
    """
    return _read_regions(checkpoint, [(leaf, region)], rank)[0]


def read_arrays(checkpoint: Checkpoint, leaves: Sequence[Leaf]) -> list[np.ndarray]:
    """Reads arrays that no rank has for itself, many small ones at once, as `read_region` does."""
    return _read_regions(checkpoint, [(leaf, Region.whole(leaf.spec.shape)) for leaf in leaves if leaf.spec], 0)


def _read_regions(checkpoint: Checkpoint, parts: Sequence[tuple[Leaf, Region]], rank: int) -> list[np.ndarray]:
    batch = ReadBatch(checkpoint, rank, Recorder(0))
    arrays = [batch.add_region(leaf, region) for leaf, region in parts]
    batch.run(BatchOptions(memory=REGION_MEMORY, ahead=True))
    return arrays


def add_changed(error: Exception, batches: Sequence[ReadBatch]) -> None:
    """Adds to the error of a fill which arrays of the target may have changed."""
    total = sum(len(batch.filled) for batch in batches)
    changed = [path for batch in batches for path in batch.changed()]
    text = "The target was not changed"
    if changed:
        more = f" and {len(changed) - PATHS_SHOWN} more" if len(changed) > PATHS_SHOWN else ""
        names = ", ".join(path or "<root>" for path in changed[:PATHS_SHOWN])
        text = f"The target is partly filled: {len(changed)} of {total} arrays may have changed: {names}{more}"
    if isinstance(error, TreeckptError):
        error.add_hint(text)
    else:
        error.add_note(text)
