"""One save and one load of a simulated world, through the functions that a real one goes through.

What a rank does is done for one rank; what the coordinator does is done with the messages of all. Messages are encoded
and decoded as on the wire, the index is published into a store in memory. Only the bytes of arrays are missing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from treeckpt._arrays.base import ArrayTarget, HostMemory, TargetPiece
from treeckpt._arrays.describe import json_digest
from treeckpt._bench.measure import Meter
from treeckpt._core.format.index import INDEX_NAME, decode_index
from treeckpt._core.format.records import Index
from treeckpt._core.format.shard_header import shard_name
from treeckpt._core.format.timings import Span, timings_name
from treeckpt._core.planning.rank_trees import Inventory, LeafSpec, RankClass, merge_rank_trees
from treeckpt._core.planning.save_plan import GlobalPlan, assign_offsets, compute_plan
from treeckpt._core.sharding.dtypes import dtype_of
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import BoxLayout, Layout, MeshLayout, held_by, replica_offsets
from treeckpt._core.sharding.region import Region, coalesce
from treeckpt._core.tree.flatten import flatten
from treeckpt._io.comm.collective import decode_each
from treeckpt._io.comm.message_store import GROUP_SIZES, group_sizes_for
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._io.storage.store import MemoryStore
from treeckpt._io.timing import Recorder
from treeckpt._loading.plan import Read
from treeckpt._loading.read_batch import ReadBatch
from treeckpt._saving.agree import (
    Decision,
    MergedTree,
    RankProposal,
    RankTree,
    check_arguments,
    merge_inventories,
    plan_key,
    representatives,
)
from treeckpt._saving.options import CommonOptions
from treeckpt._saving.shard_writer import CommitResult, InlineWriter, SaveInfo, WriteReport

from .models import Array, Grid, Layouts, Model, arrays_of, flat_pieces
from .traffic import Load, Talk

__all__ = ["Figures", "simulate"]

T = TypeVar("T")
PHASES = ("save", "flatten", "agree", "plan", "copy", "hash", "write", "sync", "commit", "gather", "wait", "end")
HEADER = 8192
"""Bytes of each shard's header."""
STEP = 10_000_019
"""Nanoseconds of a phase."""
HOST = 8
"""Ranks of a host."""
HOSTS = 2
"""Hosts whose loads are planned."""
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Figures(msgspec.Struct):
    """Seconds of computing, and bytes, of one simulated world."""

    model: str
    layout: str
    target: str
    world: int
    leaves: int
    nbytes: int
    classes: int
    """Kinds of ranks by what they bring."""
    chunks: int = 0
    """Of flat ranges only, where each is listed."""
    hello: float = 0.0
    """One rank: digest, and the encoded message."""
    agree: float = 0.0
    """The coordinator: reads all hellos, joins all inventories."""
    plan: float = 0.0
    """One rank: decodes the coordinator's word, plans all and its own part."""
    again: float = 0.0
    """The coordinator: reads all hellos of a second save of the same tree."""
    commit: float = 0.0
    """The coordinator: reads all reports, checks, builds and publishes index and timings."""
    commit_rss: int = 0
    open: float = 0.0
    """One rank: decodes and checks the index."""
    load: float = 0.0
    """One rank: plans its load into the other layout (the slowest of some)."""
    hello_nbytes: int = 0
    told_nbytes: int = 0
    """Of all tellers together."""
    joined_nbytes: int = 0
    """To each rank."""
    done_nbytes: int = 0
    """Of one rank."""
    messages: int = 0
    """Of the first save: of all ranks to the coordinator, and its words."""
    alone: Load = msgspec.field(default_factory=Load)
    """Of rank 0's server in the first save, where all ranks speak to it."""
    root: Load = msgspec.field(default_factory=Load)
    """Of the same where they speak by leaders."""
    leader: Load = msgspec.field(default_factory=Load)
    """Of the busiest of these."""
    index_nbytes: int = 0
    timings_nbytes: int = 0
    amplification: float = 0.0
    """Bytes that the ranks of a host read / bytes that they need, each counted once."""
    write_balance: float = 0.0
    """Bytes that the busiest rank writes / mean."""
    write_least: float = 0.0
    """The same of the rank that has the most for itself alone: what nobody else holds only it can write."""
    read_balance: float = 0.0


def _timed(verb: Callable[[], T]) -> tuple[float, T]:
    started = time.process_time()  # nothing here waits: what else runs on the machine is not our concern
    result = verb()
    return time.process_time() - started, result


def _nested(arrays: list[Array]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for array in arrays:
        at = tree
        for step in array.path[:-1]:
            at = at.setdefault(step, {})
        at[array.path[-1]] = None
    return tree


def _stages(arrays: list[Array], grid: Grid) -> list[tuple[Inventory, range]]:
    """Each stage's inventory and ranks: what its ranks would make of their trees of DTensors."""
    found: list[tuple[Inventory, range]] = []
    size = grid.dp * grid.tp
    for stage in range(grid.pp):
        mine, layouts = [array for array in arrays if array.stage == stage], Layouts(grid, stage)
        structure, leaves = flatten(_nested(mine))
        specs = {"/".join(array.path): LeafSpec("", array.spec, layouts.of(array)) for array in mine}
        ordered = tuple(msgspec.structs.replace(specs[path], path=path) for path, _ in leaves)
        found.append((Inventory(structure, ordered), range(stage * size, (stage + 1) * size)))
    return found


def _flat(arrays: list[Array], world: int) -> list[tuple[Inventory, range]]:
    """Each rank's inventory: ranges of uneven length, which nothing regular describes."""
    total = sum(int(np.prod(array.shape, dtype=np.int64)) for array in arrays)
    draw = random.Random(world)
    inner = sorted(draw.sample(range(1, total), world - 1))
    found: list[tuple[Inventory, range]] = []
    for rank, pieces in enumerate(flat_pieces(arrays, [0, *inner, total])):
        structure, leaves = flatten(_nested([arrays[number] for number, _ in pieces]))
        by_path = {"/".join(arrays[number].path): (arrays[number].spec, regions) for number, regions in pieces}
        ordered = tuple(
            LeafSpec(path, by_path[path][0], BoxLayout(tuple((rank, region) for region in by_path[path][1])))
            for path, _ in leaves
        )
        found.append((Inventory(structure, ordered), range(rank, rank + 1)))
    return found


class _Written(MemoryStore):
    """A directory with all shards that the ranks say they have written."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self._sizes = sizes

    def sizes(self) -> dict[str, int]:
        return self._sizes | super().sizes()


class _World:
    """The ranks of one save."""

    def __init__(self, kinds: list[tuple[Inventory, range]], figures: Figures) -> None:
        self.kinds, self.figures, self.size = kinds, figures, sum(len(ranks) for _, ranks in kinds)
        self._talks = {spans: Talk(self.size, spans) for spans in ((), GROUP_SIZES)}

    def _hellos(self, remembered: str = "") -> list[bytes]:
        options = CommonOptions(step=100)
        messages: list[bytes] = []
        for inventory, ranks in self.kinds:
            hello = RankProposal("run/step_00000100", options, json_digest(inventory), bytes(16), remembered)
            messages += [_encode(hello)] * len(ranks)
        return messages

    def agree(self) -> tuple[str, bytes]:
        """The key of the plan, and the word of the coordinator that all ranks decode; none where all bring the same."""
        figures = self.figures
        busiest = max((inventory for inventory, _ in self.kinds), key=lambda inventory: len(inventory.leaves))
        figures.hello, _ = _timed(lambda: json_digest(busiest))
        messages = self._hellos()
        figures.hello_nbytes = max(map(len, messages))
        bundles, hellos = self._gather(messages)
        heard, (key, tellers) = _timed(lambda: _heard(hellos))
        inventory_of = {ranks[0]: inventory for inventory, ranks in self.kinds}
        told = {rank: _encode(RankTree(inventory_of[rank], {}, {})) for rank in tellers}
        figures.told_nbytes = sum(map(len, told.values()))
        figures.messages = 2 * self.size + len(told)
        terms = Decision(save_id="0" * 16, created_ns=1 << 60, key=key, representatives=tellers)
        self._share(_encode(terms), last=not told)

        def joined() -> bytes:
            tales = {rank: _decode(message, type=RankTree) for rank, message in told.items()}
            digests = {rank: each.inventory for rank, each in decode_each(hellos, RankProposal).items()}
            return _encode(MergedTree(merge_inventories(digests, tales, self.size)))

        joining, word = _timed(joined) if told else (0.0, b"")
        if told:
            bundles += self._gather([told.get(rank, b"") for rank in range(self.size)])[0]
            self._share(word, last=True)
        figures.agree, figures.joined_nbytes = bundles + heard + joining, len(word)
        again = Talk(self.size, group_sizes_for(self.size))
        repeated = again.gather(self._hellos(key))
        figures.again = again.seconds + _timed(lambda: _heard(repeated))[0]
        return key, word

    def _gather(self, messages: list[bytes]) -> tuple[float, dict[int, bytes]]:
        """What rank 0 hears as the world really speaks, and the seconds that it needs to take bundles apart."""
        talk = self._talks[group_sizes_for(self.size)]
        before = talk.seconds
        heard = [each.gather(messages) for each in self._talks.values() if each is not talk]
        heard.append(talk.gather(messages))
        return talk.seconds - before, heard[-1]

    def _share(self, word: bytes, *, last: bool) -> None:
        for talk in self._talks.values():
            talk.broadcast(word, last=last)

    def plans(self, key: str, word: bytes, rank: int) -> GlobalPlan:
        """What follows for one rank."""

        def make() -> GlobalPlan:
            plenum = _decode(word, type=MergedTree).global_tree if word else None
            if plenum is None:
                plenum = merge_rank_trees([RankClass(encode_runs(range(self.size)), self.kinds[0][0])], self.size)
            return compute_plan(key, plenum, rank, 1 << 62)

        self.figures.plan, plans = _timed(make)
        return plans

    def commit(self, plans: GlobalPlan) -> Index:
        """All ranks report, and the coordinator publishes; gives the index as a reader would decode it."""
        figures = self.figures
        _, totals = assign_offsets([leaf for _, leaf in plans.arrays], plans.shares, self.size)
        alone = [at for at, (_, leaf) in enumerate(plans.arrays) if not _replicated(leaf.layout)]
        _, least = assign_offsets([plans.arrays[at][1] for at in alone], [plans.shares[at] for at in alone], self.size)
        figures.write_balance = float(totals.max() / totals.mean())
        figures.write_least = max(1.0, float(least.max() / totals.mean()))
        messages = [_encode(_report(rank, int(nbytes))) for rank, nbytes in enumerate(totals.tolist())]
        bundles, _ = self._gather(messages)
        self._share(_encode(CommitResult((), True)), last=True)
        for talk in self._talks.values():
            talk.join()
        figures.alone, figures.root = (talk.servers[0] for talk in self._talks.values())
        figures.leader = self._talks[GROUP_SIZES].busiest
        figures.done_nbytes = max(map(len, messages))
        info = SaveInfo(0, self.size, "0" * 16, 0, CommonOptions(step=100))
        names = (shard_name(info.save_id, rank, self.size, 0) for rank in range(self.size))
        store = _Written({name: nbytes + HEADER for name, nbytes in zip(names, totals.tolist(), strict=True)})

        def publish() -> None:
            writer = InlineWriter(store, info, plans, Recorder(0))
            reports = {rank: _decode(message, type=WriteReport) for rank, message in enumerate(messages)}
            result = writer.commit(reports)
            assert writer.error is None and not result.faults

        with Meter() as meter:
            took, _ = _timed(publish)
            figures.commit, figures.commit_rss = bundles + took, meter.lap().extra_rss
        data = bytes(store.files[INDEX_NAME])
        figures.index_nbytes, figures.timings_nbytes = len(data), len(store.files[timings_name(info.save_id)])
        figures.open, index = _timed(lambda: decode_index(data, INDEX_NAME))
        return index


def _heard(messages: dict[int, bytes]) -> tuple[str, tuple[int, ...]]:
    """What the coordinator makes of all hellos: the key of the plan, and who is to tell more."""
    hellos = decode_each(messages, RankProposal)
    check_arguments(hellos)
    key = plan_key(hellos)
    cached = all(hello.cached_plan == key for hello in hellos.values())
    return key, () if cached else representatives(hellos)


def _replicated(layout: Layout) -> bool:
    return isinstance(layout, MeshLayout) and len(replica_offsets(layout)) > 1


def _report(rank: int, nbytes: int) -> WriteReport:
    start = 1_700_000_000_000_000_000 + rank * 977
    spans = tuple(
        Span(
            name,
            rank,
            start + i * 10_000_019,
            start + (i + 1) * 10_000_019 + rank % 251,
            nbytes if i == 6 else 0,
            0 if i else -1,
        )
        for i, name in enumerate(PHASES)
    )
    return WriteReport(None, ((rank, 0, 0, nbytes, HEADER),), spans)


class _Loads:
    """Loads of ranks of another layout, planned."""

    def __init__(self, index: Index, model: Model, grid: Grid) -> None:
        self._index, self._grid, self._arrays = index, grid, arrays_of(model, grid.pp)
        self._checkpoint = Checkpoint(MemoryStore(), index)
        self._layouts = [Layouts(grid, stage) for stage in range(grid.pp)]

    def plan(self, rank: int) -> tuple[dict[tuple[str, Region], int], list[Read]]:
        """The regions that a rank needs, with their bytes, and what it reads for them where no checksum is compared."""
        needs: dict[tuple[str, Region], int] = {}
        batch = ReadBatch(self._checkpoint, 0, Recorder(rank))
        stage = rank // (self._grid.dp * self._grid.tp)
        for array in self._arrays:
            if array.stage != stage:
                continue
            leaf = self._index.by_path["/".join(array.path)][0]
            itemsize = dtype_of(array.dtype).itemsize
            for held in held_by(self._layouts[stage].of(array), array.shape, rank):
                if held.region.size:
                    piece = TargetPiece(held.region, HostMemory(0, held.region.shape, itemsize, None))
                    batch.add_target(leaf.path, leaf, ArrayTarget(leaf.spec, None, [piece]))
                    needs[leaf.path, held.region] = held.region.size * itemsize
        return needs, batch.requests(verify=False)

    def host(self, first: int) -> tuple[float, int, int]:
        """Of the ranks of a host, which share its page cache: the longest planning, bytes needed, and bytes read."""
        needs: dict[tuple[str, Region], int] = {}
        spans: dict[str, list[tuple[int, int]]] = {}
        longest = 0.0
        for rank in range(first, first + min(HOST, self._grid.world)):
            took, (needed, plan) = _timed(lambda rank=rank: self.plan(rank))
            longest = max(longest, took)
            needs |= needed
            for block in plan:
                spans.setdefault(block.file.name, []).append((block.start, block.stop))
        return longest, sum(needs.values()), sum(_joined_length(found) for found in spans.values())


def _joined_length(spans: list[tuple[int, int]]) -> int:
    ordered = np.array(sorted(spans), np.int64)
    bounds, _ = coalesce(ordered[:, 0], ordered[:, 1], 0)
    return int((bounds[:, 1] - bounds[:, 0]).sum())


def simulate(model: Model, source: Grid, target: Grid, *, flat: bool = False) -> Figures:
    """One save under `source`, and loads under `target`.

    Args:
        flat: every rank saves an uneven range of all arrays laid end to end instead.
    """
    arrays = arrays_of(model, source.pp)
    kinds = _flat(arrays, source.world) if flat else _stages(arrays, source)
    nbytes = sum(int(np.prod(a.shape, dtype=np.int64)) * dtype_of(a.dtype).itemsize for a in arrays)
    name = f"flat ranges x {source.world}" if flat else str(source)
    figures = Figures(model.name, name, str(target), source.world, len(arrays), nbytes, len(kinds))
    world = _World(kinds, figures)
    key, word = world.agree()
    index = world.commit(world.plans(key, word, source.world // 3))
    if flat:
        figures.chunks = sum(len(index.chunks_of(leaf)) for leaf in index.entries)
    loads = _Loads(index, model, target)
    hosts = range(0, target.world, max(HOST, -(-target.world // HOSTS // HOST) * HOST))
    seconds, needed, read = zip(*(loads.host(first) for first in hosts), strict=True)
    figures.load, figures.amplification = max(seconds), sum(read) / sum(needed)
    figures.read_balance = max(read) * len(read) / sum(read)
    return figures
