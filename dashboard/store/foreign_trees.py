"""The checkpoints that other programs wrote, and the stores from which their values are read."""

from __future__ import annotations

import contextlib
import os
import stat
from functools import lru_cache
from pathlib import Path

import msgspec

from treeckpt._core.text import bytes_text
from treeckpt._io.os_errors import shows_damage, wrap_read_error
from treeckpt._io.storage.foreign_formats import DCP_METADATA, TORCH_SUFFIXES, describe_foreign
from treeckpt._io.storage.local_files import follows_links
from treeckpt._io.storage.local_store import LocalRun, LocalStore
from treeckpt._io.storage.store import DirectoryEntry, Store
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.step_names import has_steps
from treeckpt.errors import FormatError, StoreError, visible

MAX_METADATA = 64 << 20
"""Bytes of the metadata of torch.distributed.checkpoint beyond which they are not read here."""


class ForeignInfo(CheckpointInfo, frozen=True):
    """A checkpoint of another program. Its tree and its values can be browsed."""

    format: str = ""
    """What it is, in words."""


class ForeignFile(LocalStore):
    """One file of another program, in place of a folder."""

    def modified_ns(self) -> int | None:
        try:
            return self.directory.stat().st_mtime_ns
        except OSError as error:
            if not shows_damage(error):
                raise wrap_read_error(error, self.url) from error
            return None


class RunWithFiles(LocalRun):
    """A run in a local directory, in which files of other programs are listed too, as folders are."""

    def names(self) -> list[str]:
        return sorted({*super().names(), *self.modified_times()})

    def folder(self, name: str) -> LocalStore:
        path = self.path / name
        return ForeignFile(path) if path.suffix in TORCH_SUFFIXES and path.is_file() else LocalStore(path)

    def is_checkpoint_file(self, entry: os.DirEntry[str], at: os.stat_result) -> bool:
        if not entry.name.endswith(TORCH_SUFFIXES) or entry.is_symlink() or not stat.S_ISREG(at.st_mode):
            return False
        try:
            return _is_foreign_file(entry.path, at.st_mtime_ns)
        except StoreError:  # it could not be read: listed, and said there
            return True


@lru_cache(1 << 16)
def _is_foreign_file(path: str, modified_ns: int) -> bool:
    """Whether a file is a checkpoint of another program; looked at once for each time of its last change."""
    return describe_foreign(path) is not None


def is_foreign(path: Path) -> bool:
    """Whether a path is a checkpoint of another program, and no run of such."""
    if not (path.is_file() or path.is_dir()) or describe_foreign(str(path)) is None:
        return False
    return path.is_file() or not has_steps(LocalStore(path))


def look_at_foreign(folder: Store, info: CheckpointInfo, inside: Path | None) -> CheckpointInfo:
    """Returns what a folder without a checkpoint of ours is: its own description, or that of another program's.

    Args:
        inside: the directory of the run, which links in the folder must not leave; None for a path that a person gave.
    """
    if (path := folder.traits.local_path) is None or (found := describe_foreign(str(path))) is None:
        return info
    if (
        inside is not None
        and not follows_links(None)
        and (link := _link_out(folder, path, inside.resolve())) is not None
    ):
        error = f"{found[0]} with a link out of the run, {link}, which is not followed; open it by itself"
        return msgspec.structs.replace(info, error=error)
    error = f"{found[0]}, not of treeckpt"
    return ForeignInfo(
        info.name, info.path, "foreign", info.step, disk_nbytes=_disk_nbytes(path), error=error, format=found[0]
    )


def _disk_nbytes(path: Path) -> int:
    """Adds up the bytes of a file, or of the files of a directory, where links lead."""
    nbytes = 0
    for file in path.iterdir() if path.is_dir() else [path]:
        with contextlib.suppress(OSError):  # another process may be deleting, a link may lead nowhere
            nbytes += file.stat().st_size if file.is_file() else 0
    return nbytes


def _link_out(folder: Store, path: Path, root: Path) -> str | None:
    names = (name for name, entry in folder.entries().items() if not entry.regular)
    return next((name for name in names if not (path / name).resolve().is_relative_to(root)), None)


def foreign_store(info: ForeignInfo) -> Store:
    """Returns the store that reads the files of a checkpoint in place.

    Raises:
        FormatError: it is none any more.
    """
    from treeckpt._foreign.files import foreign_at

    if (found := foreign_at(info.path)) is None:
        raise FormatError(visible(info.path), expected=info.format, found="other files")
    return found


def foreign_version(info: ForeignInfo) -> DirectoryEntry:
    """Returns what changes when the files of a checkpoint do.

    Raises:
        FormatError: its metadata are too large to be read for a page.
    """
    path = Path(info.path)
    files = LocalStore(path).entries() if path.is_dir() else {}
    metadata = files.get(DCP_METADATA)
    if metadata is not None and metadata.nbytes > MAX_METADATA:
        expected, found = f"metadata of at most {bytes_text(MAX_METADATA)}", bytes_text(metadata.nbytes)
        raise FormatError(visible(info.path), expected=expected, found=found, hint="treeckpt show lists its tree")
    own = path.stat()
    newest = max([own.st_mtime_ns, *(file.modified_ns for file in files.values())])
    return DirectoryEntry(sum(file.nbytes for file in files.values()) or own.st_size, newest, own.st_ino)
