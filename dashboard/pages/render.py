"""Renders a page's data with its Jinja2 template: autoescaped, and with invisible characters written as escapes.

Links are relative to the page's own address, so pages work under any root path, through a proxy or a tunnel.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemBytecodeCache, PackageLoader, StrictUndefined, compiler
from jinja2.bccache import Bucket

from treeckpt._core.columns import bytes_column, numbers_column, seconds_column
from treeckpt._core.text import ago_text, bytes_text, count_text, rate_text, seconds_text, shape_text, time_text
from treeckpt.errors import visible


def _clock_text(when: str | float) -> str:
    """Formats an ISO 8601 time, or a Unix time in seconds, as commands do."""
    seconds = datetime.fromisoformat(when).timestamp() if isinstance(when, str) else when
    return time_text(int(seconds * 1e9))


def _ago(time: str) -> str:
    """Formats how long ago an ISO 8601 time was, in one unit."""
    return ago_text((datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())


def days_text(days: float) -> str:
    """Formats a time left in minutes, hours or days."""
    if days >= 1000:
        return "> 1,000 days"
    if days >= 2:
        return f"{days:.1f} days"
    return f"{days * 24:.1f} h" if days * 24 >= 1 else f"{days * 1440:.0f} min"


def _figure(value: float | str) -> str:
    """Formats a number with five digits; the name of one that is not finite stays."""
    return value if isinstance(value, str) else f"{value:.5g}"


def span_text(seconds: float) -> str:
    """Formats a time between two events in one unit, to two digits."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.0f} ms"
    units = ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s"))
    unit, name = next((pair for pair in units if seconds >= 1.5 * pair[0]), units[-1])
    count = seconds / unit
    return f"{count:,.0f} {name}" if count >= 10 else f"{count:.1f}".removesuffix(".0") + f" {name}"


def sparkline(values: Sequence[float]) -> str:
    """Returns the points of a line through values, oldest first, in a box of 100 x 20; its lower edge is zero."""
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    top = max(finite, default=0.0) or 1.0
    across = 100 / max(1, len(finite) - 1)
    return " ".join(f"{n * across:.1f},{19 - 18 * max(0.0, value) / top:.1f}" for n, value in enumerate(finite))


def _visible_text(value: object) -> object:
    return visible(value) if type(value) is str else value


def _count_text(count: int | None, one: str, several: str = "") -> str:
    return "–" if count is None else count_text(count, one, several)


def _or_dash(to_text: Callable[[Any], str], value: Any) -> str:
    return "–" if value is None else to_text(value)


def _column(make: Callable[[Any], Callable[[Any], str]], values: Iterable[Any]) -> Callable[[Any], str]:
    """Returns what formats the values of a column of a table; None reads as a dash."""
    return partial(_or_dash, make(list(values)))


def _columns(
    make: Callable[[Any], Callable[[Any], str]], rows: Iterable[Mapping[str, Any] | Sequence[Any]]
) -> Mapping[str | int, Callable[[Any], str]]:
    """Returns what formats each column of rows, by its name or number."""
    columns: dict[str | int, list[Any]] = {}
    for row in rows:
        for key, value in row.items() if isinstance(row, Mapping) else enumerate(row):
            columns.setdefault(key, []).append(value)
    return {key: _column(make, values) for key, values in columns.items()}


def _metric_columns(runs: Iterable[Any]) -> Mapping[str | int, Callable[[Any], str]]:
    """Returns what formats the last and the best values of each metric of runs."""
    return _columns(
        numbers_column, [[getattr(one, at) for one in run.values] for run in runs for at in ("last", "best")]
    )


class CompiledTemplates(FileSystemBytecodeCache):
    """Compiled templates in files, as Python keeps bytecode: to compile those of a page takes a tenth of the start."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        made_by = [Path(path).stat() for path in (compiler.__file__, __file__)]
        self._made_by = [(one.st_size, one.st_mtime_ns) for one in made_by]

    def get_source_checksum(self, source: str) -> str:
        """Returns what another compiler, or other options of the environment, change too."""
        return super().get_source_checksum(f"{self._made_by}{source}")

    def load_bytecode(self, bucket: Bucket) -> None:
        """Reads the file of a template, if there is one that can be read."""
        try:
            super().load_bytecode(bucket)
        except Exception:  # of a damaged one many kinds
            bucket.reset()

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Writes the file of a template, if it can be written."""
        with contextlib.suppress(OSError):
            super().dump_bytecode(bucket)


@cache
def templates() -> Environment:
    """Returns the Jinja2 environment of all templates; the applications of a process share what it has compiled."""
    # The directory where Python keeps the bytecode of this module: who may write there may change what is run here.
    bytecode = __spec__.cached if __spec__ is not None and not sys.dont_write_bytecode else None
    environment = Environment(
        loader=PackageLoader("treeckpt_dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible_text,
        bytecode_cache=CompiledTemplates(Path(bytecode).parent) if bytecode else None,
    )
    environment.globals["metric_heads"] = lambda run: [(f"metric:{name}", name, "n") for name in run.metrics]
    environment.globals["now"] = time.time
    environment.filters |= {
        "ago": partial(_or_dash, _ago),
        "bytes": partial(_or_dash, bytes_text),
        "bytes_column": partial(_column, bytes_column),
        "clock": partial(_or_dash, _clock_text),
        "count": _count_text,
        "days": partial(_or_dash, days_text),
        "figure": partial(_or_dash, _figure),
        "figure_column": partial(_column, numbers_column),
        "figure_columns": partial(_columns, numbers_column),
        "json": json.dumps,  # ASCII only, and autoescaped as any text: safe in an attribute, unlike `tojson`
        "metric_columns": _metric_columns,
        "number": partial(_or_dash, "{:,}".format),
        "rate": partial(_or_dash, rate_text),
        "rate_column": partial(_column, partial(bytes_column, per="/s")),
        "seconds": partial(_or_dash, seconds_text),
        "seconds_column": partial(_column, seconds_column),
        "seconds_columns": partial(_columns, seconds_column),
        "shape": shape_text,
        "span": partial(_or_dash, span_text),
        "sparkline": sparkline,
        "visible": visible,
    }
    return environment


def render(request: Request, name: str, page: Any, status: int = 200) -> HTMLResponse:
    """Renders a page as an HTML response; `base` leads from the page to the dashboard's root: `./`, `../` ...

    `given` has the parameters of the request, and `here` returns the page's own address with others. The page links to
    its JSON and CSV (`request.state.links`) with its own query, and with the parameters that it chose
    itself (`request.state.chosen`).
    """
    base = "../" * max(0, request.scope["path"].count("/") - 1) or "./"
    template = request.app.state.templates.get_template(name)
    links, chosen = getattr(request.state, "links", {}), getattr(request.state, "chosen", {})
    asked = [*chosen.items(), *(pair for pair in request.query_params.multi_items() if pair[0] not in chosen)]
    table = [pair for pair in asked if pair[0] not in ("start", "cursor")]
    queries = {"json": urlencode(asked), "csv": urlencode(table)}
    take = {kind: f"{base}{link[1:]}{'?' * bool(queries[kind])}{queries[kind]}" for kind, link in links.items()}
    given = request.query_params.multi_items()
    return HTMLResponse(
        template.render(page=page, base=base, take=take, given=given, here=partial(_here, given)), status
    )


def _here(given: Sequence[tuple[str, str]], **changed: str | Sequence[str]) -> str:
    """Returns the address of the same page with other values of some parameters; an empty one leaves it out.

    It begins with the first row.
    """
    pairs = [pair for pair in given if pair[0] not in {"start", "cursor", *changed}]
    for name, values in changed.items():
        pairs += [(name, value) for value in ([values] if isinstance(values, str) else values) if value]
    return f"?{urlencode(pairs)}"
