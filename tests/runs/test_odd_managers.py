"""Managers under uses that nobody plans: huge steps, models that can be called, mistyped options, `chdir`."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.background import Gate, GatedRun
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name
from treeckpt._io.storage.open import open_run
from treeckpt._loading.options import ONLY_OF_LOAD, LoadKeywords
from treeckpt._runs import options as manager_options
from treeckpt.policy import Best, EveryPeriod, EverySteps, Last, Steps


def manager(run: Any, **options: Any) -> tc.Manager:
    return tc.Manager(run, **{"background": False, **options})


def test_a_step_of_nine_digits_is_newer_than_one_of_eight(tmp_path: Path) -> None:
    made = manager(tmp_path, keep=None)
    for step in (99_999_999, 100_000_000):
        made.save(step, {"s": step})
    assert made.latest() == 100_000_000 and made.restore() == {"s": 100_000_000}


def test_the_path_of_a_step_opens_it_where_no_text_is_in_its_name(tmp_path: Path) -> None:
    made = manager(tmp_path / os.fsdecode(b"run\xff"))
    made.save(1, {"s": 1})
    assert tc.load(made.path(1)) == {"s": 1}


def test_a_checkpoint_in_the_place_of_its_run_is_refused_with_the_name_of_the_run(tmp_path: Path) -> None:
    manager(tmp_path).save(4, {"w": np.zeros(2)})
    made = manager(tmp_path / step_name(4))
    for call in (made.latest, made.steps, lambda: made.best("loss"), made.restore):
        with pytest.raises(tc.CheckpointNotFound, match=rf"found one checkpoint\. .*above it, {tmp_path},"):
            call()


def test_a_checkpoint_of_an_object_store_in_the_place_of_its_run_is_refused_too() -> None:
    run = "memory://taken-for-its-run/run"
    manager(run).save(4, {"w": np.zeros(2)})
    made = manager(f"{run}/{step_name(4)}")
    for call in (made.latest, lambda: made.resume(torch.nn.Linear(1, 1))):
        with pytest.raises(tc.CheckpointNotFound, match=rf"found one checkpoint\. .*above it, {run},"):
            call()


@pytest.mark.parametrize("keep", ["last:2 best:loss:max", ["last:2", "best:loss:max"], [Last(2), "best:loss:max"]])
def test_policies_may_be_the_text_of_the_dashboard(tmp_path: Path, keep: Any) -> None:
    with manager(tmp_path, keep=keep) as made:
        assert repr(made) == repr(manager(tmp_path, keep=[Last(2), Best("loss", mode="max")]))


def test_without_policies_the_last_three_stay_whoever_saved_them(tmp_path: Path) -> None:
    for step in range(1, 6):
        tc.save(tmp_path / step_name(step), {"s": step}, step=step)
    with manager(tmp_path, keep=None) as made:
        made.save(6, {"s": 6})
        assert made.steps() == [1, 2, 3, 4, 5, 6]
    with manager(tmp_path) as made:
        made.save(7, {"s": 7})
    assert made.steps() == [5, 6, 7]


def test_steps_may_be_integers_of_numpy(tmp_path: Path) -> None:
    made = manager(tmp_path)
    made.save(np.int64(4), {"s": 4})  # pyright: ignore[reportArgumentType]
    assert made.steps() == [4] and type(made.count) is int
    with pytest.raises(tc.TreeError, match="step"):
        made.save(4.5, {"s": 4})  # pyright: ignore[reportArgumentType]


class Model:
    """As those of torch: it has a state, and can be called."""

    def __init__(self) -> None:
        self.weight = np.arange(3)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]

    def __call__(self, batch: Any) -> Any:
        return batch


def test_a_model_that_can_be_called_is_saved_not_called(tmp_path: Path) -> None:
    made = manager(tmp_path, every=1)
    made.step(Model())
    made.step(lambda: {"s": 2})
    assert made.restore(step=1)["weight"].tolist() == [0, 1, 2] and made.restore() == {"s": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"every": -2},
        {"seconds": -1.0},
        {"keep": "loss"},
        {"keep": [2.0]},
        {"keep": Best("loss", mode="maximum")},  # pyright: ignore[reportArgumentType]
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_when_the_manager_is_made(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(tc.TreeckptError, match=next(iter(options))):
        manager(tmp_path, **options)


@pytest.mark.parametrize(
    "keep",
    [
        -1, 0, True, [], [Last(-1)], Last(True), Last(2.0), EverySteps(0), Best("loss", count=0), Best("a", count=-1),
        Best(""), Best(None), EveryPeriod(-1.0), EveryPeriod("1"), EveryPeriod(float("nan")), EveryPeriod(float("inf")),
        Steps(()), Steps(5), Steps((1, "2")),
    ],
    ids=str,
)  # fmt: skip
def test_policies_that_can_keep_nothing_are_refused_and_delete_nothing(tmp_path: Path, keep: Any) -> None:
    made = manager(tmp_path, keep=None)
    for step in range(3):
        made.save(step, {"s": step})
    with pytest.raises(tc.TreeckptError, match=r"^keep: .*None keeps all"):
        manager(tmp_path, keep=keep)
    assert made.steps() == [0, 1, 2]


def test_counts_and_steps_may_be_integers_of_numpy(tmp_path: Path) -> None:
    for keep in (np.int64(2), [Last(np.int64(1)), Steps([np.int64(2)]), Steps(())]):  # pyright: ignore[reportArgumentType]
        made = manager(tmp_path, keep=keep, grace=0)  # pyright: ignore[reportArgumentType]
        for step in (1, 2, 3):
            made.save(step, {"s": step})
        assert made.steps() == [2, 3]


def test_a_mistyped_mode_or_two_targets_are_refused(tmp_path: Path) -> None:
    made = manager(tmp_path)
    made.save(1, {"s": 1}, metrics={"loss": 1.0})
    with pytest.raises(tc.TreeckptError, match="'maximum'"):
        made.best("loss", mode="maximum")  # pyright: ignore[reportArgumentType]
    with pytest.raises(tc.TreeckptError, match="like and into"):
        made.restore({"s": 1}, into={"s": 1})


def test_a_metric_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError, match=r"metrics: expected numbers by name.*found 0\.5"):
        manager(tmp_path).save(1, {"s": 1}, metrics=0.5)  # pyright: ignore[reportArgumentType]
    assert manager(tmp_path).steps() == []


def test_the_path_of_no_step_is_refused(tmp_path: Path) -> None:
    made = manager(tmp_path)
    assert made.latest() is None
    with pytest.raises(tc.TreeError, match="step: expected an integer, found None"):
        made.path(made.latest())  # pyright: ignore[reportArgumentType]


def test_a_run_stays_where_it_is_when_the_program_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    made = manager("a rün")
    made.save(1, {"s": 1})
    monkeypatch.chdir(tmp_path / "elsewhere")
    made.save(2, {"s": 2})
    assert made.steps() == [1, 2] and Path(made.path(2)) == tmp_path / "a rün" / step_name(2)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_pinned_save_that_is_skipped_or_refused_leaves_no_pin(tmp_path: Path) -> None:
    gate = Gate()
    with tc.Manager(GatedRun(tmp_path, gate), background=tc.BackgroundOptions(busy="skip", writer="thread")) as made:
        gate.open.clear()
        made.save(1, {"s": 1})
        assert made.save(2, {"s": 2}, pin=True).skipped  # pyright: ignore[reportAttributeAccessIssue]
        gate.open.set()
    with pytest.raises(tc.TreeError):
        made.save(3, {"s": object()}, pin=True)
    assert open_run(tmp_path).names() == [step_name(1)]


def test_a_pinned_save_that_fails_behind_the_training_leaves_no_pin(tmp_path: Path) -> None:
    gate = Gate()
    gate.failing = {step_name(1), step_name(2)}
    made = tc.Manager(GatedRun(tmp_path, gate), background=tc.BackgroundOptions(writer="thread"))
    for step, earlier in ((1, False), (2, True)):
        if earlier:
            made.directory.put_pin(made.directory.folder(step))
        made.save(step, {"s": step}, pin=True)
        with pytest.raises(tc.CheckpointError, match="No space left"):
            made.wait()
        assert (tmp_path / step_name(step) / "pinned.json").exists() == earlier
    made.close()


ODD_STEPS = [True, np.True_, torch.tensor(True), 1.0, 1.5, "7", None, [1], -1, np.int64(-3), 10**18, 10**30, 10**5000]


@pytest.mark.parametrize("odd", ODD_STEPS, ids=[f"{n}" for n in range(len(ODD_STEPS))])
def test_what_is_no_step_is_refused_in_every_call(tmp_path: Path, odd: Any) -> None:
    made = manager(tmp_path / "run")
    made.save(7, {"s": 7})
    calls = [
        lambda: made.save(odd, {"s": 1}),
        lambda: made.should_save(odd),
        lambda: made.pin(odd),
        lambda: made.unpin(odd),
        lambda: made.path(odd),
        lambda: made.reading(odd).__enter__(),
        *([] if odd is None else [lambda: made.restore(step=odd), lambda: tc.save(tmp_path / "a", {}, step=odd)]),
    ]
    for call in calls:
        with pytest.raises(
            tc.TreeError, match=r"step: expected an? (integer|step, 0 or more|step, at most 9{18}),.*steps"
        ):
            call()
    assert made.steps() == [7] and sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_the_highest_step_is_saved_found_and_restored(tmp_path: Path) -> None:
    made = manager(tmp_path)
    highest = 10**18 - 1
    made.save(highest, {"s": 1})
    made.save(5, {"s": 2})
    assert made.steps() == [5, highest] and made.latest() == 5 and made.restore(step=highest) == {"s": 1}


@pytest.mark.parametrize("odd", [str(10**18), "1" * 5000, "-1", "1.5"])
def test_the_command_line_refuses_what_is_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: str) -> None:
    manager(tmp_path).save(1, {"s": 1})
    for arguments in (
        ["pin", str(tmp_path), odd],
        ["unpin", str(tmp_path), odd],
        ["gc", str(tmp_path), "--steps", odd],
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        error = capsys.readouterr().err
        assert "a step" in error or "expected one argument" in error or "required" in error


@pytest.mark.parametrize(
    "options", [{"every": True}, {"every": "10"}, {"every": 0}, {"seconds": True}, {"seconds": "1"}]
)
def test_an_interval_that_is_no_number_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(tc.TreeckptError, match=f"{next(iter(options))}: expected a number"):
        manager(tmp_path, **options)


def test_a_manager_passes_on_every_option_of_saves_and_loads() -> None:
    own = {"step", "comm", "custom_metadata", "files", "together", "background", "base"}
    for function, passed_on in (
        (tc.save, manager_options.SaveKeywords.__optional_keys__),
        (tc.save_async, manager_options.SaveKeywords.__optional_keys__),
        (tc.load, LoadKeywords.__optional_keys__),
        (tc.load_into, LoadKeywords.__optional_keys__ - ONLY_OF_LOAD),
    ):
        assert passed_on == inspect.unwrap(function).__kwdefaults__.keys() - own


def test_a_mistyped_option_is_told_with_the_one_that_is_like_it(tmp_path: Path) -> None:
    for wrong, right in (("kep", "keep"), ("evry", "every"), ("overwite", "overwrite")):
        with pytest.raises(TypeError, match=rf"^'{wrong}' is no option of Manager, .*; near to it is '{right}'$"):
            tc.Manager(tmp_path, **{wrong: 3})
    with pytest.raises(
        TypeError, match=r"'buzy' is no option of Manager, .*; write background=tc.BackgroundOptions\(busy="
    ):
        manager(tmp_path, buzy="skip")
    with pytest.raises(TypeError, match=r"'colour' is no option of Manager, nor of save$"):
        manager(tmp_path, colour=3)


@pytest.mark.filterwarnings("error")
def test_a_metric_may_be_a_tensor_that_requires_grad(tmp_path: Path) -> None:
    loss: Any = torch.ones(1, requires_grad=True).mul(0.5).sum()
    made = manager(tmp_path)
    made.save(1, {"a": 1}, metrics={"loss": loss})
    assert made.best("loss") == 1
    with pytest.raises(tc.TreeError, match="metrics/loss"):
        made.save(2, {"a": 1}, metrics={"loss": torch.ones(2, requires_grad=True)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("keep", "text", "gone"),
    [
        ({}, "last:3", [1, 2]),
        ({"keep": "every:2"}, "every:2", [1, 3]),
        ({"keep": "steps:4"}, "steps:4", [1, 2, 3]),
        ({"keep": "period:3600"}, "period:3600", [2, 3, 4]),
        ({"keep": "best:loss last:1"}, "best:loss:min:1 last:1", [1, 2, 3]),
    ],
)
@pytest.mark.parametrize("background", [True, False])
def test_what_a_clean_up_removes_is_logged_with_the_policies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: dict[str, Any], text: str, gone: list[int], background: bool
) -> None:
    with tc.Manager(tmp_path, keep=None, background=False) as before:
        for step in range(1, 5):
            before.save(step, {"x": step}, metrics={"loss": float(-step)})
    with caplog.at_level("INFO", "treeckpt"), tc.Manager(tmp_path, background=background, **keep) as manager:
        manager.restore()
        manager.save(5, {"x": 5})
        manager.wait()
        assert manager.clean().removed == ()
    [line] = [one for one in caplog.records if "removed" in one.getMessage()]
    names = ", ".join(f"step_{step:08d}" for step in gone)
    assert line.levelname == "INFO"
    assert line.getMessage() == f"{tmp_path}: keep={text!r} removed checkpoint (no policy keeps it): {names}"


def test_custom_metadata_of_the_name_of_the_metrics_is_refused_beside_them_and_kept_alone(tmp_path: Path) -> None:
    made = manager(tmp_path)
    with pytest.raises(tc.TreeError, match=r"custom_metadata/metrics: expected another name beside the argument"):
        made.save(1, {"s": 1}, metrics={"loss": 0.5}, custom_metadata={"metrics": {"full": [1, 2]}})
    assert made.latest() is None
    made.save(1, {"s": 1}, custom_metadata={"metrics": {"loss": 0.25}})
    assert made.best("loss") == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_pinned_step_that_is_saved_again_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, background: bool
) -> None:
    with manager(tmp_path, keep=None, background=background) as made:
        made.save(1, {"s": 1})
        made.save(2, {"s": 2}, pin=True)
        made.wait()
        made.restore(step=1)
        made.save(2, {"s": 3}, pin=True)
        made.save(3, {"s": 3})
        made.wait()
        assert "pinned" not in caplog.text, "the caller pins what is there from now on"
        made.restore(step=1)
        made.save(2, {"s": 4})
    assert f"{tmp_path / step_name(2)}: is pinned, and this save replaces it" in caplog.text


@pytest.mark.parametrize("run", [tc.MemoryStore(), tc.LocalStore("one"), 3, None])
def test_a_run_that_is_none_is_refused(run: Any) -> None:
    with pytest.raises(
        tc.CheckpointError, match=rf"expected the path or URL of a run.* found {type(run).__qualname__}"
    ):
        manager(run)
