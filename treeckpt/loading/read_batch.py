"""Reading what a load wants: arrays that stay where they are read, and regions that are copied to where they belong.

A whole array that one chunk holds *lands*: its run of the file is read once into page-aligned memory, and the array
is a view of that. Everything else (regions, several chunks, other devices, other dtypes, targets that exist) is
read through a few buffers and copied box by box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from ..arrays.base import ArrayTarget, HostArray, HostMemory, TargetPiece, raw_dtype
from ..arrays.registry import check_library, library_of, mark_written
from ..core.format.chunks import BoxChunks, WholeChunk
from ..core.format.records import AliasRecord, ArrayRecord, Index, Leaf, LeafRecord
from ..core.planning.load_plan import (
    BoxCopy,
    Chunk,
    ContiguousRead,
    ReadBlock,
    WantedRegion,
    plan_contiguous_reads,
    plan_load,
    split_at_multiples,
)
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region, any_overlap, intersect
from ..core.tree.spec import ArraySpec
from ..errors import FormatError
from ..io.storage.page_cache import available_memory
from ..io.storage.shard_reader import Shards
from ..io.storage.store import Store
from ..io.timing import Recorder
from .check_sizes import Claims
from .read_tasks import STRETCH, LoadedRange, ReadTask, list_landings, list_readings, read_limit, run_map, run_readings
from .scatter import Destination, Scatter, deal
from .shared_read import Part, SharedRead, together
from .transforms.assemble import only_chunk, pieces_of
from .transforms.view import MadeLeaf

__all__ = ["LeafPlaceholder", "ReadBatch", "ReadOptions", "Verify"]

Verify = bool | Literal["first", "stream"]
SMALL = 64 << 10
"""Bytes up to which each rank reads an array itself, rather than be handed it by another."""


class ReadOptions(msgspec.Struct, frozen=True):
    """How a load reads."""

    memory: int
    """Bytes of buffers, at most."""
    mapped: bool = False
    """Whole arrays are mapped, not read."""
    relay: SharedRead | None = None
    """Where what several ranks want is read by one of them."""


class LeafPlaceholder:
    """A place for a leaf: known at once, or once its bytes have been read."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Any = None) -> None:
        self.leaf = leaf


class _Landing(msgspec.Struct):
    slot: LeafPlaceholder
    spec: ArraySpec
    path: str
    rank: int
    start: int
    nbytes: int


class _Casting:
    """A target of another dtype than was saved."""

    def __init__(self, inner: Any, spec: ArraySpec, saved: str) -> None:
        self.inner, self.spec, self.saved = inner, spec, saved

    def write(self, box: tuple[slice, ...], data: np.ndarray) -> None:
        self.inner.write(box, library_of(self.spec).cast(data, self.saved, self.spec.dtype))


class ReadBatch:
    """What one load wants read."""

    def __init__(self, store: Store, index: Index, source_rank: int, recorder: Recorder, *, whole: bool = True) -> None:
        self.whole = whole
        """Whether shards that are cut short are refused, even where what is wanted is there."""
        self.store, self.index, self.source_rank, self.recorder = store, index, source_rank, recorder
        self.nbytes = self.read_nbytes = 0
        self.claims = Claims(store, index, whole=whole)
        self._landings: list[_Landing] = []
        self._wants: list[WantedRegion] = []
        self._pieces: list[TargetPiece] = []
        self._paths: list[str] = []
        self._members: list[Destination] = []
        self._boxes = 0
        self._after: list[Callable[[], None]] = []
        self._targets: list[object] = []
        self.asked: list[tuple[str, Leaf]] = []
        """Paths of the targets, and what was saved for them."""
        self.begun: list[ReadTask] = []
        """Whose bytes have reached their targets, or may have."""
        self._work: list[tuple[Sequence[int], list[ReadTask]]] = []

    def land(self, path: str, leaf: Leaf, spec: ArraySpec) -> LeafPlaceholder | None:
        """Wants a whole array as a view of what is read; None if it does not lie in one chunk."""
        record = leaf.record
        if not math.prod(spec.shape) or (isinstance(record, AliasRecord) and record.view is not None):
            return None
        chunk = self._only_chunk(leaf)
        dtype = dtype_of(spec.dtype)
        # what was read may begin at any block, so an element's alignment follows from its place in the stream
        if chunk is None or chunk.start % (dtype.itemsize // dtype.parts):
            return None
        check_library(spec, path)
        slot = LeafPlaceholder()
        nbytes = math.prod(spec.shape) * dtype.itemsize
        self._landings.append(_Landing(slot, spec, path, chunk.rank, chunk.start, nbytes))
        self.nbytes += nbytes
        return slot

    def _only_chunk(self, leaf: Leaf) -> WholeChunk | Chunk | None:
        """The chunk that is all of an array, None if there are several."""
        record = leaf.record
        if isinstance(record, ArrayRecord) and isinstance(record.chunks, WholeChunk):
            return record.chunks  # nearly all there is: spared a list
        if isinstance(leaf, MadeLeaf):
            return only_chunk(self.index, leaf, self.source_rank)
        chunks = self.index.chunks_of(leaf, rank=self.source_rank)
        return chunks[0] if len(chunks) == 1 else None

    def want(self, path: str, leaf: Leaf, target: ArrayTarget) -> LeafPlaceholder:
        """Wants a target's regions copied to it."""
        spec = leaf.spec
        assert spec is not None, "values are decoded, not read"
        self._targets.append(target.leaf)
        self.asked.append((path, leaf))
        if isinstance(leaf, MadeLeaf):
            self._want_made(path, leaf, target)
            return LeafPlaceholder(target.leaf)
        if self._want_whole(path, leaf.record, target, spec):
            return LeafPlaceholder(target.leaf)
        pieces = list(target.pieces)
        if target.spec.dtype != spec.dtype:
            pieces = [TargetPiece(p.region, _Casting(p.data, target.spec, spec.dtype)) for p in pieces]
        itemsize = dtype_of(spec.dtype).itemsize
        self.nbytes += sum(piece.region.size for piece in pieces) * itemsize
        record = leaf.record
        if isinstance(record, AliasRecord) and record.view is not None:
            self._want_view(path, leaf, record, pieces)
        else:
            for piece in pieces:
                self._want_piece(path, leaf, piece, itemsize)
        return LeafPlaceholder(target.leaf)

    def _want_made(self, path: str, leaf: MadeLeaf, target: ArrayTarget) -> None:
        """Wants the boxes of saved arrays that rules made an array of."""
        for wanted in pieces_of(leaf, target):
            if not isinstance(wanted, tuple):
                self._after.append(wanted)
                continue
            source, piece = wanted
            assert source.spec is not None, "values are not cut"
            itemsize, record = dtype_of(source.spec.dtype).itemsize, source.record
            self.nbytes += piece.region.size * itemsize
            if isinstance(record, AliasRecord) and record.view is not None:
                self._want_view(path, source, record, [piece])
            else:
                self._want_piece(path, source, piece, itemsize)

    def _want_whole(self, path: str, record: LeafRecord, target: ArrayTarget, spec: ArraySpec) -> bool:
        """Wants an array whole, from the one chunk that holds it, where nothing but bytes has to be moved."""
        if not isinstance(record, ArrayRecord) or not isinstance(record.chunks, WholeChunk) or len(target.pieces) != 1:
            return False
        memory = target.pieces[0].data
        if not isinstance(memory, HostMemory) or target.spec.dtype != spec.dtype or memory.shape != spec.shape:
            return False
        nbytes = math.prod(spec.shape) * memory.itemsize
        self.nbytes += nbytes
        chunk = record.chunks
        self._members.append(Destination(path, chunk.rank, chunk.start, nbytes, memory.address, memory))
        return True

    def _join_members(self, limit: int, *, apart: bool) -> None:
        """What lies together is wanted as one stretch of bytes, cut at borders of checksums.

        Args:
            apart: large ones stay alone, so that ranks which want the same one can tell.
        """
        members, self._members = self._members, []
        close = [m for m in members if not (apart and m.nbytes > SMALL)]
        for member in members if apart else ():
            if member.nbytes > SMALL:
                self._want_stretch([member], [(member.start, member.start + member.nbytes)])
        self._boxes = len(self._wants)
        for run in plan_contiguous_reads([(m.rank, m.start, m.nbytes) for m in close], borders=self.index.borders):
            inside = [close[i] for i in run.members]
            file, _ = self.index.locate(run.rank, run.start, run.stop, inside[0].path)
            self._want_stretch(inside, split_at_multiples(run.start, run.stop, file.stream, limit))

    def _want_stretch(self, members: Sequence[Destination], parts: Iterable[tuple[int, int]]) -> None:
        """Wants parts of the stream, which go to members that lie together."""
        rank, start, path = members[0].rank, members[0].start, members[0].path
        stop = max(member.start + member.nbytes for member in members)
        piece = TargetPiece(Region((0,), (stop - start,)), Scatter(start, members))
        for low, high in parts:
            part = Region((low - start,), (high - low,))
            self._wants.append(WantedRegion(part, 1, (Chunk(part, rank, low),)))
            self._pieces.append(piece)
            self._paths.append(path)

    def _want_piece(self, path: str, leaf: Leaf, piece: TargetPiece, itemsize: int) -> None:
        if not piece.region.size:
            return
        chunks = self.index.chunks_of(leaf, piece.region, rank=self.source_rank)
        covered = sum(_overlap(chunk.region, piece.region) for chunk in chunks)
        listed = isinstance(leaf.record, ArrayRecord) and isinstance(leaf.record.chunks, BoxChunks)
        if covered != piece.region.size or (listed and any_overlap([chunk.region for chunk in chunks])):
            raise FormatError(
                path,
                expected=f"chunks that hold each of {piece.region.size} elements once",
                found=f"{covered} elements" if covered != piece.region.size else "chunks that overlap",
                hint="The index does not describe the whole array; try treeckpt rebuild-index",
            )
        left = [chunk for chunk in chunks if not self._want_run(path, chunk, piece)]
        if left:
            self._wants.append(WantedRegion(piece.region, itemsize, left))
            self._pieces.append(piece)
            self._paths.append(path)

    def _want_run(self, path: str, chunk: Chunk, piece: TargetPiece) -> bool:
        """Wants what a chunk has of a piece as a run of bytes, if it is one."""
        box = intersect(chunk.region, piece.region)
        if box is None or not isinstance(piece.data, HostMemory):
            return False
        member = deal(path, (chunk.region, chunk.rank, chunk.start), piece.region, piece.data, box)
        if member is not None:
            self._members.append(member)
        return member is not None

    def _want_view(self, path: str, leaf: Leaf, record: AliasRecord, pieces: Sequence[TargetPiece]) -> None:
        """A view is cut out of its base, which is read whole."""
        base, view, spec = self.index.entries[record.of], record.view, leaf.spec
        assert base.spec is not None and view is not None and spec is not None, "checked when the index was read"
        raw = raw_dtype(dtype_of(spec.dtype).itemsize)
        memory = np.empty(base.spec.shape, raw)
        self._want_piece(path, base, TargetPiece(Region.whole(base.spec.shape), HostArray(memory)), raw.itemsize)
        strides = tuple(s * raw.itemsize for s in view.strides)

        def cut() -> None:
            window = np.ndarray(spec.shape, raw, memory, view.offset * raw.itemsize, strides)
            for piece in pieces:
                box = tuple(slice(0, n) for n in piece.region.shape)
                piece.data.write(box, window[piece.region.slices()])

        self._after.append(cut)

    def then(self, act: Callable[[], None]) -> None:
        """Has something done when everything has been read."""
        self._after.append(act)

    def run(self, verify: Verify, means: ReadOptions) -> None:
        """Reads everything, where no target exists before."""
        self.put(self.prepare(verify, means), means)

    def prepare(self, verify: Verify, means: ReadOptions, *, in_place: bool = False) -> Shards:
        """Opens the shards that are needed, and lists what is to be read. No target is written.

        Args:
            in_place: targets exist already: with `verify="first"` all checksums are compared now, which reads twice.

        Raises:
            CorruptError: a shard is missing, cut short, or of another save.
        """
        shards = Shards(self.store, self.index, self.recorder, verify=verify is not False, whole=self.whole)
        if means.mapped:
            self._map(shards)
        limit = read_limit(means.memory)
        self._join_members(min(limit, STRETCH), apart=means.relay is not None)
        parts = self._parts(means.relay)
        with together(means.relay):
            self._work = [(part.members, self._readings(shards, part.wants, limit)) for part in parts]
        if verify == "first" and in_place:
            self._check(shards, means)
        return shards

    def put(self, shards: Shards, means: ReadOptions, *, in_place: bool = False) -> None:
        """Reads what was listed and puts it in place; each block is compared with its checksum on the way.

        Args:
            in_place: targets exist already; their version counters for autograd rise.
        """
        if in_place:
            mark_written(self._targets)
        with together(means.relay):
            if means.relay is not None:
                self.read_nbytes += means.relay.run(shards, self._work, memory=means.memory, begin=self.begun.append)
            else:
                for _, readings in self._work:
                    self.read_nbytes += run_readings(shards, readings, memory=means.memory, begin=self.begun.append)
            for action in self._after:
                action()

    def _parts(self, relay: SharedRead | None) -> list[Part]:
        """Landings, then wants, by number; those that other ranks have too by which ranks that are."""
        if relay is None:
            return [Part((0,), list(range(len(self._landings) + len(self._wants))))]
        lands = [(x.rank, x.start, x.nbytes) for x in self._landings]
        return relay.agree(
            self.index.save_id, [*lands, *((w.region, [(c.rank, c.start) for c in w.chunks]) for w in self._wants)]
        )

    def _readings(self, shards: Shards, numbers: Sequence[int], limit: int) -> list[ReadTask]:
        """What is to be read for some of the landings and wants."""
        first = len(self._landings)
        lands = [self._landings[i] for i in numbers if i < first]
        wants = [i - first for i in numbers if i >= first]
        runs = plan_contiguous_reads([(x.rank, x.start, x.nbytes) for x in lands], borders=self.index.borders)
        landed, readings = list_landings(shards, runs, lambda i: lands[i].path)
        self._show(lands, runs, landed)
        boxes = [i for i in wants if i < self._boxes]
        wants = boxes + [i for i in wants if i >= self._boxes]
        plan = plan_load([self._wants[i] for i in boxes], borders=self.index.borders, limit=limit)
        return readings + list_readings(
            shards,
            [*plan.blocks, *(self._stretch(i, wants[i]) for i in range(len(boxes), len(wants)))],
            lambda i: self._pieces[wants[i]],
            itemsize=lambda i: self._wants[wants[i]].itemsize,
            paths=lambda i: self._paths[wants[i]],
        )

    def _stretch(self, number: int, want: int) -> ReadBlock:
        """The block that holds a stretch of members, and nothing else."""
        region, [chunk] = self._wants[want].region, self._wants[want].chunks
        stop = chunk.start + region.size
        return ReadBlock(chunk.rank, chunk.start, stop, (BoxCopy(number, region, region, chunk.start, stop),))

    def _map(self, shards: Shards) -> None:
        lands, self._landings = self._landings, []
        runs = plan_contiguous_reads([(x.rank, x.start, x.nbytes) for x in lands], borders=self.index.borders)
        self._show(lands, runs, run_map(shards, runs, lambda i: lands[i].path))

    def _show(
        self, landings: Sequence[_Landing], runs: Sequence[ContiguousRead], landed: Sequence[LoadedRange]
    ) -> None:
        """Makes arrays of the memory that runs land in."""
        for run, place in zip(runs, landed, strict=True):
            for member in run.members:
                landing = landings[member]
                wrap = library_of(landing.spec).wrap
                landing.slot.leaf = wrap(landing.spec, place.memory, landing.start - place.start)

    def _check(self, shards: Shards, means: ReadOptions) -> None:
        """Compares the checksums of all that is to be read; where there is room, it stays in the page cache."""
        total = sum(reading.nbytes for _, readings in self._work for reading in readings)
        stays = total < available_memory() // 2
        with together(means.relay):
            for members, readings in self._work:
                mine = means.relay.owned(readings, members) if means.relay is not None else readings
                checks = [ReadTask(reading.stretch, shared=reading.shared or stays) for reading in mine]
                run_readings(shards, checks, memory=means.memory)


def _overlap(a: Region, b: Region) -> int:
    return math.prod(
        max(0, min(o1 + n1, o2 + n2) - max(o1, o2))
        for o1, n1, o2, n2 in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )
