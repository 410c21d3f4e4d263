"""The index of a checkpoint is read and decoded once per call, however many parts of the call need it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from treeckpt._cli.main import main
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.storage import checkpoint
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.shard_reader import check_blocks
from treeckpt.training._sources import place_under


class CountingStore(LocalStore):
    """Counts the reads of index.json."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.index_reads = 0

    def read(self, name: str, *, limit: int) -> bytes:
        self.index_reads += name == INDEX_NAME
        return super().read(name, limit=limit)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The name of every index that was decoded."""
    names: list[str] = []
    decode = checkpoint.decode_index

    def counting(data: bytes, name: str = INDEX_NAME) -> Any:
        names.append(name)
        return decode(data, name)

    monkeypatch.setattr(checkpoint, "decode_index", counting)
    yield names


class Holder:
    """An object with a state of its own."""

    def __init__(self, number: int) -> None:
        self.number, self.weights = number, np.full(3, number)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.weights = state["number"], state["weights"]


def tree(number: int) -> dict[str, Any]:
    return {"w": np.full((40, 50), float(number)), "step": number, "held": Holder(number)}


def saved(path: Path, number: int) -> CountingStore:
    tc.save(path, tree(number))
    return CountingStore(path)


def test_load_decodes_the_index_once(tmp_path: Path, decoded: list[str]) -> None:
    store = saved(tmp_path / "c", 1)
    decoded.clear()
    assert tc.load(store)["step"] == 1
    assert (store.index_reads, len(decoded)) == (1, 1)
    assert tc.load(store, tree(0))["w"].all()
    assert (store.index_reads, len(decoded)) == (2, 2)


def test_a_salvage_decodes_the_index_once(tmp_path: Path, decoded: list[str]) -> None:
    store = saved(tmp_path / "c", 1)
    decoded.clear()
    assert tc.load(store, fallback=tc.Fallback(on_corrupt="skip"))["step"] == 1
    assert (store.index_reads, len(decoded)) == (1, 1)


def test_load_into_decodes_the_index_once(tmp_path: Path, decoded: list[str]) -> None:
    """Objects with a state of their own load their parts from the same decoded index."""
    store, target = saved(tmp_path / "c", 1), tree(0)
    decoded.clear()
    tc.load_into(store, target)
    assert target["held"].number == 1 and target["w"].all()
    assert (store.index_reads, len(decoded)) == (1, 1)


def test_load_into_from_several_checkpoints_decodes_each_index_once(tmp_path: Path, decoded: list[str]) -> None:
    stores = [saved(tmp_path / str(number), number) for number in (1, 2, 3)]
    target = tree(0)
    decoded.clear()
    first, second, third = stores
    tc.load_into([first, tc.From(second, select="w"), tc.From(third, select="held")], target)
    assert (target["step"], target["w"].flat[0], target["held"].number) == (1, 2.0, 3)
    assert [store.index_reads for store in stores] == [1, 1, 1] and len(decoded) == 3


def test_verify_decodes_the_index_once(tmp_path: Path, decoded: list[str]) -> None:
    store = saved(tmp_path / "c", 1)
    decoded.clear()
    assert tc.verify(store).ok
    assert (store.index_reads, len(decoded)) == (1, 1)


@pytest.mark.parametrize("leaf", [[], ["w"], ["--structure"]], ids=" ".join)
def test_the_command_show_decodes_the_index_once(
    tmp_path: Path, decoded: list[str], capsys: pytest.CaptureFixture[str], leaf: list[str]
) -> None:
    path = str(saved(tmp_path / "c", 1).directory)
    decoded.clear()
    assert main(["show", path, *leaf]) == 0 and "float64" in capsys.readouterr().out
    assert len(decoded) == 1


class Reader:
    """Input of which each rank has its own place."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_manager_restores_registered_state_from_one_decoded_index(tmp_path: Path, decoded: list[str]) -> None:
    """The model, what is registered, the optimizer's fresh state and the reader's place come from one index."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    reader = Reader()
    reader.at = 7
    manager = tc.Manager(tmp_path)
    manager.register("optimizer", optimizer)
    manager.register("held", Holder(5))
    manager.register_io_state("reader", reader)
    manager.save(1, {"model": model.state_dict()})
    manager.wait()
    fresh_model, held, place = torch.nn.Linear(4, 4), Holder(0), Reader()
    fresh = torch.optim.AdamW(fresh_model.parameters())
    manager = tc.Manager(tmp_path)
    manager.register("optimizer", fresh)
    manager.register("held", held)
    manager.register_io_state("reader", place)
    assert manager.latest() == 1, "the catalog has read the index"
    decoded.clear()
    manager.restore(into={"model": fresh_model.state_dict()})
    assert (held.number, place.at) == (5, 7) and fresh.state
    assert torch.equal(fresh_model.weight, model.weight)
    assert len(decoded) == 1


def training_setup() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10)


def test_training_restore_decodes_the_index_once(tmp_path: Path, decoded: list[str]) -> None:
    model, optimizer, scheduler = training_setup()
    reader = Reader()
    reader.at = 3
    tc.save(tmp_path / "c", tc.training.state(model, optimizer, scheduler=scheduler, loader=reader, extra={"n": 1}))
    store, place = CountingStore(tmp_path / "c"), Reader()
    fresh_model, fresh, fresh_scheduler = training_setup()
    decoded.clear()
    report = tc.training.restore(store, fresh_model, fresh, scheduler=fresh_scheduler, loader=place)
    assert place.at == 3 and report.extra == {"n": 1}
    assert all(map(torch.equal, fresh_model.state_dict().values(), model.state_dict().values()))
    assert (store.index_reads, len(decoded)) == (1, 1)


def test_training_restore_of_several_checkpoints_decodes_each_index_once(tmp_path: Path, decoded: list[str]) -> None:
    model, optimizer, _ = training_setup()
    stores: list[CountingStore] = []
    for name in ("base", "tuned"):
        tc.save(tmp_path / name, tc.training.state(model, optimizer))
        stores.append(CountingStore(tmp_path / name))
    base, tuned = stores
    fresh_model, fresh, _ = training_setup()
    decoded.clear()
    tc.training.restore([base, tc.From(tuned, select="model/1.*")], fresh_model, fresh)
    assert all(map(torch.equal, fresh_model.state_dict().values(), model.state_dict().values()))
    assert [store.index_reads for store in stores] == [1, 1] and len(decoded) == 2


def test_custom_metadata_is_read_as_plain_values() -> None:
    store, given = tc.MemoryStore(), {"name": "run", "sizes": 3, "loss": float("inf"), "bytes": b"x", "z": 1j}
    tc.save(store, {"a": 1}, custom_metadata=given)
    assert tc.inspect(store).custom_metadata == given


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_shard_names_the_leaves_of_the_index_that_it_is_read_under(tmp_path: Path, opened: str) -> None:
    tc.save(tmp_path / "c", {"w": np.arange(1000.0)})
    old = checkpoint.Checkpoint(LocalStore(tmp_path / "c"))
    (file,) = old.index.file_list
    if opened == "before":
        old.shard(file)
    new = place_under(old, "model")
    for one, name in ((new, "model/w: "), (old, "w: "), (new, "model/w: ")):
        shard = one.shard(file)
        assert shard.index is one.index
        with pytest.raises(tc.CorruptError, match=f"^{name}"):
            check_blocks(one.store, shard, 0, memoryview(bytes(file.nbytes)))


def test_a_checkpoint_exists_once_it_is_committed_and_errors_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a"
    assert not tc.exists(path)
    tc.save(path, {"v": 1})
    assert tc.exists(path) and tc.exists(LocalStore(path)) and not tc.exists(path.parent)
    assert not tc.exists(path / INDEX_NAME)
    index = (path / INDEX_NAME).rename(path / "aside")
    assert not tc.exists(path), "shards alone are those of a save that never finished"
    index.rename(path / f"deleted.{tc.inspect(copy(path, index)).save_id}.{'0' * 16}.json")
    assert not tc.exists(path), "a deletion that was cut short took it away"
    (path / "pinned.json").write_text("{}")
    assert tc.exists(path) and tc.load(path) == {"v": 1}, "it was pinned meanwhile, and comes back"

    class Broken(LocalStore):
        def entry(self, name: str) -> Any:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(tc.StoreError, match="Input/output error"):
        tc.exists(Broken(path))
    for wrong in (None, 3):
        with pytest.raises(tc.CheckpointError):
            tc.exists(wrong)  # pyright: ignore[reportArgumentType]


def copy(path: Path, index: Path) -> Path:
    """A copy of a checkpoint whose index has another name."""
    there = shutil.copytree(path, path.parent / "copy")
    (there / index.name).rename(there / INDEX_NAME)
    return there
