"""The file of an index, so that a checkpoint of a million leaves is browsed with little memory.

`write_outline` writes one file: a head in JSON, the columns of the tree (`_inspect.outline`), the records of
leaves in blocks, and the structure. It is written under a temporary name and renamed, never changed afterwards, and may
be deleted at any time. A `StoredOutline` maps it: memory grows with the size of a result, not with the number of
leaves.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, overload

import msgspec
import numpy as np

from treeckpt._core.format.byte_map import ChunkColumns, chunk_columns
from treeckpt._core.format.records import Index, Leaf, LeafRecord, specs_of
from treeckpt._core.sharding.int_runs import Runs
from treeckpt._core.text import json_number
from treeckpt._core.tree.structure import Structure
from treeckpt._foreign.foreign_checkpoint import ForeignIndex
from treeckpt._inspect.outline import (
    MAX_CHUNKS,
    Outline,
    OutlineColumns,
    PartColumns,
    Texts,
    join_texts,
    outline_columns,
    part_columns,
)
from treeckpt._runs.index_summary import Summary, summarize_index

VERSION = "9"
"""Version of this format, in the name of the cache directory: other versions use other directories."""
LEAVES_OF_BLOCK = 64
"""All leaves of a block are decoded to show one."""
BLOCKS_OF_REPORT = 256
"""Blocks of leaves between two reports of progress."""
KEPT_BLOCKS = 256
"""Decoded blocks that stay in memory."""
ALIGNMENT = 8
_ARRAYS = {"form": "<i4", "child": "<i8", "first": "<i8", "leaves": "<i8", "key_ends": "<i8", "sums": "<i8",
           "spec": "<i4", "path_ends": "<i8", "block_ends": "<i8", "part": "<i4", "part_ends": "<i8"}  # fmt: skip
_CHUNKS = {"form": "<i4", "start": "<i8", "ends": "<i8", "rank": "<i8", "offset": "<i8", "nbytes": "<i8"}
"""The columns of chunks, which a file has under these names after `chunk_`; none where there are too many chunks."""


class _Head(msgspec.Struct):
    """What a file begins with, after its length in 8 bytes."""

    foreign: bool
    """Whether it is the index of another program's files."""
    index: msgspec.Raw
    """Without its leaves and its structure."""
    summary: Summary
    forms: list[tuple[str, str]]
    parts: dict[str, tuple[int, int]]
    """Where each part begins after the head, and its bytes."""


# made once: the first decoding of a struct in two threads at a time can crash msgspec
_HEAD = msgspec.json.Decoder(_Head, strict=False)  # as `encodable` writes metrics
_INDEX = {False: msgspec.json.Decoder(Index), True: msgspec.json.Decoder(ForeignIndex)}
_BLOCK = msgspec.json.Decoder(list[tuple[LeafRecord, Runs | None]])
_STRUCTURE = msgspec.json.Decoder(Structure)


def encodable(summary: Summary) -> Summary:
    """Returns a summary whose metrics JSON can hold, which has no NaN; a decoder that is not strict reads it back."""
    metrics: dict[str, Any] = {name: json_number(value) for name, value in summary.metrics.items()}
    return msgspec.structs.replace(summary, metrics=metrics)


def write_outline(index: Index, target: Path, report: Callable[[int, int], None] = lambda done, total: None) -> Summary:
    """Writes the file of an index and returns the index's summary.

    Args:
        report: gets the number of leaves done so far, and of all leaves.

    Raises:
        FormatError: the tree cannot be shown.
    """
    columns, summary, encode = outline_columns(index), summarize_index(index), msgspec.json.Encoder().encode
    blocks, ends = bytearray(), list[int]()
    records = [(record, ranks) for record, (_, ranks) in zip(index.leaves, index.paths, strict=True)]
    for low in range(0, len(records), LEAVES_OF_BLOCK):
        if low % (LEAVES_OF_BLOCK * BLOCKS_OF_REPORT) == 0:
            report(low, len(records))
        blocks += encode(records[low : low + LEAVES_OF_BLOCK])
        ends.append(len(blocks))
    names, part = part_columns(path for path, _ in index.paths)
    part_names, part_ends = join_texts(names)
    arrays: dict[str, Any] = {**columns._asdict(), "part": part, "part_ends": part_ends}
    arrays["block_ends"] = np.array(ends, np.int64)
    data = {name: arrays[name].astype(kind).tobytes() for name, kind in _ARRAYS.items()}
    if (chunks := chunk_columns(index, MAX_CHUNKS)) is not None:
        data |= {f"chunk_{name}": getattr(chunks, name).astype(kind).tobytes() for name, kind in _CHUNKS.items()}
    data |= {"keys": columns.keys, "paths": columns.paths, "part_names": part_names, "records": blocks}
    data["structure"] = encode(index.structure)
    parts: dict[str, tuple[int, int]] = {}
    place = 0
    for name, part in data.items():
        parts[name] = place, len(part)
        place += len(part) + -len(part) % ALIGNMENT
    bare = encode(msgspec.structs.replace(index, structure=None, leaves=()))
    head = encode(
        _Head(isinstance(index, ForeignIndex), msgspec.Raw(bare), encodable(summary), list(columns.forms), parts)
    )
    head += b" " * (-len(head) % ALIGNMENT)
    # With the process in its name, because another one may write the same file at the same time.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for part in data.values():
                file.write(part)
                file.write(b"\0" * (-len(part) % ALIGNMENT))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return summary


class StoredOutline(Outline):
    """The outline of an index in a file; its `index` reads leaves and structure when they are used.

    Raises:
        OSError, ValueError, KeyError, msgspec.MsgspecError: it cannot be read, or `write_outline` did not write it.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(data[:8], "little")
        head = _HEAD.decode(data[8:start])
        parts = {name: data[start + low : start + low + nbytes] for name, (low, nbytes) in head.parts.items()}
        if any(len(parts[name]) != nbytes for name, (_, nbytes) in head.parts.items()):
            raise ValueError(f"{path} ends too early")
        arrays = {name: np.frombuffer(parts[name], kind) for name, kind in _ARRAYS.items()}
        ends = arrays.pop("block_ends")
        self._parts = PartColumns(Texts(parts["part_names"], arrays.pop("part_ends")), arrays.pop("part"))
        columns_of_chunks = {
            name: np.frombuffer(parts[f"chunk_{name}"], kind) for name, kind in _CHUNKS.items() if "chunk_form" in parts
        }
        self._chunks = ChunkColumns(**columns_of_chunks) if columns_of_chunks else None
        columns = OutlineColumns(forms=head.forms, keys=parts["keys"], paths=parts["paths"], **arrays)
        self.summary = head.summary
        """What lists of checkpoints show."""
        bare = _INDEX[head.foreign].decode(head.index)
        index = (_StoredForeignIndex if head.foreign else _StoredIndex)(
            **{name: getattr(bare, name) for name in bare.__struct_fields__}
        )
        super().__init__(index, columns)
        entries = _Entries(self, parts["records"], ends, bare)
        vars(index).update(entries=entries, stored=parts["structure"])
        msgspec.structs.force_setattr(index, "leaves", _Records(entries))

    def chunks(self) -> ChunkColumns | None:
        return self._chunks

    def parts(self) -> PartColumns:
        return self._parts


class _Entries(Sequence[Leaf]):
    """The leaves by number, decoded in blocks."""

    def __init__(self, outline: Outline, data: memoryview, ends: np.ndarray, index: Index) -> None:
        self._paths, self._count = outline.paths, len(outline.columns().spec)
        self._data, self._ends, self._specs = data, ends, index.specs
        self._block = lru_cache(KEPT_BLOCKS)(self._read)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Leaf: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Leaf]: ...
    def __getitem__(self, at: int | slice) -> Leaf | Sequence[Leaf]:
        if isinstance(at, slice):
            return [self[n] for n in range(self._count)[at]]
        number = range(self._count)[at]
        return self._block(number // LEAVES_OF_BLOCK)[number % LEAVES_OF_BLOCK]

    def _read(self, block: int) -> list[Leaf]:
        records = _BLOCK.decode(self._data[self._ends[block - 1] if block else 0 : self._ends[block]])
        numbers = range(block * LEAVES_OF_BLOCK, block * LEAVES_OF_BLOCK + len(records))
        rows = zip(numbers, self._paths(numbers), records, strict=True)
        return [Leaf(n, path, record, ranks, *specs_of(record, self._specs)) for n, path, (record, ranks) in rows]

    def __iter__(self) -> Iterator[Leaf]:
        for block in range(len(self._ends)):
            yield from self._read(block)


class _Records(Sequence[LeafRecord]):
    """The records of the leaves."""

    def __init__(self, entries: _Entries) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, at: int) -> LeafRecord: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[LeafRecord]: ...
    def __getitem__(self, at: int | slice) -> LeafRecord | Sequence[LeafRecord]:
        found = self._entries[at]
        return found.record if isinstance(found, Leaf) else [leaf.record for leaf in found]

    def __iter__(self) -> Iterator[LeafRecord]:
        return (leaf.record for leaf in self._entries)


def _structure(index: Index) -> Structure:
    """Decodes the structure of the tree as a whole."""
    return _STRUCTURE.decode(vars(index)["stored"])


class _StoredIndex(Index, frozen=True, dict=True):
    structure = cached_property(_structure)  # pyright: ignore[reportAssignmentType]


class _StoredForeignIndex(ForeignIndex, frozen=True, dict=True):
    structure = cached_property(_structure)  # pyright: ignore[reportAssignmentType]
