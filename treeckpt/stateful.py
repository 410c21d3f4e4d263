"""Objects that keep a state of their own, anywhere in a tree: whatever has `state_dict` and `load_state_dict`.

To be saved, such an object is replaced by what its `state_dict()` gives. To be restored, the arrays of that state are
filled in place, as those of the tree are, and the state is then handed to `load_state_dict`. An object whose state
holds no arrays may have grown (a data loader's queue): its state is loaded as it was saved, and the object judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from .core.containers import is_common_leaf, take
from .core.errors import MismatchError, TreeError
from .core.structure import MAX_DEPTH, any_rank, key_text, rank_key
from .core.tree import PerRank, flatten, graft, replace_leaves

__all__ = ["Expanded", "expand", "holds_stateful", "is_stateful"]


def is_stateful(value: object) -> bool:
    """Whether a leaf keeps a state that it gives and takes as a tree."""
    return _is_stateful(type(value))


@lru_cache(maxsize=1024)
def _is_stateful(kind: type) -> bool:
    if kind is type or is_common_leaf(kind):
        return False
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def holds_stateful(tree: Any, namespace: str = "", depth: int = 0) -> bool:
    """Whether there is one such object; cheap for the trees without, which most are."""
    if depth > MAX_DEPTH:
        return False  # flattening says so
    kind = type(tree)
    if kind is dict:
        children: Any = tree.values()
    elif kind in (list, tuple):
        children = tree
    elif is_common_leaf(kind):
        return False
    else:
        try:
            taken = take(tree, "", namespace, 0)
        except TreeError:
            return True  # flattening says where
        if taken is None:
            return is_stateful(tree)
        children = taken.children
    return any(holds_stateful(child, namespace, depth + 1) for child in children if not is_common_leaf(type(child)))


class _Found(msgspec.Struct):
    """One object of a tree, and its state at the moment."""

    path: str
    owner: Any
    state: Any
    size: int
    """Leaves of the state."""
    has_arrays: bool


class Expanded:
    """A tree with the states of its objects in their places."""

    def __init__(self, tree: object, rank: int, namespace: str) -> None:
        self.original, self.rank, self.namespace = tree, rank, namespace
        _, self.leaves = flatten(tree, rank=rank, namespace=namespace)
        self.found: dict[int, _Found] = {}
        for position, (path, leaf) in enumerate(self.leaves):
            if is_stateful(leaf):
                state = leaf.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
                _, inner = flatten(state, rank=rank, namespace=namespace)
                has_arrays = any(hasattr(x, "shape") and hasattr(x, "dtype") for _, x in inner)
                self.found[position] = _Found(path, leaf, state, len(inner), has_arrays)
        self.tree = self._rebuilt(lambda found: found.state)

    def _rebuilt(self, of: Callable[[_Found], Any]) -> Any:
        leaves = (of(self.found[i]) if i in self.found else leaf for i, (_, leaf) in enumerate(self.leaves))
        return replace_leaves(self.original, leaves, namespace=self.namespace)

    def target(self) -> Any:
        """The tree to fill: states without arrays are left out, to be loaded as they were saved."""
        return self._rebuilt(lambda found: found.state if found.has_arrays else ...)

    def restore(self, load: Callable[[str], Any], fill: Callable[[Any], Any]) -> Any:
        """Has everything loaded, and each object take its state.

        Args:
            load: gives the tree as saved, of what lies at a path.
            fill: fills a tree in place; gives a report with the number of leaves that it `loaded`.

        Returns:
            That report, which counts the leaves of all states too.
        """
        loaded = 0
        for found in self.found.values():
            if not found.has_arrays:
                found.state = _at(load(any_rank(found.path, self.rank)), found, self.rank, self.namespace)
        target = self.target()
        report = fill(target)
        graft(self.original, replace_leaves(self.original, self._filled(target), namespace=self.namespace))
        for found in self.found.values():
            if found.has_arrays:
                found.owner.load_state_dict(found.state)
            elif (size := self._size(found.state)) is not None:
                found.owner.load_state_dict(found.state)
                loaded += size
        return msgspec.structs.replace(report, loaded=report.loaded + loaded)

    def _size(self, state: Any) -> int | None:
        """The leaves of a state; None where a part of it could not be loaded."""
        _, leaves = flatten(state, rank=self.rank, namespace=self.namespace)
        return None if any(leaf is ... for _, leaf in leaves) else len(leaves)

    def _filled(self, target: Any) -> Iterator[Any]:
        """The leaves of the original tree after `target` was filled; the objects stay where they are."""
        _, filled = flatten(target, rank=self.rank, namespace=self.namespace)
        at = 0
        for position, _ in enumerate(self.leaves):
            found = self.found.get(position)
            yield found.owner if found is not None else filled[at][1]
            at += found.size if found is not None and found.has_arrays else 1


def expand(tree: object, *, rank: int = 0, namespace: str = "") -> Expanded | None:
    """The tree with states in the places of objects; None for a tree without such objects."""
    return Expanded(tree, rank, namespace) if holds_stateful(tree, namespace) else None


def _at(tree: Any, found: _Found, rank: int, namespace: str) -> Any:
    """What stands at a path of a loaded tree.

    Raises:
        MismatchError: nothing, or the arrays of an optimizer, which only their parameters can tell where to go.
    """
    node, steps = tree, found.path.split("/") if found.path else []
    for step in steps:
        taken = take(node, "", namespace, rank)
        text = rank_key if type(node) is PerRank else key_text
        keys = [text(key) for key in taken.keys] if taken is not None else []  # pyright: ignore[reportArgumentType]
        if taken is None or step not in keys:
            raise MismatchError(
                found.path,
                expected=f"the state of a {type(found.owner).__qualname__}",
                found="nothing in the checkpoint",
                hint="Leave it out with `...`",
            )
        node = taken.children[keys.index(step)]
    if any(f"{k.__module__}.{k.__qualname__}" == "torch.optim.optimizer.Optimizer" for k in type(found.owner).__mro__):
        _, leaves = flatten(node, rank=rank, namespace=namespace)
        if any(hasattr(leaf, "shape") for _, leaf in leaves):
            raise MismatchError(
                found.path,
                expected="an optimizer that has state already, to fill in place",
                found="a fresh one",
                hint="Use treeckpt.training.restore, which makes the state where its parameters are",
            )
    return node
