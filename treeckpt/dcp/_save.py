"""`save` and `async_save` with DCP's arguments, on treeckpt's own planner, staging and format."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import xxhash
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_through_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_through_dcp
from torch.distributed.checkpoint.utils import _api_bc_check as takes_positional_storage

from .. import _api
from .._arrays.describe import content_digests, describe_tree
from .._core.tree.containers import AbsentSubtree, FromRank
from .._core.tree.dict_attributes import copy_attributes
from .._io.comm.collective import all_gather
from .._io.comm.comm import Comm, members_of
from .._saving.future import Pending
from .._saving.options import BackgroundOptions
from .._threads import call_in_thread
from ..errors import MismatchError, visible
from ._calls import comm_for, converted, exception_of, is_default_planner, states_of, storage_for
from ._names import Place, places_in
from ._reader import SavedMetadata
from ._writer import DcpWriter

OnConflict = Literal["error", "rank0"]


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
        if comm.rank == 0:
            storage.publish_marker()
    return SavedMetadata(storage.path)


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
    lazy = getattr(getattr(async_stager, "_config", None), "use_async_staging", False)
    with converted("save", comm.rank):
        pending = _api.save_async(
            storage.path,
            _tree_for(state_dict, comm, storage.url, on_conflict),
            comm=comm,
            overwrite=storage.overwrite,
            allow_pickle=storage.allow_pickle,
            background=BackgroundOptions(staging="lazy" if lazy else "copy", writer=kind.value),
        )
    return _futures_of(pending, storage, comm.rank, lazy=lazy)


def _futures_of(pending: Pending, storage: DcpWriter, rank: int, *, lazy: bool) -> Any:
    """Returns the future of a background save; of one that stages lazily those of staging and save."""
    uploaded: Future[Any] = _new_future()
    pending.add_done_callback(lambda _: _finish(pending, uploaded, storage, rank))
    if not lazy:
        return uploaded
    staged: Future[None] = _new_future()
    call_in_thread(partial(_wait_staged, pending, staged, rank), "treeckpt-staged")
    return AsyncSaveResponse(staged, uploaded)


def _new_future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a save cannot be cancelled
    return future


def _finish(pending: Pending, uploaded: Future[Metadata], storage: DcpWriter, rank: int) -> None:
    """Gives the future of a background save that has ended its result."""
    try:
        pending.result()
        if rank == 0:
            storage.publish_marker()
    except Exception as error:
        uploaded.set_exception(exception_of("save", error, rank))
    else:
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
    for rank, found in enumerate(all_gather(comm, f"{url} conflicts", work, dict[str, bytes])):
        for path, digest in found.items():
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
