"""Keyed tables from n owners into m: every row once, where it belongs, and no more read than that."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks, reseal, shards_of
from treeckpt._core.format.shard_header import BLOCK
from treeckpt._core.tree.spec import TableSpec
from treeckpt._io.comm.comm import thread_comms

ODD = [-(1 << 63), (1 << 63) - 1, -1, 0, 1, 1 << 52, (1 << 52) + 12_345, 65_535, 65_536]
Oracle = dict[int, tuple[list[float], list[float]]]


def make_oracle(rows: int, *, seed: int = 0) -> Oracle:
    """Rows by id, as a dict; ids of all 64 bits among them."""
    random = np.random.default_rng(seed)
    ids = dict.fromkeys([*ODD, *random.integers(-(1 << 63), (1 << 63) - 1, rows).tolist()][:rows])
    return {i: (random.standard_normal(4).astype(np.float32).tolist(), [float(n)]) for n, i in enumerate(ids)}


def table_of(oracle: Oracle, owned: tuple[int, int], *, kind: str = "numpy", **options: Any) -> tc.KeyedTable:
    """The part of a dict that an owner has, in the order in which the dict has it."""
    buckets = options.get("buckets", 65_536)
    mine = [i for i in oracle if owned[0] <= (i & ((1 << 64) - 1)) % buckets < owned[1]]
    ids = np.array(mine, np.int64)
    slots: dict[str, Any] = {
        "embedding": np.array([oracle[i][0] for i in mine], np.float32).reshape(-1, 4),
        "count": np.array([oracle[i][1] for i in mine], np.float64).reshape(-1, 1),
    }
    if kind == "torch":
        ids, slots = torch.from_numpy(ids), {k: torch.from_numpy(v) for k, v in slots.items()}
    return tc.KeyedTable(ids, slots, owned=owned, scalars={"step": 7}, **options)


def target(owned: tuple[int, int] | None = None, **options: Any) -> tc.KeyedTable:
    slots = {"embedding": tc.ArraySpec((0, 4), "float32"), "count": np.empty((0, 1))}
    return tc.KeyedTable(tc.ArraySpec((0,), "int64", kind="numpy"), slots, owned=owned, scalars={"step": 0}, **options)


def rows_of(table: tc.KeyedTable) -> Oracle:
    found: Oracle = {}
    slots = [np.asarray(table.slots[name]) for name in ("embedding", "count")]
    for i, embedding, count in zip(np.asarray(table.ids).tolist(), *slots, strict=True):
        assert i not in found
        found[i] = embedding.tolist(), count.tolist()
    return found


def save_by(path: Any, oracle: Oracle, world: int, **options: Any) -> None:
    def act(comm: Any) -> None:
        owned = tc.KeyedTable.share(comm.rank, world)
        table = table_of(oracle, owned, kind=("numpy", "torch")[comm.rank % 2])
        tc.save(path, {"emb": table, "dense": np.arange(5)}, comm=comm, **options)

    assert errors_of(on_ranks(world, act)) == [None] * world


def load_by(path: Any, world: int, *, buckets: int = 65_536, **options: Any) -> list[Oracle]:
    found: list[Oracle] = []
    for rank in range(world):
        like = {"emb": target(tc.KeyedTable.share(rank, world, buckets), buckets=buckets, **options), "dense": ...}
        table = tc.load(path, like)["emb"]
        assert table.scalars == {"step": 7} and isinstance(table.slots["embedding"], torch.Tensor)
        found.append(rows_of(table))
    return found


def joined(parts: list[Oracle]) -> Oracle:
    whole: Oracle = {}
    for part in parts:
        assert not whole.keys() & part.keys()
        whole |= part
    return whole


# from n owners into m -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", range(1, 10))
def test_every_row_goes_to_its_new_owner_from_any_number_into_any_other(tmp_path: Path, world: int) -> None:
    oracle = make_oracle(300, seed=world)
    save_by(tmp_path / "c", oracle, world)
    for owners in range(1, 10):
        parts = load_by(tmp_path / "c", owners)
        assert joined(parts) == oracle
        for rank, part in enumerate(parts):
            start, stop = tc.KeyedTable.share(rank, owners)
            assert all(start <= (i & ((1 << 64) - 1)) % 65_536 < stop for i in part)
    assert rows_of(tc.load(tmp_path / "c")["emb"]) == oracle
    assert tc.verify(tmp_path / "c").ok


@pytest.mark.parametrize("changed", [{"buckets": 1000}, {"buckets": 64}, {"partition": "splitmix64_mod"}])
def test_a_table_that_is_parted_otherwise_is_scanned_and_filtered(tmp_path: Path, changed: dict[str, Any]) -> None:
    oracle = make_oracle(300)
    save_by(tmp_path / "c", oracle, 3)
    for owners in (1, 2, 5):
        assert joined(load_by(tmp_path / "c", owners, **changed)) == oracle


def test_saving_the_same_rows_again_after_resharding_writes_the_same_bytes(tmp_path: Path) -> None:
    oracle = make_oracle(200)
    save_by(tmp_path / "a", oracle, 4)
    save_by(tmp_path / "b", joined(load_by(tmp_path / "a", 3)), 3)
    save_by(tmp_path / "c", joined(load_by(tmp_path / "b", 4)), 4)
    a, c = ([data_of(path) for path in shards_of(tmp_path / name)] for name in "ac")
    assert a == c


def data_of(shard: Path) -> bytes:
    data = shard.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


@pytest.mark.parametrize("world", [1, 3])
def test_an_empty_table_and_owners_without_rows_or_buckets(tmp_path: Path, world: int) -> None:
    save_by(tmp_path / "none", {}, world)
    assert [load_by(tmp_path / "none", owners) for owners in (1, 3)] == [[{}], [{}, {}, {}]]
    one: Oracle = {-1: ([1.0, 2.0, 3.0, 4.0], [5.0])}  # of the last bucket
    save_by(tmp_path / "one", one, world)
    assert load_by(tmp_path / "one", 3) == [{}, {}, one]
    table = tc.load(tmp_path / "one", {"emb": target((7, 7)), "dense": ...})["emb"]
    assert rows_of(table) == {} and table.slots["count"].shape == (0, 1)


def test_more_owners_than_buckets(tmp_path: Path) -> None:
    oracle = make_oracle(40)

    def act(comm: Any) -> None:
        owned = tc.KeyedTable.share(comm.rank, 3, 2)
        tc.save(tmp_path, {"emb": table_of(oracle, owned, buckets=2), "dense": 0}, comm=comm)

    assert errors_of(on_ranks(3, act)) == [None] * 3
    assert joined(load_by(tmp_path, 5, buckets=2)) == oracle


def test_the_shards_are_plain_safetensors_and_the_index_says_who_holds_what(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    save_by(tmp_path, make_oracle(100), 2)
    index = tc.inspect(tmp_path)
    assert {path: leaf[0].spec.shape for path, leaf in index.by_path.items() if leaf[0].spec} == {
        "emb/ids": (100,), "emb/offsets": (65_536,), "emb/slots/embedding": (100, 4), "emb/slots/count": (100, 1),
        "dense": (5,),
    }  # fmt: skip
    halves = [load_file(path) for path in shards_of(tmp_path)]
    ids = np.concatenate([half[next(key for key in half if key.startswith("emb/ids"))] for half in halves])
    offsets = tc.load(tmp_path, select="emb/offsets")["emb"]
    assert ids.tolist() == tc.load(tmp_path)["emb"].ids.tolist() and offsets.ids is ...
    buckets = (ids.view(np.uint64) % 65_536).tolist()
    assert buckets == sorted(buckets)
    assert rebuilt_is_the_same(tmp_path, index)


def rebuilt_is_the_same(path: Path, index: tc.Index) -> bool:
    (path / "index.json").unlink()
    return tc.rebuild_index(path) == index


# what is read ---------------------------------------------------------------------------------------------------------


def test_an_owner_reads_its_rows_and_next_to_nothing_else(tmp_path: Path) -> None:
    """Checksums are of blocks of 256 KiB, so a read is rounded to them: the first and last of each array, at most."""
    rows, world = 400_000, 3
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(-(1 << 63), (1 << 63) - 1, rows))
    slots = {"embedding": random.random((len(ids), 16), np.float32), "m": random.random((len(ids), 16), np.float32)}
    tc.save(tmp_path, {"emb": tc.KeyedTable(ids, slots)})
    like_slots = {name: np.empty((0, 16), np.float32) for name in slots}
    for rank in range(world):
        like = {"emb": tc.KeyedTable(ids[:0], like_slots, owned=tc.KeyedTable.share(rank, world))}
        reports: list[Any] = []
        table = tc.load(tmp_path, like, on_report=reports.append)["emb"]
        tc.load(tmp_path, like, on_report=reports.append, read=tc.ReadOptions(verify=False))
        needed = table.ids.nbytes + sum(slot.nbytes for slot in table.slots.values())
        rounding = 2 * BLOCK * 4  # ids, offsets, two slots
        assert needed > 17 << 20
        assert reports[0].read_nbytes <= 1.05 * needed + rounding
        assert reports[1].read_nbytes <= 1.05 * needed


# what is refused ------------------------------------------------------------------------------------------------------


def test_ids_that_are_twice_there_are_refused_or_one_is_kept(tmp_path: Path) -> None:
    ids, rows = np.array([5, 1, 5, 2, 1, 5]), np.arange(6.0)
    with pytest.raises(tc.TreeError, match=r"emb/ids.*2 ids more than once: 1, 5"):
        tc.save(tmp_path / "c", {"emb": tc.KeyedTable(ids, {"row": rows})})
    for keep, expected in (("first", {5: 0, 1: 1, 2: 3}), ("last", {5: 5, 1: 4, 2: 3})):
        tc.save(tmp_path / keep, {"emb": tc.KeyedTable(ids, {"row": rows}, keep=keep)})
        table = tc.load(tmp_path / keep)["emb"]
        assert dict(zip(table.ids.tolist(), table.slots["row"].tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("owned", "words"),
    [
        ([(0, 65_536), (0, 65_536)], "same rows on every owner of buckets 0:65536"),
        ([(0, 40_000), (30_000, 65_536)], "bucket 30000 is owned by rank 1 and by another"),
        ([(0, 30_000), (30_001, 65_536)], "no rank owns buckets 30000:30001"),
    ],
)
def test_owners_whose_buckets_contradict_each_other_are_named(tmp_path: Path, owned: Any, words: str) -> None:
    oracle = make_oracle(50)

    def act(comm: Any) -> None:
        part = oracle if comm.rank == 0 else dict(itertools.islice(oracle.items(), 20))
        tc.save(tmp_path / "c", {"emb": table_of(part, owned[comm.rank])}, comm=comm)

    for error in errors_of(on_ranks(2, act)):
        assert isinstance(error, tc.TreeckptError) and words in str(error)
    assert not (tmp_path / "c" / "index.json").exists()


def test_replicas_are_written_once_and_other_ids_on_the_same_buckets_are_refused(tmp_path: Path) -> None:
    oracle = make_oracle(50)
    other = {i ^ (1 << 40): row for i, row in oracle.items()}

    def act(comm: Any, parts: list[Oracle], name: str) -> Any:
        return tc.save(tmp_path / name, {"emb": table_of(parts[comm.rank], (0, 65_536))}, comm=comm)

    outcomes = on_ranks(2, lambda comm: act(comm, [oracle, oracle], "same"))
    assert sum(o.value.nbytes for o in outcomes) == 8 * 65_536 + 50 * (8 + 16 + 8)
    assert rows_of(tc.load(tmp_path / "same")["emb"]) == oracle
    for error in errors_of(on_ranks(2, lambda comm: act(comm, [oracle, other], "other"))):
        assert isinstance(error, tc.MismatchError) and "emb/ids" in str(error)


@pytest.mark.parametrize(
    ("rows", "every", "compare", "found"),
    [(50, 50, False, True), (9000, 9000, False, False), (9000, 1, "sample", True)],
)
def test_slots_that_differ_on_the_same_buckets_are_refused_unless_large_ones_are_trusted(
    tmp_path: Path, rows: int, every: int, compare: Any, found: bool
) -> None:
    """Every `every`th row differs."""
    oracle = make_oracle(rows)
    changed = {i: (row, [9.0] if n % every == 7 % every else k) for n, (i, (row, k)) in enumerate(oracle.items())}

    def act(comm: Any, **options: Any) -> Any:
        return tc.save(
            tmp_path / "c", {"emb": table_of((oracle, changed)[comm.rank], (0, 65_536))}, comm=comm, **options
        )

    for error in errors_of(on_ranks(2, lambda comm: act(comm, verify_replicas=compare))):
        assert isinstance(error, tc.MismatchError) == found and ("emb/slots/count" in str(error)) == found
    for error in errors_of(on_ranks(2, lambda comm: act(comm, verify_replicas=True, overwrite=True))):
        assert isinstance(error, tc.MismatchError) and "emb/slots/count" in str(error), "all of them, if asked for"


@pytest.mark.parametrize(
    ("ids", "slots", "options", "words"),
    [
        ([1, 2, 3], {"row": [1.0, 2.0]}, {}, "emb/slots/row.*a row for each id"),
        ([1, 2, 70_000], {}, {"owned": (0, 3)}, "1 of others, as 70000 of bucket 4464"),
        ([1.0, 2.0], {}, {}, "ids of int64"),
        ([[1, 2]], {}, {}, "ids of int64"),
    ],
)
def test_tables_that_are_none_are_refused_by_their_path(
    tmp_path: Path, ids: Any, slots: Any, options: Any, words: str
) -> None:
    arrays = {name: np.array(rows) for name, rows in slots.items()}
    with pytest.raises(tc.TreeError, match=words):
        tc.save(tmp_path / "c", {"emb": tc.KeyedTable(np.array(ids), arrays, **options)})
    with pytest.raises(tc.TreeError, match=r"plain array.*numpy array or a tensor"):
        tc.save(tmp_path / "c", {"emb": tc.KeyedTable([1, 2], arrays, **options)})


def test_a_missing_slot_is_an_error_or_filled_and_never_what_was_there(tmp_path: Path) -> None:
    oracle = make_oracle(60)
    save_by(tmp_path, oracle, 2)

    def like(fill: dict[str, float] | None, buckets: int = 65_536) -> dict[str, Any]:
        table = target((0, buckets // 2), fill=fill, buckets=buckets)
        table.slots["exp_avg"] = torch.full((3, 4), torch.nan, dtype=torch.bfloat16)
        return {"emb": table, "dense": ...}

    with pytest.raises(tc.MismatchError, match="missing in the checkpoint: emb/slots/exp_avg"):
        tc.load(tmp_path, like(None))
    with pytest.raises(tc.MismatchError, match="what to fill it with"):
        tc.load(tmp_path, like(None), strict=False)
    for buckets in (65_536, 100):
        table = tc.load(tmp_path, like({"exp_avg": 0.5}, buckets))["emb"]
        assert 0 < len(table.ids) < 60 and rows_of(table).items() <= oracle.items()
        assert table.slots["exp_avg"].dtype == torch.bfloat16
        assert table.slots["exp_avg"].tolist() == [[0.5] * 4] * len(table.ids)


def test_a_slot_that_is_not_selected_is_filled_or_refused(tmp_path: Path) -> None:
    save_by(tmp_path, make_oracle(60), 1)
    select = ["emb/ids", "emb/slots/embedding", "emb/scalars"]
    with pytest.raises(tc.MismatchError, match=r"emb/slots/count.*not selected"):
        tc.load(tmp_path, {"emb": target()}, select=select)
    with pytest.raises(tc.MismatchError, match="a slot together with the ids"):
        tc.load(tmp_path, {"emb": target()}, select="emb/slots")
    table = tc.load(tmp_path, {"emb": target(fill={"count": -1})}, select=select)["emb"]
    assert table.slots["count"].tolist() == [[-1.0]] * 60


def test_a_slot_of_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    save_by(tmp_path, make_oracle(60), 1)
    for spec in (tc.ArraySpec((0, 5), "float32"), tc.ArraySpec((0, 4), "float16")):
        like = target((0, 9))
        like.slots["embedding"] = spec
        with pytest.raises(tc.MismatchError, match="emb/slots/embedding"):
            tc.load(tmp_path, {"emb": like, "dense": ...})
    like = target((0, 30_000))
    like.slots["embedding"] = tc.ArraySpec((0, 4), "float64", kind="numpy")
    assert tc.load(tmp_path, {"emb": like, "dense": ...}, cast=True)["emb"].slots["embedding"].dtype == np.float64


def test_ids_are_never_wanted_as_anything_but_whole_numbers_of_64_bits(tmp_path: Path) -> None:
    """As of an empty list that numpy makes an array of: with `cast` ids past 2**53 would become others."""
    save_by(tmp_path, make_oracle(60), 1)
    for ids in (np.array([]), torch.empty(0, dtype=torch.int32), tc.ArraySpec((0,), "uint64")):
        like = tc.KeyedTable(ids, {"embedding": np.empty((0, 4), np.float32)})
        for cast in (False, True):
            with pytest.raises(tc.MismatchError, match=r"emb/ids: expected ids of int64"):
                tc.load(tmp_path, {"emb": like, "dense": ...}, strict=False, cast=cast)


def test_a_changed_byte_and_a_missing_shard_are_errors(tmp_path: Path) -> None:
    oracle = make_oracle(3000)
    save_by(tmp_path / "c", oracle, 2)
    victim = shards_of(tmp_path / "c")[1]
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.write_bytes(data)
    with pytest.raises(tc.CorruptError):
        load_by(tmp_path / "c", 1)
    assert not tc.verify(tmp_path / "c").ok
    victim.unlink()
    with pytest.raises(tc.CorruptError):
        load_by(tmp_path / "c", 1)


def test_a_forged_table_record_is_a_clear_error(tmp_path: Path) -> None:
    save_by(tmp_path, make_oracle(30), 1)

    def change(document: Any) -> None:
        node = document["index"]["structure"][2][0]
        assert node[0] == "table"
        node[1][2] = -4

    reseal(tmp_path, change)
    with pytest.raises(tc.FormatError, match="emb"):
        tc.load(tmp_path)


# with everything else -------------------------------------------------------------------------------------------------


def test_it_is_saved_beside_training_and_each_save_has_its_own_rows(tmp_path: Path) -> None:
    oracle = make_oracle(500)

    def act(comm: Any) -> None:
        owned = tc.KeyedTable.share(comm.rank, 2)
        for step, rows in enumerate((100, 500, 300)):
            table = table_of(dict(itertools.islice(oracle.items(), rows)), owned)
            pending = tc.save_async(
                tmp_path / f"{step}",
                {"emb": table, "dense": step},
                comm=comm,
                background=tc.BackgroundOptions(writer="thread"),
            )
            table.ids[:] = 0
            table.slots["embedding"][:] = np.nan
            pending.result()

    assert errors_of(on_ranks(2, act)) == [None] * 2
    for step, rows in enumerate((100, 500, 300)):
        assert joined(load_by(tmp_path / f"{step}", 3)) == dict(itertools.islice(oracle.items(), rows))


def test_load_into_gives_the_table_new_arrays_and_leaves_the_rest_in_place(tmp_path: Path) -> None:
    oracle = make_oracle(80)
    save_by(tmp_path, oracle, 2)
    tree = {"emb": target((0, 65_536)), "dense": np.zeros(5, np.int64)}
    table, dense = tree["emb"], tree["dense"]
    tc.load_into(tmp_path, tree)
    assert tree["emb"] is table and rows_of(table) == oracle and table.scalars == {"step": 7}
    assert tree["dense"] is dense and dense.tolist() == [0, 1, 2, 3, 4]


def test_each_rank_may_have_a_table_of_its_own(tmp_path: Path) -> None:
    oracles = [make_oracle(10, seed=1), make_oracle(25, seed=2)]

    def save(comm: Any) -> None:
        tc.save(tmp_path, tc.PerRank({"emb": table_of(oracles[comm.rank], (0, 65_536))}), comm=comm)

    def load(comm: Any) -> tuple[Oracle, Oracle]:
        half = tc.load(tmp_path, tc.PerRank({"emb": target((0, 32_768))}), comm=comm)
        return rows_of(tc.load(tmp_path, comm=comm).value["emb"]), rows_of(half.value["emb"])

    assert errors_of(on_ranks(2, save)) == [None] * 2
    for outcome, oracle in zip(on_ranks(2, load), oracles, strict=True):
        assert outcome.error is None
        whole, half = outcome.value
        assert whole == oracle
        assert half == {i: row for i, row in oracle.items() if i & 65_535 < 32_768}


def test_stages_hold_tables_of_their_own_names(tmp_path: Path) -> None:
    oracles = [make_oracle(10, seed=1), make_oracle(25, seed=2)]

    def save(comm: Any) -> None:
        tc.save(tmp_path, {f"emb{comm.rank}": table_of(oracles[comm.rank], (0, 65_536))}, comm=comm)

    assert errors_of(on_ranks(2, save)) == [None] * 2
    assert [rows_of(tc.load(tmp_path)[f"emb{n}"]) for n in range(2)] == oracles


def test_a_group_of_ranks_saves_a_table_of_its_own(tmp_path: Path) -> None:
    oracle = make_oracle(90)
    comms = thread_comms(2, timeout=60)
    for comm in comms:
        comm.members = (5, 3)  # of the default group

    def save(comm: Any) -> None:
        tc.save(tmp_path, {"emb": table_of(oracle, tc.KeyedTable.share(comm.rank, 2)), "dense": 0}, comm=comm)

    assert errors_of(on_ranks(comms, save)) == [None] * 2
    assert joined(load_by(tmp_path, 3)) == oracle


def test_a_tables_record_says_how_it_is_parted(tmp_path: Path) -> None:
    from treeckpt._inspect.outline import Outline

    save_by(tmp_path, make_oracle(9), 1)
    index = tc.inspect(tmp_path)
    [row, _] = Outline.of(index).children()
    assert (row.kind, row.children) == ("table", 4)
    assert index.tables == {0: TableSpec("u64_mod", 1, 65_536)}


def test_a_table_is_converted_as_it_is_or_into_a_dict_and_that_is_said(tmp_path: Path) -> None:
    from treeckpt.convert import convert

    oracle = make_oracle(40)
    save_by(tmp_path / "c", oracle, 2)
    convert(tmp_path / "c", tmp_path / "again")
    assert joined(load_by(tmp_path / "again", 3)) == oracle
    report = convert(tmp_path / "c", tmp_path / "file.pt")
    assert "emb: a keyed table becomes a dict" in str(report)
    table = torch.load(tmp_path / "file.pt")["emb"]
    assert sorted(table["ids"].tolist()) == sorted(oracle) and list(table) == ["ids", "offsets", "slots", "scalars"]


def test_a_table_taken_apart_and_put_together_again_is_as_before() -> None:
    """What the union of several loaded trees is made of."""
    from treeckpt._arrays.registry import resolve
    from treeckpt._core.tree.flatten import flatten, unflatten

    store = tc.MemoryStore("c")
    save_by(store, make_oracle(9), 1)
    for tree in (tc.load(store), tc.load(store, select=["emb/ids", "emb/slots/count"])):
        structure, leaves = flatten(tree)
        again = unflatten(structure, iter([leaf for _, leaf in leaves]), resolve=resolve)["emb"]
        assert again.ids is tree["emb"].ids and again.scalars == tree["emb"].scalars
        assert all(again.slots[name] is slot for name, slot in tree["emb"].slots.items())
    assert [path for path, leaf in leaves if leaf is ...] == ["emb/slots/embedding", "emb/scalars/step", "dense"]


def test_abstract_is_a_target_of_the_same_range(tmp_path: Path) -> None:
    oracle = make_oracle(50)
    save_by(tmp_path, oracle, 1)
    like = tc.abstract({"emb": table_of(oracle, (0, 65_536), kind="torch"), "dense": np.arange(5)})
    assert isinstance(like["emb"].slots["embedding"], tc.ArraySpec)
    assert rows_of(tc.load(tmp_path, like)["emb"]) == oracle


def test_what_works_on_trees_refuses_tables() -> None:
    from treeckpt import trees

    with pytest.raises(tc.TreeError, match="KeyedTable"):
        trees.gather({"emb": table_of(make_oracle(5), (0, 65_536), kind="torch")})


def test_two_checkpoints_differ_in_their_rows() -> None:
    from treeckpt._inspect.diff import diff

    stores = [tc.MemoryStore("a"), tc.MemoryStore("b")]
    for store, rows in zip(stores, (10, 11), strict=True):
        save_by(store, make_oracle(rows), 1)
    changes = diff(*(tc.inspect(store) for store in stores)).changes
    assert {c.path for c in changes if c.aspect == "shape"} == {"emb/ids", "emb/slots/embedding", "emb/slots/count"}
    assert {c.path for c in changes} == {c.path for c in changes if c.aspect == "shape"}


@pytest.mark.parametrize("partition", ["u64_mod", "splitmix64_mod", "i64_mod"])
def test_the_bucket_of_an_id_tells_its_owner(partition: str) -> None:
    ids = np.array([0, 1, -1, 7, 1 << 62, -(1 << 63)])
    buckets = tc.KeyedTable.buckets_of(ids, 12, partition=partition)
    store, arrays = tc.MemoryStore(), {"w": np.arange(6.0)}
    tc.save(store, {"t": tc.KeyedTable(ids, arrays, buckets=12, partition=partition)})
    for rank in range(5):
        owned = tc.KeyedTable.share(rank, 5, 12)
        like = tc.KeyedTable(ids[:0], {"w": np.empty(0)}, buckets=12, partition=partition, owned=owned)
        mine = tc.load(store, {"t": like})["t"].ids
        assert sorted(mine) == sorted(ids[(buckets >= owned[0]) & (buckets < owned[1])])
    with pytest.raises(tc.LayoutError, match="ids: expected int64, found float64"):
        tc.KeyedTable.buckets_of(arrays["w"], 12)


def dealt(oracle: Oracle, rank: int, world: int, **options: Any) -> tc.KeyedTable:
    """The part of a dict whose ids have this remainder, as Python has it."""
    mine = {i: oracle[i] for i in oracle if i % world == rank}
    table = table_of(mine, (0, 65_536))
    return tc.KeyedTable(
        table.ids, table.slots, scalars={"step": 7}, owned=tc.KeyedTable.modulo(rank, world), **options
    )


@pytest.mark.parametrize("world", [1, 3, 4])
def test_ids_dealt_by_their_remainder_go_to_any_other_owners(tmp_path: Path, world: int) -> None:
    oracle = make_oracle(300)

    def act(comm: Any) -> None:
        tc.save(tmp_path / "c", {"emb": dealt(oracle, comm.rank, world), "dense": 1}, comm=comm)

    assert errors_of(on_ranks(world, act)) == [None] * world
    assert tc.inspect(tmp_path / "c").tables[0] == TableSpec("i64_mod", 1, world)
    assert rows_of(tc.load(tmp_path / "c")["emb"]) == oracle
    for other in (1, 3, 5, 8):
        for rank in range(other):
            like = {"emb": target(tc.KeyedTable.modulo(rank, other)), "dense": ...}
            found = rows_of(tc.load(tmp_path / "c", like)["emb"])
            assert found == {i: oracle[i] for i in oracle if i % other == rank}
    assert joined(load_by(tmp_path / "c", 3)) == oracle
    save_by(tmp_path / "hashed", oracle, 2)
    like = {"emb": target(tc.KeyedTable.modulo(2, 3)), "dense": ...}
    assert rows_of(tc.load(tmp_path / "hashed", like)["emb"]) == {i: oracle[i] for i in oracle if i % 3 == 2}


def test_rows_of_another_remainder_and_a_rank_that_is_missing_are_refused(tmp_path: Path) -> None:
    wrong = tc.KeyedTable(np.array([1, 5, -2]), {}, owned=tc.KeyedTable.modulo(1, 4))
    with pytest.raises(
        tc.TreeError, match=r"emb/ids: expected ids with id % 4 == 1, .*found 1 of others, as -2 of bucket 2"
    ):
        tc.save(tmp_path / "c", {"emb": wrong})
    right = tc.KeyedTable(np.array([1, 5, -3]), {}, owned=tc.KeyedTable.modulo(1, 4))
    with pytest.raises(tc.LayoutError, match=r"no rank owns buckets 0:1.*modulo\(rank, world\)"):
        tc.save(tmp_path / "c", {"emb": right})
