"""Few descriptors, few permissions, a full disk: what fails says so, and nothing is taken for what it is not."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.background import files_open
from tests.helpers.world import on_ranks
from treeckpt._io.os_errors import read_failure, shows_damage
from treeckpt._io.storage import local_files as reader_module
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._runs.discovery import scan

REFUSALS = [errno.EACCES, errno.EMFILE, errno.ESTALE, errno.EIO]


def run_with(limit: int, code: str, *arguments: object) -> str:
    """What a process prints that may have so many descriptors."""
    head = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    root = str(Path(tc.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sharded(path: Path, shards: int) -> dict[str, np.ndarray]:
    tree = {f"{i:04d}": np.full(512, i, np.int32) for i in range(shards)}
    tc.save(path, tree, max_shard_bytes=2048)
    assert len(list(path.glob("*.safetensors"))) == shards
    return tree


def test_more_shards_than_descriptors_are_loaded(tmp_path: Path) -> None:
    sharded(tmp_path / "c", 400)
    code = """
import sys, numpy as np, treeckpt as tc
for verify in (True, "first", "stream", False):
    found = tc.load(sys.argv[1], read=tc.ReadOptions(verify=verify))
    assert all((array == int(name)).all() for name, array in found.items()), verify
    into = {name: np.zeros_like(array) for name, array in found.items()}
    tc.load_into(sys.argv[1], into, read=tc.ReadOptions(verify=verify))
    assert all((array == int(name)).all() for name, array in into.items()), verify
print(len(found), tc.verify(sys.argv[1]).ok)
"""
    assert run_with(330, code, tmp_path / "c").split() == ["400", "True"]


def test_a_store_that_is_closed_while_others_read_from_it_goes_on_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load closes what it has opened, and several may share a store."""
    monkeypatch.setattr(reader_module, "MAX_OPEN_FILES", 4)
    tree = sharded(tmp_path / "c", 12)
    store = LocalStore(tmp_path / "c")

    def load(_: int) -> bool:
        found = tc.load(store, read=tc.ReadOptions(verify=False))
        return all(np.array_equal(found[name], array) for name, array in tree.items())

    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(load, range(60)))
    assert not files_open(tmp_path)


def test_files_that_nobody_reads_are_closed_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "MAX_OPEN_FILES", 4)
    sharded(tmp_path / "c", 12)
    store = LocalStore(tmp_path / "c")
    for name in sorted(store.sizes()):
        store.read_into(name, 0, memoryview(bytearray(8)))
    assert len(files_open(tmp_path)) == 4
    store.close()


def test_without_descriptors_a_run_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    tc.save(tmp_path / "run" / "step_00000001", {"w": np.arange(3)}, step=1)
    code = """
import os, sys, treeckpt as tc
manager, held = tc.Manager(sys.argv[1], background=False), []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for ask in (manager.latest, manager.steps, manager.restore):
    try:
        print(ask())
    except tc.StoreError as error:
        print("refused", "ulimit -n" in str(error))
for fd in held:
    os.close(fd)
print(manager.latest())
"""
    found = run_with(64, code, tmp_path / "run").splitlines()
    assert found == ["refused True"] * 3 + ["1"]


def refusing(monkeypatch: pytest.MonkeyPatch, what: str, refused: Callable[[str], bool], code: int) -> None:
    """Has a call of the system's refuse some paths; permissions do not bind the superuser."""
    call = getattr(os, what)

    def refuse(path: Any, *rest: Any, **more: Any) -> Any:
        if refused(os.fspath(path)):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return call(path, *rest, **more)

    monkeypatch.setattr(os, what, refuse)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        (what, code)
        for what in ("index", "shard", "step", "run")
        for code in REFUSALS
        if (what, code) != ("shard", errno.EIO)
    ],
)
def test_what_may_not_be_read_is_never_passed_over_for_an_older_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, code: int
) -> None:
    for step in (1, 2):
        tc.save(tmp_path / f"step_0000000{step}", {"w": np.arange(1 << 17)}, step=step)
    newest = str(tmp_path / "step_00000002")
    refused = {
        "index": lambda path: path == f"{newest}/index.json",
        "shard": lambda path: path.startswith(f"{newest}/shard"),
        "step": lambda path: path == newest,
        "run": lambda path: path == str(tmp_path),
    }[what]
    with tc.Manager(tmp_path) as manager:
        refusing(monkeypatch, "open" if what in ("index", "shard") else "scandir", refused, code)
        with pytest.raises(tc.StoreError, match=os.strerror(code)):
            manager.restore()
        if what in ("index", "shard"):
            with pytest.raises(tc.StoreError, match=os.strerror(code)):
                tc.load(newest)
        if what == "run":
            with pytest.raises(tc.StoreError, match=os.strerror(code)):
                scan(tmp_path)
        else:
            listed = [(info.step, info.status) for info in scan(tmp_path)]
            assert listed == [(2, "complete" if what == "shard" else "unread"), (1, "complete")], "lists are shown"
        monkeypatch.undo()
        assert manager.restore()["w"].size == 1 << 17


def test_a_shard_that_the_disk_cannot_read_is_passed_over_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        tc.save(tmp_path / f"step_0000000{step}", {"step": step, "w": np.arange(9)}, step=step)
    refusing(monkeypatch, "open", lambda path: "step_00000002/shard" in path, errno.EIO)
    with tc.Manager(tmp_path) as manager, caplog.at_level(logging.WARNING, "treeckpt"):
        assert manager.restore()["step"] == 1
    assert "passed over" in caplog.text and os.strerror(errno.EIO) in caplog.text
    assert not list(tmp_path.glob("*/damage.*")), "it is no damage"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("step", [2, None])
def test_a_restore_that_a_failing_disk_leaves_without_a_step_is_no_empty_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None, size: int
) -> None:
    for saved in (1, 2, 3):
        tc.save(tmp_path / f"step_0000000{saved}", {"step": saved, "w": np.arange(9)}, step=saved)
    [shard] = (tmp_path / "step_00000003").glob("shard*")
    shard.write_bytes(shard.read_bytes()[:-1])
    refusing(monkeypatch, "open", lambda path: "/shard" in path, errno.EIO)
    for outcome in on_ranks(size, lambda comm: tc.Manager(tmp_path, comm=comm).restore(step=step)):
        error = outcome.error
        assert type(error) is tc.StoreError and os.strerror(errno.EIO) in str(error), outcome
        assert isinstance(error.__cause__, tc.StoreError if step is None or size > 1 else OSError)
        assert ("do not start anew" in str(error)) == (step is None)
        assert step or ("2 steps could not be read" in str(error) and "step_00000002: rank 0: Store" in str(error))
    monkeypatch.undo()
    assert tc.Manager(tmp_path).restore()["step"] == 2


def test_an_older_step_that_could_not_be_read_is_passed_over_with_a_warning_and_cleaned_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        tc.save(tmp_path / f"step_0000000{step}", {"step": step, "w": np.arange(9)}, step=step)
    refusing(monkeypatch, "open", lambda path: path.endswith("step_00000001/index.json"), errno.EIO)
    with tc.Manager(tmp_path, keep=1) as manager, caplog.at_level(logging.WARNING, "treeckpt"):
        assert manager.restore()["step"] == 3 and manager.latest() == 3
        assert "unread, and perhaps saved after step 3" in caplog.text and os.strerror(errno.EIO) in caplog.text
        with pytest.raises(tc.StoreError, match=os.strerror(errno.EIO)):
            manager.steps()
        report = manager.clean()
    assert [one.name for one in report.removed] == ["step_00000002"]
    assert "it could not be read" in report.left[0].why and report.left[0].name == "step_00000001"
    assert "'skip'" in report.left[0].why, "what to do if it stays"


@pytest.mark.parametrize("code", [errno.ENFILE, errno.ENOMEM, errno.ESTALE])
@pytest.mark.parametrize("ask", ["latest", "restore", "resume"])
def test_a_second_listing_that_fails_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str, code: int
) -> None:
    tc.save(tmp_path / "step_00000002", {"w": np.arange(3)}, step=2)
    listings = iter(range(9))
    refusing(monkeypatch, "scandir", lambda path: path == str(tmp_path) and next(listings) == 1, code)
    with tc.Manager(tmp_path) as manager:
        act = partial(manager.resume, torch.nn.Linear(1, 1)) if ask == "resume" else getattr(manager, ask)
        with pytest.raises(tc.StoreError, match=os.strerror(code)):
            act()
        assert next(listings) == 2


def test_only_what_is_missing_or_wrong_is_damage() -> None:
    wrong = [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EBADMSG]
    unread = [errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE]
    unread += [errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET, errno.ENODEV, 0]
    assert all(shows_damage(OSError(code, "")) and not read_failure(OSError(code, "")) for code in wrong)
    assert not any(shows_damage(OSError(code, "")) for code in unread)
    assert read_failure(OSError(errno.EIO, "")) == "EIO" and read_failure(TimeoutError()) == "TimeoutError"
    assert shows_damage(FileNotFoundError("x")) and shows_damage(tc.CorruptError("x"))
    assert not shows_damage(tc.StoreError("x")) and read_failure(tc.StoreError("x")) == "StoreError"


def test_a_foreign_file_that_could_not_be_opened_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    with monkeypatch.context() as patch:
        refusing(patch, "open", lambda path: path.endswith("x.pt"), errno.EMFILE)
        with pytest.raises(tc.StoreError, match="ulimit -n"):
            tc.load(tmp_path / "x.pt")
    assert tc.load(tmp_path / "x.pt")["w"].sum() == 3


@pytest.mark.skipif(not hasattr(__import__("fcntl"), "F_SETLEASE"), reason="leases are Linux's")
def test_a_file_under_somebodys_lease_is_waited_for(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"w": np.arange(9)})
    [shard] = (tmp_path / "c").glob("*.safetensors")
    holder = subprocess.Popen(
        [sys.executable, "-c", """
import fcntl, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
signal.sigwait([signal.SIGIO])
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
""", str(shard)], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert tc.load(tmp_path / "c")["w"].tolist() == list(range(9))
    assert holder.returncode == 0


def test_a_full_disk_is_said_with_the_file_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(tc.CheckpointError, match=r"step: .*No space left on device: .*step/shard.*Free space"):
        tc.save(tmp_path / "step", {"w": np.arange(9)})


def test_a_full_disk_can_be_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (1, 2, 3):
        tc.save(tmp_path / f"step_0000000{step}", {"w": np.arange(9)}, step=step)
    with tc.Manager(tmp_path, keep=1, grace=0) as manager:
        monkeypatch.setattr(LocalStore, "publish", full)
        report = manager.clean()
        assert not report.failed and [one.step for one in scan(tmp_path)] == [3]


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_for_want_of_space_is_followed_by_a_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (1, 2, 3):
        tc.save(tmp_path / f"step_0000000{step}", {"w": np.arange(9)}, step=step)
    how = tc.BackgroundOptions(writer="thread") if background else False
    with tc.Manager(tmp_path, keep=1, grace=0, background=how) as manager:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(tc.CheckpointError, match="No space left"):
            manager.save(4, {"w": np.arange(9)})
            manager.wait()
        monkeypatch.undo()
        manager.wait()
        assert [one.step for one in scan(tmp_path) if one.status == "complete"] == [3]
        manager.save(5, {"w": np.arange(9)})
        manager.wait()
        assert manager.steps() == [5]
