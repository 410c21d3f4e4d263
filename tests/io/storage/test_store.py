"""Every Store keeps the same promises; the local one also on file systems and under names that make it hard."""

from __future__ import annotations

import errno
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import treeckpt as tc
from tests.helpers.background import files_open
from tests.helpers.s3 import S3
from treeckpt._io.storage import local_files, local_store
from treeckpt._io.storage.local_files import LocalReader
from treeckpt._io.storage.local_store import FarStore, LocalStore
from treeckpt._io.storage.memory import aligned_buffer
from treeckpt._io.storage.open import open_store
from treeckpt._io.storage.store import DirectoryEntry, MemoryStore, Store
from treeckpt._io.storage.wrapped_store import WrappedStore
from treeckpt.testing import StoreSuite, write_file

MEMORY_DISK = Path("/dev/shm")
BLOCK = 1 << 20


def pattern(nbytes: int) -> bytes:
    return bytes(range(251)) * (nbytes // 251) + bytes(range(nbytes % 251))


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        yield MemoryStore()


class _Undated(MemoryStore):
    """A store that does not know when its files were written."""

    def entries(self) -> dict[str, DirectoryEntry]:
        return {name: msgspec.structs.replace(entry, modified_ns=0) for name, entry in super().entries().items()}


class TestStoreWithoutTimes(StoreSuite):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        yield _Undated()


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = LocalStore(tmp_path / "above" / "it")
        yield store
        store.close()


class TestFarStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = FarStore(tmp_path)
        yield store
        store.close()


class TestS3Store(StoreSuite):
    maps = False

    @pytest.fixture
    def store(self, s3: S3) -> Iterator[Store]:
        store = s3.store(endpoint=f"http://127.0.0.1:{s3.port}")
        yield store
        store.close()


class TestFilesystemStore(StoreSuite):
    """fsspec's file system in memory."""

    maps = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        yield tc.ObjectStore(f"memory://{tmp_path}/it")


@pytest.mark.skipif(not MEMORY_DISK.is_dir(), reason="needs a tmpfs")
class TestLocalStoreInMemory(StoreSuite):
    """A file system that keeps its files in the page cache."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        import tempfile

        with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as directory:
            store = LocalStore(directory)
            yield store
            store.close()


class _CopiedStore(MemoryStore):
    """A store in memory of which pickle makes another one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _CopiedStore, ()


@pytest.mark.parametrize("follow", [None, False, True])
def test_a_writer_process_follows_links_as_the_store_does(
    tmp_path: Path, follow: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path, follow_links=follow)
    address = store.address()
    assert address is not None
    monkeypatch.setenv("TREECKPT_FOLLOW_LINKS", "0" if follow else "1")
    opened = pickle.loads(address)
    assert type(opened) is LocalStore and opened.directory == tmp_path
    assert opened.follow_links is store.follow_links is bool(follow)


def test_a_store_that_only_this_process_has_has_no_address(tmp_path: Path) -> None:
    here = [_CopiedStore(), tc.ObjectStore(f"memory://{tmp_path}/it"), MemoryStore()]
    assert [one.address() for store in here for one in (store, WrappedStore(store))] == 6 * [None]


class _NoDirect:
    """os, for a file system that refuses O_DIRECT: at open, or only at the first read or write."""

    def __init__(self, *, at_open: bool) -> None:
        self.at_open, self.refused = at_open, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _refuse(self) -> None:
        self.refused += 1
        raise OSError(errno.EINVAL, "no O_DIRECT here")

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if self.at_open and flags & os.O_DIRECT:
            os.close(os.open(path, flags & ~os.O_DIRECT, mode))  # Linux has made the file when it refuses the flag
            self._refuse()
        return os.open(path, flags, mode)

    def _check(self, fd: int) -> None:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            self._refuse()

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        self._check(fd)
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "no RWF_NOWAIT here")
        self._check(fd)
        return os.preadv(fd, buffers, offset)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="needs O_DIRECT")
class TestLocalStoreBuffered(StoreSuite):
    """The fallback of writes and reads where O_DIRECT is refused."""

    @pytest.fixture(params=["at open", "at first use"])
    def store(self, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        fake = _NoDirect(at_open=request.param == "at open")
        monkeypatch.setattr(local_store, "os", fake)
        monkeypatch.setattr(local_files, "os", fake)
        store = LocalStore(tmp_path / "buffered")
        yield store
        store.close()

    def test_the_fallback_is_what_was_tested(self, store: Store) -> None:
        store.prepare()
        write_file(store, "a", pattern(5000))
        assert local_store.os.refused > 0  # pyright: ignore[reportAttributeAccessIssue]


# what only the local store can meet -----------------------------------------------------------------------------------
def plant(directory: Path, name: str, kind: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    if kind == "symlink":
        (directory.parent / "secret").write_bytes(b"secret" * 2000)
        path.symlink_to(directory.parent / "secret")
    elif kind == "dangling symlink":
        path.symlink_to(directory.parent / "nowhere")
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()


KINDS = ["symlink", "dangling symlink", "FIFO", "directory"]


def refusal_of(kind: str) -> type[tc.TreeckptError]:
    """The error of what is no file; a link out of the run says nothing of what it leads to."""
    return tc.StoreError if kind == "symlink" else tc.CorruptError


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
class TestHostileNames:
    def test_reading_is_refused(self, tmp_path: Path, kind: str) -> None:
        plant(tmp_path / "c", "index.json", kind)
        store = LocalStore(tmp_path / "c")
        assert store.sizes() == {}
        for act in (
            lambda: store.read("index.json", limit=1 << 20),
            lambda: store.read_into("index.json", 0, aligned_buffer(4096)),
            lambda: store.map("index.json", 0, 4096),
        ):
            with pytest.raises(refusal_of(kind), match=r"index\.json: expected a regular file"):
                act()
        with pytest.raises((tc.CheckpointError, tc.StoreError), match=r"index\.json"):
            tc.inspect(tmp_path / "c")

    def test_creating_is_refused(self, tmp_path: Path, kind: str) -> None:
        plant(tmp_path / "c", "a", kind)
        with pytest.raises(FileExistsError):
            LocalStore(tmp_path / "c").create("a", 10)
        assert not (tmp_path / "nowhere").exists()

    def test_publishing_never_writes_through_it(self, tmp_path: Path, kind: str) -> None:
        plant(tmp_path / "c", "index.json", kind)
        store = LocalStore(tmp_path / "c")
        with pytest.raises(tc.CheckpointExists):
            store.publish("index.json", b"new", replace=False)
        if kind == "directory":
            with pytest.raises(OSError):
                store.publish("index.json", b"new", replace=True)
        else:
            store.publish("index.json", b"new", replace=True)
            assert store.read("index.json", limit=3) == b"new"
        assert not (tmp_path / "nowhere").exists()
        if kind == "symlink":
            assert (tmp_path / "secret").read_bytes() == b"secret" * 2000
        assert [p.name for p in (tmp_path / "c").iterdir()] == ["index.json"]

    def test_a_shard_of_that_kind_is_refused(self, tmp_path: Path, kind: str) -> None:
        import numpy as np

        path = tmp_path / "c"
        (name,) = tc.save(path, {"w": np.arange(5000)}).files
        os.rename(path / name, tmp_path / "moved")
        plant(path, name, kind)
        with pytest.raises(refusal_of(kind), match=name):
            tc.load(path)
        assert not tc.verify(path).ok


def test_a_fifo_with_a_writer_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.json")
    writer = os.open(tmp_path / "index.json", os.O_RDWR | os.O_NONBLOCK)
    try:
        with pytest.raises(tc.CorruptError, match="expected a regular file"):
            LocalStore(tmp_path).read("index.json", limit=100)
    finally:
        os.close(writer)


def test_a_file_that_vanishes_while_listing_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"x")
    real = os.scandir

    class Vanishing:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.entry, self.name = entry, entry.name

        def is_file(self, *, follow_symlinks: bool) -> bool:
            return True

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            if self.name == "b":
                raise FileNotFoundError(self.name)
            return self.entry.stat(follow_symlinks=follow_symlinks)

    class Listing:
        def __init__(self, path: Any) -> None:
            self.inner = real(path)

        def __enter__(self) -> Iterator[Vanishing]:
            return map(Vanishing, self.inner)

        def __exit__(self, *_: object) -> None:
            self.inner.close()

    def scandir(path: Any = ".") -> Any:
        return Listing(path) if path == tmp_path else real(path)  # threads of tests before may list other directories

    monkeypatch.setattr(os, "scandir", scandir)
    assert LocalStore(tmp_path).sizes() == {"a": 1, "c": 1}


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_publishing_works_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(code, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    store = LocalStore(tmp_path)
    store.publish("index.json", b"one", replace=False)
    with pytest.raises(tc.CheckpointExists):
        store.publish("index.json", b"two", replace=False)
    assert store.read("index.json", limit=3) == b"one" and list(store.sizes()) == ["index.json"]


def test_a_published_file_is_durable_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, here = list[str](), threading.get_ident()

    def noted(name: str, call: Any) -> Any:
        def act(*arguments: Any) -> Any:
            if threading.get_ident() == here:  # not what threads of other tests still do
                calls.append(name)
            return call(*arguments)

        return act

    for name in ("fsync", "replace", "link"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    store = LocalStore(tmp_path)
    store.publish("index.json", b"one", replace=False)
    store.publish("index.json", b"two", replace=True)
    assert calls == ["fsync", "link", "fsync", "fsync", "replace", "fsync"], "the file, the name, the directory"


def test_each_directory_is_durable_before_anything_is_made_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Path, int]] = []
    monkeypatch.setattr(local_files, "sync_directory", lambda path: seen.append((path, len(list(tmp_path.rglob("*"))))))
    LocalStore(tmp_path / "a" / "b").prepare()
    assert seen == [(tmp_path.parent, 0), (tmp_path, 1), (tmp_path / "a", 2)]
    seen.clear()
    LocalStore(tmp_path / "a" / "b").prepare()
    assert seen == [(tmp_path / "a", 2)], "who made it may have been killed before it did so"


def test_a_short_write_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: real(fd, data[: max(4096, len(data) // 2 // 4096 * 4096)], at)
    )
    store = LocalStore(tmp_path)
    write_file(store, "a", pattern(300_001))
    assert store.read("a", limit=1 << 20) == pattern(300_001)


def test_writers_to_a_file_that_refuses_o_direct_all_go_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse it at the first write, which two threads may meet at once."""
    store, refused = LocalStore(tmp_path), threading.Barrier(2)
    writer: Any = store.create("x", 2 * BLOCK)
    pwrite, first = os.pwrite, list[int]()

    def refuse(fd: int, data: Any, offset: int) -> int:
        if len(first) < 2:
            first.append(offset)
            if refused.wait(30):  # both are in their calls now; one of them is told when the other has gone on without
                while writer.direct:
                    time.sleep(0.001)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    writer.direct = True
    data = [bytes([n]) * BLOCK for n in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(writer.write, n * BLOCK, memoryview(data[n])) for n in (0, 1)]
    for job in jobs:
        job.result()
    writer.commit()
    assert (tmp_path / "x").read_bytes() == b"".join(data)


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_full_disk_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=r"No space left on device: .*/shard"):
        write_file(store, "shard", b"x" * BLOCK)


def test_a_disk_that_takes_nothing_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match="the disk wrote nothing"):
        write_file(LocalStore(tmp_path), "a", pattern(10))


def test_reading_leaves_no_file_open(tmp_path: Path) -> None:
    import numpy as np

    tc.save(tmp_path / "c", {f"k{n}": np.arange(100) for n in range(50)}, max_shard_bytes=1000)
    tc.load(tmp_path / "c", read=tc.ReadOptions(copy=True))
    tc.verify(tmp_path / "c")
    tc.inspect(tmp_path / "c")
    assert files_open(tmp_path) == []


def test_a_store_that_is_dropped_closes_its_files(tmp_path: Path) -> None:
    write_file(LocalStore(tmp_path), "a", pattern(100_000))
    store = LocalStore(tmp_path)
    store.read_into("a", 0, aligned_buffer(4096))
    assert files_open(tmp_path) == [str(tmp_path / "a")]
    del store
    assert files_open(tmp_path) == []


def test_a_reader_can_be_closed_twice(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    reader = LocalReader(tmp_path / "a")
    reader.close()
    other = os.open(tmp_path / "a", os.O_RDONLY)
    reader.close()
    os.fstat(other)
    os.close(other)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nosuch://host/x", "a URL that fsspec knows"),
        ("s3://", r"expected s3://bucket/path, found no bucket"),
        ("s3://bucket/../other", "a step up"),
        ("memory://a/../../b", "a step up"),
        ("memory://", "found nothing after memory://"),
        ("://x", "a URL that fsspec knows"),
    ],
)
def test_urls_that_lead_nowhere_are_refused(url: str, text: str) -> None:
    with pytest.raises(tc.StoreError, match=text):
        open_store(url)


@pytest.mark.parametrize("path", [Path("s3://b/run"), Path("memory://run"), Path("s3://b/run").absolute(), "file:/a"])
def test_a_url_that_lost_a_slash_is_refused_and_no_local_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path | str
) -> None:
    """`pathlib.Path` makes one slash of two; the checkpoint went to a local directory of the name `s3:`."""
    monkeypatch.chdir(tmp_path)
    for call in (lambda: tc.save(path, {"a": 1}), lambda: tc.load(path), lambda: tc.Manager(path).latest()):
        with pytest.raises(tc.CheckpointError, match=r"found (s3|memory|file):/\w.*://\w.*as text, without pathlib"):
            call()
    assert not list(tmp_path.iterdir())
    assert isinstance(open_store("./exp:/run"), LocalStore) and isinstance(open_store("C:/run"), LocalStore)


@pytest.mark.parametrize(
    ("url", "module", "extra"), [("gs://b/x", "obstore", "object"), ("ftp://h/x", "fsspec", "fsspec")]
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str
) -> None:
    for name in ("obstore", "obstore.store", "fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(tc.StoreError, match=rf"expected {module}.* pip install 'treeckpt\[{extra}\]'"):
        open_store(url)


def test_file_urls_are_paths(tmp_path: Path) -> None:
    for scheme in ("file", "local"):
        store = open_store(f"{scheme}://{tmp_path}/c")
        assert isinstance(store, LocalStore) and store.directory == tmp_path / "c"


def test_a_read_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    (name,) = tc.save(tmp_path / "c", {"w": np.arange(5000)}).files

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(tc.StoreError, match="expected files that can be read, found OSError") as caught:
        tc.load(tmp_path / "c")
    assert str(tmp_path / "c" / name) in str(caught.value)
