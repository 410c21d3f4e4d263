"""A training state with all that formats differ in, and a comparison that misses nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["assert_same", "training_tree"]


def training_tree() -> dict[str, Any]:
    """A model, its optimizer, ties, views, odd dtypes and values; all of it fits into a file of torch.save."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 30))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 30)).sum().backward()
    optimizer.step()
    tree: dict[str, Any] = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 3}
    tree |= {
        "half": torch.randn(5).bfloat16(),
        "eight": torch.randn(4).to(torch.float8_e4m3fn),
        "unsigned": torch.tensor([1, 40000], dtype=torch.uint16),
        "complex": torch.randn(2, 3, dtype=torch.complex128),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "pair": (torch.arange(3), 2.5),
        "values": [None, True, -7, 1 << 80, float("-inf"), "text", b"bytes", 1 + 2j, {1, "a"}],
        "torch": [torch.Size([2, 3]), torch.float16, torch.device("cuda:1")],
    }
    tree["tie"] = tree["model"]["0.weight"]
    tree["view"] = tree["model"]["0.weight"][3:7].t()
    return tree


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Trees bit for bit, with the types of containers and values, and the order of keys."""
    assert type(found) is type(expected), (path, type(found), type(expected))
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert found.requires_grad == expected.requires_grad, path
        assert _bits(found) == _bits(expected), path
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif type(expected) in (list, tuple):
        assert len(found) == len(expected), path
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    else:
        assert found == expected, (path, found, expected)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
