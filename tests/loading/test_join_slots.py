"""Tables whose ids and slots come from different saves: rows meet by id, and what an id lacks is filled or named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt import rules as R
from treeckpt._arrays.base import Box
from treeckpt._arrays.table_columns import SelectedRowsWriter
from treeckpt._loading import keyed_tables

ODD = [-(1 << 63), (1 << 63) - 1, -1, 0, 1, 65_535, 65_536]
Ids = st.sets(st.sampled_from(ODD) | st.integers(-20, 20), max_size=12)
Parting = st.sampled_from([("u64_mod", 8), ("u64_mod", 7), ("splitmix64_mod", 8), ("splitmix64_mod", 65_536)])


def row(i: int, mark: float) -> float:
    return (i % 1000) + mark


def table(ids: Iterable[int], mark: float, **options: Any) -> tc.KeyedTable:
    """Rows that tell their id and the save that they are of."""
    listed = list(ids)
    slots = {
        "embedding": np.array([[row(i, mark)] * 2 for i in listed], np.float32).reshape(-1, 2),
        "adam": np.array([10 * row(i, mark) for i in listed]),
    }
    return tc.KeyedTable(np.array(listed, np.int64), slots, **options)


def target(*, library: str = "numpy", **options: Any) -> tc.KeyedTable:
    slots = {"embedding": tc.ArraySpec((0, 2), "float32", kind=library), "adam": tc.ArraySpec((0,), "float64")}
    return tc.KeyedTable(np.empty(0, np.int64), slots, **options)


def rows_of(found: tc.KeyedTable) -> dict[int, tuple[float, float]]:
    ids, embedding, adam = (np.asarray(x) for x in (found.ids, found.slots["embedding"], found.slots["adam"]))
    assert len(ids) == len(embedding) == len(adam) == len(set(ids.tolist()))
    return {i: (float(e[0]), float(a)) for i, e, a in zip(ids.tolist(), embedding, adam, strict=True)}


def joined(ids: Iterable[int], others: set[int], fill: float) -> dict[int, tuple[float, float]]:
    return {
        i: (float(np.float32(row(i, 0.25))), 10 * row(i, 0.5) if i in others else fill) for i in ids
    }  # fmt: skip


def saved(tree: Any) -> tc.MemoryStore:
    store = tc.MemoryStore()
    tc.save(store, tree)
    return store


def owned_by(ids: Iterable[int], owner: tuple[int, int], parting: tuple[str, int]) -> list[int]:
    from treeckpt._core.tree.keyed_table import buckets_of
    from treeckpt._core.tree.spec import TableSpec

    listed = np.array(list(ids), np.int64)
    buckets = buckets_of(listed, TableSpec(parting[0], 1, parting[1]))
    return listed[(buckets >= owner[0]) & (buckets < owner[1])].tolist()


def save_by(owners: int, ids: Iterable[int], mark: float, parting: tuple[str, int]) -> tc.MemoryStore:
    store, listed = tc.MemoryStore(), list(ids)

    def act(comm: Any) -> None:
        mine = tc.KeyedTable.share(comm.rank, owners, parting[1])
        part = table(owned_by(listed, mine, parting), mark, owned=mine, partition=parting[0], buckets=parting[1])
        tc.save(store, {"emb": part}, comm=comm)

    assert errors_of(on_ranks(owners, act)) == [None] * owners
    return store


@settings(deadline=None, max_examples=60)
@given(st.data(), Ids, Ids, st.booleans())
def test_rows_of_two_checkpoints_meet_by_id_under_any_parting(
    data: st.DataObject, ids: set[int], others: set[int], into: bool
) -> None:
    """Owners, functions and numbers of buckets may be others in each of the two saves, and in the load."""
    partings = [data.draw(Parting, name) for name in ("ids'", "slots'", "wanted")]
    owners = [data.draw(st.integers(1, 3), name) for name in ("ids' owners", "slots' owners", "wanted owners")]
    first, second = save_by(owners[0], ids, 0.25, partings[0]), save_by(owners[1], others, 0.5, partings[1])
    bank: Any = [first, tc.From(second, select="emb/slots/adam")]
    if data.draw(st.booleans(), "turned"):
        bank = [tc.From(second, select="emb/slots/adam"), tc.From(first, exclude="emb/slots/adam")]
    library = data.draw(st.sampled_from(["numpy", "tensor"]))
    function, buckets = partings[2]
    found: dict[int, tuple[float, float]] = {}
    for rank in range(owners[2]):
        owned = tc.KeyedTable.share(rank, owners[2], buckets)
        options: Any = {"owned": owned, "partition": function, "buckets": buckets, "fill": {"adam": -1.5}}
        if into:
            mine = table(owned_by([5, 6, 7], owned, partings[2]), 0.75, **options)
            tc.load_into(bank, {"emb": mine})
        else:
            mine = tc.load(bank, {"emb": target(library=library, **options)})["emb"]
        part = rows_of(mine)
        assert set(part) == set(owned_by(ids, owned, partings[2])) and not set(part) & set(found)
        found |= part
    assert found == joined(ids, others, -1.5)


def test_without_like_rows_meet_by_id() -> None:
    first, second = saved({"emb": table([2, 9, 1], 0.25)}), saved({"emb": table([9, 3, 1, 2], 0.5), "more": 1})
    bank = [first, tc.From(second, select=["emb/slots/adam", "more"])]
    found = tc.load(bank)
    assert rows_of(found["emb"]) == joined([1, 2, 9], {1, 2, 9}, 0) and found["more"] == 1
    turned = tc.load([tc.From(second, select="emb/slots/adam"), tc.From(first, exclude="emb/slots/adam")])
    assert rows_of(turned["emb"]) == joined([1, 2, 9], {1, 2, 9}, 0)


@settings(deadline=None, max_examples=20)
@given(st.data(), st.lists(Ids, min_size=2, max_size=3), st.sampled_from(["load", "load_into", "without like"]))
def test_rows_of_several_checkpoints_make_one_table(data: st.DataObject, sources: list[set[int]], how: str) -> None:
    """Of an id that several have, the last one's row is taken, and the report says how many rows each gives."""
    one = data.draw(Parting, "parting")  # without like the tables are of one partition
    partings = [one if how == "without like" else data.draw(Parting, f"parting {n}") for n in range(len(sources))]
    owners = [data.draw(st.integers(1, 2), f"owners {number}") for number in range(len(sources))]
    marks = [0.25 * (number + 1) for number in range(len(sources))]
    bank: Any = [save_by(*given) for given in zip(owners, sources, marks, partings, strict=True)]
    last = {i: number for number, ids in enumerate(sources) for i in ids}
    wanted = {i: (float(np.float32(row(i, marks[n]))), 10 * row(i, marks[n])) for i, n in last.items()}
    function, buckets = data.draw(Parting, "wanted")
    world = 1 if how == "without like" else data.draw(st.integers(1, 3), "wanted owners")
    found: dict[int, tuple[float, float]] = {}
    taken: list[tuple[str, str, int]] = []
    for rank in range(world):
        owned = tc.KeyedTable.share(rank, world, buckets)
        options: Any = {"owned": owned, "partition": function, "buckets": buckets}
        if how == "load_into":
            mine = table(owned_by([5, 6, 7], owned, (function, buckets)), 0.75, **options)
            report = tc.load_into(bank, {"emb": mine})
        else:
            reports: list[tc.LoadReport] = []
            like = {"emb": target(**options)} if how == "load" else None
            mine = tc.load(bank, like, on_report=reports.append)["emb"]
            report = reports[0]
        part = rows_of(mine)
        assert how == "without like" or set(part) == set(owned_by(last, owned, (function, buckets)))
        found |= part
        taken += report.joined
    assert found == wanted
    for number in range(len(sources)):
        given_rows = sum(count for _, _, count in taken[number :: len(sources)])
        assert given_rows == sum(n == number for n in last.values())
    assert {path for path, _, _ in taken} == {"emb"}


def test_slots_of_several_checkpoints_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stores, calls = [saved({"t": table(ids, 0.0)}) for ids in ([1, 2], [2, 3])], []
    join = keyed_tables.join
    monkeypatch.setattr(keyed_tables, "join", lambda *given: calls.append(1) or join(*given))
    for like in (None, {"t": target()}):
        calls.clear()
        assert rows_of(tc.load(stores, like)["t"]).keys() == {1, 2, 3} and len(calls) == 1


def test_tables_with_other_buckets_are_joined_with_like_alone() -> None:
    stores = [saved({"t": table([1, 2], 0.0, buckets=buckets)}) for buckets in (8, 16)]
    with pytest.raises(tc.MismatchError, match=r"(?s)with 8 buckets of u64_mod.*with 16 buckets.*a tree to load into"):
        tc.load(stores)
    assert rows_of(tc.load(stores, {"t": target()})["t"]).keys() == {1, 2}


def test_joined_rows_are_in_the_text_of_a_report(tmp_path: Path) -> None:
    """recis-saver, lines 438-448: a bank fills the same tables from one path after the other."""
    for name, ids, mark in (("a", [1, 2], 0.25), ("b", [2, 3], 0.5)):
        tc.save(tmp_path / name, {"emb": table(ids, mark), "n": mark})
    reports: list[tc.LoadReport] = []
    tree = tc.load([tmp_path / "a", tmp_path / "b"], on_report=reports.append)
    assert tree["n"] == 0.5
    assert rows_of(tree["emb"]) == {1: (1.25, 12.5), 2: (2.5, 25.0), 3: (3.5, 35.0)}
    assert f"joined      emb: 1 row of {tmp_path / 'a'}" in str(reports[0])
    assert f"joined      emb: 2 rows of {tmp_path / 'b'}" in str(reports[0])
    alone: list[tc.LoadReport] = []
    tc.load([tmp_path / "a", tc.From(tmp_path / "b", exclude="emb")], on_report=alone.append)
    assert not alone[0].joined


def test_a_slot_that_some_of_several_checkpoints_have_is_filled_for_the_rows_of_others() -> None:
    first, second = saved({"emb": table([1, 2], 0.25)}), saved({"emb": table([2, 3], 0.5)})
    bare = saved({"emb": tc.KeyedTable(np.array([3, 4]), {"embedding": np.full((2, 2), 9, np.float32)})})
    with pytest.raises(tc.MismatchError, match=r"emb/slots/adam.*none for 1 of them, as 4"):
        tc.load([first, second, bare], strict=False)
    found = tc.load([first, second, bare], {"emb": target(fill={"adam": -1.0})})["emb"]
    assert rows_of(found) == {1: (1.25, 12.5), 2: (2.5, 25.0), 3: (9.0, 35.0), 4: (9.0, -1.0)}


@pytest.mark.parametrize("how", ["load", "like", "load_into"])
def test_ids_without_a_row_are_named_before_anything_is_written(how: str) -> None:
    bank = [saved({"emb": table([1, 2], 0.25), "w": np.ones(2)}), tc.From(saved({"emb": table([3, 2], 0.5)}))]
    bank[1] = tc.From(bank[1].path, select="emb/slots/adam")
    mine = {"emb": table([7], 0.75), "w": np.zeros(2)}
    with pytest.raises(tc.MismatchError, match=r"emb/slots/adam: .* none for 1 of them, as 1, .*fill=\{'adam'"):
        if how == "load_into":
            tc.load_into(bank, mine)
        else:
            tc.load(bank, {"emb": target(), "w": np.zeros(2)} if how == "like" else None)
    assert rows_of(mine["emb"]) == rows_of(table([7], 0.75)) and mine["w"].tolist() == [0, 0]


class Hashed:
    """A user's hash table, whose rows stand in an order of its own."""

    def __init__(self, rows: Mapping[int, tuple[float, float]]) -> None:
        self.rows, self.imports = dict(rows), 0

    def export(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        ids = sorted(self.rows, reverse=True)
        embedding = np.array([[self.rows[i][0]] * 2 for i in ids], np.float32).reshape(-1, 2)
        return np.array(ids, np.int64), {"embedding": embedding, "adam": np.array([self.rows[i][1] for i in ids])}

    def import_(self, ids: Any, slots: Any) -> None:
        self.imports += 1
        self.rows = rows_of(tc.KeyedTable(ids, slots))


def test_a_hash_table_takes_the_joined_rows_at_once() -> None:
    first, second = saved({"emb": table([1, 2], 0.25)}), saved({"emb": table([3, 2], 0.5)})
    mine = Hashed({7: (0.0, 0.0), 8: (0.0, 0.0), 9: (0.0, 0.0)})
    tree = {"emb": tc.KeyedTable.of(mine, fill={"adam": 0.0})}
    tc.load_into([first, tc.From(second, select="emb/slots/adam")], tree)
    assert mine.rows == joined([1, 2], {2}, 0.0) and mine.imports == 1
    tree = {"emb": tc.KeyedTable.of(mine)}
    with pytest.raises(tc.MismatchError, match="emb/slots/adam"):
        tc.load_into([first, tc.From(second, select="emb/slots/adam")], tree)
    assert mine.rows == joined([1, 2], {2}, 0.0) and mine.imports == 1


def test_tables_that_each_rank_has_of_its_own_are_joined() -> None:
    stores = tc.MemoryStore(), tc.MemoryStore()

    def save(comm: Any) -> None:
        for store, ids, mark in ((stores[0], [1, 2, 3], 0.25), (stores[1], [3, 1, 2], 0.5)):
            tc.save(store, {"own": tc.PerRank(table([i + comm.rank for i in ids], mark))}, comm=comm)

    def load(comm: Any) -> None:
        bank = [stores[0], tc.From(stores[1], select="own/~rank*/slots/adam")]
        wanted = [i + comm.rank for i in (1, 2, 3)]
        found = tc.load(bank, {"own": tc.PerRank(target())}, comm=comm)
        assert rows_of(found["own"].value) == joined(wanted, set(wanted), 0)
        assert rows_of(tc.load(bank, comm=comm)["own"].value) == joined(wanted, set(wanted), 0)

    assert errors_of(on_ranks(2, save)) == errors_of(on_ranks(2, load)) == [None, None]


def test_a_slot_that_no_checkpoint_of_a_bank_gives_is_filled() -> None:
    bank = [saved({"x": 1, "emb": table([1, 2], 0.25)}), saved({"x": 2})]
    slots = {"embedding": np.empty((0, 2), np.float32), "adam": np.empty(0), "new": np.empty((0, 3))}
    like = tc.KeyedTable(np.empty(0, np.int64), slots, fill={"new": 4.0})
    found = tc.load(bank, {"x": 0, "emb": like})
    assert found["x"] == 2 and found["emb"].slots["new"].tolist() == [[4.0] * 3] * 2
    with pytest.raises(tc.MismatchError, match="emb/slots/new"):
        tc.load(bank, {"x": 0, "emb": tc.KeyedTable(np.empty(0, np.int64), slots)})


def test_plain_arrays_cannot_take_rows_of_two_checkpoints() -> None:
    bank = [saved({"emb": table([1, 2], 0.25)}), tc.From(saved({"emb": table([2, 1], 0.5)}), select="emb/slots/adam")]
    like = {"emb": {"ids": np.empty(2, np.int64), "slots": {"embedding": ..., "adam": np.empty(2)}}}
    with pytest.raises(tc.MismatchError, match=r"emb/slots/adam: expected a KeyedTable in like"):
        tc.load(bank, like, strict=False)
    with pytest.raises(tc.MismatchError, match=r"emb/slots/adam: expected a slot of one KeyedTable.*adam"):
        plain = {"emb": {"ids": np.array([2, 1]), "slots": {"adam": np.ones(2)}}}
        tc.load([bank[0], tc.From(saved(plain), select="emb/slots/adam")], {"emb": target()}, strict=False)


# rules in one checkpoint -----------------------------------------------------------------------------------------
BOTH = {"emb": table([1, 2], 0.25), "other": table([3, 2, 1], 0.5), "plain": np.ones(2), "less": table([2], 0.5)}
TAKEN = {
    "rename": [R.Drop("emb/slots/adam"), R.Rename("other/slots/adam", "emb/slots/adam"), R.Drop("other")],
    "copy": [R.Drop("emb/slots/adam"), R.Copy("other/slots/adam", "emb/slots/adam"), R.Drop("other")],
    "cast": [
        R.Drop("emb/slots/adam"), R.Cast("other/slots/adam", "float32"),
        R.Rename("other/slots/adam", "emb/slots/adam"), R.Drop("other"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("rules", TAKEN.values(), ids=TAKEN)
def test_a_slot_that_rules_take_from_another_table_is_joined_by_id(rules: list[Any]) -> None:
    store = saved(BOTH)
    expected = joined([1, 2], {1, 2}, 0)
    rules = [*rules, R.Drop("plain"), R.Drop("less")]
    like = {"emb": target()}
    assert rows_of(tc.load(store, like, transforms=rules, cast=True)["emb"]) == expected
    assert rows_of(tc.load(store, transforms=rules)["emb"]) == expected
    tc.load_into(store, mine := {"emb": table([4], 0.75)}, transforms=rules, cast=True)
    assert rows_of(mine["emb"]) == expected


def test_slots_are_joined_to_ids_that_rules_take_from_another_table() -> None:
    """Also where an owner wants a range of them: where its buckets begin, the ids' own table says."""
    rules = [R.Drop("emb/ids"), R.Rename("other/ids", "emb/ids"), R.Drop("other"), R.Drop("plain"), R.Drop("less")]
    store = saved(BOTH)
    found: dict[int, tuple[float, float]] = {}
    for rank in range(3):
        options: Any = {"owned": (rank, 65_536 if rank == 2 else rank + 1), "fill": {"adam": 0.0, "embedding": 0.0}}
        found |= rows_of(tc.load(store, {"emb": target(**options)}, transforms=rules)["emb"])
    assert found == rows_of(table([1, 2], 0.25)) | {3: (0.0, 0.0)}
    with pytest.raises(tc.MismatchError, match=r"emb/slots/\w+: .* none for 1 of them, as 3"):
        tc.load(store, transforms=rules)


def test_a_copied_slot_is_joined_and_the_table_that_it_is_of_stays() -> None:
    rules = [R.Drop("emb/slots/adam"), R.Copy("other/slots/adam", "emb/slots/adam")]
    found = tc.load(saved(BOTH), transforms=rules)
    assert rows_of(found["emb"]) == joined([1, 2], {1, 2}, 0)
    assert rows_of(found["other"]) == rows_of(BOTH["other"])


def test_what_rules_put_beside_ids_and_has_none_is_refused() -> None:
    store = saved(BOTH)
    short = [R.Drop("emb/slots/adam"), R.Rename("less/slots/adam", "emb/slots/adam")]
    plain = [R.Drop("emb/slots/adam"), R.Rename("plain", "emb/slots/adam")]
    sources = ("other/slots/adam", "other/slots/adam2")
    stacked = [R.Copy(sources[0], sources[1]), R.Drop("emb/slots/adam"), R.Stack(sources, "emb/slots/adam")]
    for rules, found in ((short, "none for 1 of them, as 1"), (plain, "plain"), (stacked, "rows moved by rules")):
        for like in (None, {"emb": target()}):
            with pytest.raises(tc.MismatchError, match=rf"emb/slots/adam: .*{found}"):
                tc.load(store, like, transforms=rules, strict=False)
    filled = tc.load(store, {"emb": target(fill={"adam": 7.0})}, transforms=short, strict=False)["emb"]
    assert rows_of(filled) == joined([1, 2], {2}, 7.0)
    arrays = {"emb": {"ids": np.empty(2, np.int64), "slots": {"adam": np.empty(3)}}}
    with pytest.raises(tc.MismatchError, match=r"emb/slots/adam: expected a KeyedTable in like"):
        tc.load(store, arrays, transforms=TAKEN["copy"], strict=False)


def test_rules_that_move_rows_of_a_slot_are_refused() -> None:
    square = np.arange(4.0).reshape(2, 2)
    store = saved({"emb": tc.KeyedTable(np.array([2, 1]), {"w": square})})
    like = {"emb": tc.KeyedTable(np.empty(0, np.int64), {"w": np.empty((0, 2))})}
    for wanted in (like, None):
        with pytest.raises(tc.MismatchError, match=r"emb/slots/w: .*rows moved by rules"):
            tc.load(store, wanted, transforms=R.Permute("emb/slots/w", (1, 0)))


# the parts -------------------------------------------------------------------------------------------------------
class Slices:
    """Memory that takes slices only, as that of a device."""

    def __init__(self, rows: int) -> None:
        self.array, self.writes = np.zeros(rows), 0

    def write(self, box: Box, data: np.ndarray) -> None:
        assert all(isinstance(side, slice) for side in box)
        self.writes += 1
        self.array[box] = data


@given(st.permutations(range(10)), st.integers(1, 10), st.integers(1, 4))
def test_rows_go_to_their_places_in_memory_that_takes_slices(order: list[int], count: int, step: int) -> None:
    memory, places = Slices(10), np.array(order[:count])
    rows = np.arange(count) * 2 + 1
    picked = SelectedRowsWriter(memory, rows, places)
    for low in range(0, 20, step):
        picked.write((slice(low, min(low + step, 20)),), np.arange(low, min(low + step, 20), dtype=float))
    wanted = np.zeros(10)
    wanted[places] = rows
    assert memory.array.tolist() == wanted.tolist()


def test_ids_that_are_read_twice_are_counted_once() -> None:
    """Most of this checkpoint is ids, which are read to choose rows, and then as rows."""
    ids = np.arange(200_000)
    store = saved({"emb": tc.KeyedTable(ids, {"one": np.ones((len(ids), 1), np.uint8)}, buckets=64)})
    like = tc.KeyedTable(ids[:0], {"one": np.empty((0, 1), np.uint8)}, buckets=16)
    assert len(tc.load(store, {"emb": like})["emb"].ids) == len(ids)


def test_tensors_are_joined(tmp_path: Path) -> None:
    ids, rows = torch.tensor([5, 3, 4]), torch.arange(6.0).reshape(3, 2).to(torch.bfloat16)
    tc.save(tmp_path / "a", {"emb": tc.KeyedTable(ids, {"w": rows})})
    tc.save(tmp_path / "b", {"emb": tc.KeyedTable(ids.flip(0), {"v": rows.flip(0)})})
    like = {"w": torch.empty((0, 2), dtype=torch.bfloat16), "v": torch.empty((0, 2), dtype=torch.float64)}
    bank = [tmp_path / "a", tc.From(tmp_path / "b", select="emb/slots/v")]
    found = tc.load(bank, {"emb": tc.KeyedTable(torch.empty(0, dtype=torch.int64), like)}, cast=True)["emb"]
    assert found.ids.tolist() == [3, 4, 5] and found.slots["v"].dtype == torch.float64
    assert found.slots["w"].tolist() == found.slots["v"].tolist() == [[2, 3], [4, 5], [0, 1]]
