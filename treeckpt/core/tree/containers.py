"""One container at a time: which classes are containers, what their children are, and how their node is made.

Containers are dict (any insertion order, keys of str, int, bool, float, None, bytes and tuples of these), OrderedDict,
defaultdict, list, tuple, namedtuple, struct sequence, deque, dataclass, `PerRank`, `KeyedTable`, and every class
registered with optree; but no instance of a class with `state_dict` and `load_state_dict`, which stands for its state.
Whatever else is met is a leaf.
"""

# A tree holds objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import optree

from ...errors import TreeError
from ..sharding.int_runs import encode_runs
from .keyed_table import KeyedTable, columns_of
from .spec import Value, encode_value, type_name
from .structure import (
    TABLE_KEYS,
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
    TableNode,
    TupleNode,
    key_text,
)

__all__ = [
    "FACTORIES",
    "PerRank",
    "Taken",
    "is_common_leaf",
    "is_plain_dataclass",
    "keeps_state",
    "made_of",
    "registered",
    "struct_sequence_fields",
    "struct_sequence_of",
    "take",
]


@dataclasses.dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a subtree of which every rank has its own: an RNG state, a data loader's position. Nothing is compared."""

    value: Any


FACTORIES: dict[str, Callable[[], object]] = {
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
def is_common_leaf(kind: type) -> bool:
    """Whether a class is a leaf for sure, without asking the registries."""
    return kind in _SCALARS or kind.__module__ in _ARRAY_MODULES


@lru_cache(maxsize=1024)
def keeps_state(kind: type) -> bool:
    """Whether instances of a class keep a state that they give and take as a tree."""
    if is_common_leaf(kind) or issubclass(kind, type):
        return False
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


class Taken(msgspec.Struct):
    """One container taken apart: how to make its node from the children's nodes, and the children with their keys."""

    build: Callable[[tuple[Structure, ...]], Node]
    keys: Sequence[object]
    children: Sequence[object]

    def holds_leaves(self) -> bool:
        """Whether the children are all leaves for sure."""
        return all(map(is_common_leaf, map(type, self.children)))


def _take_dict(tree: Any, path: str) -> Taken:
    keys = list(tree)
    if type(tree) is dict:
        return Taken(lambda c: DictNode(_encode_keys(keys, path), c), keys, list(tree.values()))
    if type(tree) is collections.OrderedDict:
        return Taken(lambda c: OrderedDictNode(_encode_keys(keys, path), c), keys, list(tree.values()))
    factory = tree.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and FACTORIES.get(name or "") is not factory:
        raise TreeError(
            path,
            expected=f"a defaultdict whose default_factory is None or one of {', '.join(FACTORIES)}",
            found=f"{factory!r:.80}",
            hint="A function cannot be stored; save dict(...) of it instead",
        )
    return Taken(lambda c: DefaultDictNode(name, _encode_keys(keys, path), c), keys, list(tree.values()))


def _encode_keys(keys: Sequence[object], path: str) -> tuple[Value, ...]:
    return tuple([key if type(key) is str and key.isascii() else _encode_key(key, path) for key in keys])


def _encode_key(key: object, path: str) -> Value:
    key_text(key, path)  # refuses those that have no text
    return encode_value(key, path)


def _take_fields(tree: Any, path: str, fields: Sequence[str], node: type[Any]) -> Taken:
    name = type_name(type(tree))
    names = tuple(fields)
    if node is DataclassNode:
        missing = [f for f in names if not hasattr(tree, f)]
        if missing:
            raise TreeError(path, expected=f"{name} with all its fields", found=f"no value for {missing[0]!r}")
        children = [getattr(tree, field) for field in names]
    else:
        children = list(tree)
    return Taken(lambda c: node(name, names, c), names, children)


@lru_cache(maxsize=1024)
def struct_sequence_fields(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a struct sequence's class that are its items, each under a name of its own, and those that are not.

    os.stat_result has both kinds: three items without a name, and times that only their names lead to.
    """
    items = optree.structseq_fields(kind)
    names = tuple(f"item {n}" if items.count(name) > 1 else name for n, name in enumerate(items))
    members = (name for name, member in vars(kind).items() if isinstance(member, types.MemberDescriptorType))
    return names, tuple(name for name in members if name not in items)


def _take_struct_sequence(tree: Any) -> Taken:
    name, (items, hidden) = type_name(type(tree)), struct_sequence_fields(type(tree))
    fields = (*items, *hidden)
    children = (*tree, *(getattr(tree, field) for field in hidden))
    return Taken(lambda c: StructSequenceNode(name, fields, c), fields, children)


def struct_sequence_of(kind: Any, children: Sequence[object]) -> object:
    """An instance of a struct sequence's class, of its items and then, if they are given, its other fields."""
    items, hidden = struct_sequence_fields(kind)
    return kind(children[: len(items)], dict(zip(hidden, children[len(items) :], strict=False)))


def registered(kind: type, namespace: str) -> Any:
    """The entry of a class in optree's registry, None for one that is not there by itself (as each namedtuple is)."""
    find: Any = optree.register_pytree_node.get  # pyright: ignore[reportUnknownMemberType, reportFunctionMemberAccess]
    entry: Any = find(kind, namespace=namespace)
    return entry if entry is not None and entry.type is kind else None


def _take_custom(tree: Any, path: str, namespace: str) -> Taken | None:
    entry = registered(type(tree), namespace)
    if entry is None:
        return None
    flat = entry.flatten_func(tree)
    children, auxiliary = list(flat[0]), flat[1]
    keys = list(flat[2]) if len(flat) > 2 and flat[2] is not None else list(range(len(children)))
    name, aux = type_name(type(tree)), encode_value(auxiliary, path)
    if len({key_text(key, path) for key in keys}) != len(children) or len(keys) != len(children):
        raise TreeError(
            path,
            expected=f"{name} to name each of its {len(children)} children once",
            found=f"names {keys!r:.80}",
            hint="Look at the flatten function that was registered with optree",
        )
    return Taken(lambda c: CustomNode(name, aux, _encode_keys(keys, path), c), keys, children)


def take(tree: Any, path: str, namespace: str, rank: int) -> Taken | None:
    """Takes one container apart; None for a leaf."""
    kind = type(tree)
    if kind is dict or kind is collections.OrderedDict or kind is collections.defaultdict:
        return _take_dict(tree, path)
    if kind is list:
        return Taken(ListNode, range(len(tree)), tree)
    if kind is tuple:
        return Taken(TupleNode, range(len(tree)), tree)
    if kind is collections.deque:
        maxlen = tree.maxlen
        return Taken(lambda c: DequeNode(maxlen, c), range(len(tree)), list(tree))
    if kind is PerRank:
        ranks = (encode_runs([rank]),)
        return Taken(lambda c: PerRankNode(ranks, c), (rank,), (tree.value,))
    if kind is KeyedTable:
        spec = tree.spec
        return Taken(lambda c: TableNode(spec, c), TABLE_KEYS, columns_of(tree))
    if is_common_leaf(kind) or keeps_state(kind):
        return None  # decided without asking the registries
    if (custom := _take_custom(tree, path, namespace)) is not None:
        return custom
    if isinstance(tree, tuple):
        if optree.is_namedtuple(tree):
            return _take_fields(tree, path, kind._fields, NamedTupleNode)
        if optree.is_structseq(tree):
            return _take_struct_sequence(tree)
    if is_plain_dataclass(kind):
        return _take_fields(tree, path, [f.name for f in dataclasses.fields(kind)], DataclassNode)
    return None


@lru_cache(maxsize=1024)
def is_plain_dataclass(kind: type) -> bool:
    """Whether fields are all there is to an instance: not so if it is a dict too, or an enum, or says it is a leaf."""
    others = (enum.Enum, type, BaseException, dict, list, tuple, set, frozenset, str, bytes, int, float)
    known: Any = [type.__getattribute__(base, "__dict__") for base in type.__getattribute__(kind, "__mro__")]
    made = any("__dataclass_fields__" in names for names in known)  # a metaclass may answer anything to hasattr
    return made and not issubclass(kind, others) and "__treeckpt_leaf__" not in known[0]


def made_of(kind: type, fields: Sequence[str], children: Sequence[object]) -> object:
    """An instance as copy and pickle make one: no __init__, no __post_init__."""
    made: object = object.__new__(kind)
    for field, child in zip(fields, children, strict=True):
        object.__setattr__(made, field, child)
    return made
