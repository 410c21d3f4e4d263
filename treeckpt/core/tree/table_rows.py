"""Which rows of a saved table does each owner bring? A table's rows stand in the order of its buckets.

A rank knows which buckets it owns and how many rows it has, not how many rows the others have. So in its inventory the
arrays of a table are cut by bucket; when all ranks have spoken, `row_starts` says which rows these are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import LayoutError, MismatchError

__all__ = ["Claim", "row_starts"]


class Claim(msgspec.Struct, frozen=True):
    """What one rank says it has of a table."""

    rank: int
    start: int
    """Its first bucket."""
    stop: int
    rows: int


def row_starts(claims: Sequence[Claim], buckets: int, path: str) -> tuple[dict[tuple[int, int], int], int]:
    """The first row of each range of buckets, and the number of all rows. Owners of the same range are replicas.

    Raises:
        MismatchError: replicas have not as many rows.
        LayoutError: ranges overlap, or leave buckets out.
    """
    owners: dict[tuple[int, int], Claim] = {}
    for claim in claims:
        first = owners.setdefault((claim.start, claim.stop), claim)
        if first.rows != claim.rows:
            raise MismatchError(
                path,
                expected=f"the same rows on every owner of buckets {claim.start}:{claim.stop}; "
                f"rank {first.rank} has {first.rows}",
                found=f"rank {claim.rank} has {claim.rows}",
                hint="Give each rank buckets of its own: owned=tc.KeyedTable.share(rank, world)",
            )
    starts: dict[tuple[int, int], int] = {}
    rows = bucket = 0
    for key, claim in sorted(owners.items()):
        starts[key] = rows
        rows += claim.rows
        if claim.start == claim.stop:
            continue
        if claim.start != bucket:
            raise _not_once(path, claim, bucket)
        bucket = claim.stop
    if bucket != buckets:
        raise _not_once(path, Claim(-1, buckets, buckets, 0), bucket)
    return starts, rows


def _not_once(path: str, claim: Claim, bucket: int) -> LayoutError:
    if claim.start < bucket:
        found = f"bucket {claim.start} is owned by rank {claim.rank} and by another, with another range"
    else:
        found = f"no rank owns buckets {bucket}:{claim.start}"
    return LayoutError(
        path,
        expected="owners whose ranges hold each bucket once",
        found=found,
        hint="Use owned=tc.KeyedTable.share(rank, world) on each rank",
    )
