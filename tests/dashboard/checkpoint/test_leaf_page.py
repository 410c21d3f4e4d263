"""The page of a leaf: layout, chunks, holders, shard map and values."""

import numpy as np
import pytest

from tests.dashboard.helpers import number_of
from tests.helpers.samples import write_checkpoint
from treeckpt._core.sharding.placements import BoxLayout
from treeckpt._core.sharding.region import Region
from treeckpt_dashboard.checkpoint.chunks import overlaps_of


def test_a_leaf_names_mesh_and_placements(client, newest):
    number = number_of(client, newest, "model/layers.0.mlp.proj.weight")
    page = client.get(f"{newest}/leaves/{number}").json()
    assert (page["dtype"], page["shape"], page["kind"]) == ("float32", [96, 384], "array")
    assert [(m["name"], m["size"], m["placement"]) for m in page["mesh"]] == [
        ("dp", 2, "Shard(0)"), ("tp", 2, "Shard(1)"),
    ]  # fmt: skip
    assert [n["path"] for n in page["above"]] == ["model"]


@pytest.mark.parametrize("path", ["model/wte.weight", "model/layers.2.attention.qkv.weight", "model/mask"])
def test_chunks_point_at_the_very_bytes(client, newest, run, index, path):
    number = number_of(client, newest, path)
    page = client.get(f"{newest}/leaves/{number}/chunks").json()
    spec = index.entries[number].spec
    itemsize = {"float32": 4, "bfloat16": 2}[spec.dtype]
    whole = np.zeros(spec.shape, f"u{itemsize}")
    for row in page["rows"]:
        data = (run / "step_00000700" / row["name"]).read_bytes()[row["start"] : row["stop"]]
        box = tuple(slice(o, o + n) for o, n in zip(row["offset"], row["shape"], strict=True))
        whole[box] = np.frombuffer(data, f"u{itemsize}").reshape(row["shape"])
    from tests.helpers.samples import gpt_state

    model = gpt_state(seed=700)["model"][path.removeprefix("model/")]
    expected = model.bits if spec.dtype == "bfloat16" else model.view("u4")
    np.testing.assert_array_equal(whole, expected)


def test_holders_of_replicated_regions_are_named(client, newest):
    number = number_of(client, newest, "model/norm.weight")
    rows = client.get(f"{newest}/leaves/{number}/chunks").json()["rows"]
    assert [(row["region"], row["holders"]) for row in rows] == [("[0:48]", [0, 1]), ("[48:96]", [2, 3])]


def test_the_map_covers_the_plane_exactly(client, newest):
    number = number_of(client, newest, "model/layers.0.mlp.proj.weight")
    page = client.get(f"{newest}/leaves/{number}/map").json()
    cover = np.zeros((page["rows"], page["columns"]), int)
    for top, left, bottom, right, *_ in page["boxes"]:
        cover[top:bottom, left:right] += 1
    assert (cover == 1).all() and sorted(box[4] for box in page["boxes"]) == [0, 1, 2, 3]


def test_the_map_of_three_dimensions_takes_axes_and_a_position(client, newest):
    at = f"{newest}/leaves/{number_of(client, newest, 'model/mask')}/map"
    default = client.get(at).json()
    assert (default["y"], default["x"], default["rows"], default["columns"]) == (1, 2, 8, 6)
    assert [box[4] for box in default["boxes"]] == [0]
    assert [box[4] for box in client.get(at, params={"at": "3,0,0"}).json()["boxes"]] == [2]
    turned = client.get(at, params={"y": 0, "x": 1}).json()
    assert (turned["rows"], turned["columns"], len(turned["boxes"])) == (4, 8, 2)
    odd = client.get(at, params={"y": 9, "x": 9, "at": "99,99,99,99"}).json()
    assert (odd["y"], odd["x"], odd["at"]) == (1, 2, [0, 0, 0])


def test_arrays_of_single_ranks_are_stacked_on_the_map(client, newest):
    page = client.get(f"{newest}/leaves/{number_of(client, newest, 'rng/~rank*')}/map").json()
    assert page["dims"] == ["rank", "dim 0"] and page["rows"] == 4
    assert [(box[0], box[4]) for box in page["boxes"]] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_scalars_empty_arrays_and_explicit_pieces_have_pages(serve, tmp_path):
    def layouts(path, array):
        halves = ((0, Region((0, 0), (3, 4))), (1, Region((3, 0), (2, 4))))
        return BoxLayout(halves) if path == "pieces" else None

    tree = {"scalar": np.float32(3), "empty": np.zeros((0, 4)), "pieces": np.zeros((5, 4)), "none": None}
    tree["scalar"] = np.array(3, np.float32)
    write_checkpoint(tmp_path / "c", tree, layouts=layouts, world=2)
    client = serve(tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"checkpoints/{run['checkpoints'][0]['id']}/leaves"
    pages = [client.get(f"/api/v1/{at}/{n}").json() for n in range(4)]
    assert [p["dims"] for p in pages] == [["scalar"], [], ["dim 0", "dim 1"], []]
    assert pages[2]["layout"] == "explicit pieces" and pages[2]["chunks"]["total"] == 2
    assert pages[3]["values"] == [{"name": "", "type": "None", "text": "None"}]
    assert all(client.get(f"/{at}/{n}").status_code == 200 for n in range(4))
    assert len(client.get(f"/api/v1/{at}/0/map").json()["boxes"]) == 1
    assert client.get(f"/api/v1/{at}/1/map").json()["boxes"] == []


def test_values_are_shown_with_their_types(client, newest):
    at = f"{newest}/leaves/{number_of(client, newest, 'scheduler/warmup')}"
    assert client.get(at).json()["values"] == [{"name": "", "type": "float", "text": "inf"}]
    own = client.get(f"{newest}/leaves/{number_of(client, newest, 'loader/~rank*/position')}").json()
    assert [(v["name"], v["text"]) for v in own["values"]] == [(f"rank {r}", "4096") for r in range(4)]


def test_who_holds_a_region(asked):
    page = asked("", "model/h.0.w", region="2:4, 1")
    assert page["found"] == [2, 1, 2, 1] and page["problem"] is None
    assert [row["region"] for row in page["chunks"]["rows"]] == ["[0:4, 0:16]"]
    everything = asked("", "model/h.0.w", region=" [:, :] ")["chunks"]["total"]
    assert everything == asked("", "model/h.0.w")["chunks"]["total"] == 2
    for bad in ("9:10", "a", "1:2:3", "0,0,0", "5:5", "-1", "9" * 30, "²"):
        page = asked("", "model/h.0.w", region=bad)
        assert page["problem"] and page["chunks"]["total"] == 2, bad


def test_gaps_and_overlaps_of_a_map_are_counted():
    boxes = [[0, 0, 4, 4], [3, 3, 6, 6], [0, 4, 3, 6], [0, 0, 1, 1]]
    found, twice = overlaps_of(boxes)
    assert found == [[3, 3, 4, 4], [0, 0, 1, 1]] and twice == 2
