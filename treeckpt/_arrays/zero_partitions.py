"""Refuses parameters that DeepSpeed's ZeRO-3 has partitioned: each is left with 0 elements, its part lies elsewhere.

Such a parameter has an attribute `ds_shape`. A state dict of its module has detached tensors without it, of shape
(0,): these are refused in a process in which ZeRO-3 has partitioned parameters.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..errors import TreeError

_ZERO_3 = "deepspeed.runtime.zero.partition_parameters"
GATHER = (
    "Save inside `with deepspeed.zero.GatheredParameters([*model.parameters()]):`, on every rank, where they are whole"
)


def check_not_partitioned(leaf: torch.Tensor, path: str) -> None:
    """Checks that a tensor of shape (0,) is none that ZeRO-3 has partitioned.

    Raises:
        TreeError: it is one, or is not told apart from one.
    """
    shape: Any = getattr(leaf, "ds_shape", None)
    # the number that the next parameter gets
    init: Any = getattr(sys.modules.get(_ZERO_3), "Init", None)
    if shape is not None:
        hint, found = (
            GATHER,
            f"0 elements of a parameter of shape {tuple(shape)}, which DeepSpeed ZeRO-3 has partitioned",
        )
    elif leaf.is_floating_point() and getattr(init, "param_id", 0):
        hint = f"{GATHER}. A tensor that is meant to be empty is saved as an array of numpy"
        found = "shape (0,), as parameters have in a state dict that DeepSpeed ZeRO-3 has partitioned"
    else:
        return
    raise TreeError(path, expected="a tensor with its elements", found=found, hint=hint)
