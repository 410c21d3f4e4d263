"""Compares the ranks of a save: a matrix of ranks by phases, grouped by host or mesh dimension, and its stragglers.

A rank is a straggler in a phase where its modified z-score (Iglewicz and Hoaglin), 0.6745 (x - median) / MAD, is above
3.5. Where most ranks take the same time to the nanosecond, the deviation is zero and the score has no meaning, so a
straggler must also be slower than the median by a fifth. One that loses less than a hundredth of the save is none: to
be as fast as the median there would gain nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from .._core.format.records import Index
from .._core.format.timings import Host
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.placements import Mesh, MeshLayout, mesh_ranks
from .profile import COORDINATOR_PHASES, LATE_CALL, ROOT_SPAN, WAITING_PHASES, SaveProfile, SpanColumns, covered_ns

MAX_PHASES = 512
MIN_SCORE = 3.5
MIN_SLOWDOWN = 1.2
MIN_LOSS_NS = 1_000_000
"""Nanoseconds: a rank that loses less than a millisecond to the median is no straggler."""
MIN_SHARE = 0.01
"""Part of the duration of the save below which a loss is none either."""


@dataclass(frozen=True, slots=True)
class PhaseMatrix:
    """The time of each row (a rank or a group of ranks) in each phase."""

    phases: tuple[str, ...]
    ranks: np.ndarray
    """int64[rows]: the rank of each row; the first rank of a group."""
    times: np.ndarray
    """int64[rows, phases]: nanoseconds, -1 where a row has no such phase."""
    slowest: np.ndarray
    """int64[rows, phases]: the rank whose time it is."""


class Straggler(msgspec.Struct, frozen=True):
    """A rank that was slow in a phase, or in all its work, or that called save late."""

    rank: int
    phase: str
    """Empty for all the work that ranks have in common."""
    ns: int
    median_ns: int
    score: float
    """Modified z-score; infinite where the other ranks do not differ at all."""

    @property
    def lost_ns(self) -> int:
        return self.ns - self.median_ns

    @property
    def times(self) -> float:
        return self.ns / self.median_ns if self.median_ns else float("inf")


@dataclass(frozen=True, slots=True)
class RankGrouping:
    """A partition of the ranks: by host, or by their coordinate along one dimension of a mesh."""

    name: str
    labels: tuple[str, ...]
    of: np.ndarray
    """int64[world]: the group of each rank, -1 for none."""


def phase_matrix(spans: SpanColumns) -> PhaseMatrix:
    """Computes the time of each rank in each phase except the root span; phases in the order of their first start."""
    ranks, row = np.unique(spans.rank, return_inverse=True)
    shown = [n for n, name in enumerate(spans.names) if name != ROOT_SPAN and (spans.name == n).any()][:MAX_PHASES]
    column = np.full(len(spans.names), -1)
    column[shown] = np.arange(len(shown))
    mine = column[spans.name] >= 0 if len(spans.name) else np.zeros(0, bool)
    group = row[mine] * len(shown) + column[spans.name[mine]]
    times = covered_ns(group, spans.start[mine], spans.stop[mine], len(ranks) * len(shown))
    present = np.zeros(len(times), bool)
    present[group] = True
    times = np.where(present, times, -1).reshape(len(ranks), len(shown))
    slowest = np.broadcast_to(ranks[:, None], times.shape)
    return PhaseMatrix(tuple(spans.names[n] for n in shown), ranks, times, slowest)


def group_phase_matrix(matrix: PhaseMatrix, grouping: RankGrouping) -> tuple[PhaseMatrix, tuple[str, ...]]:
    """Reduces a matrix to one row for each group that has a rank: the longest time in each phase, and its rank.

    Returns:
        The matrix, and the labels of its rows.
    """
    of = grouping.of[matrix.ranks] if len(matrix.ranks) else np.zeros(0, np.int64)
    rows = [np.flatnonzero(of == group) for group in range(len(grouping.labels))]
    kept = [(label, row) for label, row in zip(grouping.labels, rows, strict=True) if len(row)]
    columns = np.arange(len(matrix.phases))
    firsts = np.array([row[0] for _, row in kept], np.int64)
    tops = np.array([row[matrix.times[row].argmax(0)] for _, row in kept], np.int64).reshape(len(kept), len(columns))
    grouped = PhaseMatrix(matrix.phases, matrix.ranks[firsts], matrix.times[tops, columns], matrix.ranks[tops])
    return grouped, tuple(label for label, _ in kept)


def rank_groupings(world: int, hosts: Sequence[Host], index: Index | None) -> tuple[RankGrouping, ...]:
    """Returns the groupings of the ranks: by host, then by each dimension of the meshes that arrays were placed on."""
    found: list[RankGrouping] = []
    if hosts:
        of = np.full(world, -1, np.int64)
        for number, host in enumerate(hosts):
            of[decode_runs(host.ranks)] = number
        found.append(RankGrouping("host", tuple(host.name for host in hosts), of))
    meshes = _named_meshes(index) if index is not None else []
    for name in dict.fromkeys(name for mesh in meshes for name in mesh.names):
        of = np.full(world, -1, np.int64)
        for mesh in meshes:
            if name not in mesh.names:
                continue
            ranks, dim = mesh_ranks(mesh), mesh.names.index(name)
            where = np.unravel_index(np.arange(len(ranks)), mesh.shape)[dim]
            known = (ranks >= 0) & (ranks < world)
            free = known & (of[np.where(known, ranks, 0)] < 0)
            of[ranks[free]] = where[free]
        size = int(of.max(initial=-1)) + 1
        found.append(RankGrouping(name, tuple(f"{name} {n}" for n in range(size)), of))
    return tuple(found)


def _named_meshes(index: Index) -> list[Mesh]:
    """Returns the named meshes of an index, the largest first."""
    found = {layout.mesh for layout in index.layouts if isinstance(layout, MeshLayout) and layout.mesh.names}
    return sorted(found, key=lambda mesh: (-len(mesh_ranks(mesh)), -len(mesh.names), mesh.names, mesh.ranks))


def find_stragglers(profile: SaveProfile, matrix: PhaseMatrix) -> tuple[Straggler, ...]:
    """Returns the stragglers, the largest loss of time first. Phases of waiting or of the coordinator have none.

    A rank that called save later than the others is one in the phase LATE_CALL.
    """
    found: list[Straggler] = []
    least_ns = max(MIN_LOSS_NS, MIN_SHARE * profile.seconds * 1e9)
    for column, phase in enumerate(matrix.phases):
        if phase not in WAITING_PHASES | COORDINATOR_PHASES:
            rows = np.flatnonzero(matrix.times[:, column] >= 0)
            found += _outliers(phase, matrix.ranks[rows], matrix.times[rows, column], least_ns)
    ranks = np.array([r.rank for r in profile.ranks], np.int64)
    starts = [r.start_ns - profile.start_ns for r in profile.ranks]
    found += _outliers("", ranks, np.array([r.busy_ns for r in profile.ranks], np.int64), least_ns)
    found += _outliers(LATE_CALL, ranks, np.array(starts, np.int64), least_ns)
    return tuple(sorted(found, key=lambda s: (-s.lost_ns, s.rank, s.phase)))


def _outliers(phase: str, ranks: np.ndarray, times: np.ndarray, least_ns: float) -> list[Straggler]:
    if len(times) < 3:  # of two ranks none is the outlier
        return []
    median = int(np.partition(times, (len(times) - 1) // 2)[(len(times) - 1) // 2])
    deviation = float(np.median(np.abs(times - median)))
    far = (times > median * MIN_SLOWDOWN) & (times - median >= least_ns)
    scores = 0.6745 * (times - median) / deviation if deviation else np.full(len(times), np.inf)
    return [
        Straggler(int(ranks[at]), phase, int(times[at]), median, float(scores[at]))
        for at in np.flatnonzero(far & (scores > MIN_SCORE)).tolist()
    ]
