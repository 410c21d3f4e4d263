"""`Manager.open`: a step that is restored in parts, by frameworks that read their own files first."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks, shards_of
from treeckpt._core.format.files import step_name, stored_name
from treeckpt._io.comm.comm import thread_comms

N = 1 << 16


def filled(run: Any, *steps: int, **options: Any) -> tc.Manager:
    """A run whose steps hold their numbers, in two arrays and a file beside them."""
    manager = tc.Manager(run, background=False, keep=None, **options)
    for step in steps:
        tree = {"a": np.full(N, float(step)), "b": np.full(N, float(step))}
        manager.save(step, tree, files={"state.json": b"%d" % step}, custom_metadata={"epoch": step})
    return manager


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage(run: Path, step: int) -> None:
    """Changes a byte of the last array of a step."""
    flip(shards_of(run / step_name(step))[0], -10)


@pytest.mark.parametrize("where", ["disk", pytest.param("s3", marks=pytest.mark.slow)])
def test_every_rank_opens_the_same_step_and_what_was_saved_beside_it(
    tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue("s3").url() if where == "s3" else tmp_path
    filled(run, 1, 2)

    def act(comm: Any) -> Any:
        manager = tc.Manager(run, comm=comm)
        with manager.open() as opened:
            assert opened is not None and manager.count == 0 and opened.passed_over == ()
            found = opened.step, opened.files, opened.custom_metadata, opened.read_file("state.json")
            with pytest.raises(tc.MismatchError, match=r"files: state\.json"):
                opened.read_file("other.json")
            assert tc.load(opened.path)["a"][0] == 2 and opened.load(select="b")["b"][0] == 2
            assert opened.restored and manager.count == 2
        return found

    outcomes = on_ranks(3, act)
    assert errors_of(outcomes) == [None] * 3
    assert [each.value for each in outcomes] == [(2, ("state.json",), {"epoch": 2}, b"2")] * 3


def test_a_first_run_opens_nothing_and_a_misspelt_step_is_refused(tmp_path: Path) -> None:
    manager = tc.Manager(tmp_path / "run", background=False)
    with manager.open() as opened:
        assert opened is None
    manager.save("tuned", {"v": 1})
    with manager.open("tuned") as opened:
        assert opened is not None and (opened.step, opened.load()) == ("tuned", {"v": 1})
    with pytest.raises(tc.CheckpointNotFound, match="the nearest is tuned"), manager.open("tunde"):
        pass
    other = tc.Manager(tmp_path / "run", background=False)
    with other.open() as opened:
        assert opened is not None and opened.step == "tuned"


def restore_from_what_loads(manager: tc.Manager, restore: Callable[[tc.OpenedStep], Any]) -> tuple[Any, list[Any]]:
    """What an adapter does; returns the result, and the steps that were opened."""
    steps: list[Any] = []
    while True:
        try:
            with manager.open() as opened:
                assert opened is not None
                steps.append(opened.step)
                return restore(opened), steps
        except tc.CorruptError:
            continue


def test_damage_that_one_rank_sees_is_an_error_on_all_and_the_next_open_passes_over_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)

    def act(comm: Any) -> Any:
        manager = tc.Manager(tmp_path, comm=comm)
        whole = r"expected a checkpoint that loads on all ranks.*rank 1"
        with pytest.raises(tc.CorruptError, match=whole), manager.open() as opened:
            assert opened is not None and opened.step == 3
            opened.load(select="ab"[comm.rank])
        assert manager.count == 0
        with manager.open() as opened:
            assert opened is not None and [step_name(3) in text for text in opened.passed_over] == [True]
            value = opened.load(select="ab"[comm.rank])["ab"[comm.rank]][0]
        return value, opened.step, manager.count

    with caplog.at_level(logging.WARNING, "treeckpt"):
        outcomes = on_ranks(2, act)
    assert errors_of(outcomes) == [None] * 2
    assert [each.value for each in outcomes] == [(2.0, 2, 2)] * 2
    assert f"{step_name(3)}: passed over, rank 1: CorruptError" in caplog.text


def test_steps_that_fail_in_a_later_part_alone_are_passed_over_one_by_one(tmp_path: Path) -> None:
    manager = filled(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    damage(tmp_path, 2)

    def in_parts(opened: tc.OpenedStep) -> Any:
        return opened.load(select="a")["a"][0], opened.load(select="b")["b"][0]

    assert restore_from_what_loads(manager, in_parts) == ((1.0, 1.0), [3, 2, 1])
    assert manager.count == 1
    damage(tmp_path, 1)
    with pytest.raises(tc.CheckpointNotFound, match="only such as cannot be loaded"):
        restore_from_what_loads(manager, in_parts)


def test_a_damaged_file_beside_the_newest_step_is_damage_too(tmp_path: Path) -> None:
    manager = filled(tmp_path, 1, 2)
    path = tmp_path / step_name(2)
    flip(path / stored_name(tc.inspect(path).save_id, "state.json"), 0)
    assert restore_from_what_loads(manager, lambda opened: opened.read_file("state.json")) == (b"1", [2, 1])
    with pytest.raises(tc.CorruptError), manager.open(2) as opened:
        assert opened is not None
        opened.read_file("state.json")


def test_a_step_that_is_asked_for_is_never_exchanged_for_another(tmp_path: Path) -> None:
    manager = filled(tmp_path, 1, 2)
    damage(tmp_path, 2)
    for _ in range(2):
        with pytest.raises(tc.CorruptError, match="changed bytes"), manager.open(2) as opened:
            assert opened is not None
            opened.load()
    model = torch.nn.Linear(1, 1)
    with pytest.raises(tc.CheckpointNotFound, match="the nearest is 2"):
        manager.resume(model, step=7)


def test_no_other_manager_deletes_a_step_that_is_open(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3)
    other = tc.Manager(tmp_path, keep=1, background=False)
    manager = tc.Manager(tmp_path)
    with manager.open(1) as opened:
        assert opened is not None
        assert [left.name for left in other.clean().left] == [step_name(1)]
        with pytest.raises(tc.CheckpointError, match="it is being read"):
            other.delete(1)
        assert opened.load()["a"][0] == 1
    other.clean()
    assert other.steps() == [3]


def test_a_step_that_another_save_replaces_is_opened_again(tmp_path: Path) -> None:
    manager = filled(tmp_path, 1, 2)

    def replaced_once(opened: tc.OpenedStep) -> Any:
        if not replaced:
            replaced.append(filled(tmp_path, 2))
        return opened.custom_metadata, opened.load()["a"][0]

    replaced: list[Any] = []
    assert restore_from_what_loads(manager, replaced_once) == (({"epoch": 2}, 2.0), [2, 2])


def test_an_error_in_the_body_of_one_rank_ends_it_on_all(tmp_path: Path) -> None:
    filled(tmp_path, 1)

    def act(comm: Any) -> None:
        with tc.Manager(tmp_path, comm=comm).open() as opened:
            assert opened is not None and not (comm.rank and opened.step), "only here"

    found = [outcome.error for outcome in on_ranks(2, act)]
    assert all(isinstance(each, tc.RankError) and list(each.ranks) == [1] for each in found), found


class Job:
    """A model with dropout, its optimizer, and a counter that is registered."""

    def __init__(self, run: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.manager = tc.Manager(run, background=False, keep=None)
        self.seen = {"samples": 0}
        self.manager.register("seen", self.seen)

    def train(self, last: int) -> list[float]:
        losses: list[float] = []
        for step in range(self.manager.count + 1, last + 1):
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.seen["samples"] += 4
            losses.append(float(loss.detach()))
            self.manager.save(step, tc.training.state(self.model, self.optimizer))
        return losses


def test_a_training_restored_in_parts_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    calm = Job(tmp_path / "calm").train(6)
    Job(tmp_path / "run").train(4)
    damage(tmp_path / "run", 4)
    job = Job(tmp_path / "run", seed=9)

    def in_parts(opened: tc.OpenedStep) -> tc.training.RestoreReport:
        before = torch.get_rng_state()
        first = opened.restore(job.model, rng=False)
        assert "optimizer" in first.ignored and torch.equal(torch.get_rng_state(), before)
        second = opened.restore(job.model, job.optimizer, rng=False)
        torch.rand(7)  # what a framework draws while it starts
        opened.restore_rng()
        return second

    report, steps = restore_from_what_loads(job.manager, in_parts)
    assert (report.step, steps, job.manager.count, job.seen) == (3, [4, 3], 3, {"samples": 12})
    assert len(report.passed_over) == 1 and job.train(6) == calm[3:]


def test_generators_alone_are_refused_where_none_were_saved(tmp_path: Path) -> None:
    manager = tc.Manager(tmp_path, background=False)
    manager.save(1, tc.training.state(torch.nn.Linear(1, 1), rng=False))
    with pytest.raises(tc.MismatchError, match="rng"), manager.open() as opened:
        assert opened is not None
        opened.restore_rng()


@pytest.mark.parametrize("how", ["open", "resume"])
def test_the_next_save_follows_the_step_that_was_chosen(tmp_path: Path, how: str) -> None:
    calm = Job(tmp_path).train(4)
    job = Job(tmp_path, seed=9)
    if how == "open":
        with job.manager.open(2) as opened:
            assert opened is not None
            opened.restore(job.model, job.optimizer)
    else:
        report = job.manager.resume(job.model, job.optimizer, step=2)
        assert report is not None and report.step == 2
    assert job.manager.count == 2 and job.train(3) == calm[2:3]
    assert job.manager.latest() == 3
    saved = tc.inspect(tmp_path / step_name(3)).lineage
    assert saved is not None and saved.follows == tc.inspect(tmp_path / step_name(2)).save_id


# requests of a save ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [(0,), (2,), (0, 1, 2)])
def test_a_request_from_a_thread_makes_all_ranks_save_the_same_step_once(tmp_path: Path, who: tuple[int, ...]) -> None:
    meet, asked = threading.Barrier(3), (5, 20)

    def act(comm: Any) -> list[int]:
        manager = tc.Manager(tmp_path, comm=comm, background=False, keep=None)
        manager.save_on_signal((), exit=7)
        saved: list[int] = []
        for step in range(1, 40):
            if comm.rank in who and step in asked:
                thread = threading.Thread(target=manager.request_save)
                thread.start()
                thread.join()
            if manager.should_save(step):
                manager.save(step, {"s": step})
                saved.append(step)
            assert not manager.stopping
            meet.wait(60)  # as a step's collective does
        return saved

    outcomes = on_ranks(thread_comms(3, timeout=60), act)
    assert errors_of(outcomes) == [None] * 3
    first, second = outcomes[0].value
    assert first in (6, 7) and second in (21, 22)
    assert [each.value for each in outcomes] == [[first, second]] * 3 and tc.Manager(tmp_path).steps() == [
        first,
        second,
    ]


def test_a_request_on_one_rank_alone_is_met_at_once(tmp_path: Path) -> None:
    with tc.Manager(tmp_path, every=10) as manager:
        assert not manager.should_save(1)
        manager.request_save()
        assert manager.should_save(2) and not manager.should_save(3)


def test_a_request_that_no_other_rank_would_hear_is_refused(tmp_path: Path) -> None:
    outcomes = on_ranks(2, lambda comm: tc.Manager(tmp_path, comm=comm, every=5).request_save())
    assert all("save_on_signal(())" in str(each.error) for each in outcomes), outcomes
