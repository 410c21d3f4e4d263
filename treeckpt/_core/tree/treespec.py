"""`optree.PyTreeSpec`, the structure of a tree as optree has it: stored as a value, and made of it again.

It is stored as the structure of the tree that it makes of marks, so every kind of container is named as in a tree.
"""

from __future__ import annotations

from contextlib import nullcontext
from operator import attrgetter
from typing import Any, ClassVar

import msgspec
import optree
from optree import PyTreeSpec, registry

from ...errors import TreeError
from .containers import MARKS, NAMESPACE, register_mark
from .flatten import flatten, replace_leaves, unflatten
from .structure import Structure, paths_of
from .value_codec import FunctionResolver, Resolver, TypedValue

KIND = "optree.PyTreeSpec"
"""The kind of its stored form."""


class _Leaf:
    """Stands for each leaf of a `PyTreeSpec`."""

    __treeckpt_leaf__: ClassVar[bool] = True

    def __repr__(self) -> str:
        return "*"


LEAF = _Leaf()


class MarkNode:
    """Stands in a stored tree for a mark that is a node of optree, and is a leaf where a tree is saved."""

    def __init__(self, mark: Any) -> None:
        children, auxiliary, _ = MARKS[type(mark)].flatten_func(mark)
        self.parts = [_with_mark_nodes(child) for child in children], (type(mark).__name__, auxiliary)

    @staticmethod
    def mark(auxiliary: Any, children: Any) -> Any:
        """Returns the mark of a node."""
        name, own = auxiliary
        functions = {kind.__name__: functions for kind, functions in MARKS.items()}[name]
        return functions.unflatten_func(own, children)


register_mark(MarkNode, attrgetter("parts"), MarkNode.mark)


def _with_mark_nodes(tree: Any) -> Any:
    """Returns a tree with a node in the place of each mark that is a leaf."""
    leaves = [leaf for _, leaf in flatten(tree, namespace=NAMESPACE)[1]]
    if not any(type(leaf) in MARKS for leaf in leaves):
        return tree
    new = (MarkNode(leaf) if type(leaf) in MARKS else leaf for leaf in leaves)
    return replace_leaves(tree, new, namespace=NAMESPACE)


def tree_of(treespec: PyTreeSpec) -> Any:
    """Returns the tree of a `PyTreeSpec`, with `LEAF` for each leaf.

    Raises:
        TreeError: a function that was registered for a container fails.
    """
    try:
        return treespec.unflatten([LEAF] * treespec.num_leaves)
    except Exception as error:  # raised by the user's function
        raise TreeError(
            "",
            expected="unflatten functions that take any children, as those of optree.tree_map",
            found=f"{error!r:.200}",
            hint=f"Look at those of the classes in {treespec!r:.200}",
        ) from error


def encode_treespec(treespec: PyTreeSpec) -> TypedValue:
    """Returns the stored form.

    Raises:
        TreeError: a container in it cannot be stored.
    """
    tree = tree_of(treespec)
    none_is_leaf, namespace = treespec.none_is_leaf, treespec.namespace
    structure, leaves = flatten(_with_mark_nodes(tree) if namespace == NAMESPACE else tree, namespace=namespace)
    made = (
        is_sorted
        for is_sorted in (True, False)
        if _treespec_of(tree, none_is_leaf, namespace, is_sorted=is_sorted) == treespec
    )
    is_sorted = next(made, None)
    if is_sorted is None or any(leaf is not LEAF and leaf is not None for _, leaf in leaves):
        raise TreeError(
            "",
            expected="a PyTreeSpec of containers that a tree can have here",
            found=f"{treespec!r:.200}",
            hint="Look at the flatten and unflatten functions of its registered classes, or pass allow_pickle=True",
        )
    nones = (number for number, (_, leaf) in enumerate(leaves) if leaf is None)
    return TypedValue(KIND, (none_is_leaf, namespace, is_sorted, msgspec.json.encode(structure).decode(), *nones))


def decode_treespec(typed: TypedValue, resolve: Resolver, functions: FunctionResolver | None) -> PyTreeSpec:
    """Returns the `PyTreeSpec` of a stored form.

    Args:
        resolve, functions: as for `unflatten`.

    Raises:
        FormatError: it is no stored form.
        MismatchError: a class in it does not exist in this program.
    """
    none_is_leaf, namespace, is_sorted, text, *nones = typed.items
    structure = msgspec.json.decode(str(text), type=Structure)
    leaves: list[object] = [LEAF] * len(paths_of(structure))
    for number in nones:
        leaves[int(number)] = None  # pyright: ignore[reportArgumentType]
    namespace = str(namespace)
    tree = unflatten(structure, iter(leaves), resolve=resolve, functions=functions, namespace=namespace)
    return _treespec_of(tree, bool(none_is_leaf), namespace, is_sorted=bool(is_sorted))


def _treespec_of(tree: Any, none_is_leaf: bool, namespace: str, *, is_sorted: bool) -> PyTreeSpec:
    """Returns the structure of a tree, with the keys of dicts sorted, or in the order of the dict.

    Which of these a program of optree gets is a mode of the process, which is set where it is another one.
    """
    mode: Any = nullcontext()
    probe: Any = {1: 0, 0: 0}
    if (optree.tree_structure(probe, namespace=namespace).entries() == [0, 1]) is not is_sorted:
        everywhere: Any = vars(registry)["__GLOBAL_NAMESPACE"]
        mode = optree.dict_insertion_ordered(not is_sorted, namespace=namespace or everywhere)
    with mode:
        return optree.tree_structure(tree, none_is_leaf=none_is_leaf, namespace=namespace)
