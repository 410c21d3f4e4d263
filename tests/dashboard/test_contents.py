"""Do the pages of one checkpoint say what is in it: values, pictures of bytes, blocks, checksums, other layouts?"""

import ast
import fnmatch

import numpy as np
import pytest

import treeckpt as tc
from tests.samples import BFloat16, mesh_layout, write_checkpoint
from treeckpt.core.analysis.reshard_preview import parse_mesh, parse_rules, plan_reshard
from treeckpt.core.tree.flatten import PerRank
from treeckpt.io.storage.run_store import LocalFolder
from treeckpt.io.storage.store import LocalStore
from treeckpt.runs import catalog
from treeckpt.runs.catalog import read_index
from treeckpt_dashboard import checksums
from treeckpt_dashboard.arrays import _overlaps


@pytest.fixture(scope="module")
def tree():
    random = np.random.default_rng(3)
    blocks = {f"h.{n}.{k}": random.standard_normal((8, 16)).astype(np.float32) for n in range(3) for k in ("w", "b")}
    odd = np.array([[1, np.nan, np.inf], [-2, 0, 0]], np.float32)
    half = BFloat16(np.array([[0x3F80, 0xC000]], np.uint16))
    return {
        "model": blocks,
        "odd": odd,
        "half": half,
        "deep": np.arange(4 * 5 * 6).reshape(4, 5, 6),
        "empty": np.zeros((0, 3)),
        "n": 7,
        "it's [x]*": np.ones(3),
        "rng": PerRank(np.arange(9, dtype=np.uint8)),
    }


@pytest.fixture(scope="module")
def path(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("contents") / "step_00000001"
    write_checkpoint(path, tree, step=1, layouts=mesh_layout)
    return path


@pytest.fixture
def asked(serve, path):
    """Asks for a part of the checkpoint's JSON; a path of the tree stands for its leaf."""
    client = serve(path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}"
    rows = client.get(f"{at}/leaves").json()["rows"]
    numbers = {row["path"]: row["leaf"] for row in rows}

    def ask(rest, leaf=None, status=200, **params):
        place = f"{at}/leaves/{numbers[leaf]}{rest}" if leaf is not None else f"{at}{rest}"
        response = client.get(place, params=params)
        assert response.status_code == status, response.text
        return response.json()

    ask.client, ask.page = client, at.removeprefix("/api/v1")
    return ask


def test_a_peek_shows_values_and_what_they_are_like(asked):
    found = asked("/peek", "odd")
    assert found["values"] == [["1", "nan", "inf"], ["-2", "0", "0"]] and found["region"] == "[0:2, 0:3]"
    numbers = found["statistics"]
    assert [numbers[k] for k in ("nan", "infinite", "zero", "minimum", "maximum")] == [1, 1, 2, "-2", "1"]
    assert sum(numbers["bins"]) == 4 and found["verified"] and found["nbytes"] == 24
    assert asked("/peek", "half")["values"] == [["1", "-2"]]
    assert asked("/peek", "rng/~rank*", at="2")["rank"] == 2


def test_axis_pickers_choose_the_slice(asked, tree):
    deep = tree["deep"]
    found = asked("/peek", "deep", y=0, x=1, at="0,0,5", top=1, rows=2, columns=3)
    assert found["region"] == "[1:3, 0:3, 5:6]" and found["values"] == deep[1:3, :3, 5].astype(str).tolist()
    turned = asked("/peek", "deep", y=2, x=0, at="0,4,0")
    assert turned["values"] == deep[:, 4, :].T.astype(str).tolist()
    whole = asked("/peek", "deep", whole=True)
    assert whole["elements"] == deep.size and whole["statistics"]["maximum"] == "119"
    assert asked("/peek", "deep", top=10**9, left=10**9)["region"] == "[0:1, 4:5, 5:6]"


def test_what_has_no_values_to_look_at_says_so(asked):
    assert "no elements" in asked("/peek", "empty", 404)["error"]
    assert "no elements" in asked("/peek", "n", 404)["error"]


def test_a_snippet_selects_the_leaf_and_no_other_whatever_its_name(asked, path):
    for name in ("it's [x]*", "model/h.1.w"):
        text = asked("/snippet", path=name)["snippet"]
        call = ast.parse(text).body[-1].value
        [select] = ast.literal_eval(call.keywords[0].value)
        assert ast.literal_eval(call.args[0]) == str(path) and ast.unparse(call.func) == "tc.load"
        assert [leaf.path for leaf in read_index(path).entries if fnmatch.fnmatchcase(leaf.path, select)] == [name]
    assert asked("/snippet", path="\u202e\x00'\n")["snippet"].isascii()


def test_blocks_are_folded_and_dtypes_listed(asked):
    page = asked("/folds", node="0")
    [fold] = page["folds"]
    assert (fold["title"], fold["blocks"], fold["start"], fold["stop"]) == ("h.0..2", 3, 0, 6)
    assert fold["names"] == ["h.0", "h.1", "h.2"] and fold["nbytes"] == 6 * 8 * 16 * 4
    assert "bfloat16" in page["dtypes"] and asked("/folds", node="9.9", status=404)


def test_leaves_are_found_by_dtype_and_size(asked):
    def paths(**params):
        return [row["path"] for row in asked("/leaves", **params)["rows"]]

    assert paths(dtype="bfloat16") == ["half"] and paths(larger=900) == ["deep"]
    assert paths(q="h.1", dtype="float32", larger=10) == ["model/h.1.w", "model/h.1.b"]
    assert paths(q="h.1", dtype="int8") == [] and len(paths()) == 13


@pytest.mark.parametrize("by", ["tree", "part", "rank", "file", "dtype"])
def test_a_treemap_adds_up(asked, by):
    page = asked("/treemap", by=by)
    assert page["total"] == page["nbytes"][0] > 0 and len({len(page[k]) for k in ("parents", "names", "nbytes")}) == 1
    inside = [0] * len(page["parents"])
    for parent, nbytes in zip(page["parents"][1:], page["nbytes"][1:], strict=True):
        inside[parent] += nbytes
    assert all(i in (0, n) for i, n in zip(inside, page["nbytes"], strict=True))


def test_who_holds_a_region(asked):
    page = asked("", "model/h.0.w", region="2:4, 1")
    assert page["found"] == [2, 1, 2, 1] and page["problem"] is None
    assert [row["region"] for row in page["chunks"]["rows"]] == ["[0:4, 0:16]"]
    everything = asked("", "model/h.0.w", region=" [:, :] ")["chunks"]["total"]
    assert everything == asked("", "model/h.0.w")["chunks"]["total"] == 2
    for bad in ("9:10", "a", "1:2:3", "0,0,0", "5:5", "-1", "9" * 30, "²"):
        page = asked("", "model/h.0.w", region=bad)
        assert page["problem"] and page["chunks"]["total"] == 2, bad


def test_checksums_are_compared_a_part_at_a_time(asked, path, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "PART", 1000)
    found = asked("/files/0/checksums")
    assert found["problem"] is None and found["next"] == 1000
    while found["next"] is not None:
        found = asked("/files/0/checksums", start=found["next"])
    assert found["stop"] == found["nbytes"] > 1000
    assert asked("/files/0/checksums", start=1 << 53)["next"] is None
    asked("/files/99/checksums", status=404)


def test_damage_is_told_by_name(serve, tmp_path):
    index = write_checkpoint(tmp_path / "c", {"a": np.ones(1000)}, world=1, layouts=lambda path, array: None)
    shard = tmp_path / "c" / index.file_list[0].name
    data = bytearray(shard.read_bytes())
    data[-8] ^= 255
    shard.write_bytes(data)
    client = serve(tmp_path / "c")
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}"
    found = client.get(f"{at}/files/0/checksums").json()
    assert "a: " in found["problem"] and "checksum" in found["problem"] and found["next"] is None
    assert client.get(f"{at}/leaves/0/peek").status_code == 404
    shard.unlink()
    assert "no such file" in client.get(f"{at}/files/0/checksums").json()["problem"]


def test_bytes_of_each_rank(asked):
    page = asked("/balance")
    assert page["ranks"] == [0, 1, 2, 3] and page["mean"] == sum(page["nbytes"]) / 4


def test_a_strip_shows_bytes_that_are_no_leafs(asked):
    strip = asked("/files/0/strip")
    assert strip["groups"][0] == "header" and strip["groups"][-1] == "padding"
    assert all(group != len(strip["groups"]) - 1 for _, _, group in strip["segments"]), "treeckpt writes none"


def test_gaps_and_overlaps_of_a_map_are_counted():
    boxes = [[0, 0, 4, 4], [3, 3, 6, 6], [0, 4, 3, 6], [0, 0, 1, 1]]
    found, twice = _overlaps(boxes)
    assert found == [[3, 3, 4, 4], [0, 0, 1, 1]] and twice == 2


def test_a_reshard_is_the_plan_of_the_core(asked, path):
    page = asked("/reshard", mesh="2x2", names="dp,tp", place="model/*: Shard(0), Shard(1)")
    mesh = parse_mesh("2x2", "dp,tp")
    plan = plan_reshard(read_index(path), mesh, parse_rules("model/*: Shard(0), Shard(1)", mesh))
    assert (page["read"], page["held"], page["planned"]) == (plan.read, plan.held, 4)
    assert [(row["rank"], row["place"], row["read"]) for row in page["rows"]] == [
        (r.rank, f"dp {r.rank // 2}, tp {r.rank % 2}", r.read) for r in plan.ranks
    ]
    assert page["cells"] == [[at, n, b] for at, r in enumerate(plan.ranks) for n, b in r.files]


def test_a_reshard_begins_with_the_mesh_of_the_save(asked):
    page = asked("/reshard")
    assert (page["mesh"], page["names"], page["problem"]) == ("2x2", "dp,tp", None)
    for preset in page["presets"]:
        found = asked("/reshard", mesh=preset["mesh"], names=preset["names"], place=preset["place"])
        assert found["problem"] is None and found["planned"] > 0


@pytest.mark.parametrize(
    "query",
    [
        {"mesh": "0"},
        {"mesh": "2", "place": "<b>"},
        {"mesh": "9999999"},
        {"mesh": "2", "names": "a,b,c"},
        {"mesh": "2", "place": "*: Shard(0), R"},
    ],
)
def test_a_target_that_is_none_is_told_on_the_page(asked, query):
    assert asked("/reshard", **query)["problem"]
    page = asked.client.get(f"{asked.page}/reshard", params=query)
    assert page.status_code == 200 and "no preview" in page.text and "<b>" not in page.text


def test_no_question_is_answered_with_an_error_of_the_server(asked):
    odd = ["", "-1", "0", "1e9", "9" * 18, "'", "\u202e", "a/../b", "*" * 400, "0.0.0", ",", ":"]
    for value in odd:
        for rest, name in [
            ("/reshard", "mesh"), ("/reshard", "place"), ("/treemap", "node"), ("/folds", "node"), ("/leaves", "q"),
            ("/leaves", "larger"), ("/leaves/0/peek", "at"), ("/leaves/0/peek", "rows"), ("/leaves/0", "region"),
            ("/files/0/checksums", "start"), ("/snippet", "path"),
        ]:  # fmt: skip
            response = asked.client.get(f"/api/v1{asked.page}{rest}", params={name: value})
            assert response.status_code in (200, 404, 422), (rest, name, value)


def test_a_peek_and_checksums_follow_a_checkpoint_that_is_replaced_meanwhile(serve, tmp_path, monkeypatch):
    path = tmp_path / "step_00000001"
    tc.save(path, {"w": np.full(1000, 1.0)})
    client = serve(path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}"
    sizes, number, times = LocalStore.sizes, iter(range(2, 100)), [0]

    def replaced(self):
        if times[0]:
            times[0] -= 1
            tc.save(path, {"w": np.full(1000, float(next(number)))}, overwrite=True)
        return sizes(self)

    monkeypatch.setattr(LocalStore, "sizes", replaced)
    for ask, expected in (("leaves/0/peek", 2.0), ("leaves/0/peek", 3.0)):
        client.get(f"{at}/leaves")
        times[0] = 1
        answer = client.get(f"{at}/{ask}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["values"][0][0] == f"{expected:g}" and answer.json()["verified"]
    times[0] = 1
    assert client.get(f"{at}/files/0/checksums").json()["problem"] is None


def test_a_list_never_calls_a_checkpoint_corrupt_that_is_replaced_while_it_is_looked_at(tmp_path, monkeypatch):
    path = tmp_path / "step_00000001"
    tc.save(path, {"w": np.ones(1000)})
    entries, times = LocalFolder.entries, [1]

    def replaced(self):
        found = entries(self)
        if times[0]:
            times[0] -= 1
            tc.save(path, {"w": np.zeros(1000)}, overwrite=True)
        return found

    monkeypatch.setattr(LocalFolder, "entries", replaced)
    assert catalog.read_info(path).status == "complete"
