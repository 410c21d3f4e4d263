"""Real checkpoints for tests of what reads them: a GPT-like training state, sharded over a mesh, written rank by rank.

Everything goes through the library's own planning, shard headers and index; only the ranks are played one after the
other by one process, so that meshes of any size need neither torch nor processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treeckpt._core.format.files import Sidecar, checksum, stored_name
from treeckpt._core.format.index import INDEX_NAME, encode_index, encode_manifest
from treeckpt._core.format.records import FileTable, Index, build_index, file_table
from treeckpt._core.format.shard_header import BLOCK, ShardEntry, ShardHeader, encode_header, hash_block, shard_name
from treeckpt._core.format.timings import Span, Timings, encode_timings, timings_name
from treeckpt._core.planning.rank_trees import GlobalTree, Inventory, LeafSpec, RankClass, merge_rank_trees
from treeckpt._core.planning.save_plan import FilePlan, array_leaves, assign_offsets, assign_writers, plan_save
from treeckpt._core.sharding.dtypes import dtype_of
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import Layout, Mesh, MeshLayout, Replicate, Shard, StridedShard
from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.flatten import flatten
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.value_codec import Value, encode_value

MESH = Mesh((2, 2), encode_runs(range(4)), ("dp", "tp"))
FILES = {"config.json": b'{\n\t"width": 32\n}\n', "tokenizer.model": bytes(range(256))}
"""Sidecar files: a text, and one that is none."""
START_NS = 1_750_000_000_000_000_000
Layouts = Callable[[str, np.ndarray], Layout | None]


class BFloat16(msgspec.Struct, frozen=True):
    """Stands for a bfloat16 array, which numpy lacks."""

    bits: np.ndarray


def mesh_layout(path: str, array: np.ndarray, mesh: Mesh = MESH) -> Layout | None:
    """FSDP over dp and tensor parallelism over tp, by the names of a GPT's parameters; None is replicated."""
    if array.ndim == 0 or array.size < 64:
        return None
    if "qkv" in path or "fc." in path:
        return MeshLayout(mesh, (StridedShard(0, mesh.shape[1]), Shard(0)))
    if "proj.weight" in path:
        return MeshLayout(mesh, (Shard(0), Shard(1)))
    return MeshLayout(mesh, (Shard(0), Replicate()))


def gpt_state(*, layers: int = 6, width: int = 96, vocabulary: int = 1000, seed: int = 0) -> dict[str, Any]:
    """A model, its AdamW state, a schedule, a data loader and RNG states: a few hundred leaves."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (256, width)}
    for n in range(layers):
        shapes |= {f"layers.{n}.{name}": shape for name, shape in _block(width).items()}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    model: dict[str, Any] = {k: random.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    model["mask"] = BFloat16(random.integers(0, 1 << 15, (4, 8, 6), np.uint16))
    moments = {
        at: {
            "step": np.array(float(seed), np.float32),
            "exp_avg": random.standard_normal(s).astype(np.float32),
            "exp_avg_sq": random.standard_normal(s).astype(np.float32) ** 2,
        }
        for at, s in enumerate(shapes.values())
    }
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "foreach": None}
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{**group, "params": list(range(len(shapes)))}]},
        "scheduler": {"last_epoch": seed, "base_lrs": [3e-4], "name": "cosine", "warmup": float("inf")},
        "loader": PerRank({"epoch": 1, "position": 4096}),
        "rng": PerRank(random.integers(0, 255, 5056, np.uint8)),
    }


def _block(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.qkv.bias": (3 * width,),
        "attention.proj.weight": (width, width),
        "attention.proj.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "mlp.fc.weight": (4 * width, width),
        "mlp.fc.bias": (4 * width,),
        "mlp.proj.weight": (width, 4 * width),
        "mlp.proj.bias": (width,),
    }


def _describe(path: str, leaf: Any, layouts: Layouts) -> tuple[LeafSpec, np.ndarray | None]:
    name = path.replace("~rank0", "~rank*")
    own = () if name != path else None
    if isinstance(leaf, BFloat16):
        spec, array = ArraySpec(leaf.bits.shape, "bfloat16"), leaf.bits
    elif isinstance(leaf, np.ndarray):
        spec, array = ArraySpec(leaf.shape, leaf.dtype.name), leaf
    else:
        return LeafSpec(name, None, per_rank=own), None
    return LeafSpec(name, spec, layouts(path, array) if own is None else None, per_rank=own), array


def write_checkpoint(
    directory: Path,
    tree: Any = None,
    *,
    step: int | None = 100,
    world: int = 4,
    layouts: Layouts = mesh_layout,
    metadata: Mapping[str, Value] | None = None,
    publish: bool = True,
    error: str | None = None,
    max_shard_bytes: int = 1 << 62,
    files: Mapping[str, bytes] | None = None,
    block: int = BLOCK,
) -> Index:
    """Writes a checkpoint, with checksums of blocks of `block` bytes; without `publish` all but its index."""
    tree = gpt_state(seed=step or 0) if tree is None else tree
    save_id = hashlib.blake2s(f"{directory.name} {step}".encode(), digest_size=8).hexdigest()
    structure, leaves = flatten(tree)
    described = [_describe(path, leaf, layouts) for path, leaf in leaves]
    inventory = Inventory(structure, tuple(spec for spec, _ in described))
    plenum = merge_rank_trees([RankClass(encode_runs(range(world)), inventory)], world)
    numbered = array_leaves(plenum)
    arrays = [leaf for _, leaf in numbered]
    shares = assign_writers(arrays)
    chunks, _ = assign_offsets(arrays, shares, world)
    placed = {number: at for (number, _), at in zip(numbered, chunks, strict=True)}
    values = {
        path: encode_value(leaf, path) for (path, leaf), (_, a) in zip(leaves, described, strict=True) if a is None
    }
    own = {(p.replace("~rank0", "~rank*"), r): v for p, v in values.items() if "~rank0" in p for r in range(world)}

    sidecars = tuple(Sidecar(name, len(content), checksum(content)) for name, content in (files or {}).items())

    def build(placed: Any, files: FileTable) -> Index:
        index = build_index(
            plenum, placed, files, values=values, own_values=own, save_id=save_id, step=step,
            created_ns=START_NS + (step or 0) * 10**9, metadata=dict(metadata or {}),
        )  # fmt: skip
        return msgspec.structs.replace(index, sidecars=sidecars)

    directory.mkdir(parents=True, exist_ok=True)
    manifest = encode_manifest(build(None, FileTable()))
    data = {number: described[number][1] for number, _ in numbered}
    rows: list[tuple[int, int, int, int, int]] = []
    for rank in range(world):
        for file in plan_save(arrays, shares, rank, max_shard_bytes=max_shard_bytes).files:
            entries, area = _pieces(file, rank, numbered, data, plenum)
            hashes = tuple(hash_block(area[at : at + block]) for at in range(0, len(area), block))
            own_manifest = manifest if rank == 0 and file.part == 0 else None
            header = encode_header(
                ShardHeader(save_id, rank, world, file.part, file.stream, entries, hashes, block, own_manifest)
            )
            (directory / shard_name(save_id, rank, world, file.part)).write_bytes(header + area)
            rows.append((rank, file.part, file.stream, file.nbytes, len(header)))
    for name, content in (files or {}).items():
        (directory / stored_name(save_id, name)).write_bytes(content)
    index = build(placed, file_table(rows))
    timings = Timings(save_id, step, world, spans_of(index), error)
    (directory / timings_name(save_id)).write_bytes(encode_timings(timings))
    if publish:
        (directory / INDEX_NAME).write_bytes(encode_index(index))
    return index


def _pieces(
    file: FilePlan, rank: int, numbered: Any, data: Any, plenum: GlobalTree
) -> tuple[tuple[ShardEntry, ...], bytes]:
    """What a shard holds: its entries and its bytes."""
    entries, parts = [], []
    for write in file.writes:
        number, leaf = numbered[write.leaf]
        spec, array = plenum.leaves[number].spec, data[number]
        assert spec is not None and array is not None
        path = leaf.path.replace("~rank*", f"~rank{rank}")
        entries.append(ShardEntry(path, spec.dtype, spec.shape, write.region, write.start, write.nbytes))
        parts.append(np.ascontiguousarray(array[write.region.slices()]).tobytes())
        assert len(parts[-1]) == write.nbytes == write.region.size * dtype_of(spec.dtype).itemsize
    return tuple(entries), b"".join(parts)


def spans_of(index: Index, *, slow: int = 2) -> tuple[Span, ...]:
    """Spans as a save of this index would leave them; one rank writes at a fifth of the others' rate."""
    at = index.created_ns
    spans: list[Span] = []
    writes = {f.rank: 0 for f in index.file_list}
    for file in index.file_list:
        writes[file.rank] += file.nbytes
    write_ns = {r: int(n / 0.4 * (5 if r == slow else 1) * (1 + 0.1 * (r % 3))) + 200_000 for r, n in writes.items()}
    gathered = at + 1_600_000 + max(write_ns.values())
    for rank in range(index.world):
        first, wrote = at + 1_200_000 + 40_000 * rank, write_ns.get(rank, 0)
        done = gathered + (400_000 if rank == 0 else 100_000)
        rows = [
            ("save", at + 10_000 * rank, done, 0, -1),
            ("flatten", at + 10_000 * rank, at + 500_000, 0, 0),
            ("agree", at + 500_000, at + 900_000, 0, 0),
            ("plan", at + 900_000, first, 0, 0),
            ("write", first, first + wrote, writes.get(rank, 0), 0),
            ("hash", first, first + wrote // 3, writes.get(rank, 0), 4),
            ("fsync", first + wrote * 2 // 3, first + wrote, 0, 4),
            ("gather", first + wrote, gathered, 0, 0),
        ]
        if rank == 0:
            rows.append(("publish", gathered, done, 0, 0))
        spans += [Span(name, rank, start, stop, nbytes, parent) for name, start, stop, nbytes, parent in rows]
    return tuple(spans)


def write_metrics(run: Path, values: Mapping[int, Mapping[str, float]]) -> Path:
    """A run of small checkpoints with metrics, by step."""
    for step, metrics in values.items():
        metadata = {"metrics": encode_value(dict(metrics), "metrics")}
        write_checkpoint(run / f"step_{step:08d}", {"x": 1}, step=step, world=1, metadata=metadata)
    return run


def write_run(run: Path, *, steps: tuple[int, ...] = (100, 200, 300), **options: Any) -> Path:
    """A run of complete checkpoints."""
    for step in steps:
        write_checkpoint(run / f"step_{step:08d}", step=step, **options)
    return run


def write_mixed_run(run: Path) -> Path:
    """Good checkpoints beside a partial, a failed, two damaged and two foreign ones."""
    small: dict[str, Any] = {"layers": 1, "width": 32, "vocabulary": 64}
    for step in (100, 200):
        write_checkpoint(run / f"step_{step:08d}", gpt_state(**small, seed=step), step=step, files=FILES)
    write_checkpoint(run / "step_00000300", gpt_state(**small), step=300, publish=False)
    failed = write_checkpoint(
        run / "step_00000400", gpt_state(**small), step=400, publish=False, error="rank 3: No space left on device"
    )
    (run / "step_00000400" / failed.file_list[3].name).unlink()
    write_checkpoint(run / "step_00000500", gpt_state(**small), step=500)
    (run / "step_00000500" / INDEX_NAME).write_bytes(b'{"seal":"0000000000000000","format":"treeckpt"')
    cut = write_checkpoint(run / "step_00000600", gpt_state(**small), step=600)
    shard = run / "step_00000600" / cut.file_list[1].name
    shard.write_bytes(shard.read_bytes()[:-100])
    (run / "logs").mkdir()
    (run / "logs" / "train.txt").write_text("loss 1.0")
    (run / "latest").symlink_to("step_00000200")
    return run
