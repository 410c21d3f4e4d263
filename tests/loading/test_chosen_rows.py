"""`ids=` loads the rows of chosen ids of keyed tables, and reads little else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt._core.format.shard_header import BLOCK
from treeckpt._core.planning.load_plan import READ_GAP

IDS = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-20, 20))


def row_of(number: int) -> list[float]:
    return [float(number % 1009), float(number % 31)]


def table(ids: Any, **options: Any) -> tc.KeyedTable:
    rows = np.array([row_of(int(n)) for n in ids], np.float32).reshape(-1, 2)
    return tc.KeyedTable(np.array(ids, np.int64), {"w": rows, "m": torch.from_numpy(rows + 1)}, **options)


def parted(options: dict[str, Any], rank: int, world: int, ids: list[int]) -> tc.KeyedTable:
    """The part of a table that a rank of two has."""
    if options == {"modulo": True}:
        return table([n for n in ids if n % world == rank], owned=tc.KeyedTable.modulo(rank, world))
    owned = tc.KeyedTable.share(rank, world, options.get("buckets", 65_536))
    buckets = tc.KeyedTable.buckets_of(
        np.array(ids, np.int64), options.get("buckets", 65_536), partition=options.get("partition", "u64_mod")
    )
    return table(
        [n for n, b in zip(ids, buckets.tolist(), strict=True) if owned[0] <= b < owned[1]], owned=owned, **options
    )


@settings(max_examples=12, deadline=None)
@given(
    ids=st.lists(IDS, min_size=1, max_size=40, unique=True),
    data=st.data(),
    options=st.sampled_from([{}, {"modulo": True}, {"buckets": 3}, {"partition": "splitmix64_mod", "buckets": 8}]),
)
def test_the_rows_come_in_the_order_of_the_ids(ids: list[int], data: st.DataObject, options: dict[str, Any]) -> None:
    store = tc.MemoryStore()
    tree = lambda comm: {"emb": parted(options, comm.rank, 2, ids), "step": 3}  # noqa: E731
    assert errors_of(on_ranks(2, lambda comm: tc.save(store, tree(comm), comm=comm))) == [None, None]
    chosen = data.draw(st.permutations(ids))[: data.draw(st.integers(0, len(ids)))]
    given_ids: Any = data.draw(st.sampled_from([np.array, torch.tensor]))(chosen or [0])[: len(chosen)]
    like = {
        "emb": tc.KeyedTable(
            torch.empty(0, dtype=torch.int64), {"m": np.empty((0, 2), np.float32), "w": torch.empty(0, 2)}
        ),
        "step": 0,
    }
    for wanted in (None, like):
        for form in (given_ids, {"emb": given_ids}):
            found = tc.load(store, wanted, ids=form)
            assert found["step"] == 3 and np.asarray(found["emb"].ids).tolist() == chosen
            assert np.asarray(found["emb"].slots["w"]).tolist() == [row_of(n) for n in chosen]
            assert np.asarray(found["emb"].slots["m"]).tolist() == [[a + 1, b + 1] for a, b in map(row_of, chosen)]


def test_missing_ids_are_named_or_filled() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"emb": table([5, 7, -9])})
    with pytest.raises(tc.MismatchError, match=r"emb/ids: expected the chosen ids .*found 2 .*6, 8.*fill"):
        tc.load(store, ids=[5, 6, 8])
    like = {"emb": tc.KeyedTable(np.empty(0, np.int64), {"w": np.empty((0, 2), np.float32)})}
    with pytest.raises(tc.MismatchError, match=r"emb/slots/w: .*none for 1 of them, as 6"):
        tc.load(store, like, ids=[6, -9], strict="missing")
    with pytest.raises(tc.MismatchError, match=r"emb/ids: expected the chosen ids"):
        tc.load(store, {"emb": tc.KeyedTable(np.empty(0, np.int64), {})}, ids=[6, -9], strict="missing")
    like["emb"].fill = {"w": 0.5}
    found = tc.load(store, like, ids=[6, -9], strict="missing")["emb"]
    assert found.ids.tolist() == [6, -9] and found.slots["w"].tolist() == [[0.5, 0.5], row_of(-9)]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1.5], r"ids: expected ids of int64\[N\], found float64 of shape \(1,\)"),
        (3, r"ids: expected ids of int64\[N\], found int64 of shape \(\)"),
        ([5, 5], "ids: expected each id once, found 5 2 times"),
        ({"emd": [5]}, r"ids\['emd'\]: expected the path of a KeyedTable .*There is emb"),
        ({"emb": ["a"]}, r"ids\['emb'\]: expected ids of int64"),
    ],
)
def test_what_are_no_ids_of_a_table_is_refused(ids: Any, words: str) -> None:
    store = tc.MemoryStore()
    tc.save(store, {"emb": table([5, 7])})
    with pytest.raises(tc.MismatchError, match=words):
        tc.load(store, ids=ids)


def test_ids_are_those_of_one_checkpoint_with_tables_and_of_the_owner_that_asks() -> None:
    plain, store = tc.MemoryStore(), tc.MemoryStore()
    tc.save(plain, {"w": np.zeros(2)})
    tc.save(store, {"emb": table([5, 7])})
    with pytest.raises(tc.MismatchError, match=r"ids: expected the path of a KeyedTable .*found none in it"):
        tc.load(plain, ids=[5])
    with pytest.raises(tc.MismatchError, match="ids: expected one checkpoint"):
        tc.load([store, plain], ids=[5])
    like = {"emb": tc.KeyedTable(np.empty(0, np.int64), {}, owned=tc.KeyedTable.modulo(1, 4))}
    with pytest.raises(
        tc.MismatchError, match=r"emb/ids: expected ids with id % 4 == 1, as owned in like says, found 7"
    ):
        tc.load(store, like, ids=[5, 7], strict="missing")
    assert tc.load(store, like, ids=[5], strict="missing")["emb"].ids.tolist() == [5]


def large_table(rows: int) -> tc.KeyedTable:
    ids = np.unique(np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, rows))
    return tc.KeyedTable(ids, {name: np.arange(len(ids) * 16, dtype=np.float32).reshape(-1, 16) for name in "wm"})


def test_little_more_than_the_rows_is_read_of_files(tmp_path: Path) -> None:
    whole = large_table(400_000)
    tc.save(tmp_path, {"emb": whole})
    places = np.arange(0, len(whole.ids), len(whole.ids) // 3)
    chosen, reports = whole.ids[places], list[Any]()
    for verify in (True, False):
        found = tc.load(tmp_path, ids=chosen, read=tc.ReadOptions(verify=verify), on_report=reports.append)["emb"]
        assert found.slots["w"].tolist() == whole.slots["w"][places].tolist()
    assert reports[0].read_nbytes <= 4 * len(chosen) * 2 * BLOCK  # ids, offsets, two slots, rounded to blocks
    assert reports[1].read_nbytes <= len(chosen) * (2 * 64 + READ_GAP)
    assert len(tc.load(tmp_path, ids=whole.ids[:0])["emb"].ids) == 0


def test_another_world_of_remainders_reads_the_rows_that_are_its_own(tmp_path: Path) -> None:
    """Rows that lie apart by more than a gap are read without what is between them."""
    ids = np.arange(3000)
    wide = np.zeros((3000, 25_000), np.uint8)
    wide[:, 0] = ids % 251
    tc.save(tmp_path, {"emb": tc.KeyedTable(ids, {"w": wide})})
    like = {"emb": tc.KeyedTable(ids[:0], {"w": wide[:0]}, owned=tc.KeyedTable.modulo(3, 50))}
    reports = list[Any]()
    found = tc.load(tmp_path, like, read=tc.ReadOptions(verify=False), on_report=reports.append)["emb"]
    assert sorted(found.ids.tolist()) == list(range(3, 3000, 50))
    assert found.slots["w"][:, 0].tolist() == [n % 251 for n in found.ids.tolist()]
    assert reports[0].read_nbytes < 1.2 * 60 * 25_000 + 3000 * 8


def test_little_more_than_the_rows_is_fetched_of_objects(s3: Any) -> None:
    whole, url = large_table(60_000), s3.url()
    store = s3.store(url)
    tc.save(store, {"emb": whole})
    chosen = whole.ids[:: len(whole.ids) // 3]
    s3.rules()
    found = tc.load(store, ids={"emb": torch.from_numpy(chosen)})["emb"]
    assert found.slots["m"].tolist() == whole.slots["m"][:: len(whole.ids) // 3].tolist()
    fetched = sum(row["got"] for row in s3.log() if row["method"] == "GET" and "shard" in row["path"])
    assert 0 < fetched <= 3 * len(chosen) * BLOCK + (1 << 20) < whole.slots["w"].nbytes * 2  # with ids and offsets
