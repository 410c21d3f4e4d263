"""Prints the output of the command line: tables on a terminal, plain columns or JSON elsewhere.

All text goes through `visible` here, so that names from files cannot send control sequences to the terminal.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Sequence

import msgspec

from ..errors import visible

STYLES = {
    "complete": "green",
    "partial": "yellow",
    "in progress": "cyan",
    "stalled": "bold red",
    "damaged": "bold red",
    "unread": "yellow",
    "foreign": "dim",
}


def print_json(thing: object) -> None:
    """Prints indented JSON of any object that msgspec can encode."""
    text = msgspec.json.format(msgspec.json.encode(thing), indent=2).decode()
    if codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8":
        text = json.dumps(json.loads(text), indent=2)  # ASCII, which every encoding of a terminal has
    # only texts have such characters, and a text of JSON may have each in this form
    lines = ("".join(c if visible(c) == c else json.dumps(c)[1:-1] for c in line) for line in text.split("\n"))
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def print_line(text: str, style: str = "") -> None:
    """Prints one line of text."""
    from .console import OutputConsole, Text  # rich takes a tenth of the start of a command that prints no text

    console = OutputConsole(highlight=False, soft_wrap=True)
    console.print(Text(visible(text), style=style))


def fail(text: str) -> None:
    """Prints a message on the error stream."""
    from .console import OutputConsole, Text

    OutputConsole(stderr=True, highlight=False, soft_wrap=True).print(Text(visible(text), style="red"))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Prints a table; cells that are a status are coloured, columns named in `right` are aligned to the right."""
    from .console import OutputConsole, Table, Text

    columns, cells = [*map(visible, columns)], [[visible(cell) for cell in row] for row in rows]
    console = OutputConsole(highlight=False)
    if not console.is_terminal:
        _print_plain(columns, cells, right)
        return
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console.print(table)


def _print_plain(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        parts = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        )
        sys.stdout.write("  ".join(parts).rstrip() + "\n")


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Prints names and values, one pair on each line."""
    from .console import OutputConsole, Text

    facts = [(visible(name), text) for name, text in facts]
    width = max((len(name) for name, _ in facts), default=0)
    console = OutputConsole(highlight=False, soft_wrap=True)
    for name, text in facts:
        console.print(Text.assemble((f"{name:<{width}}  ", "dim"), visible(text)))
