"""Files that are saved with a checkpoint: listed and verified, replaced, copied and deleted with it, in any store."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.s3 import S3, wait_for_late_requests
from tests.helpers.world import Faulty, Switch, errors_of, on_ranks, small_tree
from treeckpt._cli.main import main
from treeckpt._core.format.files import MAX_SIDECAR_NBYTES, MAX_SIDECARS, parse_file_name, stored_name
from treeckpt._io.comm.comm import Comm
from treeckpt._io.storage.deletions import delete_files
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.open import open_store
from treeckpt._io.storage.plain_names import give_plain_names
from treeckpt._io.storage.store import DirectoryEntry

TREE = {"w": np.arange(1000.0)}


def stored(path: Path, name: str) -> Path:
    return path / stored_name(tc.inspect(path).save_id, name)


def sizes_of(path: Path | str) -> dict[str, int]:
    return {one.name: one.nbytes for one in tc.inspect(path).sidecars}


@pytest.fixture(params=["disk", "s3"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "step_00000001")
    s3: S3 = request.getfixturevalue("s3")
    return s3.url(f"sidecars/{tmp_path.name}/step_00000001")


def test_files_come_back_and_go_with_the_save_that_is_replaced(path: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"layers": 2}')
    tc.save(path, TREE, files={"config.json": config, "empty": b"", "zeros.bin": bytearray(100)})
    config.write_text("changed later")
    assert sizes_of(path) == {"config.json": 13, "empty": 0, "zeros.bin": 100}
    assert [tc.read_file(path, name) for name in sizes_of(path)] == [b'{"layers": 2}', b"", bytes(100)]
    assert tc.verify(path).ok

    wait_for_late_requests()  # the record of the save goes behind its return
    first = set(open_store(path).sizes())
    pending = tc.save_async(path, TREE, files={"config.json": b"new"}, overwrite=True)
    pending.result()
    assert tc.read_file(path, "config.json") == b"new"
    wait_for_late_requests()
    assert set(open_store(path).sizes()) & first == {"index.json", "config.json"}
    assert np.array_equal(tc.load(path)["w"], TREE["w"])
    with pytest.raises(tc.MismatchError, match=r"empty: expected a file that was saved with it, found files: config"):
        tc.read_file(path, "empty")


def test_other_programs_open_them_under_their_plain_names(path: str) -> None:
    store = open_store(path)

    def plain() -> dict[str, bytes]:
        own = (name for name in store.sizes() if parse_file_name(name) is None)
        return {name: store.read(name, limit=100) for name in own}

    tc.save(path, TREE, files={"config.json": b"{}", "empty": b"", "same": b"same"})
    assert plain() == {"config.json": b"{}", "empty": b"", "same": b"same"}
    tc.save(path, TREE, files={"config.json": b"[]", "more": b"m", "same": b"same"}, overwrite=True)
    assert plain() == {"config.json": b"[]", "more": b"m", "same": b"same"}
    assert tc.verify(path).ok and not tc.verify(path).notes
    tc.save(path, TREE, overwrite=True)
    assert plain() == {}
    tc.save(path, TREE, files={"config.json": b"{}"}, overwrite=True)
    tc.delete(path)
    wait_for_late_requests()
    assert not store.sizes()


def test_a_save_that_was_stopped_until_its_checkpoint_was_deleted_leaves_no_copy(tmp_path: Path) -> None:
    class Stopped(LocalStore):
        """The process is stopped before the file gets its plain name, once the index is there."""

        def publish_copy(self, name: str, data: bytes, *, of: str) -> None:
            for own in filter(parse_file_name, self.sizes()):
                self.delete(own)
            super().publish_copy(name, data, of=of)

    tc.save(tmp_path, TREE, files={"config.json": b"{}"})
    (tmp_path / "of others").touch()
    tc.save(Stopped(tmp_path), TREE, files={"config.json": b"[]"}, overwrite=True)
    assert [one.name for one in tmp_path.iterdir() if parse_file_name(one.name) is None] == ["of others"]


@pytest.mark.parametrize("gone", [False, True], ids=["its files are there", "its files are gone"])
def test_a_copy_that_a_replaced_save_still_writes_gives_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: bool
) -> None:
    saves: list[threading.Thread] = []
    met, written, tried = threading.Event(), threading.Event(), threading.Event()

    class Replaced(LocalStore):
        """Another save replaces the checkpoint before its files get their plain names."""

        def publish_copy(self, name: str, data: bytes, *, of: str) -> None:
            if saves:
                return super().publish_copy(name, data, of=of)
            options = {"files": {"config.json": b"[2]"}, "overwrite": True}
            saves.append(threading.Thread(target=tc.save, args=(Replacing(tmp_path), TREE), kwargs=options))
            saves[0].start()
            assert met.wait(60)
            super().publish_copy(name, data, of=of)
            if gone:
                self.delete(of)
            written.set()
            assert tried.wait(60)
            return None

    class Replacing(LocalStore):
        """Writes its copy once the replaced save has written its own."""

        def publish_copy(self, name: str, data: bytes, *, of: str) -> None:
            met.set()
            assert written.wait(60)
            try:
                super().publish_copy(name, data, of=of)
            finally:
                tried.set()

    tc.save(tmp_path, TREE, files={"config.json": b"{}"})
    tc.save(Replaced(tmp_path), TREE, files={"config.json": b"[1]"}, overwrite=True)
    saves[0].join(60)
    assert tc.read_file(tmp_path, "config.json") == (tmp_path / "config.json").read_bytes() == b"[2]"
    assert not caplog.text and len(list(tmp_path.glob("*config.json"))) == 2


def test_a_copy_that_a_clean_up_deletes_at_the_look_is_no_file_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Looked(LocalStore):
        """The copy of the save that was replaced comes before the look at the directory, and goes right behind it."""

        def entries(self) -> dict[str, DirectoryEntry]:
            if late := (tmp_path / replaced).exists() and tc.inspect(tmp_path).save_id not in replaced:
                (tmp_path / "config.json").write_bytes(b"[1]")
            found = super().entries()
            if late:
                for name in ("config.json", replaced):
                    (tmp_path / name).unlink()
            return found

    tc.save(tmp_path, TREE, files={"config.json": b"[1]"})
    replaced = next(tmp_path.glob("file.*")).name
    tc.save(Looked(tmp_path), TREE, files={"config.json": b"[2]"}, overwrite=True)
    assert (tmp_path / "config.json").read_bytes() == b"[2]" and not caplog.text
    assert len(list(tmp_path.glob("*config.json"))) == 2


def test_a_clean_up_that_meets_the_copy_of_the_save_behind_it_makes_it_again(tmp_path: Path) -> None:
    class Late(LocalStore):
        """Deletes a copy that it has looked at once the save behind has put its own in its place."""

        def delete(self, name: str, **options: Any) -> None:
            if name == "config.json":
                give_plain_names(LocalStore(tmp_path))
                assert (tmp_path / name).read_bytes() == b"[2]"
            super().delete(name, **options)

    tc.save(tmp_path, TREE, files={"config.json": b"[2]"})
    replaced = stored_name("0" * 16, "config.json")
    for name in (replaced, "config.json"):
        (tmp_path / name).write_bytes(b"[1]")
    delete_files(Late(tmp_path), [replaced])
    assert (tmp_path / "config.json").read_bytes() == b"[2]" and not (tmp_path / replaced).exists()


@pytest.mark.parametrize("before", [{}, {"config.json": b"{}"}])
def test_a_file_of_others_refuses_the_save_and_stays(path: str, before: dict[str, bytes]) -> None:
    store = open_store(path)
    store.prepare()
    if before:
        tc.save(path, TREE, files=before)
    store.publish("config.json", b"of others", replace=True)
    with pytest.raises(tc.CheckpointExists, match=r"config\.json: expected no file, .* found another file, and 1 more"):
        store.publish("vocab.txt", b"mine", replace=True)
        tc.save(path, TREE, files={"config.json": b"[]", "vocab.txt": b"", "free": b""}, overwrite=True)
    assert store.read("config.json", limit=100) == b"of others" and "free" not in store.sizes()
    assert tc.exists(path) == bool(before)
    if before:
        assert tc.read_file(path, "config.json") == b"{}"
    tc.save(path, TREE, overwrite=True)
    assert store.read("config.json", limit=100) == b"of others" and tc.verify(path).ok


def test_a_copy_that_is_gone_or_was_changed_is_noted_and_made_again_where_the_name_is_free(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(path)
    tc.save(path, TREE, files={"config.json": b"{}", "vocab.txt": b"a b"})
    store.delete("config.json")
    store.publish("vocab.txt", b"a c", replace=True)
    report = tc.verify(path)
    assert report.ok and len(report.notes) == 2, report
    assert "config.json, a copy of the file that was saved, is missing" in str(report)
    assert "vocab.txt is not as it was saved" in str(report)
    assert main(["gc", path]) == 0
    assert "files of others: vocab.txt" in capsys.readouterr().out
    assert store.read("config.json", limit=100) == b"{}" and store.read("vocab.txt", limit=100) == b"a c"
    assert len(tc.verify(path).notes) == 1


def test_custom_metadata_stays_what_the_user_gave(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", TREE, custom_metadata={"note": "mine"}, files={"a.txt": b"a"})
    assert tc.inspect(tmp_path / "c").metadata == {"note": "mine"}


def test_a_manager_saves_and_deletes_them_with_the_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with tc.Manager(run, keep=1) as manager:
        manager.save(1, TREE, files={"a.txt": b"1"})
        manager.wait()
        assert tc.read_file(run / "step_00000001", "a.txt") == b"1"
        manager.save(2, TREE, files={"a.txt": b"2"})
        manager.wait()
    assert [one.name for one in run.iterdir()] == ["step_00000002"]
    assert tc.read_file(run / "step_00000002", "a.txt") == b"2"


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"config.json": "/nowhere/config.json"}, r"files/config\.json: expected a readable file at /nowhere/config"),
        ({"d": "/"}, r"files/d: .* found something else than a file"),
        ({"../x": b""}, r"expected a plain name.*found '\.\./x'"),
        ({".hidden": b""}, "expected a plain name"),
        ({"a/b": b""}, "expected a plain name"),
        ({"n" * 129: b""}, "expected a plain name"),
        ({"": b""}, "expected a plain name"),
        ({"a": 10**15}, "files/a: expected a path or bytes, found int"),
        ({"Config": b"", "config": b""}, "differ not only in case"),
        ({"Index.json": b""}, r"files/Index\.json: expected a name that no file of treeckpt has"),
        ({f"f{n}": b"" for n in range(MAX_SIDECARS + 1)}, "at most 1000, found 1001"),
        ({"big": bytes(MAX_SIDECAR_NBYTES + 1)}, "files/big: expected at most 67108864 bytes a file"),
        (dict.fromkeys("abcde", bytes(MAX_SIDECAR_NBYTES)), "files/e: expected .* 268435456 together"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, files: dict[str, Any], error: str
) -> None:
    with pytest.raises(tc.TreeError, match=error):
        tc.save(tmp_path / "c", TREE, files=files)
    assert not (tmp_path / "c").exists()


def test_rank_0_counts_and_others_give_the_same_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "host0.txt").write_text("of host 0")

    def save(comm: Comm, name: str, given: list[dict[str, Any]]) -> None:
        tc.save(tmp_path / name, small_tree(comm.rank, 2), comm=comm, files=given[comm.rank])

    paths = {"a.txt": tmp_path / "host0.txt", "b": b"b"}
    elsewhere = {"a.txt": "/a/path/of/another/host", "b": b"b"}
    assert errors_of(on_ranks(2, lambda comm: save(comm, "c", [paths, elsewhere]))) == [None] * 2
    assert tc.read_file(tmp_path / "c", "a.txt") == b"of host 0"
    for name, other in {"content": {"b": b"other"}, "alone": {"more": b""}}.items():
        errors = errors_of(on_ranks(2, lambda comm, name=name, other=other: save(comm, name, [paths, other])))
        assert all(isinstance(error, tc.MismatchError) and "on rank 1" in str(error) for error in errors), errors
        assert not (tmp_path / name).exists()


def test_a_file_that_cannot_be_written_fails_the_save_on_every_rank_and_leaves_the_old_version(tmp_path: Path) -> None:
    path = tmp_path / "c"
    tc.save(path, small_tree(0, 1), files={"a": b"old"})
    before = set(tc.LocalStore(path).sizes())

    class Full(Faulty):
        def publish(self, name: str, data: bytes, **options: Any) -> None:
            if name.startswith("file."):
                raise OSError(28, "No space left on device")
            super().publish(name, data, **options)

    def save(comm: Comm) -> None:
        store = Full(tc.LocalStore(path), Switch())
        tc.save(store, small_tree(comm.rank, 2), comm=comm, overwrite=True, files={"a": b"new"})

    errors = errors_of(on_ranks(2, save))
    assert all("No space left" in str(error) for error in errors), errors
    assert tc.read_file(path, "a") == b"old"
    left = set(tc.LocalStore(path).sizes()) - before
    assert not {name for name in left if name.startswith(("file.", "shard"))}, left


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "missing"])
def test_damage_is_found_by_verify_and_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c"
    tc.save(path, TREE, files={"config.json": b"0123456789"})
    file = stored(path, "config.json")
    file.write_bytes({"flipped": b"0123x56789", "short": b"0123", "long": b"0123456789+"}.get(damage, b""))
    if damage == "missing":
        file.unlink()
    report = tc.verify(path)
    assert [problem.file for problem in report.problems] == [file.name]
    if damage == "long":
        assert tc.read_file(path, "config.json") == b"0123456789"
    else:
        with pytest.raises(tc.CorruptError, match=r"config\.json"):
            tc.read_file(path, "config.json")
    assert np.array_equal(tc.load(path)["w"], TREE["w"])
    copy = path / "config.json"
    copied = copy.read_bytes()
    copy.write_bytes(b"9876543210")
    assert [problem.file for problem in tc.verify(path, repair=True).problems] == [file.name], "the copy is no better"
    copy.write_bytes(copied)
    assert tc.verify(path, repair=True).ok and tc.read_file(path, "config.json") == copied == b"0123456789"


def test_a_rebuilt_index_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "c"
    tc.save(path, TREE, files={"config.json": b"{}"})
    index = tc.inspect(path)
    (path / "index.json").unlink()
    assert tc.rebuild_index(path).sidecars == index.sidecars
    assert tc.read_file(path, "config.json") == b"{}"
    (path / "index.json").unlink()
    stored_at = path / stored_name(index.save_id, "config.json")
    stored_at.unlink()
    with pytest.raises(tc.CorruptError, match=r"config\.json: expected 2 bytes, found no such file"):
        tc.rebuild_index(path)


def test_convert_copies_them_and_says_where_it_cannot(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", TREE, files={"config.json": b"{}"})
    tc.convert.convert(tmp_path / "c", tmp_path / "copy")
    assert tc.read_file(tmp_path / "copy", "config.json") == b"{}"
    report = tc.convert.convert(tmp_path / "c", tmp_path / "w.safetensors")
    assert report.files == ("w.safetensors", "config.json") and (tmp_path / "config.json").read_bytes() == b"{}"


def test_show_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tc.save(tmp_path / "c", TREE, files={"config.json": b"{}"})
    assert main(["show", str(tmp_path / "c")]) == 0
    assert "file config.json" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "c"), "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)["sidecars"]
    assert (listed["name"], listed["nbytes"]) == ("config.json", 2)


@pytest.mark.parametrize("content", ["mine", "[]"], ids=["another size", "the same size"])
def test_clean_names_files_of_others_and_leaves_them(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        tc.save(run / f"step_{step:08d}", TREE, step=step, files={"config.json": b"{}"})
    foreign = run / "step_00000001" / "config.json"
    foreign.write_text(content)
    assert main(["gc", str(run / "step_00000001")]) == 0
    assert "files of others: config.json" in capsys.readouterr().out
    report = tc.Manager(run, keep=1).clean()
    assert report.foreign == {"step_00000001": ("config.json",)}
    assert "foreign   step_00000001: config.json" in str(report)
    assert list((run / "step_00000001").iterdir()) == [foreign]


def test_a_step_that_is_due_takes_files_too(tmp_path: Path) -> None:
    with tc.Manager(tmp_path / "run", every=2, background=False) as manager:
        for _ in range(3):
            manager.step(TREE, files={"config.json": b"{}"})
    assert manager.steps() == [2] and tc.read_file(manager.path(2), "config.json") == b"{}"


def test_a_list_names_a_lost_or_cut_file_of_a_checkpoint_whose_tree_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for step, name in ((1, "config.json"), (2, "vocab.txt"), (3, "a")):
        tc.save(run / f"step_0000000{step}", TREE, step=step, files={name: b"content", "b": b""})
    stored(run / "step_00000001", "config.json").unlink()
    stored(run / "step_00000002", "vocab.txt").write_bytes(b"con")
    assert main(["ls", str(run)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "step_00000001: 1 of 2 sidecar files is not as saved: file." in text and "config.json is missing" in text
    assert "vocab.txt has 3 bytes instead of 7" in text and "step_00000003:" not in text
    assert tc.Manager(run).latest() == 3 and np.array_equal(tc.load(run / "step_00000001")["w"], TREE["w"])
