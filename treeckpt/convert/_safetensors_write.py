"""The layout of safetensors files: one, or several with an index, as Hugging Face has them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from .._arrays.base import LazyArray
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, tiles
from .._core.tree.spec import ArraySpec
from .._foreign.safetensors_read import MAX_HEADER, METADATA, PACKED, TIES, tag_of
from ..errors import TreeError
from ._format_fit import FittedContents
from ._output import Output, OutputFile, OutputPart

SHARE_NBYTES = 64 << 20
"""Bytes of a part, at most, where parts can be cut: so that ranks have alike to do."""
Named = tuple[str, str, LazyArray]
"""The name of an array in the file, the path of its leaf, and the array."""


def lay_out_safetensors(held: FittedContents, *, directory: bool, max_shard_size: int) -> Output:
    """Lays out one safetensors file, or a directory as Hugging Face has it.

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
    base = {"format": "pt"} | {k: v for k, v in contents.metadata.items() if is_written(k, v)}
    for number, shard in enumerate(shards):
        # a tie can only be one of a tensor in the same file
        tied = {held.names[p]: held.names[tie.of] for p, tie in held.ties.items() if homes[tie.of] == number}
        shard = sorted(shard, key=lambda named: -dtype_of(named[2].spec.dtype).itemsize)  # so that none is misaligned
        noted = base | ({TIES: json.dumps(tied, ensure_ascii=False)} if tied else {})
        header, starts = encode_safetensors_header([(name, lazy.spec) for name, _, lazy in shard], noted)
        _check_header(len(header) - 8, contents.label, directory=directory)
        size = len(header) + sum(lazy.nbytes for _, _, lazy in shard)
        files.append(OutputFile(_shard_name(number, len(shards)) if directory else "", size, ((0, header),)))
        for (_, path, lazy), start in zip(shard, starts, strict=True):
            parts += _cut(OutputPart(number, start, path, lazy, Region.whole(lazy.spec.shape)))
    if len(shards) > 1:
        places = {name: _shard_name(i, len(shards)) for i, shard in enumerate(shards) for name, _, _ in shard}
        total = sum(lazy.nbytes for _, _, lazy in arrays)
        document = {"metadata": {"total_size": total}, "weight_map": places}
        data = (json.dumps(document, indent=2) + "\n").encode()
        files.append(OutputFile("model.safetensors.index.json", len(data), ((0, data),)))
    return Output(tuple(files), tuple(parts), directory)


def is_written(key: str, value: Any) -> bool:
    """Returns whether custom metadata has a place in a file: texts do; some keys have a meaning of their own there."""
    return type(value) is str and key not in ("format", TIES)


def _check_header(nbytes: int, label: str, *, directory: bool) -> None:
    """Refuses a header that no reader of safetensors takes.

    Raises:
        TreeError: it is longer.
    """
    if nbytes > MAX_HEADER:
        fewer = "a smaller max_shard_size=, so that a file has fewer of them" if directory else "a directory of files"
        raise TreeError(
            label,
            expected=f"names and metadata that take at most {MAX_HEADER} bytes in a file, as safetensors has it",
            found=f"{nbytes} bytes",
            hint=f"Write {fewer}, or take a part (select=)",
        )


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


def _cut(part: OutputPart) -> Iterable[OutputPart]:
    """Cuts a part into pieces that ranks can share."""
    start = part.start
    for region in tiles(part.region, max(1, SHARE_NBYTES // part.itemsize)):
        yield msgspec.structs.replace(part, start=start, region=region)
        start += region.size * part.itemsize


def encode_safetensors_header(
    specs: Sequence[tuple[str, ArraySpec]], metadata: dict[str, str]
) -> tuple[bytes, list[int]]:
    """Returns the bytes before the data of a new file, and the offset of each tensor in the file.

    Raises:
        KeyError: safetensors has no such dtype.
    """
    header: dict[str, Any] = {METADATA: metadata} if metadata else {}
    starts: list[int] = []
    position = 0
    for name, spec in specs:
        nbytes = math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
        offsets = [position, position + nbytes]
        if (tag := tag_of(spec)) is None:
            raise KeyError(spec.dtype)
        shape = (*spec.shape[:-1], 2 * spec.shape[-1]) if spec.dtype == PACKED else spec.shape
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": offsets}
        starts.append(position)
        position += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # data begins at a multiple of 8, as in files that the library writes
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in starts]
