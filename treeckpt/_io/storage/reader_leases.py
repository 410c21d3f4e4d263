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
from collections.abc import Iterator

from ..._core.format.files import Owner, lease_name, parse_file_name
from .kept_file import LAPSE, KeptFile, encode_claim, read_claim
from .store import Store

_log = logging.getLogger("treeckpt")
LEASE = LAPSE
"""Seconds for which a lease is valid after it was renewed."""
RENEW = 60.0


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
    lease = KeptFile(folder, lease_name(secrets.token_hex(8)), encode_claim)
    try:
        held = (far and ahead) or lease.try_write()
        if not held:
            lease.forget()
        elif not lease.renew(renew, create=far and ahead) and lease.try_write():
            _log.warning(
                "%s: no thread can be started to renew the lease: a clean-up may delete this checkpoint after %g s",
                folder.url,
                LEASE,
            )
        yield held
    finally:
        lease.end_late() if far else lease.end()


def has_readers(folder: Store, now_ns: int) -> bool:
    """Whether a reader holds a valid lease."""
    entries = folder.entries().items()
    leases = [(name, entry) for name, entry in entries if (kind := parse_file_name(name)) and kind.kind == "lease"]
    recent = [name for name, entry in leases if now_ns - (entry.modified_ns or now_ns) < LEASE * 1e9]
    return any(_may_be_held(folder, name) for name in recent)


def _may_be_held(store: Store, name: str) -> bool:
    try:
        return read_lease(store, name)[1] is not False
    except FileNotFoundError:
        return False


def read_lease(store: Store, name: str) -> tuple[Owner | None, bool | None]:
    """Returns the process that a lease names, and whether it may still read, as `read_claim`."""
    return read_claim(store, name, damaged=None)
