"""Verifications: a job with progress, cancelled or not, whose verdict over all shards every page and command shows."""

import errno
import json
import os
import re
import threading

import numpy as np
import pytest

from tests.dashboard.helpers import client_of
from tests.helpers.background import until
from tests.helpers.samples import write_checkpoint
from treeckpt._cli.main import main
from treeckpt_dashboard.checkpoint import verify
from treeckpt_dashboard.store import jobs

SHARDS = 120  # more than a page lists


@pytest.fixture
def many_shards(tmp_path):
    """A checkpoint of SHARDS shards; returns its path and its index."""
    path = tmp_path / "run" / "step_00000007"
    tree = {f"w{n}": np.full(512, n, np.float32) for n in range(SHARDS)}
    return path, write_checkpoint(path, tree, step=7, world=1, max_shard_bytes=2048, layouts=lambda path, array: None)


def flip(file, at=-8):
    """Changes one byte of a file in place, which keeps its size and its modification time."""
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def the_checkpoint(client):
    [run] = client.get("/api/v1/runs").json()["runs"]
    [row] = run["checkpoints"]
    return row


def verified(client):
    """Starts a verification through the page, as a form does, and waits for its end."""
    at = f"/checkpoints/{the_checkpoint(client)['id']}/verify"
    sent = client.get(at, params={"action": "start"}, follow_redirects=False)
    assert (sent.status_code, sent.headers["location"]) == (303, "verify")
    assert until(lambda: not client.get(f"/api/v1{at}").json()["running"])
    return client.get(f"/api/v1{at}").json()


def test_a_complete_checkpoint_is_not_called_intact_until_every_shard_was_compared(many_shards, tmp_path):
    client = client_of(tmp_path / "run", tmp_path / "cache")
    row = the_checkpoint(client)
    assert (row["status"], row["intact"], row["verification"]) == ("complete", False, None)
    assert "sizes match, contents not verified" in client.get(f"/checkpoints/{row['id']}").text
    found = verified(client)
    assert (found["job"]["state"], found["job"]["share"], found["job"]["shards"]) == ("ended", 1.0, SHARDS)
    verdict = found["checkpoint"]["verification"]
    assert (verdict["ok"], verdict["files"], verdict["nbytes"]) == (True, SHARDS, SHARDS * 2048)
    row = the_checkpoint(client)
    assert (row["status"], row["intact"]) == ("complete", True)
    assert "dashboard" in row["verification"]["by"] and row["verification"]["ended"]
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert run["statuses"] == {"complete": 1} and (run["complete"], run["intact"]) == (1, 1)
    metrics = client.get("/metrics").text
    assert 'status="complete"} 1' in metrics and 'treeckpt_checkpoints_intact{run="run"} 1' in metrics
    for page in (f"/runs/{run['id']}", f"/checkpoints/{row['id']}", f"/checkpoints/{row['id']}/files"):
        assert re.search("just now|verified|>intact<", client.get(page).text), page


def test_a_flipped_byte_in_the_last_shard_is_found_and_stays_found(many_shards, tmp_path):
    path, index = many_shards
    assert len(index.file_list) == SHARDS
    last = path / index.file_list[-1].name
    flip(last)
    found = verified(client_of(tmp_path / "run", tmp_path / "cache"))
    [problem] = found["checkpoint"]["verification"]["problems"]
    assert problem["file"] == last.name and "differ from their checksum" in problem["text"]
    again = client_of(tmp_path / "run", tmp_path / "cache")  # another server
    row = the_checkpoint(again)
    assert row["status"] == "damaged" and last.name in row["error"]
    assert row["kept"] == ["damaged: counts for no policy"]
    [run] = again.get("/api/v1/runs").json()["runs"]
    assert (run["complete"], run["statuses"], run["newest_step"]) == (0, {"damaged": 1}, None)
    for page in (f"/checkpoints/{row['id']}", f"/checkpoints/{row['id']}/verify"):
        assert last.name in again.get(page).text
    listed = again.get(f"/api/v1/checkpoints/{row['id']}/files?start=100").json()["rows"]
    assert [file["name"] for file in listed if file["problem"]] == [last.name]
    os.utime(last)  # a copy, a touch: whether the byte is right again is not known
    row = the_checkpoint(client_of(tmp_path / "run", tmp_path / "cache"))
    assert row["status"] == "damaged" and row["verification"]["changed"]
    flip(last)
    assert verified(again)["checkpoint"]["intact"], "every byte was compared and found intact"


def test_a_verdict_is_that_of_the_files_as_they_were(many_shards, tmp_path):
    path, index = many_shards
    client = client_of(tmp_path / "run", tmp_path / "cache")
    verified(client)
    os.utime(path / index.file_list[3].name)
    assert the_checkpoint(client_of(tmp_path / "run", tmp_path / "cache"))["status"] == "complete"


def test_the_command_and_the_dashboard_share_their_verdicts(many_shards, serve, tmp_path, monkeypatch, capsys):
    path, index = many_shards
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "shared"))
    client = serve(tmp_path / "run")
    assert the_checkpoint(client)["status"] == "complete"
    assert main(["verify", str(path)]) == 0
    row = the_checkpoint(client)
    assert row["intact"] and "treeckpt verify" in row["verification"]["by"]
    capsys.readouterr()
    assert main(["ls", str(tmp_path / "run")]) == 0 and "intact, " in capsys.readouterr().out
    flip(path / index.file_list[0].name)
    assert main(["verify", str(path)]) == 1
    assert the_checkpoint(client)["status"] == "damaged"
    capsys.readouterr()
    assert main(["ls", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["verification"]["total"] == 1


def test_a_cancelled_job_keeps_what_it_has_found_and_calls_nothing_verified(many_shards, tmp_path, monkeypatch):
    path, index = many_shards
    client = client_of(tmp_path / "run", tmp_path / "cache")
    at = f"/api/v1/checkpoints/{the_checkpoint(client)['id']}/verify"
    with client.app.state.verify_jobs._working:  # as while another checkpoint is verified
        assert client.get(at, params={"action": "start"}).json()["job"]["state"] == "waiting"
        client.get(at, params={"action": "cancel"})
    assert until(lambda: not client.get(at).json()["running"])
    assert client.get(at).json()["job"]["state"] == "cancelled" and the_checkpoint(client)["status"] == "complete"

    flip(path / index.file_list[0].name)
    held, go_on = threading.Event(), threading.Event()
    take = verify._Job.take

    def hold(job, message):
        take(job, message)
        if isinstance(message, verify.Found):
            held.set()
            go_on.wait(300)
        if isinstance(message, verify.Result):
            pytest.fail("it was killed before its end")

    monkeypatch.setattr(jobs, "PROGRAM", jobs.PROGRAM.replace("sys.exit(", "import time\n" + SLOW))
    monkeypatch.setattr(verify._Job, "take", hold)
    client.get(at, params={"action": "start"})
    assert held.wait(300) and client.get(at).json()["job"]["total"] == 1, "what was found shows while it runs"
    client.get(at, params={"action": "cancel"})
    go_on.set()
    assert until(lambda: not client.get(at).json()["running"])
    row = the_checkpoint(client)
    assert row["status"] == "damaged" and not row["verification"]["complete"]


SLOW = """
from treeckpt_dashboard.checkpoint import verify
add = verify._Printer.add_shard
verify._Printer.add_shard = lambda self, problems: (add(self, problems), time.sleep(60))
sys.exit("""


def test_pages_of_other_sites_start_no_job(many_shards, tmp_path):
    client = client_of(tmp_path / "run", tmp_path / "cache")
    at = f"/api/v1/checkpoints/{the_checkpoint(client)['id']}/verify"
    others = [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}]
    others += [{name: "https://elsewhere.example"} for name in ("Origin", "Referer")]
    others += [{"Origin": "null"}, {"Origin": "http://[", "Host": "localhost"}]
    for headers in others:
        assert client.get(at, params={"action": "start"}, headers=headers).status_code == 404, headers
    assert client.get(at).json()["job"] is None


def test_what_could_not_be_read_is_said_and_is_no_verdict(many_shards, tmp_path, monkeypatch):
    _, index = many_shards
    client = client_of(tmp_path / "run", tmp_path / "cache")
    name = index.file_list[2].name
    refuse = f"""
import errno, os
opened = os.open
def refuse(path, *rest, **more):
    if str(path).endswith({name!r}):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    return opened(path, *rest, **more)
os.open = refuse
"""
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "PROGRAM", refuse + jobs.PROGRAM)
        found = verified(client)
    assert found["job"]["state"] == "failed" and "1 part could not be read, first " + name in found["job"]["error"]
    assert "Input/output error" in found["job"]["error"] and "on_corrupt" in found["job"]["error"]
    row = the_checkpoint(client)
    assert (row["status"], row["verification"]) == ("complete", None)
    page = client.get(f"/checkpoints/{row['id']}/verify").text
    assert "The verification failed: 1 part could not be read" in page and "Damaged" not in page

    with monkeypatch.context() as patch:
        opened = os.open

        def refused(path, *rest, **more):
            if str(path).endswith(name):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return opened(path, *rest, **more)

        patch.setattr(os, "open", refused)
        answer = client.get(f"/api/v1/checkpoints/{row['id']}/files/2/checksums")
        assert answer.status_code == 404 and "Input/output error" in answer.text
    assert the_checkpoint(client)["status"] == "complete"
    assert client.get(f"/api/v1/checkpoints/{row['id']}/files/2/checksums").json()["problem"] is None
    assert verified(client)["checkpoint"]["intact"]


def test_damage_that_another_user_has_found_is_shown_and_what_is_known_here_alone_says_so(
    many_shards, tmp_path, monkeypatch
):
    path, index = many_shards
    flip(path / index.file_list[0].name)
    client = client_of(tmp_path / "run", tmp_path / "cache")
    alone = "Only the cache of this machine has that"
    found = verified(client)
    at = f"/checkpoints/{found['checkpoint']['id']}/verify"
    assert found["checkpoint"]["status"] == "damaged" and alone in client.get(at).text
    assert not list(path.glob("damage.*")), "the dashboard only reads"
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "of another"))
    assert main(["verify", str(path)]) == 1
    other = client_of(tmp_path / "run", tmp_path / "new cache")
    row = the_checkpoint(other)
    assert row["status"] == "damaged" and row["verification"]["beside"] and index.file_list[0].name in row["error"]
    assert "treeckpt verify" in row["verification"]["by"] and row["kept"] == ["damaged: counts for no policy"]
    assert alone not in other.get(at).text and "Damaged." in other.get(at).text
    flip(path / index.file_list[0].name)
    found = verified(other)
    assert found["checkpoint"]["intact"], "it was compared after that"
    assert list(path.glob("damage.*")) and "treeckpt verify removes that" in found["job"]["error"]


def test_each_shard_says_what_is_known_of_it(many_shards, tmp_path):
    path, index = many_shards
    files = index.file_list
    flip(path / files[3].name)
    (path / files[5].name).unlink()
    with (path / files[7].name).open("rb+") as file:
        file.truncate(100)
    client = client_of(tmp_path / "run", tmp_path / "cache")
    at = f"/api/v1/checkpoints/{the_checkpoint(client)['id']}/files"

    def states():
        rows = client.get(at).json()["rows"]
        return {row["number"]: row["state"] for row in rows if row["number"] < 10}

    gone = {5: "missing", 7: "cut short"}
    assert states() == {n: gone.get(n, "not verified") for n in range(10)}
    verified(client)
    assert states() == {n: gone.get(n, "damaged" if n == 3 else "intact") for n in range(10)}
    (path / files[9].name).touch()
    assert states()[8] == "not verified", "the files were written since"
    text = client.get(f"{at.removeprefix('/api/v1')}/5").text
    assert "Missing: there is no such file in step_00000007." in text


def test_all_damage_is_paged_and_marked_wherever_its_leaves_are_shown(many_shards, tmp_path, capsys):
    path, index = many_shards
    broken = [file.name for file in index.file_list[:110]]
    for name in broken:
        flip(path / name)
    (path / index.file_list[115].name).unlink()
    client = client_of(tmp_path / "run", tmp_path / "cache")
    row = the_checkpoint(client)
    at = f"/api/v1/checkpoints/{row['id']}"
    missing = client.get(f"{at}/verify").json()["rows"]
    assert [(one["path"], one["text"]) for one in missing] == [("w115", "the file is missing")], "by its listing"
    found = verified(client)
    assert (found["total"], found["next"], len(found["rows"])) == (111, 100, 100)
    rows = found["rows"] + client.get(f"{at}/verify", params={"start": 100}).json()["rows"]
    assert sorted(one["file"] for one in rows) == sorted([*broken, index.file_list[115].name])
    assert {one["path"] for one in rows} == {index.entries[one["leaf"]].path for one in rows}
    assert len(client.get(f"{at}/verify/table.csv").text.splitlines()) == 112
    assert len(the_checkpoint(client)["verification"]["problems"]) == 100, "a row of a list has no more"

    bad = {one["leaf"] for one in rows}
    whole = next(leaf.number for leaf in index.entries if leaf.number not in bad)
    tree = client.get(f"{at}/tree").json()
    assert tree["node"]["damaged"] == 111
    assert {each["leaf"] for each in tree["rows"] if each["damaged"]} == bad & {each["leaf"] for each in tree["rows"]}
    treemap = client.get(f"{at}/treemap").json()
    assert {treemap["leaves"][box] for box in treemap["damaged"]} == bad
    for leaf in (min(bad), whole):
        is_bad = leaf in bad
        shown = client.get(f"{at}/leaves/{leaf}").json()
        assert shown["damaged"] == is_bad and [c["damaged"] for c in shown["chunks"]["rows"]] == [is_bad]
        assert client.get(f"{at}/leaves/{leaf}/map").json()["damaged"] == [0] * is_bad
        assert ("This leaf is damaged" in client.get(f"{at.removeprefix('/api/v1')}/leaves/{leaf}").text) is is_bad
        number = shown["chunks"]["rows"][0]["file"]
        file = index.file_list[number]
        assert client.get(f"{at}/files/{number}").json()["rows"][0]["damaged"] == is_bad
        strip = client.get(f"{at}/files/{number}/strip").json()["damaged"]
        assert strip == ([[file.header, file.header + file.nbytes]] if is_bad else [])
    assert main(["verify", str(path)]) == 1 and capsys.readouterr().out.count("checksum") == 110
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert f"; and 110 more, which treeckpt verify {path} prints" in capsys.readouterr().out


def test_without_an_index_the_page_does_not_say_that_it_is_published(tmp_path):
    write_checkpoint(tmp_path / "run" / "step_00000007", step=7, publish=False)
    client = client_of(tmp_path / "run", tmp_path / "cache")
    text = client.get(f"/checkpoints/{the_checkpoint(client)['id']}/verify").text
    assert "The index is published" not in text and "There is no index that its bytes could be compared with" in text
