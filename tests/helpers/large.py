"""Large synthetic runs for tests and benchmarks: many checkpoints, a million leaves, the spans of 16,384 ranks.

Everything is written by the library's own encoders, so readers cannot tell it from what was saved; only the shards are
sparse files of the right sizes, mostly without headers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.helpers.samples import START_NS
from treeckpt._core.format.index import INDEX_NAME, encode_index
from treeckpt._core.format.records import (
    ArrayRecord,
    GridChunks,
    Index,
    LeafRecord,
    ValueRecord,
    WholeChunk,
    file_table,
)
from treeckpt._core.format.shard_header import BLOCK, ShardEntry, ShardHeader, encode_header, hash_block
from treeckpt._core.format.timings import Host, Span, Timings, encode_timings, timings_name
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import Mesh, MeshLayout, Replicate, Shard
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.structure import DictNode, Structure
from treeckpt._core.tree.value_codec import Value, encode_value

__all__ = [
    "hold_readers",
    "large_index",
    "spans_of_ranks",
    "write_large_checkpoint",
    "write_many",
    "write_spans",
    "write_sparse",
    "write_timed",
]

HEADER = 4096
PARTS = ("attention.qkv.weight", "attention.proj.weight", "mlp.fc.weight", "mlp.proj.weight", "norm.weight")
SAVE_ID = "00000000000000aa"


def _chunks(spec: ArraySpec, start: int, world: int) -> tuple[GridChunks | WholeChunk, int]:
    """Rows split evenly over the ranks, or all of it on rank 0; and the bytes that it takes in each rank's stream."""
    rows, nbytes = spec.shape[0], 4
    for n in spec.shape:
        nbytes *= n
    if rows % world or len(spec.shape) < 2:
        return WholeChunk(0, start), nbytes
    cuts = (encode_runs(range(0, rows + 1, rows // world)), encode_runs([0, spec.shape[1]]))
    return GridChunks(cuts, encode_runs(range(world)), encode_runs([start] * world)), nbytes // world


def large_index(
    leaves: int, *, world: int = 8, width: int = 64, step: int = 1, metadata: dict[str, Value] | None = None
) -> Index:
    """A model of `leaves / 4` parameters and three leaves of optimizer state for each, as AdamW leaves them."""
    parameters = max(1, leaves // 4)
    names = tuple(f"layers.{n // len(PARTS)}.{PARTS[n % len(PARTS)]}" for n in range(parameters))
    weight, norm = ArraySpec((width, width), "float32"), ArraySpec((width,), "float32")
    mesh = Mesh((world,), encode_runs(range(world)), ("dp",))
    layouts = (MeshLayout(mesh, (Shard(0),)), MeshLayout(mesh, (Replicate(),)))
    start = 0
    records: list[LeafRecord] = []

    def add(n: int) -> None:
        nonlocal start
        small = n % len(PARTS) == len(PARTS) - 1
        chunks, nbytes = _chunks(norm if small else weight, start, world)
        records.append(ArrayRecord(int(small), int(isinstance(chunks, WholeChunk)), chunks))
        start += nbytes

    for n in range(parameters):
        add(n)
    for n in range(parameters):
        records.append(ValueRecord(step))
        add(n)
        add(n)
    moments = DictNode(("step", "exp_avg", "exp_avg_sq"), (None, None, None))
    states = DictNode(tuple(range(parameters)), (moments,) * parameters)
    model = DictNode(names, (None,) * parameters)
    structure: Structure = DictNode(("model", "optimizer"), (model, DictNode(("state",), (states,))))
    files = file_table((rank, 0, 0, start, HEADER) for rank in range(world))
    return Index(
        save_id=SAVE_ID,
        step=step,
        created_ns=START_NS + step * 10**9,
        world=world,
        structure=structure,
        specs=(weight, norm),
        layouts=layouts,
        leaves=tuple(records),
        files=files,
        metadata=metadata or {},
    )


def _put(directory: Path, index: Index, data: bytes, timings: bytes | None) -> None:
    os.makedirs(directory, exist_ok=True)
    for file in index.file_list:
        with open(directory / file.name, "wb") as shard:
            shard.truncate(file.header + file.nbytes)
    if timings is not None:
        (directory / timings_name(index.save_id)).write_bytes(timings)
    (directory / INDEX_NAME).write_bytes(data)


def write_large_checkpoint(directory: Path, *, leaves: int, step: int = 1, world: int = 8) -> Index:
    """A checkpoint of so many leaves, its shards sparse files."""
    index = large_index(leaves, world=world, step=step)
    spans = tuple(spans_of_ranks(world, start_ns=index.created_ns))
    timings = Timings(index.save_id, step, world, spans)
    _put(directory, index, encode_index(index), encode_timings(timings))
    return index


def hold_readers(monkeypatch: Any, gate: Path) -> Callable[[], None]:
    """Has processes that read large indexes wait; gives what lets them go on."""
    from treeckpt_dashboard.store import jobs

    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    monkeypatch.setattr(jobs, "PROGRAM", wait + jobs.PROGRAM)
    return gate.touch


def write_timed(run: Path, count: int, spans: Callable[[int], Iterable[Span]], *, per_host: int = 8) -> Path:
    """A run of so many small checkpoints; `spans` gives those of the save of a number, from 1 on."""
    first = large_index(12, world=2, width=8)
    for n in range(1, count + 1):
        index = msgspec.structs.replace(first, save_id=f"{n:016x}", step=n, created_ns=START_NS + n * 60 * 10**9)
        own = tuple(spans(n))
        world = 1 + max(span.rank for span in own)
        hosts = tuple(
            Host(f"node{at // per_host}", encode_runs(range(at, min(world, at + per_host))))
            for at in range(0, world, per_host)
        )
        timings = Timings(index.save_id, n, world, own, None, hosts)
        _put(run / f"step_{n:08d}", index, encode_index(index), encode_timings(timings))
    return run


def write_many(
    run: Path,
    count: int,
    *,
    leaves: int = 12,
    world: int = 2,
    every: int = 100,
    start_ns: int = START_NS,
    metrics: Callable[[int], dict[str, float]] = lambda step: {},
) -> Path:
    """A run of so many small checkpoints, one a minute: about half a second a thousand."""
    first = large_index(leaves, world=world, width=8)
    for n in range(1, count + 1):
        step, created = n * every, start_ns + n * 60 * 10**9
        values = metrics(step)
        metadata = {"metrics": encode_value(values, "metrics")} if values else {}
        index = msgspec.structs.replace(first, save_id=f"{n:016x}", step=step, created_ns=created, metadata=metadata)
        seconds = 1 + (n % 7) / 3
        spans = tuple(Span("save", rank, created, created + int(seconds * 1e9)) for rank in range(world))
        timings = Timings(index.save_id, step, world, spans)
        _put(run / f"step_{step:08d}", index, encode_index(index), encode_timings(timings))
    return run


PHASES = ("flatten", "agree", "plan", "copy", "write", "hash", "fsync", "gather", "commit", "publish", "clean")


def spans_of_ranks(
    world: int, *, phases: Iterable[str] = PHASES, start_ns: int = START_NS, slow: int = 3
) -> Iterator[Span]:
    """A save of many ranks, one span for each phase and one around them; every `slow`-th prime rank takes longer."""
    names = tuple(phases)
    for rank in range(world):
        late = 4 if rank % 997 == slow else 1
        at = start_ns + (rank * 7919) % 100_000
        lengths = [(1_000_000 + (rank * 31 + n * 17) % 500_000) * (late if name == "write" else 1) * (n % 3 + 1)
                   for n, name in enumerate(names)]  # fmt: skip
        yield Span("save", rank, at, at + sum(lengths))
        for name, length in zip(names, lengths, strict=True):
            yield Span(name, rank, at, at + length, length // 2 if name in ("write", "hash") else 0, 0)
            at += length


def write_spans(directory: Path, *, world: int, phases: Iterable[str] = PHASES, leaves: int = 12) -> Path:
    """A small checkpoint whose timings hold the spans of `world` ranks."""
    index = large_index(leaves, world=2, width=8)
    timings = Timings(index.save_id, index.step, world, tuple(spans_of_ranks(world, phases=phases)))
    _put(directory, index, encode_index(index), encode_timings(timings))
    return directory


def write_sparse(directory: Path, *, nbytes: int) -> Index:
    """A checkpoint of one float32 matrix with rows of 4 KiB, that takes no room: its shard is a header and a hole."""
    spec = ArraySpec((nbytes // 4096, 1024), "float32")
    entry = ShardEntry("tensor", spec.dtype, spec.shape, Region.whole(spec.shape), 0, nbytes)
    hashes = (hash_block(bytes(BLOCK)),) * (nbytes // BLOCK)
    header = encode_header(ShardHeader(SAVE_ID, 0, 1, 0, 0, (entry,), hashes))
    index = msgspec.structs.replace(
        large_index(4, world=1),
        structure=DictNode(("tensor",), (None,)),
        specs=(spec,),
        layouts=(),
        leaves=(ArrayRecord(0, -1, WholeChunk(0, 0)),),
        files=file_table([(0, 0, 0, nbytes, len(header))]),
    )
    _put(directory, index, encode_index(index), None)
    with open(directory / index.file_list[0].name, "r+b") as shard:
        shard.write(header)
    return index
