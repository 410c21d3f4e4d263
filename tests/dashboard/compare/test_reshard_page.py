"""The preview of a load into another mesh."""

import json

import numpy as np
import pytest

from tests.helpers.large import large_index
from tests.helpers.samples import write_checkpoint
from treeckpt._cli.main import main
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import Mesh, MeshLayout, Replicate, Shard
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.store import MemoryStore
from treeckpt._loading import reshard_plan
from treeckpt._loading.reshard_plan import parse_target, plan_reshard
from treeckpt.errors import LayoutError


def test_a_reshard_is_the_plan_of_the_core(asked, path):
    page = asked("/reshard", mesh="2x2", names="dp,tp", place="model/*: Shard(0), Shard(1)")
    target = parse_target("2x2", "dp,tp", "model/*: Shard(0), Shard(1)")
    plan = plan_reshard(Checkpoint(LocalStore(path)), target)
    assert (page["read"], page["held"], page["planned"]) == (plan.read, plan.held, 4)
    assert [(row["rank"], row["place"], row["read"]) for row in page["rows"]] == [
        (r.rank, f"dp {r.rank // 2}, tp {r.rank % 2}", r.read) for r in plan.ranks
    ]
    assert page["cells"] == [[at, n, b] for at, r in enumerate(plan.ranks) for n, b in r.files]


def test_a_reshard_begins_with_the_layout_of_the_save_and_page_json_and_command_agree(asked, path, capsys):
    page = asked("/reshard")
    assert (page["mesh"], page["place"], page["problem"], page["planned"]) == ("saved", "*", None, 4)
    for preset in page["presets"]:
        found = asked("/reshard", mesh=preset["mesh"], names=preset["names"], place=preset["place"])
        assert found["problem"] is None and found["planned"] > 0
        command = ["show", str(path), "--json", "--mesh", preset["mesh"], "--place", preset["place"]]
        assert main([*command, "--names", preset["names"]]) == 0
        printed = json.loads(capsys.readouterr().out)
        shown = [{key: row[key] for key in ("rank", "nbytes", "read", "reads", "files")} for row in found["rows"]]
        assert printed["ranks"] == shown and printed["amplification"] == found["amplification"]
    assert main(["show", str(path), "--mesh", "saved"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rank", "0", f"{page['rows'][0]['reads']}"] in [[*line[:2], line[-2]] for line in lines if len(line) > 4]


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


HSDP = Mesh((2, 4), encode_runs(range(8)), ("dp_replicate", "dp_shard"))


def test_the_presets_are_of_the_real_mesh_and_tensor_parallel_is_rules_by_name(serve, tmp_path):
    names = ("q_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight", "norm.weight")
    tree = {"model": {f"layers.0.{n}": np.zeros((64,) if "norm" in n else (64, 64), np.float32) for n in names}}
    layouts = lambda path, array: MeshLayout(HSDP, (Replicate(), Shard(0)))  # noqa: E731
    write_checkpoint(tmp_path / "c", tree, world=8, layouts=layouts)
    client = serve(tmp_path / "c")
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}/reshard"
    page = client.get(at).json()
    assert page["mesh"] == "saved" and page["planned"] == 8 and page["amplification"] < 1.5
    presets = {preset["text"]: preset for preset in page["presets"]}
    hsdp = presets["HSDP, 2 replicas of 8 shards"]
    assert (hsdp["mesh"], hsdp["place"]) == ("2x8", "*: Replicate, Shard(0)")
    rules = presets["tensor parallel over 2"]["place"].split("\n")
    assert rules == [
        "*o_proj*: Shard(1)", "*down_proj*: Shard(1)", "*q_proj*: Shard(0)", "*up_proj*: Shard(0)", "*: Replicate",
    ]  # fmt: skip
    thirds = {"mesh": "3", "place": "*: Shard(0)"}
    assert client.get(at, params=thirds).json()["amplification"] > 1.1
    why = "A load reads as much: whole blocks of 256 KiB"
    assert why in client.get(at.removeprefix("/api/v1"), params=thirds).text
    assert why not in client.get(at.removeprefix("/api/v1"), params={"mesh": "1", "place": "*: Replicate"}).text
    typed = client.get(at, params={"mesh": "2x2"}).json()
    assert typed["place"] == "*: Replicate, Shard(0)", "as it was saved"


def test_too_many_arrays_are_refused_without_reading_all_of_them(monkeypatch):
    index, read = large_index(20_000), []
    leaves = list(index.entries)
    monkeypatch.setattr(reshard_plan, "wanted_arrays", lambda *_: read.append(1))
    with pytest.raises(LayoutError, match="Narrow the rules"):
        plan_reshard(Checkpoint(MemoryStore(), index), parse_target("2", "dp", "*: Shard(0)"), chunks=len(leaves) // 2)
    assert read == []
