"""What a restore put in place, and what it left out."""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.text import bytes_text, seconds_text

__all__ = ["RestoreReport"]


class RestoreReport(msgspec.Struct, frozen=True):
    """What a restore put in place, and what it did not find."""

    path: str
    step: int | None
    """Of training, as it was given to save."""
    loaded: int
    """Leaves of models, optimizers and extra that were filled."""
    nbytes: int
    """Bytes of arrays that were asked for."""
    read_nbytes: int
    """Bytes of arrays that this rank read."""
    seconds: float
    missing: tuple[str, ...]
    """Wanted, not in the checkpoint; they stay as they were."""
    unexpected: tuple[str, ...]
    """In the checkpoint, wanted by nothing here."""
    materialised: tuple[str, ...]
    """What stood on the meta device and has memory now."""
    on_meta: tuple[str, ...]
    """What stands on the meta device still, as it is not saved: buffers that are not persistent, or what was missing.
    Give it memory and values before the model runs."""
    ignored: tuple[str, ...]
    """In the checkpoint, and of no use here: moments of frozen parameters, generators of devices that are not here, and
    what an optimizer's `load_state_dict` does not take."""
    loader: Any = None
    """The loader's state, if `loader` cannot take it itself."""
    extra: Any = None
    """As it was saved, or the tree that was given, filled."""
    dropped: tuple[str, ...] = ()
    """In the checkpoint, and left out by a rule; as it is called there."""
    renamed: tuple[tuple[str, str], ...] = ()
    """What rules gave another name and nothing else: as in the checkpoint, and as restored."""

    def __str__(self) -> str:
        rows = [
            f"restored {self.path}  {self.loaded} leaves, {bytes_text(self.nbytes)} in {seconds_text(self.seconds)}"
        ]
        rows += [f"  missing     {path}" for path in self.missing]
        rows += [f"  on meta     {path}" for path in self.on_meta]
        rows += [f"  ignored     {path}" for path in self.ignored]
        rows += [f"  unexpected  {path}" for path in self.unexpected]
        rows += [f"  dropped     {path}" for path in self.dropped]
        return "\n".join(rows + [f"  renamed     {before} -> {now}" for before, now in self.renamed])
