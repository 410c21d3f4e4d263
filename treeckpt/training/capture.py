"""The training state of a job as one tree, keyed by what it means and not by how it is cut.

`{"model", "optimizer", "param_groups", "scheduler", "loader", "rng", "extra"}`: parameters and moments by parameter
name, hyper-parameters by group, what each rank has of its own under `PerRank`. The tensors are the live ones; nothing
is copied and no rank is talked to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from ..arrays.dtensor import is_dtensor
from ..arrays.stateful import is_stateful
from ..core.tree.flatten import PerRank
from ..errors import TreeError
from .groups import labels_of
from .modules import Entry, Modules, collect, hidden, shards_of
from .names import nested, tie_names
from .optimizers import Live, Optimizers, groups_of, survey, trees_of, unwrapped
from .rng import capture_rng
from .schedules import to_groups

__all__ = ["live_of", "state", "states_of", "ties_of"]


def state(
    model: Modules,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    rng: bool = True,
    extra: Any = None,
    buffers: Literal["replicated", "per_rank"] = "replicated",
) -> dict[str, Any]:
    """The state of a training job as a tree for `treeckpt.save`.

    The tree is the same under every parallelism: plain, DDP, FSDP2, tensor parallel, pipeline stages, compiled or
    checkpointed modules. Save it right away: its tensors are the live ones.

    Args:
        model: a module; a list of the parts of one (pipeline stages), whose names differ; or a dict of several.
        optimizer: likewise. Its state is keyed by the names that the model gives its parameters.
        scheduler: an object with `state_dict`, or a list or dict of such.
        loader: what tells where this rank's data loader stands: an object with `state_dict`, or any tree.
        rng: whether the generators of torch, CUDA, numpy and Python belong to the state.
        extra: any tree of your own. What differs between ranks goes under `treeckpt.PerRank`.
        buffers: of modules whose buffers several ranks have: one for all (that of the first of the ranks over which
            the module is laid), or each rank's own.

    Raises:
        TreeError: an optimizer with parameters that are not the model's, or names that stand for two things.
    """
    entries = collect(model)
    lives = survey(optimizer, ties_of(entries, model), shards_of(entries, hidden(model, entries)))
    kept = [entry for entry in entries if entry.owned or buffers == "per_rank"]
    tree: dict[str, Any] = {"model": nested((entry.key, _content(entry, buffers)) for entry in kept)}
    if lives:
        tree["optimizer"], tree["param_groups"] = trees_of(lives)
    if scheduler is not None:
        tree["scheduler"] = states_of(scheduler, lambda one: _schedule(one, lives))
    if loader is not None:
        tree["loader"] = PerRank(loader.state_dict() if is_stateful(loader) else loader)
    if rng:
        tree["rng"] = PerRank(capture_rng())
    if extra is not None:
        tree["extra"] = extra
    return tree


def _content(entry: Entry, buffers: str) -> Any:
    own = buffers == "per_rank" and entry.kind == "buffer" and not is_dtensor(entry.value)
    return PerRank(entry.value) if own else entry.value


def ties_of(entries: Sequence[Entry], model: Modules) -> dict[int, Any]:
    """The names of each parameter, by identity."""
    every = (*entries, *hidden(model, entries))
    return tie_names((entry.key, id(entry.value)) for entry in every if isinstance(entry.value, nn.Parameter))


def states_of(given: Any, act: Any) -> Any:
    """What `act` makes of an object, or of each in a list or dict."""
    if is_stateful(given):  # whatever else its class is
        return act(given)
    if isinstance(given, Mapping):
        return {key: act(one) for key, one in given.items()}
    if isinstance(given, (list, tuple)):
        return [act(one) for one in given]
    return act(given)


def _schedule(scheduler: Any, lives: Sequence[Live]) -> Any:
    if not is_stateful(scheduler):
        raise TreeError(
            "scheduler", expected="an object with state_dict and load_state_dict", found=type(scheduler).__qualname__
        )
    found = scheduler.state_dict()
    live = live_of(scheduler, lives)
    if live is None:
        return found
    groups = groups_of(lives, live.prefix)
    labels = dict(zip(map(id, groups), labels_of(groups), strict=True))
    return to_groups(found, [labels[id(group)] for group in live.groups])


def live_of(scheduler: Any, lives: Sequence[Live]) -> Live | None:
    """The optimizer that a scheduler, or the one that it wraps, works on, if it is one of these."""
    while scheduler is not None:
        optimizer = getattr(scheduler, "optimizer", None)
        found = (live for live in lives if any(one is optimizer for one in unwrapped(live.optimizer)))
        if (live := next(found, None)) is not None:
            return live
        scheduler = getattr(scheduler, "scheduler", None)
    return None
