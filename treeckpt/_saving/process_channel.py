"""The socket between a process that saves and its writer process, and what the writer process does when it starts.

Both ends import this module; the writer process imports it first, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

NICENESS = 10
"""What is added to the writer's niceness: beside one busy training thread on a core it gets a tenth of the time."""
_IO_PRIORITY = 2 << 13 | 7  # best effort, the lowest of its levels; the idle class could be starved for ever
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of the system call, by machine."""
_FRAME = struct.Struct("<QI")
"""The head of a message: its number of bytes, and that of its descriptors."""
_MAX_FDS = 4
passes_files = hasattr(socket, "send_fds")
"""Whether processes of this system can hand open files on; Windows has no such sockets, and no writer process."""


class WriterGone(Exception):
    """The process at the other end has ended, or does not answer."""


class ProcessChannel:
    """Messages over a socket, with file descriptors."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, data: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Sends one message; raises WriterGone if the other end does not take it."""
        try:
            self._socket.settimeout(timeout)
            frame = _FRAME.pack(len(data), len(fds))
            # the descriptors go with the first bytes of the frame; the kernel may take less than all of it
            sent = socket.send_fds(self._socket, [frame], list(fds)) if fds else 0
            self._socket.sendall(frame[sent:])
            self._socket.sendall(data)
        except OSError as error:
            raise WriterGone(f"{error or type(error).__name__}") from error

    def receive(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Returns the next message and its descriptors; raises WriterGone if none comes in time."""
        try:
            self._socket.settimeout(timeout)
            frame, fds, _, _ = socket.recv_fds(self._socket, _FRAME.size, _MAX_FDS)
            if not frame:
                raise WriterGone("it ended")
            # a stream may give less than the frame at once
            frame += self._receive_exactly(_FRAME.size - len(frame))
            nbytes, _ = _FRAME.unpack(frame)
            return bytes(self._receive_exactly(nbytes)), list(fds)
        except TimeoutError as error:
            raise WriterGone(f"it was silent for {timeout:g} s") from error
        except OSError as error:
            raise WriterGone(f"{error}") from error

    def _receive_exactly(self, nbytes: int) -> bytearray:
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


def start_in_child(fd: int, parent: int) -> ProcessChannel:
    """Has this new process ignore the training's signals, run at low priority and end with its parent."""
    # the training may handle these and wait for its saves, which this process writes
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    system_call = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and system_call is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(system_call, 1, 0, _IO_PRIORITY)  # of this process
    with contextlib.suppress(RuntimeError):  # no thread can be started: the end of the socket's stream has to do
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    return ProcessChannel(socket.socket(fileno=fd))


def _exit_with_parent(parent: int) -> None:
    """Ends this process when its parent is gone.

    The kernel's parent-death signal would not do: it comes when the thread ends that started this process.
    """
    try:
        fd = os.pidfd_open(parent)
    except (OSError, AttributeError):
        fd = -1
    while os.getppid() == parent:
        # without a pidfd, as before Linux 5.3 and on macOS, the parent is looked for now and then
        if fd >= 0:
            select.select([fd], [], [])
        else:
            time.sleep(0.5)
    # `sys.exit` would end this thread alone
    os._exit(1)
