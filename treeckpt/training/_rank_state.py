"""State that each rank had of its own, restored by another number of ranks: taken, merged, left or refused.

Whatever is done is noted for the report. Where nobody has said what to do, all is refused but the generators: these
continue on the same ranks of a smaller world, and in a larger one stay as the program has seeded them. So ranks whose
numbers were alike stay alike, and those whose numbers differed still differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from .._core.text import count_text
from .._io.comm.comm import Comm
from .._loading.options import Policies, Policy, policy_of
from ..trees._per_rank_state import refused
from ._rng import check_rng
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

    def load(self, part: str, default: Policy = "error") -> Any:
        """Returns this rank's state of a part at the root.

        Raises:
            MismatchError: it is refused.
        """
        policy, saved = policy_of(self._policies, part) or default, self._source.world_of(part)
        found = self._source.own(part, policy)
        if saved != self._comm.size:
            self.notes[part] = f"merged of {count_text(saved, 'rank')}" if callable(policy) else self._taken(saved)
        return found

    def load_generators(self) -> Any:
        """Returns this rank's state of the random number generators; None where they stay as they are.

        Raises:
            MismatchError: it is refused, or is not the state of generators.
        """
        here, saved = self._comm.size, self._source.world_of("rng")
        if here == saved or policy_of(self._policies, "rng") is not None:
            state = self.load("rng")
        elif here < saved:
            self._warn(saved, "continue where those of the same rank were", "does that without this warning")
            state = self.load("rng", "take")
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
