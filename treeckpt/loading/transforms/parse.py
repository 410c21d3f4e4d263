"""Rules as text: the statements that configurations hold, `a, b -> c, axis=0`.

    statement  = names "->" names { "," option }        one a line, or separated by ";"; "#" begins a comment
    names      = name { "," name }
    name       = path of letters, digits, `._-/~`, with `*`, `$LAYER`, `${LAYER+4}`, `[2:5]` or a final `^T`; or `_`
    option     = "axis=" integer | "permute=" order | "dtype=" dtype | "src_dtype=" dtype | "optional"
               | "fused_qkv" | "fused_qkv_old" | "fused_ffn" | "num_heads=" n | "num_key_value_groups=" n | "shards=" n

`a -> b` renames, `a -> _` drops, `_ -> b` keeps what is there, `a -> b, c, axis=0` splits and `a, b -> c, axis=0`
joins. `a^T -> b` transposes, `permute="[1,0]"` permutes (`[]` reverses), `dtype="float16"` casts. `w[0:3]` stands for
`w_0, w_1, w_2`; on the left a `$E` or `*` that is not on the right stands for all the numbers there are, in order.
`$LAYER_ID_OFFSET` is a number that is one less on the right. The fused ones split or join, by the number of names:
`fused_qkv` with queries, keys and values of one group after the other, `fused_qkv_old` and `fused_ffn` with all of them
once for each of `shards`. Their axis is 1 by default; all others have to say it. An option that a statement has no use
for is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...errors import FormatError
from .reshape_rules import Cast, Concat, Permute, Split
from .rules import Carried, Drop, Keep, Rename, Rule

__all__ = ["parse"]

_FLAGS = ("fused_qkv", "fused_qkv_old", "fused_ffn", "optional")
_NUMBERS = ("axis", "num_heads", "num_key_value_groups", "shards")
_TEXTS = ("permute", "dtype", "src_dtype", "dst_dtype", "transpose")
_NAME = re.compile(r"(?:[\w.~/*:-]|\$\{[^{}]*\}|\$[A-Z][A-Z0-9_]*)+(?:\[[0-9]+:[0-9]+\])?(?:\^T)?")
_SEPARATOR = re.compile(r""",(?=(?:[^"']|"[^"]*"|'[^']*')*$)(?![^\[]*\])""")


class _Statement:
    """One statement, taken apart."""

    def __init__(self, text: str, prefix: str) -> None:
        self.text = text
        left, arrow, right = text.partition("->")
        if not arrow or "->" in right:
            raise self.fault("one `->`", "none" if not arrow else "several")
        self.options: dict[str, str] = {}
        self.used: set[str] = set()
        self.left = self._names(left, prefix)
        self.right = self._names(right, prefix)
        if not self.left or not self.right:
            raise self.fault("names on both sides of `->`", "none")
        self.transposed = [name.endswith("^T") for name in self.left]
        self.left = [name.removesuffix("^T") for name in self.left]
        if any(name.endswith("^T") for name in self.right):
            raise self.fault("`^T` on the left", "on the right")
        self._offset()

    def _names(self, text: str, prefix: str) -> list[str]:
        names: list[str] = []
        for item in (part.strip() for part in _SEPARATOR.split(text)):
            key, equals, value = (word.strip() for word in item.partition("="))
            if key in _FLAGS and not equals:
                self.options[key] = ""
            elif equals and key in (*_NUMBERS, *_TEXTS):
                self.options[key] = value.strip("\"'")
            elif not equals and _NAME.fullmatch(item):
                names += _listed(item if item == "_" else prefix + item)
            elif item:
                raise self.fault("a name or an option", item)
        return names

    def _offset(self) -> None:
        """`$LAYER_ID_OFFSET` is one number less on the right."""
        word = "$LAYER_ID_OFFSET"
        self.right = [name.replace(word, "${LAYER_ID_OFFSET - 1}") for name in self.right]

    def has(self, *flags: str) -> bool:
        """Whether one of these is said."""
        self.used.update(flags)
        return not self.options.keys().isdisjoint(flags)

    def option(self, *keys: str) -> str | None:
        """An option, by any of its names."""
        self.used.update(keys)
        return next((self.options[key] for key in keys if key in self.options), None)

    def check_used(self) -> None:
        """Refuses options that change nothing: somebody meant something by them."""
        for key in self.options.keys() - self.used:
            raise self.fault("options that go with such a statement", key)

    def number(self, key: str, default: int | None = None) -> int:
        """An option that is a number."""
        text = self.option(key)
        if text is None and default is not None:
            return default
        if text is None or not re.fullmatch(r"-?[0-9]+", text):
            raise self.fault(f"{key}=a number", "none" if text is None else text)
        return int(text)

    def order(self, text: str) -> tuple[int, ...] | None:
        """A permutation; None for the reverse order."""
        if not re.fullmatch(r"\[[0-9, ]*\]", text):
            raise self.fault('permute="[1, 0]"', text)
        return tuple(map(int, re.findall("[0-9]+", text))) or None

    def fault(self, expected: str, found: str) -> FormatError:
        return FormatError(self.text[:200], expected=expected, found=found[:200], hint="See treeckpt.rules.parse")


def _listed(name: str) -> list[str]:
    """`w[0:3]` as w_0, w_1 and w_2."""
    found = re.fullmatch(r"(.*)\[([0-9]+):([0-9]+)\](\^T)?", name)
    if found is None:
        return [name]
    return [f"{found[1]}_{i}{found[4] or ''}" for i in range(int(found[2]), int(found[3]))]


def parse(text: str, *, prefix: str = "", carried: bool = False) -> tuple[Rule, ...]:
    """The rules of statements; the module's docstring has the grammar.

    Args:
        text: statements, one a line.
        prefix: put before every name, as `model/` for the names of a module.
        carried: optimizers' state follows, as by `treeckpt.rules.Carried`.

    Raises:
        FormatError: a statement that says something else.
    """
    lines = (line.partition("#")[0] for line in text.splitlines())
    rules: list[Rule] = []
    for text in (one.strip() for line in lines for one in line.split(";") if one.strip()):
        one = _Statement(text, prefix)
        rules += _rules_of(one)
        one.check_used()
    return (Carried(tuple(rules)),) if carried and rules else tuple(rules)


def _rules_of(one: _Statement) -> list[Rule]:
    optional = one.has("optional")
    if one.right == ["_"]:
        return [Drop(name, optional=optional) for name in one.left]
    if one.left == ["_"]:
        return [Keep(name) for name in one.right]
    if "_" in one.left:
        raise one.fault("`_` alone on its side, or among what a split gives", "`_` among names")
    stars = len(one.left) == 1 and "*" in one.left[0] and "*" not in one.right[0]
    left = [one.left[0].replace("*", "$EACH")] if stars else one.left
    before = _changes(one, left, optional)
    many = len(left) > 1 or stars or (len(one.right) == 1 and bool(_own(left[0], one.right[0])))
    if one.has("fused_qkv", "fused_qkv_old", "fused_ffn"):
        return [*before, _fused(one, left, one.right, optional)]
    if many and len(one.right) > 1:
        raise one.fault("one name on the left or on the right", f"{len(left)} and {len(one.right)}")
    if many:
        return [*before, Concat(tuple(left), one.right[0], one.number("axis"), optional=optional)]
    if len(one.right) > 1:
        return [*before, Split(left[0], tuple(one.right), one.number("axis"), optional=optional)]
    return [*before, *([Rename(left[0], one.right[0], optional=optional)] if left != one.right else [])]


def _own(left: str, right: str) -> set[str]:
    """Numbers that only the left has."""
    names = re.compile(r"\$\{?\s*([A-Z][A-Z0-9_]*)")
    return set(names.findall(left)) - set(names.findall(right))


def _changes(one: _Statement, left: Sequence[str], optional: bool) -> list[Rule]:
    """Changes of order and dtype, of what stands on the left."""
    found: list[Rule] = [
        Permute(n, optional=optional) for n, turned in zip(left, one.transposed, strict=True) if turned
    ]
    order = one.option("permute", "transpose")
    if order is not None:
        found += [Permute(name, one.order(order), optional=optional) for name in left]
    dtype = one.option("dtype", "dst_dtype")
    if dtype is not None:
        before = one.option("src_dtype")
        found += [Cast(name, dtype, before, optional=optional) for name in left]
    return found


def _fused(one: _Statement, left: Sequence[str], right: Sequence[str], optional: bool) -> Rule:
    axis, shards = one.number("axis", 1), one.number("shards", 1)
    parts = 2 if one.has("fused_ffn") else 3
    sizes: tuple[int, ...] | None = None
    groups = shards
    if parts == 3:
        heads, shared = one.number("num_heads"), one.number("num_key_value_groups")
        groups = shards if one.has("fused_qkv_old") else shared
        if min(heads, shared, groups) < 1 or heads % groups or shared % groups:
            raise one.fault(f"heads that {groups} groups can share", f"{heads} and {shared}")
        sizes = (heads // groups, shared // groups, shared // groups)
    if len(left) == 1 and len(right) == parts:
        return Split(left[0], tuple(right), axis, sizes, groups, optional=optional)
    if len(left) == parts and len(right) == 1:
        return Concat(tuple(left), right[0], axis, groups, optional=optional)
    raise one.fault(f"1 name and {parts} names", f"{len(left)} and {len(right)}")
