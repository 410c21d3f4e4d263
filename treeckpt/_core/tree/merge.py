"""Merges the structures of ranks' trees. Each may hold a part of one tree, and subtrees of its own."""

from __future__ import annotations

from collections.abc import Container

import msgspec

from ...errors import MismatchError
from ..sharding.int_runs import Runs
from .dict_attributes import merge_attributes
from .structure import (
    AbsentNode,
    DefaultDictNode,
    DictNode,
    Node,
    OrderedDictNode,
    PerRankNode,
    Structure,
    TableNode,
    TensorNode,
    key_text,
    keys_of,
)

_Mapping = DictNode | OrderedDictNode | DefaultDictNode


class _MergeRule(msgspec.Struct, frozen=True):
    """Whose trees are merged."""

    where: str
    hint: str
    mixed: bool
    """Whether mappings of two kinds are joined."""
    left_out: Container[str] = ()
    """The paths at which a leaf stands for whatever the other has."""


_ACROSS_RANKS = _MergeRule(
    "on every rank", "Ranks may hold different keys of a dict; wrap what differs otherwise in PerRank", mixed=False
)
_ACROSS_CHECKPOINTS = _MergeRule(
    "in every checkpoint", "Give a tree to load into, or select= or exclude= it", mixed=True
)


def merge(a: Structure, b: Structure) -> Structure:
    """Returns the structure of two ranks' trees together: pipeline stages hold parts of one tree.

    Mappings are joined key by key; everything else must be equal.

    Raises:
        MismatchError: naming the first place where the two contradict each other.
    """
    return _merge(a, b, "", _ACROSS_RANKS)


def merge_sources(a: Structure, b: Structure, *, left_out: Container[str] = ()) -> Structure:
    """Returns the structure of the trees of two checkpoints together, as `merge` does.

    Mappings of two kinds, as of a dict and an OrderedDict, become one of the first kind, or an OrderedDict if the other
    is one with attributes. Where these differ, those of `b` count.

    Args:
        left_out: the paths, with `~rank*` for a rank, at which a leaf stands for whatever the other tree has.
    """
    return _merge(a, b, "", msgspec.structs.replace(_ACROSS_CHECKPOINTS, left_out=left_out))


def _merge(a: Structure, b: Structure, path: str, rule: _MergeRule) -> Structure:
    if a is None and b is None:
        return None
    if isinstance(a, AbsentNode) or isinstance(b, AbsentNode):
        return b if isinstance(a, AbsentNode) else a
    if (a is None or b is None) and path in rule.left_out:
        return b if a is None else a
    if isinstance(a, PerRankNode) and isinstance(b, PerRankNode):
        return _merge_ranks(a, b)
    if isinstance(a, _Mapping) and isinstance(b, _Mapping) and (type(a) is type(b) or rule.mixed):
        return _merge_mappings(a, b, path, rule)
    if a is None or b is None or not _same_node(a, b):
        raise MismatchError(
            path,
            expected=f"the same kind of node {rule.where}: {_node_name(a)}",
            found=_node_name(b),
            hint=rule.hint,
        )
    prefix = f"{path}/" if path else ""
    merged: list[Structure] = []
    for key, x, y in zip(keys_of(a, path), a.children, b.children, strict=True):
        merged.append(x if x is None and y is None else _merge(x, y, prefix + key_text(key, path), rule))
    return msgspec.structs.replace(a, children=tuple(merged))


def _merge_mappings(a: _Mapping, b: _Mapping, path: str, rule: _MergeRule) -> Node:
    if isinstance(a, DefaultDictNode) and isinstance(b, DefaultDictNode) and a.factory != b.factory:
        raise MismatchError(path, expected=f"the same default_factory {rule.where}: {a.factory}", found=f"{b.factory}")
    # by text: the keys 1 and True are equal, but not the same
    texts = [key_text(key, path) for key in keys_of(a, path)]
    others = dict(zip((key_text(key, path) for key in keys_of(b, path)), b.children, strict=True))
    children = list(a.children)
    for position, text in enumerate(texts):
        if text in others:
            children[position] = _merge(children[position], others[text], f"{path}/{text}" if path else text, rule)
    known = set(texts)
    added = [(key, child) for key, (text, child) in zip(b.keys, others.items(), strict=True) if text not in known]
    keys = (*a.keys, *(key for key, _ in added))
    merged = msgspec.structs.replace(a, keys=keys, children=(*children, *(child for _, child in added)))
    if isinstance(b, OrderedDictNode) and b.attributes is not None:  # a dict has no attributes
        of_a = a.attributes if isinstance(a, OrderedDictNode) else None
        where = None if rule.mixed else rule.where
        return OrderedDictNode(merge_attributes(of_a, b.attributes, path, where), merged.keys, merged.children)
    return merged


def _same_node(a: Node, b: Node) -> bool:
    """Returns whether two nodes are equal except for their children."""
    # as JSON: the keys 1 and True are equal, but not the same
    bare = [msgspec.json.encode(msgspec.structs.replace(node, children=())) for node in (a, b)]
    return type(a) is type(b) and len(a.children) == len(b.children) and bare[0] == bare[1]


def _merge_ranks(a: PerRankNode, b: PerRankNode) -> PerRankNode:
    """Joins the groups of ranks of two nodes; equal groups become one."""
    groups: dict[tuple[Runs, bytes], Structure] = {}
    for node in (a, b):
        for ranks, child in zip(node.ranks, node.children, strict=True):
            groups.setdefault((ranks, msgspec.json.encode(child)), child)
    return PerRankNode(tuple(ranks for ranks, _ in groups), tuple(groups.values()))


def _node_name(node: Structure) -> str:
    if node is None:
        return "a leaf"
    if isinstance(node, TensorNode):
        return f"a tensor of {node.cls}, shape {node.shape}, context {msgspec.json.encode(node.context).decode():.80}"
    if isinstance(node, TableNode):
        return f"a keyed table with {node.table.buckets} buckets of {node.table.function}"
    return f"{type(node).__struct_config__.tag} of {len(node.children)}"


def with_ranks(structure: Structure, ranks: Runs) -> Structure:
    """Returns the structure if all of `ranks` have the same one: each `PerRank` node gets these ranks."""
    if structure is None:
        return None
    children = list(structure.children)
    for position, child in enumerate(children):
        # nodes of leaves only do not change, and are the most common ones: no call for them
        if isinstance(child, PerRankNode) or (child is not None and child.children.count(None) < len(child.children)):
            children[position] = with_ranks(child, ranks)
    if isinstance(structure, PerRankNode):
        return PerRankNode((ranks,), tuple(children))
    # most trees hold no `PerRank`, and then no node is replaced
    same = all(child is old for child, old in zip(children, structure.children, strict=True))
    return structure if same else msgspec.structs.replace(structure, children=tuple(children))
