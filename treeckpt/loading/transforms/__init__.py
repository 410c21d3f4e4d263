"""Load rules: what becomes of saved leaves before they are wanted.

    rules = [
        tc.rules.Rename("model/h.$L.*", "model/layers.$L.*"),
        tc.rules.split_qkv("model/layers.$L.qkv", ("model/layers.$L.q", "model/layers.$L.k", "model/layers.$L.v"),
                           heads=32, kv_heads=8),
    ]
    tc.load(path, like, transforms=rules)

Rules are plain frozen data: they compare, print, and become JSON (`encode`, `decode`). They are applied to names and
shapes; a load then reads the bytes that it wants of the result, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.format.records import Index
from ...core.tree.spec import ArraySpec
from ...errors import TreeckptError
from .apply_rules import inverse as _inverse
from .parse import parse
from .reshape_rules import Cast, Concat, Permute, Slice, Split, Stack, Unstack
from .rules import Carried, Copy, Drop, Fill, Keep, Rename, Renames, Rule, decode_rules, encode_rules

__all__ = [
    "Carried",
    "Cast",
    "Concat",
    "Copy",
    "Drop",
    "Fill",
    "Keep",
    "Permute",
    "Rename",
    "Renames",
    "Rule",
    "Slice",
    "Split",
    "Stack",
    "Unstack",
    "as_rules",
    "carried",
    "decode",
    "encode",
    "fuse_ffn",
    "fuse_qkv",
    "inverse",
    "parse",
    "split_ffn",
    "split_qkv",
]


Renaming = Mapping[str, str] | Iterable[tuple[str, str]] | None
"""Patterns and new names."""
Transforms = Rule | str | Iterable[Rule | str] | None
"""Rules, or statements of `parse`."""


def carried(*rules: Rule) -> Carried:
    """Rules for `model/...` that the optimizers' state of the same training state follows; see `Carried`."""
    return Carried(rules)


def split_qkv(
    source: str, into: tuple[str, str, str], *, heads: int, kv_heads: int | None = None, axis: int = 0, groups: int = 0
) -> Split:
    """A fused projection of attention, split into queries, keys and values.

    Args:
        heads: of queries.
        kv_heads: of keys and values; None for as many.
        axis: of the heads: 0 for a weight as torch has it ([out, in]), and for a bias.
        groups: how often queries, keys and values follow each other along the axis. By default once for every head of
            keys and values, each with the queries that share it; 1 where all queries come first, then all keys and all
            values; n where n ranks of a tensor-parallel group had that each for itself.

    Raises:
        TreeckptError: heads that the groups cannot share.
    """
    return Split(source, into, axis, _heads(heads, kv_heads, groups), groups or kv_heads or heads)


def fuse_qkv(
    sources: tuple[str, str, str],
    target: str,
    *,
    heads: int,
    kv_heads: int | None = None,
    axis: int = 0,
    groups: int = 0,
) -> Concat:
    """Queries, keys and values, fused into one projection; the inverse of `split_qkv`."""
    _heads(heads, kv_heads, groups)
    return Concat(sources, target, axis, groups or kv_heads or heads)


def _heads(heads: int, kv_heads: int | None, groups: int) -> tuple[int, int, int]:
    """Heads of queries, keys and values in one group."""
    shared = kv_heads or heads
    count = groups or shared
    if heads < 1 or shared < 1 or heads % count or shared % count:
        raise TreeckptError(
            "heads",
            expected=f"heads that {count} groups can share",
            found=f"{heads} of queries, {shared} of keys and values",
            hint="Pass groups=1 where all queries come first, then all keys, then all values",
        )
    return heads // count, shared // count, shared // count


def split_ffn(source: str, into: tuple[str, str], *, axis: int = 0, groups: int = 1) -> Split:
    """A fused gate and up projection, split.

    Args:
        groups: how often gate and up follow each other: once, or once for each rank of a tensor-parallel group.
    """
    return Split(source, into, axis, None, groups)


def fuse_ffn(sources: tuple[str, str], target: str, *, axis: int = 0, groups: int = 1) -> Concat:
    """Gate and up projections, fused; the inverse of `split_ffn`."""
    return Concat(sources, target, axis, groups)


def inverse(rules: Transforms, leaves: Index | Mapping[str, ArraySpec | None]) -> tuple[Rule, ...]:
    """Rules that undo `rules` where they are applied to these leaves, in names and shapes written out.

    Args:
        leaves: an index, as of `treeckpt.inspect`, or specs by path.

    Raises:
        MismatchError: a rule that loses something (drop, slice, a cast to a narrower dtype) or cannot be applied.
    """
    if isinstance(leaves, Index):
        specs = ((leaf.path, leaf.spec) for leaf in leaves.entries)
        leaves = {path: spec if isinstance(spec, ArraySpec) else None for path, spec in specs}
    return _inverse(as_rules(None, rules), leaves)


def encode(rules: Sequence[Rule]) -> bytes:
    """Rules as JSON: a list of objects, each with its kind as `rule`."""
    return encode_rules(rules)


def decode(data: bytes | str) -> tuple[Rule, ...]:
    """The inverse of `encode`. A string in the place of an object is a statement, as for `parse`.

    Raises:
        FormatError: an unknown kind of rule or field, or one that is missing.
    """
    try:
        found: Any = json.loads(data)
    except ValueError:
        found = None  # decode_rules says what is wrong
    if not isinstance(found, list):
        return decode_rules(data)
    made: list[Rule] = []
    for one in found:
        made += parse(one) if isinstance(one, str) else decode_rules(json.dumps([one]))
    return tuple(made)


def _pairs(rename: Any) -> tuple[tuple[str, str], ...]:
    """Patterns and new names.

    Raises:
        TreeckptError: anything else.
    """
    odd = TreeckptError(
        "rename",
        expected='patterns and new names, as {"h.$L.*": "layers.$L.*"}, or pairs of these',
        found=f"{rename!r:.80}",
        hint="A function can be called beforehand, for each path of treeckpt.inspect(path).by_path",
    )
    try:
        given: list[Any] = list(rename.items() if isinstance(rename, Mapping) else rename)
        pairs = tuple((before, now) for before, now in given)
    except (TypeError, ValueError) as error:
        raise odd from error
    if any(isinstance(pair, str) for pair in given) or any(type(name) is not str for pair in pairs for name in pair):
        raise odd
    return pairs


def as_rules(rename: Renaming, transforms: Transforms) -> tuple[Rule, ...]:
    """The rules of a load's `rename` and `transforms`: renames first, all at once; texts are parsed.

    Raises:
        TreeckptError: something else among them.
    """
    found: list[Rule] = []
    if rename is not None and (pairs := _pairs(rename)):
        found.append(Renames(pairs))
    given: Any = () if transforms is None else [transforms] if isinstance(transforms, (str, Rule)) else transforms
    for one in given:
        if isinstance(one, str):
            found += parse(one)
        elif isinstance(one, Rule):
            found.append(one)
        else:
            raise TreeckptError("transforms", expected="rules of treeckpt.rules, or statements", found=f"{one!r:.80}")
    return tuple(found)
