"""The writer process: how it is started, what it is asked, and what it does.

It is spawned, never forked, and imports nothing of the user's program: not its `__main__`, not torch. Requests, answers
and the descriptors of arenas cross one pair of connected sockets. The process ends with the one that started it: at the
end of the socket's stream, or, where a fork still holds that open, when that process is gone.

It gets the description of a save, the plan, and the number of an arena that holds the data areas of the files, and
builds header, manifest and index itself. Plans and arenas are sent once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .._core.format.decoding import decode_msgpack
from .._core.format.files import progress_name
from .._core.format.timings import Span
from .._core.planning.rank_trees import GlobalTree
from .._core.planning.save_plan import GlobalPlan, compute_plan
from .._io.comm.collective import Fault, to_fault
from .._io.process import umask_of_process
from .._io.storage.kept_files import ProgressRecorder
from .._io.storage.store import Store
from .._io.timing import Recorder, RecorderSnapshot
from ..errors import CheckpointError
from .committed_files import index_may_be_published, remove_files, with_published_hint
from .process_channel import ProcessChannel, WriterGone
from .shard_writer import CommitResult, InlineWriter, SaveInfo, WriteReport
from .staging import Arena, StagedShardSource, map_arena

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode

# requests and answers -------------------------------------------------------------------------------------------------


class SetPlan(msgspec.Struct, tag=True, array_like=True):
    """The plan of the next saves; it has no answer."""

    key: str
    rank: int
    max_shard_bytes: int
    groups: tuple[int, ...]
    global_tree: msgspec.Raw


class AttachArena(msgspec.Struct, tag=True, array_like=True):
    """An arena, whose descriptor comes with the message; it has no answer."""

    arena: int
    nbytes: int


class DetachArena(msgspec.Struct, tag=True, array_like=True):
    """Releases an arena; it has no answer."""

    arena: int


class WriteShards(msgspec.Struct, tag=True, array_like=True):
    """A save whose bytes are staged; the answer holds a `WriteReport`."""

    info: SaveInfo
    address: bytes
    """The address of the store, from `Store.address`."""
    arena: int
    recorder: RecorderSnapshot
    umask: int
    """The umask of the process that saves, which may have changed since this one began."""


class CommitSave(msgspec.Struct, tag=True, array_like=True):
    """All ranks' reports on the save that was written last; the answer holds a `CommitResult`."""

    reports: dict[int, WriteReport]
    silent: tuple[Fault, ...]
    recorder: RecorderSnapshot


class EndSave(msgspec.Struct, tag=True, array_like=True):
    """The save has ended: its progress file is removed."""


class ListModules(msgspec.Struct, tag=True, array_like=True):
    """Requests the names of the imported modules."""


class WriteProgress(msgspec.Struct, tag=True, array_like=True):
    """Bytes written so far; sent before the answer to `WriteShards`, now and then."""

    written: int


class Answer(msgspec.Struct, tag=True, array_like=True):
    """The result of a request."""

    data: bytes
    spans: tuple[Span, ...] = ()
    trace: str = ""
    """The traceback of this process's own failure."""


Request = SetPlan | AttachArena | DetachArena | WriteShards | CommitSave | EndSave | ListModules
Reply = WriteProgress | Answer


# the process that saves -----------------------------------------------------------------------------------------------

_REQUEST_TIMEOUT = 60.0
"""The seconds that a request outside of a save may take."""
_END_GRACE = 1.0
"""The seconds that a process which closed its socket has to end by itself, so that its exit code can be reported."""
_PROGRAM = """
import sys, types
fd, parent, package = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import json
sys.path[:] = json.loads(sys.argv[4])
# the package without what its __init__ imports: reading, numpy and optree's trees are not needed to write
module = sys.modules["treeckpt"] = types.ModuleType("treeckpt")
module.__path__ = [package]
from treeckpt._saving.process_channel import start_in_child
channel = start_in_child(fd, parent)  # before anything else is imported, which takes time
from treeckpt._saving.writer_process import serve
serve(channel)
"""


class WriterProcess:
    """The writer process of a session: started when first needed, kept for all saves, replaced when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ProcessChannel | None = None
        self._plan: tuple[str, int, tuple[int, ...]] = ("", 0, ())
        """The key, shard limit and groups of the plan that the process has."""
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
        # the socket of a process that has ended is still open
        self.end()
        package = Path(__file__).resolve().parents[1]
        ours, theirs = socket.socketpair()
        paths = [str(Path(path).absolute()) for path in dict.fromkeys((*sys.path, str(package.parent)))]
        numbers = (str(theirs.fileno()), str(os.getpid()))
        # -I ignores PYTHONPATH, the user's site packages and the working directory: the search path is passed instead
        command = [sys.executable, "-I", "-c", _PROGRAM, *numbers, str(package), json.dumps(paths)]
        # this process closes its copy of the other end: the stream ends with the writer process then
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
        self._process, self._channel = process, ProcessChannel(ours)
        self._plan, self._arenas = ("", 0, ()), set()

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
        key = (plan.key, plan.max_shard_bytes, plan.groups)
        if key != self._plan:
            global_tree = msgspec.Raw(_encode(plan.global_tree))
            self.send(SetPlan(plan.key, plan.own.rank, *key[1:], global_tree), timeout=timeout)
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
        try:
            code = process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "it was ended"
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

    def disown(self) -> None:
        """Forgets the process, in a forked child: it belongs to the parent."""
        if self._process is not None and self._channel is not None:
            self._channel.close()
            self._process.returncode = 0  # this process cannot wait for it
        self._process = self._channel = None


class ProcessWriter:
    """Writes in the writer process, which must send something within the time limit of the comm.

    Args:
        arena: holds what is written.
        address: of the store, from `Store.address`.
        timeout: that limit, in seconds.
        record: the progress record of the save, which the process continues; None on ranks other than 0.
    """

    def __init__(
        self,
        process: WriterProcess,
        store: Store,
        info: SaveInfo,
        plan: GlobalPlan,
        recorder: Recorder,
        *,
        arena: Arena,
        address: bytes,
        timeout: float,
        record: ProgressRecorder | None,
    ) -> None:
        self.error: Exception | None = None
        self.trace = ""
        self._process, self._arena, self._address, self._timeout = process, arena, address, timeout
        self._store, self._info, self._plan, self._recorder = store, info, plan, recorder
        self._record = record
        self._is_gone = False

    def write(self) -> WriteReport:
        try:
            self._process.prepare(self._plan, self._arena, timeout=self._timeout)
            snapshot = self._recorder.snapshot
            request = WriteShards(self._info, self._address, self._arena.number, snapshot, umask_of_process())
            if self._record is not None:
                # the process writes the record from here on
                self._record.stop()
            report = decode_msgpack(self._call(request), WriteReport)
            if self._record is not None and report.fault is None:
                # the process has written the record, and deletes it at `EndSave`
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
        # a process that is silent but runs would only be waited for
        how = self._process.end(grace=0.0 if is_silent else _END_GRACE)
        return CheckpointError(
            self._store.url,
            expected="its writer process to finish",
            found=f"process {pid}: {how}" + (f" ({gone})" if is_silent else ""),
            hint="Save again: the next save starts a new one",
        )


# the writer process ---------------------------------------------------------------------------------------------------

_LIGHT = {"treeckpt", *sys.stdlib_module_names}
"""The packages below which a pickled store may name modules without the import of all of treeckpt."""


class _StoreUnpickler(pickle.Unpickler):
    """Opens the store of a `Store.address`, which comes from the parent process by a socket that only it has."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "treeckpt" or module_name.partition(".")[0] not in _LIGHT:
            _import_package()
        return super().find_class(module_name, global_name)


def _import_package() -> None:
    """Runs the package's `__init__`: a store of the user's own may import treeckpt, of which only parts are here."""
    package = sys.modules["treeckpt"]
    if package.__spec__ is not None:
        return
    [folder] = package.__path__
    spec = importlib.util.spec_from_file_location(
        "treeckpt", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None, "the package has an __init__"
    package.__spec__ = spec
    spec.loader.exec_module(package)


def serve(channel: ProcessChannel) -> None:
    """Answers the parent's requests until it closes the channel."""
    server = WriterServer(channel)
    with contextlib.suppress(WriterGone):
        while True:
            data, fds = channel.receive()
            answer = server.handle(_decode(data, type=Request), fds)
            if answer is not None:
                channel.send(_encode(answer))


class WriterServer:
    """The state of the writer process: the plan, the arenas, and the writer of the current save."""

    def __init__(self, channel: ProcessChannel) -> None:
        self._channel = channel
        self._plan: GlobalPlan | None = None
        self._arenas: dict[int, np.ndarray] = {}
        self._error: Exception | None = None
        """The error of a request that has no answer; the next `WriteShards` fails with it."""
        self._writer: InlineWriter | None = None

    def handle(self, request: Request, fds: list[int]) -> Answer | None:
        """Does what a request says; returns the answer, if the request has one."""
        match request:
            case WriteShards():
                return self._write(request)
            case CommitSave():
                assert self._writer is not None and self._plan is not None, "it has written before"
                self._writer.recorder = Recorder.resumed(self._plan.own.rank, request.recorder)
                result = self._writer.commit(request.reports, request.silent)
                return self._answer(self._writer, _encode(result), request.recorder)
            case EndSave():
                if self._writer is not None:
                    self._writer.end()
                    self._writer = None
                return Answer(b"")
            case ListModules():
                return Answer(_encode(sorted(sys.modules)))
            case _:
                self._prepare(request, fds)
                return None

    def _prepare(self, request: SetPlan | AttachArena | DetachArena, fds: list[int]) -> None:
        try:
            if isinstance(request, SetPlan):
                self._plan = None  # an old plan would write other files
                global_tree = _decode(request.global_tree, type=GlobalTree)
                limits = (request.max_shard_bytes, request.groups)
                self._plan = compute_plan(request.key, global_tree, request.rank, *limits)
            elif isinstance(request, AttachArena):
                self._arenas[request.arena] = map_arena(fds[0], request.nbytes)
            else:
                self._arenas.pop(request.arena, None)
        except Exception as error:
            self._error = error
        finally:
            # the map of an arena has a copy of the descriptor
            for fd in fds:
                os.close(fd)

    def _write(self, request: WriteShards) -> Answer:
        info, error = request.info, self._error
        self._error = None
        os.umask(request.umask)
        try:
            if error is not None:
                raise error
            plan = self._plan
            assert plan is not None, "the plan is sent before the save"
            source = StagedShardSource(info.to_write(plan), self._arenas[request.arena])
            store = _StoreUnpickler(BytesIO(request.address)).load()
        except Exception as failed:
            return Answer(_encode(WriteReport(to_fault(failed, info.rank))), (), _trace(failed))
        recorder = Recorder.resumed(info.rank, request.recorder)
        self._writer = InlineWriter(store, info, plan, recorder, source, on_progress=self._send_progress)
        return self._answer(self._writer, _encode(self._writer.write()), request.recorder)

    def _answer(self, writer: InlineWriter, data: bytes, before: RecorderSnapshot) -> Answer:
        """Returns the result of a call, with the spans that it added."""
        return Answer(data, tuple(writer.recorder.spans[len(before.spans) :]), _trace(writer.error))

    def _send_progress(self, written: int) -> None:
        self._channel.send(_encode(WriteProgress(written)))


def _trace(error: Exception | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))
