"""What is registered with a manager is filled from other runs, banks and checkpoints of other programs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.recis_files import RecisTable, note_latest, table_of, write_recis
from tests.helpers.world import errors_of, on_ranks


class Table:
    """A hash table whose rows tell their id and the run that they are of."""

    def __init__(self, ids: Any = (), mark: float = 0) -> None:
        self.ids = np.array(ids, np.int64)
        self.slots = {"embedding": (np.repeat(self.ids[:, None], 4, axis=1) + mark).astype(np.float32)}

    def export(self) -> tuple[Any, Any]:
        return self.ids, self.slots

    def import_(self, ids: Any, slots: Any) -> None:
        self.ids, self.slots = np.asarray(ids), {name: np.asarray(slot) for name, slot in slots.items()}

    def rows(self) -> dict[int, float]:
        return dict(zip(self.ids.tolist(), self.slots["embedding"][:, 0].tolist(), strict=True))


class Job:
    """A training whose objects are registered."""

    def __init__(self, run: Path, ids: Any = (), mark: float = 0, **options: Any) -> None:
        self.manager = tc.Manager(run, background=False, **options)
        self.table, self.model, self.state = Table(ids, mark), torch.nn.Linear(2, 2), {"mark": mark}
        torch.nn.init.constant_(self.model.weight, mark)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.manager.register("emb", tc.KeyedTable.of(self.table, owned=None))
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.register("state", self.state)

    def train(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, ids, mark in (("a", [1, 2], 0.25), ("b", [2, 3], 0.5)):
        job = Job(tmp_path / name, ids, mark)
        job.train()
        job.manager.save(10, {"own": name})
        job.state["mark"] = mark + 1
        job.manager.save("tuned", {"own": name})
    return tmp_path


def test_a_bank_fills_what_is_registered(runs: Path) -> None:
    """recis-saver, lines 438-448: load_model_bank, where the last source replaces a table as a whole.

    The newest checkpoint of each run is taken. Neither the count nor the lineage follows it.
    """
    job = Job(runs / "new")
    report = job.manager.restore(source=[runs / "a", runs / "b"])
    assert job.table.rows() == {1: 1.25, 2: 2.5, 3: 3.5}
    assert job.state == {"mark": 1.5} and job.model.weight.eq(0.5).all() and len(job.optimizer.state) == 2
    assert report.joined == (
        ("registered/emb", str(runs / "a/tuned"), 1),
        ("registered/emb", str(runs / "b/tuned"), 2),
    )
    assert report.unexpected == ("own",)
    assert job.manager.count == 0 and job.manager.latest() is None
    job.manager.save(1)
    assert tc.inspect(job.manager.path(1)).lineage.follows == ""


def test_a_step_of_a_run_or_a_checkpoint_is_chosen(runs: Path) -> None:
    job, into = Job(runs / "new"), {"own": ""}
    job.manager.restore(source=runs / "a", step=10, into=into)
    assert job.state == {"mark": 0.25} and into == {"own": "a"} and job.table.rows() == {1: 1.25, 2: 2.25}
    job.manager.restore(source=runs / "b/tuned")
    assert job.state == {"mark": 1.5}
    job.manager.restore(source=runs / "a", step="tuned")
    assert job.state == {"mark": 1.25}


def test_globs_and_rules_choose_what_a_source_gives(runs: Path) -> None:
    """recis-saver, lines 361-378: `load` and `exclude` of each source."""
    job = Job(runs / "new")
    bank = [runs / "a", tc.From(runs / "b/tuned", select="registered/emb"), tc.From(runs / "gone", optional=True)]
    job.manager.restore(source=bank)
    assert job.table.rows() == {1: 1.25, 2: 2.5, 3: 3.5} and job.state == {"mark": 1.25}
    job.manager.restore(source=runs / "b", exclude=["registered/emb", "registered/model"])
    assert job.table.rows() == {1: 1.25, 2: 2.5, 3: 3.5} and job.state == {"mark": 1.5}
    assert job.model.weight.eq(0.25).all()


def test_a_checkpoint_of_recis_fills_what_is_registered(runs: Path) -> None:
    """recis-saver, lines 346-387: the dense model, tables and extra objects, each into its own."""
    rows, model = table_of(50, seed=3), torch.nn.Linear(2, 2)
    table = RecisTable(rows.ids, {"embedding": rows.slots["embedding"]})
    extra = {"state": {"mark": 9}}
    write_recis(runs / "old/ckpt_7", {"emb": table}, shards=2, model=model.state_dict(), extra=extra)
    note_latest(runs / "old", "ckpt_7")
    names = {"sparse/emb": "registered/emb", "model": "registered/model", "extra/state": "registered/state"}
    job = Job(runs / "new")
    job.manager.restore(source=[runs / "a", tc.From(runs / "old", rename=names)])
    wanted = {1: 1.25, 2: 2.25} | dict(zip(rows.ids.tolist(), rows.slots["embedding"][:, 0].tolist(), strict=True))
    assert job.table.rows() == wanted and job.state == {"mark": 9}
    assert torch.equal(job.model.weight, model.weight)


def test_what_a_source_lacks_is_named_and_nothing_changes(runs: Path) -> None:
    job = Job(runs / "new")
    job.manager.register("more", {"n": 1})
    with pytest.raises(tc.MismatchError, match="registered/more"):
        job.manager.restore(source=runs / "a")
    assert job.state == {"mark": 0} and not len(job.table.ids)
    job.manager.restore(source=runs / "a", strict=False)
    assert job.state == {"mark": 1.25}


def test_calls_that_mean_nothing_are_refused(runs: Path) -> None:
    manager = Job(runs / "new").manager
    with pytest.raises(tc.CheckpointNotFound, match="gone"):
        manager.restore(source=runs / "gone")
    with pytest.raises(tc.TreeckptError, match="a run in source"):
        manager.restore(source=runs / "a/tuned", step=10)
    with pytest.raises(tc.TreeckptError, match="one run in source"):
        manager.restore(source=[runs / "a", runs / "b"], step=10)
    with pytest.raises(tc.CheckpointNotFound, match="the nearest is 10"):
        manager.restore(source=runs / "a", step=11)
    with pytest.raises(tc.TreeckptError, match="like and source"):
        manager.restore({"own": ""}, source=runs / "a")
    with pytest.raises(tc.TreeError, match="something registered"):
        tc.Manager(runs / "bare").restore(source=runs / "a")


def test_readers_stay_where_they_are(runs: Path) -> None:
    class Reader:
        def __init__(self) -> None:
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    first, second = Reader(), Reader()
    first.at = 5
    with tc.Manager(runs / "c", background=False) as manager:
        manager.register_io_state("rows", first)
        manager.register("state", {"n": 1})
        manager.save(1)
    with tc.Manager(runs / "d") as manager:
        manager.register_io_state("rows", second)
        manager.register("state", {"n": 0})
        manager.restore(source=runs / "c")
        assert second.at == 0 and manager.registered("state") == {"n": 1}


def test_ranks_fill_their_own_rows(runs: Path) -> None:
    def act(comm: Any) -> dict[int, float]:
        manager = tc.Manager(runs / "new", comm=comm)
        table = Table()
        owned = tc.KeyedTable.share(comm.rank, comm.size, 2)
        manager.register("emb", tc.KeyedTable.of(table, owned=owned, buckets=2))
        manager.restore(source=[runs / "a", runs / "b"])
        return table.rows()

    outcomes = on_ranks(2, act)
    assert errors_of(outcomes) == [None] * 2
    assert [outcome.value for outcome in outcomes] == [{2: 2.5}, {1: 1.25, 3: 3.5}]


def test_what_is_registered_is_found_by_its_name(tmp_path: Path) -> None:
    """recis-saver, lines 388-392, 417-418: get_extra_data, whose caller takes a tensor of 0 for nothing."""
    manager = tc.Manager(tmp_path)
    step = torch.tensor(0)
    manager.register("global_step", step)
    values = [3]
    manager.register_value("seen", lambda: values[0], lambda new: values.__setitem__(0, new))
    assert manager.registered("global_step") is step and manager.registered("seen") == 3
    assert manager.registered("other") is None and manager.registered("other", 5) == 5
    with pytest.raises(ValueError, match="'global_step' is registered already"):
        manager.register("global_step", step)


def test_a_damaged_checkpoint_of_a_run_is_passed_over(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    (runs / "a/tuned/index.json").write_text("{")
    job = Job(runs / "new")
    with caplog.at_level(logging.WARNING, "treeckpt"):
        job.manager.restore(source=runs / "a")
    assert job.state == {"mark": 0.25} and "tuned: passed over, damaged, and perhaps saved after step 10" in caplog.text


def test_tables_of_several_trainings_are_joined(tmp_path: Path) -> None:
    for name, ids, mark in (("a", [1, 2], 0.25), ("b", [2, 3], 0.5)):
        extra = {"emb": tc.KeyedTable.of(Table(ids, mark)), "name": name}
        tc.save(tmp_path / name, tc.training.state(torch.nn.Linear(2, 2), extra=extra, rng=False))
    table, extra = Table(), {"name": ""}
    given = {"emb": tc.KeyedTable.of(table), **extra}
    report = tc.training.restore([tmp_path / "a", tmp_path / "b"], torch.nn.Linear(2, 2), extra=given, rng=False)
    assert table.rows() == {1: 1.25, 2: 2.5, 3: 3.5} and given["name"] == "b"
    assert report.joined == (("extra/emb", str(tmp_path / "a"), 1), ("extra/emb", str(tmp_path / "b"), 2))
    assert f"joined      extra/emb: 2 rows of {tmp_path / 'b'}" in str(report)
