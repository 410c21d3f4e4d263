"""What each page shows, as data: the templates draw it, /api/v1 gives it as JSON.

Names of checkpoints and runs are made visible already; paths, values and metadata of a checkpoint are as stored, and
whoever draws them escapes them. `nbytes` counts bytes; times are seconds, or ISO 8601 where they are moments.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "CheckpointPage",
    "CheckpointRow",
    "ChunkRow",
    "ChunksPage",
    "ExtentRow",
    "Fact",
    "FilePage",
    "FileRow",
    "FilesPage",
    "Group",
    "LeafPage",
    "MapPage",
    "MeshPart",
    "NodeRow",
    "SearchPage",
    "StripPage",
    "TreePage",
]


class CheckpointRow(msgspec.Struct, frozen=True):
    """One directory of a run."""

    id: str
    run: str
    run_name: str
    name: str
    status: str
    step: int | None
    save_id: str | None
    world: int | None
    leaves: int | None
    nbytes: int | None
    created: str | None
    seconds: float | None
    rate: float | None
    """Bytes a second."""
    error: str | None
    readable: bool
    """Whether there is an index to browse."""
    pinned: bool = False
    kept: list[str] = []
    """Why it stays; empty where that was not asked, or nothing keeps it."""
    goes: bool = False
    """Whether the next clean-up deletes it."""
    saved: float | None = None
    """From 0 to 1, of a save under way."""
    phase: str | None = None
    """Of a save under way."""
    abandoned: bool = False
    """Whether it is on an abandoned branch: the newest checkpoint does not descend from it."""
    follows: str | None = None
    """The save id of the checkpoint from which the training went on; None where that is not recorded."""
    follows_step: int | None = None
    """The step of that checkpoint, where it is still there."""
    branches: bool = False
    """Whether another checkpoint was saved between that one and this one: a branch begins here."""


class Fact(msgspec.Struct, frozen=True):
    """A named value."""

    name: str
    type: str
    text: str


class Group(msgspec.Struct, frozen=True):
    """Something that bytes are counted for."""

    name: str
    nbytes: int
    leaves: int
    share: float


class NodeRow(msgspec.Struct, frozen=True):
    """One node of a tree; the last fields are of leaves."""

    node: str
    key: str
    path: str
    kind: str
    cls: str
    children: int
    leaves: int
    nbytes: int
    share: float
    """Of the bytes of the whole checkpoint."""
    leaf: int | None
    text: str
    """What it is, in a few words."""


class TreePage(msgspec.Struct, frozen=True):
    """A page of one node's children."""

    node: NodeRow
    above: list[NodeRow]
    """The nodes from the root to this one's parent."""
    start: int
    next: int | None
    rows: list[NodeRow]


class SearchPage(msgspec.Struct, frozen=True):
    """Leaves whose path holds every word of the query."""

    query: str
    start: int
    next: int | None
    rows: list[NodeRow]


class CheckpointPage(msgspec.Struct, frozen=True):
    """One checkpoint: what it is, and its tree from the root, or from the node asked for."""

    checkpoint: CheckpointRow
    files: int | None
    metadata: list[Fact]
    groups: list[Group]
    tree: TreePage | None
    found: SearchPage | None


class MeshPart(msgspec.Struct, frozen=True):
    """One dimension of a mesh and what it does to an array."""

    name: str
    size: int
    placement: str


class ChunkRow(msgspec.Struct, frozen=True):
    """A chunk and where its bytes are."""

    region: str
    offset: list[int]
    shape: list[int]
    rank: int
    holders: list[int] | None
    """Ranks that held all of it; None where the index does not say, or there are too many to list."""
    file: int
    name: str
    start: int
    stop: int


class ChunksPage(msgspec.Struct, frozen=True):
    """A page of an array's chunks."""

    start: int
    total: int
    next: int | None
    rows: list[ChunkRow]


class LeafPage(msgspec.Struct, frozen=True):
    """One leaf."""

    checkpoint: CheckpointRow
    leaf: int
    path: str
    above: list[NodeRow]
    kind: str
    dtype: str | None
    shape: list[int] | None
    nbytes: int
    facts: list[Fact]
    layout: str | None
    mesh: list[MeshPart]
    mesh_ranks: list[int]
    values: list[Fact]
    chunks: ChunksPage | None
    dims: list[str]
    """Names of the dimensions of the map; empty where there is nothing to draw."""
    dim_sizes: list[int]
    previous: int | None
    following: int | None
    region: str
    """The region that chunks were asked for, as it was typed; empty for all."""
    found: list[int]
    """The same as [offset per dimension, then size per dimension]; empty for all."""
    problem: str | None
    """Why that region is none."""


class MapPage(msgspec.Struct, frozen=True):
    """Two dimensions of an array's index space, cut at one position of the others."""

    dims: list[str]
    sizes: list[int]
    y: int | None
    x: int | None
    at: list[int]
    rows: int
    columns: int
    boxes: list[list[int]]
    """[top, left, bottom, right, rank, file, first byte, byte past the last, ranks that hold it] of each region."""
    files: dict[int, str]
    more: int
    """Regions beyond those drawn."""
    missing: int
    """Elements of the plane that no region holds; 0 where not all regions are drawn."""
    overlaps: list[list[int]]
    """[top, left, bottom, right] of what two regions hold, which no save writes."""


class FileRow(msgspec.Struct, frozen=True):
    """One shard."""

    number: int
    name: str
    rank: int
    part: int
    nbytes: int
    header: int
    share: float
    """Of the largest one."""


class FilesPage(msgspec.Struct, frozen=True):
    """The shards of a checkpoint."""

    checkpoint: CheckpointRow
    total: int
    start: int
    next: int | None
    nbytes: int
    mean: float
    """Bytes a rank."""
    imbalance: float
    """The most that a rank wrote over the mean."""
    largest_rank: int | None
    rows: list[FileRow]


class ExtentRow(msgspec.Struct, frozen=True):
    """A stretch of a shard's bytes and the leaf it belongs to."""

    leaf: int
    path: str
    region: str
    start: int
    stop: int


class FilePage(msgspec.Struct, frozen=True):
    """One shard and a page of its extents."""

    checkpoint: CheckpointRow
    file: FileRow
    total: int
    start: int
    next: int | None
    rows: list[ExtentRow]


class StripPage(msgspec.Struct, frozen=True):
    """A shard as a strip: stretches [first byte, byte past the last, group], neighbours of one group joined."""

    file: int
    nbytes: int
    groups: list[str]
    segments: list[list[int]]
