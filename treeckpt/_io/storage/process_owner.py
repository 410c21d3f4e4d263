"""Identifies the process that owns a file, and tells whether it still runs.

The kernel knows the processes of this boot of this host, in the process namespace of this process: in a container the
same pid is another process. Whether any other process runs is not known here.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from ..._core.format.files import Owner

_known: dict[int, Owner] = {}


def this_process() -> Owner:
    """Returns the identity of this process; a forked child has its own."""
    pid = os.getpid()
    owner = _known.get(pid)
    if owner is None:
        _known.clear()
        owner = _known[pid] = Owner(socket.gethostname(), pid, _boot_id(), _stat(pid)[1])
    return owner


def _boot_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[bool, int]:
    """Returns whether a process is a zombie without live threads, and its start time; (False, 0) if not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] in "ZX" and int(fields[17]) <= 1, int(fields[19])
    return False, 0


def is_running(owner: Owner) -> bool | None:
    """Whether a process still runs; None if that cannot be known here."""
    here = this_process()
    if owner == here:
        return True
    if not here.boot or (owner.host, owner.boot) != (here.host, here.boot) or owner.pid <= 0:
        return None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to another user
        pass
    ended, started = _stat(owner.pid)
    return not ended and (not started or started == owner.started)
