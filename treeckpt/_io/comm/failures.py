"""One rank's failure as a message, and the error that every rank raises for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ... import errors
from ...errors import RankError, StoreError, TreeckptError

NOT_COMMITTED = "Nothing was committed; an earlier checkpoint at this path is still valid"
"""The hint of the error of a save that failed."""
_KINDS: dict[str, type[TreeckptError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TreeckptError) and kind is not RankError
}
"""Error classes of treeckpt that can be raised for the failure of another rank."""


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error as a message between ranks."""

    rank: int
    kind: str
    """The name of the error's class."""
    path: str
    expected: str
    found: str
    hint: str
    text: str
    common: bool = False
    """Found by the coordinator for all ranks: no single rank has failed."""
    errno: int = 0
    """Of the error of the operating system for which a `StoreError` was raised; 0 without one."""


def to_fault(error: BaseException, rank: int, *, common: bool = False) -> Fault:
    """Returns an error as a message."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TreeckptError):
        cause = error.__cause__ or error.__context__
        number = (cause.errno or 0) if isinstance(error, StoreError) and isinstance(cause, OSError) else 0
        facts = error.path, error.expected, error.found, error.hint
        return Fault(rank, type(error).__name__, *facts, text, common, number)
    return Fault(rank, type(error).__name__, path="", expected="", found="", hint="", text=text, common=common)


def silent_faults(lost: Mapping[int, str]) -> list[Fault]:
    """Returns the faults of ranks that did not answer, with what is known of each."""
    return [
        Fault(rank, RankError.__name__, path="", expected="", found="", hint="", text=text)
        for rank, text in lost.items()
    ]


def raise_faults(
    faults: Sequence[Fault],
    path: str,
    size: int,
    *,
    cause: BaseException | None = None,
    hint: str = NOT_COMMITTED,
) -> None:
    """Raises the error that the faults amount to; does nothing where there are none.

    A treeckpt error that concerns all ranks alike is raised as itself; failures of single ranks as one `RankError`
    that names each.

    Args:
        size: how many ranks there are.
        cause: this rank's own error.
        hint: what state the failure leaves behind.
    """
    if not faults:
        return
    if cause is not None and size == 1:
        raise cause
    first = faults[0]
    alike = all((f.kind, f.path, f.expected) == (first.kind, first.path, first.expected) for f in faults)
    kind = _KINDS.get(first.kind)
    if kind is not None and alike and (first.common or len(faults) == size):
        raise kind(first.path, expected=first.expected, found=first.found, hint=first.hint) from cause
    ranks = {fault.rank: fault.text for fault in faults}
    raise RankError(path, ranks=ranks, expected=f"all {size} ranks to succeed", hint=hint) from cause
