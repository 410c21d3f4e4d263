"""Previews a load on another mesh: what each rank would read from which file.

The target is a mesh and rules `glob: placement, placement`; the first rule that matches a leaf's path applies. Regions
come from `_core.sharding.placements` and reads from `_core.planning.load_plan`, so the counts are those of the
loader. Ranks are planned one after the other until a budget of chunks is used up, in an order that is spread over the
mesh: a preview of a large job is exact for the ranks that it shows, and shows fewer ranks.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator, Sequence

import msgspec

from treeckpt._core.format.records import ArrayRecord, Index, Leaf
from treeckpt._core.format.shard_header import BLOCK
from treeckpt._core.planning.load_plan import READ_GAP, WantedRegion, plan_load
from treeckpt._core.sharding.dtypes import dtype_of
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import (
    Mesh,
    MeshLayout,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    held_by,
    replicated_layout,
)
from treeckpt._core.sharding.region import Region, byte_runs, intersect
from treeckpt.errors import LayoutError

MAX_RANKS = 1 << 16
MAX_DIMS = 8
MAX_RULES = 100
MAX_PLANNED_CHUNKS = 60_000
"""Chunks that are planned for one preview, which takes a few seconds."""
SAMPLES = 256
"""Leaves from which the number of arrays is estimated."""
CERTAIN = 1.5
"""The multiple of what can be planned from which an estimate is enough to refuse it."""


class PlacementRule(msgspec.Struct, frozen=True):
    """The placements of the leaves whose path matches a glob."""

    glob: str
    placements: tuple[Placement, ...]


class RankReads(msgspec.Struct, frozen=True):
    """The reads of one rank."""

    rank: int
    nbytes: int
    """Bytes that the rank holds afterwards."""
    read: int
    """Bytes that it reads, with gaps too small to skip and the rest of blocks whose checksum is compared."""
    reads: int
    files: tuple[tuple[int, int], ...]
    """(number of a file, bytes read from it)."""


class ReshardPlan(msgspec.Struct, frozen=True):
    """A planned load."""

    ranks: tuple[RankReads, ...]
    """The ranks that were planned, by number."""
    world: int
    arrays: int
    """Arrays that a rule matches."""
    nbytes: int
    """Bytes of those arrays, each counted once."""
    whole: int
    """Arrays that stay whole on every rank, because they lack a dimension that their rule names."""
    unmatched: int
    """Arrays that no rule matches, which are not loaded."""
    left_out: int
    """Arrays under `PerRank`, which ranks of another world cannot load, and aliases."""

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
    lines = [line.strip() for line in re.split(r"[;\n]", text) if line.strip()]
    if not lines or len(lines) > MAX_RULES:
        raise LayoutError("placements", expected=f"1 to {MAX_RULES} rules such as *: Shard(0)", found=f"{len(lines)}")
    return tuple(_parse_rule(line, len(mesh.shape)) for line in lines)


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


class _TargetArray(msgspec.Struct, frozen=True):
    leaf: Leaf
    layout: MeshLayout
    shape: tuple[int, ...]
    itemsize: int


def plan_reshard(
    index: Index, mesh: Mesh, rules: Sequence[PlacementRule], *, chunks: int = MAX_PLANNED_CHUNKS
) -> ReshardPlan:
    """Plans what the ranks of `mesh` would read to hold the checkpoint as the rules place it.

    Args:
        chunks: the number of chunks that may be planned; ranks beyond are left out.

    Raises:
        LayoutError: not even one rank can be planned within that number.
    """
    if (estimate := _estimated_arrays(index, rules)) > chunks * CERTAIN:
        raise _too_many(f"about {estimate} arrays", chunks)
    wanted, whole, unmatched, left_out = _target_arrays(index, mesh, rules)
    world = math.prod(mesh.shape)
    numbers = {file.name: number for number, file in enumerate(index.file_list)}
    ranks: list[RankReads] = []
    for rank in bit_reversed_order(world):
        wants, used = _rank_wants(index, wanted, rank, chunks)
        if wants is None:
            break
        chunks -= used
        ranks.append(_rank_reads(index, rank, wants, numbers))
    if not ranks:
        raise _too_many(f"{len(wanted)} arrays", chunks)
    return ReshardPlan(
        tuple(sorted(ranks, key=lambda reads: reads.rank)),
        world,
        arrays=len(wanted),
        nbytes=sum(math.prod(w.shape) * w.itemsize for w in wanted),
        whole=whole,
        unmatched=unmatched,
        left_out=left_out,
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


def _estimated_arrays(index: Index, rules: Sequence[PlacementRule]) -> int:
    """Estimates how many arrays the rules match, each of which is at least one piece for each rank."""
    matchers = [re.compile(fnmatch.translate(rule.glob)) for rule in rules]
    sample = sampled_leaves(index)
    arrays = (leaf for leaf in sample if isinstance(leaf.record, ArrayRecord) and leaf.spec)
    matching = sum(any(matcher.match(leaf.path) for matcher in matchers) for leaf in arrays)
    return matching * len(index.entries) // max(1, len(sample))


def bit_reversed_order(count: int) -> Iterator[int]:
    """Yields the numbers below `count` in the order of their reversed bits: every prefix is spread over the range."""
    bits = max(count - 1, 0).bit_length()
    for number in range(1 << bits):
        reverse = int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
        if reverse < count:
            yield reverse


def _target_arrays(
    index: Index, mesh: Mesh, rules: Sequence[PlacementRule]
) -> tuple[list[_TargetArray], int, int, int]:
    matchers = [(re.compile(fnmatch.translate(rule.glob)), MeshLayout(mesh, rule.placements)) for rule in rules]
    everywhere = replicated_layout(mesh.ranks)
    found: list[_TargetArray] = []
    whole = unmatched = left_out = 0
    for leaf in index.entries:
        if leaf.spec is None:
            continue
        if not isinstance(leaf.record, ArrayRecord):
            left_out += 1
            continue
        layout = next((layout for matcher, layout in matchers if matcher.match(leaf.path)), None)
        if layout is None:
            unmatched += 1
            continue
        dims = len(leaf.spec.shape)
        if any(not isinstance(p, Replicate) and p.dim >= dims for p in layout.placements):
            layout, whole = everywhere, whole + 1
        found.append(_TargetArray(leaf, layout, leaf.spec.shape, dtype_of(leaf.spec.dtype).itemsize))
    return found, whole, unmatched, left_out


def _rank_wants(
    index: Index, wanted: Sequence[_TargetArray], rank: int, budget: int
) -> tuple[list[WantedRegion] | None, int]:
    """Returns what a rank wants, and the number of chunks; None where they are more than the budget."""
    wants: list[WantedRegion] = []
    used = 0
    for want in wanted:
        for held in held_by(want.layout, want.shape, rank):
            found = index.chunks_of(want.leaf, held.region) if held.region.size else []
            used += 1 + sum(_max_reads(held.region, chunk.region, want.itemsize) for chunk in found)
            if used > budget:
                return None, used
            wants.append(WantedRegion(held.region, want.itemsize, found))
    return wants, used


def _max_reads(wanted: Region, chunk: Region, itemsize: int) -> int:
    """Returns the most reads that a chunk can take: rows with large gaps between them are read one by one."""
    common = intersect(wanted, chunk)
    if common is None:
        return 0
    runs = byte_runs(common, chunk, itemsize)
    first, last = runs.span
    return 1 + min(runs.count, (last - first) // READ_GAP)


def _rank_reads(index: Index, rank: int, wants: Sequence[WantedRegion], numbers: dict[str, int]) -> RankReads:
    by_file: dict[int, int] = {}
    blocks = plan_load(wants, borders=index.borders)
    for block in blocks:
        file, start = index.locate(block.rank, block.start, block.stop, f"rank {block.rank}")
        low = (start - file.header) // BLOCK * BLOCK
        high = min(-(-(start - file.header + block.stop - block.start) // BLOCK) * BLOCK, file.nbytes)
        number = numbers[file.name]
        by_file[number] = by_file.get(number, 0) + high - low
    nbytes = sum(want.region.size * want.itemsize for want in wants)
    return RankReads(rank, nbytes, sum(by_file.values()), len(blocks), tuple(sorted(by_file.items())))
