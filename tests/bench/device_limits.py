"""Measures how fast memory is copied between the host and a device: from and to pinned memory, in bytes per second.

With the device "cpu" both are copies in host memory, so that the scenarios of devices can be tried without one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from tests.bench.states import SpeedTask, synchronize
from treeckpt._bench.measure import LARGEST, MIN_RATED_NBYTES, Measurement
from treeckpt._bench.results import Limit
from treeckpt._bench.states import shapes_bytes

TIMES = 3
"""Copies, of which the fastest counts."""


class DeviceLimits:
    """Measures with one buffer on each side.

    Args:
        device: of torch, as "cuda" or "cuda:1".
        nbytes: of the payload that is compared.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self._nbytes = min(max(nbytes, MIN_RATED_NBYTES), LARGEST)
        self._there = torch.ones(self._nbytes, dtype=torch.uint8, device=device)
        self._host = torch.ones(self._nbytes, dtype=torch.uint8, pin_memory=self._there.is_cuda)

    def measure(self) -> dict[str, float]:
        """Returns both rates."""
        return {"D2H": self._rate(self._there, self._host), "H2D": self._rate(self._host, self._there)}

    def _rate(self, source: torch.Tensor, target: torch.Tensor) -> float:
        seconds: list[float] = []
        for _ in range(TIMES):
            synchronize(self._there.device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize(self._there.device)
            seconds.append(time.perf_counter() - start)
        return self._nbytes / min(seconds)


class DeviceMeasurement(Measurement):
    """Measures turns with a state on a device: no limit is above the rate of the copy."""

    def __init__(self, task: SpeedTask) -> None:
        nbytes = shapes_bytes(task.shapes)
        super().__init__(task, nbytes)
        self._device = DeviceLimits(task.device, nbytes) if nbytes >= MIN_RATED_NBYTES else None

    def limits(self, names: Sequence[Limit]) -> dict[str, float]:
        rates = super().limits(names)
        if self._device is None:
            return rates
        copies = self._device.measure()
        for name in names:
            if name != "C":
                rates[name] = min(rates[name], copies["D2H" if name.startswith("W") else "H2D"])
        return {**rates, **copies}
