"""Trials of the benchmark, and their medians and ranges. Pure: no clock, no disk, no torch.

A trial is one operation (a phase) of one contender in one repetition, with the raw limits that were measured right
before it. Its rate is compared with those limits only, never with those of another moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal, NamedTuple, get_args

import msgspec

DiskPhase = Literal["save", "load cold", "load warm", "fill cold", "fill warm", "first cold", "first warm"]
RemotePhase = Literal["save remote", "load remote", "fill remote", "restore remote"]
Phase = DiskPhase | RemotePhase
Limit = Literal["W", "R", "R_fresh", "C", "plain", "plain_fresh", "W_huge", "R_huge"]
RemoteLimit = Literal["put", "get", "get_fresh"]
DeviceLimit = Literal["D2H", "H2D"]
AnyLimit = Limit | RemoteLimit | DeviceLimit

PHASES: tuple[DiskPhase, ...] = get_args(DiskPhase)
"""`load` makes a new tree, `fill` fills one that exists, `first` does so once all checksums were compared (treeckpt's
`fill` compares each block as it is put in place); cold is from the device, warm from the page cache."""
REMOTE_PHASES: tuple[RemotePhase, ...] = get_args(RemotePhase)
"""To and from an object store; `restore` is `Manager.restore`, which finds the newest checkpoint first."""

HOST = (2, 4, 8)
"""Numbers of ranks of one host that load the same."""
LIMITS: dict[DiskPhase, Limit] = {
    "save": "W",
    "load cold": "R_fresh",
    "load warm": "plain_fresh",
    "fill cold": "R",
    "fill warm": "plain",
    "first cold": "R",
    "first warm": "plain",
}
REMOTE_LIMITS: dict[RemotePhase, RemoteLimit] = {
    "save remote": "put",
    "load remote": "get_fresh",
    "fill remote": "get",
    "restore remote": "get_fresh",
}
"""The limit that each phase is compared with; those of an object store are an upload in parts, and ranges into touched
and into new memory."""
_LIMITS: dict[Phase, AnyLimit] = {**LIMITS, **REMOTE_LIMITS}
HUGE: dict[AnyLimit, Limit] = {"W": "W_huge", "R": "R_huge"}
"""What the device takes or gives where huge pages are used; reported beside a limit."""


class Link(NamedTuple):
    """The way to an object store."""

    latency: float
    """Milliseconds before each answer."""
    rate: float
    """MB/s of one connection, in each direction; 0 is as fast as it goes."""

    @property
    def scenario(self) -> str:
        """The name under which its trials stand."""
        return f"remote {self.latency:g}/{self.rate:g}"


RAW = "raw"
"""The first word of contenders whose best rates are the limits of the others."""
SERVER_LINK = Link(0, 0)
"""No latency, and no limit of a connection: what the server itself can do."""
LINKS = (Link(1, 1000), Link(40, 90), Link(150, 30))
"""Those that are measured unless others are asked for: a store nearby, one in the region, one across an ocean."""


class Trial(msgspec.Struct, frozen=True):
    """One operation of one contender."""

    scenario: str
    contender: str
    phase: Phase
    repetition: int
    ranks: int
    seconds: float
    """Until it is durable, or until every page of what was loaded is in memory; of the slowest rank."""
    summed: float
    """Of a load: until the processor has also added up every byte. Of a save: the same as `seconds`."""
    nbytes: int
    """Unique bytes of what was saved, or requested by all ranks together."""
    limits: dict[AnyLimit, float]
    """Raw rates in bytes a second, measured right before; those of an object store in the same repetition."""
    extra_rss: int
    """Bytes of memory at the peak beyond those right before; of the rank with most."""
    read_bytes: int
    """Fetched from the device (/proc/self/io), or sent by the object store; all ranks together."""
    write_bytes: int
    files_bytes: int
    """The size of the files."""
    cached: float
    """The part of the files' pages that was in the page cache when the clock started; 0 to 1."""
    requests: int = 0
    """To the object store."""
    cut: bool = False
    """It took longer than it was given; `seconds` is what it was given."""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds

    @property
    def ratio(self) -> float | None:
        """The rate as a part of its limit."""
        limit = self.limits.get(_LIMITS[self.phase])
        return self.rate / limit if limit else None


class AsyncTrial(msgspec.Struct, frozen=True):
    """One save in the background. Repetition 0 is the first, right after what can be prepared was prepared."""

    scenario: str
    contender: str
    repetition: int
    nbytes: int
    blocked: float
    """Seconds until training may go on and change the state."""
    durable: float
    """Seconds until the save is durable."""
    copy_rate: float | None
    """C, measured right before; of a state on a device, D2H."""
    interference: float | None
    """Time lost by the steps beside the save, as a part of `durable`."""
    gap: float | None
    """Seconds for which a thread that wants the interpreter every millisecond did not get it, at the longest."""
    idle_gap: float | None
    """The same while nothing else runs."""

    @property
    def stall(self) -> float | None:
        """Time blocked beside that of one copy into warm memory."""
        return self.blocked * self.copy_rate / self.nbytes if self.copy_rate else None


class AsyncSummary(msgspec.Struct, frozen=True):
    """All saves in the background of one contender: the first, and medians of those after it."""

    scenario: str
    contender: str
    repetitions: int
    nbytes: int
    first: float
    blocked: float
    blocked_low: float
    blocked_high: float
    durable: float
    stall: float | None
    interference: float | None
    gap: float | None
    """The median of the longest."""
    idle_gap: float | None


def summarize_async(trials: Sequence[AsyncTrial]) -> list[AsyncSummary]:
    """A row for each scenario and contender, as they first occur."""
    groups: dict[tuple[str, str], list[AsyncTrial]] = {}
    for trial in sorted(trials, key=lambda trial: trial.repetition):
        groups.setdefault((trial.scenario, trial.contender), []).append(trial)
    return [_async_row(group[0], group[1:] or group) for group in groups.values()]


def _async_row(first: AsyncTrial, warm: Sequence[AsyncTrial]) -> AsyncSummary:
    blocked = [trial.blocked for trial in warm]
    return AsyncSummary(
        scenario=first.scenario,
        contender=first.contender,
        repetitions=len(warm),
        nbytes=first.nbytes,
        first=first.blocked,
        blocked=median(blocked),
        blocked_low=min(blocked),
        blocked_high=max(blocked),
        durable=median(trial.durable for trial in warm),
        stall=_median_of_known(trial.stall for trial in warm),
        interference=_median_of_known(trial.interference for trial in warm),
        gap=_median_of_known(trial.gap for trial in warm),
        idle_gap=_median_of_known(trial.idle_gap for trial in warm),
    )


def _median_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


class TrialSummary(msgspec.Struct, frozen=True):
    """All repetitions of one phase of one contender."""

    scenario: str
    contender: str
    phase: Phase
    repetitions: int
    nbytes: int
    seconds: float
    fastest: float
    slowest: float
    summed: float
    rate: float
    limit: AnyLimit
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
    requests: int
    cut: bool
    """A trial was; then times are lower bounds, rates and ratios upper bounds."""

    @property
    def loaded(self) -> int:
        """Bytes of the new tree that the operation makes."""
        return self.nbytes if self.phase.partition(" ")[0] in ("load", "restore") else 0


def with_remote_limits(turns: Sequence[Sequence[Trial]]) -> list[list[Trial]]:
    """Returns the turns of one repetition on one link, with the best rates of the raw contenders as their limits."""
    best: dict[AnyLimit, float] = {}
    for trial in itertools.chain.from_iterable(turns):
        if trial.contender.startswith(RAW):
            limit = _LIMITS[trial.phase]
            best[limit] = max(best.get(limit, 0.0), trial.rate)
    return [[msgspec.structs.replace(trial, limits=best) for trial in trials] for trials in turns]


def summarize(trials: Sequence[Trial]) -> list[TrialSummary]:
    """A row for each scenario, phase and contender, in this order, as they first occur."""
    groups: dict[tuple[str, Phase, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.scenario, trial.phase, trial.contender), []).append(trial)
    scenarios = list(dict.fromkeys(trial.scenario for trial in trials))
    contenders = list(dict.fromkeys(t.contender for t in sorted(trials, key=lambda t: t.repetition)))
    phases = (*PHASES, *REMOTE_PHASES)
    order = sorted(groups, key=lambda key: (scenarios.index(key[0]), phases.index(key[1]), contenders.index(key[2])))
    return [_row(groups[key]) for key in order]


def _row(trials: Sequence[Trial]) -> TrialSummary:
    first = trials[0]
    seconds = [trial.seconds for trial in trials]
    ratios = [ratio for trial in trials if (ratio := trial.ratio) is not None]
    limit = _LIMITS[first.phase]
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
        limit=limit,
        limit_rate=_median_of_known(trial.limits.get(limit) for trial in trials),
        huge_rate=_median_of_known(trial.limits.get(HUGE[limit]) for trial in trials) if limit in HUGE else None,
        ratio=_median_of_known(ratios),
        ratio_low=min(ratios, default=None),
        ratio_high=max(ratios, default=None),
        extra_rss=max(trial.extra_rss for trial in trials),
        read_bytes=round(median(trial.read_bytes for trial in trials)),
        write_bytes=round(median(trial.write_bytes for trial in trials)),
        files_bytes=round(median(trial.files_bytes for trial in trials)),
        cached=median(trial.cached for trial in trials),
        requests=round(median(trial.requests for trial in trials)),
        cut=any(trial.cut for trial in trials),
    )
