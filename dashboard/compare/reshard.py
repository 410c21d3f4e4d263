"""The reshard preview: what each rank of another mesh would read, computed by the loader's own planner."""

from __future__ import annotations

import msgspec
import numpy as np

from treeckpt._core.sharding.placements import Mesh
from treeckpt._inspect.outline import Outline
from treeckpt.errors import TreeckptError

from ..pages.checkpoints import PAGE_ROWS, CheckpointRow, next_start
from .presets import Preset, default_rule, presets_of
from .reshard_plan import RankReads, ReshardPlan, parse_mesh, parse_rules, plan_reshard

MAX_CELLS = 20_000
"""Pairs of a rank and a file that are drawn."""


class ReaderRow(msgspec.Struct, frozen=True):
    """One rank of the target mesh."""

    rank: int
    place: str
    """Its coordinates in the mesh, as text."""
    nbytes: int
    """Bytes that it holds after the load."""
    read: int
    """Bytes that it reads."""
    amplification: float
    """Bytes read for each byte held."""
    share: float
    """Bytes read, as a share of those of the rank that reads the most."""
    reads: int
    files: list[list[int]]
    """[number of a file, bytes read of it]."""


class ReshardPage(msgspec.Struct, frozen=True, kw_only=True):
    """The preview of a load into another mesh; without a plan, the numbers are those of an empty one."""

    checkpoint: CheckpointRow
    mesh: str
    names: str
    place: str
    problem: str | None = None
    """Why there is no preview."""
    presets: list[Preset]
    world: int = 0
    planned: int = 0
    """Ranks that were planned: all of them, or as many as one request may take."""
    arrays: int = 0
    nbytes: int = 0
    held: int = 0
    read: int = 0
    amplification: float = 1.0
    imbalance: float = 1.0
    whole: int = 0
    unmatched: int = 0
    left_out: int = 0
    files: int
    start: int = 0
    next: int | None = None
    rows: list[ReaderRow] = []
    cells: list[list[int]] = []
    """[position of a planned rank, number of a file, bytes], for as many ranks as can be drawn."""
    ranks: list[int] = []
    """The rank at each position of the cells."""


def reshard_page(
    checkpoint: CheckpointRow, outline: Outline, mesh: str, names: str, place: str, start: int
) -> ReshardPage:
    """Returns the preview of a target mesh; by default of the mesh and the placements of the save."""
    index = outline.index
    presets, files = presets_of(index), len(index.file_list)
    if not mesh.strip():
        mesh, names, place = presets[0].mesh, presets[0].names, place if place.strip() else presets[0].place
    try:
        target = parse_mesh(mesh, names)
        place = place if place.strip() else default_rule(index, target)
        plan = plan_reshard(index, target, parse_rules(place, target))
    except TreeckptError as error:
        return ReshardPage(
            checkpoint=checkpoint,
            mesh=mesh,
            names=names,
            place=place,
            problem=str(error),
            presets=presets,
            files=files,
        )
    cells, ranks = _cells(plan)
    return ReshardPage(
        checkpoint=checkpoint,
        mesh=mesh,
        names=names,
        place=place,
        presets=presets,
        world=plan.world,
        planned=len(plan.ranks),
        arrays=plan.arrays,
        nbytes=plan.nbytes,
        held=plan.held,
        read=plan.read,
        amplification=plan.amplification,
        imbalance=plan.imbalance,
        whole=plan.whole,
        unmatched=plan.unmatched,
        left_out=plan.left_out,
        files=files,
        start=start,
        next=next_start(start, len(plan.ranks)),
        rows=[_row(target, rank, plan) for rank in plan.ranks[start : start + PAGE_ROWS]],
        cells=cells,
        ranks=ranks,
    )


def _row(mesh: Mesh, rank: RankReads, plan: ReshardPlan) -> ReaderRow:
    most = max(other.read for other in plan.ranks)
    return ReaderRow(
        rank.rank,
        _coordinates(mesh, rank.rank),
        nbytes=rank.nbytes,
        read=rank.read,
        amplification=rank.read / rank.nbytes if rank.nbytes else 1.0,
        share=rank.read / most if most else 0.0,
        reads=rank.reads,
        files=[list(pair) for pair in rank.files],
    )


def _coordinates(mesh: Mesh, rank: int) -> str:
    names = mesh.names or map(str, range(len(mesh.shape)))
    position = np.unravel_index(rank, mesh.shape)
    return ", ".join(f"{name} {at}" for name, at in zip(names, position, strict=True))


def _cells(plan: ReshardPlan) -> tuple[list[list[int]], list[int]]:
    cells: list[list[int]] = []
    ranks: list[int] = []
    for position, rank in enumerate(plan.ranks):
        if len(cells) + len(rank.files) > MAX_CELLS:
            break
        ranks.append(rank.rank)
        cells += [[position, number, nbytes] for number, nbytes in rank.files]
    return cells, ranks
