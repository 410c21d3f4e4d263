"""The live objects that a restore fills, and how it treats them."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ..trees.per_rank_state import Policies
from .capture import LEFT_OUT
from .modules import Modules
from .optimizers import Optimizers


class RestoreTargets(msgspec.Struct, frozen=True):
    """The arguments of `restore` that name what is filled."""

    model: Modules
    optimizer: Optimizers | None
    scheduler: Any
    loader: Any
    rng: bool | None
    """None restores them where they were saved."""
    extra: Any
    """A tree to fill; None if the saved one comes back in the report, False if it is left alone."""
    keep: tuple[str, ...]
    world_changed: Policies
    device: str | torch.device | None

    def __post_init__(self) -> None:
        for part in ("optimizer", "scheduler", "loader"):
            if getattr(self, part) is False:
                msgspec.structs.force_setattr(self, part, None)

    @property
    def fills_extra(self) -> bool:
        """Whether a tree for `extra` was given."""
        return self.extra is not None and self.extra is not False

    def ask_for(self, part: Any) -> bool:
        """Whether a part at the root of a checkpoint is asked for, returned in the report, or turned down by name."""
        if part in ("optimizer", "param_groups"):
            return self.optimizer is not None
        if part in ("scheduler", "loader"):
            return getattr(self, part) is not None
        return part in ("model", "rng", "extra", LEFT_OUT)
