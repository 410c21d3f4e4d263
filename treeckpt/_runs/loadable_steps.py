"""Names the checkpoints of a run that can be loaded, for errors where another one was asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .._core.format.files import CheckpointId, id_order
from .catalog import CheckpointInfo, step_info


def loadable_text(infos: Iterable[CheckpointInfo], step: CheckpointId) -> str:
    """Returns which steps of a run can be loaded, at most the 10 highest, and which is nearest to `step`."""
    steps = sorted((step_info(info).step for info in infos if info.status == "complete"), key=id_order)
    others = [other for other in steps if type(other) is type(step)]

    def distance(other: CheckpointId) -> float:
        if isinstance(other, str) or isinstance(step, str):
            return -difflib.SequenceMatcher(a=f"{other}", b=f"{step}").ratio()
        return abs(other - step)

    near = f"; the nearest is {min(others, key=distance)}" if others else ""
    return f"Steps that can be loaded: {', '.join(map(str, steps[-10:])) or 'none'}{near}"
