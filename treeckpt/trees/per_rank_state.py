"""Loads state under `PerRank` into a world of another size.

The policy `error` refuses, `take` gives rank r the state of old rank r modulo the old world size, and a function
returns the state of each new rank from those of all old ones. Only with a function is every old rank's state read, and
only for its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from .. import api
from ..core.tree.flatten import PerRank
from ..errors import MismatchError
from ..io.comm.comm import Comm, SoloComm

Merge = Callable[[list[Any], int, int], Any]
"""merge(states of all old ranks, rank, world) -> state of this rank."""

Policy = Literal["error", "take"] | Merge


def policy_of(given: Policy | Mapping[str, Policy], part: str) -> Policy:
    """Returns the policy for one part ("rng", "loader", "buffers", "extra"); `error` where a mapping has none.

    Raises:
        MismatchError: an unknown policy.
    """
    policy: Any = given.get(part, "error") if isinstance(given, Mapping) else given
    if policy not in ("error", "take") and not callable(policy):
        raise MismatchError(part, expected="world_changed of 'error', 'take' or a function", found=f"{policy!r:.60}")
    return policy


class _AssumedRankComm(SoloComm):
    """The comm of a load for some rank of a world that may have ended; such loads exchange no messages."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def _as_rank(path: Any, part: str, rank: int, world: int, **options: Any) -> Any:
    tree = api.load(path, select=part, comm=_AssumedRankComm(rank, world), **options)
    state = tree[part]
    return state.value if isinstance(state, PerRank) else state


def states_of_all_ranks(
    path: Any, part: str, world: int, *, ranks: Sequence[int] | None = None, **options: Any
) -> list[Any]:
    """Returns the per-rank part `part` of every rank of the world that saved, or of some of them, by rank."""
    return [_as_rank(path, part, rank, world, **options) for rank in (range(world) if ranks is None else ranks)]


def load_own(path: Any, part: str, policy: Policy, comm: Comm, *, saved_world: int, **options: Any) -> Any:
    """Returns this rank's state of a part at the root of a checkpoint.

    Raises:
        MismatchError: the world size changed and the policy is `error`.
    """
    if comm.size == saved_world:
        return _as_rank(path, part, comm.rank, saved_world, **options)
    if policy == "error":
        raise MismatchError(
            part,
            expected=f"state of one rank of {comm.size}",
            found=f"state saved by a world of {saved_world}",
            hint=f"The world size changed: pass world_changed={{{part!r}: 'take'}} or a function that merges the "
            f"states, or leave it out ({part}={'False' if part == 'rng' else None})",
        )
    if policy == "take":
        return _as_rank(path, part, comm.rank % saved_world, saved_world, **options)
    assert callable(policy), "checked by policy_of"
    return policy(states_of_all_ranks(path, part, saved_world, **options), comm.rank, comm.size)
