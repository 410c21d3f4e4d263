"""Readers' leases: a small file beside the index that a reader renews for as long as it reads.

A reader writes its lease before it reads the index; a deleter looks for leases after it has deleted the index. So
either the reader finds no index, or the deleter finds the lease and leaves the shards for later. This needs no locks,
only that what one process writes is seen by others within `LEASE` seconds, as on local file systems, NFS, Lustre and
object stores. It does not work where the reader has no write permission (a load from there is not protected), nor where
the clocks of hosts differ by more than `LEASE`. The lease of a process that is known to have ended does not count.
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

LEASE = 600.0
"""Seconds for which a lease is valid after it was renewed."""
RENEW = 60.0
MAX_LEASE = 4096
"""Bytes of a lease, at most."""


@contextlib.contextmanager
def hold_lease(folder: Folder, *, renew: float = RENEW) -> Iterator[bool]:
    """Holds a lease while the body runs, renewed every `renew` seconds; gives False where none can be written."""
    if folder.has_directory and not folder.entries():  # a lease would create it again
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
    """Whether a reader holds a valid lease."""
    entries = folder.entries().items()
    leases = [(name, entry) for name, entry in entries if (kind := parse_file_name(name)) and kind.kind == "lease"]
    recent = [name for name, entry in leases if now_ns - entry.modified_ns < LEASE * 1e9]
    return any((owner := lease_owner(folder.store, name)) is None or is_running(owner) is not False for name in recent)


def lease_owner(store: Store, name: str) -> Owner | None:
    """Returns the process that holds a lease; None if the lease names none or cannot be read."""
    with contextlib.suppress(OSError, TreeckptError, msgspec.MsgspecError):
        return msgspec.json.decode(store.read(name, limit=MAX_LEASE), type=Owner)
    return None
