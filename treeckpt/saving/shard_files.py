"""Writes the shards of a rank: one after the other to a disk, several at a time to an object store.

On a disk the data is written first and hashed meanwhile, and the header, with the checksums, last; `shard_upload` says
how a large shard goes to an object store.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial
from threading import Event

import msgspec

from ..core.format.shard_header import ShardHeader, encode_header, with_hashes
from ..core.planning.save_plan import FilePlan
from ..errors import CheckpointError, StoreError
from ..io.storage.memory import aligned_buffer
from ..io.storage.store import Store, Writer
from ..io.timing import Recorder
from ..threads import ThreadPool
from .shard_stream import BUFFER, BufferedWriter, Pipeline, ShardSource, WriteCallbacks, write_data
from .shard_upload import COPIES, ShardUpload

BUFFER_COUNT = 4
WRITE_THREADS = 3
SENDINGS = 3
"""How often a shard is sent, at most, where the store refuses a part of an upload for a reason that passes."""
UPLOADS = 4
"""Shards that are sent at a time: the checksums of one, and the ends of others, cost no time of the network."""


class ShardFile(msgspec.Struct, frozen=True):
    """One shard to write: its entries, its name, and a header that lacks only the checksums."""

    plan: FilePlan
    name: str
    header: ShardHeader


class _Files(msgspec.Struct, frozen=True):
    """What all shards of a save are written with."""

    store: Store
    source: ShardSource
    recorder: Recorder
    pipeline: Pipeline
    at_once: int
    callbacks: WriteCallbacks


def write_files(
    store: Store,
    files: Sequence[ShardFile],
    source: ShardSource,
    recorder: Recorder,
    callbacks: WriteCallbacks,
) -> list[tuple[int, int]]:
    """Writes a rank's shards, durably; returns (bytes of the header, bytes of the data) of each file."""
    huge = any(file.plan.nbytes >= BUFFER for file in files)
    free: queue.Queue[memoryview] = queue.Queue()
    for _ in range(BUFFER_COUNT):
        free.put(aligned_buffer(BUFFER, huge=huge))
    sends = store.traits.far
    at_once = min(UPLOADS, len(files)) if sends else 1
    headers = [encode_header(file.header) for file in files]
    sizes = [(len(header), file.plan.nbytes) for header, file in zip(headers, files, strict=True)]
    with ThreadPool(WRITE_THREADS, "treeckpt-write") as pool:
        given_up = Event()
        callbacks = _ending(callbacks, given_up)
        pipeline = Pipeline(pool, free, callbacks.on_written)
        write = partial(_write_file, _Files(store, source, recorder, pipeline, at_once, callbacks))
        if sends and files:  # in threads also one shard: a request cannot be interrupted, the wait for it can
            with recorder.span("write", sum(map(sum, sizes))):
                calls = [partial(write, file, header) for file, header in zip(files, headers, strict=True)]
                _call_side_by_side(calls, at_once, given_up, callbacks.on_interrupt)
            return sizes
        for file, header, size in zip(files, headers, sizes, strict=True):
            with recorder.span("write", sum(size)):
                write(file, header)
    return sizes


class _GivenUp(Exception):
    """Ends the writing of a shard where another one failed, or the save was interrupted."""


def _ending(callbacks: WriteCallbacks, given_up: Event) -> WriteCallbacks:
    """Returns callbacks that raise `_GivenUp` once the event is set."""

    def check() -> None:
        if given_up.is_set():
            raise _GivenUp

    def before_first() -> None:
        callbacks.before_first()
        check()

    def on_written(nbytes: int) -> None:
        check()
        callbacks.on_written(nbytes)

    return WriteCallbacks(before_first, callbacks.before_commit, on_written, callbacks.on_interrupt)


def _call_side_by_side(
    calls: Sequence[Callable[[], None]],
    at_once: int,
    given_up: Event,
    on_interrupt: Callable[[BaseException], None],
) -> None:
    """Calls functions in threads; sets the event, and raises, at the first error or interrupt."""
    with ThreadPool(at_once, "treeckpt-shard") as pool:
        try:
            pending = [pool.submit(call) for call in calls]
            for future in wait(pending, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException as error:
            given_up.set()
            if not isinstance(error, Exception):
                on_interrupt(error)
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write_file(files: _Files, file: ShardFile, header: bytes) -> None:
    for tried in range(1, SENDINGS + 1):
        writer = files.store.create(file.name, len(header) + file.plan.nbytes)
        try:
            if writer.ordered:
                _upload(files, file, writer, header)
            else:
                files.callbacks.before_first()
                _write_in_place(files, file, writer, header)
            return
        except BaseException as error:
            writer.abort()
            # a bucket repeats its requests, but no longer has what it has sent of an upload
            again = isinstance(error, StoreError) and error.refused_once and writer.ordered
            if not again or tried == SENDINGS:
                raise


def _write_in_place(files: _Files, file: ShardFile, writer: Writer, header: bytes) -> None:
    data = BufferedWriter(writer, len(header), file.plan.nbytes, files.pipeline)
    hashes = write_data(data, file.plan, files.source, files.recorder)
    head = aligned_buffer(len(header))
    head[:] = with_hashes(header, hashes)
    writer.write(0, head)
    files.callbacks.before_commit()
    start = files.recorder.now()
    writer.commit()
    files.recorder.add("fsync", start, files.recorder.now())


def _upload(files: _Files, file: ShardFile, writer: Writer, header: bytes) -> None:
    copies = COPIES // files.at_once
    upload = ShardUpload(file.plan, files.source, files.recorder, files.pipeline.pool, copies, files.callbacks)
    try:
        stayed = upload.send(writer, header)
    except StoreError:
        files.callbacks.on_written(-upload.counted)
        raise
    if not stayed:
        files.store.delete(file.name)
        raise CheckpointError(
            f"{files.store.url}/{file.name}",
            expected="arrays that stay as they are while they are being saved",
            found="other bytes than a moment ago",
            hint="Wait for the save before anything trains on, or use save_async",
        )
