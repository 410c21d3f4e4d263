"""Without the system calls that macOS or Windows lack everything works, by what stands in for them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.other_systems import run_on
from treeckpt._io.storage import local_files
from treeckpt._io.storage.local_files import open_regular
from treeckpt.errors import CorruptError


@pytest.mark.parametrize("system", ["windows", pytest.param("macos", marks=pytest.mark.slow)])
def test_saves_loads_conversions_and_commands_work_without_what_is_missing(system, tmp_path: Path) -> None:
    assert "all as it was" in run_on(system, "tests.helpers.smoke", tmp_path)


@pytest.mark.parametrize("missing", [(), ("preadv", "pwrite")])
def test_threads_read_and_write_at_their_own_offsets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing) -> None:
    for name in missing:
        monkeypatch.delattr(os, name)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | local_files.BINARY)
    blocks = [bytes([number]) * 5000 for number in range(64)]

    def there_and_back(number: int) -> bytes:
        assert local_files.write_at(fd, memoryview(blocks[number]), number * 5000) == 5000
        first, second = bytearray(2000), bytearray(3000)
        assert local_files.read_at(fd, [memoryview(first), memoryview(second)], number * 5000) == 5000
        return bytes(first + second)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(there_and_back, range(64))) == blocks
    behind = [memoryview(bytearray(3000)), memoryview(bytearray(3000)), memoryview(bytearray(3000))]
    assert local_files.read_at(fd, behind, 64 * 5000 - 4000) == 4000, "the file ends there"
    assert local_files.read_at(fd, behind, 64 * 5000) == 0
    os.close(fd)


def test_a_file_is_synced_beyond_the_cache_of_the_device_where_the_system_must_be_told(monkeypatch, tmp_path) -> None:
    calls: list[object] = []
    real = os.fsync
    with open(tmp_path / "file", "wb") as file:
        own = file.fileno()  # threads of tests before may sync other files
        monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync") if fd == own else real(fd))
        local_files.sync_file(file.fileno())
        flushing = SimpleNamespace(F_FULLFSYNC=51, fcntl=lambda fd, command: calls.append(command))
        monkeypatch.setattr(local_files, "fcntl", flushing)
        local_files.sync_file(file.fileno())

        def refuse(fd: int, command: int) -> None:
            raise OSError(45, "Operation not supported")

        flushing.fcntl = refuse
        local_files.sync_file(file.fileno())
    assert calls == ["fsync", 51, "fsync"]


@pytest.mark.parametrize("kind", ["a link", "a directory"])
def test_what_is_no_regular_file_is_refused_where_an_open_would_follow(monkeypatch, tmp_path, kind) -> None:
    monkeypatch.delattr(os, "O_NOFOLLOW")
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "a link").symlink_to(tmp_path / "file")
    (tmp_path / "a directory").mkdir()
    os.close(open_regular(tmp_path / "file"))
    with pytest.raises(CorruptError, match=kind):
        open_regular(tmp_path / kind)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
