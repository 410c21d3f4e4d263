"""The part `--id` of the command `show`: which row of a keyed table has an id."""

from __future__ import annotations

import argparse

from .._core.format.records import Index
from .._core.text import bytes_text, shape_text
from .._core.tree.keyed_table import table_path
from .._loading.run_load import opened
from .._loading.table_row import TableRow, find_row
from .._report.terminal import print_facts, print_json
from ..errors import MismatchError


def show_row(options: argparse.Namespace) -> int:
    """Prints where a table has an id; 1 where it does not have it."""
    with opened(options.checkpoint) as checkpoint:
        index = checkpoint.index
        found = find_row(checkpoint.store, index, index.entries[_ids_of(index, options.leaf)], options.id)
    if options.json:
        print_json(found)
    else:
        print_facts(_facts(found))
    return 0 if found.row is not None else 1


def _ids_of(index: Index, path: str) -> int:
    """Returns the number of the ids of the table at a path, or of the only table for the path ""."""
    tables = {table_path(index.entries[number].path): number for number in index.tables}
    if path in tables:
        return tables[path]
    if not path and len(tables) == 1:
        return next(iter(tables.values()))
    raise MismatchError(
        path or "PATH",
        expected="the path of a keyed table",
        found="another path" if path else f"{len(tables)} tables",
        hint=f"There is {', '.join(list(tables)[:5])}" if tables else "The checkpoint has none",
    )


def _facts(found: TableRow) -> list[tuple[str, str]]:
    checked = "compared with checksums" if found.verified else "not compared with checksums"
    facts = [("table", found.table), ("id", found.id)]
    if found.bucket is not None:
        facts.append(("bucket", f"{found.bucket}"))
    if found.row is None:
        facts.append(("row", f"not in the table, which has {found.rows} rows"))
    else:
        where = f"{found.part_rows}"
        if found.part_rows != found.rows:
            where += f" in {found.part}, of a table of {found.rows} rows"
        facts.append(("row", f"{found.row} of {where}, written by rank {found.rank}"))
        facts.append(("bytes", f"{found.start}:{found.start + 8} of {found.file}"))
    for slot in found.slots:
        more = ", ..." if len(slot.values) < slot.elements else ""
        where = f"{slot.start}:{slot.stop} of {slot.file}"
        facts.append(
            (slot.path, f"{slot.dtype}{shape_text(slot.shape)} [{', '.join(slot.values)}{more}], bytes {where}")
        )
    return [*facts, ("read", f"{bytes_text(found.read)}, {checked}")]
