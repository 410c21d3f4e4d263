"""Draws a page's data with its template: autoescaped, with every unseen character written out, and relative addresses.

Addresses are relative to the page's own, so pages work under any root path, through a proxy or a tunnel.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from treeckpt.core.text import bytes_text, seconds_text, shape_text, visible

__all__ = ["base_of", "render", "templates"]


def base_of(request: Request) -> str:
    """The way from the page to the dashboard's root: `./`, `../`, `../../` ..."""
    return "../" * max(0, request.scope["path"].count("/") - 1) or "./"


def _clock(moment: str | None) -> str:
    """A moment on this machine's clock, to the second."""
    if moment is None:
        return "–"
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{bytes_text(rate)}/s"


def _number(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def templates() -> Environment:
    """The environment of all templates."""
    environment = Environment(
        loader=PackageLoader("treeckpt_dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters |= {
        "bytes": lambda n: "–" if n is None else bytes_text(n),
        "clock": _clock,
        "json": json.dumps,  # of ASCII, and escaped as other text is: fit for an attribute, unlike tojson
        "number": _number,
        "rate": _rate,
        "seconds": lambda s: "–" if s is None else seconds_text(s),
        "shape": shape_text,
        "visible": visible,
    }
    return environment


def render(request: Request, name: str, page: Any, status: int = 200) -> HTMLResponse:
    """The page as HTML."""
    template = request.app.state.templates.get_template(name)
    return HTMLResponse(template.render(page=page, base=base_of(request)), status)
