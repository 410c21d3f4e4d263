"""The figures that treeckpt has to reach, compared with the measured ones. Pure functions of rows and trials.

Against raw limits the median of the ratios of single trials counts; against another library the ratio of the median
times, until every byte was added up; of memory the largest figure counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tests.bench.results import HOST, RAW, REMOTE_PHASES, AsyncSummary, Link, RemoteSummary
from treeckpt._bench.results import TrialSummary

MEMORY = 96 << 20
"""Bytes of memory that a save, or a load beyond its destination, may take."""
GROUP = 2 << 20
"""Bytes that may be read beyond what is needed, for each rank and file."""

REMOTE_MEMORY = 512 << 20
"""Bytes of memory that a load from an object store may take beyond its destination."""
REQUEST = 8 << 20
FAR, NEAR = Link(40, 90), Link(1, 1000)
"""The links on which there are targets; on the nearer one only beside raw."""

State = Literal["ok", "short", "not measured"]
Rows = Mapping[tuple[str, str, str], TrialSummary]
"""By scenario, contender and phase."""


class BenchTarget(msgspec.Struct, frozen=True):
    """One figure with its target."""

    scenario: str
    text: str
    figure: float | None
    target: float
    sense: Literal[">=", "<="]
    unit: Literal["x", "MiB", "ms"]
    state: State
    """Whether the target is reached."""


def _at_least(scenario: str, text: str, figure: float | None, target: float) -> BenchTarget:
    state = "not measured" if figure is None else "ok" if figure >= target else "short"
    return BenchTarget(scenario, text, figure, target, ">=", "x", state)


def _at_most(
    scenario: str, text: str, figure: float | None, target: float, unit: Literal["x", "MiB", "ms"] = "x"
) -> BenchTarget:
    state = "not measured" if figure is None else "ok" if figure <= target else "short"
    return BenchTarget(scenario, text, figure, target, "<=", unit, state)


_COLD: tuple[str, ...] = ("fill cold", "first cold", "load cold")
_WARM: tuple[str, ...] = ("fill warm", "first warm", "load warm")
_TO_DEVICE: tuple[str, ...] = ("load cold", "fill cold")
_LIMITS: tuple[tuple[str, str, float], ...] = (
    ("save", "W", 0.90),
    ("fill cold", "R", 0.90),
    ("load cold", "R_fresh", 0.95),
    ("fill warm", "a plain buffered read", 1.0),
    ("load warm", "a plain buffered read into new memory", 1.0),
)
"""Of gpt2: phase, limit, and the least ratio of both rates."""
_PEERS: tuple[tuple[str, tuple[str, ...], str, float], ...] = (
    ("gpt2", ("save",), "dcp", 3.0),
    ("gpt2", ("save",), "dcp-4", 2.0),
    ("gpt2", ("save",), "safetensors", 1.2),
    ("gpt2", _COLD, "dcp", 2.5),
    ("gpt2", _COLD, "safetensors", 1.5),
    ("gpt2", _WARM, "dcp", 2.5),
    ("replicated", ("save",), "dcp", 4.0),
    ("reshard", ("fill cold", "load cold", "fill warm", "load warm"), "dcp", 2.5),
    ("tiny", ("save", "load cold", "load warm", "fill cold", "fill warm"), "dcp", 10.0),
)
"""Scenario, phases, another library, and how many times faster than that treeckpt has to be."""


def compare_with_targets(rows: Sequence[TrialSummary]) -> list[BenchTarget]:
    """Returns every target; targets of scenarios that were not run have no figure."""
    table: Rows = {(row.scenario, row.contender, row.phase): row for row in rows}
    targets: list[BenchTarget] = []
    for phase in _TO_DEVICE:
        row = table.get(("device", "treeckpt", phase))
        text = f"{phase}, rate / the smaller of the disk's and of a copy to the device"
        targets.append(_at_least("device", text, row.ratio if row else None, 0.9))
    for phase, limit, least in _LIMITS:
        row = table.get(("gpt2", "treeckpt", phase))
        targets.append(_at_least("gpt2", f"{phase}, rate / {limit}", row.ratio if row else None, least))
    for scenario, phases, peer, times in _PEERS:
        for phase in phases:
            figure = _times_faster(table, scenario, phase, peer)
            targets.append(_at_least(scenario, f"{phase}, times faster than {peer}", figure, times))
    return [
        *targets,
        *_dcp_forms(table),
        *_host(table),
        *_bytes_read(table),
        *_tables(table),
        *_memory(table),
        *_remote(table),
    ]


def _times_faster(rows: Rows, scenario: str, phase: str, peer: str, contender: str = "treeckpt") -> float | None:
    own = rows.get((scenario, contender, phase))
    same: dict[str, str] = {"first cold": "fill cold", "first warm": "fill warm"}  # others fill in one way only
    other = rows.get((scenario, peer, same.get(phase, phase)))
    return other.summed / own.summed if own and other else None


def _dcp_forms(rows: Rows) -> list[BenchTarget]:
    return [
        _at_least(
            scenario, f"{form}, save, times faster than {peer}", _times_faster(rows, scenario, "save", peer, form), n
        )
        for scenario in ("dcp", "dcp-small")
        for form, n in (("treeckpt.dcp", 3.0), ("treeckpt.dcp storage", 2.0))
        for peer in ("dcp", "dcp-4")
    ]


def _host(rows: Rows) -> list[BenchTarget]:
    targets: list[BenchTarget] = []
    for ranks in HOST:
        scenario = f"host-{ranks}"
        row, one = (rows.get((scenario, name, "load cold")) for name in ("treeckpt", "treeckpt one rank"))
        read = row.read_bytes / row.files_bytes if row else None
        longer = row.seconds / one.seconds if row and one else None
        targets += [
            _at_most(scenario, "load cold, bytes read by all ranks / bytes of the files", read, 1.1),
            _at_least(
                scenario, "load cold, times faster than dcp", _times_faster(rows, scenario, "load cold", "dcp"), 2.0
            ),
            _at_most(scenario, "load cold, times as long as one rank alone", longer, 1.5),
        ]
    return targets


def _bytes_read(rows: Rows) -> list[BenchTarget]:
    reshard, part = (rows.get((scenario, "treeckpt", "load cold")) for scenario in ("reshard", "slice"))
    # two ranks, each with a part of both files: four groups of runs, however many runs are in one
    resharded = max(0, reshard.read_bytes - 4 * GROUP) / reshard.nbytes if reshard else None
    text = "load cold, bytes read (less 2 MiB for each rank and file) / needed"
    return [
        _at_most("reshard", text, resharded, 1.05),
        _at_most(
            "slice", "bytes read / needed, for 1/8 of the rows", part.read_bytes / part.nbytes if part else None, 1.05
        ),
    ]


def _tables(rows: Rows) -> list[BenchTarget]:
    targets: list[BenchTarget] = []
    phases: tuple[str, ...] = ("save", "load cold", "load warm")
    for phase in phases:
        table, dense = (rows.get(("table", contender, phase)) for contender in ("treeckpt", "treeckpt dense"))
        figure = table.summed / dense.summed if table and dense else None
        targets.append(_at_most("table", f"{phase}, times as long as dense tensors of the same bytes", figure, 1.3))
    return targets


def _memory(rows: Rows) -> list[BenchTarget]:
    targets: list[BenchTarget] = []
    phases: tuple[str, ...] = ("save", "load cold", "fill cold")
    for scenario in ("gpt2", "one"):
        for phase in phases:
            row = rows.get((scenario, "treeckpt", phase))
            loaded = row.nbytes if row and phase == "load cold" else 0
            figure = (row.extra_rss - loaded) / 2**20 if row else None
            text = f"{phase}, memory at the peak" + (", beyond what is loaded" if phase == "load cold" else "")
            targets.append(_at_most(scenario, text, figure, MEMORY / 2**20, "MiB"))
    return targets


def _remote(rows: Rows) -> list[BenchTarget]:
    targets: list[BenchTarget] = []
    for link in (FAR, NEAR):
        for phase in REMOTE_PHASES:
            row = rows.get((link.scenario, "treeckpt", phase))
            targets.append(_at_least(link.scenario, f"{phase}, rate / raw", row.ratio if row else None, 0.9))
    loads: tuple[str, ...] = REMOTE_PHASES[1:]
    own: dict[str, RemoteSummary] = {}
    for phase in REMOTE_PHASES:
        if isinstance(row := rows.get((FAR.scenario, "treeckpt", phase)), RemoteSummary):
            own[phase] = row
    for phase in REMOTE_PHASES[:3]:
        others = [
            row.seconds
            for (scenario, contender, row_phase), row in rows.items()
            if (scenario, row_phase) == (FAR.scenario, phase) and not contender.startswith((RAW, "treeckpt"))
        ]
        figure = min(others) / own[phase].seconds if others and phase in own else None
        targets.append(_at_least(FAR.scenario, f"{phase}, times faster than the fastest other", figure, 3))
    for phase in loads:
        row = own.get(phase)
        memory = (row.extra_rss - row.loaded) / 2**20 if row else None
        sent = row.read_bytes / row.nbytes if row else None
        requests = row.requests / (1.1 * row.nbytes / REQUEST + 4) if row else None
        text = f"{phase}, memory at the peak, beyond what is loaded"
        targets.append(_at_most(FAR.scenario, text, memory, REMOTE_MEMORY / 2**20, "MiB"))
        targets.append(_at_most(FAR.scenario, f"{phase}, bytes sent / wanted", sent, 1.02))
        targets.append(_at_most(FAR.scenario, f"{phase}, requests / (1.1 a 8 MiB, and 4)", requests, 1))
    return targets


def compare_async_with_targets(rows: Sequence[AsyncSummary]) -> list[BenchTarget]:
    """Returns the targets of background saves."""
    table = {(row.scenario, row.contender): row for row in rows}
    own, lazy = table.get(("async", "treeckpt")), table.get(("async", "treeckpt lazy"))
    dcp, rival = table.get(("async", "dcp thread")), table.get(("async", "torch_checkpointing"))
    tiny = table.get(("async-tiny", "treeckpt"))
    through, beside = table.get(("dcp-async", "treeckpt.dcp thread")), table.get(("dcp-async", "dcp thread"))
    slower, dcp_slower = own.interference if own else None, dcp.interference if dcp else None
    return [
        _at_least("async", "blocked, times shorter than dcp's", dcp.blocked / own.blocked if own and dcp else None, 2),
        _at_least(
            "async",
            "blocked, times shorter than torch_checkpointing's",
            rival.blocked / own.blocked if own and rival else None,
            1,
        ),
        _at_most("async", "first save, times longer than a warm one", own.first / own.blocked if own else None, 2.5),
        _at_most("async", "blocked, times as long as a copy", own.stall if own else None, 1.25),
        _at_most("async", "lazy, blocked, times as long as a copy", lazy.stall if lazy else None, 0.10),
        _at_most("async", "time lost by training steps / time until durable", slower, 0.10),
        _at_least(
            "async",
            "time lost by training steps, times less than with dcp's thread",
            dcp_slower / max(slower, 1e-3) if slower is not None and dcp_slower is not None else None,
            2,
        ),
        _at_most(
            "async-tiny",
            "longest wait for the interpreter",
            max(0.0, tiny.gap) * 1e3 if tiny and tiny.gap is not None else None,
            20,
            "ms",
        ),
        _at_most(
            "dcp-async",
            "blocked, times as long as dcp's",
            through.blocked / beside.blocked if through and beside else None,
            0.5,
        ),
        *_from_device(table),
    ]


def _from_device(table: Mapping[tuple[str, str], AsyncSummary]) -> list[BenchTarget]:
    own, lazy = table.get(("device-async", "treeckpt")), table.get(("device-async", "treeckpt lazy"))
    rate = 1 / own.stall if own and own.stall else None
    slower = lazy.interference if lazy else None
    return [
        _at_least("device-async", "copied to the host, rate / that of one copy", rate, 0.9),
        _at_most("device-async", "lazy, blocked, times as long as a copy", lazy.stall if lazy else None, 0.15),
        _at_most("device-async", "lazy, time lost by training steps / time until durable", slower, 0.01),
    ]
