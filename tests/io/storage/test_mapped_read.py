"""Bytes are lent where they lie in the page cache, and nobody can pull them away meanwhile."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import treeckpt as tc
from treeckpt._io.storage import local_files
from treeckpt._io.storage.local_files import LocalReader, MappedReader, is_cached
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.memory import HUGE

PAGE = mmap.PAGESIZE
NBYTES = 1 << 20
SECONDS = 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is lent without the kernel's leases")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file in the page cache, of this user."""
    path = tmp_path / "file"
    path.write_bytes(np.arange(NBYTES, dtype=np.uint32).astype(np.uint8).tobytes())
    return path


@pytest.fixture
def lender(file: Path) -> Iterator[MappedReader]:
    fd = os.open(file, os.O_RDONLY)
    lender = MappedReader(fd)
    with lender.mapped(0, NBYTES) as memory:
        able = memory is not None
    if not able:
        os.close(fd)
        pytest.skip("this kernel or file system lends nothing")
    yield lender
    os.close(fd)


def refused(path: Path) -> bool:
    """Whether another process that opens the file to write is told to wait."""
    code = f"import os; os.open({str(path)!r}, os.O_WRONLY | os.O_NONBLOCK)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode or "BlockingIOError" in done.stderr, done.stderr
    return bool(done.returncode)


def waiting(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


# what is lent ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("offset", [0, PAGE, PAGE + 24, 3])
def test_what_is_lent_is_what_the_file_holds(file: Path, lender: MappedReader, offset: int) -> None:
    with lender.mapped(offset, NBYTES // 2) as memory:
        assert memory is not None and memory == file.read_bytes()[offset : offset + NBYTES // 2]


def test_what_is_written_to_it_stays_out_of_the_file(file: Path, lender: MappedReader) -> None:
    before = file.read_bytes()
    with lender.mapped(0, NBYTES) as memory:
        assert memory is not None
        memory[:] = bytes(NBYTES)
    assert file.read_bytes() == before


def test_little_and_what_lies_past_the_end_are_not_lent(lender: MappedReader) -> None:
    for offset, nbytes in ((0, 100), (NBYTES - PAGE, NBYTES), (2 * NBYTES, NBYTES)):
        with lender.mapped(offset, nbytes) as memory:
            assert memory is None


def test_what_is_not_in_the_cache_is_not_lent(file: Path, lender: MappedReader) -> None:
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(fd, 0, NBYTES):
        pytest.skip("this file system lives in the page cache")
    with lender.mapped(0, NBYTES) as memory:
        assert memory is None and not is_cached(fd, 0, NBYTES), "and asking does not read it"
    os.close(fd)


def test_what_is_to_be_fetched_is_lent_and_stays_in_the_cache(tmp_path: Path, lender: MappedReader) -> None:
    path, data = tmp_path / "large", bytes(range(256)) * (3 * HUGE // 256)
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with MappedReader(fd).mapped(5, 2 * HUGE, fetch=True) as memory:
        assert memory == data[5 : 5 + 2 * HUGE] and is_cached(fd, 5, 2 * HUGE)
    with MappedReader(fd).mapped(HUGE, 3 * HUGE, fetch=True) as memory:
        assert memory is None, "past the end"
    os.close(fd)


def test_an_error_passes_though_its_traceback_holds_an_array_of_what_was_lent(lender: MappedReader) -> None:
    def fail(memory: memoryview | None) -> None:
        assert memory is not None
        array = np.frombuffer(memory, np.uint8)
        raise RuntimeError(f"at {array[5]}")

    with pytest.raises(RuntimeError, match="at 5"), lender.mapped(0, NBYTES) as memory:
        fail(memory)


# the guard ------------------------------------------------------------------------------------------------------------
def test_who_would_write_is_held_off_until_all_is_given_back(file: Path, lender: MappedReader) -> None:
    with lender.mapped(0, NBYTES):
        with lender.mapped(0, NBYTES) as second:
            assert second is not None and refused(file)
        assert refused(file)
    assert not refused(file)


def test_nothing_is_lent_while_somebody_has_it_open_to_write(file: Path, lender: MappedReader) -> None:
    with file.open("rb+"), lender.mapped(0, NBYTES) as memory:
        assert memory is None
    with lender.mapped(0, NBYTES) as memory:
        assert memory is not None


def test_a_file_that_is_cut_short_is_cut_after_it_was_given_back(file: Path, lender: MappedReader) -> None:
    before = file.read_bytes()
    with lender.mapped(0, NBYTES) as memory:
        assert memory is not None
        thread = waiting(lambda: os.truncate(file, 10))
        while fcntl.fcntl(lender.fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
            assert thread.is_alive()  # it is on its way to the file
        with lender.mapped(0, NBYTES) as more:
            assert more is None, "somebody waits"
        assert memory == before and thread.is_alive()
    thread.join(SECONDS)
    assert not thread.is_alive() and file.stat().st_size == 10
    with lender.mapped(0, NBYTES) as memory:
        assert memory is None


def test_threads_that_borrow_all_the_time_do_not_starve_who_would_write(file: Path, lender: MappedReader) -> None:
    stop = threading.Event()
    lent: list[bool] = []

    def borrow() -> None:
        while not stop.is_set():
            with lender.mapped(0, NBYTES) as memory:
                lent.append(memory is not None)

    threads = [waiting(borrow) for _ in range(4)]
    for _ in range(20):
        writer = waiting(lambda: file.open("rb+").close())
        writer.join(SECONDS)
        assert not writer.is_alive()
    stop.set()
    for thread in threads:
        thread.join()
    assert any(lent)
    with lender.mapped(0, NBYTES) as memory:
        assert memory is not None, "and all was given back"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another user")
def test_files_of_others_are_not_lent(file: Path, lender: MappedReader) -> None:
    code = f"""
import os
from treeckpt._io.storage.local_files import MappedReader
fd = os.open({str(file)!r}, os.O_RDONLY)
os.setresuid(65534, 65534, 65534)
lender = MappedReader(fd)
for _ in range(2):
    with lender.mapped(0, {NBYTES}) as memory:
        print(memory)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["None", "None"]


def test_a_forked_process_borrows_nothing_from_the_file_of_its_parent(lender: MappedReader) -> None:
    pid = os.fork()
    if not pid:
        with lender.mapped(0, NBYTES) as memory:
            os._exit(memory is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_gives_back_nothing_of_its_parents(file: Path, lender: MappedReader) -> None:
    pid = -1
    try:
        with lender.mapped(0, NBYTES):
            if not (pid := os.fork()):
                return
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert refused(file)
    finally:
        if not pid:
            os._exit(0)
    assert not refused(file)


def test_an_interrupt_while_memory_is_given_back_leaves_no_guard(
    file: Path, lender: MappedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(mmap.mmap):
        def close(self) -> None:
            super().close()
            raise KeyboardInterrupt

    monkeypatch.setattr(mmap, "mmap", Interrupted)
    with pytest.raises(KeyboardInterrupt), lender.mapped(0, NBYTES):
        pass
    monkeypatch.undo()
    assert not refused(file)
    with lender.mapped(0, NBYTES) as memory:
        assert memory is not None


def test_a_reader_that_was_closed_lends_nothing_though_its_descriptor_is_another_file_now(
    file: Path, lender: MappedReader, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(NBYTES))
    reader = LocalReader(file)
    early = reader.mapped(0, NBYTES, fetch=True)
    fd, begun = reader.fd, reader.mapped(0, NBYTES, fetch=True)
    assert begun.__enter__() == file.read_bytes()
    reader.close()
    second = LocalReader(other)
    assert second.fd == fd
    with second.mapped(0, NBYTES, fetch=True) as memory:
        begun.__exit__(None, None, None)
        assert memory == other.read_bytes() and refused(other)
        with early as nothing:
            assert nothing is None
    assert not refused(file) and not refused(other)
    second.close()


def test_a_reader_that_is_closed_at_that_moment_lends_nothing(
    file: Path, lender: MappedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LocalReader(file)
    original = MappedReader.take

    def closing(self: MappedReader, holder: object) -> bool:
        taken = original(self, holder)
        reader.close()
        return taken

    monkeypatch.setattr(MappedReader, "take", closing)
    with reader.mapped(0, NBYTES, fetch=True) as memory:
        assert memory is None


def test_a_reader_that_nobody_keeps_stays_open_while_it_lends(file: Path, lender: MappedReader) -> None:
    with LocalReader(file).mapped(0, NBYTES, fetch=False) as memory:
        assert memory is not None and refused(file)
    assert not refused(file)


def test_only_file_systems_whose_files_nobody_else_changes_lend(file: Path, lender: MappedReader) -> None:
    fds = [os.open(path, os.O_RDONLY) for path in (file, "/proc/self/status")]
    assert [local_files.file_system(fd) in local_files.LEASED_FILE_SYSTEMS for fd in (*fds, -1)] == [True, False, False]
    for fd in fds:
        os.close(fd)


# loads ----------------------------------------------------------------------------------------------------------------
def test_a_load_survives_a_shard_that_is_cut_short_under_it_again_and_again(
    tmp_path: Path, lender: MappedReader
) -> None:
    """Touching memory of a file that was cut short ends a process; loads end with an error, or are not disturbed."""
    path = tmp_path / "x"
    tc.save(path, {"w": np.arange(1 << 20).reshape(1024, 1024)})
    [shard] = path.glob("*.safetensors")
    whole = shard.read_bytes()
    code = f"""
import numpy as np
import treeckpt as tc
tree = {{"w": np.zeros((1024, 512), np.int64)}}
expected = np.arange(1 << 20).reshape(1024, 1024)[:, 256:768]
found = []
like = {{"w": tc.Sharded(tree["w"], (1024, 1024), offset=(0, 256))}}
print("ready", flush=True)
while len(found) < 300 or len(set(found)) < 2:
    try:
        tc.load_into({str(path)!r}, like)
        assert np.array_equal(tree["w"], expected)
        found.append("loaded")
    except tc.CorruptError:
        found.append("refused")
print(*sorted(set(found)))
"""
    loader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert loader.stdout is not None and loader.stdout.readline() == "ready\n"
    draw = random.Random(0)
    while loader.poll() is None:
        time.sleep(draw.uniform(0, 0.01))
        os.truncate(shard, len(whole) // 2)
        with shard.open("rb+") as opened:
            opened.write(whole)
    said = loader.stdout.read()
    loader.stdout.close()
    assert loader.returncode == 0, said
    assert said.split() == ["loaded", "refused"]


class _Noted(LocalStore):
    """Notes what is read rather than lent."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.read_names: list[str] = []

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        if len(out) >= local_files.LEAST_MAPPED:
            self.read_names.append(name)
        super().read_into(name, offset, out, shared=shared)


@pytest.mark.parametrize("verify", [True, "first", "stream", False])
def test_parts_of_rows_come_from_lent_memory_and_are_no_read_of_their_own(
    tmp_path: Path, lender: MappedReader, verify: bool | str
) -> None:
    saved = torch.arange(1 << 20).reshape(1024, 1024)
    tc.save(tmp_path / "x", {"w": saved})
    for shard in (tmp_path / "x").glob("*.safetensors"):
        shard.read_bytes()  # into the page cache
    store, part = _Noted(tmp_path / "x"), torch.zeros(1024, 512, dtype=torch.int64)
    report = tc.load_into(
        store, {"w": tc.Sharded(part, (1024, 1024), offset=(0, 256))}, read=tc.ReadOptions(verify=verify)
    )  # pyright: ignore[reportArgumentType]
    assert torch.equal(part, saved[:, 256:768]) and not store.read_names
    assert report.read_nbytes == saved.nbytes
    store.close()
