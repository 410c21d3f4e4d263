"""Who writes a save's shards and publishes its index: this process (`Here`), or its writer process (`There`)?

Both do the same with the same functions. The writer process gets facts, plans and the number of an arena whose bytes
stand as they will in the files, makes header, manifest and index itself, and sends back small answers. It keeps plans
and arenas from save to save, so that a warm save sends it little more than its facts. `serve` is its main loop.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from .agreement import Done, FileRow, Verdict
from .committing import Facts, judge, may_be_in_place, write_shards
from .core.errors import CheckpointError
from .core.events import Span
from .core.inventory import Plenum
from .core.plan import FilePlan, SavePlan, Write
from .core.progress import Progress
from .core.region import Region
from .faults import Fault, fault_of, ours
from .io.arena import Arena, area_offsets, map_arena
from .io.progress import ProgressNote
from .io.record import Recorder, Trail
from .io.store import LocalStore, Store
from .io.writer import Channel, WriterGone, WriterProcess
from .leaves.base import HostArray, Piece
from .plans import Plans, plans_of

__all__ = ["ENTRY", "Here", "Scribe", "Stream", "There", "Wrote", "address_of", "serve", "staged_stream"]

ENTRY = "treeckpt.scribe:serve"
Stream = tuple[Sequence[FilePlan], Callable[[int], Sequence[Piece]]]
"""What files are made of: for each a plan of its bytes, and the pieces by number of leaf."""
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Wrote(msgspec.Struct, frozen=True, array_like=True):
    """How a rank's writing went."""

    fault: Fault | None
    files: tuple[FileRow, ...] = ()


class Scribe(Protocol):
    """What completes a save on a rank."""

    error: Exception | None
    """This rank's failure, where there is one."""

    def judge(self, heard: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
        """On rank 0, the encoded verdict on what all ranks have reported."""
        ...

    def end(self) -> None:
        """Lets go of what is kept for this save."""
        ...


def staged_stream(plan: SavePlan, memory: np.ndarray) -> Stream:
    """The files of a plan out of an arena that holds their data areas."""
    offsets, _ = area_offsets([file.nbytes for file in plan.files])
    whole = [Region((0,), (file.nbytes,)) for file in plan.files]
    files = [
        FilePlan(file.part, file.stream, file.nbytes, (Write(n, region, 0, file.nbytes),))
        for n, (file, region) in enumerate(zip(plan.files, whole, strict=True))
    ]

    def pieces(number: int) -> Sequence[Piece]:
        start = offsets[number]
        return (Piece(whole[number], HostArray(memory[start : start + plan.files[number].nbytes])),)

    return files, pieces


class Here:
    """This process as the scribe of one save.

    Args:
        error: why there are no plans.
        heard: is told of bytes written.
    """

    def __init__(
        self,
        store: Store,
        facts: Facts,
        plans: Plans | None,
        recorder: Recorder,
        *,
        error: Exception | None = None,
        heard: Callable[[int], None] = lambda written: None,
    ) -> None:
        self.error = error
        self._store, self._facts, self._plans, self._recorder, self._heard = store, facts, plans, recorder, heard
        self._note: ProgressNote | None = None

    def write(self, stream: Callable[[Plans], Stream]) -> Wrote:
        """Writes this rank's shards; a failure is for telling the others, so it is returned, not raised."""
        facts, plans = self._facts, self._plans
        try:
            if plans is None:
                raise self.error or AssertionError("what kept this rank from planning is known")
            now = time.time_ns()
            planned = plans.own.nbytes
            first = Progress(facts.save_id, facts.rank, facts.world, facts.step, "write", 0, planned, now, now)
            self._note = ProgressNote(self._store, first, heard=self._heard)
            rows = write_shards(self._note.counting(), facts, plans, stream(plans), self._recorder)
            self._note.commit()
            return Wrote(None, rows)
        except Exception as error:
            self.error = ours(error, self._store.url)
            return Wrote(fault_of(self.error, facts.rank))

    def judge(self, heard: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
        reports = {rank: _decode(message, type=Done) for rank, message in heard.items()}
        verdict, error = judge(self._store, self._facts, self._plans, reports, lost, self._recorder)
        self.error = self.error or error
        return _encode(verdict)

    def end(self) -> None:
        if self._note is not None:
            self._note.end()


# messages -------------------------------------------------------------------------------------------------------------
class _Arrange(msgspec.Struct, tag=True, array_like=True):
    """The plans of this key, to be kept."""

    key: str
    rank: int
    max_shard_bytes: int
    plenum: msgspec.Raw


class _Attach(msgspec.Struct, tag=True, array_like=True):
    """An arena; its descriptor comes with the message."""

    arena: int
    nbytes: int


class _Detach(msgspec.Struct, tag=True, array_like=True):
    arena: int


class _Write(msgspec.Struct, tag=True, array_like=True):
    """A save whose bytes are staged."""

    facts: Facts
    address: bytes
    arena: int
    trail: Trail


class _Judge(msgspec.Struct, tag=True, array_like=True):
    heard: dict[int, bytes]
    lost: dict[int, str]
    trail: Trail


class _End(msgspec.Struct, tag=True, array_like=True):
    """The save is over."""


class _Modules(msgspec.Struct, tag=True, array_like=True):
    """Asks what is imported."""


class _Advanced(msgspec.Struct, tag=True, array_like=True):
    """So many bytes are written."""

    written: int


class _Answer(msgspec.Struct, tag=True, array_like=True):
    """What became of a request."""

    data: bytes
    spans: tuple[Span, ...] = ()
    trace: str = ""
    """Where this process's own failure came from."""


_Request = _Arrange | _Attach | _Detach | _Write | _Judge | _End | _Modules
_Reply = _Advanced | _Answer


def address_of(store: Store) -> bytes | None:
    """By which another process opens the same store; None for one that lives in this process only."""
    if type(store) is LocalStore:
        return b"path:" + os.fsencode(store.directory)
    try:
        return b"made:" + pickle.dumps(store)
    except Exception:
        return None


def _open(address: bytes) -> Store:
    kind, _, rest = address.partition(b":")
    if kind == b"path":
        return LocalStore(os.fsdecode(rest))
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


# the writer process ---------------------------------------------------------------------------------------------------
def serve(channel: Channel) -> None:
    """Does what the parent asks for, until it asks no more."""
    desk = _Desk(channel)
    with contextlib.suppress(WriterGone):
        while True:
            data, fds = channel.receive()
            request = _decode(data, type=_Request)
            answer = desk.do(request, fds)
            if answer is not None:
                channel.send(_encode(answer))


class _Desk:
    """What the writer process keeps: plans, arenas, and the save that it is at."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._plans: Plans | None = None
        self._arenas: dict[int, np.ndarray] = {}
        self._broken: Exception | None = None
        self._at: tuple[Store, Facts, Here] | None = None

    def do(self, request: _Request, fds: list[int]) -> _Answer | None:
        if isinstance(request, _Write):
            return self._write(request)
        if isinstance(request, _Judge):
            return self._judge(request)
        if isinstance(request, _Modules):
            return _Answer(_encode(sorted(sys.modules)))
        try:
            if isinstance(request, _Arrange):
                plenum = _decode(request.plenum, type=Plenum)
                self._plans = plans_of(request.key, plenum, request.rank, max_shard_bytes=request.max_shard_bytes)
            elif isinstance(request, _Attach):
                self._arenas[request.arena] = map_arena(fds[0], request.nbytes)
            elif isinstance(request, _Detach):
                self._arenas.pop(request.arena, None)
            elif self._at is not None:
                self._at[2].end()
                self._at = None
        except Exception as error:  # told with the save that needs it
            self._broken = error
        finally:
            for fd in fds:
                os.close(fd)
        return None

    def _write(self, request: _Write) -> _Answer:
        facts, recorder = request.facts, Recorder.resumed(request.facts.rank, request.trail)
        broken, self._broken = self._broken, None
        try:
            if broken is not None:
                raise broken
            plans, memory = self._plans, self._arenas[request.arena]
            assert plans is not None and plans.key == facts.key, "plans are sent before they are needed"
            store = _open(request.address)
        except Exception as error:
            return _Answer(_encode(Wrote(fault_of(error, facts.rank))), (), _trace(error))
        here = Here(store, facts, plans, recorder, heard=self._advanced)
        self._at = store, facts, here
        wrote = here.write(lambda plans: staged_stream(plans.own, memory))
        return _Answer(_encode(wrote), tuple(recorder.spans[len(request.trail.spans) :]), _trace(here.error))

    def _judge(self, request: _Judge) -> _Answer:
        assert self._at is not None and self._plans is not None, "it has written before"
        store, facts, _ = self._at
        recorder = Recorder.resumed(facts.rank, request.trail)
        here = Here(store, facts, self._plans, recorder)
        verdict = here.judge(request.heard, request.lost)
        return _Answer(verdict, tuple(recorder.spans[len(request.trail.spans) :]), _trace(here.error))

    def _advanced(self, written: int) -> None:
        self._channel.send(_encode(_Advanced(written)))


def _trace(error: Exception | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))


# the parent's side ----------------------------------------------------------------------------------------------------
class There:
    """The writer process as the scribe of one save.

    Args:
        known: what the process has: the key of its plans, and the numbers of its arenas. Kept between saves.
        limit: seconds in which it must have written something more.
    """

    def __init__(
        self,
        process: WriterProcess,
        known: set[str | int],
        store: Store,
        facts: Facts,
        plans: Plans,
        recorder: Recorder,
        *,
        limit: float,
    ) -> None:
        self.error: Exception | None = None
        self.trace = ""
        self.broken = False
        """Whether the process is of no more use."""
        self._process, self._known, self._limit = process, known, limit
        self._store, self._facts, self._plans, self._recorder = store, facts, plans, recorder

    def arrange(self, arena: Arena) -> None:
        """Sends what the process does not have yet.

        Raises:
            WriterGone: it has ended.
        """
        arrange(self._process, self._known, self._plans, arena, limit=self._limit)

    def write(self, arena: Arena, address: bytes) -> Wrote:
        """Has the process write this rank's shards out of the arena."""
        try:
            self.arrange(arena)
            answer = self._ask(_Write(self._facts, address, arena.number, self._recorder.trail))
            return _decode(answer.data, type=Wrote)
        except WriterGone as gone:
            return Wrote(fault_of(self._gone(gone), self._facts.rank))

    def judge(self, heard: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
        faults = lost or any(_decode(message, type=Done).fault for message in heard.values())
        if self.broken or faults:  # there is nothing to publish but an error
            here = Here(self._store, self._facts, self._plans, self._recorder)
            return here.judge(heard, lost)
        try:
            return self._ask(_Judge(dict(heard), dict(lost), self._recorder.trail)).data
        except WriterGone as gone:
            fault = fault_of(self._gone(gone), self._facts.rank)
            return _encode(Verdict((fault,), may_be_in_place(self._store, self._facts.save_id)))

    def _ask(self, request: _Write | _Judge) -> _Answer:
        self._process.channel.send(_encode(request), timeout=self._limit)
        while True:
            data, _ = self._process.channel.receive(timeout=self._limit)
            reply = _decode(data, type=_Reply)
            if isinstance(reply, _Answer):
                self._recorder.adopt(reply.spans)
                self.trace = self.trace or reply.trace
                return reply

    def _gone(self, gone: WriterGone) -> CheckpointError:
        self.broken = True
        how = self._process.end(patience=0.0 if "silent" in str(gone) else 1.0)
        found = f"process {self._process.pid}: {how}" + (f" ({gone})" if "silent" in str(gone) else "")
        error = CheckpointError(
            self._store.url,
            expected="its writer process to finish",
            found=found,
            hint="Save again: the next save starts a new one",
        )
        return error

    def end(self) -> None:
        if not self.broken:
            with contextlib.suppress(WriterGone):
                self._process.channel.send(_encode(_End()), timeout=self._limit)


def arrange(process: WriterProcess, known: set[str | int], plans: Plans, arena: Arena, *, limit: float) -> None:
    """Sends a writer process the plans and the arena, if it does not have them.

    Raises:
        WriterGone: it has ended.
    """
    key = f"{plans.key} {plans.max_shard_bytes}"
    if key not in known:
        known.difference_update([kept for kept in known if isinstance(kept, str)])
        plenum = msgspec.Raw(_encode(plans.plenum))
        request = _Arrange(plans.key, plans.own.rank, plans.max_shard_bytes, plenum)
        process.channel.send(_encode(request), timeout=limit)
        known.add(key)
    if arena.number not in known:
        process.channel.send(_encode(_Attach(arena.number, arena.nbytes)), [arena.fd], timeout=limit)
        known.add(arena.number)


def detach(process: WriterProcess, known: set[str | int], arena: int, *, limit: float) -> None:
    """Lets a writer process give back an arena."""
    if arena in known:
        known.discard(arena)
        process.channel.send(_encode(_Detach(arena)), timeout=limit)


def modules_of(process: WriterProcess) -> list[str]:
    """What a writer process that is idle has imported."""
    process.channel.send(_encode(_Modules()), timeout=60)
    data, _ = process.channel.receive(timeout=60)
    return _decode(_decode(data, type=_Answer).data, type=list[str])
