"""The names of torch.distributed.checkpoint (DCP) in a checkpoint of treeckpt.

DCP counts entries: a tensor, or a value, which may be a whole list, tuple or object. It enters mappings, and lists that
hold a tensor or a mapping. An entry's name is its keys as text, joined by dots. So a nested and a flat state dict have
the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from .._arrays.sharded import Sharded
from .._arrays.torch import torch_dtype
from .._core.format.records import Index, Leaf
from .._core.tree.structure import (
    DefaultDictNode,
    DictNode,
    ListNode,
    OrderedDictNode,
    Structure,
    TensorNode,
    key_text,
    keys_of,
    leaf_count,
)
from .._io.comm.comm import Comm
from .._io.storage.checkpoint import Checkpoint
from .._loading.load import load_tree
from .._loading.match import LoadOptions
from .._loading.options import ReadOptions
from .._loading.run_load import fill_tree
from ..errors import MismatchError

DcpPath = tuple[str | int, ...]
"""The keys of an entry as DCP has them: text in mappings, a position in lists."""
_MAPPINGS = (DictNode, OrderedDictNode, DefaultDictNode)


class Entry(msgspec.Struct, frozen=True):
    """One entry of a saved state dict, as DCP counts them."""

    path: DcpPath
    keys: tuple[Any, ...]
    """The keys of the entry in the saved tree."""
    leaves: tuple[Leaf, ...]
    is_tensor: bool
    in_parts: bool = False
    """Whether it is a tensor that is made of others."""

    @property
    def leaf(self) -> Leaf:
        """The leaf of a tensor."""
        return self.leaves[0]


def entries_of(index: Index) -> dict[str, Entry]:
    """Returns the entries of a checkpoint by their names.

    Raises:
        MismatchError: the tree is no state dict, or two entries have one name.
    """
    entries: dict[str, Entry] = {}
    leaves = index.entries

    def walk(node: Structure, first: int, path: DcpPath, keys: tuple[Any, ...]) -> None:
        if not path or _is_entered(node, first):
            assert node is not None, "a leaf is not entered, and the root is a container"
            listed = isinstance(node, ListNode)
            for key, child in zip(keys_of(node, ""), node.children, strict=True):
                step = key if listed else str(key)
                walk(child, first, (*path, step), (*keys, key))  # pyright: ignore[reportArgumentType]
                first += leaf_count(child)
            return
        name = ".".join(map(str, path))
        own = leaves[first : first + leaf_count(node)]
        entry = Entry(path, keys, own, node is None and _is_tensor(own[0]), isinstance(node, TensorNode))
        if entries.setdefault(name, entry) is not entry:
            raise MismatchError(
                name,
                expected="one entry of each name",
                found="two in the checkpoint",
                hint="Load it with treeckpt.load, which tells apart what dots join here",
            )

    def _is_entered(node: Structure, first: int) -> bool:
        """Whether DCP enters a container: a mapping, or a list that holds a tensor or a mapping at any depth."""
        if not isinstance(node, ListNode):
            return isinstance(node, _MAPPINGS)
        for child in node.children:
            if (child is None and _is_tensor(leaves[first])) or _is_entered(child, first):
                return True
            first += leaf_count(child)
        return False

    if not isinstance(index.structure, _MAPPINGS):
        raise MismatchError("", expected="a state dict", found="a checkpoint of another tree", hint="Use treeckpt.load")
    walk(index.structure, 0, (), ())
    return entries


def _is_tensor(leaf: Leaf) -> bool:
    return leaf.spec is not None and leaf.spec.kind != "numpy"


class Place(msgspec.Struct, frozen=True):
    """Where an entry stands in a state dict."""

    container: Any
    key: Any
    path: str
    """The path that treeckpt has for it."""

    @property
    def content(self) -> Any:
        """What stands there."""
        return self.container[self.key]


def places_in(state_dict: Any) -> dict[str, Place]:
    """Returns where each entry of a state dict stands, by name.

    Raises:
        MismatchError: two have one name.
    """
    places: dict[str, Place] = {}

    def walk(node: Any, name: str, path: str) -> None:
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            below = f"{name}.{key}" if name else str(key)
            text = f"{path}/{key_text(key)}" if path else key_text(key)
            if _enters(child):
                walk(child, below, text)
            elif below not in places:
                places[below] = Place(node, key, text)
            else:
                raise MismatchError(
                    below,
                    expected="one entry of each name",
                    found=f"two, at {places[below].path} and {text}",
                    hint="Dots join the keys of nested dicts here: rename one, or use treeckpt.save and load",
                )

    walk(state_dict, "", "")
    return places


def _enters(value: Any) -> bool:
    if not isinstance(value, list):
        return isinstance(value, Mapping)
    return any(_enters(child) or isinstance(child, (torch.Tensor, Sharded)) for child in value)


def load_values(
    checkpoint: Checkpoint, entries: Mapping[str, Entry], comm: Comm, *, allow_pickle: bool
) -> dict[str, Any]:
    """Returns entries that are no tensors, as they were saved, by name."""
    if not entries:
        return {}
    paths = frozenset(leaf.path for entry in entries.values() for leaf in entry.leaves)
    options = LoadOptions(strict=False, only=paths, read=ReadOptions(copy=True), allow_pickle=allow_pickle)
    tree, _ = load_tree(checkpoint, None, comm, options)
    return {name: _at(tree, entry.keys) for name, entry in entries.items()}


def _at(tree: Any, keys: Iterable[Any]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def fill_tensors(checkpoint: Checkpoint, targets: Iterable[tuple[Entry, Any]], comm: Comm) -> None:
    """Fills arrays in place from the entries of tensors; casts as `copy_` does, but no numbers to integers.

    Args:
        targets: each entry with what it fills, a tensor or `Sharded`.

    Raises:
        MismatchError: a cast that would cut off fractions or imaginary parts.
    """
    tree: dict[Any, Any] = {}
    for entry, target in targets:
        spec = None if entry.in_parts else entry.leaf.spec
        if (
            spec is not None
            and isinstance(target.dtype, torch.dtype)
            and not torch.can_cast(torch_dtype(spec.dtype), target.dtype)
        ):
            raise MismatchError(
                ".".join(map(str, entry.path)),
                expected=f"a dtype that holds numbers of {spec.dtype}",
                found=f"{target.dtype}",
                hint="Load it as it was saved, and convert it then",
            )
        node = tree
        for key in entry.keys[:-1]:
            node = node.setdefault(key, {})
        node[entry.keys[-1]] = target
    if tree:
        # as in DCP, what is in the checkpoint and was not asked for is ignored, and dtypes are converted
        options = LoadOptions(strict="missing", cast=True, read=ReadOptions(copy=True))
        fill_tree(checkpoint, tree, comm, options)
