"""The row of an id is found by few reads; page, JSON and command say the same."""

import json

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.changing_tables import ChangingTable
from tests.helpers.layout_cases import on_ranks
from treeckpt._cli.main import main
from treeckpt._core.format.shard_header import BLOCK
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._loading.table_row import find_row, ids_of_table, parse_id
from treeckpt.errors import MismatchError

WORLD = 2
LARGEST = (1 << 64) - 1
IDS = np.concatenate([np.arange(-500, 200_000, 7), [-1, np.iinfo(np.int64).min, (1 << 53) + 1, np.iinfo(np.int64).max]])


def table_of(rank, partition, buckets):
    ids = np.unique(IDS)
    owned = tc.KeyedTable.share(rank, WORLD, buckets)
    mine = tc.KeyedTable.buckets_of(ids, buckets, partition=partition)
    ids = ids[(mine >= owned[0]) & (mine < owned[1])]
    slots = {"w": np.stack([ids, ids + 1], 1).astype(np.float64), "count": ids}
    return tc.KeyedTable(ids, slots, owned=owned, buckets=buckets, partition=partition)


@pytest.fixture(scope="module", params=[("u64_mod", 64), ("splitmix64_mod", 1 << 16), ("i64_mod", 2)], ids=str)
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "step_00000001"
    trees = [{"emb": table_of(rank, *request.param), "w": np.ones(3)} for rank in range(WORLD)]
    on_ranks(WORLD, lambda comm: tc.save(path, trees[comm.rank], comm=comm))
    return path


def find(path, text):
    index = tc.inspect(path)
    return find_row(LocalStore(path), index, ids_of_table(index, index.by_path["emb/slots/w"][0]), text)


@pytest.mark.parametrize("number", [-500, -1, 199_994, -(1 << 63), (1 << 53) + 1, (1 << 63) - 1])
def test_an_id_is_found_with_its_row_and_the_values_of_its_slots(saved, number):
    found, table = find(saved, f" {number} "), tc.load(saved, select="emb")["emb"]
    assert table.ids[found.row] == number and found.id == f"{number}" and found.rows == len(table.ids)
    by_path = {slot.path: slot for slot in found.slots}
    assert by_path["emb/slots/count"].values == (f"{number}",) and by_path["emb/slots/w"].elements == 2
    data = (saved / found.file).read_bytes()[found.start : found.start + 8]
    assert int.from_bytes(data, "little", signed=True) == number and found.verified
    slot = by_path["emb/slots/w"]
    assert np.frombuffer((saved / slot.file).read_bytes()[slot.start : slot.stop])[0] == float(number)
    assert found.read < 8 * BLOCK + (1 << 17), "the blocks around a few rows, however long the table is"


def test_an_unsigned_id_is_the_one_with_its_bits_and_others_are_not_in_the_table(saved):
    assert find(saved, f"{LARGEST}").row == find(saved, "-1").row is not None
    missing = find(saved, "1")
    assert missing.row is None and missing.slots == () and missing.read > 0
    for text in ("", "1.0", "x", f"{1 << 64}", "-9223372036854775809", "\u0661"):
        with pytest.raises(MismatchError):
            parse_id(text)


def test_page_and_json_and_command_say_the_same(serve, saved, capsys):
    client = serve(saved)
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/checkpoints/{run['checkpoints'][0]['id']}"
    rows = client.get(f"/api/v1{at}/leaves").json()["rows"]
    leaf = {row["path"]: row["leaf"] for row in rows}
    for text in (f"{(1 << 53) + 1}", f"{LARGEST}", "1", "no"):
        page = client.get(f"/api/v1{at}/leaves/{leaf['emb/slots/w']}", params={"id": text}).json()
        html = client.get(f"{at}/leaves/{leaf['emb/ids']}", params={"id": text}).text
        if text == "no":
            assert page["row"] is None and "integer" in page["row_problem"] and "integer" in html
            continue
        row = page["row"]["row"]
        assert main(["show", str(saved), "emb", "--id", text, "--json"]) == (row is None)
        assert json.loads(capsys.readouterr().out) == page["row"]
        main(["show", str(saved), "--id", text])
        printed = capsys.readouterr().out
        if row is None:
            assert "is not in the table" in html and "not in the table" in printed
        else:
            assert f"<strong>{row:,}</strong>" in html and f"{row} of " in printed
            assert page["row"]["id"] == text, "no digit is lost in JSON"
    assert client.get(f"/api/v1{at}/leaves/{leaf['w']}").json()["table"] is None
    assert main(["show", str(saved), "w", "--id", "1"]) != 0


def test_a_slot_without_elements_leaves_the_row_compared_with_checksums(tmp_path):
    slots = {"w": np.ones((5, 2)), "none": np.ones((5, 0))}
    tc.save(tmp_path, {"emb": tc.KeyedTable(np.arange(5), slots)})
    found = find(tmp_path, "3")
    assert found.verified and [slot.elements for slot in found.slots] == [2, 0]


def test_a_row_of_a_delta_leads_to_the_leaf_that_holds_it_and_the_tree_counts_rows_as_a_load(serve, tmp_path):
    table = ChangingTable(400, buckets=4)
    for step in range(1, 5):
        base = {"base": tmp_path / f"step_{step - 1}"} if step > 1 else {}
        tc.save(tmp_path / f"step_{step}", {"emb": table.table()}, step=step, **base)
        expected = dict(table.rows)
        table.change()
    client = serve(tmp_path / "step_4")
    [run] = client.get("/api/v1/runs").json()["runs"]
    [at] = [f"/checkpoints/{row['id']}" for row in run["checkpoints"]]
    count, last = len(tc.load(tmp_path / "step_4")["emb"].ids), [*expected][-1]
    [node] = client.get(f"/api/v1{at}").json()["tree"]["rows"]
    assert node["text"] == f"table of {count} rows" and count == len(expected)
    leaf = next(row["leaf"] for row in client.get(f"/api/v1{at}/leaves").json()["rows"] if row["path"] == "emb/ids")
    page = client.get(f"/api/v1{at}/leaves/{leaf}", params={"id": f"{last}"}).json()["row"]
    assert (page["rows"], page["part"], page["part_rows"]) == (count, "emb/deltas/1/rows", 27)
    html = client.get(f"{at}/leaves/{leaf}", params={"id": f"{last}"}).text
    assert f'of 27 in <span class="mono">emb/deltas/1/rows</span>, of a table of {count} rows' in html
    for slot in page["slots"]:
        held = client.get(f"/api/v1{at}/leaves/{slot['leaf']}", params={"region": f"{page['row']}"}).json()
        assert held["path"] == slot["path"] and held["problem"] is None and held["found"][0] == page["row"]
