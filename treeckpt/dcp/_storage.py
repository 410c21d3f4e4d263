"""DCP's storage interfaces on treeckpt's format, for programs that take a storage: `Writer` and `Reader`.

DCP's planner says which rank writes what, and what is wanted; `metadata_of` gives the `Metadata` that DCP plans by.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import uuid
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _fsspec_filesystem, filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .. import _api
from .._arrays.sharded import Sharded
from .._arrays.torch import torch_dtype
from .._core.format.index import INDEX_NAME
from .._core.format.records import Index
from .._core.tree.containers import AbsentSubtree
from .._io.comm.collective import all_gather
from .._io.comm.comm import Comm, PrefixComm, as_comm, comm_of_ranks
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.foreign_formats import DCP_METADATA
from .._io.storage.local_store import is_url
from .._io.storage.open import open_store
from .._loading.run_load import on_one_version
from ..errors import CheckpointExists, CheckpointNotFound, TreeckptError
from ._names import DcpPath, Entry, entries_of, fill_tensors, load_values

FILE_SYSTEM_WRITER, FILE_SYSTEM_READER = filesystem.FileSystemWriter, filesystem.FileSystemReader
FSSPEC_WRITER, FSSPEC_READER = _fsspec_filesystem.FsspecWriter, _fsspec_filesystem.FsspecReader
"""The classes of DCP itself, also after `install`."""
_WRITER_ARGUMENTS, _READER_ARGUMENTS = map(inspect.signature, (FILE_SYSTEM_WRITER, FILE_SYSTEM_READER))
MARKER = b"A checkpoint of treeckpt: see index.json. This file is for programs that look for DCP's files.\n"


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


class _PathStorage:
    """What both storages say of the path that they have.

    It stands after DCP's base class, whose layout of objects theirs has: so `install` can make one the base of another.
    """

    __slots__ = ()
    path: Any

    @property
    def url(self) -> str:
        """The name of the path in messages."""
        return open_store(self.path).url

    @property
    def checkpoint_id(self) -> Any:
        """The path."""
        return self.path


def _is_known(checkpoint_id: Any) -> bool:
    try:
        open_store(checkpoint_id)
    except TreeckptError:
        return False
    return True


class DcpWriter(StorageWriter, _PathStorage):
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
        marker: writes `.metadata` after the index, and `__<rank>_0.distcp` on each rank, for programs that look for
            these names; by default as `install` says.
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
        given = _WRITER_ARGUMENTS.bind(path, *options, **named).arguments
        if given.get("_extensions"):
            raise TreeckptError("_extensions", expected="none", found="some", hint="treeckpt stores bytes as they are")
        self.path, self.overwrite, self.allow_pickle = path, given.get("overwrite", True), allow_pickle
        self.marker = self.marker_by_default if marker is None else marker
        self.save_id = ""  # of the last save, once it is there

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is a path or URL that treeckpt knows."""
        return _is_known(checkpoint_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Takes another path, if one is given."""
        if checkpoint_id:
            self.path = checkpoint_id

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
        self.publish_markers(comm.rank)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, _nbytes(item), None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when the checkpoint is committed: completes the metadata that the save returns."""
        metadata.storage_data, metadata.storage_meta = {}, self.storage_meta()

    def publish_markers(self, rank: int) -> None:
        """Writes a rank's markers of a committed checkpoint, if they are asked for.

        Else rank 0 removes `.metadata`: a marker, or that of a checkpoint of DCP which this one replaces.
        """
        store = open_store(self.path)
        if self.marker:
            store.publish(f"__{rank}_0.distcp", MARKER, replace=True)
        if rank == 0 and self.marker:
            store.publish(DCP_METADATA, MARKER, replace=True)
        elif rank == 0:
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
        own_entries: dict[DcpPath, ListedEntry] = {}
        for item in plan.items:
            path = _path_of(plan, item.index.fqn)
            if any(type(key) is int for key in path):
                data = item.tensor_data if item.type == WriteItemType.SHARD else None
                size, dtype = (tuple(data.size), data.properties.dtype) if data is not None else (None, "")
                own_entries.setdefault(path, ListedEntry(path, size, str(dtype).removeprefix("torch.")))
        return list(own_entries.values())

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
        for name, own in pieces.items():
            entries[_path_of(self._plan, name)] = _joined_pieces(own)
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
        # a planner of another class may change the value: only what it resolves is known then
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


def _joined_pieces(pieces: list[tuple[torch.Tensor, WriteItem]]) -> Any:
    """Returns the leaf of the pieces that this rank writes of a tensor."""
    first, item = pieces[0]
    assert item.tensor_data is not None, "an item of a tensor describes it"
    size = item.tensor_data.size
    if item.type == WriteItemType.TENSOR:
        return first
    # empty pieces say nothing; a rank that has only such ones still names the array
    full = [(tensor, item) for tensor, item in pieces if tensor.numel()] or pieces[:1]
    offsets = [tuple(item.tensor_data.chunk.offsets) for _, item in full if item.tensor_data is not None]
    return Sharded([tensor for tensor, _ in full], tuple(size), offsets)


def metadata_of(index: Index, path: Any, load_id: str | None = None) -> dcp.Metadata:
    """Returns the metadata: one chunk for each tensor, as treeckpt itself finds the parts that a reader wants."""
    entries = entries_of(index)
    described = {
        name: _of_tensor(entry) if entry.is_tensor else dcp.BytesStorageMetadata() for name, entry in entries.items()
    }
    planned = {name: entry.path for name, entry in entries.items()}
    return dcp.Metadata(described, planned, {}, dcp.StorageMeta(path, index.save_id, load_id))


def _of_tensor(entry: Entry) -> dcp.TensorStorageMetadata:
    spec = entry.leaf.spec
    assert spec is not None, "a tensor has a spec"
    size = torch.Size(spec.shape)
    chunk = dcp.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    properties = dcp.TensorProperties(torch_dtype(spec.dtype, entry.leaf.path), requires_grad=spec.requires_grad)
    return dcp.TensorStorageMetadata(properties, size, [chunk])


class SavedMetadata(dcp.Metadata):
    """The metadata of a checkpoint that was just saved; read from its index when a field is first asked for."""

    def __init__(self, path: Any) -> None:
        self._path = path

    @cached_property
    def _read(self) -> dcp.Metadata:
        return metadata_of(_api.inspect(self._path), self._path)

    def __getattribute__(self, name: str) -> Any:
        # fields with a default are attributes of DCP's class, so `__getattr__` would not be asked for them
        if name in _FIELDS:
            return getattr(object.__getattribute__(self, "_read"), name)
        return object.__getattribute__(self, name)

    # it goes to another process as its path, and is read there
    def __reduce__(self) -> Any:
        return SavedMetadata, (self._path,)


_FIELDS = frozenset(dcp.Metadata.__dataclass_fields__)


def reader_of_dcp(path: Any, *options: Any, **named: Any) -> filesystem.FileSystemReader:
    """Returns DCP's own reader of a directory or URL."""
    of_fsspec = isinstance(path, str) and is_url(path)
    return (FSSPEC_READER if of_fsspec else FILE_SYSTEM_READER)(path, *options, **named)


class DcpReader(StorageReader, _PathStorage):
    """Loads through DCP's planner from treeckpt's format, and from directories that DCP has written.

        torch.distributed.checkpoint.load(state_dict, storage_reader=treeckpt.dcp.Reader("run/step_00000100"))

    It gives each tensor as one chunk; treeckpt itself finds and reads the parts that a rank wants.

    >>> state = {"step": 0}
    >>> tc.dcp.load(state, storage_reader=tc.dcp.Reader("run/step_00000100"), no_dist=True)
    >>> state["step"]
    100

    Args:
        path: a path or URL, as for `treeckpt.load`.
        options, named: those of `FileSystemReader`, for directories of DCP.
        allow_pickle: unpickles values that were saved so, which can run any code, as DCP does with all.

    Raises:
        TypeError: an argument that `FileSystemReader` does not have.
    """

    def __init__(self, path: Any, *options: Any, allow_pickle: bool = True, **named: Any) -> None:
        super().__init__()
        _READER_ARGUMENTS.bind(path, *options, **named)
        self.path, self.allow_pickle = path, allow_pickle
        self._options, self._named = options, named
        self._dcp: filesystem.FileSystemReader | None = None
        self.load_id = uuid.uuid4().hex

    def is_of_dcp(self) -> bool:
        """Whether DCP has written what is at the path; also False where that cannot be seen, which a read will say."""
        try:
            names = open_store(self.path).sizes()
        except (OSError, TreeckptError):
            return False
        return DCP_METADATA in names and INDEX_NAME not in names

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is a path or URL that treeckpt knows."""
        return _is_known(checkpoint_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Takes another path, if one is given."""
        if checkpoint_id:
            self.path = checkpoint_id
        self._dcp, self.load_id = None, uuid.uuid4().hex

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata, with one chunk for each tensor.

        Raises:
            CheckpointNotFound, CorruptError, FormatError: the state of the files.
        """
        if self.is_of_dcp():
            self._dcp = reader_of_dcp(self.path, *self._options, **self._named)
            return self._dcp.read_metadata(*args, **kwargs)

        return on_one_version(self.path, lambda checkpoint: metadata_of(checkpoint.index, self.path, self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Passes the metadata on to DCP's reader, where that reads."""
        self.storage_data = metadata.storage_data or _FilesOfEntries()
        if self._dcp is not None:
            self._dcp.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Reads what the plan lists, into the planner's tensors."""
        if self._dcp is not None:
            return self._dcp.read_data(plan, planner)
        on_one_version(self.path, lambda checkpoint: self._read(checkpoint, plan, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, checkpoint: Checkpoint, plan: LoadPlan, planner: LoadPlanner) -> None:
        entries = entries_of(checkpoint.index)
        values: dict[str, ReadItem] = {}
        tensors: dict[str, list[tuple[ReadItem, torch.Tensor]]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if name not in entries:
                raise CheckpointNotFound(name, expected="an entry of the checkpoint", found="none")
            if item.type == LoadItemType.BYTE_IO:
                values[name] = item
            else:
                tensors.setdefault(name, []).append((item, planner.resolve_tensor(item).detach()))
        comm = as_comm(None, sends_messages=False)
        wanted = {name: entries[name] for name in values}
        loaded = load_values(checkpoint, wanted, comm, allow_pickle=self.allow_pickle)
        fill_tensors(
            checkpoint,
            [(entries[name], _joined_targets(entries[name], targets)) for name, targets in tensors.items()],
            comm,
        )
        for targets in tensors.values():
            for item, tensor in targets:
                planner.commit_tensor(item, tensor)
        for name, value in loaded.items():
            _give_value(planner, values[name], value)


class _FilesOfEntries(dict[dcp.MetadataIndex, Any]):
    """The index as the file of every entry, for classes derived from DCP's reader that check files before they read."""

    def __missing__(self, key: dcp.MetadataIndex) -> Any:
        return filesystem._StorageInfo(INDEX_NAME, 0, 0)  # pyright: ignore[reportPrivateUsage]


def _joined_targets(entry: Entry, pieces: list[tuple[ReadItem, torch.Tensor]]) -> Any:
    """Returns the leaf that the planner's tensors for one entry form."""
    spec, (_, first) = entry.leaf.spec, pieces[0]
    assert spec is not None, "a tensor has a spec"
    if len(pieces) == 1 and tuple(first.shape) == spec.shape:
        return first
    return Sharded([tensor for _, tensor in pieces], spec.shape, [tuple(item.storage_offsets) for item, _ in pieces])


def _give_value(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Gives a planner a value: itself to DCP's default one, which unpickles, and bytes to others."""
    name = item.dest_index.fqn
    if isinstance(value, WholeValue):
        value = value.value
    if isinstance(value, DcpBytes):
        planner.load_bytes(item, io.BytesIO(value.data))
    elif not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        planner.load_bytes(item, data)
    elif planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        planner.state_dict[name] = value
