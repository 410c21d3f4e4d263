"""Loads state under `PerRank` into a world of another size.

The policy `error` refuses, `take` gives rank r the state of old rank r modulo the old world size, and a function
returns the state of each new rank from those of all old ones. Only with a function is every old rank's state read, and
only for its own part.
"""

from __future__ import annotations

from typing import Any

from .. import _api
from .._core.tree.containers import PerRank
from .._io.comm.comm import Comm, SoloComm, other_world_error
from .._loading.options import Policy
from ..errors import MismatchError


def refused(path: str, part: str, comm: Comm, saved_world: int, others: str = "") -> MismatchError:
    """Returns the error for a part of a world of another size that no policy covers, with what else can be done."""
    take = f"fallback=Fallback(per_rank={{{part!r}: 'take'}})"
    return other_world_error(path, comm, saved_world, take=take, others=others)


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
    argument: str = "per_rank",
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
