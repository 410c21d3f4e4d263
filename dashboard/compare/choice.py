"""Which two checkpoints are compared: by the steps that were typed, or by the rows of a run that were ticked."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from treeckpt.errors import visible

from ..pages.checkpoints import CheckpointRow, checkpoint_row
from ..store.library import Library, Listed, Run

SUGGESTED = 200
"""Checkpoints that a field suggests, the newest."""


class StepChoice(msgspec.Struct, frozen=True):
    """One of the two fields of the form: a run and a step of it."""

    run: str
    step: str
    """What was typed: a number, or the name of a checkpoint."""
    id: str = ""
    """The checkpoint of that step; empty if there is none."""
    problem: str = ""
    near: Sequence[CheckpointRow] = ()
    """The checkpoints with the nearest steps, where there is none of that step."""
    suggested: Sequence[str] = ()
    """The steps of the newest checkpoints of the run."""


def _readable(library: Library, run: Run) -> Listed:
    """Returns the checkpoints of a run that can be compared, newest first."""
    return [(i, info) for i, info in library.checkpoints(run) if info.leaves is not None]


def typed_step(library: Library, run_id: str, text: str) -> StepChoice:
    """Returns the choice of the checkpoint of a run with a step, as a number with or without commas, or with a name.

    Raises:
        NotFound: there is no such run.
    """
    run = library.run(run_id)
    listed, wanted = _readable(library, run), text.strip()
    number = wanted.removeprefix("step").strip(" _").replace(",", "").replace("_", "")
    step = int(number) if number.isascii() and number.isdecimal() and len(number) < 19 else None
    choice = StepChoice(run_id, wanted, suggested=_suggested(listed))
    for checkpoint_id, info in listed:
        if info.name == wanted or (step is not None and info.step == step):
            return msgspec.structs.replace(choice, id=checkpoint_id)
    if not listed:
        return msgspec.structs.replace(choice, problem=f"{run.name} has no checkpoint that can be compared.")
    if step is None:
        what = f"{run.name} has no checkpoint {visible(wanted[:100])!r}. The newest are"
        near = listed[:2]
    else:
        what = f"{run.name} has no step {step:,} that can be compared. The nearest are"
        ordered = sorted((pair for pair in listed if pair[1].step is not None), key=lambda pair: pair[1].step or 0)
        below = [pair for pair in ordered if (pair[1].step or 0) < step][-1:]
        near = below + [pair for pair in ordered if (pair[1].step or 0) > step][:1]
    rows = [checkpoint_row(checkpoint_id, run, info) for checkpoint_id, info in near]
    return msgspec.structs.replace(choice, problem=what, near=rows)


def chosen_step(library: Library, checkpoint_id: str, otherwise: str = "") -> StepChoice:
    """Returns the choice of a checkpoint; without one that of no step, of the run `otherwise` or the first run."""
    for run in library.runs:
        for one, info in library.checkpoints(run):
            if one == checkpoint_id:
                step = info.name if info.step is None else f"{info.step}"
                return StepChoice(run.id, step, one, suggested=_suggested(_readable(library, run)))
    run = next((run for run in library.runs if run.id == otherwise), library.runs[0] if library.runs else None)
    return StepChoice(run.id, "", suggested=_suggested(_readable(library, run))) if run else StepChoice("", "")


def _suggested(listed: Listed) -> list[str]:
    return [visible(info.name) if info.step is None else f"{info.step}" for _, info in listed[:SUGGESTED]]


def ticked_pair(library: Library, ticked: Sequence[str]) -> tuple[str, str] | None:
    """Returns the two checkpoints that are ticked, the one that was saved first before the other; None unless two."""
    places = {one: (number, -at) for number, run in enumerate(library.runs)
              for at, (one, _) in enumerate(library.checkpoints(run))}  # fmt: skip
    found = sorted((one for one in dict.fromkeys(ticked) if one in places), key=lambda one: places[one])
    return (found[0], found[1]) if len(found) == 2 else None
