"""Reports: a checkpoint or a run as one HTML file that needs no network, server or torch; and terminal output.

It may import all rooms but `_cli`, `_bench` and `demo`. `report` returns the page, which `treeckpt_dashboard.report`
makes with the dashboard's drawings; `treeckpt report PATH --html FILE` writes it. The size of a page is bounded: it
states how many entries it leaves out.
"""

from __future__ import annotations

import os
from pathlib import Path

from .._io.os_errors import write_errors_wrapped
from .._runs.catalog import OnRead
from .._runs.discovery import is_checkpoint

__all__ = ["report"]


def report(
    path: str | os.PathLike[str],
    html: str | os.PathLike[str] | None = None,
    *,
    on_read: OnRead | None = None,
) -> str:
    """Renders the page of a checkpoint, or of a run and its newest checkpoint.

    Args:
        path: a directory.
        html: the file to write; an existing file is replaced.
        on_read: takes how many checkpoints of a run were read, and how many there are.

    Returns:
        The page.

    Raises:
        CheckpointNotFound: there is neither a checkpoint nor a run.
        CheckpointError: the file cannot be written.
    """
    from treeckpt_dashboard.report.page import checkpoint_page, run_page

    text = checkpoint_page(path) if is_checkpoint(path) else run_page(path, on_read=on_read)
    if html is not None:
        replace_file(Path(html), text.encode())
    return text


def replace_file(target: Path, data: bytes) -> None:
    """Writes a file beside the target, and puts it in its place when it is whole.

    Raises:
        CheckpointError: it cannot be written; the target is as it was.
    """
    part = target.with_name(f".{target.name}.part")
    with write_errors_wrapped(str(target)):
        try:
            part.write_bytes(data)
            part.replace(target)
        except OSError:
            part.unlink(missing_ok=True)
            raise
