"""Checkpoints of other programs are browsed: their names, shapes, dtypes, sizes and values."""

import io
import os
import pickle
import shutil
import warnings

import numpy as np
import pytest

from tests.dashboard.helpers import page as run_page
from treeckpt_dashboard.store.library import Library

torch = pytest.importorskip("torch")
safetensors_numpy = pytest.importorskip("safetensors.numpy")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory as Hugging Face has it, one of torch.distributed.checkpoint, and a file of torch.save."""
    import torch.distributed.checkpoint as dcp

    at = tmp_path_factory.mktemp("models")
    (at / "hub").mkdir()
    arrays = {f"model.layers.{n}.weight": np.ones((8, 4), np.float16) for n in range(3)}
    safetensors_numpy.save_file(arrays, at / "hub" / "model.safetensors", {"note": "<b>from elsewhere"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.ones(30, 4, dtype=torch.bfloat16)}}, checkpoint_id=str(at / "dcp"))
    torch.save({"model": {"w": torch.ones(5, 4), "t": torch.ones(4, 5).t()}, "step": 7}, at / "saved.pt")
    return at


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of files of torch.save, and of others that are none."""
    at = tmp_path_factory.mktemp("saved")
    for epoch in (1, 2):
        torch.save({"w": torch.full((3,), epoch)}, at / f"epoch_{epoch}.pt")
    (at / "tokens.bin").write_bytes(b"no checkpoint")
    (at / "logs").mkdir()
    (at / "newest.pt").symlink_to(at / "epoch_2.pt")
    return at


def leaves_of(client):
    found = run_page(client).json()["run"]["checkpoints"]
    return {
        c["name"]: {
            row["path"]: row["text"] for row in client.get(f"/api/v1/checkpoints/{c['id']}/leaves").json()["rows"]
        }
        for c in found
        if c["format"]
    }


def test_the_trees_of_a_folder_of_models_have_names_shapes_and_dtypes(serve, models):
    leaves = leaves_of(serve(models))
    assert leaves.pop("saved.pt")["model/w"] == "array float32 [5, 4]"
    assert leaves == {
        "hub": {f"model.layers.{n}.weight": "array float16 [8, 4]" for n in range(3)},
        "dcp": {"model/w": "array bfloat16 [30, 4]"},
    }


def test_the_files_of_a_folder_of_torch_are_listed_and_a_new_one_is_found(serve, saved):
    client = serve(saved)
    assert leaves_of(client) == {f"epoch_{n}.pt": {"w": "array int64 [3]"} for n in (1, 2)}
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert (run["others"], run["total"], run["complete"]) == (2, 3, 0)
    now = [0.0]
    library = Library([saved], clock=lambda: now[0])
    before = dict(library.checkpoints(library.runs[0], wait=300))
    torch.save({"b": torch.zeros(2)}, saved / "last.ckpt")
    now[0] += 60
    added = [info for i, info in library.checkpoints(library.runs[0], wait=300) if i not in before]
    assert [(info.name, info.error) for info in added] == [("last.ckpt", "a file of torch.save, not of treeckpt")]
    (saved / "last.ckpt").unlink()
    library.close()


def test_the_list_of_runs_links_to_folders_of_other_formats_and_does_not_call_them_empty(serve, models, saved):
    client = serve(models, saved, models / "hub")
    runs = client.get("/api/v1/runs").json()["runs"]
    for run in runs:
        client.app.state.library.watches[run["id"]].refresh(wait=300)
    html = client.get("/").text
    assert html.count("other format</span>") == 3 and "no checkpoint" not in html
    for run, text in zip(runs, ("3 foreign", "2 foreign", "1 foreign"), strict=True):
        assert f'href="./runs/{run["id"]}">{text}</a>' in html


def test_a_hub_directory_or_a_file_of_torch_is_given_by_itself(serve, models):
    assert leaves_of(serve(models / "hub")).keys() == {"hub"}
    [(name, leaves)] = leaves_of(serve(models / "saved.pt")).items()
    assert name == "saved.pt" and leaves["model/w"] == "array float32 [5, 4]" and leaves["step"].endswith("7")


@pytest.mark.parametrize("name", ["hub", "dcp", "saved.pt"])
def test_each_page_of_it_answers_and_what_there_is_not_says_so(serve, models, name):
    client = serve(models / name)
    [found] = run_page(client).json()["run"]["checkpoints"]
    assert found["status"] == "foreign" and not found["readable"]
    at = f"/checkpoints/{found['id']}"
    html = client.get(at).text
    assert found["format"] in html and "Reshard" not in html and "<b>from" not in html
    for leaf in range(client.get(f"/api/v1{at}").json()["leaves"]):
        page = client.get(f"{at}/leaves/{leaf}")
        assert page.status_code == 200
        assert " rank" not in page.text.partition("<main")[2]
        client.get(f"/api/v1{at}/leaves/{leaf}/map").raise_for_status()
    assert client.get(f"/api/v1{at}/treemap").json()["total"] > 0
    for rest in ("/files", "/reshard", "/files/0/strip", "/files/0/checksums", "/balance", "/sidecars/0"):
        got = client.get(f"/api/v1{at}{rest}")
        assert got.status_code == 404 and "only its tree and values are shown" in got.json()["error"], rest
    for rest in ("/timing", "/verify"):
        assert client.get(at + rest).status_code == 200


def test_the_map_of_an_array_in_a_file_shows_its_bytes(serve, models):
    client = serve(models / "hub")
    [found] = run_page(client).json()["run"]["checkpoints"]
    page = client.get(f"/api/v1/checkpoints/{found['id']}/leaves/1").json()
    [row] = page["chunks"]["rows"]
    data = (models / "hub" / row["name"]).read_bytes()[row["start"] : row["stop"]]
    np.testing.assert_array_equal(np.frombuffer(data, np.float16).reshape(8, 4), 1)


def test_values_are_shown_and_downloaded(serve, models):
    expected = {"hub": np.ones((8, 4), np.float16), "saved.pt": np.ones((5, 4), np.float32)}
    for name, array in expected.items():
        client = serve(models / name)
        [found] = run_page(client).json()["run"]["checkpoints"]
        leaf = f"/api/v1/checkpoints/{found['id']}/leaves/0"
        peeked = client.get(f"{leaf}/peek").json()
        assert peeked["statistics"]["mean"] == "1" and not peeked["verified"]
        got = client.get(f"{leaf}/file?form=npy")
        np.testing.assert_array_equal(np.load(io.BytesIO(got.content)), array)
        assert got.headers["x-checksums"] == "not compared"


def test_an_array_that_is_in_no_file_as_it_is_says_so(serve, models):
    client = serve(models / "saved.pt")
    [found] = run_page(client).json()["run"]["checkpoints"]
    rows = client.get(f"/api/v1/checkpoints/{found['id']}/leaves").json()["rows"]
    number = next(row["leaf"] for row in rows if row["path"] == "model/t")
    assert "in no file as they are" in client.get(f"/checkpoints/{found['id']}/leaves/{number}").text
    got = client.get(f"/api/v1/checkpoints/{found['id']}/leaves/{number}/peek")
    assert got.status_code == 404 and "computed as a whole" in got.json()["error"]


def test_a_tree_whose_data_are_gone_is_shown_and_its_values_are_an_error(serve, models, tmp_path):
    shutil.copytree(models / "dcp", tmp_path / "dcp")
    for file in (tmp_path / "dcp").glob("*.distcp"):
        file.unlink()
    client = serve(tmp_path / "dcp")
    [found] = run_page(client).json()["run"]["checkpoints"]
    at = f"/checkpoints/{found['id']}"
    assert [row["path"] for row in client.get(f"/api/v1{at}/leaves").json()["rows"]] == ["model/w"]
    assert client.get(f"{at}/leaves/0").status_code == 200
    for rest in ("/peek", "/file?form=safetensors"):
        got = client.get(f"/api/v1{at}/leaves/0{rest}")
        assert got.status_code == 404 and "Load it" in got.json()["error"]


def test_a_change_of_the_files_shows(serve, tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors_numpy.save_file({"a": np.ones(3)}, path)
    client = serve(tmp_path)
    assert leaves_of(client)[tmp_path.name].keys() == {"a"}
    safetensors_numpy.save_file({"a": np.ones(3), "b": np.ones(3)}, path)
    assert leaves_of(client)[tmp_path.name].keys() == {"a", "b"}


def test_a_run_with_steps_stays_a_run_beside_a_model(serve, tmp_path, run):
    (tmp_path / "run").mkdir()
    safetensors_numpy.save_file({"a": np.ones(3)}, tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / "step_00000001").mkdir()
    assert [c["name"] for c in run_page(serve(tmp_path / "run")).json()["run"]["checkpoints"]] == ["step_00000001"]


def test_links_out_of_a_run_and_pipes_are_not_followed(serve, tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    safetensors_numpy.save_file({"secret": np.ones(3)}, tmp_path / "secret.safetensors")
    (tmp_path / "run" / "model" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (tmp_path / "run" / "pipe").mkdir()
    os.mkfifo(tmp_path / "run" / "pipe" / "model.safetensors")
    client = serve(tmp_path / "run")
    rows = {row["name"]: row for row in run_page(client).json()["run"]["checkpoints"]}
    assert "a link out of the run" in rows["model"]["error"] and rows["model"]["format"] is None
    for row in rows.values():
        for prefix in ("", "/api/v1"):
            assert "secret" not in client.get(f"{prefix}/checkpoints/{row['id']}").text
    # the cache of Hugging Face consists of links: what a person names is read through them
    assert leaves_of(serve(tmp_path / "run" / "model")) == {"model": {"secret": "array float64 [3]"}}


class Touch:
    """A value whose pickle would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_nothing_that_a_file_holds_is_executed(serve, tmp_path):
    torch.save({"w": torch.ones(2), "evil": Touch(str(tmp_path / "written"))}, tmp_path / "evil.pt")
    with (tmp_path / "bare.pkl").open("wb") as file:
        pickle.dump(Touch(str(tmp_path / "written")), file)
    for name in ("evil.pt", "bare.pkl"):
        client = serve(tmp_path / name)
        [found] = run_page(client).json()["run"]["checkpoints"]
        for rest in ("", "/leaves/0", "/leaves/1"):
            assert client.get(f"/checkpoints/{found['id']}{rest}").status_code in (200, 404)
    assert not (tmp_path / "written").exists()
