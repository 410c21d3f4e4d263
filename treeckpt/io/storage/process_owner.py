"""The process that owns a file: this one, and whether another one still runs.

The kernel answers for processes of this boot of this host, in the process namespace of this process: in a container the
same number is another process. Of all other processes only what they write is known here.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from ...core.format.save_progress import Owner

__all__ = ["is_running", "this_process"]

_known: dict[int, Owner] = {}


def this_process() -> Owner:
    """This process, a forked child as itself."""
    pid = os.getpid()
    owner = _known.get(pid)
    if owner is None:
        _known.clear()
        owner = _known[pid] = Owner(socket.gethostname(), pid, _boot(), _stat(pid)[1])
    return owner


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[bool, int]:
    """Whether a process is a zombie of which no thread is left, and when it began; zeros where that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] in "ZX" and int(fields[17]) <= 1, int(fields[19])
    return False, 0


def is_running(owner: Owner) -> bool | None:
    """Whether a process still runs; None where that cannot be known here."""
    here = this_process()
    if owner == here:
        return True
    if not here.boot or (owner.host, owner.boot) != (here.host, here.boot) or owner.pid <= 0:
        return None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is another user's
        pass
    ended, started = _stat(owner.pid)
    return not ended and (not started or started == owner.started)
