"""Builds HTML and SVG in which strings from a checkpoint can only be text, never markup.

An `Html` is finished markup; every other string that becomes a child or an attribute is escaped, and characters
without a glyph are written as escapes. Names of elements come from our own code only.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ..errors import visible

_VOID = frozenset({"meta", "input", "br"})


class Html(str):
    """Finished markup, which is not escaped again."""

    __slots__ = ()


Child = str | int | float | None


def joined(children: Iterable[Child]) -> Html:
    """Concatenates children; plain strings are escaped, None is skipped."""
    parts = (c if isinstance(c, Html) else html.escape(visible(str(c))) for c in children if c is not None)
    return Html("".join(parts))


def el(name: str, /, *children: Child, **attributes: Child) -> Html:
    """Builds an element. In names of attributes a trailing underscore is removed, other underscores become dashes."""
    given = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items() if v is not None}
    text = "".join(f' {k}="{html.escape(visible(str(v)))}"' for k, v in given.items())
    return Html(f"<{name}{text}>" if name in _VOID else f"<{name}{text}>{joined(children)}</{name}>")


def table(columns: Sequence[str], rows: Iterable[Sequence[Child]], *, right: Sequence[str] = ()) -> Html:
    """Builds a table; the columns named in `right` hold numbers and are aligned to the right."""
    kinds = ["n" if column in right else None for column in columns]
    head = el("tr", *(el("th", c, class_=k) for c, k in zip(columns, kinds, strict=True)))
    body = (el("tr", *(el("td", c, class_=k) for c, k in zip(row, kinds, strict=True))) for row in rows)
    return el("table", el("thead", head), el("tbody", *body))


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Builds a list of names and values."""
    return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in pairs))
