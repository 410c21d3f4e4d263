"""The place of a loader that Accelerate has prepared, with what its shuffled order comes from.

Accelerate saves how many batches a stateful loader has given, and neither the epoch nor the generators from which its
order was drawn. Here a loader tells when an epoch begins and ends: inside one, the generators are saved as they were
when it began, and the order is drawn again from them. Loaders and samplers without a generator, which would draw from
torch's global one, get one of their own, so that its other users are not disturbed.
"""

from __future__ import annotations

from typing import Any

import torch


class LoaderPosition:
    """The place of a prepared loader: its epoch, and the generators of its order as they were when the epoch began."""

    def __init__(self, loader: Any) -> None:
        self.loader, self._running, sampler = loader, loader, loader.batch_sampler
        while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
            sampler = inner
        self._sampler, self._begun = sampler, list[torch.Tensor]()
        owners = [each for each in (sampler, loader.base_dataloader) if hasattr(each, "generator")]
        for owner in owners:  # instead of torch's global one
            owner.generator = owner.generator or torch.Generator().manual_seed(torch.initial_seed())
        self._generators = [owner.generator for owner in owners]
        self.watch(loader)

    def watch(self, loader: Any) -> None:
        """Follows the epochs of the loader, or of one that skips its first batches."""
        begin, end = loader.begin, loader.end

        def begun() -> None:
            begin()
            self._running, self._begun = loader, [generator.get_state() for generator in self._generators]

        def ended() -> None:
            end()
            self.loader.iteration, self._begun = loader.iteration, []

        loader.begin, loader.end = begun, ended

    def state_dict(self) -> dict[str, Any]:
        within = bool(self._begun) and not self._running.end_of_dataloader
        return {
            "epoch": self._running.iteration + (bool(self._begun) and not within),
            "seed": getattr(self._sampler, "initial_seed", None),
            "generators": self._begun if within else [generator.get_state() for generator in self._generators],
            "loader": self._running.state_dict() if within and self.loader.use_stateful_dataloader else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.iteration = state["epoch"]
        if state["seed"] is not None:
            self._sampler.initial_seed, self._sampler.epoch = state["seed"], state["epoch"]
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.set_state(saved)
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])
