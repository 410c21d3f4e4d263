"""`Writer`, a StorageWriter of DCP on treeckpt's format: DCP's planner says which rank writes what."""

from __future__ import annotations

import dataclasses
import inspect
import io
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import _api
from .._arrays.sharded import Sharded
from .._arrays.torch import torch_dtype
from .._core.format.index import INDEX_NAME
from .._core.tree.containers import AbsentSubtree
from .._io.comm.collective import all_gather
from .._io.comm.comm import Comm, PrefixComm, as_comm, comm_of_ranks
from .._io.storage.foreign_formats import DCP_METADATA
from .._io.storage.open import open_store
from ..errors import CheckpointExists, TreeckptError
from ._names import DcpPath

_DCP_ARGUMENTS = inspect.signature(FileSystemWriter)
MARKER = b"A checkpoint of treeckpt: see index.json. This file is for programs that look for DCP's metadata.\n"


@dataclasses.dataclass(frozen=True)
class WholeValue:
    """An entry that DCP has as one value though it is a container: a dict, where a planner does not flatten."""

    value: Any


@dataclasses.dataclass(frozen=True)
class DcpBytes:
    """The bytes that a planner gives for a value, where they hold a class that only it can read."""

    data: bytes


class ListedEntry(msgspec.Struct, frozen=True):
    """An entry below a list. All ranks have to list it, also those that write nothing of it."""

    path: DcpPath
    size: tuple[int, ...] | None = None
    """The shape of a tensor's whole; None for a value."""
    dtype: str = ""


class DcpWriter(StorageWriter):
    """Saves through DCP's planner in treeckpt's format.

        torch.distributed.checkpoint.save(state_dict, storage_writer=treeckpt.dcp.Writer("run/step_00000100"))

    The tree is nested as the state dict was, so that `treeckpt.load` and `training.restore` see its names. DCP decides
    which rank's value is written where several have one of a name. It may be sent to another process, as a background
    save of DCP does.

    >>> metadata = tc.dcp.save({"step": 7}, storage_writer=tc.dcp.Writer("ckpt"), no_dist=True)

    Args:
        path: a path or URL, as for `treeckpt.save`.
        options, named: those of `FileSystemWriter`, in its order; of these only `overwrite` has an effect.
            By default a checkpoint at the path is replaced; it stays valid until the new one is committed.
        marker: writes a file `.metadata` after the index, for programs that look for one; by default as `install` says.
        allow_pickle: stores values of unknown kinds as pickles; others are refused.

    Raises:
        TreeckptError: extensions, which would change the bytes.
        TypeError: an argument that `FileSystemWriter` does not have.
    """

    marker_by_default: ClassVar[bool] = False

    def __init__(
        self,
        path: Any,
        *options: Any,
        marker: bool | None = None,
        allow_pickle: bool = True,
        **named: Any,
    ) -> None:
        super().__init__()
        given = _DCP_ARGUMENTS.bind(path, *options, **named).arguments
        if given.get("_extensions"):
            raise TreeckptError("_extensions", expected="none", found="some", hint="treeckpt stores bytes as they are")
        self.path, self.overwrite, self.allow_pickle = path, given.get("overwrite", True), allow_pickle
        self.marker = self.marker_by_default if marker is None else marker
        self.save_id = ""  # of the last save, once it is there

    @property
    def url(self) -> str:
        """The name of the path in messages."""
        return open_store(self.path).url

    def reset(self, checkpoint_id: Any = None) -> None:
        """Takes another path, if one is given."""
        if checkpoint_id:
            self.path = checkpoint_id

    @property
    def checkpoint_id(self) -> Any:
        """The path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is a path or URL that treeckpt knows."""
        try:
            open_store(checkpoint_id)
        except TreeckptError:
            return False
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Returns path and save id."""
        return StorageMeta(self.path, self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: all is done in `write_data`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds this process's rank.

        Raises:
            CheckpointExists: there is a checkpoint that is not to be replaced.
        """
        if not self.overwrite and INDEX_NAME in open_store(self.path).sizes():
            raise CheckpointExists(
                self.url,
                expected="no checkpoint",
                found="one",
                hint="Checkpoint already exists and self.overwrite=False",
            )
        return dataclasses.replace(plan, storage_data=dist.get_rank() if dist.is_initialized() else 0)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds which ranks save.

        Raises:
            TreeckptError: the planner caches plans, and only some ranks of a smaller process group have new ones.
        """
        members = tuple(plan.storage_data for plan in plans)
        if None in members:  # a rank without a new plan goes by the last one, which DCP's planner keeps
            if set(members) != {None} and len(plans) != dist.get_world_size():
                raise TreeckptError(
                    self.url,
                    expected="new plans of all ranks of the process group, or of none",
                    found=f"{sum(plan.usable for plan in plans)} of {len(plans)}",
                    hint="Pass a planner with enable_plan_caching=False, or save on the default process group",
                )
            members = tuple(range(len(plans)))
        return [dataclasses.replace(plan, storage_data=members) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Writes this rank's part of the checkpoint, and on the coordinator the index when all have."""
        comm = _comm_of(plan.storage_data)
        tree = PlannedTree(plan, planner, _listed_by_all(plan, comm, self.url), comm.rank)
        report = _api.save(self.path, tree, comm=comm, overwrite=self.overwrite, allow_pickle=self.allow_pickle)
        self.save_id = report.save_id
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, _nbytes(item), None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when the checkpoint is committed: writes the marker."""
        metadata.storage_data, metadata.storage_meta = {}, self.storage_meta()
        self.publish_marker()

    def publish_marker(self) -> None:
        """Writes the marker if it is asked for; else removes one, or DCP's metadata, that the checkpoint replaces."""
        store = open_store(self.path)
        if self.marker:
            store.publish(DCP_METADATA, MARKER, replace=True)
        else:
            store.delete(DCP_METADATA)


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _comm_of(members: tuple[int, ...]) -> Comm:
    """Returns the comm of the ranks that save, apart from what the program itself saves meanwhile in another thread."""
    return PrefixComm(as_comm("alone") if len(members) == 1 else comm_of_ranks(members), "dcp")


def _path_of(plan: SavePlan, name: str) -> DcpPath:
    """Returns the path of an entry in the nested state dict; its name alone where the planner does not nest."""
    return plan.planner_data.get(name, (name,)) if isinstance(plan.planner_data, Mapping) else (name,)


def _listed_by_all(plan: SavePlan, comm: Comm, url: str) -> dict[ListedEntry, int]:
    """Returns what any rank writes below lists, with the first rank that does.

    The ranks tell each other: of a cached plan `prepare_global_plan` sees nothing.
    """

    def own() -> list[ListedEntry]:
        found: dict[DcpPath, ListedEntry] = {}
        for item in plan.items:
            path = _path_of(plan, item.index.fqn)
            if any(type(key) is int for key in path):
                data = item.tensor_data if item.type == WriteItemType.SHARD else None
                size, dtype = (tuple(data.size), data.properties.dtype) if data is not None else (None, "")
                found.setdefault(path, ListedEntry(path, size, str(dtype).removeprefix("torch.")))
        return list(found.values())

    listed: dict[DcpPath, tuple[ListedEntry, int]] = {}
    for rank, entries in enumerate(all_gather(comm, f"{url} lists", own, list[ListedEntry])):
        for entry in entries:
            listed.setdefault(entry.path, (entry, rank))
    return dict(listed.values())


class PlannedTree:
    """What a rank writes by a plan, as an object with a state: what a planner raises fails the save on all ranks."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, listed: dict[ListedEntry, int], rank: int) -> None:
        self._plan, self._planner, self._listed, self._rank = plan, planner, listed, rank

    def state_dict(self) -> dict[Any, Any]:
        """Returns the tree of this rank's entries."""
        entries: dict[DcpPath, Any] = {}
        pieces: dict[str, list[tuple[torch.Tensor, WriteItem]]] = {}
        for item in self._plan.items:
            path = _path_of(self._plan, item.index.fqn)
            if item.type == WriteItemType.BYTE_IO:
                entries[path] = self._value(item)
            else:
                entries.setdefault(path)  # in the order of the state dict
                tensor: Any = self._planner.resolve_data(item)
                pieces.setdefault(item.index.fqn, []).append((tensor.detach(), item))
        for name, found in pieces.items():
            entries[_path_of(self._plan, name)] = _joined(found)
        for entry, first in self._listed.items():
            if entry.path not in entries:
                entries[entry.path] = (
                    AbsentSubtree(first)
                    if entry.size is None
                    else Sharded(torch.empty(0, dtype=torch_dtype(entry.dtype)), entry.size, 0)
                )
        tree: dict[Any, Any] = {}
        for path, entry in entries.items():
            set_element(tree, path, entry)
        return tree

    def load_state_dict(self, state: Any) -> None:
        """Makes the object a stateful one; it is only saved."""
        raise NotImplementedError

    def _value(self, item: WriteItem) -> Any:
        """Returns a value itself where the planner lets it be seen, or its bytes hold plain data; else the bytes."""
        kind: Any = type(self._planner)
        if (
            isinstance(self._planner, DefaultSavePlanner)
            and kind.resolve_data is DefaultSavePlanner.resolve_data
            and kind.transform_object is DefaultSavePlanner.transform_object
        ):
            value = self._planner.lookup_object(item.index)
        else:
            resolved: Any = self._planner.resolve_data(item)
            data = resolved.getvalue()
            try:
                value = torch.load(io.BytesIO(data), weights_only=True)
            except Exception:  # a class, which is not unpickled here, or no pickle of torch at all
                return DcpBytes(data)
        return value if list(flatten_state_dict({"": value})[1]) == [""] else WholeValue(value)


def _joined(pieces: list[tuple[torch.Tensor, WriteItem]]) -> Any:
    """Returns the leaf of the pieces that this rank writes of a tensor."""
    first, item = pieces[0]
    assert item.tensor_data is not None, "an item of a tensor describes it"
    size = item.tensor_data.size
    if item.type == WriteItemType.TENSOR:
        return first
    full = [(tensor, item) for tensor, item in pieces if tensor.numel()] or pieces[:1]
    offsets = [tuple(item.tensor_data.chunk.offsets) for _, item in full if item.tensor_data is not None]
    return Sharded([tensor for tensor, _ in full], tuple(size), offsets)
