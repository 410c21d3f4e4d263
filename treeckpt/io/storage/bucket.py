"""What is asked of any place that holds objects under keys: the few calls that a store and a run are made of.

`obstores` answers them for S3, Google Cloud Storage and Azure, `filesystems` for whatever fsspec knows. Which of the
two a URL takes is decided here, and neither library is imported before a URL asks for it.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import msgspec

from ...errors import CheckpointError, StoreError

__all__ = [
    "OBJECT_SCHEMES",
    "Bucket",
    "Found",
    "Listing",
    "Tag",
    "check_path",
    "is_url",
    "local_path",
    "missing_extra",
    "split_url",
]

OBJECT_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl"})
"""Of URLs that go to obstore; all others, but for file://, go to fsspec."""

_LOCAL = ("file://", "local://")
Tag = Mapping[str, Any]
"""Which version of an object was read, for writing only over that one."""


class Found(msgspec.Struct, frozen=True):
    """An object in a listing."""

    key: str
    nbytes: int
    modified_ns: int
    """Unix time by the clock of the service, 0 where it tells none."""
    number: int
    """Changes with the content."""


class Listing(msgspec.Struct, frozen=True):
    """What stands straight under a prefix."""

    files: list[Found]
    folders: list[str]
    """Keys below which there is more."""


class Bucket(Protocol):
    """Objects under keys. A key has no leading slash; a prefix stands for the keys below it, with a slash between.

    Every call raises StoreError where the place cannot be reached or refuses, and FileNotFoundError where there is no
    such object.
    """

    @property
    def url(self) -> str:
        """Of the root, without a slash at the end."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """With which it was opened."""
        ...

    @property
    def shared(self) -> bool:
        """Whether another process finds the same objects."""
        ...

    def list(self, prefix: str) -> Listing:
        """What stands straight under a prefix, all pages of it."""
        ...

    def walk(self, prefix: str) -> Iterator[Found]:
        """Every object below a prefix, page by page."""
        ...

    def size(self, key: str) -> int:
        """Bytes of an object."""
        ...

    def read(self, key: str, limit: int) -> tuple[bytes, Tag]:
        """A whole object, or what is needed to see that it is longer than `limit`; and which version it is."""
        ...

    def read_into(self, key: str, start: int, out: memoryview) -> int:
        """Fills `out` by requests for ranges; returns how many bytes there were."""
        ...

    def put(self, key: str, data: bytes, *, replace: bool | Tag) -> None:
        """Writes a small object in one request, atomically.

        Args:
            replace: False only where there is none; a tag only over that version.

        Raises:
            FileExistsError: there is one, or another version.
        """
        ...

    def upload(self, key: str, nbytes: int, blocks: Iterable[bytes]) -> None:
        """Writes a large object of so many bytes in parts, several at a time; it appears when all is there.

        What `blocks` raises aborts the upload, and is raised.
        """
        ...

    def delete(self, key: str) -> None:
        """Removes an object if it is there."""
        ...

    def tidy(self, prefix: str) -> None:
        """Removes the directory that an empty prefix may have left."""
        ...


def is_url(path: object) -> TypeGuard[str]:
    """Whether a path is a URL of a place that is no local directory."""
    return isinstance(path, str) and "://" in path and not path.startswith(_LOCAL)


def local_path(path: str) -> str:
    """The path that a file:// URL names; a path as it is.

    Raises:
        CheckpointError: an empty one, which the system takes for the current directory, or one that no file can have.
    """
    check_path(path)
    for scheme in _LOCAL:
        path = path.removeprefix(scheme)
    if not path:
        hint = "Pass '.' for the current directory"
        raise CheckpointError("path", expected="a path, a URL or a store", found="an empty one", hint=hint)
    return path


def check_path(path: str) -> None:
    """Refuses a path or URL that no system takes.

    Raises:
        CheckpointError: it holds a zero, or characters that no file name is made of.
    """
    try:
        if is_url(path):
            path.encode()  # no file system's bytes stand in a URL
        if "\0" not in os.fsencode(path).decode("utf-8", "surrogateescape"):
            return
        found = "a zero in"
    except UnicodeEncodeError:
        found = "half of a pair of code points in"
    hint = "Look for where the path comes from"
    raise CheckpointError("path", expected="a path that a file can have", found=f"{found} {path!r:.200}", hint=hint)


def split_url(url: str) -> tuple[str, str]:
    """(root, key below it) of an object's URL, without slashes at the ends.

    Raises:
        StoreError: it names no bucket, or steps up.
    """
    scheme, _, rest = url.partition("://")
    root, _, key = rest.partition("/")
    parts = [part for part in key.split("/") if part]
    if not root or any(part in (".", "..") for part in parts):
        raise StoreError(url, expected=f"{scheme}://bucket/path", found="no bucket" if not root else "a step up")
    return f"{scheme}://{root}", posixpath.join(*parts) if parts else ""


def missing_extra(url: str, module: str, extra: str) -> StoreError:
    """The error where the library for a kind of URL is not installed."""
    return StoreError(
        url,
        expected=f"{module}, which reads {url.partition('://')[0]}:// URLs",
        found="it is not installed",
        hint=f"pip install 'treeckpt[{extra}]'",
    )
