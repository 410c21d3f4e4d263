"""Writers of objects: small objects in one request, large objects by multipart upload.

obstore takes the parts of an upload in order, from the first byte on, so the writer of a large object is `ordered`: its
header is written first, not last. The upload runs in a thread of its own while later blocks are still being produced.
Blocks are sent from where they are, without a copy; at most `WAITING` of them are queued.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

from ..._threads import start_thread
from ...errors import StoreError
from .bucket import ObjectBucket

SINGLE_PUT_LIMIT = 16 << 20
"""Bytes up to which an object is kept in memory and written in one request."""
WAITING = 2
"""Blocks in the queue, at most."""


class _Aborted(Exception):
    """Ends an upload that was aborted."""


class SinglePutWriter:
    """Writes a small object: collects its blocks and writes them in `commit`."""

    ordered = False

    def __init__(self, bucket: ObjectBucket, key: str, nbytes: int) -> None:
        self._bucket, self._key = bucket, key
        self._data: bytearray | None = bytearray(nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        assert self._data is not None, "not after the end"
        if offset + len(data) > len(self._data):
            raise ValueError(f"{self._key}: write of {len(data)} bytes at {offset} past {len(self._data)}")
        self._data[offset : offset + len(data)] = data

    def commit(self) -> None:
        assert self._data is not None, "not after the end"
        self._bucket.put(self._key, bytes(self._data), replace=False)
        self._data = None

    def abort(self) -> None:
        self._data = None


class MultipartWriter:
    """Writes a large object: uploads its blocks in order while later ones are still being produced.

    A block must stay as it is until nothing else refers to its memory any more.
    """

    ordered = True

    def __init__(self, bucket: ObjectBucket, key: str, nbytes: int) -> None:
        self._bucket, self._key, self._nbytes = bucket, key, nbytes
        self._taken = 0
        self._blocks: queue.Queue[memoryview | None] = queue.Queue(WAITING)
        self._copies: list[memoryview] = []
        """What is sent at the end, where no thread can be started: as much memory as the object."""
        self._error: BaseException | None = None
        self._aborted = False
        self._ended = threading.Event()
        """Waited for in place of the end of the thread: an interrupted `Thread.join` takes a running one for ended."""
        self._in_thread = start_thread(self._run, "treeckpt-upload") is not None

    def _run(self) -> None:
        try:
            self._bucket.upload(self._key, self._nbytes, self._stream())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _stream(self) -> Iterator[memoryview]:
        while self._copies:
            yield self._copies.pop(0)
        while (block := self._blocks.get()) is not None:
            yield block
            del block  # its memory may be waited for before the next block comes
        if self._aborted or self._taken != self._nbytes:
            raise _Aborted(f"{self._key}: ended after {self._taken} of {self._nbytes} bytes")

    def write(self, offset: int, data: memoryview) -> None:
        if offset != self._taken:
            raise ValueError(f"{self._key}: a block at {offset} where {self._taken} is next")
        if self._in_thread:
            self._put(data)
        else:
            self._copies.append(memoryview(bytes(data)))
        self._taken += len(data)

    def _put(self, block: memoryview | None) -> None:
        while True:
            self._check()
            with contextlib.suppress(queue.Full):
                self._blocks.put(block, timeout=0.2)
                return

    def _check(self) -> None:
        if self._ended.is_set():
            raise self._error or StoreError(self._key, expected="an upload under way", found="one that has ended")

    def commit(self) -> None:
        self._put(None)
        if not self._in_thread:
            self._run()
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Aborts the upload: the service discards the parts that were sent."""
        if self._ended.is_set() or not self._in_thread:
            return
        self._aborted = True
        with contextlib.suppress(Exception):
            self._put(None)
        self._ended.wait()
