"""Is it the checkpoint's fault that a file cannot be read, or that of the process or the machine? What to do, by error.

A checkpoint is passed over where its files are missing, cut short, changed or unreadable; not where this process may
not read them, has no descriptors left, or cannot reach the server.
"""

from __future__ import annotations

import errno

from ..errors import CheckpointError, StoreError, TreeckptError

__all__ = ["hint_for", "wrap_read_error"]

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
}
_REFUSED = {
    getattr(errno, name)
    for name in [
        "EACCES",
        "EPERM",
        "EMFILE",
        "ENFILE",
        "ENOMEM",
        "EAGAIN",
        "EBUSY",
        "EINTR",
        "ESTALE",
        "ETIMEDOUT",
        "ENETDOWN",
        "ENETUNREACH",
        "ENETRESET",
        "ECONNREFUSED",
        "ECONNRESET",
        "ECONNABORTED",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ENOTCONN",
        "ESHUTDOWN",
        "EREMOTEIO",
        "ENOLINK",
    ]
    if hasattr(errno, name)
}


def hint_for(error: OSError) -> str:
    """What to do about it, where that is known."""
    return _HINTS.get(error.errno or 0, "Look at the permissions and the health of the disk")


def wrap_read_error(error: OSError, path: str, *, kind: type[CheckpointError] = CheckpointError) -> TreeckptError:
    """The error to raise for one of the system's: `StoreError` where it says nothing of the checkpoint, else `kind`."""
    made = StoreError if error.errno in _REFUSED else kind
    return made(path, expected="files that can be read", found=f"{type(error).__name__}: {error}", hint=hint_for(error))
