"""`Manager.resume`: the newest checkpoint that loads, with what is registered; nothing on a first run."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks, shards_of
from treeckpt._core.format.files import step_name
from treeckpt._io.storage import checkpoint


class Job:
    """A model with dropout, its optimizer and scheduler, and a counter that is registered with a manager."""

    def __init__(self, run: Path, seed: int = 0, comm: Any = None) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Dropout(0.2), torch.nn.Linear(512, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.manager = tc.Manager(run, background=False, keep=None, comm=comm)
        self.seen = {"samples": 0}
        self.manager.register("seen", self.seen)

    def train(self, last: int) -> list[float]:
        losses: list[float] = []
        for step in range(self.manager.count + 1, last + 1):
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.seen["samples"] += 4
            losses.append(float(loss.detach()))
            self.manager.save(step, tc.training.state(self.model, self.optimizer, scheduler=self.scheduler))
        return losses

    def resume(self, **options: Any) -> tc.training.RestoreReport | None:
        return self.manager.resume(self.model, self.optimizer, scheduler=self.scheduler, **options)


def test_a_first_run_refuses_what_its_first_save_would_refuse(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    model, optimizer, resume = job.model, job.optimizer, job.manager.resume
    with pytest.raises(tc.TreeError, match=r"The order is state\(model, optimizer\)"):
        resume(optimizer, model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(tc.TreeError, match="expected"):
        resume(model.state_dict(), optimizer.state_dict())  # pyright: ignore[reportArgumentType]
    with pytest.raises(tc.TreeError, match="parameter"):
        resume(torch.nn.Linear(2, 2), optimizer)
    with pytest.raises(tc.MismatchError, match="StatefulDataLoader"):
        resume(model, optimizer, loader=torch.utils.data.DataLoader([1]))
    with pytest.raises(TypeError, match="'stric' is no option of resume; near to it is 'strict'"):
        resume(model, optimizer, stric=False)  # pyright: ignore[reportCallIssue]
    assert resume(model, optimizer, scheduler=False, loader=False, extra={"ema": model}) is None


class Unsaveable:
    """A value that a save refuses, with `allow_pickle` too."""

    def __reduce__(self) -> str:
        raise ValueError("there is no way to save it")


class Reader:
    """A loader whose state may not be asked for before it is read."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("its workers would start")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_first_run_refuses_what_its_first_save_would_refuse_of_a_loader_in_the_same_words(
    tmp_path: Path, *, allow_pickle: bool
) -> None:
    model, manager = torch.nn.Linear(2, 2), tc.Manager(tmp_path, background=False, allow_pickle=allow_pickle)
    odd = Unsaveable()
    for loader in (odd, {"epoch": 3, "odd": odd}, [1, (odd,)]):
        with pytest.raises(tc.TreeError) as at_start:
            manager.resume(model, loader=loader)
        with pytest.raises(tc.TreeError) as at_save:
            manager.save(1, tc.training.state(model, loader=loader))
        assert f"{at_start.value}" == f"{at_save.value}".replace("/~rank*", "")
    for loader in (Reader(), {"reader": Reader(), "epoch": 3, "seen": torch.ones(2)}, [Reader(), "name", {1: 2.0}]):
        assert manager.resume(model, loader=loader) is None
    if allow_pickle:
        assert manager.resume(model, loader={"args": argparse.Namespace(lr=1)}) is None


def damage(run: Path, step: int, at: int = -10) -> None:
    """Changes a byte of a step."""
    shard = max(shards_of(run / step_name(step)), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)


def test_a_first_run_resumes_nothing_and_a_second_one_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Job(tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    assert first.resume() is None and first.manager.count == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.model.state_dict().items())
    first.train(3)
    second = Job(tmp_path / "run", seed=9)
    report = second.resume()
    assert report is not None and (report.step, second.manager.count) == (3, 3)
    assert report.passed_over == () and second.seen == {"samples": 12}
    assert second.scheduler.state_dict() == first.scheduler.state_dict()
    losses = second.train(5)
    unbroken = Job(tmp_path / "unbroken")
    assert unbroken.train(5)[3:] == losses


@pytest.mark.parametrize("what", ["bytes", "cut", "index"])
def test_a_broken_checkpoint_is_passed_over_and_named(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    Job(tmp_path).train(3)
    newest = tmp_path / step_name(3)
    if what == "bytes":
        damage(tmp_path, 3)
    elif what == "cut":
        shards_of(newest)[0].write_bytes(b"")
    else:
        (newest / "index.json").write_text("{")
    job = Job(tmp_path, seed=9)
    with caplog.at_level(logging.WARNING, "treeckpt"):
        report = job.resume()
    assert report is not None and (report.step, job.manager.count, job.seen) == (2, 2, {"samples": 8})
    assert len(report.passed_over) == 1 and report.passed_over[0].startswith(f"{newest}: ")
    assert "passed over" in str(report) and f"{newest}: passed over" in caplog.text
    saved = tc.load(tmp_path / step_name(2))["model"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in job.model.state_dict().items())
    job.manager.save(4, tc.training.state(job.model, job.optimizer, scheduler=job.scheduler))
    assert tc.Manager(tmp_path).latest() == 4


@pytest.mark.parametrize("at", [-10, 4096], ids=["one part", "another part"])
def test_broken_checkpoints_alone_are_an_error_never_a_new_start(tmp_path: Path, at: int) -> None:
    Job(tmp_path).train(2)
    for step in (1, 2):
        damage(tmp_path, step, at)
    with pytest.raises(tc.CheckpointNotFound, match=r"found only such as cannot be loaded.*treeckpt verify"):
        Job(tmp_path).resume()
    for step in (1, 2):
        (tmp_path / step_name(step) / "index.json").write_text("{")
    with pytest.raises(tc.CheckpointNotFound, match="found only such as cannot be loaded"):
        Job(tmp_path).resume()


def test_what_a_killed_first_save_left_is_a_first_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Job(tmp_path).train(1)
    (tmp_path / step_name(1) / "index.json").unlink()
    with caplog.at_level(logging.WARNING, "treeckpt"):
        assert Job(tmp_path).resume() is None
    assert "passed over, partial" in caplog.text


def test_a_first_run_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treeckpt")
    assert Job(tmp_path / "misspelt").resume() is None
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == f"{tmp_path / 'misspelt'}: no checkpoint: the training starts anew"


@pytest.mark.parametrize("above", ["{}", "memory://runs-below{}"], ids=["local", "bucket"])
def test_a_first_run_above_other_runs_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, above: str
) -> None:
    folder = above.format(tmp_path)
    for name in ("a", "b"):
        tc.save(f"{folder}/{name}/{step_name(3)}", {"w": np.zeros(2)}, step=3)
    assert tc.Manager(folder, background=False).resume(torch.nn.Linear(1, 1)) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(f"starts anew. Below it are runs: {folder}/a, {folder}/b")


def test_a_resume_says_what_does_not_fit_before_anything_changes(tmp_path: Path) -> None:
    Job(tmp_path).train(1)
    job = Job(tmp_path, seed=9)
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    job.model.add_module("more", torch.nn.Linear(1, 1))
    with pytest.raises(tc.MismatchError, match=r"2 missing in the checkpoint: model/more\.weight"):
        job.resume()
    report = job.resume(strict=False, keep=("lr",))
    assert report is not None and report.missing == ("model/more.weight", "model/more.bias")
    other = Job(tmp_path, seed=9)
    other.manager.register("later", {"x": 1})
    with pytest.raises(tc.MismatchError, match="the state of 'later', which is registered"):
        other.resume()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())
    with tc.Manager(tmp_path / "tree", background=False) as manager:
        manager.save(1, {"w": np.ones(3)})
        with pytest.raises(tc.MismatchError, match=r"a training state, with `model` at its root"):
            manager.resume(job.model)
    with pytest.raises(TypeError, match="stric"):
        job.resume(stric=False)


def test_a_step_that_is_read_is_protected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    job.train(1)
    names: list[set[str]] = []

    class Watcher:
        def state_dict(self) -> dict[str, int]:
            return {"x": 1}

        def load_state_dict(self, state: Any) -> None:
            names.append({path.name.partition(".")[0] for path in (tmp_path / step_name(2)).iterdir()})

    job.manager.register_io_state("watch", Watcher())
    job.train(2)
    assert job.resume() is not None
    assert any(name.startswith("lease") or "reader" in name for name in names[0]), names


def test_ranks_resume_one_step_whatever_one_of_them_finds(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        job = Job(tmp_path, comm=comm)
        job.train(2)

    def resume(comm: Any) -> tuple[Any, int, int]:
        job = Job(tmp_path, seed=comm.rank, comm=comm)
        report = job.resume(fallback=tc.Fallback(per_rank="take"))
        return report and report.passed_over, job.manager.count, job.seen["samples"]

    assert [outcome.value for outcome in on_ranks(2, resume)] == [(None, 0, 0)] * 2
    assert errors_of(on_ranks(1, save)) == [None]
    (tmp_path / step_name(2) / "index.json").write_text("{")
    found = on_ranks(3, resume)
    assert errors_of(found) == [None] * 3
    assert [outcome.value[1:] for outcome in found] == [(1, 4)] * 3
    assert all(len(outcome.value[0]) == 1 and "step_00000002" in outcome.value[0][0] for outcome in found)


def test_registered_state_of_each_rank_on_another_number_of_ranks_is_refused_by_the_argument_that_takes_it(
    tmp_path: Path,
) -> None:
    saved = Job(tmp_path)
    state = tc.training.state(saved.model, saved.optimizer, scheduler=saved.scheduler)

    def save(comm: Any) -> None:
        manager = tc.Manager(tmp_path, background=False, comm=comm)
        manager.register("own", {"place": tc.PerRank(comm.rank + 10)})
        manager.register("seen", {"samples": 4})
        manager.save(1, state)

    def resume(comm: Any, **options: Any) -> int:
        job, own = Job(tmp_path, comm=comm), {"place": tc.PerRank(0)}
        job.manager.register("own", own)
        job.resume(**options)
        return own["place"].value

    assert errors_of(on_ranks(2, save)) == [None] * 2
    refused = errors_of(on_ranks(1, resume))[0]
    assert isinstance(refused, tc.MismatchError) and "registered/own/place" in str(refused)
    assert "per_rank='take'" in str(refused)
    assert [out.value for out in on_ranks(1, lambda comm: resume(comm, fallback=tc.Fallback(per_rank="take")))] == [10]


@pytest.mark.parametrize(("own", "strict"), [({}, True), ({"place": ...}, True), ({"place": 5}, False)])
def test_registered_state_of_each_rank_that_is_not_asked_for_is_taken_by_no_other_number_of_ranks(
    tmp_path: Path, own: dict[str, Any], strict: bool
) -> None:
    saved = Job(tmp_path)
    state = tc.training.state(saved.model, saved.optimizer, scheduler=saved.scheduler)

    def save(comm: Any) -> None:
        manager = tc.Manager(tmp_path, background=False, comm=comm)
        manager.register("own", {"place": tc.PerRank(comm.rank + 10), "rows": 3})
        manager.register("seen", {"samples": 4})
        manager.save(1, state)

    def resume(comm: Any) -> dict[str, Any]:
        job, here = Job(tmp_path, comm=comm), {**own, "rows": 0}
        job.manager.register("own", here)
        job.resume(strict=strict)
        return here

    assert errors_of(on_ranks(2, save)) == [None] * 2
    found = on_ranks(1, resume)
    assert errors_of(found) == [None]
    assert found[0].value == {**own, "rows": 3}


def test_a_newest_step_whose_index_cannot_be_read_is_named_though_its_place_in_the_lineage_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Job(tmp_path)
    first.train(4)
    first.manager.restore(step=1)
    first.manager.save(2, tc.training.state(first.model, first.optimizer, scheduler=first.scheduler))
    index = tmp_path / step_name(2) / "index.json"
    index.write_bytes(index.read_bytes()[:-20])
    job = Job(tmp_path)
    report = job.resume()
    assert report is not None and report.step == 4, "nothing tells any more that it was left behind"
    [passed] = report.passed_over
    assert passed.startswith(f"{index.parent}: damaged, and perhaps saved after step 4: ")
    assert passed in caplog.text.replace(": passed over, ", ": ")


@pytest.mark.parametrize("target", ["there", "unmounted"])
def test_a_newer_step_that_is_a_link_is_named_and_never_a_new_start(
    tmp_path: Path, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    Job(run).train(3)
    archive.mkdir()

    def move_to_archive(step: int) -> None:
        (run / step_name(step)).rename(archive / step_name(step))
        place = archive if target == "there" else tmp_path / "nowhere"
        (run / step_name(step)).symlink_to(place / step_name(step))

    move_to_archive(1)
    report = Job(run).resume()
    assert report is not None and (report.step, report.passed_over) == (3, ()), "an older one is left where it is"
    move_to_archive(3)
    report = Job(run).resume()
    assert report is not None and report.step == 2
    assert report.passed_over == (f"{run / step_name(3)}: a symbolic link, which is not followed",)
    assert f"{run / step_name(3)}: passed over, a symbolic link" in caplog.text
    move_to_archive(2)
    with pytest.raises(tc.CheckpointNotFound, match="found only such as cannot be loaded"):
        Job(run).resume()


@pytest.mark.parametrize(
    "value",
    [argparse.Namespace(f=print), lambda: 0, torch.Generator(), {1, (object(),)}],
)
def test_a_first_resume_refuses_values_that_no_save_takes(tmp_path: Path, value: Any) -> None:
    job = Job(tmp_path)
    with pytest.raises(tc.TreeckptError, match="extra/deep/0"):
        job.resume(extra={"fine": {"step": 1, "left": ...}, "deep": [value]})
    assert not list(tmp_path.iterdir()) and job.manager.count == 0
    with pytest.raises(tc.TreeckptError, match="extra/deep/0"):
        job.manager.save(1, tc.training.state(job.model, job.optimizer, extra={"deep": [value]}))


def test_a_first_resume_takes_what_a_save_with_pickles_takes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.manager = tc.Manager(tmp_path, background=False, allow_pickle=True)
    extra = {
        "args": object(),
        "lr": argparse.Namespace(lr=0.1),
        "spec": tc.abstract(torch.ones(2)),
        "left": ...,
        "w": torch.ones(2),
    }
    assert job.resume(extra=extra) is None
    with pytest.raises(tc.TreeckptError, match="extra/args"):
        job.resume(extra={"args": lambda: 0})


def test_each_index_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(tmp_path).train(2)
    decoded, real = list[str](), checkpoint.decode_index
    monkeypatch.setattr(checkpoint, "decode_index", lambda data, name: decoded.append(name) or real(data, name))
    report = Job(tmp_path).resume()
    assert report is not None and report.step == 2
    assert len(decoded) == len(set(decoded)) == 2


def test_what_is_registered_is_compared_before_a_resume_changes_anything(tmp_path: Path) -> None:
    """One load fills the training state and the registered objects: one that does not fit leaves all as it was."""
    saved = Job(tmp_path)
    saved.manager.register("table", {"rows": torch.zeros(3)})
    saved.train(1)
    job = Job(tmp_path)
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    for value in before.values():
        value += 1
    job.model.load_state_dict(before)
    job.manager.register("table", {"rows": torch.zeros(4)})
    with pytest.raises(tc.MismatchError, match="registered/table/rows: expected shape"):
        job.resume()
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
    assert not job.optimizer.state
