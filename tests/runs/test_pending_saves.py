"""The manager keeps its promises while saves go on in the background."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import Gate, GatedRun, run_program
from tests.helpers.memory_run import MemoryRun
from tests.helpers.world import LONG, errors_of, on_ranks, small_tree
from treeckpt._core.format.files import step_name
from treeckpt._io.storage.store import RunStore
from treeckpt._runs.run import RunDirectory


def manager(run: RunStore | Path, **options: Any) -> tc.Manager:
    how = tc.BackgroundOptions(writer="thread", busy=options.pop("busy", "wait"))
    return tc.Manager(run, background=how, **options)


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_saves_are_durable_and_cleaned_up_after_at_the_end(tmp_path: Path, writer: str) -> None:
    with tc.Manager(tmp_path, keep=2, background=tc.BackgroundOptions(writer=writer)) as made:
        array = np.zeros(1000)
        for step in range(1, 6):
            array += 1
            pending = made.save(step, {"a": array})
            assert isinstance(pending, tc.Pending)
        made.wait()
        assert made.steps() == [4, 5]
        assert made.restore()["a"].tolist() == [5.0] * 1000
        assert made.restore(step=4)["a"].tolist() == [4.0] * 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(4), step_name(5)]


def test_a_run_in_memory_is_saved_in_the_background_too() -> None:
    run = MemoryRun()
    with tc.Manager(run, keep=1) as made:
        for step in (1, 2, 3):
            made.save(step, {"s": step})
    assert tc.Manager(run).restore() == {"s": 3} and run.names() == [step_name(3)]


def test_what_is_being_saved_is_neither_offered_nor_cleaned_away(tmp_path: Path, caplog: Any) -> None:
    gate = Gate()
    run = GatedRun(tmp_path, gate)
    with manager(run, keep=1, grace=0.0) as made:
        made.save(1, {"s": 1})
        made.wait()
        gate.open.clear()
        gate.reached.clear()
        pending = made.save(2, {"s": 2})
        assert gate.reached.wait(60)
        assert made.latest() == 1 and not caplog.records, "it is known: nothing to warn of"
        assert {left.why for left in made.clean().left} == {"it is being saved"}
        gate.open.set()
        pending.result(60)
        assert made.latest() == 2
    assert manager(tmp_path).steps() == [2]


def test_a_failed_save_is_raised_by_wait_and_at_the_next_save_and_the_one_after_works(
    tmp_path: Path, caplog: Any
) -> None:
    gate = Gate()
    gate.failing = {step_name(2), step_name(3)}
    made = manager(GatedRun(tmp_path, gate))
    made.save(1, {"s": 1})
    made.save(2, {"s": 2})
    with pytest.raises(tc.CheckpointError, match="No space left"):
        made.wait()
    made.wait()
    made.save(3, {"s": 3})
    with pytest.raises(tc.CheckpointError, match="No space left"):
        made.save(4, {"s": 4})
    made.save(4, {"s": 4})
    made.close()
    assert made.steps() == [1, 4] and "saving step 2 failed" in caplog.text


def test_an_error_in_the_body_is_not_hidden_by_that_of_a_save(tmp_path: Path) -> None:
    gate = Gate()
    gate.failing = {step_name(1)}
    with pytest.raises(ZeroDivisionError), manager(GatedRun(tmp_path, gate)) as made:
        made.save(1, {"s": 1})
        raise ZeroDivisionError
    gate.failing = {step_name(2)}
    with pytest.raises(tc.CheckpointError, match="No space left"), manager(GatedRun(tmp_path, gate)) as made:
        made.save(2, {"s": 2})


def test_a_skipped_save_counts_as_none(tmp_path: Path) -> None:
    gate = Gate()
    with manager(GatedRun(tmp_path, gate), keep=None, busy="skip", every=1) as made:
        gate.open.clear()
        first, second = made.step({"s": 1}), made.step({"s": 2})
        assert isinstance(first, tc.Pending) and isinstance(second, tc.Pending)
        assert (first.skipped, second.skipped) == (False, True)
        assert made.should_save(2), "it was not saved"
        gate.open.set()
        first.result(60)
        made.step({"s": 3})
    assert manager(tmp_path).steps() == [1, 3]


def test_the_save_of_a_signal_is_never_skipped(tmp_path: Path) -> None:
    gate = Gate()
    with pytest.raises(SystemExit), manager(GatedRun(tmp_path, gate), busy="skip", every=1) as made:
        made.save_on_signal([], exit=0)
        gate.open.clear()
        made.step({"s": 1})
        made.schedule.signum = 15
        threading.Timer(0.3, gate.open.set).start()
        made.step({"s": 2})
    assert manager(tmp_path).steps() == [1, 2]


def test_a_signal_after_which_training_fails_does_what_it_would_have_done(tmp_path: Path) -> None:
    import signal

    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(ZeroDivisionError), manager(tmp_path) as made:
            made.save_on_signal([signal.SIGUSR1])
            signal.raise_signal(signal.SIGUSR1)
            assert not heard
            raise ZeroDivisionError
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("ends", ["close", "wait"])
def test_waiting_for_saves_in_flight_has_a_limit_if_asked(tmp_path: Path, ends: str) -> None:
    gate = Gate()
    made = manager(GatedRun(tmp_path, gate))
    made.save(1, {"s": 1})
    made.wait(60)
    gate.open.clear()
    pending = made.save(2, {"s": 2})
    assert isinstance(pending, tc.Pending)
    with pytest.raises(tc.CheckpointError, match=r"step_00000002: expected .*within 0\.2 s, found .*step 2") as caught:
        getattr(made, ends)(timeout=0.2)
    assert caught.value.hint and made.latest() == 1
    gate.open.set()
    pending.result(60)
    made.close(60)
    assert manager(tmp_path).steps() == [1, 2]


def test_a_save_that_was_given_up_does_not_hold_the_end_of_the_program_up(tmp_path: Path) -> None:
    code = f"""
import threading
import treeckpt as tc
from tests.helpers.background import Gate, GatedRun

gate = Gate()
gate.open.wait = lambda timeout: threading.Event().wait()
manager = tc.Manager(GatedRun({str(tmp_path)!r}, gate), background=tc.BackgroundOptions(writer="thread"))
manager.save(1, {{"s": 1}})
try:
    manager.close(timeout=0.2)
except tc.CheckpointError as error:
    print(error)
"""
    done = run_program(code)
    assert done.returncode == 0 and "step 1" in done.stdout and "waiting for" not in done.stderr, done.stderr


@pytest.mark.parametrize("busy", ["wait", "skip"])
def test_ranks_save_in_the_background_and_ask_meanwhile(tmp_path: Path, busy: str) -> None:
    def act(comm: Any) -> Any:
        with manager(tmp_path, keep=2, comm=comm, busy=busy) as made:
            for step in range(1, 8):
                made.save(step, small_tree(comm.rank, 3, seed=step))
                assert made.latest() in (None, *range(1, step + 1))
            made.wait()
            tree = made.restore(like=small_tree(comm.rank, 3))
            return made.steps(), made.count, tree["step"]

    outcomes = on_ranks(3, act)
    assert errors_of(outcomes) == [None] * 3
    assert outcomes[0].value == outcomes[1].value == outcomes[2].value
    steps, count, loaded = outcomes[0].value
    assert loaded == 100 + count and steps[-1] == count
    if busy == "wait":
        assert count == 7


def test_one_ranks_failure_is_every_ranks_and_the_next_save_works(tmp_path: Path) -> None:
    gate = Gate()
    gate.failing = {step_name(2)}

    def act(comm: Any) -> Any:
        with manager(GatedRun(tmp_path, gate) if comm.rank == 1 else tmp_path, comm=comm) as made:
            made.save(1, small_tree(comm.rank, 2))
            made.save(2, small_tree(comm.rank, 2))
            with pytest.raises(tc.RankError, match="rank 1"):
                made.save(3, small_tree(comm.rank, 2))
            made.save(3, small_tree(comm.rank, 2))
            made.wait()
            return made.steps()

    outcomes = on_ranks(2, act)
    assert errors_of(outcomes) == [None] * 2
    assert [o.value for o in outcomes] == [[1, 3]] * 2


def test_one_clean_up_waits_for_another_however_many_saves_end_meanwhile(tmp_path: Path, monkeypatch: Any) -> None:
    go_on, real = threading.Event(), RunDirectory.clean
    calls: list[int] = []
    before = set(threading.enumerate())  # clean-ups that tests of before have begun

    def clean(self: RunDirectory, *arguments: Any, **options: Any) -> Any:
        if self.url == str(tmp_path):
            calls.append(1)
            assert go_on.wait(LONG)
        return real(self, *arguments, **options)

    monkeypatch.setattr(RunDirectory, "clean", clean)
    with manager(tmp_path, keep=1) as made:
        for step in range(1, 7):
            pending = made.save(step, {"s": step})
            assert isinstance(pending, tc.Pending) and pending.result(60)
        begun = set(threading.enumerate()) - before
        assert sum(thread.name == "treeckpt-clean" for thread in begun) <= 2
        go_on.set()
    assert len(calls) <= 3 and [path.name for path in tmp_path.iterdir()] == [step_name(6)]
