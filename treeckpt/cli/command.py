"""Adds commands to the parser of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

from ..report.terminal import fail

__all__ = ["AddCommand", "usage_error"]


class AddCommand(Protocol):
    """Adds a command to the parser, with the option `--json` unless `json` is False; returns its own parser."""

    def __call__(
        self, name: str, run: Callable[[Any], int], text: str, /, *, json: bool = True
    ) -> argparse.ArgumentParser: ...


def usage_error(text: str) -> int:
    """Prints that the command was used wrongly; returns the exit code for that."""
    fail(f"treeckpt: {text}")
    return 2
