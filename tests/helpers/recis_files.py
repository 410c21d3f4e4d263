"""Checkpoints as RecIS writes them: blocks of hash tables in safetensors shards, and files of torch.save."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import treeckpt as tc

BUCKETS = 65_536
_TAGS = {"int64": "I64", "int32": "I32", "float32": "F32", "float16": "F16", "float64": "F64", "bool": "bool"}
_NAMES = {"I64": "int64", "I32": "int32", "F32": "float32", "F16": "float16", "F64": "float64"}


class RecisTable(msgspec.Struct, frozen=True):
    """All rows of a table, in any order."""

    ids: np.ndarray
    slots: dict[str, np.ndarray]

    def rows(self, chosen: Any) -> RecisTable:
        return RecisTable(self.ids[chosen], {name: slot[chosen] for name, slot in self.slots.items()})


class _Block(msgspec.Struct):
    name: str
    """As the header has it."""
    data: np.ndarray
    dense: bool


def table_of(rows: int, *, seed: int = 0, width: int = 4, low: int = -(1 << 63)) -> RecisTable:
    """A table with the slots that an embedding with AdamW has."""
    random = np.random.default_rng(seed)
    ids = np.unique(random.integers(low, (1 << 63) - 1, 2 * rows + 1))
    ids = random.permutation(ids)[:rows]
    names = ("embedding", "sparse_adamw_exp_avg", "sparse_adamw_exp_avg_sq")
    return RecisTable(ids, {name: random.standard_normal((rows, width)).astype(np.float32) for name in names})


def write_recis(
    path: Path,
    tables: dict[str, RecisTable],
    *,
    shards: int = 1,
    parallel: int = 4,
    dense: dict[str, np.ndarray] | None = None,
    model: Any = None,
    extra: Any = None,
    io_states: list[Any] | None = None,
    homes: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes one checkpoint.

    Args:
        dense: tensors of the sparse optimizer, by name.
        model: the state dict of the dense model.
        io_states: the state of the readers of each shard.
        homes: by table the bucket to which each id is dealt, where it is not the one of the id.
    """
    path.mkdir(parents=True)
    names: dict[str, str] = {}
    blocks: dict[str, int] = {}
    files: dict[str, int] = {}
    described: dict[str, Any] = {}
    for shard in range(shards):
        writers: list[list[_Block]] = [[] for _ in range(parallel)]
        own = _table_blocks(tables, shard, shards, homes or {}, names)
        own += [_Block(f"{name}^ ", data, True) for name, data in (dense or {}).items()] if shard == 0 else []
        for number, block in enumerate(own):
            writers[number % parallel].append(block)
        for number, writer in enumerate(writers):
            if writer:
                name = f"model-{shard * parallel + number:06d}-of-{parallel * shards:06d}.safetensors"
                files[name] = len(files)
                blocks |= {block.name: files[name] for block in writer}
                described |= _write_shard(path / name, writer)
    if tables or dense:
        _write_compact(path / "index", {"block_index": blocks, "file_index": files})
        (path / "tensorkey.json").write_text(json.dumps(dict(sorted(names.items())), indent=4))
        texts = {name: _describe(name, entry) for name, entry in sorted(described.items())}
        (path / "torch_rank_weights_embs_table_multi_shard.json").write_text(json.dumps(texts, indent=4))
    for shard, state in enumerate(io_states or []):
        torch.save(state, path / f"io_state_{shard}.pt")
    if io_states:
        (path / "io_state_count").write_text(f"{len(io_states)}")
    if model is not None:
        torch.save(model, path / "model.pt")
    if extra is not None:
        torch.save(extra, path / "extra.pt")
    return path


def note_latest(run: Path, name: str) -> None:
    """Appends the id of a checkpoint to those of its run."""
    with (run / "checkpoint").open("a+") as file:
        file.write(name + "\n")


def _table_blocks(
    tables: dict[str, RecisTable], shard: int, shards: int, homes: dict[str, np.ndarray], names: dict[str, str]
) -> list[_Block]:
    begin, end = tc.KeyedTable.share(shard, shards, BUCKETS)
    found: list[_Block] = []
    for child, table in tables.items():
        buckets = homes.get(child, tc.KeyedTable.buckets_of(table.ids, BUCKETS))
        own = table.rows((buckets >= begin) & (buckets < end))
        for slot, data in {"id": own.ids, **own.slots}.items():
            # RecIS replaces the first separator alone
            name = f"{child}@{slot}".replace("@", ".", 1) + f"/part_{shard}_{shards}"
            names[name] = f"{child}@{slot}^{begin:05d}@{end:05d}@{BUCKETS}"
            found.append(_Block(name, data, False))
    return found


def _write_shard(path: Path, blocks: list[_Block]) -> dict[str, Any]:
    header: dict[str, Any] = {}
    offset = 0
    for block in blocks:
        span = [offset, offset + block.data.nbytes]
        header[block.name] = {"dtype": _TAGS[str(block.data.dtype)], "shape": [*block.data.shape], "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (8 - len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(block.data.tobytes() for block in blocks))
    return {block.name: {**header[block.name], "dense": block.dense} for block in blocks}


def _describe(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """What `torch_rank_weights_embs_table_multi_shard.json` says of a block."""
    if entry["dense"]:
        kept = {"dense": True, "dimension": 0, "is_hashmap": False, "name": name, "shape": entry["shape"]}
        return {**kept, "dtype": _NAMES.get(entry["dtype"], "")}
    if ".embedding" not in name:
        return entry
    key = name.replace(".embedding", ".id", 1)
    kept = {"dense": False, "dimension": entry["shape"][-1], "dtype": _NAMES[entry["dtype"]], "name": name}
    hashed = {"hashmap_key": key, "hashmap_key_dtype": "int64", "hashmap_value": name, "is_hashmap": True}
    return kept | hashed | {"shape": entry["shape"]}


def _write_compact(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, separators=(",", ":"), sort_keys=True))
