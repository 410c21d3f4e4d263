"""An index written into SQLite, so that a checkpoint of a million leaves is browsed without being held in memory.

`build_table` writes one file: every node of the tree by number (`core.analysis.node_table`) in blocks, so that a page
of children is a few of these; the records of leaves in blocks; folded paths in blocks of text, which `str.find`
searches at memory speed; and the rest of the index. A row for each node would take SQLite two seconds for a million of
them. A file is written beside its place and renamed, never changed afterwards, and may be deleted at any time.
`stored` reads them.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from treeckpt.core.analysis.node_table import node_records
from treeckpt.core.format.records import Index, LeafRecord
from treeckpt.core.sharding.int_runs import Runs
from treeckpt.core.tree.nesting import split_structure
from treeckpt.core.tree.structure import Structure
from treeckpt.runs.catalog import Summary, summarize_index

__all__ = ["LEAVES", "NAMES", "NODES", "SCHEMA", "StoredLeaf", "build_table"]

SCHEMA = "3"
"""Of files of this form: other versions look elsewhere."""
LEAVES = 64
"""Leaves of one row: what is decoded to show one of them."""
NAMES = 8192
"""Paths of one row: what is read at once by a search."""
NODES = 64
"""Nodes of one row."""
TOLD = 256
"""Rows of nodes after which progress is told."""

StoredLeaf = tuple[str, LeafRecord, Runs | None]
"""Path, record, ranks."""

T = TypeVar("T")

_TABLES = """
PRAGMA page_size = 8192;
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA locking_mode = EXCLUSIVE;
CREATE TABLE part (name TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID;
CREATE TABLE node (block INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE leaf (block INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE name (block INTEGER PRIMARY KEY, text TEXT);
"""


def build_table(index: Index, target: Path, tell: Callable[[int, int], None] = lambda done, total: None) -> Summary:
    """Writes the file of an index and gives its summary.

    Args:
        tell: is told the leaves done so far, and all of them.

    Raises:
        FormatError: the tree is none that can be shown.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        connection = sqlite3.connect(temporary, isolation_level=None)
        try:
            connection.executescript(_TABLES)
            connection.execute("BEGIN")
            summary = _fill(connection, index, tell)
            connection.execute("COMMIT")
        finally:
            connection.close()
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return summary


def _fill(connection: sqlite3.Connection, index: Index, tell: Callable[[int, int], None]) -> Summary:
    summary = summarize_index(index)
    nodes = msgspec.msgpack.Encoder()
    for done, block in _blocks(node_records(index), NODES):
        connection.execute("INSERT INTO node VALUES (?, ?)", (done, nodes.encode(block)))
        if done % TOLD == 0:
            tell(min(done * NODES, len(index.leaves)), len(index.leaves))
    leaves = ((leaf.path, leaf.record, leaf.ranks) for leaf in index.entries)
    encode = msgspec.json.Encoder().encode
    connection.executemany("INSERT INTO leaf VALUES (?, ?)", ((n, encode(b)) for n, b in _blocks(leaves, LEAVES)))
    names = (leaf.path.casefold().replace("\n", " ") for leaf in index.entries)
    connection.executemany("INSERT INTO name VALUES (?, ?)", ((n, "\n".join(b)) for n, b in _blocks(names, NAMES)))
    count = len(index.entries)
    head = msgspec.structs.replace(index, structure=None, leaves=())
    parts = {
        "count": str(count).encode(),
        "head": encode(head),
        "structure": _structure(index.structure),
        "summary": encode(summary),
    }
    connection.executemany("INSERT INTO part VALUES (?, ?)", parts.items())
    return summary


def _structure(structure: Structure) -> bytes:
    return msgspec.json.encode(split_structure(structure))


def _blocks(items: Iterable[T], size: int) -> Iterator[tuple[int, list[T]]]:
    rest, number = iter(items), 0
    while block := list(islice(rest, size)):
        yield number, block
        number += 1
