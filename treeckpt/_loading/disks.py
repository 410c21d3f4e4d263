"""Loads from the disks of several hosts: ranks give each other the files that only some of them see.

Where one path is a directory of its own on each host, a rank sees the files of one disk alone. Ranks that load together
tell each other which version of the checkpoint they see, and which files of it. Where all see all, that was it.
Otherwise each rank gets its checkpoint in a `JoinedStore`, which reads from this disk what is there, and all else
through a rank that sees it. A rank without the directory is given the index.

A rank serves its files in a thread of its own while its load goes on, until all ranks have ended theirs: whatever part
of a load reads, and whether it reads for this rank alone, it finds all files. What comes from another rank is compared
with its checksums like what is read here.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
import xxhash

from .._core.format.index import INDEX_NAME, decode_index
from .._core.format.records import Index
from .._core.sharding.int_runs import Runs, decode_runs, encode_runs
from .._io.comm.comm import Comm
from .._io.storage.checkpoint import Checkpoint, Replaced
from .._io.storage.memory import aligned_buffer
from .._io.storage.store import Store, StoreTraits
from .._io.storage.wrapped_store import WrappedStore
from .._threads import ThreadPool, start_thread
from ..errors import CheckpointError, StoreError, TreeckptError
from .execute_local import READERS
from .execute_shared import SharedRead, open_shared_read, unreachable
from .plan import address_of, memory_at

NO_TIMEOUT = datetime.timedelta(days=365)
"""How long a rank waits for the next request: a load may take any time, and a wait that ends breaks the group."""
ERROR_NBYTES = 2000
"""Bytes of an error's text that are sent to the rank that asked."""


class _Seen(msgspec.Struct, frozen=True):
    """The version of a checkpoint that one rank sees."""

    created_ns: int
    digest: int
    """Of the bytes of the index."""
    lacking: bool
    """Whether files of a node-local checkpoint are elsewhere."""


class _Request(msgspec.Struct, frozen=True):
    """Bytes of a file that a rank asks another one for; all are numbers, which are sent as a tensor."""

    rank: int
    """The rank that asks; -1 for the end of the service."""
    ticket: int = 0
    """Tells the requests of a rank apart."""
    checkpoint: int = 0
    """The number of the checkpoint, of those that are loaded."""
    file: int = 0
    """The number of the shard in the index."""
    offset: int = 0
    nbytes: int = 0


class _Source(msgspec.Struct, frozen=True):
    """A shard that other ranks see."""

    file: int
    """Its number in the index."""
    nbytes: int
    ranks: Sequence[int]


class JoinedStore(WrappedStore):
    """The files of one checkpoint on the disks of all ranks that load together.

    Args:
        inner: the directory here.
        number: of the checkpoint, of those that are loaded.
        index_bytes: the index that all ranks read, where the directory here has another one, or none.
        sources: the shards that are not here, or not whole, and that other ranks see, by name.
    """

    def __init__(
        self,
        inner: Store,
        service: FileService,
        number: int,
        index_bytes: bytes | None,
        sources: Mapping[str, _Source],
    ) -> None:
        super().__init__(inner)
        self._service, self._number, self._index_bytes, self._sources = service, number, index_bytes, sources

    @property
    def traits(self) -> StoreTraits:
        return msgspec.structs.replace(super().traits, far=False, joined=True)

    def sizes(self) -> dict[str, int]:
        return self.inner.sizes() | {name: source.nbytes for name, source in self._sources.items()}

    def read(self, name: str, *, limit: int) -> bytes:
        if name == INDEX_NAME and self._index_bytes is not None:
            return self._index_bytes
        return self.inner.read(name, limit=limit)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        source = self._sources.get(name)
        if source is None:
            self.inner.read_into(name, offset, out, shared=shared)
        elif len(out):
            self._service.ask(source, self._number, f"{self.url}/{name}", offset, out)

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        return name not in self._sources and self.inner.read_parts(name, offset, parts, shared=shared)

    def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> AbstractContextManager[memoryview | None]:
        if name in self._sources:
            return contextlib.nullcontext()
        return self.inner.mapped(name, offset, nbytes, fetch=fetch)

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        source = self._sources.get(name)
        if source is None:
            return self.inner.map(name, offset, nbytes)
        raise StoreError(
            f"{self.url}/{name}",
            expected="a file on a disk here, which can be mapped into memory",
            found=f"one that rank {source.ranks[0]} sees, on the disk of another host",
            hint="Load without mmap",
        )


class FileService:
    """Gives other ranks bytes of the files here, and asks them for bytes of theirs, while a load lasts.

    Args:
        checkpoints: each with the directory that this rank sees, and the index that all ranks read.
    """

    def __init__(self, ranks: SharedRead, timeout: float, checkpoints: Sequence[Checkpoint]) -> None:
        self._ranks, self._group, self._rank, self._size = ranks, ranks.services(NO_TIMEOUT), ranks.rank, ranks.size
        self._timeout, self._checkpoints = datetime.timedelta(seconds=timeout), checkpoints
        self._tickets = itertools.count(1)
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Answers requests while the body runs, at whose end no other rank may need an answer any more."""
        thread = start_thread(self._serve, "treeckpt-files")
        if thread is None:
            raise CheckpointError(
                "ranks",
                expected="a thread that gives other ranks the files of this disk",
                found="none can be started",
                hint="Raise the limit of processes",
            )
        try:
            yield
        except BaseException:
            # all ranks fail: none waits for another one, which may have ended, and the next load takes another group
            self._ranks.drop_services()
            self._end_next()
            raise
        self._end_next()
        thread.join(self._timeout.total_seconds())

    def _end_next(self) -> None:
        """Ends the service of the next rank, as no rank can send a message to itself."""
        import torch
        import torch.distributed as dist

        end = torch.tensor(msgspec.structs.astuple(_Request(-1)), dtype=torch.int64)
        with contextlib.suppress(RuntimeError):  # it has ended
            dist.send(end, (self._rank + 1) % self._size, self._group, 0)

    def _serve(self) -> None:
        import torch
        import torch.distributed as dist

        with ThreadPool(READERS, "treeckpt-answer") as pool:
            while True:
                numbers = torch.zeros(len(_Request.__struct_fields__), dtype=torch.int64)
                try:
                    dist.recv(numbers, None, self._group, 0)
                except RuntimeError:  # a rank has ended: those that wait for an answer learn it by the same error
                    return
                request = _Request(*numbers.tolist())
                if request.rank < 0:
                    return
                pool.submit(self._answer, request)

    def _answer(self, request: _Request) -> None:
        """Sends the bytes of a request, after a zero; or the text of the error, after its length in bytes."""
        import torch
        import torch.distributed as dist

        checkpoint, failed = self._checkpoints[request.checkpoint], 0
        data = aligned_buffer(request.nbytes, huge=True)
        try:
            name = checkpoint.index.file_list[request.file].name
            # several hosts may ask for it
            checkpoint.store.read_into(name, request.offset, data, shared=True)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".encode()[:ERROR_NBYTES]
            data, failed = memoryview(bytearray(text)), len(text)
            with contextlib.suppress(TreeckptError, OSError):
                failed *= -1 if checkpoint.is_replaced() else 1
        with contextlib.suppress(RuntimeError):  # the rank that asked has ended
            works = [
                dist.isend(part, request.rank, self._group, request.ticket * 2 + number)
                for number, part in enumerate((torch.tensor([failed], dtype=torch.int64), _as_tensor(data)))
            ]
            for work in filter(None, works):
                work.wait()

    def ask(self, source: _Source, checkpoint: int, url: str, offset: int, out: memoryview) -> None:
        """Fills memory with bytes of a shard that another rank sees.

        Raises:
            StoreError: it could not read them.
            Replaced: another save has replaced the checkpoint there.
            RankError: it does not answer.
        """
        import torch
        import torch.distributed as dist

        with self._lock:
            ticket = next(self._tickets)
        # ranks of one disk take turns, and so do its files
        owner = source.ranks[(self._rank + source.file) % len(source.ranks)]
        request = _Request(self._rank, ticket, checkpoint, source.file, offset, len(out))
        failed = torch.zeros(1, dtype=torch.int64)
        try:
            numbers = torch.tensor(msgspec.structs.astuple(request), dtype=torch.int64)
            dist.send(numbers, owner, self._group, 0)
            self._receive(failed, owner, ticket * 2)
            length = int(failed.item())
            data = memoryview(bytearray(abs(length))) if length else out
            self._receive(_as_tensor(data), owner, ticket * 2 + 1)
        except RuntimeError as error:
            raise unreachable(error, owner) from error
        if length < 0:
            raise Replaced(url, expected="one version of the checkpoint", found="another save in its place")
        if length:
            text = bytes(data).decode(errors="replace")
            hint = f"Look at the disk of rank {owner}"
            raise StoreError(url, expected=f"bytes of the file that rank {owner} sees", found=text, hint=hint)

    def _receive(self, tensor: Any, owner: int, tag: int) -> None:
        import torch.distributed as dist

        work = dist.irecv(tensor, owner, self._group, tag)
        assert work is not None, "this rank is in the group"
        work.wait(self._timeout)


def _as_tensor(data: memoryview) -> Any:
    """Returns a tensor of bytes in memory."""
    import torch

    return torch.frombuffer(memory_at(address_of(data), len(data)), dtype=torch.uint8)


def _seen_here(checkpoint: Checkpoint) -> _Seen | Exception | None:
    """Returns the version that this rank sees, or the error without one; None for files of another program."""
    if type(checkpoint) is not Checkpoint:
        return None
    try:
        index = checkpoint.index
        lacking = bool(index.disks) and len(_whole_here(checkpoint, index)) < len(index.file_list)
    except (TreeckptError, OSError) as error:
        return error
    return _Seen(index.created_ns, xxhash.xxh3_64_intdigest(checkpoint.index_bytes), lacking)


def _whole_here(checkpoint: Checkpoint, index: Index) -> list[int]:
    """Returns the numbers of the shards of an index that are here, with their sizes."""
    sizes = checkpoint.sizes
    return [n for n, file in enumerate(index.file_list) if sizes.get(file.name) == file.header + file.nbytes]


def _is_apart(seen: Sequence[_Seen | None]) -> bool:
    """Whether ranks differ in what they see of one checkpoint, or some of its files are elsewhere."""
    there = [one for one in seen if one is not None]
    return bool(there) and (len({one and one.digest for one in seen}) > 1 or any(one.lacking for one in there))


class LoadingRanks(msgspec.Struct, frozen=True):
    """The ranks that make one load together, and give each other files of their disks."""

    comm: Comm
    apart: bool = False
    """Whether they know that files lie on several disks; without it each goes by the index that it sees."""


def on_all_disks(
    checkpoints: Sequence[Checkpoint], ranks: LoadingRanks
) -> AbstractContextManager[Sequence[Checkpoint]]:
    """Returns `joined_disks`; the same checkpoints without other ranks, or where no file can be on another disk.

    A rank that sees no index cannot tell. It is told by the others: they are at the same point if theirs names disks.
    """
    directories = [each for each in checkpoints if each.store.traits.has_directory and not each.store.traits.in_process]
    if ranks.comm.size == 1 or not directories:
        return contextlib.nullcontext(checkpoints)
    if not ranks.apart:
        seen = [_seen_here(each) for each in directories]
        if not any(isinstance(one, Exception) for one in seen) and not any(
            each.index.disks for each in directories if type(each) is Checkpoint
        ):
            return contextlib.nullcontext(checkpoints)
    return joined_disks(checkpoints, ranks.comm)


@contextlib.contextmanager
def joined_disks(checkpoints: Sequence[Checkpoint], comm: Comm) -> Iterator[Sequence[Checkpoint]]:
    """Gives checkpoints through which every rank reads what any of them sees. Every rank has to call.

    They are the same ones where all ranks see one version of each, and all of its files. Where ranks see several
    versions, it is the one that was saved last.

    Args:
        checkpoints: as this rank sees them.

    Raises:
        CheckpointError: the ranks are not those of torch.distributed's default group.
        RankError: a rank failed, in the body too.
    """
    ranks = open_shared_read(comm, checkpoints)
    mine = [_seen_here(one) for one in checkpoints]
    fault = next((one for one in mine if isinstance(one, Exception)), None)
    message = [one if isinstance(one, _Seen) else None for one in mine]
    seen = ranks.settle(fault, message, step="looking for files", excused=True)
    apart = [n for n in range(len(checkpoints)) if _is_apart([seen[rank][n] for rank in range(comm.size)])]
    if not apart:
        yield checkpoints
        return
    own = list(checkpoints)
    for number in apart:
        own[number] = _agreed_version(ranks, checkpoints[number], [seen[rank][number] for rank in range(comm.size)])
    with ranks.together("listing"):
        here = [encode_runs(_whole_here(own[number], own[number].index)) for number in apart]
    lists = ranks.settle(None, here, step="listed")
    service, joined = FileService(ranks, comm.timeout, own), list(own)
    for at, number in enumerate(apart):
        there: dict[int, Runs] = {rank: lists[rank][at] for rank in lists}
        is_given = own[number].index_bytes is not vars(checkpoints[number]).get("index_bytes")
        given = own[number].index_bytes if is_given else None
        sources = _sources(own[number].index, there, comm.rank)
        store = JoinedStore(own[number].store, service, number, given, sources)
        joined[number] = Checkpoint(store, own[number].index)
        joined[number].index_bytes = own[number].index_bytes
    ranks.checkpoints = joined
    with service.running(), ranks.together("read"):
        yield joined


def _agreed_version(ranks: SharedRead, checkpoint: Checkpoint, seen: Sequence[_Seen | None]) -> Checkpoint:
    """Returns a checkpoint here under the index that was created last, of those that ranks see."""
    there = [(one.created_ns, one.digest, -rank) for rank, one in enumerate(seen) if one is not None]
    _, digest, first = max(there)
    holders = [rank for rank, one in enumerate(seen) if one is not None and one.digest == digest]
    if len(holders) == len(seen):
        return checkpoint
    data = ranks.share(-first, lambda: checkpoint.index_bytes)
    if ranks.rank in holders:
        return checkpoint
    # a rank that has the index has compared it with its files
    agreed = Checkpoint(checkpoint.store, decode_index(data, f"{checkpoint.url}/{INDEX_NAME}"), joined=True)
    agreed.index_bytes = data
    return agreed


def _sources(index: Index, there: Mapping[int, Runs], here: int) -> dict[str, _Source]:
    """Returns the shards that this rank does not see, and some other rank does, by name.

    Args:
        there: the numbers of the shards that each rank sees.
    """
    files = index.file_list
    lacking = np.ones(len(files), bool)
    lacking[decode_runs(there[here])] = False
    found: dict[int, list[int]] = {}
    for rank, numbers in there.items():
        decoded = decode_runs(numbers)
        for number in decoded[lacking[decoded]].tolist():
            found.setdefault(number, []).append(rank)
    return {
        files[number].name: _Source(number, files[number].header + files[number].nbytes, ranks)
        for number, ranks in found.items()
    }
