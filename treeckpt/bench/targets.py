"""The figures that treeckpt has to reach, compared with the measured ones. Pure functions of rows and trials.

Against raw limits the median of the ratios of single trials counts; against another library the ratio of the median
times, until every byte was added up; of memory the largest figure counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from .results import AsyncSummary, Phase, TrialSummary

__all__ = ["MEMORY", "BenchTarget", "compare_async_with_targets", "compare_with_targets"]

MEMORY = 96 << 20
"""Bytes of memory that a save, or a load beyond its destination, may take."""
GROUP = 2 << 20
"""Bytes that may be read beyond what is needed, for each rank and file."""

State = Literal["ok", "short", "not measured"]


class BenchTarget(msgspec.Struct, frozen=True):
    """One figure with its target."""

    scenario: str
    text: str
    figure: float | None
    target: float
    sense: Literal[">=", "<="]
    unit: Literal["x", "MiB", "ms"]

    @property
    def state(self) -> State:
        """Whether the target is reached."""
        if self.figure is None:
            return "not measured"
        reached = self.figure >= self.target if self.sense == ">=" else self.figure <= self.target
        return "ok" if reached else "short"


_FILLS: dict[Phase, Phase] = {"first cold": "fill cold", "first warm": "fill warm"}
Find = Callable[[str, str, Phase], TrialSummary | None]


def compare_with_targets(rows: Sequence[TrialSummary]) -> list[BenchTarget]:
    """Returns every target; targets of scenarios that were not run have no figure."""
    table = {(row.scenario, row.contender, row.phase): row for row in rows}

    def find(scenario: str, contender: str, phase: Phase) -> TrialSummary | None:
        return table.get((scenario, contender, phase))

    return [*_saves(find), *_loads(find), *_on_ranks(find), *_tiny(find), *_tables(find), *_memory(find)]


def _against(find: Find, scenario: str, phase: Phase, peer: str, target: float) -> BenchTarget:
    """Target for how many times faster than another library; the latter has only one way to fill."""
    theirs: Phase = _FILLS.get(phase, phase)
    own, other = find(scenario, "treeckpt", phase), find(scenario, peer, theirs)
    figure = other.summed / own.summed if own and other else None
    return BenchTarget(scenario, f"{phase}, times faster than {peer}", figure, target, ">=", "x")


def _of_limit(find: Find, phase: Phase, limit: str, target: float) -> BenchTarget:
    row = find("gpt2", "treeckpt", phase)
    return BenchTarget("gpt2", f"{phase}, rate / {limit}", row.ratio if row else None, target, ">=", "x")


def _saves(find: Find) -> list[BenchTarget]:
    return [
        _of_limit(find, "save", "W", 0.90),
        _against(find, "gpt2", "save", "dcp", 3.0),
        _against(find, "gpt2", "save", "dcp-4", 2.0),
        _against(find, "gpt2", "save", "safetensors", 1.2),
    ]


def _loads(find: Find) -> list[BenchTarget]:
    cold: tuple[Phase, ...] = ("fill cold", "first cold", "load cold")
    warm: tuple[Phase, ...] = ("fill warm", "first warm", "load warm")
    return [
        _of_limit(find, "fill cold", "R", 0.90),
        _of_limit(find, "load cold", "R_fresh", 0.95),
        *(_against(find, "gpt2", phase, "dcp", 2.5) for phase in cold),
        *(_against(find, "gpt2", phase, "safetensors", 1.5) for phase in cold),
        *(_against(find, "gpt2", phase, "dcp", 2.5) for phase in warm),
        _of_limit(find, "fill warm", "a plain buffered read", 1.0),
        _of_limit(find, "load warm", "a plain buffered read into new memory", 1.0),
    ]


def _on_ranks(find: Find) -> list[BenchTarget]:
    return [
        _against(find, "replicated", "save", "dcp", 4.0),
        *(
            _against(find, "reshard", phase, "dcp", 2.5)
            for phase in ("fill cold", "load cold", "fill warm", "load warm")
        ),
        _reshard_bytes(find),
        _slice_bytes(find),
    ]


def _reshard_bytes(find: Find) -> BenchTarget:
    """Two ranks, each with a part of both files: four groups of runs, however many runs are in one."""
    row = find("reshard", "treeckpt", "load cold")
    figure = max(0, row.read_bytes - 4 * GROUP) / row.nbytes if row else None
    text = "load cold, bytes read (less 2 MiB for each rank and file) / needed"
    return BenchTarget("reshard", text, figure, 1.05, "<=", "x")


def _slice_bytes(find: Find) -> BenchTarget:
    row = find("slice", "treeckpt", "load cold")
    figure = row.read_bytes / row.nbytes if row else None
    return BenchTarget("slice", "bytes read / needed, for 1/8 of the rows", figure, 1.05, "<=", "x")


def _tiny(find: Find) -> list[BenchTarget]:
    phases: tuple[Phase, ...] = ("save", "load cold", "load warm", "fill cold", "fill warm")
    return [_against(find, "tiny", phase, "dcp", 10.0) for phase in phases]


def _tables(find: Find) -> list[BenchTarget]:
    bars: list[BenchTarget] = []
    phases: tuple[Phase, ...] = ("save", "load cold", "load warm")
    for phase in phases:
        table, dense = find("table", "treeckpt", phase), find("table", "treeckpt dense", phase)
        figure = table.summed / dense.summed if table and dense else None
        bars.append(
            BenchTarget("table", f"{phase}, times as long as dense tensors of the same bytes", figure, 1.3, "<=", "x")
        )
    return bars


def _memory(find: Find) -> list[BenchTarget]:
    bars: list[BenchTarget] = []
    for scenario in ("gpt2", "one"):
        for phase in ("save", "load cold", "fill cold"):
            row = find(scenario, "treeckpt", phase)
            beyond = row.nbytes if row and phase == "load cold" else 0
            figure = (row.extra_rss - beyond) / 2**20 if row else None
            text = "memory at the peak" + (", beyond what is loaded" if phase == "load cold" else "")
            bars.append(BenchTarget(scenario, f"{phase}, {text}", figure, MEMORY / 2**20, "<=", "MiB"))
    return bars


def compare_async_with_targets(rows: Sequence[AsyncSummary]) -> list[BenchTarget]:
    """Returns the targets of background saves."""
    table = {(row.scenario, row.contender): row for row in rows}
    own, lazy = table.get(("async", "treeckpt")), table.get(("async", "treeckpt lazy"))
    dcp, rival = table.get(("async", "dcp thread")), table.get(("async", "torch_checkpointing"))
    tiny = table.get(("async-tiny", "treeckpt"))
    calm = dcp.interference if dcp and dcp.interference is not None else None
    return [
        _stay("blocked, times shorter than dcp's", dcp.blocked / own.blocked if own and dcp else None, 2.0, ">="),
        _stay(
            "blocked, times shorter than torch_checkpointing's",
            rival.blocked / own.blocked if own and rival else None,
            1.0,
            ">=",
        ),
        _stay("first save, times longer than a warm one", own.first / own.blocked if own else None, 2.5, "<="),
        _stay("blocked, times as long as a copy", own.stall if own else None, 1.25, "<="),
        _stay("lazy, blocked, times as long as a copy", lazy.stall if lazy else None, 0.10, "<="),
        _stay("time lost by training steps / time until durable", own.interference if own else None, 0.10, "<="),
        _stay(
            "time lost by training steps, times less than with dcp's thread",
            calm / max(own.interference, 1e-3) if own and own.interference is not None and calm is not None else None,
            2.0,
            ">=",
        ),
        BenchTarget(
            "async-tiny",
            "longest wait for the interpreter",
            max(0.0, tiny.gap) * 1e3 if tiny and tiny.gap is not None else None,
            20.0,
            "<=",
            "ms",
        ),
    ]


def _stay(text: str, figure: float | None, target: float, sense: Literal[">=", "<="]) -> BenchTarget:
    return BenchTarget("async", text, figure, target, sense, "x")
