"""Processes that see different directories at one path, as on the private disks of several hosts.

Each process enters a mount namespace of its own, in which the directory of its host is mounted at the path, and has the
name of that host. The test that started it sees the directories of all hosts.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import sys
from pathlib import Path

import pytest

__all__ = ["LOCAL", "disk_of", "enter_host", "host_of", "needs_two_disks"]

LOCAL = "local"
"""The name, below the directory of a test, at which each host has its own disk."""
HOSTS = 2
NEW_NAMESPACES = {"mounts": 0x00020000, "names": 0x04000000, "users": 0x10000000}  # of <linux/sched.h>
BIND, PRIVATE = 4096, (1 << 18) | (1 << 14)  # of <linux/mount.h>; private with all below it


def disk_of(directory: Path, host: int) -> Path:
    """Returns the directory that is the disk of a host, as it is seen from outside."""
    return directory / f"disk of host{host}"


def host_of(rank: int, world: int) -> int:
    """Returns the host of a rank, where the first half of the ranks is on the first host."""
    return rank * HOSTS // world


def enter_host(host: int, directory: Path, *, local: str = LOCAL) -> Path:
    """Has this process, which has one thread, see the disk of a host at one path; returns the path.

    Args:
        directory: that of the test.
        local: the name of the path below it.
    """
    path, disk = directory / local, disk_of(directory, host)
    for each in (path, disk):
        each.mkdir(parents=True, exist_ok=True)
    _enter_namespaces()
    _call("mount", os.fsencode(disk), os.fsencode(path), None, ctypes.c_ulong(BIND), None)
    socket.sethostname(f"host{host}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look the name up
    return path


def _enter_namespaces() -> None:
    """Enters namespaces of mounts and of the host's name; a user without rights enters one of users too."""
    spaces, user, group = NEW_NAMESPACES["mounts"] | NEW_NAMESPACES["names"], os.geteuid(), os.getegid()
    _call("unshare", spaces | NEW_NAMESPACES["users"] if user else spaces)
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call("mount", None, b"/", None, ctypes.c_ulong(PRIVATE), None)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@functools.cache
def _why_not() -> str:
    pid = os.fork()
    if pid == 0:
        try:
            _enter_namespaces()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return os.strerror(code) if code else ""


def needs_two_disks() -> None:
    """Skips a test where no process may enter such namespaces."""
    if sys.platform != "linux":
        pytest.skip("only Linux has mount namespaces")
    if why := _why_not():
        pytest.skip(f"no process may enter a mount namespace here: {why}")
