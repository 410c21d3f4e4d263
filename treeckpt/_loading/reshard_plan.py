"""Previews a load in a layout: which bytes each rank reads of which file, in how many requests.

The layout is that of the save, in which each rank wants the regions that it had, or a mesh with rules
`glob: placement, placement`, of which the first that matches a leaf's path applies. What a rank wants is given to the
planner of loads (`ReadBatch.requests`), so the numbers are those of a load into new arrays in host memory, with the
traits of the store. Ranks are planned one after the other until a budget of pieces is used up, in an order that is
spread over the ranks: a preview of a large job is exact for the ranks that it shows, and shows fewer ranks.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator, Sequence

import msgspec

from .._arrays.base import ArrayTarget, Box, HostMemory, TargetPiece, local_pieces, local_shape_of
from .._core.format.byte_map import chunks_of_rank, layout_of
from .._core.format.records import AliasRecord, ArrayRecord, Index, Leaf
from .._core.planning.load_plan import READ_GAP
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import encode_runs
from .._core.sharding.placements import (
    Mesh,
    MeshLayout,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    held_by,
    replicated_layout,
)
from .._core.sharding.region import Region, byte_runs
from .._core.tree.spec import ArraySpec
from .._io.storage.checkpoint import Checkpoint
from .._io.timing import Recorder
from ..errors import LayoutError
from .plan import BoxDestination, Read
from .read_batch import ReadBatch

SAVED = "saved"
"""What stands for the layout of the save, in the place of the sizes of a mesh."""
MAX_RANKS = 1 << 16
MAX_DIMS = 8
MAX_RULES = 100
MAX_PLANNED_CHUNKS = 60_000
"""Pieces that are planned for one preview, which takes a few seconds."""
SAMPLES = 256
"""Leaves from which the number of arrays is estimated."""
CERTAIN = 1.5
"""The multiple of what can be planned from which an estimate is enough to refuse it."""


class PlacementRule(msgspec.Struct, frozen=True):
    """The placements of the leaves whose path matches a glob."""

    glob: str
    placements: tuple[Placement, ...]


class LoadTarget(msgspec.Struct, frozen=True):
    """What ranks hold after a load."""

    rules: tuple[PlacementRule, ...]
    """Of the layout of the save only their globs count."""
    mesh: Mesh | None = None
    """None for the layout of the save."""

    def names(self, path: str) -> bool:
        """Whether a rule matches a path."""
        return any(fnmatch.fnmatchcase(path, rule.glob) for rule in self.rules)


class RankReads(msgspec.Struct, frozen=True):
    """The reads of one rank."""

    rank: int
    nbytes: int
    """Bytes that the rank holds afterwards."""
    read: int
    """Bytes that it reads, with gaps too small to skip and the rest of blocks whose checksum is compared."""
    reads: int
    """Requests for these bytes. Each file costs one more, for its header."""
    files: tuple[tuple[int, int], ...]
    """(number of a file, bytes read from it)."""

    @property
    def amplification(self) -> float:
        """Bytes read for each byte that the rank holds afterwards."""
        return self.read / self.nbytes if self.nbytes else 1.0


class ReshardPlan(msgspec.Struct, frozen=True):
    """A planned load."""

    ranks: tuple[RankReads, ...]
    """The ranks that were planned, by number."""
    world: int
    arrays: int
    """Arrays that a rule matches; of the save, long texts and bytes too."""
    nbytes: int
    """Bytes of those arrays, each counted once."""
    whole: int
    """Arrays that stay whole on every rank, because they lack a dimension that their rule names."""
    unmatched: int
    """Arrays that no rule matches, which are not loaded."""
    left_out: int
    """Arrays under `PerRank`, which ranks of another world cannot load, long texts and bytes, and aliases."""
    listed: int
    """Arrays of the save of which only the rank that wrote a piece is recorded, and counts here."""
    tables: int
    """Keyed tables whose rows are cut evenly here, where a load cuts them by buckets."""

    @property
    def read(self) -> int:
        return sum(rank.read for rank in self.ranks)

    @property
    def held(self) -> int:
        return sum(rank.nbytes for rank in self.ranks)

    @property
    def amplification(self) -> float:
        """Bytes read for each byte that ranks hold afterwards."""
        return self.read / self.held if self.held else 1.0

    @property
    def imbalance(self) -> float:
        """The most bytes that a rank reads, divided by the mean."""
        return max(rank.read for rank in self.ranks) * len(self.ranks) / self.read if self.read else 1.0


def parse_mesh(sizes: str, names: str = "") -> Mesh:
    """Parses a mesh from sizes such as `2x4` and names such as `dp,tp`; ranks are in row-major order.

    Raises:
        LayoutError: the texts describe no mesh, or one of more than MAX_RANKS ranks.
    """
    parts = [part.strip() for part in re.split(r"[x×*,]", sizes.strip())]
    if len(parts) > MAX_DIMS or not all(re.fullmatch(r"[1-9][0-9]{0,6}", part, re.ASCII) for part in parts):
        raise LayoutError("mesh", expected=f"sizes such as 2x4, at most {MAX_DIMS}", found=f"{sizes!r:.60}")
    shape = tuple(map(int, parts))
    if (count := math.prod(shape)) > MAX_RANKS:
        raise LayoutError("mesh", expected=f"at most {MAX_RANKS} ranks", found=f"{count}")
    named = tuple(name.strip() for name in names.split(",")) if names.strip() else ()
    if named and len(named) != len(shape):
        raise LayoutError("names", expected=f"{len(shape)} names, one for each size", found=f"{names!r:.60}")
    return Mesh(shape, encode_runs(range(count)), named)


_PLACEMENT = re.compile(
    r"\s*(?:(?P<r>R|Replicate)(?:\(\s*\))?"
    r"|(?:S|Shard)\(\s*(?:dim\s*=\s*)?(?P<s>[0-9]{1,2})\s*\)"
    r"|(?:_?StridedShard)\(\s*(?:dim\s*=\s*)?(?P<t>[0-9]{1,2})\s*,\s*(?:(?:split_)?factor\s*=\s*)?(?P<f>[1-9][0-9]{0,4})\s*\)"
    r")\s*(?:,|$)",
    re.ASCII,
)


def parse_rules(text: str, mesh: Mesh) -> tuple[PlacementRule, ...]:
    """Parses rules from a text such as `*.bias: Replicate, Replicate; *: Shard(0), Replicate`.

    Raises:
        LayoutError: naming the text that is no rule.
    """
    return tuple(_parse_rule(line, len(mesh.shape)) for line in _lines(text))


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in re.split(r"[;\n]", text) if line.strip()]
    if not lines or len(lines) > MAX_RULES:
        raise LayoutError("placements", expected=f"1 to {MAX_RULES} rules such as *: Shard(0)", found=f"{len(lines)}")
    return lines


def _parse_rule(line: str, dims: int) -> PlacementRule:
    # The last colon, because a glob may have some and placements have none.
    glob, _, placed = line.rpartition(":")
    found: list[Placement] = []
    at = 0
    while at < len(placed):
        match = _PLACEMENT.match(placed, at)
        if match is None:
            raise LayoutError(
                f"placements: {line:.80}",
                expected="Shard(0), Replicate or StridedShard(0, 2)",
                found=f"{placed[at:].strip()!r:.40}",
            )
        found.append(_placement(match))
        at = match.end()
    if len(found) != dims:
        raise LayoutError(
            f"placements: {line:.80}", expected=f"{dims} placements, one for each dimension", found=f"{len(found)}"
        )
    return PlacementRule(glob.strip() or "*", tuple(found))


def _placement(match: re.Match[str]) -> Placement:
    if match["r"]:
        return Replicate()
    return Shard(int(match["s"])) if match["s"] else StridedShard(int(match["t"]), int(match["f"]))


def parse_target(sizes: str, names: str = "", place: str = "") -> LoadTarget:
    """Parses what ranks hold after a load: `saved` with globs, or a mesh with rules.

    Raises:
        LayoutError: naming the text that is no mesh or rule.
    """
    if sizes.strip() == SAVED:
        return LoadTarget(tuple(PlacementRule(glob, ()) for glob in _lines(place or "*")))
    mesh = parse_mesh(sizes, names)
    return LoadTarget(parse_rules(place, mesh), mesh)


class WantedArray(msgspec.Struct, frozen=True):
    """A leaf that ranks want, and its layout among them."""

    leaf: Leaf
    layout: MeshLayout | None
    """None for the chunks that each rank wrote."""
    offsets: bool = False
    """Whether it is the first rows of a table's buckets, of which a load takes only the ends of a rank's own."""

    def regions(self, rank: int) -> tuple[Region, ...]:
        """Returns what a rank wants of it."""
        spec = self.leaf.stored
        assert spec is not None, "it has bytes"
        if self.layout is not None:
            found = tuple(held.region for held in held_by(self.layout, spec.shape, rank))
        else:
            found = tuple(chunk.region for chunk in chunks_of_rank(self.leaf, spec.shape, rank))
        return _bucket_ends(found, spec.shape[0]) if self.offsets else found


def _bucket_ends(owned: Sequence[Region], buckets: int) -> tuple[Region, ...]:
    """Returns the elements that a load reads to find the rows of a range of buckets: none for all of them, or none."""
    start, stop = min((r.offset[0] for r in owned), default=0), max((r.stop[0] for r in owned), default=0)
    if start == stop or (start, stop) == (0, buckets):
        return ()
    return (Region((start,), (min(stop + 1, buckets) - start,)),)


class WantedArrays(msgspec.Struct, frozen=True):
    """The leaves that the ranks of a target want, and how many others there are."""

    arrays: list[WantedArray]
    whole: int = 0
    unmatched: int = 0
    left_out: int = 0
    tables: int = 0


def wanted_arrays(index: Index, target: LoadTarget) -> WantedArrays:
    """Returns the leaves that the ranks of a target want; see `ReshardPlan` for the others."""
    matchers = [re.compile(fnmatch.translate(rule.glob)) for rule in target.rules]
    mesh = target.mesh
    layouts = [None if mesh is None else MeshLayout(mesh, rule.placements) for rule in target.rules]
    everywhere = None if mesh is None else replicated_layout(mesh.ranks)
    arrays: list[WantedArray] = []
    whole = unmatched = left_out = tables = 0
    for leaf in index.entries:
        if leaf.stored is None or (mesh is not None and leaf.number in index.offsets):
            continue
        if mesh is None and isinstance(leaf.record, AliasRecord):
            continue  # it is loaded with the array that it shares
        if mesh is not None and (leaf.spec is None or not isinstance(leaf.record, ArrayRecord)):
            left_out += 1
            continue
        number = next((n for n, matcher in enumerate(matchers) if matcher.match(leaf.path)), None)
        if number is None:
            unmatched += 1
            continue
        if mesh is None:
            arrays.append(WantedArray(leaf, layout_of(index, leaf), leaf.number in index.offsets))
            continue
        layout = layouts[number]
        assert layout is not None, "of the mesh"
        tables += leaf.number in index.tables
        if any(not isinstance(p, Replicate) and p.dim >= len(leaf.stored.shape) for p in layout.placements):
            layout, whole = everywhere, whole + 1
        arrays.append(WantedArray(leaf, layout))
    return WantedArrays(arrays, whole, unmatched, left_out, tables)


def plan_reshard(checkpoint: Checkpoint, target: LoadTarget, *, chunks: int = MAX_PLANNED_CHUNKS) -> ReshardPlan:
    """Plans what each rank would read to hold the checkpoint in a layout.

    Args:
        checkpoint: its index and the traits of its store are used; nothing is read.
        chunks: the number of pieces that may be planned; ranks beyond are left out.

    Raises:
        LayoutError: not even one rank can be planned within that number.
    """
    index, mesh = checkpoint.index, target.mesh
    if (estimate := _estimated_arrays(index, target)) > chunks * CERTAIN:
        raise _too_many(f"about {estimate} arrays", chunks)
    wanted = wanted_arrays(index, target)
    world = index.world if mesh is None else math.prod(mesh.shape)
    numbers = {file.name: number for number, file in enumerate(index.file_list)}
    ranks: list[RankReads] = []
    for rank in bit_reversed_order(world):
        planned = _RankPlan(checkpoint, rank, chunks)
        if not planned.add_all(wanted.arrays):
            break
        chunks = planned.left
        ranks.append(planned.reads(numbers))
    if not ranks:
        raise _too_many(f"{len(wanted.arrays)} arrays", chunks)
    shared = [one for one in wanted.arrays if isinstance(one.leaf.record, ArrayRecord)]
    return ReshardPlan(
        tuple(sorted(ranks, key=lambda reads: reads.rank)),
        world,
        arrays=len(wanted.arrays),
        nbytes=sum(one.leaf.nbytes for one in wanted.arrays),
        whole=wanted.whole,
        unmatched=wanted.unmatched,
        left_out=wanted.left_out,
        listed=sum(one.layout is None for one in shared),
        tables=wanted.tables,
    )


def _too_many(arrays: str, chunks: int) -> LayoutError:
    return LayoutError(
        arrays,
        expected=f"a rank that reads at most {chunks} pieces",
        found="more",
        hint="Narrow the rules, so that they match a part of the tree only, such as model/*",
    )


def sampled_leaves(index: Index) -> list[Leaf]:
    """Returns at most about SAMPLES leaves, evenly spread: to read all of a million takes seconds."""
    count = len(index.entries)
    return [index.entries[number] for number in range(0, count, max(1, count // SAMPLES))]


def _estimated_arrays(index: Index, target: LoadTarget) -> int:
    """Estimates how many arrays a rank wants, each of which is at least one piece; of the save, on average."""
    matchers = [re.compile(fnmatch.translate(rule.glob)) for rule in target.rules]
    sample = sampled_leaves(index)
    arrays = (leaf for leaf in sample if isinstance(leaf.record, ArrayRecord) and leaf.spec)
    matching = sum(any(matcher.match(leaf.path) for matcher in matchers) for leaf in arrays)
    return matching * len(index.entries) // max(1, len(sample)) // (index.world if target.mesh is None else 1)


def bit_reversed_order(count: int) -> Iterator[int]:
    """Yields the numbers below `count` in the order of their reversed bits: every prefix is spread over the range."""
    bits = max(count - 1, 0).bit_length()
    for number in range(1 << bits):
        reverse = int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
        if reverse < count:
            yield reverse


class _Unaddressed:
    """The memory of a piece that is not contiguous, or not torch's: bytes are copied to it box by box."""

    def write(self, box: Box, data: object) -> None:
        raise NotImplementedError("a preview fills nothing")


class _RankPlan:
    """The reads of one rank, in the batches in which a load carries them out.

    Args:
        left: pieces that may still be planned.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, left: int) -> None:
        self._checkpoint, self._rank, self.left = checkpoint, rank, left
        self._batches: dict[object, ReadBatch] = {}

    def add_all(self, arrays: Sequence[WantedArray]) -> bool:
        """Adds what the rank wants; False where that is too much."""
        return all(self._add(one) for one in arrays)

    def _batch(self, key: object) -> ReadBatch:
        """Returns the batch of a leaf: what other reads depend on is read before."""
        if key not in self._batches:
            self._batches[key] = ReadBatch(self._checkpoint, self._rank, Recorder(self._rank))
        return self._batches[key]

    def _add(self, one: WantedArray) -> bool:
        leaf, regions = one.leaf.as_array, one.regions(self._rank)
        spec = leaf.spec
        assert spec is not None, "it has bytes"
        batch = self._batch(leaf.number if one.offsets else "texts" if one.leaf.spec is None else "arrays")
        before = len(batch.wanted)
        whole = regions == (Region.whole(spec.shape),)
        if regions and not (whole and one.leaf.spec is not None and batch.add_new_array(leaf.path, leaf, spec)):
            wanted = msgspec.structs.replace(spec, regions=None if whole else regions)
            batch.add_target(leaf.path, leaf, ArrayTarget(spec, None, _pieces(wanted)))
        self.left -= 1 + sum(map(_most_requests, batch.wanted[before:]))
        return self.left >= 0

    def reads(self, numbers: dict[str, int]) -> RankReads:
        by_file: dict[int, int] = {}
        requests = [read for batch in self._batches.values() for read in batch.requests()]
        for read in requests:
            number = numbers[read.file.name]
            by_file[number] = by_file.get(number, 0) + read.nbytes
        nbytes = sum(batch.nbytes for batch in self._batches.values())
        files = tuple(sorted(by_file.items()))
        return RankReads(self._rank, nbytes, sum(by_file.values()), len(requests), files)


def _pieces(spec: ArraySpec) -> list[TargetPiece]:
    """Returns the pieces of a new local array, without its memory."""
    local, itemsize = Region.whole(local_shape_of(spec)), dtype_of(spec.dtype).itemsize
    in_order = spec.order is None and (spec.kind != "numpy" or spec.regions is None)

    def at(box: Box) -> HostMemory | _Unaddressed:
        part = Region(tuple(side.start for side in box), tuple(side.stop - side.start for side in box))
        dense = in_order and part.size and not byte_runs(part, local, itemsize).counts
        return HostMemory(0, part.shape, itemsize, None) if dense else _Unaddressed()

    return local_pieces(spec, at)


def _most_requests(read: Read) -> int:
    """Returns the most requests that a read takes: rows with large gaps between them are read one by one."""
    [where] = read.destinations
    if not isinstance(where, BoxDestination):
        return 1
    return 1 + min(byte_runs(where.box, where.chunk, where.itemsize).count, read.nbytes // READ_GAP)
