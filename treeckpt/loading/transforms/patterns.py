"""Which leaves does a rule mean, and what are they called after it? Patterns over paths, and new names made from them.

In a pattern `*` stands for any text and `$LAYER` (capitals) for a whole number, the same one wherever it stands again.
In a new name the k-th `*` is what the k-th `*` of the pattern stood for, `$LAYER` the number, and `${LAYER + 4}` what
comes of it: integers, names of numbers, `+ - * // %` and brackets. A pattern that ends before a `/` of a path means all
that lies below, which then keeps its place there; the new name "" is the root.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec

from ...errors import MismatchError

__all__ = ["Binding", "Pattern", "compile_pattern", "expand", "names_in", "numbers_of"]

Binding = tuple[tuple[str, int | str], ...]
"""What stands for what: numbers by name, texts by position (`*0`, `*1` ...), and what lies below (`/`)."""

_PART = re.compile(r"\*|\$\{[^{}]*\}|\$[A-Z][A-Z0-9_]*")
_NUMBER = "(0|[1-9][0-9]*)"
_BELOW = "/"
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


class Pattern(msgspec.Struct, frozen=True):
    """A pattern, ready to be compared."""

    text: str
    prefix: str
    """What every path begins with that it means."""
    regex: re.Pattern[str] | None
    """None for a literal, which means one path and what lies below it."""
    names: tuple[str, ...]
    """Of the groups of `regex`."""

    def match(self, path: str, *, below: bool = False) -> Binding | None:
        """What stands for what in a path; None if it is not meant.

        Args:
            below: takes paths below a meant one too.
        """
        if not path.startswith(self.prefix):
            return None
        if self.regex is None:
            tail = path[len(self.prefix) :]
            return (((_BELOW, tail),) if tail else ()) if not tail or (below and tail[0] == "/") else None
        if (found := self.regex.fullmatch(path)) is None:
            return None
        tail = found["below"]
        if tail and not below:
            return None
        groups = zip(self.names, found.groups(), strict=False)  # the last group is what lies below
        bound: dict[str, int | str] = {name: int(text) if name[0] != "*" else text for name, text in groups}
        if tail:
            bound[_BELOW] = tail
        return tuple(sorted(bound.items()))


@lru_cache(maxsize=1 << 16)
def compile_pattern(text: str) -> Pattern:
    """The pattern of a text.

    Raises:
        MismatchError: arithmetic, which only new names can have.
    """
    first = next(_PART.finditer(text), None)
    if first is None:
        return Pattern(text, text, None, ())
    source, names, at = "", list[str](), 0
    for part in _PART.finditer(text):
        source += re.escape(text[at : part.start()])
        at = part.end()
        token = part[0]
        if token == "*":
            names.append(f"*{sum(name[0] == '*' for name in names)}")
            source += "(.*)"
            continue
        name = token.strip("${} ")
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            raise MismatchError(
                text,
                expected="a pattern of names, `*` and `$LAYER`",
                found=token,
                hint="Let the pattern take the number as it stands, and compute in the new name",
            )
        if name in names:
            source += rf"\{names.index(name) + 1}"
        else:
            names.append(name)
            source += _NUMBER
    source += re.escape(text[at:])
    return Pattern(text, text[: first.start()], re.compile(source + "(?P<below>/.*)?", re.DOTALL), tuple(names))


def numbers_of(template: str) -> set[str]:
    """The numbers that a pattern or a new name has, by name."""
    found: set[str] = set()
    for part in _PART.findall(template):
        found |= set(re.findall(r"[A-Z][A-Z0-9_]*", part))
    return found


def names_in(pattern: Pattern) -> set[str]:
    """The numbers that a pattern binds."""
    return {name for name in pattern.names if name[0] != "*"}


def expand(template: str, binding: Binding) -> str:
    """The new name that a template gives under a binding.

    Raises:
        MismatchError: it needs what the pattern does not bind, or computes what is no whole number of at least 0.
    """
    if "*" not in template and "$" not in template and not binding:
        return template
    bound, stars = dict(binding), 0

    def put(part: re.Match[str]) -> str:
        nonlocal stars
        if part[0] == "*":
            stars += 1
            if f"*{stars - 1}" not in bound:
                raise MismatchError(
                    template,
                    expected=f"at most {stars - 1} `*` in the new name, as in the pattern",
                    found="more",
                    hint="Each `*` stands for what the one in the same place of the pattern stood for",
                )
            return str(bound[f"*{stars - 1}"])
        return str(_number(part[0].strip("${}"), template, bound))

    name, below = _PART.sub(put, template), str(bound.get(_BELOW, ""))
    return name + below if name else below.removeprefix("/")


def _number(text: str, template: str, bound: Mapping[str, int | str]) -> int:
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body, bound)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise MismatchError(template, expected="a number to compute", found=f"{text}: {error}") from error
    except KeyError as error:
        raise MismatchError(
            template,
            expected="numbers that the pattern binds",
            found=f"${error.args[0]}",
            hint="Write it where it stands in the pattern too",
        ) from error
    if value < 0:
        raise MismatchError(template, expected="a number of at least 0", found=f"{text} = {value}")
    return value


def _evaluate(node: ast.expr, bound: Mapping[str, int | str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(bound[node.id])
    if isinstance(node, ast.BinOp) and (act := _OPERATORS.get(type(node.op))) is not None:
        return act(_evaluate(node.left, bound), _evaluate(node.right, bound))
    raise ValueError("only integers, names of numbers, + - * // % and brackets")
