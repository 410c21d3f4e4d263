"""Draws the medians: a panel for a phase of a scenario, a bar for each contender, and a line at the raw limit.

What was measured on object stores has a picture of its own: a panel to load and one to save, a group of bars for each
link, as parts of the raw limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.results import RAW, SERVER_LINK, RemoteSummary
from treeckpt._bench.results import TrialSummary

OWN, OTHER, LINE, INK, FAINT = "#0f766e", "#c3c9d1", "#b45309", "#1f2937", "#6b7280"
LIMIT_TEXTS = {
    "W": "raw durable write",
    "R": "raw read",
    "R_fresh": "raw read, new memory",
    "plain": "plain cached read",
    "plain_fresh": "plain cached read, new memory",
}
COLUMNS = 3


class Panel(msgspec.Struct, frozen=True):
    """A phase of a scenario."""

    scenario: str
    phase: str
    title: str
    seconds: bool = False
    """Draws seconds, where a rate says nothing: less is better."""


PANELS = (
    Panel("gpt2", "save", "Save, durable"),
    Panel("gpt2", "load cold", "Load, new tree, cold"),
    Panel("gpt2", "fill cold", "Load in place, cold"),
    Panel("gpt2", "load warm", "Load, new tree, warm"),
    Panel("replicated", "save", "Save, 2 equal ranks"),
    Panel("reshard", "fill cold", "Load, rows to columns"),
    Panel("one", "save", "Save, one 2 GB tensor"),
    Panel("tiny", "save", "Save, 20,000 leaves", seconds=True),
    Panel("tiny", "load cold", "Load, 20,000 leaves, cold", seconds=True),
)


def draw(rows: Sequence[TrialSummary], path: Path) -> list[Path]:
    """Writes the pictures; their format follows the file's suffix. Panels without figures are left out.

    Returns:
        The paths of the pictures; where there are two, that of object stores ends with `-remote`.
    """
    found = [(panel, chosen) for panel in PANELS if (chosen := _rows_of(rows, panel))]
    remote = [row for row in rows if isinstance(row, RemoteSummary) and row.ratio is not None and row.limit_rate]
    if not found and not remote:
        raise ValueError("nothing to draw: none of the scenarios of the picture was run")
    paths: list[Path] = []
    if found:
        _write(lambda: _figure(found), path)
        paths.append(path)
    if remote:
        paths.append(path.with_stem(f"{path.stem}-remote") if found else path)
        _write(lambda: _remote_figure(remote), paths[-1])
    return paths


def _write(make: Callable[[], Any], path: Path) -> None:
    import matplotlib as mpl

    style: dict[Any, Any] = {
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": "treeckpt",
        "font.family": "sans-serif",
    }
    with mpl.rc_context(style):
        make().savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=160, facecolor="white")


def _rows_of(rows: Sequence[TrialSummary], panel: Panel) -> list[TrialSummary]:
    chosen = [row for row in rows if (row.scenario, row.phase) == (panel.scenario, panel.phase)]
    if panel.phase.startswith("fill"):
        compared = (panel.scenario, panel.phase.replace("fill", "first"))
        two_passes = [row for row in rows if (row.scenario, row.phase) == compared]
        chosen += [msgspec.structs.replace(row, contender=f"{row.contender}, compared first") for row in two_passes]
    return sorted(chosen, key=lambda row: row.seconds)


def _figure(found: Sequence[tuple[Panel, list[TrialSummary]]]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(COLUMNS, len(found))
    lines = [found[at : at + columns] for at in range(0, len(found), columns)]
    heights = [max(len(chosen) for _, chosen in line) + 2.2 for line in lines]
    engine = ConstrainedLayoutEngine(hspace=0.06, wspace=0.06)
    figure = Figure(figsize=(4.0 * columns, 0.27 * sum(heights)), layout=engine)
    axes = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
    for row, line in zip(axes, lines, strict=True):
        for ax in row[len(line) :]:
            ax.set_axis_off()
        for ax, (panel, chosen) in zip(row, line, strict=False):
            _draw_panel(ax, panel, chosen, places=max(len(rows) for _, rows in line))
    return figure


def _remote_figure(rows: Sequence[RemoteSummary]) -> Any:
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.scenario != SERVER_LINK.scenario and not row.contender.startswith(RAW)]
    links = list(dict.fromkeys(row.scenario for row in rows))
    names = list(dict.fromkeys(row.contender for row in rows))
    figure = Figure(figsize=(12, 0.7 + len(links) * 0.16 * (len(names) + 1)), layout="constrained")
    titles = {"load remote": "Load, new tree", "save remote": "Save"}
    for ax, (phase, title) in zip(figure.subplots(1, 2, squeeze=False)[0], titles.items(), strict=True):
        for place, name in enumerate(names):
            chosen = {row.scenario: row for row in rows if (row.contender, row.phase) == (name, phase)}
            _draw_group(ax, place, name, [chosen.get(link) for link in links], len(names) + 1)
        limits = {row.scenario: row.limit_rate or 0.0 for row in rows if row.phase == phase}
        texts = [f"{_link_text(link)}\nraw {limits.get(link, 0.0) / 1e9:.2f} GB/s" for link in links]
        ax.set_yticks([at * (len(names) + 1) + (len(names) - 1) / 2 for at in range(len(links))], texts)
        ax.set_ylim(len(links) * (len(names) + 1) - 1, -1)
        ax.axvline(1, color=LINE, linewidth=1, linestyle=(0, (3, 2)), zorder=0)
        ax.set_xlim(0, 1.3)
        _strip(ax, title, "part of obstore's own rate with 16 to 128 connections")
    return figure


def _draw_group(ax: Any, place: int, name: str, rows: Sequence[RemoteSummary | None], size: int) -> None:
    """Draws the bars of one contender: one on each link."""
    own = name == "treeckpt"
    for at, row in enumerate(rows):
        if row is not None and row.ratio is not None:
            y = at * size + place
            ax.barh(y, 0 if row.cut else row.ratio, color=OWN if own else OTHER, height=0.8)
            text = f"> {row.seconds:.0f} s" if row.cut else f"{row.ratio:.2f}"
            x = 0.015 + (0 if row.cut else row.ratio)
            label = ax.text(x, y, f"{text}  {name}", va="center", fontsize=6.5, color=INK)
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # the line of 1 may be behind it


def _link_text(scenario: str) -> str:
    latency, _, rate = scenario.partition(" ")[2].partition("/")
    return f"{latency} ms, {rate} MB/s"


def _draw_panel(ax: Any, panel: Panel, rows: Sequence[TrialSummary], *, places: int) -> None:
    """Draws the bars; all panels beside each other have the same number of places, so that bars are equally thick."""
    values = [row.seconds if panel.seconds else row.rate / 1e9 for row in rows]
    ranges = [_range(panel, row) for row in rows]
    limits = [row.limit_rate / 1e9 for row in rows if row.limit_rate and row.contender == "treeckpt"]
    limit = limits[0] if limits and not panel.seconds else 0.0
    top = max([limit, *(high for _, high in ranges)])
    colors = [OWN if row.contender.startswith("treeckpt") else OTHER for row in rows]
    at = range(len(rows))
    ax.barh(at, values, color=colors, height=0.68)
    for place, value, (low, high) in zip(at, values, ranges, strict=True):
        ax.plot([low, high], [place, place], color=INK, linewidth=0.8, alpha=0.55, solid_capstyle="butt")
        text = ax.text(max(value, high) + top * 0.02, place, f"{value:.2f}", va="center", color=INK, fontsize=8)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # the line of the limit may be behind it
    ax.set_yticks(at, [row.contender for row in rows])
    for label, row in zip(ax.get_yticklabels(), rows, strict=True):
        if row.contender.startswith("treeckpt"):
            label.set(fontweight="bold", color=OWN)
    ax.set_ylim(places - 0.5, -0.5)
    if limit:
        ax.axvline(limit, color=LINE, linewidth=1, linestyle=(0, (3, 2)), zorder=0)
        ax.text(limit, -0.62, LIMIT_TEXTS[rows[0].limit], color=LINE, fontsize=7, ha="right", va="bottom")
    ax.set_xlim(0, top * 1.16)
    _strip(ax, panel.title, "s, less is better" if panel.seconds else "GB/s")


def _range(panel: Panel, row: TrialSummary) -> tuple[float, float]:
    if panel.seconds:
        return row.fastest, row.slowest
    return row.nbytes / row.slowest / 1e9, row.nbytes / row.fastest / 1e9


def _strip(ax: Any, title: str, unit: str) -> None:
    """Sets the title and the axes, without frames and ticks that are not needed to read the panel."""
    ax.set_title(title, loc="left", fontsize=9.5, color=INK, fontweight="bold", pad=14)
    ax.set_xlabel(unit, color=FAINT, fontsize=8, loc="left")
    ax.tick_params(axis="x", colors=FAINT, labelsize=7.5, length=2)
    ax.tick_params(axis="y", colors=INK, length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#d1d5db")
