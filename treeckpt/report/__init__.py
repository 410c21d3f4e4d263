"""A checkpoint or a run as one HTML file that needs nothing else: no network, no server, no torch.

`report` gives the page; `treeckpt report PATH --html FILE` writes it. Its size is bounded: what is left out is counted.
"""

from __future__ import annotations

import os
from pathlib import Path

from .page import checkpoint_page, run_page

__all__ = ["report"]


def report(path: str | os.PathLike[str], html: str | os.PathLike[str] | None = None) -> str:
    """The page of a checkpoint, or of a run and its newest checkpoint.

    Args:
        path: a directory.
        html: where to write it; an existing file is replaced.

    Returns:
        the page.

    Raises:
        CheckpointNotFound: there is neither a checkpoint nor a run.
    """
    from ..runs.catalog import is_checkpoint

    text = checkpoint_page(path) if is_checkpoint(path) else run_page(path)
    if html is not None:
        target = Path(html)
        part = target.with_name(f".{target.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    return text
