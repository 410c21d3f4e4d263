"""Readers' leases: a small file beside the index says that somebody reads, and is renewed for as long as that lasts.

A reader writes its lease before it reads the index; a deleter looks for leases after the index went. So either the
reader finds no index, or the deleter finds the lease and leaves the shards for later. That needs no locks, only that
what one process writes is seen by others within `LEASE`: local file systems, NFS, Lustre and object stores do so. It
does not hold where the reader may not write (a load from there is not protected), nor where the clocks of hosts differ
by more than `LEASE`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator

import msgspec

from ..core.errors import StoreError
from ..core.files import kind_of, lease_name
from .runs import Folder

__all__ = ["LEASE", "has_readers", "hold_lease"]

LEASE = 600.0
"""Seconds for which a lease counts after it was renewed."""
RENEW = 60.0


@contextlib.contextmanager
def hold_lease(folder: Folder, *, renew: float = RENEW) -> Iterator[bool]:
    """Holds a lease while the body runs; gives whether there is one: where nothing can be written there is none.

    Args:
        renew: seconds between renewals.
    """
    if not folder.entries():  # do not bring a directory back
        yield False
        return
    name, stop = lease_name(secrets.token_hex(8)), threading.Event()
    text = msgspec.json.encode({"host": socket.gethostname(), "pid": os.getpid()})

    def keep() -> None:
        while not stop.wait(renew):
            with contextlib.suppress(OSError, StoreError):
                folder.store.publish(name, text, replace=True)

    try:
        folder.store.publish(name, text, replace=True)
    except (OSError, StoreError):
        yield False
        return
    renewer = threading.Thread(target=keep, name="treeckpt-lease", daemon=True)
    renewer.start()
    try:
        yield True
    finally:
        stop.set()
        renewer.join()
        with contextlib.suppress(OSError, StoreError):
            folder.store.delete(name)


def has_readers(folder: Folder, now_ns: int) -> bool:
    """Whether somebody holds a lease that counts."""
    entries = folder.entries().items()
    leases = [entry for name, entry in entries if (kind := kind_of(name)) and kind.kind == "lease"]
    return any(now_ns - entry.modified_ns < LEASE * 1e9 for entry in leases)
