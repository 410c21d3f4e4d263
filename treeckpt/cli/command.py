"""The parser of the command line, to which each module adds its commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..io.storage.bucket import is_url
from ..io.storage.open import open_run
from ..report.terminal import fail
from ..runs import catalog

SHOWN = 12
"""Names that an error lists, at most."""


class Commands:
    """The commands of a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    @property
    def parsers(self) -> dict[str, argparse.ArgumentParser]:
        """The parser of each command, by its name."""
        return self._added.choices

    def add(self, name: str, run: Callable[[Any], int], text: str, *, json: bool = True) -> argparse.ArgumentParser:
        """Adds a command, with the option `--json` unless `json` is False; returns its own parser.

        Args:
            run: carries the command out; returns its exit code.
        """
        added = self._added.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.set_defaults(run=run)
        if json:
            added.add_argument("--json", action="store_true", help="print JSON")
        return added


def no_such_run(run: str) -> str:
    """Returns the error where a path or URL does not exist, with what is beside it; empty if it exists."""
    if catalog.run_exists(run):
        return ""
    if not is_url(run):
        return f"{run}: no such directory"
    parent = run.rstrip("/").rpartition("/")[0]
    beside = open_run(parent).names() if parent.count("/") >= 2 else []
    names = ", ".join(beside[:SHOWN]) + f" and {len(beside) - SHOWN} more" * (len(beside) > SHOWN)
    known = f". Below {parent} there are: {names}" if beside else ""
    return f"{run}: no such directory: no object has this prefix{known}"


def usage_error(text: str) -> int:
    """Prints that the command was used wrongly; returns the exit code for that."""
    fail(f"treeckpt: {text}")
    return 2
