"""The writer process at its desk: what it is asked, what it does, and what it keeps from save to save.

It gets facts, plans and the number of an arena whose bytes stand as they will in the files, makes header, manifest and
index itself, and sends back small answers. Plans and arenas are sent once, so that a warm save needs little more than
its facts.
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
from ..io.comm.failures import to_fault
from ..io.storage.object_store import open_address
from ..io.storage.store import LocalStore, Store
from ..io.timing import Recorder, RecorderSnapshot
from .commit import SaveInfo
from .plan_cache import Plans, plans_of
from .process_channel import Channel, WriterGone
from .shard_writer import InlineWriter, WriteResult, staged_stream
from .staging_memory import map_arena

__all__ = [
    "ENTRY",
    "Advanced",
    "Answer",
    "Attach",
    "Commit",
    "Detach",
    "End",
    "Modules",
    "Reply",
    "SetPlan",
    "WriteShards",
    "serve",
]

ENTRY = "treeckpt.saving.writer_server:serve"
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class SetPlan(msgspec.Struct, tag=True, array_like=True):
    """The plans of this key, to be kept."""

    key: str
    rank: int
    max_shard_bytes: int
    plenum: msgspec.Raw


class Attach(msgspec.Struct, tag=True, array_like=True):
    """An arena; its descriptor comes with the message."""

    arena: int
    nbytes: int


class Detach(msgspec.Struct, tag=True, array_like=True):
    """An arena that is given back."""

    arena: int


class WriteShards(msgspec.Struct, tag=True, array_like=True):
    """A save whose bytes are staged."""

    facts: SaveInfo
    address: bytes
    arena: int
    trail: RecorderSnapshot


class Commit(msgspec.Struct, tag=True, array_like=True):
    """What all ranks have reported on the save that was written last."""

    heard: dict[int, bytes]
    lost: dict[int, str]
    trail: RecorderSnapshot


class End(msgspec.Struct, tag=True, array_like=True):
    """The save is over: its record is to go."""


class Modules(msgspec.Struct, tag=True, array_like=True):
    """Asks what is imported."""


class Advanced(msgspec.Struct, tag=True, array_like=True):
    """So many bytes are written."""

    written: int


class Answer(msgspec.Struct, tag=True, array_like=True):
    """What became of a request."""

    data: bytes
    spans: tuple[Span, ...] = ()
    trace: str = ""
    """Where this process's own failure came from."""


Request = SetPlan | Attach | Detach | WriteShards | Commit | End | Modules
Reply = Advanced | Answer


def _open(address: bytes) -> Store:
    kind, _, rest = address.partition(b":")
    if kind == b"path":
        return LocalStore(os.fsdecode(rest))
    if kind == b"url":
        return open_address(rest)
    _complete_package()
    return pickle.loads(rest)  # from our own parent, by a socket that only it has


def _complete_package() -> None:
    """A store of the user's own may import treeckpt itself, of which this process has only the parts that it needs."""
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


def serve(channel: Channel) -> None:
    """Does what the parent asks for, until it asks no more."""
    desk = WriterServer(channel)
    with contextlib.suppress(WriterGone):
        while True:
            data, fds = channel.receive()
            request = _decode(data, type=Request)
            answer = desk.do(request, fds)
            if answer is not None:
                channel.send(_encode(answer))


class WriterServer:
    """What the writer process keeps: plans, arenas, and the save that it is at."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._plans: Plans | None = None
        self._arenas: dict[int, np.ndarray] = {}
        self._broken: Exception | None = None
        self._at: tuple[Store, SaveInfo, InlineWriter] | None = None

    def do(self, request: Request, fds: list[int]) -> Answer | None:
        if isinstance(request, WriteShards):
            return self._write(request)
        if isinstance(request, Commit):
            return self._judge(request)
        if isinstance(request, End):
            return self._end()
        if isinstance(request, Modules):
            return Answer(_encode(sorted(sys.modules)))
        try:
            if isinstance(request, SetPlan):
                plenum = _decode(request.plenum, type=GlobalTree)
                self._plans = plans_of(request.key, plenum, request.rank, max_shard_bytes=request.max_shard_bytes)
            elif isinstance(request, Attach):
                self._arenas[request.arena] = map_arena(fds[0], request.nbytes)
            else:
                self._arenas.pop(request.arena, None)
        except Exception as error:  # told with the save that needs it
            self._broken = error
        finally:
            for fd in fds:
                os.close(fd)
        return None

    def _end(self) -> Answer:
        if self._at is not None:
            self._at[2].end()
            self._at = None
        return Answer(b"")

    def _write(self, request: WriteShards) -> Answer:
        facts, recorder = request.facts, Recorder.resumed(request.facts.rank, request.trail)
        broken, self._broken = self._broken, None
        try:
            if broken is not None:
                raise broken
            plans, memory = self._plans, self._arenas[request.arena]
            assert plans is not None and plans.key == facts.key, "plans are sent before they are needed"
            store = _open(request.address)
        except Exception as error:
            return Answer(_encode(WriteResult(to_fault(error, facts.rank))), (), _trace(error))
        here = InlineWriter(store, facts, plans, recorder, heard=self._advanced)
        self._at = store, facts, here
        wrote = here.write(lambda plans: staged_stream(plans.own, memory))
        return Answer(_encode(wrote), tuple(recorder.spans[len(request.trail.spans) :]), _trace(here.error))

    def _judge(self, request: Commit) -> Answer:
        assert self._at is not None and self._plans is not None, "it has written before"
        store, facts, _ = self._at
        recorder = Recorder.resumed(facts.rank, request.trail)
        here = InlineWriter(store, facts, self._plans, recorder)
        verdict = here.judge(request.heard, request.lost)
        return Answer(verdict, tuple(recorder.spans[len(request.trail.spans) :]), _trace(here.error))

    def _advanced(self, written: int) -> None:
        self._channel.send(_encode(Advanced(written)))


def _trace(error: Exception | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))
