"""verify --repair: what can be made again is, bit for bit; what was there is kept; what is lost is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.corruption import TREES, flip
from tests.helpers.elsewhere import elsewhere
from tests.helpers.s3 import S3, array, same
from tests.helpers.world import (
    assert_equal,
    assert_holds,
    errors_of,
    on_ranks,
    reseal,
    shards_of,
    small_tree,
    whole_tree,
)
from treeckpt._core.format.files import parse_file_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import BLOCK
from treeckpt._io.storage import object_store
from treeckpt._loading import repair


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    assert all(o.error is None for o in on_ranks(2, lambda c: tc.save(tmp_path / "c", small_tree(c.rank, 2), comm=c)))
    return tmp_path / "c"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.endswith(".damaged")}


def kept(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name.endswith(".damaged")}


def test_an_intact_checkpoint_is_left_alone(saved: Path) -> None:
    before = contents(saved)
    report = tc.verify(saved, repair=True)
    assert report.ok and report.repairs == () and report.lost == ()
    assert contents(saved) == before and not kept(saved)


INDEXES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda data: flip(data, 300),
    "cut": lambda data: data[:100],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "of another format": lambda data: data.replace(b"treeckpt", b"strangers", 1),
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_damaged_index_is_made_again_from_the_shards(saved: Path, name: str) -> None:
    before = contents(saved)
    damaged = INDEXES[name](before[INDEX_NAME])
    (saved / INDEX_NAME).write_bytes(damaged)
    with pytest.raises(tc.CheckpointError):
        tc.load(saved)
    report = tc.verify(saved, repair=True)
    assert report.ok and [repair.file for repair in report.repairs] == [INDEX_NAME]
    assert contents(saved) == before and list(kept(saved).values()) == [damaged]
    assert report.repairs[0].kept_as in kept(saved) and report.repairs[0].kept_as in str(report)
    assert_holds(saved, seed=0)


def test_a_lost_index_is_made_again_but_not_that_of_a_save_being_deleted(saved: Path) -> None:
    before = contents(saved)
    (saved / INDEX_NAME).unlink()
    mark = saved / f"deleted.{shards_of(saved)[0].name.split('.')[-2]}.json"
    mark.write_bytes(b"{}")
    with pytest.raises(tc.CheckpointNotFound):
        tc.verify(saved, repair=True)
    mark.unlink()
    assert tc.verify(saved, repair=True).ok and contents(saved) == before


def test_an_index_that_lies_is_replaced(saved: Path) -> None:
    before = contents(saved)
    reseal(saved, lambda document: document["index"].__setitem__("step", 7))
    assert not tc.verify(saved).ok
    assert tc.verify(saved, repair=True).ok and contents(saved) == before and len(kept(saved)) == 1


def test_a_damaged_index_comes_back_as_that_of_its_own_save(saved: Path, tmp_path: Path) -> None:
    """Shards of a later save, which was never committed, lie whole beside it."""
    tc.save(tmp_path / "later", whole_tree(seed=3))
    for file in shards_of(tmp_path / "later"):
        (saved / file.name).write_bytes(file.read_bytes())
    data = (saved / INDEX_NAME).read_bytes()
    (saved / INDEX_NAME).write_bytes(data[:-1] + b" ")
    assert tc.verify(saved, repair=True).ok
    assert (saved / INDEX_NAME).read_bytes() == data
    assert_equal(tc.load(saved, fallback=tc.Fallback(per_rank="take")), whole_tree())


def header_places(data: bytes) -> list[int]:
    size = int.from_bytes(data[:8], "little") + 8
    seal = data.index(b'"seal":"') + 8
    hashes = data.index(b'"hashes":"') + 10
    return [0, 3, 7, 8, 12, seal, seal + 15, hashes, hashes + 5, size // 2, size - 1]


def test_a_flipped_bit_anywhere_in_a_header_is_put_right(saved: Path) -> None:
    before = contents(saved)
    for shard in shards_of(saved):
        data = before[shard.name]
        for at in header_places(data):
            shard.write_bytes(flip(data, at))
            assert not tc.verify(saved).ok
            report = tc.verify(saved, repair=True)
            assert report.ok and [r.file for r in report.repairs] == [shard.name], f"byte {at}: {report}"
            assert contents(saved) == before
    assert all(parse_file_name(name) is not None for name in kept(saved)), "the clean-up knows them"


@pytest.mark.parametrize("name", ["small", "sharded", "per rank", "one leaf", "nothing", "only empty", "big replica"])
@pytest.mark.parametrize("limit", [None, 100])
def test_headers_of_all_kinds_of_trees_are_made_again(tmp_path: Path, name: str, limit: int | None) -> None:
    path, make = tmp_path / "c", TREES[name]
    act = lambda c: tc.save(path, make(c.rank, 3), comm=c, step=9, max_shard_bytes=limit)  # noqa: E731
    assert errors_of(on_ranks(3, act)) == [None] * 3
    before = contents(path)
    for shard in shards_of(path):
        seal = before[shard.name].index(b'"seal":"') + 8
        shard.write_bytes(before[shard.name][: seal + 40] + bytes(100) + before[shard.name][seal + 140 :])
    report = tc.verify(path, repair=True)
    assert report.ok, str(report)
    assert contents(path) == before


def test_a_header_comes_back_though_the_data_is_damaged_too(tmp_path: Path) -> None:
    tree = {"a": np.arange(BLOCK // 8), "b": np.arange(BLOCK // 8) + 1}
    (name,) = tc.save(tmp_path / "c", tree).files
    file = tmp_path / "c" / name
    data = file.read_bytes()
    file.write_bytes(flip(flip(data, len(data) - 1), 4095))
    report = tc.verify(tmp_path / "c", repair=True)
    assert not report.ok and report.lost == ("b",) and [r.file for r in report.repairs] == [name]
    assert file.read_bytes() == flip(data, len(data) - 1)
    found = tc.load(tmp_path / "c", fallback=tc.Fallback(on_corrupt="skip"))
    assert np.array_equal(found["a"], tree["a"]) and found["b"] is ...


def test_what_stands_behind_the_end_is_cut_off(saved: Path) -> None:
    before = contents(saved)
    shard = shards_of(saved)[0]
    shard.write_bytes(before[shard.name] + b"x" * 5000)
    report = tc.verify(saved, repair=True)
    assert report.ok and "5000 bytes" in str(report) and contents(saved) == before


def test_what_is_lost_is_said_and_left_alone(saved: Path) -> None:
    before = contents(saved)
    first, second = shards_of(saved)
    first.write_bytes(before[first.name][:-1])
    second.unlink()
    report = tc.verify(saved, repair=True)
    assert not report.ok and report.repairs == () and not kept(saved)
    assert "pieces" in report.lost and "own/~rank1/rng" in report.lost
    assert {problem.file for problem in report.problems} == {first.name, second.name}
    assert first.read_bytes() == before[first.name][:-1]
    with pytest.raises(tc.CorruptError, match=r"pieces|replica|shared"):
        tc.load(saved, fallback=tc.Fallback(per_rank="take"))


def test_a_shard_of_another_save_proves_nothing(saved: Path, tmp_path: Path) -> None:
    outcomes = on_ranks(2, lambda c: tc.save(tmp_path / "other", small_tree(c.rank, 2, seed=5), comm=c))
    assert errors_of(outcomes) == [None] * 2
    data = shards_of(tmp_path / "other")[1].read_bytes()
    shards_of(saved)[1].write_bytes(data)
    report = tc.verify(saved, repair=True)
    assert not report.ok and report.repairs == () and shards_of(saved)[1].read_bytes() == data


def test_damaged_timings_are_taken_away(saved: Path) -> None:
    (timings,) = saved.glob("timings.*")
    data = flip(timings.read_bytes(), 99)
    timings.write_bytes(data)
    report = tc.verify(saved, repair=True)
    assert report.ok and [r.file for r in report.repairs] == [timings.name] and list(kept(saved).values()) == [data]
    assert not timings.exists()
    assert_holds(saved, seed=0)


def test_index_and_header_together_are_beyond_repair(saved: Path) -> None:
    (saved / INDEX_NAME).write_bytes(b"broken")
    shard = shards_of(saved)[0]
    shard.write_bytes(flip(shard.read_bytes(), 100))
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(tc.CheckpointError):
        tc.verify(saved, repair=True)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


class Overwritten(tc.LocalStore):
    """A directory into which another save is committed when a shard is read for the `at`-th time."""

    left = 0

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        super().read_into(name, offset, out, shared=shared)
        self.left -= 1
        if self.left == 0:
            elsewhere(tc.save, self.directory, {"of": "the other save", "w": np.ones(5)}, overwrite=True)


@pytest.mark.parametrize("act", ["repair", "repair an intact one", "rebuild"])
def test_a_save_that_is_committed_meanwhile_is_replaced_by_no_rebuilt_index(tmp_path: Path, act: str) -> None:
    errors: list[str] = []
    for reads in range(1, 20):
        path = tmp_path / f"{reads}"
        tc.save(path, {"of": "the first save", "w": np.zeros(5)})
        if act == "repair":
            (path / INDEX_NAME).write_bytes((path / INDEX_NAME).read_bytes()[:-20])
        store = Overwritten(path)
        store.left = reads
        try:
            tc.rebuild_index(store, replace=True) if act == "rebuild" else tc.verify(store, repair=True)
        except tc.CheckpointError as error:
            errors.append(str(error))
        if store.left > 0:
            break
        assert len(errors) == reads, "nothing is said of the save that is there now"
        assert tc.load(path)["of"] == "the other save" and tc.verify(path).ok
    assert any("another save was committed meanwhile" in error for error in errors)


def locks_of(store: Any) -> list[str]:
    return [name for name in store.sizes() if name.startswith("repairing")]


def test_a_shard_is_copied_before_the_lock_is_taken(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[list[str]] = []
    monkeypatch.setattr(object_store, "SINGLE_PUT_LIMIT", 1 << 20)
    monkeypatch.setattr(repair, "COPIED_NBYTES", 1 << 20)

    class Local(tc.LocalStore):
        def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
            if name.endswith(".damaged"):
                held.append(locks_of(self))
            super().read_into(name, offset, out, shared=shared)

    class Remote(tc.ObjectStore):
        def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
            if name.endswith(".damaged"):
                held.append(locks_of(self))
            super().read_into(name, offset, out, shared=shared)

    for store in (Local(tmp_path / "c"), Remote(s3.url(), **s3.options())):
        tree = {"a": array(5)}
        (name,) = tc.save(store, tree).files
        nbytes = store.sizes()[name]
        data = bytearray(nbytes)
        store.read_into(name, 0, memoryview(data))
        store.delete(name)
        writer = store.create(name, nbytes)
        writer.write(0, memoryview(flip(bytes(data), 20)))
        writer.commit()
        store.close()
        assert tc.verify(store, repair=True).ok and len(held) > 4 and not any(held)
        held.clear()
        assert locks_of(store) == [] and same(store, tree)


def test_a_shard_that_another_process_replaces_meanwhile_is_left_alone(tmp_path: Path) -> None:
    class Replaced(tc.LocalStore):
        """While the shard is copied another process repairs the checkpoint."""

        def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
            super().read_into(name, offset, out, shared=shared)
            if name.endswith(".damaged") and not done:
                done.append(name)
                assert tc.verify(tmp_path, repair=True).ok

    done: list[str] = []
    (name,) = tc.save(tmp_path, {"w": np.arange(9)}).files
    before = contents(tmp_path)
    (tmp_path / name).write_bytes(flip(before[name], 20))
    with pytest.raises(tc.CheckpointError, match="meanwhile"):
        tc.verify(Replaced(tmp_path), repair=True)
    assert done and contents(tmp_path) == before and list(kept(tmp_path).values()) == [flip(before[name], 20)]


def test_other_stores_are_repaired_as_well() -> None:
    store = tc.MemoryStore()
    (name,) = tc.save(store, small_tree(0, 1)).files
    before = {key: bytes(data) for key, data in store.files.items()}
    store.files[name][20] ^= 1
    store.files[INDEX_NAME][-5] ^= 1
    with pytest.raises(tc.CheckpointError):
        tc.verify(store, repair=True)
    store.files[INDEX_NAME][-5] ^= 1
    assert tc.verify(store, repair=True).ok
    assert {key: bytes(data) for key, data in store.files.items() if not key.endswith(".damaged")} == before


def test_a_kept_file_goes_with_its_checkpoint_and_not_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    manager = tc.Manager(run, keep=[tc.policy.Last(1)], background=False, grace=0)
    manager.save(1, {"w": np.arange(9)})
    step = run / "step_00000001"
    (step / INDEX_NAME).write_bytes(b"broken")
    shard = shards_of(step)[0]
    assert tc.verify(step, repair=True).ok and len(kept(step)) == 1
    shard.write_bytes(flip(shard.read_bytes(), 50))
    assert tc.verify(step, repair=True).ok and len(kept(step)) == 2
    manager.clean()
    assert len(kept(step)) == 2
    manager.save(2, {"w": np.arange(9)})
    manager.clean()
    assert not step.exists()


@pytest.mark.parametrize("damage", [None, b"hallo", b"longer than it was"])
def test_a_sidecar_file_is_made_again_from_its_copy(tmp_path, damage):
    path = tmp_path / "c"
    tc.save(path, {"w": np.ones(3)}, files={"config.json": b"hello", "none": b""})
    [stored] = path.glob("file.*.config.json")
    stored.unlink() if damage is None else stored.write_bytes(damage)
    assert not tc.verify(path).ok
    report = tc.verify(path, repair=True)
    assert report.ok and [(one.file, bool(one.kept_as)) for one in report.repairs] == [
        (stored.name, damage is not None)
    ]
    assert tc.read_file(path, "config.json") == b"hello" == stored.read_bytes()
    # the copy is one again: it goes with the checkpoint, and no save takes it for a file of others
    tc.save(path, {"w": np.ones(3)}, files={"config.json": b"other"}, overwrite=True)
    assert (path / "config.json").read_bytes() == b"other"
    tc.delete(path)
    assert not path.exists() or not (path / "config.json").exists()


def test_a_sidecar_file_is_not_made_of_what_is_no_copy_of_it(tmp_path):
    tc.save(tmp_path, {"w": np.ones(3)}, files={"config.json": b"hello"})
    next(tmp_path.glob("file.*")).unlink()
    (tmp_path / "config.json").write_bytes(b"hallo")
    report = tc.verify(tmp_path, repair=True)
    assert not report.ok and not report.repairs and (tmp_path / "config.json").read_bytes() == b"hallo"
