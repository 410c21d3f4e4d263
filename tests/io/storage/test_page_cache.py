"""The page cache is asked truly, by either way that kernels have, and never believed where it may not tell."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from treeckpt._io.storage import local_files
from treeckpt._io.storage.local_files import LocalReader, is_cached
from treeckpt._io.storage.memory import aligned_buffer

PAGE = mmap.PAGESIZE
PAGES = 64


@pytest.fixture(params=["count", "map"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the kernel is asked: by cachestat where there is one, or as older ones are."""
    if request.param == "map":
        monkeypatch.setattr(local_files, "has_cachestat", False)
    return request.param


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file on the device, no page of which is in the cache."""
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGES * PAGE))
    forget(path)
    return path


def forget(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        if is_cached(file.fileno(), 0, PAGE):
            pytest.skip("this file system lives in the page cache")


def test_what_was_read_is_cached_and_what_was_not_is_not(file: Path, way: str) -> None:
    with file.open("rb", buffering=0) as opened:
        fd = opened.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        assert not is_cached(fd, 8 * PAGE, PAGE)
        os.pread(fd, 4 * PAGE, 8 * PAGE)
        assert is_cached(fd, 8 * PAGE, 4 * PAGE)
        assert is_cached(fd, 8 * PAGE + 1, 4 * PAGE - 2)
        assert not is_cached(fd, 8 * PAGE - 1, PAGE)
        assert not is_cached(fd, 0, PAGES * PAGE)
        os.pread(fd, PAGES * PAGE, 0)
        assert is_cached(fd, 0, PAGES * PAGE)


def test_nothing_and_what_lies_past_the_end_are_not_cached(file: Path, way: str) -> None:
    with file.open("rb", buffering=0) as opened:
        os.pread(opened.fileno(), PAGES * PAGE, 0)
        assert not is_cached(opened.fileno(), 0, 0)
        assert not is_cached(opened.fileno(), (PAGES - 1) * PAGE, 2 * PAGE)
        assert not is_cached(opened.fileno(), 2 * PAGES * PAGE, PAGE)


def test_what_is_not_cached_is_read_past_the_cache_into_memory_that_is_aligned_as_the_file(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "file", 32 * PAGE + 100
    content = np.random.default_rng(0).bytes(PAGES * PAGE)
    path.write_bytes(content)
    forget(path)
    reader = LocalReader(path)
    aligned, shifted = aligned_buffer(nbytes), aligned_buffer(nbytes + 64)[64:]
    for parts in ([shifted], [aligned[:PAGE], aligned[PAGE:]], [aligned[: 2 * PAGE]]):
        assert not reader.read_parts(4 * PAGE, parts), "unaligned, several, and too few"
    assert reader._direct_fd() >= 0 and not any(aligned) and not any(shifted)  # pyright: ignore[reportPrivateUsage]
    assert reader.read_parts(4 * PAGE, [aligned])
    assert bytes(aligned) == content[4 * PAGE : 4 * PAGE + nbytes]
    assert not is_cached(reader.fd, 4 * PAGE, 32 * PAGE), "the page cache was passed by"
    reader.close()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("answers", [True, False])
def test_a_file_of_somebody_else_is_never_taken_for_cached(file: Path, answers: bool) -> None:
    """The kernel may say that all of it is, to tell nothing: each load would go through the page cache."""
    code = f"""
import os
from treeckpt._io.storage import local_files as residency
residency.has_cachestat &= {answers}
fd = os.open({str(file)!r}, os.O_RDONLY)
os.seteuid(65534)
print(residency.is_cached(fd, 0, {PAGE}))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
