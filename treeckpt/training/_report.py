"""The report of a restore."""

from __future__ import annotations

from typing import Any

import msgspec

from .._core.text import bytes_text, count_text, seconds_text
from ..errors import visible

_LISTED = (
    "missing",
    "on_meta",
    "ignored",
    "unexpected",
    "dropped",
    "left_alone",
    "world_changed",
    "replaced",
    "cleared",
    "passed_over",
)
"""The fields of a report whose paths are printed, a line for each."""


class RestoreReport(msgspec.Struct, frozen=True):
    """What a restore filled, and what it did not find.

    >>> report = tc.training.restore(tc.training.state(model, optimizer), model, optimizer)
    >>> report.missing, report.unexpected
    ((), ())

    Attributes:
        path: of the checkpoint.
        step: training step, as it was passed to save.
        loaded: leaves of models, optimizers and extra that were filled.
        nbytes: bytes of the requested arrays, with those of extra states of modules and of an `extra` that comes back
            here.
        read_nbytes: bytes of arrays that this rank read.
        seconds: that the restore took.
        missing: leaves of the targets that the checkpoint lacks; they stay unchanged.
        unexpected: leaves of the checkpoint that no target has, as moments and hyper-parameters of another class of
            optimizer.
        materialised: tensors that were on the meta device and have memory now.
        on_meta: tensors that are still on the meta device because they are not saved (non-persistent buffers) or
            missing. Give them memory and values before the model runs.
        ignored: what of the checkpoint is without use here: moments of frozen parameters and of options that `keep`
            turns off, generators of missing devices, state that an optimizer's or a scheduler's `load_state_dict` does
            not use, and parts at the root that were not asked for ("scheduler"); and, where no optimizer is restored,
            what this program cannot make of an `extra` that comes back (a class that it lacks), which is `...` there.
        loader: what was saved as the loader's position, where that was a tree of values and not an object's state.
        extra: the saved tree, or the given one, filled; None where it was turned down or not selected. It is read with
            the rest: checked before anything changes, and not lost with the checkpoint.
        dropped: leaves that a rule dropped, by their names in the checkpoint.
        renamed: (saved path, new path) of leaves that rules only renamed.
        passed_over: of `Manager.resume`: the newer checkpoints that could not be loaded, each with what is wrong.
        left_alone: leaves of the model that stayed as they were, as they were left out on purpose when the checkpoint
            was saved; and "rng", where it has no random generators and they were not insisted on.
        world_changed: where another number of ranks had saved it: what this rank got of each part that was each rank's
            own.
        replaced: hyper-parameters, and arguments of schedulers, of which the checkpoint's were taken in place of others
            here; those that a training changes by itself, as learning rates, do not count.
        cleared: state of optimizers here that the checkpoint has none of, as before the first gradient of a parameter:
            it is gone, and begins anew.
    """

    path: str
    step: int | None
    loaded: int
    nbytes: int
    read_nbytes: int
    seconds: float
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    materialised: tuple[str, ...]
    on_meta: tuple[str, ...]
    ignored: tuple[str, ...]
    loader: Any = None
    extra: Any = None
    dropped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    passed_over: tuple[str, ...] = ()

    left_alone: tuple[str, ...] = ()
    world_changed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            f"restored {self.path}  {count_text(self.loaded, 'leaf', 'leaves')}, "
            f"{bytes_text(self.nbytes)} in {seconds_text(self.seconds)}"
        ]
        for name in _LISTED:
            rows += [f"  {name.replace('_', ' '):<10}  {path}" for path in getattr(self, name)]
        rows += [f"  renamed     {before} -> {now}" for before, now in self.renamed]
        return "\n".join(map(visible, rows))
