"""Parser of rules in text form: statements as configurations contain them, `a, b -> c, axis=0`.

    statement  = names "->" names { "," option }        one a line, or separated by ";"; "#" begins a comment
    names      = name { "," name }
    name       = path of letters, digits, `._-/~`, with `*`, `$LAYER`, `${LAYER+4}`, `[2:5]` or a final `^T`; or `_`
    option     = "axis=" integer | "permute=" order | "dtype=" dtype | "src_dtype=" dtype | "optional"
               | "dequantize" | "block=" order
               | "fused_qkv" | "fused_qkv_old" | "fused_ffn" | "num_heads=" n | "num_key_value_groups=" n | "shards=" n

`a -> b` renames, `a -> _` drops, `_ -> b` keeps the target's value, `a -> b, c, axis=0` splits, `a, b -> c, axis=0`
joins. `a^T -> b` transposes, `permute="[1,0]"` permutes (`[]` reverses), `dtype="float16"` casts. `w[0:3]` stands for
`w_0, w_1, w_2`; a `$E` or `*` that is only on the left stands for all numbers that exist, in order. `$LAYER_ID_OFFSET`
is a number that is one less on the right. `a, a_scale -> a, dequantize, block="[128,128]"` multiplies by scales, into
float32 without `dtype=`. The fused options split or join, depending on the number of names:
`fused_qkv` with queries, keys and values group by group, `fused_qkv_old` and `fused_ffn` with all of them once for each
of `shards`. Their axis is 1 by default; all other statements must give it. An option that a statement does not use is
an error.

Paddle's configurations, `{"aoa_statements": [...]}`, are taken as Paddle applies them: a name that several statements
take is there for each of them, and with `"aoa_config_reverse": True` each statement is undone, the last one first.
`fused_qkv_old` and `fused_ffn` then need `shards=`, which Paddle finds in its metadata. A checkpoint says nothing of
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import FormatError
from ._patterns import numbers_in
from ._rules import Carried, Cast, Concat, Copy, Dequantize, Drop, Keep, Permute, Rename, Rule, Split

_FLAGS = ("fused_qkv", "fused_qkv_old", "fused_ffn", "dequantize", "optional")
_NUMBERS = ("axis", "num_heads", "num_key_value_groups", "shards")
_TEXTS = ("permute", "dtype", "src_dtype", "dst_dtype", "transpose", "block")
_NAME = re.compile(r"(?:[\w.~/*:-]|\$\{[^{}]*\}|\$[A-Z][A-Z0-9_]*)+(?:\[[0-9]+:[0-9]+\])?(?:\^T)?")
# commas outside of quotes and of brackets
_SEPARATOR = re.compile(r""",(?=(?:[^"']|"[^"]*"|'[^']*')*$)(?![^\[]*\])""")


class _Statement:
    """One statement, split into names and options.

    Args:
        undone: whether its rules undo it: `left` has the names behind the arrow then.
    """

    def __init__(self, text: str, prefix: str, *, undone: bool = False) -> None:
        self.text, self.undone = text, undone
        self.copied: list[str] = []
        """The names of `left` that are there for other statements too."""
        left, arrow, right = text.partition("->")
        if not arrow or "->" in right:
            raise self.error("one `->`", "none" if not arrow else "several")
        self.options: dict[str, str] = {}
        self.used: set[str] = set()
        self.left = self._names(left, prefix)
        self.right = self._names(right, prefix)
        if not self.left or not self.right:
            raise self.error("names on both sides of `->`", "none")
        self.transposed = [name.endswith("^T") for name in self.left]
        self.left = [name.removesuffix("^T") for name in self.left]
        if any(name.endswith("^T") for name in self.right):
            raise self.error("`^T` on the left", "on the right")
        if undone:
            self.left, self.right = self.right, self.left
        other = "${LAYER_ID_OFFSET + 1}" if undone else "${LAYER_ID_OFFSET - 1}"
        self.right = [name.replace("$LAYER_ID_OFFSET", other) for name in self.right]

    def _names(self, text: str, prefix: str) -> list[str]:
        names: list[str] = []
        for item in (part.strip() for part in _SEPARATOR.split(text)):
            key, equals, value = (text.strip() for text in item.partition("="))
            if key in _FLAGS and not equals:
                self.options[key] = ""
            elif equals and key in (*_NUMBERS, *_TEXTS):
                self.options[key] = value.strip("\"'")
            elif not equals and _NAME.fullmatch(item):
                names += _expand_range(item if item == "_" else prefix + item)
            elif item:
                raise self.error("a name or an option", item)
        return names

    def has(self, *flags: str) -> bool:
        """Whether the statement has one of these flags."""
        self.used.update(flags)
        return not self.options.keys().isdisjoint(flags)

    def option(self, *keys: str) -> str | None:
        """Returns the value of an option, by any of its names."""
        self.used.update(keys)
        return next((self.options[key] for key in keys if key in self.options), None)

    def check_used(self) -> None:
        """Raises for options that had no effect, because the author expected one."""
        for key in self.options.keys() - self.used:
            raise self.error("options that go with such a statement", key)

    def number(self, key: str, default: int | None = None) -> int:
        """Returns the value of an option that is an integer."""
        text = self.option(key)
        if text is None and default is not None:
            return default
        if text is None or not re.fullmatch(r"-?[0-9]+", text):
            raise self.error(f"{key}=a number", "none" if text is None else text)
        return int(text)

    def numbers(self, *keys: str) -> tuple[int, ...] | None:
        """Returns the value of an option that is a list of integers."""
        text = self.option(*keys)
        if text is not None and not re.fullmatch(r"\[[0-9, ]*\]", text):
            raise self.error(f'{keys[0]}="[1, 0]"', text)
        return None if text is None else tuple(map(int, re.findall("[0-9]+", text)))

    def error(self, expected: str, found: str) -> FormatError:
        """Returns an error that names the statement."""
        return FormatError(self.text[:200], expected=expected, found=found[:200], hint="See treeckpt.rules.parse")


def _expand_range(name: str) -> list[str]:
    """Expands `w[0:3]` to w_0, w_1 and w_2."""
    matched = re.fullmatch(r"(.*)\[([0-9]+):([0-9]+)\](\^T)?", name)
    if matched is None:
        return [name]
    return [f"{matched[1]}_{i}{matched[4] or ''}" for i in range(int(matched[2]), int(matched[3]))]


def parse(text: str | Mapping[str, Any], *, prefix: str = "", carried: bool = False) -> tuple[Rule, ...]:
    """Parses statements into rules; the module's docstring has the grammar.

    >>> tc.rules.parse("model/q, model/k -> model/qk, axis=0")
    (Concat(...),)
    >>> tc.rules.parse({"aoa_statements": ["q^T -> q", "k -> _"]}, prefix="model/")
    (Permute(...), Drop(...))

    Args:
        text: statements, one per line, or a configuration of Paddle, a dict with `aoa_statements`.
        prefix: is put before every name, as `model/` before the names of a module.
        carried: whether the optimizers' state follows, as with `treeckpt.rules.Carried`.

    Raises:
        FormatError: a statement does not follow the grammar.
    """
    rules: list[Rule] = []
    for statement in _aoa_statements(text, prefix) if isinstance(text, Mapping) else _statements([text], prefix):
        rules += _rules_of(statement)
        statement.check_used()
    return (Carried(tuple(rules)),) if carried and rules else tuple(rules)


def _statements(texts: Iterable[str], prefix: str, *, undone: bool = False) -> list[_Statement]:
    lines = (line.partition("#")[0] for text in texts for line in text.splitlines())
    parts = (part.strip() for line in lines for part in line.split(";"))
    return [_Statement(part, prefix, undone=undone) for part in parts if part]


_AOA = ("aoa_statements", "aoa_config_reverse")
"""The keys of a configuration of Paddle."""


def _aoa_statements(config: Mapping[str, Any], prefix: str) -> list[_Statement]:
    """Returns the statements of a configuration of Paddle, in the order in which they are applied."""
    texts, undone = config.get(_AOA[0]), config.get(_AOA[1], False)
    unknown, is_said = [key for key in config if key not in _AOA], undone in (None, True, False)
    if unknown or not is_said or not isinstance(texts, (list, tuple)) or any(not isinstance(t, str) for t in texts):
        raise FormatError(
            "transforms",
            expected='a dict of Paddle, {"aoa_statements": ["a -> b", ...]}, perhaps with "aoa_config_reverse": True',
            found=f"{dict(config)!r:.80}",
            hint=f"{unknown[0]!r} is none of its keys" if unknown else "See treeckpt.rules.parse",
        )
    statements = _statements(texts, prefix, undone=bool(undone))
    if undone:
        statements.reverse()
    stays = {name for each in statements if each.left == each.right for name in each.left}
    for number, statement in enumerate(statements):
        if statement.has("fused_qkv_old", "fused_ffn") and "shards" not in statement.options:
            expected = "shards=, in how many parts ranks held the fused array where it was saved, 1 for a whole one"
            raise statement.error(expected, "none")
        if len(statement.left) == len(statement.right) == 1:
            statement.used.add("axis")  # Paddle takes it where nothing is split or joined
        later = {name for each in statements[number + 1 :] for name in each.left}
        if statement.left != statement.right and statement.right != ["_"]:
            statement.copied = [name for name in statement.left if name != "_" and name in stays | later]
    return statements


def _rules_of(statement: _Statement) -> list[Rule]:
    optional = statement.has("optional")
    if statement.right == ["_"]:
        return [Drop(name, optional=optional) for name in statement.left]
    if statement.left == ["_"]:
        return [Keep(name) for name in statement.right]
    if "_" in statement.left:
        raise statement.error("`_` alone on its side, or among what a split gives", "`_` among names")
    if statement.has("dequantize"):
        if statement.undone:
            raise statement.error("statements that can be undone", "dequantize")
        return [_dequantized(statement, optional)]
    if "*" in "".join(statement.right) and "*" not in "".join(statement.left):
        raise statement.error("`*` on the side that is taken, or all names written out", "on the other side alone")
    copies: list[Rule] = [Copy(name, f"{name}.copied", optional=optional) for name in statement.copied]
    statement.left = [f"{name}.copied" if name in statement.copied else name for name in statement.left]
    # a `*` that is only on the left is a number of the sources, as `$EACH`
    stars = len(statement.left) == 1 and "*" in statement.left[0] and "*" not in statement.right[0]
    left = [statement.left[0].replace("*", "$EACH")] if stars else statement.left
    after = _layout_changes(statement, statement.right, optional) if statement.undone else []
    before = copies if statement.undone else [*copies, *_layout_changes(statement, left, optional)]
    return [*before, *_moves(statement, left, optional, stars=stars), *after]


def _moves(statement: _Statement, left: list[str], optional: bool, *, stars: bool) -> list[Rule]:
    """Returns the rule that splits, joins or renames."""
    many = (
        len(left) > 1
        or stars
        or (len(statement.right) == 1 and bool(numbers_in(left[0]) - numbers_in(statement.right[0])))
    )
    if statement.has("fused_qkv", "fused_qkv_old", "fused_ffn"):
        return [_fused(statement, left, statement.right, optional)]
    if many and len(statement.right) > 1:
        raise statement.error("one name on the left or on the right", f"{len(left)} and {len(statement.right)}")
    if many:
        return [Concat(tuple(left), statement.right[0], statement.number("axis"), optional=optional)]
    if len(statement.right) > 1:
        return [Split(left[0], tuple(statement.right), statement.number("axis"), optional=optional)]
    return [Rename(left[0], statement.right[0], optional=optional)] if left != statement.right else []


def _layout_changes(statement: _Statement, names: Sequence[str], optional: bool) -> list[Rule]:
    """Returns the permutations and casts of the names before the arrow, or what undoes them."""
    changes: list[Rule] = [
        Permute(n, optional=optional) for n, transposed in zip(names, statement.transposed, strict=True) if transposed
    ]
    order = statement.numbers("permute", "transpose")
    if order is not None:
        if statement.undone and sorted(order) == list(range(len(order))):
            order = tuple(order.index(dim) for dim in range(len(order)))
        changes += [Permute(name, order or None, optional=optional) for name in names]  # None is the reverse order
    before, after = statement.option("src_dtype"), statement.option("dtype", "dst_dtype")
    if statement.undone and after is not None and before is None:
        raise statement.error("src_dtype=, the dtype that is given back", "none")
    before, after = (after, before) if statement.undone else (before, after)
    if after is not None:
        changes += [Cast(name, after, before, optional=optional) for name in names]
    elif before is not None:
        raise statement.error("dtype=, with src_dtype=", "src_dtype")
    return changes


def _dequantized(statement: _Statement, optional: bool) -> Rule:
    names, dtype = statement.left, statement.option("dtype", "dst_dtype") or "float32"
    if len(names) != 2 or statement.right != names[:1] or any(statement.transposed):
        raise statement.error("`a, a_scale -> a, dequantize`", f"{', '.join(names)} -> {', '.join(statement.right)}")
    return Dequantize(names[0], names[1], statement.numbers("block"), dtype, optional=optional)


def _fused(statement: _Statement, left: Sequence[str], right: Sequence[str], optional: bool) -> Rule:
    axis, shards = statement.number("axis", 1), statement.number("shards", 1)
    parts = 2 if statement.has("fused_ffn") else 3
    sizes: tuple[int, ...] | None = None
    groups = shards
    if parts == 3:
        heads, shared = statement.number("num_heads"), statement.number("num_key_value_groups")
        groups = shards if statement.has("fused_qkv_old") else shared
        if min(heads, shared, groups) < 1 or heads % groups or shared % groups:
            raise statement.error(f"heads that {groups} groups can share", f"{heads} and {shared}")
        sizes = (heads // groups, shared // groups, shared // groups)
    if len(left) == 1 and len(right) == parts:
        return Split(left[0], tuple(right), axis, sizes, groups, optional=optional)
    if len(left) == parts and len(right) == 1:
        return Concat(tuple(left), right[0], axis, groups, optional=optional)
    raise statement.error(f"1 name and {parts} names", f"{len(left)} and {len(right)}")
