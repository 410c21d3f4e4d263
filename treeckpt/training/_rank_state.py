"""State that each rank had of its own, restored by another number of ranks: taken, merged, left or refused.

Whatever is done is noted for the report. Where nobody has said what to do, all is refused but the generators: these
continue on the same ranks of a smaller world, and in a larger one stay as the program has seeded them. So ranks whose
numbers were alike stay alike, and those whose numbers differed still differ.

The generators are torch's CPU generator, that of the current CUDA device where CUDA is in use, numpy's global one and
Python's; those that a program creates itself belong into `extra`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .._core.text import count_text
from .._core.tree.containers import PerRank
from .._io.comm.comm import Comm
from .._loading.options import Policies, Policy, policy_of
from ..errors import MismatchError
from ..trees._per_rank_state import refused
from ._sources import RestoreSource

_log = logging.getLogger("treeckpt")


class RankState:
    """Loads the per-rank parts of a source for one rank.

    Args:
        policies: the field `per_rank` of a `Fallback`.
    """

    def __init__(self, source: RestoreSource, comm: Comm, policies: Policies) -> None:
        self._source, self._comm = source, comm
        self._policies: Policies = policies
        self.notes: dict[str, str] = {}
        """What became of each part that another number of ranks had saved."""
        self.to_fill: dict[str, Any] = {}
        """The parts that are to be filled with all other arrays."""

    def load(self, part: str, default: Policy = "error", *, later: bool = False) -> Any:
        """Returns this rank's state of a part at the root.

        Args:
            later: leaves a part of one rank that saved to be filled.

        Raises:
            MismatchError: it is refused.
        """
        policy, saved = policy_of(self._policies, part) or default, self._source.world_of(part)
        is_one = saved == self._comm.size or policy == "take"
        made = self._source.own_to_fill(part) if later and is_one else None
        if made is None:
            state = self._source.own(part, policy)
        else:
            self.to_fill[part], state = made, made.value if isinstance(made, PerRank) else made
        if saved != self._comm.size:
            self.notes[part] = f"merged of {count_text(saved, 'rank')}" if callable(policy) else self._taken(saved)
        return state

    def load_generators(self) -> Any:
        """Returns this rank's state of the random number generators, to be filled; None where they stay as they are.

        Raises:
            MismatchError: it is refused, or is not the state of generators.
        """
        here, saved = self._comm.size, self._source.world_of("rng")
        if here == saved or policy_of(self._policies, "rng") is not None:
            state = self.load("rng", later=True)
        elif here < saved:
            self._warn(saved, "continue where those of the same rank were", "does that without this warning")
            state = self.load("rng", "take", later=True)
        else:
            self._warn(
                saved,
                "stay as the program has seeded them. Seed them by the step, or random numbers that were used once are "
                "used again",
                f"gives rank r the state of rank r % {saved} instead, and rng=False leaves them without this warning",
            )
            self.notes["rng"] = f"left as it was here, saved by {count_text(saved, 'rank')}"
            return None
        check_rng(state)
        return state

    def _warn(self, saved: int, what: str, take: str) -> None:
        if self._comm.rank == 0:
            _log.warning(
                "%s: saved by %s, restored by %d: the random generators of each rank %s. "
                "fallback=Fallback(per_rank={'rng': 'take'}) %s",
                self._source.url,
                count_text(saved, "rank"),
                self._comm.size,
                what,
                take,
            )

    def check(self, part: str, paths: Sequence[str]) -> None:
        """Refuses per-rank leaves of a world of another size, unless the policy is to take them.

        Raises:
            MismatchError: naming the first of the paths.
        """
        saved = self._source.world
        if saved == self._comm.size or not paths:
            return
        if policy_of(self._policies, part) != "take":
            raise refused(paths[0], part, self._comm, saved)
        self.notes[part] = self._taken(saved)

    def _taken(self, saved: int) -> str:
        return f"of rank {self._comm.rank % saved} of {saved}"


# random generators ----------------------------------------------------------------------------------------------------

_PARTS = "torch", "numpy/bit_generator", "python/version", "python/state", "python/gauss"
"""What a state of the generators has in any case; `cuda` is there where CUDA was in use."""


def rng_state() -> dict[str, Any]:
    """Returns the state of every generator as a tree of arrays and values.

    >>> sorted(tc.training.rng_state())
    ['numpy', 'python', 'torch']
    """
    version, integers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "state": np.array(integers, np.uint64), "gauss": gauss},
    }
    # The question for its state would start CUDA in a process that does not use it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


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
