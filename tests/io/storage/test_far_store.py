"""Checkpoints on far file systems: many reads in flight within the memory, past the page cache unless that is slower.

Reads are delayed in this process, or by a mount of sshfs whose server answers late.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import until
from tests.helpers.s3 import MIB, array
from tests.helpers.samples import write_checkpoint
from tests.helpers.world import LONG
from treeckpt._io.storage import local_store
from treeckpt._io.storage.local_files import LocalReader, file_system
from treeckpt._io.storage.local_store import FIRST_FAR_READS, DirectChoice, FarStore, LocalStore, for_reading
from treeckpt._io.storage.wrapped_store import CountingStore

SFTP = next(filter(os.path.exists, ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server")), None)
RELAY = Path(__file__).parents[2] / "helpers" / "delayed_pipe.py"


class Flights:
    """Counts the calls of os.preadv that run at once, and their bytes; each takes some seconds more.

    Reads of less than 64 KiB are neither counted nor delayed. Where `meet` is set, each takes longer until so many have
    run at once; `may_meet` says whether so many may be in flight yet.
    """

    meet = 0
    may_meet: Callable[[], bool] = staticmethod(lambda: True)

    def __init__(self, seconds: float) -> None:
        self.most = self.most_nbytes = self._now = self._nbytes = 0
        self._seconds, self._read, self._lock = seconds, os.preadv, threading.Lock()

    def __call__(self, fd: int, buffers: Any, offset: int, *flags: int) -> int:
        nbytes = sum(map(len, buffers))
        if nbytes < 64 << 10:
            return self._read(fd, buffers, offset, *flags)
        with self._lock:
            self._now, self._nbytes = self._now + 1, self._nbytes + nbytes
            self.most, self.most_nbytes = max(self.most, self._now), max(self.most_nbytes, self._nbytes)
        try:
            time.sleep(self._seconds)
            assert not self.may_meet() or until(lambda: self.most >= self.meet, LONG)
            return self._read(fd, buffers, offset, *flags)
        finally:
            with self._lock:
                self._now, self._nbytes = self._now - 1, self._nbytes - nbytes


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> Flights:
    found = Flights(0.1)  # long enough for 16 threads to start on a busy machine
    monkeypatch.setattr(os, "preadv", found)
    monkeypatch.setattr(FarStore, "request_nbytes", MIB)
    return found


@pytest.fixture
def tree() -> dict[str, Any]:
    return {"w": array(40), "b": np.arange(10.0)}


@pytest.fixture
def saved(tmp_path: Path, tree: dict[str, Any]) -> Path:
    tc.save(tmp_path / "c", tree)
    return tmp_path / "c"


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of the test counts as a far one."""
    monkeypatch.setattr(local_store, "FAR_FILE_SYSTEMS", {file_system(tmp_path)})


def filled(path: Any, tree: dict[str, Any], **options: Any) -> dict[str, Any]:
    target = {name: np.zeros_like(value) for name, value in tree.items()}
    tc.load_into(path, target, **options)
    return target


LOADS: list[Callable[..., dict[str, Any]]] = [lambda path, tree, **options: tc.load(path, **options), filled]


@pytest.mark.skipif(sys.platform != "linux", reason="file systems are told apart on Linux")
@pytest.mark.parametrize("load", LOADS, ids=["load", "load_into"])
def test_a_load_from_a_far_file_system_keeps_many_reads_in_flight(
    load: Callable[..., dict[str, Any]], saved: Path, tree: dict[str, Any], far: None, flights: Flights
) -> None:
    flights.meet = FIRST_FAR_READS
    back = load(saved, tree)
    assert all(np.array_equal(back[name], tree[name]) for name in tree)
    assert flights.most >= FIRST_FAR_READS


@pytest.mark.parametrize("block", [5 * 4096])
def test_shards_with_blocks_of_another_size_are_verified_by_their_own(tmp_path: Path, block: int) -> None:
    tree = {"w": np.arange(700 * 600.0).reshape(700, 600), "b": np.arange(10.0)}
    index = write_checkpoint(tmp_path / "c", tree, world=4, block=block)
    like = {
        "w": tc.Sharded(np.zeros((700, 30)), (700, 600), (0, 9)),
        "b": np.zeros(10),
    }
    for store in (tc.LocalStore(tmp_path / "c"), FarStore(tmp_path / "c")):
        for back in (tc.load(store), filled(store, tree)):
            assert all(np.array_equal(back[name], tree[name]) for name in tree)
        back = tc.load(store, like)
        assert np.array_equal(back["w"].local, tree["w"][:, 9:39]) and np.array_equal(back["b"], tree["b"])
    file = max(index.file_list, key=lambda file: file.nbytes)
    data = bytearray((tmp_path / "c" / file.name).read_bytes())
    data[-9] ^= 1
    (tmp_path / "c" / file.name).write_bytes(data)
    for store in (tc.LocalStore(tmp_path / "c"), FarStore(tmp_path / "c")):
        with pytest.raises(tc.CorruptError, match="changed bytes"):
            tc.load(store)


@pytest.mark.skipif(sys.platform != "linux", reason="file systems are told apart on Linux")
@pytest.mark.parametrize("load", LOADS, ids=["load", "load_into"])
def test_memory_bounds_the_reads_in_flight(
    load: Callable[..., dict[str, Any]], saved: Path, tree: dict[str, Any], far: None, flights: Flights
) -> None:
    flights.meet = 2
    back = load(saved, tree, read=tc.ReadOptions(memory=4 * MIB))
    assert all(np.array_equal(back[name], tree[name]) for name in tree)
    assert flights.most > 1 and flights.most_nbytes <= 4 * MIB


@pytest.mark.parametrize("load", LOADS, ids=["load", "load_into"])
def test_a_load_from_a_local_file_system_keeps_three_reads_in_flight(
    load: Callable[..., dict[str, Any]], saved: Path, tree: dict[str, Any], flights: Flights
) -> None:
    assert type(for_reading(LocalStore(saved))) is LocalStore
    load(saved, tree)
    assert flights.most <= 3


def test_more_reads_are_in_flight_while_the_rate_rises_with_them(saved: Path, flights: Flights) -> None:
    name = next(path.name for path in saved.iterdir() if path.stat().st_size > MIB)
    ranges = [(name, number % 300 << 17, 64 << 10) for number in range(900)]
    with contextlib.closing(FarStore(saved)) as store:
        depth = store._fetchers[False].depth  # pyright: ignore
        flights.meet, flights.may_meet = FIRST_FAR_READS + 1, lambda: depth.depth > FIRST_FAR_READS
        store.fetch(ranges, lambda *_: None, memory=1 << 30)
    assert flights.most > FIRST_FAR_READS


@pytest.mark.skipif(sys.platform != "linux", reason="file systems are told apart on Linux")
def test_a_store_that_counts_bytes_and_a_verify_read_from_a_far_file_system(
    saved: Path, tree: dict[str, Any], far: None
) -> None:
    counted = list[int]()
    store = CountingStore(for_reading(LocalStore(saved)), counted.append)
    assert np.array_equal(tc.load(store)["w"], tree["w"])
    assert sum(counted) >= 40 * MIB
    (saved / "shard-0.0123456789abcdef.safetensors").touch()
    report = tc.verify(saved)
    assert report.ok and not report.problems


@pytest.mark.skipif(sys.platform != "linux", reason="file systems are told apart on Linux")
def test_a_file_that_is_cut_short_or_changed_is_an_error_of_ours(saved: Path, far: None) -> None:
    shard = max(saved.iterdir(), key=lambda path: path.stat().st_size)
    with open(shard, "r+b") as file:
        file.seek(20 * MIB)
        file.write(b"changed")
    with pytest.raises(tc.CorruptError, match="match their checksum"):
        tc.load(saved)
    os.truncate(shard, 20 * MIB)
    with pytest.raises(tc.CorruptError, match=shard.name):
        tc.load(saved)
    shard.unlink()
    with pytest.raises(tc.CorruptError, match="no such file"):
        tc.load(saved)


@pytest.mark.parametrize(("past", "through", "direct"), [(1.0, 0.5, False), (1.0, 0.9, True), (1.0, 8.0, True)])
def test_reads_go_past_the_page_cache_unless_those_through_it_are_faster(
    past: float, through: float, direct: bool
) -> None:
    choice = DirectChoice()
    for _ in range(local_store.DIRECT_TRIALS):
        assert choice.direct, "until it is known"
        choice.add(past, through)
    assert choice.direct == direct


def test_what_the_first_reads_compare_is_read_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = list[tuple[int, bool]]()
    read = LocalReader.read_into

    def noted(self: LocalReader, offset: int, out: memoryview, *, shared: bool = False) -> None:
        ways.append((len(out), shared))
        read(self, offset, out, shared=shared)

    monkeypatch.setattr(LocalReader, "read_into", noted)
    name = next(path.name for path in saved.iterdir() if path.stat().st_size > MIB)
    data = (saved / name).read_bytes()[: 4 * MIB]
    out = bytearray(4 * MIB)
    with LocalStore(saved).readers.using(name, saved / name, False) as reader:
        DirectChoice().read_into(reader, 0, memoryview(out))
    part = local_store.COMPARED_NBYTES
    assert out == data and ways == [(part, False), (part, True), (4 * MIB - 2 * part, False)]


@pytest.mark.parametrize("shared", [False, True])
def test_what_other_ranks_of_the_host_read_too_goes_through_the_page_cache(
    saved: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    shard = max(saved.iterdir(), key=lambda path: path.stat().st_size)
    ways = set[bool]()
    read = LocalReader.read_into

    def noted(self: LocalReader, offset: int, out: memoryview, *, shared: bool = False) -> None:
        ways.add(shared)
        read(self, offset, out, shared=shared)

    monkeypatch.setattr(LocalReader, "read_into", noted)
    monkeypatch.setattr(local_store, "is_cached", lambda *_: False)
    with contextlib.closing(FarStore(saved)) as store:
        store.fetch([(shard.name, n * MIB, MIB) for n in range(8)], lambda *_: None, memory=1 << 30, shared=shared)
    assert (True in ways) and (False in ways) != shared


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A directory, and where sshfs shows it over a link with a round trip of 10 ms."""
    if SFTP is None or not shutil.which("sshfs") or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs sshfs, an sftp-server and /dev/fuse")
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    script = tmp_path / "link"
    script.write_text(f"#!/bin/sh\nexec {shlex.join([sys.executable, str(RELAY), '0.005', SFTP])}\n")
    script.chmod(0o755)
    command = ["sshfs", "-o", f"ssh_command={script}", f"there:{there}", str(here)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"sshfs cannot mount here: {done.stderr.decode(errors='replace').strip()}")
    try:
        yield there, here
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(here)], check=True)


def test_checkpoints_go_over_a_real_mount_with_many_reads_in_flight(
    mount: tuple[Path, Path], tree: dict[str, Any], flights: Flights
) -> None:
    there, here = mount
    tc.save(there / "saved there", tree)
    back = tc.load(here / "saved there")
    assert np.array_equal(back["w"], tree["w"]) and flights.most >= FIRST_FAR_READS
    small = {"w": array(2), "b": np.arange(3)}
    tc.save(here / "saved here", small)
    tc.save_async(here / "saved beside", small).result()
    for name in ("saved here", "saved beside"):
        for place in (there, here):
            assert all(np.array_equal(tc.load(place / name)[key], small[key]) for key in small)
    assert tc.verify(here / "saved here").ok
