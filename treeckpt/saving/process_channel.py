"""The writer process: how is it started, reached, calmed and ended? What it writes is told in `scribe`.

It is spawned, never forked, and imports nothing of the user's program: not its `__main__`, not torch. It hears and
answers over one pair of connected sockets, by which it also gets the descriptors of arenas; there are no ports and no
process groups. It runs at low priority, ignores the signals that are meant for the training, and ends with the process
that started it: at the end of the socket's stream, and even where a fork still holds that open, when the process is
gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Channel", "WriterGone", "WriterProcess", "settle_in"]

NICE = 10
"""Added to the writer's niceness: beside one busy training thread on the same core it gets a tenth of the time."""
_IO_PRIORITY = 2 << 13 | 7  # best effort, the lowest of its levels; idle could be starved for ever
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_HEAD = struct.Struct("<QI")
_MAX_FDS = 4

_PROGRAM = """
import importlib, sys, types
fd, parent, package, entry = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
import json
sys.path[:] = json.loads(sys.argv[5])
# the package without what its __init__ imports: reading, numpy and optree's trees are not needed to write
module = sys.modules["treeckpt"] = types.ModuleType("treeckpt")
module.__path__ = [package]
from treeckpt.saving.process_channel import settle_in
name, _, function = entry.partition(":")
channel = settle_in(fd, parent)
getattr(importlib.import_module(name), function)(channel)
"""


class WriterGone(Exception):
    """The process at the other end has ended, or does not answer."""


class Channel:
    """Messages over a socket, with descriptors."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, data: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Sends one message.

        Raises:
            WriterGone: nobody takes it.
        """
        try:
            self._socket.settimeout(timeout)
            head = _HEAD.pack(len(data), len(fds))
            sent = socket.send_fds(self._socket, [head], list(fds)) if fds else 0
            self._socket.sendall(head[sent:])
            self._socket.sendall(data)
        except OSError as error:
            raise WriterGone(f"{error or type(error).__name__}") from error

    def receive(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """The next message.

        Raises:
            WriterGone: there will be none, or none came in time.
        """
        try:
            self._socket.settimeout(timeout)
            head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MAX_FDS)
            if not head:
                raise WriterGone("it ended")
            head += self._exactly(_HEAD.size - len(head))
            nbytes, _ = _HEAD.unpack(head)
            return bytes(self._exactly(nbytes)), list(fds)
        except TimeoutError as error:
            raise WriterGone(f"it was silent for {timeout:g} s") from error
        except OSError as error:
            raise WriterGone(f"{error}") from error

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        done = 0
        while done < nbytes:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise WriterGone("it ended")
            done += count
        return data

    def close(self) -> None:
        self._socket.close()


class WriterProcess:
    """The parent's hold on its writer.

    Args:
        entry: `module:function` that the process runs with its `Channel`.
    """

    def __init__(self, entry: str) -> None:
        package = Path(__file__).resolve().parents[1]
        ours, theirs = socket.socketpair()
        paths = [str(Path(path).absolute()) for path in dict.fromkeys((*sys.path, str(package.parent)))]
        numbers = (str(theirs.fileno()), str(os.getpid()))
        command = [sys.executable, "-I", "-c", _PROGRAM, *numbers, str(package), entry, json.dumps(paths)]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the training
            )
        self.channel = Channel(ours)
        self.owner = os.getpid()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, *, patience: float = 0.0) -> str:
        """Ends it, and says how it ended; what it was writing stays unfinished.

        Args:
            patience: seconds in which it may end by itself.
        """
        self.channel.close()
        if os.getpid() != self.owner:  # in a fork it is somebody else's child
            self._process.returncode = 0
            return "it is another process's"
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "it was ended"
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


def settle_in(fd: int, parent: int) -> Channel:
    """In the new process: takes its place beside the training, and returns the way to the parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _yield_to_others()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return Channel(socket.socket(fileno=fd))


def _yield_to_others() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _IO_PRIORITY)  # of this process


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone.

    The kernel's parent-death signal would not do: it comes when the thread ends that started this process.
    """
    try:
        fd = os.pidfd_open(parent)
    except (OSError, AttributeError):
        fd = -1
    while os.getppid() == parent:
        if fd >= 0:
            select.select([fd], [], [])
        else:
            time.sleep(0.5)
    os._exit(1)
