"""Stateful objects anywhere in a tree: objects with `state_dict` and `load_state_dict`.

To save, such an object is replaced by the result of its `state_dict()`. To restore, the arrays of that state are filled
in place, as those of the tree are, and the state is then passed to `load_state_dict`. An object whose state holds no
arrays may have grown (a data loader's queue): its state is loaded as it was saved, and the object checks it.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import lru_cache
from typing import Any

import msgspec

from ..core.tree.containers import AbsentSubtree, FromRank, flatten_one_level, is_leaf_type, is_stateful_type
from ..core.tree.flatten import PerRank, flatten, replace_leaves
from ..core.tree.in_place import update_in_place
from ..core.tree.structure import index_path, key_text, rank_key
from ..core.tree.tensor_parts import TensorParts
from ..errors import LayoutError, MismatchError, TreeError
from .base import PartsNeeded
from .registry import any_in_parts, is_value, parts_adapter, take_apart

_log = logging.getLogger("treeckpt")


def is_stateful(value: object) -> bool:
    """Returns whether an object has a state that it returns and loads as a tree."""
    return is_stateful_type(type(value))


@lru_cache(maxsize=1024)
def _is_mapping(kind: type) -> bool:
    """Returns whether a class that is no container is filled key by key, as a subclass of dict."""
    return issubclass(kind, MutableMapping) and kind is not collections.Counter


def holds_stateful(tree: Any, namespace: str = "", *, mappings: bool = False, layouts: bool = True) -> bool:
    """Returns whether a tree holds a stateful object, a tensor made of others, or `FromRank`.

    It is cheap for trees without, which most are.

    Args:
        layouts: looks at the layout of each plain tensor, which takes 0.2 microseconds. Without it sparse and nested
            tensors are not found: their adapter raises `PartsNeeded` where it meets one.
    """
    met: dict[int, Any] = {}
    waiting: list[Any] = [tree]
    nodes: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if kind is dict:
            children: Any = node.values()
        elif kind is list or kind is tuple:
            children = node
        elif is_leaf_type(kind):
            continue
        else:
            try:
                taken = flatten_one_level(node, "", namespace, 0)
            except TreeError:
                return True  # flattening raises the error with the path
            if taken is None:
                if kind is FromRank or is_stateful_type(kind) or (mappings and _is_mapping(kind)):
                    return True
                if any_in_parts((node,)):
                    return True
                continue
            children = taken.children
        if id(node) not in met:
            met[id(node)] = node
            if layouts:
                nodes.extend(children)
            waiting += [child for child in children if not is_leaf_type(type(child))]
    return layouts and any_in_parts(nodes)


class LoadsSavedState:
    """Base class of objects that load their state as it was saved, arrays too: nothing is filled in place."""


def is_optimizer(value: object) -> bool:
    """Returns whether an object has the attributes of an optimizer; some wrappers derive from no class of torch.

    One that acts as an optimizer and has one in an attribute need not have groups itself.
    """
    methods = "state_dict", "load_state_dict"
    if isinstance(value, type) or not all(hasattr(value, name) for name in methods):
        return False
    if hasattr(value, "param_groups"):
        return True
    acts = hasattr(value, "step") and hasattr(value, "zero_grad") and not hasattr(value, "named_parameters")
    inner = getattr(value, "__dict__", {}).values() if acts else ()
    return any(hasattr(one, "param_groups") and hasattr(one, "state_dict") for one in inner)


def pass_state(path: str, owner: Any, state: Any) -> None:
    """Passes an object its state; an error of its own gets a note that names the path."""
    try:
        owner.load_state_dict(state)
    except Exception as error:
        where = f"raised by {type(owner).__qualname__}.load_state_dict for {path}"
        error.add_note(f"{where}; the arrays of the target are filled already")
        raise


def is_disabled_scaler(value: object) -> bool:
    """Whether an object is a disabled `GradScaler` of torch: its state is empty, and it ignores what it loads."""
    return is_of_torch(value, _SCALER) and not value.is_enabled()  # pyright: ignore[reportAttributeAccessIssue]


def load_exact_state(path: str, owner: Any, state: Any) -> None:
    """Loads the state of an object; the state of an optimizer's parameters keeps the dtypes of `state`.

    torch casts it to the dtype of the parameter, also in an optimizer inside a wrapper.
    """
    pass_state(path, owner, state)
    optimizers = _optimizers_in(owner)
    for given in _states_in(state) if optimizers else ():
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        for optimizer in optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            live = getattr(optimizer, "state", None)
            if not isinstance(live, MutableMapping) or len(parameters) != len(numbers):
                continue
            for number, parameter in zip(numbers, parameters, strict=True):
                mine, part = live.get(parameter), given["state"].get(number)
                if isinstance(mine, dict) and isinstance(part, dict) and part.keys() <= mine.keys():
                    live[parameter] = _uncast(mine, part)


def _optimizers_in(owner: object) -> list[Any]:
    """Returns an optimizer, and those that it wraps."""
    found: list[Any] = []
    waiting = [owner]
    while waiting:
        one = waiting.pop()
        if is_optimizer(one) and all(one is not other for other in found):
            found.append(one)
            waiting += getattr(one, "__dict__", {}).values()
    return [one for one in found if hasattr(one, "param_groups")]


def _states_in(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the state dicts of torch optimizers in a state."""
    waiting = [state]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (list, tuple)):
            waiting += node
        elif isinstance(node, dict):
            groups, of = node.get("param_groups"), node.get("state")
            if isinstance(of, dict) and isinstance(groups, list) and all("params" in group for group in groups):
                yield node
            waiting += (part for key, part in node.items() if key not in ("param_groups", "state"))


def _uncast(loaded: Any, given: Any) -> Any:
    """Returns a loaded part of a state, with the given arrays in place of those that `load_state_dict` has cast."""
    if hasattr(given, "dtype") and hasattr(given, "shape"):
        was_cast = type(loaded) is type(given) and loaded.shape == given.shape and loaded.dtype != given.dtype
        return given.to(loaded.device) if was_cast and hasattr(given, "to") else loaded
    if isinstance(given, Mapping) and isinstance(loaded, dict):
        for key in loaded.keys() & given.keys():
            loaded[key] = _uncast(loaded[key], given[key])
    elif type(given) in (list, tuple) and type(loaded) is type(given) and len(loaded) == len(given):
        parts = [_uncast(*pair) for pair in zip(loaded, given, strict=True)]
        return parts if isinstance(given, list) else tuple(parts)
    return loaded


class _StatefulLeaf(msgspec.Struct):
    """One stateful object of a tree, and its present state."""

    path: str
    owner: Any
    state: Any
    has_arrays: bool
    inside: ExpandedTree | None = None
    """The content of a mapping, or a state, that holds stateful objects or tensors in parts itself."""
    is_tensor: bool = False
    """Whether it is a tensor that is made of others; its state is these."""


class ExpandedTree:
    """A tree with each stateful object replaced by its state.

    Args:
        mappings: objects that are mappings, and no containers, are replaced too, to be filled key by key.
        above: the path of the tree.
        world: of the ranks that save, where `FromRank` leaves what other ranks give; None takes it for its value.
        layouts: as for `holds_stateful`.
    """

    def __init__(
        self,
        tree: object,
        rank: int,
        namespace: str,
        *,
        mappings: bool = False,
        above: str = "",
        world: int | None = None,
        layouts: bool = True,
    ) -> None:
        self.original, self.rank, self.namespace = tree, rank, namespace
        _, self.leaves = flatten(tree, rank=rank, namespace=namespace)
        self.found: dict[int, _StatefulLeaf] = {}
        tensors: dict[int, Any] = {}
        for position, (below, leaf) in enumerate(self.leaves):
            path = f"{above}/{below}" if above and below else above or below
            if type(leaf) is FromRank:
                state = _of_rank(leaf, path, rank, namespace, mappings=mappings, world=world)
                self.found[position] = _StatefulLeaf(path, leaf, state, True)
            elif is_stateful(leaf):
                state = leaf.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
                _, inner = flatten(state, rank=rank, namespace=namespace)
                arrays = (part for _, part in inner if hasattr(part, "shape") and hasattr(part, "dtype"))
                has_arrays = not isinstance(leaf, LoadsSavedState) and any(True for _ in arrays)
                inside = (
                    expand_states(state, rank=rank, namespace=namespace, above=path, layouts=layouts)
                    if has_arrays
                    else None
                )
                self.found[position] = _StatefulLeaf(
                    path, leaf, state if inside is None else inside.tree, has_arrays, inside
                )
            elif (parts := tensors.get(id(leaf)) or take_apart(leaf, path)) is not None:
                tensors[id(leaf)] = parts
                in_place = parts_adapter().fills_in_place(leaf)
                self.found[position] = _StatefulLeaf(path, leaf, parts, in_place, is_tensor=True)
            elif mappings and _is_mapping(type(leaf)):
                inside = ExpandedTree(dict(leaf), rank, namespace, mappings=True, above=path, layouts=layouts)  # pyright: ignore[reportArgumentType, reportCallIssue]
                self.found[position] = _StatefulLeaf(path, leaf, inside.tree, True, inside)
        self.tree = self._rebuilt(lambda found: found.state)

    def _rebuilt(self, of: Callable[[_StatefulLeaf], Any]) -> Any:
        """Returns the tree with `of(object)` in place of each stateful object."""
        leaves = (of(self.found[i]) if i in self.found else leaf for i, (_, leaf) in enumerate(self.leaves))
        return replace_leaves(self.original, leaves, namespace=self.namespace)

    def target(self) -> Any:
        """Returns the tree to fill, without the states that hold no arrays, which are loaded as they were saved."""
        for found in self.found.values():
            if type(found.owner) is FromRank:
                raise TreeError(
                    found.path,
                    expected="what can be filled in place",
                    found="a FromRank, which marks what is saved",
                    hint="Give its value, or use treeckpt.load",
                )
            if found.inside is not None:
                found.state = found.inside.target()
        return self._rebuilt(lambda found: found.state if found.has_arrays else ...)

    def restore(self, load: Callable[[str], Any], fill: Callable[[Any], Any]) -> tuple[Any, int]:
        """Loads everything, and passes each object its state.

        Args:
            load: returns the tree as saved, with the leaves below a path.
            fill: fills a tree in place.

        Returns:
            the result of `fill`, and how many further leaves were loaded.
        """
        self._load_states(load)
        target = self.target()
        report = fill(target)
        return report, self._take_back(target)

    def _load_states(self, load: Callable[[str], Any]) -> None:
        for found in self.found.values():
            if found.inside is not None:
                found.inside._load_states(load)
            elif not found.has_arrays:
                saved = self._saved_state(load, found)
                if saved is _NOTHING:
                    raise MismatchError(
                        found.path,
                        expected=f"the state of a {type(found.owner).__qualname__}",
                        found="nothing in the checkpoint",
                        hint="Leave it out with `...`",
                    )
                self._check_scaler(found, saved)
                if type(saved) is TensorParts:  # of a tree in memory
                    saved = parts_adapter().build(saved, found.path)
                if found.is_tensor and not _is_left_out(saved):
                    parts_adapter().check_content(found.owner, saved, found.path)
                found.state = saved
            elif is_of_torch(found.owner, _OPTIMIZER) and not self._has_moments(found.state):  # its lr is a tensor
                self._saved_state(load, found)

    def _check_scaler(self, found: _StatefulLeaf, saved: Any) -> None:
        """Compares whether a `GradScaler` was enabled and is; one that does not take its state up is logged.

        Raises:
            MismatchError: a disabled one was saved, which has no state for the one here.
        """
        if is_disabled_scaler(found.owner):
            if saved and self.rank == 0:
                what = "what was saved of a GradScaler was not restored: the one here has enabled=False"
                _log.warning("%s: %s", found.path, what)
        elif saved == {} and is_of_torch(found.owner, _SCALER):
            raise MismatchError(
                found.path,
                expected="the state of a GradScaler with enabled=True",
                found="that of one with enabled=False, which is empty",
                hint="Leave it out with `...`, and the one here stays as it is",
            )

    def _saved_state(self, load: Callable[[str], Any], found: _StatefulLeaf) -> Any:
        """Returns the saved state of an object, `_NOTHING` where there is none.

        Raises:
            MismatchError: it holds moments, of a fresh optimizer, whose devices its parameters determine.
        """
        tree = load(index_path(found.path, self.rank))
        node = _node_at(tree, found.path, self.rank, self.namespace)
        if is_of_torch(found.owner, _OPTIMIZER) and node is not _NOTHING and self._has_moments(node):
            raise MismatchError(
                found.path,
                expected="an optimizer that has state already, to fill in place",
                found="a fresh one",
                hint="Use treeckpt.training.restore, which makes the state where its parameters are",
            )
        return node

    def _has_moments(self, state: Any) -> bool:
        """Whether the state of an optimizer holds arrays beside those of its param groups."""
        _, leaves = flatten(state, rank=self.rank, namespace=self.namespace)
        return any(hasattr(leaf, "shape") and not path.startswith("param_groups/") for path, leaf in leaves)

    def _take_back(self, target: Any) -> int:
        """Passes objects their states, and stores values of a filled tree in containers; returns the further leaves."""
        whole = {id(found.state) for found in self.found.values() if found.has_arrays}
        owners = {self.leaves[position][0]: found.owner for position, found in self.found.items()}
        _, leaves = flatten(target, rank=self.rank, namespace=self.namespace, whole=whole)
        filled = iter([owners.get(path, leaf) for path, leaf in leaves])
        new = replace_leaves(target, filled, namespace=self.namespace, whole=whole)
        objects = {id(found.owner) for found in self.found.values()}  # each object stays, in a new tuple too
        update_in_place(
            self.original, new, is_value=lambda x: id(x) in objects or is_value(x), namespace=self.namespace
        )
        loaded = 0
        for found in self.found.values():
            if found.inside is not None:
                loaded += found.inside._take_back(found.state)
                content: Any = found.inside.original
                if is_stateful(found.owner):
                    load_exact_state(found.path, found.owner, content)
                    continue
                found.owner.update((key, value) for key, value in content.items() if found.owner[key] is not value)
            elif found.is_tensor:
                if not found.has_arrays and not _is_left_out(found.state):
                    parts_adapter().set_content(found.owner, found.state)
                    loaded += 1
            elif found.has_arrays:
                load_exact_state(found.path, found.owner, found.state)
            else:
                _, leaves = flatten(found.state, rank=self.rank, namespace=self.namespace)
                if all(leaf is not ... for _, leaf in leaves):  # else a part of it could not be loaded
                    load_exact_state(found.path, found.owner, found.state)
                    loaded += len(leaves)
        return loaded


def _of_rank(mark: FromRank, path: str, rank: int, namespace: str, *, mappings: bool, world: int | None) -> object:
    """Returns the subtree that a `FromRank` stands for on a rank.

    Raises:
        LayoutError: no rank that saves is named.
        TreeError: it holds `PerRank` state.
    """
    named = mark.rank
    if type(named) is not int or named < 0 or (world is not None and named >= world):
        raise LayoutError(
            path,
            expected="FromRank of a rank of 0 or more" if world is None else f"FromRank of a rank below {world}",
            found=f"rank={named!r:.40}",
            hint="Name one of the ranks that save",
        )
    if world is not None and rank != named:
        return AbsentSubtree(named)
    state = state_tree(mark.value, rank=rank, namespace=namespace, mappings=mappings, world=world)
    if any(rank_key(rank) in below.split("/") for below, _ in flatten(state, rank=rank, namespace=namespace)[1]):
        raise TreeError(path, expected="a value of one rank", found="PerRank state below FromRank")
    return state


def _is_left_out(content: Any) -> bool:
    """Whether a saved tensor, or a part of it, was not loaded."""
    return content is ... or (isinstance(content, dict) and ... in content.values())


def expand_states(
    tree: object,
    *,
    rank: int = 0,
    namespace: str = "",
    mappings: bool = False,
    above: str = "",
    layouts: bool = True,
) -> ExpandedTree | None:
    """Returns the tree with stateful objects replaced by their states; None for a tree without such objects."""
    if not holds_stateful(tree, namespace, mappings=mappings, layouts=layouts):
        return None
    return ExpandedTree(tree, rank, namespace, mappings=mappings, above=above, layouts=layouts)


def state_tree(
    tree: Any,
    *,
    rank: int = 0,
    namespace: str = "",
    mappings: bool = False,
    world: int | None = None,
    layouts: bool = True,
) -> Any:
    """Returns the tree with stateful objects replaced by their states; the tree itself where it holds none.

    Args:
        world, layouts: as for `ExpandedTree`.
    """
    if not holds_stateful(tree, namespace, mappings=mappings, layouts=layouts):
        return tree
    return ExpandedTree(tree, rank, namespace, mappings=mappings, world=world, layouts=layouts).tree


def in_parts_if_needed(act: Callable[[bool], Any], *, always: bool = False) -> Any:
    """Returns what an action returns that expands a tree, with `layouts` False, and again with True if it needs that.

    Args:
        act: changes nothing before all leaves of the tree are described.
        always: calls it with True at once.
    """
    if always:
        return act(True)
    try:
        return act(False)
    except PartsNeeded:
        return act(True)


_NOTHING = object()
"""Stands for the state of an object that the checkpoint does not have."""


def _node_at(tree: Any, path: str, rank: int, namespace: str) -> Any:
    """Returns what a loaded tree has at a path; `_NOTHING` where it has nothing."""
    node, steps = tree, path.split("/") if path else []
    for step in steps:
        taken = flatten_one_level(node, "", namespace, rank)
        text = rank_key if type(node) is PerRank else key_text
        keys = [text(key) for key in taken.keys] if taken is not None else []  # pyright: ignore[reportArgumentType]
        if taken is None or step not in keys:
            return _NOTHING
        node = taken.children[keys.index(step)]
    return node


def is_of_torch(value: object, name: str) -> bool:
    """Whether an object is of a class of torch, by its full name, without importing torch."""
    return any(f"{k.__module__}.{k.__qualname__}" == name for k in type(value).__mro__)


_OPTIMIZER = "torch.optim.optimizer.Optimizer"
_SCALER = "torch.amp.grad_scaler.GradScaler"
