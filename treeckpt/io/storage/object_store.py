"""Runs and checkpoints in object stores: `s3://bucket/run/step_00000100`, `gs://`, `az://`, and what fsspec knows.

A directory is a prefix: it is there as long as an object is. Shards are uploaded in parts and appear whole or not at
all; the index is published by a conditional write, so of several saves into one place exactly one wins. A crash leaves
no object behind, only parts of an upload that never ends: those cost money until the bucket's rule for incomplete
multipart uploads removes them (obstore cannot list them).

A whole run is listed by pages of its objects, not directory by directory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import CheckpointExists, CorruptError, StoreError
from .bucket import OBJECT_SCHEMES, Bucket, Found, Listing, split_url
from .fsspec import open_filesystem
from .multipart import WHOLE, PartsWriter, WholeWriter
from .obstore import ObstoreBucket
from .run_store import Entry
from .store import Writer

__all__ = ["ObjectFolder", "ObjectRun", "ObjectStore", "open_address"]

HEAD = 64 << 10
"""Bytes that the first read of an object's beginning brings: its header comes with the length of it."""
_ODD = re.compile(r"[\x00-\x1f\x7f/]")
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "HOME", "SSL_CERT_FILE")


def open_bucket(url: str, options: Mapping[str, Any]) -> tuple[Bucket, str]:
    """The place that a URL is in, and the key that it names there.

    Raises:
        StoreError: the URL is of no known kind, the library for it is not installed, or an option is wrong.
    """
    if url.partition("://")[0] in OBJECT_SCHEMES:
        root, key = split_url(url)
        return ObstoreBucket(root, options), key
    return open_filesystem(url, options)


class ObjectStore:
    """A checkpoint's files as objects under a prefix.

    Args:
        url: `s3://bucket/run/step_00000100` and the like.
        options: of obstore (`endpoint`, `region`, `access_key_id`, `client_options`, `retry_config`, ...), or of the
            fsspec file system.

    Raises:
        StoreError: the URL is of no known kind, the library for it is not installed, or an option is wrong.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._bucket, self._prefix = open_bucket(url, options)
        self._heads: dict[str, bytes] = {}
        self._lock = threading.Lock()

    _met = ""
    """An object that was read."""

    @classmethod
    def _within(cls, bucket: Bucket, prefix: str) -> ObjectStore:
        """The store of a prefix in a bucket that is open."""
        store = cls.__new__(cls)
        store._bucket, store._prefix, store._heads, store._lock = bucket, prefix, {}, threading.Lock()
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.url, dict(self._bucket.options))

    @property
    def url(self) -> str:
        return f"{self._bucket.url}/{self._prefix}".rstrip("/")

    @property
    def address(self) -> bytes | None:
        """By which another process opens the same store; None where it would find another one, or cannot be told."""
        if not self._bucket.shared:
            return None
        env = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
        try:
            return pickle.dumps((self.url, dict(self._bucket.options), env))
        except Exception:
            return None

    def _key(self, name: str) -> str:
        """The key of a file.

        Raises:
            StoreError: a name that would lead out of the prefix.
        """
        if not _is_plain(name):
            raise StoreError(f"{self.url}/{name!r:.80}", expected="the plain name of a file", found="something else")
        return f"{self._prefix}/{name}".lstrip("/")

    def prepare(self) -> None:
        """There are no directories to make."""

    def entries(self) -> dict[str, Entry]:
        """What stands under the prefix, by name."""
        listing = self._bucket.list(self._prefix)
        found = {name: _entry(one) for name, one in _under(listing, self._prefix).items()}
        for key in listing.folders:
            found.setdefault(key.rpartition("/")[2], Entry(0, 0, regular=False))
        if not found and self._met:
            self._refuse_empty(self._met)
        return found

    def _refuse_empty(self, met: str) -> None:
        """Refuses an empty listing where an object that was read is still there."""
        with contextlib.suppress(FileNotFoundError):
            self._bucket.size(self._key(met))
            raise StoreError(
                self.url,
                expected=f"a listing with {met}, which is there",
                found="an empty one",
                hint="Something between here and the store answers in its place: look at the proxy and the endpoint",
            )

    def sizes(self) -> dict[str, int]:
        return {name: entry.nbytes for name, entry in self.entries().items() if entry.regular}

    def read(self, name: str, *, limit: int) -> bytes:
        data, _ = self._bucket.read(self._key(name), limit)
        if len(data) > limit:
            raise CorruptError(f"{self.url}/{name}", expected=f"at most {limit} bytes", found="more")
        self._met = name
        return data

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        key = self._key(name)
        head = self._head(name, key, offset, len(out))
        if head is not None:
            data = head[offset : offset + len(out)]
            out[: len(data)] = data
            filled = len(data)
        else:
            filled = self._bucket.read_into(key, offset, out) if len(out) else 0
        if filled < len(out):
            raise CorruptError(
                f"{self.url}/{name}",
                expected=f"{len(out)} bytes at {offset}",
                found=f"{filled} before the end of the object",
                hint="The object was cut short; restore it from a copy",
            )

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview]) -> bool:
        return False  # everything comes over the network

    def _head(self, name: str, key: str, offset: int, nbytes: int) -> bytes | None:
        """The beginning of an object, fetched when the first few bytes of it are wanted; None for what is not in it."""
        head = self._heads.get(name)
        if head is None and offset == 0 and nbytes < 4096:
            memory = bytearray(HEAD)
            head = bytes(memory[: self._bucket.read_into(key, 0, memoryview(memory))])
            with self._lock:
                self._heads[name] = head
        inside = head is not None and (offset + nbytes <= len(head) or len(head) < HEAD)
        return head if inside else None

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        raise StoreError(
            f"{self.url}/{name}",
            expected="a file on a disk, which can be mapped into memory",
            found="an object",
            hint="Load without mmap",
        )

    def close(self) -> None:
        with self._lock:
            self._heads.clear()

    def create(self, name: str, nbytes: int) -> Writer:
        key = self._key(name)
        try:
            self._bucket.size(key)
        except FileNotFoundError:
            return (WholeWriter if nbytes <= WHOLE else PartsWriter)(self._bucket, key, nbytes)
        raise FileExistsError(f"{self.url}/{name}")

    def publish(self, name: str, data: bytes, *, replace: bool) -> None:
        try:
            self._bucket.put(self._key(name), bytes(data), replace=replace)
        except FileExistsError as error:
            raise self._exists(name) from error

    def swap(self, name: str, data: bytes, *, holds: Callable[[bytes], bool], limit: int) -> None:
        """Publishes a file over the one that is there, if that is what is expected, and still is at that moment.

        Args:
            holds: whether what is there is what may be replaced.
            limit: bytes of what is there, at most.

        Raises:
            CheckpointExists: it is not.
        """
        key = self._key(name)
        try:
            found, tag = self._bucket.read(key, limit)
            if not holds(found):
                raise self._exists(name)
            self._bucket.put(key, data, replace=tag)
        except FileNotFoundError:
            self.publish(name, data, replace=False)
        except FileExistsError as error:
            raise self._exists(name) from error

    def _exists(self, name: str) -> CheckpointExists:
        return CheckpointExists(
            f"{self.url}/{name}", expected="no such file", found="one, written meanwhile by another save"
        )

    def delete(self, name: str) -> None:
        self._bucket.delete(self._key(name))

    def tidy(self) -> bool:
        """Removes what an empty directory leaves, where there are such; says whether it is empty."""
        if self.entries():
            return False
        self._bucket.tidy(self._prefix)
        return True


class ObjectFolder:
    """A prefix of a run, as a directory.

    Args:
        entries: what a listing has just found in it; None to list it when that is asked for.
    """

    is_link = False

    def __init__(self, store: ObjectStore, entries: dict[str, Entry] | None = None) -> None:
        self.store, self.url, self._entries = store, store.url, entries
        self.name = store.url.rpartition("/")[2]

    def modified_ns(self) -> int | None:
        return max((entry.modified_ns for entry in self.entries().values()), default=None)

    def entries(self) -> dict[str, Entry]:
        return self.store.entries() if self._entries is None else self._entries

    def entry(self, name: str) -> Entry | None:
        return self.entries().get(name)

    def sync(self) -> None:
        """What is deleted stays so."""

    def remove(self) -> bool:
        """There is no directory once nothing is in it."""
        return self.store.tidy()


class ObjectRun:
    """A run of checkpoints under a prefix.

    Args:
        url: `s3://bucket/run` and the like.
        options: as of `ObjectStore`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._bucket, self._prefix = open_bucket(url, options)

    @property
    def url(self) -> str:
        return f"{self._bucket.url}/{self._prefix}".rstrip("/")

    def names(self) -> list[str]:
        found = self._bucket.list(self._prefix).folders
        names = (key[len(self._prefix) :].strip("/") for key in found if _is_below(key, self._prefix))
        return sorted(name for name in names if _is_plain(name) and not name.startswith("."))

    def folder(self, name: str) -> ObjectFolder:
        if not _is_plain(name):
            raise StoreError(
                f"{self.url}/{name!r:.80}", expected="the plain name of a directory", found="something else"
            )
        return ObjectFolder(ObjectStore._within(self._bucket, f"{self._prefix}/{name}".lstrip("/")))

    def folders(self) -> list[ObjectFolder]:
        """All of them with what is in them, by one listing of the whole run."""
        entries: dict[str, dict[str, Entry]] = {}
        for found in self._bucket.walk(self._prefix):
            if not _is_below(found.key, self._prefix):
                continue
            name, _, rest = found.key[len(self._prefix) :].lstrip("/").partition("/")
            if rest and _is_plain(name) and not name.startswith("."):
                inner, _, deeper = rest.partition("/")
                entries.setdefault(name, {})[inner] = Entry(0, 0, regular=False) if deeper else _entry(found)
        return [ObjectFolder(self.folder(name).store, entries[name]) for name in sorted(entries)]


def open_address(address: bytes) -> ObjectStore:
    """The store of an `ObjectStore.address`, in a process that was started for it: takes its credentials over."""
    url, options, env = pickle.loads(address)  # from our own parent, by a socket that only it has
    os.environ.update(env)
    return ObjectStore(url, **options)


def _reopened(url: str, options: Mapping[str, Any]) -> ObjectStore:
    return ObjectStore(url, **options)


def _is_plain(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not _ODD.search(name)


def _is_below(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(f"{prefix}/")


def _under(listing: Listing, prefix: str) -> dict[str, Found]:
    """The objects straight under a prefix by name; what a service lists beside that is left out."""
    found: dict[str, Found] = {}
    for one in listing.files:
        name = one.key[len(prefix) :].lstrip("/")
        if _is_below(one.key, prefix) and _is_plain(name):
            found[name] = one
    return found


def _entry(found: Found) -> Entry:
    return Entry(found.nbytes, found.modified_ns, found.number)
