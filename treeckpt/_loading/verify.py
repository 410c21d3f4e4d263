"""Verifies a checkpoint against its checksums and its index, and rebuilds a lost index.

`survey_shard` finds all damaged bytes of a shard; `_io.storage.shard_reader` stops at the first of them. What could not
be read, for want of descriptors, say, or because a disk failed, is told apart from damage (`_io.os_errors`).

`LeafMoments` computes the statistics of every array from the bytes that are compared, in whatever order they are read.
Its memory follows the number of arrays and chunks. Of an element that lies in two reads, the first part is kept until
the second one comes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, lru_cache, partial

import msgspec
import numpy as np

from .._core.format.byte_map import BadBytes, damaged_leaves, disk_text, locate_chunks
from .._core.format.files import stored_name
from .._core.format.index import INDEX_NAME, rebuild
from .._core.format.records import AliasRecord, Disk, File, Index, PerRankArrays
from .._core.format.shard_header import ShardHeader, decode_header
from .._core.format.timings import timings_name
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region
from .._inspect.numbers import Moments, merged, moments_of, placed
from .._io.comm.collective import all_gather
from .._io.comm.comm import Comm
from .._io.os_errors import hint_for, read_failure
from .._io.storage.checkpoint import (
    Checkpoint,
    OnShardsRead,
    header_here,
    read_sidecar,
    read_timings,
    rebuild_from_shards,
    shared_files,
)
from .._io.storage.deletions import index_state, legible_save_id, list_leftovers
from .._io.storage.local_files import too_short
from .._io.storage.memory import aligned_buffer
from .._io.storage.plain_names import file_checksum
from .._io.storage.published_index import replace_index
from .._io.storage.shard_reader import ArrivingBlocks, OpenedShard, check_missing, elsewhere, matches, open_shard
from .._io.storage.store import FETCH_MEMORY, Store, for_each
from .._io.timing import Recorder
from .._threads import ThreadPool
from ..errors import CheckpointError, CheckpointExists, StoreError, TreeckptError
from ..reports import Leftover, Problem, VerifyReport

_log = logging.getLogger("treeckpt")
SHOWN_LEAVES = 5
READ_NBYTES = 8 << 20
"""Bytes that are read at a time."""

Survey = tuple[OpenedShard | None, list[BadBytes]]
"""A shard, None if its header is bad or could not be read, and its bad bytes."""


def verify_checkpoint(
    checkpoint: Checkpoint,
    *,
    on_shard: Callable[[Sequence[Problem]], object] | None = None,
    moments: LeafMoments | None = None,
) -> VerifyReport:
    """See `treeckpt.verify`.

    Args:
        on_shard: takes the problems of each shard, as soon as it was compared.
        moments: takes all bytes that are compared.

    Raises:
        StoreError: the index or a listing could not be read, or an object store cannot be reached, or refuses.
    """
    recorder = Recorder(0)
    checkpoint = checkpoint.own()
    index, sizes, store = checkpoint.index, checkpoint.sizes, checkpoint.store
    checkpoint.check_against_files()
    problems, unread, notes = list[Problem](), list[Problem](), list[str]()
    headers: list[tuple[int, ShardHeader]] = []
    nbytes = 0
    files, away = _files_here(index, sizes)
    for file, (opened, bad) in zip(
        files, survey_shards(store, index, files, sizes, keep=True, moments=moments), strict=True
    ):
        own = [_problem(index, part) for part in bad if not part.unread]
        problems += own
        unread += [_problem(index, part) for part in bad if part.unread]
        notes += [_advice(part) for part in bad if part.unread]
        if on_shard is not None:
            on_shard(own)
        if opened is not None and not bad:
            nbytes += file.nbytes
            try:
                header = decode_header(opened.header, f"{store.url}/{file.name}")
                headers.append((file.header, header_here(index, file, header)))
            except TreeckptError as error:
                problems.append(Problem(file.name, str(error), 0, file.header))
    if not problems and not unread and not away and (why := _index_difference(checkpoint, headers)):
        problems.append(Problem(INDEX_NAME, why))
    for problem, failure in _problems_of_others(checkpoint):
        (unread if failure else problems).append(problem)
    notes += _copies_that_differ(checkpoint)
    left: tuple[Leftover, ...] = ()
    try:
        left = list_leftovers(checkpoint.place, checkpoint.place.sizes(), known=index.save_id)
    except (TreeckptError, OSError) as error:
        notes.append(f"Whether dead saves have left files there could not be found out: {error}")
    return VerifyReport(
        store.url,
        len(files),
        nbytes,
        tuple(problems),
        recorder.seconds,
        leftovers=left,
        unread=tuple(unread),
        notes=tuple(dict.fromkeys(notes)),
        elsewhere=tuple(disk_text(index, disk) for disk in away),
    )


def _files_here(index: Index, present: Container[str]) -> tuple[Sequence[File], tuple[Disk, ...]]:
    """Returns the shards that belong on this disk, and the disks of other hosts, of a node-local checkpoint.

    Where no shard is here, no disk can be told to be this one: then all belong here.
    """
    away = index.disks_elsewhere(present)
    if not away or len(away) == len(index.disks):
        return index.file_list, ()
    others = {file.name for disk in away for file in index.disk_files(disk)}
    return [file for file in index.file_list if file.name not in others], away


def _problem(index: Index, bad: BadBytes) -> Problem:
    leaves = tuple(sorted({d.path for damaged in damaged_leaves(index, [bad]).values() for d in damaged}))
    more = f" and {len(leaves) - SHOWN_LEAVES} more" if len(leaves) > SHOWN_LEAVES else ""
    of = f" of {', '.join(path or '<root>' for path in leaves[:SHOWN_LEAVES])}{more}" if leaves else ""
    return Problem(bad.file, f"bytes {bad.start}:{bad.stop}{of}: {bad.why}", bad.start, bad.stop, leaves)


def _index_difference(checkpoint: Checkpoint, headers: Sequence[tuple[int, ShardHeader]]) -> str:
    """Returns how the index differs from what the headers of all shards describe; empty if it does not."""
    try:
        # a shard does not say on which of several disks it lay, nor what was compared with the save before
        index, references = checkpoint.index, checkpoint.index.references
        by_part = {(file.rank, file.part): file for file in index.file_list}
        if references is not None:
            references = msgspec.structs.replace(references, stayed=())
        described = msgspec.structs.replace(index, disks=(), references=references)
        own = [pair for pair in headers if not by_part[pair[1].rank, pair[1].part].directory]
        same = rebuild(headers, checkpoint.url, shared=shared_files(own, checkpoint.url)) == described
    except CheckpointError as error:
        return str(error)
    return "" if same else "it is not the index that the shards describe"


def _advice(bad: BadBytes) -> str:
    """Returns what to do about bytes that could not be read."""
    return hint_for(OSError(getattr(errno, bad.unread, 0), bad.why))


def _problems_of_others(checkpoint: Checkpoint) -> Iterator[tuple[Problem, str]]:
    """Yields what is wrong with the timings and sidecar files, and `read_failure` of its error."""
    store, index = checkpoint.store, checkpoint.index
    try:
        read_timings(store, index.save_id)
    except (TreeckptError, OSError) as error:
        yield Problem(timings_name(index.save_id), str(error)), read_failure(error)
    for sidecar in index.sidecars:
        name = stored_name(index.save_id, sidecar.name)
        size = checkpoint.sizes.get(name)
        try:
            if size is not None and size > sidecar.nbytes:
                yield Problem(name, f"the file goes on after byte {sidecar.nbytes}", sidecar.nbytes, size), ""
            read_sidecar(store, index, sidecar.name)
        except (TreeckptError, OSError) as error:
            yield Problem(name, str(error), 0, sidecar.nbytes), read_failure(error)


def _copies_that_differ(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields which files under the plain names of sidecar files are not what was saved: the checkpoint needs none."""
    store, sidecars = checkpoint.store, checkpoint.index.sidecars
    entries = store.entries() if sidecars else {}
    for sidecar in sidecars:
        entry = entries.get(sidecar.name)
        if entry is None:
            yield f"{sidecar.name}, a copy of the file that was saved, is missing: a clean-up makes it again"
        elif entry.nbytes != sidecar.nbytes or file_checksum(store, sidecar.name, entry) != sidecar.xxh3:
            yield f"{sidecar.name} is not as it was saved; treeckpt.read_file reads what was"


def publish_rebuilt(store: Store, *, replace: bool, on_read: OnShardsRead | None = None) -> Index:
    """See `treeckpt.rebuild_index`."""
    if not replace and INDEX_NAME in store.sizes():
        raise CheckpointExists(
            store.url, expected=f"no {INDEX_NAME}", found="one", hint="Pass replace=True to make it anew"
        )
    before = index_state(store)
    try:  # the save of the index that is there: a later one beside it may never have been committed
        index = rebuild_from_shards(store, save_id=legible_save_id(before), on_read=on_read)
    except CheckpointError:
        # without a save id any whole save was tried already
        if legible_save_id(before) is None:
            raise
        index = rebuild_from_shards(store, on_read=on_read)
    if aside := replace_index(store, before, index):
        store.delete(aside)
    return index


# damaged bytes -------------------------------------------------------------------------------------------------------
def survey_shards(
    store: Store,
    index: Index,
    files: Sequence[File],
    sizes: Mapping[str, int],
    *,
    keep: bool = False,
    moments: LeafMoments | None = None,
) -> Iterable[Survey]:
    """Compares every checksum of several shards, and gives what `survey_shard` returns for each of them, in order.

    A store that fetches has many requests in flight, over all shards.
    """
    if store.traits.far:
        with contextlib.suppress(CheckpointError, OSError):
            return _survey_fetched(store, index, files, sizes, keep, moments)
        if moments is not None:
            # what the failed fetch added would be counted twice
            moments.clear()
    # or a range cannot be read: this way finds out which
    return (survey_shard(store, index, file, sizes.get(file.name), keep=keep, moments=moments) for file in files)


def survey_shard(
    store: Store,
    index: Index,
    file: File,
    size: int | None,
    *,
    keep: bool = False,
    moments: LeafMoments | None = None,
) -> Survey:
    """Compares every checksum of a shard.

    Args:
        size: the file's, in bytes; None where it is missing.
        keep: as for `open_shard`.
        moments: as for `verify_checkpoint`.

    Returns:
        The shard, and its bad bytes by where they start. Without a header that can be believed there is no shard, and
        all of the file is bad.
    """
    opened, bad = _open(store, index, file, size, keep)
    if opened is None or size is None:
        return opened, bad
    there = min(size, file.header + file.nbytes) - file.header
    return opened, _joined([*_bad_blocks(store, opened, there, moments), *bad])


def _open(store: Store, index: Index, file: File, size: int | None, keep: bool) -> Survey:
    """Opens a shard; returns it, and what its header and its length show to be bad."""
    whole = file.header + file.nbytes
    if size is None:
        try:
            check_missing(store, file.name)
        except StoreError as error:
            return None, [BadBytes(file.name, 0, whole, f"{error.found}. {error.hint}", read_failure(error))]
        disk = elsewhere(store, index, file)
        where = f" in {file.directory} beside this directory, which shares it" if file.directory else ""
        why = f"the file is missing{where}" if disk is None else f"the file was written to {disk}, and is not here"
        return None, [BadBytes(file.name, 0, whole, why)]
    try:
        opened = open_shard(store, index, file, size, whole=False, keep=keep)
    except CheckpointError as error:
        why = f"no header as it was written: expected {error.expected}, found {error.found}"
        return None, [BadBytes(file.name, 0, whole, why)]
    except OSError as error:
        return None, [BadBytes(file.name, 0, whole, f"the header cannot be read: {error}", read_failure(error))]
    if size < whole:
        return opened, [BadBytes(file.name, size, whole, f"the file ends at byte {size}")]
    if size > whole:
        return opened, [BadBytes(file.name, whole, size, f"the file goes on after byte {whole}")]
    return opened, []


def _joined(parts: Iterable[BadBytes]) -> list[BadBytes]:
    """Joins bad bytes that follow each other and have the same cause."""
    joined: list[BadBytes] = []
    for bad in parts:
        if joined and joined[-1].stop == bad.start and joined[-1].why == bad.why:
            bad = BadBytes(bad.file, joined.pop().start, bad.stop, bad.why, bad.unread)
        joined.append(bad)
    return joined


def _survey_fetched(
    store: Store,
    index: Index,
    files: Sequence[File],
    sizes: Mapping[str, int],
    keep: bool,
    moments: LeafMoments | None,
) -> list[Survey]:
    """Surveys shards of a store that fetches; raises what a request raised."""
    assert store.traits.far, "the caller has looked"
    surveys = for_each(store, lambda file: _open(store, index, file, sizes.get(file.name), keep), files)
    parts = [
        (opened, start, min(start + _step(opened), opened.file.nbytes))
        for opened, bad in surveys
        if opened is not None and not bad
        for start in range(0, opened.file.nbytes, _step(opened))
    ]
    """The shard of each request, and where in its data area the request begins and ends."""
    by_file: dict[str, list[BadBytes]] = {file.name: [] for file in files}
    arriving: dict[int, ArrivingBlocks] = {}

    def compare(number: int, offset: int, data: memoryview, size: int | None) -> None:
        opened, start, stop = parts[number]
        position, nbytes = opened.file.header + start, stop - start
        if size is not None and size < position + nbytes:
            url = f"{store.url}/{opened.file.name}"
            raise too_short(url, position, nbytes, max(size - position, 0), what="object")
        if not offset:
            arriving[number] = ArrivingBlocks(opened, start, partial(_add_unlike, opened, by_file[opened.file.name]))
        arriving[number].add(data)
        if moments is not None:
            moments.add(opened.file, start + offset, data)
        if offset + len(data) == nbytes:
            del arriving[number]

    ranges = [(opened.file.name, opened.file.header + start, stop - start) for opened, start, stop in parts]
    store.fetch(ranges, compare, memory=FETCH_MEMORY)
    for file, (opened, bad) in zip(files, surveys, strict=True):
        if opened is not None and bad:  # of another length
            by_file[file.name] += _bad_blocks(store, opened, min(sizes[file.name] - file.header, file.nbytes), None)
    return [
        (opened, _joined([*sorted(by_file[file.name], key=lambda bad: bad.start), *bad]))
        for file, (opened, bad) in zip(files, surveys, strict=True)
    ]


def _add_unlike(opened: OpenedShard, bad: list[BadBytes], start: int, nbytes: int, checksum: int) -> None:
    if checksum != opened.hashes[start // opened.block]:
        bad.append(_unlike(opened, start, nbytes))


def survey(checkpoint: Checkpoint, comm: Comm) -> tuple[BadBytes, ...]:
    """Returns all bytes of a checkpoint's shards that differ from what was saved. Every rank has to call.

    The ranks divide the shards among them, and exchange what they found. Bytes that a disk fails to read (EIO) are
    among them, so that what is intact elsewhere can be loaded.

    Raises:
        StoreError: bytes could not be read for another reason, which says nothing of them.
        CheckpointNotFound, CorruptError, FormatError: there is no index that can be read.
        RankError: another rank failed.
    """

    def own() -> list[BadBytes]:
        checkpoint.check_against_files()
        store, index, sizes = checkpoint.store, checkpoint.index, checkpoint.sizes
        files = index.file_list[comm.rank :: comm.size]
        return [bad for _, parts in survey_shards(store, index, files, sizes) for bad in parts]

    damaged = [bad for part in all_gather(comm, f"load {checkpoint.url}", own, list[BadBytes]) for bad in part]
    for bad in damaged:
        if bad.unread not in ("", "EIO"):
            where = f"{checkpoint.url}/{bad.file}"
            raise StoreError(where, expected="bytes to compare", found=bad.why, hint=_advice(bad))
    return tuple(sorted(damaged, key=lambda bad: (bad.file, bad.start)))


def _bad_blocks(store: Store, opened: OpenedShard, there: int, moments: LeafMoments | None) -> Iterator[BadBytes]:
    """The blocks that differ from their checksums, of a data area with its first `there` bytes left."""
    file = opened.file
    for start, data, failed in _read_steps(store, opened, there):
        all_read = True
        for begin in range(start, start + len(data), opened.block):
            part = data[begin - start : begin - start + opened.block]
            # a read of many blocks fails for one of them: each is read alone to find it
            if failed and (error := _error_of(store, opened, begin, part)):
                all_read = False
                first, why = file.header + begin, f"they cannot be read: {error}"
                yield BadBytes(file.name, first, first + len(part), why, read_failure(error))
            elif not matches(opened, begin, part):
                yield _unlike(opened, begin, len(part))
        if moments is not None:
            moments.add(file, start, data)
        # a disk that reads only at the second try is worth a warning, and no damage
        if failed and all_read:
            first = file.header + start
            where = f"{store.url}/{file.name}: bytes {first}:{first + len(data)}"
            _log.warning("%s: only a second try could read them: %s", where, failed)


def _read_steps(store: Store, opened: OpenedShard, there: int) -> Iterator[tuple[int, memoryview, Exception | None]]:
    """Reads the first `there` bytes of a data area; the next bytes are read while the last ones are compared.

    Yields:
        Where the bytes start, the bytes, and the error of the read.
    """
    step = _step(opened)
    parts = [(start, min(step, there - start)) for start in range(0, max(there, 0), step)]
    # two: one is compared while the other is filled
    buffers = [aligned_buffer(min(step, there), huge=True) for _ in parts[:2]]
    with ThreadPool(1, "treeckpt-verify") as reader:

        def read(number: int) -> tuple[int, memoryview, Future[Exception | None]]:
            start, nbytes = parts[number]
            data = buffers[number % 2][:nbytes]
            return start, data, reader.submit(_error_of, store, opened, start, data)

        reads = map(read, range(len(parts)))
        coming = next(reads, None)
        while coming is not None:
            start, data, error = coming
            failed = error.result()
            coming = next(reads, None)
            yield start, data, failed


def _step(opened: OpenedShard) -> int:
    """Returns the bytes of a shard that are read at a time: whole blocks with checksums."""
    return max(READ_NBYTES // opened.block, 1) * opened.block


def _unlike(opened: OpenedShard, start: int, nbytes: int) -> BadBytes:
    """Returns the block that begins at `start` in the data area as bad bytes."""
    first = opened.file.header + start
    return BadBytes(opened.file.name, first, first + nbytes, "they differ from their checksum")


def _error_of(store: Store, opened: OpenedShard, start: int, out: memoryview) -> Exception | None:
    """Returns the error of a read; None if it succeeds."""
    try:
        store.read_into(opened.file.name, opened.file.header + start, out)
    except (CheckpointError, OSError) as error:
        return error
    return None


THREADS = 2
"""Threads that compute, beside one that reads and compares: a disk is rarely faster than they are."""
SHARE = 1 << 20
"""Bytes that one thread takes, at least."""
Extents = tuple[list[int], list[int], list[int]]
"""Where each chunk of a shard starts in the data area, where it ends, and the number of its leaf; by offset."""


class LeafMoments:
    """The statistics of the arrays of an index; under `PerRank` those of all ranks together."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._pool = ThreadPool(THREADS, "treeckpt-moments")
        self._found: dict[int, Moments | None] = {}
        self._parts: dict[tuple[str, int], tuple[bytearray, int]] = {}
        """The bytes of each element of which some are missing, and how many are there, by file and offset."""
        # asked for arrays with elements that are not finite only
        self._chunks = lru_cache(64)(self._chunks_of)

    @cached_property
    def _extents(self) -> dict[str, Extents]:
        by_file: dict[str, list[tuple[int, int, int]]] = {}
        for leaf in self._index.entries:
            if leaf.spec is None or isinstance(leaf.record, AliasRecord):
                continue
            self._found[leaf.number] = moments_of(np.empty(0, np.uint8), leaf.spec.dtype)
            try:
                chunks = locate_chunks(self._index, leaf)
            except TreeckptError:  # the verification says so
                return {}
            for chunk in chunks:
                header = chunk.file.header
                by_file.setdefault(chunk.file.name, []).append((chunk.start - header, chunk.stop - header, leaf.number))
        columns = {name: zip(*sorted(rows), strict=True) for name, rows in by_file.items()}
        return {name: (list(starts), list(stops), list(numbers)) for name, (starts, stops, numbers) in columns.items()}

    def clear(self) -> None:
        """Forgets what was added: everything is read again."""
        self._found, self._parts = {}, {}
        vars(self).pop("_extents", None)

    def add(self, file: File, start: int, data: memoryview) -> None:
        """Takes bytes of a shard, each of which may be given only once.

        Args:
            start: where they start in the data area.
        """
        with self._lock:
            extents = self._extents.get(file.name, ([], [], []))
        parts = range(0, len(data), max(-(-len(data) // THREADS), SHARE))
        step = parts.step
        for done in self._pool.map(
            lambda low: self._add(file.name, extents, start + low, data[low : low + step]), parts
        ):
            assert done is None, "an error is raised here"

    def _add(self, name: str, extents: Extents, start: int, data: memoryview) -> None:
        starts, stops, numbers = extents
        stop = start + len(data)
        for i in range(bisect_right(stops, start), len(starts)):
            if starts[i] >= stop:
                break
            low, high = max(start, starts[i]), min(stop, stops[i])
            self._add_piece(numbers[i], name, starts[i], low, data[low - start : high - start])

    def _add_piece(self, number: int, name: str, first: int, start: int, piece: memoryview) -> None:
        """Adds bytes of one chunk.

        Args:
            first: where the chunk starts in the data area.
            start: where the bytes start there.
        """
        spec = self._index.entries[number].spec
        assert spec is not None, "a chunk is one of an array"
        width = dtype_of(spec.dtype).itemsize
        inside = (start - first) % width
        head = min(-inside % width, len(piece))
        tail = (len(piece) - head) % width
        whole = piece[head : len(piece) - tail]
        elements: list[tuple[int, memoryview | bytearray]] = [(start + head, whole)] if len(whole) else []
        elements += self._join(name, start - inside, width, inside, piece[:head])
        elements += self._join(name, start + len(piece) - tail, width, 0, piece[len(piece) - tail :])
        for begin, data in elements:
            moments = moments_of(np.frombuffer(data, np.uint8), spec.dtype)
            if moments is not None:
                before = (begin - first) // width
                moments = placed(moments, lambda at, before=before: self._position(number, name, first, before + at))
            with self._lock:
                known = self._found[number]
                self._found[number] = None if known is None or moments is None else merged(known, moments)

    def _position(self, number: int, name: str, first: int, at: int) -> int:
        """Returns the position in its array of element `at` of the chunk that starts at `first` of a file."""
        spec = self._index.entries[number].spec
        assert spec is not None, "a chunk is one of an array"
        nth, region = self._chunks(number)[name, first]
        index = [int(low + n) for low, n in zip(region.offset, np.unravel_index(at, region.shape), strict=True)]
        for n, size in zip(index, spec.shape, strict=True):
            nth = nth * size + n
        return nth

    def _chunks_of(self, number: int) -> dict[tuple[str, int], tuple[int, Region]]:
        """Returns the regions of an array by file and start; of an array for each rank, with the number of the rank."""
        leaf = self._index.entries[number]
        alone = isinstance(leaf.record, PerRankArrays)
        return {
            (chunk.file.name, chunk.start - chunk.file.header): (nth if alone else 0, chunk.region)
            for nth, chunk in enumerate(locate_chunks(self._index, leaf))
            if chunk.start < chunk.stop
        }

    def _join(
        self, name: str, element: int, width: int, first: int, piece: memoryview
    ) -> list[tuple[int, memoryview | bytearray]]:
        """Adds bytes of an element from its byte `first` on; returns where it starts, and it, if it is complete now."""
        if not len(piece):
            return []
        with self._lock:
            data, there = self._parts.pop((name, element), (bytearray(width), 0))
            data[first : first + len(piece)] = piece
            if there + len(piece) == width:
                return [(element, data)]
            self._parts[name, element] = data, there + len(piece)
            return []

    def found(self) -> dict[int, Moments]:
        """Returns the statistics of all arrays of numbers, by leaf number."""
        return {number: moments for number, moments in sorted(self._found.items()) if moments is not None}
