"""Trials of the benchmark, their medians and ranges, the machine that they ran on, and the tables that are printed.

A trial is one operation (a phase) of one contender in one repetition, with the raw limits that were measured right
before it. Its rate is compared with those limits only, never with those of another moment.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Literal

import msgspec

from .._core.text import bytes_text
from .._io.process import usable_cpus
from .._report.terminal import print_line, print_table

Limit = Literal["W", "R", "R_fresh", "C", "plain", "plain_fresh", "W_huge", "R_huge"]

LIMITS: dict[str, Limit] = {
    "save": "W",
    "load cold": "R_fresh",
    "load warm": "plain_fresh",
    "fill cold": "R",
    "fill warm": "plain",
    "first cold": "R",
    "first warm": "plain",
}
"""The phases, and the limit that each is compared with.

`load` makes a new tree, `fill` fills one that exists, `first` does so once all checksums were compared (treeckpt's
`fill` compares each block as it is put in place); cold is from the device, warm from the page cache."""
HUGE: dict[str, Limit] = {"W": "W_huge", "R": "R_huge"}
"""What the device takes or gives where huge pages are used; reported beside a limit."""
PACKAGES = (
    "treeckpt",
    "torch",
    "numpy",
    "safetensors",
    "obstore",
    "s3fs",
    "s3torchconnector",
    "orbax-checkpoint",
    "jax",
    "torch_checkpointing",
    "transformers",
    "lightning",
    "accelerate",
    "torchtitan",
    "ray",
)
MIB = 1 << 20


class BenchError(Exception):
    """A contender returned other bytes than were saved, or the processes of a scenario failed."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of one contender."""

    scenario: str
    contender: str
    phase: str
    repetition: int
    seconds: float
    """Until it is durable, or until every page of what was loaded is in memory; of the slowest rank."""
    summed: float
    """Until the processor has also added up every byte that was loaded; of a save the same as `seconds`."""
    nbytes: int
    """Unique bytes of what was saved, or requested by all ranks together."""
    limit: str
    """The name of the limit that its rate is compared with."""
    limits: dict[str, float]
    """Raw rates in bytes a second, measured right before."""
    extra_rss: int
    """Bytes of memory at the peak beyond those right before; of the rank with most."""
    read_bytes: int
    """Fetched from the device (/proc/self/io); all ranks together."""
    write_bytes: int
    files_bytes: int
    """The size of the files."""
    cached: float
    """The part of the files' pages that was in the page cache when the clock started; 0 to 1."""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds

    @property
    def ratio(self) -> float | None:
        """The rate as a part of its limit."""
        limit = self.limits.get(self.limit)
        return self.rate / limit if limit else None


class TrialSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All repetitions of one phase of one contender."""

    scenario: str
    contender: str
    phase: str
    repetitions: int
    nbytes: int
    seconds: float
    fastest: float
    slowest: float
    summed: float
    rate: float
    limit: str
    limit_rate: float | None
    huge_rate: float | None
    """The limit's in huge pages, where that was measured."""
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    extra_rss: int
    """The largest, other than the medians in the other fields."""
    read_bytes: int
    write_bytes: int
    files_bytes: int
    cached: float


def summarize(trials: Iterable[Trial]) -> list[TrialSummary]:
    """Returns a row for each scenario, phase and contender, in this order; phases as in `LIMITS`, all else as met."""
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.scenario, trial.phase, trial.contender), []).append(trial)
    scenarios, phases, contenders = ([*dict.fromkeys(key[part] for key in groups)] for part in range(3))
    phases = [*LIMITS, *phases]
    keys = sorted(groups, key=lambda key: (scenarios.index(key[0]), phases.index(key[1]), contenders.index(key[2])))
    return [_row(groups[key]) for key in keys]


def median_of_known(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _row(trials: Sequence[Trial]) -> TrialSummary:
    first = trials[0]
    seconds = [trial.seconds for trial in trials]
    ratios = [ratio for trial in trials if (ratio := trial.ratio) is not None]
    huge = HUGE.get(first.limit)
    return TrialSummary(
        scenario=first.scenario,
        contender=first.contender,
        phase=first.phase,
        repetitions=len(trials),
        nbytes=first.nbytes,
        seconds=median(seconds),
        fastest=min(seconds),
        slowest=max(seconds),
        summed=median(trial.summed for trial in trials),
        rate=median(trial.rate for trial in trials),
        limit=first.limit,
        limit_rate=median_of_known(trial.limits.get(first.limit) for trial in trials),
        huge_rate=median_of_known(trial.limits.get(huge) for trial in trials) if huge else None,
        ratio=median_of_known(ratios),
        ratio_low=min(ratios, default=None),
        ratio_high=max(ratios, default=None),
        extra_rss=max(trial.extra_rss for trial in trials),
        read_bytes=round(median(trial.read_bytes for trial in trials)),
        write_bytes=round(median(trial.write_bytes for trial in trials)),
        files_bytes=round(median(trial.files_bytes for trial in trials)),
        cached=median(trial.cached for trial in trials),
    )


class Machine(msgspec.Struct, frozen=True):
    """The facts about a machine that figures depend on."""

    cpus: int
    memory: int
    """Bytes."""
    system: str
    python: str
    packages: dict[str, str]
    """The versions of the installed packages."""


def describe_machine() -> Machine:
    """Describes this machine."""
    packages: dict[str, str] = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return Machine(
        cpus=usable_cpus(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages=packages,
    )


def print_rows(text: str, rows: Sequence[TrialSummary]) -> None:
    """Prints the rows of one scenario, a group for each phase."""
    print_line("")
    print_line(text, "bold")
    columns = ("phase", "contender", "s", "range", "GB/s", "of limit", "range ", "limit", "memory", "read", "written")
    cells: list[tuple[str, ...]] = []
    previous = ""
    for row in rows:
        cells.append((row.phase if row.phase != previous else "", *_cells(row)))
        previous = row.phase
    print_table(columns, cells, right=("s", "range", "GB/s", "of limit", "range ", "memory", "read", "written"))


def _cells(row: TrialSummary) -> tuple[str, ...]:
    return (
        row.contender,
        f"{row.seconds:.3f}",
        f"{row.fastest:.3f}-{row.slowest:.3f}",
        f"{row.rate / 1e9:.2f}" if row.limit_rate else "",
        f"{row.ratio:.2f}" if row.ratio is not None else "",
        f"{row.ratio_low:.2f}-{row.ratio_high:.2f}" if row.ratio_low is not None else "",
        _limit(row),
        f"+{row.extra_rss / MIB:.0f} MiB",
        f"{row.read_bytes / row.nbytes:.2f}x",
        f"{row.write_bytes / row.nbytes:.2f}x",
    )


def _limit(row: TrialSummary) -> str:
    if row.limit_rate is None:
        return ""
    huge = f", {row.huge_rate / 1e9:.2f} in huge pages" if row.huge_rate is not None else ""
    return f"{row.limit} {row.limit_rate / 1e9:.2f}{huge}"


def trials_line(trials: Sequence[Trial], repetitions: int) -> str:
    """Returns what a turn took, as one line of progress."""
    first = trials[0]
    parts = ", ".join(f"{trial.phase} {trial.seconds:.3f} s" for trial in trials)
    return f"{first.scenario} {first.repetition + 1}/{repetitions} {first.contender}: {parts}"


# frameworks -----------------------------------------------------------------------------------------------------------

MAX_BLOCKED, MAX_DURABLE = 0.5, 1.2
"""Of the framework's own seconds: what treeckpt may take at most."""


class FrameworkSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The medians of a framework's saves in seconds: of its own checkpoints, and of treeckpt's."""

    framework: str
    saves: int
    own_blocked: float
    blocked: float
    own_durable: float
    durable: float

    @property
    def state(self) -> str:
        """Whether both bars are reached."""
        blocked, durable = self.blocked / self.own_blocked, self.durable / self.own_durable
        return "ok" if blocked <= MAX_BLOCKED and durable <= MAX_DURABLE else "short"


def print_frameworks(rows: Sequence[FrameworkSummary], missing: Sequence[str]) -> None:
    """Prints a line for each framework, and the names of those that are not installed."""
    print_line("")
    print_line("frameworks: seconds of their own checkpoints, of treeckpt's, and the ratio", "bold")
    columns = ("framework", "blocks, own", "treeckpt", f"<= {MAX_BLOCKED}", "durable, own", "treeckpt ")
    columns += (f"<= {MAX_DURABLE}", "bars")
    cells = [
        (
            row.framework,
            f"{row.own_blocked:.3f}",
            f"{row.blocked:.3f}",
            f"{row.blocked / row.own_blocked:.2f}x",
            f"{row.own_durable:.3f}",
            f"{row.durable:.3f}",
            f"{row.durable / row.own_durable:.2f}x",
            row.state,
        )
        for row in rows
    ]
    print_table(columns, cells, right=columns[1:-1])
    if missing:
        print_line(f"not installed: {', '.join(missing)}", "dim")


# incremental saves ----------------------------------------------------------------------------------------------------


class IncrementalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The saves of a contender of a state of which little changes: medians in seconds."""

    state: str
    contender: str
    saves: int
    nbytes: int
    """Bytes of the files that the last save has written."""
    per_changed: float
    """These bytes as a multiple of those that change between two saves."""
    save: float
    load: float


def print_incremental(rows: Sequence[IncrementalSummary], changed: int) -> None:
    """Prints a line for each contender."""
    print_line("")
    print_line(f"incremental: {rows[0].state}, {bytes_text(changed)} change; seconds and bytes of a save", "bold")
    columns = ("contender", "written", "x changed", "save", "load")
    cells = [
        (row.contender, bytes_text(row.nbytes), f"{row.per_changed:.2f}x", f"{row.save:.3f}", f"{row.load:.3f}")
        for row in rows
    ]
    print_table(columns, cells, right=columns[1:])
