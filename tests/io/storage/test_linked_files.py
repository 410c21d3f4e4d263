"""Files that are links are read where they lead into the run, elsewhere if asked; their targets never change."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import descriptors_left, in_child
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name
from treeckpt._runs.discovery import scan
from treeckpt._runs.run import RunDirectory

TREE = {"w": np.arange(5000.0), "n": 1}


def as_dvc(path: Path, cache: Path) -> None:
    """Replaces each file by an absolute link into a cache, as `dvc checkout` with links does."""
    for file in path.iterdir():
        digest = hashlib.md5(file.read_bytes()).hexdigest()
        place = cache / "files" / "md5" / digest[:2] / digest[2:]
        place.parent.mkdir(parents=True, exist_ok=True)
        file.rename(place)
        place.chmod(0o444)
        file.symlink_to(place)


def as_hub(path: Path, root: Path) -> Path:
    """Makes of a checkpoint what `snapshot_download` leaves: relative links to blobs; returns the snapshot."""
    snapshot, blobs = root / "snapshots" / "0123abc", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in path.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blobs / digest)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", digest))
    return snapshot


@pytest.fixture(params=["dvc", "hub", "in the run"])
def linked(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, bool]:
    """A checkpoint of links, and whether they lead out of its run."""
    path = tmp_path / "run" / step_name(1)
    tc.save(path, TREE, step=1, files={"config.json": b"{}"})
    if request.param == "hub":
        return as_hub(path, tmp_path / "models--a--b"), True
    as_dvc(path, tmp_path / "cache" if request.param == "dvc" else tmp_path / "run" / ".cache")
    return path, request.param == "dvc"


def content(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in root.rglob("*") if p.is_file() and not p.is_symlink()}


DOORS: dict[str, Callable[..., Any]] = {
    "load": lambda path, **o: tc.load(path, read=tc.ReadOptions(**o))["n"] == 1,
    "like": lambda path, **o: (
        tc.load(path, {"w": np.zeros(5000), "n": 0}, read=tc.ReadOptions(mmap=True, verify=False, **o))["n"] == 1
    ),
    "load_into": lambda path, **o: (
        tc.load_into(path, {"w": np.zeros(5000), "n": 0}, read=tc.ReadOptions(**o)).loaded == 2
    ),
    "abstract": lambda path, **o: tc.load_abstract(path, read=tc.ReadOptions(**o))["n"] == 1,
    "async": lambda path, **o: tc.load_async(path, read=tc.ReadOptions(**o)).result()["n"] == 1,
    "inspect": lambda path, **o: tc.inspect(path, **o).step == 1,
    "read_file": lambda path, **o: tc.read_file(path, "config.json", **o) == b"{}",
    "verify": lambda path, **o: tc.verify(path, **o).ok,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_checkpoint_of_links_is_read_if_that_is_asked_for(linked: tuple[Path, bool], door: str) -> None:
    path, outside = linked
    assert DOORS[door](path, follow_links=True)
    if not outside:
        assert DOORS[door](path)
        return
    with pytest.raises(tc.StoreError, match=r"found a link to .*, which is not in .*follow_links=True .* reads it"):
        DOORS[door](path)


@pytest.mark.parametrize("command", ["show", "verify", "ls", "diff"])
def test_commands_read_links_with_the_option(
    linked: tuple[Path, bool], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, outside = linked
    paths = [str(path)] * (2 if command == "diff" else 1)
    assert main([command, *paths, "--follow-links"]) == 0
    assert "damaged" not in capsys.readouterr().out and "TREECKPT_FOLLOW_LINKS" not in os.environ
    code = main([command, *paths])
    told = capsys.readouterr()
    if outside:
        assert "a link to" in told.out + told.err and (code or command == "ls")
    else:
        assert code == 0 and "damaged" not in told.out


def test_a_manager_restores_from_links_and_deletes_only_them(tmp_path: Path) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    for step in (1, 2):
        tc.save(run / step_name(step), TREE, step=step)
    as_dvc(run / step_name(1), cache)
    (run / step_name(2)).rename(tmp_path / "elsewhere")
    (run / step_name(2)).symlink_to(tmp_path / "elsewhere")
    with tc.Manager(run, background=False) as manager, pytest.raises(tc.StoreError, match="follow_links=True"):
        manager.steps()
    before = content(tmp_path)
    with tc.Manager(run, keep=None, background=False, follow_links=True) as manager:
        assert manager.steps() == [1, 2] and manager.restore()["n"] == 1
        manager.save(3, TREE)
        manager.delete(1)
        manager.delete(2)
        assert manager.steps() == [3]
    assert before.items() <= content(tmp_path).items()
    assert sorted(os.listdir(run)) == [step_name(3)]


@pytest.mark.parametrize("follow", [False, True])
def test_a_clean_up_removes_links_and_not_what_they_lead_to(tmp_path: Path, follow: bool) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        tc.save(run / step_name(step), TREE, step=step)
    as_dvc(run / step_name(1), tmp_path / "cache")
    (run / step_name(2)).rename(tmp_path / "elsewhere")
    (run / step_name(2)).symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path)
    report = RunDirectory(run, follow_links=follow).clean([tc.policy.Last(1)])
    left = [1, 2, 3] if not follow else [3]
    assert [int(name[5:]) for name in sorted(os.listdir(run))] == left, report
    assert main(["rm", str(run), "3", *map(str, left[:-1]), "--yes"]) == 0
    kept = {path: data for path, data in before.items() if step_name(3) not in path}
    assert content(tmp_path) == kept and os.listdir(run) == []


def test_a_save_over_links_writes_through_none(linked: tuple[Path, bool], tmp_path: Path) -> None:
    path, _ = linked
    before = content(tmp_path)
    tc.save(path, {"n": 2}, step=1, overwrite=True)
    assert tc.load(path) == {"n": 2} and tc.verify(path).ok
    assert before.items() <= content(tmp_path).items()
    assert not [file for file in path.iterdir() if file.is_symlink() and file.name == "index.json"]


def test_a_repair_replaces_links(tmp_path: Path) -> None:
    path = tmp_path / "run" / step_name(1)
    tc.save(path, TREE, step=1)
    as_dvc(path, tmp_path / "cache")
    (path / "index.json").unlink()
    before = content(tmp_path)
    assert tc.verify(path, repair=True, follow_links=True).ok
    assert before.items() <= content(tmp_path).items() and not (path / "index.json").is_symlink()


@pytest.mark.parametrize("target", ["nowhere", "shard", "/dev/zero", "fifo", "."])
def test_a_link_that_leads_to_no_file_is_an_error(tmp_path: Path, target: str) -> None:
    path = tmp_path / "run" / step_name(1)
    [shard] = tc.save(path, TREE, step=1).files
    (path / shard).unlink()
    os.mkfifo(path / "fifo")
    (path / shard).symlink_to(shard if target == "shard" else target)
    for follow in (False, True):
        error = tc.StoreError if target == "/dev/zero" and not follow else tc.CorruptError
        with pytest.raises(error, match=shard):
            tc.load(path, read=tc.ReadOptions(follow_links=follow))
        with pytest.raises(error, match=shard):
            tc.load_into(path, {"w": np.zeros(5000), "n": 0}, read=tc.ReadOptions(follow_links=follow))
        assert not tc.verify(path, follow_links=follow).ok


def test_a_link_to_a_sibling_through_a_link_out_of_the_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tc.save(run / step_name(1), TREE, step=1)
    index = run / step_name(1) / "index.json"
    index.rename(tmp_path / "secret")
    (run / "hop").symlink_to(tmp_path / "secret")
    index.symlink_to(run / "hop")
    with pytest.raises(tc.StoreError, match="which is not in"):
        tc.load(run / step_name(1))
    assert tc.load(run / step_name(1), read=tc.ReadOptions(follow_links=True))["n"] == 1


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_link_whose_target_could_not_be_read_is_not_taken_for_a_missing_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for step in (1, 2):
        tc.save(tmp_path / step_name(step), TREE, step=step)
    as_dvc(tmp_path / step_name(2), tmp_path / ".cache")
    call = os.lstat

    def refuse(path: Any, **more: Any) -> os.stat_result:
        if "/.cache/files" in os.fspath(path):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return call(path, **more)

    with tc.Manager(tmp_path) as manager:
        monkeypatch.setattr(os, "lstat", refuse)
        for ask in (manager.latest, manager.restore):
            with pytest.raises(tc.StoreError, match=os.strerror(code)):
                ask()
        with pytest.raises((tc.StoreError, OSError), match=os.strerror(code)):
            tc.LocalStore(tmp_path / step_name(2)).sizes()
        [newest, _] = scan(tmp_path)
        assert newest.status == "unread", newest
        monkeypatch.undo()
        assert manager.latest() == 2


def test_with_one_descriptor_left_linked_shards_are_there(tmp_path: Path) -> None:
    for step in (1, 2):
        tc.save(tmp_path / step_name(step), TREE, step=step)
    as_dvc(tmp_path / step_name(2), tmp_path / ".cache")
    (tmp_path / step_name(2) / "index.json").replace(tmp_path / "index")  # a file, which is read with one descriptor
    shutil.copy(tmp_path / "index", tmp_path / step_name(2) / "index.json")

    def ask() -> int:
        with descriptors_left(1), tc.Manager(tmp_path) as manager:
            return manager.latest() or 0

    code, text = in_child(ask)
    assert code == 2, text


def test_a_shard_that_is_a_link_out_of_the_run_could_not_be_read_and_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "run" / step_name(1)
    [shard] = tc.save(path, TREE, step=1).files
    (path / shard).rename(tmp_path / "elsewhere")
    (path / shard).symlink_to(tmp_path / "elsewhere")
    report = tc.verify(path)
    assert not report.ok and not report.problems and "follow_links=True" in report.unread[0].text
    assert main(["verify", str(path)]) == 3 and not list(path.glob("damage.*"))
    [info] = scan(tmp_path / "run")
    assert info.status == "unread" and "which is not in" in (info.error or "")
    with tc.Manager(tmp_path / "run") as manager, pytest.raises(tc.StoreError, match="which is not in"):
        manager.restore()
    with tc.Manager(tmp_path / "run", follow_links=True) as manager:
        assert manager.restore()["n"] == 1
