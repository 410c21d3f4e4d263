"""Training state independent of its parallelism: models, optimizers, schedulers, loaders and random generators.

    import treeckpt as tc

    tc.save(path, tc.training.state(model, optimizer, scheduler=scheduler, loader=loader), step=step)
    report = tc.training.restore(path, model, optimizer, scheduler=scheduler, loader=loader)

State saved under one parallelism is restored into any other. This package imports torch; `import treeckpt` does not.
"""

from ..arrays.registry import needs_torch
from ..trees.per_rank_state import Merge, Policy

with needs_torch(__name__):
    from .capture import state
    from .guard import Guard, guard
    from .hfai import load, save
    from .report import RestoreReport
    from .restore import restore
    from .rng import rng_state, set_rng_state

__all__ = [
    "Guard",
    "Merge",
    "Policy",
    "RestoreReport",
    "guard",
    "load",
    "restore",
    "rng_state",
    "save",
    "set_rng_state",
    "state",
]
