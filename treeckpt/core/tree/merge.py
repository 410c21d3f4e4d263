"""The structures of ranks' trees together: each may hold a part of one tree, and what is its own alone."""

from __future__ import annotations

import msgspec

from ...errors import MismatchError
from ..sharding.int_runs import Runs
from .nesting import fold
from .recursion import Walk, run
from .structure import DefaultDictNode, DictNode, Node, OrderedDictNode, PerRankNode, Structure, key_text, keys_of

__all__ = ["merge", "widen_ranks"]

_Mapping = DictNode | OrderedDictNode | DefaultDictNode


def merge(a: Structure, b: Structure) -> Structure:
    """The structure of two ranks' trees together: pipeline stages hold parts of one tree.

    Mappings are joined key by key; everything else must agree.

    Raises:
        MismatchError: naming the first place where the two contradict each other.
    """
    return run(_merge(a, b, ""))


def _merge(a: Structure, b: Structure, path: str) -> Walk[Structure]:
    if a is None and b is None:
        return None
    if isinstance(a, PerRankNode) and isinstance(b, PerRankNode):
        return _merge_ranks(a, b)
    if isinstance(a, _Mapping) and isinstance(b, _Mapping) and type(a) is type(b):
        return (yield _merge_mappings(a, b, path))
    if a is None or b is None or not _same_node(a, b):
        raise MismatchError(
            path,
            expected=f"the same kind of node on every rank: {_node_name(a)}",
            found=_node_name(b),
            hint="Ranks may hold different keys of a dict; wrap what differs otherwise in PerRank",
        )
    keys = keys_of(a, path)
    merged: list[Structure] = []
    for key, x, y in zip(keys, a.children, b.children, strict=True):
        merged.append(x if x is None and y is None else (yield _merge(x, y, _below(path, key))))
    return msgspec.structs.replace(a, children=tuple(merged))


def _merge_mappings(a: _Mapping, b: _Mapping, path: str) -> Walk[Node]:
    if isinstance(a, DefaultDictNode) and isinstance(b, DefaultDictNode) and a.factory != b.factory:
        raise MismatchError(path, expected=f"the same default_factory on every rank: {a.factory}", found=f"{b.factory}")
    # by text: the keys 1 and True are equal, and not the same
    mine = {key_text(key, path): key for key in keys_of(a, path)}
    theirs = dict(zip((key_text(key, path) for key in keys_of(b, path)), b.children, strict=True))
    children = list(a.children)
    for at, (text, key) in enumerate(mine.items()):
        if text in theirs:
            children[at] = yield _merge(children[at], theirs[text], _below(path, key))
    more = [(k, c) for k, (text, c) in zip(b.keys, theirs.items(), strict=True) if text not in mine]
    keys, added = [key for key, _ in more], [child for _, child in more]
    return msgspec.structs.replace(a, keys=(*a.keys, *keys), children=(*children, *added))


def _same_node(a: Node, b: Node) -> bool:
    """Whether two nodes differ in nothing but what is below them."""
    return type(a) is type(b) and len(a.children) == len(b.children) and _bare(a) == _bare(b)


def _bare(node: Node) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(node, children=()))


def _below(path: str, key: object) -> str:
    text = key_text(key, path)
    return f"{path}/{text}" if path else text


def _merge_ranks(a: PerRankNode, b: PerRankNode) -> PerRankNode:
    """Groups of ranks side by side; the same group met again counts once."""
    groups: dict[tuple[Runs, bytes], Structure] = {}
    for node in (a, b):
        for ranks, child in zip(node.ranks, node.children, strict=True):
            groups.setdefault((ranks, msgspec.json.encode(fold(child))), child)
    return PerRankNode(tuple(ranks for ranks, _ in groups), tuple(groups.values()))


def _node_name(node: Structure) -> str:
    if node is None:
        return "a leaf"
    return f"{type(node).__struct_config__.tag} of {len(node.children)}"


def widen_ranks(structure: Structure, ranks: Runs) -> Structure:
    """The structure when all of `ranks` have the same: each `PerRank` stands for all of them."""

    def widen(node: Structure) -> Walk[Structure]:
        if node is None:
            return None
        children, same = list(node.children), not isinstance(node, PerRankNode)
        for at, child in enumerate(children):
            # nodes of leaves alone stay, and are nearly all there is: spared a call
            if child is not None and (
                isinstance(child, PerRankNode) or child.children.count(None) < len(child.children)
            ):
                children[at] = yield widen(child)
                same = same and children[at] is child
        if isinstance(node, PerRankNode):
            return PerRankNode((ranks,), tuple(children))
        # most trees hold no `PerRank`, and then nothing is made anew
        return node if same else msgspec.structs.replace(node, children=tuple(children))

    return run(widen(structure))
