"""Code that loads a part of a checkpoint runs as it is: a block, a region, a rank of a layout, whatever names say."""

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.layout_cases import on_ranks
from treeckpt_dashboard.checkpoint import tree as page_of_tree

WORLD = 3
HOSTILE = "a/b*'\n\u202e[0]"


def tree_of(rank):
    flat, ids = torch.arange(60.0), np.arange(rank, 90, WORLD)
    return {
        "model": {f"layers.{n}.{k}": torch.full((4, 5), 10.0 * n + len(k)) for n in range(4) for k in ("w", "bias")},
        HOSTILE: np.arange(24, dtype=np.int32).reshape(6, 4),
        3: [torch.ones(2), (torch.arange(40).view(10, 4), 7)],
        "zero": tc.Sharded(flat[rank * 20 : rank * 20 + 20].clone(), (12, 5), rank * 20),
        "rng": tc.PerRank({"state": np.full(4, rank), "name": f"r{rank}"}),
        "emb": tc.KeyedTable(ids, {"w": ids[:, None] * 1.0}, owned=tc.KeyedTable.modulo(rank, WORLD)),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "step_00000001"
    on_ranks(WORLD, lambda comm: tc.save(path, tree_of(comm.rank), comm=comm))
    return path


@pytest.fixture
def run(serve, saved):
    """Returns what the code of an address has made."""
    client = serve(saved)
    [found] = client.get("/api/v1/runs").json()["runs"]
    at = f"/api/v1/checkpoints/{found['checkpoints'][0]['id']}"
    numbers = {row["path"]: row["leaf"] for row in client.get(f"{at}/leaves").json()["rows"]}

    def of(address, leaf=None, status=200, **query):
        place = f"{at}/leaves/{numbers[leaf]}" if leaf else at
        answer = client.get(f"{place}/{address}", params=query)
        assert answer.status_code == status, answer.text
        made = {}
        if status == 200:
            code = answer.json()["snippet"]
            assert code.isascii() and "treeckpt._" not in code
            exec(code, made)
        return made

    of.get = lambda address, **query: client.get(f"{at}/{address}", params=query).json()
    return of


def test_a_region_is_loaded_alone_whatever_the_name_of_its_array(run):
    path = tc.path_text((HOSTILE,))
    found = run("snippet", path, region="1:3, 2")["array"]
    assert found.tolist() == [[6], [10]]
    assert run("snippet", "3/1/0", region="4:9")["array"].equal(torch.arange(40).view(10, 4)[4:9])
    assert run("snippet", "emb/slots/w", region="30:33")["array"].shape == (3, 1)
    assert run("snippet", "zero", region="5:7")["array"].flatten().tolist() == [*range(25, 35)]
    assert run("snippet", "rng/~rank*/state", which=2)["array"].tolist() == [2] * 4
    assert run("snippet", "rng/~rank*/state", which=1, region="1:3")["array"].tolist() == [1, 1]
    run("snippet", path, region="9:1", status=404)


def test_a_folded_block_is_loaded_alone(run):
    node = next(row["node"] for row in run.get("tree")["rows"] if row["key"] == "model")
    [fold] = run.get("folds", node=node)["folds"]
    length = (fold["stop"] - fold["start"]) // fold["blocks"]
    tree = run("snippet", node=node, start=fold["start"] + 2 * length, stop=fold["start"] + 3 * length)["tree"]
    loaded = {name: array for name, array in tree["model"].items() if array is not ...}
    assert loaded.keys() == {"layers.2.w", "layers.2.bias"} and (loaded["layers.2.bias"] == 24).all()
    run("snippet", node=node, start=0, stop=5000, status=404)


def test_what_a_search_finds_is_loaded_alone(run, monkeypatch):
    tree = run("found/snippet", q="model layers.2.")["tree"]
    loaded = {name: array for name, array in tree["model"].items() if array is not ...}
    assert loaded.keys() == {"layers.2.w", "layers.2.bias"} and (loaded["layers.2.w"] == 21).all()
    assert tree[3] == [..., (..., ...)]
    named = run("found/snippet", q=HOSTILE[2:5], dtype="int32", larger=9)["tree"]
    assert named[HOSTILE].shape == (6, 4), "whatever the name of the leaf"
    run("found/snippet", q="nothing", status=404)
    monkeypatch.setattr(page_of_tree, "MAX_NAMED_LEAVES", 3)
    run("found/snippet", q="model", status=404)


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_of_the_save_gets_what_it_had(run, rank):
    own, tree = tree_of(rank), run("reshard/snippet", rank=rank)["tree"]
    assert (tree["zero"].flatten() == own["zero"].local).all() and tree["rng"].value["name"] == f"r{rank}"
    assert (tree["rng"].value["state"] == rank).all() and tree[3][1][1] == 7
    assert sorted(tree["emb"]["ids"].tolist()) == own["emb"].ids.tolist()
    assert (tree["emb"]["slots"]["w"][:, 0] == tree["emb"]["ids"]).all()
    assert (tree[HOSTILE] == own[HOSTILE]).all() and tree["model"]["layers.3.w"].equal(own["model"]["layers.3.w"])


def test_a_rank_of_a_mesh_gets_its_regions(run):
    query = {"mesh": "2x2", "place": "3/*: Shard(0), Shard(1); zero: Replicate, Shard(0)"}
    tree = run("reshard/snippet", rank=3, **query)["tree"]
    assert tree[3][1][0].equal(torch.arange(40).view(10, 4)[5:, 2:]) and tree[3][0].shape == (2,)
    assert tree["zero"].equal(torch.arange(60.0).view(12, 5)[6:]) and tree.keys() == {3, "zero"}
    run("reshard/snippet", mesh="0", status=404)
