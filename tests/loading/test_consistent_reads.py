"""Loads that race saves into the same place: each gives one whole version, and none blames the files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.elsewhere import elsewhere
from tests.helpers.world import shards_of
from treeckpt._core.format.files import step_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.storage.local_store import LocalRun, LocalStore
from treeckpt._loading.run_load import TRIES

N = 20_000
WRITER = """
import sys, numpy as np, treeckpt as tc
number = 0
while True:
    number += 1
    tree = {f"w{i}": np.full(20_000, number) for i in range(8)} | {"step": number}
    tc.save(sys.argv[1], tree, overwrite=True)
    print(number, flush=True)
"""


def state(number: int) -> dict[str, Any]:
    return {f"w{i}": np.full(N, number) for i in range(8)} | {"step": number}


def version_of(tree: dict[str, Any]) -> int:
    """The number of the save whose state this is, and no other's."""
    number = tree["step"]
    assert all((np.asarray(tree[f"w{i}"]) == number).all() for i in range(8)), "one whole version"
    return number


class Raced(LocalStore):
    """A directory into which something is saved whenever its index has been read."""

    def __init__(self, directory: Path, then: Callable[[], object], times: int = 1) -> None:
        super().__init__(directory)
        self.then, self.left, self.reads = then, times, 0

    def read(self, name: str, *, limit: int) -> bytes:
        data = super().read(name, limit=limit)
        if name == INDEX_NAME:
            self.reads += 1
            if self.left:
                self.left -= 1
                self.then()
        return data


def raced(path: Path, make: Callable[[int], Any] = state, times: int = 1) -> Raced:
    """A checkpoint of number 1, over which the next numbers are saved while it is read."""
    numbers = iter(range(2, 1000))
    tc.save(path, make(1))
    return Raced(path, lambda: elsewhere(tc.save, path, make(next(numbers)), overwrite=True), times)


def by_load(store: Any) -> dict[str, Any]:
    return tc.load(store)


def by_like(store: Any) -> dict[str, Any]:
    return tc.load(store, state(0), read=tc.ReadOptions(copy=True))


def by_load_into(store: Any) -> dict[str, Any]:
    target = state(0)
    tc.load_into(store, target)
    return target


def by_comparing_first(store: Any) -> dict[str, Any]:
    target = state(0)
    tc.load_into(store, target, read=tc.ReadOptions(verify="first"))
    return target


def by_salvaging(store: Any) -> dict[str, Any]:
    reports: list[tc.LoadReport] = []
    tree = tc.load(store, fallback=tc.Fallback(on_corrupt="skip"), on_report=reports.append)
    assert not reports[0].damaged, "nothing is"
    return tree


def by_salvaging_into(store: Any) -> dict[str, Any]:
    target = state(0)
    assert not tc.load_into(store, target, fallback=tc.Fallback(on_corrupt="skip")).damaged
    return target


def by_bank(store: Any) -> dict[str, Any]:
    return tc.load([tc.From(store, select="w*"), tc.From(store, select="step")])


WAYS = (by_load, by_like, by_load_into, by_comparing_first, by_salvaging, by_salvaging_into)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("times", [1, 3])
def test_a_load_that_loses_its_files_to_another_save_takes_the_new_version(
    tmp_path: Path, way: Callable[[Any], dict[str, Any]], times: int
) -> None:
    store = raced(tmp_path / "c", times=times)
    assert version_of(way(store)) == times + 1
    assert store.left == 0


def test_a_bank_takes_the_new_version_of_what_was_replaced(tmp_path: Path) -> None:
    store = raced(tmp_path / "c")
    tc.save(tmp_path / "other", {"extra": np.ones(3)})
    found = tc.load([store, tmp_path / "other"])
    assert version_of(found) == 2 and found["extra"].all()


def test_verify_does_not_take_a_replaced_version_for_a_damaged_one(tmp_path: Path) -> None:
    report = tc.verify(raced(tmp_path / "c"))
    assert report.ok, report


class Counted:
    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def test_objects_and_arrays_come_from_one_version(tmp_path: Path) -> None:
    store = raced(tmp_path / "c", lambda number: state(number) | {"held": Counted(number)})
    target = state(0) | {"held": Counted(0)}
    tc.load_into(store, target)
    assert version_of(target) == target["held"].number == 2


def training_state(number: int) -> dict[str, Any]:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(number))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return tc.training.state(model, optimizer, extra={"number": number}, rng=False)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_training_is_restored_from_one_version(tmp_path: Path, after: int) -> None:
    """Whenever in the restore the checkpoint is replaced."""
    store = raced(tmp_path / "c", training_state)
    save = store.then
    store.then = lambda: save() if store.reads == after else None
    store.left = after
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    report = tc.training.restore(store, model, optimizer, rng=False)
    number = report.extra["number"]
    assert bool((model.weight == number).all()) and optimizer.param_groups[0]["lr"] == number


class RacedRun(LocalRun):
    """A run whose folders are read through one store."""

    store: Raced | None = None

    def folder(self, name: str) -> LocalStore:
        return self.store or super().folder(name)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_manager_restores_one_version_into_all_that_it_fills(tmp_path: Path, after: int) -> None:
    run, held = RacedRun(tmp_path / "run"), Counted(1)
    made = tc.Manager(run, background=False)
    made.register("held", held)
    made.save(1, state(1))
    path, number = tmp_path / "run" / step_name(1), 1

    def replace() -> None:
        nonlocal number
        number += store.reads == after
        if store.reads == after:
            elsewhere(tc.save, path, state(2) | {"registered": {"held": {"number": 2}}}, step=1, overwrite=True)

    run.store = store = Raced(path, replace, 1000)
    target = state(0)
    made.restore(into=target)
    assert version_of(target) == held.number
    assert number == 2 or after > 1, "it was replaced in the meantime"


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_found(tmp_path: Path) -> None:
    def delete() -> None:
        (tmp_path / "c" / INDEX_NAME).unlink()
        for shard in shards_of(tmp_path / "c"):
            shard.unlink()

    tc.save(tmp_path / "c", state(1))
    with pytest.raises(tc.CheckpointNotFound, match="deleted while it was being read"):
        tc.load(Raced(tmp_path / "c", delete))


def test_a_checkpoint_that_never_stays_is_given_up_in_the_end(tmp_path: Path) -> None:
    store = raced(tmp_path / "c", lambda number: {"w": np.full(9, number)}, times=10 * TRIES)
    with pytest.raises(tc.CheckpointError, match=f"another save in its place, {TRIES} times") as caught:
        tc.load(store)
    assert type(caught.value) is tc.CheckpointError and "copy" not in str(caught.value)
    assert store.reads <= 2 * TRIES


def test_what_is_damaged_and_not_replaced_is_still_corrupt(tmp_path: Path) -> None:
    store = raced(tmp_path / "c", times=0)
    shards_of(tmp_path / "c")[0].unlink()
    with pytest.raises(tc.CorruptError, match="no such file"):
        tc.load(store)
    assert store.reads == 2, "looked at once more, and no more"


class Overwriting:
    """A path into which another process saves all the time."""

    def __init__(self, path: Path, numbers: IO[bytes]) -> None:
        self.path, self._numbers, self._saved = path, numbers, 0
        self.wait_for(1)

    def wait_for(self, number: int) -> None:
        """Returns when the save of a number has ended."""
        while self._saved < number:
            line = self._numbers.readline()
            assert line == b"%d\n" % (self._saved + 1), line
            self._saved += 1


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Overwriting]:
    path = tmp_path / "c"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield Overwriting(path, process.stdout)
            assert process.poll() is None, "it was saving until now"
        finally:
            process.kill()


@pytest.mark.parametrize("turns", [80, pytest.param(300, marks=pytest.mark.slow)])
def test_loads_beside_a_process_that_overwrites_are_each_of_one_version(writer: Overwriting, turns: int) -> None:
    met: set[int] = set()
    target = state(0)
    for turn in range(turns):
        if turn % 10 == 0:  # whoever of the two is slower: a load that begins now is of another version
            writer.wait_for(max(met, default=0) + 1)
        way = WAYS[turn % len(WAYS)]
        met.add(version_of(way(writer.path)))
        tc.load_into(writer.path, target)
        met.add(version_of(target))
        assert tc.verify(writer.path).ok
    assert len(met) > turns // 15, "it was replaced again and again"


net = torch.nn.Module()
net.register_buffer("w", torch.ones(2, dtype=torch.float64))
net.register_parameter("more", torch.nn.Parameter(torch.ones(1)))

CALLS: dict[str, Any] = {
    "load": lambda path: tc.load(path, {"model": {"w": np.ones(3)}}),
    "load_into": lambda path: tc.load_into(path, {"model": {"w": np.ones(2, np.int8)}}),
    "bank": lambda path: tc.load([path, path], {"model": {"w": np.ones(3)}}),
    "restore": lambda path: tc.training.restore(path, torch.nn.Linear(2, 1), rng=False),
    "optimizer": lambda path: tc.training.restore(path, net, torch.optim.SGD(net.parameters()), rng=False),
    "manager": lambda path: tc.Manager(path.parent).restore({"model": {"w": np.ones(3)}}),
    "resume": lambda path: tc.Manager(path.parent).resume(net, torch.optim.SGD(net.parameters()), rng=False),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_does_not_fit_is_told_with_the_checkpoint_once(tmp_path: Path, call: str) -> None:
    path = tmp_path / "step_00000001"
    tc.save(path, {"model": {"w": np.ones(2)}}, step=1)
    with pytest.raises(tc.MismatchError) as caught:
        CALLS[call](path)
    assert str(caught.value).endswith(f"Checkpoint: {', '.join([str(path)] * (1 + (call == 'bank')))}")
    assert str(caught.value).count("Checkpoint: ") == 1
