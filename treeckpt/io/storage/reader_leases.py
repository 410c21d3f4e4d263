"""Readers' leases: a small file beside the index says that somebody reads, and is renewed for as long as that lasts.

A reader writes its lease before it reads the index; a deleter looks for leases after the index went. So either the
reader finds no index, or the deleter finds the lease and leaves the shards for later. That needs no locks, only that
what one process writes is seen by others within `LEASE`: local file systems, NFS, Lustre and object stores do so. It
does not hold where the reader may not write (a load from there is not protected), nor where the clocks of hosts differ
by more than `LEASE`. The lease of a process that has ended, and whose end can be seen here, does not count.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator

import msgspec

from ...core.format.file_names import lease_name, parse_file_name
from ...core.format.save_progress import Owner
from ...errors import StoreError, TreeckptError
from .process_owner import is_running, this_process
from .run_store import Folder
from .store import Store

__all__ = ["LEASE", "has_readers", "hold_lease", "owner_of"]

LEASE = 600.0
"""Seconds for which a lease counts after it was renewed."""
RENEW = 60.0
MAX_LEASE = 4096
"""Bytes of a lease, at most."""


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
    text = msgspec.json.encode(this_process())

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
    leases = [(name, entry) for name, entry in entries if (kind := parse_file_name(name)) and kind.kind == "lease"]
    recent = [name for name, entry in leases if now_ns - entry.modified_ns < LEASE * 1e9]
    return any((owner := owner_of(folder.store, name)) is None or is_running(owner) is not False for name in recent)


def owner_of(store: Store, name: str) -> Owner | None:
    """The process that holds a lease, None where it does not say."""
    with contextlib.suppress(OSError, TreeckptError, msgspec.MsgspecError):
        return msgspec.json.decode(store.read(name, limit=MAX_LEASE), type=Owner)
    return None
