"""Runs and checkpoints in object stores: `s3://bucket/run/step_00000100`, `gs://`, `az://`, and what fsspec knows.

A directory is a prefix: it exists as long as it has an object. Shards are uploaded in parts and become visible when
complete; the index is published by a conditional write, so of several saves to one path exactly one is committed. That
a store has conditional writes is found out by the first save (see `conditions`). A crash leaves parts of an upload
that never ends: they cost money until the bucket's rule for incomplete multipart uploads removes them (obstore cannot
list them). A run is listed by pages of its objects, not directory by directory.

Small objects are written in one request, large objects by multipart upload. obstore takes the parts of an upload in
order, from the first byte on, so the writer of a large object is `ordered`: its header is written first, not last. The
upload runs in a thread of its own while later blocks are still being produced. Blocks are sent from where they are,
without a copy; at most `MAX_QUEUED_BLOCKS` of them are queued.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..._threads import start_thread
from ...errors import CorruptError, StoreError
from .bucket import ObjectBucket, ObjectListing, RangeResponse, split_url
from .fsspec import open_fsspec
from .local_files import too_short
from .local_store import OBJECT_SCHEMES, check_path
from .memory import copy_bytes
from .obstore import ObstoreBucket
from .requests_in_flight import RangeFetcher, RequestDepth
from .store import (
    Consume,
    DirectoryEntry,
    FileRange,
    PickledCall,
    RunStore,
    Store,
    StoreTraits,
    VersionTag,
    Writer,
    exists_error,
)
from .wrapped_store import ListedStore

SINGLE_PUT_LIMIT = 16 << 20
"""Bytes up to which an object is kept in memory and written in one request."""
MAX_QUEUED_BLOCKS = 2
"""Blocks of an upload that wait in its queue, at most."""


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
        self._blocks: queue.Queue[memoryview | None] = queue.Queue(MAX_QUEUED_BLOCKS)
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
            # with a limit, as an upload that has failed takes no more blocks: then `_check` raises its error
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


HEAD = 64 << 10
"""Bytes fetched by the first small read at the beginning of an object: a header comes together with its length."""
HEADS_NBYTES = 16 << 20
"""Bytes of such beginnings that are kept, at most: four times those of as many objects as are read at a time."""
_ODD = re.compile(r"[\x00-\x1f\x7f/]")
"""What no plain name contains: control characters and slashes."""
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "HOME", "SSL_CERT_FILE")
"""The beginnings of the variables that a writer process gets, in which credentials and certificates stand."""


def open_bucket(url: str, options: Mapping[str, Any]) -> tuple[ObjectBucket, str]:
    """Opens the bucket of a URL; returns it with the key that the URL names.

    Raises:
        StoreError: the URL's scheme is not known, its library is not installed, or an option is wrong.
        CheckpointError: it contains what no URL can.
    """
    check_path(url)
    if url.partition("://")[0] in OBJECT_SCHEMES:
        root, key = split_url(url)
        return ObstoreBucket(root, options), key
    return open_fsspec(url, options)


class ObjectStore(Store):
    """The files of a checkpoint as objects under a prefix.

    >>> report = tc.save(tc.ObjectStore("memory://bucket/step_00000001"), {"step": 1}, overwrite=True)
    >>> tc.load("memory://bucket/step_00000001")
    {'step': 1}

    Args:
        url: `s3://bucket/run/step_00000100` and the like.
        options: of obstore (`endpoint`, `region`, `access_key_id`, `client_options`, `retry_config`, ...), or of the
            fsspec file system. `conditional=False` is for stores without conditional writes: whether an object exists
            is then looked at before it is written, and of two saves to one path at the same moment the last wins.

    Raises:
        StoreError: the URL's scheme is not known, its library is not installed, or an option is wrong.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._open(*open_bucket(url, options))

    def _open(self, bucket: ObjectBucket, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._heads: dict[str, bytes] = {}
        self._heads_nbytes = 0
        self._lock = threading.RLock()
        self._fetcher = RangeFetcher(self._fetch_one, bucket.judge, bucket.tries, RequestDepth(bucket.depth))
        self._seen = ""
        """The name of an object that was read."""
        self._places: Mapping[str, str] = {}
        """The directories of objects that are not in its own, by their names; see `Store.sharing`."""

    request_nbytes = 8 << 20
    """Bytes of one request: at 40 ms and 90 MB/s a connection a third of its time is waiting."""

    @classmethod
    def _within(cls, bucket: ObjectBucket, prefix: str) -> ObjectStore:
        """Returns the store of a prefix in a bucket that is open."""
        store = cls.__new__(cls)
        store._open(bucket, prefix)
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle calls it with positional arguments alone
        return partial(ObjectStore, self.url, **self._bucket.options), ()

    @property
    def url(self) -> str:
        return f"{self._bucket.url}/{self._prefix}".rstrip("/")

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(
            far=True,
            request_nbytes=self.request_nbytes,
            conditional=True,
            atomic_uploads=self._bucket.atomic,
            has_directory=False,
        )

    def address(self) -> bytes | None:
        """As `Store.address`, with the credentials in this process's environment."""
        if not self._bucket.shared:
            return None
        env = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
        try:
            return pickle.dumps(PickledCall(_open_with_environment, self.url, self._bucket.options, env))
        except Exception:
            return None

    def _key(self, name: str) -> str:
        """Returns the key of a file; raises StoreError for a name that would lead out of the prefix."""
        if not _is_plain(name):
            raise StoreError(f"{self.url}/{name!r:.80}", expected="the plain name of a file", found="something else")
        return f"{self._directory(self._places[name]) if name in self._places else self._prefix}/{name}".lstrip("/")

    def _directory(self, name: str) -> str:
        """Returns the prefix of another directory of the run."""
        if not _is_plain(name):
            raise StoreError(f"{self.url}/../{name!r:.80}", expected="a plain name", found="something else")
        return f"{self._prefix.rpartition('/')[0]}/{name}".lstrip("/")

    def sharing(self, places: Mapping[str, str]) -> ObjectStore:
        store = ObjectStore._within(self._bucket, self._prefix)
        store._places = {**self._places, **places}
        return store

    def run(self) -> ObjectRun:
        return ObjectRun._within(self._bucket, self._prefix.rpartition("/")[0])

    def prepare(self) -> None:
        """Begins with what a save needs; there are no directories."""
        self._bucket.prepare(self._prefix)

    def entries(self) -> dict[str, DirectoryEntry]:
        """Lists the direct children of the prefix, by name."""
        listing = self._bucket.list(self._prefix)
        entries = files_below(listing, self._prefix)
        for key in listing.folders:
            entries.setdefault(key.rpartition("/")[2], DirectoryEntry(0, 0, regular=False))
        for directory in set(self._places.values()):
            prefix = self._directory(directory)
            there = files_below(self._bucket.list(prefix), prefix)
            entries.update((name, there[name]) for name in self._places.keys() & there.keys())
        if not entries and self._seen:
            self._check_empty()
        return entries

    def _check_empty(self) -> None:
        """Raises StoreError for an empty listing if an object that was read still exists."""
        with contextlib.suppress(FileNotFoundError):
            self._bucket.size(self._key(self._seen))
            raise StoreError(
                self.url,
                expected=f"a listing with {self._seen}, which is there",
                found="an empty one",
                hint="Something between here and the store answers in its place: look at the proxy and the endpoint",
            )

    def read(self, name: str, *, limit: int) -> bytes:
        data, _ = self._bucket.read(self._key(name), limit)
        if len(data) > limit:
            raise CorruptError(f"{self.url}/{name}", expected=f"at most {limit} bytes", found="more")
        self._seen = name
        return data

    def read_version(self, name: str, *, limit: int) -> tuple[bytes, VersionTag]:
        return self._bucket.read(self._key(name), limit)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        head = self._head(name, offset, len(out))
        if head is not None:
            data = head[offset : offset + len(out)]
            out[: len(data)] = data
            filled = len(data)
        else:
            filled = self._fill(name, offset, out)
        if filled < len(out):
            raise too_short(f"{self.url}/{name}", offset, len(out), filled, what="object")

    def _fill(self, name: str, offset: int, out: memoryview) -> int:
        """Fills `out` from an object; returns the number of bytes, fewer at its end."""
        step, filled = self.request_nbytes, 0
        lock = threading.RLock()

        def put(number: int, start: int, data: memoryview, size: int | None) -> None:
            nonlocal filled
            copy_bytes(out[number * step + start :], data)
            with lock:
                filled += len(data)

        ranges = [(name, offset + start, min(step, len(out) - start)) for start in range(0, len(out), step)]
        self._fetcher.run(ranges, put, memory=len(out))
        return filled

    def _fetch_one(self, wanted: FileRange) -> RangeResponse:
        name, offset, nbytes = wanted
        return self._bucket.fetch(self._key(name), offset, nbytes)

    def fetch(
        self,
        ranges: Sequence[FileRange],
        consume: Consume,
        *,
        memory: int,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        self._fetcher.run(ranges, consume, memory=memory, first=first)

    def _head(self, name: str, offset: int, nbytes: int) -> bytes | None:
        """Returns the first `HEAD` bytes of an object if they hold the range; fetches them for a small read at 0."""
        head = self._heads.get(name)
        if head is None and offset == 0 and nbytes < 4096:
            memory = bytearray(HEAD)
            head = bytes(memory[: self._fill(name, 0, memoryview(memory))])
            self._keep_head(name, head)
        # a shorter one is the whole object: the caller finds that the range goes past its end
        inside = head is not None and (offset + nbytes <= len(head) or len(head) < HEAD)
        return head if inside else None

    def _keep_head(self, name: str, head: bytes) -> None:
        """Keeps the first bytes of an object, in place of the oldest ones where they come to too many."""
        with self._lock:
            self._heads_nbytes += len(head) - len(self._heads.pop(name, b""))
            self._heads[name] = head
            while self._heads_nbytes > HEADS_NBYTES:
                self._heads_nbytes -= len(self._heads.pop(next(iter(self._heads))))

    def close(self) -> None:
        with self._lock:
            self._heads.clear()
            self._heads_nbytes = 0

    def create(self, name: str, nbytes: int) -> Writer:
        return (SinglePutWriter if nbytes <= SINGLE_PUT_LIMIT else MultipartWriter)(
            self._bucket, self._key(name), nbytes
        )

    def publish(
        self, name: str, data: bytes, *, replace: bool | VersionTag, check: Callable[[], object] = lambda: None
    ) -> None:
        check()
        try:
            self._bucket.put(self._key(name), bytes(data), replace=replace)
        except FileExistsError as error:
            raise exists_error(self, name) from error

    def check_condition(self, name: str, data: bytes, *, replaces: bool) -> None:
        self._bucket.check_condition(self._key(name), data, "If-Match" if replaces else "If-None-Match")

    def delete(self, name: str, *, version: VersionTag | None = None) -> None:
        if version is None:
            self._bucket.delete(self._key(name))
            return
        try:
            self._bucket.delete_version(self._key(name), version)
        except FileExistsError as error:
            raise exists_error(self, name) from error

    def listed(self) -> ListedStore:
        return ListedStore(self, self.entries())

    def remove_directory(self) -> bool:
        """Removes the directory of the prefix if it is empty (fsspec has some); returns whether it is empty."""
        try:
            if self.entries():
                return False
        except StoreError:  # an index that was read is there: another save has been committed since the listing
            return False
        self._bucket.tidy(self._prefix)
        return True


class ObjectRun(RunStore):
    """A run of checkpoints under a prefix, as `s3://bucket/run`; options as for `ObjectStore`.

    >>> with tc.Manager(tc.ObjectRun("memory://bucket/run"), background=False) as manager:
    ...     report = manager.save(manager.count + 1, {"step": 1})
    >>> report.path
    'memory://bucket/run/step_00000001'
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._bucket, self._prefix = open_bucket(url, options)

    @classmethod
    def _within(cls, bucket: ObjectBucket, prefix: str) -> ObjectRun:
        """Returns the run of a prefix in a bucket that is open."""
        run = cls.__new__(cls)
        run._bucket, run._prefix = bucket, prefix
        return run

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(far=True)

    @property
    def url(self) -> str:
        return f"{self._bucket.url}/{self._prefix}".rstrip("/")

    def names(self) -> list[str]:
        keys = self._bucket.list(self._prefix).folders
        names = (key[len(self._prefix) :].strip("/") for key in keys if _is_below(key, self._prefix))
        return sorted(name for name in names if _is_plain(name) and not name.startswith("."))

    def folder(self, name: str) -> ObjectStore:
        if not _is_plain(name):
            raise StoreError(
                f"{self.url}/{name!r:.80}", expected="the plain name of a directory", found="something else"
            )
        return self._store(name)

    def _store(self, name: str) -> ObjectStore:
        return ObjectStore._within(self._bucket, f"{self._prefix}/{name}".lstrip("/"))

    def holds(self, name: str) -> bool:
        return name in ObjectStore._within(self._bucket, self._prefix).entries()

    def folders(self) -> list[ListedStore]:
        """Returns all directories with their content, by one listing of the whole run."""
        entries: dict[str, dict[str, DirectoryEntry]] = {}
        for key, entry in self._bucket.walk(self._prefix):
            if not _is_below(key, self._prefix):
                continue
            name, _, rest = key[len(self._prefix) :].lstrip("/").partition("/")
            if rest and _is_plain(name) and not name.startswith("."):
                inner, _, deeper = rest.partition("/")
                entries.setdefault(name, {})[inner] = DirectoryEntry(0, 0, regular=False) if deeper else entry
        return [ListedStore(self._store(name), entries[name]) for name in sorted(entries)]


def _open_with_environment(url: str, options: Mapping[str, Any], env: Mapping[str, str]) -> ObjectStore:
    """Opens a store in a writer process, and copies credentials into its environment."""
    os.environ.update(env)
    return ObjectStore(url, **options)


def _is_plain(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not _ODD.search(name)


def _is_below(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(f"{prefix}/")


def files_below(listing: ObjectListing, prefix: str) -> dict[str, DirectoryEntry]:
    """Returns the objects directly below a prefix by name; other keys, which some services list too, are left out."""
    names = {key[len(prefix) :].lstrip("/"): entry for key, entry in listing.files.items() if _is_below(key, prefix)}
    return {name: entry for name, entry in names.items() if _is_plain(name)}
