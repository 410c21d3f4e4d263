"""What a checkpoint has at its root and a restore does not ask for is named; what it lacks is, with the argument."""

from __future__ import annotations

import logging
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from treeckpt import training


class Job:
    """A model with an optimizer that has moments, and a scheduler."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(2)).sum().backward()
        self.optimizer.step()
        self.scheduler: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def state(self, **more: Any) -> dict[str, Any]:
        return training.state(self.model, self.optimizer, scheduler=self.scheduler, loader={"at": 3}, **more)


@pytest.mark.parametrize("in_memory", [False, True])
def test_parts_that_were_not_asked_for_are_in_the_report(tmp_path: Path, in_memory: bool) -> None:
    job = Job()
    tree = job.state(extra={"epoch": 3}) | {"mine": {"a": 1, "b": 2}}
    tc.save(tmp_path / "c", tree)
    source = tree if in_memory else tmp_path / "c"
    report = training.restore(source, job.model, job.optimizer)
    assert report.ignored == ("scheduler", "loader", "mine") and report.extra == {"epoch": 3}
    assert [line.split() for line in str(report).splitlines() if "scheduler" in line] == [["ignored", "scheduler"]]
    assert training.restore(source, job.model, rng=False).ignored == (
        "optimizer",
        "param_groups",
        "scheduler",
        "loader",
        "mine",
    )
    report = training.restore(source, job.model, job.optimizer, scheduler=job.scheduler, loader={})
    assert report.ignored == ("mine",)


def test_a_scheduler_that_is_left_where_a_training_goes_on_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    tc.save(tmp_path / "c", job.state())
    training.restore(tmp_path / "c", job.model)  # the weights alone: no training goes on
    assert not caplog.records
    training.restore(tmp_path / "c", job.model, job.optimizer)
    [record] = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING and text.startswith(str(tmp_path / "c")) and "\n" not in text
    assert "scheduler, loader" in text and "scheduler=" in text


def test_the_state_of_an_object_in_extra_that_is_left_where_a_training_goes_on_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    ema = torch.optim.swa_utils.AveragedModel(job.model)
    extra = {
        "ema": ema,
        "scaler": torch.amp.GradScaler("cpu"),
        "epoch": 3,
        "config": {"lr": 0.1},
        "seen": torch.ones(2),
    }
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, extra=extra))
    training.restore(tmp_path / "c", job.model)  # the weights alone: no training goes on
    training.restore(tmp_path / "c", job.model, job.optimizer, extra=extra)
    training.restore(tmp_path / "c", job.model, job.optimizer, extra=False)
    assert not caplog.records
    assert training.restore(tmp_path / "c", job.model, job.optimizer).extra["epoch"] == 3
    [record] = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING and text.startswith(str(tmp_path / "c")) and "\n" not in text
    assert "extra/ema, extra/scaler in the checkpoint" in text and "extra=" in text


def test_the_refusal_of_other_leaves_proposes_nothing_that_would_leave_all_of_them(tmp_path: Path) -> None:
    def refusal(model: torch.nn.Module, optimizer: Any = None, **options: Any) -> str:
        with pytest.raises(tc.MismatchError) as caught:
            training.restore(tmp_path / "c", model, optimizer, rng=False, **options)
        return caught.value.hint

    job = Job()
    ema = torch.optim.swa_utils.AveragedModel(job.model)
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, extra={"ema": ema, "epoch": 3}))
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    other[0].register_parameter("scale", torch.nn.Parameter(torch.ones(2)))
    for strict in (True, False):
        assert "Not one name of the model is in the checkpoint: pass rename=" in refusal(other, strict=strict)
    assert "has in extra: ema, epoch; given here: average." in refusal(job.model, extra={"average": ema})
    sgd = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    assert "of the class and options that were saved" in refusal(job.model, sgd)


def test_an_option_that_an_older_torch_did_not_have_stays_as_it_is_here(tmp_path: Path) -> None:
    job = Job()
    state = training.state(job.model, job.optimizer)
    for values in state["param_groups"]["values"].values():
        values.pop("decoupled_weight_decay")  # AdamW has it since torch 2.7
    tc.save(tmp_path / "c", state)
    with pytest.raises(tc.MismatchError, match="strict=False to keep these options"):
        training.restore(tmp_path / "c", job.model, job.optimizer)
    report = training.restore(tmp_path / "c", job.model, job.optimizer, strict=False)
    assert report.missing == ("param_groups/values/decoupled_weight_decay",)
    assert job.optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_what_is_registered_and_what_no_longer_is_are_told_apart(tmp_path: Path) -> None:
    def resumed(names: list[str], **options: Any) -> Any:
        with tc.Manager(tmp_path, background=False) as manager:
            for name in names:
                manager.register(name, {"n": 0})
            return manager.resume(job.model, job.optimizer, scheduler=job.scheduler, loader={}, **options)

    job = Job()
    with tc.Manager(tmp_path, background=False) as manager:
        manager.register("seen", {"n": 1})
        manager.register("old one", {"n": 2})
        manager.register_io_state("reader", torch.optim.lr_scheduler.StepLR(job.optimizer, 3))
        manager.save(1, job.state())
    assert resumed([]).ignored == ("registered", "io")
    assert resumed(["seen"]).ignored == ("registered/old one", "io")
    assert resumed(["seen", "old one"]).ignored == ("io",)


@pytest.mark.parametrize("how", ["save", "torch.save"])
def test_state_dicts_without_generators_leave_those_here_alone(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    job, fresh = Job(), Job()
    tree = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    path = tmp_path / "c.pt"
    tc.save(path, tree) if how == "save" else torch.save(tree, path)
    before = numbers_to_come()
    report = training.restore(path, fresh.model, fresh.optimizer)
    assert numbers_to_come() == before
    assert report.left_alone == ("rng",) and report.ignored == () and torch.equal(fresh.model.weight, job.model.weight)
    assert not caplog.records  # other programs never save them there
    with pytest.raises(tc.MismatchError, match=r"^rng: .*pass rng=False") as caught:
        training.restore(path, fresh.model, fresh.optimizer, rng=True)
    assert str(path) in str(caught.value)
    with pytest.raises(tc.MismatchError, match=r"^scheduler: .*pass scheduler=None"):
        training.restore(path, fresh.model, fresh.optimizer, scheduler=fresh.scheduler)


def numbers_to_come() -> tuple[float, ...]:
    """Returns the next number of each generator, and puts it back."""
    state = training.rng_state()
    found = torch.rand(1).item(), float(np.random.rand()), random.random()
    training.set_rng_state(state)
    return found


@pytest.mark.parametrize("how", ["path", "bank", "tree", "resume"])
def test_generators_are_restored_where_they_were_saved_and_otherwise_left_with_a_warning(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    before: list[Any] = []

    def restored(tree: Any, **options: Any) -> training.RestoreReport:
        fresh = Job()
        before.append(numbers_to_come())
        path = tmp_path / f"run {len(before)}" / "step_00000000"
        tc.save(path, tree, step=0)
        if how == "resume":
            with tc.Manager(path.parent) as manager:
                report = manager.resume(fresh.model, fresh.optimizer, **options)
                assert report is not None
                return report
        source: Any = tree if how == "tree" else [path] if how == "bank" else path
        return training.restore(source, fresh.model, fresh.optimizer, **options)

    job = Job()
    tree, expected = training.state(job.model, job.optimizer), numbers_to_come()
    torch.rand(1), np.random.rand(), random.random()
    assert restored(tree).left_alone == () and numbers_to_come() == expected
    without = training.state(job.model, job.optimizer, rng=False)
    torch.rand(1), np.random.rand(), random.random()
    assert not caplog.records
    report = restored(without)
    assert numbers_to_come() == before[-1] and report.left_alone == ("rng",)
    assert report.missing == () and "left alone  rng" in str(report)
    [record] = caplog.records
    assert "no random generators" in record.getMessage() and "rng=False" in record.getMessage()
    assert restored(without, rng=False).left_alone == () and len(caplog.records) == 1
    with pytest.raises(tc.MismatchError, match=r"rng: .*rng=True"):
        restored(without, rng=True)


def own_generators() -> dict[str, Any]:
    """Generators as scripts of their own put them into a checkpoint."""
    python = random.getstate()
    return {
        "all": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": python},
        "numpy as a dict": {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": python,
        },
        "torch": {"torch": torch.get_rng_state()},
        "list": [torch.get_rng_state(), None],
        "tensor": torch.get_rng_state(),
    }


@pytest.mark.parametrize("kind", list(own_generators()))
@pytest.mark.parametrize("how", ["save", "torch.save"])
def test_generators_in_a_form_of_others_are_left_alone_with_a_warning(
    tmp_path: Path, kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    job, fresh = Job(), Job()
    tree = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "rng": own_generators()[kind]}
    path = tmp_path / "c.pt"
    tc.save(path, tree) if how == "save" else torch.save(tree, path)
    was = fresh.model.weight.detach().clone()
    with pytest.raises(tc.MismatchError, match=r"^rng: expected states of torch, numpy and python.*rng=False"):
        training.restore(path, fresh.model, fresh.optimizer, rng=True)
    assert torch.equal(fresh.model.weight, was)
    before = numbers_to_come()
    report = training.restore(path, fresh.model, fresh.optimizer)
    assert torch.equal(fresh.model.weight, job.model.weight)
    assert numbers_to_come() == before and report.left_alone == ("rng",)
    [record] = caplog.records
    assert "rng is not what training.rng_state gives" in record.getMessage()


@pytest.mark.parametrize("name", ["c.pt", "dcp"])
def test_a_converted_training_state_is_restored_without_its_generators(tmp_path: Path, name: str) -> None:
    job, fresh = Job(), Job()
    tc.save(tmp_path / "a", training.state(job.model, job.optimizer))
    tc.convert.convert(tmp_path / "a", tmp_path / name, to="dcp" if name == "dcp" else "torch")
    tc.convert.convert(tmp_path / name, tmp_path / "back")
    for path in (tmp_path / name, tmp_path / "back"):
        before = numbers_to_come()
        report = training.restore(path, fresh.model, fresh.optimizer)
        assert torch.equal(fresh.model.weight, job.model.weight)
        assert report.left_alone == ("rng",) and numbers_to_come() == before


def test_a_tree_that_was_loaded_in_part_leaves_the_rest_alone(tmp_path: Path) -> None:
    job, fresh = Job(), Job()
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, extra={"epoch": 3}))
    before = numbers_to_come()
    report = training.restore(tc.load(tmp_path / "c", select="model"), fresh.model)
    assert torch.equal(fresh.model.weight, job.model.weight) and numbers_to_come() == before
    assert report.left_alone == ("rng",)


def test_weights_alone_without_generators_are_restored_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, fresh = Job(), Job()
    hub, state = tmp_path / "model.safetensors", tmp_path / "c"
    tc.convert.convert(tc.save(tmp_path / "m", dict(job.model.state_dict())).path, hub)
    tc.save(state, training.state(job.model, job.optimizer, rng=False))
    assert training.restore(hub, fresh.model, under="model").left_alone == ("rng",)
    assert training.restore(state, fresh.model).left_alone == ("rng",)
    assert not caplog.records  # no training goes on


def damaged_extra(path: Path) -> Job:
    """Saves a job whose `extra` is damaged, so that a restore that reads it fails."""
    job = Job()
    tc.save(path, training.state(job.model, job.optimizer, extra={"ema": torch.ones(1 << 18), "epoch": 3}))
    [shard] = path.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        file.write(b"damaged")
    return job


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"extra": False}, ()),
        ({"extra": False, "exclude": "extra"}, ()),
        ({"exclude": "extra"}, ("extra",)),
        ({"exclude": ["extra*", "model/bias"]}, ("extra",)),
        ({"select": "model"}, ("extra",)),
        ({"select": "model/weight"}, ("extra",)),
    ],
)
def test_extra_that_is_turned_down_or_not_selected_is_not_read(tmp_path: Path, options: Any, ignored: Any) -> None:
    job, fresh = damaged_extra(tmp_path / "c"), Job()
    with pytest.raises(tc.CorruptError) as caught:
        training.restore(tmp_path / "c", fresh.model, fresh.optimizer)
    assert "step before, as Manager.resume" in caught.value.hint and "Fallback(on_corrupt=" in caught.value.hint
    with pytest.raises(tc.CorruptError):
        training.restore(tmp_path / "c", fresh.model, fresh.optimizer, select=["model", "extra"])
    report = training.restore(tmp_path / "c", fresh.model, fresh.optimizer, **options)
    assert report.extra is None and report.ignored == ignored
    assert torch.equal(fresh.model.weight, job.model.weight)


@pytest.mark.parametrize("extra", [None, {"a": torch.zeros(2)}])
@pytest.mark.parametrize("what", ["select", "exclude"])
@pytest.mark.parametrize("glob", ["rng", "optimizer/weight", "extra/a", "scheduler"])
def test_globs_that_mean_another_part_are_refused_with_its_argument(
    tmp_path: Path, what: str, glob: str, extra: Any
) -> None:
    job = Job()
    tc.save(tmp_path / "c", job.state(extra={"a": torch.ones(2)}))
    options: Any = {what: ["model/weight", glob], "extra": extra}
    with pytest.raises(tc.MismatchError, match=rf"^{what}='{glob}'.*extra=False, rng=False"):
        training.restore(tmp_path / "c", job.model, **options)


def test_parts_that_are_false_are_left_alone(tmp_path: Path) -> None:
    job = Job()
    tc.save(tmp_path / "c", job.state())
    nothing: Any = dict.fromkeys(["optimizer", "scheduler", "loader", "rng", "extra"], False)
    report = training.restore(tmp_path / "c", job.model, **nothing)
    assert report.ignored == ("optimizer", "param_groups", "scheduler", "loader") and not report.missing


def test_the_report_counts_the_bytes_of_an_extra_that_it_returns(tmp_path: Path) -> None:
    job = Job()
    tc.save(tmp_path / "c", job.state(extra={"ema": torch.ones(1 << 18)}))
    for source in (tmp_path / "c", [tmp_path / "c"]):
        with_it = training.restore(source, job.model, rng=False)
        without = training.restore(source, job.model, rng=False, extra=False)
        filled = training.restore(source, job.model, rng=False, extra={"ema": torch.zeros(1 << 18)})
        assert (filled.nbytes, filled.loaded) == (with_it.nbytes, with_it.loaded + 1)
        assert with_it.nbytes == without.nbytes + (1 << 20) and with_it.read_nbytes >= without.read_nbytes + (1 << 20)


def test_the_state_of_a_scheduler_of_another_class_is_logged_with_the_keys_that_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    job.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 10)
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, scheduler=[job.scheduler]))
    report = training.restore(tmp_path / "c", job.model, job.optimizer, scheduler=[job.scheduler])
    assert not caplog.records and not report.ignored
    other = torch.optim.lr_scheduler.StepLR(job.optimizer, 2)
    report = training.restore(tmp_path / "c", job.model, job.optimizer, scheduler=[other])
    [record] = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING and text.startswith(f"{tmp_path / 'c'}: scheduler/0: ")
    assert "StepLR" in text and "only the saved state has T_max, eta_min, " in text and "has step_size, gamma," in text
    assert report.ignored == ("scheduler/0/T_max", "scheduler/0/eta_min")


def several(kind: str, optimizer: torch.optim.Optimizer, *names: str) -> Any:
    """Returns a scheduler of torch that consists of others, or the one other itself."""
    schedule = torch.optim.lr_scheduler
    made: dict[str, Any] = {
        "warm": schedule.LinearLR,
        "cosine": partial(schedule.CosineAnnealingLR, T_max=9),
        "step": partial(schedule.StepLR, step_size=2),
    }
    parts = [made[name](optimizer) for name in names]
    if kind == "alone":
        return parts[0]
    if kind == "chained":
        return schedule.ChainedScheduler(parts, optimizer)
    return schedule.SequentialLR(optimizer, parts, milestones=list(range(2, len(parts) + 1)))


@pytest.mark.parametrize("kind", ["sequential", "chained"])
def test_the_schedulers_in_a_scheduler_are_compared_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    job = Job()
    job.scheduler = several(kind, job.optimizer, "warm", "cosine")
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, scheduler=job.scheduler))
    same = several(kind, job.optimizer, "warm", "cosine")
    assert training.restore(tmp_path / "c", job.model, job.optimizer, scheduler=same).ignored == ()
    assert not caplog.records
    other = several(kind, job.optimizer, "warm", "step")
    report = training.restore(tmp_path / "c", job.model, job.optimizer, scheduler=other)
    [record] = caplog.records
    assert record.getMessage().startswith(f"{tmp_path / 'c'}: scheduler/_schedulers/1: ")
    assert "StepLR" in record.getMessage() and "only the saved state has T_max, eta_min, " in record.getMessage()
    assert report.ignored == ("scheduler/_schedulers/1/T_max", "scheduler/_schedulers/1/eta_min")


@pytest.mark.parametrize(
    ("saved", "here", "found"),
    [
        (("sequential", "warm", "cosine", "step"), ("sequential", "warm", "cosine"), "of 2 .*found that of 3"),
        (("chained", "warm", "cosine"), ("chained", "warm", "cosine", "step"), "of 3 .*found that of 2"),
        (("alone", "step"), ("sequential", "warm", "step"), "SequentialLR of 2 .*found that of one scheduler alone"),
    ],
)
def test_another_number_of_schedulers_in_one_is_refused_before_anything_changes(
    tmp_path: Path, saved: Any, here: Any, found: str
) -> None:
    job, fresh = Job(), Job()
    job.scheduler = several(saved[0], job.optimizer, *saved[1:])
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, scheduler=job.scheduler))
    before = fresh.model.weight.detach().clone()
    with pytest.raises(tc.MismatchError, match=rf"^scheduler: expected .*{found}.*scheduler=None"):
        training.restore(
            tmp_path / "c", fresh.model, fresh.optimizer, scheduler=several(here[0], fresh.optimizer, *here[1:])
        )
    assert torch.equal(fresh.model.weight, before)


def test_several_schedulers_restored_into_one_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.scheduler = several("sequential", job.optimizer, "warm", "cosine")
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, scheduler=job.scheduler))
    alone = several("alone", job.optimizer, "step")
    report = training.restore(tmp_path / "c", job.model, job.optimizer, scheduler=alone)
    assert report.ignored == ("scheduler/_schedulers",) and len(caplog.records) == 1


def test_an_extra_that_comes_back_is_read_with_the_rest(tmp_path: Path) -> None:
    job, fresh = damaged_extra(tmp_path / "damaged"), Job()
    before = fresh.model.weight.detach().clone()
    with pytest.raises(tc.CorruptError):
        training.restore(tmp_path / "damaged", fresh.model, fresh.optimizer)
    assert torch.equal(fresh.model.weight, before), "damage is found before anything changes: an older one can be taken"
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, extra={"ema": torch.ones(3)}))
    report = training.restore(tmp_path / "c", fresh.model, fresh.optimizer)
    shutil.rmtree(tmp_path / "c")
    assert torch.equal(report.extra["ema"], torch.ones(3)), "the checkpoint may go: it is not read later"
