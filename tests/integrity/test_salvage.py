"""Fallback(on_corrupt="skip"): intact leaves are loaded, damaged ones are not, and the report says which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.corruption import flip
from tests.helpers.world import assert_equal, errors_of, on_ranks, shards_of, small_tree, whole_tree
from treeckpt._core.format.shard_header import BLOCK

N = BLOCK // 8
LEAVES = {f"layer{n}": np.arange(N, dtype=np.int64) + n for n in range(4)}


def change(file: Path, *places: int) -> None:
    data = file.read_bytes()
    for at in places:
        data = flip(data, at)
    file.write_bytes(data)


def span_of(path: Path, leaf: str, rank: int | None = None) -> tuple[Path, int, int]:
    """The file, and the bytes in it, of a leaf's first chunk."""
    index = tc.inspect(path)
    entry = index.by_path[leaf][0]
    assert entry.spec is not None
    chunk = index.chunks_of(entry, rank=rank)[0]
    size = chunk.region.size * np.dtype(entry.spec.dtype).itemsize
    file, start = index.locate(chunk.rank, chunk.start, chunk.start + size, leaf)
    return path / file.name, start, start + size


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tc.save(tmp_path / "c", LEAVES)
    return tmp_path / "c"


def test_intact_leaves_come_and_damaged_ones_are_left_out(saved: Path) -> None:
    file, start, stop = span_of(saved, "layer2")
    change(file, start + 5)
    with pytest.raises(tc.CorruptError, match="layer2"):
        tc.load(saved)
    reports: list[tc.LoadReport] = []
    found = tc.load(saved, fallback=tc.Fallback(on_corrupt="skip"), on_report=reports.append)
    assert found["layer2"] is ... and list(found) == list(LEAVES)
    assert all(np.array_equal(found[key], LEAVES[key]) for key in LEAVES if key != "layer2")
    (part,) = reports[0].damaged
    assert (part.path, part.file, part.start, part.stop) == ("layer2", file.name, start, stop)
    assert "layer2" in str(reports[0]) and file.name in str(reports[0])


@pytest.mark.parametrize("verify", [True, "first", "stream", False])
def test_load_into_leaves_damaged_leaves_as_they_were(saved: Path, verify: Any) -> None:
    file, start, _ = span_of(saved, "layer1")
    change(file, start)
    target = {key: np.full(N, -1) for key in LEAVES}
    arrays = dict(target)
    report = tc.load_into(saved, target, read=tc.ReadOptions(verify=verify), fallback=tc.Fallback(on_corrupt="skip"))
    assert all(target[key] is arrays[key] for key in LEAVES)
    assert (target["layer1"] == -1).all() and [part.path for part in report.damaged] == ["layer1"]
    assert all(np.array_equal(target[key], LEAVES[key]) for key in LEAVES if key != "layer1")


def test_like_gets_an_ellipsis_where_a_leaf_is_damaged(saved: Path) -> None:
    file, start, _ = span_of(saved, "layer0")
    change(file, start)
    found = tc.load(
        saved, {key: torch.zeros(N, dtype=torch.int64) for key in LEAVES}, fallback=tc.Fallback(on_corrupt="skip")
    )
    assert found["layer0"] is ... and torch.equal(found["layer3"], torch.from_numpy(LEAVES["layer3"]))


def test_an_intact_checkpoint_is_loaded_as_ever(saved: Path) -> None:
    reports: list[tc.LoadReport] = []
    assert_equal(tc.load(saved, fallback=tc.Fallback(on_corrupt="skip"), on_report=reports.append), LEAVES)
    assert reports[0].damaged == ()
    with pytest.raises(tc.MismatchError, match="'skip'"):
        tc.load(saved, fallback=tc.Fallback(on_corrupt="ignore"))  # pyright: ignore[reportArgumentType]


def test_what_shares_a_block_is_hurt_together_and_what_is_tied_too(tmp_path: Path) -> None:
    base = np.arange(float(N))
    tree = {"big": base, "tie": base, "view": base[3:9], "a": np.arange(3), "b": np.arange(4), "far": np.arange(2 * N)}
    tc.save(tmp_path / "c", tree)
    file, start, _ = span_of(tmp_path / "c", "big")
    data = file.read_bytes()
    change(file, start)
    found = tc.load(tmp_path / "c", fallback=tc.Fallback(on_corrupt="skip"))
    assert {key for key in tree if found[key] is ...} == {"big", "tie", "view"}
    file.write_bytes(data)
    change(file, span_of(tmp_path / "c", "a")[1])
    found = tc.load(tmp_path / "c", fallback=tc.Fallback(on_corrupt="skip"))
    assert {key for key in tree if found[key] is ...} == {"a", "b"}, "one checksum covers both"


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


HURT: dict[str, Callable[[Path], None]] = {
    "gone": lambda file: file.unlink(),
    "header": lambda file: change(file, 100),
    "empty": lambda file: file.write_bytes(b""),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "a directory": replace_by_directory,
    "header cut": lambda file: file.write_bytes(file.read_bytes()[:1000]),
}


@pytest.mark.parametrize("name", HURT)
def test_a_shard_without_a_header_loses_what_it_holds_and_no_more(tmp_path: Path, name: str) -> None:
    path = tmp_path / "c"
    assert errors_of(on_ranks(2, lambda c: tc.save(path, small_tree(c.rank, 2), comm=c))) == [None] * 2
    HURT[name](shards_of(path)[1])
    reports: list[tc.LoadReport] = []
    found = tc.load(path, fallback=tc.Fallback(per_rank="take", on_corrupt="skip"), on_report=reports.append)
    whole = whole_tree()
    lost = {part.path for part in reports[0].damaged}
    assert "pieces" in lost and found["pieces"] is ..., "half of it was there"
    for key in ("replica", "shared", "tie"):
        assert (found[key] is ...) == (key in lost)
        if found[key] is not ...:
            assert_equal(found[key], whole[key])
    assert_equal(found["own"], whole["own"])  # rank 0's is in the other shard
    assert_equal([found["step"], found["nested"]], [whole["step"], whole["nested"]])
    assert not [path for path in lost if path.startswith("own")]


def test_what_lies_before_the_end_of_a_cut_shard_comes(saved: Path) -> None:
    file, start, _ = span_of(saved, "layer3")
    file.write_bytes(file.read_bytes()[: start + 9])
    target = {key: np.full(N, -1) for key in LEAVES}
    report = tc.load_into(saved, target, fallback=tc.Fallback(on_corrupt="skip"))
    assert [part.path for part in report.damaged] == ["layer3"] * len(report.damaged) and report.damaged
    assert (target.pop("layer3") == -1).all()
    assert all(np.array_equal(target[key], LEAVES[key]) for key in target)
    with pytest.raises(tc.CorruptError, match="are missing"):
        tc.load(saved)


def test_something_behind_the_end_hurts_no_leaf(saved: Path) -> None:
    file = shards_of(saved)[0]
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(tc.CorruptError, match="are too many"):
        tc.load(saved)
    assert_equal(tc.load(saved, fallback=tc.Fallback(on_corrupt="skip")), LEAVES)


def _own(rank: int, world: int) -> dict[str, Any]:
    rows = np.arange(4.0 * N).reshape(4, N)
    low, high = 4 * rank // world, 4 * (rank + 1) // world
    return {
        "rows": tc.Sharded(rows[low:high].copy(), (4, N), (low, 0)),
        "replica": np.arange(2 * N),
        "own": tc.PerRank({"state": np.full(N, rank)}),
    }


def test_ranks_skip_the_same_leaves_though_each_wants_another_part(tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert errors_of(on_ranks(2, lambda c: tc.save(path, _own(c.rank, 2), comm=c))) == [None] * 2
    index = tc.inspect(path)
    chunks = index.chunks_of(index.by_path["rows"][0])
    last = max(chunks, key=lambda chunk: chunk.region.offset)
    file, start = index.locate(last.rank, last.start, last.start + 8, "rows")
    change(path / file.name, start)
    own_file, own_start, _ = span_of(path, "own/~rank*/state", rank=1)
    change(own_file, own_start)

    def into(comm: Any) -> Any:
        target = _own(comm.rank, 2)
        target["rows"].local[:], target["replica"][:], target["own"].value["state"][:] = -1, -1, -1
        return target, tc.load_into(path, target, comm=comm, fallback=tc.Fallback(on_corrupt="skip"))

    outcomes = on_ranks(2, into)
    assert errors_of(outcomes) == [None] * 2
    for rank, (target, report) in enumerate(outcome.value for outcome in outcomes):
        assert (target["rows"].local == -1).all(), "no rank goes on with half an array"
        assert np.array_equal(target["replica"], np.arange(2 * N))
        assert (target["own"].value["state"] == (-1 if rank == 1 else 0)).all()
        assert {part.path for part in report.damaged} == {"rows"} | ({"own/~rank*/state"} if rank == 1 else set())


def test_a_keyed_table_is_had_whole_or_not_at_all(tmp_path: Path) -> None:
    ids = np.arange(2 * N, dtype=np.int64)
    table = tc.KeyedTable(ids, {"w": np.arange(2.0 * N), "m": np.zeros(2 * N)}, buckets=1024)
    tc.save(tmp_path / "c", {"t": table, "x": np.arange(N)})
    file, start, _ = span_of(tmp_path / "c", "t/slots/m")
    change(file, start)
    found = tc.load(tmp_path / "c", fallback=tc.Fallback(on_corrupt="skip"))
    assert found["t"].ids is ... and found["t"].slots == {"w": ..., "m": ...}
    assert np.array_equal(found["x"], np.arange(N))
    target = {"t": tc.KeyedTable(ids[:1], {"w": np.ones(1), "m": np.ones(1)}, buckets=1024), "x": np.zeros(N, np.int64)}
    report = tc.load_into(tmp_path / "c", target, fallback=tc.Fallback(on_corrupt="skip"))
    assert np.array_equal(target["t"].ids, ids[:1]) and np.array_equal(target["t"].slots["w"], np.ones(1))
    assert np.array_equal(target["x"], np.arange(N)) and {p.path for p in report.damaged} >= {"t/ids", "t/slots/w"}


class Queue:
    """Has a state that grows."""

    def __init__(self) -> None:
        self.items: Any = []

    def state_dict(self) -> Any:
        return {"items": self.items}

    def load_state_dict(self, state: Any) -> None:
        self.items = state["items"]


def test_an_object_whose_state_is_damaged_keeps_its_own(tmp_path: Path) -> None:
    full = Queue()
    full.items = [np.arange(N)]
    tc.save(tmp_path / "c", {"queue": full, "x": np.arange(N)})
    file, start, _ = span_of(tmp_path / "c", "queue/items/0")
    change(file, start)
    tree = {"queue": Queue(), "x": np.zeros(N, np.int64)}
    tc.load_into(tmp_path / "c", tree, fallback=tc.Fallback(on_corrupt="skip"))
    assert tree["queue"].items == [] and np.array_equal(tree["x"], np.arange(N))


def test_without_an_index_there_is_nothing_to_salvage_from(saved: Path) -> None:
    (saved / "index.json").write_bytes(b"{}")
    outcomes = on_ranks(2, lambda c: tc.load(saved, comm=c, fallback=tc.Fallback(on_corrupt="skip")))
    for error in errors_of(outcomes):
        assert isinstance(error, tc.CorruptError) and "--repair" in error.hint


def test_rules_make_nothing_of_what_is_damaged(saved: Path) -> None:
    file, start, _ = span_of(saved, "layer2")
    change(file, start)
    reports: list[tc.LoadReport] = []
    found = tc.load(
        saved, rename={"layer$N": "block$N"}, fallback=tc.Fallback(on_corrupt="skip"), on_report=reports.append
    )
    assert found["block2"] is ... and np.array_equal(found["block1"], LEAVES["layer1"])
    assert {part.path for part in reports[0].damaged} == {"block2"}
    with pytest.raises(tc.MismatchError, match="one checkpoint"):
        tc.load([saved, saved], fallback=tc.Fallback(on_corrupt="skip"))
