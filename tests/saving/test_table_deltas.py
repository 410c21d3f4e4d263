"""Incremental saves of keyed tables: rows that have changed are written alone, and every load sees the whole table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.changing_tables import ChangingTable, rows_of, target
from tests.helpers.world import Faulty, Switch, errors_of, on_ranks
from treeckpt._cli.main import main
from treeckpt._core.format.index import INDEX_NAME, encode_index
from treeckpt._core.format.table_deltas import count_rows
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.keyed_table import MAX_MARKS, buckets_of, sort_rows
from treeckpt._core.tree.spec import TableSpec
from treeckpt._io.comm.comm import thread_comms
from treeckpt._loading.peek import peek
from treeckpt._loading.run_load import opened
from treeckpt._loading.table_row import find_row
from treeckpt._loading.wanted_rows import search_ids
from treeckpt._saving.incremental import KnownFiles
from treeckpt._saving.table_deltas import MAX_DELTAS

ROW = 8 + 3 * 4 + 8
"""Bytes of a row of a `ChangingTable`."""
OFFSETS = 16 * 8
Save = Callable[..., tc.SaveReport | None]


def save_in_background(path: Any, tree: Any, **options: Any) -> tc.SaveReport | None:
    return tc.save_async(path, tree, **options).result()


def save_steps(root: Path, table: ChangingTable, steps: int, *, save: Save = tc.save, **options: Any) -> list[Any]:
    """Saves a table that changes after each step; returns what is expected of each step."""
    expected = list[Any]()
    for step in range(steps):
        base = {"base": root / f"{step - 1}"} if step else {}
        save(
            root / f"{step}", {"emb": table.table(shuffled=step % 2 == 1), "w": np.arange(9) + step}, **base, **options
        )
        expected.append(table.expected)
        table.change()
    return expected


def load_by(path: Path, world: int, buckets: int = 16, partition: str = "u64_mod") -> dict[int, Any]:
    """The rows of all owners."""
    whole: dict[int, Any] = {}
    for rank in range(world):
        part = rows_of(tc.load(path, {"emb": target(rank, world, buckets, partition)}, strict="missing")["emb"])
        assert not part.keys() & whole.keys()
        whole |= part
    return whole


# what is written, and what comes back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [tc.save, save_in_background])
def test_rows_that_have_changed_are_written_alone(tmp_path: Path, save: Save) -> None:
    table, reports = ChangingTable(), list[Any]()
    expected = save_steps(tmp_path, table, 5, save=lambda *args, **options: reports.append(save(*args, **options)))
    delta = (20 + 7) * ROW + 5 * 8 + 2 * OFFSETS
    whole = 6000 * ROW + OFFSETS
    # the first save with a base puts tables into files of their own
    assert [report.nbytes - 72 for report in reports[:2]] == [whole, whole + 2 * ROW]
    assert [report.nbytes - 72 for report in reports[2:]] == [delta] * 3
    for step, rows in enumerate(expected):
        loaded = tc.load(tmp_path / f"{step}")
        assert rows_of(loaded["emb"]) == rows and loaded["emb"].scalars == {"step": 7}
        assert loaded["w"].tolist() == [n + step for n in range(9)]
        assert tc.verify(tmp_path / f"{step}").ok


@pytest.mark.parametrize("options", [{}, {"buckets": 13}, {"buckets": 7, "partition": "splitmix64_mod"}])
def test_a_table_with_deltas_is_loaded_by_any_owners(tmp_path: Path, options: dict[str, Any]) -> None:
    table = ChangingTable(300, **options)
    expected = save_steps(tmp_path, table, 6)
    for world in (1, 2, 5):
        for other in (options, {"buckets": 16}, {"buckets": 11, "partition": "splitmix64_mod"}):
            assert load_by(tmp_path / "5", world, **{"buckets": 16} | other) == expected[5]


def test_large_tables_are_searched_for_what_deltas_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeckpt._loading.wanted_rows.SCANNED_ROWS", 0)
    for number, options in enumerate([{}, {"buckets": 13}, {"buckets": 7, "partition": "splitmix64_mod"}]):
        expected = save_steps(tmp_path / f"{number}", ChangingTable(300, **options), 6)
        for world, other in ((1, options), (3, options), (2, {"buckets": 5})):
            assert load_by(tmp_path / f"{number}" / "5", world, **{"buckets": 16} | other) == expected[5]


@pytest.mark.parametrize("buckets", [1, 100, 1 << 16, 1 << 18])
@pytest.mark.parametrize("function", ["u64_mod", "i64_mod", "splitmix64_mod"])
def test_ids_of_deltas_are_found_in_the_order_of_a_table(buckets: int, function: str) -> None:
    random, spec = np.random.default_rng(buckets), TableSpec(function, 1, buckets)
    ids = np.unique(random.integers(-(1 << 63), (1 << 63) - 1, 50_000))
    arranged = sort_rows(ids, spec)
    wanted = random.permutation(np.concatenate([ids[::7], random.integers(-9, 9, 50)]))
    part = buckets // 3, buckets - buckets // 5
    start, stop = arranged.starts[part[0]], arranged.starts[part[1]]
    held = arranged.of(ids)[start:stop]
    bucket = buckets_of(wanted, spec)
    wanted = wanted[(bucket >= part[0]) & (bucket < part[1])]
    place, there = search_ids(held, arranged.starts[part[0] : part[1] + 1] - start, wanted, spec, part[0])
    assert there.tolist() == np.isin(wanted, held).tolist() and len(wanted) > 0
    assert held[place[there]].tolist() == wanted[there].tolist()


def test_whole_rows_are_read_to_where_they_stay(tmp_path: Path) -> None:
    rows = np.arange((5 << 20) + 8).reshape(-1, 8)
    table = tc.KeyedTable(np.arange(len(rows)) * 3, {"x": rows, "y": rows}, buckets=4)
    for step in range(3):
        rows[:10] += step
        tc.save(tmp_path / f"{step}", {"emb": table}, **({"base": tmp_path / f"{step - 1}"} if step else {}))
    whole = tc.load(tmp_path / "2")["emb"]
    loaded = whole.slots["y"]
    index = tc.inspect(tmp_path / "2")
    [leaf] = index.by_path["emb/slots/y"]
    [chunk] = index.chunks_of(leaf)
    _, start = index.locate(chunk.rank, chunk.start, chunk.start + rows.nbytes, leaf.path)
    assert loaded.ctypes.data % 4096 == start % 4096 != 0
    assert np.array_equal(loaded[np.argsort(whole.ids)], rows)


@pytest.mark.parametrize("world", [2, 3])
def test_each_owner_writes_its_own_changes(tmp_path: Path, world: int) -> None:
    table, comms = ChangingTable(3000), thread_comms(world)

    def save(comm: Any, step: int) -> Any:
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        return tc.save(tmp_path / f"{step}", {"emb": table.table(comm.rank, world)}, comm=comm, **base)

    for step in range(5):
        outcomes = on_ranks(comms, partial(save, step=step))
        assert errors_of(outcomes) == [None] * world
        nbytes = sum(outcome.value.nbytes for outcome in outcomes)
        assert nbytes == (27 * ROW + 5 * 8 + 2 * OFFSETS if step > 1 else nbytes)
        assert load_by(tmp_path / f"{step}", 2) == table.expected
        table.change()
    assert tc.verify(tmp_path / "4").ok


def test_where_one_rank_writes_its_table_whole_all_ranks_do(tmp_path: Path) -> None:
    table, comms = ChangingTable(3000), thread_comms(2)
    for step in range(5):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}

        def save(comm: Any, step: int = step, base: Any = base) -> Any:
            own = table.table(comm.rank, 2)
            if step == 3 and comm.rank:  # an optimizer of this rank that has begun to count
                own.slots["more"] = np.zeros((len(own.ids), 1))
            if step == 3 and not comm.rank:
                own.slots["more"] = np.zeros((len(own.ids), 1))
            return tc.save(tmp_path / f"{step}", {"emb": own}, comm=comm, **base)

        outcomes = on_ranks(comms, save)
        assert errors_of(outcomes) == [None] * 2
        assert any(outcome.value.shared_nbytes for outcome in outcomes) == (step in (2,))
        table.change()


def test_replicas_of_a_part_share_its_files(tmp_path: Path) -> None:
    table, comms = ChangingTable(3000), thread_comms(4)

    def save(comm: Any, step: int) -> Any:
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        return tc.save(tmp_path / f"{step}", {"emb": table.table(comm.rank // 2, 2)}, comm=comm, **base)

    for step in range(6):
        outcomes = on_ranks(comms, partial(save, step=step))
        assert errors_of(outcomes) == [None] * 4
        assert load_by(tmp_path / f"{step}", 1) == table.expected
        assert sum(outcome.value.nbytes for outcome in outcomes) < 3000 * (5 if step > 1 else 100)
        table.change()


def test_several_tables_below_each_other_and_one_at_the_root(tmp_path: Path) -> None:
    tables, other = [ChangingTable(200, seed=seed, buckets=4) for seed in range(3)], thread_comms(1)[0]
    for step in range(4):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        own = [table.table() for table in tables]
        tree = {"a": own[0], "ab": [own[1], {"slots": own[2]}], "x": torch.nn.Parameter(torch.ones(3))}
        report = tc.save(tmp_path / f"{step}", tree, **base)
        loaded = tc.load(tmp_path / f"{step}")
        found = loaded["a"], loaded["ab"][0], loaded["ab"][1]["slots"]
        assert [rows_of(each) for each in found] == [table.expected for table in tables]
        for table in tables:
            table.change(3, 1, 2)
        root = {"base": tmp_path / f"root{step - 1}"} if step else {}
        tc.save(tmp_path / f"root{step}", own[0], **root, comm=other)
        assert rows_of(tc.load(tmp_path / f"root{step}")) == rows_of(found[0])
    assert report.shared_nbytes > 3 * 200 * ROW


def test_tables_of_each_rank_are_written_whole(tmp_path: Path) -> None:
    for step in range(3):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        table = tc.KeyedTable(np.arange(5), {"x": np.full((5, 2), step)}, buckets=2)
        tc.save(tmp_path / f"{step}", {"own": tc.PerRank({"emb": table})}, **base)
        assert tc.load(tmp_path / f"{step}")["own"].value["emb"].slots["x"].tolist() == [[step] * 2] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_rows_of_any_dtype_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    ids, rows = torch.arange(6000), torch.zeros(6000, 3, dtype=dtype)
    for step in range(4):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        rows[step] = 1
        tree = {"emb": tc.KeyedTable(ids, {"x": torch.nn.Parameter(rows, requires_grad=False)}, buckets=3)}
        report = tc.save(tmp_path / f"{step}", tree, **base)
        loaded = tc.load(tmp_path / f"{step}")["emb"]
        order = loaded.ids.argsort()
        assert loaded.slots["x"].dtype == dtype and isinstance(loaded.slots["x"], torch.nn.Parameter)
        assert torch.equal(loaded.slots["x"].detach()[order].view(torch.uint8), rows.view(torch.uint8))
    assert report.nbytes < 200


# when a table is written whole ----------------------------------------------------------------------------------------


def test_a_table_is_written_whole_after_so_many_deltas(tmp_path: Path) -> None:
    reports = list[Any]()
    expected = save_steps(
        tmp_path, ChangingTable(), MAX_DELTAS + 4, save=lambda *args, **o: reports.append(tc.save(*args, **o))
    )
    whole = [number for number, report in enumerate(reports) if report.nbytes > 6000 * ROW]
    assert whole == [0, 1, MAX_DELTAS + 2]
    assert all(load_by(tmp_path / f"{step}", 2) == rows for step, rows in enumerate(expected))


def test_a_table_of_which_most_has_changed_is_written_whole(tmp_path: Path) -> None:
    table = ChangingTable()
    save_steps(tmp_path, table, 3)
    table.change(3500, 0, 0)
    report = tc.save(tmp_path / "3", {"emb": table.table(), "w": np.arange(9)}, base=tmp_path / "2")
    assert report.nbytes > 6000 * ROW and load_by(tmp_path / "3", 1) == table.expected


@pytest.mark.parametrize("world", [1, 2])
def test_a_delta_that_takes_more_bytes_than_the_table_is_not_written(tmp_path: Path, world: int) -> None:
    """The first rows of all buckets are written with each delta, twice."""
    table, comms, buckets = ChangingTable(2000, buckets=4096), thread_comms(world), 4096 * 8

    def save(comm: Any, step: int) -> Any:
        own = {"small": table.table(comm.rank, world), "large": larger.table(comm.rank, world)}
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        return tc.save(tmp_path / f"{step}", own if step > 3 else {"small": own["small"]}, comm=comm, **base)

    larger = ChangingTable(8000, seed=1, buckets=4096)
    for step in range(8):
        outcomes = on_ranks(comms, partial(save, step=step))
        assert errors_of(outcomes) == [None] * world
        nbytes = sum(outcome.value.nbytes for outcome in outcomes)
        small, whole = 2 * buckets + 27 * ROW + 40, buckets + len(table.rows) * ROW
        assert small < whole, "a delta is less here"
        assert nbytes == (small if step in (2, 3) else 2 * small if step > 4 else nbytes)
        table.change()
        larger.change()


def test_a_table_of_few_rows_and_many_buckets_is_written_whole(tmp_path: Path) -> None:
    table = ChangingTable(300, buckets=4096)
    for step in range(5):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        report = tc.save(tmp_path / f"{step}", {"emb": table.table()}, **base)
        assert (
            report.nbytes == 4096 * 8 + len(table.rows) * ROW and load_by(tmp_path / f"{step}", 1, 4096) == table.rows
        )
        table.change()


def test_a_table_is_written_whole_after_a_restart_and_with_other_slots(tmp_path: Path) -> None:
    table = ChangingTable()
    save_steps(tmp_path, table, 4)
    restarted = tc.save(
        tmp_path / "4", {"emb": table.table(), "w": np.arange(9)}, base=tmp_path / "3", comm=thread_comms(1)[0]
    )
    assert restarted.nbytes > 6000 * ROW and load_by(tmp_path / "4", 1) == table.expected
    fewer = table.table()
    del fewer.slots["count"]
    report = tc.save(tmp_path / "5", {"emb": fewer, "w": np.arange(9)}, base=tmp_path / "3")
    assert report.nbytes > 6000 * (ROW - 8)


def test_a_save_that_follows_another_checkpoint_than_the_last_one_writes_tables_whole(tmp_path: Path) -> None:
    table = ChangingTable()
    expected = save_steps(tmp_path, table, 4)
    report = tc.save(tmp_path / "4", {"emb": table.table(), "w": np.arange(9)}, base=tmp_path / "2")
    assert report.nbytes > 6000 * ROW and load_by(tmp_path / "4", 1) == table.expected
    assert load_by(tmp_path / "3", 1) == expected[3]


def test_after_a_save_that_failed_the_next_one_has_the_changes_of_both(tmp_path: Path) -> None:
    table = ChangingTable()
    save_steps(tmp_path, table, 4)
    tree = {"emb": table.table(), "w": np.arange(9)}
    for effect in ("create", "write", "publish"):
        store = Faulty(tc.LocalStore(tmp_path / "4"), Switch(0, names=[effect]))
        with pytest.raises(tc.TreeckptError):
            tc.save(store, tree, base=tmp_path / "3")
    table.change()
    report = tc.save(tmp_path / "5", {"emb": table.table(), "w": np.arange(9)}, base=tmp_path / "3")
    assert report.nbytes < 100 * ROW and load_by(tmp_path / "5", 2) == table.expected


def test_a_save_over_the_home_of_a_delta_writes_tables_whole(tmp_path: Path) -> None:
    table = ChangingTable()
    expected = save_steps(tmp_path, table, 5)
    report = tc.save(tmp_path / "3", {"emb": table.table(), "w": np.arange(9)}, overwrite=True, base=tmp_path / "4")
    assert report.nbytes > 6000 * ROW and load_by(tmp_path / "3", 1) == table.expected
    assert load_by(tmp_path / "4", 1) == expected[4]


def test_where_the_files_before_cannot_be_read_a_save_says_so_and_the_next_one_writes_all(tmp_path: Path) -> None:
    table, comm = ChangingTable(), thread_comms(1)[0]
    save_steps(tmp_path, table, 4, comm=comm)
    comm.state.remove(KnownFiles)
    for shard in tmp_path.rglob("shard-*"):
        data = bytearray(shard.read_bytes())
        data[20] ^= 255
        shard.write_bytes(data)
    tree = {"emb": table.table(), "w": np.arange(9)}
    with pytest.raises(tc.CheckpointError, match="the next save writes all rows"):
        tc.save(tmp_path / "4", tree, base=tmp_path / "3", comm=comm)
    tc.save(tmp_path / "4", tree, base=tmp_path / "3", comm=comm)
    assert load_by(tmp_path / "4", 1) == table.expected


def test_ids_that_are_there_twice_are_refused_as_without_deltas(tmp_path: Path) -> None:
    table = ChangingTable(300)
    save_steps(tmp_path, table, 3)
    own = table.table()
    own.ids[0] = own.ids[1]
    with pytest.raises(tc.TreeError, match="each id once"):
        tc.save(tmp_path / "3", {"emb": own, "w": np.arange(9)}, base=tmp_path / "2")


# rows that the program marks ------------------------------------------------------------------------------------------


def test_marked_rows_are_written_and_others_are_not_looked_at(tmp_path: Path) -> None:
    table = ChangingTable()
    marks = table.table()
    for step in range(5):
        own = table.table(shuffled=True)
        own.marks = marks.marks
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        report = tc.save(tmp_path / f"{step}", {"emb": own}, **base)
        assert load_by(tmp_path / f"{step}", 1) == table.expected
        assert step < 2 or report.nbytes == 27 * ROW + 5 * 8 + 2 * OFFSETS
        table.touched.clear()
        table.change()
        marks.touched(table.touched)
        marks.touched(table.touched[:3])
    own = table.table()
    own.slots["count"] += 1
    own.marks = marks.marks
    tc.save(tmp_path / "5", {"emb": own}, base=tmp_path / "4")
    found = load_by(tmp_path / "5", 1)
    others = set(table.rows) - set(table.touched)
    assert all(found[i][1] == table.rows[i][1] for i in others), "they were not marked"
    assert all(found[i][1] == [table.rows[i][1][0] + 1] for i in set(table.touched) & set(table.rows))


def test_marks_that_miss_new_rows_have_the_table_written_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = np.arange(6000)
    table = tc.KeyedTable(ids, {"x": np.zeros((6000, 2))}, buckets=4)
    for step in range(3):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        table.touched([step])
        tc.save(tmp_path / f"{step}", {"emb": table}, **base)
    table.ids, table.slots["x"] = np.arange(6001), np.zeros((6001, 2))
    report = tc.save(tmp_path / "3", {"emb": table}, base=tmp_path / "2")
    assert "6001 rows, of which `touched` explains 6000" in caplog.text and report.nbytes > 6000 * 24
    assert sorted(tc.load(tmp_path / "3")["emb"].ids.tolist()) == list(range(6001))


def test_marks_of_a_save_that_failed_count_for_the_next_one(tmp_path: Path) -> None:
    rows = np.zeros((6000, 2))
    table = tc.KeyedTable(np.arange(6000), {"x": rows}, buckets=4)
    for step in range(3):
        table.touched([])
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        tc.save(tmp_path / f"{step}", {"emb": table}, **base)
    rows[5] = 1
    table.touched([5])
    with pytest.raises(tc.TreeckptError):
        tc.save(Faulty(tc.LocalStore(tmp_path / "3"), Switch(0, names=["write"])), {"emb": table}, base=tmp_path / "2")
    rows[7] = 1
    table.touched([7])
    report = tc.save(tmp_path / "3", {"emb": table}, base=tmp_path / "2")
    loaded = tc.load(tmp_path / "3")["emb"]
    assert loaded.slots["x"][loaded.ids.argsort()].sum(1).nonzero()[0].tolist() == [5, 7] and report.nbytes < 200


def test_each_run_has_the_marks_since_its_own_save(tmp_path: Path) -> None:
    rows, row = np.zeros((6000, 2)), 8 + 16
    table = tc.KeyedTable(np.arange(6000), {"x": rows}, buckets=1)
    runs: dict[int, Any] = {
        number: tc.Manager(tmp_path / f"{number}", keep=None, incremental=True, background=False) for number in range(2)
    }
    for step in range(1, 9):
        for run, manager in runs.items():
            rows[10 * step + run] = step
            table.touched([10 * step + run])
            if run and step % 2:
                continue  # the second one saves every other time
            report = manager.save(step, {"emb": table})
            # what was marked since its own save before, for steps of both
            assert step < 3 + 3 * run or report.nbytes == (4 if run else 2) * row + 2 * 8, (step, run)
            loaded = tc.load(manager.path(step))["emb"]
            assert np.array_equal(np.asarray(loaded.slots["x"])[loaded.ids.argsort()], rows)


def test_a_run_that_saves_no_more_costs_no_other_run_anything(tmp_path: Path) -> None:
    rows = np.zeros((6000, 2))
    table = tc.KeyedTable(np.arange(6000), {"x": rows}, buckets=1)
    managers = [tc.Manager(tmp_path / f"{run}", keep=1, incremental=True, background=False) for run in range(2)]
    table.touched([])
    for step in (1, 2):
        managers[1].save(step, {"emb": table})
    for step in range(1, MAX_MARKS + 10):
        table.touched([step])
        rows[step] = step
        if step < 3 or step > MAX_MARKS + 4:
            managers[0].save(step, {"emb": table})
    table.touched([5000])
    report = managers[0].save(step + 1, {"emb": table})
    assert isinstance(report, tc.SaveReport) and report.nbytes == 24 + 2 * 8
    rows[5001] = 1
    table.touched([5001])
    managers[1].save(3, {"emb": table})
    loaded = tc.load(managers[1].path(3))["emb"]
    assert np.array_equal(np.asarray(loaded.slots["x"])[loaded.ids.argsort()], rows)


def test_a_hash_table_of_the_program_marks_its_rows(tmp_path: Path) -> None:
    class Table:
        def __init__(self) -> None:
            self.rows = {i: float(i) for i in range(6000)}

        def export(self) -> Any:
            ids = np.array(list(self.rows))
            return ids, {"x": np.array([self.rows[i] for i in ids.tolist()])[:, None]}

        def import_(self, ids: Any, slots: Any) -> None:
            self.rows = dict(zip(ids.tolist(), slots["x"][:, 0].tolist(), strict=True))

    own = Table()
    bound = tc.KeyedTable.of(own, buckets=4)
    for step in range(4):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        own.rows[10 * step] = -1.0
        del own.rows[10 * step + 1]
        bound.touched([10 * step, 10 * step + 1])
        report = tc.save(tmp_path / f"{step}", {"emb": bound}, **base)
    other = Table()
    tc.load_into(tmp_path / "3", {"emb": tc.KeyedTable.of(other, buckets=4)})
    assert other.rows == own.rows and report.nbytes < 200


@pytest.mark.parametrize("wrong", [[0.5], [[1]], "no", np.array([1], np.uint64)])
def test_what_is_no_id_is_not_marked(wrong: Any) -> None:
    with pytest.raises(tc.MismatchError, match="touched"):
        tc.KeyedTable(np.arange(3), {}).touched(wrong)


# what else reads them -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    """The path of a checkpoint whose table has deltas, and its rows."""
    expected = save_steps(tmp_path / "run", ChangingTable(400, buckets=4), 5)
    return tmp_path / "run" / "4", expected[4]


def test_chosen_rows_are_those_that_count(saved: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    path, rows = saved
    some = list(rows)[::7]
    found = tc.load(path, ids=some)["emb"]
    assert found.ids.tolist() == some and rows_of(found) == {i: rows[i] for i in some}
    gone = next(iter(rows_of(tc.load(path.parent / "0")["emb"]).keys() - rows.keys()))
    with pytest.raises(tc.MismatchError, match=f"{gone}"):
        tc.load(path, ids=[gone])


def test_rules_and_banks_see_the_whole_table(saved: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    path, rows = saved
    renamed = tc.load(path, rename={"emb": "other"})
    assert rows_of(renamed["other"]) == rows
    like = {"other": target(0, 1, 4), "w": ...}
    assert rows_of(tc.load(path, like, rename={"emb": "other"}, strict="missing")["other"]) == rows
    more = ChangingTable(30, seed=9, buckets=4)
    tc.save(tmp_path / "more", {"emb": more.table()})
    assert rows_of(tc.load([path, tmp_path / "more"])["emb"]) == rows | more.expected
    first = next(iter(rows))
    bank: Any = [tc.From(tmp_path / "more", select="emb/slots/count"), tc.From(path, exclude="emb/slots/count")]
    with pytest.raises(tc.MismatchError, match="a row for each of the table's"):
        tc.load(bank)
    assert rows_of(tc.load(path, select="emb")["emb"])[first] == rows[first]


def test_a_dtype_is_cast_and_a_slot_is_left_out(saved: tuple[Path, dict[int, Any]]) -> None:
    path, rows = saved
    like = tc.KeyedTable(np.empty(0, np.int64), {"embedding": torch.empty(0, 3, dtype=torch.float64)}, buckets=4)
    like.scalars = {"step": 0}
    loaded = tc.load(path, {"emb": like, "w": ...}, cast=True, strict="missing")["emb"]
    found = dict(zip(loaded.ids.tolist(), loaded.slots["embedding"].tolist(), strict=True))
    assert found == {i: row for i, (row, _) in rows.items()}


def test_load_into_gives_a_table_its_rows(saved: tuple[Path, dict[int, Any]]) -> None:
    path, rows = saved
    tree = {"emb": target(0, 1, 4), "w": np.zeros(9, np.int64)}
    tc.load_into(path, tree)
    assert rows_of(tree["emb"]) == rows


def test_plain_arrays_are_refused_that_would_get_rows_which_do_not_count(saved: tuple[Path, dict[int, Any]]) -> None:
    path, _ = saved
    shapes = {leaf.path: leaf.spec.shape for leaf in tc.inspect(path).entries if leaf.spec}
    for column in ("ids", "slots/embedding"):
        like: Any = np.zeros(shapes[f"emb/{column}"], np.float32 if "/" in column else np.int64)
        for key in reversed(f"emb/{column}".split("/")):
            like = {key: like}
        with pytest.raises(tc.MismatchError, match="some of the saved rows are replaced"):
            tc.load(path, like, strict="missing")
        with pytest.raises(tc.MismatchError, match="some of the saved rows are replaced"):
            tc.load_into(path, like, strict="missing")


@pytest.mark.parametrize("format", ["treeckpt", "torch", "safetensors"])
def test_converted_tables_are_whole(saved: tuple[Path, dict[int, Any]], tmp_path: Path, format: str) -> None:
    path, rows = saved
    to = tmp_path / {"treeckpt": "to", "torch": "to.pt", "safetensors": "to.safetensors"}[format]
    without = [] if format == "treeckpt" else ["--exclude", "emb/scalars"]
    assert main(["convert", str(path), str(to), "--to", format, *without]) == 0
    if format == "treeckpt":
        assert rows_of(tc.load(to)["emb"]) == rows
        assert load_by(to, 3, 4) == rows, "rows are in the order of their buckets"
        return
    flat = {leaf.path.replace(".", "/"): leaf.value for leaf in tc.tree_flatten(tc.load(to))[0]}
    columns = (flat[f"emb/{name}"].tolist() for name in ("ids", "slots/embedding", "slots/count"))
    assert {i: (embedding, count) for i, embedding, count in zip(*columns, strict=True)} == rows


def test_the_row_of_an_id_is_the_one_that_counts(
    saved: tuple[Path, dict[int, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    at, rows = saved
    before = rows_of(tc.load(at.parent / "0")["emb"])
    changed = next(i for i in rows if i in before and before[i] != rows[i])
    gone = next(i for i in before if i not in rows)
    for wanted in (changed, next(iter(rows))):
        assert main(["show", str(at), "emb", "--id", str(wanted), "--json"]) == 0
        slots = {slot["path"]: slot["values"] for slot in json.loads(capsys.readouterr().out)["slots"]}
        [count] = [values for path, values in slots.items() if path.endswith("/slots/count")]
        assert [float(value) for value in count] == pytest.approx(rows[wanted][1], rel=1e-5)
    assert main(["show", str(at), "emb", "--id", str(gone)]) in (0, 1)
    assert "not" in "".join(capsys.readouterr())


def test_what_is_shown_of_a_row_is_in_the_leaf_that_holds_it(saved: tuple[Path, dict[int, Any]]) -> None:
    path, rows = saved
    parts = set[str]()
    with opened(path) as checkpoint:
        index, store = checkpoint.index, checkpoint.store
        for wanted in (next(iter(rows)), list(rows)[-10]):  # of the whole rows, and of a delta
            found = find_row(store, index, index.by_path["emb/ids"][0], str(wanted))
            slot = found.slots[1]
            held = index.entries[slot.leaf]
            assert held.path == slot.path == f"{found.part}/slots/count" and found.row is not None
            assert held.spec is not None and found.row < held.spec.shape[0] == found.part_rows
            data = peek(store, index, held, Region((found.row, 0), (1, 1))).data
            assert data.view(np.float64).tolist() == [rows[wanted][1]] and found.rows == len(rows)
            parts.add(found.part)
    assert len(parts) == 2


@pytest.mark.parametrize("how", ["as saved", "flattened", "index made again"])
def test_every_count_of_rows_is_that_of_a_load(
    saved: tuple[Path, dict[int, Any]], capsys: pytest.CaptureFixture[str], how: str
) -> None:
    path, rows = saved
    if how == "flattened":
        assert main(["flatten", str(path)]) == 0
    elif how == "index made again":
        (path / INDEX_NAME).unlink()
        assert tc.verify(path, repair=True).ok
    count, before = len(rows), len(tc.load(path.parent / "3")["emb"].ids)
    written = sum(leaf.spec.shape[0] for leaf in tc.inspect(path).entries if leaf.path.endswith("/ids") and leaf.spec)
    assert len({count, before, written, 400}) == 4
    for options in ({}, {"rename": {"emb": "other"}}, {"select": "emb/slots"}):
        table = next(iter(tc.load_abstract(path, **options).values()))
        assert {column.shape[0] for column in (table.ids, *table.slots.values()) if column is not ...} == {count}
    assert rows_of(tc.load(path, tc.load_abstract(path))["emb"]) == rows
    assert count_rows(tc.inspect(path), "emb") == count and count_rows(tc.inspect(path), "w") is None
    capsys.readouterr()
    for arguments in (["show", str(path)], ["show", str(path), "--structure"]):
        assert main(arguments) == 0 and f"table of {count} rows" in capsys.readouterr().out
    assert main(["diff", str(path.parent / "3"), str(path)]) == 0
    told = capsys.readouterr().out
    assert f"rows of table emb  {before}     {count}" in told, told


@pytest.mark.parametrize("world", [2, 3])
def test_the_rows_of_all_owners_are_counted_once(tmp_path: Path, world: int) -> None:
    table, comms = ChangingTable(3000), thread_comms(world)
    for step in range(4):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}

        def save(comm: Any, step: int = step, base: Any = base) -> Any:  # two ranks are replicas where there are three
            return tc.save(tmp_path / f"{step}", {"emb": table.table(comm.rank % 2, 2)}, comm=comm, **base)

        assert errors_of(on_ranks(comms, save)) == [None] * world
        assert tc.load_abstract(tmp_path / f"{step}")["emb"].ids.shape == (len(table.rows),)
        table.change()


def test_a_count_of_rows_that_no_save_writes_is_refused(saved: tuple[Path, dict[int, Any]]) -> None:
    path, _ = saved
    index = tc.inspect(path)
    assert index.references is not None
    for rows in ({"emb": -1}, {"emb": 1000}, {}):
        count_as(path, index, rows)
        with pytest.raises(tc.FormatError, match="rows"):
            tc.load_abstract(path)


def count_as(path: Path, index: Any, rows: dict[str, int]) -> None:
    """Writes an index that gives tables with deltas other numbers of rows."""
    references = msgspec.structs.replace(index.references, rows=rows)
    (path / INDEX_NAME).write_bytes(encode_index(msgspec.structs.replace(index, references=references)))


@pytest.mark.parametrize("error", [-1, 1])
def test_a_count_that_is_not_that_of_the_ids_is_refused(saved: tuple[Path, dict[int, Any]], error: int) -> None:
    path, rows = saved
    count_as(path, tc.inspect(path), {"emb": len(rows) + error})
    for like in (None, {"emb": target(buckets=4), "w": ...}):
        with pytest.raises(tc.FormatError, match=f"emb/ids: expected {len(rows) + error} rows.*found {len(rows)}"):
            tc.load(path, like)


def test_a_flattened_checkpoint_has_all_rows_without_the_others(saved: tuple[Path, dict[int, Any]]) -> None:
    path, rows = saved
    assert main(["flatten", str(path)]) == 0
    for step in range(4):
        shutil.rmtree(path.parent / f"{step}")
    assert rows_of(tc.load(path)["emb"]) == rows and tc.verify(path).ok


def test_a_lost_index_is_made_again_with_the_deltas(saved: tuple[Path, dict[int, Any]]) -> None:
    path, rows = saved
    (path / INDEX_NAME).unlink()
    assert tc.verify(path, repair=True).ok
    assert rows_of(tc.load(path)["emb"]) == rows


def test_a_run_with_retention_holds_what_its_tables_need(tmp_path: Path) -> None:
    table = ChangingTable(buckets=4)
    with tc.Manager(tmp_path, keep=2, incremental=True, full_every=20, background=False) as manager:
        for step in range(1, 31):
            report = manager.save(step, {"emb": table.table()})
            assert report is not None and (report.nbytes > 6000 * ROW) == (step in (1, 12, 21)), step
            assert rows_of(tc.load(manager.path(step))["emb"]) == table.expected
            table.change()
        restored = manager.restore({"emb": target(0, 1, 4)})
    assert restored is not None and manager.steps() == [29, 30]
    needed = {home.directory for home in tc.inspect(manager.path(30)).references.homes}  # pyright: ignore
    assert {path.name for path in tmp_path.glob("step_*")} <= needed | {"step_00000029", "step_00000030"}


def test_a_damaged_delta_is_found_and_no_old_row_is_given(saved: tuple[Path, dict[int, Any]]) -> None:
    path, _ = saved
    [delta] = [file for file in path.glob("shard-*") if b"emb/deltas/2/rows/slots" in file.read_bytes()[:4000]]
    with delta.open("r+b") as opened:
        opened.seek(-4, 2)
        opened.write(b"\xff" * 4)
    assert not tc.verify(path).ok
    with pytest.raises(tc.CorruptError):
        tc.load(path)
