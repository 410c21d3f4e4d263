"""The tree of one rank without its data, and the global tree that all ranks' trees merge into.

A rank's `Inventory` is its tree without data. Ranks with equal inventories (by digest) form a class;
`merge_rank_trees` merges the classes into the global tree: mappings are joined, replicas and explicit pieces
attributed to their ranks, and contradictions are errors that name their path. Values are not part of an inventory, so
that a step counter does not change its digest; they are compared separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ...errors import LayoutError, MismatchError
from ..sharding.int_runs import Runs, decode_runs, encode_runs
from ..sharding.placements import BoxLayout, Layout, Mesh, MeshLayout, Replicate, held_by, mesh_ranks, replicated_layout
from ..sharding.region import Region, earlier_overlaps
from ..tree.keyed_table import OwnedRows, row_starts
from ..tree.merge import merge, with_ranks
from ..tree.spec import BLOB_KINDS, ArraySpec, StridedView
from ..tree.structure import PerRankNode, Structure, paths_of

SPLIT_ADVICE = (
    "Where a wrapper has split a model or its optimizer into flat parts (FSDP1, ZeRO), "
    "tc.training.state(model, optimizer) saves it, or says what does"
)


class LeafSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One leaf of one rank's tree, or of the global tree."""

    path: str
    """The path, with `~rank*` for the rank's number under `PerRank`."""
    spec: ArraySpec | None
    """The spec of an array; None for a value."""
    layout: Layout | None = None
    """The layout; None in one rank's tree for a plain array, of which every rank that has it holds a replica."""
    alias_of: str | None = None
    """The path of the array whose storage this leaf shares."""
    view: StridedView | None = None
    per_rank: Runs | None = None
    """The ranks that have a leaf of their own at this path; an empty column in one rank's tree."""
    rows: int | None = None
    """The number of rows of an array of a table, in one rank's tree; shape and layout count buckets there, not rows."""


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """One rank's tree without its data."""

    structure: Structure
    leaves: tuple[LeafSpec, ...]


class RankClass(msgspec.Struct, frozen=True, array_like=True):
    """Ranks with equal inventories."""

    ranks: Runs
    inventory: Inventory


class GlobalTree(msgspec.Struct, frozen=True, array_like=True):
    """The tree of all ranks: every leaf once, in the order of the structure, each array with its layout."""

    world: int
    structure: Structure
    leaves: tuple[LeafSpec, ...]


def merge_rank_trees(classes: Sequence[RankClass], world: int) -> GlobalTree:
    """Merges the trees of all classes of ranks into the global tree.

    Raises:
        MismatchError: two classes contradict each other about a path.
        LayoutError: a mesh has ranks outside of the world.
    """
    classes = _split_tables_by_row(classes)
    if len(classes) == 1:
        only = classes[0].inventory
        structure = with_ranks(only.structure, classes[0].ranks)
        leaves = [_leaf_with_ranks(leaf, classes[0].ranks) for leaf in only.leaves]
    else:
        groups = _per_rank_groups(classes)
        structure = with_ranks(classes[0].inventory.structure, groups[0])
        for group, ranks in zip(classes[1:], groups[1:], strict=True):
            structure = merge(structure, with_ranks(group.inventory.structure, ranks))
        leaves = _merge_leaves(structure, classes, groups)
    checked: set[int] = set()
    for leaf in leaves:
        if id(leaf.layout) not in checked:  # most leaves share the very object
            checked.add(id(leaf.layout))
            if isinstance(leaf.layout, MeshLayout) and (highest := int(mesh_ranks(leaf.layout.mesh).max())) >= world:
                raise LayoutError(
                    leaf.path,
                    expected=f"a mesh of the {world} ranks that save",
                    found=f"one that holds rank {highest}",
                    hint="Call save on every rank of the mesh, with a comm that spans them all",
                )
    return GlobalTree(world, structure, tuple(leaves))


def _split_tables_by_row(classes: Sequence[RankClass]) -> Sequence[RankClass]:
    """Returns the classes with the arrays of tables sharded by row, not by bucket; see `LeafSpec.rows`."""
    claims: dict[str, list[OwnedRows]] = {}
    buckets: dict[str, int] = {}
    for group in classes:
        for leaf in group.inventory.leaves:
            if leaf.rows is not None and leaf.spec is not None:
                claims.setdefault(leaf.path, []).append(_owned_rows(leaf))
                buckets[leaf.path] = leaf.spec.shape[0]
    if not claims:
        return classes
    starts_of = {path: row_starts(claims[path], buckets[path], path) for path in claims}

    def split_by_row(leaf: LeafSpec) -> LeafSpec:
        if leaf.rows is None or leaf.spec is None:
            return leaf
        (starts, rows), mine, row = starts_of[leaf.path], _owned_rows(leaf), leaf.spec.shape[1:]
        region = Region((starts[mine.start, mine.stop], *(0 for _ in row)), (mine.rows, *row))
        spec = msgspec.structs.replace(leaf.spec, shape=(rows, *row))
        return LeafSpec(leaf.path, spec, BoxLayout(((mine.rank, region),)))

    found: list[RankClass] = []
    for group in classes:
        leaves = tuple(map(split_by_row, group.inventory.leaves))
        found.append(RankClass(group.ranks, msgspec.structs.replace(group.inventory, leaves=leaves)))
    return found


def _owned_rows(leaf: LeafSpec) -> OwnedRows:
    assert isinstance(leaf.layout, BoxLayout) and leaf.rows is not None, "tables are sharded by bucket"
    rank, region = leaf.layout.pieces[0]
    return OwnedRows(rank, region.offset[0], region.stop[0], leaf.rows)


def _leaf_with_ranks(leaf: LeafSpec, ranks: Runs) -> LeafSpec:
    if leaf.per_rank is not None:
        return msgspec.structs.replace(leaf, per_rank=ranks)
    if leaf.spec is not None and leaf.layout is None and leaf.alias_of is None:
        return LeafSpec(leaf.path, leaf.spec, replicated_layout(ranks))
    return leaf


def _per_rank_groups(classes: Sequence[RankClass]) -> list[Runs]:
    """Returns, for each class, all ranks whose subtrees under `PerRank` are equal without data: they share records."""
    groups: dict[tuple[object, ...], list[np.ndarray]] = {}
    keys = [
        (
            *(leaf for leaf in group.inventory.leaves if leaf.per_rank is not None),
            *_subtrees_of_rank(group.inventory.structure),
        )
        for group in classes
    ]
    for key, group in zip(keys, classes, strict=True):
        groups.setdefault(key, []).append(decode_runs(group.ranks))
    merged = {key: encode_runs(np.sort(np.concatenate(ranks))) for key, ranks in groups.items()}
    return [merged[key] for key in keys]


def _subtrees_of_rank(structure: Structure) -> list[bytes]:
    """Returns the structures under `PerRank`, in a form that is compared quickly."""
    found: list[bytes] = []
    waiting = [structure]
    while waiting:
        node = waiting.pop()
        if isinstance(node, PerRankNode):
            found += [msgspec.json.encode(child) for child in node.children]
        # None stands for a leaf: most nodes have nothing else
        elif node is not None and node.children.count(None) < len(node.children):
            waiting += node.children
    return found


def _merge_leaves(structure: Structure, classes: Sequence[RankClass], groups: Sequence[Runs]) -> list[LeafSpec]:
    shared: dict[str, list[tuple[LeafSpec, Runs]]] = {}
    own: dict[tuple[str, Runs], LeafSpec] = {}
    for group, ranks in zip(classes, groups, strict=True):
        for leaf in group.inventory.leaves:
            if leaf.per_rank is None:
                shared.setdefault(leaf.path, []).append((leaf, group.ranks))
            else:
                own[leaf.path, ranks] = leaf
    return [
        _merge_leaf(shared[path]) if ranks is None else _leaf_with_ranks(own[path, ranks], ranks)
        for path, ranks in paths_of(structure)
    ]


def _merge_leaf(claims: list[tuple[LeafSpec, Runs]]) -> LeafSpec:
    """Merges the specs that several classes give of one leaf."""
    claims = sorted(claims, key=lambda claim: _is_empty(claim[0]))  # what holds nothing may not know its dtype
    first, ranks = claims[0]
    for leaf, other in claims[1:]:
        _check_equal_specs(first, leaf, ranks, other)
    # a leaf may be an array on one rank and share storage on another: the array is what is written
    arrays = [claim for claim in claims if claim[0].alias_of is None]
    if len(arrays) < len(claims):
        arrays = [claim for claim in arrays if _holds_elements(*claim)]
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
        return msgspec.structs.replace(first, layout=_stack_meshes(arrays))
    return _leaf_with_ranks(first, encode_runs(np.unique(np.concatenate([decode_runs(r) for _, r in arrays]))))


def _is_empty(leaf: LeafSpec) -> bool:
    """Returns whether a leaf lists pieces, and none of them has an element."""
    return isinstance(leaf.layout, BoxLayout) and not any(region.size for _, region in leaf.layout.pieces)


def _holds_elements(leaf: LeafSpec, ranks: Runs) -> bool:
    """Returns whether any of the ranks holds an element: without one, shared storage cannot be detected."""
    if isinstance(leaf.layout, BoxLayout):
        return not _is_empty(leaf)
    if leaf.spec is None or leaf.layout is None:
        return True
    return any(held_by(leaf.layout, leaf.spec.shape, rank) for rank in decode_runs(ranks).tolist())


def _stack_meshes(arrays: list[tuple[LeafSpec, Runs]]) -> MeshLayout:
    """Joins equal placements on several meshes, as of tensor-parallel groups: replicas along one more dimension."""
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


def _check_equal_specs(a: LeafSpec, b: LeafSpec, ranks: Runs, others: Runs) -> None:
    if (a.spec is None) != (b.spec is None):
        raise _contradiction(a, b, ranks, others, "kind")
    if a.spec is not None and b.spec is not None:
        if a.spec.shape != b.spec.shape:
            raise _contradiction(a, b, ranks, others, "shape")
        # kinds of arrays may differ, as tensor and parameter; a text or bytes is no array to the program
        if a.spec.kind != b.spec.kind and not BLOB_KINDS.isdisjoint((a.spec.kind, b.spec.kind)):
            raise _contradiction(a, b, ranks, others, "kind")
        if a.spec.dtype != b.spec.dtype and not _is_empty(b):
            raise _contradiction(a, b, ranks, others, "dtype")
    if a.alias_of is not None and a.alias_of == b.alias_of and a.view != b.view:
        raise _contradiction(a, b, ranks, others, f"view of {a.alias_of}")


def _contradiction(a: LeafSpec, b: LeafSpec, ranks: Runs, others: Runs, what: str) -> MismatchError:
    return MismatchError(
        a.path,
        expected=f"the same {what} on every rank; rank {int(decode_runs(ranks)[0])} has {_describe(a)}",
        found=f"rank {int(decode_runs(others)[0])} has {_describe(b)}",
        hint=f"Wrap what each rank has of its own in tc.PerRank, and pieces of one array in tc.Sharded. {SPLIT_ADVICE}",
    )


def _describe(leaf: LeafSpec) -> str:
    if leaf.spec is None:
        return "a value"
    if leaf.spec.kind in BLOB_KINDS:
        return f"a {leaf.spec.kind} of {leaf.spec.shape[0]} bytes"
    layout = leaf.layout
    placed = f" under {layout.placements} on mesh {layout.mesh.shape}" if isinstance(layout, MeshLayout) else ""
    return f"{leaf.spec.dtype} of shape {leaf.spec.shape}{placed}"


_SEPARATOR = "\0"
"""Separates a path from a region; no path that can be typed has one."""


def piece_key(path: str, region: Region) -> str:
    """Returns the key under which the content of a piece is compared with that of its replicas."""
    return f"{path}{_SEPARATOR}{','.join(map(str, region.offset))}{_SEPARATOR}{','.join(map(str, region.shape))}"


def readable_key(key: str) -> str:
    """Returns a path, or a `piece_key`, as text for errors."""
    return key.replace(_SEPARATOR, "@", 1).replace(_SEPARATOR, "+", 1)


def check_disjoint(keys: Sequence[tuple[int, str]]) -> None:
    """Checks that pieces of one array are equal or disjoint: others cannot be compared as replicas.

    Args:
        keys: ranks, and the `piece_key`s of what they hold; other keys are ignored.

    Raises:
        LayoutError: naming both pieces and their ranks.
    """
    holders: dict[str, dict[Region, int]] = {}
    for rank, key in keys:
        # the key of a whole array is its path alone
        path, *numbers = key.rsplit(_SEPARATOR, 2)
        if len(numbers) == 2:
            region = Region(*(tuple(int(n) for n in text.split(",") if n) for text in numbers))
            if region.size:
                holders.setdefault(path, {}).setdefault(region, rank)
    for path, pieces in holders.items():
        for region, others in earlier_overlaps(sorted(pieces)):
            if others:
                raise LayoutError(
                    path,
                    expected="pieces that are equal or apart, so that replicas can be compared",
                    found=f"offset {others[0].offset}, shape {others[0].shape} on rank {pieces[others[0]]} and "
                    f"offset {region.offset}, shape {region.shape} on rank {pieces[region]}",
                    hint="Check the offsets",
                )
