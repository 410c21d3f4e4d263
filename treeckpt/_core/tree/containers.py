"""Containers, one at a time: which classes are containers, their children, and how their structure node is built.

Containers are dict (any insertion order, keys of str, int, bool, float, None, bytes and tuples of these), OrderedDict,
defaultdict, list, tuple, namedtuple, struct sequence, deque, dataclass, `PerRank`, `KeyedTable`, `TensorParts`, mapping
classes of other libraries (subclasses of dict, OrderedDict and UserDict, as transformers' ModelOutput), and every class
registered with optree or with torch.utils._pytree; but no instance of a class with `state_dict` and `load_state_dict`,
which is saved by its state. Everything else is a leaf.

Items and attributes of a mapping class are read from, and put into, an instance's storage. Nothing of its class is
called, neither at save nor at load. Attributes are those that are also items of the same name, and plain values.

The marks of this package are nodes of optree too, in the namespace `treeckpt`. `flatten` says why optree's own
flattening is not used.
"""

# A tree holds objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

import msgspec
import optree

from ...errors import TreeError
from ..sharding.int_runs import encode_runs
from .dict_attributes import METADATA, encode_attributes
from .keyed_table import KeyedTable, columns_of
from .structure import (
    AbsentNode,
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
    table_keys,
)
from .tensor_parts import TensorParts
from .value_codec import Value, encode_function, encode_value, refuse_hash_collisions, type_name

NAMESPACE = "treeckpt"
"""The namespace of optree's registry in which `PerRank`, `FromRank` and `Sharded` are nodes."""


@dataclasses.dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a subtree of which every rank has its own: an RNG state, a data loader's position. Nothing is compared.

    >>> report = tc.save("run/step_00000200", {"seed": tc.PerRank(17)})
    >>> tc.load("run/step_00000200")["seed"].value
    17
    """

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FromRank:
    """Marks a subtree of which one rank's counts, whatever the others have; a load in any world gives it to all.

        tree = {"model": model.state_dict(), "best": tc.FromRank(best)}  # only rank 0 knows the best

    Only that rank's is looked at, compared and written. As a target of `load` it stands for its value.

    >>> report = tc.save("run/step_00000200", {"best": tc.FromRank({"loss": 0.1})})
    >>> tc.load("run/step_00000200")
    {'best': {'loss': 0.1}}

    Args:
        value: of this rank; any tree, but no `PerRank` state.
        rank: whose value counts.
    """

    value: Any
    rank: int = 0
    __treeckpt_leaf__: ClassVar[bool] = True


def _flatten_mark(mark: Any) -> tuple[Any, ...]:
    others = tuple(getattr(mark, field.name) for field in dataclasses.fields(mark))[1:]
    return (mark.value,), others, ("value",)


class NodeFunctions(msgspec.Struct, frozen=True):
    """The functions of a class that flatten and rebuild an instance, in the form of optree's."""

    flatten_func: Callable[[Any], tuple[Any, ...]]
    unflatten_func: Callable[[Any, Any], object]


MARKS: dict[type, NodeFunctions] = {}
"""The classes of this package that are nodes of optree in `NAMESPACE`."""


def register_mark(
    kind: type,
    flatten: Callable[[Any], Any],
    unflatten: Callable[[Any, Any], Any],
    entry: type[optree.PyTreeEntry] = optree.GetAttrEntry,
) -> None:
    """Registers a class of this package with optree in `NAMESPACE`, where maps of optree pass through it.

    Args:
        entry: the steps of accessors from an instance to its children.
    """
    register: Any = optree.register_pytree_node  # pyright: ignore[reportUnknownMemberType]
    register(kind, flatten, unflatten, path_entry_type=entry, namespace=NAMESPACE)
    MARKS[kind] = NodeFunctions(flatten, unflatten)


register_mark(PerRank, _flatten_mark, lambda _, values: PerRank(values[0]))
register_mark(FromRank, _flatten_mark, lambda others, values: FromRank(values[0], *others))


@dataclasses.dataclass(frozen=True, slots=True)
class AbsentSubtree:
    """Stands for a subtree that another rank gives, see `FromRank`."""

    rank: int
    __treeckpt_leaf__: ClassVar[bool] = True


DEFAULT_FACTORIES: dict[str, Callable[[], object]] = {
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
"""The functions that the `default_factory` of a defaultdict can be, by name."""


_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
_ARRAY_MODULES = frozenset(("torch", "torch.nn.parameter", "numpy"))


@lru_cache(maxsize=1024)
def is_leaf_type(kind: type) -> bool:
    """Returns whether a class is certainly a leaf, without a look into the registries."""
    return kind in _SCALARS or kind.__module__ in _ARRAY_MODULES


@lru_cache(maxsize=1024)
def is_stateful_type(kind: type) -> bool:
    """Returns whether instances of a class have a state that they return and take as a tree."""
    if is_leaf_type(kind) or issubclass(kind, type):
        return False
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


class FlattenedContainer(msgspec.Struct):
    """One container flattened by one level: the constructor of its node, its keys and its children."""

    build: Callable[[tuple[Structure, ...]], Node]
    """Builds the container's node from its children's structures."""
    keys: Sequence[object]
    children: Sequence[object]

    def has_only_leaves(self) -> bool:
        """Returns whether the children are all leaves for certain."""
        return all(map(is_leaf_type, map(type, self.children)))


def flatten_one_level(tree: Any, path: str, namespace: str, rank: int) -> FlattenedContainer | None:
    """Flattens one container by one level; None for a leaf.

    Raises:
        TreeError: the container, or one of its keys, cannot be stored.
    """
    kind = type(tree)
    if kind is dict or kind is collections.OrderedDict:
        keys = list(tree)
        node = DictNode if kind is dict else partial(_ordered_dict_node, tree, path)
        return FlattenedContainer(partial(_keyed_node, node, (), keys, path), keys, list(tree.values()))
    if kind is collections.defaultdict:
        return _flatten_defaultdict(tree, path)
    if kind is list:
        return FlattenedContainer(ListNode, range(len(tree)), tree)
    if kind is tuple:
        return FlattenedContainer(TupleNode, range(len(tree)), tree)
    if kind is collections.deque:
        return FlattenedContainer(partial(DequeNode, tree.maxlen), range(len(tree)), list(tree))
    if kind is PerRank:
        return FlattenedContainer(partial(PerRankNode, (encode_runs([rank]),)), (rank,), (tree.value,))
    if kind is AbsentSubtree:
        return FlattenedContainer(partial(AbsentNode, tree.rank), (), ())
    if kind is TensorParts:
        return FlattenedContainer(tree.node_of, tree.node.keys, list(tree.parts.values()))
    if kind is KeyedTable:
        children = columns_of(tree)
        return FlattenedContainer(partial(TableNode, tree.spec), table_keys(len(children)), children)
    if is_leaf_type(kind) or is_stateful_type(kind):
        return None  # decided without a look into the registries
    entry = registry_entry(kind, namespace)
    if entry is not None:
        try:
            return _flatten_registered(tree, entry, path)
        except TreeError:
            if not isinstance(entry, NodeFunctions):
                raise
            return None  # torch keeps any object beside the children, a constant as a whole
    if isinstance(tree, tuple):
        if optree.is_namedtuple(tree):
            fields = tuple(kind._fields)
            return FlattenedContainer(partial(NamedTupleNode, type_name(kind), fields), fields, list(tree))
        if optree.is_structseq(tree):
            items, hidden = struct_sequence_fields(kind)
            fields, children = (*items, *hidden), (*tree, *(getattr(tree, field) for field in hidden))
            return FlattenedContainer(partial(StructSequenceNode, type_name(kind), fields), fields, children)
    if is_plain_dataclass(kind):
        return _flatten_dataclass(tree, path)
    mapping = mapping_state(tree, path)
    return None if mapping is None else _flatten_mapping(tree, *mapping, path)


def _keyed_node(
    kind: Callable[..., Node],
    fields: tuple[Value, ...],
    keys: Sequence[object],
    path: str,
    children: tuple[Structure, ...],
) -> Node:
    """Builds a node of a class with `keys` and `children` after its other fields."""
    encoded: list[Value] = []
    for key in keys:
        # JSON holds it as it is, and every such text is a valid name
        if type(key) is str and key.isascii():
            encoded.append(key)
        else:
            key_text(key, path)  # raises for a key that has no text
            encoded.append(encode_value(key, path))
    # Python hashes text with a secret, so nobody can choose many of one hash
    if any(type(key) is not str for key in keys):
        refuse_hash_collisions(keys, path)
    return kind(*fields, tuple(encoded), children)


def _ordered_dict_node(
    tree: collections.OrderedDict[Any, Any], path: str, keys: tuple[Value, ...], children: tuple[Structure, ...]
) -> OrderedDictNode:
    return OrderedDictNode(encode_attributes(vars(tree), path), keys, children)


def _flatten_defaultdict(tree: collections.defaultdict[Any, Any], path: str) -> FlattenedContainer:
    factory = tree.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and DEFAULT_FACTORIES.get(name or "") is not factory:
        raise TreeError(
            path,
            expected=f"a defaultdict whose default_factory is None or one of {', '.join(DEFAULT_FACTORIES)}",
            found=f"{factory!r:.80}",
            hint="A function cannot be stored; save dict(...) of it instead",
        )
    keys = list(tree)
    return FlattenedContainer(partial(_keyed_node, DefaultDictNode, (name,), keys, path), keys, list(tree.values()))


def _flatten_dataclass(tree: Any, path: str) -> FlattenedContainer:
    name = type_name(type(tree))
    fields = tuple(field.name for field in dataclasses.fields(tree))
    missing = [field for field in fields if not hasattr(tree, field)]
    if missing:
        raise TreeError(path, expected=f"{name} with all its fields", found=f"no value for {missing[0]!r}")
    children = [getattr(tree, field) for field in fields]
    return FlattenedContainer(partial(DataclassNode, name, fields), fields, children)


def _flatten_registered(tree: Any, entry: Any, path: str) -> FlattenedContainer:
    """Flattens an instance of a registered class."""
    flat = entry.flatten_func(tree)
    children, auxiliary = list(flat[0]), flat[1]
    keys = list(flat[2]) if len(flat) > 2 and flat[2] is not None else list(range(len(children)))
    fields = (type_name(type(tree)), encode_value(auxiliary, path, encode_function))
    # two children of one name would have one path
    if len({key_text(key, path) for key in keys}) != len(children) or len(keys) != len(children):
        raise TreeError(
            path,
            expected=f"{fields[0]} to name each of its {len(children)} children once",
            found=f"names {keys!r:.80}",
            hint="Look at the flatten function that was registered for it",
        )
    return FlattenedContainer(partial(_keyed_node, CustomNode, fields, keys, path), keys, children)


def _flatten_mapping(tree: Any, items: dict[Any, Any], state: tuple[object, ...], path: str) -> FlattenedContainer:
    """Flattens an instance of a mapping class of another library."""
    keys, fields = list(items), (type_name(type(tree)), encode_value(state, path))
    return FlattenedContainer(partial(_keyed_node, CustomNode, fields, keys, path), keys, list(items.values()))


def registry_entry(kind: type, namespace: str) -> Any:
    """Returns the entry of a class in optree's registry, else in torch's, with `flatten_func` and `unflatten_func`.

    None for a class without one of its own, as any namedtuple, and for a leaf of this package.
    """
    if "__treeckpt_leaf__" in type.__getattribute__(kind, "__dict__"):
        return None
    find: Any = optree.register_pytree_node.get  # pyright: ignore[reportUnknownMemberType, reportFunctionMemberAccess]
    entry: Any = find(kind, namespace=namespace)
    return entry if entry is not None and entry.type is kind else _torch_entry(kind)


def _torch_entry(kind: type) -> NodeFunctions | None:
    """Returns the functions of a class that is registered with torch.utils._pytree, and that no other rule knows."""
    node: Any = getattr(sys.modules.get("torch.utils._pytree"), "SUPPORTED_NODES", {}).get(kind)
    if node is None or issubclass(kind, tuple) or is_plain_dataclass(kind) or mapping_base(kind) is not None:
        return None

    def flattened(tree: Any) -> tuple[Any, ...]:
        if node.flatten_with_keys_fn is None:
            return node.flatten_fn(tree)
        pairs, context = node.flatten_with_keys_fn(tree)
        names = ("key", "idx", "name")
        # a key of a class of one's own may have none of these
        steps = [
            next((getattr(key, name) for name in names if hasattr(key, name)), number)
            for number, (key, _) in enumerate(pairs)
        ]
        return [child for _, child in pairs], context, steps

    return NodeFunctions(flattened, lambda context, children: node.unflatten_fn(list(children), context))


@lru_cache(maxsize=1024)
def struct_sequence_fields(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the fields of a struct sequence's class that are its items, each with a unique name, and the others.

    os.stat_result has both kinds: three items without a name, and times that can only be read by name.
    """
    items = optree.structseq_fields(kind)
    names = tuple(f"item {n}" if items.count(name) > 1 else name for n, name in enumerate(items))
    members = (name for name, member in vars(kind).items() if isinstance(member, types.MemberDescriptorType))
    return names, tuple(name for name in members if name not in items)


def new_struct_sequence(kind: Any, children: Sequence[object]) -> object:
    """Returns an instance of a struct sequence's class from its items and then its other fields."""
    items, hidden = struct_sequence_fields(kind)
    return kind(children[: len(items)], dict(zip(hidden, children[len(items) :], strict=True)))


@lru_cache(maxsize=1024)
def is_plain_dataclass(kind: type) -> bool:
    """Returns whether a class is a dataclass without other state: no dict or enum, for example, and no marked leaf."""
    others = (enum.Enum, type, BaseException, dict, list, tuple, set, frozenset, str, bytes, int, float)
    known: Any = [type.__getattribute__(base, "__dict__") for base in type.__getattribute__(kind, "__mro__")]
    # a metaclass may return anything from hasattr
    is_dataclass = any("__dataclass_fields__" in names for names in known)
    return is_dataclass and not issubclass(kind, others) and "__treeckpt_leaf__" not in known[0]


def new_instance(kind: type, fields: Sequence[str], children: Sequence[object]) -> object:
    """Returns an instance of a dataclass as copy and pickle create one: without __init__ and __post_init__."""
    instance: object = object.__new__(kind)
    for field, child in zip(fields, children, strict=True):
        object.__setattr__(instance, field, child)
    return instance


# mapping classes of other libraries ----------------------------------------------------------------------------------
MARK = "treeckpt mapping"
"""The first item of the auxiliary data of nodes of such classes; the names of attributes and their values follow."""
_HEAP_TYPE = 1 << 9
"""Flag of classes that Python code defines; those of C can have a state that only they know."""


@lru_cache(maxsize=1024)
def mapping_base(kind: type) -> Any:
    """Returns the class that stores the items of a mapping class: dict, OrderedDict or UserDict; None for others."""
    bases: tuple[type, ...] = (collections.OrderedDict, dict, collections.UserDict)
    base = next((base for base in bases if issubclass(kind, base)), None)
    # the first two have nodes of their own, and a Counter is a value
    if base is None or kind in (dict, collections.OrderedDict, collections.Counter):
        return None
    for parent in type.__getattribute__(kind, "__mro__"):
        names = type.__getattribute__(parent, "__dict__")
        # state in slots is not in `__dict__`, and would be lost
        if "__treeckpt_leaf__" in names or names.get("__slots__"):
            return None
        if parent not in (object, dict, collections.OrderedDict) and not parent.__flags__ & _HEAP_TYPE:
            return None
    # a load cannot find a class that a function has defined
    return None if "<locals>" in type_name(kind) else base


def mapping_state(tree: Any, path: str) -> tuple[dict[Any, Any], tuple[object, ...]] | None:
    """Returns the items of an instance of a mapping class, and its other state as plain data; None for all else."""
    base = mapping_base(type(tree))
    if base is None:
        return None
    attributes: dict[str, Any] = dict(object.__getattribute__(tree, "__dict__"))
    items = attributes.pop("data", None) if base is collections.UserDict else dict(base.items(tree))
    if type(items) is not dict:
        return None
    both = tuple(name for name, value in attributes.items() if name in items and items[name] is value)
    others = {name: value for name, value in attributes.items() if name not in both}
    try:
        encode_value(others, path)
    except TreeError:
        return None
    return items, (MARK, both, others)


def new_mapping(kind: type, state: Any, keys: Sequence[object], children: Sequence[object]) -> object:
    """Returns an instance of a mapping class.

    Args:
        state: as `mapping_state` returned it.

    Raises:
        TypeError, ValueError, KeyError: the class is no mapping class, or the state is not one of it.
    """
    base = mapping_base(kind)
    _, both, others = state
    if base is None or not all(type(name) is str for name in (*both, *others)):
        raise TypeError("no subclass of dict or UserDict whose state is its items and attributes")
    items = dict(zip(keys, children, strict=True))
    made = object.__new__(kind) if base is collections.UserDict else base.__new__(kind)
    attributes: dict[str, Any] = object.__getattribute__(made, "__dict__")
    attributes.update(others)
    attributes.update((name, items[name]) for name in both)
    if base is collections.UserDict:
        attributes["data"] = items
        return made
    for key, child in items.items():
        base.__setitem__(made, key, child)
    return made


def set_item(tree: Any, key: Any, child: object) -> None:
    """Replaces an item of an instance of a mapping class, and the attribute of the same name that is the item."""
    base, attributes = mapping_base(type(tree)), object.__getattribute__(tree, "__dict__")
    items = attributes["data"] if base is collections.UserDict else tree
    setter = dict if base is collections.UserDict else base
    if type(key) is str and key in attributes and attributes[key] is setter.__getitem__(items, key):
        attributes[key] = child
    setter.__setitem__(items, key, child)


# the states of objects inside of states ------------------------------------------------------------------------------
class ObjectState(dict[Any, Any]):
    """The state of an object that stands inside the state of another object, with its class (`package.module:Class`).

    An object whose `state_dict()` returns further objects (a scheduler that keeps another in an attribute) is saved
    with their states in their places. The class tells such a state from a dict, so that a restore finds the object of
    each. In a structure it is a mapping class.
    """

    of: str
    """The class of the object."""
    versions: dict[Any, Any]
    """The versions of a module's submodules; empty for all other objects."""

    @classmethod
    def from_object(cls, owner: object, state: Mapping[Any, Any]) -> ObjectState:
        """Returns the state of an object as one inside another state."""
        made = cls(state)
        made.of, made.versions = type_name(type(owner)), dict(getattr(state, METADATA, {}))
        return made

    def with_items(self, items: Mapping[Any, Any]) -> ObjectState:
        """Returns a state of the same object with other items."""
        made = type(self)(items)
        vars(made).update(vars(self))
        return made

    def as_state_dict(self) -> dict[Any, Any]:
        """Returns the state as `load_state_dict` of its object takes it."""
        if not self.versions:
            return dict(self)
        made = collections.OrderedDict(self)
        setattr(made, METADATA, collections.OrderedDict(self.versions))
        return made
