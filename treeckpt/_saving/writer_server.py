"""The writer process's side: the requests that it takes, and the server that answers them.

It gets the description of a save, the plan, and the number of an arena that holds the data areas of the files, and
builds header, manifest and index itself. Plans and arenas are sent once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import sys
import traceback
from io import BytesIO
from typing import Any

import msgspec
import numpy as np

from .._core.format.timings import Span
from .._core.planning.rank_trees import GlobalTree
from .._io.comm.failures import Fault, to_fault
from .._io.timing import Recorder, RecorderSnapshot
from .plan_cache import GlobalPlan, compute_plan
from .process_channel import ProcessChannel, WriterGone
from .shard_writer import InlineWriter, SaveInfo, WriteReport
from .staging import StagedShardSource, map_arena

ENTRY_POINT = "treeckpt._saving.writer_server:serve"
_LIGHT = {"treeckpt", *sys.stdlib_module_names}
"""Packages below which a pickled store may name modules without the import of all of treeckpt."""
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class SetPlan(msgspec.Struct, tag=True, array_like=True):
    """The plan of the next saves; it has no answer."""

    key: str
    rank: int
    max_shard_bytes: int
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
    """Of the store, from `Store.address`."""
    arena: int
    recorder: RecorderSnapshot


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
        """Of a request that has no answer; the next `WriteShards` fails with it."""
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
                self._plan = compute_plan(request.key, global_tree, request.rank, request.max_shard_bytes)
            elif isinstance(request, AttachArena):
                self._arenas[request.arena] = map_arena(fds[0], request.nbytes)
            else:
                self._arenas.pop(request.arena, None)
        except Exception as error:
            self._error = error
        finally:
            for fd in fds:
                os.close(fd)

    def _write(self, request: WriteShards) -> Answer:
        info, error = request.info, self._error
        self._error = None
        try:
            if error is not None:
                raise error
            plan = self._plan
            assert plan is not None, "the plan is sent before the save"
            source = StagedShardSource(plan, self._arenas[request.arena])
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
