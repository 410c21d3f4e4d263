"""The page of a sidecar file: its text, if it is one."""

from __future__ import annotations

import msgspec

from treeckpt._core.format.files import Sidecar
from treeckpt._inspect.outline import Outline
from treeckpt._io.storage.checkpoint import read_sidecar
from treeckpt._io.storage.store import Store

from ..pages.checkpoints import CheckpointRow
from ..store.library import NotFound

MAX_SHOWN = 256 << 10
"""Bytes of a file that are shown."""


class SidecarPage(msgspec.Struct, frozen=True):
    """One file that was saved with a checkpoint."""

    checkpoint: CheckpointRow
    number: int
    file: Sidecar
    text: str | None
    """The first MAX_SHOWN bytes of it; None if they are no UTF-8 text."""
    shown: int
    """How many bytes the text stands for."""


def _sidecar_of(outline: Outline, number: int) -> Sidecar:
    if not 0 <= number < len(outline.index.sidecars):
        raise NotFound("There is no such file in this checkpoint.")
    return outline.index.sidecars[number]


def sidecar_file(store: Store, outline: Outline, number: int) -> tuple[Sidecar, bytes]:
    """Returns a sidecar file, of 64 MiB at most, and its content, which matches its checksum.

    Raises:
        NotFound: there is no such file.
        CheckpointError: it is missing or damaged.
    """
    sidecar = _sidecar_of(outline, number)
    return sidecar, read_sidecar(store, outline.index, sidecar.name)


def sidecar_page(store: Store, outline: Outline, row: CheckpointRow, number: int) -> SidecarPage:
    """Returns the page of a sidecar file.

    Raises:
        NotFound, CheckpointError: as `sidecar_file`.
    """
    sidecar, data = sidecar_file(store, outline, number)
    first = data[:MAX_SHOWN]
    try:
        # the cut may be inside a character
        text = first.decode("utf-8", "strict" if len(first) == len(data) else "ignore")
    except UnicodeDecodeError:
        text = None
    return SidecarPage(row, number, sidecar, None if text is None or "\0" in text else text, len(first))
