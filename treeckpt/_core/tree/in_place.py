"""Updates a tree in place: new leaves go into the containers that the tree has."""

# A tree holds objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..sharding.int_runs import decode_runs
from .containers import flatten_one_level, is_leaf_type, registry_entry
from .dict_attributes import METADATA, ModuleMetadata, take_metadata
from .flatten import Leaves, PerRank, flatten, rebuild_container
from .keyed_table import KeyedTable
from .mappings import mapping_base, set_item
from .structure import OrderedDictNode, PerRankNode, Structure, child_path, key_text, keys_of
from .tensor_parts import TensorParts

_MUTABLE = (dict, list, collections.deque)


def update_in_place(
    tree: object, new: object, *, is_value: Callable[[object], bool], namespace: str = "", dry: bool = False
) -> Leaves:
    """Replaces the leaves of `tree` that differ from those of `new`, inside the containers that `tree` has.

    A tuple of values is replaced in the container above it. A list whose content differs in more than its leaves takes
    the content of the new one.

    Args:
        new: has the structure of `tree`, except for lists and tuples of values.
        is_value: returns whether a leaf is a Python value.
        dry: nothing is changed.

    Returns:
        (path, new leaf or tuple) of what could not be put in place because its container is immutable.
    """
    updater = _Updater(is_value, namespace, dry)
    updated = updater.update(tree, new, "", "")
    if updated is not tree:
        updater.stuck.append(("", updated))
    return updater.stuck


def update_metadata(
    tree: object, saved: Structure, loaded: Mapping[str, bool], *, rank: int = 0, namespace: str = ""
) -> None:
    """Gives the state dicts of a tree the `_metadata` of those that they were loaded from, where these have any.

    Args:
        saved: the structure of the tree that was loaded from.
        loaded: whether each leaf of the tree was loaded, by path.
        rank: the rank whose subtrees count, under `PerRank`.
    """
    for keys, metadata in _saved_metadata(saved, rank):
        here, path = tree, "/".join(keys)
        for key in keys:
            flat = flatten_one_level(here, path, namespace, rank)
            steps = [] if flat is None else ["~rank*"] if type(here) is PerRank else [key_text(k) for k in flat.keys]
            here = flat.children[steps.index(key)] if flat is not None and key in steps else None
        if type(here) is not collections.OrderedDict:
            continue
        modules: dict[bool | None, set[str]] = {True: set(), False: set(), None: set()}
        for key in here:
            if type(key) is str:  # of a container of its own, as an extra state may be, no leaf is here
                modules[loaded.get(child_path(path, key))].add(key.rpartition(".")[0])
        attributes = vars(here)
        attributes[METADATA] = take_metadata(
            attributes.get(METADATA), modules[False], metadata.decoded(path), modules[True]
        )


def _saved_metadata(saved: Structure, rank: int) -> list[tuple[tuple[str, ...], ModuleMetadata]]:
    """Returns the keys, as text, and the metadata of each state dict of a structure that has any."""
    found: list[tuple[tuple[str, ...], ModuleMetadata]] = []
    waiting: list[tuple[Structure, tuple[str, ...]]] = [(saved, ())]
    while waiting:
        node, keys = waiting.pop()
        if isinstance(node, OrderedDictNode) and node.attributes is not None and node.attributes.metadata is not None:
            found.append((keys, node.attributes.metadata))
        if node is None or node.children.count(None) == len(node.children):
            continue
        if isinstance(node, PerRankNode):
            own = [c for group, c in zip(node.ranks, node.children, strict=True) if rank in decode_runs(group)]
            waiting += [(child, (*keys, "~rank*")) for child in own[:1]]
            continue
        for key, child in zip(keys_of(node, ""), node.children, strict=True):
            # most containers are moments of one parameter, which hold leaves only
            if child is not None and (isinstance(child, OrderedDictNode) or any(c is not None for c in child.children)):
                waiting.append((child, (*keys, key_text(key))))
    return found


class _Updater:
    """The state of one `update_in_place`."""

    def __init__(self, is_value: Callable[[object], bool], namespace: str, dry: bool) -> None:
        self._is_value, self._namespace, self._dry = is_value, namespace, dry
        self.stuck: Leaves = []

    def update(self, old: Any, new: Any, path: str, prefix: str) -> Any:
        """Returns what replaces `old` in its container: `old` itself wherever it can change."""
        if old is new or type(old) is TensorParts:  # whose parts are filled
            return old
        if isinstance(old, KeyedTable) and isinstance(new, KeyedTable):
            if not self._dry:
                old.ids, old.slots = new.ids, new.slots
            self.update(old.scalars, new.scalars, f"{prefix}scalars", f"{prefix}scalars/")
            return old
        flat, other = (flatten_one_level(node, path, self._namespace, 0) for node in (old, new))
        if flat is None or other is None:
            return new
        steps = [key_text(key) for key in flat.keys]
        if steps != [key_text(key) for key in other.keys]:
            return self._replace_content(old, new)
        if type(old) is PerRank:
            steps = ["~rank*"]
        children, changed = list(flat.children), list[int]()
        for at, (step, child, new_child) in enumerate(zip(steps, flat.children, other.children, strict=True)):
            if child is not new_child:
                leaf, below = is_leaf_type(type(new_child)), prefix + step
                children[at] = new_child if leaf else self.update(child, new_child, below, below + "/")
                if children[at] is not child:
                    changed.append(at)
        if not changed:
            return old
        foreign = mapping_base(type(old)) is not None and registry_entry(type(old), self._namespace) is None
        known = [flat.keys[at] for at in changed], [flat.children[at] for at in changed]
        if foreign or isinstance(old, _MUTABLE) or _is_frozen(old) is False or _are_attributes(old, *known):
            for at in changed if not self._dry else ():
                if foreign:
                    set_item(old, flat.keys[at], children[at])
                elif isinstance(old, _MUTABLE):
                    old[flat.keys[at]] = children[at]  # pyright: ignore[reportCallIssue, reportArgumentType]
                else:
                    setattr(old, str(flat.keys[at]), children[at])
            return old
        if self._is_replaceable(old):
            return rebuild_container(old, flat.keys, children, self._namespace)
        self.stuck.extend((prefix + steps[at], children[at]) for at in changed)
        return old

    def _replace_content(self, old: Any, new: Any) -> Any:
        """Gives a list or deque the whole content of a new one, and returns it; returns any other new container."""
        if type(old) is not type(new) or not isinstance(old, (list, collections.deque)):
            return new
        if not self._dry:
            old.clear()
            old.extend(new)
        return old

    def _is_replaceable(self, container: Any) -> bool:
        """Returns whether an equal container can take its place: a tuple or a frozen dataclass that holds values."""
        if not isinstance(container, tuple) and _is_frozen(container) is not True:
            return False
        leaves = flatten(container, namespace=self._namespace)[1]
        return all(leaf is ... or self._is_value(leaf) for _, leaf in leaves)


def _are_attributes(container: Any, keys: Sequence[object], children: Sequence[object]) -> bool:
    """Returns whether a registered container keeps children as attributes of the names of their keys, to be set."""
    if type(container).__setattr__ is not object.__setattr__:
        return False
    attributes: dict[str, object] = getattr(container, "__dict__", {})
    pairs = zip(keys, children, strict=True)
    return all(str(key) in attributes and attributes[str(key)] is child for key, child in pairs)


def _is_frozen(container: Any) -> bool | None:
    """Returns whether a dataclass is frozen; None for any other container."""
    parameters: Any = getattr(type(container), "__dataclass_params__", None)
    return parameters.frozen if parameters is not None else None
