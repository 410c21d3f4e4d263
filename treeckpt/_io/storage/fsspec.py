"""File systems of fsspec (`memory://`, `http://`, `hdfs://`, ...) as buckets: slower and less atomic than obstore.

A file is replaced as atomically as the file system writes one. Writing only a new file is as atomic as the exclusive
mode of the file system; without such a mode, or with `conditional=False`, its existence is checked first, and two
writers at one moment can both pass that check. Replacing only one version is checked the same way.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import StoreError
from .bucket import FetchFailure, ObjectListing, RangeResponse, missing_extra
from .conditions import Condition, no_conditional_writes, takes_conditions
from .requests_in_flight import first_depth
from .store import DirectoryEntry, VersionTag

_TIMES = ("mtime", "modified", "LastModified", "last_modified", "updated", "created")


def open_fsspec(url: str, options: Mapping[str, Any]) -> tuple[FsspecBucket, str]:
    """Opens the file system of a URL; returns it with the key that the URL names. Raises as `open_bucket`."""
    scheme, _, rest = url.partition("://")
    if any(part in (".", "..") for part in rest.split("/")):
        raise StoreError(url, expected="a path below the root", found="a step up")
    if not scheme or not rest.strip("/"):  # fsspec takes both for local paths
        expected = "a path, or a URL that fsspec knows, as memory://path"
        raise StoreError(url, expected=expected, found=f"nothing {'after' if scheme else 'before'} {scheme}://")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise missing_extra(url, "fsspec", "fsspec") from error
    conditional, rest_options = takes_conditions(url, options)
    try:
        fs, path = url_to_fs(url.rstrip("/"), **rest_options)
    except (ValueError, TypeError) as error:
        raise StoreError(url, expected="a path, or a URL that fsspec knows", found=f"{error}") from error
    except ImportError as error:
        raise StoreError(url, expected="the library for this kind of URL", found=f"{error}") from error
    # paths of http are whole URLs; others lack the scheme, and some the host
    key = path.removeprefix(f"{scheme}://").partition("/")[2] if "://" in path else path.strip("/")
    key = key.strip("/")
    base = url.rstrip("/")
    root = base[: -len(key)].removesuffix("/") if key and base.endswith(key) else base
    above = path.rstrip("/")[: -len(key)] if key else path
    return FsspecBucket(fs, root, above, options, shared=scheme != "memory", conditional=conditional), key


class FsspecBucket:
    """A file system of fsspec.

    Args:
        url: the URL of its root, for messages.
        root: the beginning of its paths.
        shared: whether another process sees the same files.
        conditional: whether the exclusive mode of the file system is used.
    """

    tries = 1
    atomic = False

    def __init__(
        self, fs: Any, url: str, root: str, options: Mapping[str, Any], *, shared: bool, conditional: bool = True
    ) -> None:
        self._fs, self.url, self._root, self.options, self.shared = fs, url, root, dict(options), shared
        self._conditional, self.depth = conditional, first_depth()
        self._lock = threading.RLock()

    def _path(self, key: str) -> str:
        return f"{self._root}{key}"

    def list(self, prefix: str) -> ObjectListing:
        with self._wrapped_errors("list", prefix), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # fsspec keeps listings, and other processes write there
            self._fs.invalidate_cache()
            rows = self._fs.ls(self._path(prefix), detail=True)
            files = {self._key(row["name"]): _entry(row) for row in rows if row["type"] == "file"}
            return ObjectListing(files, [self._key(row["name"]) for row in rows if row["type"] == "directory"])
        return ObjectListing({}, [])

    def walk(self, prefix: str) -> Iterator[tuple[str, DirectoryEntry]]:
        with self._wrapped_errors("list", prefix), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            rows = self._fs.find(self._path(prefix), detail=True)
            yield from [(self._key(row["name"]), _entry(row)) for row in rows.values()]

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).strip("/")

    def size(self, key: str) -> int:
        with self._wrapped_errors("look at", key):
            self._fs.invalidate_cache()
            info = self._fs.info(self._path(key))
            if info["type"] != "file":
                raise FileNotFoundError(f"{self.url}/{key}")
            return info["size"]

    def read(self, key: str, limit: int) -> tuple[bytes, VersionTag]:
        with self._wrapped_errors("read", key):
            data = self._fs.cat_file(self._path(key), start=0, end=limit + 1)
            tag = {"content": hashlib.blake2s(data).digest(), "limit": limit}
            if len(data) > limit:
                # the hash is that of the beginning alone: of the rest is known what a listing tells
                self._fs.invalidate_cache()
                tag["entry"] = _entry(self._fs.info(self._path(key)))
        return data, tag

    def _is_version(self, key: str, tag: VersionTag) -> bool:
        """Whether a file has a version; raises FileNotFoundError if there is none."""
        return self.read(key, tag["limit"])[1] == tag

    def fetch(self, key: str, start: int, nbytes: int) -> RangeResponse:
        with self._wrapped_errors("read", key):
            data = memoryview(self._fs.cat_file(self._path(key), start=start, end=start + nbytes))
        # of fewer bytes the size tells whether the object ends there or the answer broke off
        return RangeResponse(None if len(data) == nbytes else self.size(key), [data])

    def judge(self, error: Exception) -> FetchFailure:
        """Nothing: the file system has repeated what can be."""
        return FetchFailure(throttled=False, temporary=False)

    def put(self, key: str, data: bytes, *, replace: bool | VersionTag) -> None:
        path = self._path(key)
        # threads of this process look and write one at a time; other processes are not held off
        with self._lock, self._wrapped_errors("write", key):
            if isinstance(replace, Mapping):
                if not self._is_version(key, replace):
                    raise FileExistsError(f"{self.url}/{key}")
            elif not replace and self._fs.exists(path):
                raise FileExistsError(f"{self.url}/{key}")
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if replace or not self._conditional:
                self._fs.pipe_file(path, data)
                return
            try:
                self._fs.pipe_file(path, data, mode="create")
            except (NotImplementedError, TypeError, ValueError) as error:  # the mode is unknown to the file system
                found = f"{type(error).__name__}: {error}"
                raise no_conditional_writes(self.url, 'mode="create"', found) from error

    def check_condition(self, key: str, data: bytes, condition: Condition) -> None:
        """Does nothing: what a file system does in its exclusive mode is not known."""

    def upload(self, key: str, nbytes: int, blocks: Iterable[memoryview]) -> None:
        path = self._path(key)
        with self._wrapped_errors("write", key):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            file = self._fs.open(path, "wb")
            try:
                for block in blocks:
                    file.write(bytes(block))
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                with contextlib.suppress(Exception):
                    self._fs.rm_file(path)
                raise

    def delete(self, key: str) -> None:
        with self._wrapped_errors("delete", key), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def delete_version(self, key: str, tag: VersionTag) -> None:
        with self._lock:
            if not self._is_version(key, tag):
                raise FileExistsError(f"{self.url}/{key}")
            self.delete(key)

    def prepare(self, prefix: str) -> None:
        """Does nothing: directories are made with the objects in them."""

    def tidy(self, prefix: str) -> None:
        with contextlib.suppress(Exception):  # many have no directories
            self._fs.rmdir(self._path(prefix))

    @contextlib.contextmanager
    def _wrapped_errors(self, what: str, key: str) -> Iterator[None]:
        url = f"{self.url}/{key}"
        try:
            yield
        except (FileNotFoundError, FileExistsError, StoreError):
            raise
        except NotImplementedError as error:
            raise StoreError(url, expected=f"a file system that can {what}", found="one that cannot") from error
        except Exception as error:  # each file system raises errors of its own library
            hint = "Look at the network, the permissions and the options of the file system"
            found = f"{type(error).__name__}: {error}"[:600]
            failed = StoreError(url, expected=f"to {what} it", found=found, hint=hint)
            failed.unanswered = isinstance(error, (TimeoutError, ConnectionError))
            raise failed from error


def _entry(row: Mapping[str, Any]) -> DirectoryEntry:
    tag = next((row[name] for name in ("ETag", "etag", "md5Hash", "ino") if row.get(name)), "")
    number = int.from_bytes(hashlib.blake2s(str(tag).encode(), digest_size=7).digest()) if tag else 0
    moment = next((row[name] for name in _TIMES if row.get(name)), None)
    modified_ns = int(moment * 1e9) if isinstance(moment, (int, float)) else 0
    if isinstance(moment, datetime.datetime):
        aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
        modified_ns = int(aware.timestamp() * 1e6) * 1000
    return DirectoryEntry(row.get("size") or 0, modified_ns, number)
