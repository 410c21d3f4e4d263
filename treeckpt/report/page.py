"""Renders the sections of a report: facts, sizes, tree, maps of large arrays, files and timings."""

from __future__ import annotations

import math
import os
from pathlib import Path

from .. import api
from ..core.analysis.diff import leaf_text
from ..core.analysis.outline import IndexOutline, Outline, OutlineRow
from ..core.analysis.timing_report import TimingReport
from ..core.format.byte_map import chunk_count, layout_of, locate_chunks
from ..core.format.records import AliasRecord, ArrayRecord, Index, Leaf
from ..core.html import Child, Html, el, facts, table
from ..core.sharding.region import Region
from ..core.text import (
    bytes_text,
    count_text,
    layout_text,
    rate_text,
    region_text,
    seconds_text,
    shape_text,
    time_text,
    value_text,
)
from ..errors import CheckpointNotFound, TreeckptError
from ..io.storage.metadata_files import NewestIndex
from ..io.storage.open import open_store
from ..runs import catalog
from ..runs.checkpoint_info import CheckpointInfo, with_verification
from ..runs.notebook import COLUMNS, checkpoint_rows
from ..runs.verification import VerificationStore, cache_directory
from .page_assets import POLICY, SCRIPT, STYLE
from .pictures import RegionBox, line_chart, shard_map, treemap, waterfall

NODES = 2000
"""Nodes of the tree that are listed."""
CHILDREN = 200
"""Children of one node that are listed."""
CELLS = 300
"""Leaves that the treemap shows."""
MAPS = 6
BOXES = 512
CHUNKS = 1 << 16
"""A leaf with more chunks is not drawn."""
FILES = 100
CHECKPOINTS = 200


def checkpoint_page(path: str | os.PathLike[str]) -> str:
    """Renders one checkpoint in any state.

    Raises:
        CheckpointNotFound: there is none.
    """
    read = NewestIndex(local=True)
    info = _verified(catalog.read_info(path, follow=True, newest=read), VerificationStore(cache_directory()))
    index = read.found.index if read.found is not None else None
    return _document(info.name, [el("h1", info.name), *_checkpoint(path, info, index)])


def run_page(path: str | os.PathLike[str], *, on_read: catalog.OnRead | None = None) -> str:
    """Renders a run and its newest complete checkpoint.

    Args:
        on_read: as for `catalog.scan`.

    Raises:
        CheckpointNotFound: there is no checkpoint in it.
    """
    read = NewestIndex(local=True)
    found = [info for info in catalog.scan(path, newest=read, on_read=on_read) if info.status != "foreign"]
    if not found:
        raise CheckpointNotFound(os.fspath(path), expected="a checkpoint, or a run of some", found="neither")
    known = VerificationStore(cache_directory())
    found = [_verified(info, known) for info in found]
    name = Path(path).absolute().name
    rows = table(COLUMNS, checkpoint_rows(found[:CHECKPOINTS]), right=COLUMNS[2:6] + COLUMNS[7:])
    more = el("p", f"and {len(found) - CHECKPOINTS} older", class_="dim") if len(found) > CHECKPOINTS else None
    complete = [info for info in found if info.status == "complete"]
    about = facts(
        [
            ("complete checkpoints", intact := sum(not info.damaged for info in complete)),
            ("others", len(found) - intact),
            ("on disk", bytes_text(sum(info.disk_nbytes or 0 for info in found))),
            ("newest step", complete[0].step if complete else None),
        ]
    )
    parts = [el("h1", name), about, _section("Checkpoints", rows, more), *_trends(complete)]
    if complete:
        newest, last = complete[0], read.found  # which may be one that is corrupt, or of an abandoned branch
        index = last.index if last is not None and last.index.save_id == newest.save_id else None
        parts += [el("h1", newest.name), *_checkpoint(newest.path, newest, index)]
    return _document(name, parts)


def _verified(info: CheckpointInfo, known: VerificationStore) -> CheckpointInfo:
    return with_verification(info, open_store(info.path), known)


def _document(title: str, parts: list[Html]) -> str:
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{title} · treeckpt"),
        el("style", Html(STYLE)),
    )
    body = el("body", el("main", *parts), el("script", Html(SCRIPT)))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _section(title: str, *children: Child) -> Html:
    return el("section", el("h2", title), *children)


def _trends(complete: list[CheckpointInfo]) -> list[Html]:
    saves = [i for i in reversed(complete) if i.step is not None and i.seconds is not None][-CHECKPOINTS:]
    if len(saves) < 2:
        return []
    steps = [i.step or 0 for i in saves]
    rates = [i.nbytes / i.seconds if i.nbytes and i.seconds else None for i in saves]
    times = [("took", [i.seconds for i in saves]), ("blocked", [i.blocked_seconds for i in saves])]
    return [
        _section("Time of saves", line_chart(steps, times, seconds_text)),
        _section("Rate", line_chart(steps, [("rate", rates)], rate_text)),
    ]


def _checkpoint(path: str | os.PathLike[str], info: CheckpointInfo, index: Index | None = None) -> list[Html]:
    state = el("p", info.state_and_problem, class_="dim")
    timing = _timing(path, info.save_id if info.leaves is not None else None)
    try:
        index = index or api.inspect(path)
    except TreeckptError as error:
        return [state, el("p", f"{error}", class_="bad"), *timing]
    outline = IndexOutline(index)
    return [state, _facts(index), _sizes(outline), *timing, *_maps(index), _tree(outline), _files(index)]


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


def _sizes(outline: Outline) -> Html:
    """Draws a treemap of the largest leaves, coloured by the first key of the path, and lists the largest nodes."""
    arrays = sorted(outline.index.entries, key=lambda leaf: -leaf.nbytes)[:CELLS]
    first = {name: at for at, name in enumerate(dict.fromkeys(leaf.path.partition("/")[0] for leaf in arrays))}
    cells: list[tuple[str, str, int, int]] = []
    for leaf in arrays:
        title = f"{leaf.path}: {bytes_text(leaf.nbytes)}"
        colour = first[leaf.path.partition("/")[0]]
        cells.append((leaf.path.rpartition("/")[2], title, colour, leaf.nbytes))
    rest = outline.index.nbytes - sum(cell[3] for cell in cells)
    if rest > 0:
        more = count_text(len(outline.index.entries) - len(arrays), "smaller leaf", "smaller leaves")
        cells.append(("the rest", more, 7, rest))
    total = outline.index.nbytes or 1
    nodes = sorted(outline.children(count=10_000), key=lambda row: -row.nbytes)[:10]
    columns = ("part", "leaves", "size", "share")
    rows = [(row.path, f"{row.leaves:,}", bytes_text(row.nbytes), f"{row.nbytes / total:.1%}") for row in nodes]
    return _section("Sizes", treemap(cells), table(columns, rows, right=columns[1:]))


def _maps(index: Index) -> list[Html]:
    """Draws the largest arrays of several chunks."""
    arrays = [leaf for leaf in index.entries if isinstance(leaf.record, ArrayRecord) and leaf.spec]
    spread = [leaf for leaf in arrays if 1 < chunk_count(leaf) <= CHUNKS]
    largest = sorted(spread, key=lambda leaf: -leaf.nbytes)[:MAPS]
    pictures = [part for leaf in largest for part in _map(index, leaf)]
    return [_section("Where large arrays lie", *pictures)] if pictures else []


def _map(index: Index, leaf: Leaf) -> list[Html]:
    """Draws the last two dimensions of an array at index 0 of the others."""
    assert leaf.spec is not None, "arrays only are drawn"
    shape = leaf.spec.shape
    if not shape or 0 in shape:
        return []
    across = len(shape) - 1
    down = across - 1 if across else None
    plane = Region((0,) * len(shape), tuple(n if d in (across, down) else 1 for d, n in enumerate(shape)))
    boxes: list[RegionBox] = []
    for at in locate_chunks(index, leaf, plane)[:BOXES]:
        top, rows = (at.region.offset[down], at.region.shape[down]) if down is not None else (0, 1)
        left, columns = at.region.offset[across], at.region.shape[across]
        title = f"{region_text(at.region)} written by rank {at.rank}: bytes {at.start}:{at.stop} of {at.file.name}"
        boxes.append((top, left, top + rows, left + columns, at.rank, title))
    about = f"{leaf.spec.dtype} {shape_text(shape)} · {layout_text(layout_of(index, leaf))}"
    picture = shard_map(shape[down] if down is not None else 1, shape[across], boxes)
    return [el("h3", leaf.path, " ", el("span", about, class_="dim")), picture]


def _tree(outline: Outline) -> Html:
    left = [NODES]
    rows = _nodes(outline, outline.row(), left, 0)
    search = el("input", id="find", type="search", placeholder="Search paths", aria_label="Search paths", hidden="")
    more = el("p", f"The first {NODES:,} nodes of the tree.", class_="dim") if left[0] <= 0 else None
    return _section("Tree", search, el("div", *rows, id="tree"), more)


def _nodes(outline: Outline, parent: OutlineRow, left: list[int], depth: int) -> list[Html]:
    if parent.kind == "leaf":
        return [_leaf(outline.index, parent)]
    found: list[Html] = []
    for row in outline.children(parent.node, count=CHILDREN):
        if left[0] <= 0:
            break
        left[0] -= 1
        if row.kind == "leaf":
            found.append(_leaf(outline.index, row))
            continue
        leaves = count_text(row.leaves, "leaf", "leaves")
        size = el("span", f"{leaves}, {bytes_text(row.nbytes)}", class_="size")
        inner = _nodes(outline, row, left, depth + 1)
        summary = el("summary", el("span", row.key, class_="mono"), size)
        found.append(el("details", summary, *inner, open="" if not depth else None))
    if parent.children > CHILDREN:
        found.append(el("p", f"and {parent.children - CHILDREN:,} more", class_="leaf dim", data_path=""))
    return found


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
    rows = [(f.name, f.rank, bytes_text(f.nbytes), f"{f.nbytes / mean:.2f}×" if mean else "") for f in files[:FILES]]
    more = el("p", f"and {len(files) - FILES:,} more", class_="dim") if len(files) > FILES else None
    return _section("Shards", table(columns, rows, right=columns[1:]), more)


def _timing(path: str | os.PathLike[str], save_id: str | None) -> list[Html]:
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
    phases = [
        (
            p.name,
            _ns_text(p.median_ns),
            _ns_text(p.longest_ns),
            f"rank {p.slowest}",
            bytes_text(p.nbytes) if p.nbytes else None,
        )
        for p in profile.phases
    ]
    parts = [about, waterfall(study), table(columns, phases, right=columns[1:])]
    if study.late_call:
        parts.insert(1, el("p", f"{study.late_call[0].upper()}{study.late_call[1:]}."))
    if study.clocks:
        parts.insert(1, el("p", study.clocks))
    if study.timings.error:
        parts.insert(0, el("p", study.timings.error, class_="bad"))
    if study.stragglers:
        columns = ("rank", "in", "took", "median", "times")
        rows = [
            (f"rank {s.rank}", s.phase or "all its work", _ns_text(s.ns), _ns_text(s.median_ns), _times_text(s.times))
            for s in study.stragglers[:20]
        ]
        parts += [el("h3", "Stragglers"), table(columns, rows, right=columns[2:])]
    return [_section("Time of the save", *parts)]


def _ns_text(ns: float) -> str:
    return seconds_text(ns / 1e9)


def _times_text(times: float) -> str | None:
    return f"{times:.1f}×" if math.isfinite(times) else None
