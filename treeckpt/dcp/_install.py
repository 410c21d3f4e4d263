"""`install` puts treeckpt's storages in the place of DCP's in all imported modules, and `uninstall` takes it back."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any, NamedTuple

from torch.distributed import checkpoint
from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem

from .._core.text import count_text
from ..errors import TreeckptError
from ._storage import FILE_SYSTEM_READER, FILE_SYSTEM_WRITER, FSSPEC_READER, FSSPEC_WRITER, DcpReader, DcpWriter

_log = logging.getLogger("treeckpt")
_REPLACED: dict[Any, Any] = {
    FILE_SYSTEM_WRITER: DcpWriter,
    FILE_SYSTEM_READER: DcpReader,
    FSSPEC_WRITER: DcpWriter,
    FSSPEC_READER: DcpReader,
}
_READ_BY_DCP = checkpoint, filesystem, _fsspec_filesystem, _storage_utils
"""Modules in which DCP itself, and programs that name it in full, look for its storages."""


class _Change(NamedTuple):
    """An attribute of a module or a class that `install` sets."""

    module: str
    what: str
    """The name of the storage there, or of the class that is derived from one."""
    owner: Any
    attribute: str
    before: Any
    after: Any


_changes: list[_Change] = []


def install(*, marker: bool = False) -> dict[str, list[str]]:
    """Has DCP, and the modules that are imported so far, save and load with treeckpt where they name DCP's storages.

    These are `FileSystemWriter`, `FileSystemReader`, `FsspecWriter` and `FsspecReader`. They are replaced under every
    name that a module has for them, and as a base of classes, but for those of torch. So
    `torch.distributed.checkpoint.save(state_dict, checkpoint_id=path)` writes treeckpt's format; directories that DCP
    has written still load. Call it in every process that saves or loads, before it makes a storage. It may be called
    again; modules that are imported later have treeckpt's storages as well.

    >>> changed = tc.dcp.install()
    >>> changed["torch.distributed.checkpoint"]
    ['FileSystemReader', 'FileSystemWriter']
    >>> torch.distributed.checkpoint.FileSystemWriter is tc.dcp.Writer
    True
    >>> tc.dcp.uninstall()

    Args:
        marker: also writes `.metadata` and `__<rank>_0.distcp` into each checkpoint, for programs that look for these.

    Returns:
        What it has changed, also in earlier calls: names of storages, and of classes derived from one, by the module.
        It is logged (INFO, to the logger `treeckpt`). A framework that is not among them saves with DCP's functions,
        which are, or without DCP.

    Raises:
        TreeckptError: DCP does not have its own storages, as another program has put others there; nothing is changed.
    """
    try:
        for change in _found():
            setattr(change.owner, change.attribute, change.after)
            _changes.append(change)
        _check()
    except BaseException:
        uninstall()
        raise
    DcpWriter.marker_by_default = marker
    changed: dict[str, list[str]] = {}
    for module, what in sorted(change[:2] for change in _changes):
        changed.setdefault(module, []).append(what)
    listed = "; ".join(f"{module}: {', '.join(names)}" for module, names in changed.items())
    _log.info("install: treeckpt's storages in %s: %s", count_text(len(changed), "module"), listed)
    return changed


def uninstall() -> None:
    """Takes back what `install` did. Modules that were imported since then keep treeckpt's storages.

    >>> tc.dcp.uninstall()
    """
    DcpWriter.marker_by_default = False
    while _changes:
        change = _changes.pop()
        setattr(change.owner, change.attribute, change.before)


def _found() -> list[_Change]:
    """Returns what is to be changed in all modules but those of this package, which go on naming DCP's storages."""
    replaced = {id(old): new for old, new in _REPLACED.items()}
    own = __name__.rpartition(".")[0]
    found: list[_Change] = []
    for module, owner in list(sys.modules.items()):
        if isinstance(owner, ModuleType) and not module.startswith(own):
            # `vars` would load a module that is loaded when it is first used
            for name, value in list(object.__getattribute__(owner, "__dict__").items()):
                if id(value) in replaced:
                    found.append(_Change(module, name, owner, name, value, replaced[id(value)]))
    derived = {
        cls: None for old in _REPLACED for cls in old.__subclasses__() if not cls.__module__.startswith("torch.")
    }
    for cls in derived:
        bases = tuple(_REPLACED.get(base, base) for base in cls.__bases__)
        found.append(_Change(cls.__module__, cls.__qualname__, cls, "__bases__", cls.__bases__, bases))
    return found


def _check() -> None:
    """Refuses an installation after which DCP would go on with storages of others.

    Raises:
        TreeckptError: a module of DCP has another class.
    """
    for module in _READ_BY_DCP:
        for name in (old.__name__ for old in _REPLACED):
            found = vars(module).get(name, DcpWriter)
            if found not in _REPLACED.values():
                raise TreeckptError(
                    f"{module.__name__}.{name}",
                    expected="the class of DCP, in whose place treeckpt's is to come",
                    found=f"{found.__module__}.{found.__qualname__}",
                    hint="Call install before that is put there, or pass storages: treeckpt.dcp.Writer(path)",
                )
