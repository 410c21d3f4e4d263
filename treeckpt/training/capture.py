"""The training state of a job as one tree, whose keys do not depend on the parallelism.

`{"model", "optimizer", "param_groups", "scheduler", "loader", "rng", "extra"}`: parameters and moments by parameter
name, hyper-parameters by group, per-rank state under `PerRank`. The tensors are the live ones; nothing is copied and no
message is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from ..arrays.dtensor import is_dtensor
from ..arrays.stateful import is_stateful
from ..core.tree.containers import FromRank
from ..core.tree.flatten import PerRank
from ..errors import TreeError
from .groups import labels_of
from .modules import Modules, StateDictEntry, collect_entries
from .names import nested
from .optimizers import NamedOptimizer, Optimizers, groups_of, name_optimizers, optimizer_chain, trees_of
from .rng import rng_state
from .schedules import to_groups

Buffers = Literal["replicated", "first", "same", "per_rank"]
"""Whose buffers are saved, where several ranks hold a module."""


def state(
    model: Modules,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    rng: bool = True,
    extra: Any = None,
    buffers: Buffers = "replicated",
) -> dict[str, Any]:
    """Returns the state of a training job as a tree for `treeckpt.save`.

    The tree is the same under every parallelism: plain, DDP, FSDP2, tensor parallel, pipeline stages, compiled or
    checkpointed modules. Save it before the next step: its tensors are the live ones.

    Args:
        model: a module; a list of the parts of one (pipeline stages) with distinct names; or a dict of several.
        optimizer: likewise. Its state is keyed by the model's parameter names.
        scheduler: an object with `state_dict`, or a list or dict of such.
        loader: the position of this rank's data loader: an object with `state_dict`, or any tree.
        rng: whether the generators of torch, CUDA, numpy and Python are part of the state.
        extra: any tree of your own. State that differs between ranks goes under `treeckpt.PerRank`.
        buffers: of modules that several ranks hold. "replicated": one for all, that of the first rank of the wrapper or
            mesh around the module; without one the save compares them. "first": without one that of rank 0 counts,
            whatever the others have. "same": those of all ranks are compared, as plain tensors are. "per_rank": one for
            each rank.

    Raises:
        TreeError: an optimizer has parameters that are not the model's, or two objects have one name.
    """
    found = collect_entries(model)
    optimizers = name_optimizers(optimizer, found)
    if buffers not in get_args(Buffers):
        raise TreeError("buffers", expected=", ".join(map(repr, get_args(Buffers))), found=f"{buffers!r:.60}")
    kept = [entry for entry in found.entries if entry.owned is not False or buffers in ("per_rank", "same")]
    tree: dict[str, Any] = {"model": nested((one.key, _marked(one, buffers)) for one in kept)}
    if optimizers:
        tree["optimizer"], tree["param_groups"] = trees_of(optimizers)
    if scheduler is not None:
        tree["scheduler"] = _scheduler_states(scheduler, optimizers)
    if loader is not None:
        tree["loader"] = PerRank(loader.state_dict() if is_stateful(loader) else loader)
    if rng:
        tree["rng"] = PerRank(rng_state())
    if extra is not None:
        tree["extra"] = extra
    return tree


def _marked(entry: StateDictEntry, buffers: Buffers) -> Any:
    """Returns the value of an entry, with the mark that says whose counts."""
    if entry.kind != "buffer" or is_dtensor(entry.value):
        return entry.value
    if buffers == "per_rank":
        return PerRank(entry.value)
    return FromRank(entry.value) if buffers == "first" and entry.owned is None else entry.value


def _scheduler_states(given: Any, optimizers: Sequence[NamedOptimizer]) -> Any:
    """Returns the state of a scheduler, or of each in a list or dict."""
    if isinstance(given, Mapping) and not is_stateful(given):  # an object with state_dict is one, whatever its class
        return {key: _scheduler_state(one, optimizers) for key, one in given.items()}
    if isinstance(given, (list, tuple)) and not is_stateful(given):
        return [_scheduler_state(one, optimizers) for one in given]
    return _scheduler_state(given, optimizers)


def _scheduler_state(scheduler: Any, optimizers: Sequence[NamedOptimizer]) -> Any:
    if not is_stateful(scheduler):
        raise TreeError(
            "scheduler", expected="an object with state_dict and load_state_dict", found=type(scheduler).__qualname__
        )
    found = scheduler.state_dict()
    live = optimizer_of(scheduler, optimizers)
    if live is None:
        return found
    groups = groups_of(optimizers, live.prefix)
    labels = dict(zip(map(id, groups), labels_of(groups), strict=True))
    return to_groups(found, [labels[id(group)] for group in live.groups])


def optimizer_of(scheduler: Any, optimizers: Sequence[NamedOptimizer]) -> NamedOptimizer | None:
    """Returns the optimizer of a scheduler, or of the scheduler that it wraps; None if it is none of these."""
    while scheduler is not None:
        optimizer = getattr(scheduler, "optimizer", None)
        found = (live for live in optimizers if any(one is optimizer for one in optimizer_chain(live.optimizer)))
        if (live := next(found, None)) is not None:
            return live
        scheduler = getattr(scheduler, "scheduler", None)
    return None
