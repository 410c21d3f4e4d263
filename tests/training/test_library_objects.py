"""Schedulers, averages, metrics and loaders of other libraries, which hold objects or arrays of changing sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau, SequentialLR

import treeckpt as tc
from treeckpt import training

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def _load_into(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    tc.save(path, saved)
    tc.load_into(path, here)


def _register(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    for things, act in ((saved, "save"), (here, "restore")):
        manager = tc.Manager(path, background=False)
        for name, thing in things.items():
            manager.register(name, thing)
        manager.save(1) if act == "save" else manager.restore()


def _extra(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    tc.save(path, training.state(model, extra=saved))
    training.restore(path, model, extra=here)


def _extra_of_tree(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    training.restore(training.state(model, extra=saved), model, extra=here)


WAYS = [_load_into, _register, _extra, _extra_of_tree]


class _WarmUp:
    """A job with the scheduler of the warm-up package, which keeps another for the steps behind the warm-up."""

    def __init__(self, kind: str, *, after: bool = True) -> None:
        warmup_scheduler = pytest.importorskip("warmup_scheduler")
        self.kind, self.model = kind, nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        make = ReduceLROnPlateau if kind == "plateau" else lambda optimizer: CosineAnnealingLR(optimizer, 10)
        self.after = make(self.optimizer) if after else None
        self.scheduler: Any = warmup_scheduler.GradualWarmupScheduler(self.optimizer, 1.0, 3, self.after)
        if kind == "sequential":
            self.scheduler = SequentialLR(self.optimizer, [self.scheduler, ExponentialLR(self.optimizer, 0.9)], [20])

    def rates(self, steps: int) -> list[float]:
        found = []
        for step in range(steps):
            self.optimizer.step()
            self.scheduler.step(metrics=1.0 + step) if self.kind == "plateau" else self.scheduler.step()
            found.append(self.optimizer.param_groups[0]["lr"])
        return found


@pytest.mark.parametrize("steps", [2, 4, 9])
@pytest.mark.parametrize("kind", ["cosine", "plateau", "sequential"])
@pytest.mark.parametrize("way", [*WAYS, "training", "resume"])
def test_the_warm_up_goes_on_in_the_scheduler_that_it_keeps(tmp_path: Path, kind: str, steps: int, way: Any) -> None:
    job, fresh = _WarmUp(kind), _WarmUp(kind)
    job.rates(steps)
    if way == "training":
        tc.save(tmp_path / "c", training.state(job.model, job.optimizer, scheduler=job.scheduler))
        training.restore(tmp_path / "c", fresh.model, fresh.optimizer, scheduler=fresh.scheduler)
    elif way == "resume":
        manager = tc.Manager(tmp_path / "run", background=False)
        manager.save(1, training.state(job.model, job.optimizer, scheduler=job.scheduler))
        manager.resume(fresh.model, fresh.optimizer, scheduler=fresh.scheduler)
    else:
        parts = [{"optimizer": one.optimizer, "scheduler": one.scheduler} for one in (job, fresh)]
        way(tmp_path / "c", *parts)
    outer = fresh.scheduler._schedulers[0] if kind == "sequential" else fresh.scheduler
    assert outer.after_scheduler is fresh.after
    assert fresh.rates(8) == job.rates(8)


def test_the_warm_up_without_a_scheduler_behind_it_is_refused(tmp_path: Path) -> None:
    job, fresh = _WarmUp("cosine"), _WarmUp("cosine", after=False)
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, scheduler=job.scheduler))
    with pytest.raises(tc.MismatchError, match="scheduler/after_scheduler: expected a CosineAnnealingLR"):
        training.restore(tmp_path / "c", fresh.model, fresh.optimizer, scheduler=fresh.scheduler)


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_plain(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


MODEL = nn.Linear(2, 2)


def _average(updates: int, *, stored: bool) -> Any:
    average = pytest.importorskip("torch_ema").ExponentialMovingAverage(MODEL.parameters(), 0.9)
    for _ in range(updates):
        with torch.no_grad():
            MODEL.weight.add_(1)
        average.update()
    if stored:
        average.store()
    return average


def _metric(name: str, updates: int, **options: Any) -> Any:
    metric = getattr(pytest.importorskip("torchmetrics"), name)(**options)
    metric.persistent(True)
    for _ in range(updates):
        metric.update(torch.rand(3), *([torch.tensor([0, 1, 1])] if options else []))
    return metric


def _observer(updates: int) -> Any:
    observer = torch.ao.quantization.PerChannelMinMaxObserver()
    for _ in range(updates):
        observer(torch.rand(3, 4))
    return observer


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    **{
        f"average {saved} {here}": lambda saved=saved, here=here: (
            _average(3, stored=saved),
            _average(1, stored=here),
        )
        for saved in (False, True)
        for here in (False, True)
    },
    **{
        f"{name} {saved} {here}": lambda name=name, saved=saved, here=here, options=options: (
            _metric(name, saved, **options),
            _metric(name, here, **options),
        )
        for name, options in (("MeanMetric", {}), ("CatMetric", {}), ("AUROC", {"task": "binary"}))
        for saved, here in ((0, 2), (2, 0), (2, 3))
    },
    "observer": lambda: (_observer(2), _observer(0)),
    "used observer": lambda: (_observer(0), _observer(2)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", PAIRS)
def test_averages_metrics_and_observers_take_arrays_of_another_number_or_size(
    tmp_path: Path, pair: str, way: Callable[[Path, Any, Any], None]
) -> None:
    saved, here = PAIRS[pair]()
    expected = copy.deepcopy(_plain(saved.state_dict()))
    way(tmp_path / "c", {"it": saved}, {"it": here})
    assert _plain(here.state_dict()) == expected


@pytest.mark.parametrize("kind", ["Lookahead", "SAM", "ScheduleFreeWrapper", "OrthoGrad", "TRAC"])
@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_around_another_comes_back_in_a_tree(tmp_path: Path, kind: str, way: Any) -> None:
    library = pytest.importorskip("pytorch_optimizer")

    def make(steps: int) -> tuple[Any, Any]:
        torch.manual_seed(steps)
        model = nn.Linear(3, 2)
        if kind == "SAM":
            optimizer = library.SAM(model.parameters(), base_optimizer=torch.optim.AdamW, lr=0.1)
        else:
            optimizer = getattr(library, kind)(torch.optim.AdamW(model.parameters(), lr=0.1))
        if hasattr(optimizer, "train"):
            optimizer.train()
        train(model, optimizer, steps)
        return model, optimizer

    def train(model: Any, optimizer: Any, steps: int) -> list[Any]:
        found = []
        for step in range(steps):
            torch.manual_seed(step)
            batch = torch.rand(4, 3)

            def closure(batch: torch.Tensor = batch) -> Any:
                loss = model(batch).pow(2).sum()
                loss.backward()
                return loss

            optimizer.zero_grad()
            closure()
            optimizer.step(closure) if kind == "SAM" else optimizer.step()
            found.append(model.weight.tolist())
        return found

    (model, optimizer), (other, again) = make(3), make(2)
    way(tmp_path / "c", {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": again})
    assert train(other, again, 4) == train(model, optimizer, 4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", [*WAYS, "training"])
def test_a_loader_goes_on_where_it_was(tmp_path: Path, workers: int, way: Any) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return stateful.StatefulDataLoader(list(range(20)), batch_size=2, num_workers=workers)

    loader, fresh, model = make(), make(), nn.Linear(1, 1)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    if way == "training":
        tc.save(tmp_path / "c", training.state(model, loader=loader))
        training.restore(tmp_path / "c", model, loader=fresh)
    else:
        way(tmp_path / "c", {"it": loader}, {"it": fresh})
    assert _plain(list(fresh)) == _plain(list(batches))
