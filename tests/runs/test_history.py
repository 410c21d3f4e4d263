"""Newest means saved last: a run that went back goes on from what it saved since, whatever clocks say."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.memory_run import MemoryRun
from tests.helpers.world import errors_of, on_ranks, reseal
from treeckpt._cli.main import main
from treeckpt._core.format import index as index_module
from treeckpt._core.format.files import step_name
from treeckpt._core.format.index import INDEX_NAME, decode_index
from treeckpt._io.storage.open import open_run
from treeckpt._io.timing import Recorder
from treeckpt._runs.discovery import scan
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import All, Best, EveryPeriod, EverySteps, Last, Steps


@pytest.fixture(params=["disk", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def run(request: Any, tmp_path: Path) -> Any:
    if request.param == "s3":
        return request.getfixturevalue("s3").url()
    return tmp_path / "run" if request.param == "disk" else MemoryRun()


def manager(run: Any, **options: Any) -> tc.Manager:
    return tc.Manager(run, **{"background": False, "keep": None, **options})


def fill(run: Any, steps: Any, **options: Any) -> tc.Manager:
    made = manager(run, **options)
    for step in steps:
        made.save(step, {"step": step, "of": "first"}, metrics={"loss": float(step)})
    return made


def rolled_back(run: Any, **options: Any) -> tc.Manager:
    """Steps 10 to 40, then back to 20, then 21 and 22."""
    fill(run, [10, 20, 30, 40])
    made = manager(run, **options)
    made.restore(step=20)
    for step in (21, 22):
        made.save(step, {"step": step, "of": "second"}, metrics={"loss": float(step)})
    return made


def abandoned(run: Any) -> list[int | None]:
    return sorted(info.step for info in scan(run) if info.abandoned)


def listed(run: Any) -> list[int | None]:
    return [info.step for info in scan(run)]


def store_of(run: Any, step: int) -> Any:
    return open_run(run).folder(step_name(step))


# what is newest ------------------------------------------------------------------------------------------------------


def test_what_was_just_saved_stays_though_its_step_is_lower(run: Any) -> None:
    made = manager(run, keep=1)
    made.save(30, {"s": 30})
    made.save(21, {"s": 21})
    assert made.steps() == [21] and made.latest() == 21 and manager(run).restore() == {"s": 21}


def test_the_newest_after_a_rollback_is_what_was_saved_last(run: Any) -> None:
    made = rolled_back(run)
    for step in (23, 24):
        made.save(step, {"step": step, "of": "second"})
    assert made.latest() == 24
    again = manager(run)
    assert again.latest() == 24 and again.restore() == {"step": 24, "of": "second"}
    assert again.steps() == [10, 20, 21, 22, 23, 24, 30, 40]
    assert abandoned(run) == [30, 40]
    assert listed(run) == [24, 23, 22, 21, 20, 10, 40, 30], "the newest first, abandoned branches behind"


def test_a_restore_without_a_save_changes_nothing(run: Any) -> None:
    made = fill(run, [10, 20])
    made.restore(step=10)
    assert made.latest() == 20 and manager(run).latest() == 20 and abandoned(run) == []
    made.save(30, {"step": 30})
    assert made.latest() == 30 and abandoned(run) == [20]


def test_a_crash_between_restore_and_save_leaves_the_newest_as_it_was(run: Any) -> None:
    fill(run, [10, 20, 30])
    manager(run).restore(step=10)
    again = manager(run)
    assert again.restore()["step"] == 30
    again.save(40, {"step": 40})
    assert abandoned(run) == []


def test_the_abandoned_branch_is_overtaken_step_by_step(run: Any) -> None:
    made = rolled_back(run)
    for step in (30, 40, 50):
        made.save(step, {"step": step, "of": "second"})
    assert made.latest() == 50 and abandoned(run) == [] and manager(run).restore(step=30)["of"] == "second"


def test_going_back_onto_the_abandoned_branch_continues_it(run: Any) -> None:
    rolled_back(run)
    made = manager(run)
    made.restore(step=30)
    assert made.latest() == 22
    made.save(31, {"step": 31})
    assert made.latest() == 31 and abandoned(run) == [21, 22, 40]
    assert listed(run)[:4] == [31, 30, 20, 10]


def test_the_best_is_of_the_present_branch(run: Any, caplog: Any) -> None:
    made = rolled_back(run)
    assert made.best("loss", mode="max") == 22
    made.restore(step=40)
    made.save(41, {"step": 41})
    assert made.best("loss", mode="max") == 40


def test_two_rollbacks_leave_two_abandoned_branches(run: Any) -> None:
    made = rolled_back(run)
    made.restore(step=10)
    made.save(11, {"step": 11})
    made.save(12, {"step": 12})
    assert abandoned(run) == [20, 21, 22, 30, 40] and listed(run)[:3] == [12, 11, 10]
    made.restore(step=22)
    made.save(23, {"step": 23})
    assert abandoned(run) == [11, 12, 30, 40] and listed(run)[:5] == [23, 22, 21, 20, 10]


# what is deleted in between ------------------------------------------------------------------------------------------


def test_the_lineage_survives_the_deletion_of_its_middle(run: Any) -> None:
    rolled_back(run)
    for step in (20, 21):
        store = store_of(run, step)
        for name in [INDEX_NAME, *(name for name in store.sizes() if name != INDEX_NAME)]:
            store.delete(name)
    again = manager(run)
    assert again.latest() == 22 and abandoned(run) == [30, 40]
    again.save(23, {"step": 23})
    assert again.latest() == 23 and abandoned(run) == [30, 40]
    store_of(run, 22).delete(INDEX_NAME)
    assert manager(run).latest() == 23 and abandoned(run) == [30, 40]


def test_the_restored_step_may_be_deleted_before_the_first_save(run: Any) -> None:
    fill(run, [10, 20, 30, 40])
    made = manager(run)
    made.restore(step=20)
    RunDirectory(run).clean([Steps((10, 30, 40))])
    made.save(21, {"step": 21})
    assert made.latest() == 21 and abandoned(run) == [30, 40] and listed(run) == [21, 10, 40, 30]


def test_restore_falls_back_along_the_lineage(run: Any) -> None:
    rolled_back(run)
    for step in (22, 21):
        store = store_of(run, step)
        store.delete(next(name for name in store.sizes() if name.endswith(".safetensors")))
    made = manager(run)
    assert made.latest() == 20 and made.restore()["step"] == 20
    made.save(21, {"step": 21, "of": "third"})
    assert made.latest() == 21 and manager(run).restore()["of"] == "third"
    store_of(run, 21).delete(INDEX_NAME)
    store_of(run, 20).delete(INDEX_NAME)
    store_of(run, 10).delete(INDEX_NAME)
    assert manager(run).latest() == 40, "an abandoned branch is better than nothing"


# retention -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "stays"),
    [
        (Last(1), [22]),
        (Last(3), [20, 21, 22]),
        (Last(5), [10, 20, 21, 22, 40]),
        (EverySteps(20), [20, 22, 40]),
        (Steps((30,)), [22, 30]),
        (Best("loss", mode="max"), [22, 40]),
        (Best("loss"), [10, 22, 30]),
        (EveryPeriod(0), [10, 20, 21, 22, 30, 40]),
        (EveryPeriod(3600), [10, 22, 30]),
        (All(), [10, 20, 21, 22, 30, 40]),
    ],
)
def test_each_policy_follows_the_lineage(tmp_path: Path, keep: Any, stays: list[int]) -> None:
    made = rolled_back(tmp_path)
    assert list(manager(tmp_path, keep=keep).clean(dry_run=True).kept) == stays
    made.save(23, {"step": 23, "of": "second"}, metrics={"loss": 23.0})
    assert 23 in manager(tmp_path, keep=keep).clean().kept and made.latest() == 23


@pytest.mark.parametrize("keep", [Last(1), EverySteps(1000), Steps((1000,)), Best("loss"), EveryPeriod(3600), All()])
@pytest.mark.parametrize("background", [False, True])
def test_under_every_policy_what_was_just_saved_stays(tmp_path: Path, keep: Any, background: bool) -> None:
    with manager(tmp_path, keep=keep, background=background) as made:
        for step in (30, 40, 21, 22, 5, 22, 40, 3):
            made.save(step, {"step": step}, metrics={"loss": 100.0 - step})
            made.wait()
            assert made.latest() == step
    assert manager(tmp_path).restore() == {"step": 3}


def test_pins_hold_on_an_abandoned_branch(run: Any) -> None:
    fill(run, [10, 20, 30, 40])
    made = manager(run, keep=2)
    made.pin(30)
    made.restore(step=20)
    made.save(21, {"step": 21})
    assert made.steps() == [20, 21, 30] and made.latest() == 21 and abandoned(run) == [30]
    kept = made.clean()
    assert kept.kept[30] == ("pinned",) and kept.abandoned == (30,) and "abandoned branch" in str(kept)


# steps that are saved again ------------------------------------------------------------------------------------------


def test_a_step_saved_again_is_the_newest_and_what_followed_it_is_abandoned(run: Any) -> None:
    made = fill(run, [10, 20, 30])
    made.save(20, {"step": 20, "of": "second"})
    assert made.latest() == 20 and abandoned(run) == [30]
    assert manager(run, keep=2).clean().kept.keys() == {10, 20}
    assert manager(run).restore() == {"step": 20, "of": "second"}


def test_the_newest_step_saved_again_abandons_nothing(run: Any) -> None:
    made = fill(run, [10, 20])
    made.save(20, {"step": 20, "of": "second"})
    made.save(30, {"step": 30})
    assert abandoned(run) == [] and listed(run) == [30, 20, 10]


# what the manager cannot know ----------------------------------------------------------------------------------------


def test_a_load_past_the_manager_is_told_by_the_lower_step(run: Any) -> None:
    fill(run, [10, 20, 30, 40])
    made = manager(run)
    assert tc.load(store_of(run, 20))["step"] == 20
    made.save(21, {"step": 21})
    assert made.latest() == 21 and abandoned(run) == [30, 40]
    assert tc.load(store_of(run, 10))["step"] == 10
    made.save(11, {"step": 11})
    assert made.latest() == 11 and abandoned(run) == [20, 21, 30, 40]


def test_a_run_that_starts_anew_abandons_all_that_was_there(run: Any) -> None:
    fill(run, [10, 20])
    made = manager(run, keep=2)
    made.save(1, {"step": 1})
    assert made.latest() == 1 and abandoned(run) == [20] and made.steps() == [1, 20]
    made.save(2, {"step": 2})
    assert made.steps() == [1, 2]


def test_a_manager_that_has_restored_nothing_goes_on_from_the_newest(run: Any) -> None:
    rolled_back(run)
    manager(run).save(50, {"step": 50})
    assert manager(run).latest() == 50 and abandoned(run) == [30, 40]
    assert listed(run) == [50, 22, 21, 20, 10, 40, 30]


def test_two_managers_take_turns(run: Any) -> None:
    one, two = fill(run, [10]), manager(run)
    two.restore()
    two.save(20, {"step": 20})
    two.save(30, {"step": 30})
    one.save(15, {"step": 15})
    assert one.latest() == two.latest() == 15 and abandoned(run) == [20, 30]
    two.save(40, {"step": 40})
    assert one.latest() == 40 and abandoned(run) == [15] and listed(run) == [40, 30, 20, 10, 15]


def test_checkpoints_saved_by_hand_count_by_their_step(run: Any) -> None:
    made = fill(run, [10, 20])
    tc.save(store_of(run, 30), {"step": 30}, step=30)
    assert made.latest() == 30
    tc.save(store_of(run, 15), {"step": 15}, step=15)
    assert made.latest() == 30 and listed(run) == [30, 20, 15, 10]
    made.save(40, {"step": 40})
    assert made.latest() == 40 and abandoned(run) == []
    made.restore(step=20)
    made.save(21, {"step": 21})
    tc.save(store_of(run, 22), {"step": 22}, step=22)
    assert made.latest() == 22 and abandoned(run) == [30, 40]


def test_a_run_of_checkpoints_without_a_lineage_is_as_it_was_and_can_go_back(run: Any) -> None:
    for step in (10, 20, 40, 30):
        tc.save(store_of(run, step), {"step": step}, step=step)
    made = manager(run)
    assert made.latest() == 40 and listed(run) == [40, 30, 20, 10] and abandoned(run) == []
    made.restore(step=20)
    made.save(35, {"step": 35})
    assert made.latest() == 35 and abandoned(run) == [30, 40] and listed(run) == [35, 20, 10, 40, 30]
    made.save(36, {"step": 36})
    assert manager(run, keep=3).clean().kept.keys() == {20, 35, 36}


def test_a_checkpoint_moved_to_another_step_decides_nothing(tmp_path: Path) -> None:
    rolled_back(tmp_path)
    shutil.copytree(tmp_path / step_name(40), tmp_path / step_name(99))
    assert manager(tmp_path).latest() == 22 and abandoned(tmp_path) == [30, 40]


# clocks --------------------------------------------------------------------------------------------------------------


def test_clocks_that_were_set_back_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, [10, 20, 30, 40])
    real = time.time_ns
    monkeypatch.setitem(Recorder.__init__.__kwdefaults__, "wall", lambda: real() - 10**16)
    made = manager(tmp_path, keep=2)
    made.restore(step=20)
    for step in (21, 22, 23):
        made.save(step, {"step": step})
    assert tc.inspect(made.path(23)).created_ns < real() - 10**15
    assert made.steps() == [22, 23] and manager(tmp_path).latest() == 23


# restarts ------------------------------------------------------------------------------------------------------------


def test_jobs_that_end_and_are_killed_leave_the_lineage_to_the_next(tmp_path: Path) -> None:
    def job(text: str, code: int = 0) -> str:
        begin = f"import os, numpy as np, treeckpt as tc; m = tc.Manager({str(tmp_path)!r}, keep=tc.policy.Last(4)); "
        ended = subprocess.run([sys.executable, "-c", begin + text], capture_output=True, text=True, timeout=300)
        assert ended.returncode == code, ended.stderr
        return ended.stdout.strip()

    save = "[m.save(s, {'step': s}) for s in (%s)]; m.close()"
    job(save % "10, 20, 30, 40")
    job("m.restore(step=20); os._exit(7)", 7)
    assert job("print(m.latest())") == "40"
    job(
        "m.restore(step=20); m.save(21, {'step': 21}).result(); "
        "m.save(22, {'step': 22, 'w': np.zeros(1 << 24)}); os._exit(7)",
        7,
    )
    assert job("print(m.latest(), m.restore()['step'])") in ("21 21", "22 22")
    job("m.restore(step=21); " + save % "22, 23")
    assert job("print(m.latest(), m.steps())") == "23 [20, 21, 22, 23]"


# saves that come to nothing ------------------------------------------------------------------------------------------


def test_a_failed_save_is_not_followed(tmp_path: Path) -> None:
    made = fill(tmp_path, [10])
    (tmp_path / step_name(20)).write_text("in the way")
    with pytest.raises(tc.TreeckptError):
        made.save(20, {"step": 20})
    (tmp_path / step_name(20)).unlink()
    made.save(30, {"step": 30})
    assert tc.inspect(made.path(30)).lineage.follows == tc.inspect(made.path(10)).save_id  # type: ignore[union-attr]


def test_a_skipped_save_is_not_followed(tmp_path: Path) -> None:
    with manager(tmp_path, background=tc.BackgroundOptions(busy="skip", writer="thread")) as made:
        made.save(10, {"w": np.zeros(1 << 22)})
        for step in range(11, 15):
            made.save(step, {"w": np.zeros(1 << 22)})
        made.wait()
        made.save(20, {"w": np.zeros(4)})
    newest = made.steps()[-2]
    assert made.latest() == 20 and abandoned(tmp_path) == []
    assert tc.inspect(made.path(20)).lineage.follows == tc.inspect(made.path(newest)).save_id  # type: ignore[union-attr]


def test_a_restore_beside_a_save_in_the_background_is_what_the_next_save_follows(tmp_path: Path) -> None:
    fill(tmp_path, [10, 20])
    with manager(tmp_path, background=True) as made:
        made.save(30, {"w": np.zeros(1 << 22)})
        made.restore(step=10)
        made.save(11, {"w": np.zeros(4)})
        made.wait()
        assert made.latest() == 11 and abandoned(tmp_path) == [20, 30]


def test_ranks_go_back_together(tmp_path: Path) -> None:
    def act(comm: Any) -> Any:
        with manager(tmp_path, keep=3, comm=comm, background=comm.size == 3) as made:
            for step in (10, 20, 30):
                made.save(step, {"step": step})
            made.restore(step=20)
            made.save(21, {"step": 21})
            made.save(22, {"step": 22})
            made.wait()
            return made.latest(), made.steps(), made.restore()["step"]

    outcomes = on_ranks(3, act)
    assert errors_of(outcomes) == [None] * 3
    assert [o.value for o in outcomes] == [(22, [20, 21, 22], 22)] * 3


def test_a_run_that_cannot_be_listed_is_saved_into_all_the_same(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    made = fill(tmp_path, [10, 20])
    made.restore(step=10)

    def refuse(*_: Any) -> Any:
        raise tc.StoreError("run", expected="a listing", found="none")

    with monkeypatch.context() as patch:
        patch.setattr("treeckpt._io.storage.local_store.LocalRun.names", refuse)
        made.save(11, {"step": 11})
    assert "lineage" in caplog.text and manager(tmp_path).restore(step=11) == {"step": 11}


# on disk -------------------------------------------------------------------------------------------------------------


def test_an_index_has_the_lineage_beside_the_metadata(tmp_path: Path) -> None:
    made = rolled_back(tmp_path)
    index = decode_index((tmp_path / step_name(22) / INDEX_NAME).read_bytes())
    assert index.metadata.keys() == {"metrics"}, "the user's own, and nothing else"
    assert index.lineage is not None and index.lineage.follows == tc.inspect(made.path(21)).save_id
    assert index.lineage.abandoned == ((30, 40),)


def test_a_save_by_hand_has_no_lineage(tmp_path: Path) -> None:
    tc.save(tmp_path / "a", {"n": 1}, custom_metadata={"note": "x"})
    assert tc.inspect(tmp_path / "a").lineage is None
    assert b"lineage" not in (tmp_path / "a" / INDEX_NAME).read_bytes()


def test_a_rebuilt_index_has_its_lineage(tmp_path: Path) -> None:
    rolled_back(tmp_path)
    before = tc.inspect(tmp_path / step_name(22))
    (tmp_path / step_name(22) / INDEX_NAME).unlink()
    assert manager(tmp_path).latest() == 21
    assert tc.rebuild_index(tmp_path / step_name(22)) == before and manager(tmp_path).latest() == 22


@pytest.mark.parametrize("odd", ["text", {"sequence": -1}, {"sequence": 1, "abandoned": [[5, 1]]}, 7])
def test_what_is_no_lineage_is_refused(tmp_path: Path, odd: Any) -> None:
    tc.save(tmp_path, {"n": 1}, step=1)
    reseal(tmp_path, lambda document: document["index"].update(lineage=odd))
    with pytest.raises(tc.FormatError):
        tc.inspect(tmp_path)


# what is shown -------------------------------------------------------------------------------------------------------


def test_the_command_line_and_notebooks_show_abandoned_branches(tmp_path: Path, capsys: Any) -> None:
    made = rolled_back(tmp_path)
    assert main(["ls", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step_")]
    assert [line.split()[0] for line in rows] == [step_name(s) for s in (22, 21, 20, 10, 40, 30)]
    assert ["abandoned branch" in line for line in rows] == [False] * 4 + [True] * 2
    assert main(["ls", "--json", str(tmp_path)]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert [one["abandoned"] for one in found] == [False] * 4 + [True] * 2
    assert main(["show", str(tmp_path)]) == 2 and step_name(22) in capsys.readouterr().err, "the newest is offered"
    html = made._repr_html_()
    assert html.count("abandoned branch") == 2
    assert main(["gc", "--keep-last", "2", "--dry-run", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert sum("abandoned branch" in line for line in out.splitlines()) == 2 and "step_00000020" in out


def test_a_save_reads_no_index_that_is_known(tmp_path: Path) -> None:
    """Nothing is read of a checkpoint that is known already but the state of its index."""
    made = fill(tmp_path, range(1, 31))
    reads: list[str] = []
    plain = index_module.decode_index

    def counting(data: bytes, name: str = INDEX_NAME) -> Any:
        reads.append(name)
        return plain(data, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treeckpt._io.storage.checkpoint.decode_index", counting)
        made.save(31, {"step": 31})
    assert len(set(reads)) <= 2, reads
