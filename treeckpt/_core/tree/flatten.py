"""Flattens nested containers into leaves with paths, rebuilds the containers exactly, and updates them in place.

`flatten` walks a tree once and returns its structure, plain data for the index, and its leaves in order;
`_core.tree.containers` defines what a container is. `unflatten` is the inverse, and needs the classes of the
containers: `without_left_out` takes those out of a structure of which nothing is wanted. `replace_leaves` puts new
leaves into new containers like those of a given tree, `update_in_place` into the containers that the tree has.

Nearly all of a tree is leaves, and containers of leaves only: these are handled without one more call of the recursion.

The registry of optree is used, its flattening is not. Milliseconds of a process, the best of many runs:

| tree | `flatten` | `optree.tree_flatten_with_path` | and `path_text` of its paths |
|---|---|---|---|
| 1,000 arrays in a dict | 0.4 | 0.2 | 1.5 |
| moments of 1,000 parameters: 3,000 arrays | 4.1 | 1.2 | 7.0 |
| moments of 33,333 parameters: 100,000 arrays | 267 | 81 | 282 |
| 2,000 arrays in 4,001 containers | 10 | 1.4 | 6.3 |

Leaves with paths as text, which an index needs, cost about the same by either way, and 4 % of a save of 1,000 arrays.
optree then lacks

- the order of the keys of a dict, in leaves and paths, unless a mode of the whole process is set;
- the names of the fields of a namedtuple in paths, and of a struct sequence the fields that are no items (9 of 19 of
  os.stat_result);
- `_metadata` of a state dict and other attributes of an OrderedDict;
- dataclasses and mappings of other libraries that are not registered: each is one leaf, with its arrays inside;
- a structure as plain data: a `PyTreeSpec` is stored by pickle, or as `treespec` stores it;
- an error that names the path of what cannot be stored.

Neither keeps that one container is in two places: it is two containers afterwards, whose arrays stay one.
"""

# A tree holds objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import optree

from ...errors import FormatError, MismatchError, TreeError
from ..sharding.int_runs import decode_runs, length_of
from .containers import (
    DEFAULT_FACTORIES,
    MARK,
    AbsentSubtree,
    FlattenedContainer,
    PerRank,
    flatten_one_level,
    is_leaf_type,
    is_plain_dataclass,
    mapping_base,
    mapping_state,
    new_instance,
    new_mapping,
    new_struct_sequence,
    registry_entry,
    set_item,
    struct_sequence_fields,
)
from .dict_attributes import METADATA, ModuleMetadata, copy_attributes, take_metadata
from .keyed_table import KeyedTable, restore_table
from .structure import (
    MAX_DEPTH,
    MAX_EXTRA_PATH_CHARS,
    USUAL_PATH_LENGTH,
    AbsentNode,
    CustomNode,
    DataclassNode,
    DefaultDictNode,
    DequeNode,
    DictNode,
    KeyTextCache,
    ListNode,
    NamedTupleNode,
    Node,
    OrderedDictNode,
    PerRankNode,
    StructSequenceNode,
    Structure,
    TableNode,
    TensorNode,
    TupleNode,
    check_stack,
    child_path,
    extra_path_chars,
    key_text,
    keys_of,
    rank_key,
    too_deep,
)
from .tensor_parts import BuildTensor, TensorParts
from .value_codec import FunctionResolver, Resolver, decode_function, decode_value

_DEEP = 50
"""Levels from which on a tree is flattened only where there is room on the stack for all walks that follow."""
Leaves = list[tuple[str, object]]
"""Leaves with their paths."""


def flatten(
    tree: object, *, rank: int = 0, namespace: str = "", whole: Container[int] = ()
) -> tuple[Structure, Leaves]:
    """Returns the structure of a tree, and its leaves with their paths, in order.

    Args:
        rank: the rank to which subtrees under `PerRank` belong.
        namespace: of optree's registry.
        whole: the ids of containers that are taken as leaves.

    Raises:
        TreeError: a key, or a container, that cannot be stored; nesting deeper than `MAX_DEPTH`, or than there is room
            for on the stack.
    """
    flattener = _Flattener(rank, namespace, whole)
    top = flattener.open(tree, "")
    try:
        structure = None if top is None else flattener.flatten(tree, top, "", "")
    except RecursionError:
        check_stack()
        raise  # of a container's own function
    return structure, flattener.leaves


class _Flattener:
    """The state of one `flatten`."""

    __slots__ = ("_above", "_namespace", "_nchars", "_rank", "_rank_key", "_whole", "leaves")

    def __init__(self, rank: int, namespace: str, whole: Container[int]) -> None:
        self._rank, self._namespace, self._whole = rank, namespace, whole
        self._rank_key = rank_key(rank)
        self._above: list[int] = []
        self._nchars = 0
        self.leaves: Leaves = []

    def open(self, node: object, path: str) -> FlattenedContainer | None:
        """Returns a container flattened by one level; None for a leaf, which it adds to the leaves."""
        flat = None if id(node) in self._whole else flatten_one_level(node, path, self._namespace, self._rank)
        if flat is None:
            self.leaves.append((path, node))
            return None
        above = self._above
        if len(above) == MAX_DEPTH:
            # a container that holds itself gets here too, so no level has to look for it
            raise too_deep(path, itself=id(node) in above)
        if len(above) == _DEEP:
            check_stack(path)
        if len(path) > USUAL_PATH_LENGTH:
            self._nchars += extra_path_chars(path, len(flat.keys))
            if self._nchars > MAX_EXTRA_PATH_CHARS:
                raise TreeError(
                    path[:200],
                    expected="names of a usual length",
                    found=f"paths of {self._nchars} characters",
                    hint="Give its parts shorter names: each stands in the paths of all below it",
                )
        return flat

    def flatten(self, node: object, flat: FlattenedContainer, path: str, prefix: str) -> Structure:
        """Returns the structure of a container, and adds its leaves."""
        self._above.append(id(node))
        own = type(node) is PerRank
        children: list[Structure] = []
        for key, child in zip(flat.keys, flat.children, strict=True):
            below = prefix + (self._rank_key if own else key_text(key, path))
            if is_leaf_type(type(child)):
                self.leaves.append((below, child))
                children.append(None)
            elif (inner := self.open(child, below)) is None:
                children.append(None)
            elif inner.has_only_leaves():
                texts = [self._rank_key] if type(child) is PerRank else [key_text(k, below) for k in inner.keys]
                self.leaves.extend(zip([f"{below}/{text}" for text in texts], inner.children, strict=True))
                children.append(inner.build((None,) * len(texts)))
            else:
                children.append(self.flatten(child, inner, below, below + "/"))
        self._above.pop()
        return flat.build(tuple(children))


_OF_CLASSES = (NamedTupleNode, StructSequenceNode, DataclassNode, CustomNode)
"""Kinds of containers whose classes a program may lack."""


def without_left_out(
    structure: Structure, taken: Sequence[bool], is_wanted: Callable[[str], bool]
) -> tuple[Structure, list[int | None]]:
    """Puts a leaf in the place of each container of a class of which nothing is taken.

    Args:
        taken: of each leaf in order, whether it is taken.
        is_wanted: whether an empty container is taken, by its path, with `~rank*` for a rank.

    Returns:
        The structure, and the number of each of its leaves in the given one; None where a container was.
    """
    kept: list[int | None] = []
    numbers, texts = iter(range(len(taken))), KeyTextCache()

    def walk(node: Node, path: str, prefix: str) -> tuple[Structure, bool]:
        first, has_some = len(kept), not node.children and is_wanted(path)
        children = list(node.children)
        for position, (text, child) in enumerate(zip(texts.of(node, path), node.children, strict=True)):
            if child is None:
                kept.append(number := next(numbers))
                is_taken = taken[number]
            else:
                children[position], is_taken = walk(child, prefix + text, f"{prefix}{text}/")
            has_some = has_some or is_taken
        if has_some or not isinstance(node, _OF_CLASSES):
            return msgspec.structs.replace(node, children=tuple(children)), has_some
        kept[first:] = [None]
        return None, False

    # without a container of a class nothing has to be taken out
    waiting = [] if structure is None else [structure]
    while waiting and structure is not None:
        node = waiting.pop()
        if isinstance(node, _OF_CLASSES):
            structure, _ = walk(structure, "", "")
            return structure, kept
        waiting += [child for child in node.children if child is not None]
    return structure, list(range(len(taken)))


def unflatten(
    structure: Structure,
    leaves: Iterator[object],
    *,
    resolve: Resolver,
    build: BuildTensor | None = None,
    functions: FunctionResolver | None = None,
    rank: int = 0,
    namespace: str = "",
    refused: list[str] | None = None,
) -> object:
    """Returns the tree of a structure; the inverse of `flatten`.

    Args:
        leaves: in order; of a `PerRank` node, those of `rank`'s subtree only.
        resolve: finds the classes of namedtuples, dataclasses and registered nodes.
        functions: finds the functions that registered nodes keep; by default they are refused, as the caller of such a
            node would run what the writer of the structure has named.
        build: makes a tensor of its parts, by default they stay `TensorParts`.
        refused: receives the paths of containers that cannot be made, and become `...`, in place of those of what is
            in them; by default they are errors.

    Raises:
        MismatchError: a class does not exist in this program, or has other fields.
    """
    unflattener = _Unflattener(leaves, resolve, build, functions, rank=rank, namespace=namespace, refused=refused)
    return unflattener.build(structure, "", "")


class _Unflattener:
    """The state of one `unflatten`."""

    __slots__ = ("_build", "_functions", "_leaves", "_namespace", "_rank", "_refused", "_resolve")

    def __init__(
        self,
        leaves: Iterator[object],
        resolve: Resolver,
        build: BuildTensor | None,
        functions: FunctionResolver | None,
        *,
        rank: int,
        namespace: str,
        refused: list[str] | None,
    ) -> None:
        self._leaves, self._resolve, self._build, self._functions = leaves, resolve, build, functions
        self._rank, self._namespace, self._refused = rank, namespace, refused

    def build(self, node: Structure, path: str, prefix: str) -> Any:
        """Returns the subtree of a node."""
        if node is None:
            return next(self._leaves)
        if isinstance(node, PerRankNode):
            below = prefix + rank_key(self._rank)
            return PerRank(self.build(child_of_rank(node, self._rank, path), below, below + "/"))
        keys = keys_of(node, path)
        children: list[Any] = []
        for key, child in zip(keys, node.children, strict=True):
            if child is None:
                children.append(next(self._leaves))
                continue
            below, count = prefix + key_text(key), len(child.children)
            if child.children.count(None) == count and not isinstance(child, PerRankNode):
                own = list(islice(self._leaves, count))
                children.append(self._container(child, keys_of(child, below), own, below))
            else:
                children.append(self.build(child, below, below + "/"))
        return self._container(node, keys, children, path)

    def _container(self, node: Node, keys: Sequence[Any], children: list[Any], path: str) -> object:
        if isinstance(node, DictNode):
            return dict(zip(keys, children, strict=True))
        if isinstance(node, ListNode):
            return children
        if isinstance(node, TupleNode):
            return tuple(children)
        if isinstance(node, OrderedDictNode):
            made: Any = collections.OrderedDict(zip(keys, children, strict=True))
            if node.attributes is not None:
                vars(made).update(node.attributes.decoded(path))
            return made
        if isinstance(node, DequeNode):
            return collections.deque(children, node.maxlen)
        if isinstance(node, DefaultDictNode):
            if node.factory is not None and node.factory not in DEFAULT_FACTORIES:
                raise FormatError(path, expected="a known default_factory", found=f"{node.factory!r:.60}")
            factory: Any = DEFAULT_FACTORIES[node.factory] if node.factory is not None else None
            return collections.defaultdict(factory, zip(keys, children, strict=True))
        assert not isinstance(node, (PerRankNode, AbsentNode)), "handled by build, and refused by paths_of"
        if isinstance(node, TableNode):
            return restore_table(node.table, children[0], *children[2:4])
        if isinstance(node, TensorNode):
            made = TensorParts(node, dict(zip(keys, children, strict=True)), self._build)
            return made if self._build is None else self._build(made, path)
        try:
            return self._of_class(node, keys, children, path)
        except MismatchError:
            if self._refused is None:
                raise
            self._refused[:] = [*(other for other in self._refused if not other.startswith(f"{path}/")), path]
            return ...

    def _of_class(
        self,
        node: NamedTupleNode | StructSequenceNode | DataclassNode | CustomNode,
        keys: Sequence[Any],
        children: list[Any],
        path: str,
    ) -> object:
        try:
            kind: Any = self._resolve(node.cls)
        except LookupError as error:
            raise _class_error(path, node.cls, "no such class in this program") from error
        if isinstance(node, CustomNode):
            return self._custom(node, kind, keys, children, path)
        _check_fields(node, kind, path)
        if isinstance(node, NamedTupleNode):
            return tuple.__new__(kind, children)  # as `_make` of a namedtuple does, which a subclass may override
        if isinstance(node, StructSequenceNode):
            return new_struct_sequence(kind, children)
        try:
            return new_instance(kind, node.fields, children)
        except (TypeError, AttributeError) as error:  # an abstract class, for example
            raise _class_error(path, node.cls, f"{error}"[:200]) from error

    def _custom(self, node: CustomNode, kind: type, keys: Sequence[Any], children: list[Any], path: str) -> object:
        auxiliary: Any = decode_value(
            node.auxiliary, path, resolve=self._resolve, extra=partial(decode_function, find=self._functions, path=path)
        )
        if type(auxiliary) is tuple and auxiliary[:1] == (MARK,):
            try:
                return new_mapping(kind, auxiliary, keys, children)
            except (TypeError, ValueError, KeyError) as error:
                raise _class_error(path, f"{node.cls}, a mapping", f"{error!r:.200}") from error
        entry = registry_entry(kind, self._namespace)
        if entry is None:
            raise _class_error(path, node.cls, "a class that is not registered", _REGISTER)
        try:
            return entry.unflatten_func(auxiliary, tuple(children))
        except Exception as error:  # raised by the user's function
            raise _class_error(path, f"{node.cls} of {len(children)} children", f"{error!r:.200}") from error


def child_of_rank(node: PerRankNode, rank: int, path: str) -> Structure:
    """Returns the subtree of one rank.

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
        found=f"state of {count} other rank{'s' * (count != 1)}",
        hint="The world size changed: leave this leaf out with `...` in like, or pass "
        "fallback=Fallback(per_rank='take')",
    )


def _check_fields(node: NamedTupleNode | StructSequenceNode | DataclassNode, kind: Any, path: str) -> None:
    """Checks that a class is of the node's kind and has the same fields."""
    fields: Sequence[str] | None = None
    if isinstance(node, NamedTupleNode):
        if issubclass(kind, tuple) and optree.is_namedtuple_class(kind):
            fields = getattr(kind, "_fields")  # noqa: B009 (pyright takes it for a plain tuple)
    elif isinstance(node, StructSequenceNode):
        if issubclass(kind, tuple) and optree.is_structseq_class(kind):
            items, hidden = struct_sequence_fields(kind)
            fields = (*items, *hidden)
    elif is_plain_dataclass(kind):
        fields = [field.name for field in dataclasses.fields(kind)]
    if fields is None or tuple(fields) != node.fields:
        raise _class_error(path, f"{node.cls} with fields {', '.join(node.fields)}", f"{fields}")


_IMPORT = "Import the module that defines it before loading, or pass like= with a tree of your own"
_REGISTER = (
    "Register it with optree or torch.utils._pytree before loading, in the namespace that is passed, "
    "or pass like= with a tree of your own"
)


def _class_error(path: str, expected: str, found: str, hint: str = _IMPORT) -> MismatchError:
    return MismatchError(path, expected=f"the class {expected}", found=found, hint=hint)


_Made = dict[int, tuple[object, object]]
"""Containers that were rebuilt, and the new one of each, by the id of the first, which stays alive so."""


def replace_leaves(
    tree: object,
    leaves: Iterator[object],
    *,
    namespace: str = "",
    whole: Container[int] = (),
    keep_shared: bool = False,
) -> object:
    """Returns a tree with containers of the same classes, and leaves in the order of `flatten`; `whole` as there.

    Args:
        keep_shared: a container that stands at several places is one container again; its leaves are those of the
            first place.
    """
    top = None if id(tree) in whole else flatten_one_level(tree, "", namespace, 0)
    made: _Made | None = {} if keep_shared else None
    return next(leaves) if top is None else _replace(tree, top, leaves, namespace, whole, made)


def _replace(
    node: object,
    flat: FlattenedContainer,
    leaves: Iterator[object],
    namespace: str,
    whole: Container[int],
    made: _Made | None,
) -> Any:
    children = list(flat.children)
    for position, child in enumerate(children):
        kind = type(child)
        inner = None if is_leaf_type(kind) or id(child) in whole else flatten_one_level(child, "", namespace, 0)
        if inner is None:
            children[position] = next(leaves)
            continue
        if inner.has_only_leaves():
            new = rebuild_container(child, inner.keys, list(islice(leaves, len(inner.keys))), namespace)
        else:
            new = _replace(child, inner, leaves, namespace, whole, made)
        children[position] = new if made is None else made.setdefault(id(child), (child, new))[1]
    return rebuild_container(node, flat.keys, children, namespace)


def rebuild_container(node: Any, keys: Sequence[object], children: list[Any], namespace: str) -> object:
    """Returns a container like `node`, which was flattened by one level, with other children."""
    kind: Any = type(node)
    if kind is dict:
        return dict(zip(keys, children, strict=True))
    if kind is collections.OrderedDict:
        return copy_attributes(node, collections.OrderedDict(zip(keys, children, strict=True)))
    if kind is collections.defaultdict:
        return collections.defaultdict(node.default_factory, zip(keys, children, strict=True))
    if kind in (list, tuple):
        return kind(children)
    if kind is collections.deque:
        return collections.deque(children, node.maxlen)
    if kind is PerRank:
        return PerRank(children[0])
    if kind is AbsentSubtree:
        return node
    if kind is KeyedTable:
        return node.with_parts(children[0], *children[2:4])
    if kind is TensorParts:
        return node.with_parts(children)
    entry = registry_entry(kind, namespace)
    if entry is not None:
        return entry.unflatten_func(entry.flatten_func(node)[1], tuple(children))
    if isinstance(node, tuple):
        # a subclass of a namedtuple may override `_make`
        return tuple.__new__(kind, children) if optree.is_namedtuple(node) else new_struct_sequence(kind, children)
    if mapping_base(kind) is not None and (mapping := mapping_state(node, "")) is not None:
        return new_mapping(kind, mapping[1], keys, children)
    return new_instance(kind, [str(key) for key in keys], children)


# in place -----------------------------------------------------------------------------------------------------------
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
    with_metadata: list[tuple[tuple[str, ...], ModuleMetadata]] = []
    waiting: list[tuple[Structure, tuple[str, ...]]] = [(saved, ())]
    while waiting:
        node, keys = waiting.pop()
        if isinstance(node, OrderedDictNode) and node.attributes is not None and node.attributes.metadata is not None:
            with_metadata.append((keys, node.attributes.metadata))
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
    return with_metadata


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
        # by text: the keys 1 and True are equal, but not the same
        if steps != [key_text(key) for key in other.keys]:
            return self._replace_content(old, new)
        if type(old) is PerRank:
            steps = ["~rank*"]
        children, changed = list(flat.children), list[int]()
        for number, (step, child, new_child) in enumerate(zip(steps, flat.children, other.children, strict=True)):
            if child is not new_child:
                leaf, below = is_leaf_type(type(new_child)), prefix + step
                children[number] = new_child if leaf else self.update(child, new_child, below, below + "/")
                if children[number] is not child:
                    changed.append(number)
        if not changed:
            return old
        foreign = mapping_base(type(old)) is not None and registry_entry(type(old), self._namespace) is None
        known = [flat.keys[number] for number in changed], [flat.children[number] for number in changed]
        if foreign or isinstance(old, _MUTABLE) or _is_frozen(old) is False or _are_attributes(old, *known):
            for number in changed if not self._dry else ():
                if foreign:
                    set_item(old, flat.keys[number], children[number])
                elif isinstance(old, _MUTABLE):
                    old[flat.keys[number]] = children[number]  # pyright: ignore[reportCallIssue, reportArgumentType]
                else:
                    setattr(old, str(flat.keys[number]), children[number])
            return old
        if self._is_replaceable(old):
            return rebuild_container(old, flat.keys, children, self._namespace)
        self.stuck.extend((prefix + steps[number], children[number]) for number in changed)
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
    # a class that sets attributes itself may do more than that, or refuse
    if type(container).__setattr__ is not object.__setattr__:
        return False
    attributes: dict[str, object] = getattr(container, "__dict__", {})
    pairs = zip(keys, children, strict=True)
    return all(str(key) in attributes and attributes[str(key)] is child for key, child in pairs)


def _is_frozen(container: Any) -> bool | None:
    """Returns whether a dataclass is frozen; None for any other container."""
    parameters: Any = getattr(type(container), "__dataclass_params__", None)
    return parameters.frozen if parameters is not None else None
