"""How many bytes the checkpoints of a run take: now, and later under a retention policy.

Retention is simulated: saves are added at the run's usual interval, each of the usual bytes, with the metrics of the
newest checkpoint, and the policies choose from all of them. Policies that choose once from many saves choose the same
as after each save, so that one choice for each point in time is enough. The command line and the dashboard show what is
computed here. Nothing is read or deleted here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from ..policy import All, EveryPeriod, EverySteps, KeepError, Policy, StepInfo, keep_text, kept, parse_keep
from .catalog import CheckpointInfo, id_of, needed_nbytes, step_info, sum_nbytes
from .run_state import SavePattern, activity_at, signs_of_run

DAY, WEEK = 86_400.0, 7 * 86_400.0
POINTS = (DAY, WEEK, 2 * WEEK)
"""Seconds from now for which bytes are computed; behind the last point they grow as between the last two."""
MAX_SAVES = 5_000
"""Saves that are simulated; where a run makes more until the last point, all points are earlier, in proportion."""
PERIODS = 20
"""Checkpoints that a policy by period or step keeps, which are simulated all the same, within MOST_SAVES saves."""
MOST_SAVES = 100_000


def recorded_policies(infos: Iterable[CheckpointInfo]) -> tuple[Policy, ...]:
    """Returns the policies of the manager that saved the newest checkpoint; none where it has not recorded them.

    Args:
        infos: of the run, newest first.
    """
    newest = next((info for info in infos if info.files == "complete"), None)
    if newest is None or newest.lineage is None:
        return ()
    try:
        return parse_keep(newest.lineage.keep)
    except KeepError:
        return ()


Source = Literal["recorded", "dashboard", "given", "all"]


class Projection(msgspec.Struct, frozen=True):
    """The bytes of all files of a run over time under policies."""

    source: Source
    """Where the policies come from, see `ProjectionRow`."""
    keep: str
    """The policies, as `treeckpt.policy.keep_text` has them."""
    points: tuple[tuple[float, int], ...]
    """(seconds from now, bytes then), from now on. While a save is written, it takes its bytes more."""

    def after(self, seconds: float) -> float:
        """Returns the bytes so many seconds from now."""
        pairs = list(pairwise(self.points))
        (early, low), (late, high) = next((pair for pair in pairs if seconds <= pair[1][0]), pairs[-1])
        return max(0.0, low + (high - low) * (seconds - early) / (late - early))

    @property
    def in_a_week(self) -> int:
        """Bytes in a week."""
        return round(self.after(WEEK))

    @property
    def per_day(self) -> float:
        """Bytes per day by which it grows in the end; 0 where the policies delete as much as is saved."""
        (early, low), (late, high) = self.points[-2:]
        return (high - low) / (late - early) * DAY


class RunUsage(msgspec.Struct, frozen=True):
    """The bytes of a run, and how they grow."""

    checkpoints: int
    """Directories that hold one, whatever its state; none of other programs."""
    nbytes: int
    """Bytes of all their files."""
    live: bool
    """Whether the run still saves: see `RunActivity.live`."""
    pattern: SavePattern | None
    """How it saves; None where too few saves followed each other to know."""
    projections: tuple[Projection, ...]
    """What it would take if it went on as it saved last: under the policies that were asked for, under its own, and if
    nothing were deleted. Empty without a pattern."""

    def at(self, infos: Sequence[CheckpointInfo], now_ns: int) -> RunUsage:
        """Returns the same at another time, at which the run may have ended."""
        return msgspec.structs.replace(self, live=activity_at(signs_of_run(infos), now_ns).live)

    @property
    def written_per_day(self) -> float | None:
        """Bytes that a live run writes per day, whatever is deleted; 0 for one that has ended, None if not known."""
        if not self.live:
            return 0.0
        return self.pattern.nbytes * DAY / self.pattern.seconds if self.pattern else None

    @property
    def growth_per_day(self) -> float | None:
        """Bytes per day by which it grows in the end; 0 for one that has ended, None if not known."""
        if not self.live:
            return 0.0
        return self.projections[0].per_day if self.projections else None


def usage_of_run(
    infos: Sequence[CheckpointInfo],
    now_ns: int,
    *,
    given: Sequence[Policy] | None = None,
    default: Sequence[Policy] = (),
) -> RunUsage:
    """Returns the bytes of a run, and how they grow.

    Args:
        infos: of the run, newest first.
        given: policies that were asked for.
        default: the policies of a run that has recorded none, if they are known.
    """
    infos = [info for info in infos if info.files != "foreign"]
    recorded = recorded_policies(infos)
    wanted: list[tuple[Source, Sequence[Policy]]] = [("given", given)] if given else []
    if own := recorded or default:
        wanted.append(("recorded" if recorded else "dashboard", own))
    wanted.append(("all", (All(),)))
    signs = signs_of_run(infos)
    pattern = signs.pattern
    projections = tuple(project(infos, pattern, now_ns, each, source) for source, each in wanted) if pattern else ()
    return RunUsage(
        checkpoints=len(infos),
        nbytes=sum_nbytes(infos),
        live=activity_at(signs, now_ns).live,
        pattern=pattern,
        projections=projections,
    )


def project(
    infos: Sequence[CheckpointInfo],
    pattern: SavePattern,
    now_ns: int,
    policies: Sequence[Policy],
    source: Source = "given",
) -> Projection:
    """Simulates the saves and clean-ups of a run that goes on as it saved last.

    What policies do not decide about, as damaged checkpoints and files of other programs, stays; and so do the files
    that a checkpoint shares which stays.
    """
    steps = {step: info for info in infos if info.files == "complete" and (step := id_of(info)) is not None}
    nbytes = {step: info.disk_nbytes or 0 for step, info in steps.items()}
    homes = {info.name: step for step, info in steps.items()}
    shared = {step: info.shared_with for step, info in steps.items()}
    newest = next(iter(shared.values()), {})  # as what comes will share
    total = sum_nbytes(infos)
    others = total - sum(nbytes.values())
    held = [step_info(info) for info in steps.values()]
    scale = min(1.0, _simulated_saves(policies, pattern) * pattern.seconds / POINTS[-1])
    coming = _coming_saves(held, pattern, now_ns, int(POINTS[-1] * scale / pattern.seconds))
    points, done, whole = [(0.0, total)], 0, any(isinstance(policy, All) for policy in policies)
    for seconds in (point * scale for point in POINTS):
        count = int(seconds / pattern.seconds)
        new = coming[done:count]
        replaced = {info.step for info in new}  # as on an abandoned branch
        held, done = [*(info for info in held if info.step not in replaced), *new], count
        nbytes |= dict.fromkeys(replaced, pattern.nbytes)
        stays = nbytes.keys() if whole else kept(held, policies)
        held = [info for info in held if info.step in stays]
        needed = needed_nbytes(shared.get(step, newest) for step in stays)
        left = sum(count for name, count in needed.items() if name in homes and homes[name] not in stays)
        points.append((seconds, others + left + sum(nbytes[step] for step in stays)))
    return Projection(source, keep_text(policies), tuple(points))


def _simulated_saves(policies: Sequence[Policy], pattern: SavePattern) -> float:
    """Returns how many saves show how policies let a run grow in the end."""
    periods = [policy.seconds / pattern.seconds for policy in policies if isinstance(policy, EveryPeriod)]
    periods += [policy.steps / pattern.steps for policy in policies if isinstance(policy, EverySteps)]
    return min(max(MAX_SAVES, PERIODS * max(periods, default=0.0)), MOST_SAVES)


def _coming_saves(held: Sequence[StepInfo], pattern: SavePattern, now_ns: int, count: int) -> list[StepInfo]:
    """Returns the next saves of a run: behind its newest checkpoint, and with its metrics."""
    newest = max(held, key=lambda info: info.age, default=StepInfo(0, now_ns))
    present = [info.step for info in held if isinstance(info.step, int) and not info.abandoned]
    step, sequence = max(present, default=0), max((info.age[1] for info in held), default=0)
    return [
        StepInfo(
            step + number * pattern.steps,
            now_ns + int(number * pattern.seconds * 1e9),
            metrics=newest.metrics,
            sequence=sequence + number,
        )
        for number in range(1, count + 1)
    ]


class FileSystem(msgspec.Struct, frozen=True):
    """A file system that holds runs."""

    number: int
    """Equal for runs on the same one."""
    free: int
    total: int


def disk_of(path: Path) -> FileSystem | None:
    """Returns the file system of a local directory; None where it cannot be asked."""
    try:
        usage = shutil.disk_usage(path)
        return FileSystem(path.stat().st_dev, usage.free, usage.total)
    except OSError:
        return None


def seconds_until_full(free: int, usages: Iterable[RunUsage]) -> float | None:
    """Returns the seconds until a file system is full by the growth of the live runs on it; None where it never is.

    Each grows under the first of its projections; of a run without one, nothing is known.
    """
    growing = [usage.projections[0] for usage in usages if usage.live and usage.projections]

    def grown(seconds: float) -> float:
        return sum(one.after(seconds) - one.points[0][1] for one in growing)

    times = sorted({seconds for one in growing for seconds, _ in one.points})
    for early, late in pairwise(times):
        if (high := grown(late)) >= free:
            low = grown(early)
            return early + (late - early) * (free - low) / (high - low) if high > low else early
    rate = sum(one.per_day for one in growing) / DAY
    return times[-1] + (free - grown(times[-1])) / rate if rate > 0 else None


class ProjectionRow(msgspec.Struct, frozen=True):
    """What a run takes under policies if it goes on as it saved last."""

    source: Source
    """given: asked for; recorded: by the manager that saved last; dashboard: given at its start; all: none."""
    keep: str
    in_a_week: int
    """Bytes in a week."""
    per_day: float
    """Bytes per day by which it grows in the end."""


class UsageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the command and the page of usage show of one run, beside the bytes that it has."""

    live: bool | None
    """Whether it still saves; None, as all that follows, until all of its directories are read."""
    between: float | None
    """Usual seconds between two saves."""
    save_nbytes: int | None
    """Usual bytes of a save."""
    written_per_day: float | None
    """Bytes that it writes per day, whatever is deleted; 0 once it has ended."""
    per_day: float | None
    """Bytes per day by which it grows in the end under the first of `projections`; 0 once it has ended."""
    projections: list[ProjectionRow]
    """Under the policies that were asked for, under its own, and with nothing deleted."""
    disk: int | None
    """Equal for runs on the same disk; None if that is not known, as of object stores."""
    disk_free: int | None
    disk_total: int | None
    disk_live: int | None
    """Live runs on the same disk, this one included."""
    days: float | None
    """Days until the disk is full by the growth of those; None where it never is, or is not known."""


def usage_figures(usages: Sequence[RunUsage | None], disks: Sequence[FileSystem | None]) -> list[UsageFigures]:
    """Returns what is shown of several runs, whose disks fill by the growth of all live ones on them.

    Args:
        usages: None for a run that is still being read.
        disks: on which these runs are.
    """
    found: list[UsageFigures] = []
    on_disk: dict[int, list[RunUsage | None]] = {}
    for usage, disk in zip(usages, disks, strict=True):
        on_disk.setdefault(disk.number if disk is not None else -1, []).append(usage)
    # None of a disk with a run that is still being read
    known = {number: None if None in beside else [one for one in beside if one] for number, beside in on_disk.items()}
    free = {disk.number: disk.free for disk in disks if disk is not None}
    full = {number: seconds_until_full(nbytes, known[number] or ()) for number, nbytes in free.items()}
    for usage, disk in zip(usages, disks, strict=True):
        beside = known[disk.number] if disk is not None else None
        seconds = full[disk.number] if disk is not None and beside is not None else None
        pattern = usage.pattern if usage else None
        projections = usage.projections if usage else ()
        found.append(
            UsageFigures(
                live=usage.live if usage else None,
                between=pattern.seconds if pattern else None,
                save_nbytes=pattern.nbytes if pattern else None,
                written_per_day=usage.written_per_day if usage else None,
                per_day=usage.growth_per_day if usage else None,
                projections=[ProjectionRow(one.source, one.keep, one.in_a_week, one.per_day) for one in projections],
                disk=disk.number if disk else None,
                disk_free=disk.free if disk else None,
                disk_total=disk.total if disk else None,
                disk_live=sum(one.live for one in beside) if beside is not None else None,
                days=seconds / DAY if seconds is not None else None,
            )
        )
    return found
