"""Trees of tensors that share storages of a torch.save file, and the change of one bit of such a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

W = torch.arange(300_000, dtype=torch.float32).view(300, 1000)
STORAGE_TREES: dict[str, dict[str, Any]] = {
    "whole": {"model": {"w": W}, "n": torch.ones(3)},
    "ties and views": {"a": W[3:9], "model": {"w": W, "t": W.t()}, "n": torch.ones(3)},
    "parts": {"model": {"w": W[:, 10:20], "v": W[250:]}, "n": torch.ones(3)},
    "transposed": {"model": {"w": W.t()}, "n": torch.ones(3)},
    "overlapping": {"model": {"w": W[:200], "v": W[100:]}, "n": torch.ones(3)},
}


def flip_in_file(path: Path, tensor: torch.Tensor, byte: int = -5) -> None:
    """Changes one bit of a tensor's bytes, which the file holds once."""
    data, wanted = bytearray(path.read_bytes()), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert data.count(wanted) == 1
    data[data.index(wanted) + byte % len(wanted)] ^= 0x40
    path.write_bytes(data)
