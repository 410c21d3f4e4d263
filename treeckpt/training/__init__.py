"""Training state independent of its parallelism: models, optimizers, schedulers, loaders and random generators.

    import treeckpt as tc

    tc.save(path, tc.training.state(model, optimizer, scheduler=scheduler, loader=loader), step=step)
    report = tc.training.restore(path, model, optimizer, scheduler=scheduler, loader=loader)

State saved under one parallelism is restored into any other. This package imports torch; `import treeckpt` does not.

- Everything is keyed by parameter name. A state restores into models on the meta device, into fresh optimizers, and
  into param groups in another order or split otherwise. Generators and loaders are saved for each rank.
- An optimizer with a `state_dict` of its own, or one that wraps another, gets back everything in it, in the dtypes that
  were saved (`tests/training/test_own_state_dicts.py`); those of libraries are compared with what `torch.save` and
  `load_state_dict` give (`tests/training/test_library_optimizers.py`).
- A restore may go back in the same process: state of a parameter that the checkpoint has none of, as before its first
  gradient, is gone afterwards and named in `RestoreReport.cleared` (`tests/training/test_rollback.py`). The saved
  values of param groups hold, whatever schedulers write into them while they load.
- A module with load code of its own (`_load_from_state_dict`, a hook before it, the model's own `load_state_dict`) is
  passed what was saved of it, of any size and with the version that was saved, before anything else is filled. That
  takes as much memory again as its tensors do. Where its code fails, the model is as it was before
  (`tests/training/test_module_code.py`).
- Plain moments of parameters in shards (FSDP2, tensor parallelism), as the codes and block scales of 8-bit optimizers,
  are each rank's own, but for numbers and what has the shape of the whole parameter. They are restored by as many ranks
  in the same layout, and refused by name in another (`tests/training/test_own_moments.py`).
- A `DataLoader` draws a number from its generator, by default the global one, for each new iterator, also one that
  continues an epoch. Give a `StatefulDataLoader` one that nothing else draws from: `sampler=RandomSampler(data),
  generator=torch.Generator()`, with torchdata's `RandomSampler`. With the global one the other random numbers of the
  training do not continue; with `shuffle=True, generator=...` and no workers, which gives its sampler the same one,
  later epochs have another order. `restore` and `Manager.resume` warn of both (`tests/training/test_whole_loop.py`).
  A plain `DataLoader`, whose samples a loop skips by itself, draws alike and is not seen: seed its own with the epoch.
- State dicts of other programs are restored from their files. Steps of wrappers in saved names that the model lacks, as
  `module.` of DistributedDataParallel, are taken out; `RestoreReport.renamed` lists what that has changed
  (`tests/training/test_restore_foreign.py`). `save` and `load` have the signatures of `hfai.checkpoint`.
- Parts that the checkpoint has and a call does not name, such as a scheduler, are not restored: they are in
  `RestoreReport.ignored`; an `extra` comes back in the report. A warning names a scheduler, a loader or the state of an
  object in `extra` that was put into nothing while an optimizer was restored, and moments of parameters that are
  frozen here.
"""

from .._arrays.registry import needs_torch
from .._core.public_names import publish
from .._loading.options import Merge, Policy

with needs_torch(__name__):
    from ._capture import state
    from ._guard import Guard, guard
    from ._hfai import load, save
    from ._rank_state import rng_state, set_rng_state
    from ._report import RestoreReport
    from ._restore import restore

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
publish(__name__, __all__, globals())
