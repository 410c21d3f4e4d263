"""Taking nested containers apart into leaves with paths, and putting them together again, exactly.

`flatten` walks a tree once and returns its structure, plain data that goes into the index, and its leaves in order;
what is a container, `core.tree.containers` says. `unflatten` is the inverse. `replace_leaves` and `graft` put new
leaves into a tree that is there, the first into new containers, the second into the ones that it has.
"""

# A tree holds objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice
from typing import Any

import optree

from ...errors import FormatError, MismatchError, TreeError
from ..sharding.int_runs import decode_runs, length_of
from .containers import (
    FACTORIES,
    PerRank,
    Taken,
    is_common_leaf,
    is_plain_dataclass,
    made_of,
    registered,
    struct_sequence_fields,
    struct_sequence_of,
    take,
)
from .keyed_table import KeyedTable, restored
from .recursion import Walk, run
from .spec import Resolver, decode_value
from .structure import (
    LEVELS,
    MAX_DEPTH,
    MAX_TEXT,
    USUAL,
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
    extra_text,
    key_text,
    keys_of,
    rank_key,
)

__all__ = ["PerRank", "flatten", "graft", "own_child", "replace_leaves", "unflatten"]


def flatten(
    tree: object, *, rank: int = 0, namespace: str = "", whole: Container[int] = ()
) -> tuple[Structure, list[tuple[str, object]]]:
    """The structure of a tree, and its leaves with their paths, in order.

    Args:
        rank: whose subtrees `PerRank` marks.
        namespace: of optree's registry.
        whole: the ids of containers that are taken for leaves.

    Raises:
        TreeError: a key, or a container, that cannot be stored; nesting deeper than `MAX_DEPTH`.
    """
    leaves: list[tuple[str, object]] = []
    above: list[int] = []
    nchars = 0

    def found_at(node: object, path: str) -> Taken | None:
        """A container taken apart, None for a leaf."""
        nonlocal nchars
        taken = None if id(node) in whole else take(node, path, namespace, rank)
        if taken is None:
            leaves.append((path, node))
            return None
        if len(above) >= LEVELS and (len(above) == MAX_DEPTH or id(node) in above):
            raise TreeError(
                path[:200],
                expected=f"a tree at most {MAX_DEPTH} levels deep",
                found="a container that holds itself" if id(node) in above else "a deeper one",
                hint="Look for a container that holds itself",
            )
        if len(path) > USUAL and (nchars := nchars + extra_text(path, len(taken.keys))) > MAX_TEXT:
            raise TreeError(
                path[:200],
                expected="names of a usual length",
                found=f"paths of {nchars} characters",
                hint="Give its parts shorter names: each stands in the paths of all below it",
            )
        return taken

    def flat(node: object, taken: Taken, path: str) -> Structure:
        """The structure of a container of leaves, spared a call of the walk."""
        texts = [rank_key(rank)] if type(node) is PerRank else [key_text(key, path) for key in taken.keys]
        leaves.extend(zip([f"{path}/{text}" for text in texts], taken.children, strict=True))
        return taken.build((None,) * len(texts))

    def walk(node: object, taken: Taken, path: str, prefix: str) -> Walk[Structure]:
        above.append(id(node))
        own = type(node) is PerRank
        children: list[Structure] = []
        for key, child in zip(taken.keys, taken.children, strict=True):
            below = prefix + (rank_key(rank) if own else key_text(key, path))
            if is_common_leaf(type(child)):  # nearly all there is: spared a call
                leaves.append((below, child))
                children.append(None)
            elif (inner := found_at(child, below)) is None:
                children.append(None)
            elif inner.holds_leaves():
                children.append(flat(child, inner, below))
            else:
                children.append((yield walk(child, inner, below, below + "/")))
        above.pop()
        return taken.build(tuple(children))

    top = found_at(tree, "")
    return (None if top is None else run(walk(tree, top, "", ""))), leaves


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

    def build(node: Structure, path: str, prefix: str) -> Walk[Any]:
        if node is None:
            return next(leaves)
        if isinstance(node, PerRankNode):
            below = prefix + rank_key(rank)
            return PerRank((yield build(own_child(node, rank, path), below, below + "/")))
        keys = keys_of(node, path)
        children: list[Any] = []
        for key, child in zip(keys, node.children, strict=True):
            if child is None:
                children.append(next(leaves))
                continue
            below, count = prefix + key_text(key), len(child.children)
            if child.children.count(None) == count and not isinstance(child, PerRankNode):  # spared a call
                own = list(islice(leaves, count))
                children.append(_assemble(child, keys_of(child, below), own, below, resolve, namespace))
            else:
                children.append((yield build(child, below, below + "/")))
        return _assemble(node, keys, children, path, resolve, namespace)

    return run(build(structure, "", ""))


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
        if node.factory is not None and node.factory not in FACTORIES:
            raise FormatError(path, expected="a known default_factory", found=f"{node.factory!r:.60}")
        factory: Any = FACTORIES[node.factory] if node.factory is not None else None
        return collections.defaultdict(factory, zip(keys, children, strict=True))
    assert not isinstance(node, PerRankNode), "handled by unflatten"
    if isinstance(node, TableNode):
        return restored(node.table, children[0], *children[2:])
    kind = _class_of(node, path, resolve)
    if isinstance(node, CustomNode):
        return _assemble_custom(node, kind, children, path, namespace)
    if isinstance(node, NamedTupleNode):
        return tuple.__new__(kind, children)  # as `_make` of a namedtuple does, whatever a subclass makes of that
    if isinstance(node, StructSequenceNode):
        return struct_sequence_of(kind, children)
    try:
        return made_of(kind, node.fields, children)
    except (TypeError, AttributeError) as error:  # an abstract class, say
        raise _no_class(path, node.cls, f"{error}"[:200]) from error


def _assemble_custom(node: CustomNode, kind: type, children: list[Any], path: str, namespace: str) -> object:
    entry = registered(kind, namespace)
    if entry is None:
        raise _no_class(path, node.cls, "a class not registered with optree")
    try:
        return entry.unflatten_func(decode_value(node.auxiliary, path), tuple(children))
    except Exception as error:  # the user's own function
        raise _no_class(path, f"{node.cls} of {len(children)} children", f"{error!r:.200}") from error


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
        known = issubclass(kind, tuple) and optree.is_namedtuple_class(kind)
        fields: Any = getattr(kind, "_fields") if known else None  # noqa: B009 (pyright takes it for a plain tuple)
    elif isinstance(node, StructSequenceNode):
        known = issubclass(kind, tuple) and optree.is_structseq_class(kind)
        items, hidden = struct_sequence_fields(kind) if known else ((), ())
        fields = items if items == node.fields else (*items, *hidden) or None  # items alone: an older checkpoint
    else:
        fields = [f.name for f in dataclasses.fields(kind)] if is_plain_dataclass(kind) else None
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


def replace_leaves(
    tree: object, leaves: Iterator[object], *, namespace: str = "", whole: Container[int] = ()
) -> object:
    """A tree with the same containers, of the same classes, and leaves in the order of `flatten`; `whole` as there."""

    def build(node: Any, taken: Taken) -> Walk[Any]:
        children = list(taken.children)
        for at, child in enumerate(children):
            kind = type(child)
            inner = None if is_common_leaf(kind) or id(child) in whole else take(child, "", namespace, 0)
            if inner is None:
                children[at] = next(leaves)
            elif inner.holds_leaves():  # spared a call
                children[at] = _rebuilt(child, inner.keys, list(islice(leaves, len(inner.keys))), namespace)
            else:
                children[at] = yield build(child, inner)
        return _rebuilt(node, taken.keys, children, namespace)

    top = None if id(tree) in whole else take(tree, "", namespace, 0)
    return next(leaves) if top is None else run(build(tree, top))


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
    if kind is KeyedTable:
        return node.with_parts(children[0], *children[2:])
    entry = registered(kind, namespace)
    if entry is not None:
        return entry.unflatten_func(entry.flatten_func(node)[1], tuple(children))
    if isinstance(node, tuple):
        return kind._make(children) if optree.is_namedtuple(node) else struct_sequence_of(kind, children)
    return made_of(kind, [str(key) for key in keys], children)


def graft(
    tree: object, new: object, *, is_value: Callable[[object], bool], namespace: str = "", dry: bool = False
) -> list[tuple[str, object]]:
    """Puts the leaves of `new` in the place of those of `tree` that differ, inside the containers that `tree` has.

    A tuple of values is replaced in the container above it. A list whose content differs in more than its leaves takes
    the content of the new one.

    Args:
        new: has the structure of `tree`, but for lists and tuples of values.
        is_value: whether a leaf is a Python value.
        dry: nothing is changed.

    Returns:
        what could not be put in place because its container cannot be changed: (path, new leaf or tuple).
    """
    stuck: list[tuple[str, object]] = []

    def settle(old: Any, fresh: Any, path: str, prefix: str) -> Walk[Any]:
        """What stands in the place of `old` at the end: itself, wherever it can change."""
        if old is fresh:
            return old
        if isinstance(old, KeyedTable) and isinstance(fresh, KeyedTable):
            if not dry:
                old.ids, old.slots = fresh.ids, fresh.slots
            yield settle(old.scalars, fresh.scalars, f"{prefix}scalars", f"{prefix}scalars/")
            return old
        taken, other = take(old, path, namespace, 0), take(fresh, path, namespace, 0)
        if taken is None or other is None:
            return fresh
        texts = [key_text(key) for key in taken.keys]
        if texts != [key_text(key) for key in other.keys]:
            return old if _refill(old, fresh, dry=dry) else fresh
        children, moved = list(taken.children), list[int]()
        for at, (text, child, new_child) in enumerate(zip(texts, taken.children, other.children, strict=True)):
            if child is not new_child:
                below = prefix + ("~rank*" if type(old) is PerRank else text)
                common = is_common_leaf(type(new_child))  # spared a call
                children[at] = new_child if common else (yield settle(child, new_child, below, below + "/"))
                if children[at] is not child:
                    moved.append(at)
        if not moved:
            return old
        if _can_change(old):
            for at in moved if not dry else ():
                _put(old, taken.keys[at], children[at])
            return old
        if _can_be_replaced(old) and all(x is ... or is_value(x) for _, x in flatten(old, namespace=namespace)[1]):
            return _rebuilt(old, taken.keys, children, namespace)
        stuck.extend((prefix + ("~rank*" if type(old) is PerRank else texts[at]), children[at]) for at in moved)
        return old

    settled = run(settle(tree, new, "", ""))
    if settled is not tree:
        stuck.append(("", settled))
    return stuck


def _refill(old: Any, fresh: Any, *, dry: bool) -> bool:
    """Gives a list or deque the whole content of another one; False for any other container."""
    if type(old) is not type(fresh) or not isinstance(old, (list, collections.deque)):
        return False
    if not dry:
        old.clear()
        old.extend(fresh)
    return True


def _can_change(container: Any) -> bool:
    if isinstance(container, (dict, list, collections.deque)):
        return True
    return type(container) is not PerRank and _is_frozen(container) is False


def _is_frozen(container: Any) -> bool | None:
    """Whether a dataclass is frozen; None for what is none."""
    parameters: Any = getattr(type(container), "__dataclass_params__", None)
    return parameters.frozen if parameters is not None else None


def _can_be_replaced(container: Any) -> bool:
    """Whether an equal container means the same: a tuple of any kind, a frozen dataclass."""
    return isinstance(container, tuple) or _is_frozen(container) is True


def _put(container: Any, key: Any, value: object) -> None:
    if isinstance(container, (dict, list, collections.deque)):
        container[key] = value  # pyright: ignore[reportUnknownMemberType]
    else:
        setattr(container, key, value)
