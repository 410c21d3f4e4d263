"""A manager takes the steps that a program saved by hand, names what it does not take, and refuses links to nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import Gate, GatedRun
from tests.helpers.memory_run import MemoryRun
from tests.helpers.world import on_ranks
from treeckpt._cli.main import main
from treeckpt._io.storage.open import open_run
from treeckpt._runs.run import RunDirectory

STEPS = (1, 2, 10, 100)


def save_by_hand(run: object, name: Callable[[int], str] = "step_{}".format, steps: tuple[int, ...] = STEPS) -> None:
    for step in steps:
        tc.save(open_run(run).folder(name(step)), {"w": np.full(3, step)})


@pytest.fixture(params=["disk", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    return tmp_path / "run" if request.param == "disk" else MemoryRun()


@pytest.mark.parametrize("width", [1, 3, 12])
def test_steps_of_any_width_are_taken_in_the_order_of_their_numbers(run: object, width: int) -> None:
    save_by_hand(run, f"step_{{:0{width}}}".format)
    made = tc.Manager(run, keep=None, background=False)
    assert (made.steps(), made.latest()) == ([*STEPS], 100)
    assert made.restore()["w"].tolist() == [100] * 3 and made.count == 100
    assert made.restore(step=10)["w"].tolist() == [10] * 3
    assert made.path(10).endswith(f"step_{10:0{width}}") and made.path(11).endswith("step_00000011")


def test_a_run_saved_by_hand_goes_on_with_a_manager(run: object) -> None:
    save_by_hand(run)
    with tc.Manager(run, keep=2, background=False) as made:
        made.restore()
        made.save(101, {"w": np.full(3, 101)}, pin=True)
    assert made.steps() == [100, 101]
    assert open_run(run).names() == ["step_00000101", "step_100"], (
        "clean-ups keep what policies keep, by whomever saved"
    )
    made.pin(100)
    assert "pinned.json" in open_run(run).folder("step_100").entries()
    made.unpin(100)
    made.delete(100)
    assert made.steps() == [101]


def test_all_ranks_restore_the_step_that_one_saved_by_hand(tmp_path: Path) -> None:
    save_by_hand(tmp_path / "run")
    found = on_ranks(3, lambda comm: tc.Manager(tmp_path / "run", comm=comm).restore()["w"].tolist())
    assert [outcome.value for outcome in found] == [[100] * 3] * 3


def test_of_two_directories_of_one_step_the_one_of_the_manager_counts_and_the_other_is_named(
    run: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_by_hand(run)
    save_by_hand(run, steps=(2,), name="step_{:03}".format)
    tc.save(open_run(run).folder("step_00000002"), {"w": np.full(3, 22)}, step=2)
    with tc.Manager(run, keep=None, background=False) as made:
        assert made.steps() == [*STEPS] and made.restore(step=2)["w"].tolist() == [22] * 3
        made.save(2, {"w": np.full(3, 23)})
        assert made.restore(step=2)["w"].tolist() == [23] * 3
        assert {"step_2", "step_002", "step_00000002"} <= {*open_run(run).names()}, "nothing is deleted for it"
    if isinstance(run, Path):
        assert main(["ls", str(run)]) == 0
        assert "step_2: not taken: step 2 of this run is step_00000002" in capsys.readouterr().out


@pytest.mark.parametrize("background", [False, True])
def test_a_step_that_was_saved_by_hand_is_refused_or_replaced_where_it_is(run: object, background: bool) -> None:
    save_by_hand(run)
    names = open_run(run).names()
    with tc.Manager(run, keep=None, background=background, overwrite=False) as made:
        with pytest.raises(tc.CheckpointExists, match="step_10"):
            made.save(10, {"w": np.full(3, 1)}, pin=True)
        assert made.restore(step=10)["w"].tolist() == [10] * 3
        assert "pinned.json" not in open_run(run).folder("step_10").entries()
    with tc.Manager(run, keep=None, background=background, overwrite=True) as made:
        made.save(10, {"w": np.full(3, 22)}, pin=True)
        made.wait()
        assert made.restore(step=10)["w"].tolist() == [22] * 3 and made.steps() == [*STEPS]
        assert open_run(run).names() == names
        assert "pinned.json" in open_run(run).folder("step_10").entries()
        made.save(11, {"w": np.full(3, 11)})
    assert {*open_run(run).names()} == {*names, "step_00000011"}


def test_a_directory_that_was_named_by_hand_is_left_alone_while_a_save_goes_into_it(tmp_path: Path) -> None:
    save_by_hand(tmp_path, steps=(1, 2))
    gate = Gate()
    how = tc.BackgroundOptions(writer="thread")
    with tc.Manager(GatedRun(tmp_path, gate), keep=1, grace=0.0, overwrite=True, background=how) as made:
        gate.open.clear()
        made.save(1, {"w": np.full(3, 11)})
        assert gate.reached.wait(60)
        assert [(left.name, left.why) for left in made.clean().left] == [("step_1", "it is being saved")]
        gate.open.set()
    assert made.restore(step=1)["w"].tolist() == [11] * 3


@pytest.mark.parametrize("name", ["step_5", "step_00000005"])
@pytest.mark.parametrize("options", [{}, {"follow_links": True}, {"follow_links": True, "overwrite": True}])
def test_no_save_goes_through_a_link_in_place_of_a_step(tmp_path: Path, name: str, options: dict[str, bool]) -> None:
    tc.save(tmp_path / "target", {"w": np.full(3, 5)}, step=5)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "target")
    with tc.Manager(tmp_path / "run", background=False, **options) as made:
        with pytest.raises(tc.CheckpointExists, match=f"{name}: .*a link, through which no save goes. Remove the link"):
            made.save(5, {"w": np.zeros(3)})
        (tmp_path / "run" / name).unlink()
        made.save(5, {"w": np.ones(3)})
        assert made.steps() == [5]
    assert tc.load(tmp_path / "target")["w"].tolist() == [5] * 3


def test_all_ranks_refuse_a_link_that_rank_0_sees(tmp_path: Path) -> None:
    save_by_hand(tmp_path / "run", steps=(1,))
    (tmp_path / "run" / "step_00000005").symlink_to(tmp_path / "run" / "step_1")

    def save(comm: object) -> None:
        with tc.Manager(tmp_path / "run", comm=comm, background=False) as made:
            made.save(5, {"w": np.zeros(3)})

    failed = on_ranks(2, save)
    assert [type(outcome.error) for outcome in failed] == [tc.CheckpointExists] * 2
    assert tc.load(tmp_path / "run" / "step_1")["w"].tolist() == [1] * 3


def test_all_ranks_save_into_the_directory_of_a_step_that_one_saved_by_hand(tmp_path: Path) -> None:
    save_by_hand(tmp_path / "run")

    def save(comm: object) -> str:
        with tc.Manager(tmp_path / "run", comm=comm, background=False, overwrite=True) as made:
            return made.save(100, {"w": np.full(3, 101)}).path

    found = on_ranks(3, save)
    assert [outcome.value for outcome in found] == [str(tmp_path / "run" / "step_100")] * 3
    assert tc.Manager(tmp_path / "run").restore()["w"].tolist() == [101] * 3


def test_a_save_that_was_killed_does_not_hide_the_step_that_was_saved_by_hand(tmp_path: Path) -> None:
    save_by_hand(tmp_path)
    (tmp_path / "step_00000100").mkdir()
    (tmp_path / "step_00000100" / "pinned.json").write_bytes(b"{}")
    made = tc.Manager(tmp_path)
    assert made.latest() == 100 and made.restore(step=100)["w"].tolist() == [100] * 3


def test_checkpoints_whose_names_are_no_steps_are_named_before_a_training_starts_anew(
    run: object, caplog: pytest.LogCaptureFixture
) -> None:
    save_by_hand(run, "epoch_{}".format, (1, 2))
    with caplog.at_level(logging.WARNING, "treeckpt"):
        assert tc.Manager(run).latest() is None
    assert "passed over, as their names are no steps: epoch_1, epoch_2. Rename them to step_NUMBER" in caplog.text


@pytest.mark.parametrize("below", ["", "team/job"])
def test_a_run_that_is_a_link_to_nothing_is_an_error(
    tmp_path: Path, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.symlink(tmp_path / "not mounted", tmp_path / "run")
    with pytest.raises(tc.CheckpointNotFound, match=r"a link to .*not mounted, where nothing is"):
        tc.Manager(tmp_path / "run" / below)
    for read in (tc.load, tc.inspect):
        for path in (tmp_path / "run" / below, tmp_path / "run" / below / "step_00000001"):
            with pytest.raises(tc.CheckpointNotFound, match=r"a link to .*not mounted, where nothing is"):
                read(path)
    for command in (["ls"], ["gc", "--keep-last", "1"]):
        assert main([*command, str(tmp_path / "run" / below)]) == 2
        assert "not mounted, where nothing is" in capsys.readouterr().err
    (tmp_path / "not mounted").mkdir()
    assert tc.Manager(tmp_path / "run" / below).latest() is None


@pytest.mark.parametrize("call", ["restore", "resume"])
def test_an_unknown_option_is_named_before_files_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made = tc.Manager(tmp_path / "none")
    monkeypatch.setattr(RunDirectory, "checkpoints", lambda *_, **__: pytest.fail("files are looked for"))
    with pytest.raises(TypeError, match=f"'stict' is no option of {call}; near to it is 'strict'"):
        getattr(made, call)({}, stict=False)
