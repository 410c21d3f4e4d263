"""HTML and SVG as text in which nothing that came out of a checkpoint can be anything but text.

A `Html` is finished markup; every other string that becomes a child or an attribute is escaped, its unseen characters
written out. No element is made of a name that is not in our own code.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from .text import visible

__all__ = ["Child", "Html", "el", "facts", "joined", "table"]

_VOID = frozenset({"meta", "input", "br"})


class Html(str):
    """Markup that is finished."""

    __slots__ = ()


Child = str | int | float | None


def joined(children: Iterable[Child]) -> Html:
    """One after the other; what is no markup is escaped, None is nothing."""
    parts = (c if isinstance(c, Html) else html.escape(visible(str(c))) for c in children if c is not None)
    return Html("".join(parts))


def el(name: str, /, *children: Child, **attributes: Child) -> Html:
    """An element. A trailing underscore of an attribute's name is left out, others become dashes."""
    given = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items() if v is not None}
    text = "".join(f' {k}="{html.escape(visible(str(v)))}"' for k, v in given.items())
    return Html(f"<{name}{text}>" if name in _VOID else f"<{name}{text}>{joined(children)}</{name}>")


def table(columns: Sequence[str], rows: Iterable[Sequence[Child]], *, right: Sequence[str] = ()) -> Html:
    """A table whose columns named in `right` hold numbers."""
    kinds = ["n" if column in right else None for column in columns]
    head = el("tr", *(el("th", c, class_=k) for c, k in zip(columns, kinds, strict=True)))
    body = (el("tr", *(el("td", c, class_=k) for c, k in zip(row, kinds, strict=True))) for row in rows)
    return el("table", el("thead", head), el("tbody", *body))


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Names and what they are."""
    return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in pairs))
