"""Load rules: renames, splits, joins and casts that are applied to saved leaves before they are matched with `like`.

    rules = [
        tc.rules.Rename("model/h.$L.*", "model/layers.$L.*"),
        tc.rules.split_qkv("model/layers.$L.qkv", ("model/layers.$L.q", "model/layers.$L.k", "model/layers.$L.v"),
                           heads=32, kv_heads=8),
    ]
    tc.load(path, like, transforms=rules)

Rules are plain frozen data that can be compared, printed and stored as JSON (`encode`, `decode`). They are applied to
names and shapes; a load then reads only the bytes that it needs of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import msgspec

from .._core.format.decoding import decode_json
from .._core.format.records import Index
from .._core.public_names import publish
from .._core.tree.paths import as_path
from .._core.tree.spec import ArraySpec
from ..errors import FormatError, TreeckptError
from ._apply_rules import inverse as _inverse
from ._parse import parse
from ._rules import (
    Carried,
    Cast,
    Concat,
    Copy,
    Dequantize,
    Drop,
    Fill,
    Keep,
    Permute,
    Rename,
    Renames,
    Rule,
    Slice,
    Split,
    Stack,
    Unstack,
)

__all__ = [
    "Carried",
    "Cast",
    "Concat",
    "Copy",
    "Dequantize",
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
    "rotary_halves",
    "rotary_pairs",
    "split_ffn",
    "split_qkv",
]
publish(__name__, __all__, globals())


Renaming = Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None
"""Pairs of a pattern and a new name, each a text, or a path as keys or an accessor of optree."""
Transforms = Rule | str | Mapping[str, Any] | Iterable[Rule | str | Mapping[str, Any]] | None
"""Rules, or statements in the syntax of `parse`, or configurations of Paddle."""


def carried(*rules: Rule) -> Carried:
    """Returns rules for `model/...` that are also applied to the optimizers' state; see `Carried`.

    >>> tc.rules.carried(tc.rules.Rename("model/old.*", "model/*")).rules[0].target
    'model/*'
    """
    return Carried(rules)


def split_qkv(
    source: str, into: tuple[str, str, str], *, heads: int, kv_heads: int | None = None, axis: int = 0, groups: int = 0
) -> Split:
    """Returns the rule that splits a fused attention projection into queries, keys and values.

    >>> tc.rules.split_qkv("qkv", ("q", "k", "v"), heads=32, kv_heads=8).sizes
    (4, 1, 1)

    Args:
        heads: number of query heads.
        kv_heads: number of key and value heads; None means `heads`.
        axis: the axis of the heads: 0 for a bias and for a weight in torch's layout ([out, in]).
        groups: number of (queries, keys, values) blocks along the axis. The default is one block for each key-value
            head, with the query heads that share it; 1 means all queries, then all keys, then all values; n means that
            layout once for each of n tensor-parallel ranks.

    Raises:
        TreeckptError: the heads are not divisible by the groups.
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
    """Returns the rule that joins queries, keys and values into one projection; the inverse of `split_qkv`.

    >>> tc.rules.fuse_qkv(("q", "k", "v"), "qkv", heads=32, kv_heads=8).groups
    8
    """
    _heads(heads, kv_heads, groups)
    return Concat(sources, target, axis, groups or kv_heads or heads)


def _heads(heads: int, kv_heads: int | None, groups: int) -> tuple[int, int, int]:
    """Returns the number of query, key and value heads in one group."""
    _check_counts(heads=heads, kv_heads=kv_heads or 0, groups=groups)
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
    """Returns the rule that splits a fused gate and up projection.

    >>> tc.rules.split_ffn("ffn", ("gate", "up")).into
    ('gate', 'up')

    Args:
        groups: number of (gate, up) blocks along the axis: 1, or one for each rank of a tensor-parallel group.
    """
    return Split(source, into, axis, None, groups)


def fuse_ffn(sources: tuple[str, str], target: str, *, axis: int = 0, groups: int = 1) -> Concat:
    """Returns the rule that joins gate and up projections; the inverse of `split_ffn`.

    >>> tc.rules.fuse_ffn(("gate", "up"), "ffn").sources
    ('gate', 'up')
    """
    return Concat(sources, target, axis, groups)


def rotary_halves(
    source: str, target: str, *, heads: int, head_dim: int, axis: int = 0, optional: bool = False
) -> tuple[Split, Concat]:
    """Returns the rules that reorder each head of a query or key projection for rotary embeddings by halves.

    Llama's own checkpoints rotate the pairs (0, 1), (2, 3) ... of a head; transformers rotates (0, d/2), (1, d/2 + 1)
    ..., so it stores the even rows of each head before the odd ones:

        tc.rules.rotary_halves("layers.$L.attention.wk.weight", "model.layers.$L.self_attn.k_proj.weight",
                               heads=config.num_key_value_heads, head_dim=config.head_dim)

    >>> [type(rule).__name__ for rule in tc.rules.rotary_halves("wk", "k_proj", heads=8, head_dim=64)]
    ['Split', 'Concat']

    Args:
        heads: number of heads of this projection; of keys, those of keys.
        head_dim: length of one head along the axis.
        axis: the axis of the heads: 0 for a weight in torch's layout ([out, in]) and for a bias.
    """
    parts = (f"{target}.even", f"{target}.odd")
    split = Split(source, parts, axis, groups=_pairs_in(heads, head_dim), optional=optional)
    return split, Concat(parts, target, axis, heads, optional=optional)


def rotary_pairs(
    source: str, target: str, *, heads: int, head_dim: int, axis: int = 0, optional: bool = False
) -> tuple[Split, Concat]:
    """Returns the rules that undo `rotary_halves`: from transformers' order to that of Llama's own checkpoints.

    >>> [type(rule).__name__ for rule in tc.rules.rotary_pairs("k_proj", "wk", heads=8, head_dim=64)]
    ['Split', 'Concat']
    """
    parts = (f"{target}.even", f"{target}.odd")
    split = Split(source, parts, axis, groups=heads, optional=optional)
    return split, Concat(parts, target, axis, _pairs_in(heads, head_dim), optional=optional)


def _check_counts(**counts: object) -> None:
    for name, count in counts.items():
        if not isinstance(count, Integral):
            raise TreeckptError(name, expected="an integer", found=f"{count!r:.80}")


def _pairs_in(heads: int, head_dim: int) -> int:
    _check_counts(heads=heads, head_dim=head_dim)
    if heads < 1 or head_dim < 2 or head_dim % 2:
        raise TreeckptError("heads", expected="heads of an even length", found=f"{heads} heads of {head_dim}")
    return heads * head_dim // 2


def inverse(rules: Transforms, leaves: Index | Mapping[str, ArraySpec | None]) -> tuple[Rule, ...]:
    """Returns rules that undo `rules`; they are written out for the names and shapes of these leaves.

    >>> tc.rules.inverse(tc.rules.Rename("model/weight", "w"), tc.inspect("run/step_00000100"))
    (Renames(...),)

    Args:
        leaves: an index, as `treeckpt.inspect` returns it, or specs by path.

    Raises:
        MismatchError: a rule loses data (drop, slice, a cast to a narrower dtype) or cannot be applied.
    """
    if isinstance(leaves, Index):
        specs = ((leaf.path, leaf.spec) for leaf in leaves.entries)
        leaves = {path: spec if isinstance(spec, ArraySpec) else None for path, spec in specs}
    return _inverse(as_rules(None, rules), leaves)


def encode(rules: Sequence[Rule]) -> bytes:
    """Encodes rules as JSON: a list of objects, each with its kind in the field `rule`.

    >>> tc.rules.encode([tc.rules.Rename("a", "b")])
    b'[{"rule":"rename","source":"a","target":"b"}]'
    """
    return msgspec.json.encode(rules)


def decode(data: bytes | str) -> tuple[Rule, ...]:
    """Decodes what `encode` wrote. A string in the place of an object is a statement, as for `parse`.

    >>> tc.rules.decode('["a -> b"]')
    (Rename(source='a', target='b', optional=False),)

    A configuration of Paddle may stand there too, or in place of the list.

    Raises:
        FormatError: an unknown kind of rule or field, or a missing field.
    """
    rules: list[Rule] = []
    try:
        single = data.lstrip()[:1] in ("{", b"{")
        for raw in [msgspec.Raw(data)] if single else msgspec.json.decode(data, type=list[msgspec.Raw]):
            one = msgspec.json.decode(raw)
            if isinstance(one, str) or (isinstance(one, dict) and "aoa_statements" in one):
                rules += parse(one)
            else:
                rules.append(decode_json(raw, Rule))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError("rules", expected="a list of rules", found=f"{error}"[:200]) from error
    return tuple(rules)


def _pairs(rename: Any) -> tuple[tuple[str, str], ...]:
    """Returns (pattern, new name) pairs from a mapping or an iterable of pairs; refuses all else."""
    invalid = TreeckptError(
        "rename",
        expected='patterns and new names, as {"h.$L.*": "layers.$L.*"}, or pairs of these',
        found=f"{rename!r:.80}",
        hint="A function can be called beforehand, for each path of treeckpt.inspect(path).by_path",
    )
    try:
        given: list[Any] = list(rename.items() if isinstance(rename, Mapping) else rename)
        pairs = tuple((_name_of(before), _name_of(now)) for before, now in given)
    except (TypeError, ValueError) as error:
        raise invalid from error
    if any(isinstance(pair, str) for pair in given) or any(type(name) is not str for pair in pairs for name in pair):
        raise invalid
    return pairs


def _name_of(given: Any) -> Any:
    """Returns a pattern or a name: of an accessor of optree, or keys in a tuple, the path as text."""
    return as_path(given, "rename") if isinstance(given, tuple) else given


def as_rules(rename: Renaming, transforms: Transforms) -> tuple[Rule, ...]:
    """Returns the rules for the `rename` and `transforms` of a load: renames first, all at once; texts are parsed.

    >>> len(tc.rules.as_rules({"a": "b"}, ["c -> d", tc.rules.Drop("e")]))
    3

    Raises:
        TreeckptError: an element is neither a rule nor a text.
    """
    rules: list[Rule] = []
    if rename is not None and (pairs := _pairs(rename)):
        rules.append(Renames(pairs))
    single = isinstance(transforms, (str, Rule, Mapping))
    given: Any = () if transforms is None else [transforms] if single else transforms
    for transform in given if isinstance(given, Iterable) else [given]:
        if isinstance(transform, (str, Mapping)):
            rules += parse(transform)
        elif isinstance(transform, Rule):
            rules.append(transform)
        else:
            raise TreeckptError(
                "transforms",
                expected="rules of treeckpt.rules, statements, or a dict of Paddle with aoa_statements",
                found=f"{transform!r:.80}",
            )
    return tuple(rules)
