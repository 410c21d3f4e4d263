"""The pages of shards: extents, strips, checksums and the balance of ranks."""

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.samples import write_checkpoint
from treeckpt_dashboard.checkpoint import files


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


def test_each_byte_of_a_strip_is_of_the_part_that_its_leaf_is_in(asked):
    strip, extents = asked("/files/0/strip"), asked("/files/0")["rows"]
    for extent in extents:
        part = extent["path"].partition("/")[0]
        [group] = [group for start, stop, group in strip["segments"] if start <= extent["start"] < stop]
        assert strip["groups"][group] == (part if part in strip["groups"] else "other parts"), part
    assert len({row["path"].partition("/")[0] for row in extents}) > 5


def test_checksums_are_compared_a_part_at_a_time(asked, path, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART", 1000)
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
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert run["checkpoints"][0]["status"] == "damaged", "what was found once stays found"
    shard.unlink()
    assert "no such file" in client.get(f"{at}/files/0/checksums").json()["problem"]


def test_bytes_of_each_rank(asked):
    page = asked("/balance")
    assert page["ranks"] == [0, 1, 2, 3] and page["mean"] == sum(page["nbytes"]) / 4


def test_a_strip_shows_bytes_that_are_no_leafs(asked):
    strip = asked("/files/0/strip")
    assert strip["groups"][0] == "header" and strip["groups"][-1] == "padding"
    assert all(group != len(strip["groups"]) - 1 for _, _, group in strip["segments"]), "treeckpt writes none"


def test_files_saved_with_a_checkpoint_are_listed(serve, tmp_path):
    tc.save(tmp_path / "c", {"a": np.ones(10)}, files={"config.json": b"{}"})
    client = serve(tmp_path / "c")
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/checkpoints/{run['checkpoints'][0]['id']}/files"
    [listed] = client.get(f"/api/v1{at}").json()["sidecars"]
    assert (listed["name"], listed["nbytes"]) == ("config.json", 2)
    assert "config.json" in client.get(at).text
