"""The writer process, from the side of the process that saves: it is started, gets requests, and is ended.

It is spawned, never forked, and imports nothing of the user's program: not its `__main__`, not torch. Requests, answers
and the descriptors of arenas cross one pair of connected sockets. The process ends with the one that started it: at the
end of the socket's stream, or, where a fork still holds that open, when that process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .._core.format.decoding import decode_msgpack
from .._core.format.files import progress_name
from .._io.comm.collective import Fault, to_fault
from ..errors import CheckpointError
from .agree import AgreedSave
from .plan_cache import GlobalPlan
from .process_channel import ProcessChannel, WriterGone
from .shard_writer import (
    CommitResult,
    InlineWriter,
    WriteReport,
    index_may_be_published,
    remove_files,
    with_published_hint,
)
from .staging import Arena
from .writer_server import (
    ENTRY_POINT,
    Answer,
    AttachArena,
    CommitSave,
    DetachArena,
    EndSave,
    ListModules,
    Reply,
    Request,
    SetPlan,
    WriteShards,
)

_REQUEST_TIMEOUT = 60.0
"""Seconds for requests outside of a save."""
_END_GRACE = 1.0
"""Seconds that a process which closed its socket has to end by itself, so that its exit code can be reported."""
_PROGRAM = """
import importlib, sys, types
fd, parent, package, entry = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
import json
sys.path[:] = json.loads(sys.argv[5])
# the package without what its __init__ imports: reading, numpy and optree's trees are not needed to write
module = sys.modules["treeckpt"] = types.ModuleType("treeckpt")
module.__path__ = [package]
from treeckpt._saving.process_channel import start_in_child
name, _, function = entry.partition(":")
channel = start_in_child(fd, parent)
getattr(importlib.import_module(name), function)(channel)
"""
_encode = msgspec.msgpack.encode


class WriterProcess:
    """The writer process of a session: started when first needed, kept for all saves, replaced when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ProcessChannel | None = None
        self._owner = 0
        self._plan = ("", 0)
        """The key and shard limit of the plan that the process has."""
        self._arenas: set[int] = set()
        """The numbers of the arenas that it has."""

    @property
    def pid(self) -> int | None:
        """The process id; None if no process is started."""
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        """Whether a process is running."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process if none is running; raises OSError if it cannot."""
        if self.alive:
            return
        self.end()
        package = Path(__file__).resolve().parents[1]
        ours, theirs = socket.socketpair()
        paths = [str(Path(path).absolute()) for path in dict.fromkeys((*sys.path, str(package.parent)))]
        numbers = (str(theirs.fileno()), str(os.getpid()))
        command = [sys.executable, "-I", "-c", _PROGRAM, *numbers, str(package), ENTRY_POINT, json.dumps(paths)]
        with theirs, contextlib.ExitStack() as opened:
            opened.callback(ours.close)
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the training
            )
            opened.pop_all()
        self._process, self._channel, self._owner = process, ProcessChannel(ours), os.getpid()
        self._plan, self._arenas = ("", 0), set()

    def send(self, request: Request, fds: Sequence[int] = (), *, timeout: float = _REQUEST_TIMEOUT) -> None:
        """Sends a request.

        Raises:
            WriterGone: there is no process, or it has ended, or does not take the request within `timeout` seconds.
        """
        if self._channel is None:
            raise WriterGone("it is not running")
        self._channel.send(_encode(request), fds, timeout=timeout)

    def call(self, request: Request, *, timeout: float = _REQUEST_TIMEOUT) -> Answer:
        """Sends a request, and waits for the answer, at most `timeout` seconds for each message.

        Raises:
            WriterGone: there is no process, or it has ended, or is silent.
        """
        self.send(request, timeout=timeout)
        assert self._channel is not None, "it has sent the request"
        while True:
            data, _ = self._channel.receive(timeout=timeout)
            reply = decode_msgpack(data, Reply)
            if isinstance(reply, Answer):
                return reply

    def prepare(self, plan: GlobalPlan, arena: Arena, *, timeout: float) -> None:
        """Sends the plan and the arena, if the process does not have them; raises as `send`."""
        key = (plan.key, plan.max_shard_bytes)
        if key != self._plan:
            global_tree = msgspec.Raw(_encode(plan.global_tree))
            self.send(SetPlan(plan.key, plan.own.rank, plan.max_shard_bytes, global_tree), timeout=timeout)
            self._plan = key
        if arena.number not in self._arenas:
            self.send(AttachArena(arena.number, arena.nbytes), [arena.fd], timeout=timeout)
            self._arenas.add(arena.number)

    def detach(self, arena: int) -> None:
        """Has the process release an arena, by its number."""
        if arena in self._arenas:
            self._arenas.discard(arena)
            with contextlib.suppress(WriterGone):
                self.send(DetachArena(arena))

    def modules(self) -> list[str]:
        """Returns the names of the modules that the process has imported; it must not be writing. Raises as `call`."""
        return decode_msgpack(self.call(ListModules()).data, list[str])

    def end(self, *, grace: float = 0.0) -> str:
        """Ends the process, after `grace` seconds in which it may end by itself; returns how it ended."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if process is None or channel is None:
            return "it is not running"
        channel.close()
        if os.getpid() != self._owner:  # in a fork it is the child of another process
            process.returncode = 0
            return "it is another process's"
        try:
            code = process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "it was ended"
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


class ProcessWriter:
    """Writes in the writer process, which must send something within the time limit of the comm.

    Args:
        arena: holds what is written.
        address: of the store, from `Store.address`.
    """

    def __init__(
        self, process: WriterProcess, agreed: AgreedSave, plan: GlobalPlan, arena: Arena, address: bytes
    ) -> None:
        self.error: Exception | None = None
        self.trace = ""
        self._process, self._arena, self._address, self._timeout = process, arena, address, agreed.comm.timeout
        self._store, self._info, self._plan, self._recorder = agreed.store, agreed.info, plan, agreed.recorder
        self._record = agreed.record
        self._is_gone = False

    def write(self) -> WriteReport:
        try:
            self._process.prepare(self._plan, self._arena, timeout=self._timeout)
            request = WriteShards(self._info, self._address, self._arena.number, self._recorder.snapshot)
            if self._record is not None:
                self._record.stop()
            report = decode_msgpack(self._call(request), WriteReport)
            if self._record is not None and report.fault is None:
                self._record.forget()
            return report
        except WriterGone as gone:
            return WriteReport(to_fault(self._end_process(gone), self._info.rank))

    def commit(self, reports: Mapping[int, WriteReport], silent: Sequence[Fault] = ()) -> CommitResult:
        faults = silent or any(report.fault is not None for report in reports.values())
        if self._is_gone or faults:  # there is nothing to publish but an error
            return InlineWriter(self._store, self._info, self._plan, self._recorder).commit(reports, silent)
        try:
            request = CommitSave(dict(reports), tuple(silent), self._recorder.snapshot)
            return decode_msgpack(self._call(request), CommitResult)
        except WriterGone as gone:
            error: Exception = self._end_process(gone)
            if in_place := index_may_be_published(self._store, self._info.save_id):
                error = with_published_hint(error)
            return CommitResult((to_fault(error, self._info.rank),), in_place)

    def end(self) -> None:
        if not self._is_gone:
            try:
                self._call(EndSave())  # answered: who learns that the save has ended finds no record of it
                return
            except WriterGone as gone:
                self._end_process(gone)
        # what the process would have removed
        remove_files(self._store, [progress_name(self._info.rank, self._info.save_id)])

    def _call(self, request: WriteShards | CommitSave | EndSave) -> bytes:
        answer = self._process.call(request, timeout=self._timeout)
        self._recorder.adopt(answer.spans)
        self.trace = self.trace or answer.trace
        return answer.data

    def _end_process(self, gone: WriterGone) -> CheckpointError:
        """Ends a process that is of no more use; returns the error that says why."""
        self._is_gone = True
        pid, is_silent = self._process.pid, "silent" in str(gone)
        how = self._process.end(grace=0.0 if is_silent else _END_GRACE)
        return CheckpointError(
            self._store.url,
            expected="its writer process to finish",
            found=f"process {pid}: {how}" + (f" ({gone})" if is_silent else ""),
            hint="Save again: the next save starts a new one",
        )
