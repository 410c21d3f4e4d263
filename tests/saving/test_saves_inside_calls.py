"""A save on a thread that is inside of another call is refused at once, and no call inside of another hangs."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import ROOT
from treeckpt._io.comm.comm import SoloComm

INSIDE = {"save", "save_async", "thread", "foreground", "background", "load", "load_into", "verify", "restore"}
"""The outer calls that last so long that most moments are inside of them."""


def ended(path: Path, share: int, trials: int) -> list[dict[str, dict[str, int]]]:
    """What a program prints that makes calls at a share of the lines of others, and at random moments."""
    command = [sys.executable, "-W", "error", "-m", "tests.saving.nested", str(path), str(share), str(trials)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


def test_calls_at_lines_of_other_calls_are_made_or_refused(tmp_path: Path) -> None:
    lines, signals = ended(tmp_path, 1, 13)
    assert all(lines[name]["refused"] and lines[name]["loads"] for name in INSIDE)
    assert any(counts["loads"] for counts in signals.values())


@pytest.mark.slow
def test_calls_at_each_line_of_other_calls_are_made_or_refused(tmp_path: Path) -> None:
    lines, _ = ended(tmp_path, 100, 0)
    assert all(lines[name]["refused"] > 2500 and lines[name]["loads"] > 900 for name in INSIDE)


@pytest.mark.slow
def test_signals_at_random_moments_of_calls_make_none_hang(tmp_path: Path) -> None:
    _, signals = ended(tmp_path, 0, 780)
    assert sum(counts["loads"] for counts in signals.values()) >= 80
    assert sum(counts["refused"] for counts in signals.values()) >= 80


class Acting:
    """An object that does something when its state is taken or loaded."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, int]:
        self.act()
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.act()


class ActingValue:
    """An object that does something when it is pickled."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __getstate__(self) -> None:
        self.act()


class ActingStore(tc.MemoryStore):
    """A store that does something when a file is created."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def create(self, name: str, nbytes: int) -> Any:
        self.act()
        return super().create(name, nbytes)


@pytest.mark.parametrize("outer", [tc.save, tc.save_async])
@pytest.mark.parametrize("kind", [Acting, ActingValue])
def test_an_object_that_saves_when_it_is_saved_is_an_error(tmp_path: Path, outer: Any, kind: Any) -> None:
    def save() -> None:
        tc.save_async(tmp_path / "inner", {"n": 1})

    with pytest.raises(tc.TreeckptError, match=f"a save is under way on this thread: {outer.__name__}"):
        outer(tmp_path / "outer", {"o": kind(save)}, allow_pickle=True)
    assert not (tmp_path / "inner").exists() and not (tmp_path / "outer/index.json").exists()


def test_a_refusal_says_save_of_what_saves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_: Any) -> bool:
        tc.save(tmp_path / "inner", {"n": 1})
        return True

    with tc.Manager(tmp_path / "run", background=False) as manager:
        monkeypatch.setattr(type(manager.schedule), "due", save)
        with pytest.raises(tc.CheckpointError, match=r"a call is under way on this thread: Manager\.should_save,"):
            manager.should_save(1)
        with pytest.raises(tc.CheckpointError, match=r"a save is under way on this thread: Manager\.save,"):
            manager.save(1, {"o": Acting(save)})
    pending = tc.save_async(ActingStore(save), {"n": 1})
    with pytest.raises(tc.CheckpointError, match="a save is under way on this thread: save_async,"):
        pending.result(60)


def test_an_object_may_load_when_it_is_saved_and_when_it_is_loaded(tmp_path: Path) -> None:
    tc.save(tmp_path / "inner", {"n": 5})
    found: list[Any] = []
    tree = {"o": Acting(lambda: found.append(tc.load(tmp_path / "inner")))}
    tc.save(tmp_path / "outer", tree)
    tc.load_into(tmp_path / "outer", tree)
    assert found == [{"n": 5}] * len(found) and len(found) >= 2


def test_a_save_on_another_thread_and_one_when_a_save_has_ended_are_made(tmp_path: Path) -> None:
    def save(name: str) -> None:
        tc.save(tmp_path / name, {"n": 1}, comm=SoloComm())

    def on_thread() -> None:
        thread = threading.Thread(target=save, args=("thread",))
        thread.start()
        thread.join()

    ended = threading.Event()
    pending = tc.save_async(tmp_path / "outer", {"o": Acting(on_thread)}, comm=SoloComm())
    pending.add_done_callback(lambda _: (save("callback"), ended.set()))
    assert pending.result(60) is not None and ended.wait(60)
    assert all(tc.verify(tmp_path / name).ok for name in ("outer", "thread", "callback"))


@pytest.mark.parametrize("caught", [True, False])
def test_a_handler_that_saves_leaves_the_save_under_way_whole_or_ends_it(
    tmp_path: Path, caught: bool, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[BaseException] = []

    def handler(*_: Any) -> None:
        try:
            tc.save(tmp_path / "inner", {"n": 1})
        except tc.CheckpointError as error:
            errors.append(error)
            if not caught:
                raise

    class Signalling:
        def state_dict(self) -> dict[str, Any]:
            signal.raise_signal(signal.SIGUSR1)
            return {"w": np.ones(3)}

        load_state_dict = state_dict

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with caplog.at_level(logging.WARNING, "treeckpt"):
            if caught:
                tc.save(tmp_path / "outer", {"o": Signalling()})
            else:
                with pytest.raises(tc.CheckpointError, match="Set a flag and save at the next step"):
                    tc.save(tmp_path / "outer", {"o": Signalling()})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) == 1 and "save_on_signal" in str(errors[0])
    assert ("inside of save, save was refused (1 calls)" in caplog.text) == caught
    assert (tmp_path / "outer/index.json").exists() == caught
    tc.save(tmp_path / "outer", {"n": 2}, overwrite=True)
    assert tc.load(tmp_path / "outer") == {"n": 2}


def test_an_interrupted_call_does_not_refuse_the_save_that_answers_it(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    try:
        tc.save_async(tmp_path / "outer", {"o": Acting(interrupt)})
    except KeyboardInterrupt:
        tc.save(tmp_path / "last", {"n": 1})
    assert tc.load(tmp_path / "last") == {"n": 1}


def test_a_function_that_gets_the_report_of_a_load_may_save(tmp_path: Path) -> None:
    tc.save(tmp_path / "a", {"n": 1})
    tc.load(tmp_path / "a", on_report=lambda report: tc.save(tmp_path / "b", {"report": str(report)}))
    assert tc.load(tmp_path / "b")["report"]


def test_a_refusal_is_logged_also_where_the_call_fails_for_another_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save_and_fail() -> None:
        with contextlib.suppress(tc.CheckpointError):
            tc.save(tmp_path / "inner", {"n": 1})
        raise ValueError("another reason")

    with caplog.at_level(logging.WARNING, "treeckpt"), pytest.raises(ValueError, match="another reason"):
        tc.save(tmp_path / "outer", {"o": Acting(save_and_fail)})
    assert "inside of save, save was refused (1 calls)" in caplog.text
