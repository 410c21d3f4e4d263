"""Stateful objects in a tree, those with `state_dict` and `load_state_dict`, and the tree that holds their states.

`ExpandedTree` is a tree to be saved or filled in which the state of each such object stands in its place, the parts of
each tensor that is made of others (`_arrays.tensor_parts`), and the content of a mapping that is no container.

To save, an object is replaced by the result of its `state_dict()`, in which further objects are replaced likewise
(`ObjectState`). To restore, the saved state is passed to `load_state_dict`: it may hold other values, and arrays of
another number or size, than the object has (a data loader's queue, a replay buffer), and the object checks it. Arrays
that the object has in the saved shape are filled in place; others are new. The states of objects in it are loaded into
the live ones, which stand in their places. The arrays of modules and optimizers are compared as those of the tree are.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import msgspec

from .._core.tree.containers import (
    AbsentSubtree,
    FromRank,
    ObjectState,
    PerRank,
    flatten_one_level,
    is_leaf_type,
    is_stateful_type,
)
from .._core.tree.dict_attributes import METADATA
from .._core.tree.flatten import flatten, replace_leaves, update_in_place
from .._core.tree.keyed_table import TableColumn
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import index_path, key_text, rank_key
from .._core.tree.tensor_parts import TensorParts
from ..errors import LayoutError, MismatchError, TreeError
from .registry import abstract_of, adapter_of, any_in_parts, is_value, like_of, parts_adapter, take_apart

_log = logging.getLogger("treeckpt")


def is_stateful(value: object) -> bool:
    """Returns whether an object has a state that it returns and loads as a tree."""
    return is_stateful_type(type(value))


@lru_cache(maxsize=1024)
def is_filled_by_key(kind: type) -> bool:
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
                if kind is FromRank or is_stateful_type(kind) or (mappings and is_filled_by_key(kind)):
                    return True
                if any_in_parts((node,)):
                    return True
                continue
            children = taken.children
        if id(node) not in met:
            # the node is kept: the id of one that is gone may be given to another
            met[id(node)] = node
            if layouts:
                nodes.extend(children)
            waiting += [child for child in children if not is_leaf_type(type(child))]
    return layouts and any_in_parts(nodes)


_T = TypeVar("_T")


class LoadSaved(Protocol):
    """Returns a tree as it was saved, with the leaves below a path; others are `...`."""

    def __call__(self, path: str, *, arrays: bool) -> Any:
        """Arrays may be specs, unless `arrays`."""
        ...


class LoadsSavedState:
    """Base class of objects that load their state as it was saved, arrays too: nothing is filled in place."""


def is_optimizer(value: object) -> bool:
    """Returns whether an object has the attributes of an optimizer; some wrappers derive from no class of torch.

    One that acts as an optimizer and has one in an attribute need not have groups itself.
    """
    methods = "state_dict", "load_state_dict"
    # a class has the methods of its instances
    if isinstance(value, type) or not all(hasattr(value, name) for name in methods):
        return False
    if hasattr(value, "param_groups"):
        return True
    acts = hasattr(value, "step") and hasattr(value, "zero_grad") and not hasattr(value, "named_parameters")
    inner = getattr(value, "__dict__", {}).values() if acts else ()
    return any(hasattr(value, "param_groups") and hasattr(value, "state_dict") for value in inner)


def is_disabled_scaler(value: object) -> bool:
    """Whether an object is a disabled `GradScaler` of torch: its state is empty, and it ignores what it loads."""
    return is_of_torch(value, SCALER) and not value.is_enabled()  # pyright: ignore[reportAttributeAccessIssue]


def load_exact_state(path: str, owner: Any, state: Any) -> None:
    """Loads the state of an object; the state of an optimizer's parameters keeps the dtypes of `state`.

    torch casts it to the dtype of the parameter, also in an optimizer inside a wrapper.
    """
    try:
        owner.load_state_dict(state)
    except Exception as error:
        where = f"raised by {type(owner).__qualname__}.load_state_dict for {path}"
        error.add_note(f"{where}; the arrays of the target are filled already")
        raise
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
    optimizers: list[Any] = []
    waiting = [owner]
    while waiting:
        candidate = waiting.pop()
        if is_optimizer(candidate) and all(candidate is not other for other in optimizers):
            optimizers.append(candidate)
            waiting += getattr(candidate, "__dict__", {}).values()
    return [candidate for candidate in optimizers if hasattr(candidate, "param_groups")]


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


# the state of one object ----------------------------------------------------------------------------------------------


def object_states(
    state: Any,
    path: str,
    owners: tuple[Any, ...] = (),
    *,
    apart: Container[int] = (),
    rank: int = 0,
    namespace: str = "",
) -> Any:
    """Returns a state with the state of each object in it in the object's place, as an `ObjectState`.

    Args:
        owners: the object that it is of, after those in whose state that one stands.
        apart: the ids of objects that are saved elsewhere; their states are empty here.

    Raises:
        TreeError: an object in its own state, or one whose state is no mapping.
    """
    if not holds_stateful(state, namespace):
        return state
    try:
        _, leaves = flatten(state, rank=rank, namespace=namespace)
    except TreeError:
        return state  # the save raises the error with the whole path
    if not any(is_stateful(leaf) for _, leaf in leaves):
        return state
    made: list[Any] = []
    for below, leaf in leaves:
        if is_stateful(leaf):
            where, around, inner = join_paths(path, below), (*owners, leaf), None
            if all(leaf is not owner for owner in owners):
                inner = {} if id(leaf) in apart else leaf.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
            if not isinstance(inner, Mapping):
                what = "that stands in its own state" if inner is None else f"that returns a {type(inner).__qualname__}"
                raise TreeError(
                    where,
                    expected="an object whose state_dict() returns a dict",
                    found=f"a {type(leaf).__qualname__} {what}",
                    hint="Leave it out of the state of the object around it, and save it beside that",
                )
            inner = object_states(inner, where, around, apart=apart, rank=rank, namespace=namespace)
            leaf = ObjectState.from_object(leaf, inner)
        made.append(leaf)
    return replace_leaves(state, iter(made), namespace=namespace)


def join_paths(path: str, below: str) -> str:
    """Returns the path of what is below a path; either may be empty."""
    return f"{path}/{below}" if path and below else path or below


class StatePlan(msgspec.Struct):
    """A saved state, and the live objects that take the parts of it that are states of objects."""

    path: str
    owner: Any
    live: Any
    """The present state of the owner, with the live objects."""
    state: Any
    """What the owner takes, with the states of the objects in their places."""
    inner: dict[str, StatePlan]
    """The plans of the objects in the state, by their paths in it."""
    rank: int = 0
    namespace: str = ""

    def loaded(self) -> Any:
        """Loads the states of the objects in the state, and returns it with these objects in their places."""
        for plan in self.inner.values():
            if plan.state:  # else it is saved elsewhere
                plan.load()
        return self.placed()

    def placed(self) -> Any:
        """Returns the state with the live objects in their places."""
        state = self.state
        if self.inner:
            owners = {id(plan.state): plan.owner for plan in self.inner.values()}
            _, leaves = flatten(state, rank=self.rank, namespace=self.namespace, whole=owners)
            placed = iter([owners.get(id(leaf), leaf) for _, leaf in leaves])
            state = replace_leaves(state, placed, namespace=self.namespace, whole=owners)
        return state.as_state_dict() if isinstance(state, ObjectState) else state

    def load(self) -> None:
        """Passes the owner the state."""
        load_exact_state(self.path, self.owner, self.loaded())

    def has_tensors_of(self) -> bool:
        """Whether each saved tensor that is made of others has one here that is filled in place."""
        return all(
            (parts := take_apart(leaf := node_at(self.live, path, self.rank, self.namespace), path)) is not None
            and (parts.node.cls, parts.node.shape) == (saved.node.cls, saved.node.shape)
            and parts_adapter().fills_in_place(leaf)
            for path, saved in nodes_of(TensorParts, self.state, self.namespace).items()
        )

    def fill_in_place(self, *, as_here: bool) -> None:
        """Puts the owner's arrays in the place of saved ones, to be filled, and new arrays where it has none.

        An array of the owner is taken where it has the saved shape. Where it has not, a new one is on its device, or on
        that of another array of the owner, in the layout of one of the same shape.

        Args:
            as_here: the state keeps the leaves that it has here.

        Raises:
            MismatchError: a distributed array of another shape.
        """
        inner = {id(plan.state): plan for plan in self.inner.values()}
        for plan in inner.values():
            plan.fill_in_place(as_here=False)
        own = dict(flatten(self.live, rank=self.rank, namespace=self.namespace)[1])
        if as_here or any(type(leaf) is TableColumn for leaf in own.values()):
            for path, leaf in own.items():
                if is_stateful(leaf) and path not in self.inner:  # nothing was saved of it
                    self.inner[path] = StatePlan(path, leaf, {}, ObjectState.from_object(leaf, {}), {})
            parts = (self.inner[path].state if path in self.inner else leaf for path, leaf in own.items())
            self.state = replace_leaves(self.live, parts, namespace=self.namespace) if self.inner else self.live
            return
        arrays = _specs_of(own, self.rank)
        taken = nodes_of(TensorParts, self.state, self.namespace)
        tensors = {id(parts): own[path] for path, parts in taken.items() if path in own}
        known = {key: plan.state for key, plan in inner.items()} | tensors
        _, leaves = flatten(self.state, rank=self.rank, namespace=self.namespace, whole=known)
        new = [
            known[id(leaf)]
            if id(leaf) in known
            else own.get(path, leaf)
            if leaf is ...
            else leaf
            if (spec := abstract_of(leaf, path, self.rank)) is None
            else self._array(path, spec, own, arrays)
            for path, leaf in leaves
        ]
        made: Any = replace_leaves(self.state, iter(new), namespace=self.namespace, whole=known)
        versions = getattr(self.live, METADATA, None)  # those of a checkpoint that has none
        if versions is not None and type(made) is collections.OrderedDict and not hasattr(made, METADATA):
            setattr(made, METADATA, versions)
        self.state = made

    def _array(self, path: str, saved: ArraySpec, own: Mapping[str, Any], arrays: Mapping[str, ArraySpec]) -> Any:
        """Returns the array to fill with a saved one."""
        here = arrays.get(path)
        fits = here is not None and (here.shape == saved.shape or is_optimizer(self.owner))  # which compares no shapes
        if fits and getattr(own[path], "grad_fn", None) is None:
            return own[path]
        if here is not None and here.regions is not None and here.shape != saved.shape:
            raise MismatchError(
                join_paths(self.path, path),
                expected=f"shape {here.shape}, of a distributed array of the {type(self.owner).__qualname__} here",
                found=f"{saved.shape} in the checkpoint",
                hint="Make the object with arrays of the saved shapes, or leave it out with `...`",
            )
        like = [other for other, spec in arrays.items() if spec.regions is not None and spec.shape == saved.shape]
        like.sort(key=lambda other: (other != path, other.rpartition("/")[2] != path.rpartition("/")[2]))
        if like and (made := like_of(own[like[0]], path, self.rank, None)) is not None:
            return made.leaf
        near = here or next((spec for spec in arrays.values() if spec.kind == saved.kind), None)
        spec = msgspec.structs.replace(saved, regions=None, device=near.device if near is not None else None)
        made = like_of(spec, path, self.rank, None)
        assert made is not None, "a spec describes an array"
        return made.leaf


def plan_state(path: str, owner: Any, saved: Any, *, live: Any = ..., rank: int = 0, namespace: str = "") -> StatePlan:
    """Finds the live object for each state of an object in a saved state; nothing is changed.

    Args:
        owner: the object whose state it is.
        live: its present state; by default the owner is asked for it, where the saved one holds states of objects.

    Raises:
        MismatchError: there is no object here for a saved state, or one that cannot take it.
    """
    there = nodes_of(ObjectState, saved, namespace)
    if owner is None and isinstance(saved, ObjectState):
        there = {"": saved}
    if live is ...:
        live = owner.state_dict() if there and owner is not None else None
    inner: dict[str, StatePlan] = {}
    if there or holds_stateful(live, namespace):
        for below, leaf in flatten(live, rank=rank, namespace=namespace)[1]:
            node = node_at(saved, below, rank, namespace) if is_stateful(leaf) else None
            if isinstance(node, Mapping):
                mine: Any = leaf
                state = node if isinstance(node, ObjectState) else ObjectState.from_object(leaf, node)
                live_state = mine.state_dict() if node else {}
                inner[below] = plan_state(
                    join_paths(path, below), leaf, state, live=live_state, rank=rank, namespace=namespace
                )
                _check_can_take(inner[below])
    for below, node in there.items():
        if below not in inner:
            raise MismatchError(
                join_paths(path, below),
                expected=f"a {node.of.rpartition(':')[2]} to load its saved state into",
                found="none here" if owner is None else f"none in the state of the {type(owner).__qualname__} here",
                hint="Make the object around it as it was when this was saved",
            )
    if inner:
        planned = {id(node_at(saved, below, rank, namespace)): plan.state for below, plan in inner.items()}
        _, leaves = flatten(saved, rank=rank, namespace=namespace, whole=planned)
        states = iter([planned.get(id(leaf), leaf) for _, leaf in leaves])
        saved = replace_leaves(saved, states, namespace=namespace, whole=planned)
    return StatePlan(path, owner, live=live, state=saved, inner=inner, rank=rank, namespace=namespace)


def nodes_of(kind: type[_T], state: Any, namespace: str) -> dict[str, _T]:
    """Returns the containers of a class in a state by path, without those in others; the state itself is none."""
    nodes: dict[str, _T] = {}
    waiting: list[tuple[str, Any]] = [("", state)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, kind) and path:
            nodes[path] = node
            continue
        taken = None if is_leaf_type(type(node)) else flatten_one_level(node, path, namespace, 0)
        if taken is not None:
            text = rank_key if type(node) is PerRank else key_text
            pairs = zip(taken.keys, taken.children, strict=True)
            waiting += ((join_paths(path, text(key)), child) for key, child in pairs)  # pyright: ignore[reportArgumentType]
    return nodes


def _check_can_take(plan: StatePlan) -> None:
    """Refuses a saved state that the object inside another's state would refuse as it is loaded, or take wrongly.

    Raises:
        MismatchError: a module of other arrays, or a fresh optimizer of distributed parameters.
    """
    saved, here = (
        {path: spec.shape for path, spec in _specs_of(dict(leaves), plan.rank).items()}
        for leaves in (flatten(state, rank=plan.rank, namespace=plan.namespace)[1] for state in (plan.state, plan.live))
    )
    if not saved or saved == here:
        return
    if compares_arrays(plan.owner) and (path := min(path for path, _ in saved.items() ^ here.items())):
        raise MismatchError(
            join_paths(plan.path, path),
            expected=f"shape {here[path]}" if path in here else f"nothing, as the {type(plan.owner).__qualname__} here",
            found=f"{saved[path]} in the checkpoint" if path in saved else "nothing in the checkpoint",
            hint="Make the object as it was when this was saved",
        )
    groups: Any = getattr(plan.owner, "param_groups", ()) if is_optimizer(plan.owner) else ()
    if any(hasattr(parameter, "placements") for group in groups for parameter in group["params"]):
        raise MismatchError(
            plan.path,
            expected="an optimizer that has state already, as its parameters are distributed",
            found="one without the state that was saved",
            hint="Give it to treeckpt.training.state and restore as optimizer=",
        )


def _specs_of(leaves: Mapping[str, Any], rank: int) -> dict[str, ArraySpec]:
    """Returns the specs of the arrays among leaves, but of those that are made of others."""
    plain = {path: leaf for path, leaf in leaves.items() if not any_in_parts((leaf,))}
    return {path: spec for path, leaf in plain.items() if (spec := abstract_of(leaf, path, rank)) is not None}


def is_array(leaf: object) -> bool:
    """Returns whether a leaf is an array, a spec of one, or a column of a table."""
    return isinstance(leaf, (ArraySpec, TableColumn)) or adapter_of(type(leaf)) is not None


def compares_arrays(owner: Any) -> bool:
    """Whether an object takes only the arrays that it has: a module all of whose code for loading is that of torch."""
    if not is_of_torch(owner, _MODULE):
        return False
    modules = (where for module in owner.modules() for where in load_code_of(module, is_root=module is owner))
    return all(where.startswith("torch.nn.") for where in modules)


def load_code_of(module: Any, *, is_root: bool) -> Iterator[str]:
    """Yields the Python module of each function that may change what a module of torch loads, but of its wrappers'.

    Args:
        is_root: whether it is asked to load: torch calls the `load_state_dict` of no module inside.
    """
    base = next(kind for kind in type(module).__mro__ if _full_name(kind) == _MODULE)
    methods = ("_load_from_state_dict", "load_state_dict") if is_root else ("_load_from_state_dict",)
    functions = [getattr(getattr(module, name), "__func__", getattr(module, name)) for name in methods]
    own = [f for f, name in zip(functions, methods, strict=True) if f is not getattr(base, name)]
    for function in (*module._load_state_dict_pre_hooks.values(), *own):
        where = getattr(function, "__module__", None) or ""
        if not where.startswith("torch.distributed."):
            yield where


NOTHING = object()
"""Stands for the state of an object that the checkpoint does not have."""


def node_at(tree: Any, path: str, rank: int, namespace: str = "") -> Any:
    """Returns what a tree has at a path; `NOTHING` where it has nothing."""
    node, steps = tree, path.split("/") if path else []
    for step in steps:
        taken = flatten_one_level(node, "", namespace, rank)
        text = rank_key if type(node) is PerRank else key_text
        keys = [text(key) for key in taken.keys] if taken is not None else []  # pyright: ignore[reportArgumentType]
        if taken is None or step not in keys:
            return NOTHING
        node = taken.children[keys.index(step)]
    return node


def is_of_torch(value: object, name: str) -> bool:
    """Whether an object is of a class of torch, by its full name, without importing torch."""
    return name in map(_full_name, type(value).__mro__)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_MODULE = "torch.nn.modules.module.Module"
SCALER = "torch.amp.grad_scaler.GradScaler"


# a whole tree ---------------------------------------------------------------------------------------------------------


class _StatefulLeaf(msgspec.Struct):
    """One stateful object of a tree, and its present state."""

    path: str
    owner: Any
    live: Any
    """What `state_dict` returned."""
    state: Any
    """What stands in the tree: for a save the present state, for a restore what is filled, `...` for nothing."""
    inside: ExpandedTree | None = None
    """The content of a mapping, or of what is filled, that holds stateful objects or tensors in parts itself."""
    plan: StatePlan | None = None
    """What the object takes of a restore; None where it keeps its state."""
    content: Any = ...
    """The saved tensor, where a restore does not fill one that is made of others in place."""


class ExpandedTree:
    """A tree with each stateful object replaced by its state.

    Args:
        mappings: objects that are mappings, and no containers, are replaced too, to be filled key by key.
        above: the path of the tree.
        world: of the ranks that save, where `FromRank` leaves what other ranks give; None takes it for its value.
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
    ) -> None:
        self.original, self.rank, self.namespace = tree, rank, namespace
        _, self.leaves = flatten(tree, rank=rank, namespace=namespace)
        self.objects: dict[int, _StatefulLeaf] = {}
        tensors: dict[int, Any] = {}
        for position, (below, leaf) in enumerate(self.leaves):
            path = join_paths(above, below)
            if type(leaf) is FromRank:
                state = _of_rank(leaf, path, rank, namespace, mappings=mappings, world=world)
                self.objects[position] = _StatefulLeaf(path, leaf, None, state)
            elif is_stateful(leaf):
                live = leaf.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
                state = object_states(live, path, (leaf,), rank=rank, namespace=namespace)
                parts = expand_states(state, rank=rank, namespace=namespace, above=path)
                self.objects[position] = _StatefulLeaf(path, leaf, live, state if parts is None else parts.tree)
            elif (parts := tensors.get(id(leaf)) or take_apart(leaf, path)) is not None:
                # a tensor at two places is taken apart once, so that it stays one
                tensors[id(leaf)] = parts
                self.objects[position] = _StatefulLeaf(path, leaf, None, parts)
            elif mappings and is_filled_by_key(type(leaf)):
                inside = ExpandedTree(dict(leaf), rank, namespace, mappings=True, above=path)  # pyright: ignore[reportArgumentType, reportCallIssue]
                self.objects[position] = _StatefulLeaf(path, leaf, None, inside.tree, inside)
        self.tree = self._with_states(keep_shared=True)

    def _with_states(self, *, keep_shared: bool = False) -> Any:
        """Returns the tree with the state of each stateful object in its place."""
        leaves = (self.objects[i].state if i in self.objects else leaf for i, (_, leaf) in enumerate(self.leaves))
        return replace_leaves(self.original, leaves, namespace=self.namespace, keep_shared=keep_shared)

    def _leaves_of(self, state: Any) -> list[tuple[str, Any]]:
        return flatten(state, rank=self.rank, namespace=self.namespace)[1]

    def restore(self, load: LoadSaved, fill: Callable[[Any], Any]) -> tuple[Any, int]:
        """Loads everything, and passes each object its state.

        Args:
            load: returns the tree as saved, with the leaves below a path.
            fill: fills a tree in place.

        Returns:
            the result of `fill`, and how many further leaves were loaded.
        """
        target = self.target(load)
        report = fill(target)
        return report, self._take_back(target)

    def target(self, load: LoadSaved) -> Any:
        """Returns the tree to fill: for each object what it takes of its saved state; `...` where that has no arrays.

        Raises:
            MismatchError: an object cannot take what was saved; nothing is changed.
        """
        for entry in self.objects.values():
            if type(entry.owner) is FromRank:
                raise TreeError(
                    entry.path,
                    expected="what can be filled in place",
                    found="a FromRank, which marks what is saved",
                    hint="Give its value, or use treeckpt.load",
                )
            if entry.inside is not None:
                entry.state = entry.inside.target(load)
            elif type(entry.state) is TensorParts:
                self._plan_tensor(entry, load)
            else:
                self._plan(entry, load)
        return self._with_states()

    def _saved(self, entry: _StatefulLeaf, load: LoadSaved, *, arrays: bool) -> Any:
        return node_at(load(index_path(entry.path, self.rank), arrays=arrays), entry.path, self.rank, self.namespace)

    def _plan_tensor(self, entry: _StatefulLeaf, load: LoadSaved) -> None:
        """Loads the content of a tensor that is made of others, if these may be of other sizes than the saved ones."""
        if parts_adapter().fills_in_place(entry.owner):
            return
        entry.state, saved = ..., self._saved(entry, load, arrays=True)
        if saved is NOTHING:
            raise self._nothing(entry)
        if type(saved) is TensorParts:  # of a tree in memory
            saved = parts_adapter().build(saved, entry.path)
        if saved is not ... and not (isinstance(saved, dict) and ... in saved.values()):  # it was loaded as a whole
            parts_adapter().check_content(entry.owner, saved, entry.path)
            entry.content = saved

    def _nothing(self, entry: _StatefulLeaf) -> MismatchError:
        return MismatchError(
            entry.path,
            expected=f"the state of a {type(entry.owner).__qualname__}",
            found="nothing in the checkpoint",
            hint="Leave it out with `...`",
        )

    def _plan(self, entry: _StatefulLeaf, load: LoadSaved) -> None:
        """Sets what an object takes, and what of that is to be filled."""
        owner, whole = entry.owner, isinstance(entry.owner, LoadsSavedState)
        path, rank, namespace = entry.path, self.rank, self.namespace
        if compares_arrays(owner) and all(map(is_array, entry.live.values())):  # the usual model needs no second look
            self._fill_state(
                entry,
                StatePlan(path, owner, live=entry.live, state=entry.live, inner={}, rank=rank, namespace=namespace),
                load,
            )
            return
        saved, here = self._saved(entry, load, arrays=whole), self._moments(entry.state)
        if saved is NOTHING:
            if whole or not self._has_arrays(entry.live):
                raise self._nothing(entry)
            saved = entry.state  # the error, or the report, of what is missing comes of the filling
        elif is_optimizer(owner) and (lacking := self._moments(saved) - here):
            raise MismatchError(
                path,
                expected="an optimizer that has state already, to fill in place",
                found=f"one without {min(lacking)}" if here else "a fresh one",
                hint="Use treeckpt.training.restore, which makes the state where its parameters are",
            )
        elif saved == {} and is_of_torch(owner, SCALER) and not is_disabled_scaler(owner):
            raise MismatchError(
                path,
                expected="the state of a GradScaler with enabled=True",
                found="that of one with enabled=False, which is empty",
                hint="Leave it out with `...`, and the one here stays as it is",
            )
        as_here = compares_arrays(owner) or (is_optimizer(owner) and self._moments(saved) == here)
        plan = plan_state(path, owner, saved, live=entry.live, rank=rank, namespace=namespace)
        if not as_here and not plan.has_tensors_of():  # sparse tensors, for one, have other sizes
            whole, saved = True, self._saved(entry, load, arrays=True)
            leaves = (leaf for _, leaf in self._leaves_of(saved))
            saved = replace_leaves(saved, leaves, namespace=namespace)  # makes those of a tree in memory
            plan = plan_state(path, owner, saved, live=entry.live, rank=rank, namespace=namespace)
        entry.state = ...
        if not whole and self._has_arrays(saved):
            plan.fill_in_place(as_here=as_here)
            self._fill_state(entry, plan, load)
        elif all(leaf is not ... for _, leaf in self._leaves_of(plan.state)):
            entry.plan = plan  # else a part of it is not selected, or damaged

    def _fill_state(self, entry: _StatefulLeaf, plan: StatePlan, load: LoadSaved) -> None:
        """Has a state filled, with the tensors in it that are made of others."""
        entry.state = plan.state
        entry.inside = expand_states(plan.state, rank=self.rank, namespace=self.namespace, above=entry.path)
        if entry.inside is not None:
            entry.state = entry.inside.target(load)
        if all(leaf is not ... for _, leaf in self._leaves_of(plan.state)):
            entry.plan = plan

    def _has_arrays(self, state: Any) -> bool:
        return any(is_array(leaf) for _, leaf in self._leaves_of(state))

    def _moments(self, state: Any) -> set[str]:
        """Returns the paths of the arrays in the state of an optimizer, beside those of its groups and of objects."""
        objects = set(map(id, nodes_of(ObjectState, state, self.namespace).values()))
        _, leaves = flatten(state, rank=self.rank, namespace=self.namespace, whole=objects)
        return {path for path, leaf in leaves if is_array(leaf) and not path.startswith("param_groups/")}

    def _take_back(self, target: Any) -> int:
        """Passes objects their states, and stores values of a filled tree in containers; returns the further leaves."""
        whole = {id(entry.state) for entry in self.objects.values() if entry.state is not ...}
        owners = {self.leaves[position][0]: entry.owner for position, entry in self.objects.items()}
        _, leaves = flatten(target, rank=self.rank, namespace=self.namespace, whole=whole)
        filled = iter([owners.get(path, leaf) for path, leaf in leaves])
        new = replace_leaves(target, filled, namespace=self.namespace, whole=whole)
        objects = {id(entry.owner) for entry in self.objects.values()}  # each object stays, in a new tuple too
        update_in_place(
            self.original, new, is_value=lambda x: id(x) in objects or is_value(x), namespace=self.namespace
        )
        loaded = 0
        for entry in self.objects.values():
            if entry.inside is not None:
                loaded += entry.inside._take_back(entry.state)
            if entry.inside is not None and not is_stateful(entry.owner):
                content: Any = entry.inside.original
                entry.owner.update((key, value) for key, value in content.items() if entry.owner[key] is not value)
            elif entry.plan is not None:
                if self.rank == 0 and is_disabled_scaler(entry.owner) and entry.plan.state:
                    what = "what was saved of a GradScaler was not restored: the one here has enabled=False"
                    _log.warning("%s: %s", entry.path, what)
                entry.plan.load()
                if entry.state is ...:
                    loaded += len(self._leaves_of(entry.plan.state))
            elif entry.content is not ...:
                parts_adapter().set_content(entry.owner, entry.content)
                loaded += 1
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


def expand_states(
    tree: object,
    *,
    rank: int = 0,
    namespace: str = "",
    mappings: bool = False,
    above: str = "",
    world: int | None = None,
    layouts: bool = True,
) -> ExpandedTree | None:
    """Returns the tree with stateful objects replaced by their states; None for a tree without such objects.

    Args:
        world: as for `ExpandedTree`.
        layouts: as for `holds_stateful`.
    """
    if not holds_stateful(tree, namespace, mappings=mappings, layouts=layouts):
        return None
    return ExpandedTree(tree, rank, namespace, mappings=mappings, above=above, world=world)


def state_tree(
    tree: Any,
    *,
    rank: int = 0,
    namespace: str = "",
    mappings: bool = False,
    world: int | None = None,
    layouts: bool = True,
) -> Any:
    """Returns the tree of `expand_states`, with the same arguments; the tree itself where it holds no such objects."""
    expanded = expand_states(tree, rank=rank, namespace=namespace, mappings=mappings, world=world, layouts=layouts)
    return tree if expanded is None else expanded.tree
