"""The bucket of an id, and the order in which the rows of a keyed table are saved.

A partition function maps an id to one of a fixed number of buckets. Rows are saved in the order of (bucket, id as
unsigned), so that what any owner holds is a range of rows. Where the bucket is the low bits of the id, integers are
sorted that hold both an id's bits and its position, in parts that may be sorted in parallel; otherwise by two stable
sorts.
"""

# numpy's stubs leave some results unknown
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, SupportsIndex

import msgspec
import numpy as np

from ...errors import LayoutError, TreeError
from .spec import TableSpec

DEFAULT_BUCKETS = 65_536
"""The default number of buckets of a table."""
MAX_BUCKETS = 1 << 24
PART_SIZE = 1 << 17
"""Ids that are processed at a time: they stay in the cache."""
PARALLEL_PARTS = 4
"""The number of parts into which ids are cut for parallel work."""
Keep = Literal["first", "last"]
Executor = Callable[[Sequence[Callable[[], object]]], None]
"""Calls functions that are independent of each other, and returns when all have returned."""


def run_serially(tasks: Sequence[Callable[[], object]]) -> None:
    """Calls the functions one after the other."""
    for task in tasks:
        task()


# buckets -------------------------------------------------------------------------------------------------------------


def _u64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    if buckets & (buckets - 1) == 0:
        return ids & np.uint64(buckets - 1)
    return ids % np.uint64(buckets)


def _splitmix64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    """The bucket by mixed bits (Vigna's splitmix64): for ids whose low bits are unevenly distributed."""
    with np.errstate(over="ignore"):
        mixed = ids + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return _u64_mod(mixed ^ (mixed >> np.uint64(31)), buckets)


def _i64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    """The remainder as Python and torch have it, never negative: -1 of 4 buckets is in bucket 3."""
    if buckets & (buckets - 1) == 0:
        return ids & np.uint64(buckets - 1)
    return (ids.view(np.int64) % np.int64(buckets)).view(np.uint64)


_FUNCTIONS = {"u64_mod": _u64_mod, "splitmix64_mod": _splitmix64_mod, "i64_mod": _i64_mod}


def check_partition(spec: TableSpec) -> None:
    """Checks that this version can compute a partition.

    Raises:
        LayoutError: no such function, or no such number of buckets.
    """
    if spec.function not in _FUNCTIONS or spec.version != 1:
        raise LayoutError(
            "partition", expected=f"one of {', '.join(_FUNCTIONS)}", found=f"{spec.function}, version {spec.version}"
        )
    if not 0 < spec.buckets <= MAX_BUCKETS:
        raise LayoutError("buckets", expected=f"1 to {MAX_BUCKETS}", found=f"{spec.buckets}")


def buckets_of(ids: np.ndarray, spec: TableSpec) -> np.ndarray:
    """Returns the bucket of each id, uint64[N]; `ids` is int64[N]."""
    return _FUNCTIONS[spec.function](ids.view(np.uint64), spec.buckets)


class ModuloOwner(msgspec.Struct, frozen=True):
    """Owns the ids of which `id % world == rank`, as Python and torch have it: -1 of 4 belongs to rank 3."""

    rank: int
    world: int


def modulo_owner(rank: int, world: int) -> ModuloOwner:
    """Returns, for `owned=`, the ids with `id % world == rank`; the remainder of a negative id is not negative.

    The table is then saved with the partition "i64_mod" and `world` buckets.
    """
    return ModuloOwner(*checked_rank(rank, world))


def checked_rank(rank: object, world: object) -> tuple[int, int]:
    """Returns a rank and the number of ranks.

    Raises:
        LayoutError: they are no such numbers.
    """
    if isinstance(rank, SupportsIndex) and isinstance(world, SupportsIndex):
        rank, world = operator.index(rank), operator.index(world)
        if 0 <= rank < world:
            return rank, world
    raise LayoutError("owned", expected=f"a rank of a world of {world!r:.40}", found=f"{rank!r:.40}")


def owned_text(spec: TableSpec, owned: tuple[int, int]) -> str:
    """Describes the ids in a range of buckets."""
    start, stop = owned
    if spec.function == "i64_mod" and stop == start + 1:
        return f"ids with id % {spec.buckets} == {start}"
    return f"ids of buckets {start}:{stop} of {spec.buckets}"


def bucket_range(rank: int, world: int, buckets: int = DEFAULT_BUCKETS) -> tuple[int, int]:
    """Returns the buckets `start:stop` of one of `world` owners: even, the first ones take the remainder."""
    rank, world = checked_rank(rank, world)
    each, more = divmod(buckets, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


# the order of rows ---------------------------------------------------------------------------------------------------


class RowOrder(msgspec.Struct, frozen=True):
    """The order in which rows are saved."""

    order: np.ndarray | None
    """The position of each row in the table's own arrays, int64[rows]; None if they are in order."""
    starts: np.ndarray
    """The first row of each bucket, then the number of rows, int64[buckets + 1]."""

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Returns ids in that order; the same array if they are in order."""
        return ids if self.order is None else ids[self.order]


def sort_rows(
    ids: np.ndarray, spec: TableSpec, keep: Keep | None = None, path: str = "ids", *, execute: Executor = run_serially
) -> RowOrder:
    """Returns the order of rows by (bucket, unsigned id).

    Args:
        ids: int64[N].
        keep: which of several rows with one id is kept.
        execute: runs the parts of the work, possibly in parallel.

    Raises:
        TreeError: an id has several rows, and `keep` is None.
    """
    unsigned = ids.view(np.uint64)
    power = spec.buckets.bit_length() - 1
    if spec.function in ("u64_mod", "i64_mod") and spec.buckets == 1 << power:
        order, starts, repeated = _sort_by_packed_keys(unsigned, power, execute)
    else:
        buckets = buckets_of(ids, spec)
        order = np.argsort(unsigned, kind="stable")
        # a stable sort of 16-bit numbers is a radix sort
        small = np.uint16 if spec.buckets <= 1 << 16 else np.uint32
        order = order[np.argsort(buckets[order].astype(small), kind="stable")]
        starts, repeated = _bucket_starts(buckets, spec.buckets), _has_duplicates(unsigned, order)
    if order is not None and repeated:
        order = order[_drop_duplicates(ids[order], keep, path)]
        starts = _bucket_starts(buckets_of(ids[order], spec), spec.buckets)
    return RowOrder(order, starts)


def _bucket_starts(buckets: np.ndarray, count: int) -> np.ndarray:
    sizes = np.bincount(buckets.view(np.int64), minlength=count)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _overlapping_parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields parts that fit in the cache, each with the first element of the next one."""
    for low in range(0, len(array), PART_SIZE):
        yield array[low : low + PART_SIZE + 1]


def _has_duplicates(ids: np.ndarray, order: np.ndarray) -> bool:
    """Returns whether an id is repeated; `order` sorts the ids."""
    taken = (ids[part] for part in _overlapping_parts(order))
    return any((part[1:] == part[:-1]).any() for part in taken)


def _sort_by_packed_keys(ids: np.ndarray, power: int, execute: Executor) -> tuple[np.ndarray | None, np.ndarray, bool]:
    """Returns the stable order of (low `power` bits, other bits), the first rows of buckets, and if ids are repeated.

    A key (the id with the low bits moved to the top) and a position, packed into one integer, are sorted as integers,
    in a third of the time of an argsort. Where both do not fit in 64 bits, the last bits of the keys are left out, and
    the few keys that are equal without them are sorted afterwards. The order is None for ids that are in order.
    """
    width = max(power, int(ids.max(initial=0)).bit_length())
    bits = max(1, (len(ids) - 1).bit_length())
    left_out = max(0, width + bits - 64)
    borders = np.arange(1 << power, dtype=np.uint64) << np.uint64(min(63, width - power - left_out + bits))
    packed, ascending = _pack_keys(ids, power, width, left_out, bits, execute)
    if not ascending:
        _parallel_sort(packed, execute)
    starts = np.append(np.searchsorted(packed, borders), len(ids))
    if ascending:
        return None, starts, False
    at = _equal_neighbours(packed, bits)
    if left_out and len(at) > len(ids) // 32:
        order = np.argsort(_sort_keys(ids, power, width), kind="stable")
        return order, starts, _has_duplicates(ids, order)
    execute([partial(np.bitwise_and, part, np.uint64((1 << bits) - 1), part) for part in _split(packed)])
    order = packed.view(np.int64)
    some = order[at]
    order[at] = some[np.argsort(_sort_keys(ids[some], power, width), kind="stable")]
    return order, starts, _has_duplicates(ids, order[at])


def _split(array: np.ndarray) -> list[np.ndarray]:
    step = max(PART_SIZE, -(-len(array) // PARALLEL_PARTS))
    return [array[low : low + step] for low in range(0, len(array), step)]


def _pack_keys(
    ids: np.ndarray, power: int, width: int, left_out: int, bits: int, execute: Executor
) -> tuple[np.ndarray, bool]:
    """Returns keys without their last bits, with positions in the low bits, uint64[N], and whether the keys ascend."""
    packed, descents = np.empty(len(ids), np.uint64), list[int]()

    def pack(start: int, stop: int) -> None:
        for low in range(start, stop, PART_SIZE):
            keys = _sort_keys(ids[low : low + PART_SIZE + 1], power, width)
            if not descents and not (keys[1:] > keys[:-1]).all():
                descents.append(low)
            keys = keys[:PART_SIZE]
            keys >>= np.uint64(left_out)
            keys <<= np.uint64(bits)
            keys |= np.arange(low, low + len(keys), dtype=np.uint64)
            packed[low : low + PART_SIZE] = keys

    step = PART_SIZE * max(1, -(-len(ids) // (PART_SIZE * PARALLEL_PARTS)))
    execute([partial(pack, low, min(low + step, len(ids))) for low in range(0, len(ids), step)])
    return packed, not descents


def _parallel_sort(packed: np.ndarray, execute: Executor) -> None:
    """Sorts integers in place: partitions them into parts (a tenth of the work), then sorts each part."""
    parts = [packed]
    while len(parts) < PARALLEL_PARTS and len(packed) > PART_SIZE * len(parts):
        execute([partial(part.partition, len(part) // 2) for part in parts])
        parts = [half for part in parts for half in (part[: len(part) // 2], part[len(part) // 2 :])]
    execute([part.sort for part in parts])


def _sort_keys(ids: np.ndarray, power: int, width: int) -> np.ndarray:
    """Returns ids of `width` bits with the low `power` bits moved to the top."""
    keys = ids & np.uint64((1 << power) - 1)
    keys <<= np.uint64(min(width - power, 63))
    keys |= ids >> np.uint64(power)
    return keys


def _equal_neighbours(packed: np.ndarray, bits: int) -> np.ndarray:
    """Returns the positions of sorted integers that equal a neighbour except for the last `bits` bits."""
    same: list[np.ndarray] = [np.empty(0, np.int64)]
    for n, part in enumerate(_overlapping_parts(packed)):
        same.append(np.flatnonzero((part[1:] ^ part[:-1]) >> np.uint64(bits) == 0) + n * PART_SIZE)
    first = np.concatenate(same)
    return np.union1d(first, first + 1)


def _drop_duplicates(taken: np.ndarray, keep: Keep | None, path: str) -> np.ndarray:
    """Returns which rows are kept, bool[N]. `taken`: ids in order, rows of one id in the order of the caller."""
    same = taken[1:] == taken[:-1]
    if keep is None:
        repeated = np.unique(taken[1:][same])
        more = ", ..." if len(repeated) > 5 else ""
        raise TreeError(
            path,
            expected="each id once",
            found=f"{len(repeated)} ids more than once: {', '.join(map(str, repeated[:5].tolist()))}{more}",
            hint="Pass keep='first' or keep='last' to KeyedTable",
        )
    one = np.ones(1, bool)
    return np.concatenate([one, ~same]) if keep == "first" else np.concatenate([~same, one])
