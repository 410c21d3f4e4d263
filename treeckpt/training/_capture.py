"""The training state of a job as one tree, whose keys do not depend on the parallelism.

`{"model", "optimizer", "param_groups", "scheduler", "loader", "rng", "extra"}`: parameters and moments by parameter
name, hyper-parameters by group, per-rank state under `PerRank`. The tensors are the live ones; nothing is copied and no
message is sent.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args
from weakref import WeakKeyDictionary

from torch import nn

from .._arrays.registry import PICKLE_ADVICE, abstract_of, encode
from .._arrays.stateful import holds_stateful, is_stateful, object_states, state_tree
from .._core.tree.containers import FromRank, PerRank
from .._core.tree.flatten import flatten
from .._core.tree.leaf_differences import some_of
from .._core.tree.paths import Selection, compile_globs, globs_of
from .._core.tree.structure import key_text
from .._io.public_calls import checks_options
from ..errors import TreeError
from ._groups import labels_of, to_groups
from ._modules import Modules, StateDictEntry, collect_entries, nested, with_metadata
from ._optimizers import NamedOptimizer, Optimizers, groups_of, name_optimizers, optimizer_chain, trees_of
from ._rank_state import rng_state
from ._user_state import check_loader, loader_state

_log = logging.getLogger("treeckpt")
Buffers = Literal["replicated", "first", "same", "per_rank"]
"""Whose buffers are saved, where several ranks hold a module."""
LEFT_OUT = "left_out"
"""The key at the root under which the names of parameters and buffers stand that were left out."""


class PartKeywords(TypedDict, total=False):
    """The arguments of `state` that choose a part of the model."""

    select: Selection
    exclude: Selection
    frozen: bool


@checks_options
def state(
    model: Modules,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    rng: bool = True,
    extra: Any = None,
    buffers: Buffers = "replicated",
    select: Selection = None,
    exclude: Selection = None,
    frozen: bool = True,
) -> dict[str, Any]:
    """Returns the state of a training job as a tree for `treeckpt.save`.

    The tree is the same under every parallelism: plain, DDP, FSDP2, tensor parallel, pipeline stages, compiled or
    checkpointed modules. Save it before the next step: its tensors are the live ones. A model's part is a state dict
    with the versions of its modules (`_metadata`), which `load_state_dict` reads.

    >>> sorted(tc.training.state(model, optimizer, extra={"epoch": 3}))
    ['extra', 'model', 'optimizer', 'param_groups', 'rng']

    Args:
        model: a module; a list of the parts of one (pipeline stages) with distinct names; or a dict of several.
        optimizer: likewise. Its state is keyed by the model's parameter names.
        scheduler: an object with `state_dict`, or a list or dict of such.
        loader: the position of this rank's data loader: an object with `state_dict`, or any tree; no other iterable.
        rng: whether the generators of torch, CUDA, numpy and Python are part of the state.
        extra: any tree of your own. State that differs between ranks goes under `treeckpt.PerRank`.
        buffers: of modules that several ranks hold, and attributes that their own code saves. "replicated": one for
            all, that of the first rank of the wrapper or mesh around the module; without one the save compares them.
            "first": without one that of rank 0 counts, whatever the others have. "same": all are compared, as plain
            tensors are. "per_rank": one for each rank.
        select, exclude: globs over `model/...`: what is not selected is left out, and the optimizers' state of it.
        frozen: False leaves out parameters without gradients, as beside adapters (LoRA): named under "left_out", which
            `restore` takes with `strict="missing"` and reports. A warning names adapters of PEFT that are not active.

    Raises:
        TreeError: parameters of an optimizer that are not the model's, two objects of one name, a glob without meaning.
    """
    entries = collect_entries(model)
    optimizers = name_optimizers(optimizer, entries)
    if buffers not in get_args(Buffers):
        raise TreeError("buffers", expected=", ".join(map(repr, get_args(Buffers))), found=f"{buffers!r:.60}")
    left_out = _left_out(entries.entries, globs_of(select), globs_of(exclude, "exclude"), frozen=frozen)
    every = buffers in ("per_rank", "same")
    kept = [e for e in entries.entries if (e.owned is not False or every) and e.full_name not in left_out]
    pairs = ((entry.key, _marked(entry, buffers)) for entry in kept)
    tree: dict[str, Any] = {"model": with_metadata(nested(pairs), entries.metadata)}
    if optimizers:
        tree["optimizer"], tree["param_groups"] = _optimizer_trees(optimizers, left_out)
    if scheduler is not None:
        tree["scheduler"] = _scheduler_states(scheduler, optimizers)
    if loader is not None:
        tree["loader"] = PerRank(loader_state(loader))
    if rng:
        tree["rng"] = PerRank(rng_state())
    if extra is not None:
        tree["extra"] = extra
    return tree | {LEFT_OUT: left_out} if left_out else tree


def _optimizer_trees(optimizers: Sequence[NamedOptimizer], left_out: Container[str]) -> tuple[Any, Any]:
    """Returns (state, groups) of all optimizers, with the states of objects among the groups.

    Raises:
        TreeError: an object in the state of a parameter: a fresh optimizer has none to load its state into.
    """
    moments, groups = trees_of(optimizers, left_out)
    for path, leaf in flatten({"optimizer": moments})[1] if holds_stateful(moments) else ():
        if is_stateful(leaf):
            raise TreeError(
                path,
                expected="arrays and values in the state of a parameter",
                found=f"a {type(leaf).__qualname__}",
                hint="Keep it in an attribute of the optimizer, and in its state_dict() beside state and param_groups",
            )
    return moments, object_states(groups, "param_groups")


def check_objects(
    model: Modules, optimizer: Optimizers | None, options: Mapping[str, Any], rank: int, *, allow_pickle: bool
) -> None:
    """Raises what a save of a job's objects will raise, for a first run, which has no checkpoint to compare them with.

    Args:
        options: of `restore`.
        allow_pickle: that of the save.

    Raises:
        TreeError: a value that cannot be saved, or what `state` raises.
    """
    scheduler, loader, extra = (options.get(name) for name in ("scheduler", "loader", "extra"))
    namespace: str = options.get("namespace", "")
    tree = state(model, optimizer, scheduler=None if scheduler is False else scheduler, rng=False)
    del tree["model"]
    if loader is not None and loader is not False:
        check_loader(loader, rank, allow_pickle=True, namespace=namespace)
    if extra is not None and extra is not False:
        tree["extra"] = extra
    leaves = flatten(state_tree(tree, rank=rank, namespace=namespace), rank=rank, namespace=namespace)[1]
    if loader is not None and loader is not False:
        # only what stands beside objects: the state of a loader starts its workers, and draws from its generator
        beside = flatten({"loader": loader}, rank=rank, namespace=namespace)[1]
        leaves = [*leaves, *((path, leaf) for path, leaf in beside if not holds_stateful(leaf, namespace))]
    for path, leaf in leaves:
        if leaf is not ... and abstract_of(leaf, path, rank) is None:
            encode(leaf, path, allow_pickle=allow_pickle, advice=PICKLE_ADVICE)


def _left_out(
    entries: Sequence[StateDictEntry],
    select: tuple[str, ...] | None,
    exclude: tuple[str, ...] | None,
    *,
    frozen: bool,
) -> dict[str, str]:
    """Returns the names of what is left out, each with the argument that says so; ranks may have different ones.

    Raises:
        TreeError: a glob means nothing, or all is left out.
    """
    if not isinstance(frozen, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TreeError(
            "frozen", expected="True or False", found=f"{frozen!r:.60}", hint="False leaves frozen ones out"
        )
    names = {entry.full_name: entry for entry in entries}
    paths = [f"model/{name}" for name in names]
    for what, globs in (("select", select), ("exclude", exclude)):
        for glob in compile_globs(globs).unused(paths) if globs else ():
            raise TreeError(
                f"{what}={glob!r:.80}",
                expected="a glob that means some of model/...",
                found=f"none of {len(paths)}, as {', '.join(paths[:3])}",
                hint="Names begin with model/, as in the checkpoint",
            )
    left: dict[str, str] = {}
    for name, entry in names.items():
        if select is not None and not compile_globs(select).match(f"model/{name}"):
            left[name] = "select"
        elif exclude is not None and compile_globs(exclude).match(f"model/{name}"):
            left[name] = "exclude"
        elif not frozen and entry.kind == "parameter" and not entry.value.requires_grad:
            left[name] = "frozen"
    _warn_of_adapters(entries, left)
    return left


_ADAPTERS = "adapter_layer_names"
"""The attribute in which a layer of PEFT names its dicts of adapters."""
_warned: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""The adapters of each model of which it was said that they are left out."""


def _warn_of_adapters(entries: Sequence[StateDictEntry], left_out: Mapping[str, str]) -> None:
    """Warns, once for each model, of adapters of PEFT that were left out as frozen since they are not active."""
    frozen = [entry for entry in entries if left_out.get(entry.full_name) == "frozen"]
    for root in {id(entry.root): entry.root for entry in frozen}.values():
        adapters = _adapters_of(root)
        left = [(adapters[id(entry.value)], entry.full_name) for entry in frozen if id(entry.value) in adapters]
        names = frozenset(name for name, _ in left)
        if names and _warned.get(root) != names:
            _warned[root] = names
            _log.warning(
                "training.state(frozen=False) leaves out adapters that are not active: %s (%s). frozen=True saves "
                "them; exclude= with their names says that it is meant",
                ", ".join(sorted(names)),
                some_of("parameters", [path for _, path in left]),
            )


def _adapters_of(root: nn.Module) -> dict[int, str]:
    """Returns the name of the adapter of each parameter that belongs to one, by identity."""
    found: dict[int, str] = {}
    for layer in root.modules():
        for name in getattr(layer, _ADAPTERS, ()):
            with contextlib.suppress(AttributeError):  # not each layer has all that its class names
                by_adapter: nn.Module = operator.attrgetter(name)(layer)
                found |= {id(parameter): path.partition(".")[0] for path, parameter in by_adapter.named_parameters()}
    return found


def _marked(entry: StateDictEntry, buffers: Buffers) -> Any:
    """Returns the value of an entry, with the mark that says whose counts."""
    value = entry.value
    if entry.kind in ("extra", "value"):
        value = object_states(value, entry.path, (entry.module,))
    if not entry.may_differ:
        return value
    if buffers == "per_rank":
        return PerRank(value)
    return FromRank(value) if buffers == "first" and entry.owned is None else value


def _scheduler_states(given: Any, optimizers: Sequence[NamedOptimizer]) -> Any:
    """Returns the state of a scheduler, or of each in a list or dict."""
    if isinstance(given, Mapping) and not is_stateful(given):  # an object with state_dict is one, whatever its class
        return {
            key: _scheduler_state(scheduler, optimizers, f"scheduler/{key_text(key)}")
            for key, scheduler in given.items()
        }
    if isinstance(given, (list, tuple)) and not is_stateful(given):
        return [
            _scheduler_state(scheduler, optimizers, f"scheduler/{number}") for number, scheduler in enumerate(given)
        ]
    return _scheduler_state(given, optimizers, "scheduler")


def _scheduler_state(scheduler: Any, optimizers: Sequence[NamedOptimizer], path: str) -> Any:
    if not is_stateful(scheduler):
        raise TreeError(
            "scheduler", expected="an object with state_dict and load_state_dict", found=type(scheduler).__qualname__
        )
    # A scheduler may have its optimizer in its state; that is saved under `optimizer`, and stays empty here.
    saved = {id(optimizer) for live in optimizers for optimizer in (*optimizer_chain(live.optimizer), live.stateful)}
    states = object_states(scheduler.state_dict(), path, (scheduler,), apart=saved)
    live = optimizer_of(scheduler, optimizers)
    if live is None:
        return states
    groups = groups_of(optimizers, live.prefix)
    labels = dict(zip(map(id, groups), labels_of(groups), strict=True))
    return to_groups(states, [labels[id(group)] for group in live.groups])


def optimizer_of(scheduler: Any, optimizers: Sequence[NamedOptimizer]) -> NamedOptimizer | None:
    """Returns the optimizer of a scheduler, or of the scheduler that it wraps; None if it is none of these."""
    while scheduler is not None:
        optimizer = getattr(scheduler, "optimizer", None)
        matching = (live for live in optimizers if any(part is optimizer for part in optimizer_chain(live.optimizer)))
        if (live := next(matching, None)) is not None:
            return live
        scheduler = getattr(scheduler, "scheduler", None)
    return None
