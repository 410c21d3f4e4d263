"""Loads state under `PerRank` into a world of another size.

The policy `error` refuses, `take` gives rank r the state of old rank r modulo the old world size, and a function
returns the state of each new rank from those of all old ones. Only with a function is every old rank's state read, and
only for its own part.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .. import _api
from .._core.tree.flatten import PerRank
from .._io.comm.comm import Comm, SoloComm, other_world_error
from ..errors import MismatchError

Merge = Callable[[list[Any], int, int], Any]
"""merge(states of all old ranks, rank, world) -> state of this rank."""

Policy = Literal["error", "take"] | Merge
Policies = Policy | Mapping[str, Policy] | None
"""One policy for all parts, or one each by name; None, or no entry, where nothing is said."""
PARTS = ("rng", "loader", "buffers", "extra")
"""The parts of a training state that may have state of each rank's own."""


def check_parts(given: Policies) -> None:
    """Refuses policies for parts of unknown names.

    Raises:
        MismatchError: naming one, and the part that may be meant.
    """
    for name in given if isinstance(given, Mapping) else ():
        if name not in PARTS:
            near = difflib.get_close_matches(str(name), PARTS, n=1)
            raise MismatchError(
                "world_changed",
                expected=f"policies for some of {', '.join(PARTS)}",
                found=f"one for {name!r}" + (f"; near to it is {near[0]!r}" if near else ""),
                hint="Mend the name",
            )


def policy_of(given: Policies, part: str) -> Policy | None:
    """Returns the policy for one part; None where none is given for it.

    Raises:
        MismatchError: an unknown policy.
    """
    policy: Any = given.get(part) if isinstance(given, Mapping) else given
    if policy not in (None, "error", "take") and not callable(policy):
        raise MismatchError(part, expected="world_changed of 'error', 'take' or a function", found=f"{policy!r:.60}")
    return policy


def refused(path: str, part: str, comm: Comm, saved_world: int, others: str = "") -> MismatchError:
    """Returns the error for a part of a world of another size that no policy covers, with what else can be done."""
    return other_world_error(path, comm, saved_world, take=f"world_changed={{{part!r}: 'take'}}", others=others)


class _AssumedRankComm(SoloComm):
    """The comm of a load for some rank of a world that may have ended; such loads exchange no messages."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def _as_rank(path: Any, part: str, rank: int, world: int, **options: Any) -> Any:
    tree = _api.load(path, select=part, comm=_AssumedRankComm(rank, world), **options)
    state = tree[part]
    return state.value if isinstance(state, PerRank) else state


def load_own(
    path: Any,
    part: str,
    policy: Policy,
    comm: Comm,
    *,
    saved_world: int,
    argument: str = "world_changed",
    **options: Any,
) -> Any:
    """Returns this rank's state of a part at the root of a checkpoint.

    Args:
        argument: the name of that by which a function was given.

    Raises:
        MismatchError: the world size changed and the policy is `error`, or a function that raises.
    """
    if comm.size == saved_world:
        return _as_rank(path, part, comm.rank, saved_world, **options)
    if policy == "error":
        others = "; or a function merge(states, rank, world) in place of 'take'"
        raise refused(part, part, comm, saved_world, f"{others}; or {part}={False if part == 'rng' else None}")
    if policy == "take":
        return _as_rank(path, part, comm.rank % saved_world, saved_world, **options)
    assert callable(policy), "checked by policy_of"
    states = [_as_rank(path, part, rank, saved_world, **options) for rank in range(saved_world)]
    try:
        return policy(states, comm.rank, comm.size)
    except Exception as error:
        raise MismatchError(
            part,
            expected=f"a state for rank {comm.rank} of {comm.size} from the function in {argument}",
            found=f"it raised {type(error).__name__}: {error}",
            hint=f"It gets the states of all {saved_world} ranks that saved, the rank and the number of ranks here",
        ) from error
