"""Trees with the states of the objects and the parts of the tensors in them, to be saved or filled.

A stateful object is replaced by its state, see `_arrays.stateful`, a tensor that is made of others by its parts, see
`_arrays.tensor_parts`, and a mapping that is no container by its content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from .._core.tree.containers import AbsentSubtree, FromRank, ObjectState
from .._core.tree.flatten import flatten, replace_leaves, update_in_place
from .._core.tree.structure import index_path, rank_key
from .._core.tree.tensor_parts import TensorParts
from ..errors import LayoutError, MismatchError, TreeError
from .base import PartsNeeded
from .registry import is_value, parts_adapter, take_apart
from .stateful import (
    NOTHING,
    SCALER,
    LoadSaved,
    LoadsSavedState,
    StatePlan,
    compares_arrays,
    holds_stateful,
    is_array,
    is_disabled_scaler,
    is_filled_by_key,
    is_of_torch,
    is_optimizer,
    is_stateful,
    join_paths,
    node_at,
    nodes_of,
    object_states,
    plan_state,
)

_log = logging.getLogger("treeckpt")


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
    """For a restore, what the object takes; None where it keeps its state."""
    content: Any = ...
    """For a restore, of a tensor that is made of others and not filled in place, the saved tensor."""


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
        self.found: dict[int, _StatefulLeaf] = {}
        tensors: dict[int, Any] = {}
        for position, (below, leaf) in enumerate(self.leaves):
            path = join_paths(above, below)
            if type(leaf) is FromRank:
                state = _of_rank(leaf, path, rank, namespace, mappings=mappings, world=world)
                self.found[position] = _StatefulLeaf(path, leaf, None, state)
            elif is_stateful(leaf):
                live = leaf.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
                state = object_states(live, path, (leaf,), rank=rank, namespace=namespace)
                parts = expand_states(state, rank=rank, namespace=namespace, above=path)
                self.found[position] = _StatefulLeaf(path, leaf, live, state if parts is None else parts.tree)
            elif (parts := tensors.get(id(leaf)) or take_apart(leaf, path)) is not None:
                tensors[id(leaf)] = parts
                self.found[position] = _StatefulLeaf(path, leaf, None, parts)
            elif mappings and is_filled_by_key(type(leaf)):
                inside = ExpandedTree(dict(leaf), rank, namespace, mappings=True, above=path)  # pyright: ignore[reportArgumentType, reportCallIssue]
                self.found[position] = _StatefulLeaf(path, leaf, None, inside.tree, inside)
        self.tree = self._with_states()

    def _with_states(self) -> Any:
        """Returns the tree with the state of each stateful object in its place."""
        leaves = (self.found[i].state if i in self.found else leaf for i, (_, leaf) in enumerate(self.leaves))
        return replace_leaves(self.original, leaves, namespace=self.namespace)

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
        for found in self.found.values():
            if type(found.owner) is FromRank:
                raise TreeError(
                    found.path,
                    expected="what can be filled in place",
                    found="a FromRank, which marks what is saved",
                    hint="Give its value, or use treeckpt.load",
                )
            if found.inside is not None:
                found.state = found.inside.target(load)
            elif type(found.state) is TensorParts:
                self._plan_tensor(found, load)
            else:
                self._plan(found, load)
        return self._with_states()

    def _saved(self, found: _StatefulLeaf, load: LoadSaved, *, arrays: bool) -> Any:
        return node_at(load(index_path(found.path, self.rank), arrays=arrays), found.path, self.rank, self.namespace)

    def _plan_tensor(self, found: _StatefulLeaf, load: LoadSaved) -> None:
        """Loads the content of a tensor that is made of others, if these may be of other sizes than the saved ones."""
        if parts_adapter().fills_in_place(found.owner):
            return
        found.state, saved = ..., self._saved(found, load, arrays=True)
        if saved is NOTHING:
            raise self._nothing(found)
        if type(saved) is TensorParts:  # of a tree in memory
            saved = parts_adapter().build(saved, found.path)
        if not _is_left_out(saved):
            parts_adapter().check_content(found.owner, saved, found.path)
            found.content = saved

    def _nothing(self, found: _StatefulLeaf) -> MismatchError:
        return MismatchError(
            found.path,
            expected=f"the state of a {type(found.owner).__qualname__}",
            found="nothing in the checkpoint",
            hint="Leave it out with `...`",
        )

    def _plan(self, found: _StatefulLeaf, load: LoadSaved) -> None:
        """Sets what an object takes, and what of that is to be filled."""
        owner, whole = found.owner, isinstance(found.owner, LoadsSavedState)
        path, rank, namespace = found.path, self.rank, self.namespace
        if compares_arrays(owner) and all(map(is_array, found.live.values())):  # the usual model needs no second look
            self._fill_state(
                found,
                StatePlan(path, owner, live=found.live, state=found.live, inner={}, rank=rank, namespace=namespace),
                load,
            )
            return
        saved, here = self._saved(found, load, arrays=whole), self._moments(found.state)
        if saved is NOTHING:
            if whole or not self._has_arrays(found.live):
                raise self._nothing(found)
            saved = found.state  # the error, or the report, of what is missing comes of the filling
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
        plan = plan_state(path, owner, saved, live=found.live, rank=rank, namespace=namespace)
        if not as_here and not plan.has_tensors_of():  # sparse tensors, for one, have other sizes
            whole, saved = True, self._saved(found, load, arrays=True)
            leaves = (leaf for _, leaf in flatten(saved, rank=rank, namespace=namespace)[1])
            saved = replace_leaves(saved, leaves, namespace=namespace)  # makes those of a tree in memory
            plan = plan_state(path, owner, saved, live=found.live, rank=rank, namespace=namespace)
        found.state = ...
        if not whole and self._has_arrays(saved):
            plan.fill_in_place(as_here=as_here)
            self._fill_state(found, plan, load)
        elif all(leaf is not ... for _, leaf in flatten(plan.state, rank=rank, namespace=namespace)[1]):
            found.plan = plan  # else a part of it is not selected, or damaged

    def _fill_state(self, found: _StatefulLeaf, plan: StatePlan, load: LoadSaved) -> None:
        """Has a state filled, with the tensors in it that are made of others."""
        found.state = plan.state
        found.inside = expand_states(plan.state, rank=self.rank, namespace=self.namespace, above=found.path)
        if found.inside is not None:
            found.state = found.inside.target(load)
        if all(leaf is not ... for _, leaf in flatten(plan.state, rank=self.rank, namespace=self.namespace)[1]):
            found.plan = plan

    def _has_arrays(self, state: Any) -> bool:
        return any(is_array(leaf) for _, leaf in flatten(state, rank=self.rank, namespace=self.namespace)[1])

    def _moments(self, state: Any) -> set[str]:
        """Returns the paths of the arrays in the state of an optimizer, beside those of its groups and of objects."""
        objects = set(map(id, nodes_of(ObjectState, state, self.namespace).values()))
        _, leaves = flatten(state, rank=self.rank, namespace=self.namespace, whole=objects)
        return {path for path, leaf in leaves if is_array(leaf) and not path.startswith("param_groups/")}

    def _take_back(self, target: Any) -> int:
        """Passes objects their states, and stores values of a filled tree in containers; returns the further leaves."""
        whole = {id(found.state) for found in self.found.values() if found.state is not ...}
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
            if found.inside is not None and not is_stateful(found.owner):
                content: Any = found.inside.original
                found.owner.update((key, value) for key, value in content.items() if found.owner[key] is not value)
            elif found.plan is not None:
                if self.rank == 0 and is_disabled_scaler(found.owner) and found.plan.state:
                    what = "what was saved of a GradScaler was not restored: the one here has enabled=False"
                    _log.warning("%s: %s", found.path, what)
                found.plan.load()
                if found.state is ...:
                    loaded += len(flatten(found.plan.state, rank=self.rank, namespace=self.namespace)[1])
            elif found.content is not ...:
                parts_adapter().set_content(found.owner, found.content)
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
    return ExpandedTree(tree, rank, namespace, mappings=mappings, above=above)


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
        world: as for `ExpandedTree`.
        layouts: as for `holds_stateful`.
    """
    if not holds_stateful(tree, namespace, mappings=mappings, layouts=layouts):
        return tree
    return ExpandedTree(tree, rank, namespace, mappings=mappings, world=world).tree


def in_parts_if_needed(act: Callable[[bool], Any], *, always: bool = False) -> Any:
    """Returns what an action returns that expands a tree, with `layouts` False, and again with True if it needs that.

    It asks no object for its state a second time: in a tree with such objects all tensors are looked at.

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
