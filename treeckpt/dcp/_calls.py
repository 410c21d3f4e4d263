"""`save`, `async_save` and `load` with DCP's arguments, on treeckpt's planner, staging and format.

The errors of treeckpt are raised as DCP's `CheckpointException`, by every rank alike.
"""

from __future__ import annotations

import contextlib
import enum
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from traceback import StackSummary
from typing import Any, Literal

import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.api import _wrap_exception as with_trace
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.logger import _dcp_logger as event_log
from torch.distributed.checkpoint.logger import _dcp_method_logger as logs_events
from torch.distributed.checkpoint.logger import _get_msg_dict as event_of
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner_helpers import _init_state_dict as allocate_meta_tensors
from torch.distributed.checkpoint.state_dict_loader import load as load_of_dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_of_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_of_dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import _api_bc_check as takes_positional_storage

from .. import _api, errors
from .._arrays.describe import content_digests, describe_tree
from .._core.tree.containers import AbsentSubtree, FromRank
from .._core.tree.dict_attributes import copy_attributes
from .._core.tree.flatten import update_metadata
from .._io.comm.collective import Fault, all_gather, gather_errors
from .._io.comm.comm import Comm, as_comm, members_of, world_size
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.open import open_store
from .._loading.disks import LoadingRanks
from .._loading.run_load import on_one_version, opened
from .._saving.options import BackgroundOptions
from .._saving.session import Pending
from .._threads import call_in_thread
from ..errors import CheckpointExists, CheckpointNotFound, MismatchError, RankError, TreeckptError, visible
from ._names import Entry, Place, entries_of, fill_tensors, load_values, places_in
from ._storage import (
    FILE_SYSTEM_READER,
    FILE_SYSTEM_WRITER,
    FSSPEC_READER,
    FSSPEC_WRITER,
    DcpReader,
    DcpWriter,
    SavedMetadata,
    reader_of_dcp,
)

# without their events: the calls of this module have logged their own
save_through_dcp: Callable[..., Metadata] = vars(save_of_dcp)["__wrapped__"]
async_save_through_dcp: Callable[..., Any] = vars(async_save_of_dcp)["__wrapped__"]
load_through_dcp: Callable[..., None] = vars(load_of_dcp)["__wrapped__"]


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
    # of these very classes: a subclass may store in its own way
    if type(given) in (FILE_SYSTEM_READER, FSSPEC_READER):
        return DcpReader(given.path)
    if type(given) in (FILE_SYSTEM_WRITER, FSSPEC_WRITER) and not given.transforms.extensions:
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


_SAID_WHOLE = CheckpointExists, CheckpointNotFound, MismatchError
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
        failures = {failed: (RuntimeError(cause), StackSummary()) for failed, cause in error.ranks.items()}
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
    return (error, StackSummary()) if isinstance(error, _SAID_WHOLE) else with_trace(error)


def _cause(error: Exception | None) -> Exception | None:
    return None if isinstance(error, _SAID_WHOLE) else error


def _error_of(fault: Fault) -> Exception:
    """Returns the error that another rank has reported."""
    kind = getattr(errors, fault.kind, None)
    # a RankError is made of the causes of ranks, which a fault does not have
    if not isinstance(kind, type) or not issubclass(kind, TreeckptError) or kind is RankError:
        return RuntimeError(fault.text)
    return kind(fault.path, expected=fault.expected, found=fault.found, hint=fault.hint)


OnConflict = Literal["error", "rank0"]


@logs_events(log_exceptions=True)
@takes_positional_storage
def save(
    state_dict: Any,
    *,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    on_conflict: OnConflict = "error",
) -> Metadata:
    """Saves a state dict, as `torch.distributed.checkpoint.save` does; returns when it is durable and committed.

    A checkpoint at the path is replaced, and stays valid until then; a `Writer` with `overwrite=False` refuses.

    >>> metadata = tc.dcp.save({"model": model.state_dict(), "step": 7}, checkpoint_id="ckpt", no_dist=True)

    Args:
        state_dict: dicts and lists with tensors, DTensors, ShardedTensors and values; stateful objects at the top stand
            for their states. `treeckpt.Sharded`, `PerRank` and `FromRank` may be in it.
        checkpoint_id: a path or URL, as for `treeckpt.save`.
        storage_writer: a `Writer` or DCP's `FileSystemWriter`, for its path; another one is used through DCP.
        planner: one of another class than DCP's default one plans through DCP, with a `Writer`.
        process_group: the ranks that save; they talk over the Store, without a collective.
        no_dist: saves in this process alone.
        use_collectives: has no effect, as no collective is used.
        on_conflict: where ranks bring different values or tensors under one name: "error" refuses, by samples of what
            is above 64 KiB; "rank0" compares all bytes, and saves what the first rank has, with a warning.

    Raises:
        CheckpointException: the save failed; on every rank.
    """
    storage = storage_for(storage_writer, checkpoint_id, reading=False)
    if not isinstance(storage, DcpWriter) or not is_default_planner(planner):
        return save_through_dcp(
            state_dict, storage_writer=storage, planner=planner, process_group=process_group, no_dist=no_dist
        )
    comm = comm_for(process_group, no_dist=no_dist)
    with converted("save", comm.rank):
        report = _api.save(
            storage.path,
            _tree_for(state_dict, comm, storage.url, on_conflict),
            comm=comm,
            overwrite=storage.overwrite,
            allow_pickle=storage.allow_pickle,
        )
        storage.save_id = report.save_id
        storage.publish_markers(comm.rank)
    return SavedMetadata(storage.path)


@logs_events(log_exceptions=True)
def async_save(
    state_dict: Any,
    *,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    on_conflict: OnConflict = "error",
) -> Any:
    """Saves in the background, as `torch.distributed.checkpoint.async_save` does.

    It returns when the state dict is copied. A save that is under way is waited for first.

    >>> future = tc.dcp.async_save({"model": model.state_dict()}, checkpoint_id="ckpt", no_dist=True)
    >>> metadata = future.result()

    Args:
        async_checkpointer_type: `PROCESS` writes from a process of its own, as treeckpt does by default; `THREAD`, the
            default as in DCP, from a thread.
        async_stager: treeckpt copies by itself where it is None or a stager of DCP; one that stages asynchronously has
            it copy beside the next forward and backward, which must not change the state dict. Another one is used
            through DCP, with a `Writer`.

    Returns:
        a `Future` of the metadata; with a stager that stages asynchronously an `AsyncSaveResponse`.

    See `save` for the other arguments and errors; those after the call are the future's.
    """
    storage = storage_for(storage_writer, checkpoint_id, reading=False)
    kind = async_checkpointer_type or AsyncCheckpointerType.THREAD
    own_stager = async_stager is None or type(async_stager).__module__.startswith("torch.distributed.checkpoint.")
    if not isinstance(storage, DcpWriter) or not is_default_planner(planner) or not own_stager:
        return async_save_through_dcp(
            state_dict,
            storage_writer=storage,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=kind,
            async_stager=async_stager,
            no_dist=no_dist,
        )
    comm = comm_for(process_group, no_dist=no_dist)
    # DCP's stager keeps this in a private attribute alone
    lazy = getattr(getattr(async_stager, "_config", None), "use_async_staging", False)
    with converted("save", comm.rank):
        pending = _api.save_async(
            storage.path,
            _tree_for(state_dict, comm, storage.url, on_conflict),
            comm=comm,
            overwrite=storage.overwrite,
            allow_pickle=storage.allow_pickle,
            # the values of DCP's type are the names of treeckpt's writers
            background=BackgroundOptions(staging="lazy" if lazy else "copy", writer=kind.value),
        )
    return _futures_of(pending, storage, comm.rank, lazy=lazy)


def _futures_of(pending: Pending, storage: DcpWriter, rank: int, *, lazy: bool) -> Any:
    """Returns the future of a background save; of one that stages lazily those of staging and save."""
    uploaded: Future[Any] = _new_future()
    event = BackgroundEvent(storage)
    pending.add_done_callback(lambda _: _finish(pending, uploaded, storage, rank, event))
    if not lazy:
        return uploaded
    staged: Future[None] = _new_future()
    call_in_thread(partial(_wait_staged, pending, staged, rank), "treeckpt-staged")
    return AsyncSaveResponse(staged, uploaded)


def _new_future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a save cannot be cancelled
    return future


class BackgroundEvent:
    """The events of a save while it goes on in the background, in DCP's logger: those of `save`, as DCP has them."""

    def __init__(self, storage: DcpWriter) -> None:
        self._begin_ns = time.time_ns()
        self._event = event_of("save", storage_writer=storage) | {"log_exceptions": True}
        event_log.debug(self._event | {"event": "start", "time": self._begin_ns})

    def end(self, error: CheckpointException | None) -> None:
        """Logs that the save has ended, with the error of one that failed."""
        end_ns = time.time_ns()
        if error is not None:
            event_log.error(self._event | {"event": "exception", "error": f"{error}", "time": end_ns})
        else:
            spent = end_ns - self._begin_ns
            event_log.debug(self._event | {"event": "end", "time": end_ns, "times_spent": spent})


def _finish(
    pending: Pending, uploaded: Future[Metadata], storage: DcpWriter, rank: int, event: BackgroundEvent
) -> None:
    """Gives the future of a background save that has ended its result, after its event is logged."""
    try:
        pending.result()
        storage.publish_markers(rank)
    except Exception as error:
        failed = exception_of("save", error, rank)
        event.end(failed)
        uploaded.set_exception(failed)
    else:
        event.end(None)
        uploaded.set_result(SavedMetadata(storage.path))


def _wait_staged(pending: Pending, staged: Future[None], rank: int) -> None:
    try:
        pending.wait_staged()
    except Exception as error:
        staged.set_exception(exception_of("stage", error, rank))
    else:
        staged.set_result(None)


class _StateDictToSave:
    """A state dict, as an object with a state: what fails while it is made fails the save on all ranks."""

    def __init__(self, state_dict: Any, rank: int) -> None:
        self._given, self._rank = state_dict, rank

    def state_dict(self) -> dict[Any, Any]:
        """Returns the tree to save."""
        tree = _plain(states_of(self._given), self._rank)
        places_in(tree)  # refuses two entries of one name
        return tree

    def load_state_dict(self, state: Any) -> None:
        """Makes the object a stateful one; it is only saved."""
        raise NotImplementedError


def _plain(node: Any, rank: int) -> Any:
    """Returns a state dict with plain containers wherever DCP looks into one: it keeps names, and no classes."""
    if isinstance(node, Mapping):
        items = [(key, _plain(child, rank)) for key, child in node.items()]
        # the state dict of a module has the versions of its modules in an attribute, `_metadata`
        return copy_attributes(node, OrderedDict(items)) if type(node) is OrderedDict else dict(items)
    if isinstance(node, list):
        return [_plain(child, rank) for child in node]
    if type(node) is FromRank:
        return _plain(node.value, rank) if node.rank == rank else AbsentSubtree(node.rank)
    return node


def _tree_for(state_dict: Any, comm: Comm, url: str, on_conflict: OnConflict) -> Any:
    """Returns what stands for a state dict in a save.

    Raises:
        MismatchError: no such `on_conflict`.
    """
    if on_conflict not in ("error", "rank0"):
        raise MismatchError("on_conflict", expected="'error' or 'rank0'", found=f"{on_conflict!r:.40}")
    state = _StateDictToSave(state_dict, comm.rank)
    return state if on_conflict == "error" or comm.size == 1 else _settled(state, comm, url)


def _settled(state: _StateDictToSave, comm: Comm, url: str) -> dict[Any, Any]:
    """Returns the tree of a state dict, in which an entry that differs between ranks is left to the first with it."""
    tree: dict[Any, Any] = {}
    places: dict[str, Place] = {}

    def work() -> dict[str, bytes]:
        tree.update(state.state_dict())
        places.update((place.path, place) for place in places_in(tree).values())
        return _digests(tree, places, comm)

    first: dict[str, tuple[int, bytes]] = {}
    differing: dict[str, int] = {}
    for rank, digests in enumerate(all_gather(comm, f"{url} conflicts", work, dict[str, bytes])):
        for path, digest in digests.items():
            if first.setdefault(path, (rank, digest))[1] != digest:
                differing[path] = first[path][0]
    if differing and comm.rank == 0:
        listed = ", ".join(list(differing)[:5]) + (", ..." if len(differing) > 5 else "")
        warnings.warn(
            visible(f"{url}: {len(differing)} entries differ between ranks, and the first rank's are saved: {listed}. ")
            + "Mark what each rank has of its own with treeckpt.PerRank",
            stacklevel=4,
        )
    for path, rank in differing.items():
        if path in places and rank != comm.rank:
            place = places[path]
            place.container[place.key] = AbsentSubtree(rank)
    return tree


def _digests(tree: dict[Any, Any], places: dict[str, Place], comm: Comm) -> dict[str, bytes]:
    """Returns a digest of each entry that ranks have as replicas, by path."""
    described = describe_tree(tree, rank=comm.rank, members=members_of(comm), allow_pickle=True, tables=True)
    found: dict[str, list[bytes]] = {}
    for path, place in places.items():
        if not hasattr(place.content, "dtype"):
            found[path] = []  # an empty list has no leaf
    for leaf, digest in sorted(content_digests(described, True).items()):
        above = leaf
        while above and above not in places:
            above = above.rpartition("/")[0]
        found.setdefault(above, []).extend((leaf.encode(), digest))
    return {path: xxhash.xxh3_128_digest(b"\0".join(parts)) for path, parts in found.items()}


@logs_events(log_exceptions=True)
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
    directory that DCP has written is loaded through DCP. Ranks give each other what lies on the private disk of one
    host alone, if they are all ranks of torch.distributed.

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
        storage = reader_of_dcp(storage.path)
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
        across = LoadingRanks(comm, apart=True) if _is_apart(storage.path, comm) else None
        states |= states_of(state_dict)
        on_one_version(storage.path, fill, together=across is not None, across=across)
    # in one order on all ranks, as a `load_state_dict` may communicate
    for key in sorted(states):
        if is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(states[key])
        else:
            state_dict[key] = states[key]


class _DiskView(enum.Enum):
    """What one rank sees of a checkpoint."""

    ONE_DISK = 0
    """An index that names no disks, or one that cannot be read, which the load says."""
    SEVERAL_DISKS = 1
    NO_INDEX = 2


def _is_apart(path: Any, comm: Comm) -> bool:
    """Whether a checkpoint lies on several disks, or is seen by some ranks alone; the same on all ranks."""
    if comm.size == 1 or members_of(comm) is not None or world_size() != comm.size:
        return False
    traits = open_store(path).traits
    if not traits.has_directory or traits.in_process:
        return False

    def look() -> _DiskView:
        try:
            with opened(path) as checkpoint:
                return _DiskView.SEVERAL_DISKS if checkpoint.index.disks else _DiskView.ONE_DISK
        except CheckpointNotFound:
            return _DiskView.NO_INDEX
        except TreeckptError:
            return _DiskView.ONE_DISK

    views = set(all_gather(comm, f"{getattr(path, 'url', path)} disks", look, _DiskView))
    return _DiskView.SEVERAL_DISKS in views or views == {_DiskView.ONE_DISK, _DiskView.NO_INDEX}


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
