"""The errors of treeckpt as DCP's `CheckpointException`, which every rank raises alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from traceback import StackSummary
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.api import _wrap_exception as with_trace

from .. import errors
from ..errors import CheckpointExists, CheckpointNotFound, MismatchError, RankError, TreeckptError
from ..io.comm.collective import gather_errors
from ..io.comm.comm import Comm
from ..io.comm.failures import Fault

_PLAIN = CheckpointExists, CheckpointNotFound, MismatchError
"""Errors whose text says all: they are printed without the frames and causes, which the error object keeps."""


def exception_of(what: str, error: Exception, rank: int) -> CheckpointException:
    """Returns the exception for an error that all ranks have raised, each for itself.

    Args:
        what: of the call, as "save".
        rank: of this process.
    """
    if isinstance(error, CheckpointExists):
        error.add_hint("Checkpoint already exists and self.overwrite=False")  # in DCP's words, which programs look for
    if isinstance(error, MismatchError) and "tc.FromRank" in error.hint:  # ranks bring different contents
        error.add_hint('With on_conflict="rank0" what the first rank has is saved, with a warning')
    failures: dict[int, Any] = {rank: _with_frames(error)}
    if isinstance(error, RankError):
        failures = {at: (RuntimeError(cause), StackSummary()) for at, cause in error.ranks.items()}
        failures[rank if rank in failures else min(failures, default=rank)] = _with_frames(error)
    return CheckpointException(what, failures)


@contextlib.contextmanager
def converted(what: str, rank: int) -> Iterator[None]:
    """Raises the errors of a call that ends on all ranks alike as `CheckpointException`."""
    try:
        yield
    except Exception as error:
        raise exception_of(what, error, rank) from _cause(error)


@contextlib.contextmanager
def ended_together(what: str, topic: str, comm: Comm) -> Iterator[None]:
    """Carries out the body on every rank; where it fails on any, raises one `CheckpointException` on all.

    Args:
        topic: tells this call from others.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failed:
        error = failed
    with converted(what, comm.rank):
        faults = gather_errors(comm, topic, error)
    if faults:
        failures: dict[int, Any] = {fault.rank: (_error_of(fault), StackSummary()) for fault in faults}
        if error is not None:
            failures[comm.rank] = _with_frames(error)
        raise CheckpointException(what, failures) from _cause(error)


def _with_frames(error: Exception) -> Any:
    """Returns an error as `CheckpointException` takes it: with its frames, where they are printed."""
    return (error, StackSummary()) if isinstance(error, _PLAIN) else with_trace(error)


def _cause(error: Exception | None) -> Exception | None:
    return None if isinstance(error, _PLAIN) else error


def _error_of(fault: Fault) -> Exception:
    """Returns the error that another rank has reported."""
    kind = getattr(errors, fault.kind, None)
    if not isinstance(kind, type) or not issubclass(kind, TreeckptError) or kind is RankError:
        return RuntimeError(fault.text)
    return kind(fault.path, expected=fault.expected, found=fault.found, hint=fault.hint)
