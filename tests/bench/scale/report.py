"""Simulated worlds as a table with bars, how figures grow with ranks and leaves, and a plot."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from treeckpt._io.comm.message_store import TREE_ABOVE

from .models import MODELS, Grid
from .simulate import Figures, simulate
from .traffic import LOOKS, Load, requests_per_second

__all__ = ["growth", "judge", "main"]

BIG = 16_384
MIB = 1 << 20
Get = Callable[[Figures], float]


class Bar(msgspec.Struct, frozen=True):
    """What a figure may be at most, in worlds of `BIG` ranks."""

    text: str
    get: Get
    most: float
    unit: str


BARS = (
    Bar("a rank's plan", lambda f: f.plan, 1.0, "s"),
    Bar("the coordinator's commit", lambda f: f.commit, 5.0, "s"),
    Bar("its memory", lambda f: f.commit_rss / MIB, 1024, "MiB"),
    Bar("the index", lambda f: f.index_nbytes / MIB, 5.0, "MiB"),
    Bar("opening it and planning a load", lambda f: f.open + f.load, 1.0, "s"),
    Bar("bytes read / needed", lambda f: f.amplification, 1.05, "x"),
    Bar("the busiest writer / what one has alone", lambda f: f.write_balance / f.write_least, 1.2, "x"),
)
CHUNK_NBYTES = 20
"""Bytes of index for each chunk of an irregular layout, at most."""
GROWING: tuple[tuple[str, Get], ...] = (
    ("plan", lambda f: f.plan),
    ("agree", lambda f: f.agree),
    ("again", lambda f: f.again),
    ("commit", lambda f: f.commit),
    ("open + load", lambda f: f.open + f.load),
    ("index bytes", lambda f: f.index_nbytes),
    ("timings bytes", lambda f: f.timings_nbytes),
)
SERVERS: tuple[tuple[str, Callable[[Figures], Load]], ...] = (
    ("rank 0's, if all speak to it", lambda f: f.alone),
    ("rank 0's", lambda f: f.root),
    ("the busiest leader's", lambda f: f.leader),
)

Job = tuple[str, Grid, Grid, bool]


def _worlds(most: int) -> list[Job]:
    """70 B parameters on ever more ranks, other models on many, and flat ranges."""
    by_ranks = [
        ("llama 70B", Grid(n // 8, 8), Grid(max(n // 16, 1), 8, 2), False) for n in (64, 512, 4096, 16384, 65536)
    ]
    by_leaves = [(name, Grid(512, 8), Grid(256, 8), False) for name in ("llama 8B", "llama 405B")]
    others = [
        ("llama 70B", Grid(2048, 8, copies=16), Grid(64, 8), False),
        ("llama 405B", Grid(128, 8, 16), Grid(64, 8, 8), False),
        ("mixtral 8x22B", Grid(2048, 4, 2, ep=8), Grid(512, 8, 1, ep=4), False),
        ("llama 8B", Grid(512), Grid(64, 8), True),
        ("llama 70B", Grid(4096), Grid(64, 8), True),
    ]
    return [job for job in by_ranks + by_leaves + others if job[1].world <= most]


def judge(rows: Iterable[Figures]) -> list[tuple[Figures, Bar, float]]:
    """Every bar that a world does not meet."""
    missed: list[tuple[Figures, Bar, float]] = []
    for row in rows:
        if row.world == BIG:
            missed += [(row, bar, bar.get(row)) for bar in BARS if bar.get(row) > bar.most]
        if row.chunks and (found := row.index_nbytes / row.chunks) > CHUNK_NBYTES:
            missed.append((row, Bar("index / chunk", lambda f: 0, CHUNK_NBYTES, "bytes"), found))
    return missed


def growth(rows: Sequence[Figures], size: Get) -> dict[str, float]:
    """The exponent with which each figure grows, by least squares on logarithms."""
    x = np.log([size(row) for row in rows])
    return {name: float(np.polyfit(x, np.log([max(get(row), 1e-9) for row in rows]), 1)[0]) for name, get in GROWING}


def _series(rows: Sequence[Figures]) -> tuple[list[Figures], list[Figures]]:
    """The worlds that differ in ranks alone, and in leaves alone."""
    plain = [row for row in rows if not row.chunks and row.classes == 1]
    ranks = [row for row in plain if row.model == "llama 70B" and "copies" not in row.layout]
    return ranks, sorted((row for row in plain if row.world == 4096), key=lambda row: row.leaves)


def _table(rows: Sequence[Figures]) -> Table:
    table = Table(
        title="Simulated worlds: seconds of computing of one rank (hello, plan, open, load) and the coordinator"
    )
    for name in ("model", "layout", "ranks", "leaves", "hello", "agree", "again", "plan", "commit", "open", "load"):
        table.add_column(name, justify="left" if name in ("model", "layout") else "right")
    for name in ("RSS MiB", "index kB", "B/chunk", "timings kB", "read/needed", "write max/mean", "least"):
        table.add_column(name, justify="right")
    for f in rows:
        seconds = [f"{value:.3f}" for value in (f.hello, f.agree, f.again, f.plan, f.commit, f.open, f.load)]
        table.add_row(
            *(f.model, f.layout, f"{f.world:,}", f"{f.leaves:,}", *seconds),
            *(f"{f.commit_rss / MIB:.0f}", f"{f.index_nbytes / 1e3:,.0f}"),
            f"{f.index_nbytes / f.chunks:.1f}" if f.chunks else "",
            f"{f.timings_nbytes / 1e3:,.0f}",
            *(f"{f.amplification:.3f}", f"{f.write_balance:.3f}", f"{f.write_least:.3f}"),
        )
    return table


def _traffic(rows: Sequence[Figures]) -> Table:
    """What passes through the servers of messages in a first save."""
    table = Table(title="Messages of a first save at a server: ranks that wait there, messages, MB")
    for name in ("model", "layout", "ranks", "kinds", *(name for name, _ in SERVERS)):
        table.add_column(name, justify="left" if name in ("model", "layout") else "right")
    for f in rows:
        loads = [get(f) for _, get in SERVERS]
        texts = [f"{load.clients:,} · {load.messages:,} · {load.nbytes / 1e6:,.1f}" for load in loads]
        table.add_row(f.model, f.layout, f"{f.world:,}", f"{f.classes:,}", *texts)
    return table


def _plot(rows: Sequence[Figures], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ranks, _ = _series(rows)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    x = [row.world for row in ranks]
    sizes = [(name, get) for name, get in GROWING if "bytes" in name]
    loads = [(name, lambda f, get=get: get(f).messages) for name, get in SERVERS]
    panels = (
        ("seconds", [pair for pair in GROWING if pair not in sizes]),
        ("bytes", sizes),
        ("messages at a server", loads),
    )
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for name, get in lines:
            # a world of few ranks has no leader but rank 0
            points = [(row.world, get(row)) for row in ranks if get(row) > 0]
            axis.loglog(*zip(*points, strict=True), marker="o", markersize=4, label=name.removesuffix(" bytes"))
        axis.set_title(title, loc="left")
        axis.set_xlabel("ranks")
        axis.set_xticks(x, [f"{n:,}" for n in x], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{ranks[0].model}, {ranks[0].leaves:,} leaves")
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] = ()) -> None:
    """Simulates, prints the table, the bars and the growth; `--json FILE`, `--plot FILE`, `--most RANKS`."""
    parser = argparse.ArgumentParser(prog="scale")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--most", type=int, default=65_536, help="ranks of the largest world")
    options = parser.parse_args(arguments)
    console = Console(width=None if Console().is_terminal else 200)
    rows: list[Figures] = []
    for model, source, target, flat in _worlds(options.most):
        rows.append(simulate(MODELS[model], source, target, flat=flat))
        console.print(f"{rows[-1].model}, {rows[-1].layout}: done", style="dim")
    console.print(_table(rows))
    console.print(_traffic(rows))
    rate = requests_per_second()
    console.print(
        f"one Store server answers {rate:,.0f} requests a second here: {rate / LOOKS:,.0f} ranks that wait, and look "
        f"{LOOKS} times a second, keep it busy; above {TREE_ABOVE:,} ranks they speak by leaders"
    )
    for text, series, size in zip(("ranks", "leaves"), _series(rows), (_ranks_of, _leaves_of), strict=True):
        if len(series) > 1:
            found = ", ".join(f"{name} {power:.2f}" for name, power in growth(series, size).items())
            console.print(f"growth with {text}, as a power: {found}")
    missed = judge(rows)
    for row, bar, figure in missed:
        console.print(f"MISSED: {row.model}, {row.layout}: {bar.text} {figure:.2f} {bar.unit}, bar {bar.most:g}")
    if not missed:
        console.print(f"every bar is met ({', '.join(f'{bar.text} <= {bar.most:g} {bar.unit}' for bar in BARS)})")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    if options.plot:
        _plot(rows, options.plot)


def _ranks_of(row: Figures) -> float:
    return row.world


def _leaves_of(row: Figures) -> float:
    return row.leaves
