"""The parser of the command line, to which each module adds its commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._io.storage.foreign_formats import describe_foreign, describe_place, link_to_nothing
from .._io.storage.local_store import is_url, local_path
from .._io.storage.open import open_run
from .._report.terminal import fail
from .._runs import catalog

_ARGUMENT = re.compile(r"(?<![\w/'])([a-z_]+)=(?:True)?(?=[ ,;]|\. |\.?$)(?! \(--)")
"""An argument in a hint, as `overwrite=True` or `select=`, without the option behind it in brackets."""
SHOWN_NAMES = 12
"""Names that an error lists, at most."""
UNREAD = 3
"""The exit code of `verify` where something could not be read, and nothing is damaged."""
EXIT_CODES = """\
exit codes:
  0    done; `verify`: all is intact
  1    a checkpoint is missing, damaged or incomplete, or what was asked for failed; the message says which and why
  2    wrong use: an unknown command, option, path or run; nothing was done
  3    `verify`: some of it could not be read, and the rest is intact; nothing is known to be damaged: try again
  130  interrupted by Ctrl-C
"""


class Commands:
    """The commands of a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    @property
    def parsers(self) -> dict[str, argparse.ArgumentParser]:
        """The parser of each command, by its name."""
        return self._added.choices

    def add(
        self, name: str, run: Callable[[Any], int], text: str, *, json: bool = True, progress: bool = False
    ) -> argparse.ArgumentParser:
        """Adds a command; returns its own parser.

        Args:
            run: carries the command out; returns its exit code.
            json: whether it has the options `--json` and `--follow-links`.
            progress: whether it has the option `--progress`; `progress_of` gives its value.
        """
        added = self._added.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run, parser=added)
        if json:
            added.add_argument("--json", action="store_true", help="print JSON")
            links = "read links that lead out of a run, such as those of DVC and the cache of Hugging Face"
            added.add_argument("--follow-links", action="store_true", help=links)
        if progress:
            help_text = "show progress with --json and where the error stream is no terminal too"
            added.add_argument("--progress", action="store_true", help=help_text)
        return added


def progress_of(options: argparse.Namespace) -> bool | None:
    """Returns the argument `shown` of a progress bar: True with `--progress`, else False with `--json`."""
    return True if options.progress else False if options.json else None


def no_such_run(run: str) -> str:
    """Returns the error where a path or URL does not exist, with what is beside it; empty if it exists."""
    if catalog.run_exists(run):
        return ""
    if not is_url(run):
        path = Path(local_path(run)).absolute()
        what, hint = describe_foreign(f"{path}") or describe_place(f"{path}")
        said = path.exists() or link_to_nothing(path) is not None
        return f"{run}: no such directory{f': it is {what}' * said}. {hint}"
    parent = run.rstrip("/").rpartition("/")[0]
    beside = open_run(parent).names() if parent.count("/") >= 2 else []
    names = ", ".join(beside[:SHOWN_NAMES]) + f" and {len(beside) - SHOWN_NAMES} more" * (len(beside) > SHOWN_NAMES)
    known = f". Below {parent} there are: {names}" if beside else ""
    return f"{run}: no such directory: no object has this prefix{known}"


def in_options(text: str, options: argparse.Namespace) -> str:
    """Returns an error of the library with each argument that the command has as an option named as that option."""

    def option(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}" if hasattr(options, found[1]) else found[0]

    return _ARGUMENT.sub(option, text)


def usage_error(text: str) -> int:
    """Prints that the command was used wrongly; returns the exit code for that."""
    fail(f"treeckpt: {text}")
    return 2
