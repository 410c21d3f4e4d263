"""What one rank brings to a save, and what all ranks bring together.

A rank's `Inventory` is its tree without data. Ranks with equal inventories (by digest) form a class;
`merge_rank_trees` makes of
the classes the one global tree: mappings joined, replicas and explicit pieces attributed to their ranks, contradictions
named. Values are not part of an inventory, so that a step counter does not change its digest; they are compared apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
import xxhash

from ...errors import LayoutError, MismatchError, TreeError
from ..sharding.dtypes import dtype_of
from ..sharding.int_runs import Runs, decode_runs, encode_runs
from ..sharding.placements import BoxLayout, Layout, Mesh, MeshLayout, Replicate, held_by, mesh_ranks, replicated
from ..sharding.region import MAX_NDIM, Region, intersect
from ..sharding.write_assignment import ArrayLeaf, held_twice
from ..tree.merge import merge, widen_ranks
from ..tree.nesting import Folded, fold
from ..tree.spec import ArraySpec, StridedView
from ..tree.structure import Structure, paths_of
from ..tree.table_rows import Claim, row_starts

__all__ = [
    "GlobalTree",
    "Inventory",
    "LeafSpec",
    "RankClass",
    "array_leaves",
    "check_apart",
    "contested",
    "digest_of",
    "merge_rank_trees",
    "piece_key",
]


class LeafSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One leaf as one rank, or all, see it."""

    path: str
    """With `~rank*` for the rank's number under `PerRank`."""
    spec: ArraySpec | None
    """None for a value."""
    layout: Layout | None = None
    """None for a plain array on one rank's word: every rank that has it holds a replica."""
    alias_of: str | None = None
    """The path of the array whose storage this leaf shares."""
    view: StridedView | None = None
    per_rank: Runs | None = None
    """The ranks that have a leaf of their own here; one rank's word says an empty column."""
    rows: int | None = None
    """On one rank's word, of a table: how many rows it has in the buckets by which shape and layout count instead."""


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """One rank's tree without its data."""

    structure: Structure
    leaves: tuple[LeafSpec, ...]
    below: tuple[Structure, ...] = ()
    """Deep parts of the structure, see `core.tree.nesting`."""

    @property
    def whole(self) -> Structure:
        """The structure with its deep parts in their places."""
        return Folded(self.structure, self.below).whole()


class RankClass(msgspec.Struct, frozen=True, array_like=True):
    """Ranks that bring equal inventories."""

    ranks: Runs
    inventory: Inventory


class GlobalTree(msgspec.Struct, frozen=True, array_like=True):
    """The global tree: every leaf once, in the structure's order, each array with its layout."""

    world: int
    structure: Structure
    leaves: tuple[LeafSpec, ...]
    below: tuple[Structure, ...] = ()
    """Deep parts of the structure, see `core.tree.nesting`."""

    @property
    def whole(self) -> Structure:
        """The structure with its deep parts in their places."""
        return Folded(self.structure, self.below).whole()


def digest_of(inventory: Inventory) -> bytes:
    """16 bytes that are equal for equal inventories."""
    return xxhash.xxh3_128_digest(msgspec.json.encode(inventory))


def merge_rank_trees(classes: Sequence[RankClass], world: int) -> GlobalTree:
    """The global tree of all classes of ranks.

    Raises:
        MismatchError: two classes contradict each other about a path.
        LayoutError: a mesh reaches outside of the world.
    """
    classes = _by_row(classes)
    if len(classes) == 1:
        only = classes[0].inventory
        structure = widen_ranks(only.whole, classes[0].ranks)
        leaves = [_resolved(leaf, classes[0].ranks) for leaf in only.leaves]
    else:
        kin = _kin(classes)
        structure = widen_ranks(classes[0].inventory.whole, kin[0])
        for group, ranks in zip(classes[1:], kin[1:], strict=True):
            structure = merge(structure, widen_ranks(group.inventory.whole, ranks))
        leaves = _joined(structure, classes, kin)
    checked: set[int] = set()
    for leaf in leaves:
        if id(leaf.layout) not in checked:  # most leaves share the very object
            checked.add(id(leaf.layout))
            _check_ranks(leaf, world)
    folded = fold(structure)
    return GlobalTree(world, folded.top, tuple(leaves), folded.below)


def _by_row(classes: Sequence[RankClass]) -> Sequence[RankClass]:
    """The same with the arrays of tables cut by row, where ranks have cut them by bucket; see `rows`."""
    claims: dict[str, list[Claim]] = {}
    buckets: dict[str, int] = {}
    for group in classes:
        for leaf in group.inventory.leaves:
            if leaf.rows is not None and leaf.spec is not None:
                claims.setdefault(leaf.path, []).append(_claim(leaf))
                buckets[leaf.path] = leaf.spec.shape[0]
    if not claims:
        return classes
    placed = {path: row_starts(claims[path], buckets[path], path) for path in claims}

    def by_row(leaf: LeafSpec) -> LeafSpec:
        if leaf.rows is None or leaf.spec is None:
            return leaf
        (starts, rows), mine, row = placed[leaf.path], _claim(leaf), leaf.spec.shape[1:]
        region = Region((starts[mine.start, mine.stop], *(0 for _ in row)), (mine.rows, *row))
        spec = msgspec.structs.replace(leaf.spec, shape=(rows, *row))
        return LeafSpec(leaf.path, spec, BoxLayout(((mine.rank, region),)))

    return [
        RankClass(
            group.ranks, msgspec.structs.replace(group.inventory, leaves=tuple(map(by_row, group.inventory.leaves)))
        )
        for group in classes
    ]


def _claim(leaf: LeafSpec) -> Claim:
    assert isinstance(leaf.layout, BoxLayout) and leaf.rows is not None, "tables are cut by bucket"
    rank, region = leaf.layout.pieces[0]
    return Claim(rank, region.offset[0], region.stop[0], leaf.rows)


def _resolved(leaf: LeafSpec, ranks: Runs) -> LeafSpec:
    if leaf.per_rank is not None:
        return msgspec.structs.replace(leaf, per_rank=ranks)
    if leaf.spec is not None and leaf.layout is None and leaf.alias_of is None:
        return LeafSpec(leaf.path, leaf.spec, replicated(ranks))
    return leaf


def _kin(classes: Sequence[RankClass]) -> list[Runs]:
    """For each class, all ranks whose leaves under `PerRank` are specified alike: they share records."""
    groups: dict[tuple[LeafSpec, ...], list[np.ndarray]] = {}
    keys = [tuple(leaf for leaf in group.inventory.leaves if leaf.per_rank is not None) for group in classes]
    for key, group in zip(keys, classes, strict=True):
        groups.setdefault(key, []).append(decode_runs(group.ranks))
    merged = {key: encode_runs(np.sort(np.concatenate(ranks))) for key, ranks in groups.items()}
    return [merged[key] for key in keys]


def _joined(structure: Structure, classes: Sequence[RankClass], kin: Sequence[Runs]) -> list[LeafSpec]:
    shared: dict[str, list[tuple[LeafSpec, Runs]]] = {}
    own: dict[tuple[str, Runs], LeafSpec] = {}
    for group, ranks in zip(classes, kin, strict=True):
        for leaf in group.inventory.leaves:
            if leaf.per_rank is None:
                shared.setdefault(leaf.path, []).append((leaf, group.ranks))
            else:
                own[leaf.path, ranks] = leaf
    return [
        _join(shared[path]) if ranks is None else _resolved(own[path, ranks], ranks)
        for path, ranks in paths_of(structure)
    ]


def _join(claims: list[tuple[LeafSpec, Runs]]) -> LeafSpec:
    """One leaf from what several classes say of it."""
    first, ranks = claims[0]
    for leaf, other in claims[1:]:
        _check_same(first, leaf, ranks, other)
    # a rank may hold as an array of its own what is a tie elsewhere: the array is what gets written
    arrays = [claim for claim in claims if claim[0].alias_of is None]
    if len(arrays) < len(claims):
        arrays = [claim for claim in arrays if _sees_memory(*claim)]
    if not arrays:
        return first if first.alias_of is not None else next(leaf for leaf, _ in claims if leaf.alias_of is not None)
    first, ranks = arrays[0]
    for leaf, other in arrays[1:]:
        if type(leaf.layout) is not type(first.layout):
            raise _contradiction(first, leaf, ranks, other, "kind of layout")
    if isinstance(first.layout, BoxLayout):
        pieces = [piece for leaf, _ in arrays if isinstance(leaf.layout, BoxLayout) for piece in leaf.layout.pieces]
        return msgspec.structs.replace(first, layout=BoxLayout(tuple(pieces)))
    if isinstance(first.layout, MeshLayout):
        return msgspec.structs.replace(first, layout=_stacked(arrays))
    return _resolved(first, encode_runs(np.unique(np.concatenate([decode_runs(r) for _, r in arrays]))))


def _sees_memory(leaf: LeafSpec, ranks: Runs) -> bool:
    """Whether any of the ranks holds an element: those that hold none cannot tell a tie from an array."""
    if isinstance(leaf.layout, BoxLayout):
        return any(region.size for _, region in leaf.layout.pieces)
    if leaf.spec is None or leaf.layout is None:
        return True
    return any(held_by(leaf.layout, leaf.spec.shape, rank) for rank in decode_runs(ranks).tolist())


def _stacked(arrays: list[tuple[LeafSpec, Runs]]) -> MeshLayout:
    """Equal placements on several meshes, as tensor-parallel groups have them: replicas along one more dimension."""
    first, ranks = arrays[0]
    layouts = [leaf.layout for leaf, _ in arrays if isinstance(leaf.layout, MeshLayout)]
    distinct = list(dict.fromkeys(layouts))
    if len(distinct) == 1:
        return distinct[0]
    mesh, placements = distinct[0].mesh, distinct[0].placements
    stacked = np.concatenate([mesh_ranks(layout.mesh) for layout in distinct])
    apart = len(np.unique(stacked)) == len(stacked)
    for layout, (leaf, other) in zip(layouts, arrays, strict=True):
        alike = apart and (layout.mesh.shape, layout.placements) == (mesh.shape, placements)
        if layout != distinct[0] and not alike:
            raise _contradiction(first, leaf, ranks, other, "mesh or placements")
    names = ("replicas", *mesh.names) if mesh.names else ()
    grown = Mesh((len(distinct), *mesh.shape), encode_runs(stacked), names)
    return MeshLayout(grown, (Replicate(), *placements))


def _check_same(a: LeafSpec, b: LeafSpec, ranks: Runs, others: Runs) -> None:
    if (a.spec is None) != (b.spec is None):
        raise _contradiction(a, b, ranks, others, "kind")
    if a.spec is not None and b.spec is not None:
        if a.spec.shape != b.spec.shape:
            raise _contradiction(a, b, ranks, others, "shape")
        if a.spec.dtype != b.spec.dtype:
            raise _contradiction(a, b, ranks, others, "dtype")
    if a.alias_of is not None and a.alias_of == b.alias_of and a.view != b.view:
        raise _contradiction(a, b, ranks, others, f"view of {a.alias_of}")


def _contradiction(a: LeafSpec, b: LeafSpec, ranks: Runs, others: Runs, what: str) -> MismatchError:
    return MismatchError(
        a.path,
        expected=f"the same {what} on every rank; rank {int(decode_runs(ranks)[0])} has {_say(a)}",
        found=f"rank {int(decode_runs(others)[0])} has {_say(b)}",
        hint="Wrap what each rank has of its own in tc.PerRank, and pieces of one array in tc.Sharded",
    )


def _say(leaf: LeafSpec) -> str:
    if leaf.spec is None:
        return "a value"
    layout = leaf.layout
    placed = f" under {layout.placements} on mesh {layout.mesh.shape}" if isinstance(layout, MeshLayout) else ""
    return f"{leaf.spec.dtype} of shape {leaf.spec.shape}{placed}"


@lru_cache(maxsize=64)
def _highest(mesh: Mesh) -> int:
    return int(mesh_ranks(mesh).max())


def _check_ranks(leaf: LeafSpec, world: int) -> None:
    if isinstance(leaf.layout, MeshLayout):
        highest = _highest(leaf.layout.mesh)
        if highest >= world:
            raise LayoutError(
                leaf.path,
                expected=f"a mesh of the {world} ranks that save",
                found=f"one that holds rank {highest}",
                hint="Call save on every rank of the mesh, with a comm that spans them all",
            )


def array_leaves(plenum: GlobalTree) -> list[tuple[int, ArrayLeaf]]:
    """The arrays to be written, each with its number among all leaves."""
    found: list[tuple[int, ArrayLeaf]] = []
    for number, leaf in enumerate(plenum.leaves):
        if leaf.spec is None or leaf.alias_of is not None:
            continue
        if len(leaf.spec.shape) > MAX_NDIM:
            ndim = len(leaf.spec.shape)
            raise TreeError(leaf.path, expected=f"arrays of at most {MAX_NDIM} dimensions", found=f"{ndim}")
        dtype = dtype_of(leaf.spec.dtype)
        layout = leaf.layout or replicated(leaf.per_rank or ())
        align = dtype.itemsize // dtype.parts
        found.append((number, ArrayLeaf(leaf.path, leaf.spec.shape, dtype.itemsize, layout, align, leaf.per_rank)))
    return found


def contested(plenum: GlobalTree) -> list[tuple[str, Region, int]]:
    """What several pieces of arrays with listed pieces hold: path, box and its bytes."""
    found: list[tuple[str, Region, int]] = []
    for leaf in plenum.leaves:
        if leaf.spec is not None and leaf.alias_of is None and isinstance(leaf.layout, BoxLayout):
            itemsize = dtype_of(leaf.spec.dtype).itemsize
            found += [(leaf.path, box, box.size * itemsize) for box in held_twice(leaf.spec.shape, leaf.layout)]
    return found


_MARK = "\0"
"""Between a path and a region; no path that can be typed has one."""


def piece_key(path: str, region: Region) -> str:
    """The name under which the content of a piece is compared with that of its replicas."""
    return f"{path}{_MARK}{','.join(map(str, region.offset))}{_MARK}{','.join(map(str, region.shape))}"


def _piece_of(key: str) -> tuple[str, Region] | None:
    path, *numbers = key.rsplit(_MARK, 2)
    if len(numbers) != 2:
        return None
    offset, shape = (tuple(int(n) for n in text.split(",") if n) for text in numbers)
    return path, Region(offset, shape)


def check_apart(keys: Sequence[tuple[int, str]]) -> None:
    """Refuses pieces of one array that overlap in part: their contents can not be compared.

    Args:
        keys: ranks, and `piece_key`s of what they hold; other keys are passed over.

    Raises:
        LayoutError: naming both pieces and their ranks.
    """
    holders: dict[str, dict[Region, int]] = {}
    for rank, key in keys:
        if (piece := _piece_of(key)) is not None and piece[1].size:
            holders.setdefault(piece[0], {}).setdefault(piece[1], rank)
    for path, pieces in holders.items():
        active: list[Region] = []
        for region in sorted(pieces):
            active = [r for r in active if not r.shape or r.offset[0] + r.shape[0] > region.offset[0]]
            if (other := next((r for r in active if intersect(r, region) is not None), None)) is not None:
                raise LayoutError(
                    path,
                    expected="pieces that are equal or apart, so that replicas can be compared",
                    found=f"offset {other.offset}, shape {other.shape} on rank {pieces[other]} and "
                    f"offset {region.offset}, shape {region.shape} on rank {pieces[region]}",
                    hint="Check the offsets",
                )
            active.append(region)
