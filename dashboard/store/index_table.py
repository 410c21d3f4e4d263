"""Writes an index into an SQLite file, so that a checkpoint of a million leaves is browsed with little memory.

`build_table` writes one file: every node of the tree by number (`core.analysis.outline`) in blocks, so that a page
of children is a few blocks; the records of leaves in blocks; case-folded paths in blocks of text, which `str.find`
searches at memory speed; and the rest of the index. One row for each node would take SQLite two seconds for a million
nodes. A file is written under a temporary name and renamed, never changed afterwards, and may be deleted at any time.
`stored_index` reads it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from treeckpt.core.analysis.outline import IndexOutline, node_records
from treeckpt.core.format.records import Index, LeafRecord
from treeckpt.core.sharding.int_runs import Runs
from treeckpt.runs.index_summary import Summary, summarize_index

SCHEMA = "6"
"""Version of this format, in the name of the cache directory: other versions use other directories."""
LEAVES = 64
"""Leaves of one block: all of them are decoded to show one."""
NAMES = 8192
"""Paths of one block: a search reads one block at a time."""
NODES = 64
"""Nodes of one block."""
REPORTED = 256
"""Blocks of nodes between two reports of progress."""

StoredLeaf = tuple[LeafRecord, Runs | None]
"""Record, ranks."""

T = TypeVar("T")

_TABLES = """
PRAGMA page_size = 8192;
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA locking_mode = EXCLUSIVE;
CREATE TABLE part (name TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID;
CREATE TABLE node (block INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE leaf (block INTEGER PRIMARY KEY, paths BLOB, data BLOB);
CREATE TABLE name (block INTEGER PRIMARY KEY, text TEXT);
"""


def build_table(index: Index, target: Path, report: Callable[[int, int], None] = lambda done, total: None) -> Summary:
    """Writes the file of an index and returns the index's summary.

    Args:
        report: gets the number of leaves done so far, and of all leaves.

    Raises:
        FormatError: the tree cannot be shown.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        connection = sqlite3.connect(temporary, isolation_level=None)
        try:
            connection.executescript(_TABLES)
            connection.execute("BEGIN")
            summary = _fill(connection, index, report)
            connection.execute("COMMIT")
        finally:
            connection.close()
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return summary


def _fill(connection: sqlite3.Connection, index: Index, report: Callable[[int, int], None]) -> Summary:
    summary, outline = summarize_index(index), IndexOutline(index)
    nodes = msgspec.msgpack.Encoder()
    for done, block in _blocks(node_records(outline), NODES):
        connection.execute("INSERT INTO node VALUES (?, ?)", (done, nodes.encode(block)))
        if done % REPORTED == 0:
            report(min(done * NODES, len(index.leaves)), len(index.leaves))
    encode = msgspec.json.Encoder().encode
    leaves = (
        (n, encode([leaf.path for leaf in block]), encode([(leaf.record, leaf.ranks) for leaf in block]))
        for n, block in _blocks(index.entries, LEAVES)
    )
    connection.executemany("INSERT INTO leaf VALUES (?, ?, ?)", leaves)
    names = (leaf.path.casefold().replace("\n", " ") for leaf in index.entries)
    connection.executemany("INSERT INTO name VALUES (?, ?)", ((n, "\n".join(b)) for n, b in _blocks(names, NAMES)))
    count = len(index.entries)
    head = msgspec.structs.replace(index, structure=None, leaves=())
    columns = outline.columns()
    parts = {
        "count": str(count).encode(),
        "head": encode(head),
        "kind": type(index).__name__.encode(),
        "structure": encode(index.structure),
        "summary": encode(summary),
        "nbytes": columns.nbytes.astype("<i8").tobytes(),
        "spec": columns.spec.astype("<i4").tobytes(),
    }
    connection.executemany("INSERT INTO part VALUES (?, ?)", parts.items())
    return summary


def _blocks(items: Iterable[T], size: int) -> Iterator[tuple[int, list[T]]]:
    rest, number = iter(items), 0
    while block := list(islice(rest, size)):
        yield number, block
        number += 1
