"""Translates operating system errors: into an error of the checkpoint or of the machine, and into hints.

A checkpoint is skipped where its files are missing, truncated, changed or unreadable; not where this process has no
permission to read them, has no descriptors left, or cannot reach the server.
"""

from __future__ import annotations

import errno

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
}
_NOT_THE_CHECKPOINT = {
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
    """Returns advice for an error, where there is some."""
    return _HINTS.get(error.errno or 0, "Look at the permissions and the health of the disk")


def wrap_read_error(error: OSError, path: str, *, kind: type[CheckpointError] = CheckpointError) -> TreeckptError:
    """Returns the error to raise: `StoreError` where the cause is not the checkpoint, else `kind`."""
    raised = StoreError if error.errno in _NOT_THE_CHECKPOINT else kind
    return raised(
        path, expected="files that can be read", found=f"{type(error).__name__}: {error}", hint=hint_for(error)
    )
