"""Whether an index holds together: checks on a decoded one, before anything is expanded or allocated by its word."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from .chunks import BoxChunks, GridChunks
from .dtypes import dtype_of
from .errors import FormatError, TreeckptError
from .records import AliasRecord, ArrayRecord, Index, LeafRecord, PerRankArrays, PerRankValues, ValueRecord
from .runs import Runs, check_runs, decode_runs, length_of
from .shard import MAX_NDIM
from .spec import ArraySpec
from .structure import paths_of

__all__ = ["check_index"]


def check_index(index: Index, name: str) -> None:
    """Everything that can be checked without expanding a column."""
    try:
        paths = paths_of(index.structure)
    except TreeckptError as error:
        raise FormatError(name, expected="a tree's structure", found=str(error)[:200]) from error
    if len(paths) != len(index.leaves):
        raise FormatError(name, expected=f"{len(paths)} leaves", found=f"{len(index.leaves)}")
    if not 0 < index.world <= 1 << 24 or not all(c in "0123456789abcdef" for c in index.save_id):
        raise FormatError(name, expected="a save id and a world", found=f"{index.save_id!r:.40}, {index.world}")
    if len(index.save_id) != 16:
        raise FormatError(name, expected="a save id of 16 hex digits", found=f"{index.save_id!r:.40}")
    rows = length_of(index.files.rank)
    for column in msgspec.structs.astuple(index.files):
        check_runs(column, length=rows, path=name)
    for spec in index.specs:
        itemsize = dtype_of(spec.dtype).itemsize
        if len(spec.shape) > MAX_NDIM or any(n < 0 for n in spec.shape) or math.prod(spec.shape) * itemsize >= 1 << 62:
            raise FormatError(name, expected="a shape", found=f"{spec.shape!r:.80}")
    for (path, ranks), record in zip(paths, index.leaves, strict=True):
        _check_record(index, path, ranks, record)


def _check_record(index: Index, path: str, ranks: Runs | None, record: LeafRecord) -> None:
    if isinstance(record, ValueRecord):
        return
    if isinstance(record, PerRankValues):
        if ranks is None or len(record.values) != length_of(ranks):
            raise FormatError(path, expected="one value per rank", found=f"{len(record.values)}")
        return
    if not 0 <= record.spec < len(index.specs):
        raise FormatError(path, expected=f"one of {len(index.specs)} specs", found=f"number {record.spec}")
    spec = index.specs[record.spec]
    if isinstance(record, AliasRecord):
        _check_alias(index, path, spec, record)
    elif isinstance(record, PerRankArrays):
        if ranks is None:
            raise FormatError(path, expected="a leaf under PerRank", found="another")
        if record.start:
            check_runs(record.start, length=length_of(ranks), path=path)
    elif isinstance(record.chunks, GridChunks):
        grid = record.chunks
        if len(grid.cuts) != len(spec.shape):
            raise FormatError(path, expected=f"cuts of {len(spec.shape)} dimensions", found=f"{len(grid.cuts)}")
        for cut, size in zip(grid.cuts, spec.shape, strict=True):
            column = decode_runs(cut) if length_of(cut) <= 1 << 24 else np.empty(0)
            if len(column) < 2 or column[0] != 0 or column[-1] != size or (np.diff(column) <= 0).any():
                raise FormatError(path, expected=f"rising cuts from 0 to {size}", found=f"{cut!r:.80}")
        cells = math.prod(length_of(cut) - 1 for cut in grid.cuts)
        check_runs(grid.rank, length=cells, path=path)
        check_runs(grid.start, length=cells, path=path)
    elif isinstance(record.chunks, BoxChunks):
        boxes = record.chunks
        columns = (*boxes.offset, *boxes.shape, boxes.start)
        if len(boxes.offset) != len(spec.shape) or len(boxes.shape) != len(spec.shape):
            raise FormatError(path, expected=f"boxes of {len(spec.shape)} dimensions", found=f"{len(boxes.offset)}")
        for column in columns:
            check_runs(column, length=length_of(boxes.rank), path=path)


def _check_alias(index: Index, path: str, spec: ArraySpec, record: AliasRecord) -> None:
    base = index.leaves[record.of] if 0 <= record.of < len(index.leaves) else None
    if not isinstance(base, (ArrayRecord, PerRankArrays)) or not 0 <= base.spec < len(index.specs):
        raise FormatError(path, expected="an alias of an array", found=f"of leaf {record.of}")
    other = index.specs[base.spec]
    if record.view is None:
        fits = spec.shape == other.shape and spec.dtype == other.dtype
    else:
        last = record.view.offset + sum((n - 1) * s for n, s in zip(spec.shape, record.view.strides, strict=True))
        fits = (
            spec.dtype == other.dtype
            and min((record.view.offset, *record.view.strides)) >= 0
            and (0 in spec.shape or last < math.prod(other.shape))
        )
    if not fits:
        raise FormatError(path, expected=f"a view inside shape {other.shape}", found=f"{record!r:.120}")
