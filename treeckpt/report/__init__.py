"""Reports: a checkpoint or a run as one HTML file that needs no network, server or torch; and terminal output.

It may import all rooms but `cli`, `bench` and `demo`. Start with `page`. `report` returns the page; `treeckpt report
PATH --html FILE` writes it. The size of a page is bounded: it states how many entries it leaves out.
"""

from __future__ import annotations

import os
from pathlib import Path

from .output_file import replace_file
from .page import checkpoint_page, run_page

__all__ = ["report"]


def report(path: str | os.PathLike[str], html: str | os.PathLike[str] | None = None) -> str:
    """Renders the page of a checkpoint, or of a run and its newest checkpoint.

    Args:
        path: a directory.
        html: the file to write; an existing file is replaced.

    Returns:
        The page.

    Raises:
        CheckpointNotFound: there is neither a checkpoint nor a run.
        CheckpointError: the file cannot be written.
    """
    from ..runs.catalog import is_checkpoint

    text = checkpoint_page(path) if is_checkpoint(path) else run_page(path)
    if html is not None:
        replace_file(Path(html), text.encode())
    return text
