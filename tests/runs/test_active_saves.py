"""Saves in flight are named, with how far they are, from nothing but their records."""

import json
import os
import threading
import time

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.world import Faulty, Switch
from treeckpt._cli.main import main
from treeckpt._core.format.files import Progress, encode_progress, parse_progress_name, progress_name
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._runs.active_saves import saves_under_way, under_way_text
from treeckpt._runs.catalog import read_info
from treeckpt._runs.discovery import scan

ID, NOW = "a" * 16, 10**18


def put(path, rank, *, phase="write", written=30, planned=100, updated=NOW, save_id=ID):
    path.mkdir(exist_ok=True)
    record = Progress(save_id, rank, 4, 7, phase, written, planned, NOW - 10**9 * (rank + 1), updated)
    (path / progress_name(rank, save_id)).write_bytes(encode_progress(record))


def found(path):
    folder = LocalStore(path)
    return saves_under_way(folder, [name for name in folder.entries() if parse_progress_name(name)])


def test_ranks_are_summed_up(tmp_path):
    put(tmp_path, 0, phase="commit", written=100)
    put(tmp_path, 2, updated=NOW + 5)
    [save] = found(tmp_path)
    assert (save.ranks, save.world, save.written, save.planned, save.phase) == (2, 4, 130, 200, "write")
    assert (save.started_ns, save.updated_ns, save.step) == (NOW - 3 * 10**9, NOW + 5, 7)
    assert under_way_text(save, NOW) == f"save {ID} is being written: 65% of 200 B on 2 of 4 ranks, for 3 s"


def test_one_that_is_silent_is_said_to_hang(tmp_path):
    put(tmp_path, 0)
    [save] = found(tmp_path)
    assert "hangs or was killed" in under_way_text(save, NOW + 61 * 10**9)


def test_waiting_for_the_commit_is_said(tmp_path):
    put(tmp_path, 1, phase="commit", written=100)
    assert "waiting for the commit: 100%" in under_way_text(found(tmp_path)[0], NOW)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 5000, b"x" * 10_000])
def test_records_that_are_none_are_passed_over(tmp_path, content):
    put(tmp_path, 0)
    (tmp_path / progress_name(1, ID)).write_bytes(content)
    assert found(tmp_path)[0].ranks == 1


def test_a_record_under_another_saves_name_is_passed_over(tmp_path):
    put(tmp_path, 0)
    (tmp_path / progress_name(0, ID)).rename(tmp_path / progress_name(0, "b" * 16))
    assert found(tmp_path) == ()


def test_ls_and_show_name_them(tmp_path, capsys):
    tc.save(tmp_path / "step_00000001", {"a": 1}, step=1)
    put(tmp_path / "step_00000001", 0, updated=time.time_ns())
    put(tmp_path / "step_00000002", 0, updated=time.time_ns())
    assert main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for step in (1, 2):
        assert any(line.startswith(f"step_0000000{step}: save {ID} is being written: 30%") for line in lines), lines
    assert main(["show", str(tmp_path / "step_00000001")]) == 0
    assert "is being written: 30%" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "step_00000002")]) == 1
    assert "is being written: 30%" in capsys.readouterr().out
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert [i["saving"][0]["written"] for i in json.loads(capsys.readouterr().out)] == [30, 30]
    assert main(["show", str(tmp_path / "step_00000001"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["saving"][0]["planned"] == 100


def test_two_saves_whose_records_are_renewed_in_turn_do_not_change_places(tmp_path):
    """As the stages of a pipeline that save side by side."""
    for name, started in (("stage-a", NOW), ("stage-b", NOW + 10**9)):
        put(tmp_path / name, 0, updated=started)
    orders = []
    for nth, renewed in enumerate(("stage-a", "stage-b", "stage-a")):
        [record] = (tmp_path / renewed).iterdir()
        os.utime(record, ns=(NOW, NOW + (nth + 2) * 10**10))
        orders.append([info.name for info in scan(tmp_path)])
    assert orders == [["stage-a", "stage-b"]] * 3


def test_a_real_save_is_seen_on_its_way_and_gone_afterwards(tmp_path):
    path, go, reached = tmp_path / "step_00000005", threading.Event(), threading.Event()

    class Slow(Switch):
        """Writes slowly until there is a record of what is written, and then not at all for a while."""

        def __call__(self, name, effect):
            if name.startswith("write "):
                if any(save.written for save in found(path)):
                    reached.set()
                    assert go.wait(60)
                else:
                    time.sleep(0.3)
            return super().__call__(name, effect)

    store = Faulty(tc.LocalStore(path), Slow())
    saver = threading.Thread(target=lambda: tc.save(store, {"a": np.zeros(100 << 20, np.uint8)}, step=5))
    saver.start()
    try:
        assert reached.wait(60)
        [info] = scan(tmp_path)
        [save] = info.saving
        assert (info.status, info.files) == ("in_progress", "partial") and save.step == 5 and 0 < save.fraction < 1
        report = tc.Manager(tmp_path, keep=1).clean()
        assert not report.removed and "under way" in report.left[0].why
    finally:
        go.set()
        saver.join()
    assert read_info(path).status == "complete" and read_info(path).saving == ()
