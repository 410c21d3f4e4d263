"""Says what state a run is in, from the list of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from .catalog import CheckpointInfo, Status

_WEIGHTS: dict[Status, int] = {"complete": 3, "damaged": 3, "unread": 2, "reading": 2, "partial": 1}
"""How much a status says about a run; one that is not here says least."""


def status_of_run(infos: Sequence[CheckpointInfo]) -> Status | None:
    """Returns the status that a list of runs shows for a run; None if it has no directory.

    It is that of a save in progress, else of a stalled one; else complete or damaged, whichever the newest checkpoint
    with an index is. Without any of these it is what the newest directory is that may be a checkpoint.

    Args:
        infos: of the run, newest first.
    """
    saves = {save.state for info in infos for save in info.saving}
    if "in_progress" in saves:
        return "in_progress"
    if "stalled" in saves:
        return "stalled"
    return max((info.status for info in infos), key=lambda status: _WEIGHTS.get(status, 0), default=None)
