"""Puts `Writer` and `Reader` in the place of DCP's file system storage, for programs that take that by name."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint import filesystem

from ._reader import DcpReader
from ._writer import DcpWriter

_SWAPPED: dict[str, tuple[Any, Any]] = {
    "FileSystemWriter": (filesystem.FileSystemWriter, DcpWriter),
    "FileSystemReader": (filesystem.FileSystemReader, DcpReader),
}


def install(*, marker: bool = False) -> None:
    """Has DCP, and the modules that are imported so far, save and load with treeckpt where they name no other storage.

    `torch.distributed.checkpoint.save(state_dict, checkpoint_id=path)` then writes treeckpt's format; directories that
    DCP has written still load. Call it after the imports of the program, in every process that saves or loads.

    >>> tc.dcp.install()
    >>> torch.distributed.checkpoint.FileSystemWriter is tc.dcp.Writer
    True
    >>> tc.dcp.uninstall()

    Args:
        marker: writes a file `.metadata` into each checkpoint, for programs that look for one.
    """
    DcpWriter.marker_by_default = marker
    for name, (old, new) in _SWAPPED.items():
        _replace(name, old, new)


def uninstall() -> None:
    """Takes back what `install` did.

    >>> tc.dcp.uninstall()
    """
    DcpWriter.marker_by_default = False
    for name, (old, new) in _SWAPPED.items():
        _replace(name, new, old)


def _replace(name: str, old: Any, new: Any) -> None:
    """Replaces a class in each imported module that has it under its name."""
    for module in list(sys.modules.values()):
        if (
            isinstance(module, ModuleType)
            and vars(module).get(name) is old
            and not module.__name__.startswith(__package__ or "")
        ):
            setattr(module, name, new)
