"""What save, async_save and load have in common: which storage a call means, and which ranks take part."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from ..errors import TreeckptError
from ..io.comm.comm import Comm, as_comm, world_size
from ..io.storage.open import open_store
from .reader import DcpReader
from .writer import DcpWriter

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
