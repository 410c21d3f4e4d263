"""Compares the arrays of two checkpoints, and measures how much they differ.

Checksums in the shards' headers are compared first: arrays that these show to be equal or changed need no read.
`delta_of` reads two arrays, a part at a time, and measures the difference. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from .._core.format.records import Leaf
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.region import Region, flat_regions
from .._core.tree.spec import BLOB_KINDS, ArraySpec
from .._inspect.diff import ByteComparison, Diff, comparable, compare_checksums, diff
from .._inspect.numbers import as_numbers, norm_of
from .._io.storage.checkpoint import Checkpoint
from ..errors import MismatchError
from .read_batch import read_arrays, read_region

READ_NBYTES = 16 << 20
"""Bytes of each side that are read at a time."""
MAX_ARRAYS_AT_ONCE = 4096
"""Arrays that are read at a time, at most."""
BATCH = 1 << 17
"""Elements that are compared at a time: as float64 they stay in a processor's cache."""
INTS = ("int64", "uint64")
"""Dtypes whose elements float64 does not hold exactly."""


class Delta(msgspec.Struct, frozen=True):
    """The difference of two arrays, element by element."""

    elements: int
    compared: int
    """The number of elements that were compared: fewer than all where a cap was given."""
    changed: int
    """The number of compared elements whose bits differ."""
    max_abs: float | None
    """The largest difference where both elements are finite; None where no two are, or they are no numbers."""
    mean_abs: float | None
    """The mean difference over all elements that are finite in both, changed or not."""
    not_finite: int
    """The number of changed elements of which one is infinite or not a number."""
    before: float = 0.0
    """The Euclidean norm of the first array, over elements that are finite in both, as in the fields that follow."""
    after: float = 0.0
    """The norm of the second array."""
    change: float = 0.0
    """The norm of the difference."""
    cosine: float | None = None
    """The cosine of the angle between the two arrays; None where one is zero, or they are no numbers."""

    @property
    def relative(self) -> float:
        """The norm of the difference over that of the first array; infinity if that is zero and the second is not."""
        return self.change / self.before if self.before else math.inf if self.change else 0.0


class ValueChange(msgspec.Struct, frozen=True):
    """An array whose content differs, or may."""

    path: str
    other: str
    """The path of the array in the second checkpoint."""
    verdict: ByteComparison
    nbytes: int
    """The bytes of each of the two, as far as they are compared: under `PerRank` of all ranks' arrays."""
    delta: Delta | None = None


def verdict_of(a: Checkpoint, x: Leaf, b: Checkpoint, y: Leaf) -> ByteComparison:
    """Returns the verdict of the checksums on two arrays of one shape and dtype; "unknown" where one has none."""
    if not (a.has_checksums and b.has_checksums):
        return "unknown"
    return compare_checksums(a.index, x, b.index, y, (a.checksums, b.checksums))


def value_changes(
    a: Checkpoint, b: Checkpoint, known: Diff | None = None, *, exact: bool = True
) -> Iterator[ValueChange]:
    """Yields the arrays that both checkpoints have, and whose contents differ.

    Args:
        known: the difference of the indexes, if it has been computed.
        exact: reads what checksums cannot tell, and measures every difference; otherwise the verdict may be "unknown".
    """
    for side in (a, b):
        side.check_against_files()
    pairs = comparable(a.index, b.index, known or diff(a.index, b.index))
    if exact:
        for x, y, delta in measured_pairs(a, b, pairs, equal_too=False):
            if delta.changed:
                yield ValueChange(x.path, y.path, "changed", min(x.nbytes, y.nbytes), delta)
        return
    for x, y in pairs:
        if (verdict := verdict_of(a, x, b, y)) != "equal":
            yield ValueChange(x.path, y.path, verdict, min(x.nbytes, y.nbytes))


def delta_of(a: Checkpoint, x: Leaf, b: Checkpoint, y: Leaf, *, cap: int | None = None) -> Delta:
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
    # ranks that only one side has have nothing to be compared with
    for rank, other in zip(ranks, others, strict=False):
        step = max(1, READ_NBYTES // itemsize)
        for start in range(0, min(elements, left), step):
            for region in flat_regions(x.spec.shape, start, min(start + step, elements, left)):
                sums.add(read_region(a, x, region, rank=rank), read_region(b, y, region, rank=other), x.spec)
        left -= min(elements, left)
    return sums.delta(elements * len(ranks))


def measured_pairs(
    a: Checkpoint, b: Checkpoint, pairs: Iterable[tuple[Leaf, Leaf]], *, equal_too: bool = True
) -> Iterator[tuple[Leaf, Leaf, Delta]]:
    """Yields pairs of arrays of one shape and dtype with their differences, measured over all elements.

    Small arrays are read many at a time. Of arrays that are equal by their checksums only the first is read.

    Args:
        equal_too: whether these are yielded too.
    """
    batch: list[tuple[Leaf, Leaf, bool]] = []
    nbytes = 0
    for x, y in pairs:
        equal = verdict_of(a, x, b, y) == "equal"
        if equal and not equal_too:
            continue
        if x.ranks is not None or x.nbytes > READ_NBYTES:
            yield x, y, delta_of(a, x, a if equal else b, x if equal else y)
            continue
        batch.append((x, y, equal))
        nbytes += x.nbytes
        if nbytes > READ_NBYTES or len(batch) == MAX_ARRAYS_AT_ONCE:
            yield from _measured_batch(a, b, batch)
            batch, nbytes = [], 0
    yield from _measured_batch(a, b, batch)


def _measured_batch(
    a: Checkpoint, b: Checkpoint, batch: Sequence[tuple[Leaf, Leaf, bool]]
) -> Iterator[tuple[Leaf, Leaf, Delta]]:
    before = read_arrays(a, [x for x, _, _ in batch])
    after = iter(read_arrays(b, [y for _, y, equal in batch if not equal]))
    for (x, y, equal), data in zip(batch, before, strict=True):
        assert x.spec is not None, "arrays only are compared"
        sums = _Sums()
        sums.add(data, data if equal else next(after), x.spec)
        yield x, y, sums.delta(data.size)


class _Sums:
    """Totals over the parts that were compared so far."""

    def __init__(self) -> None:
        self.compared = self.changed = self.finite = self.not_finite = 0
        self.total = self.most = 0.0
        self.before = self.after = self.change = self.dot = 0.0

    def add(self, before: np.ndarray, after: np.ndarray, spec: ArraySpec) -> None:
        dtype = None if spec.kind in BLOB_KINDS else spec.dtype
        left, right = (np.ascontiguousarray(part).reshape(-1) for part in (before, after))
        for start in range(0, len(left), BATCH):
            self._add(left[start : start + BATCH], right[start : start + BATCH], dtype)

    def _add(self, left: np.ndarray, right: np.ndarray, dtype: str | None) -> None:
        width = left.dtype.itemsize
        # as bits: a NaN equals itself, and -0.0 is not 0.0
        if width in (1, 2, 4, 8):
            differs = left.view(f"u{width}") != right.view(f"u{width}")
        else:
            differs = (left.view("u1").reshape(-1, width) != right.view("u1").reshape(-1, width)).any(1)
        self.compared += len(left)
        self.changed += int(np.count_nonzero(differs))
        if dtype is None:  # text and bytes are no numbers
            return
        numbers, others = as_numbers(left, dtype), as_numbers(right, dtype)
        if numbers is None or others is None:
            return
        finite = np.isfinite(numbers) & np.isfinite(others)
        if not finite.all():
            # two numbers in an element are a second dimension: transposed, the elements are last, as in `differs`
            self.not_finite += int((differs & ~finite.T).sum())
            numbers, others = numbers[finite], others[finite]
        self.finite += numbers.size
        with np.errstate(over="ignore", invalid="ignore"):  # two finite numbers can be further apart than the largest
            gaps = np.abs(others - numbers).reshape(-1) if dtype not in INTS else _int_gaps(left, right, dtype)
            self.total += float(gaps.sum())
            self.most = max(self.most, float(gaps.max(initial=0.0)))
            if numbers.dtype.kind == "c":
                numbers, others = numbers.view(np.float64), others.view(np.float64)
            # hypot joins norms without squares, which could overflow
            self.before = math.hypot(self.before, norm_of(numbers.reshape(-1)))
            self.after = math.hypot(self.after, norm_of(others.reshape(-1)))
            self.change = math.hypot(self.change, norm_of(gaps))
            self.dot += float(np.vdot(numbers, others))

    def delta(self, elements: int) -> Delta:
        most, mean = (self.most, self.total / self.finite) if self.finite else (None, None)
        size = self.before * self.after
        cosine = self.dot / size if size and math.isfinite(size) and math.isfinite(self.dot) else None
        return Delta(
            elements=elements,
            compared=self.compared,
            changed=self.changed,
            max_abs=most,
            mean_abs=mean,
            not_finite=self.not_finite,
            before=self.before,
            after=self.after,
            change=self.change,
            cosine=None if cosine is None else min(1.0, max(-1.0, cosine)),
        )


def _int_gaps(left: np.ndarray, right: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the differences of 64-bit integers as float64: those of the numbers as float64 are 0 for neighbours."""
    bits, others = left.view(np.uint64), right.view(np.uint64)
    return np.where(left.view(dtype) > right.view(dtype), bits - others, others - bits).astype(np.float64)
