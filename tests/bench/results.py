"""Trials of developers' measurements, and their medians: of several ranks, of object stores, of background saves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from treeckpt._bench.results import Trial, TrialSummary, median_of_known, summarize

REMOTE_LIMITS = {
    "save remote": "put",
    "load remote": "get_fresh",
    "fill remote": "get",
    "restore remote": "get_fresh",
}
"""The limit that each phase is compared with: an upload in parts, and ranges into touched and into new memory.

`restore` is `Manager.restore`, which finds the newest checkpoint first."""
REMOTE_PHASES = tuple(REMOTE_LIMITS)
HOST = (2, 4, 8)
"""Numbers of ranks of one host that load the same."""


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


class RankTrial(Trial, frozen=True, kw_only=True):
    """One operation of one contender on several ranks."""

    ranks: int


class RemoteTrial(Trial, frozen=True, kw_only=True):
    """One operation with an object store; `read_bytes` is what it has sent, limits are of the same repetition."""

    requests: int = 0
    cut: bool = False
    """It took longer than it was given; `seconds` is what it was given."""


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
        stall=median_of_known(trial.stall for trial in warm),
        interference=median_of_known(trial.interference for trial in warm),
        gap=median_of_known(trial.gap for trial in warm),
        idle_gap=median_of_known(trial.idle_gap for trial in warm),
    )


class RemoteSummary(TrialSummary, frozen=True, kw_only=True):
    """All repetitions of one phase of one contender with an object store."""

    requests: int
    cut: bool
    """A trial was; then times are lower bounds, rates and ratios upper bounds."""

    @property
    def loaded(self) -> int:
        """Bytes of the new tree that the operation makes."""
        return self.nbytes if self.phase.partition(" ")[0] in ("load", "restore") else 0


def summarize_all(trials: Sequence[Trial]) -> list[TrialSummary]:
    """Returns a row for each scenario, phase and contender."""
    remote = [trial for trial in trials if isinstance(trial, RemoteTrial)]
    return [*summarize(trial for trial in trials if trial not in remote), *summarize_remote(remote)]


def summarize_remote(trials: Sequence[RemoteTrial]) -> list[RemoteSummary]:
    """Returns the rows of trials with an object store, with their requests, and whether one was cut."""
    found: list[RemoteSummary] = []
    for row in summarize(trials):
        key = row.scenario, row.phase, row.contender
        own = [trial for trial in trials if (trial.scenario, trial.phase, trial.contender) == key]
        requests, cut = round(median(trial.requests for trial in own)), any(trial.cut for trial in own)
        found.append(RemoteSummary(**msgspec.structs.asdict(row), requests=requests, cut=cut))
    return found


def with_remote_limits(turns: Sequence[Sequence[RemoteTrial]]) -> list[list[RemoteTrial]]:
    """Returns the turns of one repetition on one link, with the best rates of the raw contenders as their limits."""
    best: dict[str, float] = {}
    for trial in itertools.chain.from_iterable(turns):
        if trial.contender.startswith(RAW):
            best[trial.limit] = max(best.get(trial.limit, 0.0), trial.rate)
    return [[msgspec.structs.replace(trial, limits=best) for trial in trials] for trials in turns]
