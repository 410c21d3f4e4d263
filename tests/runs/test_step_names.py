"""Steps whose directories have names of another pattern: saved, kept, found by others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import treeckpt as tc
from tests.helpers.memory_run import MemoryRun
from treeckpt._cli.main import main
from treeckpt._core.format.files import check_pattern, step_name, step_of
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.storage.open import open_run
from treeckpt._runs import discovery
from treeckpt._runs.catalog import id_of
from treeckpt._runs.run import RunDirectory
from treeckpt._runs.step_names import has_steps, step_names

PATTERN = "checkpoint-{step}"


def manager(run: Any, name: str = PATTERN, **options: Any) -> tc.Manager:
    return tc.Manager(run, name=name, background=False, **{"keep": None, **options})


def names(run: Path) -> set[str]:
    return {path.name for path in run.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (PATTERN, "checkpoint-500"),
        ("{step}", "500"),
        ("global_step{step}", "global_step500"),
        ("{step:08d}", "00000500"),
        ("epoch=1-step={step}.ckpt", "epoch=1-step=500.ckpt"),
        ("step_{step}", "step_500"),
        ("v2_{step:03d}_x", "v2_500_x"),
    ],
)
def test_a_run_has_its_steps_by_any_pattern(tmp_path: Path, pattern: str, name: str) -> None:
    run = tmp_path / "run"
    made = manager(run, pattern, keep=2)
    for step in (5, 40, 500):
        made.save(step, {"n": step})
    assert names(run) == {name, step_name(40, pattern)} and made.latest() == 500
    again = tc.Manager(run)
    assert again.steps() == [40, 500] and again.latest() == 500 and again.restore() == {"n": 500}
    assert again.path(500) == str(run / name) and again.restore(step=500) == {"n": 500}
    assert discovery.runs_in(open_run(tmp_path)) == {str(run): 2}
    again.delete(500)
    assert made.steps() == [40]


@pytest.mark.parametrize(
    "odd",
    ["checkpoint", "{step}{step}", "a/{step}", ".{step}", "{step:8d}", "{step:x}", "a{step}1", "1{step}", "{}",
     "{step!r}", "{step:099d}", "{epoch}-{step}", "deleted.{step}.json", "a {step}", "x" * 120 + "{step}", "", 3, None],
)  # fmt: skip
def test_what_is_no_pattern_is_refused(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(tc.TreeError, match=r"name: expected \{step\}"):
        tc.Manager(tmp_path / "run", name=odd)
    assert not (tmp_path / "run").exists()


def test_the_step_of_a_name_may_have_fewer_or_more_digits_than_its_pattern_says() -> None:
    for pattern in ("a{step:04d}b", "a{step}b"):
        assert [step_of(name, (check_pattern(pattern),)) for name in ("a7b", "a0007b", "a70000b")] == [7, 7, 70000]
        assert all(
            step_of(name, (pattern,)) is None for name in ("ab", "a٣b", "a-7b", "a7", "xa7b", "a" + "7" * 19 + "b")
        )


def test_others_know_the_steps_by_what_an_index_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    made = manager(run)
    for step in (1, 2, 3):
        made.save(step, {"n": step}, metrics={"loss": 1 / step})
    shutil.copytree(run / "checkpoint-3", run / "checkpoint-3-copy")
    shutil.copytree(run / "checkpoint-3", run / "other7")
    tc.save(run / "model-7", {"n": 7}, step=7)
    (run / "checkpoint-99").mkdir()
    (run / "checkpoint-99" / "model.bin").write_bytes(b"mine")
    left = {"checkpoint-3-copy", "other7", "model-7", "checkpoint-99"}
    assert RunDirectory(run).clean([tc.policy.Last(2)]).kept.keys() == {2, 3}
    assert names(run) == {"checkpoint-2", "checkpoint-3", *left}
    assert main(["gc", str(run), "--keep-last", "1"]) == 0
    assert names(run) == {"checkpoint-3", *left} and (run / "checkpoint-99" / "model.bin").read_bytes() == b"mine"
    capsys.readouterr()
    assert main(["ls", "--json", str(run)]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert listed["checkpoint-3"]["named_step"] == 3 and listed["checkpoint-3-copy"]["named_step"] is None
    assert listed["checkpoint-99"]["status"] == "foreign"
    for text in ("3", "checkpoint-3"):
        assert main(["pin", str(run), text]) == 0 and (run / "checkpoint-3" / "pinned.json").exists()
        assert main(["unpin", str(run), text]) == 0
    target = {"n": 0}
    tc.Manager(tmp_path / "new").restore(into=target, source=run)
    assert target == {"n": 3}
    assert main(["rm", "--yes", str(run), "3"]) == 0 and names(run) == left


def test_a_copy_of_a_step_under_the_name_of_another_one_is_damaged_and_stays(tmp_path: Path) -> None:
    made = manager(tmp_path, keep=1)
    made.save(5, {"n": 5})
    shutil.copytree(tmp_path / "checkpoint-5", tmp_path / "checkpoint-9")
    made.save(6, {"n": 6})
    assert made.steps() == [6] and names(tmp_path) == {"checkpoint-6", "checkpoint-9"}
    [moved] = [info for info in RunDirectory(tmp_path).checkpoints() if info.name == "checkpoint-9"]
    assert moved.files == "damaged" and "its index says step 5" in (moved.error or "")


def test_a_step_that_is_saved_again_stays_in_its_directory_whatever_the_pattern(tmp_path: Path) -> None:
    manager(tmp_path).save(5, {"n": 5})
    plain = tc.Manager(tmp_path, keep=None, background=False)
    plain.restore()
    plain.save(5, {"n": 50})
    plain.save(6, {"n": 6})
    assert names(tmp_path) == {"checkpoint-5", "step_00000006"}
    for made in (plain, manager(tmp_path), manager(tmp_path, "{step}")):
        assert made.steps() == [5, 6] and made.restore(step=5) == {"n": 50} and made.latest() == 6
    other = manager(tmp_path, "{step}")
    other.restore()
    other.save(6, {"n": 60})
    other.save(7, {"n": 7})
    assert names(tmp_path) == {"checkpoint-5", "step_00000006", "7"}
    assert tc.Manager(tmp_path).steps() == [5, 6, 7] and tc.Manager(tmp_path).restore(step=6) == {"n": 60}


def test_what_a_killed_save_left_is_that_of_a_step_where_the_pattern_is_known(tmp_path: Path) -> None:
    for known in (True, False):
        run = tmp_path / f"{known}"
        made = manager(run)
        for step in (1, 2):
            made.save(step, {"n": step})
        (run / "checkpoint-2" / INDEX_NAME).unlink()
        if not known:
            shutil.rmtree(run / "checkpoint-1")
        infos = {info.name: id_of(info) for info in discovery.scan(run)}
        assert infos["checkpoint-2"] == (2 if known else None)
        assert made.steps() == ([1] if known else [])
        cleaned = RunDirectory(run).clean([tc.policy.All()], grace=0)
        assert [one.name for one in cleaned.removed] == (["checkpoint-2"] if known else [])
        made.save(2, {"n": 2})
        assert names(run) == ({"checkpoint-1", "checkpoint-2"} if known else {"checkpoint-2"})
    (run / "checkpoint-2" / INDEX_NAME).unlink()
    assert [one.name for one in manager(run, grace=0).clean().removed] == ["checkpoint-2"], "its own pattern it knows"


def test_a_step_saved_by_hand_counts_where_the_pattern_is_known(tmp_path: Path) -> None:
    tc.save(tmp_path / "checkpoint-5", {"n": 5}, step=5)
    assert tc.Manager(tmp_path).steps() == [] and manager(tmp_path).steps() == [5]
    made = manager(tmp_path)
    assert made.restore() == {"n": 5}
    made.save(6, {"n": 6})
    assert tc.Manager(tmp_path).steps() == [5, 6] and tc.Manager(tmp_path).latest() == 6


def test_a_text_that_would_be_the_name_of_a_step_is_refused(tmp_path: Path) -> None:
    made = manager(tmp_path)
    with pytest.raises(tc.TreeError, match="a text that no step has as its name"):
        made.save("checkpoint-7", {"n": 7})
    made.save("tuned", {"n": 0})
    made.save(7, {"n": 7})
    assert made.steps() == [7] and made.names() == ["tuned"] and made.restore(step="checkpoint-7") == {"n": 7}


def test_a_directory_of_numbered_runs_is_no_run(tmp_path: Path) -> None:
    for number in (1, 2):
        manager(tmp_path / f"seed{number}").save(10 * number, {"n": number})
    tc.save(tmp_path / "model3", {"n": 3}, step=3)
    run = open_run(tmp_path)
    assert step_names(run) == [] and not has_steps(tc.LocalStore(tmp_path))
    assert discovery.runs_in(run) == {str(tmp_path / "seed1"): 1, str(tmp_path / "seed2"): 1}
    assert sorted(discovery.runs_below(run)) == [str(tmp_path / "seed1"), str(tmp_path / "seed2")]


def test_a_pattern_holds_in_a_store_of_ones_own() -> None:
    run = MemoryRun()
    made = manager(run, keep=1)
    for step in (1, 2):
        made.save(step, {"n": step})
    assert tc.Manager(run).steps() == [2] and run.folder("checkpoint-2").entry(INDEX_NAME) is not None
    assert run.folder("checkpoint-1").sizes() == {}
