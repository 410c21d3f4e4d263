"""A program in a fork of this process, which has everything imported, with pipes as of `subprocess.Popen`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO


class ForkedProcess:
    """A fork that runs a function, and ends.

    Attributes:
        stdin, stdout: pipes to it; what it prints as an error comes out of `stdout` too.
    """

    def __init__(self, main: Callable[[], None]) -> None:
        (its_in, to_it), (from_it, its_out) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                for own, stream in ((its_in, 0), (its_out, 1), (its_out, 2)):
                    os.dup2(own, stream)
                sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
                for signum in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(signum, signal.SIG_DFL)
                os.closerange(3, 256)
                main()
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                os._exit(status)
        os.close(its_in)
        os.close(its_out)
        self.stdin: IO[str] = os.fdopen(to_it, "w")
        self.stdout: IO[str] = os.fdopen(from_it)
        self._ended = False

    def ask(self, text: str) -> None:
        """Writes a line to it."""
        self.stdin.write(text + "\n")
        self.stdin.flush()

    def line(self) -> str:
        """Returns the next line that it prints; fails where it has ended."""
        found = self.stdout.readline().strip()
        assert found, "it has ended"
        return found

    def send_signal(self, signum: int) -> None:
        if not self._ended:
            os.kill(self.pid, signum)

    def freeze(self) -> None:
        """Stops it, and waits until none of its threads runs any more; SIGCONT lets it go on."""
        self.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def end(self) -> None:
        """Kills it, wherever it is."""
        self.send_signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._ended = True
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()


def forked_together(mains: Sequence[Callable[[], None]]) -> list[ForkedProcess]:
    """Forks a process for each function, all in one process group, that of the first; none begins before all are there.

    A Store of this process looks up the name of each client, in a thread: a process that is forked meanwhile inherits
    the resolver's lock, held, and waits for it for ever.
    """

    def begin(main: Callable[[], None]) -> None:
        sys.stdin.readline()
        main()

    processes = [ForkedProcess(partial(begin, main)) for main in mains]
    for process in processes:
        os.setpgid(process.pid, processes[0].pid)
    for process in processes:
        process.ask("begin")
    return processes
