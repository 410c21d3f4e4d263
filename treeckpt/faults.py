"""One rank's failure as a message, and what every rank raises for it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .core import errors
from .core.errors import RankError, TreeckptError
from .io.comm import Comm

__all__ = ["Fault", "fault_of", "raise_faults"]


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error, as it travels from rank to rank."""

    rank: int
    kind: str
    """The name of our error class, or of a foreign one."""
    path: str
    expected: str
    found: str
    hint: str
    text: str


def fault_of(error: BaseException, rank: int) -> Fault:
    """The message that tells of an error."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TreeckptError):
        return Fault(rank, type(error).__name__, error.path, error.expected, error.found, error.hint, text)
    return Fault(rank, type(error).__name__, "", "", "", "", text)


def raise_faults(faults: Sequence[Fault], path: str, comm: Comm, cause: BaseException | None = None) -> None:
    """Raises what the faults amount to; nothing where there are none.

    An error of ours that concerns all ranks alike is raised as itself; failures of single ranks as a `RankError`
    that names each.
    """
    if not faults:
        return
    if cause is not None and comm.size == 1:
        raise cause
    first = faults[0]
    alike = all((f.kind, f.path, f.expected) == (first.kind, first.path, first.expected) for f in faults)
    kind = getattr(errors, first.kind, None)
    ours = isinstance(kind, type) and issubclass(kind, TreeckptError) and kind is not RankError
    judged = len(faults) == comm.size or (len(faults) == 1 and first.rank == 0 and first.kind in _JUDGEMENTS)
    if ours and alike and judged:
        raise kind(first.path, expected=first.expected, found=first.found, hint=first.hint) from cause
    ranks = {fault.rank: fault.text for fault in faults}
    raise RankError(
        path,
        ranks=ranks,
        expected=f"all {comm.size} ranks to succeed",
        hint="Nothing was committed; an earlier checkpoint at this path is still valid",
    ) from cause


_JUDGEMENTS = frozenset(("CheckpointExists", "CheckpointError", "MismatchError", "LayoutError"))
"""Errors that the coordinator finds on behalf of all ranks."""
