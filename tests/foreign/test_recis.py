"""Checkpoints of RecIS are read in place: tables as tables, by any number of ranks, and everything beside them."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.recis_files import BUCKETS, RecisTable, note_latest, table_of, write_recis
from tests.helpers.world import errors_of, on_ranks
from treeckpt._cli.main import main

Rows = dict[int, dict[str, list[Any]]]
SLOTS = ("embedding", "sparse_adamw_exp_avg", "sparse_adamw_exp_avg_sq")


def rows_of(table: Any) -> Rows:
    ids = np.asarray(table.ids).tolist()
    slots = {name: np.asarray(slot).tolist() for name, slot in table.slots.items()}
    found = {i: {name: slot[n] for name, slot in slots.items()} for n, i in enumerate(ids)}
    assert len(found) == len(ids)
    return found


def given(tree: dict[str, Any]) -> set[str]:
    """The parts that were loaded: in the others `...` is in the place of leaves."""
    return {name for name, part in tree.items() if "Ellipsis" not in f"{part}" and "(? rows" not in f"{part}"}


def wanted(rank: int = 0, world: int = 1, **options: Any) -> tc.KeyedTable:
    slots = {name: tc.ArraySpec((0, 4), "float32") for name in SLOTS}
    return tc.KeyedTable(tc.ArraySpec((0,), "int64"), slots, owned=tc.KeyedTable.share(rank, world), **options)


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "tables": {"emb@0": table_of(700), "user": table_of(90, seed=1), "none": table_of(0)},
        "dense": {"sparse_adamw_step": np.array([5]), "fc.weight": np.ones(2), "fc.weight_g": np.array([True, False])},
        "model": torch.nn.Linear(3, 2).state_dict(),
        "extra": {"global_step": torch.tensor(10), "schedule": {"lr": 0.5}},
    }


@pytest.fixture
def place(tmp_path: Path, state: dict[str, Any]) -> Path:
    readers = [{"rows": {"offset": shard}} for shard in range(3)]
    return write_recis(tmp_path / "ckpt_10", **state, shards=3, parallel=2, io_states=readers)


def test_all_that_a_checkpoint_has_is_in_the_tree(place: Path, state: dict[str, Any]) -> None:
    """recis-saver, lines 132-160, 200-247: sparse and dense parameters, extra objects, states of readers.

    A name that begins with another one, and booleans, which RecIS writes and cannot read, are read as any other.
    """
    tree = tc.load(place)
    assert [*tree] == ["model", "sparse", "sparse_opt", "extra", "io_state"]
    assert {name: rows_of(table) for name, table in tree["sparse"].items()} == {
        name: rows_of(table) for name, table in state["tables"].items()
    }
    assert [*tree["sparse"]["user"].slots] == [*SLOTS]
    assert torch.equal(tree["model"]["weight"], state["model"]["weight"])
    assert {name: value.tolist() for name, value in tree["sparse_opt"].items()} == {
        name: value.tolist() for name, value in state["dense"].items()
    }
    assert tree["extra"] == state["extra"]
    assert tree["io_state"] == {shard: {"rows": {"offset": shard}} for shard in range(3)}


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("parallel", [1, 7])
def test_any_number_of_ranks_loads_its_rows(tmp_path: Path, shards: int, parallel: int) -> None:
    """recis-saver, lines 248-260: what some shards saved, others load, each its own buckets."""
    table = table_of(2000)
    place = write_recis(tmp_path / "c", {"emb": table}, shards=shards, parallel=parallel)
    for world in (1, 2, 3):
        found: Rows = {}
        for rank in range(world):
            own = tc.load(place, {"sparse": {"emb": wanted(rank, world)}})["sparse"]["emb"]
            start, stop = tc.KeyedTable.share(rank, world)
            buckets = tc.KeyedTable.buckets_of(own.ids)
            assert ((buckets >= start) & (buckets < stop)).all()
            found |= rows_of(own)
        assert found == rows_of(table)


def test_a_rank_reads_little_more_than_its_rows(tmp_path: Path) -> None:
    table = table_of(60_000, width=32)
    place = write_recis(tmp_path / "c", {"emb": table}, shards=6)
    slots = {name: tc.ArraySpec((0, 32), "float32") for name in SLOTS}
    like = tc.KeyedTable(tc.ArraySpec((0,), "int64"), slots, owned=tc.KeyedTable.share(2, 6))
    read: list[int] = []
    tc.load(place, {"sparse": {"emb": like}}, on_report=lambda report: read.append(report.read_nbytes))
    own = 60_000 * (8 + 3 * 32 * 4) / 6
    assert read[0] < 1.1 * own + 100_000


def test_rows_in_the_shard_of_other_buckets_are_found(tmp_path: Path) -> None:
    """A lookup on a CPU places a negative id by the remainder of C, which a load of RecIS then looks for elsewhere."""
    table = table_of(1500)
    homes = np.array([int(math.fmod(i, BUCKETS)) for i in table.ids.tolist()])
    place = write_recis(tmp_path / "c", {"emb": table}, shards=4, homes={"emb": np.abs(homes)})
    assert rows_of(tc.load(place)["sparse"]["emb"]) == rows_of(table)
    parts = [tc.load(place, {"sparse": {"emb": wanted(rank, 3)}})["sparse"]["emb"] for rank in range(3)]
    assert {i: row for part in parts for i, row in rows_of(part).items()} == rows_of(table)


def test_chosen_rows_are_loaded_by_id(place: Path, state: dict[str, Any]) -> None:
    table = state["tables"]["emb@0"]
    own = tc.load(place, ids={"sparse/emb@0": table.ids[5:9]}, select="sparse/emb@0")["sparse"]["emb@0"]
    assert np.asarray(own.ids).tolist() == table.ids[5:9].tolist()
    assert np.asarray(own.slots["embedding"]).tolist() == table.slots["embedding"][5:9].tolist()


def test_an_id_with_two_rows_is_refused(tmp_path: Path) -> None:
    table = table_of(50)
    twice = RecisTable(
        np.append(table.ids, table.ids[7]), {name: np.append(s, s[:1], axis=0) for name, s in table.slots.items()}
    )
    place = write_recis(tmp_path / "c", {"emb": twice}, shards=2)
    with pytest.raises(tc.CorruptError, match=rf"(?s)table 'emb'.*each id once.*{table.ids[7]}"):
        tc.load(place)
    assert tc.inspect(place).by_path["sparse/emb/ids"][0].spec.shape == (51,)


def test_groups_of_parts_are_chosen_by_paths(place: Path) -> None:
    """recis-saver, lines 346-387: `load` and `exclude` of sparse, dense, extra, sparse_opt and io_state."""
    every = {"model", "sparse", "sparse_opt", "extra", "io_state"}
    for name in sorted(every):
        assert given(tc.load(place, select=name)) == {name}
        assert given(tc.load(place, exclude=name)) == every - {name}
    # excluding the extra objects leaves the readers, unlike there
    assert tc.load(place, exclude="extra")["io_state"][1] == {"rows": {"offset": 1}}


def test_the_list_of_a_run_names_the_latest(tmp_path: Path, state: dict[str, Any]) -> None:
    """recis-saver, lines 326-345: the last line of `checkpoint` is loaded, unless another one is named."""
    run = tmp_path / "run"
    for number, name in enumerate(["checkpoint_b", "checkpoint_a"]):
        write_recis(run / name, {}, model=state["model"], extra={"global_step": torch.tensor(number)})
        note_latest(run, name)
    assert tc.convert.detect(run) == "recis"
    assert tc.load(run)["extra"]["global_step"] == 1
    assert tc.load(run / "checkpoint_b")["extra"]["global_step"] == 0
    shutil.rmtree(run / "checkpoint_a")
    with pytest.raises(tc.CheckpointNotFound, match=r"(?s)checkpoint_a.*checkpoint_b is there"):
        tc.load(run)


def test_an_empty_run_is_an_error(tmp_path: Path) -> None:
    """recis-saver, lines 328-342: where RecIS logs that there is nothing, and goes on with a fresh model."""
    with pytest.raises(tc.CheckpointNotFound):
        tc.load(tmp_path)
    with pytest.raises(tc.CheckpointNotFound):
        tc.training.restore(tmp_path / "none", torch.nn.Linear(3, 2))


def test_it_fills_models_and_hash_tables(place: Path, state: dict[str, Any]) -> None:
    class Table:
        def export(self) -> tuple[Any, Any]:
            return np.empty(0, np.int64), {name: np.empty((0, 4), np.float32) for name in SLOTS}

        def import_(self, ids: Any, slots: Any) -> None:
            self.ids, self.slots = ids, slots

    model, table, user = torch.nn.Linear(3, 2), Table(), Table()
    report = tc.training.restore(
        place,
        model,
        extra={"emb": tc.KeyedTable.of(table), "global_step": torch.tensor(0), "schedule": ...},
        rename={"sparse/emb@0": "extra/emb"},
        from_root=True,
    )
    assert "io_state" in report.ignored
    assert torch.equal(model.weight, state["model"]["weight"])
    assert rows_of(table) == rows_of(state["tables"]["emb@0"])
    tc.load_into(place, {"sparse": {"user": tc.KeyedTable.of(user)}}, strict="missing")
    assert rows_of(user) == rows_of(state["tables"]["user"])


@pytest.mark.parametrize("world", [1, 2])
def test_it_becomes_a_checkpoint_of_ours(place: Path, state: dict[str, Any], tmp_path: Path, world: int) -> None:
    outcomes = on_ranks(world, lambda comm: tc.convert.convert(place, tmp_path / "new", comm=comm))
    assert errors_of(outcomes) == [None] * world
    assert tc.verify(tmp_path / "new").ok
    tree = tc.load(tmp_path / "new")
    assert rows_of(tree["sparse"]["emb@0"]) == rows_of(state["tables"]["emb@0"])
    assert tree["extra"] == state["extra"]


def test_it_becomes_files_of_other_formats(place: Path, state: dict[str, Any], tmp_path: Path) -> None:
    tc.convert.convert(place, tmp_path / "new.safetensors", select="sparse/user")
    flat = tc.load(tmp_path / "new.safetensors")
    own = RecisTable(flat["sparse.user.ids"], {name: flat[f"sparse.user.slots.{name}"] for name in SLOTS})
    assert rows_of(own) == rows_of(state["tables"]["user"])
    buckets = tc.KeyedTable.buckets_of(own.ids)
    assert np.searchsorted(buckets, np.arange(BUCKETS)).tolist() == flat["sparse.user.offsets"].tolist()


def test_it_is_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(place)]) == 0
    shown = capsys.readouterr().out
    assert "emb@0" in shown and "table" in shown and "sparse_opt" in shown
    assert main(["show", str(place.parent)]) != 0 or "ckpt_10" in capsys.readouterr().out


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_pickles_are_read_as_data(tmp_path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """model.pt and extra.pt may hold anything: what only code could make is left out by name, or refused."""
    monkeypatch.chdir(tmp_path)
    place = write_recis(tmp_path / "c", {}, model=state["model"], extra={"bad": Harmful(), "good": 3})
    assert tc.load(place, exclude="extra/bad")["extra"]["good"] == 3
    with pytest.raises(tc.TreeError, match=r"(?s)extra/bad.*mkdir"):
        tc.load(place)
    assert not (tmp_path / "harm").exists()


def _drop(name: str) -> Any:
    return lambda place: (place / name).unlink()


def _left(name: str) -> Any:
    return lambda place: (place / name).write_bytes(b"{}")


def _other_part(place: Path) -> None:
    keys = json.loads((place / "tensorkey.json").read_text())
    changed = {name: held.replace("^21846@43691@", "^21846@40000@") for name, held in keys.items()}
    assert changed != keys
    (place / "tensorkey.json").write_text(json.dumps(changed))


def _no_blocks(place: Path) -> None:
    (place / "index").write_text('{"block_index":{},"file_index":{}}')


def _other_modulus(place: Path) -> None:
    keys = json.loads((place / "tensorkey.json").read_text())
    changed = {name: held.replace("@65536", "@70000") if "@id^" in held else held for name, held in keys.items()}
    (place / "tensorkey.json").write_text(json.dumps(changed))


def _other_rows(place: Path) -> None:
    for shard in place.glob("model-*.safetensors"):
        data = shard.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for name, block in header.items():
            if name.startswith(("emb.0.embedding/part_1", "emb.0@embedding/part_1")):
                block["shape"] = [block["shape"][0], 2, 2]
        text = json.dumps(header).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


DAMAGES = {
    "no names of blocks": (_drop("tensorkey.json"), "tensorkey.json"),
    "no index": (_drop("index"), "the file index"),
    "a shard is missing": (_drop("model-000002-of-000006.safetensors"), "model-000002"),
    "a save is under way": (_left("ckpt-0000001-0000000.data.tmp"), "a save that has ended"),
    "names were not joined": (_left("2tensorkey.json"), "a save that has ended"),
    "a reader is missing": (_drop("io_state_1.pt"), "none of shard 1"),
    "the number of readers is missing": (_drop("io_state_count"), "io_state_count"),
    "buckets are missing": (_other_part, "none with bucket 40000"),
    "an index without blocks": (_no_blocks, "which tensorkey.json names"),
    "another number of buckets": (_other_modulus, "0 to 21846 of 70000 by 3 shards, and buckets 0 to 21846 of 65536"),
    "rows of another shape": (_other_rows, r"'embedding': float32\[2, 2\] in part 1, float32\[4\] in part 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_save_that_did_not_end_is_refused(place: Path, damage: str) -> None:
    """recis-saver, lines 140-164: the list names a checkpoint before other ranks have written their states.

    A rank that has no block to write leaves a save of RecIS waiting for ever, with such files.
    """
    act, text = DAMAGES[damage]
    act(place)
    with pytest.raises(tc.CorruptError, match=text):
        tc.load(place)


def test_files_of_an_earlier_save_are_named(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(place / "io_state_0.pt", place / "io_state_7.pt")
    shutil.copy(place / "model-000000-of-000006.safetensors", place / "model-000007-of-000008.safetensors")
    tc.load(place)
    assert "io_state_7.pt" in caplog.text and "model-000007" in caplog.text and "model.pt" not in caplog.text


def test_its_own_files_are_no_files_beside_it(place: Path, tmp_path: Path) -> None:
    """The names of blocks are no configs: beside what was converted they would name it a checkpoint of RecIS."""
    (place / "config.json").write_text("{}")
    (place / "notes.bin").write_bytes(b"x")
    report = tc.convert.convert(place, tmp_path / "new")
    assert [(note.path, note.found) for note in report.notes] == [("notes.bin", "a file beside those read")]
    assert [one.name for one in tc.inspect(tmp_path / "new").sidecars] == ["config.json"]


def test_it_is_compared_with_what_it_became(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tc.convert.convert(place, tmp_path / "new")
    assert main(["diff", "--json", "--values", str(place), str(tmp_path / "new")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["values"] == [] and found["equal_by"] == "bytes" and found["also"] == []
    assert main(["diff", "--values", str(tmp_path / "new"), str(place)]) == 0
    assert "contents too, by their bytes" in capsys.readouterr().out
    tree = tc.load(place)
    tree["sparse"]["user"].slots["embedding"][3, 1] += 1
    tc.save(tmp_path / "other", tree)
    assert main(["diff", "--json", "--values", str(place), str(tmp_path / "other")]) == 0
    [changed] = json.loads(capsys.readouterr().out)["values"]
    assert changed["path"] == "sparse/user/slots/embedding" and changed["delta"]["changed"] == 1
