"""Decides what an error of reading says of a checkpoint, and gives hints for errors of the operating system.

There are two kinds. Damage: what is to be read is missing, is no file or does not decode, or the file system has found
its own checksums wrong. A checkpoint is passed over for it, and a verification keeps it as a verdict. All other errors
say nothing of the bytes: they could not be read this time, for want of descriptors, memory, permission or an answer, or
because a disk failed. They are a `StoreError`: no older checkpoint is taken for it, nothing is kept, and the next call
tries again. Only a restore that was given no step takes the step before for a shard with EIO, as a bad sector stays.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import msgspec

from ..errors import CheckpointError, StoreError, TreeckptError

_HINTS = {
    errno.EACCES: "Give this user the permission to read and write there",
    errno.EPERM: "Give this user the permission to read and write there",
    errno.EMFILE: "This process has too many files open: close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "The machine has too many files open",
    errno.ENOMEM: "There is no memory left for it",
    errno.ENOSPC: "Free space on the disk, or save elsewhere; what was saved before is still there",
    errno.EDQUOT: "The quota is used up: free space, or save elsewhere; what was saved before is still there",
    errno.EFBIG: "Files may not be so large there: pass a smaller max_shard_bytes, or raise the limit (ulimit -f)",
    errno.EROFS: "The file system is mounted read-only; after an error of the disk it may have become so",
    errno.ENAMETOOLONG: "Choose a shorter path",
    errno.EIO: "The disk or the file server failed, perhaps for a moment: try again. If it stays, the kernel's log "
    "says more; treeckpt.load(path, fallback=treeckpt.Fallback(on_corrupt='skip')) returns what can be read",
}
_DAMAGE = {
    getattr(errno, name)
    for name in ["ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "ENAMETOOLONG", "EBADMSG", "EUCLEAN", "EILSEQ"]
    if hasattr(errno, name)
}
"""EBADMSG, EUCLEAN and EILSEQ are checksums and structures of the file system that are wrong; btrfs says EIO."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk or quota that is full."""


def shows_damage(error: BaseException) -> bool:
    """Whether an error of reading says that bytes are missing or wrong; else they could not be read this time."""
    if isinstance(error, OSError):
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        return missing or error.errno in _DAMAGE
    return isinstance(error, (CheckpointError, msgspec.MsgspecError))


def read_failure(error: BaseException) -> str:
    """Returns the name of an error by which bytes could not be read, as EIO; empty where it shows damage."""
    if shows_damage(error):
        return ""
    number = error.errno if isinstance(error, OSError) else None
    return errno.errorcode.get(number or 0, type(error).__name__)


def hint_for(error: OSError) -> str:
    """Returns advice for an error, where there is some."""
    return _HINTS.get(error.errno or 0, "Look at the permissions and the health of the disk")


def wrap_read_error(error: OSError, path: str, *, kind: type[CheckpointError] = CheckpointError) -> TreeckptError:
    """Returns the error to raise: `kind` where it shows damage, else `StoreError`."""
    raised = kind if shows_damage(error) else StoreError
    return raised(
        path, expected="files that can be read", found=f"{type(error).__name__}: {error}", hint=hint_for(error)
    )


@contextlib.contextmanager
def read_errors_wrapped(url: str) -> Iterator[None]:
    """Raises an OSError of the body, a read, as `wrap_read_error` says."""
    try:
        yield
    except OSError as error:
        raise wrap_read_error(error, url) from error


def wrap_write_error(error: Exception, url: str, *, expected: str = "files that can be written") -> Exception:
    """Returns a `CheckpointError` for an OSError of a write; any other error unchanged."""
    if not isinstance(error, OSError):
        return error
    found = f"{type(error).__name__}: {error}"
    wrapped = CheckpointError(url, expected=expected, found=found, hint=hint_for(error))
    wrapped.__cause__ = error
    return wrapped


@contextlib.contextmanager
def write_errors_wrapped(url: str, *, expected: str = "files that can be written") -> Iterator[None]:
    """Raises an OSError of the body, a write, as `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise wrap_write_error(error, url, expected=expected) from error
