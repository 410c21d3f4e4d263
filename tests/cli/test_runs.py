"""gc, pin and unpin do what they say, and say what they did."""

import json
import os
import time

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.corruption import flip
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name
from treeckpt._core.format.shard_header import shard_name


@pytest.fixture
def run(tmp_path):
    manager = tc.Manager(tmp_path, keep=None, background=False)
    for step in range(100, 700, 100):
        manager.save(step, {"s": step}, metrics={"val:loss": abs(step - 250), "acc": step})
    return tmp_path


@pytest.fixture
def cli(capsys):
    def call(*arguments, code=0):
        try:
            got = main([str(a) for a in arguments])
        except SystemExit as error:
            got = error.code
        out, err = capsys.readouterr()
        assert got == code, out + err
        return out + err

    return call


def test_ls_says_what_files_of_other_programs_are_and_which_command_reads_them(cli, run):
    hub = run / "hub"
    hub.mkdir()
    (hub / "model.safetensors").write_bytes(b"")
    said = "a directory of safetensors files. Read it as it is with treeckpt show or tc.load"
    assert f"{hub}: {said}" in cli("ls", hub) and f"\n{hub}: {said}" in cli("ls", run)
    (hub / "onnx").mkdir()
    assert f"\n{hub}: {said}" in cli("ls", hub)
    assert json.loads(cli("ls", "--json", hub))[0]["name"] == "onnx"
    file = run / "saved.pt"
    file.write_bytes(b"PK\3\4")
    assert "it is a file of torch.save. Read it as it is with treeckpt show or tc.load" in cli("ls", file, code=2)
    file.write_bytes(b"\x80\2}.")
    assert "bare pickle" in (told := cli("ls", file, code=2)) and "treeckpt show" not in told
    assert cli("ls", run / "hub" / "onnx") == "no checkpoints\n"


def steps(run):
    return [step // 100 for step in tc.Manager(run).steps()]


def test_without_a_policy_no_checkpoint_goes(cli, run):
    assert "6 kept, 0 removed" in cli("gc", run)
    assert steps(run) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        (["--keep-last", 2], [5, 6]),
        (["--every", 200], [2, 4, 6]),
        (["--steps", "100,step_00000300"], [1, 3, 6]),
        (["--best", "val:loss"], [3, 6]),
        (["--best", "val:loss:2"], [2, 3, 6]),
        (["--best", "val:loss:max:3"], [4, 5, 6]),
        (["--best", "acc:3:min"], [1, 2, 3, 6]),
        (["--best", "acc:1", "--best", "val:loss:min"], [1, 3, 6]),
        (["--period", 1e9], [1, 6]),
        (["--period", 0, "--keep-last", 1], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_policies_are_named_and_add_up(cli, run, options, stays):
    before = cli("gc", run, *options, "--dry-run")
    assert steps(run) == [1, 2, 3, 4, 5, 6], "a dry run deletes nothing"
    after = cli("gc", run, *options)
    assert steps(run) == stays
    assert before.replace("would go", "removed").replace("would be freed", "freed").split() == after.split()


def test_each_kept_step_has_its_reasons_and_each_removal_too(cli, run):
    text = cli("gc", run, "--keep-last", 1, "--best", "acc:max")
    [last] = [line for line in text.splitlines() if "600" in line]
    assert last.split()[:3] == ["kept", "step", "600"]
    assert "newest, one of the best 1 by acc, one of the last 1" in last
    assert sum("checkpoint: no policy keeps it" in line for line in text.splitlines()) == 5
    assert "1 kept, 5 removed" in text


def test_a_checkpoint_that_is_known_to_be_damaged_takes_no_place_of_a_good_one(cli, tmp_path):
    for step in (1, 2, 3):
        metrics = {"metrics": {"acc": step}}
        tc.save(tmp_path / step_name(step), {"w": np.arange(1000.0)}, step=step, custom_metadata=metrics)
    [shard] = (tmp_path / step_name(3)).glob("shard-*")
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 9))
    assert tc.Manager(tmp_path).best("acc", mode="max") == 3
    cli("verify", tmp_path / step_name(3), code=1)
    assert tc.Manager(tmp_path).best("acc", mode="max") == 2
    text = cli("gc", tmp_path, "--keep-last", 1)
    assert {line.split("  ")[-1].strip() for line in text.splitlines() if line.startswith("kept")} == {
        "newest, one of the last 1",
        "damaged: counts for no policy",
    }
    manager = tc.Manager(tmp_path, keep=1, background=False)
    assert manager.clean().kept.keys() == {2, 3}
    manager.delete(3)
    assert manager.steps() == [2]


def test_as_json(cli, run):
    found = json.loads(cli("gc", run, "--keep-last", 1, "--json"))
    assert list(found["kept"]) == ["600"] and len(found["removed"]) == 5 and not found["failed"]


def test_leftovers_go_after_the_grace_period(cli, run):
    (run / step_name(700)).mkdir()
    (run / step_name(700) / shard_name("c" * 16, 0, 1, 0)).write_bytes(b"torn")
    assert "a save may be under way" in cli("gc", run)
    past = time.time() - 100
    for path in (*(run / step_name(700)).iterdir(), run / step_name(700)):
        os.utime(path, (past, past))
    assert "left over" in cli("gc", run, "--grace", 50)
    assert not (run / step_name(700)).exists()


def test_pins(cli, run):
    assert "is pinned" in cli("pin", run, 100)
    assert "pinned" in cli("gc", run, "--keep-last", 1) and steps(run) == [1, 6]
    assert "yes" in cli("show", run / step_name(100)).partition("pinned")[2].splitlines()[0]
    assert json.loads(cli("pin", run, 600, "--json"))["pinned"] is True
    assert "no longer pinned" in cli("unpin", run, "step_00000100")
    cli("gc", run, "--keep-last", 1)
    assert steps(run) == [6]
    assert "no such directory" in cli("unpin", run, 5, code=1)
    assert "expected a complete checkpoint" in cli("pin", run, 5, code=1)


@pytest.mark.parametrize(
    "options",
    ["--keep-last 0", "--every x", "--best :max", "--best a:0", "--grace -1", "--period nan", "--period inf"],
)
def test_wrong_use_is_code_2_and_deletes_nothing(cli, run, options):
    cli("gc", run, *options.split(), code=2)
    assert len(steps(run)) == 6


@pytest.mark.parametrize("metric", ["los", "val:los", "val:loss:mx", "acc:2:nim"])
def test_a_metric_that_no_checkpoint_has_is_wrong_use_and_deletes_nothing(cli, run, metric):
    text = cli("gc", run, "--best", "acc", "--best", metric, code=2)
    assert "has the metric" in text and "there are: acc, val:loss" in text
    assert (":min or :max" in text) == (":" in metric)
    assert len(steps(run)) == 6


@pytest.mark.parametrize("also", [(), ("--dry-run",), ("--keep-last", 1)])
def test_a_step_that_is_not_there_is_wrong_use_and_deletes_nothing(cli, run, also):
    (run / step_name(700)).mkdir()
    text = cli("gc", run, "--steps", "100,310,700,600", *also, code=2)
    assert "has no steps 310, 700" in text, "a directory without an index keeps nothing either"
    assert "Steps that can be loaded: 100, 200, 300, 400, 500, 600; the nearest is 300" in text
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_runs_without_metrics_or_checkpoints_have_none_to_choose_by(cli, tmp_path):
    assert "0 kept, 0 removed" in cli("gc", tmp_path, "--best", "loss")
    tc.Manager(tmp_path, background=False).save(1, {"s": 1})
    assert "'loss'; none has any" in cli("gc", tmp_path, "--best", "loss", code=2)


def test_a_metric_that_is_nowhere_a_number_keeps_all_and_says_so(cli, tmp_path):
    with tc.Manager(tmp_path, keep=None, background=False) as manager:
        for step in (1, 2):
            manager.save(step, {"s": step}, metrics={"loss": float("nan")})
    text = cli("gc", tmp_path, "--best", "loss")
    assert "2 kept, 0 removed" in text and "no checkpoint has the metric 'loss' as a number" in text


def test_policies_for_a_checkpoint_in_the_place_of_its_run_are_wrong_use(cli, run, monkeypatch):
    assert f"Name the run that it is in: {run}\n" in cli("gc", run / step_name(100), "--keep-last", 1, code=2)
    monkeypatch.chdir(run / step_name(100))
    assert f"Name the run that it is in: {run}\n" in cli("gc", ".", "--best", "acc", code=2)
    assert "0 files removed" in cli("gc", "."), "without a policy only what is left over there goes"
    assert len(steps(run)) == 6


def test_a_run_that_is_not_there_is_wrong_use(cli, run):
    assert "no such directory" in cli("gc", run / "nowhere", code=2)


def test_no_torch_is_imported(run):
    import subprocess
    import sys

    code = f"import sys; from treeckpt._cli.main import main; main(['gc', {str(run)!r}]); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
