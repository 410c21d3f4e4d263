"""`ObjectBucket`, the protocol on which stores and runs in object storage are built, and how a URL is split for it.

`obstore` implements it for S3, Google Cloud Storage and Azure, `fsspec` for all other URLs.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec

from ...errors import StoreError
from .conditions import Condition
from .store import DirectoryEntry, VersionTag


class FetchFailure(msgspec.Struct, frozen=True):
    """What may be done about a request that failed."""

    throttled: bool
    """Whether the store asks for fewer requests."""
    temporary: bool
    """Whether the same request may succeed later."""


class RangeResponse(msgspec.Struct, frozen=True):
    """The answer to a request for a range of an object."""

    size: int | None
    """Bytes of the whole object; None where only the range is known to be there."""
    pieces: Iterable[Any]
    """The bytes of the range that the object has, in order as they arrive: buffers that are not empty."""


class ObjectListing(msgspec.Struct, frozen=True):
    """The direct children of a prefix."""

    files: dict[str, DirectoryEntry]
    """The objects, by key."""
    folders: list[str]
    """Keys that are prefixes of further keys."""


class ObjectBucket(Protocol):
    """Objects under keys. A key has no leading slash; a prefix is followed by a slash in the keys below it.

    Every call raises StoreError if the service cannot be reached or refuses, and FileNotFoundError if there is no such
    object.
    """

    url: str
    """The URL of the root, without a slash at the end."""
    options: dict[str, Any]
    """The options with which it was opened."""
    shared: bool
    """Whether another process that opens the same URL sees the same objects."""
    atomic: bool
    """Whether an object that is uploaded has its key only once the upload has ended."""

    def prepare(self, prefix: str) -> None:
        """Begins with what a listing of a prefix without objects, and writes below it, will need."""
        ...

    def list(self, prefix: str) -> ObjectListing:
        """Lists the direct children of a prefix, all pages."""
        ...

    def walk(self, prefix: str) -> Iterator[tuple[str, DirectoryEntry]]:
        """Yields every object below a prefix with its key, page by page."""
        ...

    def size(self, key: str) -> int:
        """Returns the size of an object in bytes."""
        ...

    def read(self, key: str, limit: int) -> tuple[bytes, VersionTag]:
        """Returns an object and its version; of an object longer than `limit` only its first `limit + 1` bytes."""
        ...

    tries: int
    """Requests for one range that may fail, at most."""
    depth: int
    """Requests for ranges in flight at first."""

    def fetch(self, key: str, start: int, nbytes: int) -> RangeResponse:
        """Requests a range of at least one byte, once; `judge` tells of errors, those of its pieces too."""
        ...

    def judge(self, error: Exception) -> FetchFailure:
        """Returns what may be done about an error of `fetch`, or of the pieces that it returns."""
        ...

    def put(self, key: str, data: bytes, *, replace: bool | VersionTag) -> None:
        """Writes a small object in one request, atomically.

        Args:
            replace: True replaces any version, False writes a new object, a `VersionTag` replaces only that version.

        Raises:
            FileExistsError: the object exists, or has another version.
            StoreError: `unanswered` where the service may have written it all the same, or may do so later.
        """
        ...

    def check_condition(self, key: str, data: bytes, condition: Condition) -> None:
        """Finds out whether the service honours a condition of `put`, by an object that is there; once a process.

        Args:
            data: the object's content, which may be written again.

        Raises:
            StoreError: the store does not honour it, or cannot be reached.
        """
        ...

    def upload(self, key: str, nbytes: int, blocks: Iterable[memoryview]) -> None:
        """Writes a large object in parts, several at a time; it becomes visible when it is complete.

        Args:
            nbytes: the size of the object.
            blocks: its content, not empty each; it is referred to until it was sent. An error that it raises aborts
                the upload and is raised.
        """
        ...

    def delete(self, key: str) -> None:
        """Deletes an object if it exists."""
        ...

    def delete_version(self, key: str, tag: VersionTag) -> None:
        """Deletes an object if it has this version; where the service does not know that condition, without it.

        Raises:
            FileExistsError: it has another version.
        """
        ...

    def tidy(self, prefix: str) -> None:
        """Removes the empty directory of a prefix, on file systems that have directories."""
        ...


def split_url(url: str) -> tuple[str, str]:
    """Splits an object's URL into (root, key), without slashes at the ends.

    Raises:
        StoreError: it names no bucket, or contains `.` or `..`.
    """
    scheme, _, rest = url.partition("://")
    root, _, key = rest.partition("/")
    parts = [part for part in key.split("/") if part]
    if not root or any(part in (".", "..") for part in parts):
        raise StoreError(url, expected=f"{scheme}://bucket/path", found="no bucket" if not root else "a step up")
    return f"{scheme}://{root}", posixpath.join(*parts) if parts else ""


def missing_extra(url: str, module: str, extra: str) -> StoreError:
    """Returns the error for a URL whose library is not installed."""
    return StoreError(
        url,
        expected=f"{module}, which reads {url.partition('://')[0]}:// URLs",
        found="it is not installed",
        hint=f"pip install 'treeckpt[{extra}]'",
    )
