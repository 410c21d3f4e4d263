"""Local files as readers of foreign formats take them."""

from __future__ import annotations

from pathlib import Path

from treeckpt._foreign.files import FileRange, store_window
from treeckpt._io.storage.local_store import LocalStore


def file_window(path: str | Path) -> FileRange:
    """A whole local file."""
    file = Path(path).absolute()
    return store_window(LocalStore(file.parent, follow_links=True), file.name)
