"""Which bucket is an id in, and in which order are the rows of a keyed table saved?

A partition function maps an id to one of so many buckets. Rows are saved in the order of (bucket, id as unsigned), so
that what any owner holds is a range of rows. Where buckets are the low bits of ids, numbers are sorted that hold both
an id's bits and its position, in stretches that may be worked on at the same time; otherwise two stable orders do.
"""

# numpy's stubs leave some results unknown
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np

from ...errors import LayoutError, TreeError
from .spec import TableSpec

__all__ = ["BUCKETS", "Arranged", "Keep", "Together", "arrange", "buckets_of", "check_partition", "in_turn", "share_of"]

BUCKETS = 65_536
"""How many buckets a table has, unless told otherwise."""
MAX_BUCKETS = 1 << 24
PART = 1 << 17
"""Ids that are looked at at a time."""
STRETCHES = 4
"""Into so many parts ids are cut for those who work on them at the same time."""
Keep = Literal["first", "last"]
Together = Callable[[Sequence[Callable[[], object]]], None]
"""Calls functions that do not depend on each other."""


def in_turn(works: Sequence[Callable[[], object]]) -> None:
    """Calls one after the other."""
    for work in works:
        work()


# buckets -------------------------------------------------------------------------------------------------------------


def _u64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    if buckets & (buckets - 1) == 0:
        return ids & np.uint64(buckets - 1)
    return ids % np.uint64(buckets)


def _splitmix64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    """Of mixed bits (Vigna's splitmix64): for ids whose low bits say little."""
    with np.errstate(over="ignore"):
        mixed = ids + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return _u64_mod(mixed ^ (mixed >> np.uint64(31)), buckets)


_FUNCTIONS = {"u64_mod": _u64_mod, "splitmix64_mod": _splitmix64_mod}


def check_partition(spec: TableSpec) -> None:
    """Refuses a partition that this version cannot compute.

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
    """The bucket of each id, uint64[N]; `ids` int64[N]."""
    return _FUNCTIONS[spec.function](ids.view(np.uint64), spec.buckets)


def share_of(rank: int, world: int, buckets: int = BUCKETS) -> tuple[int, int]:
    """The buckets `start:stop` of one of `world` owners: equal shares, what is left over to the first ones."""
    if not 0 <= rank < world:
        raise LayoutError("owned", expected=f"a rank of a world of {world}", found=f"{rank}")
    each, more = divmod(buckets, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


# the order of rows ---------------------------------------------------------------------------------------------------


class Arranged(msgspec.Struct, frozen=True):
    """The order in which rows are saved."""

    order: np.ndarray | None
    """Where each row stands in the table's own arrays, int64[rows]; None if it stands where it is."""
    starts: np.ndarray
    """The first row of each bucket, and the number of rows, int64[buckets + 1]."""

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Ids in that order, a view where it is theirs."""
        return ids if self.order is None else ids[self.order]


def arrange(
    ids: np.ndarray, spec: TableSpec, keep: Keep | None = None, path: str = "ids", *, together: Together = in_turn
) -> Arranged:
    """Finds the order of (bucket, unsigned id).

    Args:
        ids: int64[N].
        keep: which of several rows with one id stays.
        together: calls what may be done at the same time.

    Raises:
        TreeError: an id has several rows, and `keep` does not say what to do.
    """
    unsigned = ids.view(np.uint64)
    power = spec.buckets.bit_length() - 1
    if spec.function == "u64_mod" and spec.buckets == 1 << power:
        order, starts, repeated = _order_by_bits(unsigned, power, together)
    else:
        buckets = buckets_of(ids, spec)
        order = np.argsort(unsigned, kind="stable")
        # a stable sort of 16-bit numbers is a radix sort
        small = np.uint16 if spec.buckets <= 1 << 16 else np.uint32
        order = order[np.argsort(buckets[order].astype(small), kind="stable")]
        starts, repeated = _starts(buckets, spec.buckets), _repeated(unsigned, order)
    if order is not None and repeated:
        order = order[_distinct(ids[order], keep, path)]
        starts = _starts(buckets_of(ids[order], spec), spec.buckets)
    return Arranged(order, starts)


def _starts(buckets: np.ndarray, count: int) -> np.ndarray:
    sizes = np.bincount(buckets.view(np.int64), minlength=count)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Stretches that stay in a cache while they are looked at, each with the first element of the next."""
    for low in range(0, len(array), PART):
        yield array[low : low + PART + 1]


def _repeated(ids: np.ndarray, order: np.ndarray) -> bool:
    """Whether ids, in order, hold one twice."""
    taken = (ids[part] for part in _parts(order))
    return any((part[1:] == part[:-1]).any() for part in taken)


def _order_by_bits(ids: np.ndarray, power: int, together: Together) -> tuple[np.ndarray | None, np.ndarray, bool]:
    """The order of (low `power` bits, the other bits), stable, the first row of each bucket, and if ids are repeated.

    A key, the low bits put first, and a position in one number can be sorted as such, in a third of the time that an
    order takes. Where both do not fit, the last bits of the keys are left out, and the few that are alike without them
    put in order afterwards. The order is None for ids that are in it.
    """
    width = max(power, int(ids.max(initial=0)).bit_length())
    bits = max(1, (len(ids) - 1).bit_length())
    left_out = max(0, width + bits - 64)
    borders = np.arange(1 << power, dtype=np.uint64) << np.uint64(min(63, width - power - left_out + bits))
    packed, rising = _pack(ids, power, width, left_out, bits, together)
    if not rising:
        _sort(packed, together)
    starts = np.append(np.searchsorted(packed, borders), len(ids))
    if rising:
        return None, starts, False
    at = _alike(packed, bits)
    if left_out and len(at) > len(ids) // 32:
        order = np.argsort(_keys(ids, power, width), kind="stable")
        return order, starts, _repeated(ids, order)
    together([partial(np.bitwise_and, part, np.uint64((1 << bits) - 1), part) for part in _stretches(packed)])
    order = packed.view(np.int64)
    some = order[at]
    order[at] = some[np.argsort(_keys(ids[some], power, width), kind="stable")]
    return order, starts, _repeated(ids, order[at])


def _stretches(array: np.ndarray) -> list[np.ndarray]:
    step = max(PART, -(-len(array) // STRETCHES))
    return [array[low : low + step] for low in range(0, len(array), step)]


def _pack(
    ids: np.ndarray, power: int, width: int, left_out: int, bits: int, together: Together
) -> tuple[np.ndarray, bool]:
    """Keys, but for their last bits, with positions behind them, uint64[N], and whether the keys rise."""
    packed, falls = np.empty(len(ids), np.uint64), list[int]()

    def pack(start: int, stop: int) -> None:
        for low in range(start, stop, PART):
            keys = _keys(ids[low : low + PART + 1], power, width)
            if not falls and not (keys[1:] > keys[:-1]).all():
                falls.append(low)
            keys = keys[:PART]
            keys >>= np.uint64(left_out)
            keys <<= np.uint64(bits)
            keys |= np.arange(low, low + len(keys), dtype=np.uint64)
            packed[low : low + PART] = keys

    step = PART * max(1, -(-len(ids) // (PART * STRETCHES)))
    together([partial(pack, low, min(low + step, len(ids))) for low in range(0, len(ids), step)])
    return packed, not falls


def _sort(packed: np.ndarray, together: Together) -> None:
    """Sorts numbers in place: by halves so far that no stretch has any of another's, a tenth of the work; then each."""
    stretches = [packed]
    while len(stretches) < STRETCHES and len(packed) > PART * len(stretches):
        together([partial(part.partition, len(part) // 2) for part in stretches])
        stretches = [half for part in stretches for half in (part[: len(part) // 2], part[len(part) // 2 :])]
    together([part.sort for part in stretches])


def _keys(ids: np.ndarray, power: int, width: int) -> np.ndarray:
    """Ids of `width` bits with the low `power` of them put first."""
    keys = ids & np.uint64((1 << power) - 1)
    keys <<= np.uint64(min(width - power, 63))
    keys |= ids >> np.uint64(power)
    return keys


def _alike(packed: np.ndarray, bits: int) -> np.ndarray:
    """Where sorted numbers are the same but for the last bits, neighbours of both sides."""
    same: list[np.ndarray] = [np.empty(0, np.int64)]
    for n, part in enumerate(_parts(packed)):
        same.append(np.flatnonzero((part[1:] ^ part[:-1]) >> np.uint64(bits) == 0) + n * PART)
    first = np.concatenate(same)
    return np.union1d(first, first + 1)


def _distinct(taken: np.ndarray, keep: Keep | None, path: str) -> np.ndarray:
    """Which of rows in order, those of one id in the order in which they were given, are to stay."""
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
