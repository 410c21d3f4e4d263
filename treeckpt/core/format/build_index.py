"""The index of a save, from the global tree, the plan, the values and what the ranks reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ..planning.rank_trees import GlobalTree, LeafSpec
from ..planning.stream_order import ChunkOffsets, SingleChunkOffset
from ..sharding.int_runs import decode_runs, encode_runs
from ..sharding.placements import BoxLayout, Layout
from ..tree.spec import ArraySpec
from ..tree.value_codec import Value
from .chunks import NoChunks, encode_chunks
from .lineage import Lineage
from .records import AliasRecord, ArrayRecord, FileTable, Index, LeafRecord, PerRankArrays, PerRankValues, ValueRecord

__all__ = ["PerRankKey", "build_index"]

PerRankKey = tuple[str, int]
"""A path with `~rank*`, and a rank."""


class _Table:
    """Numbers for distinct things, in the order in which they were met."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self._met: dict[int, int] = {}

    def number(self, thing: object) -> int:
        # of an object that was met before the hash, which covers a whole mesh, is not taken again
        number = self._met.get(id(thing))
        if number is None:
            number = self._met[id(thing)] = self.numbers.setdefault(thing, len(self.numbers))
        return number


def build_index(
    plenum: GlobalTree,
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
    """The index.

    Args:
        placed: by leaf number, the chunks of each array; None gives the manifest, an index before placement.
        values: of the leaves that ranks share.
        own_values: of the leaves under `PerRank`, for each rank.
    """
    specs, layouts = _Table(), _Table()
    numbers = {leaf.path: n for n, leaf in enumerate(plenum.leaves) if leaf.per_rank is None}
    # most leaves share the very spec and layout: what has been met is known by its identity, without hashing it
    blanks: dict[tuple[int, int], ArrayRecord] = {}
    records: list[LeafRecord] = []
    for n, leaf in enumerate(plenum.leaves):
        if leaf.spec is None:
            records.append(_value_record(leaf, values, own_values))
        elif leaf.alias_of is not None:
            records.append(AliasRecord(specs.number(leaf.spec), _base(plenum, numbers, n, leaf), leaf.view))
        elif leaf.per_rank is not None:
            at = placed[n] if placed is not None else None
            records.append(
                PerRankArrays(specs.number(leaf.spec), encode_runs(at.starts) if isinstance(at, ChunkOffsets) else ())
            )
        else:
            blank = blanks.get((id(leaf.spec), id(leaf.layout)))
            if blank is None:
                blank = ArrayRecord(specs.number(leaf.spec), _layout_number(leaf.layout, layouts), NoChunks())
                blanks[id(leaf.spec), id(leaf.layout)] = blank
            if placed is not None:
                blank = ArrayRecord(blank.spec, blank.layout, encode_chunks(leaf.spec.shape, placed[n]))
            records.append(blank)
    return Index(
        save_id=save_id,
        step=step,
        created_ns=created_ns,
        world=plenum.world,
        structure=plenum.whole,
        specs=tuple(spec for spec in specs.numbers if isinstance(spec, ArraySpec)),
        layouts=tuple(cast(Layout, layout) for layout in layouts.numbers),
        leaves=tuple(records),
        files=files,
        metadata=dict(metadata),
        lineage=lineage,
    )


def _layout_number(layout: Layout | None, layouts: _Table) -> int:
    return -1 if layout is None or isinstance(layout, BoxLayout) else layouts.number(layout)


def _value_record(leaf: LeafSpec, values: Mapping[str, Value], own_values: Mapping[PerRankKey, Value]) -> LeafRecord:
    if leaf.per_rank is None:
        return ValueRecord(values[leaf.path])
    ranks: Sequence[int] = decode_runs(leaf.per_rank).tolist()
    return PerRankValues(tuple(own_values[leaf.path, rank] for rank in ranks))


def _base(plenum: GlobalTree, numbers: Mapping[str, int], number: int, leaf: LeafSpec) -> int:
    """The number of the array that a leaf shares storage with; under `PerRank` one of the same group of ranks."""
    assert leaf.alias_of is not None, "only asked for aliases"
    if leaf.per_rank is None:
        return numbers[leaf.alias_of]
    return min(
        (n for n, other in enumerate(plenum.leaves) if other.path == leaf.alias_of and other.per_rank == leaf.per_rank),
        key=lambda n: abs(n - number),
    )
