"""The devices that a test runs on: the host always, CUDA where torch sees it; and a state on one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.bench.states import synchronize

__all__ = ["CUDA_MARKS", "DEVICES", "busy_device", "leaves_of", "state_on"]

CUDA_MARKS = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
)
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA_MARKS)]
"""What each test of a device runs with: on the host it shows that the test itself is right."""

_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_DTYPES = [
    dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype) and name == str(dtype).removeprefix("torch.") and dtype not in _QUANTISED
    if not name.startswith("bits")
]


@contextlib.contextmanager
def busy_device(a: torch.Tensor, *, side_stream: bool) -> Iterator[None]:
    """Runs the body, on a side stream of CUDA if asked, behind work on a square matrix that keeps its device busy."""
    synchronize(a.device)
    with torch.cuda.stream(torch.cuda.Stream()) if side_stream else contextlib.nullcontext():
        for _ in range(20):
            a.copy_(a @ a / a.abs().amax())
        yield


def _filled(dtype: torch.dtype, device: str, shape: tuple[int, ...] = (6, 8)) -> torch.Tensor:
    """A tensor of random bytes on a device."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(dtype.itemsize).integers(0, 2 if dtype is torch.bool else 256, count, np.uint8)
    return torch.from_numpy(data).to(device).view(dtype).view(shape)


def state_on(device: str) -> dict[str, Any]:
    """A leaf of every dtype, views, conjugates, a parameter, a scalar and an empty tensor."""
    base = torch.arange(4000.0, device=device).reshape(50, 80)
    number = torch.view_as_complex(base.reshape(-1, 2).contiguous())
    return {
        "dtypes": {str(dtype): _filled(dtype, device) for dtype in _DTYPES},
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "conjugate": number.conj(),
        "negative": number.conj().imag,
        "parameter": nn.Parameter(torch.randn(3, 5, device=device)),
        "scalar": torch.tensor(2.5, device=device),
        "empty": torch.empty(0, 3, device=device),
        "tied": (base, base),
        "number": 7,
    }


def leaves_of(tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    flat = {**tree["dtypes"], **{name: leaf for name, leaf in tree.items() if isinstance(leaf, torch.Tensor)}}
    return flat | {"first": tree["tied"][0], "second": tree["tied"][1]}
