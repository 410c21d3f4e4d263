"""A training with all that a loop has beside its model continues with the losses of one that never ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

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
