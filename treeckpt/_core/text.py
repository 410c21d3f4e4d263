"""Formats shapes, layouts, values, bytes and times as text, the same on the command line and in the dashboard.

Names and values come from files, so they may hold anything: `visible` shows control, format and bidirectional
characters as escapes, and `value_text` is bounded in length and depth whatever size the value claims to have.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Context
from typing import TypeVar

from ..errors import TreeckptError
from ..errors import visible as visible
from .sharding.int_runs import Runs, decode_runs, length_of
from .sharding.placements import Layout, MeshLayout, Placement, Replicate, Shard
from .sharding.region import Region
from .tree.value_codec import TypedValue, Value, decode_value

T = TypeVar("T")
_MAX_DEPTH = 8
BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def rounded(number: float, digits: int) -> float:
    """Rounds the exact value of a number to so many digits, ties away from zero, as JavaScript's `toPrecision` does."""
    return float(Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal(number))


def whole(number: float) -> int:
    """Rounds to a whole number, ties up, as JavaScript's `Math.round` does."""
    return math.floor(number) + (number - math.floor(number) >= 0.5)


def bytes_text(nbytes: float) -> str:
    """Formats bytes in decimal units with three digits: `1.23 MB`."""
    size, unit = float(nbytes), 0
    while abs(size) >= 999.5 and unit < len(BYTE_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{whole(size)} B" if unit == 0 else f"{rounded(size, 3):.3g} {BYTE_UNITS[unit]}"


def json_number(value: T) -> T | str:
    """Returns a value as JSON has it: NaN and infinities, which JSON lacks, as `NaN`, `Infinity` and `-Infinity`.

    Integers beyond 2**53, of which programs that read numbers as float64 lose digits, are text too.
    """
    if isinstance(value, int) and abs(value) > 1 << 53:
        return str(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def number_text(number: float, digits: int = 5) -> str:
    """Formats a number of an array: an integer whole, a float to so many digits."""
    return str(number) if isinstance(number, int) else f"{number:.{digits}g}"


def count_text(count: int, one: str, several: str = "") -> str:
    """Formats a number of things: `1 shard`, `2 shards`; `several` is the plural if that is not `one` with an s."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def ranks_text(ranks: Runs) -> str:
    """Formats ranks that rise: `rank 3`, `ranks 4-7`, `ranks 0, 2, 5 and 3 more`."""
    numbers: list[int] = decode_runs(ranks).tolist()
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]}-{numbers[-1]}"
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers[:3]))}{more}"


def rate_text(nbytes: float, seconds: float = 1.0) -> str:
    """Formats bytes per second: `1.23 GB/s`; `-` where no time passed."""
    return f"{bytes_text(nbytes / seconds)}/s" if seconds > 0 else "-"


def time_text(ns: int | None) -> str:
    """Formats a Unix time in nanoseconds to the second, `2026-01-31 12:00:00 UTC`; None gives `-`."""
    if ns is None:
        return "-"
    try:
        return datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "out of range"


def seconds_text(seconds: float) -> str:
    """Formats a duration with three digits: `12.3 ms`, `4.56 s`, `3 min 20 s`."""
    full = whole(seconds)
    if full >= 3600:
        return f"{full // 3600} h {full % 3600 // 60} min"
    if seconds >= 99.95:
        return f"{full // 60} min {full % 60} s"
    if seconds >= 0.9995:  # its three digits are 1.00
        return f"{rounded(seconds, 3):.3g} s"
    if seconds >= 0.9995e-3 or seconds == 0:
        return f"{rounded(seconds * 1e3, 3):.3g} ms"
    return f"{rounded(seconds * 1e6, 3):.3g} µs"


def ago_text(seconds: float) -> str:
    """Formats how long ago something was, in one unit: `3 days ago`, `5 h ago`, `just now` below a minute."""
    for unit, name in ((86_400, "day"), (3600, "h"), (60, "min")):
        if (count := int(seconds // unit)) >= 1:
            return f"{count:,} {name}{'s' * (name == 'day' and count > 1)} ago"
    return "just now"


def shell_quoted(text: str) -> str:
    """Quotes an argument for bash and zsh; anything but printable ASCII is written as escapes."""
    if text.isascii() and text.isprintable():
        return shlex.quote(text)
    data = text.encode("utf-8", "surrogateescape")
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in data)
    return f"$'{''.join(plain)}'"


def shape_text(shape: Sequence[int]) -> str:
    """Formats a shape: `[1024, 768]`, `[]` for a scalar."""
    return "[" + ", ".join(map(str, shape)) + "]"


def region_text(region: Region) -> str:
    """Formats a region as slices: `[0:512, 128:256]`."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(region.offset, region.shape, strict=True)) + "]"


def placement_text(placement: Placement) -> str:
    """Formats one placement as torch spells it."""
    if isinstance(placement, Replicate):
        return "Replicate"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return f"StridedShard({placement.dim}, {placement.factor})"


def layout_text(layout: Layout | None) -> str:
    """Formats a layout in one line; None stands for explicit pieces."""
    if not isinstance(layout, MeshLayout):
        return "explicit pieces"
    ranks = length_of(layout.mesh.ranks)
    if all(isinstance(p, Replicate) for p in layout.placements):
        return f"whole on {ranks} ranks" if ranks > 1 else "whole on one rank"
    names = layout.mesh.names or ("",) * len(layout.placements)
    placed = ", ".join(
        f"{name}: {placement_text(p)}" if name else placement_text(p)
        for name, p in zip(names, layout.placements, strict=False)
    )
    return f"{placed} on a {'×'.join(map(str, layout.mesh.shape))} mesh"


def blob_text(kind: str, nbytes: int) -> str:
    """Describes a value whose bytes are in shards: its type and length."""
    return f"{kind} of {count_text(nbytes, 'byte')}"


def value_type(value: Value) -> str:
    """Returns the usual name of a value's type."""
    if isinstance(value, TypedValue):
        return value.kind
    return "None" if value is None else type(value).__name__


def value_text(value: Value, limit: int = 200) -> str:
    """Formats a value as Python's repr does, in at most `limit` characters, without building that object."""
    budget = [limit]
    text = _value_text(value, budget, 0)
    return text if len(text) <= limit else text[: max(0, limit - 1)] + "…"


_BRACKETS = {"list": ("[", "]"), "tuple": ("(", ")"), "set": ("{", "}"), "frozenset": ("frozenset({", "})")}


def _value_text(value: Value, budget: list[int], depth: int) -> str:
    if depth > _MAX_DEPTH or budget[0] <= 0:
        return "…"
    if isinstance(value, str):
        text = repr(value if len(value) <= budget[0] else value[: budget[0]] + "…")
    elif not isinstance(value, TypedValue):
        text = repr(value)
    else:
        return _typed_text(value, budget, depth)
    budget[0] -= len(text)
    return text


def _typed_text(value: TypedValue, budget: list[int], depth: int) -> str:
    kind, items = value.kind, value.items
    if kind == "enum" and len(items) == 3:
        return f"{str(items[0]).rpartition(':')[2]}.{items[1]}"
    if kind in ("bytes", "bytearray") and len(items) == 1:
        return f"{kind} of {len(str(items[0])) * 3 // 4 - str(items[0]).count('=')}"
    if kind in ("numpy", "int", "float", "str") and len(items) < 3:
        try:
            return repr(decode_value(value, ""))
        except (TreeckptError, ValueError, OverflowError):
            pass
    parts: list[str] = []
    for item in items:
        if budget[0] <= 0:
            parts.append("…")
            break
        budget[0] -= 2
        parts.append(_value_text(item, budget, depth + 1))
    if kind in _BRACKETS:
        left, right = _BRACKETS[kind]
        return left + ", ".join(parts) + ("," if kind == "tuple" and len(parts) == 1 else "") + right
    if kind in ("dict", "OrderedDict"):
        pairs = [": ".join(parts[at : at + 2]) for at in range(0, len(parts), 2)]
        return "{" + ", ".join(pairs) + "}"
    return f"{kind}({', '.join(parts)})"
