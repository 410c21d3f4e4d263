"""Incremental saves of a state on a device: what is unchanged is hashed there, and not copied to the host.

On the host, conjugate tensors are read as those of a device are, and the test asks for checksums of them too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import treeckpt as tc
from tests.helpers.devices import CUDA_MARKS, DEVICES, busy_device
from treeckpt._arrays import device_checksums
from treeckpt._arrays.torch import DeviceArray
from treeckpt._core.format.shard_header import BLOCK

FROZEN, REST = 3, 800
FROZEN_NBYTES, TRAINED_NBYTES = 2 * BLOCK + REST // FROZEN // 8 * 8, 4000
Save = Callable[..., tc.SaveReport]


def save_in_background(path: Path, tree: Any, *, staging: Any, **options: Any) -> tc.SaveReport:
    report = tc.save_async(path, tree, background=tc.BackgroundOptions(staging=staging), **options).result(120)
    assert report is not None
    return report


def save_copied(path: Path, tree: Any, **options: Any) -> tc.SaveReport:
    return save_in_background(path, tree, staging="copy", **options)


def save_lazily(path: Path, tree: Any, **options: Any) -> tc.SaveReport:
    return save_in_background(path, tree, staging="lazy", **options)


class Adapted:
    """A state of frozen arrays and trained ones that take turns, on a device."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        numbers = [torch.randn(FROZEN_NBYTES // 8, dtype=torch.complex64, generator=generator) for _ in range(FROZEN)]
        self.frozen = [nn.Parameter(number.to(device).conj(), requires_grad=False) for number in numbers]
        self.trained = [nn.Parameter(torch.zeros(TRAINED_NBYTES // 4, device=device)) for _ in range(FROZEN)]

    def train(self) -> dict[str, Any]:
        with torch.no_grad():
            for parameter in self.trained:
                parameter += 1
        return {f"{i}": {"base": self.frozen[i], "adapter": self.trained[i]} for i in range(FROZEN)}


class CopiesToHost(TorchDispatchMode):
    """Counts the bytes that operations of this thread copy from a device to the host."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and not leaf.is_cpu for leaf in tree_leaves((args, kwargs))):
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.nbytes += sum(tensor.nbytes for tensor in tensors if tensor.is_cpu)
        return result


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of memory that numpy cannot address."""
    nbytes: list[int] = []
    to_host, to_arena = DeviceArray.read, DeviceArray.copy_to

    def counted_read(self: DeviceArray, box: Any) -> np.ndarray:
        data = to_host(self, box)
        nbytes.append(data.nbytes)
        return data

    def counted_copy(self: DeviceArray, box: Any, out: np.ndarray) -> Any:
        nbytes.append(out.nbytes)
        return to_arena(self, box, out)

    monkeypatch.setattr(DeviceArray, "read", counted_read)
    monkeypatch.setattr(DeviceArray, "copy_to", counted_copy)
    monkeypatch.setattr(device_checksums, "KINDS", device_checksums.KINDS | {"cpu"})
    return nbytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("save", [tc.save, save_copied, save_lazily])
def test_what_is_unchanged_on_a_device_is_not_copied(tmp_path: Path, read: list[int], save: Save, device: str) -> None:
    state, trained = Adapted(device), FROZEN * TRAINED_NBYTES if device == "cuda" else 0
    for step in range(4):
        tree, copies = state.train(), CopiesToHost()
        read.clear()
        with copies:
            report = save(tmp_path / f"{step}", tree, **({"base": tmp_path / f"{step - 1}"} if step else {}))
        unchanged = FROZEN * FROZEN_NBYTES if step > 1 else 0
        assert report.shared_nbytes == unchanged
        assert sum(read) == trained + FROZEN * FROZEN_NBYTES - unchanged
        if unchanged:  # the bytes behind the last whole block are hashed by the host
            assert copies.nbytes <= trained + unchanged % BLOCK + 8 * (unchanged // BLOCK)
        loaded = tc.load(tmp_path / f"{step}")
        for name, layer in tree.items():
            assert all(torch.equal(loaded[name][key].resolve_conj(), layer[key].cpu()) for key in layer)
    with torch.no_grad():
        state.frozen[1][5] += 1
    read.clear()
    assert save(tmp_path / "4", state.train(), base=tmp_path / "3").shared_nbytes == 0
    assert sum(read) == trained + FROZEN * FROZEN_NBYTES
    assert torch.equal(tc.load(tmp_path / "4")["1"]["base"].resolve_conj(), state.frozen[1].cpu())


@pytest.mark.parametrize(
    ("device", "stream"),
    [("cpu", "current"), *(pytest.param("cuda", s, marks=CUDA_MARKS) for s in ("current", "side"))],
)
@pytest.mark.parametrize("save", [tc.save, save_copied, save_lazily])
def test_what_was_queued_on_the_device_before_the_save_is_compared(
    tmp_path: Path, save: Save, device: str, stream: str
) -> None:
    a, x = torch.rand(512, 512, device=device), torch.zeros(1 << 20, device=device)
    for step in range(4):
        save(tmp_path / f"{step}", {"x": x}, **({"base": tmp_path / f"{step - 1}"} if step else {}))
    with busy_device(a, side_stream=stream == "side"):
        x.add_(3)
        save(tmp_path / "4", {"x": x}, base=tmp_path / "3")
    assert tc.load(tmp_path / "4")["x"].eq(3).all()
