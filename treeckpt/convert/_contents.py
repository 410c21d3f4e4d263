"""The tree of a conversion, as structure and leaves, with arrays that are still in their files.

Pure operations on it: selection, and plain containers in the place of those that a format lacks. Each lists its
changes (`Finding`), so that they can be reported before anything is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from .._arrays.registry import resolve
from .._core.sharding.int_runs import decode_runs
from .._core.text import count_text
from .._core.tree.dict_attributes import DictAttributes, encode_attributes
from .._core.tree.flatten import flatten, unflatten
from .._core.tree.paths import Globs
from .._core.tree.structure import (
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
    TensorNode,
    TupleNode,
    child_path,
    keys_of,
)
from .._foreign.pickle_reader import brief
from ..errors import MismatchError, visible

ContentsLeaf = tuple[str, Any]


class Finding(msgspec.Struct, frozen=True):
    """One leaf or container that a conversion changes.

    >>> [finding] = tc.convert.convert("run/step_00000100", "model.safetensors", dry_run=True).losses
    >>> print(finding)
    step: ...

    Attributes:
        path: of the leaf or container.
        expected: what the format holds.
        found: what is there.
        becomes: what is written in its place.
        lost: whether a leaf is left out or its values change; else only its form, or that of a container.
    """

    path: str
    expected: str
    found: str
    becomes: str
    lost: bool = False

    def __str__(self) -> str:
        return visible(f"{self.path or '<root>'}: {self.found} becomes {self.becomes}")


class ConvertReport(msgspec.Struct, frozen=True):
    """The result of a conversion, or of a dry run.

    >>> len(tc.convert.convert("run/step_00000100", "model.safetensors", dry_run=True).losses)
    1

    Attributes:
        source: its path.
        destination: its path.
        source_format: one of `SOURCES`.
        format: one of `FORMATS`, that was written.
        leaves: number of leaves that are written; in a dry run, that would be.
        arrays: number of arrays.
        nbytes: bytes of all arrays, each as often as it stands in the tree.
        files: names of the files that were written.
        written_nbytes: bytes of array data that this rank wrote.
        notes: changes of form without loss.
        losses: leaves that are left out or changed: only with `lossy`, and in a dry run.
        dry_run: whether nothing was written.
        seconds: that it took.
    """

    source: str
    destination: str
    source_format: str
    format: str
    leaves: int
    arrays: int
    nbytes: int
    files: tuple[str, ...]
    written_nbytes: int
    notes: tuple[Finding, ...]
    losses: tuple[Finding, ...]
    dry_run: bool
    seconds: float

    def __str__(self) -> str:
        did = "would convert" if self.dry_run else "converted"
        rows = [
            f"{did} {self.source} ({self.source_format}) to {self.destination} ({self.format}): "
            f"{count_text(self.leaves, 'leaf', 'leaves')}, {self.nbytes} bytes, "
            f"{count_text(len(self.files), 'file')}"
        ]
        rows += [f"  lost  {finding}" for finding in self.losses]
        return "\n".join(map(visible, rows + [f"  note  {finding}" for finding in self.notes]))


class Contents(msgspec.Struct, frozen=True):
    """A tree on its way from one format to another."""

    structure: Structure
    leaves: tuple[ContentsLeaf, ...]
    """In the structure's order, with their paths."""
    label: str
    """Of the source, for errors."""
    step: int | None = None
    metadata: dict[str, Any] = {}
    findings: tuple[Finding, ...] = ()
    sidecars: tuple[tuple[str, Callable[[], bytes]], ...] = ()
    """Names of the files that were saved with it, and functions that read them."""
    unread: tuple[str, ...] = ()
    """Names of files beside those of the source that are not read: of another format, or in no index."""
    present: int = 0
    """Bytes that its arrays can take together: those of the files, and as many as views may repeat."""


def contents_of(tree: Any, label: str, metadata: dict[str, Any], unread: tuple[str, ...]) -> Contents:
    """Returns the contents of a tree."""
    structure, leaves = flatten(tree)
    return Contents(structure, tuple(leaves), label, metadata=metadata, unread=unread)


def tree_of(contents: Contents) -> Any:
    """Returns the tree of some contents."""
    return unflatten(contents.structure, iter([leaf for _, leaf in contents.leaves]), resolve=resolve)


def subtree(contents: Contents, at: str) -> Contents:
    """Returns the subtree at a path, with paths from there.

    Raises:
        MismatchError: there is no such path.
    """
    if not at:
        return contents
    node, path = contents.structure, ""
    while path != at:
        keys = keys_of(node, path) if node is not None else ()
        paths = [child_path(path, key) for key in keys]
        step = next((i for i, text in enumerate(paths) if f"{at}/".startswith(text + "/")), None)
        if step is None or node is None:
            raise MismatchError(
                f"{at}: {contents.label}",
                expected="a path of the tree",
                found=f"only {', '.join(paths[:8]) or 'a leaf'}{' ...' if len(paths) > 8 else ''}",
                hint="treeckpt show lists the paths of a checkpoint",
            )
        path, node = paths[step], node.children[step]
    cut, above = len(at) + 1, at + "/"
    leaves = tuple((path[cut:], leaf) for path, leaf in contents.leaves if f"{path}/".startswith(above))
    inside = [finding for finding in contents.findings if f"{finding.path}/".startswith(above)]
    findings = tuple(msgspec.structs.replace(finding, path=finding.path[cut:]) for finding in inside)
    return msgspec.structs.replace(contents, structure=node, leaves=leaves, findings=findings)


def select(contents: Contents, globs: Sequence[str]) -> Contents:
    """Keeps only the leaves that globs match, and those below paths that they name; all without globs.

    Raises:
        MismatchError: a glob names nothing.
    """
    if not globs:
        return contents
    chosen = Globs(globs)
    for glob in chosen.unused([path for path, _ in contents.leaves]):
        raise MismatchError(
            f"{glob}: {contents.label}", expected="a glob that names some leaf", found="none of that name"
        )
    return _kept(contents, chosen.match)


def exclude(contents: Contents, globs: Sequence[str]) -> Contents:
    """Removes the leaves that globs match; an element of a sequence that cannot be read becomes None."""
    left_out = Globs(globs)
    kept = _kept(contents, lambda path: not left_out.match(path))
    unread = [path for path, leaf in kept.leaves if leaf is ...]
    gone = [Finding(path, "sequences without gaps", "what cannot be read", "None") for path in unread]
    kept = map_leaves(kept, lambda _, leaf: None if leaf is ... else leaf)
    return msgspec.structs.replace(kept, findings=(*kept.findings, *gone))


def _kept(contents: Contents, keep: Callable[[str], bool]) -> Contents:
    kept = [keep(path) for path, _ in contents.leaves]
    if all(kept):
        return contents
    marks = iter(kept)
    structure, whole = _pruned(contents.structure, marks)
    leaves = tuple(leaf for leaf, mark in zip(contents.leaves, whole, strict=True) if mark)
    paths = {path for path, _ in leaves}
    findings = tuple(f for f in contents.findings if f.path in paths or keep(f.path))
    return msgspec.structs.replace(contents, structure=structure, leaves=leaves, findings=findings)


_MAPPINGS = (DictNode, OrderedDictNode, DefaultDictNode)


def _pruned(node: Structure, marks: Iterator[bool]) -> tuple[Structure, list[bool]]:
    """Returns a structure without unmarked leaves, and for each leaf whether it is kept.

    Entries of mappings go; other containers keep all their elements or go as a whole.
    """
    if node is None:
        return None, [next(marks)]
    parts: list[tuple[Structure, list[bool]]] = []
    for child in node.children:
        part: tuple[Structure, list[bool]] = _pruned(child, marks)
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
    """Replaces each leaf."""
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
    TensorNode: "tensor made of others",
    PerRankNode: "state of each rank's own",
    TableNode: "keyed table",
}


NODES = frozenset(_PLAIN) - {PerRankNode}
"""The kinds of containers that hold lazy leaves."""
_WITH_CLASSES = (NamedTupleNode, StructSequenceNode, DataclassNode, CustomNode, TensorNode)


def _is_known(node: Node) -> bool:
    """Returns whether the class that a node names is in this program, where it is needed to hold leaves."""
    if isinstance(node, TensorNode):  # a part that each rank has of its own has become a dict
        return not any(isinstance(child, DictNode) for child in node.children)
    if not isinstance(node, _WITH_CLASSES):
        return True
    try:
        resolve(node.cls)
    except LookupError:
        return False
    return True


def lower_containers(
    contents: Contents, holds: frozenset[type], holds_attribute: Callable[[Any], bool] = lambda _: True
) -> Contents:
    """Replaces containers that a format does not hold by plain ones.

    Args:
        holds_attribute: whether it holds an attribute of an OrderedDict, where it holds these.
    """
    findings: list[Finding] = []
    plain = ", ".join(name for kind, name in _PLAIN.items() if kind in holds)

    def walk(node: Structure, path: str) -> Structure:
        if node is None:
            return None
        found: list[Structure] = []
        for key, child in zip(keys_of(node, path), node.children, strict=True):
            found.append(None if child is None else walk(child, child_path(path, key)))
        children = tuple(found)
        if type(node) in holds and _is_known(node):
            if isinstance(node, OrderedDictNode) and node.attributes is not None:
                given = node.attributes.decoded(path)
                kept = {name: value for name, value in given.items() if holds_attribute(value)}
                gone = [(name, value) for name, value in given.items() if name not in kept]
                findings.extend(Finding(f"{path}.{n}", "plain attributes", brief(v), "nothing", True) for n, v in gone)
                return OrderedDictNode(encode_attributes(kept, path) if gone else node.attributes, node.keys, children)
            return msgspec.structs.replace(node, children=children)
        made = _lowered(node, children)
        name = f"a {_PLAIN[type(node)]}" + (f" {node.cls}" if isinstance(node, _WITH_CLASSES) else "")
        without = ""
        if isinstance(node, OrderedDictNode) and node.attributes is not None:
            name, without = f"{name} with {_attributes_text(node.attributes)}", " without"
        findings.append(Finding(path, plain, name, f"a {_PLAIN[type(made)]}{without}"))
        return made

    structure = walk(contents.structure, "")
    return msgspec.structs.replace(contents, structure=structure, findings=(*contents.findings, *findings))


def _attributes_text(attributes: DictAttributes) -> str:
    """Returns what an OrderedDict has beside its items."""
    if attributes.metadata is None:
        return "attributes"
    return f"the versions of {count_text(len(attributes.metadata.names), 'module')}, its _metadata"


def _lowered(node: Node, children: tuple[Structure, ...]) -> Node:
    if isinstance(node, (OrderedDictNode, DefaultDictNode, CustomNode, TensorNode)):
        return DictNode(node.keys, children)
    if isinstance(node, (DataclassNode, TableNode)):
        return DictNode(node.fields if isinstance(node, DataclassNode) else TABLE_KEYS, children)
    return TupleNode(children) if isinstance(node, (NamedTupleNode, StructSequenceNode)) else ListNode(children)


def spread_ranks(
    structure: Structure, leaf: Callable[[int, int | None], Any]
) -> tuple[Structure, tuple[ContentsLeaf, ...], tuple[Finding, ...]]:
    """Replaces each `PerRank` by a dict by rank; returns the structure, its leaves, and the changes.

    Args:
        leaf: returns leaf number i, as of a rank where it is under a `PerRank`.
    """
    numbers = itertools.count()
    rows: list[tuple[str, int, int | None]] = []
    findings: list[Finding] = []

    def walk(node: Structure, path: str) -> Structure:
        if node is None:
            rows.append((path, next(numbers), None))
            return None
        if not isinstance(node, PerRankNode):
            children: list[Structure] = []
            for key, child in zip(keys_of(node, path), node.children, strict=True):
                children.append(walk(child, child_path(path, key)))
            return msgspec.structs.replace(node, children=tuple(children))
        by_rank: list[tuple[int, Structure]] = []
        for group, child in zip(node.ranks, node.children, strict=True):
            first = len(rows)
            made = walk(child, path)
            shared, rows[first:] = rows[first:], []
            for rank in decode_runs(group).tolist():
                by_rank.append((rank, made))
                rows.extend((_with_rank(at, path, rank), number, rank) for at, number, _ in shared)
        found = f"state of its own for each of {count_text(len(by_rank), 'rank')}"
        findings.append(Finding(path, "one tree", found, "a dict by rank"))
        return DictNode(tuple(rank for rank, _ in by_rank), tuple(child for _, child in by_rank))

    spread = walk(structure, "")
    return spread, tuple((path, leaf(number, rank)) for path, number, rank in rows), tuple(findings)


def _with_rank(path: str, above: str, rank: int) -> str:
    """Inserts a rank into a path, below `above`."""
    rest = path[len(above) :].removeprefix("/")
    return "/".join(part for part in (above, str(rank), rest) if part)
