"""File layouts of contents that fit a format. Pure, except that torch helps with pickles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..arrays.lazy import LazyArray
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region, tiles
from ..errors import TreeError
from .contents import tree_of
from .format_fit import FittedContents
from .output import Output, OutputFile, OutputPart
from .safetensors_files import encode_header

__all__ = ["lay_out_safetensors", "lay_out_torch", "slice_of"]

SHARE = 64 << 20
"""Bytes of a part, at most, where parts can be cut: so that ranks have alike to do."""
Named = tuple[str, str, LazyArray]
"""Name, path, array."""


def lay_out_torch(held: FittedContents) -> Output:
    """One file of torch.save."""
    from .torch_write import build_archive

    contents = held.contents
    archive = build_archive(tree_of(contents), contents.leaves, held.ties, "archive")
    file = OutputFile("", archive.layout.nbytes, archive.literals())
    return Output((file,), tuple(archive.parts(0)), False)


def lay_out_safetensors(held: FittedContents, *, directory: bool, max_shard_size: int) -> Output:
    """One safetensors file, or a directory as Hugging Face has it.

    Raises:
        TreeError: there is no array.
    """
    contents = held.contents
    arrays = [(held.names[p], p, leaf) for p, leaf in contents.leaves if p in held.names and p not in held.ties]
    if not arrays:
        raise TreeError(contents.label, expected="arrays to write", found="none", hint="Look at select= and subtree=")
    shards = _shards(arrays, max_shard_size) if directory else [arrays]
    homes = {path: number for number, shard in enumerate(shards) for _, path, _ in shard}
    files: list[OutputFile] = []
    parts: list[OutputPart] = []
    base = {"format": "pt"} | {k: v for k, v in contents.metadata.items() if type(v) is str}
    for number, shard in enumerate(shards):
        tied = {held.names[p]: held.names[tie.of] for p, tie in held.ties.items() if homes[tie.of] == number}
        shard = sorted(shard, key=lambda named: -dtype_of(named[2].spec.dtype).itemsize)  # so that none is misaligned
        header, starts = encode_header([(name, lazy.spec) for name, _, lazy in shard], base | tied)
        size = len(header) + sum(lazy.nbytes for _, _, lazy in shard)
        files.append(OutputFile(_shard_name(number, len(shards)) if directory else "", size, ((0, header),)))
        for (_, path, lazy), start in zip(shard, starts, strict=True):
            parts += _cut(OutputPart(number, start, path, lazy, Region.whole(lazy.spec.shape)))
    if len(shards) > 1:
        files.append(_index(shards))
    return Output(tuple(files), tuple(parts), directory)


def _shards(arrays: Sequence[Named], limit: int) -> list[list[Named]]:
    """Arrays in order, in shards of at most `limit` bytes; a larger array alone."""
    shards: list[list[Named]] = [[]]
    size = 0
    for named in arrays:
        if shards[-1] and size + named[2].nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(named)
        size += named[2].nbytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def _index(shards: Sequence[Sequence[Named]]) -> OutputFile:
    total = sum(lazy.nbytes for shard in shards for _, _, lazy in shard)
    places = {name: _shard_name(i, len(shards)) for i, shard in enumerate(shards) for name, _, _ in shard}
    document: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": places}
    data = (json.dumps(document, indent=2) + "\n").encode()
    return OutputFile("model.safetensors.index.json", len(data), ((0, data),))


def _cut(part: OutputPart) -> Iterable[OutputPart]:
    """A part in pieces that ranks can share."""
    at = part.start
    for region in tiles(part.region, max(1, SHARE // part.itemsize)):
        yield msgspec.structs.replace(part, start=at, region=region)
        at += region.size * part.itemsize


def slice_of(lazy: LazyArray, box: Region) -> LazyArray:
    """A box of an array, as an array."""
    spec = msgspec.structs.replace(lazy.spec, shape=box.shape)
    return LazyArray(spec, lambda region: lazy.read(region.shifted(box.offset)))
