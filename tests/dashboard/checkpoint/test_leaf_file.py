"""Arrays, tables and sidecar files are taken away as files that other programs open."""

import csv
import io
import json

import numpy as np
import pytest

import treeckpt as tc
from tests.dashboard.helpers import number_of
from tests.helpers.samples import FILES
from treeckpt_dashboard.checkpoint import files, leaf, values
from treeckpt_dashboard.pages import answers

torch = pytest.importorskip("torch")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture
def taken(asked, tmp_path):
    """Downloads a leaf; returns what numpy, or safetensors, reads from the file."""

    def take(leaf, form, status=200, load=safetensors_numpy.load, **params):
        rows = asked("/leaves")["rows"]
        number = next(row["leaf"] for row in rows if row["path"].split("/~")[0] == leaf)
        got = asked.client.get(f"/api/v1{asked.page}/leaves/{number}/file", params={"form": form, **params})
        assert got.status_code == status, got.text
        if status != 200:
            return got.json()["error"]
        assert got.headers["content-disposition"].startswith("attachment; filename=")
        assert got.headers["x-checksums"] == "match"
        if form == "npy":
            return np.load(io.BytesIO(got.content), allow_pickle=False)
        return load(got.content)

    return take


def test_an_npy_file_has_the_array_of_a_leaf(taken, tree):
    for name in ("model/h.1.w", "odd", "deep", "empty"):
        expected = tree["model"]["h.1.w"] if name.startswith("model") else tree[name]
        found = taken(name, "npy")
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_a_safetensors_file_has_the_array_under_its_path(taken, tree):
    np.testing.assert_array_equal(taken("model/h.1.w", "safetensors")["model/h.1.w"], tree["model"]["h.1.w"])
    half = taken("half", "safetensors", load=safetensors_torch.load)["half"]
    assert half.dtype == torch.bfloat16
    np.testing.assert_array_equal(half.view(torch.uint16).numpy(), tree["half"].bits)


def test_a_region_is_taken_alone(taken, tree):
    np.testing.assert_array_equal(taken("deep", "npy", region="1:3, :, 2"), tree["deep"][1:3, :, 2:3])
    assert "nothing of a dimension" in taken("deep", "npy", 404, region="9:12")


def test_the_array_of_any_rank_is_taken(taken, tree):
    np.testing.assert_array_equal(taken("rng", "npy", which=2), tree["rng"].value)


def test_a_leaf_above_the_limit_is_refused_with_its_size_and_a_region_of_it_is_not(taken, monkeypatch, tree):
    monkeypatch.setattr(values, "MAX_NBYTES", 256)
    error = taken("model/h.1.w", "npy", 404)
    assert "512 B" in error and "256 B" in error and "region" in error
    np.testing.assert_array_equal(taken("model/h.1.w", "npy", region="0:2"), tree["model"]["h.1.w"][:2])


def test_a_format_without_the_dtype_is_not_offered(taken, asked):
    assert "take .safetensors" in taken("half", "npy", 404)
    assert asked("", leaf="half")["forms"] == ["safetensors"] and asked("", leaf="n")["forms"] == []


def test_a_damaged_leaf_is_no_file(serve, tmp_path):
    tc.save(tmp_path / "c", {"a": np.ones(1000)})
    [shard] = tmp_path.glob("c/shard-*")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    client = serve(tmp_path / "c")
    [run] = client.get("/api/v1/runs").json()["runs"]
    got = client.get(f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}/leaves/0/file")
    assert got.status_code == 404 and "checksum" in got.json()["error"]


def test_the_page_of_a_leaf_offers_the_files_of_the_region_it_shows(client, newest):
    number = number_of(client, newest, "model/wte.weight")
    page = client.get(f"{newest.removeprefix('/api/v1')}/leaves/{number}?region=10:20").text
    assert f"leaves/{number}/file?form=npy&amp;region=10%3A20" in page and "form=safetensors" in page


def test_the_page_of_a_leaf_above_the_limit_says_how_to_take_a_part_of_it(client, newest, monkeypatch):
    monkeypatch.setattr(leaf, "MAX_NBYTES", 8000)
    page = f"{newest.removeprefix('/api/v1')}/leaves/{number_of(client, newest, 'model/wte.weight')}"
    html = client.get(page).text
    assert "larger than 8 kB" in html and "treeckpt.load" in html and "form=npy" not in html
    assert "form=npy" in client.get(f"{page}?region=10:20").text


# tables -------------------------------------------------------------------------------------------------------------


def table(client, path, **params):
    got = client.get(f"{path}/table.csv", params=params)
    assert got.status_code == 200 and got.headers["content-type"].startswith("text/csv"), got.text
    return list(csv.DictReader(io.StringIO(got.text)))


def test_a_table_has_all_rows_of_all_pages(client, newest):
    leaves = int(client.get(newest).json()["checkpoint"]["leaves"])
    rows = table(client, f"{newest}/leaves")
    assert leaves > 100 and [int(row["leaf"]) for row in rows] == list(range(leaves))
    assert rows[0]["path"] == client.get(f"{newest}/leaves").json()["rows"][0]["path"]
    assert len(table(client, f"{newest}/leaves", q="qkv")) < leaves


def test_the_table_of_a_run_has_numbers_as_they_are(client, ids):
    [run] = client.get("/api/v1/runs").json()["runs"]
    rows = {row["name"]: row for row in table(client, f"/api/v1/runs/{run['id']}", sort="oldest")}
    assert rows.keys() == ids.keys()
    assert int(rows["step_00000700"]["nbytes"]) == next(
        c["nbytes"] for c in run["checkpoints"] if c["name"] == "step_00000700"
    )


def test_columns_over_the_steps_of_a_run_are_a_table(client):
    [run] = client.get("/api/v1/runs").json()["runs"]
    rows = table(client, f"/api/v1/runs/{run['id']}/trends")
    page = client.get(f"/api/v1/runs/{run['id']}/trends").json()
    assert [int(row["step"]) for row in rows] == page["step"]
    assert [float(row["seconds"]) for row in rows] == page["seconds"] and "hosts" not in rows[0]


def test_the_table_of_all_runs_has_a_row_for_each(serve, run, path):
    client = serve(run, path)
    assert {row["name"] for row in table(client, "/api/v1/runs")} == {"gpt", path.name}
    assert "table.csv" in client.get("/").text


def test_each_page_with_a_table_links_to_it(client, ids):
    at = f"/checkpoints/{ids['step_00000700']}"
    for path in (f"{at}/files", f"{at}/files/0", f"{at}/leaves/0", f"{at}/timing", f"{at}/reshard?mesh=2"):
        page = client.get(path).text
        assert "table.csv" in page and f"api/v1{at}" in page, path
        place, _, query = path.partition("?")
        assert table(client, f"/api/v1{place}", **dict([query.split("=")] if query else [])), path


def test_a_text_that_a_spreadsheet_would_run_is_quoted(serve, tmp_path):
    tc.save(tmp_path / "c", {"=cmd|' /C calc'!A0": np.ones(2), "-x": 3, 'a,b\n"c': 4})
    client = serve(tmp_path / "c")
    [run] = client.get("/api/v1/runs").json()["runs"]
    rows = table(client, f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}/leaves")
    assert {row["path"] for row in rows} == {"'=cmd|' ~1C calc'!A0", "'-x", 'a,b\n"c'}


def test_a_table_that_is_too_long_is_an_error_and_not_cut(client, newest, monkeypatch):
    monkeypatch.setattr(answers, "MAX_ROWS", 150)
    got = client.get(f"{newest}/leaves/table.csv")
    assert got.status_code == 422 and "200 rows" in got.json()["error"]


# sidecar files ------------------------------------------------------------------------------------------------------


def test_a_sidecar_file_is_shown_and_downloaded(client, newest):
    page = newest.removeprefix("/api/v1")
    assert "config.json" in client.get(f"{page}/files").text
    found = {}
    for number in range(len(FILES)):
        about = client.get(f"{newest}/sidecars/{number}").json()
        got = client.get(f"{newest}/sidecars/{number}/content")
        found[about["file"]["name"]] = got.content
        assert got.headers["content-type"] == "application/octet-stream"
        assert got.headers["content-disposition"] == f'attachment; filename="{about["file"]["name"]}"'
        assert (about["text"] is None) == (about["file"]["name"] == "tokenizer.model")
    assert found == FILES
    assert json.loads(client.get(f"{newest}/sidecars/0").json()["text"]) == {"width": 32}
    assert "&#34;width&#34;: 32" in client.get(f"{page}/sidecars/0").text
    assert "This is no text." in client.get(f"{page}/sidecars/1").text
    assert client.get(f"{newest}/sidecars/2").status_code == 404


def test_the_text_of_a_sidecar_file_is_hostile_text_and_cut(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_SHOWN", 41)
    text = "<script>alert(1)</script>\u202e" + "ü" * 100
    tc.save(tmp_path / "c", {"a": 1}, files={"x.txt": text.encode()})
    client = serve(tmp_path / "c")
    [run] = client.get("/api/v1/runs").json()["runs"]
    page = client.get(f"/checkpoints/{run['checkpoints'][0]['id']}/sidecars/0").text
    assert "<script>alert" not in page and "\u202e" not in page and "\\u202e" in page
    assert page.count("ü") == 6 and "The first 41 B are shown." in page


def test_a_damaged_sidecar_file_is_not_sent(serve, tmp_path):
    tc.save(tmp_path / "c", {"a": 1}, files={"x.txt": b"abc"})
    [stored] = tmp_path.glob("c/file.*")
    stored.write_bytes(b"abd")
    client = serve(tmp_path / "c")
    [run] = client.get("/api/v1/runs").json()["runs"]
    got = client.get(f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}/sidecars/0/content")
    assert got.status_code == 404 and "checksum" in got.json()["error"]
