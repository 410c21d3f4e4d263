"""Draws SVG: a treemap, the map of a sharded array, a waterfall, a line chart. Every shape has a title."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..core.analysis.profile import ROOT_SPAN, WAITING_PHASES
from ..core.analysis.timing_report import TimingReport
from ..core.html import Html, el
from ..core.text import seconds_text

COLOURS = 8
WIDTH = 1000
RANKS = 40
SPANS = 200
"""Spans of one rank that are drawn."""
RegionBox = tuple[int, int, int, int, int, str]
"""(top, left, bottom, right, rank, title) in elements."""


def _svg(height: float, *children: Html, label: str) -> Html:
    return el("svg", *children, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=label)


def _rect(x: float, y: float, w: float, h: float, fill: str, title: str) -> Html:
    size = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{max(w, 0.6):.2f}", "height": f"{max(h, 0.6):.2f}"}
    return el("rect", el("title", title), class_=fill, **size)


def _text(x: float, y: float, text: str, kind: str = "t", anchor: str = "start") -> Html:
    return el("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=kind, text_anchor=anchor)


def treemap(items: Sequence[tuple[str, str, int, int]], *, height: int = 340) -> Html:
    """Draws rectangles with areas in proportion to bytes.

    Args:
        items: (short name, title, number of the colour, bytes) of each rectangle.
    """
    shown = sorted((item for item in items if item[3] > 0), key=lambda item: -item[3])
    shapes: list[Html] = []
    for (name, title, colour, _), (x, y, w, h) in zip(shown, _squares([i[3] for i in shown], height), strict=True):
        shapes.append(_rect(x + 0.5, y + 0.5, w - 1, h - 1, f"f{colour % COLOURS}", title))
        if w > 7 * len(name) + 10 and h > 18:
            shapes.append(_text(x + w / 2, y + h / 2 + 4, name, "on", "middle"))
    return _svg(height, *shapes, label="Bytes as areas; the table beside it holds the same")


def _squares(sizes: Sequence[int], height: float) -> Iterator[tuple[float, float, float, float]]:
    """Yields (x, y, width, height) of rectangles that are nearly square.

    Rows run along the shorter side; a row ends when another rectangle would worsen its aspect ratios. Bruls, Huizing,
    van Wijk: Squarified Treemaps, 2000.
    """
    x, y, w, h = 0.0, 0.0, float(WIDTH), float(height)
    scale = w * h / (sum(sizes) or 1)
    areas = [size * scale for size in sizes]
    at = 0
    while at < len(areas):
        side, count = min(w, h), 1
        while at + count < len(areas) and _worst(areas[at : at + count + 1], side) <= _worst(
            areas[at : at + count], side
        ):
            count += 1
        row = areas[at : at + count]
        depth = sum(row) / side if side else 0.0
        along = 0.0
        for area in row:
            length = area / depth if depth else 0.0
            yield (x, y + along, depth, length) if w >= h else (x + along, y, length, depth)
            along += length
        if w >= h:
            x, w = x + depth, max(w - depth, 0.0)
        else:
            y, h = y + depth, max(h - depth, 0.0)
        at += count


def _worst(row: Sequence[float], side: float) -> float:
    """Returns the largest aspect ratio in a row."""
    total = sum(row)
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row))) if total and side else 0.0


def shard_map(rows: int, columns: int, boxes: Sequence[RegionBox]) -> Html:
    """Draws a plane of an array's index space, with regions coloured by the rank that wrote them."""
    height = 40 if rows == 1 else max(60, min(260, 500 * rows / max(columns, 1)))
    sx, sy = WIDTH / max(columns, 1), height / max(rows, 1)
    shapes: list[Html] = [el("rect", x="0", y="0", width=WIDTH, height=f"{height:.0f}", class_="gap")]
    for top, left, bottom, right, rank, title in boxes:
        x, y, w, h = left * sx, top * sy, (right - left) * sx, (bottom - top) * sy
        shapes.append(_rect(x, y, w, h, f"f{rank % COLOURS} edge", title))
        if w > 60 and h > 16:
            shapes.append(_text(x + w / 2, y + h / 2 + 4, f"rank {rank}", "on", "middle"))
    return _svg(height, *shapes, label="Regions of the array by rank")


def waterfall(study: TimingReport) -> Html:
    """Draws ranks and phases over time; of many ranks only the slowest and rank 0."""
    profile, spans = study.profile, study.spans
    numbers = sorted(range(len(profile.ranks)), key=lambda n: -profile.ranks[n].busy_ns)[:RANKS]
    order = sorted({0, *numbers}) if profile.ranks else []
    left, lane = 80, 15
    scale = (WIDTH - left - 10) / max(profile.stop_ns - profile.start_ns, 1)
    work = [n for n, name in enumerate(spans.names) if name != ROOT_SPAN and name not in WAITING_PHASES]
    colours = {n: f"f{at % COLOURS}" for at, n in enumerate(work)}
    shapes: list[Html] = []
    top = 8.0
    for n in order:
        part = slice(int(study.edges[n]), min(int(study.edges[n + 1]), int(study.edges[n]) + SPANS))
        lanes = study.lanes[part].tolist()
        columns = (c[part].tolist() for c in (spans.name, spans.start, spans.stop))
        rank = profile.ranks[n].rank
        shapes.append(_text(4, top + 11, f"rank {rank}", "t bad" if rank == profile.slowest else "t"))
        for name, start, stop, at in zip(*columns, lanes, strict=True):
            text = spans.names[name]
            fill = colours.get(name, "frame" if text == ROOT_SPAN else "wait")
            title = f"rank {rank} · {text} · {seconds_text((stop - start) / 1e9)}"
            x, y = left + (start - profile.start_ns) * scale, top + at * lane
            shapes.append(_rect(x, y, (stop - start) * scale, lane - 2, fill, title))
            if (stop - start) * scale > 7 * len(text) + 8:
                kind = "on" if name in colours else "t"
                shapes.append(_text(x + (stop - start) * scale / 2, y + 10.5, text, kind, "middle"))
        top += (max(lanes, default=0) + 1) * lane + 7
    if profile.blocked_ns is not None:
        x = left + (profile.blocked_ns - profile.start_ns) * scale
        shapes.append(el("path", el("title", "the call returned"), d=f"M{x:.1f} 0V{top:.0f}", class_="blocked"))
    return _svg(top + 4, *shapes, label="Phases of the save over time; the table below holds the same")


def line_chart(
    steps: Sequence[int], series: Sequence[tuple[str, Sequence[float | None]]], text: Callable[[float], str]
) -> Html:
    """Draws values over steps; the vertical axis begins at zero.

    Args:
        text: formats a value.
    """
    height, left, bottom = 170, 80, 22
    most = max((v for _, values in series for v in values if v is not None), default=0) or 1
    span = max(steps[-1] - steps[0], 1)
    shapes = [_text(left - 8, 20, text(most), anchor="end"), _text(left - 8, height - bottom, "0", anchor="end")]
    for colour, (name, values) in enumerate(series):
        path: list[str] = []
        dots: list[Html] = []
        for step, value in zip(steps, values, strict=True):
            if value is not None:
                x = f"{left + (step - steps[0]) / span * (WIDTH - left - 20):.1f}"
                y = f"{(height - bottom) - value / most * (height - 40):.1f}"
                path.append(f"{x} {y}")
                title = el("title", f"step {step}: {name} {text(value)}")
                dots.append(el("circle", title, cx=x, cy=y, r="3.5", class_=f"f{colour}"))
        shapes += [el("path", d="M" + "L".join(path) if path else "", class_=f"line l{colour}"), *dots]
    shapes += [_text(left, height - 4, f"step {steps[0]}"), _text(WIDTH - 20, height - 4, f"{steps[-1]}", anchor="end")]
    return _svg(height, *shapes, label=", ".join(name for name, _ in series) + " over steps")
