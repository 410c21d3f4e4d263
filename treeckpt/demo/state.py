"""Digests of a job's state, to compare it with the state that another job saved.

Digests gather each distributed tensor with torch's own `full_tensor` and hash it: an oracle that shares no code with
the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .tasks import Digests

__all__ = ["Tree", "digests"]

Tree = dict[str, Any]


def digests(tree: object) -> Digests:
    """SHA-256 of every leaf, by path. Every rank must call it, with the same paths."""
    return {path: _digest(leaf) for path, leaf in _leaves(tree, "")}


def _leaves(node: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(child, f"{path}/{key}")
    elif isinstance(node, list | tuple):
        for position, child in enumerate(node):
            yield from _leaves(child, f"{path}/{position}")
    else:
        yield path.removeprefix("/"), node


def _digest(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return hashlib.sha256(repr(leaf).encode()).hexdigest()
    whole = (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).detach().contiguous()
    content = hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)} ".encode())
    content.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
