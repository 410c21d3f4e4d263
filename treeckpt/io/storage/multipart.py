"""Writers of objects: small ones in one request, large ones in parts while they are still being made.

An upload takes its parts in order, from the first byte on, so a large object's writer is `ordered`: its header comes
first, not last. A thread of its own takes the blocks as they come; no more of them wait here than `WAITING`, and no
more parts are on their way than the bucket allows, so memory stays bounded whatever the size of the object.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator

from ...errors import StoreError
from .bucket import Bucket

__all__ = ["WHOLE", "PartsWriter", "WholeWriter"]

WHOLE = 16 << 20
"""Bytes up to which an object is kept in memory and written in one request."""
WAITING = 2
PATIENCE = 600.0
"""Seconds for which a block waits for those before it."""


class _Aborted(Exception):
    """Ends an upload that is not wanted any more."""


class WholeWriter:
    """A small object: blocks are kept, and written at the commit."""

    ordered = False

    def __init__(self, bucket: Bucket, key: str, nbytes: int) -> None:
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


class PartsWriter:
    """A large object: blocks go out in order, while later ones are still being made."""

    ordered = True

    def __init__(self, bucket: Bucket, key: str, nbytes: int) -> None:
        self._bucket, self._key, self._nbytes = bucket, key, nbytes
        self._taken = 0
        self._ahead = threading.Condition()
        self._blocks: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._error: BaseException | None = None
        self._aborted = self._ended = False
        self._thread = threading.Thread(target=self._run, name="treeckpt-upload", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._bucket.upload(self._key, self._nbytes, self._stream())
        except BaseException as error:
            self._error = error
            with contextlib.suppress(queue.Empty):  # whoever waits to put something finds room, and the error
                while True:
                    self._blocks.get_nowait()
        finally:
            with self._ahead:
                self._ended = True
                self._ahead.notify_all()

    def _stream(self) -> Iterator[bytes]:
        while (block := self._blocks.get()) is not None:
            yield block
        if self._aborted or self._taken != self._nbytes:
            raise _Aborted(f"{self._key}: ended after {self._taken} of {self._nbytes} bytes")

    def write(self, offset: int, data: memoryview) -> None:
        self._wait_for_turn(offset)
        if len(data):
            self._put(bytes(data))  # a copy: the caller fills its buffer anew as soon as this returns
        with self._ahead:
            self._taken = offset + len(data)
            self._ahead.notify_all()

    def _wait_for_turn(self, offset: int) -> None:
        with self._ahead:
            waited_since, seen = time.monotonic(), self._taken
            while self._taken != offset and not self._ended:
                self._ahead.wait(min(1.0, PATIENCE))
                if self._taken != seen:
                    waited_since, seen = time.monotonic(), self._taken
                if offset < self._taken or time.monotonic() - waited_since > PATIENCE:
                    raise ValueError(f"{self._key}: a block at {offset} where {self._taken} is next")
        self._check()

    def _put(self, block: bytes | None) -> None:
        while True:
            self._check()
            with contextlib.suppress(queue.Full):
                self._blocks.put(block, timeout=0.2)
                return

    def _check(self) -> None:
        if self._ended:
            raise self._error or StoreError(self._key, expected="an upload under way", found="one that has ended")

    def commit(self) -> None:
        self._put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Has the parts that were sent thrown away."""
        if self._ended:
            return
        self._aborted = True
        with contextlib.suppress(Exception):
            self._put(None)
        self._thread.join()
