"""What save, async_save and load have in common: which storage a call means, which ranks take part, and
the errors of treeckpt as DCP's `CheckpointException`, which every rank raises alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from traceback import StackSummary
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.api import _wrap_exception as with_trace
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from .. import errors
from .._io.comm.collective import Fault, gather_errors
from .._io.comm.comm import Comm, as_comm, world_size
from .._io.storage.open import open_store
from ..errors import CheckpointExists, CheckpointNotFound, MismatchError, RankError, TreeckptError
from ._reader import DcpReader
from ._writer import DcpWriter

FILE_SYSTEM_WRITER, FILE_SYSTEM_READER = filesystem.FileSystemWriter, filesystem.FileSystemReader
"""DCP's own, also after `install`."""


def comm_for(process_group: Any, *, no_dist: bool) -> Comm:
    """Returns the comm of a call: DCP takes a process without a process group for alone."""
    return as_comm("alone" if no_dist or not (world_size() or process_group) else process_group)


def storage_for(given: Any, checkpoint_id: Any, *, reading: bool) -> Any:
    """Returns the storage that a call means: treeckpt's own for a path, and for DCP's own file system storage.

    Raises:
        RuntimeError: no storage is given, nor a path or URL that is known; as DCP says it.
    """
    if given is None:
        if not checkpoint_id:
            raise RuntimeError("`checkpoint_id` must be specified if storage_reader/storage_writer is None.")
        try:
            open_store(checkpoint_id)
        except TreeckptError as error:
            raise RuntimeError("Cannot detect which StorageReader or StorageWriter to use.") from error
        return DcpReader(checkpoint_id) if reading else DcpWriter(checkpoint_id)
    if checkpoint_id is not None:
        given.reset(checkpoint_id)
    if type(given) is FILE_SYSTEM_READER:
        return DcpReader(given.path)
    if type(given) is FILE_SYSTEM_WRITER and not given.transforms.extensions:
        return DcpWriter(given.path, overwrite=given.overwrite)
    return given


def is_default_planner(planner: Any) -> bool:
    """Whether a planner plans as DCP does by default, so that treeckpt can plan instead."""
    return planner is None or (
        type(planner) in (DefaultSavePlanner, DefaultLoadPlanner)
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
    )


def states_of(state_dict: Any) -> dict[Any, Any]:
    """Returns a state dict with its stateful objects replaced by their states, which are asked for in sorted order.

    So the ranks ask in one order, as a `state_dict` may communicate.
    """
    states = {key: state_dict[key].state_dict() for key in sorted(state_dict) if is_stateful(state_dict[key])}
    return {key: states.get(key, element) for key, element in state_dict.items()}


def is_stateful(element: Any) -> bool:
    """Whether an element is one of DCP's `Stateful`.

    The check of the protocol takes 40 us, as long as all else in a save of a small tensor.
    """
    return hasattr(element, "state_dict") and isinstance(element, Stateful)


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
