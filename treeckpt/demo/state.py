"""How do a model and its optimizer become a tree, and a tree a model and its optimizer again?

The tree is keyed by parameter name, so that it means the same under every layout. Digests gather each distributed
tensor with torch's own `full_tensor` and hash it: an oracle that shares no code with the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .tasks import Digests

__all__ = ["Tree", "digests", "materialise", "optimizer_tree", "restore"]

Tree = dict[str, Any]


def materialise(optimizer: torch.optim.AdamW) -> None:
    """Gives AdamW its state, all zeros, without taking a step: there must be something to load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def optimizer_tree(model: nn.Module, optimizer: torch.optim.AdamW) -> Tree:
    """The optimizer's state by parameter name, and its groups with names in the place of parameters."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "state": {names[parameter]: dict(state) for parameter, state in optimizer.state.items()},
        "groups": [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups],
    }


@torch.no_grad()
def restore(model: nn.Module, optimizer: torch.optim.AdamW, tree: Tree) -> None:
    """Puts a tree's tensors, laid out as here, and its values into a model and an optimizer with materialised state."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(tree["model"][name])
    parameters = dict(model.named_parameters())
    for name, state in tree["optimizer"]["state"].items():
        for key, tensor in state.items():
            optimizer.state[parameters[name]][key].copy_(tensor)
    for group, saved in zip(optimizer.param_groups, tree["optimizer"]["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


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
