"""Readers' leases: a small file beside the index that a reader renews for as long as it reads.

A reader writes its lease before it reads the index; a deleter looks for leases after it has deleted the index. So
either the reader finds no index, or the deleter finds the lease and leaves the shards for later. This needs no locks,
only that what one process writes is seen by others within `LEASE` seconds, as on local file systems, NFS, Lustre and
object stores. It does not work where the reader has no write permission (a load from there is not protected), nor where
the clocks of hosts differ by more than `LEASE`. The lease of a process that is known to have ended does not count.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterator
from functools import partial

import msgspec

from ...core.format.decoding import decode_json
from ...core.format.file_names import lease_name, parse_file_name
from ...core.format.save_progress import Owner
from ...errors import StoreError, TreeckptError
from ...threads import start_thread
from .late_requests import delete_late
from .process_owner import is_running, this_process
from .store import Store

_log = logging.getLogger("treeckpt")
LEASE = 600.0
"""Seconds for which a lease is valid after it was renewed."""
RENEW = 60.0
MAX_LEASE = 4096
"""Bytes of a lease, at most."""

_held: set[str] = set()
"""The names of the leases that this process holds."""


@contextlib.contextmanager
def hold_lease(folder: Store, *, renew: float = RENEW, ahead: bool = False) -> Iterator[bool]:
    """Holds a lease while the body runs, renewed every `renew` seconds; gives False where none can be written.

    Args:
        ahead: in an object store the body begins while the lease is being written, for a reader that has read the index
            already and raises if it finds files gone: until the lease is written nothing protects it.

    In an object store the end of the body does not wait until the lease is deleted; the end of the process does.
    """
    if folder.traits.has_directory and not folder.entries():  # a lease would create it again
        yield False
        return
    far = folder.traits.far
    lease = _Lease(folder, renew)
    held = (far and ahead) or lease.write()
    if held:
        lease.start()
    try:
        yield held
    finally:
        lease.end(wait=not far)


class _Lease:
    """A lease, and the thread that renews it."""

    def __init__(self, store: Store, renew: float) -> None:
        self._store, self._renew = store, renew
        self._name, self._ended, self._written = lease_name(secrets.token_hex(8)), threading.Event(), False
        self._keeper: threading.Thread | None = None
        self._started = False
        _held.add(self._name)

    def write(self) -> bool:
        """Writes it; returns whether that was possible."""
        with contextlib.suppress(OSError, StoreError):
            self._store.publish(self._name, msgspec.json.encode(this_process()), replace=True)
            self._written = True
        return self._written

    def start(self) -> None:
        """Starts to renew it, and to write it where that is still to be done."""
        self._started = True
        self._keeper = start_thread(self._keep, "treeckpt-lease")
        if self._keeper is None and (self._written or self.write()):
            _log.warning(
                "%s: no thread can be started to renew the lease: a clean-up may delete this checkpoint after %g s",
                self._store.url,
                LEASE,
            )

    def _keep(self) -> None:
        if self._written or self.write():
            while not self._ended.wait(self._renew):
                self.write()

    def end(self, *, wait: bool) -> None:
        """Deletes it, if it was started; a thread for which the process waits does so unless `wait`."""
        _held.discard(self._name)
        self._ended.set()
        if self._started:
            delete = partial(self._delete, self._keeper)
            delete() if wait else delete_late(self._store.url, self._name, delete)

    def _delete(self, keeper: threading.Thread | None) -> None:
        if keeper is not None:
            keeper.join()  # a write that is under way would create it again
        if self._written:
            with contextlib.suppress(OSError, StoreError):
                self._store.delete(self._name)


def has_readers(folder: Store, now_ns: int) -> bool:
    """Whether a reader holds a valid lease."""
    entries = folder.entries().items()
    leases = [(name, entry) for name, entry in entries if (kind := parse_file_name(name)) and kind.kind == "lease"]
    recent = [name for name, entry in leases if now_ns - entry.modified_ns < LEASE * 1e9]
    return any(_may_be_held(folder, name) for name in recent)


def _may_be_held(store: Store, name: str) -> bool:
    try:
        return read_lease(store, name)[1] is not False
    except FileNotFoundError:
        return False


def read_lease(store: Store, name: str) -> tuple[Owner | None, bool | None]:
    """Returns the process that a lease names, and whether it may still read: None where that is not known here.

    Raises:
        FileNotFoundError: the lease was deleted since it was listed.
    """
    try:
        owner = decode_json(store.read(name, limit=MAX_LEASE), Owner)
    except FileNotFoundError:
        raise
    except (OSError, TreeckptError, msgspec.MsgspecError):
        return None, None
    return owner, name in _held if owner == this_process() else is_running(owner)
