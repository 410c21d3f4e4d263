"""Restore of the parts of a training state that are user-defined trees: `loader` and `extra`.

A loader is one object or a tree of them: each loads the state that was saved at its path. A given `extra` is filled as
`treeckpt.load_into` fills a tree; leaves that only one side has are found here, before anything changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

from ..arrays.registry import abstract_of, is_value
from ..arrays.stateful import (
    expand_states,
    holds_stateful,
    is_disabled_scaler,
    is_stateful,
    object_states,
    plan_state,
)
from ..core.tree.flatten import flatten
from ..core.tree.sequences import differing_sequences
from ..core.tree.structure import index_path, key_text
from ..errors import MismatchError
from .sources import RestoreSource

_log = logging.getLogger("treeckpt")


def loader_actions(loader: Any, state: Any, path: str) -> Iterator[Callable[[], None]]:
    """Yields functions that load the state of each object in a loader's tree (dicts, lists and tuples).

    Raises:
        MismatchError: nothing was saved for an object.
    """
    if is_stateful(loader):
        yield plan_state(path, loader, state).load
        return
    pairs: Any = loader.items() if isinstance(loader, Mapping) else ()
    for key, one in enumerate(loader) if isinstance(loader, (list, tuple)) else pairs:
        if not holds_stateful(one):
            continue
        here = f"{path}/{key_text(key)}"
        try:
            part = state[key]
        except (LookupError, TypeError) as error:
            raise MismatchError(
                here,
                expected=f"the state of a {type(one).__qualname__}",
                found="nothing in the checkpoint",
                hint="Give the loaders in a tree as that which was saved",
            ) from error
        yield from loader_actions(one, part, here)


def loader_state(loader: Any) -> Any:
    """Returns what is saved of a loader.

    Raises:
        MismatchError: it is an iterable without `state_dict` and `load_state_dict`.
    """
    check_loader(loader, allow_pickle=True)
    return object_states(loader.state_dict(), "loader", (loader,)) if is_stateful(loader) else loader


def check_loader(loader: Any, rank: int = 0, *, allow_pickle: bool) -> None:
    """Refuses a loader that is, or holds, an object without the methods through which its place is saved and loaded.

    Args:
        allow_pickle: takes such an object for a value, unless it is iterable: the pickle of a loader has no place.

    Raises:
        MismatchError: naming it.
    """
    for path, leaf in flatten({"loader": loader}, rank=rank)[1]:
        if leaf is ... or holds_stateful(leaf) or is_value(leaf) or abstract_of(leaf, path, rank) is not None:
            continue
        if isinstance(leaf, Iterable) or not allow_pickle:
            raise MismatchError(
                path,
                expected="an object with state_dict and load_state_dict, or plain values and arrays",
                found=f"a {type(leaf).__qualname__}",
                hint="Take torchdata's StatefulDataLoader; or leave loader= out, keep the epoch and the number of "
                "samples in extra=, and skip as many after a restore",
            )


_checked = WeakSet[Any]()
"""The loaders whose generators were looked at; a warning comes once for each."""


def check_generators(loader: Any) -> None:
    """Logs which generators of a torchdata loader will not continue, or make others not continue.

    A `DataLoader` draws a number from its generator for each new iterator, also for one that continues a saved epoch.
    """
    parts = loader.values() if isinstance(loader, Mapping) else loader if isinstance(loader, (list, tuple)) else ()
    for one in parts:
        check_generators(one)
    if not isinstance(loader, DataLoader) or not is_stateful(loader) or loader in _checked:
        return
    _checked.add(loader)
    batches = loader.batch_sampler
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    shared = any(getattr(one, "generator", None) is loader.generator for one in samplers)
    if loader.generator is None:
        lost = "draws from the global generator: other random numbers of the training (dropout) do not continue"
    elif shared and not loader.num_workers:
        lost = "draws from the generator of its sampler: the order of later epochs does not continue"
    else:
        return
    _log.warning(
        "loader: %s as they would without the interruption. Give it a generator of its own beside that of its sampler: "
        "%s(data, sampler=RandomSampler(data), generator=torch.Generator()), with the RandomSampler of "
        "torchdata.stateful_dataloader.sampler",
        lost,
        type(loader).__qualname__,
    )


def objects_of_extra(source: RestoreSource) -> set[str]:
    """Returns the names in `extra` under which the state of an object stands: arrays, or what a `GradScaler` saves."""
    found = (path.split("/") for path, spec in source.leaves.items() if spec or path.endswith("/_growth_tracker"))
    return {steps[1] for steps in found if steps[0] == "extra" and len(steps) > 2 and not steps[1].startswith("~")}


def compare_extra(extra: Any, source: RestoreSource, *, rank: int) -> tuple[list[str], list[str], list[str], list[str]]:
    """Returns the paths that only the given tree has, that only the checkpoint has, and of what both have per rank.

    The last are those of disabled objects, which leave what was saved of them unused.

    Paths at or below `...` are not compared, nor is the state of an object without arrays, which checks it itself.
    """
    tree: dict[str, Any] = {"extra": extra}
    leaves = [(index_path(path, rank), leaf) for path, leaf in flatten(tree, rank=rank)[1]]
    given = tuple(f"{path}/" for path, leaf in leaves if leaf is not ...)
    disabled = [path for path, leaf in leaves if is_disabled_scaler(leaf)]
    found = expand_states(tree, rank=rank, mappings=True)
    if found is not None:
        saved = {"extra": source.abstract("extra")}
        tree = found.target(lambda path, arrays: saved)
    _, leaves = flatten(tree, rank=rank)
    sequences = differing_sequences(
        tree,
        source.structure,
        is_value=is_value,
        is_saved_value=lambda path: path in source.leaves and source.leaves[path] is None,
        rank=rank,
        source_rank=rank % source.world,
    )
    wanted = {index_path(path, rank): leaf for path, leaf in leaves}
    free = (*(f"{path}/" for path, leaf in wanted.items() if leaf is ...), *(f"{path}/" for path in sequences))
    there = [path for path in source.leaves if path == "extra" or path.startswith("extra/")]
    missing = [
        path
        for path, leaf in wanted.items()
        if leaf is not ... and path not in source.leaves and not path.startswith(free)
    ]
    own = [path for path in there if "~rank*" in path and f"{path}/".startswith(given)]
    unused = [path for path in disabled if any(one.startswith(f"{path}/") for one in there)]
    return missing, [path for path in there if path not in wanted and not path.startswith(free)], own, unused
