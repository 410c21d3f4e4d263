"""The tree of a conversion, as structure and leaves, with arrays that are still in their files.

Pure operations on it: taking a subtree, leaving parts out, casting, and putting plain containers in the place of those
that a format lacks. Each says what it changes (`Finding`), so that all of it can be told before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ..arrays.registry import resolve
from ..core.sharding.int_runs import decode_runs
from ..core.tree.flatten import flatten, unflatten
from ..core.tree.globs import compile_globs
from ..core.tree.recursion import Recursive, trampoline
from ..core.tree.structure import (
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
    keys_of,
)
from ..errors import MismatchError

__all__ = [
    "NODES",
    "Contents",
    "ContentsLeaf",
    "Finding",
    "contents_of",
    "exclude",
    "lower_containers",
    "map_leaves",
    "matches_globs",
    "select",
    "spread_ranks",
    "subtree",
    "tree_of",
]

ContentsLeaf = tuple[str, Any]


class Finding(msgspec.Struct, frozen=True):
    """One leaf or container that a conversion changes."""

    path: str
    expected: str
    """What the format holds."""
    found: str
    becomes: str
    lost: bool = False
    """Whether a leaf is left out or its values change; else only its form, or that of a container."""

    def __str__(self) -> str:
        return f"{self.path or '<root>'}: {self.found} becomes {self.becomes}"


class Contents(msgspec.Struct, frozen=True):
    """A tree on its way from one format to another."""

    structure: Structure
    leaves: tuple[ContentsLeaf, ...]
    """In the structure's order, with their paths."""
    label: str
    """Where they come from, for errors."""
    step: int | None = None
    metadata: dict[str, Any] = {}
    findings: tuple[Finding, ...] = ()


def contents_of(tree: Any, label: str, **more: Any) -> Contents:
    """The contents that are a tree."""
    structure, leaves = flatten(tree)
    return Contents(structure, tuple(leaves), label, **more)


def tree_of(contents: Contents) -> Any:
    """The tree itself."""
    return unflatten(contents.structure, iter([leaf for _, leaf in contents.leaves]), resolve=resolve)


def _below(path: str, key: object) -> str:
    text = key_text(key, path)
    return f"{path}/{text}" if path else text


def matches_globs(path: str, globs: Sequence[str]) -> bool:
    """Whether a glob names a path or something above it."""
    return compile_globs(tuple(globs)).match(path)


def subtree(contents: Contents, at: str) -> Contents:
    """What is below a path, as a tree of its own.

    Raises:
        MismatchError: there is no such path.
    """
    if not at:
        return contents
    node, path = contents.structure, ""
    while path != at:
        keys = keys_of(node, path) if node is not None else ()
        below = [(_below(path, key), i) for i, key in enumerate(keys)]
        step = next(((text, i) for text, i in below if at == text or at.startswith(text + "/")), None)
        if step is None or node is None:
            raise MismatchError(
                f"{at}: {contents.label}",
                expected="a path of the tree",
                found=f"only {', '.join(text for text, _ in below[:8]) or 'a leaf'}{' ...' if len(below) > 8 else ''}",
                hint="treeckpt show lists the paths of a checkpoint",
            )
        path, node = step[0], node.children[step[1]]
    cut = len(at) + 1
    leaves = tuple((path[cut:], leaf) for path, leaf in contents.leaves if path == at or path.startswith(at + "/"))
    findings = tuple(
        msgspec.structs.replace(f, path=f.path[cut:])
        for f in contents.findings
        if f.path == at or f.path.startswith(at + "/")
    )
    return msgspec.structs.replace(contents, structure=node, leaves=leaves, findings=findings)


def select(contents: Contents, globs: Sequence[str]) -> Contents:
    """Only what globs over paths name; a path under a named one counts.

    Raises:
        MismatchError: a glob names nothing.
    """
    for glob in globs:
        if not any(matches_globs(path, (glob,)) for path, _ in contents.leaves):
            raise MismatchError(
                f"{glob}: {contents.label}", expected="a glob that names some leaf", found="none of that name"
            )
    return _kept(contents, lambda path: matches_globs(path, globs))


def exclude(contents: Contents, globs: Sequence[str]) -> Contents:
    """All but what globs over paths name; None where that is an element of a sequence and cannot be read."""
    kept = _kept(contents, lambda path: not matches_globs(path, globs))
    gone = [
        Finding(path, "sequences without gaps", "what cannot be read", "None")
        for path, leaf in kept.leaves
        if leaf is ...
    ]
    kept = map_leaves(kept, lambda _, leaf: None if leaf is ... else leaf) if gone else kept
    return msgspec.structs.replace(kept, findings=(*kept.findings, *gone))


def _kept(contents: Contents, keep: Callable[[str], bool]) -> Contents:
    kept = [keep(path) for path, _ in contents.leaves]
    if all(kept):
        return contents
    marks = iter(kept)
    structure, whole = trampoline(_pruned(contents.structure, marks))
    leaves = tuple(leaf for leaf, mark in zip(contents.leaves, whole, strict=True) if mark)
    paths = {path for path, _ in leaves}
    findings = tuple(f for f in contents.findings if f.path in paths or keep(f.path))
    return msgspec.structs.replace(contents, structure=structure, leaves=leaves, findings=findings)


_MAPPINGS = (DictNode, OrderedDictNode, DefaultDictNode)


def _pruned(node: Structure, marks: Iterator[bool]) -> Recursive[tuple[Structure, list[bool]]]:
    """A structure without the leaves that are not marked, and which are kept after all.

    Entries of mappings go; other containers keep all their elements or go as a whole.
    """
    if node is None:
        return None, [next(marks)]
    parts: list[tuple[Structure, list[bool]]] = []
    for child in node.children:
        part: tuple[Structure, list[bool]] = yield _pruned(child, marks)
        parts.append(part)
    flags = [mark for _, part in parts for mark in part]
    if isinstance(node, _MAPPINGS):
        chosen = [(key, child) for key, (child, part) in zip(node.keys, parts, strict=True) if not part or any(part)]
        keys, children = tuple(key for key, _ in chosen), tuple(child for _, child in chosen)
        return msgspec.structs.replace(node, keys=keys, children=children), flags
    if not any(flags):
        return node, flags
    elements = [
        (pruned, part) if isinstance(pruned, _MAPPINGS) or any(part) else (child, [True] * len(part))
        for child, (pruned, part) in zip(node.children, parts, strict=True)
    ]
    made = msgspec.structs.replace(node, children=tuple(child for child, _ in elements))
    return made, [mark for _, part in elements for mark in part]


def map_leaves(contents: Contents, change: Callable[[str, Any], Any]) -> Contents:
    """The same contents with other leaves."""
    return msgspec.structs.replace(contents, leaves=tuple((path, change(path, leaf)) for path, leaf in contents.leaves))


_PLAIN: dict[type, str] = {
    DictNode: "dict",
    OrderedDictNode: "OrderedDict",
    DefaultDictNode: "defaultdict",
    ListNode: "list",
    TupleNode: "tuple",
    DequeNode: "deque",
    NamedTupleNode: "namedtuple",
    StructSequenceNode: "struct sequence",
    DataclassNode: "dataclass",
    CustomNode: "registered class",
    PerRankNode: "state of each rank's own",
    TableNode: "keyed table",
}


NODES = frozenset(_PLAIN) - {PerRankNode}
"""The kinds of containers that hold lazy leaves."""


def _is_known(node: Node) -> bool:
    """Whether the class that a node names is in this program."""
    if not isinstance(node, (NamedTupleNode, StructSequenceNode, DataclassNode, CustomNode)):
        return True
    try:
        resolve(node.cls)
    except LookupError:
        return False
    return True


def lower_containers(contents: Contents, holds: frozenset[type]) -> Contents:
    """The contents with plain containers in the place of those that a format does not hold."""
    findings: list[Finding] = []
    plain = ", ".join(name for kind, name in _PLAIN.items() if kind in holds)

    def walk(node: Structure, path: str) -> Recursive[Structure]:
        if node is None:
            return None
        below: list[Structure] = []
        for key, child in zip(keys_of(node, path), node.children, strict=True):
            below.append(None if child is None else (yield walk(child, _below(path, key))))
        children = tuple(below)
        if type(node) in holds and _is_known(node):
            return msgspec.structs.replace(node, children=children)
        made = _lowered(node, children)
        found = f"a {_PLAIN[type(node)]}" + (f" {node.cls}" if hasattr(node, "cls") else "")  # pyright: ignore[reportAttributeAccessIssue]
        findings.append(Finding(path, plain, found, f"a {_PLAIN[type(made)]}"))
        return made

    structure = trampoline(walk(contents.structure, ""))
    return msgspec.structs.replace(contents, structure=structure, findings=(*contents.findings, *findings))


def _lowered(node: Node, children: tuple[Structure, ...]) -> Node:
    if isinstance(node, (OrderedDictNode, DefaultDictNode, CustomNode)):
        return DictNode(node.keys, children)
    if isinstance(node, (DataclassNode, TableNode)):
        return DictNode(node.fields if isinstance(node, DataclassNode) else TABLE_KEYS, children)
    return TupleNode(children) if isinstance(node, (NamedTupleNode, StructSequenceNode)) else ListNode(children)


def spread_ranks(
    structure: Structure, leaf: Callable[[int, int | None], ContentsLeaf]
) -> tuple[Structure, list[ContentsLeaf], list[Finding]]:
    """A structure with a dict by rank in the place of each `PerRank`, and its leaves.

    Args:
        leaf: gives leaf number i, as of a rank where it is under a `PerRank`; its path may name the rank as `~rank*`.
    """
    leaves: list[ContentsLeaf] = []
    findings: list[Finding] = []
    counter = iter(range(1 << 62))

    def walk(node: Structure, path: str, number: Callable[[], int], rank: int | None) -> Recursive[Structure]:
        if node is None:
            leaves.append((path, leaf(number(), rank)[1]))
            return None
        if isinstance(node, PerRankNode):
            return (yield by_rank(node, path, number))
        children: list[Structure] = []
        for key, child in zip(keys_of(node, path), node.children, strict=True):
            children.append((yield walk(child, _below(path, key), number, rank)))
        return msgspec.structs.replace(node, children=tuple(children))

    def by_rank(node: PerRankNode, path: str, number: Callable[[], int]) -> Recursive[Structure]:
        found: list[tuple[int, Structure]] = []
        for group, child in zip(node.ranks, node.children, strict=True):
            numbers = [number() for _ in range(_count(child))]
            for rank in decode_runs(group).tolist():
                again = iter(numbers)
                found.append((rank, (yield walk(child, _below(path, rank), again.__next__, rank))))
        findings.append(Finding(path, "one tree", f"state of each of {len(found)} ranks' own", "a dict by rank"))
        return DictNode(tuple(rank for rank, _ in found), tuple(child for _, child in found))

    return trampoline(walk(structure, "", counter.__next__, None)), leaves, findings


def _count(structure: Structure) -> int:
    waiting, found = [structure], 0
    while waiting:
        node = waiting.pop()
        found += node is None
        waiting += node.children if node is not None else ()
    return found
