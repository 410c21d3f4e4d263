"""Do two checkpoints hold the same numbers, and by how much do they differ?

Checksums of the shards' headers answer first, for nothing: what they call equal or changed is not read to know it.
`delta_of` reads two arrays, a part at a time, and measures the difference. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ..arrays.base import ArrayTarget, HostArray, TargetPiece, raw_dtype
from ..core.analysis.checksum_diff import ByteComparison, Checksums, compare_checksums
from ..core.analysis.diff import Diff, comparable, diff
from ..core.analysis.element_stats import as_numbers
from ..core.format.check_index import check_against_files
from ..core.format.records import File, Index, Leaf
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.int_runs import decode_runs
from ..core.sharding.region import Region, flat_regions
from ..errors import MismatchError
from ..io.storage.metadata_files import read_index
from ..io.storage.shard_reader import open_shard
from ..io.storage.store import Store
from ..io.timing import Recorder
from .read_batch import ReadBatch, ReadOptions

__all__ = ["Delta", "Side", "ValueChange", "delta_of", "read_box", "value_changes", "verdict_of"]

PART = 16 << 20
"""Bytes of each side that are compared at a time."""


class Delta(msgspec.Struct, frozen=True):
    """The difference of two arrays, element by element."""

    elements: int
    compared: int
    """Fewer than all where a cap was given."""
    changed: int
    """Of those compared: elements whose bits differ."""
    max_abs: float | None
    """Largest difference where both are finite; None where no two are, or they are no numbers."""
    mean_abs: float | None
    """Mean over all such elements, changed or not."""
    not_finite: int
    """Changed elements of which one is infinite or not a number."""


class ValueChange(msgspec.Struct, frozen=True):
    """An array whose content differs, or may."""

    path: str
    other: str
    """Its path in the second checkpoint."""
    verdict: ByteComparison
    nbytes: int
    delta: Delta | None = None


class Side:
    """One of the two checkpoints: its index, and the checksums of its shards as they are asked for."""

    def __init__(self, store: Store, index: Index | None = None) -> None:
        self.store, self.index = store, read_index(store) if index is None else index
        self._sizes: dict[str, int] | None = None
        self._known: dict[str, Checksums] = {}

    def checksums(self, file: File) -> Checksums:
        """Those of a shard.

        Raises:
            CorruptError: it is not the one that the index means.
        """
        if file.name not in self._known:
            if self._sizes is None:
                self._sizes = self.store.sizes()
            opened = open_shard(self.store, self.index, file, self._sizes.get(file.name))
            self._known[file.name] = Checksums(np.array(opened.hashes, np.uint64), opened.block)
        return self._known[file.name]


def verdict_of(a: Side, x: Leaf, b: Side, y: Leaf) -> ByteComparison:
    """What checksums say of two arrays of one shape and dtype."""
    return compare_checksums(a.index, x, b.index, y, (a.checksums, b.checksums))


def value_changes(a: Side, b: Side, found: Diff | None = None, *, exact: bool = True) -> Iterator[ValueChange]:
    """The arrays that both checkpoints have, and whose contents differ.

    Args:
        found: the difference of the indexes, if it is known.
        exact: reads what checksums cannot tell, and measures every difference; otherwise the verdict may be "unknown".
    """
    for side in (a, b):
        check_against_files(side.index, side.store.sizes(), side.store.url)
    for x, y in comparable(a.index, b.index, found or diff(a.index, b.index)):
        verdict = verdict_of(a, x, b, y)
        delta = delta_of(a, x, b, y) if exact and verdict != "equal" else None
        if verdict != "equal" and (delta is None or delta.changed):
            yield ValueChange(x.path, y.path, verdict if delta is None else "changed", _nbytes(x), delta)


def _nbytes(leaf: Leaf) -> int:
    assert leaf.spec is not None, "arrays only are compared"
    return Region.whole(leaf.spec.shape).size * dtype_of(leaf.spec.dtype).itemsize


def delta_of(a: Side, x: Leaf, b: Side, y: Leaf, *, cap: int | None = None) -> Delta:
    """Reads two arrays of one shape and dtype, and measures how they differ.

    Args:
        cap: bytes to read of both together, at most; the first elements in C order are compared.

    Raises:
        MismatchError: shapes or dtypes differ.
        CorruptError: what was read does not match its checksum.
    """
    if x.spec is None or y.spec is None or (x.spec.shape, x.spec.dtype) != (y.spec.shape, y.spec.dtype):
        raise MismatchError(x.path, expected="two arrays of one shape and dtype", found=f"another at {y.path}")
    itemsize = dtype_of(x.spec.dtype).itemsize
    ranks = decode_runs(x.ranks).tolist() if x.ranks is not None else [0]
    others = decode_runs(y.ranks).tolist() if y.ranks is not None else [0]
    elements = Region.whole(x.spec.shape).size
    left = elements * len(ranks) if cap is None else cap // (2 * itemsize)
    sums = _Sums()
    for rank, other in zip(ranks, others, strict=False):
        step = max(1, PART // itemsize)
        for start in range(0, min(elements, left), step):
            for region in flat_regions(x.spec.shape, start, min(start + step, elements, left)):
                sums.add(read_box(a, x, region, rank=rank), read_box(b, y, region, rank=other), x.spec.dtype)
        left -= min(elements, left)
    return sums.delta(elements * len(ranks))


class _Sums:
    """What is known of the parts that were compared so far."""

    def __init__(self) -> None:
        self.compared = self.changed = self.finite = self.not_finite = 0
        self.total, self.most = 0.0, 0.0

    def add(self, before: np.ndarray, after: np.ndarray, dtype: str) -> None:
        width = before.dtype.itemsize
        left, right = (np.ascontiguousarray(part).reshape(-1) for part in (before, after))
        differs = (left.view("u1").reshape(-1, width) != right.view("u1").reshape(-1, width)).any(1)
        self.compared += len(left)
        self.changed += int(differs.sum())
        numbers, others = as_numbers(left, dtype), as_numbers(right, dtype)
        if numbers is None or others is None:
            return
        finite = np.isfinite(numbers) & np.isfinite(others)
        self.finite += int(finite.sum())
        changed = (differs & finite.T).T  # of one number or several per element
        self.not_finite += int((differs & ~finite.T).sum())
        if changed.any():
            with np.errstate(over="ignore"):  # two finite numbers can be further apart than the largest one
                gaps = np.abs(numbers[changed] - others[changed])
            self.total += float(gaps.sum())
            self.most = max(self.most, float(gaps.max()))

    def delta(self, elements: int) -> Delta:
        most, mean = (self.most, self.total / self.finite) if self.finite else (None, None)
        return Delta(elements, self.compared, self.changed, most, mean, self.not_finite)


def read_box(side: Side, leaf: Leaf, region: Region, *, rank: int = 0) -> np.ndarray:
    """A region of an array, as raw elements in C order; its bytes are compared with their checksums.

    Args:
        rank: whose array, under `PerRank`.
    """
    assert leaf.spec is not None, "values are in the index"
    memory = np.empty(region.shape, raw_dtype(dtype_of(leaf.spec.dtype).itemsize))
    filling = ReadBatch(side.store, side.index, rank, Recorder(0))
    filling.want(leaf.path, leaf, ArrayTarget(leaf.spec, memory, [TargetPiece(region, HostArray(memory))]))
    filling.run(True, ReadOptions(memory=PART))
    return memory
