"""State of the random number generators of this process.

These are torch's CPU generator, that of the current CUDA device where CUDA is in use, numpy's global one and Python's.
Each rank has its own; generators that a program creates itself belong into `extra`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import MismatchError

_PARTS = "torch", "numpy/bit_generator", "python/version", "python/state", "python/gauss"
"""What a state of the generators has in any case; `cuda` is there where CUDA was in use."""


def rng_state() -> dict[str, Any]:
    """Returns the state of every generator as a tree of arrays and values.

    >>> sorted(tc.training.rng_state())
    ['numpy', 'python', 'torch']
    """
    version, integers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "state": np.array(integers, np.uint64), "gauss": gauss},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def is_rng(paths: Iterable[str]) -> bool:
    """Returns whether leaves are what `rng_state` gives, of each rank or of all; other programs have "rng" too."""
    below = {path.removeprefix("rng/").removeprefix("~rank*/") for path in paths if path.startswith("rng/")}
    return below.issuperset(_PARTS)


def check_rng(state: Any) -> None:
    """Checks a saved state before any generator is set.

    Raises:
        MismatchError: it is not the state of generators.
    """
    if not all(_has(state, part) for part in _PARTS):
        found = f"{sorted(state)}" if isinstance(state, Mapping) else type(state).__name__
        hint = "training.rng_state() gives such a state; rng=False leaves the generators here as they are"
        raise MismatchError("rng", expected="states of torch, numpy and python", found=found, hint=hint)
    if not isinstance(state["torch"], torch.Tensor) or state["torch"].dtype is not torch.uint8:
        raise MismatchError("rng/torch", expected="a tensor of bytes", found=f"{type(state['torch']).__name__}")


def _has(state: Any, part: str) -> bool:
    for name in part.split("/"):
        if not isinstance(state, Mapping) or name not in state:
            return False
        state = state[name]
    return True


def set_rng_state(state: Mapping[str, Any]) -> list[str]:
    """Sets the generators of this process to what `rng_state` returned; returns those that this process lacks.

    >>> state = tc.training.rng_state()
    >>> before = torch.rand(3)
    >>> missing = tc.training.set_rng_state(state)
    >>> torch.equal(torch.rand(3), before)
    True

    Raises:
        MismatchError: it is not the state of generators; none has changed.
    """
    check_rng(state)
    return set_rng(state)


def set_rng(state: Mapping[str, Any]) -> list[str]:
    """Sets the generators to a captured state; returns the paths of generators that this process lacks."""
    python = state["python"]
    random.setstate((int(python["version"]), tuple(int(number) for number in python["state"]), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" not in state:
        return []
    if not torch.cuda.is_available():
        return ["rng/cuda"]
    torch.cuda.set_rng_state(state["cuda"].cpu())
    return []
