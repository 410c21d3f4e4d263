"""Disks that fail, fill up or vanish, clocks that jump, two that save to one path: no half, all goes on after it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.crash.disks import failing_disk, fill, remount, small_disk
from tests.crash.kills import switched
from tests.crash.syscalls import why_not
from tests.helpers.background import files_open
from tests.helpers.elsewhere import elsewhere
from tests.helpers.world import LIMIT, Faulty, Switch, assert_holds, seed_of, small_tree, whole_tree
from treeckpt._core.format.files import step_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.storage import local_files, local_store
from treeckpt._saving.committed_files import PUBLISHED_HINT

ROOT = Path(__file__).parents[2]
SYSTEM_CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "replace", "posix_fallocate")
MODULES = [local_store, local_files]
PAGE = 4096


def save(path: Any, seed: int, *, background: bool = False, **options: Any) -> None:
    options = {"overwrite": True, **options}
    if background:
        tc.save_async(path, small_tree(0, 1, seed=seed), **options).result(LIMIT)
    else:
        tc.save(path, small_tree(0, 1, seed=seed), **options)


def outcome(act: Callable[[], Any], path: Path, before: int | None) -> tc.TreeckptError | None:
    """What a save of the seed 2 raised; what is there afterwards must fit to that."""
    try:
        act()
    except tc.TreeckptError as error:
        assert str(path) in str(error)
        committed = PUBLISHED_HINT in error.hint
        assert seed_of(path) == (2 if committed else before), str(error)
        return error
    assert seed_of(path) == 2
    return None


def check_left(path: Path) -> None:
    """Files of the committed save only, but for the timings of failed ones, which say why."""
    named = {file.name for file in tc.inspect(path).file_list} if seed_of(path) is not None else set[str]()
    names = {p.name for p in path.iterdir() if not p.name.startswith("timings.")} if path.exists() else set[str]()
    assert names - {INDEX_NAME} == named


# errors of the system -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["new", "overwriting"])
@pytest.mark.parametrize("code", [errno.EIO, pytest.param(errno.ENOSPC, marks=pytest.mark.slow)])
def test_an_error_at_any_system_call_fails_the_save_and_nothing_else(tmp_path: Path, what: str, code: int) -> None:
    before = 1 if what == "overwriting" else None

    def attempt(path: Path, switch: Switch) -> tc.TreeckptError | None:
        if before is not None:
            save(path, 1)
        with switched(switch, SYSTEM_CALLS, MODULES):
            error = outcome(lambda: save(path, 2), path, before)
        assert files_open(path) == []
        return error

    counted = Switch()
    assert attempt(tmp_path / "count", counted) is None
    assert len(counted.calls) >= 20

    def act(call: str) -> None:
        raise OSError(code, os.strerror(code))

    failed = 0
    for at in range(len(counted.calls)):
        path = tmp_path / f"{at}"
        error = attempt(path, Switch(at, act=act))
        in_place = error is not None and PUBLISHED_HINT in error.hint
        if error is not None:
            failed += 1
            assert os.strerror(code) in str(error)
        save(path, 3)
        assert_holds(path, seed=3)
        if not in_place:  # else the shards before are kept as long as it may be lost
            check_left(path)
    assert failed >= len(counted.calls) * 2 // 3, "those that did no harm are reads and timings behind the commit"


INJECTED = [
    ("pwrite64", "EIO", 1),
    *(
        pytest.param(call, error, when, marks=pytest.mark.slow)
        for call, error, count in (
            ("pwrite64", "ENOSPC", 2),
            ("fsync", "EIO", 9),
            ("fsync", "ENOSPC", 9),
            ("ftruncate", "EIO", 1),
            ("fallocate", "ENOSPC", 1),
            ("fallocate", "EIO", 1),
            ("rename,renameat,renameat2", "EIO", 2),
        )
        for when in range(1, count + 1)
    ),
]


@pytest.mark.parametrize(("call", "error", "when"), INJECTED)
def test_an_error_that_the_kernel_gives_is_the_cause(tmp_path: Path, call: str, error: str, when: int) -> None:
    why = why_not()
    if why:
        pytest.skip(why)
    path = tmp_path / "c"
    save(path, 1)
    code = f"""
import treeckpt as tc
from tests.helpers.world import small_tree
try:
    tc.save({str(path)!r}, small_tree(0, 1, seed=2), overwrite=True)
except tc.CheckpointError as error:
    print(error.__cause__.errno, error.hint or 'failed')
else:
    print("saved")
"""
    names = ",".join(f"?{name}" for name in call.split(","))
    inject = ["-e", f"trace={names}", "-e", f"inject={names}:error={error}:when={when}"]
    command = ["strace", "-f", "-qq", "-o", str(tmp_path / "trace"), *inject, sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # renames of the test's own are meant
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    if "(INJECTED)" not in (tmp_path / "trace").read_text():
        pytest.skip("calls are counted for each thread, and none of them made so many")
    told = done.stdout.strip()
    harmless = told == "saved" or PUBLISHED_HINT in told
    assert harmless or told.split()[0] == str(getattr(errno, error)), told
    assert seed_of(path) == (2 if harmless else 1)
    assert when > 2 or call.startswith("rename") or not harmless
    save(path, 3)
    if PUBLISHED_HINT not in told:  # else the shards before are kept as long as it may be lost
        check_left(path)


# disks that are full --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("what", ["new", "overwriting"])
def test_a_disk_that_is_full_at_any_moment_leaves_the_checkpoint_before(
    tmp_path: Path, what: str, background: bool
) -> None:
    before = 1 if what == "overwriting" else None
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        states: list[bool] = []
        while not states or not states[-1]:
            path = disk / f"{len(states)}"
            path.mkdir()  # else it is the directory for which there is no room
            if before is not None:
                save(path, 1)
            filler = fill(disk, len(states) * PAGE)
            error = outcome(lambda path=path: save(path, 2, background=background), path, before)
            assert error is None or "No space left" in str(error)
            states.append(error is None)
            filler.unlink()
            check_left(path)
            save(path, 3)
            assert_holds(path, seed=3)
            shutil.rmtree(path)
        assert len(states) > 5, "from no room at all to enough, page by page"


def test_a_device_that_fails_behind_its_file_system_fails_the_save(tmp_path: Path) -> None:
    with failing_disk(tmp_path / "disk", 4 << 20) as disk:
        save(disk / "c", 1)
        big = {"step": 102, "w": np.random.default_rng(0).integers(0, 255, 8 << 20, np.uint8)}
        with pytest.raises(tc.CheckpointError) as caught:
            tc.save(disk / "c", big, overwrite=True)
        assert isinstance(caught.value.__cause__, OSError) and str(disk / "c") in str(caught.value)
        assert seed_of(disk / "c") == 1


# directories that cannot be written, or are gone ----------------------------------------------------------------------
def test_a_read_only_disk_is_read_and_the_save_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        run = disk / "run"
        save(run / step_name(1), 1, step=1)
        remount(disk, writable=False)
        for step in (1, 2):
            with pytest.raises(tc.CheckpointError, match="Read-only file system"):
                save(run / step_name(step), 2, step=step)
        with tc.Manager(run, keep=1, background=False) as manager:
            assert manager.steps() == [1]
            with pytest.raises(tc.CheckpointError, match="Read-only file system"):
                manager.save(2, whole_tree(seed=2))
            assert manager.restore(fallback=tc.Fallback(per_rank="take"))["step"] == 101
        remount(disk, writable=True)
        save(run / step_name(2), 2, step=2)
        assert seed_of(run / step_name(2)) == 2 and seed_of(run / step_name(1)) == 1


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only the superuser becomes somebody else; test_errors has the other case"
)
def test_a_directory_of_somebody_else_is_not_written_and_can_be_read() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        os.chmod(name, 0o755)
        path = Path(name) / "c"
        save(path, 1)
        told, tell = os.pipe()
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                os.setgid(65534)
                os.setuid(65534)
                text = "saved"
                try:
                    save(path, 2)
                except tc.CheckpointError as error:
                    text = str(error)
                os.write(tell, f"{tc.load(path, select='step')['step']} {text}".encode())
            os._exit(0)
        os.close(tell)
        with os.fdopen(told) as stream:
            text = stream.read()
        os.waitpid(pid, 0)
        assert text.startswith(f"101 {path}: ") and "Permission denied" in text, text
        assert seed_of(path) == 1
        check_left(path)


@pytest.mark.parametrize("back", [False, True], ids=["gone", "made again"])
@pytest.mark.parametrize("what", [pytest.param("new", marks=pytest.mark.slow), "overwriting"])
def test_a_directory_that_vanishes_fails_the_save(tmp_path: Path, what: str, back: bool) -> None:
    """Somebody cleans up by hand, while it is being written to."""

    def act(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        if back:
            path.mkdir()

    counted = Switch()
    if what == "overwriting":
        save(tmp_path / "count", 1)
    save(Faulty(tc.LocalStore(tmp_path / "count"), counted), 2)
    assert len(counted.calls) >= 9
    last = max(at for at, call in enumerate(counted.calls) if call == f"publish {INDEX_NAME}")
    for at in range(len(counted.calls)):
        path = tmp_path / f"{at}"
        if what == "overwriting":
            save(path, 1)
        switch = Switch(at, act=lambda call, path=path: act(path))
        error: tc.TreeckptError | None = None
        try:
            save(Faulty(tc.LocalStore(path), switch), 2)
        except tc.TreeckptError as met:
            error = met
        created = any("create" in call for call in counted.calls[:at])
        if back and at == last:  # no more is looked at before the index is published
            assert error is None and not tc.verify(path).ok
        else:
            # before there is a file in it, the directory is made again, as after a clean-up of another process
            assert (error is not None) == (created and at <= last), (switch.fired, error)
            assert seed_of(path) == (2 if error is None and at <= last else None), switch.fired
        save(path, 3)
        assert_holds(path, seed=3)
        check_left(path)


# clocks ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("jump", [-(10**9), 10**9], ids=["back", "forward"])
def test_a_clock_that_jumps_at_each_call_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    real_ns, real, shift = time.time_ns, time.time, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + shift[0] * 10**9)
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])

    def act(name: str, effect: Callable[[], Any]) -> Any:
        shift[0] += jump // 50
        return effect()

    for step in (1, 2, 3):
        path = tmp_path / step_name(step)
        save(Faulty(tc.LocalStore(path), act), step, step=step)  # pyright: ignore[reportArgumentType]
        assert seed_of(path) == step
        shift[0] += jump
    with tc.Manager(tmp_path, keep=2, background=False) as manager:
        assert manager.latest() == 3, "steps count, not times"
        manager.save(4, whole_tree(seed=4))
        shift[0] -= 3 * jump
        assert not manager.clean().failed and manager.steps() == [3, 4]
    assert seed_of(tmp_path / step_name(4)) == 4


# two that save to one path --------------------------------------------------------------------------------------------
@pytest.fixture
def calls(tmp_path: Path) -> Iterator[list[str]]:
    switch = Switch()
    save(tmp_path / "count", 1)
    save(Faulty(tc.LocalStore(tmp_path / "count"), switch), 2)
    yield switch.calls


@pytest.mark.parametrize("overwrite", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_save_in_the_middle_of_another_one_to_the_same_path(
    tmp_path: Path, calls: list[str], overwrite: bool
) -> None:
    ends: set[tuple[int | None, bool]] = set()
    for at in range(len(calls)):
        path = tmp_path / f"{at}"
        if overwrite:
            save(path, 1)
        switch = Switch(at, act=lambda call, path=path: elsewhere(save, path, 4))
        refused = False
        try:
            save(Faulty(tc.LocalStore(path), switch), 2, overwrite=overwrite)
        except tc.CheckpointExists:
            refused = True
        if switch.fired:
            ends.add((seed_of(path), refused))
        assert not refused or seed_of(path) == 4
        save(path, 3)
        assert_holds(path, seed=3)
    assert ends <= ({(2, False), (4, False)} if overwrite else {(4, True), (4, False), (2, False)}) and len(ends) > 1


def test_two_that_save_to_one_path_at_once_leave_one_of_both(tmp_path: Path) -> None:
    def act(seed: int, start: threading.Barrier, failed: list[BaseException]) -> None:
        start.wait()
        try:
            save(tmp_path / "c", seed)
        except BaseException as error:
            failed.append(error)

    for _ in range(10):
        start, failed = threading.Barrier(2), list[BaseException]()
        threads = [threading.Thread(target=act, args=(seed, start, failed)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed and seed_of(tmp_path / "c") in (1, 2)
    assert not tc.Manager(tmp_path, grace=0).clean().failed
