"""Lets a process do without the system calls that macOS or Windows do not have, as far as Linux can imitate that.

What is taken away is missing when treeckpt is imported after that. Under "windows" a directory cannot be opened, and a
file that is open or mapped can be neither deleted nor replaced.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

System = Literal["macos", "windows"]
ROOT = Path(__file__).resolve().parents[2]
_NEITHER = {
    os: ("O_DIRECT", "posix_fallocate", "posix_fadvise", "memfd_create", "pidfd_open", "sched_getaffinity", "sendfile"),
    mmap: ("MADV_HUGEPAGE", "MADV_POPULATE_READ", "MADV_POPULATE_WRITE", "MAP_POPULATE"),
}
_NOT_ON_WINDOWS = {
    os: (
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "pread", "preadv", "pwrite", "pwritev", "writev"),
        *("fork", "register_at_fork", "geteuid", "getuid", "nice", "killpg", "fchmod", "mkfifo", "statvfs", "sysconf"),
    ),
    mmap: ("MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE"),
    signal: ("SIGHUP", "SIGKILL", "SIGURG", "SIGALRM", "SIGUSR1", "SIGUSR2"),
    socket: ("send_fds", "recv_fds", "AF_UNIX"),
}


def run_on(system: System, module: str, cwd: Path) -> str:
    """Runs a module in a process of such a system; returns what it prints."""
    start = f"import runpy; from tests.helpers.other_systems import become; become({system!r})\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TREECKPT_CACHE": str(cwd / "cache")}
    command = [sys.executable, "-c", f"{start}runpy.run_module({module!r}, run_name='__main__')"]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def become(system: System) -> None:
    """Takes away from this process what the system does not have; called before treeckpt is imported."""
    import asyncio
    import fcntl
    import multiprocessing.util
    import sqlite3
    import tempfile
    import zoneinfo

    import msgspec
    import numpy as np
    import optree
    import rich.console
    import torch.distributed.checkpoint
    import torch.nn

    tempfile._os = SimpleNamespace(**vars(os))  # type: ignore[attr-defined]  # its files go when they are closed, as there
    del asyncio, multiprocessing, sqlite3, tempfile, zoneinfo  # these look at what there is when they are imported
    del msgspec, np, optree, rich, torch
    assert not any(name.partition(".")[0] in ("treeckpt", "treeckpt_dashboard") for name in sys.modules)
    for module, names in _NEITHER.items():
        _take(module, names)
    _hide_proc()
    if system == "macos":
        _take(fcntl, [name for name in dir(fcntl) if name.startswith(("F_SETLEASE", "F_GETLEASE", "F_SETSIG"))])
        sys.platform = "darwin"
        return
    for module, names in _NOT_ON_WINDOWS.items():
        _take(module, names)
    for name in ("fcntl", "resource", "pwd", "grp", "termios"):
        sys.modules[name] = None  # type: ignore[assignment]
    for loader in (ctypes.CDLL, ctypes.PyDLL):
        _refuse(loader, "__init__", lambda path, *_: path is None, TypeError("bad argument type"))
    os.O_BINARY = 0  # type: ignore[attr-defined]
    _refuse(os, "open", lambda path, *_: os.path.isdir(path), PermissionError(13, "Permission denied"))
    for name in ("unlink", "remove", "replace", "rename", "rmdir"):
        _refuse(os, name, _in_use, PermissionError(13, "The process cannot access the file: it is being used"))
    sys.platform = "win32"


def _take(module: Any, names: Any) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _refuse(owner: Any, name: str, refused: Callable[..., bool], error: Exception) -> None:
    """Has a function raise an error for some arguments."""
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if refused(*(arguments[1:] if isinstance(owner, type) else arguments)):
            raise error
        return real(*arguments, **named)

    setattr(owner, name, call)


def _hide_proc() -> None:
    missing = FileNotFoundError(2, "No such file or directory")

    def is_proc(path: Any, *_: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc/")

    for owner, name in ((io, "open"), (builtins, "open"), (os, "readlink")):
        _refuse(owner, name, is_proc, missing)


_readlink, _open = os.readlink, io.open


def _in_use(*paths: Any) -> bool:
    """Whether this process has one of the files open or mapped."""
    names = {os.path.realpath(path) for path in paths[:2] if isinstance(path, (str, os.PathLike))}
    found = set[str]()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(_readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    with _open("/proc/self/maps") as maps:
        found |= {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    return bool(names & found)
