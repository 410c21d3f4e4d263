"""The query of the reshard preview: what ranks of a mesh that a person types would read, by the loader's own plan."""

from __future__ import annotations

import math

import msgspec

from treeckpt.core.analysis.outline import Outline
from treeckpt.core.analysis.reshard_preview import RankReads, ReshardPlan, parse_mesh, parse_rules, plan_reshard
from treeckpt.core.format.records import Index
from treeckpt.core.sharding.placements import Mesh, MeshLayout
from treeckpt.errors import TreeckptError

from .pages import CheckpointRow
from .queries import PAGE

__all__ = ["Preset", "ReaderRow", "ReshardPage", "reshard_page"]

MAX_CELLS = 20_000
"""Pairs of a rank and a file that are drawn."""


class ReaderRow(msgspec.Struct, frozen=True):
    """One rank of the target."""

    rank: int
    place: str
    """Where it stands in the mesh."""
    nbytes: int
    """Bytes that it holds after the load."""
    read: int
    amplification: float
    share: float
    """Of the rank that reads the most."""
    reads: int
    files: list[list[int]]
    """[number of a file, bytes read of it]."""


class Preset(msgspec.Struct, frozen=True):
    """A target to begin with."""

    text: str
    mesh: str
    names: str
    place: str


class ReshardPage(msgspec.Struct, frozen=True):
    """A load into another mesh, before it is done."""

    checkpoint: CheckpointRow
    mesh: str
    names: str
    place: str
    problem: str | None
    """Why there is no preview."""
    presets: list[Preset]
    world: int
    planned: int
    """Ranks that were planned, all or as many as one request may cost."""
    arrays: int
    nbytes: int
    held: int
    read: int
    amplification: float
    imbalance: float
    whole: int
    unmatched: int
    left_out: int
    files: int
    start: int
    next: int | None
    rows: list[ReaderRow]
    cells: list[list[int]]
    """[position of a rank among those planned, number of a file, bytes], for as many ranks as can be drawn."""
    ranks: list[int]
    """The ranks of the cells, by position."""


def reshard_page(
    checkpoint: CheckpointRow, outline: Outline, mesh: str, names: str, place: str, start: int
) -> ReshardPage:
    """The preview of a target; without one, of the mesh that saved it, sharded along the first dimension."""
    index = outline.index
    presets = _presets(index)
    if not mesh.strip():
        mesh, names = presets[0].mesh, presets[0].names
    try:
        target = parse_mesh(mesh, names)
        if not place.strip():
            place = "*: " + ", ".join(["Shard(0)", *["Replicate"] * (len(target.shape) - 1)])
        plan = plan_reshard(index, target, parse_rules(place, target))
    except TreeckptError as error:
        return _without_plan(checkpoint, mesh, names, place, presets, str(error), len(index.file_list))
    rows = [_row(target, rank, plan) for rank in plan.ranks[start : start + PAGE]]
    cells, ranks = _cells(plan)
    return ReshardPage(
        checkpoint, mesh, names, place, None, presets, plan.world, len(plan.ranks), plan.arrays, plan.nbytes,
        plan.held, plan.read, plan.amplification, plan.imbalance, plan.whole, plan.unmatched, plan.left_out,
        len(index.file_list), start, start + PAGE if start + PAGE < len(plan.ranks) else None, rows, cells, ranks,
    )  # fmt: skip


def _without_plan(
    checkpoint: CheckpointRow, mesh: str, names: str, place: str, presets: list[Preset], problem: str, files: int
) -> ReshardPage:
    return ReshardPage(
        checkpoint, mesh, names, place, problem, presets, 0, 0, 0, 0, 0, 0, 1.0, 1.0, 0, 0, 0, files, 0, None, [], [],
        [],
    )  # fmt: skip


def _row(mesh: Mesh, rank: RankReads, plan: ReshardPlan) -> ReaderRow:
    most = max(other.read for other in plan.ranks)
    return ReaderRow(
        rank.rank,
        _place(mesh, rank.rank),
        rank.nbytes,
        rank.read,
        rank.read / rank.nbytes if rank.nbytes else 1.0,
        rank.read / most if most else 0.0,
        rank.reads,
        [list(pair) for pair in rank.files],
    )


def _place(mesh: Mesh, rank: int) -> str:
    at: list[str] = []
    names = mesh.names or tuple(f"{d}" for d in range(len(mesh.shape)))
    for d in range(len(mesh.shape)):
        stride = math.prod(mesh.shape[d + 1 :])
        at.append(f"{names[d]} {rank // stride % mesh.shape[d]}")
    return ", ".join(at)


def _cells(plan: ReshardPlan) -> tuple[list[list[int]], list[int]]:
    cells: list[list[int]] = []
    ranks: list[int] = []
    for position, rank in enumerate(plan.ranks):
        if len(cells) + len(rank.files) > MAX_CELLS:
            break
        ranks.append(rank.rank)
        cells += [[position, number, nbytes] for number, nbytes in rank.files]
    return cells, ranks


def _presets(index: Index) -> list[Preset]:
    """The mesh of the save, and common other ones."""
    meshes = [layout.mesh for layout in index.layouts if isinstance(layout, MeshLayout)]
    saved = max(meshes, key=lambda mesh: (math.prod(mesh.shape) > 1, len(mesh.shape)), default=None)
    shape = saved.shape if saved is not None else (index.world,)
    names = ",".join(saved.names) if saved is not None else ""
    one = "*: " + ", ".join(["Shard(0)", *["Replicate"] * (len(shape) - 1)])
    world = max(index.world, 2)
    return [
        Preset("the mesh of the save", "x".join(map(str, shape)), names, one),
        Preset("one rank", "1", "", "*: Replicate"),
        Preset(f"fully sharded over {2 * world}", f"{2 * world}", "dp", "*: Shard(0)"),
        Preset(f"sharded over {world}, two replicas", f"2x{world}", "replica,dp", "*: Replicate, Shard(0)"),
        Preset("tensor parallel over 2", "2", "tp", "*: Shard(1)"),
    ]
