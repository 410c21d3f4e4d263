"""`load` with DCP's arguments: fills a state dict in place from a checkpoint of treeckpt, or of DCP."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.planner_helpers import _init_state_dict as allocate_meta_tensors
from torch.distributed.checkpoint.state_dict_loader import load as load_through_dcp
from torch.distributed.checkpoint.utils import _api_bc_check as takes_positional_storage

from .._core.tree.flatten import update_metadata
from .._io.comm.comm import Comm
from .._io.storage.checkpoint import Checkpoint
from .._loading.run_load import on_one_version
from ..errors import MismatchError
from ._calls import (
    FILE_SYSTEM_READER,
    comm_for,
    ended_together,
    is_default_planner,
    is_stateful,
    states_of,
    storage_for,
)
from ._names import Entry, entries_of, fill_tensors, load_values, places_in
from ._reader import DcpReader


@takes_positional_storage
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Loads a checkpoint into a state dict, as `torch.distributed.checkpoint.load` does.

    Tensors are filled in place, in any layout; values are replaced; stateful objects at the top are given their states.
    Tensors on the meta device are replaced by new ones. Entries of the checkpoint that are not asked for are ignored. A
    directory that DCP has written is loaded through DCP.

    >>> state = {"model": model.state_dict(), "step": 0}
    >>> tc.dcp.load(state, checkpoint_id="run/step_00000100", no_dist=True)
    >>> state["step"]
    100

    Args:
        checkpoint_id: a path or URL, as for `treeckpt.load`.
        storage_reader: a `Reader` or DCP's `FileSystemReader`, for its path; another one is used through DCP.
        planner: DCP's default one, for `allow_partial_load`: entries that are missing stay as they are. One of another
            class plans through DCP, with a `Reader`.
        process_group: the ranks that load.
        no_dist: loads in this process alone.

    Raises:
        CheckpointException: the load failed on a rank; on every rank. Tensors may be partly filled.
    """
    storage = storage_for(storage_reader, checkpoint_id, reading=True)
    if isinstance(storage, DcpReader) and storage.is_of_dcp():
        storage = FILE_SYSTEM_READER(storage.path)
    if not isinstance(storage, DcpReader) or not is_default_planner(planner):
        load_through_dcp(
            state_dict, storage_reader=storage, planner=planner, process_group=process_group, no_dist=no_dist
        )
        return
    comm = comm_for(process_group, no_dist=no_dist)
    partial = planner is not None and planner.allow_partial_load
    states: dict[Any, Any] = {}

    def fill(checkpoint: Checkpoint) -> None:
        _fill(checkpoint, states, comm, partial=partial, allow_pickle=storage.allow_pickle)

    with ended_together("load", f"{storage.url} load", comm):
        states |= states_of(state_dict)
        on_one_version(storage.path, fill)
    for key in sorted(states):
        if is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(states[key])
        else:
            state_dict[key] = states[key]


def _fill(checkpoint: Checkpoint, states: dict[Any, Any], comm: Comm, *, partial: bool, allow_pickle: bool) -> None:
    """Fills nested states; all is compared, and values are loaded, before the first tensor is filled."""
    allocate_meta_tensors(states)
    wanted = places_in(states)
    saved = entries_of(checkpoint.index)
    missing = [name for name in wanted if name not in saved]
    if missing and not partial:
        raise MismatchError(
            missing[0],
            expected="all that is asked for to be in the checkpoint",
            found=f"Missing key in checkpoint state_dict: {', '.join(missing[:5])}"
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""),
            hint="Pass planner=DefaultLoadPlanner(allow_partial_load=True) to leave these as they are",
        )
    tensors: list[tuple[Entry, Any]] = []
    values: dict[str, Entry] = {}
    for name, place in wanted.items():
        entry = saved.get(name)
        if entry is None:
            continue
        if not entry.is_tensor and not (entry.in_parts and isinstance(place.content, torch.Tensor)):
            values[name] = entry
            continue
        if entry.is_tensor:
            _check_target(name, entry, place.content)
        tensors.append((entry, place.content))
    loaded = load_values(checkpoint, values, comm, allow_pickle=allow_pickle)
    fill_tensors(checkpoint, tensors, comm)
    for name, value in loaded.items():
        wanted[name].container[wanted[name].key] = value
    update_metadata(states, checkpoint.index.structure, {place.path: name in saved for name, place in wanted.items()})


def _check_target(name: str, entry: Entry, target: Any) -> None:
    """Refuses a target that is no tensor, or of another size, as DCP does."""
    spec = entry.leaf.spec
    assert spec is not None, "a tensor has a spec"
    shape = getattr(target, "shape", None)
    if shape is None or not hasattr(target, "dtype"):
        raise MismatchError(
            name, expected="a tensor to fill", found=f"a {type(target).__name__}, and a tensor in the checkpoint"
        )
    if tuple(shape) != spec.shape:
        raise MismatchError(
            name,
            expected=f"a tensor of shape {spec.shape}, as in the checkpoint",
            found=f"Size mismatch between saved {torch.Size(spec.shape)} and current: {torch.Size(shape)}",
        )
