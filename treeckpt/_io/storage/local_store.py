"""Stores and runs in directories of a local or mounted file system, and the paths that lead to them.

A link in place of a step's directory is followed only with `follow_links`, or if the caller requests it; of links to
files see `LocalStore`.

On file systems of other machines (NFS, Lustre, GPFS, FUSE) a read waits for a network, so checkpoints are read with
many reads in flight, whose number is found as that of requests to an object store is: see `RangeFetcher`. Whether the
page cache is read past is measured too.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import mmap
import os
import pickle
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from ..._core.format.files import is_step_name
from ..._core.format.shard_header import check_no_zeros
from ...errors import CheckpointError, CorruptError, StoreError
from ..os_errors import shows_damage, wrap_read_error
from ..process import this_process
from .bucket import FetchFailure, RangeResponse
from .local_files import (
    LocalReader,
    ReaderCache,
    create_file,
    file_system,
    follows_links,
    is_cached,
    linked_file,
    make_directory,
    open_regular,
    sync_directory,
    sync_file,
    too_short,
)
from .memory import PAGE_NBYTES, aligned_buffer
from .requests_in_flight import RangeFetcher, RequestDepth
from .store import (
    TEXT_PART_NBYTES,
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

_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Options of mmap by which a map keeps no file descriptor open, from Python 3.13 on."""


def _where_links_lead(directory: Path, follow_links: bool) -> bool | Path:
    """Returns the argument `links` of `open_regular` for a directory."""
    real = Path(os.path.realpath(directory))
    return follow_links or (real.parent if is_step_name(real.name) else real)


def _open_local(directory: Path, follow_links: bool) -> LocalStore:
    """Opens a store in the writer process, which has no public module to find the class in."""
    return LocalStore(directory, follow_links=follow_links)


class LocalStore(Store):
    """A directory of a local (or mounted) file system.

    `read_into`, `read_parts` and `mapped` all read bytes of shards: a subclass that changes one must change all three.
    One whose files hold other bytes than it gives has no `local_path` among its `traits`: that leads around it.

    Links to files are read where they lead to a place in the run, or, if the directory is not that of a step, in the
    directory. They are never written through, and where a file is deleted, the link goes.

    >>> tc.load(tc.LocalStore("run/step_00000100"))["step"]
    100

    Args:
        follow_links: reads links wherever they lead, as those of DVC and the cache of Hugging Face: for directories of
            people whom you trust. None does so where the environment has TREECKPT_FOLLOW_LINKS=1.
    """

    def __init__(self, directory: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.follow_links = follows_links(follow_links)
        self.readers = ReaderCache()
        self.places: Mapping[str, str] = {}
        """The directories of files that are not in its own, by their names; see `Store.sharing`."""
        # no method of this store: open files would keep it, and themselves, until the garbage collector comes
        self._links = partial(_where_links_lead, self.directory, self.follow_links)

    def address(self) -> bytes | None:
        if type(self) is not LocalStore:  # its own state may be of this process alone
            return super().address()
        return pickle.dumps(PickledCall(_open_local, self.directory, self.follow_links))

    def sharing(self, places: Mapping[str, str]) -> LocalStore:
        store = copy.copy(self)
        store.places, store.readers = {**self.places, **places}, ReaderCache()
        return store

    def run(self) -> LocalRun:
        return LocalRun(self.directory.parent, follow_links=self.follow_links)

    def _path(self, name: str) -> Path:
        """Returns the path at which a file is read."""
        if name in self.places:
            return self.directory.parent / self.places[name] / name
        return self.directory / name

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(renames=True, local_path=self.directory, follow_links=self.follow_links)

    def linked_stat(self, name: str) -> os.stat_result | None:
        """Returns the state of the file that a link leads to; None if the link is not followed, or leads to no file.

        Raises:
            OSError: it could not be read this time.
        """
        try:
            state = linked_file(self._path(name), self._links()).lstat()  # takes no descriptor
        except (CorruptError, StoreError):
            return None
        except OSError as error:
            if not shows_damage(error):
                raise
            return None
        return state if stat.S_ISREG(state.st_mode) else None

    @property
    def url(self) -> str:
        # undecodable bytes of the path are escaped: messages are text
        return os.fsencode(self.directory).decode("utf-8", "backslashreplace")

    @property
    def place(self) -> str:
        return str(self.directory)

    @property
    def name(self) -> str:
        return self.directory.name or str(self.directory)

    def prepare(self) -> None:
        make_directory(self.directory)

    def scan(self) -> dict[str, DirectoryEntry]:
        """Returns all entries by name; raises OSError if they could not be read."""
        listed: dict[str, DirectoryEntry] = {}
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another process may be deleting
                        listed[entry.name] = self._entry(entry.name, entry.stat(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        for name in self.places:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                listed[name] = self._entry(name, self._path(name).lstat())
        return listed

    def _entry(self, name: str, state: os.stat_result) -> DirectoryEntry:
        link, modified_ns = stat.S_ISLNK(state.st_mode), state.st_mtime_ns
        if link and (linked := self.linked_stat(name)) is not None:
            # a change of either counts: of the link, or of the file that it leads to
            state, modified_ns = linked, max(modified_ns, linked.st_mtime_ns)
        return DirectoryEntry(state.st_size, modified_ns, state.st_ino, stat.S_ISREG(state.st_mode), link)

    def entries(self) -> dict[str, DirectoryEntry]:
        """Returns all entries by name; raises StoreError if they could not be read."""
        try:
            return self.scan()
        except OSError as error:
            raise wrap_read_error(error, self.place) from error

    def entry(self, name: str) -> DirectoryEntry | None:
        try:
            return self._entry(name, self._path(name).lstat())
        except OSError as error:
            if not shows_damage(error):
                raise wrap_read_error(error, f"{self.place}/{name}") from error
            return None

    def sizes(self) -> dict[str, int]:
        """Returns the files that can be read and their sizes; raises OSError if they could not be listed."""
        return {name: entry.nbytes for name, entry in self.scan().items() if entry.regular}

    def modified_ns(self) -> int | None:
        try:
            found = self.directory.stat()
        except OSError as error:
            if not shows_damage(error):
                raise wrap_read_error(error, self.place) from error
            return None
        return found.st_mtime_ns if stat.S_ISDIR(found.st_mode) else None

    @property
    def is_link(self) -> bool:
        return self.directory.is_symlink()

    def remove_link(self) -> None:
        os.unlink(self.directory)
        sync_directory(self.directory.parent)

    def remove_directory(self) -> bool:
        try:
            os.rmdir(self.directory)
        except FileNotFoundError:
            return True
        except OSError as error:
            # POSIX admits both for a directory that is not empty
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        sync_directory(self.directory.parent)
        return True

    def sync(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
            sync_directory(self.directory)

    def read(self, name: str, *, limit: int) -> bytes:
        with open(open_regular(self._path(name), links=self._links), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CorruptError(f"{self.url}/{name}", expected=f"at most {limit} bytes", found=f"{size}")
            # read(n) allocates n bytes at once, and a sparse file takes none
            parts, filled = [file.read(min(size, TEXT_PART_NBYTES) + 1)], 0
            while size > TEXT_PART_NBYTES and parts[-1]:
                check_no_zeros(parts[-1], filled, f"{self.url}/{name}")
                filled += len(parts[-1])
                parts.append(file.read(TEXT_PART_NBYTES))
        return b"".join(parts)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        with self._reader(name) as reader:
            reader.read_into(offset, out, shared=shared)

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        with self._reader(name) as reader:
            return reader.read_parts(offset, parts, shared=shared)

    @contextlib.contextmanager
    def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> Iterator[memoryview | None]:
        with self._reader(name) as reader, reader.mapped(offset, nbytes, fetch=fetch) as memory:
            yield memory

    def _reader(self, name: str) -> AbstractContextManager[LocalReader]:
        return self.readers.using(name, self._path(name), self._links)

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        fd = open_regular(self._path(name), links=self._links)
        try:
            if offset + nbytes > (size := os.fstat(fd).st_size):
                raise too_short(f"{self.url}/{name}", offset, nbytes, max(size - offset, 0))
            low = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            # a map of length 0 would be one of the whole file
            if not nbytes:
                return memoryview(bytearray())
            mapped = mmap.mmap(fd, offset + nbytes - low, access=mmap.ACCESS_COPY, offset=low, **_UNTRACKED)
            return memoryview(mapped)[offset - low :]
        finally:
            os.close(fd)

    def close(self) -> None:
        self.readers.close()

    def create(self, name: str, nbytes: int) -> Writer:
        return create_file(self.directory / name, nbytes)

    def publish(
        self, name: str, data: bytes, *, replace: bool | VersionTag, check: Callable[[], object] = lambda: None
    ) -> None:
        """As `Store.publish`.

        Args:
            check: called once a temporary file has the content, before it gets its name. A clean-up that takes this
                process for an ended one removes the temporary file first: so either `check` sees what it removed, or
                there is no file to rename (FileNotFoundError).
        """
        self._put(name, data, by=name, replace=bool(replace), check=check)

    def publish_copy(self, name: str, data: bytes, *, of: str) -> None:
        self._put(name, data, by=of, replace=False)

    def _put(
        self, name: str, data: bytes, *, by: str, replace: bool, check: Callable[[], object] = lambda: None
    ) -> None:
        # by the tag clean-ups know the temporary files of a process that has ended
        temporary = self.directory / f".{by}.{this_process().tag}{secrets.token_hex(4)}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                sync_file(file.fileno())
            check()
            if replace:
                os.replace(temporary, self.directory / name)
            else:
                _rename_new(temporary, self.directory / name)
        except FileExistsError as error:
            raise exists_error(self, name) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        sync_directory(self.directory)

    def delete(self, name: str, *, version: VersionTag | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.directory / name)

    def rename(self, name: str, target: str, *, replace: bool) -> None:
        if replace:
            os.replace(self.directory / name, self.directory / target)
            return
        try:
            _rename_new(self.directory / name, self.directory / target)
        except FileExistsError as error:
            raise exists_error(self, target) from error
        sync_directory(self.directory)
        # after the sync: a power loss leaves at least one of the two names
        self.delete(name)


def _rename_new(source: Path, target: Path) -> None:
    """Renames a file to a name that must be free: by a hard link, which fails if the name exists, unlike a rename."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        # no hard links (FAT, some network and FUSE file systems): two writers at one moment may both succeed
        if os.path.lexists(target):
            raise FileExistsError(target) from error
        os.rename(source, target)


class LocalRun(RunStore):
    """A run in a local directory. The path is absolute, so it survives a change of the working directory."""

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        self.path = Path(path).absolute()
        self.follow_links = follow_links

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(local_path=self.path)

    @property
    def url(self) -> str:
        return str(self.path)

    def _names(self, chosen: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        """Returns the names of the entries that are chosen; none if there is no such directory.

        Raises:
            StoreError: it could not be read. Taken for an empty run, the caller would start training from scratch.
        """
        try:
            with os.scandir(self.path) as entries:
                return sorted(entry.name for entry in entries if chosen(entry))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise wrap_read_error(error, self.url) from error

    def names(self) -> list[str]:
        return self._names(lambda entry: not entry.name.startswith(".") and entry.is_dir())

    def has_directory(self, chosen: Callable[[str], bool]) -> bool:
        try:
            with os.scandir(self.path) as entries:
                return any(chosen(entry.name) and entry.is_dir() for entry in entries)
        except OSError as error:
            if not shows_damage(error):
                raise wrap_read_error(error, self.url) from error
            return False

    def holds(self, name: str) -> bool:
        return (self.path / name).is_file()

    def linked_names(self) -> list[str]:
        return self._names(lambda entry: entry.is_symlink())

    def modified_times(self) -> dict[str, int | None]:
        """Returns when each checkpoint was last changed, by name; takes a few microseconds for each.

        Raises:
            StoreError: as `names`.
        """
        times: dict[str, int | None] = {}

        def is_listed(entry: os.DirEntry[str]) -> bool:
            try:
                state = entry.stat()
            except OSError as error:  # another process may be deleting, a link may lead nowhere
                if not shows_damage(error):
                    raise
                return False
            listed = stat.S_ISDIR(state.st_mode) or self.is_checkpoint_file(entry, state)
            times[entry.name] = state.st_mtime_ns
            return listed

        names = self._names(lambda entry: not entry.name.startswith(".") and is_listed(entry))
        return {name: times[name] for name in names}

    def is_checkpoint_file(self, entry: os.DirEntry[str], at: os.stat_result) -> bool:
        """Whether an entry that is no directory is listed as a checkpoint too."""
        return False

    def folder(self, name: str) -> LocalStore:
        return LocalStore(self.path / name, follow_links=self.follow_links)


FAR_FILE_SYSTEMS = {
    0x6969,  # NFS
    0x0BD00BD0,  # Lustre
    0x47504653,  # GPFS
    0x65735546,  # FUSE
    0x00C36400,  # CephFS
    0x19830326,  # BeeGFS
    0x01021997,  # 9p
    0x517B,  # SMB, and its later versions
    0xFF534D42,
    0xFE534D42,
    0x5346414F,  # AFS
    0x20030528,  # PVFS2
    0xAAD7AAEA,  # PanFS
}
"""Magic numbers of file systems whose bytes usually come through a network."""
FIRST_FAR_READS, MAX_FAR_READS = 16, 64
"""Reads in flight at first, and at most: 16 of 8 MiB at 20 ms come to 6 GB/s where the network carries them."""
DIRECT_TRIALS = 3
"""Comparisons of reads past and through the page cache, before the faster way is preferred."""
COMPARED_NBYTES = 256 << 10
"""Bytes that are read each way for one comparison."""
CACHE_TIME_SHARE = 0.7
"""Reads through the page cache are preferred where they take at most this part of the seconds of reads past it."""


def for_reading(store: Store) -> Store:
    """Returns a store that reads the same files with many reads in flight, for a directory of a far file system."""
    # a subclass may give other bytes than its files hold, and a `FarStore` would read the files themselves
    if type(store) is LocalStore and file_system(store.directory) in FAR_FILE_SYSTEMS:
        return FarStore(store.directory, follow_links=store.follow_links).sharing(store.places)
    return store


class DirectChoice:
    """Whether to read past the page cache: parts of the first reads are read both ways, then the faster one stays."""

    def __init__(self) -> None:
        self._begun = itertools.count(1)
        self._seconds: list[tuple[float, float]] = []
        """The seconds of each comparison, past and through the page cache."""
        self.direct = True

    def read_into(self, reader: LocalReader, offset: int, out: memoryview) -> None:
        """Fills `out` with bytes of a file that are not cached."""
        if len(out) >= 4 * COMPARED_NBYTES and next(self._begun) <= DIRECT_TRIALS:
            begin = time.monotonic()
            reader.read_into(offset, out[:COMPARED_NBYTES])
            middle = time.monotonic()
            reader.read_into(offset + COMPARED_NBYTES, out[COMPARED_NBYTES : 2 * COMPARED_NBYTES], shared=True)
            self.add(middle - begin, time.monotonic() - middle)
            offset, out = offset + 2 * COMPARED_NBYTES, out[2 * COMPARED_NBYTES :]
        reader.read_into(offset, out, shared=not self.direct)

    def add(self, past: float, through: float) -> None:
        """Counts a comparison: the seconds that as many bytes took past and through the page cache."""
        self._seconds.append((past, through))
        if len(self._seconds) == DIRECT_TRIALS:
            # the median: one slow answer decides nothing
            past, through = (sorted(times)[DIRECT_TRIALS // 2] for times in zip(*self._seconds, strict=True))
            self.direct = through > CACHE_TIME_SHARE * past


class FarStore(LocalStore):
    """A directory of a file system whose reads take long, so that many are in flight at once. It is only read."""

    request_nbytes = 8 << 20

    def __init__(self, directory: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        super().__init__(directory, follow_links=follow_links)
        self.choice = DirectChoice()
        self._fetchers = [
            RangeFetcher(
                partial(self._fetch_one, shared),
                _is_final,
                tries=1,
                depth=RequestDepth(FIRST_FAR_READS, most=MAX_FAR_READS),
            )
            for shared in (False, True)
        ]

    def sharing(self, places: Mapping[str, str]) -> FarStore:
        store = FarStore(self.directory, follow_links=self.follow_links)  # a copy would fetch by the store it is of
        store.places = {**self.places, **places}
        return store

    @property
    def traits(self) -> StoreTraits:
        return msgspec.structs.replace(super().traits, far=True, request_nbytes=self.request_nbytes)

    def fetch(
        self,
        ranges: Sequence[FileRange],
        consume: Consume,
        *,
        memory: int,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        self._fetchers[shared].run(ranges, consume, memory=memory, first=first)

    def _fetch_one(self, shared: bool, wanted: FileRange) -> RangeResponse:
        """Reads a range, less what lies behind the end of the file, through the page cache if it is `shared`."""
        name, offset, nbytes = wanted
        with self._reader(name) as reader:
            size = os.fstat(reader.fd).st_size
            nbytes = max(min(nbytes, size - offset), 0)
            out = aligned_buffer(-(-nbytes // PAGE_NBYTES) * PAGE_NBYTES, huge=True)[:nbytes]
            if shared or is_cached(reader.fd, offset, nbytes):
                reader.read_into(offset, out, shared=True)
            else:
                self.choice.read_into(reader, offset, out)
        return RangeResponse(size, [out])


def _is_final(error: Exception) -> FetchFailure:
    """No error of a file system is tried again: the kernel has done so."""
    return FetchFailure(throttled=False, temporary=False)


# paths and URLs -------------------------------------------------------------------------------------------------------

OBJECT_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl"})
"""URL schemes that obstore serves; fsspec serves all others, except file://."""

_LOCAL = ("file://", "local://")
_LOST_SLASH = re.compile(rf"(?:^[a-zA-Z][\w+.-]+|(?<=/)(?:{'|'.join(sorted(OBJECT_SCHEMES))})):/(?=[^/])")
"""The beginning of a URL of which `pathlib` or `os.path` has taken a slash away, also below a directory."""


def is_url(path: object) -> TypeGuard[str]:
    """Whether a path is a URL, other than that of a local directory."""
    return isinstance(path, str) and "://" in path and not path.startswith(_LOCAL)


def local_path(path: str) -> str:
    """Returns the path of a file:// URL; a path is returned as it is.

    Raises:
        CheckpointError: the path is empty, which pathlib takes for the current directory, no file can have it, or it
            is a URL that lost a slash.
    """
    check_path(path)
    for scheme in _LOCAL:
        path = path.removeprefix(scheme)
    if lost := _LOST_SLASH.search(path):
        url = path[lost.start() :]
        raise CheckpointError(
            "path",
            expected="a path, or a URL with ://",
            found=f"{url:.200}",
            hint=f"Give {url.replace(':/', '://', 1):.200} as text, without pathlib and os.path, which make one slash "
            f"of two; or ./{url:.200} for a local directory of this name",
        )
    if not path:
        hint = "Pass '.' for the current directory"
        raise CheckpointError("path", expected="a path, a URL or a store", found="an empty one", hint=hint)
    return path


def check_path(path: str) -> None:
    """Checks that a file can have this path or URL.

    Raises:
        CheckpointError: it contains a zero byte, or code points that cannot be encoded.
    """
    try:
        if is_url(path):
            path.encode()  # unlike a path, a URL cannot hold undecodable bytes of a file name
        if "\0" not in os.fsencode(path).decode("utf-8", "surrogateescape"):
            return
        found = "a zero in"
    except UnicodeEncodeError:
        found = "half of a pair of code points in"
    hint = "Look for where the path comes from"
    raise CheckpointError("path", expected="a path that a file can have", found=f"{found} {path!r:.200}", hint=hint)
