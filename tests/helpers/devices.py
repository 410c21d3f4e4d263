"""The devices that a test runs on: the host always, CUDA where torch sees it."""

from __future__ import annotations

import pytest
import torch

__all__ = ["CUDA_MARKS", "DEVICES"]

CUDA_MARKS = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
)
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA_MARKS)]
"""What each test of a device runs with: on the host it shows that the test itself is right."""
