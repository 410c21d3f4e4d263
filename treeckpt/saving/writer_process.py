"""The parent's side of the writer process: what it is sent for a save, and what becomes of its answers."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping

import msgspec

from ..core.format.save_progress import progress_name
from ..errors import CheckpointError
from ..io.comm.failures import to_fault
from ..io.storage.object_store import ObjectStore
from ..io.storage.store import LocalStore, Store
from ..io.timing import Recorder
from .commit import SaveInfo, as_in_place, may_be_in_place, remove
from .messages import CommitResult, WriteReport
from .plan_cache import Plans
from .process_channel import WriterGone, WriterProcess
from .shard_writer import InlineWriter, WriteResult
from .staging_memory import Arena
from .writer_server import Answer, Attach, Commit, Detach, End, Modules, Reply, SetPlan, WriteShards

__all__ = ["ProcessWriter", "address_of", "arrange", "detach", "modules_of"]

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def address_of(store: Store) -> bytes | None:
    """By which another process opens the same store; None for one that lives in this process only."""
    if type(store) is LocalStore:
        return b"path:" + os.fsencode(store.directory)
    if type(store) is ObjectStore:
        return b"url:" + address if (address := store.address) is not None else None
    try:
        return b"made:" + pickle.dumps(store)
    except Exception:
        return None


class ProcessWriter:
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
        facts: SaveInfo,
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

    def write(self, arena: Arena, address: bytes) -> WriteResult:
        """Has the process write this rank's shards out of the arena."""
        try:
            self.arrange(arena)
            answer = self._ask(WriteShards(self._facts, address, arena.number, self._recorder.snapshot))
            return _decode(answer.data, type=WriteResult)
        except WriterGone as gone:
            return WriteResult(to_fault(self._gone(gone), self._facts.rank))

    def judge(self, heard: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
        faults = lost or any(_decode(message, type=WriteReport).fault for message in heard.values())
        if self.broken or faults:  # there is nothing to publish but an error
            here = InlineWriter(self._store, self._facts, self._plans, self._recorder)
            return here.judge(heard, lost)
        try:
            return self._ask(Commit(dict(heard), dict(lost), self._recorder.snapshot)).data
        except WriterGone as gone:
            error: Exception = self._gone(gone)
            if in_place := may_be_in_place(self._store, self._facts.save_id):
                error = as_in_place(error)
            return _encode(CommitResult((to_fault(error, self._facts.rank),), in_place))

    def _ask(self, request: WriteShards | Commit | End) -> Answer:
        self._process.channel.send(_encode(request), timeout=self._limit)
        while True:
            data, _ = self._process.channel.receive(timeout=self._limit)
            reply = _decode(data, type=Reply)
            if isinstance(reply, Answer):
                self._recorder.adopt(reply.spans)
                self.trace = self.trace or reply.trace
                return reply

    def _gone(self, gone: WriterGone) -> CheckpointError:
        self.broken = True
        how = self._process.end(patience=0.0 if "silent" in str(gone) else 1.0)
        found = f"process {self._process.pid}: {how}" + (f" ({gone})" if "silent" in str(gone) else "")
        return CheckpointError(
            self._store.url,
            expected="its writer process to finish",
            found=found,
            hint="Save again: the next save starts a new one",
        )

    def end(self) -> None:
        if not self.broken:
            try:
                self._ask(End())  # answered: who is told that the save is over finds no record of it
                return
            except WriterGone as gone:
                self._gone(gone)
        # what the process would have removed
        remove(self._store, [progress_name(self._facts.rank, self._facts.save_id)])


def arrange(process: WriterProcess, known: set[str | int], plans: Plans, arena: Arena, *, limit: float) -> None:
    """Sends a writer process the plans and the arena, if it does not have them.

    Raises:
        WriterGone: it has ended.
    """
    key = f"{plans.key} {plans.max_shard_bytes}"
    if key not in known:
        known.difference_update([kept for kept in known if isinstance(kept, str)])
        plenum = msgspec.Raw(_encode(plans.plenum))
        request = SetPlan(plans.key, plans.own.rank, plans.max_shard_bytes, plenum)
        process.channel.send(_encode(request), timeout=limit)
        known.add(key)
    if arena.number not in known:
        process.channel.send(_encode(Attach(arena.number, arena.nbytes)), [arena.fd], timeout=limit)
        known.add(arena.number)


def detach(process: WriterProcess, known: set[str | int], arena: int, *, limit: float) -> None:
    """Lets a writer process give back an arena."""
    if arena in known:
        known.discard(arena)
        process.channel.send(_encode(Detach(arena)), timeout=limit)


def modules_of(process: WriterProcess) -> list[str]:
    """What a writer process that is idle has imported."""
    process.channel.send(_encode(Modules()), timeout=60)
    data, _ = process.channel.receive(timeout=60)
    return _decode(_decode(data, type=Answer).data, type=list[str])
