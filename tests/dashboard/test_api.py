"""Does every page, and its JSON, say what is in the checkpoint?"""

import math

import numpy as np
import pytest
from fastapi.routing import APIRoute

from tests.samples import write_checkpoint, write_run
from treeckpt.core.sharding.placements import BoxLayout
from treeckpt.core.sharding.region import Region
from treeckpt.runs.catalog import read_index


@pytest.fixture(scope="session")
def newest(ids):
    return f"/api/v1/checkpoints/{ids['step_00000700']}"


@pytest.fixture(scope="session")
def index(run):
    return read_index(run / "step_00000700")


def number_of(client, newest, path):
    found = client.get(f"{newest}/search", params={"q": path}).json()["rows"]
    return next(row["leaf"] for row in found if row["path"] == path)


def test_runs_give_every_checkpoint_newest_first(client):
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert [(c["step"], c["status"]) for c in run["checkpoints"]] == [
        (700, "complete"), (600, "corrupt"), (500, "corrupt"), (400, "partial"), (300, "partial"), (200, "complete"),
        (100, "complete"), (None, "foreign"), (None, "foreign"),
    ]  # fmt: skip
    assert (run["complete"], run["newest_step"], run["total"]) == (3, 700, 9)
    first = run["checkpoints"][0]
    assert first["world"] == 4 and first["seconds"] > 0
    assert first["rate"] == pytest.approx(first["nbytes"] / first["seconds"])


def test_a_run_is_paged_at_100(serve, tmp_path):
    for step in range(1, 131):
        (tmp_path / f"step_{step:08d}").mkdir()
    client = serve(tmp_path)
    [first] = client.get("/api/v1/runs").json()["runs"]
    assert (len(first["checkpoints"]), first["next"], first["total"]) == (100, 100, 130)
    rest = client.get(f"/api/v1/runs/{first['id']}", params={"start": 100}).json()["run"]
    assert [c["step"] for c in rest["checkpoints"]] == list(range(30, 0, -1)) and rest["next"] is None
    assert client.get(f"/runs/{first['id']}?start=100").status_code == 200


def test_several_runs_and_a_single_checkpoint(serve, tmp_path):
    a, b = write_run(tmp_path / "a", steps=(1,)), write_run(tmp_path / "b", steps=(2,))
    found = serve(a, b / "step_00000002", a).get("/api/v1/runs").json()["runs"]
    assert [(r["name"], [c["step"] for c in r["checkpoints"]]) for r in found] == [("a", [1]), ("step_00000002", [2])]


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
    from tests.samples import gpt_state

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


def test_files_add_up(client, newest, index):
    page = client.get(f"{newest}/files").json()
    assert sum(f["nbytes"] for f in page["rows"]) == page["nbytes"] == index.nbytes
    assert page["imbalance"] == pytest.approx(max(f["nbytes"] for f in page["rows"]) / page["mean"])


def test_extents_and_strip_fill_a_shard_without_holes(client, newest):
    rows, start = [], 0
    while start is not None:
        page = client.get(f"{newest}/files/1", params={"start": start}).json()
        rows, start = rows + page["rows"], page["next"]
    assert len(rows) == page["total"]
    ends = [page["file"]["header"], *(row["stop"] for row in rows)]
    assert [row["start"] for row in rows] == ends[:-1]
    assert ends[-1] == page["file"]["header"] + page["file"]["nbytes"]
    strip = client.get(f"{newest}/files/1/strip").json()
    assert strip["segments"][0] == [0, page["file"]["header"], 0] and strip["segments"][-1][1] == strip["nbytes"]
    assert all(a[1] == b[0] for a, b in zip(strip["segments"], strip["segments"][1:], strict=False))


def test_timing_names_the_slow_rank_and_nests_spans(client, newest):
    page = client.get(f"{newest}/timing").json()
    assert (page["slowest"], page["world"], page["problem"]) == (2, 4, None)
    assert page["slowdown"] > 3
    write = next(p for p in page["phases"] if p["name"] == "write")
    assert write["slowest"] == 2 and write["nbytes"] == sum(r["nbytes"] for r in page["ranks"])
    assert {s["name"]: s["depth"] for s in page["spans"]}["hash"] == 2
    assert min(s["start"] for s in page["spans"]) == 0


def test_a_failed_save_still_has_its_timing(client, ids):
    page = client.get(f"/api/v1/checkpoints/{ids['step_00000400']}/timing").json()
    assert "No space left" in page["error"] and page["spans"]


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


def test_a_new_save_shows_within_a_second(tmp_path):
    from treeckpt_dashboard.library import Library
    from treeckpt_dashboard.runs import runs_page

    now = [0.0]
    library = Library([tmp_path], clock=lambda: now[0])
    assert runs_page(library).runs[0].total == 0
    write_run(tmp_path, steps=(1,))
    assert runs_page(library).runs[0].total == 0
    now[0] += 1.1
    assert runs_page(library).runs[0].total == 1


def test_every_page_answers_as_html(client, ids):
    at = f"/checkpoints/{ids['step_00000700']}"
    for path in (
        "/",
        at,
        f"{at}?node=0",
        f"{at}?q=qkv",
        f"{at}/leaves/0",
        f"{at}/files",
        f"{at}/files/0",
        f"{at}/timing",
    ):
        page = client.get(path)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html"), path
        assert "<script>" not in page.text and "style=" not in page.text and "http://" not in page.text


def test_addresses_are_relative_at_every_depth_and_work_under_a_root_path(run, serve):
    import re
    from urllib.parse import urljoin

    client = serve(run, root_path="/proxy/8265")
    [found] = client.get("/api/v1/runs").json()["runs"]
    at = f"checkpoints/{found['checkpoints'][0]['id']}"
    for path in ("", f"runs/{found['id']}", at, f"{at}/leaves/3", f"{at}/files/0"):
        for prefix in ("/", "/proxy/8265/"):  # a proxy may take its prefix off, or not
            page = client.get(prefix + path)
            assert page.status_code == 200
            for link in re.findall(r'(?:href|src)="([^"#?]+)', page.text):
                assert not link.startswith("/"), link
                target = urljoin(f"http://host{prefix}{path}", link)
                assert target.startswith(f"http://host{prefix}"), (prefix, path, link)
                assert client.get(target.removeprefix("http://host")).status_code == 200, (prefix, path, link)


def test_the_schema_lists_every_api_route_and_nothing_else(client):
    schema = client.get("/api/v1/openapi.json").json()
    assert all(path.startswith("/api/v1/") for path in schema["paths"])
    shown = {path.removeprefix("/api/v1") for path in schema["paths"]}
    drawn = {route.path for route in client.app.routes if isinstance(route, APIRoute) and not route.include_in_schema}
    assert drawn - {"/", "/metrics"} <= shown, "a page without its JSON"
    assert all(set(methods) == {"get"} for methods in schema["paths"].values())
    assert client.get("/docs").status_code == 404 and client.get("/redoc").status_code == 404
