"""Measures how fast memory is copied between the host and a device: from and to pinned memory, in bytes per second.

With the device "cpu" both are copies in host memory, so that the scenarios of devices can be tried without one.
"""

from __future__ import annotations

import time

import torch

from .raw_limits import LEAST, MOST
from .results import DeviceLimit
from .states import synchronize

TIMES = 3
"""Copies, of which the fastest counts."""


class DeviceLimits:
    """Measures with one buffer on each side.

    Args:
        device: of torch, as "cuda" or "cuda:1".
        nbytes: of the payload that is compared.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self._nbytes = min(max(nbytes, LEAST), MOST)
        self._there = torch.ones(self._nbytes, dtype=torch.uint8, device=device)
        self._host = torch.ones(self._nbytes, dtype=torch.uint8, pin_memory=self._there.is_cuda)

    def measure(self) -> dict[DeviceLimit, float]:
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
