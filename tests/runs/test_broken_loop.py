"""What a manager knows of a loop that breaks, and which processes get the signals that it listens to."""

from __future__ import annotations

import signal
import threading
import time
from multiprocessing import get_context, popen_fork

import pytest
import torch
from torch.utils.data import DataLoader

import treeckpt as tc
from tests.helpers.world import LONG
from treeckpt._runs import schedule
from treeckpt._runs.schedule import LoopState, is_of_workers


def mask() -> set[signal.Signals]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


class Masks(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return int(signal.SIGUSR1 in mask())


def in_workers() -> list[int]:
    return [batch.item() for batch in DataLoader(Masks(), num_workers=1)]


def test_workers_that_start_while_a_manager_listens_are_started_with_its_signals_blocked(tmp_path):
    assert in_workers() == [0, 0]
    with tc.Manager(tmp_path) as manager:
        manager.save_on_signal([signal.SIGUSR1])
        assert in_workers() == [1, 1]
        assert signal.SIGUSR1 not in mask()
    assert in_workers() == [0, 0]


def test_other_processes_have_the_signals_as_before(tmp_path):
    context = get_context("fork")
    queue = context.SimpleQueue()
    with tc.Manager(tmp_path) as manager:
        manager.save_on_signal([signal.SIGUSR1])
        process = context.Process(target=lambda: queue.put(signal.SIGUSR1 in mask()))
        process.start()
        assert queue.get() is False
        process.join()


def test_a_worker_that_hangs_is_ended_by_terminate(tmp_path, monkeypatch, request):
    ended = threading.Event()  # another thread gets SIGCHLD where the main one blocks it
    request.addfinalizer(ended.set)
    threading.Thread(target=ended.wait).start()
    wait = popen_fork.Popen.wait

    def wait_late(popen, timeout=None):
        for _ in range(2):
            time.sleep(0.05)
        return wait(popen, timeout)

    with tc.Manager(tmp_path) as manager:
        manager.save_on_signal([signal.SIGTERM])
        batches = iter(DataLoader(Masks(), num_workers=1))
        [worker] = batches._workers
        with monkeypatch.context() as patches:
            patches.setattr(schedule, "_WORKER_END_SECONDS", LONG)
            patches.setattr(popen_fork.Popen, "wait", wait_late)
            worker.terminate()
        worker.join(LONG)
        assert worker.exitcode == -signal.SIGKILL


def test_the_state_is_that_of_a_step_until_an_optimizer_begins_another():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    loop = LoopState()
    loop.tree = lambda: {"a": 1}
    with pytest.raises(LookupError, match="between two steps"):
        loop.last_tree()
    loop.reach(1)
    assert loop.last_tree() == {"a": 1}
    optimizer.step()
    with pytest.raises(LookupError, match="between two steps"):
        loop.last_tree()
    loop.reach(2)
    assert loop.last_tree() == {"a": 1}
    loop.close()


def test_a_state_without_all_that_the_loop_saves_is_none():
    loop = LoopState()
    loop.reach(1)
    with pytest.raises(LookupError, match="resume was not given"):
        loop.last_tree()
    loop.tree = lambda: {"model": 1}
    loop.note_saved({"model": 1, "extra": 2})
    with pytest.raises(LookupError, match="saves extra, model"):
        loop.last_tree()


def test_errors_of_workers_are_found_below_those_of_the_loop():
    text = "DataLoader worker (pid 7) is killed by signal: Terminated. "
    try:
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            raise ValueError("no batch") from error
    except ValueError as error:
        assert is_of_workers(error)
    assert not is_of_workers(ValueError("nan"))


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("given", ["values", "loader", "object"])
@pytest.mark.parametrize("broken_at", [1, 5])
def test_values_that_resume_got_are_not_saved_as_those_of_a_later_step(tmp_path, caplog, given, broken_at, request):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)  # which the manager sends again where it has not saved
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))
    model = torch.nn.Linear(2, 2)
    optimizer, counter = torch.optim.SGD(model.parameters()), Counter()
    at_resume = {"values": {"extra": {"epoch": 0}}, "loader": {"loader": [0]}, "object": {"extra": {"count": counter}}}
    with pytest.raises(RuntimeError, match="DataLoader worker"), tc.Manager(tmp_path, every=2) as manager:
        manager.save_on_signal([signal.SIGUSR1])
        manager.resume(model, optimizer, **at_resume[given])
        for step in range(1, 10):
            counter.count = step
            now = {"values": {"extra": {"epoch": step}}, "loader": {"loader": [step]}}
            if manager.should_save(step):
                manager.save(step, tc.training.state(model, optimizer, **now.get(given, at_resume["object"])))
            if step == broken_at:
                manager.schedule.signum = signal.SIGUSR1
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")
    if given == "object":
        assert tc.load(manager.path(broken_at))["extra"]["count"] == {"count": broken_at}
    else:
        assert tc.Manager(tmp_path).latest() == (4 if broken_at == 5 else None)
        assert "is a value, which the loop alone knows" in caplog.text
