"""Renders a report: facts, sizes, tree, maps of large arrays, files and timings, with the drawings of the dashboard.

Its script has the modules of the pages, and what the API would answer them: it sends no requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from treeckpt import _api
from treeckpt._core.columns import bytes_column, seconds_column
from treeckpt._core.format.byte_map import chunk_count, layout_of
from treeckpt._core.format.records import AliasRecord, ArrayRecord, Index
from treeckpt._core.html import Child, Html, el, facts, table
from treeckpt._core.text import (
    bytes_text,
    count_text,
    layout_text,
    rate_text,
    seconds_text,
    shape_text,
    time_text,
    value_text,
)
from treeckpt._inspect.diff import leaf_text
from treeckpt._inspect.outline import Outline, OutlineRow
from treeckpt._inspect.timing_report import TimingReport
from treeckpt._inspect.treemap import TreemapKey
from treeckpt._io.storage.checkpoint import NewestIndex
from treeckpt._io.storage.open import open_store
from treeckpt._runs import catalog, discovery
from treeckpt._runs.catalog import CheckpointInfo, with_verification
from treeckpt._runs.notebook import COLUMNS, checkpoint_rows
from treeckpt._runs.verification import VerificationStore, cache_directory
from treeckpt.errors import CheckpointNotFound, TreeckptError

from ..checkpoint.chunks import map_page
from ..checkpoint.tree import treemap_page
from ..pages.damage import NO_DAMAGE
from ..timing.model import waterfall_data

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([^"]+)";\n', re.M)
_EXPORTED = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.M)
_LIST = re.compile(r"^(.*)export\{([^}]*)\};?\s*$", re.S)
"""The end of a minified library, which names what it exports."""
_LICENSED = re.compile(r"(vendor/[a-z0-9-]+?)-\d+\.\d")
_COMMENT = re.compile(r"^[ \t]*/\*\*(?:(?!\*/).)*\*/[ \t]*\n|^// @ts-check\n", re.M | re.S)
WIDTH = 1000
HERE = "here"
"""Stands for the id of the checkpoint in addresses."""
MARKED = 1.2
"""Times the median rank's work from which on the waterfall marks the slowest rank."""
NODES = 2000
"""Nodes of the tree that are listed."""
CHILDREN = 200
"""Children of one node that are listed."""
AREAS = 600
"""Areas of a treemap."""
GROUPINGS: tuple[TreemapKey, ...] = ("tree", "part", "dtype")
"""Treemaps of a report; those by rank and by file, which look at every chunk, would double its time."""
MAPS = 6
"""Arrays that have a shard map."""
MAX_REGIONS = 512
"""Regions of a shard map."""
MAX_CHUNKS = 1 << 16
"""An array of more chunks has no shard map."""
RANKS = 40
"""Ranks of the waterfall."""
SPANS = 200
"""Spans of each of them."""
FILES = 100
CHECKPOINTS = 200


def _static(name: str) -> str:
    return (files("treeckpt_dashboard") / "static" / name).read_text("utf-8")


def style() -> str:
    """Returns the style sheet: that of the pages, and what only a report has."""
    return _static("base.css") + _static("report.css")


def script(modules: Sequence[str], answers: Mapping[str, Any]) -> str:
    """Returns a script that runs modules one after the other.

    Each module that is imported becomes a function, which is called once and returns what it exports.

    Args:
        answers: what the API answers, by address: the modules send no requests.
    """
    joined: dict[str, str] = {}

    def add(name: str) -> None:
        if name in joined:
            return
        text = _COMMENT.sub("", _static(name))
        for _, imported in _IMPORT.findall(text):
            add(imported)
        exported = _EXPORTED.findall(text)
        if exports := _LIST.match(text):
            text, exported = exports[1], [": ".join(reversed(one.split(" as "))) for one in exports[2].split(",")]
        if licensed := _LICENSED.match(name):
            text = f"/*\n{_static(f'{licensed[1]}-LICENSE')}*/\n{text}"
        body = _IMPORT.sub(lambda one: f"const {{{one[1]}}} = {_name(one[2])};\n", text)
        body = re.sub(r"^export ", "", body, flags=re.M)
        joined[name] = f"const {_name(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"

    for module in modules:
        add(module)
    # No text in it may end the script element.
    data = json.dumps(msgspec.to_builtins(answers)).replace("<", "\\u003c")
    return f'"use strict";\nglobalThis.answers = {data};\n{"".join(joined.values())}'


def _name(module: str) -> str:
    return "m_" + re.sub(r"\W", "_", module)


def _text(x: float, y: float, text: str, anchor: str = "start") -> Html:
    return el("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


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
    label = ", ".join(name for name, _ in series) + " over steps"
    return el("svg", *shapes, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label)


class Drawings(msgspec.Struct):
    """What a page draws: modules of the dashboard's scripts, and what its API would answer them, by address."""

    modules: list[str] = []
    answers: dict[str, Any] = {}


def checkpoint_page(path: str | os.PathLike[str]) -> str:
    """Renders one checkpoint in any state.

    Raises:
        CheckpointNotFound: there is none.
    """
    read = NewestIndex(local=True)
    info = _verified(catalog.read_info(path, follow=True, newest=read), VerificationStore(cache_directory()))
    index = read.found.index if read.found is not None else None
    drawings = Drawings()
    return _document(info.name, [el("h1", info.name), *_checkpoint(path, info, index, drawings)], drawings)


def run_page(path: str | os.PathLike[str], *, on_read: catalog.OnRead | None = None) -> str:
    """Renders a run and its newest complete checkpoint.

    Args:
        on_read: as for `discovery.scan`.

    Raises:
        CheckpointNotFound: there is no checkpoint in it.
    """
    read = NewestIndex(local=True)
    infos = [info for info in discovery.scan(path, newest=read, on_read=on_read) if info.status != "foreign"]
    if not infos:
        raise CheckpointNotFound(os.fspath(path), expected="a checkpoint, or a run of some", found="neither")
    known = VerificationStore(cache_directory())
    infos = [_verified(info, known) for info in infos]
    name = Path(path).absolute().name
    rows = table(COLUMNS, checkpoint_rows(infos[:CHECKPOINTS]), right=COLUMNS[2:6] + COLUMNS[7:])
    more = el("p", f"and {len(infos) - CHECKPOINTS} older", class_="dim") if len(infos) > CHECKPOINTS else None
    complete = [info for info in infos if info.status == "complete"]
    about = facts(
        [
            ("complete checkpoints", len(complete)),
            ("others", len(infos) - len(complete)),
            ("on disk", bytes_text(catalog.sum_nbytes(infos))),
            ("newest step", complete[0].step if complete else None),
        ]
    )
    parts, drawings = [el("h1", name), about, _section("Checkpoints", rows, more), *_trends(complete)], Drawings()
    if complete:
        newest, last = complete[0], read.found  # which may be one that is damaged, or of an abandoned branch
        index = last.index if last is not None and last.index.save_id == newest.save_id else None
        parts += [el("h1", newest.name), *_checkpoint(newest.path, newest, index, drawings)]
    return _document(name, parts, drawings)


def _verified(info: CheckpointInfo, known: VerificationStore) -> CheckpointInfo:
    return with_verification(info, open_store(info.path), known)


def _document(title: str, parts: list[Html], drawings: Drawings) -> str:
    code = script(["theme.js", "report_tree.js", *drawings.modules], drawings.answers)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"  # the page fetches nothing, and only this script runs
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{title} · treeckpt"),
        el("style", Html(style())),
    )
    plain = el("noscript", el("p", "The drawings need scripts, which are switched off here.", class_="dim"))
    body = el("body", el("main", plain, *parts), el("script", Html(code)))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _section(title: str, *children: Child) -> Html:
    return el("section", el("h2", title), *children, class_="card")


def _trends(complete: list[CheckpointInfo]) -> list[Html]:
    saves = [i for i in reversed(complete) if i.step is not None and i.seconds is not None][-CHECKPOINTS:]
    if len(saves) < 2:
        return []
    steps = [i.step or 0 for i in saves]
    rates = [i.own_nbytes / i.seconds if i.own_nbytes and i.seconds else None for i in saves]
    times = [("took", [i.seconds for i in saves]), ("blocked", [i.blocked_seconds for i in saves])]
    return [
        _section("Time of saves", line_chart(steps, times, seconds_text)),
        _section("Rate", line_chart(steps, [("rate", rates)], rate_text)),
    ]


def _checkpoint(
    path: str | os.PathLike[str], info: CheckpointInfo, index: Index | None, drawings: Drawings
) -> list[Html]:
    state = el("p", info.status_and_problem, class_="dim")
    timing = _timing(path, info.save_id if info.leaves is not None else None, drawings)
    try:
        index = index or _api.inspect(path)
    except TreeckptError as error:
        return [state, el("p", f"{error}", class_="bad"), *timing]
    outline = Outline.of(index)
    sizes, maps = _sizes(outline, drawings), _maps(outline, drawings)
    return [state, _facts(index), sizes, *timing, *maps, _tree(outline), _files(index)]


def _facts(index: Index) -> Html:
    pairs: list[tuple[str, Child]] = [
        ("step", index.step),
        ("saved", time_text(index.created_ns)),
        ("ranks", index.world),
        ("leaves", f"{len(index.leaves):,}"),
        ("arrays", bytes_text(index.nbytes)),
        ("save id", index.save_id),
    ]
    return facts(pairs + [(name, value_text(value, 200)) for name, value in list(index.metadata.items())[:20]])


def _drawing(name: str, label: str) -> list[Html]:
    """Returns the canvas of a drawing, and what says which part of it is chosen."""
    about = {"tabindex": "0", "role": "img", "aria_label": label, "aria_describedby": f"{name}-text"}
    canvas = el("div", el("canvas", id=f"{name}-canvas", **about), class_="drawing")
    return [canvas, el("p", id=f"{name}-text", class_="readout", role="status", aria_live="polite")]


def _choice(attribute: str, label: str, names: Sequence[tuple[str, str]]) -> Html:
    """Returns a group of buttons, each a value and its text."""
    pressed = ["true", *["false"] * len(names)]
    buttons = [
        el("button", text, type="button", aria_pressed=on, **{attribute: value})
        for (value, text), on in zip(names, pressed, strict=False)
    ]
    return el("div", *buttons, class_="seg", role="group", aria_label=label)


def _sizes(outline: Outline, drawings: Drawings) -> Html:
    """Draws treemaps of the largest leaves, and lists the largest nodes."""
    drawings.modules.append("treemap.js")
    for by in GROUPINGS:
        drawings.answers[f"checkpoints/{HERE}/treemap?by={by}"] = treemap_page(outline, NO_DAMAGE, by, count=AREAS)
    total = outline.index.nbytes or 1
    nodes = sorted(outline.children(count=10_000), key=lambda row: -row.nbytes)[:10]
    columns = ("part", "leaves", "size", "share")
    size = bytes_column([row.nbytes for row in nodes])
    rows = [(row.path, f"{row.leaves:,}", size(row.nbytes), f"{row.nbytes / total:.1%}") for row in nodes]
    label = "Treemap of the bytes. The table below holds the largest. Arrow keys move from the largest to smaller ones."
    areas = el("div", id="treemap-table", class_="scroll tall", tabindex="0", role="region", aria_label="Areas")
    treemap = el(
        "div",
        el("p", id="treemap-trail", class_="trail mono"),
        *_drawing("treemap", label),
        el("ul", id="treemap-legend", class_="legend", aria_label="Colours of the map"),
        el("details", el("summary", "Areas as a table, the largest first"), areas),
        id="treemap",
        data_checkpoint=HERE,
    )
    by = _choice("data_by", "Grouped by", [(one, one) for one in GROUPINGS])
    return _section("Sizes", by, treemap, table(columns, rows, right=columns[1:]))


def _maps(outline: Outline, drawings: Drawings) -> list[Html]:
    """Draws the largest arrays of several chunks: the last two dimensions, at index 0 of the others."""
    index = outline.index
    arrays = [leaf for leaf in index.entries if isinstance(leaf.record, ArrayRecord) and leaf.spec]
    spread = [leaf for leaf in arrays if 1 < chunk_count(leaf) <= MAX_CHUNKS and leaf.nbytes]
    largest = sorted(spread, key=lambda leaf: -leaf.nbytes)[:MAPS]
    if not largest:
        return []
    drawings.modules.append("leaf.js")
    options: list[Html] = []
    for leaf in largest:
        address = f"checkpoints/{HERE}/leaves/{leaf.number}/map"
        drawings.answers[address] = map_page(outline, NO_DAMAGE, leaf.number, most=MAX_REGIONS)
        assert leaf.spec is not None, "arrays only are drawn"
        about = f"{leaf.path} · {leaf.spec.dtype} {shape_text(leaf.spec.shape)} · {layout_text(layout_of(index, leaf))}"
        options.append(el("option", about, value=leaf.number))
    form = el("form", el("label", "array ", el("select", *options, name="leaf")), id="axes", class_="axes")
    label = "Shard map: the regions of the array. Arrow keys move from region to region."
    legend = el("ul", id="map-legend", class_="legend", aria_label="Colours")
    by = _choice("data_colour", "Colour by", [("rank", "by rank"), ("file", "by file")])
    shown = el("div", form, by, *_drawing("map", label), legend, id="map", data_checkpoint=HERE)
    return [_section("Where large arrays lie", shown)]


def _tree(outline: Outline) -> Html:
    # A list, so that the calls for all nodes count down one number.
    left = [NODES]
    rows = _nodes(outline, outline.row(), left, 0)
    search = el("input", id="find", type="search", placeholder="Search paths", aria_label="Search paths", hidden="")
    more = el("p", f"The first {NODES:,} nodes of the tree.", class_="dim") if left[0] <= 0 else None
    return _section("Tree", search, el("div", *rows, id="tree"), more)


def _nodes(outline: Outline, parent: OutlineRow, left: list[int], depth: int) -> list[Html]:
    if parent.kind == "leaf":
        return [_leaf(outline.index, parent)]
    parts: list[Html] = []
    for row in outline.children(parent.node, count=CHILDREN):
        if left[0] <= 0:
            break
        left[0] -= 1
        if row.kind == "leaf":
            parts.append(_leaf(outline.index, row))
            continue
        leaves = count_text(row.leaves, "leaf", "leaves")
        size = el("span", f"{leaves}, {bytes_text(row.nbytes)}", class_="size")
        inner = _nodes(outline, row, left, depth + 1)
        summary = el("summary", el("span", row.key, class_="mono"), size)
        parts.append(el("details", summary, *inner, open="" if not depth else None))
    if parent.children > CHILDREN:
        parts.append(el("p", f"and {parent.children - CHILDREN:,} more", class_="leaf dim", data_path=""))
    return parts


def _leaf(index: Index, row: OutlineRow) -> Html:
    leaf = index.entries[row.first]
    text = leaf_text(index, leaf)
    if isinstance(leaf.record, AliasRecord):
        text += f" of {index.entries[leaf.record.of].path}"
    size = f"{text}{f', {bytes_text(row.nbytes)}' if row.nbytes else ''}"
    key = row.key or "(the tree is one leaf)"
    return el("div", el("span", key, class_="mono"), el("span", size, class_="size"), class_="leaf", data_path=row.path)


def _files(index: Index) -> Html:
    files = index.file_list
    mean = sum(f.nbytes for f in files) / len(files) if files else 0
    columns = ("file", "rank", "size", "to the mean")
    size = bytes_column([f.nbytes for f in files[:FILES]])
    rows = [(f.name, f.rank, size(f.nbytes), f"{f.nbytes / mean:.2f}×" if mean else "") for f in files[:FILES]]
    more = el("p", f"and {len(files) - FILES:,} more", class_="dim") if len(files) > FILES else None
    return _section("Shards", table(columns, rows, right=columns[1:]), more)


def _timing(path: str | os.PathLike[str], save_id: str | None, drawings: Drawings) -> list[Html]:
    try:
        study = TimingReport(catalog.read_timings(path, save_id=save_id))
    except TreeckptError:
        return []
    profile = study.profile
    if not profile.ranks:
        return []
    about = facts(
        [
            ("took", seconds_text(profile.seconds)),
            ("blocked", seconds_text(profile.blocked_seconds)),
            ("rate", rate_text(profile.nbytes, profile.seconds)),
            ("slowest", f"rank {profile.slowest}, {profile.slowdown:.1f}× the median's work"),
        ]
    )
    columns = ("phase", "median", "longest", "slowest", "bytes")
    median = seconds_column([p.median_ns / 1e9 for p in profile.phases])
    longest = seconds_column([p.longest_ns / 1e9 for p in profile.phases])
    size = bytes_column([p.nbytes for p in profile.phases])
    phases = [
        (
            p.name,
            median(p.median_ns / 1e9),
            longest(p.longest_ns / 1e9),
            f"rank {p.slowest}",
            size(p.nbytes) if p.nbytes else None,
        )
        for p in profile.phases
    ]
    parts = [about, *_waterfall(study, drawings), table(columns, phases, right=columns[1:])]
    if study.late_call:
        parts.insert(1, el("p", f"{study.late_call[0].upper()}{study.late_call[1:]}."))
    if study.clocks:
        parts.insert(1, el("p", study.clocks))
    if study.timings.error:
        parts.insert(0, el("p", study.timings.error, class_="bad"))
    if study.stragglers:
        columns = ("rank", "in", "took", "median", "times")
        shown = study.stragglers[:20]
        took = seconds_column([s.ns / 1e9 for s in shown])
        median = seconds_column([s.median_ns / 1e9 for s in shown])
        rows = [
            (
                f"rank {s.rank}",
                s.phase or "all its work",
                took(s.ns / 1e9),
                median(s.median_ns / 1e9),
                _times_text(s.times),
            )
            for s in shown
        ]
        parts += [el("h3", "Stragglers"), table(columns, rows, right=columns[2:])]
    return [_section("Time of the save", *parts)]


def _waterfall(study: TimingReport, drawings: Drawings) -> list[Html]:
    """Draws ranks and phases over time; of many ranks only the slowest."""
    drawings.modules.append("waterfall.js")
    drawings.answers[f"checkpoints/{HERE}/timing/waterfall"] = waterfall_data(study, ranks=RANKS, spans=SPANS)
    profile = study.profile
    label = (
        "Waterfall of the save: ranks and phases over time. The table below holds the same. Arrow keys move from span"
    )
    label += " to span, plus and minus zoom."
    zoom = el(
        "div",
        el("button", "−", type="button", id="zoom-out", aria_label="Zoom out"),
        el("button", "+", type="button", id="zoom-in", aria_label="Zoom in"),
        el("button", "all", type="button", id="zoom-reset", disabled=""),
        class_="seg",
        role="group",
        aria_label="Zoom",
    )
    order = _choice("data_order", "Order of ranks", [("rank", "by rank"), ("slow", "slowest first")])
    slow = profile.slowest if profile.slowdown > MARKED and profile.slowest is not None else ""
    left_out = len(profile.ranks) - RANKS
    return [
        el("ul", id="phase-legend", class_="legend", aria_label="Colours"),
        el("div", order, zoom, el("span", id="waterfall-about"), class_="tools"),
        el(
            "div",
            *_drawing("waterfall", label),
            id="waterfall",
            data_checkpoint=HERE,
            data_slow="" if slow is None else slow,
        ),
        *([el("p", f"The {RANKS} slowest ranks of {len(profile.ranks):,}.", class_="dim")] if left_out > 0 else []),
    ]


def _times_text(times: float) -> str | None:
    return f"{times:.1f}×" if math.isfinite(times) else None
