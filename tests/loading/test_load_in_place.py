"""What a load in place promises of its target when bytes turn out to be changed: in one pass, and comparing first."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import Faulty, Switch, assert_equal, shards_of, small_tree, whole_tree
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.storage import local_files
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.store import MemoryStore

N = 1 << 20


@pytest.fixture(params=["page cache", "device"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the reader is told that the bytes lie: it takes them straight to their place, or through a buffer."""
    monkeypatch.setattr(local_files, "is_cached", lambda *_: request.param == "page cache")
    return request.param


def leaves(fill: int) -> dict[str, Any]:
    return {f"w{i}": np.full(N, fill * (i + 1)) for i in range(4)}


def damage(path: Path, leaf: str) -> None:
    """Changes a byte in the middle of a leaf."""
    index = tc.inspect(path)
    [entry] = index.by_path[leaf]
    assert entry.spec is not None
    [chunk] = index.chunks_of(entry)
    file, start = index.locate(chunk.rank, chunk.start, chunk.start + 1, leaf)
    data = bytearray((path / file.name).read_bytes())
    data[start + chunk.region.size * 2] ^= 1
    (path / file.name).write_bytes(data)


class Holder:
    """An object with a state of values."""

    def __init__(self, count: int) -> None:
        self.count, self.given = count, 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count, self.given = state["count"], self.given + 1


@pytest.mark.parametrize("verify", [True, "stream"])
def test_one_pass_names_the_changed_bytes_and_what_is_partly_filled(tmp_path: Path, verify: Any, held: str) -> None:
    tc.save(tmp_path / "c", {**leaves(1), "step": 5, "held": Holder(5)})
    damage(tmp_path / "c", "w2")
    held_by = Holder(1)
    target = {**leaves(0), "step": 1, "held": held_by}
    with pytest.raises(tc.CorruptError, match=r"w2.*changed bytes in") as caught:
        tc.load_into(tmp_path / "c", target, read=tc.ReadOptions(verify=verify))
    said = str(caught.value)
    assert "The target is partly filled" in said and " of 4 arrays may have changed: " in said
    assert target["step"] == 1 and target["held"] is held_by, "values come after all arrays"
    assert (held_by.count, held_by.given) == (1, 0), "objects too"
    changed = [name for name in leaves(0) if target[name].any()]
    assert all(name in said.partition("may have changed: ")[2] for name in changed), "none that changed is left out"


@pytest.mark.parametrize("verify", ["first"])
def test_comparing_first_leaves_the_whole_target_as_it_was(tmp_path: Path, verify: Any, held: str) -> None:
    tc.save(tmp_path / "c", {**leaves(1), "step": 5})
    damage(tmp_path / "c", "w3")
    target = {**leaves(0), "step": 1}
    with pytest.raises(tc.CorruptError, match=r"w3.*changed bytes in") as caught:
        tc.load_into(tmp_path / "c", target, read=tc.ReadOptions(verify=verify))
    assert_equal(target, {**leaves(0), "step": 1})
    assert "partly filled" not in str(caught.value)


def test_each_byte_is_read_once_unless_all_is_compared_first(tmp_path: Path) -> None:
    class Counting(LocalStore):
        total = 0

        def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
            super().read_into(name, offset, out, shared=shared)
            self.total += len(out) if name != INDEX_NAME and len(out) >= 1 << 16 else 0

        def read_parts(self, name: str, offset: int, parts: Any, *, shared: bool = False) -> bool:
            done = super().read_parts(name, offset, parts, shared=shared)
            self.total += sum(map(len, parts)) if done else 0
            return done

        def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> AbstractContextManager[None]:
            return nullcontext()

    tc.save(tmp_path / "c", leaves(1))
    nbytes = sum(leaf.nbytes for leaf in leaves(1).values())
    for verify, times in ((True, 1), ("stream", 1), ("first", 2)):
        store, target = Counting(tmp_path / "c"), leaves(0)
        tc.load_into(store, target, read=tc.ReadOptions(verify=verify))  # pyright: ignore[reportArgumentType]
        assert_equal(target, leaves(1))
        assert store.total == times * nbytes, verify


@pytest.mark.parametrize(
    "break_it",
    [
        lambda shard: shard.unlink(),
        lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
        lambda shard: shard.write_bytes(shard.read_bytes() + b"x"),
        lambda shard: shard.write_bytes(b"\1" + shard.read_bytes()[1:]),
    ],
    ids=["missing", "cut short", "grown", "another header"],
)
def test_a_shard_that_is_not_whole_is_found_before_the_first_byte(
    tmp_path: Path, break_it: Callable[[Path], Any]
) -> None:
    tc.save(tmp_path / "c", leaves(1), max_shard_bytes=N * 8)
    assert len(shards_of(tmp_path / "c")) == 4
    break_it(shards_of(tmp_path / "c")[-1])
    target = leaves(0)
    with pytest.raises(tc.CheckpointError) as caught:
        tc.load_into(tmp_path / "c", target)
    assert_equal(target, leaves(0))
    assert "partly filled" not in str(caught.value)


def test_a_read_that_fails_midway_says_what_may_have_changed() -> None:
    saved = MemoryStore()
    tc.save(saved, small_tree(0, 1))
    switch = Switch()
    tc.load_into(Faulty(saved, switch), whole_tree(seed=9), fallback=tc.Fallback(per_rank="take"))
    told = []
    for at in range(len(switch.calls)):
        target = whole_tree(seed=9)
        with pytest.raises(tc.StoreError, match="injected") as caught:
            tc.load_into(Faulty(saved, Switch(at)), target, fallback=tc.Fallback(per_rank="take"))
        changed = "partly filled" in str(caught.value)
        told.append(changed)
        if not changed:
            assert_equal(target, whole_tree(seed=9))
    assert not told[0], "the index and the headers are read before"


def test_an_error_of_the_disk_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tc.save(tmp_path / "c", leaves(1))

    def fails(self: Any, name: str, offset: int, parts: Any, *, shared: bool = False) -> bool:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(LocalStore, "read_parts", fails)
    with pytest.raises(tc.StoreError, match=r"injected.*partly filled: .* of 4 arrays"):
        tc.load_into(tmp_path / "c", leaves(0))


def test_a_bank_puts_no_value_in_place_before_the_arrays_of_all_its_checkpoints(tmp_path: Path) -> None:
    tc.save(tmp_path / "a", {"x": np.ones(N), "m": 5})
    tc.save(tmp_path / "b", {"y": np.ones(N), "n": 6})
    bank = [tmp_path / "a", tmp_path / "b"]
    target: dict[str, Any] = {"x": np.zeros(N), "m": 0, "y": np.zeros(N), "n": 0}
    tc.load_into(bank, target)
    assert target["x"].all() and target["y"].all() and (target["m"], target["n"]) == (5, 6)

    damage(tmp_path / "b", "y")
    target = {"x": np.zeros(N), "m": 0, "y": np.zeros(N), "n": 0}
    with pytest.raises(tc.CorruptError, match=r"partly filled: [12] of 2 arrays may have changed: x"):
        tc.load_into(bank, target)
    assert (target["m"], target["n"]) == (0, 0)

    target = {"x": np.zeros(N), "m": 0, "y": np.zeros(N), "n": 0}
    with pytest.raises(tc.CorruptError):
        tc.load_into(bank, target, read=tc.ReadOptions(verify="first"))
    assert_equal(target, {"x": np.zeros(N), "m": 0, "y": np.zeros(N), "n": 0})


def test_under_rules_the_names_of_the_target_are_told(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"old": torch.ones(N), "z": torch.ones(N)})
    damage(tmp_path / "c", "z")
    target = {"new": torch.zeros(N), "z": torch.zeros(N)}
    with pytest.raises(tc.CorruptError, match=r"may have changed: .*\bnew\b|was not changed"):
        tc.load_into(tmp_path / "c", target, rename={"old": "new"})


def test_a_restore_of_a_training_says_it_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(600, 600)
    tc.save(tmp_path / "c", tc.training.state(model, rng=False))
    damage(tmp_path / "c", "model/weight")
    with pytest.raises(tc.CorruptError, match=r"partly filled|was not changed"):
        tc.training.restore(tmp_path / "c", model, rng=False)
    before = {name: leaf.clone() for name, leaf in torch.nn.Linear(600, 600).state_dict().items()}
    fresh = torch.nn.Linear(600, 600)
    fresh.load_state_dict(before)
    with pytest.raises(tc.CorruptError):
        tc.training.restore(tmp_path / "c", fresh, rng=False, read=tc.ReadOptions(verify="first"))
    assert all(torch.equal(leaf, before[name]) for name, leaf in fresh.state_dict().items())
