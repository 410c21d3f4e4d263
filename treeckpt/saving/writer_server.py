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

import msgspec
import numpy as np

from ..core.format.timings import Span
from ..core.planning.rank_trees import GlobalTree
from ..io.comm.failures import Fault, to_fault
from ..io.storage.object_store import ObjectStore, open_address
from ..io.storage.store import LocalStore, Store
from ..io.timing import Recorder, RecorderSnapshot
from .plan_cache import GlobalPlan, compute_plan
from .process_channel import ProcessChannel, WriterGone
from .shard_writer import InlineWriter, SaveInfo, WriteReport
from .staging import StagedShardSource, map_arena

ENTRY_POINT = "treeckpt.saving.writer_server:serve"
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
    """Of the store, from `address_of`."""
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


def address_of(store: Store) -> bytes | None:
    """Returns the bytes by which another process opens the same store; None for one that only this process has."""
    if type(store) is LocalStore:
        return b"path:" + os.fsencode(store.directory)
    if type(store) is ObjectStore:
        return b"url:" + address if (address := store.address) is not None else None
    try:
        return b"pickle:" + pickle.dumps(store)
    except Exception:
        return None


def _open_store(address: bytes) -> Store:
    kind, _, rest = address.partition(b":")
    if kind == b"path":
        return LocalStore(os.fsdecode(rest))
    if kind == b"url":
        return open_address(rest)
    _import_package()
    return pickle.loads(rest)  # from our own parent, by a socket that only it has


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
            source, store = StagedShardSource(plan, self._arenas[request.arena]), _open_store(request.address)
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
