"""Restore of the parts of a training state that are user-defined trees: `loader` and `extra`.

A loader is one object or a tree of them: each loads the state that was saved at its path. A given `extra` is filled as
`treeckpt.load_into` fills a tree; leaves that only one side has are found here, before anything changes. Dicts and
lists below its names may have grown: what was saved in them beside that which is here is added, as it was saved.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import setitem
from typing import Any
from weakref import WeakSet

import msgspec
from torch.utils.data import DataLoader

from .._arrays.registry import abstract_of, is_value, resolve
from .._arrays.stateful import (
    expand_states,
    holds_stateful,
    is_disabled_scaler,
    is_stateful,
    node_at,
    object_states,
    plan_state,
)
from .._core.tree.containers import PerRank, flatten_one_level
from .._core.tree.flatten import child_of_rank, flatten, replace_leaves, unflatten
from .._core.tree.leaf_differences import LeafDifferences, compare_leaves, differing_sequences
from .._core.tree.structure import (
    DefaultDictNode,
    DequeNode,
    DictNode,
    ListNode,
    OrderedDictNode,
    PerRankNode,
    Structure,
    index_path,
    key_text,
    keys_of,
    rank_key,
)
from ..errors import MismatchError
from ._groups import copied_value
from ._sources import RestoreSource, descend, leaves_below

_log = logging.getLogger("treeckpt")
_ANY_RANK = "~rank*"
_DICTS = dict, collections.OrderedDict, collections.defaultdict


def loader_actions(loader: Any, state: Any, path: str, namespace: str) -> Iterator[Callable[[], None]]:
    """Yields functions that load the state of each object in a loader's tree (dicts, lists and tuples).

    Raises:
        MismatchError: nothing was saved for an object.
    """
    if is_stateful(loader):
        yield plan_state(path, loader, state, namespace=namespace).load
        return
    pairs: Any = loader.items() if isinstance(loader, Mapping) else ()
    for key, one in enumerate(loader) if isinstance(loader, (list, tuple)) else pairs:
        if not holds_stateful(one, namespace):
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
        yield from loader_actions(one, part, here, namespace)


def loader_state(loader: Any) -> Any:
    """Returns what is saved of a loader.

    Raises:
        MismatchError: it is an iterable without `state_dict` and `load_state_dict`.
    """
    check_loader(loader, allow_pickle=True)
    return object_states(loader.state_dict(), "loader", (loader,)) if is_stateful(loader) else loader


def check_loader(loader: Any, rank: int = 0, *, allow_pickle: bool, namespace: str = "") -> None:
    """Refuses a loader that is, or holds, an object without the methods through which its place is saved and loaded.

    Args:
        allow_pickle: takes such an object for a value, unless it is iterable: the pickle of a loader has no place.

    Raises:
        MismatchError: naming it.
    """
    for path, leaf in flatten({"loader": loader}, rank=rank, namespace=namespace)[1]:
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


class ExtraDifferences(msgspec.Struct):
    """What differs between a given `extra` and the saved one; all are paths of the checkpoint, with `~rank*`."""

    keys: LeafDifferences
    """The leaves that only the given tree has, and those that only the checkpoint has."""
    own: list[str]
    """Leaves of both that are each rank's own."""
    unused: list[str]
    """Disabled objects, which leave what was saved of them unused."""
    lengths: dict[str, tuple[int, int]]
    """Sequences of other lengths: (items here, items saved)."""
    additions: list[Callable[[], None]]
    """Add what was saved in dicts and lists beside that which is here."""


class _Grown(msgspec.Struct, frozen=True):
    """A saved item that a dict or list here lacks."""

    container: Any
    key: Any
    structure: Structure
    """Of the item."""


def _grown_items(extra: Any, source: RestoreSource, rank: int) -> tuple[dict[str, _Grown], dict[str, tuple[int, int]]]:
    """Returns by path the saved items that dicts and lists here lack, and the sequences of other lengths.

    The names in `extra` itself are compared, and none is added.
    """
    grown, namespace = dict[str, _Grown](), source.options.namespace
    lengths: dict[str, tuple[int, int]] = {}

    def walk(here: Any, node: Structure, path: str) -> None:
        if isinstance(node, PerRankNode):
            if type(here) is PerRank:
                walk(here.value, child_of_rank(node, rank % source.world, path), f"{path}/{_ANY_RANK}")
            return
        taken = None if node is None or here is ... else flatten_one_level(here, path, namespace, rank)
        if node is None or taken is None:
            return
        there = {key_text(key): (key, child) for key, child in zip(keys_of(node, path), node.children, strict=True)}
        texts = [key_text(key) for key in taken.keys]
        for text, child in zip(texts, taken.children, strict=True):
            if text in there:
                walk(child, there[text][1], f"{path}/{text}")
        listed = isinstance(node, (ListNode, DequeNode)) and isinstance(here, (list, collections.deque))
        keyed = isinstance(node, (DictNode, OrderedDictNode, DefaultDictNode)) and type(here) in _DICTS
        if isinstance(here, (list, tuple, collections.deque)) and len(here) != len(there):
            lengths[path] = len(here), len(there)
        room: int | None = getattr(here, "maxlen", None)
        if (listed and (room is None or len(there) <= room)) or (keyed and path != "extra"):
            new = {text: pair for text, pair in there.items() if text not in texts}
            grown.update((f"{path}/{text}", _Grown(here, *pair)) for text, pair in new.items())

    walk(extra, descend(source.structure, ("extra",)), "extra")
    return grown, lengths


def _additions(grown: Mapping[str, _Grown], source: RestoreSource, rank: int) -> Iterator[Callable[[], None]]:
    """Loads saved items, and yields functions that put them into the dicts and lists here.

    Raises:
        MismatchError: the state of an object that stood in that of another.
    """
    if not grown:
        return
    select = [path for path, one in grown.items() if leaves_below(path, one.structure)]
    saved, namespace = source.part("extra", select=select) if select else None, source.options.namespace
    for path, one in grown.items():
        if leaves_below(path, one.structure):
            item: Any = node_at({"extra": saved}, path.replace(_ANY_RANK, rank_key(rank)), rank, namespace)
        else:
            item = unflatten(one.structure, iter(()), resolve=resolve, namespace=namespace)
        leaves = [copied_value(leaf) for _, leaf in flatten(item, rank=rank, namespace=namespace)[1]]
        item = replace_leaves(item, iter(leaves), namespace=namespace)
        item = plan_state(path, None, item, live=None, namespace=namespace).state
        if isinstance(one.container, (list, collections.deque)):
            yield partial(one.container.append, item)
        else:
            yield partial(setitem, one.container, one.key, item)


def compare_extra(extra: Any, source: RestoreSource, *, rank: int) -> ExtraDifferences:
    """Compares a given `extra` with the saved one.

    Paths at or below `...` are not compared, nor is the state of an object, which checks it itself; but that of a
    module or an optimizer is.

    Raises:
        MismatchError: an object cannot take what was saved.
    """
    tree: dict[str, Any] = {"extra": extra}
    where: Any = {"rank": rank, "namespace": source.options.namespace}
    leaves = [(index_path(path, rank), leaf) for path, leaf in flatten(tree, **where)[1]]
    given = tuple(f"{path}/" for path, leaf in leaves if leaf is not ...)
    disabled = [path for path, leaf in leaves if is_disabled_scaler(leaf)]
    expanded = expand_states(tree, mappings=True, **where)
    if expanded is not None:
        saved = {"extra": source.abstract("extra")}
        tree = expanded.target(lambda path, arrays: {"extra": source.part("extra", select=[path])} if arrays else saved)
    _, leaves = flatten(tree, **where)
    sequences = differing_sequences(
        tree,
        source.structure,
        is_value=is_value,
        is_saved_value=lambda path: path in source.leaves and source.leaves[path] is None,
        source_rank=rank % source.world,
        **where,
    )
    grown, lengths = _grown_items(extra, source, rank)
    grown = {path: at for path, at in grown.items() if not f"{path}/".startswith(tuple(f"{one}/" for one in sequences))}
    wanted = {index_path(path, rank): leaf for path, leaf in leaves}
    there = [path for path in source.leaves if path == "extra" or path.startswith("extra/")]
    found = compare_leaves(wanted, there, whole=(*sequences, *grown))
    own = [path for path in there if _ANY_RANK in path and f"{path}/".startswith(given)]
    unused = [path for path in disabled if any(one.startswith(f"{path}/") for one in there)]
    return ExtraDifferences(
        found,
        own,
        unused,
        lengths,
        list(_additions(grown, source, rank)),
    )
