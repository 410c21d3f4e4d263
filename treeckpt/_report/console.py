"""The console that `terminal` prints to, with rich; imported with the first line that is printed."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["OutputConsole", "Table", "Text"]


class OutputConsole(Console):
    """A console that leaves it to its caller what a closed pipe means; rich ends the process with code 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Raises the BrokenPipeError that is handled."""
        raise
