"""The first step with NaN: found by few reads, with its arrays and elements, and with what is not proven said."""

import json
import math
import os
import shutil

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corruption import flip
from tests.helpers.samples import gpt_state, write_checkpoint
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name
from treeckpt._core.tree.value_codec import encode_value
from treeckpt._loading.run_load import inspect
from treeckpt._runs.nan_scan import nan_report, next_to_read, scan_for_nan, steps_of_run
from treeckpt._runs.statistics_store import StatisticsStore
from treeckpt._runs.verification import VerificationStore, cache_directory

STEPS, BAD = range(10, 90, 10), 60


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_all_steps_are_read_in_the_end_and_the_first_nan_that_stays_after_few(truth):
    known, reads = [None] * len(truth), []
    while (at := next_to_read(known)) is not None:
        assert known[at] is None
        known[at] = truth[at]
        reads.append(at)
    assert known == truth
    first = truth.index(True) if True in truth else 0
    if truth[first:] == [True] * (len(truth) - first):
        assert reads.index(first) <= 2 + math.log2(len(truth))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run whose steps have NaN from step BAD on, in a weight on boxes of four ranks and in an array of each rank."""
    run = tmp_path_factory.mktemp("saved") / "run"
    for step in STEPS:
        tree = gpt_state(layers=1, width=16, vocabulary=40, seed=step)
        tree["model"].pop("mask")
        loss = 1 / step
        if step >= BAD:
            tree["model"]["layers.0.attention.proj.weight"][9, 10:13] = np.nan
            tree["optimizer"]["state"][1]["exp_avg"][5, 2] = -np.inf
            loss = math.nan
        metadata = {"metrics": encode_value({"loss": loss}, "metrics")}
        write_checkpoint(run / step_name(step), tree, step=step, metadata=metadata)
    return run


@pytest.fixture
def run(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(saved, tmp_path / "run")


def shown(run, capsys, code=0):
    assert main(["show", "--stats", "--json", str(run)]) == code
    return json.loads(capsys.readouterr().out)


def test_the_first_nan_is_told_with_its_array_element_rank_and_byte(run, capsys):
    found = shown(run, capsys)
    assert found["nan_text"] == "Step 60 is the first with NaN: none of the 5 steps before it has any."
    assert found["infinite_text"] == "Step 60 is the first with infinity: none of the 5 steps before it has any."
    assert found["metric_text"] == "loss is NaN in step 60, the first such metric."
    assert (found["steps"], found["known"], found["complete"], found["unread"]) == (8, 8, True, [])
    step = found["nan"]
    assert (step["step"], step["nan"], step["infinite"], step["arrays"]) == (60, 3, 1, 2)
    weight, moment = step["rows"]
    assert (weight["path"], weight["nan"], weight["infinite"]) == ("model/layers.0.attention.proj.weight", 3, 0)
    assert weight["first_nan"]["index"] == [9, 10] and weight["first_infinite"] is None
    assert (moment["first_infinite"]["index"], moment["first_nan"]) == ([5, 2], None)
    for place, wanted in ((weight["first_nan"], np.nan), (moment["first_infinite"], -np.inf)):
        with (run / step_name(60) / place["file"]).open("rb") as file:
            file.seek(place["byte"])
            np.testing.assert_equal(np.frombuffer(file.read(4), np.float32)[0], wanted)
    assert weight["first_nan"]["region"] == "[8:16, 8:16]" and weight["first_nan"]["rank"] == 3
    assert main(["show", "--stats", str(run)]) == 0
    text = capsys.readouterr().out
    assert "[9, 10]" in text and "[8:16, 8:16] of rank 3" in text and "8 of 8 steps read" in text
    assert main(["ls", str(run)]) == 0
    assert capsys.readouterr().out.count("not healthy") == 3


def test_a_damaged_step_is_named_and_keeps_the_proof_from_being_whole(run, capsys):
    shard = sorted((run / step_name(30)).glob("shard-*"))[1]
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 9))
    (sorted((run / step_name(20)).glob("shard-*"))[0]).unlink()
    found = shown(run, capsys, 1)
    assert [one["name"] for one in found["unread"]] == ["step_00000020", "step_00000030"]
    assert "is missing" in found["unread"][0]["why"] and "differ from their checksum" in found["unread"][1]["why"]
    assert found["nan_text"] == (
        "Step 60 has NaN, and step 50 before it has none. Not known of earlier ones: 2 damaged or unreadable."
    )
    assert list(run.glob("*/damage.*")) == [], "nothing is written into a run that is shown"


def test_what_is_not_read_is_said_and_abandoned_branches_are_left_out(run):
    known, statistics = VerificationStore(cache_directory()), StatisticsStore(cache_directory())
    begun = []

    def stop_at_the_fourth(info, folder):
        begun.append(info.step)
        if len(begun) > 3:
            raise KeyboardInterrupt
        return folder

    with pytest.raises(KeyboardInterrupt):
        scan_for_nan(steps_of_run(str(run), known), known, statistics, "a test", stop_at_the_fourth)
    infos = steps_of_run(str(run), known)

    def report(infos):
        return nan_report(infos, statistics, lambda info: inspect(info.path))

    found = report(infos)
    assert begun == [80, 40, 60, 50] and (found.known, found.complete) == (3, False)
    assert found.nan_text == "Step 60 has NaN. Not known of earlier ones: 4 steps not read yet."
    aside = report([msgspec.structs.replace(info, abandoned=info.step > 50) for info in infos])
    assert (aside.nan, aside.abandoned) == (None, 3)
    assert aside.nan_text == "No NaN in 1 of 5 steps: 4 steps not read yet."
    assert (report([]).steps, report([]).nan_text) == (0, "There is no checkpoint.")


def test_what_was_found_before_is_not_read_again(run, capsys):
    before = shown(run, capsys)
    for name in ("step_00000010", "step_00000070"):
        for shard in (run / name).glob("shard-*"):
            data, at = shard.read_bytes(), shard.stat()
            shard.write_bytes(bytes(len(data)))
            os.utime(shard, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert shown(run, capsys) == before
