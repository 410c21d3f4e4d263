"""Writes the files that the command line exports: whole, or not at all."""

from __future__ import annotations

from pathlib import Path

from .._io.os_errors import write_errors_wrapped


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
