"""Taking nested containers apart into leaves with paths, and putting them together again, exactly.

`flatten` walks a tree once and returns its structure, plain data that goes into the index, and its leaves in
order. Containers are dict (any insertion order, keys of str, int, bool, float, None, bytes and tuples of these),
OrderedDict, defaultdict, list, tuple, namedtuple, struct sequence, deque, dataclass, `PerRank`, and every class registered with
optree. Whatever else is met is a leaf. `unflatten` is the inverse.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import optree

from .errors import FormatError, MismatchError, TreeError
from .runs import decode_runs, encode_runs, length_of
from .spec import Resolver, Value, decode_value, encode_value, type_name
from .structure import (
    MAX_DEPTH,
    CustomNode,
    DataclassNode,
    DefaultDictNode,
    DequeNode,
    DictNode,
    ListNode,
    NamedTupleNode,
    Node,
    OrderedDictNode,
    PerRankNode,
    StructSequenceNode,
    Structure,
    TupleNode,
    key_text,
    keys_of,
    rank_key,
)

__all__ = ["PerRank", "flatten", "graft", "own_child", "replace_leaves", "unflatten"]


@dataclasses.dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a subtree of which every rank has its own (RNG state, data loader position): nothing is shared or compared."""

    value: Any


_FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind
    for kind in (
        int,
        float,
        bool,
        complex,
        str,
        bytes,
        list,
        tuple,
        dict,
        set,
        frozenset,
        collections.OrderedDict,
    )
}


_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
_ARRAY_MODULES = frozenset(("torch", "torch.nn.parameter", "numpy"))


@lru_cache(maxsize=1024)
def _is_common_leaf(kind: type) -> bool:
    """Whether a class is a leaf for sure, without asking the registries."""
    return kind in _SCALARS or kind.__module__ in _ARRAY_MODULES


class _Taken(msgspec.Struct):
    """One container taken apart: how to make its node from the children's nodes, and the children with their keys."""

    build: Callable[[tuple[Structure, ...]], Node]
    keys: Sequence[object]
    children: Sequence[object]


def _take_dict(tree: Any, path: str) -> _Taken:
    keys = list(tree)
    encoded = tuple(_encode_key(key, path) for key in keys)
    if type(tree) is dict:
        return _Taken(lambda c: DictNode(encoded, c), keys, list(tree.values()))
    if type(tree) is collections.OrderedDict:
        return _Taken(lambda c: OrderedDictNode(encoded, c), keys, list(tree.values()))
    factory = tree.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(name or "") is not factory:
        raise TreeError(
            path,
            expected=f"a defaultdict whose default_factory is None or one of {', '.join(_FACTORIES)}",
            found=f"{factory!r:.80}",
            hint="A function cannot be stored; save dict(...) of it instead",
        )
    return _Taken(lambda c: DefaultDictNode(name, encoded, c), keys, list(tree.values()))


def _encode_key(key: object, path: str) -> Value:
    if type(key) is str:
        try:
            if not key.isascii():
                key.encode()
        except UnicodeEncodeError as error:
            raise TreeError(path, expected="keys that are valid Unicode", found=f"{key!r}") from error
        return key
    key_text(key, path)  # refuses the kinds that have no text
    return encode_value(key, path)


def _take_fields(tree: Any, path: str, fields: Sequence[str], node: type[Any]) -> _Taken:
    name = type_name(type(tree))
    names = tuple(fields)
    if node is DataclassNode:
        missing = [f for f in names if not hasattr(tree, f)]
        if missing:
            raise TreeError(path, expected=f"{name} with all its fields", found=f"no value for {missing[0]!r}")
        children = [getattr(tree, field) for field in names]
    else:
        children = list(tree)
    return _Taken(lambda c: node(name, names, c), names, children)


def _registered(kind: type, namespace: str) -> Any:
    """The entry of a class in optree's registry, None for one that is not there by itself (as each namedtuple is)."""
    entry: Any = optree.register_pytree_node.get(kind, namespace=namespace)  # pyright: ignore[reportFunctionMemberAccess]
    return entry if entry is not None and entry.type is kind else None


def _take_custom(tree: Any, path: str, namespace: str) -> _Taken | None:
    entry = _registered(type(tree), namespace)
    if entry is None:
        return None
    flat = entry.flatten_func(tree)
    children, auxiliary = list(flat[0]), flat[1]
    keys = list(flat[2]) if len(flat) > 2 and flat[2] is not None else list(range(len(children)))
    name, aux = type_name(type(tree)), encode_value(auxiliary, path)
    encoded = tuple(_encode_key(key, path) for key in keys)
    return _Taken(lambda c: CustomNode(name, aux, encoded, c), keys, children)


def _take(tree: Any, path: str, namespace: str, rank: int) -> _Taken | None:
    """Takes one container apart; None for a leaf."""
    kind = type(tree)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return _take_dict(tree, path)
    if kind is list:
        return _Taken(ListNode, range(len(tree)), tree)
    if kind is tuple:
        return _Taken(TupleNode, range(len(tree)), tree)
    if kind is collections.deque:
        maxlen = tree.maxlen
        return _Taken(lambda c: DequeNode(maxlen, c), range(len(tree)), list(tree))
    if kind is PerRank:
        ranks = (encode_runs([rank]),)
        return _Taken(lambda c: PerRankNode(ranks, c), (rank,), (tree.value,))
    if _is_common_leaf(kind):
        return None  # the common leaves, decided without asking the registries
    if (custom := _take_custom(tree, path, namespace)) is not None:
        return custom
    if isinstance(tree, tuple):
        if optree.is_namedtuple(tree):
            return _take_fields(tree, path, kind._fields, NamedTupleNode)
        if optree.is_structseq(tree):
            return _take_fields(tree, path, optree.structseq_fields(tree), StructSequenceNode)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and "__treeckpt_leaf__" not in kind.__dict__:
        return _take_fields(tree, path, [f.name for f in dataclasses.fields(tree)], DataclassNode)
    return None


def flatten(tree: object, *, rank: int = 0, namespace: str = "") -> tuple[Structure, list[tuple[str, object]]]:
    """The structure of a tree, and its leaves with their paths, in order.

    Args:
        rank: whose subtrees `PerRank` marks.
        namespace: of optree's registry.

    Raises:
        TreeError: a key, or a container, that cannot be stored; nesting deeper than `MAX_DEPTH`.
    """
    leaves: list[tuple[str, object]] = []
    return _walk(tree, "", leaves, rank, namespace, 0), leaves


def _walk(
    tree: object, path: str, leaves: list[tuple[str, object]], rank: int, namespace: str, depth: int
) -> Structure:
    if depth > MAX_DEPTH:
        raise TreeError(
            path[:200],
            expected=f"a tree at most {MAX_DEPTH} levels deep",
            found="a deeper one",
            hint="Look for a container that holds itself",
        )
    taken = None if _is_common_leaf(type(tree)) else _take(tree, path, namespace, rank)
    if taken is None:
        leaves.append((path, tree))
        return None
    prefix = path + "/" if depth else ""
    text = rank_key if type(tree) is PerRank else key_text
    children = tuple(
        _walk(child, prefix + text(key), leaves, rank, namespace, depth + 1)  # pyright: ignore[reportArgumentType]
        for key, child in zip(taken.keys, taken.children, strict=True)
    )
    return taken.build(children)


def unflatten(
    structure: Structure, leaves: Iterator[object], *, resolve: Resolver, rank: int = 0, namespace: str = ""
) -> object:
    """The tree of a structure; the inverse of `flatten`.

    Args:
        leaves: in order; of a `PerRank` node, those of `rank`'s subtree only.
        resolve: finds the classes of namedtuples, dataclasses and registered nodes.

    Raises:
        MismatchError: a class is not to be had or has other fields.
    """

    def build(node: Structure, path: str, depth: int) -> Any:
        if node is None:
            return next(leaves)
        prefix = path + "/" if depth else ""
        if isinstance(node, PerRankNode):
            return PerRank(build(own_child(node, rank, path), prefix + rank_key(rank), depth + 1))
        keys = keys_of(node, path)
        children = [
            build(child, prefix + key_text(key), depth + 1) for key, child in zip(keys, node.children, strict=True)
        ]
        return _assemble(node, keys, children, path, resolve, namespace)

    return build(structure, "", 0)


def own_child(node: PerRankNode, rank: int, path: str) -> Structure:
    """The subtree of one rank.

    Raises:
        MismatchError: the rank has none.
    """
    for group, child in zip(node.ranks, node.children, strict=True):
        if rank in decode_runs(group):
            return child
    count = sum(length_of(group) for group in node.ranks)
    raise MismatchError(
        path,
        expected=f"state of rank {rank}",
        found=f"state of {count} other ranks",
        hint="The world size changed: leave this leaf out with `...` in like, or pass per_rank='take'",
    )


def _assemble(
    node: Node, keys: Sequence[Any], children: list[Any], path: str, resolve: Resolver, namespace: str
) -> object:
    if isinstance(node, DictNode):
        return dict(zip(keys, children, strict=True))
    if isinstance(node, ListNode):
        return children
    if isinstance(node, TupleNode):
        return tuple(children)
    if isinstance(node, OrderedDictNode):
        return collections.OrderedDict(zip(keys, children, strict=True))
    if isinstance(node, DequeNode):
        return collections.deque(children, node.maxlen)
    if isinstance(node, DefaultDictNode):
        if node.factory is not None and node.factory not in _FACTORIES:
            raise FormatError(path, expected="a known default_factory", found=f"{node.factory!r:.60}")
        factory: Any = _FACTORIES[node.factory] if node.factory is not None else None
        return collections.defaultdict(factory, zip(keys, children, strict=True))
    assert not isinstance(node, PerRankNode), "handled by unflatten"
    kind = _class_of(node, path, resolve)
    if isinstance(node, CustomNode):
        entry = _registered(kind, namespace)
        if entry is None:
            raise _no_class(path, node.cls, "a class not registered with optree")
        return entry.unflatten_func(decode_value(node.auxiliary, path), tuple(children))
    if isinstance(node, NamedTupleNode):
        return kind._make(children)
    if isinstance(node, StructSequenceNode):
        return kind(children)
    return _made(kind, node.fields, children)


def _class_of(
    node: NamedTupleNode | StructSequenceNode | DataclassNode | CustomNode, path: str, resolve: Resolver
) -> Any:
    """The class that a node names, if it is one of the node's kind with the same fields."""
    try:
        kind: Any = resolve(node.cls)
    except LookupError as error:
        raise _no_class(path, node.cls, "no such class in this program") from error
    if isinstance(node, CustomNode):
        return kind
    if isinstance(node, NamedTupleNode):
        fields = kind._fields if optree.is_namedtuple_class(kind) else None
    elif isinstance(node, StructSequenceNode):
        fields = optree.structseq_fields(kind) if optree.is_structseq_class(kind) else None
    else:
        fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None
    if fields is None or tuple(fields) != node.fields:
        raise _no_class(path, f"{node.cls} with fields {', '.join(node.fields)}", f"{fields}")
    return kind


def _no_class(path: str, expected: str, found: str) -> MismatchError:
    return MismatchError(
        path,
        expected=f"the class {expected}",
        found=found,
        hint="Import the module that defines it before loading, or pass like= with a tree of your own",
    )


def replace_leaves(tree: object, leaves: Iterator[object], *, namespace: str = "") -> object:
    """A tree with the same containers, of the same classes, and new leaves in the order of `flatten`."""

    def build(node: Any) -> Any:
        taken = _take(node, "", namespace, 0)
        if taken is None:
            return next(leaves)
        children = [build(child) for child in taken.children]
        return _rebuilt(node, taken.keys, children, namespace)

    return build(tree)


def _rebuilt(node: Any, keys: Sequence[object], children: list[Any], namespace: str) -> object:
    kind: Any = type(node)
    if kind in (dict, collections.OrderedDict):
        return kind(zip(keys, children, strict=True))
    if kind is collections.defaultdict:
        return collections.defaultdict(node.default_factory, zip(keys, children, strict=True))
    if kind in (list, tuple):
        return kind(children)
    if kind is collections.deque:
        return collections.deque(children, node.maxlen)
    if kind is PerRank:
        return PerRank(children[0])
    entry = _registered(kind, namespace)
    if entry is not None:
        return entry.unflatten_func(entry.flatten_func(node)[1], tuple(children))
    if isinstance(node, tuple):
        return kind._make(children) if optree.is_namedtuple(node) else kind(children)
    return _made(kind, [str(key) for key in keys], children)


def _made(kind: type, fields: Sequence[str], children: Sequence[object]) -> object:
    """An instance as copy and pickle make one: no __init__, no __post_init__."""
    made = object.__new__(kind)
    for field, child in zip(fields, children, strict=True):
        object.__setattr__(made, field, child)
    return made


def graft(tree: object, new: object, *, namespace: str = "", path: str = "") -> list[tuple[str, object]]:
    """Puts the leaves of `new` in the place of those of `tree` that differ, inside the containers that `tree` has.

    `new` has the structure of `tree`, as `replace_leaves` makes it. Returns what could not be put in place because
    its container cannot be changed: (path, new leaf).
    """
    taken, other = _take(tree, path, namespace, 0), _take(new, path, namespace, 0)
    if taken is None or other is None:
        return []
    stuck: list[tuple[str, object]] = []
    for key, old_child, new_child in zip(taken.keys, taken.children, other.children, strict=True):
        text = key_text(key) if type(tree) is not PerRank else "~rank*"
        below = f"{path}/{text}" if path else text
        if old_child is new_child:
            continue
        if _take(old_child, below, namespace, 0) is not None:
            stuck += graft(old_child, new_child, namespace=namespace, path=below)
        elif not _put(tree, key, new_child):
            stuck.append((below, new_child))
    return stuck


def _put(container: Any, key: Any, value: object) -> bool:
    if isinstance(container, (dict, list, collections.deque)):
        container[key] = value  # pyright: ignore[reportUnknownMemberType]
        return True
    if dataclasses.is_dataclass(container) and type(container) is not PerRank:
        parameters: Any = getattr(type(container), "__dataclass_params__", None)
        if parameters is not None and not parameters.frozen:
            setattr(container, key, value)
            return True
    return False
