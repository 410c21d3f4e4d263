"""The report of a restore."""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.text import bytes_text, seconds_text

_LISTED = "missing", "on_meta", "ignored", "unexpected", "dropped", "left_alone", "world_changed", "passed_over"
"""The fields of a report whose paths are printed, a line for each."""


class RestoreReport(msgspec.Struct, frozen=True):
    """What a restore filled, and what it did not find.

    >>> report = tc.training.restore(tc.training.state(model, optimizer), model, optimizer)
    >>> report.missing, report.unexpected
    ((), ())
    """

    path: str
    step: int | None
    """Training step, as it was passed to save."""
    loaded: int
    """Leaves of models, optimizers and extra that were filled."""
    nbytes: int
    """Bytes of the requested arrays, with those of extra states of modules and of an `extra` that comes back here."""
    read_nbytes: int
    """Bytes of arrays that this rank read."""
    seconds: float
    missing: tuple[str, ...]
    """Leaves of the targets that the checkpoint lacks; they stay unchanged."""
    unexpected: tuple[str, ...]
    """Leaves of the checkpoint that no target has."""
    materialised: tuple[str, ...]
    """Tensors that were on the meta device and have memory now."""
    on_meta: tuple[str, ...]
    """Tensors that are still on the meta device because they are not saved (non-persistent buffers) or missing. Give
    them memory and values before the model runs."""
    ignored: tuple[str, ...]
    """What of the checkpoint is without use here: moments of frozen parameters, generators of missing devices, state
    that an optimizer's or a scheduler's `load_state_dict` does not use, and parts at the root that were not asked for
    ("scheduler")."""
    loader: Any = None
    """The loader's state, if `loader` cannot load it itself."""
    extra: Any = None
    """The saved tree, or the given one, filled; None where it was turned down or not selected. It is read with the
    rest: checked before anything changes, and not lost with the checkpoint."""
    dropped: tuple[str, ...] = ()
    """Leaves that a rule dropped, by their names in the checkpoint."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(saved path, new path) of leaves that rules only renamed."""
    passed_over: tuple[str, ...] = ()
    """Of `Manager.resume`: the newer checkpoints that could not be loaded, each with what is wrong."""

    left_alone: tuple[str, ...] = ()
    """Leaves of the model that stayed as they were, as they were left out on purpose when the checkpoint was saved."""
    world_changed: tuple[str, ...] = ()
    """Where another number of ranks had saved it: what this rank got of each part that was each rank's own."""

    def __str__(self) -> str:
        rows = [
            f"restored {self.path}  {self.loaded} leaves, {bytes_text(self.nbytes)} in {seconds_text(self.seconds)}"
        ]
        for name in _LISTED:
            rows += [f"  {name.replace('_', ' '):<10}  {path}" for path in getattr(self, name)]
        return "\n".join(rows + [f"  renamed     {before} -> {now}" for before, now in self.renamed])
