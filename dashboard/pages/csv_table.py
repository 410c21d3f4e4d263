"""Tables of pages as CSV: all their rows, with numbers as they are and not as a page shows them."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

MAX_ROWS = 100_000
"""Rows of one table."""
MAX_SECONDS = 40.0
"""Seconds in which all pages of a table are built; a request is given up after `security.TIMEOUT`."""


class TableTooLong(Exception):
    """A table has more rows than one file holds, or building it takes too long."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"This table has more than {rows:,} rows, too many for one file. Filter it, or page the JSON.")


def csv_text(build: partial[Any], where: str) -> str:
    """A table as CSV: from the first row that is asked for to the last one of all.

    Fields that hold a mapping become a column for each key; lists become JSON. A text that a spreadsheet would take as
    a formula gets an apostrophe before it. A page with its numbers in columns has all of them at once.

    Args:
        build: builds the page; it takes the first row as `start`, or as that field of its `query`.
        where: the names of the fields that lead to the list of rows, or to one of the columns; `next` beside a list
            of rows is the first row of the next page.

    Raises:
        TableTooLong: more than MAX_ROWS rows, or more than MAX_SECONDS seconds.
    """
    *outer, name = where.split(".")
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + MAX_SECONDS
    while True:
        holder: Any = build()
        for step in outer:
            holder = getattr(holder, step)
        found = getattr(holder, name, ())
        if found and not isinstance(found[0], msgspec.Struct):
            return _encode(_rows_of_columns(holder, len(found)))
        rows += [_flat(row) for row in found]
        if (start := getattr(holder, "next", None)) is None:
            return _encode(rows)
        if len(rows) >= MAX_ROWS or time.monotonic() > end:
            raise TableTooLong(len(rows))
        build = partial(build, **_from_row(build.keywords, start))


def _from_row(parameters: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Returns the parameters of the page from a row on."""
    if "query" in parameters:
        return {"query": msgspec.structs.replace(parameters["query"], start=start, cursor="")}
    return {"start": start}


def _rows_of_columns(page: msgspec.Struct, count: int) -> list[dict[str, Any]]:
    """Returns the rows of a page whose fields are columns of this length, among others."""
    columns = {
        name: values
        for name, values in _flat(page).items()
        if isinstance(values, list) and len(values) == count and not isinstance(values[0], msgspec.Struct)
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _flat(row: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            found[name] = value
    return found


def _encode(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([_cell(name) for name in columns])
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    if not isinstance(value, str):
        return msgspec.json.encode(value).decode()
    value = value.encode("utf-8", "backslashreplace").decode()
    return f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") and not value[1:].isdecimal() else value
