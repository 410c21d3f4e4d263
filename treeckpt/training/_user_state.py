"""Restore of user-defined trees: `loader` and `extra` of a training state, and what is registered with a manager.

A loader is one object or a tree of them: each loads the state that was saved at its path. A given `extra` is filled as
`treeckpt.load_into` fills a tree; leaves that only one side has are found here, before anything changes. Dicts and
lists below its names may have grown: what was saved in them beside that which is here is added, as it was saved.

Optimizers in these trees may have no state yet. `Optimizer.state_dict` names parameters by their numbers; moments that
the live optimizer lacks are created as `restore` creates them by name: of the saved dtype, with the layout of their
parameter. The optimizer itself changes last.
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
from torch import Tensor
from torch.utils.data import DataLoader

from .._arrays.registry import abstract_of, build_tensor, is_value, new_array, resolve
from .._arrays.stateful import (
    expand_states,
    holds_stateful,
    is_disabled_scaler,
    is_optimizer,
    is_stateful,
    load_exact_state,
    node_at,
    object_states,
    plan_state,
)
from .._core.tree.containers import PerRank, flatten_one_level
from .._core.tree.flatten import child_of_rank, flatten, replace_leaves, unflatten, update_in_place
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
    paths_of,
    rank_key,
)
from ..errors import MismatchError
from ._groups import copied_value, torch_options
from ._moments import MomentPlacement, build_state
from ._optimizers import param_groups_of
from ._sources import OWN, RestoreSource, children_of, descend, leaves_below

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
    for key, item in enumerate(loader) if isinstance(loader, (list, tuple)) else pairs:
        if not holds_stateful(item, namespace):
            continue
        here = f"{path}/{key_text(key)}"
        try:
            part = state[key]
        except (LookupError, TypeError) as error:
            raise MismatchError(
                here,
                expected=f"the state of a {type(item).__qualname__}",
                found="nothing in the checkpoint",
                hint="Give the loaders in a tree as that which was saved",
            ) from error
        yield from loader_actions(item, part, here, namespace)


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
    for part in parts:
        check_generators(part)
    if not isinstance(loader, DataLoader) or not is_stateful(loader) or loader in _checked:
        return
    _checked.add(loader)
    batches = loader.batch_sampler
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    shared = any(getattr(sampler, "generator", None) is loader.generator for sampler in samplers)
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
    places = (path.split("/") for path, spec in source.leaves.items() if spec or path.endswith("/_growth_tracker"))
    return {steps[1] for steps in places if steps[0] == "extra" and len(steps) > 2 and not steps[1].startswith("~")}


class ExtraDifferences(msgspec.Struct):
    """What differs between a given `extra` and the saved one; all are paths of the checkpoint, with `~rank*`."""

    keys: LeafDifferences
    """The leaves that only the given tree has, and those that only the checkpoint has."""
    own: list[str]
    """Leaves of both that are each rank's own."""
    unused: list[str]
    """Disabled objects, which leave what was saved of them unused."""
    lengths: dict[str, tuple[int, int]]
    """(items here, items saved) of each sequence of another length, by path."""
    additions: list[Callable[[], None]]
    """Functions that add what was saved in dicts and lists beside that which is here."""


class _Grown(msgspec.Struct, frozen=True):
    """A saved item that a dict or list here lacks."""

    container: Any
    key: Any
    structure: Structure
    """The structure of the item."""


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
    select = [path for path, item in grown.items() if leaves_below(path, item.structure)]
    saved, namespace = source.part("extra", select=select) if select else None, source.options.namespace
    for path, new in grown.items():
        if leaves_below(path, new.structure):
            item: Any = node_at({"extra": saved}, path.replace(_ANY_RANK, rank_key(rank)), rank, namespace)
        else:
            item = unflatten(new.structure, iter(()), resolve=resolve, namespace=namespace)
        leaves = [copied_value(leaf) for _, leaf in flatten(item, rank=rank, namespace=namespace)[1]]
        item = replace_leaves(item, iter(leaves), namespace=namespace)
        item = plan_state(path, None, item, live=None, namespace=namespace).state
        if isinstance(new.container, (list, collections.deque)):
            yield partial(new.container.append, item)
        else:
            yield partial(setitem, new.container, new.key, item)


def compare_extra(extra: Any, target: Any, source: RestoreSource, *, rank: int) -> ExtraDifferences:
    """Compares a given `extra` with the saved one.

    Paths at or below `...` are not compared, nor is the state of an object, which checks it itself; but that of a
    module or an optimizer is.

    Args:
        target: what is filled in its place.

    Raises:
        MismatchError: an object cannot take what was saved.
    """
    tree: dict[str, Any] = {"extra": target}
    where: Any = {"rank": rank, "namespace": source.options.namespace}
    leaves = [(index_path(path, rank), leaf) for path, leaf in flatten(tree, **where)[1]]
    given = tuple(f"{path}/" for path, leaf in leaves if leaf is not ...)
    disabled = [path for path, leaf in leaves if is_disabled_scaler(leaf)]
    expanded = expand_states(tree, mappings=True, **where)
    if expanded is not None:
        saved = {"extra": source.part("extra", arrays=False)}
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
    grown = {
        path: item
        for path, item in grown.items()
        if not f"{path}/".startswith(tuple(f"{sequence}/" for sequence in sequences))
    }
    wanted = {index_path(path, rank): leaf for path, leaf in leaves}
    there = [path for path in source.leaves if path == "extra" or path.startswith("extra/")]
    differences = compare_leaves(wanted, there, whole=(*sequences, *grown))
    own = [path for path in there if _ANY_RANK in path and f"{path}/".startswith(given)]
    unused = [path for path in disabled if any(other.startswith(f"{path}/") for other in there)]
    return ExtraDifferences(
        differences,
        own,
        unused,
        lengths,
        list(_additions(grown, source, rank)),
    )


def own_leaves(target: Any, path: str, source: RestoreSource, *, rank: int) -> list[str]:
    """Returns the leaves of which each rank has saved its own and that a tree at a path asks for."""
    own = [saved for saved in source.leaves if OWN in saved and saved.startswith(f"{path}/")]
    if not own:
        return []
    namespace = source.options.namespace
    found = [(index_path(at, rank), leaf) for at, leaf in flatten(target, rank=rank, namespace=namespace)[1]]
    exact = {f"{path}/{at}" for at, leaf in found if leaf is not ...}
    objects = (at for at, leaf in found if _ANY_RANK in at or holds_stateful(leaf, namespace, mappings=True))
    above = tuple(f"{path}/{at}/" if at else f"{path}/" for at in objects)
    return [saved for saved in own if saved in exact or saved.startswith(above)]


# optimizers in trees --------------------------------------------------------------------------------------------------


class ResumedOptimizer:
    """An optimizer, with a state to be filled that has all leaves of the saved one."""

    def __init__(self, optimizer: Any, state: Any) -> None:
        self.optimizer, self._state = optimizer, state

    def state_dict(self) -> Any:
        """The state to be filled."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Loads the state into the optimizer; moments keep the dtype that was saved."""
        load_exact_state("optimizer", self.optimizer, state)


class TreeToFill:
    """A tree, and what is filled in its place: each optimizer that lacks saved arrays is a `ResumedOptimizer` there.

    Args:
        keys: the keys that lead to where it was saved.
        selects: whether a saved path is asked for.

    Raises:
        MismatchError: an optimizer of other groups, or one of which only a part is asked for.
    """

    def __init__(
        self,
        tree: Any,
        keys: tuple[Any, ...],
        source: RestoreSource,
        selects: Callable[[str], bool] = lambda path: True,
    ) -> None:
        self._tree, self._namespace = tree, source.options.namespace
        path, leaves = "/".join(map(key_text, keys)), list[Any]()
        for below, leaf in flatten(tree, namespace=self._namespace)[1]:
            here = f"{path}/{below}" if below else path
            leaves.append(_resumed(leaf, here, source, selects) if is_optimizer(leaf) else leaf)
        is_other = any(isinstance(leaf, ResumedOptimizer) for leaf in leaves)
        self.target = replace_leaves(tree, iter(leaves), namespace=self._namespace) if is_other else tree

    def take_back(self) -> None:
        """Puts what was filled into the containers of the tree, in which the optimizers themselves stay."""
        if self.target is not self._tree:
            filled_leaves = flatten(self.target, namespace=self._namespace)[1]
            leaves = (leaf.optimizer if isinstance(leaf, ResumedOptimizer) else leaf for _, leaf in filled_leaves)
            filled = replace_leaves(self.target, leaves, namespace=self._namespace)
            update_in_place(self._tree, filled, is_value=is_value, namespace=self._namespace)


def _resumed(optimizer: Any, path: str, source: RestoreSource, selects: Callable[[str], bool]) -> Any:
    saved, live = source.structure, optimizer.state_dict()
    for step in path.split("/"):
        saved = next((child for key, child in children_of(saved).items() if key_text(key) == step), None)
    _check_names(live, path, saved, source)
    below = {p: f"{path}/{p}" for p, _ in paths_of(saved)} if saved is not None else {}
    arrays = {p for p, leaf_path in below.items() if source.leaves.get(leaf_path) is not None}
    here = {p for p, leaf in flatten(live)[1] if isinstance(leaf, Tensor)}
    if saved is None or arrays == here or not all(leaf_path in source.leaves for leaf_path in below.values()):
        return optimizer
    if not all(map(selects, below.values())):
        raise MismatchError(
            path,
            expected="all of an optimizer's state to be asked for, as it has none of its own here",
            found="a part",
            hint="Select the whole optimizer, or exclude it",
        )
    built = _StateDictBuilder(optimizer, source).state(saved, live, path)
    return ResumedOptimizer(optimizer, plan_state(path, None, built, live=live).placed())


class _StateDictBuilder:
    """Builds the state dict of one optimizer, to be filled."""

    def __init__(self, optimizer: Any, source: RestoreSource) -> None:
        param_groups = param_groups_of(optimizer) or []
        groups: list[Any] = [group["params"] for group in param_groups]
        self._source = source
        self._by_number: dict[Any, Tensor] = dict(enumerate(parameter for group in groups for parameter in group))
        self._by_position = {(i, j): parameter for i, group in enumerate(groups) for j, parameter in enumerate(group)}
        counts = any(group.get("capturable") or group.get("fused") for group in param_groups)
        self._made: dict[object, Tensor] = {}
        self._place = MomentPlacement(counts_on_device=counts)

    def state(self, node: Structure, live: Any, path: str) -> Any:
        """Returns the state dict, or a part of it: a wrapper's contains that of its optimizer.

        Raises:
            MismatchError: it is of other groups.
        """
        children = children_of(node)
        if not isinstance(node, DictNode):
            return self._as_saved(node, path)
        if not isinstance(live, Mapping):
            live = {}
        if {"state", "param_groups"} <= children.keys() & live.keys() and isinstance(live["state"], Mapping):
            _check_groups(live, path, node)
            own = self._moments(children["state"], live["state"], f"{path}/state", self._by_number)
            return {
                key: own if key == "state" else self.state(child, live.get(key), f"{path}/{key_text(key)}")
                for key, child in children.items()
            }
        if children and all(type(key) is tuple and key in self._by_position for key in children):
            return self._moments(node, live, path, self._by_position)
        return {key: self.state(child, live.get(key), f"{path}/{key_text(key)}") for key, child in children.items()}

    def _moments(self, node: Structure, live: Any, above: str, parameters: Mapping[Any, Tensor]) -> dict[Any, Any]:
        moments: dict[Any, Any] = {}
        for key, child in children_of(node).items():
            path = f"{above}/{key_text(key)}"
            if key in parameters and isinstance(child, DictNode):
                mine = live.get(key) if isinstance(live, Mapping) else None
                arrays = (p for p in leaves_below(path, child) if self._source.leaves[p] is not None)
                place = msgspec.structs.replace(self._place, was_spread=any(map(self._source.is_spread, arrays)))
                moments[key] = build_state(
                    parameters[key], child, mine or {}, self._source, path=path, place=place, made=self._made
                )
            else:
                moments[key] = self._as_saved(child, path)
        return moments

    def _as_saved(self, node: Structure, path: str) -> Any:
        specs = ((p, self._source.leaves[p]) for p in leaves_below(path, node))
        leaves = (self._source.value(p) if spec is None else new_array(spec, p, None).leaf for p, spec in specs)
        return unflatten(node, leaves, resolve=resolve, build=build_tensor)


def _check_groups(live: Any, path: str, saved: Structure) -> None:
    """Refuses a state of other groups, before anything changes.

    Raises:
        MismatchError: of another number of groups, or of parameters in one, or with hyper-parameters of another class.
    """
    groups = children_of(descend(saved, ("param_groups",)))
    counts = [len(children_of(descend(group, ("params",)))) for group in groups.values()]
    wanted = [len(group["params"]) for group in live["param_groups"]]
    if counts != wanted:
        raise MismatchError(
            f"{path}/param_groups",
            expected=f"groups of {', '.join(map(str, wanted))} parameters, as the optimizer has",
            found=f"groups of {', '.join(map(str, counts))} in the checkpoint",
            hint="Make the optimizer with the groups that were saved; treeckpt.training matches parameters by name",
        )
    here = {name for group in live["param_groups"] for name in group}
    foreign = sorted((torch_options() & {name for group in groups.values() for name in children_of(group)}) - here)
    if foreign:
        raise MismatchError(
            f"{path}/param_groups",
            expected="the hyper-parameters of the optimizer's class",
            found=f"{', '.join(foreign)} in the checkpoint too",
            hint="Make an optimizer of the class that was saved; treeckpt.training.restore with strict=False takes "
            "what both have",
        )


def _check_names(live: Any, path: str, saved: Structure, source: RestoreSource) -> None:
    """Refuses parameters in another order, where both sides name them (`named_parameters`): state goes by number.

    Raises:
        MismatchError: a parameter stands at another place than when it was saved.
    """
    groups = live.get("param_groups") if isinstance(live, Mapping) else None
    here = [name for group in groups or () for name in group.get("param_names", ())]
    there: list[Any] = []
    for key, group in children_of(descend(saved, ("param_groups",))).items():
        names = children_of(group).get("param_names")
        names_path = f"{path}/param_groups/{key_text(key)}/param_names"
        there += [source.value(p) for p in leaves_below(names_path, names)] if names is not None else []
    moved = next((n for n, name in zip(there, here, strict=False) if n != name and n in here), None)
    if moved is not None:
        raise MismatchError(
            f"{path}/param_groups",
            expected=f"the parameters in the order in which they were saved: {', '.join(map(str, there))[:200]}",
            found=f"{moved} at another place: {', '.join(map(str, here))[:200]}",
            hint="Make the optimizer of the parameters in that order; treeckpt.training matches them by name",
        )
