"""A training with all that a loop has beside its model continues with the losses of one that never ended."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

import treeckpt as tc
from treeckpt import training

from .jobs import net, same_tensors


class Batches:
    """A loader with the interface of torchdata's StatefulDataLoader, which continues in the middle of an epoch."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data, self._order, self._taken = data, list[int](), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._taken == len(self._order):
            self._order, self._taken = torch.randperm(len(self._data)).tolist(), 0
        while self._taken < len(self._order):
            at = self._order[self._taken : self._taken + 6]
            self._taken += 6
            yield self._data[at]

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self._order), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._taken = list(state["order"]), state["taken"]


def _torchdata(data: torch.Tensor) -> Any:
    # each new iterator of a loader draws from its generator, which by default is the global one
    return StatefulDataLoader(data, batch_size=6, sampler=RandomSampler(data), generator=torch.Generator())  # pyright: ignore[reportArgumentType]


class Loop:
    """A loop with a scheduler, an exponential average, a gradient scaler, a loader and counters."""

    def __init__(self, run: Path, loader: Callable[[torch.Tensor], Any], seed: int) -> None:
        self.model = net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (seed + 1), growth_interval=2)
        self.loader = loader(torch.arange(120.0).reshape(24, 5) / 120)
        self.extra = {"ema": self.ema, "scaler": self.scaler, "seen": 0}
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.beside: dict[str, Any] = {"scheduler": scheduler, "loader": self.loader, "extra": self.extra}
        self.manager = tc.Manager(run, every=1, keep=2, background=False)
        self.manager.resume(self.model, self.optimizer, **self.beside)

    def train(self, last: int) -> list[float]:
        losses: list[float] = []
        while self.manager.count < last:
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = self.model(batch + torch.randn(()) / 10).square().mean()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.beside["scheduler"].step()
                self.ema.update_parameters(self.model)
                self.extra["seen"] += len(batch)
                losses.append(float(loss.detach()))
                self.manager.step(lambda: training.state(self.model, self.optimizer, **self.beside))
                if self.manager.count == last:
                    break
        return losses


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("loader", [Batches, _torchdata], ids=["an object with state_dict", "torchdata"])
def test_a_loop_continues_with_the_same_losses(tmp_path: Path, loader: Callable[[torch.Tensor], Any]) -> None:
    calm = Loop(tmp_path / "calm", loader, 0)
    expected = calm.train(11)
    first = Loop(tmp_path / "run", loader, 0)
    assert first.train(6) == expected[:6], "it ends in the middle of the second epoch"
    again = Loop(tmp_path / "run", loader, 7)
    assert again.train(11) == expected[6:]
    assert again.extra["seen"] == calm.extra["seen"] == 66 and again.scaler.get_scale() == calm.scaler.get_scale() > 8
    assert same_tensors(dict(again.ema.state_dict()), dict(calm.ema.state_dict()))
    assert again.beside["scheduler"].state_dict() == calm.beside["scheduler"].state_dict()


CONTINUES = {  # what the generator of a loader is, or what is logged of it: the batches, the other random numbers
    "draws from the generator of its sampler": (False, True),
    "draws from the global generator": (True, False),
    "one of its own": (True, True),
}


def _loader(why: str) -> Any:
    shuffle, generator = why != "one of its own", None if "global" in why else torch.Generator()
    return StatefulDataLoader([*range(8)], shuffle=shuffle, generator=generator)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("why", CONTINUES)
@pytest.mark.parametrize("first_run", [True, False])
def test_a_loader_whose_generator_does_not_continue_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, why: str, first_run: bool
) -> None:
    model, loader = net(0), _loader(why)
    if not first_run:
        tc.save(tmp_path / "step_00000001", training.state(model, loader=loader), step=1)
    for _ in range(2):
        tc.Manager(tmp_path, background=False).resume(model, loader={"train": loader} if first_run else loader)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (CONTINUES[why] != (True, True)) and all(
        why in text and "generator=torch.Generator()" in text for text in texts
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("why", CONTINUES)
def test_what_is_logged_of_generators_is_so(why: str) -> None:
    def train(loader: Any, steps: int) -> tuple[list[Any], list[float], list[Any]]:
        batches, numbers, states = list[Any](), list[float](), list[Any]()
        while len(numbers) < steps:
            for batch in loader:
                batches.append(batch.tolist())
                numbers.append(torch.rand(()).item())
                states.append((copy.deepcopy(loader.state_dict()), torch.get_rng_state()))
        return batches, numbers, states

    batches, numbers, states = train(_loader(why), 16)
    again = _loader(why)
    again.load_state_dict(states[2][0])
    torch.set_rng_state(states[2][1])
    found = train(again, 13)
    assert (batches[3:] == found[0], numbers[3:] == found[1]) == CONTINUES[why]


@pytest.mark.parametrize("own", [True, False])
def test_with_a_plain_loader_other_random_numbers_continue_if_its_generator_is_its_own(
    tmp_path: Path, own: bool
) -> None:
    def train(extra: dict[str, int], last: int) -> list[Any]:
        found, generator = list[Any](), torch.Generator() if own else None
        sampler = StatefulDistributedSampler([*range(8)], 1, 0)  # pyright: ignore[reportArgumentType]
        loader = DataLoader([*range(8)], 2, sampler=sampler, generator=generator)  # pyright: ignore[reportArgumentType]
        while extra["step"] < last:
            sampler.set_epoch(extra["epoch"])
            sampler.load_state_dict({"yielded": extra["seen"]})
            if generator is not None:
                generator.manual_seed(extra["epoch"])
            for batch in loader:
                found.append((batch.tolist(), torch.rand(()).item()))
                extra["step"], extra["seen"] = extra["step"] + 1, extra["seen"] + 2
                if extra["step"] == last:
                    return found
            extra["epoch"], extra["seen"] = extra["epoch"] + 1, 0
        return found

    model, extra = net(0), {"step": 0, "epoch": 0, "seen": 0}
    train(extra, 6)  # in the middle of the second epoch
    tc.save(tmp_path / "c", training.state(model, extra=extra))
    model, again = net(0), {"step": 0, "epoch": 0, "seen": 0}
    torch.manual_seed(1)
    training.restore(tmp_path / "c", model, extra=again)
    found = train(again, 12)
    torch.manual_seed(0)
    model, calm = net(0), {"step": 0, "epoch": 0, "seen": 0}
    expected = train(calm, 12)[6:]
    assert [batch for batch, _ in found] == [batch for batch, _ in expected] and again == calm
    assert (found == expected) == own
