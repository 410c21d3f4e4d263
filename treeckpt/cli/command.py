"""The parser of the command line, to which each module adds its commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..report.terminal import fail


class Commands:
    """The commands of a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(self, name: str, run: Callable[[Any], int], text: str, *, json: bool = True) -> argparse.ArgumentParser:
        """Adds a command, with the option `--json` unless `json` is False; returns its own parser.

        Args:
            run: carries the command out; returns its exit code.
        """
        added = self._parsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.set_defaults(run=run)
        if json:
            added.add_argument("--json", action="store_true", help="print JSON")
        return added


def usage_error(text: str) -> int:
    """Prints that the command was used wrongly; returns the exit code for that."""
    fail(f"treeckpt: {text}")
    return 2
