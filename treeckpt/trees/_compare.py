"""Compares the structure of two trees and lists the differences.

Both are walked side by side: containers by kind and keys, arrays by shape, dtype, kind and layout (which regions this
rank holds), values by type. Contents are not compared.
"""

from __future__ import annotations

import collections
from typing import Any

import msgspec

from .._arrays.registry import abstract_of
from .._arrays.stateful import state_tree
from .._core.tree.containers import PerRank, flatten_one_level
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import MAX_DEPTH, check_stack, key_text, too_deep
from .._io.comm.comm import default_comm, global_rank
from ..errors import visible


class Sameness(msgspec.Struct, frozen=True):
    """The differences between the structures of two trees: true in a condition if there are none.

    >>> found = tc.trees.same_structure({"w": np.ones(3)}, {"w": np.ones(4)})
    >>> bool(found), found.differences
    (False, ('w: shape (3,) instead of (4,)',))
    """

    differences: tuple[str, ...]
    """One line each, `path: found instead of expected`, in the order of the expected tree."""

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        return "\n".join(map(visible, self.differences)) or "the same structure"


def same_structure(found: Any, expected: Any, *, namespace: str = "") -> Sameness:
    """Compares the containers and keys of two trees, and the shapes, dtypes, kinds and layouts of their arrays.

    The result is true in a condition if they are the same; as text it has a line per difference. Contents are not
    compared, and arrays may be on meta or be `ArraySpec`s.

    >>> print(tc.trees.same_structure({"w": np.ones(3)}, {"w": np.ones(3), "b": 1}))
    b: missing

    Raises:
        TreeError: both nest deeper than a tree may, or than there is room for on the stack.
    """
    rank = global_rank(default_comm())
    lines: list[str] = []
    found, expected = (state_tree(tree, rank=rank, namespace=namespace) for tree in (found, expected))
    try:
        _compare(found, expected, "", lines, rank, namespace)
    except RecursionError:
        check_stack()
        raise
    return Sameness(tuple(lines))


_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)


def _name(node: Any, path: str, rank: int) -> str:
    plain = node is None or isinstance(node, (bool, int, float, str, bytes))
    spec = None if plain else abstract_of(node, path, rank)
    return "array" if spec is not None else type(node).__name__


def _compare(found: Any, expected: Any, path: str, lines: list[str], rank: int, namespace: str) -> None:
    ours, theirs = flatten_one_level(found, path, namespace, rank), flatten_one_level(expected, path, namespace, rank)
    if ours is None and theirs is None:
        return _compare_leaves(found, expected, path, lines, rank)
    if ours is None or theirs is None or type(found) is not type(expected):
        lines.append(f"{path or '<root>'}: {_name(found, path, rank)} instead of {_name(expected, path, rank)}")
        return None
    if path.count("/") >= MAX_DEPTH - 1:  # the root and each step of the path are one level
        raise too_deep(path)
    have, wanted = (dict(zip(t.keys, t.children, strict=True)) for t in (ours, theirs))
    order = [key for key in have if key in wanted], [key for key in wanted if key in have]
    if order[0] != order[1] and isinstance(found, _MAPPINGS):
        lines.append(f"{path or '<root>'}: keys in the order {order[0]!r:.80} instead of {order[1]!r:.80}")
    maximum = getattr(found, "maxlen", None), getattr(expected, "maxlen", None)
    if isinstance(found, collections.deque) and maximum[0] != maximum[1]:
        lines.append(f"{path or '<root>'}: maxlen {maximum[0]} instead of {maximum[1]}")
    for key in (*wanted, *(key for key in have if key not in wanted)):
        text = "~rank*" if type(found) is PerRank else key_text(key)
        below = f"{path}/{text}" if path else text
        if key not in have or key not in wanted:
            lines.append(f"{below}: {'missing' if key in wanted else 'unexpected'}")
        else:
            _compare(have[key], wanted[key], below, lines, rank, namespace)
    return None


def _compare_leaves(found: Any, expected: Any, path: str, lines: list[str], rank: int) -> None:
    ours, theirs = abstract_of(found, path, rank), abstract_of(expected, path, rank)
    if ours is None or theirs is None:
        if (ours is None) != (theirs is None) or type(found) is not type(expected):
            lines.append(f"{path or '<root>'}: {_name(found, path, rank)} instead of {_name(expected, path, rank)}")
        return
    for what, text in _facts(ours).items():
        if text != (other := _facts(theirs)[what]):
            lines.append(f"{path or '<root>'}: {what} {text} instead of {other}")


def _facts(spec: ArraySpec) -> dict[str, str]:
    kind = spec.kind + (" that requires grad" if spec.requires_grad else "")
    held = "all" if spec.regions is None else ", ".join(f"{r.shape} at {r.offset}" for r in spec.regions) or "nothing"
    return {"shape": str(spec.shape), "dtype": spec.dtype, "kind": kind, "pieces": held}
