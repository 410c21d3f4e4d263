"""Checkpoints that earlier versions of the format left behind are read as they were meant."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.golden.content import (
    BUCKETS,
    IDS,
    WORLD,
    arrays,
    blob_tree,
    end_to_end,
    sharing_tree,
    slots,
    table_tree,
    values,
)
from tests.golden.write import KEEP, SHARING, write_sharing
from tests.helpers.strategies import same
from tests.helpers.world import errors_of, on_ranks, shards_of
from treeckpt._core.format import index as index_module
from treeckpt._core.format.index import VERSION, decode_index, encode_index, rebuild
from treeckpt._core.format.lineage import Lineage
from treeckpt._core.format.records import AliasRecord, PerRankValues, ValueRecord
from treeckpt._core.format.references import decode_shared
from treeckpt._core.format.shard_header import decode_header, header_nbytes
from treeckpt._core.sharding.int_runs import decode_runs
from treeckpt._runs.discovery import scan
from treeckpt.policy import parse_keep

GOLDEN = Path(__file__).parent
FIRST = GOLDEN / "version_1"
RANGES = GOLDEN / "version_1_ranges"
TABLES = GOLDEN / "version_1_tables"
BLOBS = GOLDEN / "version_1_blobs"
RUN = GOLDEN / "version_1_run"
SHARED_RUN = GOLDEN / SHARING


def test_every_version_of_the_format_has_a_golden_checkpoint():
    for version in range(1, VERSION + 1):
        assert b'"version":%d,' % version in (GOLDEN / f"version_{version}" / "index.json").read_bytes()


def test_the_golden_checkpoint_of_ranges_loads():
    found = tc.load(RANGES, fallback=tc.Fallback(per_rank="take"))
    for group, arrays_of_group in end_to_end().items():
        assert found[group].keys() == arrays_of_group.keys()
        for name, array in arrays_of_group.items():
            assert found[group][name].dtype == array.dtype and np.array_equal(found[group][name], array)
    assert found["step"] == 12 and found["own"].value.tolist() == [0, 1, 2]
    assert not tc.verify(RANGES).problems


def test_the_index_of_ranges_follows_from_its_shards_and_is_written_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index_module, "MAX_PLAIN_NBYTES", 0)  # it is a small one
    data = (RANGES / "index.json").read_bytes()
    assert b'"ranges":{' in data and b'"shared":[' in data
    index = decode_index(data)
    assert encode_index(index) == data
    headers = []
    for file in index.file_list:
        shard = (RANGES / file.name).read_bytes()
        size = header_nbytes(shard[:8], file.name)
        headers.append((size, decode_header(shard[:size], file.name)))
    assert rebuild(headers) == index
    [leaf] = index.by_path["moments/layers.4.weight"]
    found = [(c.region.offset, c.region.shape, c.rank, c.start) for c in index.chunks_of(leaf)]
    assert found == [
        ((0, 0), (15, 5), 4, 264),
        ((15, 0), (1, 2), 4, 564),
        ((15, 2), (1, 3), 5, 24),
        ((16, 0), (44, 5), 5, 36),
    ]


def test_the_golden_checkpoint_of_version_1_loads():
    found = tc.load(FIRST, fallback=tc.Fallback(per_rank="take"))
    assert same(found["values"], values())
    assert found["arrays"].keys() == arrays().keys() | {"tie"}
    for name, array in arrays().items():
        assert found["arrays"][name].dtype == array.dtype
        assert found["arrays"][name].tobytes() == array.tobytes()
        assert found["arrays"][name].shape == array.shape
    assert found["arrays"]["tie"].item() == 7
    assert found["own"].value["rank"] == 0
    assert found["own"].value["seed"].tolist() == [0, 1, 2]
    assert not tc.verify(FIRST).problems


def first_index():
    return decode_index((FIRST / "index.json").read_bytes())


def test_the_index_of_version_1_says_what_it_said():
    index = first_index()
    assert (index.step, index.world, index.metadata) == (12, WORLD, {"by": "golden"})
    assert [leaf.path for leaf in index.entries] == [
        "arrays/rows", "arrays/flat", "arrays/complex", "arrays/text", "arrays/empty", "arrays/scalar", "arrays/time",
        "arrays/tie", "values/none", "values/bools/0", "values/bools/1", "values/ints/0", "values/ints/1",
        "values/ints/2", "values/floats/0", "values/floats/1", "values/floats/2", "values/7", "values/~(1~,a~1b~)",
        "values/pair/first", "values/pair/second", "values/default/x/0", "values/ordered/z", "values/ordered/a",
        "values/moment", "values/scalar", "own/~rank*/seed", "own/~rank*/rank",
    ]  # fmt: skip
    kinds = {leaf.path: leaf.spec for leaf in index.entries if leaf.spec is not None}
    assert (kinds["arrays/rows"].shape, kinds["arrays/rows"].dtype, kinds["arrays/rows"].kind) == (
        (5, 2),
        "float32",
        "numpy",
    )
    [tie], [step], [own] = (index.by_path[p] for p in ("arrays/tie", "values/ints/1", "own/~rank*/rank"))
    assert tie.record == AliasRecord(5, 5)
    assert step.record == ValueRecord(-(1 << 63))
    assert own.record == PerRankValues((0, 1)) and decode_runs(own.ranks).tolist() == [0, 1]


def test_the_chunks_of_version_1_lie_where_they_lay():
    index = first_index()
    [rows], [flat] = index.by_path["arrays/rows"], index.by_path["arrays/flat"]
    found = [(c.region.offset, c.region.shape, c.rank, c.start) for c in index.chunks_of(rows)]
    assert found == [((0, 0), (3, 2), 0, 64), ((3, 0), (2, 2), 1, 40)]
    found = [(c.region.offset, c.region.shape, c.rank, c.start) for c in index.chunks_of(flat)]
    assert found == [((0, 0), (1, 3), 0, 0), ((1, 0), (1, 1), 0, 24), ((1, 1), (1, 2), 1, 0)]
    for chunk in index.chunks_of(rows):
        file, at = index.locate(chunk.rank, chunk.start, chunk.start + chunk.region.size * 4, "arrays/rows")
        data = (FIRST / file.name).read_bytes()[at : at + chunk.region.size * 4]
        assert data == arrays()["rows"][chunk.region.slices()].tobytes()


def test_the_shards_of_version_1_explain_themselves():
    headers = []
    for file in first_index().file_list:
        data = (FIRST / file.name).read_bytes()
        size = header_nbytes(data[:8], file.name)
        headers.append((size, decode_header(data[:size], file.name)))
    assert [len(h.entries) for _, h in headers] == [9, 3]
    assert rebuild(headers) == first_index()


def test_writing_the_golden_index_again_gives_the_same_bytes():
    assert encode_index(first_index()) == (FIRST / "index.json").read_bytes()


@pytest.mark.parametrize(("owners", "buckets"), [(1, BUCKETS), (2, BUCKETS), (5, BUCKETS), (3, 7)])
def test_golden_tables_load_into_any_owners_and_buckets(owners, buckets):
    rows = {}
    names = {name: slot[:0] for name, slot in slots().items()}
    for rank in range(owners):
        options = {"buckets": buckets, "owned": tc.KeyedTable.share(rank, owners, buckets)}
        like = tc.KeyedTable(np.empty(0, np.int64), names, scalars={"step": 0}, **options)
        table = tc.load(TABLES, {"table": like, "empty": ...})["table"]
        assert table.scalars == {"step": 12}
        for n, number in enumerate(table.ids.tolist()):
            assert number not in rows
            rows[number] = [slot[n].tobytes() for slot in table.slots.values()]
    assert rows == {number: [slot[n].tobytes() for slot in slots().values()] for n, number in enumerate(IDS)}
    empty = tc.load(TABLES)["empty"]
    assert empty.spec.function == "splitmix64_mod" and empty.slots["embedding"].shape == (0, 3)
    assert not tc.verify(TABLES).problems


def test_the_tables_of_version_1_are_written_with_the_same_bytes(tmp_path):
    """Rows in their order, offsets and entries: all but the id of the save, and the checksums that cover it."""

    def save(comm):
        tc.save(tmp_path, table_tree(comm.rank), step=12, comm=comm, custom_metadata={"by": "golden"})

    assert errors_of(on_ranks(WORLD, save)) == [None] * WORLD
    for old, new in zip(shards_of(TABLES), shards_of(tmp_path), strict=True):
        found = [path.read_bytes() for path in (old, new)]
        sizes = [header_nbytes(data[:8], "shard") for data in found]
        assert found[0][sizes[0] :] == found[1][sizes[1] :]
        entries = [decode_header(data[:size], "shard").entries for data, size in zip(found, sizes, strict=True)]
        assert entries[0] == entries[1]


def test_golden_texts_and_bytes_load_and_so_do_ids_dealt_by_their_remainder():
    for rank in range(WORLD):
        like = blob_tree(rank)
        found = tc.load(BLOBS, fallback=tc.Fallback(per_rank="take"))
        for name in ("text", "bytes", "buffer", "short"):
            assert type(found[name]) is type(like[name]) and found[name] == like[name]
        owned = {"table": like["table"], **{name: ... for name in like if name != "table"}}
        table = tc.load(BLOBS, owned)["table"]
        assert sorted(table.ids.tolist()) == sorted(like["table"].ids.tolist())
    assert found["own"].value == "0" * 4100 and tc.inspect(BLOBS).by_path["short"][0].stored is None
    assert not tc.verify(BLOBS).problems


def test_the_golden_run_of_shared_files_loads_and_its_indexes_are_written_the_same() -> None:
    for step, shared in ((10, []), (20, ["step_00000010"]), (30, [])):
        path = SHARED_RUN / f"step_{step:08d}"
        data = (path / "index.json").read_bytes()
        index = decode_index(data)
        assert encode_index(index) == data and b'"version":2,' in data
        assert list(index.shared_names.values()) == shared
        assert not tc.verify(path).problems
        found, expected = tc.load(path), sharing_tree(step)
        assert found["step"] == step and not found["base"].requires_grad
        assert all(torch.equal(found[key], expected[key]) for key in ("adapter", "base"))


def test_shared_and_flattened_files_are_written_with_the_same_bytes(tmp_path: Path) -> None:
    """All but the ids of saves, times, and the checksums that cover them."""
    write_sharing(tmp_path)
    runs = SHARED_RUN, tmp_path
    ids = [{tc.inspect(path.parent).save_id: path.parent.name for path in run.glob("*/index.json")} for run in runs]
    for step in ("step_00000010", "step_00000020", "step_00000030"):
        old, new = (tc.inspect(run / step) for run in runs)
        assert old.files == new.files and old.entries == new.entries
        for one, other in zip(shards_of(SHARED_RUN / step), shards_of(tmp_path / step), strict=True):
            data = [path.read_bytes() for path in (one, other)]
            sizes = [header_nbytes(part[:8], "shard") for part in data]
            assert sizes[0] == sizes[1] and data[0][sizes[0] :] == data[1][sizes[1] :]
            headers = [decode_header(part[:size], "shard") for part, size in zip(data, sizes, strict=True)]
            assert headers[0].entries == headers[1].entries and headers[0].hashes == headers[1].hashes
            places = [_places(header.shared, known) for header, known in zip(headers, ids, strict=True)]
            assert places[0] == places[1]


def _places(shared: str, steps: dict[str, str]) -> list[tuple[str, ...]]:
    """What the header of a shard says of shared files, with the steps in the places of their saves."""
    files = decode_shared(shared, "shard")
    return [(one.home.directory, steps[one.home.save_id], *msgspec.structs.astuple(one)[1:]) for one in files]


def test_the_golden_checkpoint_is_not_written_anew():
    from tests.golden.write import main

    with pytest.raises(tc.CheckpointExists):
        main()


def test_the_golden_run_says_what_was_saved_after_what_and_under_which_policies(tmp_path):
    lineages = {}
    for path in sorted(RUN.glob("*/index.json")):
        index = decode_index(path.read_bytes())
        lineages[path.parent.name] = (index.save_id, index.lineage)
        assert encode_index(index) == path.read_bytes()
    (first, _), (middle, _), *_ = lineages.values()
    assert [lineage for _, lineage in lineages.values()] == [
        Lineage(10, keep=KEEP),
        Lineage(21, follows=first, abandoned=((20, 20),), keep=KEEP),
        Lineage(20, follows=first, keep=KEEP),
        Lineage(22, follows=middle, abandoned=((20, 20),), name="tuned", keep=KEEP),
    ]
    run = shutil.copytree(RUN, tmp_path / "run")
    assert [(info.name, info.abandoned) for info in scan(run)] == [
        ("tuned", False), ("step_00000015", False), ("step_00000010", False), ("step_00000020", True),
    ]  # fmt: skip
    with tc.Manager(run, keep=parse_keep(KEEP), background=False) as manager:
        assert manager.latest() == "tuned" and manager.best("loss") == 15
        assert manager.restore() == {"step": 16}
