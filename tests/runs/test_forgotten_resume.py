"""A training that starts again without a resume does not replace the steps of the one before without a word."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import treeckpt as tc
from tests.helpers.world import on_ranks
from treeckpt._core.format.files import step_name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 10, 20 and 30."""
    with manager(tmp_path / "run") as made:
        for step in (10, 20, 30):
            made.save(step, {"of": "first"})
    return tmp_path / "run"


def manager(run: Path, **options: Any) -> tc.Manager:
    return tc.Manager(run, **{"background": False, "keep": None, **options})


def told(act: Any) -> list[str]:
    """Returns the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("background", [False, True])
def test_the_first_replaced_step_is_named_with_what_to_do_and_no_other(run: Path, *, background: bool) -> None:
    def again() -> None:
        with manager(run, background=background) as made:
            for step in (10, 20, 30, 40):
                made.save(step, {"of": "second"})

    [text] = told(again)
    assert text.startswith(f"{run / step_name(10)}: step 10 replaces a checkpoint that this manager neither saved nor")
    assert "call resume or restore before the first save" in text and "overwrite=False" in text
    assert tc.load(run / step_name(10)) == {"of": "second"}


def test_a_step_below_those_of_the_run_is_named_too_as_clean_ups_delete_them_first(run: Path) -> None:
    made = manager(run, keep=2)
    [text] = told(lambda: [made.save(step, {"of": "second"}) for step in (5, 6)])
    assert "step_00000005: step 5 is saved below step 30" in text
    assert made.steps() == [5, 6]


@pytest.mark.parametrize("step", [None, 20])
def test_after_a_restore_of_any_step_none_is_warned_of(run: Path, step: int | None) -> None:
    made = manager(run)
    made.restore(step=step)
    assert told(lambda: [made.save(step, {"of": "second"}) for step in (10, 30, 40, 40)]) == []


def test_overwrite_says_that_they_are_to_be_replaced_or_that_none_is(run: Path) -> None:
    assert told(lambda: manager(run, overwrite=True).save(10, {"of": "second"})) == []
    with pytest.raises(tc.CheckpointExists):
        manager(run, overwrite=False).save(10, {"of": "third"})


def test_steps_above_all_others_and_those_of_the_manager_itself_are_saved_without_a_warning(run: Path) -> None:
    made = manager(run)
    assert told(lambda: [made.save(step, {"of": "second"}) for step in (40, 50, 50, 40)]) == []


def test_of_several_ranks_the_first_warns(run: Path) -> None:
    def work(comm: Any) -> None:
        manager(run, comm=comm).save(10, {"of": "second"})

    [text] = told(lambda: on_ranks(2, work))
    assert "step 10 replaces a checkpoint" in text


def test_where_warnings_are_errors_the_save_ends_and_it_is_logged(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager(run).save(10, {"of": "second"})
    assert "step 10 replaces a checkpoint" in caplog.text and tc.load(run / step_name(10)) == {"of": "second"}
