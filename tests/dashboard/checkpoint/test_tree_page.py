"""The tree of a checkpoint: its nodes, searches, repeated blocks, snippets and treemap."""

import ast
import fnmatch
import math

import numpy as np
import pytest

from tests.helpers.samples import write_checkpoint, write_run
from treeckpt._loading.run_load import inspect as read_index


def test_a_checkpoint_says_what_it_holds(client, newest, index):
    page = client.get(newest).json()
    assert page["checkpoint"]["leaves"] == len(index.leaves) and page["files"] == 4
    assert {f["name"]: (f["type"], f["text"]) for f in page["metadata"]} == {
        "note": ("str", "'warm-up done'"), "seed": ("int", "7"),
    }  # fmt: skip
    assert [row["key"] for row in page["tree"]["rows"]] == ["model", "optimizer", "scheduler", "loader", "rng"]
    assert math.isclose(sum(row["share"] for row in page["tree"]["rows"]), 1)
    assert page["groups"][0]["name"] == "optimizer"


def test_the_tree_opens_node_by_node_down_to_every_leaf(client, newest, index):
    found, todo = {}, [""]
    while todo:
        node, start = todo.pop(), 0
        while start is not None:
            page = client.get(f"{newest}/tree", params={"node": node, "start": start}).json()
            assert len(page["rows"]) <= 100
            for row in page["rows"]:
                if row["leaf"] is None:
                    todo.append(row["node"])
                else:
                    found[row["leaf"]] = row["path"]
            start = page["next"]
    assert found == {leaf.number: leaf.path for leaf in index.entries}


def test_wide_nodes_are_paged(serve, tmp_path):
    write_checkpoint(tmp_path / "c", {f"k{n}": n for n in range(250)})
    client = serve(tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    at, sizes, start = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}/tree", [], 0
    while start is not None:
        page = client.get(at, params={"start": start}).json()
        sizes.append(len(page["rows"]))
        start = page["next"]
    assert sizes == [100, 100, 50]


def test_search_finds_paths_by_words(client, newest):
    rows = client.get(f"{newest}/search", params={"q": "LAYERS.1 qkv"}).json()["rows"]
    assert [row["path"] for row in rows] == [f"model/layers.1.attention.qkv.{n}" for n in ("weight", "bias")]
    assert client.get(f"{newest}/search", params={"q": "no such"}).json()["rows"] == []


@pytest.mark.parametrize("name", ["step_00000300", "step_00000400", "step_00000500", "step_00000600", "latest", "logs"])
def test_bad_directories_have_pages_that_say_what_they_are(client, ids, name):
    page = client.get(f"/checkpoints/{ids[name]}")
    row = client.get(f"/api/v1/checkpoints/{ids[name]}").json()["checkpoint"]
    assert page.status_code == 200 and row["status"] in page.text
    assert client.get(f"/checkpoints/{ids[name]}/timing").status_code == 200
    readable = name == "step_00000600"
    assert client.get(f"/checkpoints/{ids[name]}/files").status_code == (200 if readable else 404)
    assert client.get(f"/api/v1/checkpoints/{ids[name]}/tree").status_code == (200 if readable else 404)


def test_a_checkpoint_that_goes_away_is_a_404(serve, tmp_path):
    import shutil

    write_run(tmp_path, steps=(1, 2))
    client = serve(tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    gone = run["checkpoints"][1]["id"]
    assert client.get(f"/checkpoints/{gone}").status_code == 200
    shutil.rmtree(tmp_path / "step_00000001")
    for page in ("", "/files", "/timing", "/leaves/0"):
        assert client.get(f"/checkpoints/{gone}{page}").status_code == 404


def test_a_snippet_selects_the_leaf_and_no_other_whatever_its_name(asked, path):
    for name in ("it's [x]*", "model/h.1.w"):
        text = asked("/snippet", path=name)["snippet"]
        call = ast.parse(text).body[-1].value
        [select] = ast.literal_eval(call.keywords[0].value)
        assert ast.literal_eval(call.args[0]) == str(path) and ast.unparse(call.func) == "tc.load"
        assert [leaf.path for leaf in read_index(path).entries if fnmatch.fnmatchcase(leaf.path, select)] == [name]
    assert asked("/snippet", path="\u202e\x00'\n")["snippet"].isascii()


def test_a_snippet_of_what_several_ranks_saved_loads_in_one_process(asked, tree):
    names = {}
    exec(asked("/snippet")["snippet"], names)
    assert names["tree"]["n"] == 7 and np.array_equal(names["tree"]["rng"].value, tree["rng"].value)


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
