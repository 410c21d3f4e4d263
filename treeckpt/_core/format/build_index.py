"""Builds the index of a save from the global tree, the plan, the values and the reports of the ranks."""

from __future__ import annotations

from collections.abc import Mapping

from ..planning.rank_trees import GlobalTree, LeafSpec
from ..planning.save_plan import ChunkOffsets, SingleChunkOffset
from ..sharding.int_runs import decode_runs, encode_runs
from ..sharding.placements import MeshLayout
from ..tree.spec import BLOB_KINDS, ArraySpec
from ..tree.value_codec import Value
from .chunks import NoChunks, encode_chunks
from .lineage import Lineage
from .records import (
    AliasRecord,
    ArrayRecord,
    BlobRecord,
    FileTable,
    Index,
    LeafRecord,
    PerRankArrays,
    PerRankBlobs,
    PerRankValues,
    ValueRecord,
)

PerRankKey = tuple[str, int]
"""(path with `~rank*`, rank)."""


def build_index(
    tree: GlobalTree,
    placed: Mapping[int, ChunkOffsets | SingleChunkOffset] | None,
    files: FileTable,
    *,
    values: Mapping[str, Value],
    own_values: Mapping[PerRankKey, Value],
    save_id: str,
    step: int | None,
    created_ns: int,
    metadata: Mapping[str, Value],
    lineage: Lineage | None = None,
) -> Index:
    """Builds the index.

    Args:
        placed: the chunks of each array by leaf number; None gives the manifest, an index before placement.
        values: values of the leaves that ranks share, by path.
        own_values: values of the leaves under `PerRank`, by path and rank.
    """
    specs: dict[ArraySpec, int] = {}
    layouts: dict[MeshLayout, int] = {}
    numbers = {leaf.path: n for n, leaf in enumerate(tree.leaves) if leaf.per_rank is None}
    # most leaves share the same spec and layout objects: records are found by identity, without hashing
    blanks: dict[tuple[int, int], ArrayRecord] = {}
    records: list[LeafRecord] = []
    for n, leaf in enumerate(tree.leaves):
        if leaf.spec is None:
            records.append(_value_record(leaf, values, own_values))
        elif leaf.alias_of is not None:
            base = _alias_base(tree, numbers, n, leaf)
            records.append(AliasRecord(specs.setdefault(leaf.spec, len(specs)), base, leaf.view))
        elif leaf.per_rank is not None:
            at = placed[n] if placed is not None else None
            starts = encode_runs(at.starts) if isinstance(at, ChunkOffsets) else ()
            records.append(_record_type(leaf.spec)[1](specs.setdefault(leaf.spec, len(specs)), starts))
        else:
            blank = blanks.get((id(leaf.spec), id(leaf.layout)))
            if blank is None:
                mesh = leaf.layout if isinstance(leaf.layout, MeshLayout) else None
                layout = -1 if mesh is None else layouts.setdefault(mesh, len(layouts))
                blank = _record_type(leaf.spec)[0](specs.setdefault(leaf.spec, len(specs)), layout, NoChunks())
                blanks[id(leaf.spec), id(leaf.layout)] = blank
            if placed is not None:
                blank = type(blank)(blank.spec, blank.layout, encode_chunks(leaf.spec.shape, placed[n]))
            records.append(blank)
    return Index(
        save_id=save_id,
        step=step,
        created_ns=created_ns,
        world=tree.world,
        structure=tree.structure,
        specs=tuple(specs),
        layouts=tuple(layouts),
        leaves=tuple(records),
        files=files,
        metadata=dict(metadata),
        lineage=lineage,
    )


def _record_type(spec: ArraySpec) -> tuple[type[ArrayRecord], type[PerRankArrays]]:
    """Returns the classes of the records of what is stored by such a spec: of all ranks, and of each rank."""
    return (BlobRecord, PerRankBlobs) if spec.kind in BLOB_KINDS else (ArrayRecord, PerRankArrays)


def _value_record(leaf: LeafSpec, values: Mapping[str, Value], own_values: Mapping[PerRankKey, Value]) -> LeafRecord:
    if leaf.per_rank is None:
        return ValueRecord(values[leaf.path])
    ranks: list[int] = decode_runs(leaf.per_rank).tolist()
    return PerRankValues(tuple(own_values[leaf.path, rank] for rank in ranks))


def _alias_base(tree: GlobalTree, numbers: Mapping[str, int], number: int, leaf: LeafSpec) -> int:
    """Returns the number of the array whose storage a leaf shares; under `PerRank`, of the same group of ranks."""
    assert leaf.alias_of is not None, "called for aliases only"
    if leaf.per_rank is None:
        return numbers[leaf.alias_of]
    return min(
        (n for n, other in enumerate(tree.leaves) if other.path == leaf.alias_of and other.per_rank == leaf.per_rank),
        key=lambda n: abs(n - number),
    )
