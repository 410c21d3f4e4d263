"""Patterns over paths, and templates of new names.

In a pattern `*` matches any text and `$LAYER` (capitals) a whole number; the same name matches the same number
everywhere. In a template the k-th `*` is replaced by the text of the pattern's k-th `*`, `$LAYER` by the number, and
`${LAYER + 4}` by the result of an expression of integers, number names, `+ - * // %` and brackets. A pattern that ends
before a `/` of a path matches everything below, which keeps its relative path; "" is the root, as pattern and as
template.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec

from ..errors import MismatchError

Binding = tuple[tuple[str, int | str], ...]
"""What a match has bound: numbers by name, texts by position (`*0`, `*1` ...), and the rest of the path (`/`)."""

_PART = re.compile(r"\*|\$\{[^{}]*\}|\$[A-Z][A-Z0-9_]*")
# without leading zeros: the number of `01` would be written as `1` in a new name
_NUMBER = "(0|[1-9][0-9]*)"
_BELOW = "/"
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Pattern(msgspec.Struct, frozen=True):
    """A compiled pattern."""

    text: str
    prefix: str
    """The literal text that every matching path begins with."""
    regex: re.Pattern[str] | None
    """The expression that paths match; None for a literal, which matches one path and everything below it."""
    names: tuple[str, ...]
    """Names of the groups of `regex`."""

    def match(self, path: str, *, below: bool = False) -> Binding | None:
        """Returns what a path binds; None if it does not match.

        Args:
            below: whether paths below a matching one match too.
        """
        if not path.startswith(self.prefix):
            return None
        if self.regex is None:
            if not self.text and below and path:  # the root, below which everything is
                return ((_BELOW, f"/{path}"),)
            tail = path[len(self.prefix) :]
            return (((_BELOW, tail),) if tail else ()) if not tail or (below and tail[0] == "/") else None
        if (matched := self.regex.fullmatch(path)) is None:
            return None
        tail = matched["below"]
        if tail and not below:
            return None
        groups = zip(self.names, matched.groups(), strict=False)  # the last group is the rest of the path
        bound: dict[str, int | str] = {name: int(text) if name[0] != "*" else text for name, text in groups}
        if tail:
            bound[_BELOW] = tail
        return tuple(sorted(bound.items()))


@lru_cache(maxsize=1 << 16)
def compile_pattern(text: str) -> Pattern:
    """Compiles a pattern.

    Raises:
        MismatchError: it contains arithmetic, which only templates can have.
    """
    first = next(_PART.finditer(text), None)
    if first is None:
        return Pattern(text, text, None, ())
    source, names, end = "", list[str](), 0
    for part in _PART.finditer(text):
        source += re.escape(text[end : part.start()])
        end = part.end()
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
    source += re.escape(text[end:])
    return Pattern(text, text[: first.start()], re.compile(source + "(?P<below>/.*)?", re.DOTALL), tuple(names))


def numbers_in(template: str) -> set[str]:
    """Returns the names of the numbers in a pattern or a template."""
    return {name for part in _PART.findall(template) for name in re.findall(r"[A-Z][A-Z0-9_]*", part)}


def bound_numbers(pattern: Pattern) -> set[str]:
    """Returns the names of the numbers that a pattern binds."""
    return {name for name in pattern.names if name[0] != "*"}


def expand(template: str, binding: Binding) -> str:
    """Returns the name that a template gives for a binding.

    Raises:
        MismatchError: it needs what the pattern does not bind, or an expression is not a whole number of at least 0.
    """
    if "*" not in template and "$" not in template and not binding:
        return template
    bound = dict(binding)
    name, end, stars = "", 0, 0
    for part in _PART.finditer(template):
        name += template[end : part.start()]
        end = part.end()
        if part[0] != "*":
            name += str(_number(part[0].strip("${}"), template, bound))
            continue
        if f"*{stars}" not in bound:
            raise MismatchError(
                template,
                expected=f"at most {stars} `*` in the new name, as in the pattern",
                found="more",
                hint="Each `*` stands for the text that the `*` in the same position of the pattern matched",
            )
        name += str(bound[f"*{stars}"])
        stars += 1
    name, below = name + template[end:], str(bound.get(_BELOW, ""))
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
